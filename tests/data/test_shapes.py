"""The built-in shapes and `recognize`."""

import numpy as np
import pytest
from PIL import Image, ImageFilter

from scalelong_diffusers.data import COLORS, SHAPE_CLASSES, SHAPES, recognize
from scalelong_diffusers.data.shapes import BACKGROUNDS, Drawing, Shapes


FRESH = range(50_000, 50_600)


def label_of(index):
    return tuple(SHAPE_CLASSES[index % len(SHAPE_CLASSES)].split())


def accuracy(images):
    return np.mean([recognize(image) == label_of(index) for index, image in images.items()])


def shape_in(image):
    found = recognize(image)
    return found and found[1]


def drawn(size):
    return {index: Image.fromarray(Drawing.from_number(index).paint(size)) for index in FRESH}


@pytest.mark.parametrize("size", [32, 64])
def test_recognizes_drawings(size):
    assert accuracy(drawn(size)) >= 0.97


def test_recognizes_blurred_and_noisy_drawings():
    rng = np.random.default_rng(0)

    def spoil(image):
        pixels = np.asarray(image.filter(ImageFilter.GaussianBlur(0.7))) / 255
        return Image.fromarray((255 * (pixels + rng.normal(0, 0.1, pixels.shape)).clip(0, 1)).astype(np.uint8))

    assert accuracy({index: spoil(image) for index, image in drawn(32).items()}) >= 0.9


@pytest.mark.parametrize("size", [32, 64])
def test_recognizes_no_shape_in_noise(size):
    rng = np.random.default_rng(0)
    for _ in range(100):
        uniform = rng.integers(0, 256, (size, size, 3))
        normal = (255 * rng.normal(0.5, 0.2, (size, size, 3)).clip(0, 1)).round()
        assert shape_in(Image.fromarray(uniform.astype(np.uint8))) is None
        assert shape_in(Image.fromarray(normal.astype(np.uint8))) is None


@pytest.mark.parametrize("color", ["white", "black", "gray", "red"])
def test_recognizes_nothing_in_an_empty_image(color):
    assert recognize(Image.new("RGB", (32, 32), color)) is None


def test_recognizes_nothing_in_a_gray_image():
    gray = Image.fromarray(Drawing.from_number(0).paint(32)).convert("L")
    assert recognize(gray) is None


def test_recognizes_only_the_color_of_a_stripe():
    pixels = np.full((32, 32, 3), 255, np.uint8)
    pixels[:, 8:11] = (220, 30, 30)
    assert recognize(Image.fromarray(pixels)) == ("red", None)


def test_recognizes_rotated_shapes():
    for shape in SHAPES:
        for angle in (0.0, 0.5, 1.0, 2.0, 3.0):
            drawing = Drawing("green", shape, "white", 250, 1.0, (0.5, 0.5), 0.3, angle)
            assert recognize(Image.fromarray(drawing.paint(32))) == ("green", shape)


def test_colors_match_their_names():
    primaries = {"red": "r", "yellow": "rg", "green": "g", "cyan": "gb", "blue": "b", "magenta": "rb"}
    strong = {
        name: "".join(letter for letter, value in zip("rgb", rgb) if value > 128) for name, rgb in COLORS.items()
    }
    assert strong == primaries


def test_areas_match_the_geometry():
    sin_36 = np.sin(np.pi / 5)
    areas = {
        "circle": np.pi * 0.9**2,
        "square": 1.4**2,
        "triangle": 3 * np.sqrt(3) * 0.5**2,
        "cross": 2 * 1.9 * 0.6 - 0.6**2,
        "star": 5 * 0.42 * sin_36,  # ten triangles with sides 1 and 0.42 at 36 degrees
    }
    for shape, area in areas.items():
        for angle in (0.0, 0.3):
            drawing = Drawing("red", shape, "black", 0, 1.0, (0.5, 0.5), 0.3, angle)
            covered = drawing.paint(256)[..., 0] / COLORS["red"][0]
            assert covered.mean() / 0.3**2 == pytest.approx(area, rel=0.005)


def test_drawing_depends_only_on_its_number():
    shapes = Shapes(count=100, size=48)
    again = Shapes(count=1000, size=48)
    assert shapes.image(7).size == (48, 48)
    assert shapes.image(7).tobytes() == again.image(7).tobytes()
    assert shapes.captions(7) == again.captions(7)
    assert len({shapes.image(index).tobytes() for index in range(100)}) == 100
    large = np.asarray(Shapes(100, 192).image(7).resize((48, 48), Image.Resampling.BOX), float)
    assert abs(large - np.asarray(shapes.image(7), float)).mean() < 1  # the same image, antialiased


def test_classes_alternate_and_captions_match():
    shapes = Shapes(count=60, size=32)
    assert np.bincount(shapes.labels).tolist() == [2] * len(SHAPE_CLASSES)
    for index in range(60):
        color, shape = label_of(index)
        captions = shapes.captions(index)
        assert all(color in caption and shape in caption for caption in captions)
        tone = np.asarray(shapes.image(index))[0, 0].mean()
        background = next(name for name, (low, high) in BACKGROUNDS.items() if low - 1 <= tone <= high + 1)
        assert background in captions[0]


def test_shapes_are_inside_the_image():
    for index in range(300):
        pixels = Drawing.from_number(index).paint(32).astype(int)
        border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert np.ptp(border.reshape(-1)) <= 60  # a trace of antialiasing at a tip of a star
