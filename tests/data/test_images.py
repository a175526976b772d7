"""Decoding image files, and the transform."""

import numpy as np
import pytest
import torch
from PIL import Image

from scalelong_diffusers.data.batch import Draws
from scalelong_diffusers.data.images import Transform, is_gray, to_pixel_values, with_channels
from scalelong_diffusers.image_files import read_image


DRAWS = Draws(0, "train", 0)


@pytest.fixture
def file(tmp_path):
    def save(image, name="image.png", **options):
        path = tmp_path / name
        image.save(path, **options)
        return str(path)

    return save


def read(path, channels):
    return np.asarray(with_channels(read_image(path, "it"), channels))


def one_color(mode, color):
    return Image.new(mode, (2, 2), color)


def palette_image(transparent):
    image = Image.new("P", (2, 2))
    image.putpalette([0, 0, 0, 200, 100, 50])
    image.putdata([1, 1, 1, 0])
    return image, {"transparency": 0} if transparent else {}


def sixteen_bits(value):
    return Image.fromarray(np.full((2, 2), value, np.uint16))


KINDS = {
    "rgb": (one_color("RGB", (10, 20, 30)), (10, 20, 30)),
    "gray": (one_color("L", 77), (77, 77, 77)),
    "black and white": (one_color("1", 1), (255, 255, 255)),
    "16 bits": (sixteen_bits(0x8000), (128, 128, 128)),
    "16 bits, below 256": (sixteen_bits(200), (1, 1, 1)),
    "16 bits, white": (sixteen_bits(0xFFFF), (255, 255, 255)),
    "gray, half transparent": (one_color("LA", (0, 127)), (128, 128, 128)),
    "transparent": (one_color("RGBA", (10, 20, 30, 0)), (255, 255, 255)),
    "opaque": (one_color("RGBA", (10, 20, 30, 255)), (10, 20, 30)),
}


@pytest.mark.parametrize(("image", "expected"), KINDS.values(), ids=KINDS)
def test_converts_pixel_formats_to_rgb(file, image, expected):
    assert tuple(read(file(image), 3)[0, 0]) == expected


def test_converts_cmyk(file):
    path = file(one_color("CMYK", (0, 255, 255, 0)), "image.tif")
    assert tuple(read(path, 3)[0, 0]) == (255, 0, 0)


@pytest.mark.parametrize("transparent", [False, True])
def test_converts_palettes(file, transparent):
    image, options = palette_image(transparent)
    pixels = read(file(image, **options), 3)
    assert tuple(pixels[0, 0]) == (200, 100, 50)
    assert tuple(pixels[1, 1]) == ((255, 255, 255) if transparent else (0, 0, 0))


def test_keeps_transparency_with_four_channels(file):
    assert tuple(read(file(one_color("RGBA", (10, 20, 30, 40))), 4)[0, 0]) == (10, 20, 30, 40)
    assert tuple(read(file(one_color("L", 7)), 4)[0, 0]) == (7, 7, 7, 255)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_applies_exif_orientation(file, orientation):
    upright = np.zeros((4, 6, 3), np.uint8)
    upright[:2, :3] = (255, 0, 0)
    stored = Image.fromarray(upright)
    stored_by_camera = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    if orientation > 1:
        stored = stored.transpose(stored_by_camera[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = file(stored, exif=exif)
    assert (read(path, 3) == upright).all()


def test_is_gray_looks_at_the_pixels():
    assert is_gray(one_color("RGB", (9, 9, 9)))
    assert is_gray(one_color("1", 1))
    assert is_gray(one_color("LA", (3, 9)))
    assert not is_gray(one_color("RGB", (9, 9, 10)))
    assert not is_gray(palette_image(transparent=False)[0])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"hello", r"^it cannot be read: not a PNG, JPEG, WebP, GIF, BMP or TIFF image \(it starts with b'hello'\)"),
        (b"", r"^it cannot be read: not a PNG, JPEG, WebP, GIF, BMP or TIFF image \(it is empty\)"),
        (None, r"No such file or directory: .*"),
    ],
)
def test_rejects_files_that_are_not_images(tmp_path, content, reason):
    path = tmp_path / "broken.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{reason}$"):
        read_image(str(path), "it")


@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "bmp", "tif", "webp"])
def test_rejects_truncated_files(file, tmp_path, suffix):
    rng = np.random.default_rng(0)
    path = file(Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)), f"image.{suffix}")
    content = (tmp_path / f"image.{suffix}").read_bytes()
    with pytest.raises(ValueError, match=r"\w"):
        read_image(content[: len(content) // 2], "it")
    assert read_image(path, "it").size == (64, 64)


def test_rejects_floating_point_pixels(file):
    with pytest.raises(ValueError, match="floating-point pixels have an unknown range"):
        read_image(file(Image.new("F", (2, 2)), "image.tif"), "it")


def ramp(width, height):
    """Return an image with the column as red and the row as green."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(width), np.arange(height)[:, None]
    return Image.fromarray(pixels)


def test_scales_the_shorter_side_to_the_resolution():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (16, 32, 3), dtype=np.uint8)
    means = pixels.reshape(8, 2, 16, 2, 3).mean((1, 3)).round()
    cut = Transform(resolution=8, channels=3, center_crop=True, interpolation="box")(Image.fromarray(pixels), DRAWS)
    assert cut.shape == (8, 8, 3)
    assert abs(cut - means[:, 4:12]).max() <= 1


@pytest.mark.parametrize("size", [(7, 5), (5, 7), (1, 9), (33, 32), (640, 427)])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_output_has_the_resolution_for_any_input(size, channels):
    transform = Transform(resolution=6, channels=channels, random_flip=True)
    for position in range(5):
        pixels = transform(Image.new("RGB", size), Draws(0, "train", position))
        assert pixels.shape == (6, 6, channels)
        assert pixels.dtype == np.uint8


def test_cuts_crop_size_before_scaling():
    cut = Transform(resolution=4, channels=3, crop_size=4)(ramp(10, 8), DRAWS)
    assert cut[0, :, 0].tolist() == [3, 4, 5, 6]
    assert cut[:, 0, 1].tolist() == [2, 3, 4, 5]


def test_rejects_crop_size_larger_than_the_image():
    with pytest.raises(ValueError, match="its 10 x 8 pixels are smaller than crop_size=9"):
        Transform(resolution=4, channels=3, crop_size=9)(ramp(10, 8), DRAWS)


@pytest.mark.parametrize("upright", [False, True])
def test_random_crops_cover_the_image(upright):
    transform = Transform(resolution=4, channels=3)
    image = ramp(4, 6) if upright else ramp(6, 4)
    axis = 1 if upright else 0
    starts = [int(transform(image, Draws(0, "train", position))[0, 0, axis]) for position in range(300)]
    assert set(starts) == {0, 1, 2}
    assert min(np.bincount(starts)) > 60


def test_mirrors_half_of_the_images():
    transform = Transform(resolution=4, channels=3, random_flip=True)
    mirrored = [transform(ramp(4, 4), Draws(0, "train", position))[0, 0, 0] == 3 for position in range(400)]
    assert 150 < sum(mirrored) < 250


def test_pixel_values_are_in_minus_one_to_one():
    images = [np.full((2, 4, 3), value, np.uint8) for value in (0, 51, 255)]
    images[0][0, 1] = (255, 0, 51)
    values = to_pixel_values(images)
    assert (values.shape, values.dtype, values.is_contiguous()) == ((3, 3, 2, 4), torch.float32, True)
    torch.testing.assert_close(values[:, 0, 1, 1], torch.tensor([-1, -0.6, 1]))
    torch.testing.assert_close(values[0, :, 0, 1], torch.tensor([1, -1, -0.6]))
