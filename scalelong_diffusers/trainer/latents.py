"""What a model is trained on: pixels, or what an autoencoder makes of them."""

import torch
from diffusers import AutoencoderKL

from scalelong_diffusers.data import Batch


@torch.no_grad()
def encode_images(batch: Batch, vae: AutoencoderKL | None, latent_scale: float | None = None) -> torch.Tensor:
    """The images of a batch as the model is to see them; latents are drawn anew each time."""
    pixels = batch["pixel_values"]
    if vae is None:
        return pixels
    moments = vae.encode(pixels.to(vae.dtype)).latent_dist
    latents = moments.mean + moments.std * batch.normal_like(moments.mean, "latents")
    return latents.float() * (vae.config.scaling_factor if latent_scale is None else latent_scale)
