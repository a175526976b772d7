"""The images that are judged: files, read as those of a data set are."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from scalelong_diffusers.data.images import BadImage, read_image, with_channels
from scalelong_diffusers.sampling import GRID_FILE, SETTINGS_FILE, image_file


class ImageFiles:
    """Images of one size, by their files. The first tells the size, and whether they are grey."""

    def __init__(self, files: list[Path]):
        self.files = files
        first = _read(files[0])
        self.width, self.height = first.size
        self.channels = 1 if first.mode in ("1", "L") else 3

    @classmethod
    def sampled(cls, folder: Path, n: int) -> "ImageFiles":
        """The first n that `scalelong sample` made there."""
        return cls([image_file(folder, k) for k in range(n)])

    @classmethod
    def of_folder(cls, folder: str | os.PathLike, n: int | None) -> "ImageFiles":
        """The first n by their names, or all; of the folder of `scalelong sample` without the grid of them."""
        folder = Path(folder)
        extensions = Image.registered_extensions()
        files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in extensions and path.is_file())
        if (folder / SETTINGS_FILE).is_file():
            files = [path for path in files if path != folder / GRID_FILE]
        if not files:
            raise ValueError(f"{folder} is neither a pipeline (it has no model_index.json) nor a folder of images")
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
            raise BadImage(
                f"{file} has {image.width} x {image.height} pixels, and {self.files[0]} has {self.width} x "
                f"{self.height}: images of one size are needed"
            )
        return torch.from_numpy(np.array(with_channels(image, 3))).permute(2, 0, 1)


def _read(file: Path) -> Image.Image:
    try:
        return read_image(str(file))
    except ValueError as error:
        raise BadImage(f"{file} can not be read: {error}") from error
