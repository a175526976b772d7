"""
Fine-tune a Stable Diffusion 1 or 2 or an SDXL with scaled long skips, all of its U-Net or a LoRA.

    accelerate launch train/finetune_text_to_image.py --pretrained_model_name_or_path some/sd --output_dir out \
        --train_data_dir pictures_with_captions --skip_scaling ls
    accelerate launch -m scalelong_diffusers.train.finetune_text_to_image --pretrained_model_name_or_path some/sd \
        --dataset_name user/pictures --skip_scaling cs --skip_scaling_warmup_steps 500 --lora_rank 16

The first output is that of the model as it was. The output folder is that of a pipeline, which a stock
`StableDiffusionPipeline.from_pretrained("out")` loads scaled once scalelong_diffusers is imported; with `--lora_rank`
it holds the LoRA and the scaling alone, for `load_adapter(pipe, "out")`.
"""

import argparse
import logging
import os
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from diffusers.utils import is_peft_available
from torch import nn

from scalelong_diffusers.data import Batch, DataConfig, load_training_data
from scalelong_diffusers.hub.adapters import NO_PEFT
from scalelong_diffusers.options import build_config
from scalelong_diffusers.randomness import generator_for, seed_for
from scalelong_diffusers.training import (
    NoiseProcess,
    SampleEvaluation,
    TrainingLoop,
    check_autoencoder,
    check_validation_prompts,
    encode_images,
    fine_tuning_parser,
    grid_prompts,
    held_out_captions,
    leave_out,
    mistakes_as_sentences,
    parse_fine_tuning_arguments,
    run_script,
    save_adapter_alone,
    save_pipeline,
    save_samples,
    settle,
    start,
    validation_losses,
)
from scalelong_diffusers.training.fine_tuning_flags import (
    check_warmup,
    eight_bit_adam,
    scale_without_jump,
    settle_resolution,
)
from scalelong_diffusers.training.stable_diffusion import (
    encode_prompts,
    load_stable_diffusion,
    tokenizers,
    training_schedule,
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = fine_tuning_parser("Fine-tune a Stable Diffusion with scaled long skips.")
    add = parser.add_argument_group("fine-tuning").add_argument
    add("--pretrained_model_name_or_path", metavar="PATH", required=True, help="the folder or id of its pipeline")
    add("--lora_rank", type=int, help="train a LoRA of this rank, and the gates, instead of the whole U-Net")
    add("--lora_alpha", type=float, help="the LoRA counts lora_alpha / lora_rank; 1 by default")
    add("--noise_offset", type=float, default=0.0, help="noise that is the same all over an image; 0.1 is usual")
    add("--proportion_empty_prompts", type=float, default=0.0, help="how many captions are left out")
    add("--use_8bit_adam", action="store_true", help="a smaller optimizer, which needs bitsandbytes")
    add("--validation_prompts", nargs="+", metavar="TEXT", help="of the sample grid; captions held out by default")
    add("--guidance_scale", type=float, default=7.5, help="of the sample grid; 1 is none")
    # As in diffusers' script: a constant rate and no average. Resolution and scaling are the pipeline's own.
    parser.set_defaults(
        skip_scaling_warmup_steps=None,
        resolution=None,
        learning_rate=None,
        lr_scheduler="constant",
        use_ema=False,
        num_samples=4,
    )
    args = parse_fine_tuning_arguments(parser, argv)
    if args.learning_rate is None:
        args.learning_rate = 1e-5 if args.lora_rank is None else 1e-4
    if not 0 <= args.proportion_empty_prompts < 1:
        parser.error(f"--proportion_empty_prompts must be in [0, 1), got {args.proportion_empty_prompts}")
    if args.noise_offset < 0:
        parser.error(f"--noise_offset must be at least 0, got {args.noise_offset}")
    if args.lora_rank is not None and not is_peft_available():
        parser.error(f"--lora_rank {args.lora_rank}: {NO_PEFT}")
    if args.lora_rank is not None and args.push_to_hub and os.path.isdir(args.pretrained_model_name_or_path):
        parser.error(
            "--push_to_hub of a LoRA says which repository it is loaded into, and --pretrained_model_name_or_path "
            f"{args.pretrained_model_name_or_path} is a folder: give an id, or push later with push_adapter"
        )
    return args


def main(argv: Sequence[str] | None = None):
    args = parse_args(argv)
    with mistakes_as_sentences():
        accelerator = start(args)
        pipe = load_stable_diffusion(args.pretrained_model_name_or_path).to(accelerator.device)
        pipe.set_progress_bar_config(disable=True)
        # In each step it would show the captions that it cuts.
        logging.getLogger(type(pipe).__module__).setLevel(logging.ERROR)
        settle_resolution(args, pipe)
        for tokenizer in tokenizers(pipe):
            check_validation_prompts(args.validation_prompts, tokenizer, tokenizer.model_max_length)
        settings = build_config(DataConfig, vars(args))
        channels = pipe.vae.config.in_channels
        data = load_training_data(settings, channels=channels, needs_labels=False, needs_captions=True, seed=args.seed)
        check_autoencoder(data, pipe.vae, f"that of {args.pretrained_model_name_or_path}")
        process = NoiseProcess(training_schedule(pipe).config, snr_gamma=args.snr_gamma)
        torch.manual_seed(seed_for(args.seed, "model"))  # of gates and LoRA
        trained = scale_without_jump(args, pipe)
        run = settle(args, accelerator, data, pipe.unet)
        check_warmup(args)
        optimizer = eight_bit_adam(args, trained.values()) if args.use_8bit_adam else None
        evaluation = SampleEvaluation.from_arguments(args, accelerator, data)
        loop = TrainingLoop(args, accelerator, {"unet": pipe.unet}, data, run, optimizer)

    def losses_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        clean = encode_images(batch, pipe.vae)
        noise = batch.normal_like(clean, "noise")
        if args.noise_offset:
            noise = noise + args.noise_offset * batch.normal_like(clean[:, :, :1, :1], "noise offset")
        timesteps = process.timesteps(batch.uniform("timestep")).to(clean.device)
        texts = leave_out(batch, args.proportion_empty_prompts)
        condition = encode_prompts(pipe, texts, args.resolution)
        prediction = model(process.add_noise(clean, noise, timesteps), timesteps, **condition).sample
        target = process.target(clean, noise, timesteps)
        losses = F.mse_loss(prediction, target, reduction="none").mean(dim=(1, 2, 3))
        return process.weights(timesteps) * losses

    def samples(numbers: Sequence[int], prompts: Sequence[str]) -> list:
        return pipe(
            [prompts[k % len(prompts)] for k in numbers],
            height=args.resolution,
            width=args.resolution,
            num_inference_steps=args.num_inference_steps,
            guidance_scale=args.guidance_scale,
            generator=[generator_for(args.seed, "sample", k) for k in numbers],
        ).images

    for batch in loop:
        loop.step(losses_of(loop.models["unet"], batch))
        if loop.is_due(args.validation_steps):
            loop.record(validation_losses(loop, losses_of))
        if loop.is_due(args.sample_steps):
            prompts = grid_prompts(args, data)
            save_samples(loop, partial(samples, range(len(prompts)), prompts))
        if loop.is_due(args.eval_steps):
            loop.record(evaluation.figures(loop, partial(samples, prompts=held_out_captions(data))))

    if args.lora_rank is None:
        is_id = not os.path.isdir(args.pretrained_model_name_or_path)
        save_pipeline(loop, pipe, {"base_model": args.pretrained_model_name_or_path} if is_id else None)
    else:
        save_adapter_alone(loop, pipe, args.pretrained_model_name_or_path)


if __name__ == "__main__":
    run_script(main)
