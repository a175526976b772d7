"""Image files to evaluate, decoded in the same way as the images of a dataset."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from scalelong_diffusers.data.images import (
    UnreadableImage,
    fixed_permutation,
    read_image,
    spread_indices,
    with_channels,
)
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.pipelines.sampling import (
    image_file,
    is_complete,
    is_sample_grid,
    read_sample_settings,
    sampled_numbers,
)


class ImageFiles:
    """Image files of one size. The first file sets the size, and some of them whether all are gray."""

    def __init__(self, files: list[Path]):
        self.files = files
        self.width, self.height = _read(files[0]).size
        # By storage mode: the black images of a diverged model are color images.
        is_gray = all(_read(files[k]).mode in ("1", "L") for k in spread_indices(len(files)))
        self.channels = 1 if is_gray else 3

    @classmethod
    def sampled(cls, folder: Path, n: int) -> "ImageFiles":
        """Return the first n images that `scalelong sample` made in a folder."""
        return cls([image_file(folder, k) for k in range(n)])

    @classmethod
    def of_folder(cls, folder: str | os.PathLike, n: int | None) -> "ImageFiles":
        """
        Return all images of a folder that are not hidden, or n of them.

        Of a folder of `scalelong sample` these are the first n, without the grid. Other folders may be sorted by
        class, so their images are taken in a fixed random order.
        """
        folder = Path(folder)
        if (folder / "metrics.jsonl").exists():  # its sample grids are not images to evaluate
            raise UserError(
                f"{folder} is an unfinished training run without a model_index.json: resume it with "
                "--resume_from_checkpoint latest, or give a folder of images"
            )
        if read_sample_settings(folder) is not None:
            files = _sampled_files(folder, n)
        else:
            files = sorted(path for path in folder.rglob("*") if _is_image(path.relative_to(folder)))
            files = [path for path in files if path.is_file() and not is_sample_grid(path)]
            files = [files[k] for k in fixed_permutation(len(files))]
        if not files:
            advice = "; give the folder of its pipeline" if (folder / "config.json").is_file() else ""
            raise UserError(f"{folder} is not a pipeline (no model_index.json) and has no images{advice}")
        if n is not None and n > len(files):
            raise UserError(f"--num_images {n:,} is more than the {len(files):,} images in {folder}")
        return cls(files[:n])

    def __len__(self) -> int:
        return len(self.files)

    def batches(self, batch_size: int, num_processes: int = 1, rank: int = 0) -> Iterator[torch.Tensor]:
        """Yield every `num_processes`-th batch of uint8 images (batch, 3, height, width), starting at batch `rank`."""
        for start in range(rank * batch_size, len(self), num_processes * batch_size):
            yield torch.stack([self._pixels(file) for file in self.files[start : start + batch_size]])

    def _pixels(self, file: Path) -> torch.Tensor:
        image = _read(file)
        if image.size != (self.width, self.height):
            raise UnreadableImage(
                f"{file} has {image.width} x {image.height} pixels, but {self.files[0]} has {self.width} x "
                f"{self.height}: all images must have the same size"
            )
        return torch.from_numpy(np.array(with_channels(image, 3))).permute(2, 0, 1)


def _sampled_files(folder: Path, n: int | None) -> list[Path]:
    """Return the first n images that `scalelong sample` made, or all of them. None of them may be missing."""
    numbers = range(max(sampled_numbers(folder), default=-1) + 1)[:n]
    files = [image_file(folder, k) for k in numbers]
    for file in files:
        if not is_complete(file):
            fault = "cut off" if file.exists() else "missing"
            raise UserError(f"{file} is {fault}: run `scalelong sample` again to make it")
    return files


def _is_image(path: Path) -> bool:
    """Return whether a path inside a folder has the name of an image and is not hidden."""
    is_hidden = any(part.startswith(".") for part in path.parts)
    return not is_hidden and path.suffix.lower() in Image.registered_extensions()


def _read(file: Path) -> Image.Image:
    try:
        return read_image(str(file))
    except ValueError as error:
        raise UnreadableImage(f"{file} cannot be read: {error}") from error
