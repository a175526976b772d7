"""The input of a model: pixels, or latents that are computed during training or precomputed."""

import torch
from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import nn
from transformers import CLIPTokenizer

from scalelong_diffusers.data import Batch, TrainingData
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import checksum
from scalelong_diffusers.pipelines.text_encoding import CaptionEncoder


@torch.no_grad()
def encode_images(batch: Batch, vae: AutoencoderKL | None, latent_scale: float | None = None) -> torch.Tensor:
    """Return the model's input for a batch: pixels or latents. Latents are drawn anew each time."""
    if vae is None:
        return batch["pixel_values"]
    moments = batch["moments"] if "moments" in batch else encode_moments(batch["pixel_values"], vae)
    distribution = DiagonalGaussianDistribution(moments)
    latents = distribution.mean + distribution.std * batch.normal_like(distribution.mean, "latents")
    latents = latents - (vae.config.shift_factor or 0.0)
    return latents.float() * (vae.config.scaling_factor if latent_scale is None else latent_scale)


@torch.no_grad()
def encode_moments(pixels: torch.Tensor, vae: AutoencoderKL) -> torch.Tensor:
    """Return the means and log variances of the latents, concatenated along the channels."""
    return vae.encode(pixels.to(vae.dtype)).latent_dist.parameters


def check_autoencoder(data: TrainingData, vae: AutoencoderKL | None, name: str | None):
    """Raise a `UserError` if precomputed latents come from another autoencoder."""
    if data.precomputed is None:
        return
    if vae is None:
        made_by = data.precomputed.made_of["autoencoder"]["name"]
        raise UserError(
            f"{data.precomputed.folder} has latents: pass --pretrained_vae_model_name_or_path {made_by} to decode "
            "what the model generates"
        )
    data.precomputed.check_encoder("autoencoder", name, weights_checksum(vae))


def check_text_encoder(data: TrainingData, captions: CaptionEncoder, name: str | None):
    """Raise a `UserError` if precomputed text states come from another text encoder or have another length."""
    if data.precomputed is None:
        return
    if any(parameter.requires_grad for parameter in captions.text_encoder.parameters()):
        raise UserError(
            f"{data.precomputed.folder} was made by a frozen text encoder: leave out --train_text_encoder and pass "
            f"--pretrained_text_encoder_name_or_path {data.precomputed.made_of['text_encoder']['name']}"
        )
    found = text_encoder_checksum(captions.text_encoder, captions.tokenizer)
    data.precomputed.check_encoder("text_encoder", name, found)
    length = data.precomputed.made_of["text_encoder"]["max_tokens"]
    if length != captions.max_tokens:
        raise UserError(
            f"{data.precomputed.folder} has captions of {length} tokens, but the model takes {captions.max_tokens}: "
            f"build the model with context_length={length}"
        )


def text_encoder_checksum(text_encoder: nn.Module, tokenizer: CLIPTokenizer) -> str:
    vocabulary = checksum(repr(sorted(tokenizer.get_vocab().items())))
    return f"{weights_checksum(text_encoder)}-{vocabulary[:8]}"


def weights_checksum(module: nn.Module) -> str:
    """Return a checksum of a module's weights, which is the same in every dtype that holds them exactly."""
    weights = sorted(module.state_dict().items())
    return checksum(*(part for name, tensor in weights for part in (name, tensor.float())))[:16]
