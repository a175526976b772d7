"""Bring images to the size and channels of the model."""

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from scalelong_diffusers.data.batch import Draws
from scalelong_diffusers.data.config import DataConfig
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.image_files import MAX_PIXELS


_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def with_channels(image: Image.Image, channels: int) -> Image.Image:
    """Convert an image to gray (1), RGB (3) or RGBA (4). Without an alpha channel, transparency becomes white."""
    if channels != 4 and image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(_MODES[channels])


def is_gray(image: Image.Image) -> bool:
    """Return whether all pixels are gray, in any storage format."""
    if image.mode in ("1", "L", "LA", "La"):
        return True
    pixels = np.asarray(with_channels(image, 3))
    return bool((pixels == pixels[..., :1]).all())


def fixed_permutation(count: int) -> np.ndarray:
    """Return a random permutation that is always the same. With it, the first images represent a sorted dataset."""
    return np.random.default_rng(0).permutation(count)


def spread_indices(count: int) -> np.ndarray:
    """Return up to 16 evenly spaced indices below `count`."""
    return np.linspace(0, count - 1, min(16, count)).astype(int)


@dataclass(frozen=True)
class Transform:
    """
    A transform that scales and crops an image to `resolution` x `resolution`.

    Args:
        channels: 1, 3 or 4 (RGBA).
        crop_size: first crop a centered square of this size.
        center_crop: crop the scaled image at its center instead of at a random position.
        random_flip: mirror half of the images.
        interpolation: one of `INTERPOLATION_MODES`. All of them are antialiased.
    """

    resolution: int
    channels: int
    crop_size: int | None = None
    center_crop: bool = False
    random_flip: bool = False
    interpolation: str = "lanczos"

    @classmethod
    def from_config(cls, config: DataConfig, channels: int) -> "Transform":
        return cls(
            resolution=config.resolution,
            channels=channels,
            crop_size=config.crop_size,
            center_crop=config.center_crop,
            random_flip=config.random_flip,
            interpolation=config.image_interpolation_mode,
        )

    def __call__(self, image: Image.Image, draws: Draws) -> np.ndarray:
        """Return uint8 pixels of shape (resolution, resolution, channels)."""
        image = with_channels(image, self.channels)
        if self.crop_size is not None:
            image = self._cut_center(image)
        pixels = self._crop(self._scale(image), draws)
        if self.random_flip and draws.below(2, "flip"):
            pixels = pixels[:, ::-1]
        return pixels if pixels.ndim == 3 else pixels[..., None]

    def _cut_center(self, image: Image.Image) -> Image.Image:
        width, height = image.size
        if min(width, height) < self.crop_size:
            raise UserError(f"its {width} x {height} pixels are smaller than crop_size={self.crop_size}")
        left, top = (width - self.crop_size) // 2, (height - self.crop_size) // 2
        return image.crop((left, top, left + self.crop_size, top + self.crop_size))

    def _scale(self, image: Image.Image) -> Image.Image:
        """Scale the shorter side to the resolution."""
        factor = self.resolution / min(image.size)
        size = tuple(max(self.resolution, round(side * factor)) for side in image.size)
        if size[0] * size[1] > MAX_PIXELS:
            given, scaled = (f"{width} x {height}" for width, height in (image.size, size))
            raise UserError(f"its {given} pixels would be scaled to {scaled}")
        return image if size == image.size else image.resize(size, Image.Resampling[self.interpolation.upper()])

    def _crop(self, image: Image.Image, draws: Draws) -> np.ndarray:
        pixels = np.asarray(image)
        spare = max(image.size) - self.resolution  # along the longer side
        start = spare // 2 if self.center_crop or not spare else draws.below(spare + 1, "crop")
        top, left = (start, 0) if image.height > image.width else (0, start)
        return pixels[top : top + self.resolution, left : left + self.resolution]


def to_pixel_values(images: list[np.ndarray]) -> torch.Tensor:
    """Stack uint8 images into float32 of shape (batch, channels, height, width) in [-1, 1]."""
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    return pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(127.5).sub_(1)
