"""Image files of any kind become arrays of the wanted size and channels."""

import os
from dataclasses import dataclass
from io import BytesIO

import numpy as np
import torch
from PIL import Image, ImageOps

from scalelong_diffusers.data.draws import Draws


INTERPOLATION_MODES = {
    "lanczos": Image.Resampling.LANCZOS,
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "box": Image.Resampling.BOX,
}
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
# What `scalelong sample` writes beside its images: how they were made, and a grid, which is none of them.
SAMPLE_SETTINGS, SAMPLE_GRID = "sample.json", "grid.png"


class UnreadableImage(ValueError):
    """An image that can not be used, in a sentence that names it."""

    def with_skip_advice(self) -> "UnreadableImage":
        return UnreadableImage(f"{self}; on_bad_image='skip' leaves it out")


def is_sample_grid(file: str | os.PathLike) -> bool:
    folder, name = os.path.split(file)
    return name == SAMPLE_GRID and os.path.isfile(os.path.join(folder, SAMPLE_SETTINGS))


def read_image(file: str | bytes) -> Image.Image:
    """Decode a file, given by its path or content, and turn it as its EXIF data says; a ValueError says why not."""
    try:
        with Image.open(BytesIO(file) if isinstance(file, bytes) else file) as image:
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return _with_eight_bits(image)
    except MemoryError:
        raise
    except FileNotFoundError as error:
        raise ValueError("there is no such file") from error
    except Image.UnidentifiedImageError as error:
        raise ValueError("it is no image that Pillow knows") from error
    except Exception as error:  # Pillow's decoders raise whatever they stumble over
        raise ValueError(str(error)) from error


def _with_eight_bits(image: Image.Image) -> Image.Image:
    """Pillow's own conversion from 16 bits cuts off all that is above 255."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) / 257).round().clip(0, 255).astype(np.uint8))
    if image.mode == "F":
        raise ValueError(
            "its pixels are floating-point numbers, whose range is not known; store them with 8 or 16 bits"
        )
    return image


def with_channels(image: Image.Image, channels: int) -> Image.Image:
    """Grey, RGB or RGBA; what is transparent is laid over white where there is no channel for it."""
    if channels != 4 and image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(_MODES[channels])


def is_gray(image: Image.Image) -> bool:
    """Whether no pixel has a colour, however the image is stored."""
    if image.mode in ("1", "L", "LA", "La"):
        return True
    pixels = np.asarray(with_channels(image, 3))
    return bool((pixels == pixels[..., :1]).all())


def spread_indices(count: int) -> np.ndarray:
    """Where to look in a set to tell whether it is grey: up to 16 places from all over it."""
    return np.linspace(0, count - 1, min(16, count)).astype(int)


@dataclass(frozen=True)
class Transform:
    """
    Cuts and scales an image to `resolution` x `resolution`.

    Args:
        channels: 1, 3 or 4 (RGBA).
        crop_size: the side of the square at the centre that is cut out first; None keeps all.
        center_crop: cut the scaled image at its centre, or at a random place.
        random_flip: mirror half of the images.
        interpolation: one of `INTERPOLATION_MODES`, all of them antialiased.
    """

    resolution: int
    channels: int
    crop_size: int | None = None
    center_crop: bool = False
    random_flip: bool = False
    interpolation: str = "lanczos"

    def __call__(self, image: Image.Image, draws: Draws) -> np.ndarray:
        """(resolution, resolution, channels), uint8."""
        image = with_channels(image, self.channels)
        if self.crop_size is not None:
            image = self._cut_centre(image)
        pixels = self._cut(self._scale(image), draws)
        if self.random_flip and draws.below(2, "flip"):
            pixels = pixels[:, ::-1]
        return pixels if pixels.ndim == 3 else pixels[..., None]

    def _cut_centre(self, image: Image.Image) -> Image.Image:
        width, height = image.size
        if min(width, height) < self.crop_size:
            raise ValueError(f"it has {width} x {height} pixels, and crop_size is {self.crop_size}")
        left, top = (width - self.crop_size) // 2, (height - self.crop_size) // 2
        return image.crop((left, top, left + self.crop_size, top + self.crop_size))

    def _scale(self, image: Image.Image) -> Image.Image:
        """The shorter side becomes the resolution."""
        factor = self.resolution / min(image.size)
        size = tuple(max(self.resolution, round(side * factor)) for side in image.size)
        return image if size == image.size else image.resize(size, INTERPOLATION_MODES[self.interpolation])

    def _cut(self, image: Image.Image, draws: Draws) -> np.ndarray:
        pixels = np.asarray(image)
        spare = max(image.size) - self.resolution  # of one side; the other has none
        start = spare // 2 if self.center_crop or not spare else draws.below(spare + 1, "crop")
        top, left = (start, 0) if image.height > image.width else (0, start)
        return pixels[top : top + self.resolution, left : left + self.resolution]


def to_pixel_values(images: list[np.ndarray]) -> torch.Tensor:
    """(batch, channels, height, width), float32 in [-1, 1]."""
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    return pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(127.5).sub_(1)
