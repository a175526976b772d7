"""Unconditional sampling."""

from collections.abc import Sequence

import torch
from diffusers import ImagePipelineOutput, SchedulerMixin

from scalelong_diffusers.pipelines.base import Callback, Generators, SamplingPipeline
from scalelong_diffusers.pipelines.compatibility import Autoencoder, Denoiser, check_size


class ScaleLongUnconditionalPipeline(SamplingPipeline):
    """
    Pipeline for unconditional image generation.

    Args:
        unet: a diffusers U-Net or a model of scalelong_diffusers.
        scheduler: any diffusers scheduler that fits.
        vae: decodes the model's latents; None for a model of pixels.
        latent_scale: factor that the latents were multiplied by in training, if not the vae's `scaling_factor`.

    ```python
    pipe = ScaleLongUnconditionalPipeline(unet, DDIMScheduler())
    image = pipe(num_inference_steps=50).images[0]
    ```
    """

    def __init__(
        self,
        unet: Denoiser,
        scheduler: SchedulerMixin,
        vae: Autoencoder | None = None,
        latent_scale: float | None = None,
    ):
        super().__init__()
        self._set_up(unet, scheduler, vae, latent_scale)

    @torch.no_grad()
    def __call__(
        self,
        batch_size: int = 1,
        num_inference_steps: int = 50,
        timesteps: list[int] | None = None,
        sigmas: list[float] | None = None,
        eta: float = 0.0,
        generator: Generators = None,
        latents: torch.Tensor | None = None,
        height: int | None = None,
        width: int | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> ImagePipelineOutput | tuple:
        """Generate `batch_size` images. See [`SamplingPipeline`] for the other arguments."""
        check_size("batch_size", batch_size, 1)
        self.set_guidance(1.0)
        return self._sample(
            batch_size,
            None,
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
