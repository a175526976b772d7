"""The built-in shapes look as they are called, and what an image shows is read from its pixels."""

import numpy as np
import pytest
from PIL import Image, ImageFilter

from scalelong_diffusers.data import COLORS, SHAPE_CLASSES, SHAPES, recognize
from scalelong_diffusers.data.shapes import BACKGROUNDS, Drawing, Shapes


FRESH = range(50_000, 50_600)


def truth(index):
    return tuple(SHAPE_CLASSES[index % len(SHAPE_CLASSES)].split())


def share_right(images):
    return np.mean([recognize(image) == truth(index) for index, image in images.items()])


def shape_in(image):
    found = recognize(image)
    return found and found[1]


def drawn(size):
    return {index: Image.fromarray(Drawing.number(index).paint(size)) for index in FRESH}


@pytest.mark.parametrize("size", [32, 64])
def test_drawings_are_recognised(size):
    assert share_right(drawn(size)) >= 0.97


def test_blurred_and_noisy_drawings_are_recognised():
    rng = np.random.default_rng(0)

    def spoil(image):
        pixels = np.asarray(image.filter(ImageFilter.GaussianBlur(0.7))) / 255
        return Image.fromarray((255 * (pixels + rng.normal(0, 0.1, pixels.shape)).clip(0, 1)).astype(np.uint8))

    assert share_right({index: spoil(image) for index, image in drawn(32).items()}) >= 0.9


@pytest.mark.parametrize("size", [32, 64])
def test_no_shape_is_recognised_in_noise(size):
    rng = np.random.default_rng(0)
    for _ in range(100):
        uniform = rng.integers(0, 256, (size, size, 3))
        normal = (255 * rng.normal(0.5, 0.2, (size, size, 3)).clip(0, 1)).round()
        assert shape_in(Image.fromarray(uniform.astype(np.uint8))) is None
        assert shape_in(Image.fromarray(normal.astype(np.uint8))) is None


@pytest.mark.parametrize("colour", ["white", "black", "grey", "red"])
def test_nothing_is_recognised_in_an_empty_image(colour):
    assert recognize(Image.new("RGB", (32, 32), colour)) is None


def test_a_grey_shape_has_no_colour():
    grey = Image.fromarray(Drawing.number(0).paint(32)).convert("L")
    assert recognize(grey) is None


def test_a_stripe_has_a_colour_and_is_no_shape():
    pixels = np.full((32, 32, 3), 255, np.uint8)
    pixels[:, 8:11] = (220, 30, 30)
    assert recognize(Image.fromarray(pixels)) == ("red", None)


def test_shape_and_colour_are_told_apart_whichever_way_they_are_turned():
    for shape in SHAPES:
        for angle in (0.0, 0.5, 1.0, 2.0, 3.0):
            drawing = Drawing("green", shape, "white", 250, 1.0, (0.5, 0.5), 0.3, angle)
            assert recognize(Image.fromarray(drawing.paint(32))) == ("green", shape)


def test_colours_have_their_names():
    """Held to the names' plain meaning: which of the three primaries are strong."""
    primaries = {"red": "r", "yellow": "rg", "green": "g", "cyan": "gb", "blue": "b", "magenta": "rb"}
    strong = {
        name: "".join(letter for letter, value in zip("rgb", rgb) if value > 128) for name, rgb in COLORS.items()
    }
    assert strong == primaries


def test_areas_are_those_of_the_shapes():
    """By the formulas of school."""
    sin_36 = np.sin(np.pi / 5)
    areas = {
        "circle": np.pi * 0.9**2,
        "square": 1.4**2,
        "triangle": 3 * np.sqrt(3) * 0.5**2,
        "cross": 2 * 1.9 * 0.6 - 0.6**2,
        "star": 5 * 0.42 * sin_36,  # ten triangles of sides 1 and 0.42 with 36 degrees between them
    }
    for shape, area in areas.items():
        for angle in (0.0, 0.3):
            drawing = Drawing("red", shape, "black", 0, 1.0, (0.5, 0.5), 0.3, angle)
            covered = drawing.paint(256)[..., 0] / COLORS["red"][0]
            assert covered.mean() / 0.3**2 == pytest.approx(area, rel=0.005)


def test_a_drawing_depends_on_its_number_alone_and_has_any_size():
    shapes = Shapes(count=100, size=48)
    again = Shapes(count=1000, size=48)
    assert shapes.image(7).size == (48, 48)
    assert shapes.image(7).tobytes() == again.image(7).tobytes()
    assert shapes.captions(7) == again.captions(7)
    assert len({shapes.image(index).tobytes() for index in range(100)}) == 100
    large = np.asarray(Shapes(100, 192).image(7).resize((48, 48), Image.Resampling.BOX), float)
    assert abs(large - np.asarray(shapes.image(7), float)).mean() < 1  # the same picture, antialiased


def test_classes_take_turns_and_captions_say_what_is_there():
    shapes = Shapes(count=60, size=32)
    assert np.bincount(shapes.labels).tolist() == [2] * len(SHAPE_CLASSES)
    for index in range(60):
        colour, shape = truth(index)
        captions = shapes.captions(index)
        assert all(colour in caption and shape in caption for caption in captions)
        tone = np.asarray(shapes.image(index))[0, 0].mean()
        background = next(name for name, (low, high) in BACKGROUNDS.items() if low - 1 <= tone <= high + 1)
        assert background in captions[0]


def test_shapes_are_wholly_inside():
    for index in range(300):
        pixels = Drawing.number(index).paint(32).astype(int)
        border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert np.ptp(border.reshape(-1)) <= 60  # at most a trace of antialiasing, at a star's tip
