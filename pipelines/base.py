"""The sampling loop that our pipelines share, for any model, condition and scheduler."""

import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput, SchedulerMixin
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor

from scalelong_diffusers.download import damaged_file_errors
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.models.mixin import HubMixin
from scalelong_diffusers.pipelines.compatibility import (
    Autoencoder,
    Denoiser,
    accepts_text,
    check_channels,
    check_scheduler,
    check_size,
    required_conditions,
    size_multiple,
    unwrap_model,
    uses_predicted_variance,
    vae_factor,
)
from scalelong_diffusers.pipelines.loading import check_components


OUTPUT_TYPES = ("pil", "np", "pt", "latent")

Generators = torch.Generator | list[torch.Generator] | None
Callback = Callable[[DiffusionPipeline, int, torch.Tensor, dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class NonFiniteImages(UserError):
    """The generated images have NaN or infinite values. diffusers would return black images."""


class SamplingPipeline(HubMixin, DiffusionPipeline):
    """
    Base class of our pipelines. A subclass adds its condition: one tensor that the model gets at every step.

    Arguments that all `__call__` methods share:
        num_inference_steps: number of steps of the scheduler.
        timesteps, sigmas: custom timesteps or sigmas, for schedulers that support them.
        eta: amount of noise that DDIM and related schedulers add, from 0 (none) to 1 (as much as DDPM).
        generator: one generator, or a list with one per image, which makes an image independent of its batch.
        latents: initial noise of variance 1; drawn from `generator` by default.
        height, width: size of the images in pixels; by default the size that the model was trained for.
        output_type: `"pil"`, `"np"`, `"pt"` or `"latent"`.
        return_dict: return an `ImagePipelineOutput` instead of a tuple.
        callback_on_step_end: called as `callback(pipe, step, timestep, tensors)` after each step. The tensors that it
            returns replace the current ones. Set `pipe._interrupt = True` in it to stop.
        callback_on_step_end_tensor_inputs: names of the tensors that the callback gets.
    """

    model_cpu_offload_seq = "text_encoder->unet->vae"
    _optional_components = ["vae"]
    _callback_tensor_inputs = ["latents"]

    # The name of the condition in the model's forward, and in callbacks.
    _condition_argument: str | None = None
    _condition_name: str | None = None

    def _set_up(
        self, unet: Denoiser, scheduler: SchedulerMixin, vae: Autoencoder | None, latent_scale: float | None, **others
    ):
        self._check_unet(unet)
        check_channels(unwrap_model(unet), vae)
        check_scheduler(scheduler, unwrap_model(unet))
        if latent_scale is not None and not latent_scale > 0:
            raise UserError(f"latent_scale must be above 0, or None to use the vae's; got {latent_scale!r}")
        self.register_modules(unet=unet, scheduler=scheduler, vae=vae, **others)
        self.register_to_config(latent_scale=latent_scale)
        self.image_processor = VaeImageProcessor()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        check_components(cls, pretrained_model_name_or_path, kwargs)
        with damaged_file_errors(pretrained_model_name_or_path):
            return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    def _check_unet(self, unet: Denoiser):
        name, model = type(self).__name__, unwrap_model(unet)
        if not isinstance(model, Denoiser):
            raise UserError(
                f"{name} needs a diffusers U-Net or a model of scalelong_diffusers as unet, got {type(model).__name__}"
            )
        conditions = required_conditions(model)
        if set(conditions) != {self._condition_argument} - {None}:
            needs = ", ".join(f"{argument} ({option})" for argument, option in conditions.items()) or "no condition"
            raise UserError(
                f"{name} gives its model {self._condition_argument or 'no condition'}, but this "
                f"{type(model).__name__} takes {needs}{_pipeline_for(set(conditions))}"
            )

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

    def _sample(
        self,
        batch_size: int,
        condition: torch.Tensor | None,
        *,
        num_inference_steps: int,
        timesteps: list[int] | None,
        sigmas: list[float] | None,
        eta: float,
        generator: Generators,
        latents: torch.Tensor | None,
        height: int | None,
        width: int | None,
        output_type: str,
        return_dict: bool,
        callback_on_step_end: Callback | None,
        callback_on_step_end_tensor_inputs: Sequence[str],
    ) -> ImagePipelineOutput | tuple:
        """Denoise. With guidance, the first half of `condition` is the unconditional one."""
        check_scheduler(self.scheduler, unwrap_model(self.unet))
        _check_generators(generator, batch_size)
        self._check_outputs(output_type, callback_on_step_end_tensor_inputs)
        self._interrupt = False
        timesteps = self._timesteps(num_inference_steps, timesteps, sigmas)
        latents = self._initial_latents(batch_size, height, width, generator, latents)
        step_arguments = self._step_arguments(eta, generator)
        self._num_timesteps = len(timesteps)
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
        images = self._decode(latents, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _predict(
        self, latents: torch.Tensor, t: torch.Tensor, t_on_device: torch.Tensor, condition: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the model output for the scheduler's step, with guidance applied."""
        guided = self.do_classifier_free_guidance
        sample = self.scheduler.scale_model_input(torch.cat([latents] * 2) if guided else latents, t)
        output = self.unet(sample, t_on_device, **self._model_arguments(condition), return_dict=False)[0]
        mean, variance = output.tensor_split([latents.shape[1]], dim=1)
        if guided:
            unconditional, conditional = mean.chunk(2)
            mean = unconditional + self.guidance_scale * (conditional - unconditional)
            if self.guidance_rescale > 0:
                mean = _rescaled(mean, conditional, self.guidance_rescale)
            variance = variance.chunk(2)[1]
        return torch.cat([mean, variance], dim=1) if uses_predicted_variance(self.scheduler) else mean

    def _model_arguments(self, condition: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
        arguments = {} if self._condition_argument is None else {self._condition_argument: condition}
        if accepts_text(unwrap_model(self.unet)):
            arguments.setdefault("encoder_hidden_states", None)
        return arguments

    def _timesteps(
        self, num_inference_steps: int, timesteps: list[int] | None, sigmas: list[float] | None
    ) -> torch.Tensor:
        """Set the scheduler's timesteps. They stay on the CPU: schedulers read their values in each step."""
        given = {"timesteps": timesteps, "sigmas": sigmas}
        given = {name: values for name, values in given.items() if values is not None}
        if len(given) > 1:
            raise UserError("give either timesteps or sigmas, not both")
        if not given:
            check_size("num_inference_steps", num_inference_steps, 1)
            given = {"num_inference_steps": num_inference_steps}
        (name,) = given
        if name not in inspect.signature(self.scheduler.set_timesteps).parameters:
            raise UserError(f"{type(self.scheduler).__name__} takes no custom {name}; give num_inference_steps")
        self.scheduler.set_timesteps(**given, device="cpu")
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
        height, width = self.image_size(height, width)
        shape = (batch_size, model.config.in_channels, height // factor, width // factor)
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=self._execution_device, dtype=model.dtype)
        elif tuple(latents.shape) != shape:
            raise UserError(f"latents must have shape {shape}, got {tuple(latents.shape)}")
        return latents.to(self._execution_device, model.dtype) * self.scheduler.init_noise_sigma

    def image_size(self, height: int | None = None, width: int | None = None) -> tuple[int, int]:
        """Return the height and width of the images, with the model's own size for what is None."""
        model, factor = unwrap_model(self.unet), vae_factor(self.vae)
        if height is None or width is None:
            size = model.config.sample_size
            if size is None:
                raise UserError(f"give height and width: this {type(model).__name__} has no sample_size")
            default_height, default_width = (size, size) if isinstance(size, int) else size
            height = default_height * factor if height is None else height
            width = default_width * factor if width is None else width
        check_size("height", height, size_multiple(model) * factor)
        check_size("width", width, size_multiple(model) * factor)
        return height, width

    def _step_arguments(self, eta: float, generator: Generators) -> dict[str, Any]:
        """Return eta and generator if the scheduler's step accepts them."""
        accepted = inspect.signature(self.scheduler.step).parameters
        return {name: value for name, value in (("eta", eta), ("generator", generator)) if name in accepted}

    def _decode(self, latents: torch.Tensor, output_type: str):
        check_finite(latents)
        if output_type == "latent":
            return latents
        if self.vae is None:
            return self.image_processor.postprocess(latents, output_type)
        latents = latents / (self.config.latent_scale or self.vae.config.scaling_factor)
        if self.vae.config.get("shift_factor") is not None:
            latents = latents + self.vae.config.shift_factor
        images = self.vae.decode(latents.to(self.vae.dtype), return_dict=False)[0]
        check_finite(images)
        return self.image_processor.postprocess(images, output_type)

    def set_guidance(self, guidance_scale: float, guidance_rescale: float = 0.0):
        """Set the guidance as in diffusers: it is on if the scale is above 1."""
        if not (isinstance(guidance_scale, numbers.Real) and 0 <= guidance_scale < math.inf):
            raise UserError(f"guidance_scale must be a number of at least 0 (1: no guidance), got {guidance_scale!r}")
        if not (isinstance(guidance_rescale, numbers.Real) and 0 <= guidance_rescale <= 1):
            raise UserError(f"guidance_rescale must be a number in [0, 1], got {guidance_rescale!r}")
        self._guidance_scale, self._guidance_rescale = guidance_scale, guidance_rescale

    def _check_outputs(self, output_type: str, tensor_inputs: Sequence[str]):
        if output_type not in OUTPUT_TYPES:
            raise UserError(f"output_type must be one of {', '.join(OUTPUT_TYPES)}, got {output_type!r}")
        channels = unwrap_model(self.unet).config.in_channels if self.vae is None else self.vae.config.out_channels
        if output_type == "pil" and channels not in (1, 3, 4):
            raise UserError(f"images with {channels} channels cannot be PIL images: use output_type 'np' or 'pt'")
        if unknown := [name for name in tensor_inputs if name not in self._callback_tensor_inputs]:
            accepted = ", ".join(self._callback_tensor_inputs)
            raise UserError(f"callback_on_step_end_tensor_inputs must be among {accepted}; got {unknown[0]!r}")


def check_finite(tensor: torch.Tensor):
    """Check generated images. This is the only place where sampling waits for the device."""
    if not tensor.isfinite().all():
        raise NonFiniteImages(
            f"the generated images are not finite: training diverged, or the values are too large for {tensor.dtype}"
        )


def _pipeline_for(conditions: set[str]) -> str:
    names = {
        frozenset(): "ScaleLongUnconditionalPipeline",
        frozenset({"class_labels"}): "ScaleLongClassConditionalPipeline",
        frozenset({"encoder_hidden_states"}): "ScaleLongTextToImagePipeline",
    }
    name = names.get(frozenset(conditions))
    return f"; use {name}" if name else ""


def _check_generators(generator: Generators, batch_size: int):
    if generator is None:
        return
    generators = generator if isinstance(generator, list) else [generator] * batch_size
    if len(generators) != batch_size or not all(isinstance(one, torch.Generator) for one in generators):
        raise UserError(
            f"generator must be a torch.Generator, or a list with one for each of the {batch_size} images; got "
            f"{generator!r}"
        )


def _rescaled(guided: torch.Tensor, conditional: torch.Tensor, amount: float) -> torch.Tensor:
    """Rescale guidance to the contrast of the conditional prediction (arXiv 2305.08891, section 3.4)."""
    dims = tuple(range(1, guided.ndim))
    contrast = conditional.std(dim=dims, keepdim=True) / guided.std(dim=dims, keepdim=True)
    return guided * (amount * contrast + 1 - amount)
