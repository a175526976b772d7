"""Class-conditional sampling, with classes given by number or name."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from diffusers import ImagePipelineOutput, SchedulerMixin

from scalelong_diffusers.errors import UserError, did_you_mean
from scalelong_diffusers.options import check_arguments
from scalelong_diffusers.pipelines.base import Callback, Count, Eta, Floats, Generators, SamplingPipeline, Side, Steps
from scalelong_diffusers.pipelines.compatibility import Autoencoder, Denoiser, unwrap_model


class ScaleLongClassConditionalPipeline(SamplingPipeline):
    """
    Pipeline for class-conditional image generation.

    Args:
        class_names: the names of the classes in order, or a dict from number to name.
        null_class: the class that means "no class", which guidance needs: the last one, `num_class_embeds - 1`, or
            None for a model that was trained without a null class.

    See [`SamplingPipeline`] for the other arguments.

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
        if null_class not in (None, num_embeds - 1):
            raise UserError(
                f"null_class must be None or the last class ({num_embeds - 1}, as num_class_embeds={num_embeds}), got "
                f"{null_class!r}"
            )
        names = None
        if class_names is not None:
            pairs = class_names.items() if isinstance(class_names, Mapping) else enumerate(class_names)
            numbered = {str(i): name for i, name in pairs}
            expected = [str(i) for i in range(num_embeds - (null_class is not None))]
            if set(numbered) != set(expected) or isinstance(class_names, str):
                raise UserError(
                    f"class_names must be texts for the classes 0..{len(expected) - 1} of the model "
                    f"(num_class_embeds, without the null class), got {len(numbered)}: {class_names!r:.100}"
                )
            names = {i: numbered[i] for i in expected}
        # A dict, because diffusers mistakes a list in a pipeline's config for a component; with text keys, as in JSON.
        self.register_to_config(class_names=names, null_class=null_class)

    @property
    def num_classes(self) -> int:
        """The number of classes without the null class."""
        return unwrap_model(self.unet).config.num_class_embeds - (self.config.null_class is not None)

    def class_title(self, class_id: int) -> str:
        """Return the name of a class, or its number if it has no name."""
        return (self.config.class_names or {}).get(str(class_id), str(class_id))

    def class_ids(self, class_labels: int | str | Iterable[int | str] | torch.Tensor) -> list[int]:
        """Return the numbers of classes that are given by number or name."""
        if isinstance(class_labels, torch.Tensor):
            class_labels = class_labels.tolist()
        is_one = isinstance(class_labels, str) or not isinstance(class_labels, Iterable)
        return [self._class_id(label) for label in ([class_labels] if is_one else class_labels)]

    def _class_id(self, label: int | str) -> int:
        names, null = self.config.class_names or {}, self.config.null_class
        ids = [int(i) for i, name in names.items() if name == label] if isinstance(label, str) else [label]
        if len(ids) == 1 and ids[0] in (*range(self.num_classes), null):
            return int(ids[0])
        problem = f"ambiguous ({sorted(ids)})" if len(ids) > 1 else f"unknown{did_you_mean(label, names.values())}"
        accepted = f"0..{self.num_classes - 1}" + ("" if null is None else f" (or {null}, no class)")
        some = ", ".join(list(names.values())[:10]) + (", ..." if len(names) > 10 else "")
        raise UserError(
            f"class {label!r} is {problem}; accepted: {accepted}{f', or the names {some}' if names else ''}"
        )

    @torch.no_grad()
    @check_arguments
    def __call__(
        self,
        class_labels: int | str | Iterable[int | str] | torch.Tensor,
        num_inference_steps: Steps = 50,
        timesteps: Floats = None,
        sigmas: Floats = None,
        guidance_scale: float = 1.0,
        guidance_rescale: float = 0.0,
        num_images_per_prompt: Count = 1,
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
        """
        Generate images of classes.

        Args:
            class_labels: the number or name of a class, or a list with one for each image.
            guidance_scale: as in diffusers: `uncond + guidance_scale * (cond - uncond)`; 1 turns it off.
            guidance_rescale: how far to restore the contrast that guidance changes, from 0 to 1.
            num_images_per_prompt: number of images per label.

        See [`SamplingPipeline`] for the other arguments.
        """
        self.set_guidance(guidance_scale, guidance_rescale)
        labels = torch.tensor(self.class_ids(class_labels), device=self._execution_device)
        labels = condition = labels.repeat_interleave(num_images_per_prompt)
        if self.do_classifier_free_guidance:
            condition = torch.cat([torch.full_like(labels, self.config.null_class), labels])
        self._check_inputs(len(labels), generator, output_type, callback_on_step_end_tensor_inputs)
        timesteps = self._timesteps(num_inference_steps, timesteps, sigmas)
        latents = self._initial_latents(len(labels), height, width, generator, latents)
        latents = self._denoise(
            latents, condition, timesteps, eta, generator, callback_on_step_end, callback_on_step_end_tensor_inputs
        )
        return self._to_output(latents, output_type, return_dict)

    def set_guidance(self, guidance_scale: float, guidance_rescale: float = 0.0):
        super().set_guidance(guidance_scale, guidance_rescale)
        if self.do_classifier_free_guidance and self.config.null_class is None:
            raise UserError(
                f"guidance_scale={self.guidance_scale} needs a null class, but this pipeline has none: use 1, or "
                "create the pipeline with null_class if the model was trained with one"
            )
