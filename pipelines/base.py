"""The sampling loop that our pipelines share, for any model, condition and scheduler."""

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput, SchedulerMixin, UNet2DModel
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.memory import check_memory
from scalelong_diffusers.models.mixin import HubMixin
from scalelong_diffusers.options import Option, check_arguments
from scalelong_diffusers.pipelines.compatibility import (
    Autoencoder,
    Denoiser,
    bytes_per_pixel,
    check_channels,
    check_schedule,
    check_scheduler,
    check_size,
    initial_noise_scale,
    required_conditions,
    scale_model_input,
    set_timesteps,
    size_multiple,
    unwrap_model,
    uses_predicted_variance,
    vae_factor,
)
from scalelong_diffusers.pipelines.loading import load_complete_pipeline


# Bounds that commands and scripts share.
LATENT_SCALE = {"at_least": 0.0001, "at_most": 10_000}
MAX_STEPS, MAX_SIDE = 10_000, 65_536

# Arguments that all `__call__` methods share.
Count = Annotated[int, Option(at_least=1, at_most=1_000_000)]
Steps = Annotated[int, Option(at_least=1, at_most=MAX_STEPS)]
Floats = Annotated[list[float] | None, Option(at_least=0, at_most=1_000_000)]
Eta = Annotated[float, Option(at_least=0, at_most=1)]
Side = Annotated[int | None, Option(at_least=1, at_most=MAX_SIDE)]

OUTPUT_TYPES = ("pil", "np", "pt", "latent")
# Our pipelines by the conditions of their models.
_PIPELINES = {
    frozenset(): "ScaleLongUnconditionalPipeline",
    frozenset({"class_labels"}): "ScaleLongClassConditionalPipeline",
    frozenset({"encoder_hidden_states"}): "ScaleLongTextToImagePipeline",
}

Generators = torch.Generator | list[torch.Generator] | None
Callback = Callable[[DiffusionPipeline, int, torch.Tensor, dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class NonFiniteImages(UserError):
    """The generated images have NaN or infinite values. diffusers would return black images."""


class SamplingPipeline(HubMixin, DiffusionPipeline):
    """
    Base class of our pipelines. A subclass adds its condition: one tensor that the model receives in every step.

    Arguments that all constructors share:
        unet: a diffusers U-Net or a model of scalelong_diffusers.
        scheduler: any compatible diffusers scheduler.
        vae: autoencoder that decodes the model's latents; None for a pixel model.
        latent_scale: factor that the latents were multiplied by in training, if not the vae's `scaling_factor`.

    Arguments that all `__call__` methods share:
        num_inference_steps: number of steps of the scheduler.
        timesteps, sigmas: custom timesteps or sigmas in descending order, for schedulers that support them.
        eta: amount of noise that DDIM and related schedulers add, from 0 (none) to 1 (as much as DDPM).
        generator: one generator, or a list with one per image, which makes an image independent of its batch.
        latents: initial noise of variance 1; drawn from `generator` by default.
        height, width: size of the images in pixels; by default the size that the model was trained for.
        output_type: `"pil"`, `"np"`, `"pt"` or `"latent"`.
        callback_on_step_end: called as `callback(pipe, step, timestep, tensors)` after each step. The tensors that it
            returns replace the current ones. Set `pipe._interrupt = True` in it to stop.
        callback_on_step_end_tensor_inputs: names of the tensors that the callback receives.
    """

    model_cpu_offload_seq = "text_encoder->unet->vae"
    _optional_components = ["vae"]
    _callback_tensor_inputs = ["latents"]

    # The name of the condition in the model's forward, and in callbacks.
    _condition_argument: str | None = None
    _condition_name: str | None = None

    @check_arguments
    def _set_up(
        self,
        unet: Denoiser,
        scheduler: SchedulerMixin,
        vae: Autoencoder | None,
        latent_scale: Annotated[float | None, Option(**LATENT_SCALE)],
        **others,
    ):
        model = unwrap_model(unet)
        conditions = required_conditions(model)
        if set(conditions) != {self._condition_argument} - {None}:
            needs = ", ".join(f"{argument} ({option})" for argument, option in conditions.items()) or "no condition"
            right = _PIPELINES.get(frozenset(conditions))
            raise UserError(
                f"{type(self).__name__} passes its model {self._condition_argument or 'no condition'}, but this "
                f"{type(model).__name__} takes {needs}{f'; use {right}' if right else ''}"
            )
        check_channels(model, vae)
        check_scheduler(scheduler, model)
        self.register_modules(unet=unet, scheduler=scheduler, vae=vae, **others)
        self.register_to_config(latent_scale=latent_scale)
        self.image_processor = VaeImageProcessor()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        return load_complete_pipeline(cls, super().from_pretrained, pretrained_model_name_or_path, **kwargs)

    @property
    def guidance_scale(self) -> float:
        return self._guidance_scale

    @property
    def guidance_rescale(self) -> float:
        return self._guidance_rescale

    @property
    def do_classifier_free_guidance(self) -> bool:
        return self._guidance_scale > 1

    @property
    def num_timesteps(self) -> int:
        return self._num_timesteps

    @property
    def interrupt(self) -> bool:
        return self._interrupt

    def _check_inputs(self, batch_size: int, generator: Generators, output_type: str, tensor_inputs: Sequence[str]):
        check_scheduler(self.scheduler, unwrap_model(self.unet))
        check_size("batch_size", batch_size)
        accepted = self._callback_tensor_inputs
        if output_type not in OUTPUT_TYPES:
            raise UserError(f"output_type must be one of {OUTPUT_TYPES}, got {output_type!r}")
        if not set(accepted).issuperset(tensor_inputs):
            raise UserError(f"callback_on_step_end_tensor_inputs must be among {accepted}, got {tensor_inputs}")
        if isinstance(generator, list) and len(generator) != batch_size:
            raise UserError(f"generator must be one generator, or a list with one for each of the {batch_size} images")

    def _denoise(
        self,
        latents: torch.Tensor,
        condition: torch.Tensor | None,
        timesteps: torch.Tensor,
        eta: float,
        generator: Generators,
        callback_on_step_end: Callback | None,
        callback_on_step_end_tensor_inputs: Sequence[str],
    ) -> torch.Tensor:
        """Run all steps. With guidance, the first half of `condition` is the unconditional one."""
        self._interrupt = False
        self._num_timesteps = len(timesteps)
        accepted = inspect.signature(self.scheduler.step).parameters
        step_arguments = {k: v for k, v in {"eta": eta, "generator": generator}.items() if k in accepted}
        with self.progress_bar(total=len(timesteps)) as progress_bar:
            for i, (t, t_on_device) in enumerate(zip(timesteps, timesteps.to(latents.device))):
                output = self._predict(latents, t, t_on_device, condition)
                latents = self.scheduler.step(output, t, latents, **step_arguments, return_dict=False)[0]
                if callback_on_step_end is not None:
                    tensors = {"latents": latents, self._condition_name: condition}
                    inputs = {name: tensors[name] for name in callback_on_step_end_tensor_inputs}
                    tensors |= callback_on_step_end(self, i, t, inputs)
                    latents, condition = tensors["latents"], tensors[self._condition_name]
                progress_bar.update()
                if self.interrupt:
                    break
        return latents

    def _predict(
        self, latents: torch.Tensor, t: torch.Tensor, t_on_device: torch.Tensor, condition: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the model output for the scheduler's step, with guidance applied."""
        guided = self.do_classifier_free_guidance
        sample = scale_model_input(self.scheduler, torch.cat([latents] * 2) if guided else latents, t)
        arguments = {} if self._condition_argument is None else {self._condition_argument: condition}
        if not isinstance(unwrap_model(self.unet), UNet2DModel):
            arguments.setdefault("encoder_hidden_states", None)  # a UNet2DConditionModel requires the argument
        output = self.unet(sample, t_on_device, **arguments, return_dict=False)[0]
        mean, variance = output.tensor_split([latents.shape[1]], dim=1)
        if guided:
            unconditional, conditional = mean.chunk(2)
            mean = unconditional + self.guidance_scale * (conditional - unconditional)
            if self.guidance_rescale > 0:
                mean = _rescaled(mean, conditional, self.guidance_rescale)
            variance = variance.chunk(2)[1]
        return torch.cat([mean, variance], dim=1) if uses_predicted_variance(self.scheduler) else mean

    def _timesteps(
        self, num_inference_steps: int, timesteps: list[float] | None, sigmas: list[float] | None
    ) -> torch.Tensor:
        """Set the scheduler's timesteps. They stay on the CPU: schedulers read their values in each step."""
        given = {name: v for name, v in {"timesteps": timesteps, "sigmas": sigmas}.items() if v is not None}
        if given:
            check_schedule(self.scheduler, given)
            self.scheduler.set_timesteps(**given, device="cpu")
        else:
            set_timesteps(self.scheduler, num_inference_steps)
        return self.scheduler.timesteps

    def _initial_latents(
        self,
        batch_size: int,
        height: int | None,
        width: int | None,
        generator: Generators,
        latents: torch.Tensor | None,
    ) -> torch.Tensor:
        model, factor = unwrap_model(self.unet), vae_factor(self.vae)
        if latents is not None and latents.ndim == 4:
            height, width = height or latents.shape[2] * factor, width or latents.shape[3] * factor
        height, width = self.image_size(height, width, batch_size)
        shape = (batch_size, model.config.in_channels, height // factor, width // factor)
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=self._execution_device, dtype=model.dtype)
        elif tuple(latents.shape) != shape:
            raise UserError(f"latents must have shape {shape}, got {tuple(latents.shape)}")
        return latents.to(self._execution_device, model.dtype) * initial_noise_scale(self.scheduler)

    @check_arguments
    def image_size(self, height: Side = None, width: Side = None, batch_size: int = 1) -> tuple[int, int]:
        """
        Return the height and width of the images. None means the size that the model was trained for.

        Raise a `UserError` if a batch of such images cannot fit into the memory.
        """
        model, factor = unwrap_model(self.unet), vae_factor(self.vae)
        if height is None or width is None:
            size = model.config.sample_size
            if size is None:
                raise UserError(f"pass height and width: this {type(model).__name__} has no sample_size")
            default_height, default_width = size if isinstance(size, tuple | list) else (size, size)
            return self.image_size(height or default_height * factor, width or default_width * factor, batch_size)
        check_size("height", height, size_multiple(model) * factor)
        check_size("width", width, size_multiple(model) * factor)
        if self._execution_device.type == "cpu":  # on other devices torch raises an error
            size = batch_size * height * width * bytes_per_pixel(model, factor)
            check_memory(f"{batch_size} images of {height} x {width} pixels", size)
        return height, width

    def _to_output(self, latents: torch.Tensor, output_type: str, return_dict: bool) -> ImagePipelineOutput | tuple:
        """Decode the latents and free the models."""
        check_finite(latents)
        images = latents
        if self.vae is not None and output_type != "latent":
            images = images / (self.config.latent_scale or self.vae.config.scaling_factor)
            if self.vae.config.get("shift_factor") is not None:
                images = images + self.vae.config.shift_factor
            images = self.vae.decode(images.to(self.vae.dtype), return_dict=False)[0]
            check_finite(images)
        images = self.image_processor.postprocess(images, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    @check_arguments
    def set_guidance(
        self,
        guidance_scale: Annotated[float, Option(at_least=0, at_most=1000)],
        guidance_rescale: Annotated[float, Option(at_least=0, at_most=1)] = 0.0,
    ):
        """Set the guidance as in diffusers: it is on if the scale is above 1."""
        self._guidance_scale, self._guidance_rescale = guidance_scale, guidance_rescale


def check_finite(tensor: torch.Tensor):
    """Raise `NonFiniteImages` for NaN or infinite values. Only this check waits for the device during sampling."""
    if not tensor.isfinite().all():
        raise NonFiniteImages(
            f"the generated images are not finite: training diverged, or the values are too large for {tensor.dtype}"
        )


def _rescaled(guided: torch.Tensor, conditional: torch.Tensor, amount: float) -> torch.Tensor:
    """Rescale guidance to the contrast of the conditional prediction (arXiv 2305.08891, section 3.4)."""
    dims = tuple(range(1, guided.ndim))
    contrast = conditional.std(dim=dims, keepdim=True) / guided.std(dim=dims, keepdim=True)
    return guided * (amount * contrast + 1 - amount)
