"""Compare steps from precomputed latents with steps that run the autoencoder, for benchmarks/training.py."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from measure import paired_ratio, paired_times

from scalelong_diffusers.data import DataConfig, TrainingData, load_training_data
from scalelong_diffusers.models.uvit import UViTModel
from scalelong_diffusers.noise import BetaProcess
from scalelong_diffusers.train import precompute_latents
from scalelong_diffusers.training.latents import encode_images


# Stable Diffusion's autoencoder at half its width, and the small U-ViT of the scripts, so that a round takes seconds.
VAE = {
    "block_out_channels": (64, 128, 256, 256),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
}
RESOLUTION, BATCH_SIZE, IMAGES = 128, 8, 32
MODEL = {"sample_size": RESOLUTION // 8, "patch_size": 2, "in_channels": 4, "hidden_size": 256, "num_layers": 12}


def step_of(data: TrainingData, vae: AutoencoderKL, model: UViTModel) -> Callable[[], None]:
    """Return a function that trains one step: data, latents, noise, model, loss, optimizer."""
    process = BetaProcess()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches: Iterator = iter(data.train.batches(BATCH_SIZE))

    def run():
        batch = next(batches)
        clean = encode_images(batch, vae)
        noise, timesteps = batch.normal_like(clean, "noise"), process.timesteps(batch.uniform("timestep"))
        prediction = model(process.add_noise(clean, noise, timesteps), timesteps).sample
        (prediction - process.target(clean, noise, timesteps)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def measure_precomputed(rounds: int, folder: Path) -> dict[str, Any]:
    images = {"resolution": RESOLUTION, "center_crop": True, "random_flip": True}
    torch.manual_seed(0)
    vae = AutoencoderKL(**VAE).eval().requires_grad_(False)
    vae.save_pretrained(folder / "vae")
    latents = folder / "latents"
    flags = f"--resolution {RESOLUTION} --center_crop --random_flip --num_shapes {IMAGES} --output_dir {latents}"
    with contextlib.redirect_stdout(None):
        precompute_latents.main([*flags.split(), "--pretrained_vae_model_name_or_path", str(folder / "vae")])
    settings = {
        "in the loop": DataConfig(num_shapes=IMAGES, **images),
        "precomputed": DataConfig(precomputed_dir=str(latents), **images),
    }
    functions = {}
    for name, setting in settings.items():
        data = load_training_data(setting, channels=3, needs_labels=False, needs_captions=False, seed=0)
        torch.manual_seed(0)
        functions[name] = step_of(data, vae, UViTModel(**MODEL))
    times = paired_times(functions, rounds, warmup=1)
    size = sum(file.stat().st_size for file in latents.iterdir()) / IMAGES
    return {
        "seconds_per_step": {name: sorted(values)[rounds // 2] for name, values in times.items()},
        "speed_up": paired_ratio(times["in the loop"], times["precomputed"]),
        "bytes_per_image": size,
    }


def show_precomputed(result: dict[str, Any]):
    print(f"precomputed: the small U-ViT on latents of {RESOLUTION} x {RESOLUTION} pixels, batch {BATCH_SIZE}")
    for name, seconds in result["seconds_per_step"].items():
        print(f"  {name:<12} {seconds:.3f} s per step")
    print("  {ratio:.2f} [{low:.2f}, {high:.2f}] times faster".format(**result["speed_up"]))
    print(f"  {result['bytes_per_image'] / 1024:.1f} KiB on disk per image with its mirror image")
