"""The images that are judged: files, read as those of a data set are."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from scalelong_diffusers.data.images import UnreadableImage, is_sample_grid, read_image, spread_indices, with_channels
from scalelong_diffusers.data.sources import fixed_permutation
from scalelong_diffusers.pipelines.sampling import image_file, is_complete, read_sample_settings, sampled_numbers


class ImageFiles:
    """Images of one size, by their files. The first tells the size, and some of them whether all are grey."""

    def __init__(self, files: list[Path]):
        self.files = files
        self.width, self.height = _read(files[0]).size
        # By how they are stored: the black images of a model that diverged are coloured ones.
        is_gray = all(_read(files[k]).mode in ("1", "L") for k in spread_indices(len(files)))
        self.channels = 1 if is_gray else 3

    @classmethod
    def sampled(cls, folder: Path, n: int) -> "ImageFiles":
        """The first n that `scalelong sample` made there."""
        return cls([image_file(folder, k) for k in range(n)])

    @classmethod
    def of_folder(cls, folder: str | os.PathLike, n: int | None) -> "ImageFiles":
        """
        Those that are not hidden, or n of them: of the folder of `scalelong sample` the first, without their grid; of
        another, which may be sorted by classes, in a fixed random order.
        """
        folder = Path(folder)
        if (folder / "metrics.jsonl").exists():  # whose grids of samples would pass for images
            raise ValueError(
                f"{folder} is the folder of a training run without a pipeline (model_index.json): let the run end, or "
                "give a folder of images"
            )
        if read_sample_settings(folder) is not None:
            files = _samples(folder, n)
        else:
            files = sorted(path for path in folder.rglob("*") if _is_image(path.relative_to(folder)))
            files = [path for path in files if path.is_file() and not is_sample_grid(path)]
            files = [files[k] for k in fixed_permutation(len(files))]
        if not files:
            advice = "; give the pipeline's folder, above it" if (folder / "config.json").is_file() else ""
            raise ValueError(
                f"{folder} is neither a pipeline (it has no model_index.json) nor a folder of images{advice}"
            )
        if n is not None and n > len(files):
            raise ValueError(f"--n {n:,} is more than the {len(files):,} images of {folder}")
        return cls(files[:n])

    def __len__(self) -> int:
        return len(self.files)

    def batches(self, batch_size: int, num_processes: int = 1, rank: int = 0) -> Iterator[torch.Tensor]:
        """(batch, 3, height, width), uint8: every `num_processes`-th batch, from that of the rank on."""
        for start in range(rank * batch_size, len(self), num_processes * batch_size):
            yield torch.stack([self._pixels(file) for file in self.files[start : start + batch_size]])

    def _pixels(self, file: Path) -> torch.Tensor:
        image = _read(file)
        if image.size != (self.width, self.height):
            raise UnreadableImage(
                f"{file} has {image.width} x {image.height} pixels, and {self.files[0]} has {self.width} x "
                f"{self.height}: images of one size are needed"
            )
        return torch.from_numpy(np.array(with_channels(image, 3))).permute(2, 0, 1)


def _samples(folder: Path, n: int | None) -> list[Path]:
    """The first n that `scalelong sample` made, or all, whatever else lies there. None of them may be missing."""
    numbers = range(max(sampled_numbers(folder), default=-1) + 1)[:n]
    for file in (image_file(folder, k) for k in numbers):
        if not is_complete(file):
            is_what = "cut off" if file.exists() else "missing"
            raise ValueError(f"{file} is {is_what}: call `scalelong sample` again, which makes it")
    return [image_file(folder, k) for k in numbers]


def _is_image(path: Path) -> bool:
    """By its name, below the folder of images; data sets leave out what is hidden, too."""
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and path.suffix.lower() in Image.registered_extensions()


def _read(file: Path) -> Image.Image:
    try:
        return read_image(str(file))
    except ValueError as error:
        raise UnreadableImage(f"{file} can not be read: {error}") from error
