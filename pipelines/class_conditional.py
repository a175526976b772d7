"""Images of classes, which are asked for by number or by name."""

import numbers
from collections.abc import Iterable, Mapping, Sequence

import torch
from diffusers import ImagePipelineOutput, SchedulerMixin

from scalelong_diffusers.errors import did_you_mean
from scalelong_diffusers.pipelines.base import Callback, Generators, SamplingPipeline
from scalelong_diffusers.pipelines.compatibility import Autoencoder, Denoiser, check_size, unwrap_model


class ScaleLongClassConditionalPipeline(SamplingPipeline):
    """
    Samples a model of classes.

    Args:
        unet: a U-Net of diffusers or a model of scalelong_diffusers, with `num_class_embeds`.
        scheduler: any scheduler of diffusers that fits.
        vae: what decodes the model's latents; None where it makes pixels.
        class_names: the names of the classes, in their order, or a dict from number to name.
        null_class: the class that stands for none, which guidance needs: the last one, `num_class_embeds - 1`, or None
            for a model that was trained without.
        latent_scale: the factor on the latents that the model was trained with, where it is not that of the vae.

    ```python
    pipe = ScaleLongClassConditionalPipeline(unet, DDIMScheduler(), class_names=["cat", "dog"], null_class=2)
    images = pipe(["dog", 0], guidance_scale=4).images
    ```
    """

    _callback_tensor_inputs = ["latents", "class_labels"]
    _condition_argument = "class_labels"
    _condition_name = "class_labels"

    def __init__(
        self,
        unet: Denoiser,
        scheduler: SchedulerMixin,
        vae: Autoencoder | None = None,
        class_names: Sequence[str] | Mapping[str, str] | None = None,
        null_class: int | None = None,
        latent_scale: float | None = None,
    ):
        super().__init__()
        self._set_up(unet, scheduler, vae, latent_scale)
        num_embeds = unwrap_model(unet).config.num_class_embeds
        if null_class is not None and (isinstance(null_class, bool) or null_class != num_embeds - 1):
            raise ValueError(
                f"null_class must be the last class, {num_embeds - 1} for num_class_embeds={num_embeds}, or None; got "
                f"{null_class!r}"
            )
        names = _class_names(class_names, num_embeds - (null_class is not None))
        # A dict, because diffusers takes a list in the config of a pipeline for one of its components.
        self.register_to_config(class_names=names, null_class=null_class)

    @property
    def num_classes(self) -> int:
        """How many classes there are, without the one that stands for none."""
        return unwrap_model(self.unet).config.num_class_embeds - (self.config.null_class is not None)

    def class_ids(self, class_labels: int | str | Iterable[int | str] | torch.Tensor) -> list[int]:
        """The numbers of classes that are given by number or by name."""
        if isinstance(class_labels, torch.Tensor):
            class_labels = class_labels.tolist()
        is_one = isinstance(class_labels, str) or not isinstance(class_labels, Iterable)
        labels = [class_labels] if is_one else list(class_labels)
        if not labels:
            raise ValueError("class_labels is empty; give at least one class")
        return [self._class_id(label) for label in labels]

    def _class_id(self, label: int | str) -> int:
        if isinstance(label, str):
            return self._class_of_name(label)
        if isinstance(label, bool) or not isinstance(label, numbers.Integral):
            raise TypeError(f"a class is given by its number or its name, got {label!r}")
        null = self.config.null_class
        if not 0 <= label < self.num_classes and label != null:
            none = "" if null is None else f" (or {null}, no class)"
            raise ValueError(f"class {label} is out of range; accepted: 0..{self.num_classes - 1}{none}")
        return int(label)

    def _class_of_name(self, name: str) -> int:
        if self.config.class_names is None:
            raise ValueError(
                f"class {name!r} was given by name, but this pipeline has no class_names; give its number"
            )
        ids = [int(i) for i, known in self.config.class_names.items() if known == name]
        if not ids:
            known = list(self.config.class_names.values())
            some = ", ".join(known[:10]) + (f" and {len(known) - 10} more" if len(known) > 10 else "")
            raise ValueError(f"unknown class {name!r}{did_you_mean(name, known)}; accepted: {some}, or their numbers")
        if len(ids) > 1:
            raise ValueError(f"{name!r} is the name of several classes: give one of the numbers {sorted(ids)}")
        return ids[0]

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | str | Iterable[int | str] | torch.Tensor,
        num_inference_steps: int = 50,
        timesteps: list[int] | None = None,
        sigmas: list[float] | None = None,
        guidance_scale: float = 1.0,
        guidance_rescale: float = 0.0,
        num_images_per_prompt: int = 1,
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
        """
        Make images of classes.

        Args:
            class_labels: the number or name of a class, or one for each image.
            guidance_scale: as in diffusers: `uncond + guidance_scale * (cond - uncond)`; 1 is no guidance.
            guidance_rescale: how far to take back the contrast that guidance adds, from 0 to 1.
            num_images_per_prompt: how many images to make of each label.

        [`SamplingPipeline`] says what the other arguments are.
        """
        check_size("num_images_per_prompt", num_images_per_prompt, 1)
        self.set_guidance(guidance_scale, guidance_rescale)
        labels = torch.tensor(self.class_ids(class_labels), device=self._execution_device)
        labels = labels.repeat_interleave(num_images_per_prompt)
        return self._sample(
            len(labels),
            self._with_null_class(labels) if self.do_classifier_free_guidance else labels,
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

    def set_guidance(self, guidance_scale: float, guidance_rescale: float = 0.0):
        super().set_guidance(guidance_scale, guidance_rescale)
        if self.do_classifier_free_guidance and self.config.null_class is None:
            raise ValueError(
                f"guidance_scale={self.guidance_scale} needs a null class, and this pipeline has none: take 1, or make"
                " the pipeline with null_class, if the model has learned one"
            )

    def _with_null_class(self, labels: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full_like(labels, self.config.null_class), labels])


def _class_names(names: Sequence[str] | Mapping[str, str] | None, num_classes: int) -> dict[str, str] | None:
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Mapping | Sequence):
        raise TypeError(f"class_names must be a list of texts, or a dict from number to text; got {names!r}")
    numbered = names if isinstance(names, Mapping) else dict(enumerate(names))
    if wrong := [name for name in numbered.values() if not isinstance(name, str)]:
        raise TypeError(f"class_names must be texts, got {wrong[0]!r}")
    numbered = {str(i): name for i, name in numbered.items()}
    if set(numbered) != {str(i) for i in range(num_classes)}:
        raise ValueError(
            f"class_names must name the classes 0..{num_classes - 1} of the model (num_class_embeds, without the null "
            f"class), got {len(numbered)}: {', '.join(map(str, list(numbered.values())[:5]))}..."
        )
    return dict(sorted(numbered.items(), key=lambda item: int(item[0])))
