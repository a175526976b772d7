"""
Train a class-conditional diffusion model, a U-ViT or a U-Net of diffusers, with scaled long skips.

    accelerate launch train/train_class_conditional.py --train_data_dir flowers --resolution 64 --output_dir out
    accelerate launch -m scalelong_diffusers.train.train_class_conditional --preset imagenet64-uvit-m-4 \
        --dataset_name imagenet-1k

A folder with one sub-folder for each class is a data set; without any it trains on shapes that the package draws. The
output folder is that of a pipeline: `ScaleLongClassConditionalPipeline.from_pretrained("out")("cat")`.
"""

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from diffusers import DPMSolverMultistepScheduler
from torch import nn

from scalelong_diffusers import ScaleLongClassConditionalPipeline
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
    parser = training_parser("Train a class-conditional diffusion model.", condition="class")
    parser.add_argument(
        "--class_dropout",
        type=float,
        default=0.1,
        help="how often the class is left out, which guidance needs; with 0 there is no null class",
    )
    parser.add_argument("--guidance_scale", type=float, default=2.0, help="of the sample grid; 1 is none")
    args = parse_training_arguments(parser, argv)
    if not 0 <= args.class_dropout < 1:
        parser.error(f"--class_dropout must be in [0, 1), got {args.class_dropout}")
    return args


def main(argv: Sequence[str] | None = None):
    args = parse_args(argv)
    with mistakes_as_sentences():
        accelerator = start(args)
        vae = load_vae(args.pretrained_vae_model_name_or_path, accelerator.device)
        settings = build_config(DataConfig, vars(args))
        data = load_training_data(
            settings, channels=vae and vae.config.in_channels, needs_labels=True, needs_captions=False, seed=args.seed
        )
        # The class that stands for none is the last one.
        null_class = data.num_classes if args.class_dropout else None
        unet = build_model(args, data, vae, num_class_embeds=data.num_classes + (null_class is not None))
        process = NoiseProcess.from_arguments(args)
        run = settle(args, accelerator, data, unet)
        evaluation = SampleEvaluation.from_arguments(args, accelerator, data)
        loop = TrainingLoop(args, accelerator, {"unet": unet}, data, run)

    def losses_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        clean = encode_images(batch, vae, args.latent_scale)
        noise = batch.normal_like(clean, "noise")
        timesteps = process.timesteps(batch.uniform("timestep")).to(clean.device)
        labels = batch["labels"]
        if null_class is not None:
            left_out = (batch.uniform("class") < args.class_dropout).to(labels.device)
            labels = labels.masked_fill(left_out, null_class)
        prediction = model(process.add_noise(clean, noise, timesteps), timesteps, class_labels=labels).sample
        target = process.target(clean, noise, timesteps)
        losses = F.mse_loss(prediction, target, reduction="none").mean(dim=(1, 2, 3))
        return process.weights(timesteps) * losses

    def pipeline() -> ScaleLongClassConditionalPipeline:
        scheduler = DPMSolverMultistepScheduler.from_config(process.scheduler.config)
        return ScaleLongClassConditionalPipeline(
            unet, scheduler, vae, class_names=data.class_names, null_class=null_class, latent_scale=args.latent_scale
        )

    def samples(numbers: Sequence[int]) -> list:
        pipe = pipeline()
        pipe.set_progress_bar_config(disable=True)
        return pipe(
            [k % data.num_classes for k in numbers],
            num_inference_steps=args.num_inference_steps,
            guidance_scale=1.0 if null_class is None else args.guidance_scale,
            generator=[generator_for(args.seed, "sample", k) for k in numbers],
        ).images

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
