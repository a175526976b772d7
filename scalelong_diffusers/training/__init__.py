"""What the training scripts stand on: flags, models, noise, the loop, checkpoints and validation."""

from scalelong_diffusers.training.arguments import (
    fine_tuning_parser,
    parse_fine_tuning_arguments,
    parse_training_arguments,
    training_parser,
)
from scalelong_diffusers.training.evaluation import SampleEvaluation
from scalelong_diffusers.training.latents import check_autoencoder, check_text_encoder, encode_images
from scalelong_diffusers.training.loop import TrainingLoop, TrainingStopped
from scalelong_diffusers.training.models import build_model, load_vae
from scalelong_diffusers.training.noise import NoiseProcess
from scalelong_diffusers.training.run import (
    check_processes,
    mistakes_as_sentences,
    run_script,
    save_adapter_alone,
    save_pipeline,
    start,
)
from scalelong_diffusers.training.settings import settle
from scalelong_diffusers.training.text import (
    build_text_encoder,
    check_validation_prompts,
    grid_prompts,
    held_out_captions,
    leave_out,
    load_named_text_encoder,
    text_condition,
)
from scalelong_diffusers.training.validation import save_samples, validation_losses


__all__ = [
    "NoiseProcess",
    "SampleEvaluation",
    "TrainingLoop",
    "TrainingStopped",
    "build_model",
    "build_text_encoder",
    "check_autoencoder",
    "check_processes",
    "check_text_encoder",
    "check_validation_prompts",
    "encode_images",
    "fine_tuning_parser",
    "grid_prompts",
    "held_out_captions",
    "leave_out",
    "load_named_text_encoder",
    "load_vae",
    "mistakes_as_sentences",
    "parse_fine_tuning_arguments",
    "parse_training_arguments",
    "run_script",
    "save_adapter_alone",
    "save_pipeline",
    "save_samples",
    "settle",
    "start",
    "text_condition",
    "training_parser",
    "validation_losses",
]
