"""
Does a text-to-image model draw what the prompt says? Trains on the built-in shapes with a CLIP built from captions.

    python benchmarks/text_to_shapes.py [--threads 2] [--output_dir runs/text_to_shapes] [--json]

Trains from scratch, samples 4 images for each of 16 prompts, and reads color and shape from the pixels. An interrupted
run is resumed; a finished one is only sampled again.
"""

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path

import torch

from scalelong_diffusers import ScaleLongTextToImagePipeline, ScaleLongUNet2DConditionModel
from scalelong_diffusers.data import COLORS, SHAPES, recognize
from scalelong_diffusers.experiments.results import machine
from scalelong_diffusers.randomness import generator_for
from scalelong_diffusers.train import train_text_to_image
from scalelong_diffusers.training import run_script


# A U-Net, because it learns from few images faster than a U-ViT does.
MODEL = {
    "sample_size": 16,
    "in_channels": 3,
    "out_channels": 3,
    "layers_per_block": 1,
    "block_out_channels": (24, 48, 96),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 4,
    "norm_num_groups": 8,
    "cross_attention_dim": 128,
}
TRAINING = {
    "resolution": 16,
    "num_shapes": 50_000,
    "train_batch_size": 64,
    "max_train_steps": 2_500,
    "learning_rate": 2e-3,
    # A small model predicts the clean image more easily than the noise. The SNR weight balances high noise levels,
    # where colors are visible, and low ones, where shapes are.
    "prediction_type": "sample",
    "snr_gamma": 1,
    "ddpm_beta_schedule": "squaredcos_cap_v2",
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 100,
    "adam_beta2": 0.99,
    "adam_weight_decay": 0.03,
    "ema_decay": 0.998,
    "proportion_empty_prompts": 0.1,
    "checkpointing_steps": 500,
    "checkpoints_total_limit": 1,
    "validation_steps": 500,
    "sample_steps": 500,
    "guidance_scale": 2.0,
}
SAMPLING = {"num_inference_steps": 25, "guidance_scale": 2.0}
IMAGES_PER_PROMPT = 4

# 16 of the 30 classes, with every color, every shape and every caption template of the dataset.
TEMPLATES = ("a {} {}", "a {} {} on a white background", "a picture of a {} {}", "a black picture with one {} {}")
CLASSES = [(list(COLORS)[k % len(COLORS)], list(SHAPES)[k % len(SHAPES)]) for k in range(16)]
PROMPTS = [(TEMPLATES[k % len(TEMPLATES)].format(*wanted), wanted) for k, wanted in enumerate(CLASSES)]


def train(folder: Path):
    """Train the model, or resume its training."""
    config = folder / "config"
    ScaleLongUNet2DConditionModel(**MODEL).save_config(config)
    flags = [word for name, value in TRAINING.items() for word in (f"--{name}", str(value))]
    flags += ["--model_config_name_or_path", str(config), "--output_dir", str(folder / "model")]
    if list((folder / "model").glob("checkpoint-*")):
        flags += ["--resume_from_checkpoint", "latest"]
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the results
        train_text_to_image.main(flags)


def training_minutes(folder: Path) -> float:
    """Return the minutes spent on training steps, over all starts, without checkpoints and sample grids."""
    lines = [json.loads(line) for line in (folder / "model" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] - before for line, before in zip(lines, [0, *(line["step"] for line in lines)])]
    images = [count * TRAINING["train_batch_size"] for count in steps]
    return sum(count / line["images_per_second"] for count, line in zip(images, lines)) / 60


def sample(folder: Path) -> list[tuple[str, tuple[str, str], tuple[str, str | None] | None]]:
    """Sample all prompts and return for each image the prompt, the wanted class and the recognized class."""
    pipe = ScaleLongTextToImagePipeline.from_pretrained(folder / "model")
    pipe.set_progress_bar_config(disable=True)
    results = []
    for number, (prompt, wanted) in enumerate(PROMPTS):
        generators = [generator_for(0, "benchmark", number, k) for k in range(IMAGES_PER_PROMPT)]
        images = pipe([prompt] * IMAGES_PER_PROMPT, generator=generators, **SAMPLING).images
        results += [(prompt, wanted, recognize(image)) for image in images]
    return results


def count(results) -> dict[str, int]:
    """Count the images with the right color, shape and both."""
    seen = [(wanted, found or (None, None)) for _, wanted, found in results]
    return {
        "images": len(seen),
        "color": sum(wanted[0] == found[0] for wanted, found in seen),
        "shape": sum(wanted[1] == found[1] for wanted, found in seen),
        "both": sum(wanted == found for wanted, found in seen),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/text_to_shapes"), help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train(args.output_dir)
    start = time.perf_counter()
    results = sample(args.output_dir)
    summary = count(results) | {
        "training_minutes": round(training_minutes(args.output_dir), 1),
        "sampling_seconds": round(time.perf_counter() - start, 1),
        "machine": machine(),
    }
    if args.json:
        print(json.dumps(summary, indent=2))
        return
    for prompt, wanted, found in results:
        seen = "nothing" if found is None else " ".join(word or "something" for word in found)
        print(f"{'right' if wanted == found else 'wrong':6}{prompt!r}: {seen}")
    for name in ("color", "shape", "both"):
        print(f"{name}: {summary[name]} of {summary['images']}")
    print(f"trained for {summary['training_minutes']} minutes with {args.threads} threads on {machine()['processor']}")


if __name__ == "__main__":
    run_script(main)
