"""Read image files, which may come from strangers: only raster formats, regular files and limited sizes."""

import os
import stat
import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from scalelong_diffusers.errors import UserError


# Pillow would also start Ghostscript for EPS files, and use rarely tested decoders for many other formats.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
IMAGE_SUFFIXES = tuple(suffix for suffix, kind in Image.registered_extensions().items() if kind in FORMATS)
MAX_FILE_BYTES = 2**28
MAX_PIXELS = 100_000_000


class UnreadableImage(UserError):
    """An image cannot be used. The message names it."""

    def with_skip_advice(self) -> "UnreadableImage":
        return UnreadableImage(f"{self}; --on_bad_image skip leaves them out")


def read_image(file: str | Path | bytes, name: str, folders: Sequence[Path] = ()) -> Image.Image:
    """
    Decode the first frame of an image file and apply its EXIF orientation. Raises `UnreadableImage` if that fails.

    Args:
        file: path or content of the file.
        name: how messages name the image.
        folders: see [`read_file`].
    """
    try:
        return _decode(file if isinstance(file, bytes) else read_file(file, folders))
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise errors of many types
        raise UnreadableImage(f"{name} cannot be read: {error}") from error


def read_file(path: str | Path, folders: Sequence[Path] = ()) -> bytes:
    """
    Read a regular file of at most `MAX_FILE_BYTES`.

    Args:
        folders: resolved folders, one of which must contain the file after links are followed. Relative paths start
            at the first of them.
    """
    if folders:
        path = resolve_inside(path, folders)
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):  # a pipe would block, and a device may never end
        raise UserError("it is not a regular file")
    if status.st_size > MAX_FILE_BYTES:
        raise UserError(f"it has {status.st_size:,} bytes; at most {MAX_FILE_BYTES:,} are accepted")
    return Path(path).read_bytes()


def resolve_inside(path: str | Path, folders: Sequence[Path]) -> Path:
    """Follow the links of a path, and raise a `UserError` if it leads out of the folders."""
    resolved = Path(os.path.realpath(folders[0] / path))
    if not any(resolved.is_relative_to(folder) for folder in folders):
        raise UserError(f"it is outside of the dataset's folder {folders[0]}")
    return resolved


def _decode(content: bytes) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # of Pillow's own, other limit
            with Image.open(BytesIO(content), formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise Image.DecompressionBombError
                image.load()
                ImageOps.exif_transpose(image, in_place=True)
                return _with_eight_bits(image)
    except Image.UnidentifiedImageError as error:
        given = f"it starts with {content[:16]!r}" if content else "it is empty"
        raise UserError(f"not a PNG, JPEG, WebP, GIF, BMP or TIFF image ({given})") from error
    except Image.DecompressionBombError as error:
        raise UserError(f"it has more than {MAX_PIXELS:,} pixels, the limit; scale it down") from error


def _with_eight_bits(image: Image.Image) -> Image.Image:
    # Pillow's own conversion clips 16-bit values above 255.
    if image.mode == "I" or image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) / 257).round().clip(0, 255).astype(np.uint8))
    if image.mode == "F":
        raise UserError("floating-point pixels have an unknown range; convert the image to 8 or 16 bits")
    return image
