"""The built-in dataset of colored shapes with classes and captions, and a function that recognizes them."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from PIL import Image, ImageFilter

from scalelong_diffusers.randomness import generator_for


# A sixth of the color wheel apart.
COLORS = {
    "red": (225, 35, 35),
    "yellow": (230, 220, 30),
    "green": (35, 190, 45),
    "cyan": (30, 205, 220),
    "blue": (40, 60, 225),
    "magenta": (220, 40, 215),
}
# The darkest and the lightest tone of each.
BACKGROUNDS = {"white": (240, 255), "light gray": (180, 205), "dark gray": (50, 75), "black": (0, 15)}
WORDINGS = (
    "a {color} {shape} on a {background} background",
    "a {color} {shape}",
    "a picture of a {color} {shape}",
    "a {shape} that is {color}, in front of {background}",
    "a {background} picture with one {color} {shape}",
)


# Signed distance of a point to the outline of a shape of radius 1, negative inside.
def _circle(x, y):
    return np.hypot(x, y) - 0.9


def _square(x, y):
    return np.maximum(abs(x), abs(y)) - 0.7


def _triangle(x, y):
    slope = math.sqrt(3) / 2
    return np.maximum(slope * abs(x) - 0.5 * y, y) - 0.5


def _cross(x, y):
    x, y = abs(x), abs(y)
    return np.maximum(np.minimum(x, y) - 0.3, np.maximum(x, y) - 0.95)


def _star(x, y):
    sector = 2 * math.pi / 5
    angle = np.arctan2(x, -y)  # from the upper tip
    angle = abs(angle - sector * np.round(angle / sector))  # fold all tips onto one half
    radius = np.hypot(x, y)
    inner = (0.42 * math.cos(sector / 2), 0.42 * math.sin(sector / 2))
    edge = np.array((inner[1], 1 - inner[0])) / math.hypot(inner[1], 1 - inner[0])
    return (radius * np.cos(angle) - 1) * edge[0] + radius * np.sin(angle) * edge[1]


SHAPES = {"circle": _circle, "square": _square, "triangle": _triangle, "cross": _cross, "star": _star}
SHAPE_CLASSES = [f"{color} {shape}" for color in COLORS for shape in SHAPES]


def _coverage(shape: str, size: int, center: tuple[float, float], radius: float, angle: float) -> np.ndarray:
    """Return the covered part of each pixel. `center` and `radius` are fractions of the image's side."""
    x, y = _grid(size)
    x, y = (x - center[0]) / radius, (y - center[1]) / radius
    cos, sin = math.cos(angle), math.sin(angle)
    outside = SHAPES[shape](cos * x + sin * y, cos * y - sin * x)
    return np.clip(0.5 - outside * radius * size, 0, 1)


@lru_cache
def _grid(size: int) -> tuple[np.ndarray, np.ndarray]:
    centers = (np.arange(size, dtype=np.float32) + 0.5) / size
    return centers[None, :], centers[:, None]


@dataclass(frozen=True)
class Drawing:
    """The content of one image."""

    color: str
    shape: str
    background: str
    tone: float
    brightness: float
    center: tuple[float, float]
    radius: float
    angle: float

    @classmethod
    def from_number(cls, index: int) -> "Drawing":
        """Return a drawing by its number. Classes alternate; there are infinitely many drawings."""
        color, shape = SHAPE_CLASSES[index % len(SHAPE_CLASSES)].split()
        draws = torch.rand(7, generator=generator_for(0, "shapes", index), dtype=torch.float64).tolist()
        background = list(BACKGROUNDS)[int(draws[0] * len(BACKGROUNDS))]
        darkest, lightest = BACKGROUNDS[background]
        radius = 0.24 + 0.16 * draws[3]
        nearest = radius + 0.03  # distance to the border, a pixel of 32
        return cls(
            color=color,
            shape=shape,
            background=background,
            tone=darkest + (lightest - darkest) * draws[1],
            brightness=0.85 + 0.15 * draws[2],
            center=(nearest + (1 - 2 * nearest) * draws[4], nearest + (1 - 2 * nearest) * draws[5]),
            radius=radius,
            angle=math.radians(40 * draws[6] - 20),  # at 45 degrees, a square would look like a diamond
        )

    def paint(self, size: int) -> np.ndarray:
        """Return uint8 pixels of shape (size, size, 3)."""
        coverage = _coverage(self.shape, size, self.center, self.radius, self.angle)[..., None]
        color = np.array(COLORS[self.color], np.float32) * self.brightness
        return (self.tone + 0.5 + coverage * (color - self.tone)).astype(np.uint8)

    def captions(self) -> list[str]:
        words = {"color": self.color, "shape": self.shape, "background": self.background}
        return [wording.format(**words) for wording in WORDINGS]


class Shapes:
    """The built-in dataset as a `Source`, with any number of images of any size. Images are drawn on access."""

    class_names: ClassVar = SHAPE_CLASSES
    num_classes = len(SHAPE_CLASSES)

    def __init__(self, count: int, size: int):
        self.count = count
        self.size = size
        self.labels = np.arange(count) % len(SHAPE_CLASSES)
        self.description = f"the built-in shapes, {count:,} images"

    def __len__(self) -> int:
        return self.count

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(Drawing.from_number(index).paint(self.size))

    def label(self, index: int) -> int:
        return int(self.labels[index])

    def captions(self, index: int) -> list[str]:
        return Drawing.from_number(index).captions()

    def name(self, index: int) -> str:
        return f"shape {index}"

    def identity(self) -> str:
        return f"shapes {self.count} 2"  # raise the last number when images or captions change


def recognize(image: Image.Image) -> tuple[str, str | None] | None:
    """
    Return the color and the shape in an image, using its pixels only.

    The result is None if nothing colored stands out from the background, and the shape is None if it is not one of
    `SHAPES`. The background is the median color of the border. The shape is the region that differs most from the
    background; it is compared with the drawn shapes after moving and scaling it to a standard position.
    """
    pixels = _smooth_pixels(image)
    background = np.median(_border(pixels), axis=0)
    difference = pixels - background
    distance = np.linalg.norm(difference, axis=-1)
    color = np.median(pixels[distance >= 0.6 * np.quantile(distance, 0.99)], axis=0)
    contrast = color - background
    if np.ptp(color) < 0.25 or np.linalg.norm(contrast) < 0.25:
        return None
    mask = difference @ contrast > 0.5 * contrast @ contrast
    return _nearest_hue(color), _nearest_shape(mask)


def _smooth_pixels(image: Image.Image) -> np.ndarray:
    image = image.convert("RGB").resize((64, 64), Image.Resampling.BICUBIC)
    return np.asarray(image.filter(ImageFilter.GaussianBlur(1.2)), np.float64) / 255


def _border(pixels: np.ndarray) -> np.ndarray:
    return np.concatenate([pixels[:2].reshape(-1, 3), pixels[-2:].reshape(-1, 3), pixels[:, :2].reshape(-1, 3),
                           pixels[:, -2:].reshape(-1, 3)])  # fmt: skip


def _nearest_hue(color: np.ndarray) -> str:
    return min(COLORS, key=lambda name: abs((_hue(color) - _hue(np.array(COLORS[name])) + 0.5) % 1 - 0.5))


def _hue(color: np.ndarray) -> float:
    red, green, blue = color - color.mean()
    return math.atan2(math.sqrt(3) * (green - blue), 2 * red - green - blue) / (2 * math.pi)


_TEMPLATE_SIZE = 32
_TEMPLATE_AREA = 0.2  # fraction of the template


def _nearest_shape(mask: np.ndarray) -> str | None:
    """Return the shape with the largest intersection over union with the mask, if that is above 0.75."""
    if not 0.02 < mask.mean() < 0.7:
        return None
    names, templates = _templates()
    mask = _normalized(mask).reshape(-1)
    overlap = np.minimum(templates, mask).sum(-1) / np.maximum(templates, mask).sum(-1)
    return names[overlap.argmax()] if overlap.max() > 0.75 else None


def _normalized(mask: np.ndarray) -> np.ndarray:
    """Center a mask of 64 x 64 and scale it to an area of 0.2."""
    y, x = np.nonzero(mask)
    side = math.sqrt(mask.sum() / _TEMPLATE_AREA)
    left, top = x.mean() + 0.5 - side / 2, y.mean() + 0.5 - side / 2
    scale = side / _TEMPLATE_SIZE
    picture = Image.fromarray(mask.astype(np.float32))
    placed = picture.transform(
        (_TEMPLATE_SIZE, _TEMPLATE_SIZE),
        Image.Transform.AFFINE,
        (scale, 0, left, 0, scale, top),
        Image.Resampling.BILINEAR,
    )
    return np.asarray(placed)


@lru_cache
def _templates() -> tuple[list[str], np.ndarray]:
    """Return each shape in twelve rotations, processed like an image."""
    turns = {"circle": 360, "square": 90, "triangle": 120, "cross": 90, "star": 72}
    names, masks = [], []
    for shape, turn in turns.items():
        for step in range(12):
            drawn = _coverage(shape, 64, (0.5, 0.5), 0.32, math.radians(turn * step / 12))
            blurred = Image.fromarray((drawn * 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(1.8))
            names.append(shape)
            masks.append(_normalized(np.asarray(blurred) > 127).reshape(-1))
    return names, np.stack(masks)
