"""The sampler that our pipelines share: noise becomes images, whatever the model, the condition and the scheduler."""

import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput, SchedulerMixin
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor
from torch import nn

from scalelong_diffusers.download import damaged_file_errors
from scalelong_diffusers.models.hub_mixin import HubMixin
from scalelong_diffusers.pipelines.compatibility import (
    Autoencoder,
    Denoiser,
    accepts_text,
    check_channels,
    check_scheduler,
    check_size,
    check_tensor,
    required_conditions,
    size_multiple,
    unwrap_model,
    uses_predicted_variance,
    vae_factor,
)
from scalelong_diffusers.pipelines.source import check_components


OUTPUT_TYPES = ("pil", "np", "pt", "latent")

Generators = torch.Generator | list[torch.Generator] | None
Callback = Callable[[DiffusionPipeline, int, torch.Tensor, dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class NonFiniteImages(ValueError):
    """Of what a model makes, in a sentence; diffusers would return black images."""


class SamplingPipeline(HubMixin, DiffusionPipeline):
    """
    Base of our pipelines. What a subclass adds is its condition: one tensor, which the model is given at every step.

    Arguments that the `__call__` of all of them share:
        num_inference_steps: how many steps the scheduler takes.
        timesteps, sigmas: the steps themselves instead, with schedulers that can be told.
        eta: of DDIM and its kin: how much noise is added, from 0 (none) to 1 (as much as DDPM).
        generator: one, or a list with one for each image, which makes an image independent of its batch.
        latents: the noise to start from instead, of variance 1.
        height, width: of the images, in pixels; those that the model was made for by default.
        output_type: `"pil"`, `"np"`, `"pt"` or `"latent"`.
        return_dict: whether to return an `ImagePipelineOutput` or a tuple.
        callback_on_step_end: called as `callback(pipe, step, timestep, tensors)` after each step; what it returns
            replaces those tensors. Set `pipe._interrupt = True` in it to stop.
        callback_on_step_end_tensor_inputs: which tensors it is given.
    """

    model_cpu_offload_seq = "text_encoder->unet->vae"
    _optional_components = ["vae"]
    _callback_tensor_inputs = ["latents"]

    # What the condition is called in the model's forward, and in callbacks.
    _condition_argument: str | None = None
    _condition_name: str | None = None

    def _set_up(
        self, unet: Denoiser, scheduler: SchedulerMixin, vae: Autoencoder | None, latent_scale: float | None, **others
    ):
        self._check_unet(unet)
        check_channels(unwrap_model(unet), vae)
        check_scheduler(scheduler, unwrap_model(unet))
        if latent_scale is not None and not (isinstance(latent_scale, numbers.Real) and latent_scale > 0):
            raise ValueError(
                f"latent_scale must be a number above 0, or None for that of the vae; got {latent_scale!r}"
            )
        self.register_modules(unet=unet, scheduler=scheduler, vae=vae, **others)
        self.register_to_config(latent_scale=latent_scale)
        self.image_processor = VaeImageProcessor()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        check_components(cls, pretrained_model_name_or_path, kwargs)
        with damaged_file_errors(pretrained_model_name_or_path):
            return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    def _check_unet(self, unet: Denoiser):
        name = type(self).__name__
        if not isinstance(unet, nn.Module) or not isinstance(unwrap_model(unet), Denoiser):
            raise TypeError(
                f"{name} needs a U-Net of diffusers or a model of scalelong_diffusers as unet, got {unet!r}"
            )
        conditions = required_conditions(unwrap_model(unet))
        if set(conditions) != {self._condition_argument} - {None}:
            needs = ", ".join(f"{argument} ({option})" for argument, option in conditions.items()) or "no condition"
            raise ValueError(
                f"{name} gives a model {self._condition_argument or 'no condition'}, and this "
                f"{type(unwrap_model(unet)).__name__} takes {needs}{_pipeline_for(set(conditions))}"
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
        """From noise to images; `condition` holds that of no guidance before that of guidance, where there is one."""
        check_scheduler(self.scheduler, unwrap_model(self.unet))
        _check_generators(generator, batch_size)
        self._check_outputs(output_type, callback_on_step_end_tensor_inputs)
        self._interrupt = False
        timesteps = self._timesteps(num_inference_steps, timesteps, sigmas)
        latents = self._initial_latents(batch_size, height, width, generator, latents)
        step_arguments = self._step_arguments(eta, generator)
        self._num_timesteps = len(timesteps)
        with self.progress_bar(total=len(timesteps)) as progress_bar:
            for i, t in enumerate(timesteps):
                output = self._predict(latents, t, condition)
                latents = self.scheduler.step(output, t, latents, **step_arguments, return_dict=False)[0]
                if callback_on_step_end is not None:
                    tensors = {"latents": latents, self._condition_name: condition}
                    asked = {name: tensors[name] for name in callback_on_step_end_tensor_inputs}
                    tensors |= callback_on_step_end(self, i, t, asked)
                    latents, condition = tensors["latents"], tensors[self._condition_name]
                progress_bar.update()
                if self.interrupt:
                    break
        images = self._decode(latents, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _predict(self, latents: torch.Tensor, t: torch.Tensor, condition: torch.Tensor | None) -> torch.Tensor:
        """What the scheduler's step needs of the model: its output, guided where that is asked for."""
        guided = self.do_classifier_free_guidance
        sample = self.scheduler.scale_model_input(torch.cat([latents] * 2) if guided else latents, t)
        output = self.unet(sample, t, **self._model_arguments(condition), return_dict=False)[0]
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
        device = self._execution_device
        given = {"timesteps": timesteps, "sigmas": sigmas}
        given = {name: values for name, values in given.items() if values is not None}
        if len(given) > 1:
            raise ValueError("timesteps and sigmas were both given; the scheduler takes one of them")
        if not given:
            check_size("num_inference_steps", num_inference_steps, 1)
            self.scheduler.set_timesteps(num_inference_steps, device=device)
            return self.scheduler.timesteps
        (name,) = given
        if name not in inspect.signature(self.scheduler.set_timesteps).parameters:
            raise ValueError(f"{type(self.scheduler).__name__} takes no {name} of one's own; give num_inference_steps")
        self.scheduler.set_timesteps(**given, device=device)
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
        if latents is not None:
            check_tensor("latents", latents)
        if latents is not None and latents.ndim == 4:
            height, width = height or latents.shape[2] * factor, width or latents.shape[3] * factor
        height, width = self.image_size(height, width)
        shape = (batch_size, model.config.in_channels, height // factor, width // factor)
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=self._execution_device, dtype=model.dtype)
        elif tuple(latents.shape) != shape:
            raise ValueError(f"latents must be of shape {shape}, got {tuple(latents.shape)}")
        return latents.to(self._execution_device, model.dtype) * self.scheduler.init_noise_sigma

    def image_size(self, height: int | None = None, width: int | None = None) -> tuple[int, int]:
        """The height and width of the images that are made when these are asked for."""
        model, factor = unwrap_model(self.unet), vae_factor(self.vae)
        if height is None or width is None:
            if model.config.sample_size is None:
                raise ValueError(f"height and width must be given: the {type(model).__name__} has no sample_size")
            size = model.config.sample_size
            default_height, default_width = (size, size) if isinstance(size, int) else size
            height = default_height * factor if height is None else height
            width = default_width * factor if width is None else width
        for name, value in (("height", height), ("width", width)):
            check_size(name, value, size_multiple(model) * factor)
        return height, width

    def _step_arguments(self, eta: float, generator: Generators) -> dict[str, Any]:
        """eta and generator, for a scheduler whose step takes them."""
        accepted = inspect.signature(self.scheduler.step).parameters
        return {name: value for name, value in (("eta", eta), ("generator", generator)) if name in accepted}

    def _decode(self, latents: torch.Tensor, output_type: str):
        _check_finite(latents)
        if output_type == "latent":
            return latents
        if self.vae is None:
            return self.image_processor.postprocess(latents, output_type)
        latents = latents / (self.config.latent_scale or self.vae.config.scaling_factor)
        if self.vae.config.get("shift_factor") is not None:
            latents = latents + self.vae.config.shift_factor
        images = self.vae.decode(latents.to(self.vae.dtype), return_dict=False)[0]
        _check_finite(images)
        return self.image_processor.postprocess(images, output_type)

    def set_guidance(self, guidance_scale: float, guidance_rescale: float = 0.0):
        """Guidance as in diffusers: above 1 it is on, and 1 is off. What a call can not do with is refused."""
        for name, value, high in (
            ("guidance_scale", guidance_scale, math.inf),
            ("guidance_rescale", guidance_rescale, 1),
        ):
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or not 0 <= value <= high:
                accepted = "of at least 0 (1 is no guidance)" if high == math.inf else "in [0, 1]"
                raise ValueError(f"{name} must be a number {accepted}, got {value!r}")
        self._guidance_scale, self._guidance_rescale = guidance_scale, guidance_rescale

    def _check_outputs(self, output_type: str, tensor_inputs: Sequence[str]):
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"output_type must be one of {', '.join(OUTPUT_TYPES)}, got {output_type!r}")
        channels = unwrap_model(self.unet).config.in_channels if self.vae is None else self.vae.config.out_channels
        if output_type == "pil" and channels not in (1, 3, 4):
            raise ValueError(f"images of {channels} channels can not be PIL images: take output_type 'np' or 'pt'")
        for name in tensor_inputs:
            if name not in self._callback_tensor_inputs:
                accepted = ", ".join(self._callback_tensor_inputs)
                raise ValueError(f"callback_on_step_end_tensor_inputs may be of {accepted}; got {name!r}")


def _check_finite(tensor: torch.Tensor):
    if not tensor.isfinite().all():
        raise NonFiniteImages(
            "what the model makes is not finite: it fell apart in training, or its numbers are too large for "
            f"{tensor.dtype}"
        )


def _pipeline_for(conditions: set[str]) -> str:
    names = {
        frozenset(): "ScaleLongUnconditionalPipeline",
        frozenset({"class_labels"}): "ScaleLongClassConditionalPipeline",
        frozenset({"encoder_hidden_states"}): "ScaleLongTextToImagePipeline",
    }
    name = names.get(frozenset(conditions))
    return f"; take {name}" if name else ""


def _check_generators(generator: Generators, batch_size: int):
    generators = generator if isinstance(generator, list) else [generator]
    for one in generators:
        if not isinstance(one, torch.Generator | None) or (one is None and generator is not None):
            raise TypeError(f"generator must be a torch.Generator or a list of them, got {one!r}")
    if isinstance(generator, list) and len(generator) != batch_size:
        raise ValueError(f"a list of generators has one for each image: {batch_size} are needed, got {len(generator)}")


def _rescaled(guided: torch.Tensor, conditional: torch.Tensor, amount: float) -> torch.Tensor:
    """Guidance that keeps the contrast of the conditional prediction (arXiv 2305.08891, section 3.4)."""
    dims = tuple(range(1, guided.ndim))
    contrast = conditional.std(dim=dims, keepdim=True) / guided.std(dim=dims, keepdim=True)
    return guided * (amount * contrast + 1 - amount)
