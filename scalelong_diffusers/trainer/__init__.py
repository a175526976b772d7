"""What the training scripts stand on: flags, models, noise, the loop, checkpoints and validation."""

from scalelong_diffusers.trainer.arguments import parse_training_arguments, training_parser
from scalelong_diffusers.trainer.latents import check_text_encoder, encode_images
from scalelong_diffusers.trainer.loop import TrainingLoop, TrainingStopped
from scalelong_diffusers.trainer.models import build_model, load_vae
from scalelong_diffusers.trainer.noise import NoiseProcess
from scalelong_diffusers.trainer.run import (
    check_processes,
    mistakes_as_sentences,
    run_script,
    save_pipeline,
    settle,
    start,
)
from scalelong_diffusers.trainer.validation import save_samples, validation_losses


__all__ = [
    "NoiseProcess",
    "TrainingLoop",
    "TrainingStopped",
    "build_model",
    "check_processes",
    "check_text_encoder",
    "encode_images",
    "load_vae",
    "mistakes_as_sentences",
    "parse_training_arguments",
    "run_script",
    "save_pipeline",
    "save_samples",
    "settle",
    "start",
    "training_parser",
    "validation_losses",
]
