"""Unconditional sampling."""

from collections.abc import Sequence

import torch
from diffusers import ImagePipelineOutput, SchedulerMixin

from scalelong_diffusers.options import check_arguments
from scalelong_diffusers.pipelines.base import Callback, Count, Eta, Floats, Generators, SamplingPipeline, Side, Steps
from scalelong_diffusers.pipelines.compatibility import Autoencoder, Denoiser


class ScaleLongUnconditionalPipeline(SamplingPipeline):
    """
    Pipeline for unconditional image generation. See [`SamplingPipeline`] for the arguments.

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
    @check_arguments
    def __call__(
        self,
        batch_size: Count = 1,
        num_inference_steps: Steps = 50,
        timesteps: Floats = None,
        sigmas: Floats = None,
        eta: Eta = 0.0,
        generator: Generators = None,
        latents: torch.Tensor | None = None,
        height: Side = None,
        width: Side = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> ImagePipelineOutput | tuple:
        """Generate `batch_size` images. See [`SamplingPipeline`] for the other arguments."""
        self.set_guidance(1.0)
        self._check_inputs(batch_size, generator, output_type, callback_on_step_end_tensor_inputs)
        timesteps = self._timesteps(num_inference_steps, timesteps, sigmas)
        latents = self._initial_latents(batch_size, height, width, generator, latents)
        latents = self._denoise(
            latents, None, timesteps, eta, generator, callback_on_step_end, callback_on_step_end_tensor_inputs
        )
        return self._to_output(latents, output_type, return_dict)
