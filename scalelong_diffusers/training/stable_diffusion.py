"""Load a Stable Diffusion pipeline for fine-tuning, encode prompts, and recover the noise schedule."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn
from transformers import CLIPTokenizer

from scalelong_diffusers.download import quiet_transformers
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.pipelines.compatibility import required_conditions
from scalelong_diffusers.pipelines.loading import load_complete_pipeline, pipeline_index
from scalelong_diffusers.pipelines.text_encoding import check_tokenizer, text_embedding_width, tokenize


with quiet_transformers():  # it warns that torchvision is missing, which is not needed
    from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
    from diffusers.loaders import TextualInversionLoaderMixin


StableDiffusion = StableDiffusionPipeline | StableDiffusionXLPipeline
NUM_TIME_IDS = 6  # of SDXL


def load_stable_diffusion(source: str | os.PathLike, **options) -> StableDiffusion:
    """
    Load a Stable Diffusion 1, 2 or XL from a folder, the Hub or one file, and freeze everything except the U-Net.

    Takes the options of `DiffusionPipeline.from_pretrained`.
    """
    # The class is checked before gigabytes of another model are downloaded.
    _check_class(source, pipeline_index(source, options)["_class_name"])
    pipe = load_complete_pipeline(DiffusionPipeline, DiffusionPipeline.from_pretrained, source, **options)
    check_stable_diffusion(pipe)
    freeze_all_but_unet(pipe)
    return pipe


def _check_class(source: str | os.PathLike, class_name: str | list[str]):
    name = class_name if isinstance(class_name, str) else class_name[-1]  # a pipeline with its own code has a list
    known = [pipeline_class.__name__ for pipeline_class in StableDiffusion.__args__]
    if name not in known:
        raise UserError(f"{source} is a {name}; only {' or '.join(known)} can be fine-tuned")


def check_stable_diffusion(pipe: DiffusionPipeline):
    """Check that a pipeline can be fine-tuned as Stable Diffusion, with the output of `encode_tokens` as input."""
    _check_class("this pipeline", type(pipe).__name__)
    others = ("text_encoder_2", "tokenizer_2") if isinstance(pipe, StableDiffusionXLPipeline) else ()
    missing = [name for name in ("unet", "vae", "text_encoder", "tokenizer", *others) if getattr(pipe, name) is None]
    if problem := f"has no {missing[0]}" if missing else _misfit(pipe):
        raise UserError(f"this {type(pipe).__name__} {problem}")
    for encoder, tokenizer in zip(text_encoders(pipe), tokenizers(pipe)):
        check_tokenizer(tokenizer, encoder)


def _misfit(pipe: StableDiffusion) -> str | None:
    """Say how the U-Net contradicts the other components or the output of `encode_tokens`, or return None."""
    unet, is_xl = pipe.unet, isinstance(pipe, StableDiffusionXLPipeline)
    name = f"has a {type(unet).__name__} that"
    conditions = required_conditions(unet)
    expected = {"encoder_hidden_states"} | ({"added_cond_kwargs"} if is_xl else set())
    channels, latent_channels = unet.config.in_channels, pipe.vae.config.latent_channels
    widths = [encoder.config.hidden_size for encoder in text_encoders(pipe)]
    if set(conditions) != expected or (is_xl and unet.config.addition_embed_type != "text_time"):
        takes = ", ".join(f"{argument} ({option})" for argument, option in conditions.items()) or "no condition"
        kind = " with addition_embed_type='text_time'" if is_xl else ""
        return f"{name} must take {' and '.join(sorted(expected))}{kind} but takes {takes}"
    if channels != latent_channels:
        kind = " (an inpainting model also takes a mask and the masked image)" if channels == 9 else ""
        return f"{name} takes {channels} channels{kind}, but the vae's latents have {latent_channels}"
    if sum(widths) != text_embedding_width(unet):
        width = text_embedding_width(unet)
        return f"{name} takes text of width {width}, but the text encoders have {' + '.join(map(str, widths))}"
    return None


def freeze_all_but_unet(pipe: StableDiffusion):
    """Freeze all models of the pipeline except the U-Net."""
    for component in pipe.components.values():
        if isinstance(component, nn.Module) and component is not pipe.unet:
            component.requires_grad_(False).eval()


def text_encoders(pipe: StableDiffusion) -> list[nn.Module]:
    is_xl = isinstance(pipe, StableDiffusionXLPipeline)
    return [pipe.text_encoder, pipe.text_encoder_2] if is_xl else [pipe.text_encoder]


def tokenizers(pipe: StableDiffusion) -> list[CLIPTokenizer]:
    is_xl = isinstance(pipe, StableDiffusionXLPipeline)
    return [pipe.tokenizer, pipe.tokenizer_2] if is_xl else [pipe.tokenizer]


def tokenize_prompts(pipe: StableDiffusion) -> dict[str, Callable[[Sequence[str]], torch.Tensor]]:
    """
    Return functions from captions to token ids on the CPU, by the names that [`encode_tokens`] expects.

    They can be pickled, so loader workers can call them.
    """
    names = ("input_ids", "input_ids_2")
    return {name: functools.partial(_tokenize, tokenizer) for name, tokenizer in zip(names, tokenizers(pipe))}


def _tokenize(tokenizer: CLIPTokenizer, captions: Sequence[str]) -> torch.Tensor:
    added = tokenizer.added_tokens_encoder
    if any(f"{token}_1" in added for token in added):  # a textual inversion with several vectors
        captions = TextualInversionLoaderMixin().maybe_convert_prompt(list(captions), tokenizer)
    return tokenize(captions, tokenizer, tokenizer.model_max_length)


@functools.lru_cache(maxsize=8)
def _empty_prompt(tokenizer: CLIPTokenizer, device: torch.device) -> torch.Tensor:
    """Return the token ids of the empty prompt. The cache saves a copy to the device in each step."""
    return tokenize([""], tokenizer, tokenizer.model_max_length).to(device)


@torch.no_grad()
def encode_tokens(
    pipe: StableDiffusion,
    ids: Mapping[str, torch.Tensor],
    dropped: torch.Tensor | None = None,
    resolution: int | None = None,
) -> dict[str, Any]:
    """
    Return the U-Net's keyword arguments for prompts, equal to the pipeline's own `encode_prompt`.

    All work is done on the device of the ids, without copies from or to the host.

    Args:
        ids: token ids from the functions of [`tokenize_prompts`].
        dropped: boolean, one for each prompt. A dropped prompt is replaced by the unconditional one of the pipeline's
            guidance: the empty prompt, or zeros for SDXL with `force_zeros_for_empty_prompt`.
        resolution: the side of the images in pixels, which only SDXL reads; by default the pipeline's own.

    ```python
    ids = {name: function(captions).to(device) for name, function in tokenize_prompts(pipe).items()}
    noise = pipe.unet(noisy_latents, timesteps, **encode_tokens(pipe, ids)).sample
    ```
    """
    is_xl = isinstance(pipe, StableDiffusionXLPipeline)
    zero_dropped = is_xl and pipe.config.force_zeros_for_empty_prompt
    batches = list(ids.values())
    if dropped is not None and not zero_dropped:
        empty = [_empty_prompt(tokenizer, batch.device) for tokenizer, batch in zip(tokenizers(pipe), batches)]
        batches = [torch.where(dropped[:, None], one, batch) for one, batch in zip(empty, batches)]
    if not is_xl:
        return {"encoder_hidden_states": pipe.text_encoder(batches[0])[0]}
    outputs = [encoder(batch, output_hidden_states=True) for encoder, batch in zip(text_encoders(pipe), batches)]
    states = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1).to(pipe.text_encoder_2.dtype)
    pooled = outputs[1].text_embeds
    if dropped is not None and zero_dropped:
        states = states.masked_fill(dropped[:, None, None], 0)
        pooled = pooled.masked_fill(dropped[:, None], 0)
    side = pipe.default_sample_size * pipe.vae_scale_factor if resolution is None else resolution
    return {"encoder_hidden_states": states, "added_cond_kwargs": added_conditions(pooled, side)}


def added_conditions(pooled: torch.Tensor, side: int) -> dict[str, torch.Tensor]:
    """Return SDXL's `added_cond_kwargs` for pooled text and square images that are not cropped."""
    # Height and width of the original image, top and left of the crop, height and width of the target.
    time_ids = pooled.new_full((len(pooled), NUM_TIME_IDS), side)
    time_ids[:, 2:4] = 0
    return {"text_embeds": pooled, "time_ids": time_ids}
