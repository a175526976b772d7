"""The built-in data set: coloured shapes with classes and captions; and a reader that tells what an image shows."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from PIL import Image, ImageFilter

from scalelong_diffusers.randomness import generator_for


# A sixth of the colour circle apart.
COLORS = {
    "red": (225, 35, 35),
    "yellow": (230, 220, 30),
    "green": (35, 190, 45),
    "cyan": (30, 205, 220),
    "blue": (40, 60, 225),
    "magenta": (220, 40, 215),
}
# The darkest and the lightest grey of each.
BACKGROUNDS = {"white": (240, 255), "light grey": (180, 205), "dark grey": (50, 75), "black": (0, 15)}
WORDINGS = (
    "a {colour} {shape} on a {background} background",
    "a {colour} {shape}",
    "a picture of a {colour} {shape}",
    "a {shape} that is {colour}, in front of {background}",
    "a {background} picture with one {colour} {shape}",
)


# How far a point is outside of a shape that fills the circle of radius 1; negative inside.
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
    angle = abs(angle - sector * np.round(angle / sector))  # of all tips, the halves fall onto one another
    radius = np.hypot(x, y)
    inner = (0.42 * math.cos(sector / 2), 0.42 * math.sin(sector / 2))
    edge = np.array((inner[1], 1 - inner[0])) / math.hypot(inner[1], 1 - inner[0])
    return (radius * np.cos(angle) - 1) * edge[0] + radius * np.sin(angle) * edge[1]


SHAPES = {"circle": _circle, "square": _square, "triangle": _triangle, "cross": _cross, "star": _star}
SHAPE_CLASSES = [f"{colour} {shape}" for colour in COLORS for shape in SHAPES]


def _coverage(shape: str, size: int, centre: tuple[float, float], radius: float, angle: float) -> np.ndarray:
    """How much of each pixel a shape covers; `centre` and `radius` are in sides of the image."""
    x, y = _grid(size)
    x, y = (x - centre[0]) / radius, (y - centre[1]) / radius
    cos, sin = math.cos(angle), math.sin(angle)
    outside = SHAPES[shape](cos * x + sin * y, cos * y - sin * x)
    return np.clip(0.5 - outside * radius * size, 0, 1)


@lru_cache
def _grid(size: int) -> tuple[np.ndarray, np.ndarray]:
    centres = (np.arange(size, dtype=np.float32) + 0.5) / size
    return centres[None, :], centres[:, None]


@dataclass(frozen=True)
class Drawing:
    """What is to be seen in one image."""

    colour: str
    shape: str
    background: str
    tone: float
    brightness: float
    centre: tuple[float, float]
    radius: float
    angle: float

    @classmethod
    def number(cls, index: int) -> "Drawing":
        """One of endlessly many; the classes take turns."""
        colour, shape = SHAPE_CLASSES[index % len(SHAPE_CLASSES)].split()
        draws = torch.rand(7, generator=generator_for(0, "shapes", index), dtype=torch.float64).tolist()
        background = list(BACKGROUNDS)[int(draws[0] * len(BACKGROUNDS))]
        darkest, lightest = BACKGROUNDS[background]
        radius = 0.24 + 0.16 * draws[3]
        nearest = radius + 0.03  # to the border: a pixel of 32
        return cls(
            colour=colour,
            shape=shape,
            background=background,
            tone=darkest + (lightest - darkest) * draws[1],
            brightness=0.85 + 0.15 * draws[2],
            centre=(nearest + (1 - 2 * nearest) * draws[4], nearest + (1 - 2 * nearest) * draws[5]),
            radius=radius,
            angle=math.radians(40 * draws[6] - 20),  # at 45 degrees a square would be a diamond
        )

    def paint(self, size: int) -> np.ndarray:
        """(size, size, 3), uint8."""
        coverage = _coverage(self.shape, size, self.centre, self.radius, self.angle)[..., None]
        colour = np.array(COLORS[self.colour], np.float32) * self.brightness
        return (self.tone + 0.5 + coverage * (colour - self.tone)).astype(np.uint8)

    def captions(self) -> list[str]:
        words = {"colour": self.colour, "shape": self.shape, "background": self.background}
        return [wording.format(**words) for wording in WORDINGS]


class Shapes:
    """The built-in set, of any count and size; an image is drawn when it is asked for."""

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
        return Image.fromarray(Drawing.number(index).paint(self.size))

    def label(self, index: int) -> int:
        return int(self.labels[index])

    def captions(self, index: int) -> list[str]:
        return Drawing.number(index).captions()

    def name(self, index: int) -> str:
        return f"shape {index}"

    def identity(self) -> str:
        return f"shapes {self.count} 1"  # the last number is raised when other images are drawn


def recognize(image: Image.Image) -> tuple[str, str | None] | None:
    """
    The colour and the shape that an image shows, read from its pixels alone; None where nothing coloured stands out,
    and None for the shape where what does is none of them.

    The background is what its border shows, the shape what differs from it most, and its form that of the drawn shape
    which covers it best when both are brought to the same place and area.
    """
    pixels = _smooth_pixels(image)
    background = np.median(_border(pixels), axis=0)
    difference = pixels - background
    distance = np.linalg.norm(difference, axis=-1)
    colour = np.median(pixels[distance >= 0.6 * np.quantile(distance, 0.99)], axis=0)
    contrast = colour - background
    if np.ptp(colour) < 0.25 or np.linalg.norm(contrast) < 0.25:
        return None
    mask = difference @ contrast > 0.5 * contrast @ contrast
    return _nearest_hue(colour), _nearest_shape(mask)


def _smooth_pixels(image: Image.Image) -> np.ndarray:
    image = image.convert("RGB").resize((64, 64), Image.Resampling.BICUBIC)
    return np.asarray(image.filter(ImageFilter.GaussianBlur(1.2)), np.float64) / 255


def _border(pixels: np.ndarray) -> np.ndarray:
    return np.concatenate([pixels[:2].reshape(-1, 3), pixels[-2:].reshape(-1, 3), pixels[:, :2].reshape(-1, 3),
                           pixels[:, -2:].reshape(-1, 3)])  # fmt: skip


def _nearest_hue(colour: np.ndarray) -> str:
    return min(COLORS, key=lambda name: abs((_hue(colour) - _hue(np.array(COLORS[name])) + 0.5) % 1 - 0.5))


def _hue(colour: np.ndarray) -> float:
    red, green, blue = colour - colour.mean()
    return math.atan2(math.sqrt(3) * (green - blue), 2 * red - green - blue) / (2 * math.pi)


_TEMPLATE_SIZE = 32
_TEMPLATE_AREA = 0.2  # of the template's square


def _nearest_shape(mask: np.ndarray) -> str | None:
    """The shape whose overlap with the mask (intersection over union) is largest, and at least 0.75."""
    if not 0.02 < mask.mean() < 0.7:
        return None
    names, templates = _templates()
    mask = _normalised(mask).reshape(-1)
    overlap = np.minimum(templates, mask).sum(-1) / np.maximum(templates, mask).sum(-1)
    return names[overlap.argmax()] if overlap.max() > 0.75 else None


def _normalised(mask: np.ndarray) -> np.ndarray:
    """A mask of 64 x 64, brought to the centre and to an area of 0.2."""
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
    """Every shape in twelve positions of its turn onto itself, as an image that shows it would be read."""
    turns = {"circle": 360, "square": 90, "triangle": 120, "cross": 90, "star": 72}
    names, masks = [], []
    for shape, turn in turns.items():
        for step in range(12):
            drawn = _coverage(shape, 64, (0.5, 0.5), 0.32, math.radians(turn * step / 12))
            blurred = Image.fromarray((drawn * 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(1.8))
            names.append(shape)
            masks.append(_normalised(np.asarray(blurred) > 127).reshape(-1))
    return names, np.stack(masks)
