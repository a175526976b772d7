"""
Compare our pipelines with the closest ones of diffusers, with the same weights, scheduler, steps and noise.

    python benchmarks/sampling.py [--rounds 15] [--json]

Times are paired ratios with their 95 % interval. Images must agree within 1e-5.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    DDIMPipeline,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    UNet2DModel,
)
from measure import paired_ratio, paired_times, round_count, verdict

from scalelong_diffusers import ScaleLongTextToImagePipeline, ScaleLongUnconditionalPipeline
from scalelong_diffusers.experiments.results import machine


TIME_LIMIT = 1.02
IMAGE_LIMIT = 1e-5

Pair = tuple[DiffusionPipeline, DiffusionPipeline, dict[str, Any]]


def build_unet() -> UNet2DModel:
    return UNet2DModel(
        sample_size=32,
        block_out_channels=(64, 128, 128),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    ).eval()


def ddpm() -> Pair:
    unet = build_unet()
    pair = DDPMPipeline(unet, DDPMScheduler()), ScaleLongUnconditionalPipeline(unet, DDPMScheduler())
    return *pair, {"batch_size": 4, "num_inference_steps": 10}


def ddim() -> Pair:
    unet = build_unet()
    pair = DDIMPipeline(unet, DDIMScheduler()), ScaleLongUnconditionalPipeline(unet, DDIMScheduler())
    return *pair, {"batch_size": 4, "num_inference_steps": 10, "eta": 0.5}


def stable_diffusion() -> Pair:
    """Build Stable Diffusion at an eighth of its width, without a text encoder: text embeddings are random."""
    unet = UNet2DConditionModel(
        sample_size=32, block_out_channels=(40, 80, 160, 160), cross_attention_dim=96, attention_head_dim=8,
        norm_num_groups=8,
    ).eval()  # fmt: skip
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    vae = AutoencoderKL(block_out_channels=(32, 64), norm_num_groups=8, **blocks).eval()
    stock = StableDiffusionPipeline(
        vae=vae, text_encoder=None, tokenizer=None, unet=unet, scheduler=DPMSolverMultistepScheduler(steps_offset=1),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    ours = ScaleLongTextToImagePipeline(unet, DPMSolverMultistepScheduler(steps_offset=1), vae=vae)
    embeds = {"prompt_embeds": torch.randn(1, 77, 96), "negative_prompt_embeds": torch.randn(1, 77, 96)}
    return stock, ours, {**embeds, "num_inference_steps": 10, "guidance_scale": 4.0}


PAIRS = {"DDPMPipeline": ddpm, "DDIMPipeline": ddim, "StableDiffusionPipeline": stable_diffusion}


def sampler(pipe: DiffusionPipeline, arguments: dict[str, Any]) -> Callable[[], np.ndarray]:
    pipe.set_progress_bar_config(disable=True)
    return lambda: pipe(**arguments, generator=torch.Generator().manual_seed(0), output_type="np").images


def measure(build: Callable[[], Pair], rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    stock, ours, arguments = build()
    functions = {"stock": sampler(stock, arguments), "ours": sampler(ours, arguments)}
    difference = float(abs(functions["stock"]() - functions["ours"]()).max())
    times = paired_times(functions, rounds, warmup=1)
    ratio = paired_ratio(times["ours"], times["stock"])
    return {
        "stock_seconds": sorted(times["stock"])[rounds // 2],
        "time": ratio,
        "time_verdict": verdict(ratio, TIME_LIMIT),
        "difference": difference,
        "image_verdict": "ok" if difference <= IMAGE_LIMIT else f"above {IMAGE_LIMIT}",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=round_count, default=15, help="number of rounds (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    results = {name: measure(build, arguments.rounds) for name, build in PAIRS.items()}
    if arguments.json:
        print(json.dumps({"machine": machine(), "rounds": arguments.rounds, "results": results}))
        return
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    print(f"{'against':<26} {'seconds':<8} {'time / stock [95 %]':<40} largest pixel difference")
    for name, row in results.items():
        time = "{ratio:.4f} [{low:.4f}, {high:.4f}] ".format(**row["time"]) + row["time_verdict"]
        print(f"{name:<26} {row['stock_seconds']:<8.3f} {time:<40} {row['difference']:.1e} {row['image_verdict']}")


if __name__ == "__main__":
    main()
