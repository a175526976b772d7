"""Images of text, which a CLIP text encoder reads."""

import logging
from collections.abc import Sequence

import torch
from diffusers import ImagePipelineOutput, SchedulerMixin
from transformers import CLIPTextModel, CLIPTokenizer

from scalelong_diffusers.pipelines.base import Callback, Generators, SamplingPipeline
from scalelong_diffusers.pipelines.compatibility import (
    Autoencoder,
    Denoiser,
    check_size,
    check_tensor,
    unwrap_model,
)
from scalelong_diffusers.pipelines.text_encoding import (
    check_text_width,
    hidden_states,
    max_tokens,
    text_embedding_width,
    tokenize,
    truncation_warnings,
)


logger = logging.getLogger(__name__)


class ScaleLongTextToImagePipeline(SamplingPipeline):
    """
    Samples a model of text.

    Args:
        unet: a U-Net of diffusers or a model of scalelong_diffusers that attends to text.
        scheduler: any scheduler of diffusers that fits.
        text_encoder, tokenizer: CLIP's. Without them prompts are given as `prompt_embeds`.
        vae: what decodes the model's latents; None where it makes pixels.
        latent_scale: the factor on the latents that the model was trained with, where it is not that of the vae.

    ```python
    pipe = ScaleLongTextToImagePipeline.from_pretrained("some/model")
    image = pipe("a red circle", guidance_scale=4).images[0]
    ```
    """

    _optional_components = ["vae", "text_encoder", "tokenizer"]
    _callback_tensor_inputs = ["latents", "prompt_embeds"]
    _condition_argument = "encoder_hidden_states"
    _condition_name = "prompt_embeds"

    def __init__(
        self,
        unet: Denoiser,
        scheduler: SchedulerMixin,
        text_encoder: CLIPTextModel | None = None,
        tokenizer: CLIPTokenizer | None = None,
        vae: Autoencoder | None = None,
        latent_scale: float | None = None,
    ):
        super().__init__()
        self._set_up(unet, scheduler, vae, latent_scale, text_encoder=text_encoder, tokenizer=tokenizer)
        if text_encoder is not None:
            check_text_width(text_encoder, unwrap_model(unet))

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        timesteps: list[int] | None = None,
        sigmas: list[float] | None = None,
        guidance_scale: float = 7.5,
        guidance_rescale: float = 0.0,
        negative_prompt: str | list[str] | None = None,
        num_images_per_prompt: int = 1,
        eta: float = 0.0,
        generator: Generators = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> ImagePipelineOutput | tuple:
        """
        Make images of text.

        Args:
            prompt: what to draw, or a list with one prompt for each image.
            guidance_scale: as in diffusers: `uncond + guidance_scale * (cond - uncond)`; 1 is no guidance.
            guidance_rescale: how far to take back the contrast that guidance adds, from 0 to 1.
            negative_prompt: what guidance leads away from; nothing in particular (empty text) by default.
            num_images_per_prompt: how many images to make of each prompt.
            prompt_embeds, negative_prompt_embeds: the text encoder's hidden states, in place of the prompts.

        [`SamplingPipeline`] says what the other arguments are.
        """
        check_size("num_images_per_prompt", num_images_per_prompt, 1)
        self.set_guidance(guidance_scale, guidance_rescale)
        guided = self.do_classifier_free_guidance
        prompt_embeds, negative_prompt_embeds = self.encode_prompt(
            prompt, negative_prompt, num_images_per_prompt, guided, prompt_embeds, negative_prompt_embeds
        )
        return self._sample(
            len(prompt_embeds),
            torch.cat([negative_prompt_embeds, prompt_embeds]) if guided else prompt_embeds,
            num_inference_steps=num_inference_steps,
            timesteps=timesteps,
            sigmas=sigmas,
            eta=eta,
            generator=generator,
            latents=latents,
            height=height,
            width=width,
            output_type=output_type,
            return_dict=return_dict,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
        )

    def encode_prompt(
        self,
        prompt: str | list[str] | None,
        negative_prompt: str | list[str] | None = None,
        num_images_per_prompt: int = 1,
        do_classifier_free_guidance: bool = True,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The hidden states of the prompts and, under guidance, of what it leads away from; one for each image."""
        prompt_embeds = self._embeds("prompt", prompt, prompt_embeds)
        if do_classifier_free_guidance:
            if negative_prompt is None and negative_prompt_embeds is None:
                if self.text_encoder is None:
                    raise ValueError(
                        "guidance needs a text to lead away from, which this pipeline has no text_encoder to read; "
                        "give negative_prompt_embeds, or guidance_scale=1"
                    )
                negative_prompt = ""
            negative_prompt_embeds = self._embeds("negative_prompt", negative_prompt, negative_prompt_embeds)
            if len(negative_prompt_embeds) == 1:
                negative_prompt_embeds = negative_prompt_embeds.expand(len(prompt_embeds), -1, -1)
            if negative_prompt_embeds.shape != prompt_embeds.shape:
                raise ValueError(
                    "negative_prompt must be one for all prompts or one for each, and of their length; got "
                    f"{tuple(negative_prompt_embeds.shape)} for prompts of {tuple(prompt_embeds.shape)}"
                )
            negative_prompt_embeds = negative_prompt_embeds.repeat_interleave(num_images_per_prompt, dim=0)
        return prompt_embeds.repeat_interleave(num_images_per_prompt, dim=0), negative_prompt_embeds

    def _embeds(self, name: str, prompt: str | list[str] | None, embeds: torch.Tensor | None) -> torch.Tensor:
        if (prompt is None) == (embeds is None):
            given = "neither was" if prompt is None else "both were"
            raise ValueError(f"give either {name} or {name}_embeds; {given} given")
        if embeds is None:
            embeds = self._encode(_checked_prompts(name, prompt))
        check_tensor(f"{name}_embeds", embeds)
        width = text_embedding_width(unwrap_model(self.unet))
        if embeds.ndim != 3 or embeds.shape[2] != width:
            raise ValueError(f"{name}_embeds must be of shape (prompts, tokens, {width}), got {tuple(embeds.shape)}")
        return embeds.to(self._execution_device, unwrap_model(self.unet).dtype)

    def _encode(self, prompts: list[str]) -> torch.Tensor:
        for component in ("text_encoder", "tokenizer"):
            if getattr(self, component) is None:
                raise ValueError(
                    f"a prompt needs the component {component}, which this pipeline lacks; give prompt_embeds"
                )
        limit = max_tokens(self.text_encoder, self.tokenizer, unwrap_model(self.unet))
        for sentence in truncation_warnings("prompt", prompts, self.tokenizer, limit):
            logger.warning("%s", sentence)
        ids = tokenize(prompts, self.tokenizer, limit)
        return hidden_states(ids.to(self._execution_device), self.text_encoder)


def _checked_prompts(name: str, prompt: str | list[str]) -> list[str]:
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, list | tuple) or not all(isinstance(text, str) for text in prompts):
        raise TypeError(f"{name} must be text or a list of texts, got {prompt!r}")
    if not prompts:
        raise ValueError(f"{name} is an empty list; give at least one text (which may be empty)")
    return list(prompts)
