"""Text-to-image sampling with a CLIP text encoder."""

import logging
from collections.abc import Sequence

import torch
from diffusers import ImagePipelineOutput, SchedulerMixin
from transformers import CLIPTextModel, CLIPTokenizer

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.pipelines.base import Callback, Generators, SamplingPipeline
from scalelong_diffusers.pipelines.compatibility import Autoencoder, Denoiser, check_size, unwrap_model
from scalelong_diffusers.pipelines.text_encoding import (
    check_text_width,
    check_texts,
    hidden_states,
    max_tokens,
    text_embedding_width,
    tokenize,
    truncation_warnings,
)


logger = logging.getLogger(__name__)


class ScaleLongTextToImagePipeline(SamplingPipeline):
    """
    Pipeline for text-to-image generation.

    Args:
        unet: a diffusers U-Net or a model of scalelong_diffusers that attends to text.
        scheduler: any diffusers scheduler that fits.
        text_encoder, tokenizer: from a CLIP. Without them, give `prompt_embeds` instead of prompts.
        vae: decodes the model's latents; None for a model of pixels.
        latent_scale: factor that the latents were multiplied by in training, if not the vae's `scaling_factor`.

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
        """Return the hidden states of the prompts and, with guidance, of the negative prompts, one per image."""
        prompt_embeds = self._embeds("prompt", prompt, prompt_embeds)
        if do_classifier_free_guidance:
            if negative_prompt is None and negative_prompt_embeds is None:
                if self.text_encoder is None:
                    raise UserError(
                        "guidance needs a negative prompt, which this pipeline cannot encode without a text_encoder; "
                        "give negative_prompt_embeds, or guidance_scale=1"
                    )
                negative_prompt = ""
            negative_prompt_embeds = self._embeds("negative_prompt", negative_prompt, negative_prompt_embeds)
            if len(negative_prompt_embeds) == 1:
                negative_prompt_embeds = negative_prompt_embeds.expand(len(prompt_embeds), -1, -1)
            if negative_prompt_embeds.shape != prompt_embeds.shape:
                raise UserError(
                    "give one negative_prompt for all prompts or one for each, with embeddings of the same shape; got "
                    f"{tuple(negative_prompt_embeds.shape)} for prompts of {tuple(prompt_embeds.shape)}"
                )
            negative_prompt_embeds = negative_prompt_embeds.repeat_interleave(num_images_per_prompt, dim=0)
        return prompt_embeds.repeat_interleave(num_images_per_prompt, dim=0), negative_prompt_embeds

    def _embeds(self, name: str, prompt: str | list[str] | None, embeds: torch.Tensor | None) -> torch.Tensor:
        if (prompt is None) == (embeds is None):
            raise UserError(f"give either {name} or {name}_embeds{'' if prompt is None else ', not both'}")
        if embeds is None:
            prompts = [prompt] if isinstance(prompt, str) else prompt
            check_texts(name, prompts)
            embeds = self._encode(prompts)
        width = text_embedding_width(unwrap_model(self.unet))
        if embeds.ndim != 3 or embeds.shape[2] != width:
            raise UserError(f"{name}_embeds must have shape (prompts, tokens, {width}), got {tuple(embeds.shape)}")
        return embeds.to(self._execution_device, unwrap_model(self.unet).dtype)

    def _encode(self, prompts: Sequence[str]) -> torch.Tensor:
        if self.text_encoder is None or self.tokenizer is None:
            raise UserError("this pipeline has no text_encoder and tokenizer to encode a prompt; give prompt_embeds")
        limit = max_tokens(self.text_encoder, self.tokenizer, unwrap_model(self.unet))
        for warning in truncation_warnings("prompt", prompts, self.tokenizer, limit):
            logger.warning("%s", warning)
        ids = tokenize(prompts, self.tokenizer, limit)
        return hidden_states(ids.to(self._execution_device), self.text_encoder)
