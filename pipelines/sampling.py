"""What `scalelong sample` does: a folder of images, each of which depends on the seed and its own number alone."""

import dataclasses
import inspect
import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import diffusers
import PIL.Image
import torch
from diffusers import SchedulerMixin
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from scalelong_diffusers.data.images import SAMPLE_GRID, SAMPLE_SETTINGS
from scalelong_diffusers.download import read_json
from scalelong_diffusers.errors import did_you_mean
from scalelong_diffusers.files import write_json
from scalelong_diffusers.pipelines import ScaleLongClassConditionalPipeline, ScaleLongTextToImagePipeline
from scalelong_diffusers.pipelines.base import SamplingPipeline
from scalelong_diffusers.processes import processes, run_on_all_processes
from scalelong_diffusers.randomness import generator_for


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
GRID_IMAGES = 64
# Kept to be read: checksums say whether the model is the same, wherever it was, and the others follow from the rest.
NOTED_ONLY = ("model", "revision", "sampler", "guidance_scale")


_END_OF_PNG = b"\0\0\0\0IEND\xaeB`\x82"


@dataclass(frozen=True)
class SampleSettings:
    """All that an image depends on beside its number. It is kept with the images; to go on with another is refused."""

    model: str
    revision: str | None = None
    prompt: list[str] | None = None
    negative_prompt: str | None = None
    class_labels: list[str] | None = None
    scheduler: str | None = None
    steps: int = 50
    guidance: float | None = None
    seed: int = 0
    height: int | None = None
    width: int | None = None
    dtype: str = "float32"


class Sampling:
    """
    The images 0..n-1 of a pipeline in a folder, and a grid of them. To set it up refuses what can not be made, or not
    there, and gives the pipeline its scheduler.
    """

    def __init__(self, pipe: SamplingPipeline, settings: SampleSettings, folder: Path, n: int, batch_size: int):
        for name, value in (("n", n), ("batch_size", batch_size), ("steps", settings.steps)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.pipe = pipe
        self.settings = settings
        self.folder = folder
        self.n = n
        self.batch_size = batch_size
        self._condition, self._values = _conditions(pipe, settings)
        if settings.scheduler is not None:
            pipe.scheduler = scheduler_by_name(settings.scheduler, pipe.scheduler)
        if settings.guidance is not None:
            pipe.set_guidance(settings.guidance)
        noted = {"sampler": type(pipe.scheduler).__name__, "guidance_scale": _guidance_scale(pipe, settings)}
        _refuse_what_is_no_folder(folder)
        self._told = _settings_for(folder, {**dataclasses.asdict(settings), **noted, **_checksums(pipe)}, n)

    def make(self) -> int:
        """
        Make those that are not in the folder yet; returns how many they were.

        The processes of `accelerate launch` or torchrun make a share each.
        """
        team = processes()
        missing = [k for k in range(self.n) if not is_complete(image_file(self.folder, k))]
        # What is refused is refused by all, and what is missing known to all, before the folder changes.
        team.wait_for_everyone()
        if team.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / SAMPLE_SETTINGS, self._told)
        team.wait_for_everyone()
        run_on_all_processes(lambda: self._make_share(missing))
        if team.is_main_process:
            columns = len(self._values) if 1 < len(self._values) <= 16 else None
            shown = [PIL.Image.open(image_file(self.folder, k)) for k in range(min(self.n, GRID_IMAGES))]
            save_image(grid(shown, columns), self.folder / SAMPLE_GRID)
        return len(missing)

    def _make_share(self, missing: list[int]):
        """This process's share of the images that are missing."""
        team = processes()
        share = missing[team.process_index :: team.num_processes]
        self.pipe.set_progress_bar_config(disable=True)
        layout = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total} images [{elapsed}<{remaining}]"
        total = self.n if team.num_processes == 1 else len(share)
        with tqdm(
            total=total,
            initial=total - len(share),
            desc=str(self.folder),
            bar_format=layout,
            disable=not team.is_main_process,
        ) as bar:
            for start in range(0, len(share), self.batch_size):
                batch = share[start : start + self.batch_size]
                for k, image in zip(batch, self._make_batch(batch, bar)):
                    save_image(image, image_file(self.folder, k))

    def _make_batch(self, batch: list[int], bar: tqdm) -> list[PIL.Image.Image]:
        before = bar.n

        def advance(pipe, step, timestep, tensors):
            bar.update(before + len(batch) * (step + 1) / pipe.num_timesteps - bar.n)
            return tensors

        values, settings = self._values, self.settings
        arguments = {self._condition: [values[k % len(values)] for k in batch] if values else len(batch)}
        for name in ("negative_prompt", "height", "width"):
            if getattr(settings, name) is not None:
                arguments[name] = getattr(settings, name)
        if settings.guidance is not None:
            arguments["guidance_scale"] = settings.guidance
        return self.pipe(
            **arguments,
            num_inference_steps=settings.steps,
            generator=[generator_for(settings.seed, k) for k in batch],
            callback_on_step_end=advance,
        ).images


def choose_device(name: str | None) -> torch.device:
    """The one of that name; without one a GPU, where there is any, each process its own."""
    if name is None:
        team = processes()
        return team.device if team.num_processes > 1 or torch.cuda.is_available() else torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} can not be used: {str(error).splitlines()[0]}") from error


def scheduler_by_name(name: str, current: SchedulerMixin) -> SchedulerMixin:
    """A scheduler for the noise that a model was trained with, which the current one knows."""
    if name not in SCHEDULERS:
        raise ValueError(
            f"unknown scheduler {name!r}{did_you_mean(name, SCHEDULERS)}; accepted: {', '.join(SCHEDULERS)}"
        )
    class_name, changes = SCHEDULERS[name]
    scheduler_class = getattr(diffusers, class_name)
    if "beta_schedule" not in current.config:
        raise ValueError(f"scheduler {name!r} goes by betas, which the model's own {type(current).__name__} has not")
    return scheduler_class.from_config(current.config, **changes)


def _conditions(pipe: SamplingPipeline, settings: SampleSettings) -> tuple[str, list[Any]]:
    """The argument of the pipeline's call that says what to draw, and its values, which the images take in turn."""
    is_text = isinstance(pipe, ScaleLongTextToImagePipeline)
    is_class = isinstance(pipe, ScaleLongClassConditionalPipeline)
    given = {
        "prompt": (settings.prompt, is_text, "of text"),
        "negative_prompt": (settings.negative_prompt, is_text, "of text"),
        "class": (settings.class_labels, is_class, "of classes"),
        "guidance": (settings.guidance, is_text or is_class, "of classes or text"),
    }
    for flag, (value, fits, what) in given.items():
        if value is not None and not fits:
            raise ValueError(f"--{flag} is for models {what}, and {settings.model} is none: {type(pipe).__name__}")
    if is_text:
        if settings.prompt is None:
            raise ValueError(f"{settings.model} is a model of text: give at least one --prompt")
        return "prompt", settings.prompt
    if is_class:
        labels = settings.class_labels or list(range(pipe.num_classes))
        names = set((pipe.config.class_names or {}).values())
        labels = [int(x) if str(x).isdecimal() and x not in names else x for x in labels]
        return "class_labels", pipe.class_ids(labels)
    return "batch_size", []


def _guidance_scale(pipe: SamplingPipeline, settings: SampleSettings) -> float | None:
    """What it is, also where it is left to the pipeline; None for a model without."""
    parameter = inspect.signature(pipe.__call__).parameters.get("guidance_scale")
    return settings.guidance if parameter is None or settings.guidance is not None else parameter.default


def _refuse_what_is_no_folder(folder: Path):
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{folder} can not be a folder of images: {there} is a file; give another --out")


def _settings_for(folder: Path, settings: dict[str, Any], n: int) -> dict[str, Any]:
    """What the folder's images are noted to be made with. Those that are there have to be of the same settings."""
    before = read_sample_settings(folder)
    if before is None and (any(folder.glob("*.png")) or (folder / SAMPLE_SETTINGS).exists()):
        raise ValueError(
            f"{folder} has images or a {SAMPLE_SETTINGS} that `scalelong sample` did not make: give another --out"
        )
    there = sampled_numbers(folder)
    # Settings without images may be those of a call that was refused, and count for nothing.
    if not there:
        return settings
    prompts = _prompts_of_both(before.get("prompt"), there, settings["prompt"], range(n))
    if prompts is not None:
        before, settings = ({**told, "prompt": prompts} for told in (before, settings))
    _check_same(folder, before, settings)
    return settings


def _prompts_of_both(
    before: list[str] | None, there: Iterable[int], prompts: list[str] | None, asked: Iterable[int]
) -> list[str] | None:
    """
    The longer list, where it gives the same to the images that are there and to those asked for; None otherwise.

    So one can go on for more images with more captions of the same data set.
    """
    if not before or not prompts:
        return None
    longer = max(before, prompts, key=len)

    def gives_the_same(other: list[str], numbers: Iterable[int]) -> bool:
        return all(other[k % len(other)] == longer[k % len(longer)] for k in numbers)

    return longer if gives_the_same(before, there) and gives_the_same(prompts, asked) else None


def read_sample_settings(folder: Path) -> dict[str, Any] | None:
    """What the images of a folder were made with; None where `scalelong sample` did not make them."""
    noted = read_json(folder, SAMPLE_SETTINGS) if folder.is_dir() else None
    names = {*SampleSettings.__dataclass_fields__, *NOTED_ONLY}
    return noted if noted is not None and names <= noted.keys() else None


def _check_same(folder: Path, before: dict[str, Any], settings: dict[str, Any]):
    for name in {**settings, **before}:
        was, now = before.get(name), settings.get(name)
        if name in NOTED_ONLY or was == now:
            continue
        if isinstance(was, list) and isinstance(now, list):  # of thousands of prompts the first that differ
            k, (was, now) = next((k, pair) for k, pair in enumerate(zip_longest(was, now)) if pair[0] != pair[1])
            name = f"{name} {k}"
        if name.endswith(_CHECKSUM):
            raise ValueError(
                f"{folder} has images that another {name.removesuffix(_CHECKSUM)} made, that of {before['model']} as "
                "it was then: give another --out, or delete it"
            )
        raise ValueError(
            f"{folder} has images that were made with {name} {was!r}, not {now!r}: give another --out, or delete it"
        )


_CHECKSUM = "_checksum"


def _checksums(pipe: SamplingPipeline) -> dict[str, str]:
    """Tells pipelines apart, also two of the same folder: one for each component, one for the rest."""
    components = {name: component for name, component in pipe.components.items() if component is not None}
    checksums = {f"{name}{_CHECKSUM}": _checksum(component) for name, component in components.items()}
    own = {name: value for name, value in pipe.config.items() if name not in pipe.components}
    return {**checksums, f"pipeline{_CHECKSUM}": f"{_checksum_of_config(own):08x}"}


def _checksum(component: nn.Module | SchedulerMixin | PreTrainedTokenizerBase) -> str:
    if isinstance(component, PreTrainedTokenizerBase):
        config = {"vocabulary": component.get_vocab(), "model_max_length": component.model_max_length}
    elif isinstance(component, PreTrainedModel):
        config = component.config.to_dict()
    else:
        config = dict(component.config)
    checksum = _checksum_of_config({**config, "class": type(component).__name__})
    if isinstance(component, nn.Module):
        for weights in component.state_dict().values():
            checksum = zlib.crc32(weights.cpu().contiguous().flatten().view(torch.uint8).numpy(), checksum)
    return f"{checksum:08x}"


def _checksum_of_config(config: Mapping[str, Any]) -> int:
    # What a config says of where it was loaded from, and by which version, says nothing of the images.
    told = {name: value for name, value in config.items() if name[0] != "_" and name != "transformers_version"}
    return zlib.crc32(json.dumps(told, sort_keys=True, default=str).encode())


def image_file(folder: Path, k: int) -> Path:
    return folder / f"{k:06d}.png"


def sampled_numbers(folder: Path) -> list[int]:
    """Those of the images in a folder, by the files' names."""
    numbers = (int(file.stem) for file in folder.glob("*.png") if file.stem.isdecimal())
    return sorted(k for k in numbers if image_file(folder, k).is_file())


def is_complete(file: Path) -> bool:
    """Whether it is a PNG with its last chunk, which a machine that stopped or a full disk may have cut off."""
    if not file.is_file() or file.stat().st_size < len(_END_OF_PNG):
        return False
    with open(file, "rb") as opened:
        opened.seek(-len(_END_OF_PNG), os.SEEK_END)
        return opened.read() == _END_OF_PNG


def save_image(image: PIL.Image.Image, file: Path):
    """Written aside and renamed, so that a file with that name is whole; not synced, since there may be many."""
    part = file.with_suffix(".part")
    image.save(part, format="PNG")
    os.replace(part, file)


def grid(images: list[PIL.Image.Image], columns: int | None) -> PIL.Image.Image:
    columns = columns or math.ceil(math.sqrt(len(images)))
    width, height = images[0].size
    grid = PIL.Image.new(images[0].mode, (columns * width, math.ceil(len(images) / columns) * height))
    for k, image in enumerate(images):
        grid.paste(image, (k % columns * width, k // columns * height))
    return grid
