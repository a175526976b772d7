"""Sample numbered images into a folder. Image k depends only on the settings and k, so sampling can always resume."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import diffusers
import PIL.Image
import torch
from diffusers import SchedulerMixin
from huggingface_hub import try_to_load_from_cache
from tqdm import tqdm

from scalelong_diffusers.download import read_json
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import atomic_write, remove_leftovers, write_json
from scalelong_diffusers.image_files import read_image
from scalelong_diffusers.locks import locked
from scalelong_diffusers.noise import EDM_SCHEDULERS, FLOW_SCHEDULERS
from scalelong_diffusers.options import check_options, option
from scalelong_diffusers.pipelines.base import MAX_SIDE, MAX_STEPS, SamplingPipeline
from scalelong_diffusers.pipelines.class_conditional import ScaleLongClassConditionalPipeline
from scalelong_diffusers.pipelines.compatibility import set_timesteps
from scalelong_diffusers.pipelines.grids import draw_grid
from scalelong_diffusers.pipelines.loading import INDEX
from scalelong_diffusers.pipelines.text_to_image import ScaleLongTextToImagePipeline
from scalelong_diffusers.processes import processes, run_on_all_processes, run_on_main_process
from scalelong_diffusers.randomness import generator_for
from scalelong_diffusers.terminal import printable


SCHEDULERS = {
    "ddpm": ("DDPMScheduler", {}),
    "ddim": ("DDIMScheduler", {}),
    "dpm++": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++", "variance_type": None}),
    "sde-dpm++": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++", "variance_type": None}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler-a": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "lcm": ("LCMScheduler", {}),
    "pndm": ("PNDMScheduler", {}),
    "unipc": ("UniPCMultistepScheduler", {}),
}
# The schedulers of models that were trained without betas.
FLOW_MATCHING_SCHEDULERS = {
    "euler": ("FlowMatchEulerDiscreteScheduler", {}),
    "heun": ("FlowMatchHeunDiscreteScheduler", {}),
}
PRECONDITIONED_SCHEDULERS = {"dpm++": ("EDMDPMSolverMultistepScheduler", {}), "euler": ("EDMEulerScheduler", {})}
GRID_IMAGES = 64
MAX_IMAGES = 10_000_000
# Files next to the images: their settings and a grid of them.
SAMPLE_SETTINGS, SAMPLE_GRID = "sample.json", "grid.png"
WEIGHTS_SUFFIXES = (".safetensors", ".bin")
_END_OF_PNG = b"\0\0\0\0IEND\xaeB`\x82"


@dataclass(frozen=True)
class SampleConfig:
    """All settings that determine image k, except k itself."""

    model: str
    revision: str | None = option(None, "branch, tag or commit of the model on the Hub", metavar="NAME")
    prompt: tuple[str, ...] | None = option(None, "prompts, used in turn", metavar="TEXT")
    negative_prompt: str | None = option(None, "text to guide images away from", metavar="TEXT")
    class_labels: tuple[str, ...] | None = option(
        None, "names or numbers of classes, used in turn (default: all classes)", metavar="NAME"
    )
    scheduler: str | None = option(None, "scheduler (default: the model's own)", choices=SCHEDULERS)
    num_inference_steps: int = option(50, "number of denoising steps", at_least=1, at_most=MAX_STEPS, metavar="N")
    guidance_scale: float | None = option(
        None,
        "classifier-free guidance as in diffusers; 1 turns it off (default: the pipeline's)",
        at_least=0,
        at_most=1000,
        metavar="W",
    )
    seed: int = option(0, "random seed", at_least=0, at_most=2**63 - 1, metavar="N")
    height: int | None = option(None, "height of the images", at_least=1, at_most=MAX_SIDE, metavar="PIXELS")
    width: int | None = option(None, "width of the images", at_least=1, at_most=MAX_SIDE, metavar="PIXELS")
    dtype: str = option("float32", "dtype of the weights", choices=("float32", "bfloat16", "float16"))

    def __post_init__(self):
        check_options(self)


class Sampler:
    """
    Makes numbered images with a pipeline. An image does not depend on the others in its batch.

    The constructor rejects options that do not fit the pipeline, and batches that do not fit into the memory. It
    replaces the pipeline's scheduler if the config names one.
    """

    def __init__(self, pipe: SamplingPipeline, config: SampleConfig, batch_size: int):
        self.pipe = pipe
        self.config = config
        self._condition, self.values = _conditions(pipe, config)
        if config.scheduler is not None:
            pipe.scheduler = scheduler_by_name(config.scheduler, pipe.scheduler)
        if config.guidance_scale is not None:
            pipe.set_guidance(config.guidance_scale)
        set_timesteps(pipe.scheduler, config.num_inference_steps)
        pipe.image_size(config.height, config.width, batch_size)

    def make(
        self, numbers: Sequence[int], on_step: Callable[[float], None] = lambda done: None
    ) -> list[PIL.Image.Image]:
        """Make images. After each step, call `on_step` with the fraction of the steps that are done."""

        def advance(pipe, step, timestep, tensors):
            on_step((step + 1) / pipe.num_timesteps)
            return tensors

        config, values = self.config, self.values
        options = ("negative_prompt", "height", "width", "guidance_scale")
        arguments = {name: getattr(config, name) for name in options if getattr(config, name) is not None}
        arguments[self._condition] = [values[k % len(values)] for k in numbers] if values else len(numbers)
        return self.pipe(
            **arguments,
            num_inference_steps=config.num_inference_steps,
            generator=[generator_for(config.seed, k) for k in numbers],
            callback_on_step_end=advance,
        ).images


class Sampling:
    """
    Makes images 0 to `num_images - 1` with a [`Sampler`], saves them in a folder, and adds a grid of them.

    The constructor also rejects folders with other images.
    """

    def __init__(self, pipe: SamplingPipeline, config: SampleConfig, folder: Path, num_images: int, batch_size: int):
        self.pipe = pipe
        self.folder = folder
        self.num_images = num_images
        self.batch_size = batch_size
        self._sampler = Sampler(pipe, config, min(batch_size, num_images))
        self._settings = {
            **asdict(config),
            "guidance_scale": _guidance_scale(pipe, config),
            "sampler": type(pipe.scheduler).__name__,
            "weights": _weights_version(pipe, config),
        }
        _check_folder(folder, self._settings)

    def make(self) -> int:
        """
        Make the missing images and return their number.

        The processes of `accelerate launch` or torchrun share the work.
        """
        state = processes()
        with locked(self.folder):
            run_on_main_process(lambda: _check_folder(self.folder, self._settings))  # again: now nobody can change it
            run_on_main_process(lambda: remove_leftovers(self.folder))
            missing = [k for k in range(self.num_images) if not is_complete(image_file(self.folder, k))]
            # No process changes the folder before all have listed the missing images.
            run_on_main_process(lambda: write_json(self.folder / SAMPLE_SETTINGS, self._settings))
            run_on_all_processes(lambda: self._make_share(missing[state.process_index :: state.num_processes]))
            if state.is_main_process:
                values = self._sampler.values
                columns = len(values) if 1 < len(values) <= 16 else None
                files = [image_file(self.folder, k) for k in range(min(self.num_images, GRID_IMAGES))]
                first = [read_image(file, str(file)) for file in files]
                titles = self._titles(len(first)) if values else None
                save_image(draw_grid(first, titles, columns), self.folder / SAMPLE_GRID)
        return len(missing)

    def _titles(self, count: int) -> list[str]:
        """Return the classes or prompts of the first images."""
        is_class = isinstance(self.pipe, ScaleLongClassConditionalPipeline)
        texts = [self.pipe.class_title(value) if is_class else value for value in self._sampler.values]
        return [texts[k % len(texts)] for k in range(count)]

    def _make_share(self, share: list[int]):
        """Make the missing images of this process."""
        state = processes()
        self.pipe.set_progress_bar_config(disable=True)
        layout = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total} images [{elapsed}<{remaining}]"
        total = self.num_images if state.num_processes == 1 else len(share)
        hidden = not state.is_main_process
        bar = tqdm(
            desc=printable(self.folder), total=total, initial=total - len(share), bar_format=layout, disable=hidden
        )
        with bar:
            for start in range(0, len(share), self.batch_size):
                batch = share[start : start + self.batch_size]
                before = bar.n

                def advance(done: float, before=before, batch=batch):
                    bar.update(before + len(batch) * done - bar.n)

                for k, image in zip(batch, self._sampler.make(batch, advance)):
                    save_image(image, image_file(self.folder, k))


def choose_device(name: str | None) -> torch.device:
    """Return the named device. Without a name, return this process's GPU, or the CPU if there is no GPU."""
    if name is None:
        state = processes()
        return state.device if state.num_processes > 1 or torch.cuda.is_available() else torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from error


def fitting_schedulers(current: SchedulerMixin) -> Mapping[str, tuple[str, dict[str, Any]]]:
    """Return the schedulers by name that can sample a model that was trained with the current one."""
    if isinstance(current, FLOW_SCHEDULERS):
        return FLOW_MATCHING_SCHEDULERS
    if isinstance(current, EDM_SCHEDULERS):
        return PRECONDITIONED_SCHEDULERS
    return SCHEDULERS if "beta_schedule" in current.config else {}


def scheduler_by_name(name: str, current: SchedulerMixin) -> SchedulerMixin:
    """Return a scheduler with the noise schedule of the current one, which the model was trained with."""
    accepted = fitting_schedulers(current)
    if name not in accepted:
        own = f"the model's own {type(current).__name__}"
        other = f"; it can be replaced by {' or '.join(accepted)}" if accepted else ""
        raise UserError(f"scheduler {name!r} needs a beta schedule, which {own} does not have{other}")
    class_name, changes = accepted[name]
    return getattr(diffusers, class_name).from_config(current.config, **changes)


def _conditions(pipe: SamplingPipeline, config: SampleConfig) -> tuple[str, list[Any]]:
    """Return the pipeline's argument for the condition and its values, which the images use in turn."""
    is_text = isinstance(pipe, ScaleLongTextToImagePipeline)
    is_class = isinstance(pipe, ScaleLongClassConditionalPipeline)
    accepted = {
        "prompt": (is_text, "text-to-image"),
        "negative_prompt": (is_text, "text-to-image"),
        "class_labels": (is_class, "class-conditional"),
        "guidance_scale": (is_text or is_class, "text-to-image or class-conditional"),
    }
    for name, (is_accepted, kind) in accepted.items():
        if getattr(config, name) is not None and not is_accepted:
            raise UserError(f"--{name} needs a {kind} pipeline, and {config.model} is a {type(pipe).__name__}")
    if is_text:
        if config.prompt is None:
            raise UserError(f"{config.model} is a text-to-image pipeline: pass at least one --prompt")
        return "prompt", list(config.prompt)
    if is_class:
        labels = config.class_labels or range(pipe.num_classes)
        names = set((pipe.config.class_names or {}).values())
        labels = [int(label) if str(label).isdecimal() and label not in names else label for label in labels]
        return "class_labels", pipe.class_ids(labels)
    return "batch_size", []


def _guidance_scale(pipe: SamplingPipeline, config: SampleConfig) -> float | None:
    """Return the guidance scale that the pipeline will use, or None if it has none."""
    parameter = inspect.signature(pipe.__call__).parameters.get("guidance_scale")
    return config.guidance_scale if parameter is None or config.guidance_scale is not None else parameter.default


def _weights_version(pipe: SamplingPipeline, config: SampleConfig) -> str | None:
    """Identify the weights: by the size and time of local files, or by the commit on the Hub."""
    folder = Path(config.model)
    if not folder.exists():
        index = try_to_load_from_cache(config.model, pipe.config_name, revision=config.revision)
        return Path(index).parent.name if isinstance(index, str) else None
    files = [file for name in pipe.components for file in (folder / name).glob("*") if file.suffix in WEIGHTS_SUFFIXES]
    files = [folder] if folder.is_file() else files
    if not files:
        return None
    size = sum(file.stat().st_size for file in files)
    newest = datetime.fromtimestamp(max(file.stat().st_mtime for file in files), UTC)
    return f"{size:,} bytes of {newest.isoformat()}"


def _check_folder(folder: Path, settings: dict[str, Any]):
    """Reject a folder of a model, or with images that were made with other settings or by another program."""
    try:
        if (folder / INDEX).exists() or any(folder.glob("*config.json")):
            raise UserError(f"{folder} holds a pipeline or a model: pass another --output_dir")
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:  # such as a name that is too long
        raise UserError(f"cannot use --output_dir {folder}: {error}") from error
    before = read_sample_settings(folder)
    problem = None
    if not existing.is_dir():
        problem = f"cannot be a folder, because {existing} is a file"
    elif before is None:
        if any(folder.glob("*.png")) or (folder / SAMPLE_SETTINGS).exists():
            problem = f"has images or a {SAMPLE_SETTINGS} that this version of `scalelong sample` did not make"
    # Settings without images may be left from a rejected call.
    elif sampled_numbers(folder) and (difference := _first_difference(before, settings)):
        problem = f"has images made with {difference}"
    if problem is not None:
        raise UserError(f"{folder} {problem}: pass another --output_dir, or delete it")


def _first_difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Describe the first difference, such as `seed 0, not 1` or `prompt 3 'a cat', not 'a dog'`."""

    def flat(settings: dict[str, Any]) -> dict[str, Any]:
        entries = {**settings, "model": str(Path(settings["model"]))}  # a slash at its end makes no difference
        for name, value in settings.items():
            if isinstance(value, list | tuple):
                del entries[name]
                entries |= {f"{name} {k}": entry for k, entry in enumerate(value)}
        return entries

    before, now = flat(before), flat(now)
    changed = (name for name in {**before, **now} if before.get(name) != now.get(name))
    return next((f"{name} {before.get(name)!r}, not {now.get(name)!r}" for name in changed), None)


def read_sample_settings(folder: Path) -> dict[str, Any] | None:
    """Return the settings of a folder's images, or None if `scalelong sample` did not make them."""
    settings = read_json(folder, SAMPLE_SETTINGS) if folder.is_dir() else None
    names = {*SampleConfig.__dataclass_fields__, "sampler"}
    is_own = settings is not None and names <= settings.keys() and isinstance(settings["model"], str)
    return settings if is_own else None


def is_sample_grid(file: str | os.PathLike) -> bool:
    """Return whether a file is the grid that `scalelong sample` writes next to its images."""
    folder, name = os.path.split(file)
    return name == SAMPLE_GRID and os.path.isfile(os.path.join(folder, SAMPLE_SETTINGS))


def image_file(folder: Path, k: int) -> Path:
    return folder / f"{k:06d}.png"


def sampled_numbers(folder: Path) -> list[int]:
    """Return the numbers of the images in a folder, sorted."""
    numbers = (int(file.stem) for file in folder.glob("*.png") if file.stem.isdecimal())
    return sorted(k for k in numbers if image_file(folder, k).is_file())


def is_complete(file: Path) -> bool:
    """Return whether a PNG ends with its last chunk. After a crash or on a full disk, the chunk may be missing."""
    if not file.is_file() or file.stat().st_size < len(_END_OF_PNG):
        return False
    with open(file, "rb") as opened:
        opened.seek(-len(_END_OF_PNG), os.SEEK_END)
        return opened.read() == _END_OF_PNG


def save_image(image: PIL.Image.Image, file: Path):
    """Save a PNG atomically, without syncing it to disk: there may be many images, and they can be made again."""
    atomic_write(file, lambda partial: image.save(partial, format="PNG"), durable=False)
