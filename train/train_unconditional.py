"""
Train an unconditional diffusion model, a U-ViT or a U-Net of diffusers, with scaled long skips.

    accelerate launch train/train_unconditional.py --train_data_dir my_pictures --resolution 64 --output_dir out
    accelerate launch -m scalelong_diffusers.train.train_unconditional --preset cifar10-uvit-s-2 --dataset_name cifar10

Without a data set it trains on shapes that the package draws. The output folder is that of a pipeline:
`ScaleLongUnconditionalPipeline.from_pretrained("out")`.
"""

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from diffusers import DPMSolverMultistepScheduler
from torch import nn

from scalelong_diffusers import ScaleLongUnconditionalPipeline
from scalelong_diffusers.data import Batch, DataConfig, load_training_data
from scalelong_diffusers.options import build_config
from scalelong_diffusers.randomness import generator_for
from scalelong_diffusers.training import (
    NoiseProcess,
    SampleEvaluation,
    TrainingLoop,
    build_model,
    encode_images,
    load_vae,
    mistakes_as_sentences,
    parse_training_arguments,
    run_script,
    save_pipeline,
    save_samples,
    settle,
    start,
    training_parser,
    validation_losses,
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = training_parser("Train an unconditional diffusion model.", condition=None)
    return parse_training_arguments(parser, argv)


def main(argv: Sequence[str] | None = None):
    args = parse_args(argv)
    with mistakes_as_sentences():
        accelerator = start(args)
        vae = load_vae(args.pretrained_vae_model_name_or_path, accelerator.device)
        settings = build_config(DataConfig, vars(args))
        data = load_training_data(
            settings, channels=vae and vae.config.in_channels, needs_labels=False, needs_captions=False, seed=args.seed
        )
        unet = build_model(args, data, vae)
        process = NoiseProcess.from_arguments(args)
        run = settle(args, accelerator, data, unet)
        evaluation = SampleEvaluation.from_arguments(args, accelerator, data)
        loop = TrainingLoop(args, accelerator, {"unet": unet}, data, run)

    def losses_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        clean = encode_images(batch, vae, args.latent_scale)
        noise = batch.normal_like(clean, "noise")
        timesteps = process.timesteps(batch.uniform("timestep")).to(clean.device)
        prediction = model(process.add_noise(clean, noise, timesteps), timesteps).sample
        target = process.target(clean, noise, timesteps)
        losses = F.mse_loss(prediction, target, reduction="none").mean(dim=(1, 2, 3))
        return process.weights(timesteps) * losses

    def pipeline() -> ScaleLongUnconditionalPipeline:
        scheduler = DPMSolverMultistepScheduler.from_config(process.scheduler.config)
        return ScaleLongUnconditionalPipeline(unet, scheduler, vae=vae, latent_scale=args.latent_scale)

    def samples(numbers: Sequence[int]) -> list:
        pipe = pipeline()
        pipe.set_progress_bar_config(disable=True)
        generators = [generator_for(args.seed, "sample", k) for k in numbers]
        return pipe(len(numbers), num_inference_steps=args.num_inference_steps, generator=generators).images

    for batch in loop:
        loop.step(losses_of(loop.models["unet"], batch))
        if loop.is_due(args.validation_steps):
            loop.record(validation_losses(loop, losses_of))
        if loop.is_due(args.sample_steps):
            save_samples(loop, lambda: samples(range(args.num_samples)))
        if loop.is_due(args.eval_steps):
            loop.record(evaluation.figures(loop, samples))

    save_pipeline(loop, pipeline())


if __name__ == "__main__":
    run_script(main)
