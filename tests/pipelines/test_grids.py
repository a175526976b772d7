"""Grids of images with titles, and back."""

import numpy as np
import pytest
from PIL import Image

from scalelong_diffusers.pipelines.grids import cut_grid, draw_grid


@pytest.fixture
def images():
    generator = np.random.default_rng(0)
    return [Image.fromarray(generator.integers(0, 256, (8, 16, 3), dtype=np.uint8)) for _ in range(5)]


@pytest.mark.parametrize("titles", [None, ["cat", "", "a very long prompt " * 20, "\x1b[31m", "犬"]])
def test_cutting_a_grid_returns_the_images(images, titles):
    picture = draw_grid(images, titles)
    assert picture.size == (3 * 128, 2 * (64 if titles is None else 64 + 28))
    cells = cut_grid(picture, (16, 8), has_titles=titles is not None)
    assert len(cells) == 6
    for image, cell in zip(images, cells):
        assert np.array_equal(image, cell)


def test_titles_are_drawn_below_their_images_and_cut(images):
    plain, titled = (np.asarray(draw_grid(images[:2], ["", title], columns=2)) for title in ("", "word " * 50))
    assert (plain[64:] == 255).all()
    assert np.array_equal(plain[:64], titled[:64])
    assert np.array_equal(plain[:, :128], titled[:, :128])
    assert (titled[64:, 128:] != 255).any()


def test_large_images_and_transparency():
    image = Image.new("RGBA", (200, 150), (255, 0, 0, 0))
    assert draw_grid([image]).size == (200, 150)
    assert draw_grid([image]).getpixel((0, 0)) == (255, 255, 255)
    gray = draw_grid([Image.new("L", (8, 8), 7)])
    assert gray.mode == "RGB"
    assert gray.getpixel((0, 0)) == (7, 7, 7)
