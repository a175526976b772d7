"""What a model is trained on: pixels, or what an autoencoder makes of them, now or once for all."""

import hashlib

import torch
from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import nn
from transformers import CLIPTokenizer

from scalelong_diffusers.data import Batch, TrainingData
from scalelong_diffusers.pipelines.text_encoding import CaptionEncoder


@torch.no_grad()
def encode_images(batch: Batch, vae: AutoencoderKL | None, latent_scale: float | None = None) -> torch.Tensor:
    """The images of a batch as the model is to see them; latents are drawn anew each time."""
    if vae is None:
        return batch["pixel_values"]
    moments = batch["moments"] if "moments" in batch else encode_moments(batch["pixel_values"], vae)
    latents = DiagonalGaussianDistribution(moments)
    drawn = latents.mean + latents.std * batch.normal_like(latents.mean, "latents")
    drawn = drawn - (vae.config.shift_factor or 0.0)
    return drawn.float() * (vae.config.scaling_factor if latent_scale is None else latent_scale)


@torch.no_grad()
def encode_moments(pixels: torch.Tensor, vae: AutoencoderKL) -> torch.Tensor:
    """The means and log variances of the latents, on top of each other."""
    return vae.encode(pixels.to(vae.dtype)).latent_dist.parameters


def check_autoencoder(data: TrainingData, vae: AutoencoderKL | None, name: str | None):
    """Refuse to train on the features of one autoencoder and to draw with another, or with none."""
    if data.precomputed is None:
        return
    if vae is None:
        made_by = data.precomputed.made_of["autoencoder"]["name"]
        raise ValueError(
            f"the data in {data.precomputed.folder} are latents: give --pretrained_vae_model_name_or_path {made_by}, "
            "which makes images of what the model draws"
        )
    data.precomputed.check_encoder("autoencoder", name, weights_checksum(vae))


def check_text_encoder(data: TrainingData, captions: CaptionEncoder, name: str | None):
    """Refuse to train on the hidden states of one text encoder and to draw with another, or with shorter texts."""
    if data.precomputed is None:
        return
    if any(parameter.requires_grad for parameter in captions.text_encoder.parameters()):
        raise ValueError(
            f"the data in {data.precomputed.folder} are of a text encoder as it is, and this one is to be trained: "
            "leave --train_text_encoder out and give --pretrained_text_encoder_name_or_path "
            f"{data.precomputed.made_of['text_encoder']['name']}"
        )
    checksum = text_encoder_checksum(captions.text_encoder, captions.tokenizer)
    data.precomputed.check_encoder("text_encoder", name, checksum)
    length = data.precomputed.made_of["text_encoder"]["max_tokens"]
    if length != captions.max_tokens:
        raise ValueError(
            f"the data in {data.precomputed.folder} are of captions of {length} tokens, and the model takes "
            f"{captions.max_tokens}: make it with context_length={length}"
        )


def text_encoder_checksum(text_encoder: nn.Module, tokenizer: CLIPTokenizer) -> str:
    vocabulary = hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
    return f"{weights_checksum(text_encoder)}-{vocabulary[:8]}"


def weights_checksum(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().float().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
