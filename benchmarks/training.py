"""
What training costs, and what makes it cheaper, measured on the scripts' own loop.

    python benchmarks/training.py [--only precomputed] [--rounds 15] [--json]

precomputed: a step from precomputed features against one with the encoders in the loop, with everything else the same.
Times are paired ratios with their 95 % interval.
"""

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from measure import machine, paired_ratio, paired_times

from scalelong_diffusers.data import DataSettings, TrainingData, load_training_data
from scalelong_diffusers.models.uvit import UViTModel
from scalelong_diffusers.train import precompute_latents
from scalelong_diffusers.trainer import NoiseProcess, encode_images


# Stable Diffusion's autoencoder at half its width, so that a round takes seconds.
VAE = {
    "block_out_channels": (64, 128, 256, 256),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
}
RESOLUTION, BATCH_SIZE, STEPS_IN_A_ROUND = 128, 8, 2
MODEL = {"sample_size": RESOLUTION // 8, "patch_size": 2, "in_channels": 4, "hidden_size": 512, "num_layers": 12}


def steps(data: TrainingData, vae: AutoencoderKL, model: UViTModel) -> Callable[[], None]:
    """A function that trains the next steps: data, latents, noise, model, loss, optimizer."""
    process = NoiseProcess.from_arguments(
        argparse.Namespace(
            prediction_type="epsilon", ddpm_beta_schedule="linear", continuous_time=False, snr_gamma=None
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches: Iterator = iter(data.train.batches(BATCH_SIZE))

    def run():
        for _ in range(STEPS_IN_A_ROUND):
            batch = next(batches)
            clean = encode_images(batch, vae)
            noise, timesteps = batch.normal_like(clean, "noise"), process.timesteps(batch.uniform("timestep"))
            prediction = model(process.add_noise(clean, noise, timesteps), timesteps).sample
            (prediction - process.target(clean, noise, timesteps)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def measure_precomputed(rounds: int) -> dict[str, Any]:
    images = {"resolution": RESOLUTION, "center_crop": True, "random_flip": True}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        vae = AutoencoderKL(**VAE).eval().requires_grad_(False)
        vae.save_pretrained(f"{folder}/vae")
        features = Path(folder, "features")
        flags = f"--resolution {RESOLUTION} --center_crop --random_flip --num_shapes 64 --output_dir {features}"
        with contextlib.redirect_stdout(io.StringIO()):
            precompute_latents.main([*flags.split(), "--pretrained_vae_model_name_or_path", f"{folder}/vae"])
        settings = {
            "in the loop": DataSettings(num_shapes=64, **images),
            "precomputed": DataSettings(precomputed_dir=str(features), **images),
        }
        functions = {}
        for name, setting in settings.items():
            data = load_training_data(setting, channels=3, needs_labels=False, needs_captions=False, seed=0)
            torch.manual_seed(0)
            functions[name] = steps(data, vae, UViTModel(**MODEL))
        times = paired_times(functions, rounds, warmup=1)
        size = sum(file.stat().st_size for file in features.iterdir()) / 64
    ratio = paired_ratio(times["in the loop"], times["precomputed"])
    seconds = {name: sorted(values)[rounds // 2] / STEPS_IN_A_ROUND for name, values in times.items()}
    return {"seconds_per_step": seconds, "times_as_fast": ratio, "bytes_per_image": size}


def show_precomputed(result: dict[str, Any]):
    print(f"precomputed: U-ViT-S/2 on latents of {RESOLUTION} x {RESOLUTION} pixels, batch {BATCH_SIZE}")
    for name, seconds in result["seconds_per_step"].items():
        print(f"  {name:<12} {seconds:.3f} s for a step")
    print("  {ratio:.2f} [{low:.2f}, {high:.2f}] times as fast".format(**result["times_as_fast"]))
    print(f"  {result['bytes_per_image'] / 1024:.1f} KiB on the disk for an image and its mirror image")


PARTS = {"precomputed": (measure_precomputed, show_precomputed)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(PARTS), help="measure this part alone")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    names = list(PARTS) if arguments.only is None else [arguments.only]
    results = {name: PARTS[name][0](arguments.rounds) for name in names}
    if arguments.json:
        print(json.dumps({"machine": machine(), "rounds": arguments.rounds, "results": results}))
        return
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    for name in names:
        PARTS[name][1](results[name])


if __name__ == "__main__":
    main()
