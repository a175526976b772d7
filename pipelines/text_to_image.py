"""Text-to-image sampling with a CLIP text encoder."""

import logging
from collections.abc import Sequence

import torch
from diffusers import ImagePipelineOutput, SchedulerMixin
from transformers import CLIPTextModel, CLIPTokenizer

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.options import check_arguments
from scalelong_diffusers.pipelines.base import Callback, Count, Eta, Floats, Generators, SamplingPipeline, Side, Steps
from scalelong_diffusers.pipelines.compatibility import Autoencoder, Denoiser, unwrap_model
from scalelong_diffusers.pipelines.text_encoding import (
    check_text_width,
    check_tokenizer,
    hidden_states,
    max_tokens,
    tokenize,
    truncation_warnings,
)


logger = logging.getLogger(__name__)


class ScaleLongTextToImagePipeline(SamplingPipeline):
    """
    Pipeline for text-to-image generation.

    Args:
        text_encoder, tokenizer: components of a CLIP model. Without them, pass `prompt_embeds` instead of prompts.

    See [`SamplingPipeline`] for the other arguments.

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
            if tokenizer is not None:
                check_tokenizer(tokenizer, text_encoder)

    @torch.no_grad()
    @check_arguments
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        height: Side = None,
        width: Side = None,
        num_inference_steps: Steps = 50,
        timesteps: Floats = None,
        sigmas: Floats = None,
        guidance_scale: float = 7.5,
        guidance_rescale: float = 0.0,
        negative_prompt: str | list[str] | None = None,
        num_images_per_prompt: Count = 1,
        eta: Eta = 0.0,
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
        Generate images from text.

        Args:
            prompt: the text, or a list with one for each image.
            guidance_scale: as in diffusers: `uncond + guidance_scale * (cond - uncond)`; 1 turns it off.
            guidance_rescale: how far to restore the contrast that guidance changes, from 0 to 1.
            negative_prompt: the text to guide away from; empty by default.
            num_images_per_prompt: number of images per prompt.
            prompt_embeds, negative_prompt_embeds: hidden states of the text encoder, instead of the prompts.

        See [`SamplingPipeline`] for the other arguments.
        """
        self.set_guidance(guidance_scale, guidance_rescale)
        guided = self.do_classifier_free_guidance
        prompt_embeds, negative_prompt_embeds = self.encode_prompt(
            prompt, negative_prompt, num_images_per_prompt, guided, prompt_embeds, negative_prompt_embeds
        )
        condition = torch.cat([negative_prompt_embeds, prompt_embeds]) if guided else prompt_embeds
        self._check_inputs(len(prompt_embeds), generator, output_type, callback_on_step_end_tensor_inputs)
        timesteps = self._timesteps(num_inference_steps, timesteps, sigmas)
        latents = self._initial_latents(len(prompt_embeds), height, width, generator, latents)
        latents = self._denoise(
            latents, condition, timesteps, eta, generator, callback_on_step_end, callback_on_step_end_tensor_inputs
        )
        return self._to_output(latents, output_type, return_dict)

    def encode_prompt(
        self,
        prompt: str | list[str] | None,
        negative_prompt: str | list[str] | None = None,
        num_images_per_prompt: int = 1,
        do_classifier_free_guidance: bool = True,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the hidden states of the prompts and, with guidance, of the negative prompts, one per image."""
        prompt_embeds = self._embeds("prompt", prompt, prompt_embeds)
        if do_classifier_free_guidance:
            if negative_prompt is None and negative_prompt_embeds is None:
                negative_prompt = ""
            negative_prompt_embeds = self._embeds("negative_prompt", negative_prompt, negative_prompt_embeds)
            if len(negative_prompt_embeds) not in (1, len(prompt_embeds)):
                raise UserError(
                    f"there must be one negative prompt, or one for each of the {len(prompt_embeds)} prompts, got "
                    f"{len(negative_prompt_embeds)}"
                )
            if len(negative_prompt_embeds) == 1:
                negative_prompt_embeds = negative_prompt_embeds.expand(len(prompt_embeds), -1, -1)
            negative_prompt_embeds = negative_prompt_embeds.repeat_interleave(num_images_per_prompt, dim=0)
        return prompt_embeds.repeat_interleave(num_images_per_prompt, dim=0), negative_prompt_embeds

    def _embeds(self, name: str, prompt: str | list[str] | None, embeds: torch.Tensor | None) -> torch.Tensor:
        model = unwrap_model(self.unet)
        if (prompt is None) == (embeds is None):
            raise UserError(f"pass either {name} or {name}_embeds{'' if prompt is None else ', not both'}")
        if embeds is None:
            if self.text_encoder is None or self.tokenizer is None:
                raise UserError(
                    f"this pipeline has no text_encoder and tokenizer to encode {name}; pass {name}_embeds, or "
                    "guidance_scale=1 for no negative prompt"
                )
            prompts = [prompt] if isinstance(prompt, str) else prompt
            if not prompts:
                raise UserError(f"{name} must be a text or a list of texts, got {prompt!r}")
            limit = max_tokens(self.text_encoder, self.tokenizer, model)
            for warning in truncation_warnings("prompt", prompts, self.tokenizer, limit):
                logger.warning("%s", warning)
            ids = tokenize(prompts, self.tokenizer, limit)
            embeds = hidden_states(ids.to(self._execution_device), self.text_encoder)
        return embeds.to(self._execution_device, model.dtype)
