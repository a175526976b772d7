"""An existing Stable Diffusion as fine-tuning needs it: loaded, frozen, its text encoded and its noise as it was."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import (
    DDPMScheduler,
    DiffusionPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from torch import nn
from transformers import CLIPTokenizer

from scalelong_diffusers.download import damaged_file_errors
from scalelong_diffusers.pipelines.compatibility import required_conditions
from scalelong_diffusers.pipelines.source import check_components, pipeline_index
from scalelong_diffusers.pipelines.text_encoding import check_texts, check_tokenizer, text_embedding_width


StableDiffusion = StableDiffusionPipeline | StableDiffusionXLPipeline

# The schedule of the noise; the rest of a scheduler's config is about sampling.
_SCHEDULE = (
    "num_train_timesteps",
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
    "prediction_type",
    "rescale_betas_zero_snr",
)
_PREDICTION_TYPES = ("epsilon", "v_prediction", "sample")


def load_stable_diffusion(source: str | os.PathLike, **options) -> StableDiffusion:
    """
    Load a Stable Diffusion 1 or 2 or an SDXL, from a folder or the Hub, with everything but the U-Net frozen. The
    options are those of `DiffusionPipeline.from_pretrained`.
    """
    # Before gigabytes of another model are downloaded.
    class_name = pipeline_index(source, options)["_class_name"]
    if class_name not in [known.__name__ for known in StableDiffusion.__args__]:
        raise ValueError(_no_stable_diffusion(source, class_name))
    check_components(DiffusionPipeline, source, options)
    with damaged_file_errors(source):
        pipe = DiffusionPipeline.from_pretrained(source, **options)
    check_stable_diffusion(pipe)
    freeze_all_but_unet(pipe)
    return pipe


def check_stable_diffusion(pipe: DiffusionPipeline):
    """Refuse a pipeline that can not be trained as Stable Diffusion is."""
    if not isinstance(pipe, StableDiffusion):
        raise ValueError(_no_stable_diffusion("what was given", type(pipe).__name__))
    for name in _needed_components(pipe):
        if getattr(pipe, name) is None:
            raise ValueError(f"this {type(pipe).__name__} has no {name}, which fine-tuning needs")
    if not isinstance(pipe.unet, UNet2DConditionModel):
        raise ValueError(f"the U-Net of Stable Diffusion is a UNet2DConditionModel, got {type(pipe.unet).__name__}")
    _check_unet(pipe.unet, is_xl=isinstance(pipe, StableDiffusionXLPipeline))
    channels, latent_channels = pipe.unet.config.in_channels, pipe.vae.config.latent_channels
    if channels != latent_channels:
        kind = " (one for inpainting takes masked image and mask besides)" if channels == 9 else ""
        raise ValueError(f"the unet takes {channels} channels{kind}, and the latents of the vae {latent_channels}")
    for encoder, tokenizer in zip(text_encoders(pipe), tokenizers(pipe)):
        check_tokenizer(tokenizer, encoder)
    widths = [encoder.config.hidden_size for encoder in text_encoders(pipe)]
    if sum(widths) != text_embedding_width(pipe.unet):
        raise ValueError(
            f"the hidden states of the text encoders are {' + '.join(map(str, widths))} wide, but this "
            f"{type(pipe.unet).__name__} takes {text_embedding_width(pipe.unet)}"
        )


def freeze_all_but_unet(pipe: StableDiffusion):
    for component in pipe.components.values():
        if isinstance(component, nn.Module) and component is not pipe.unet:
            component.requires_grad_(False).eval()


def text_encoders(pipe: StableDiffusion) -> list[nn.Module]:
    is_xl = isinstance(pipe, StableDiffusionXLPipeline)
    return [pipe.text_encoder, pipe.text_encoder_2] if is_xl else [pipe.text_encoder]


def tokenizers(pipe: StableDiffusion) -> list[CLIPTokenizer]:
    is_xl = isinstance(pipe, StableDiffusionXLPipeline)
    return [pipe.tokenizer, pipe.tokenizer_2] if is_xl else [pipe.tokenizer]


@torch.no_grad()
def encode_prompts(pipe: StableDiffusion, prompts: Sequence[str], resolution: int | None = None) -> dict[str, Any]:
    """
    The keyword arguments that the U-Net takes for these prompts, as the pipeline itself encodes them. The empty text
    becomes what the pipeline's guidance leads away from, which for SDXL may be zeros.

    Args:
        resolution: the side of the images, of which SDXL alone is told, and that they are whole; by default as large
            as the pipeline makes them.

    ```python
    noise = pipe.unet(noisy_latents, timesteps, **encode_prompts(pipe, captions)).sample
    ```
    """
    check_texts("prompts", prompts)
    if not isinstance(pipe, StableDiffusionXLPipeline):
        # Empty text is nothing special here: it is what guidance leads away from.
        states, _ = pipe.encode_prompt(list(prompts), pipe.text_encoder.device, 1, do_classifier_free_guidance=False)
        return {"encoder_hidden_states": states}
    states, text_embeds = _encode_for_xl(pipe, list(prompts))
    side = pipe.default_sample_size * pipe.vae_scale_factor if resolution is None else resolution
    # Height and width before and after the image was scaled, with where it was cropped between them.
    time_ids = torch.tensor([[side, side, 0, 0, side, side]] * len(prompts)).to(states)
    return {
        "encoder_hidden_states": states,
        "added_cond_kwargs": {"text_embeds": text_embeds, "time_ids": time_ids},
    }


def training_schedule(pipe: StableDiffusion) -> DDPMScheduler:
    """The noise that the model was trained with, and what it predicts, from the config of the pipeline's scheduler."""
    name, config = type(pipe.scheduler).__name__, pipe.scheduler.config
    if "beta_schedule" not in config:
        raise ValueError(f"{name} has no betas, by which a Stable Diffusion is trained; set another pipe.scheduler")
    prediction_type = config.get("prediction_type", "epsilon")
    if prediction_type not in _PREDICTION_TYPES:
        accepted = ", ".join(_PREDICTION_TYPES)
        raise ValueError(f"prediction_type of {name} must be one of {accepted}, got {prediction_type!r}")
    return DDPMScheduler(**{entry: config[entry] for entry in _SCHEDULE if entry in config})


def _encode_for_xl(pipe: StableDiffusionXLPipeline, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states of both encoders side by side, and the pooled ones of the second."""
    has_empty = "" in prompts
    states, null_states, pooled, null_pooled = pipe.encode_prompt(
        prompts, device=pipe.text_encoder.device, num_images_per_prompt=1, do_classifier_free_guidance=has_empty
    )
    if has_empty:
        is_empty = torch.tensor([prompt == "" for prompt in prompts], device=states.device)
        states = torch.where(is_empty[:, None, None], null_states, states)
        pooled = torch.where(is_empty[:, None], null_pooled, pooled)
    return states, pooled


def _no_stable_diffusion(what: str | os.PathLike, class_name: str | list[str]) -> str:
    # A pipeline that brings its own code has the name of its module beside that of its class.
    name = class_name if isinstance(class_name, str) else class_name[-1]
    accepted = " or a ".join(known.__name__ for known in StableDiffusion.__args__)
    return f"{what} is a {name}; what can be fine-tuned as Stable Diffusion is a {accepted}"


def _needed_components(pipe: StableDiffusion) -> list[str]:
    of_xl = ["text_encoder_2", "tokenizer_2"] if isinstance(pipe, StableDiffusionXLPipeline) else []
    return ["unet", "vae", "scheduler", "text_encoder", "tokenizer", *of_xl]


def _check_unet(unet: UNet2DConditionModel, is_xl: bool):
    """It takes just what `encode_prompts` gives."""
    conditions = required_conditions(unet)
    expected = {"encoder_hidden_states"} | ({"added_cond_kwargs"} if is_xl else set())
    if set(conditions) != expected:
        takes = ", ".join(f"{argument} ({option})" for argument, option in conditions.items()) or "no condition"
        raise ValueError(
            f"the unet of {'an SDXL' if is_xl else 'a Stable Diffusion'} takes {' and '.join(sorted(expected))}; this "
            f"{type(unet).__name__} takes {takes}"
        )
    if is_xl and unet.config.addition_embed_type != "text_time":
        raise ValueError(
            f"the unet of an SDXL has addition_embed_type='text_time', got {unet.config.addition_embed_type!r}"
        )
