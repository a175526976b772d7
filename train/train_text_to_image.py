"""
Train a text-to-image diffusion model, a U-ViT or a U-Net of diffusers, with scaled long skips.

    accelerate launch train/train_text_to_image.py --train_data_dir pictures_with_captions --resolution 64 \
        --pretrained_text_encoder_name_or_path openai/clip-vit-large-patch14 --output_dir out
    accelerate launch -m scalelong_diffusers.train.train_text_to_image --preset mscoco-uvit-s-2 \
        --dataset_name user/coco --pretrained_vae_model_name_or_path stabilityai/sd-vae-ft-ema \
        --pretrained_text_encoder_name_or_path openai/clip-vit-large-patch14

Where no text encoder is named, a small CLIP is built from the captions and trained along. Without a data set it trains
on shapes that the package draws. The output folder is that of a pipeline:
`ScaleLongTextToImagePipeline.from_pretrained("out")("a red circle")`.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from diffusers import DPMSolverMultistepScheduler
from torch import nn

from scalelong_diffusers import ScaleLongTextToImagePipeline
from scalelong_diffusers.data import Batch, DataConfig, load_training_data
from scalelong_diffusers.options import build_config
from scalelong_diffusers.pipelines.text_encoding import CaptionEncoder
from scalelong_diffusers.presets import get_preset
from scalelong_diffusers.randomness import generator_for
from scalelong_diffusers.training import (
    NoiseProcess,
    SampleEvaluation,
    TrainingLoop,
    build_model,
    build_text_encoder,
    check_text_encoder,
    check_validation_prompts,
    encode_images,
    grid_prompts,
    held_out_captions,
    leave_out,
    load_named_text_encoder,
    load_vae,
    mistakes_as_sentences,
    parse_training_arguments,
    run_script,
    save_pipeline,
    save_samples,
    settle,
    start,
    text_condition,
    training_parser,
    validation_losses,
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = training_parser("Train a text-to-image diffusion model.", condition="text")
    add = parser.add_argument_group("text").add_argument
    add("--pretrained_text_encoder_name_or_path", metavar="PATH", help="a CLIP, or a pipeline that has one")
    add("--train_text_encoder", action="store_true", help="train it along; so is the small one, where none is named")
    add(
        "--proportion_empty_prompts",
        type=float,
        default=0.1,
        help="how many captions are left out, which guidance needs",
    )
    add("--validation_prompts", nargs="+", metavar="TEXT", help="of the sample grid; captions held out by default")
    add("--guidance_scale", type=float, default=4.0, help="of the sample grid; 1 is none")
    args = parse_training_arguments(parser, argv)
    if not 0 <= args.proportion_empty_prompts < 1:
        parser.error(f"--proportion_empty_prompts must be in [0, 1), got {args.proportion_empty_prompts}")
    if args.pretrained_text_encoder_name_or_path is None:
        if args.preset is not None and not args.train_text_encoder:
            parser.error(
                f"preset {args.preset} reads text by a CLIP of width "
                f"{get_preset(args.preset).config['cross_attention_dim']}: give "
                "--pretrained_text_encoder_name_or_path openai/clip-vit-large-patch14, or --train_text_encoder for "
                "one built from the captions"
            )
        args.train_text_encoder = True
    return args


def main(argv: Sequence[str] | None = None):
    args = parse_args(argv)
    with mistakes_as_sentences():
        accelerator = start(args)
        vae = load_vae(args.pretrained_vae_model_name_or_path, accelerator.device)
        text = load_named_text_encoder(args, accelerator)
        settings = build_config(DataConfig, vars(args))
        data = load_training_data(
            settings, channels=vae and vae.config.in_channels, needs_labels=False, needs_captions=True, seed=args.seed
        )
        unet = build_model(args, data, vae, text=text_condition(text))
        text_encoder, tokenizer = text or build_text_encoder(args, data, unet)
        captions = CaptionEncoder(text_encoder, tokenizer, unet)
        check_text_encoder(data, captions, args.pretrained_text_encoder_name_or_path)
        check_validation_prompts(args.validation_prompts, tokenizer, captions.max_tokens)
        process = NoiseProcess.from_arguments(args)
        modules = {"unet": unet} | ({"text_encoder": text_encoder} if args.train_text_encoder else {})
        run = settle(args, accelerator, data, unet)
        evaluation = SampleEvaluation.from_arguments(args, accelerator, data)
        loop = TrainingLoop(args, accelerator, modules, data, run)

    def losses_of(models: Mapping[str, nn.Module], batch: Batch) -> torch.Tensor:
        clean = encode_images(batch, vae, args.latent_scale)
        noise = batch.normal_like(clean, "noise")
        timesteps = process.timesteps(batch.uniform("timestep")).to(clean.device)
        texts = leave_out(batch, args.proportion_empty_prompts)
        if data.precomputed is None:
            tokens = captions.tokenize(texts).to(clean.device)
            states = models.get("text_encoder", text_encoder)(tokens)[0]
        else:
            states = data.precomputed.text_states(
                batch, batch.uniform("empty caption") < args.proportion_empty_prompts
            )
        noisy = process.add_noise(clean, noise, timesteps)
        prediction = models["unet"](noisy, timesteps, encoder_hidden_states=states).sample
        target = process.target(clean, noise, timesteps)
        losses = F.mse_loss(prediction, target, reduction="none").mean(dim=(1, 2, 3))
        return process.weights(timesteps) * losses

    def pipeline() -> ScaleLongTextToImagePipeline:
        scheduler = DPMSolverMultistepScheduler.from_config(process.scheduler.config)
        return ScaleLongTextToImagePipeline(
            unet, scheduler, text_encoder, tokenizer, vae, latent_scale=args.latent_scale
        )

    def samples(numbers: Sequence[int], prompts: Sequence[str]) -> list:
        pipe = pipeline()
        pipe.set_progress_bar_config(disable=True)
        return pipe(
            [prompts[k % len(prompts)] for k in numbers],
            num_inference_steps=args.num_inference_steps,
            guidance_scale=args.guidance_scale,
            generator=[generator_for(args.seed, "sample", k) for k in numbers],
        ).images

    for batch in loop:
        loop.step(losses_of(loop.models, batch))
        if loop.is_due(args.validation_steps):
            loop.record(validation_losses(loop, losses_of, loop.modules))
        if loop.is_due(args.sample_steps):
            prompts = grid_prompts(args, data)
            save_samples(loop, partial(samples, range(len(prompts)), prompts))
        if loop.is_due(args.eval_steps):
            loop.record(evaluation.figures(loop, partial(samples, prompts=held_out_captions(data))))

    save_pipeline(loop, pipeline())


if __name__ == "__main__":
    run_script(main)
