"""Draw images in a grid, with their classes or prompts below them, and cut such a grid into its images again."""

import math
import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from scalelong_diffusers.terminal import printable


# Smaller images are enlarged to at least this width, without smoothing.
_MIN_WIDTH = 128
_FONT_SIZE, _LETTER_WIDTH, _LINE_HEIGHT, _LINES = 11, 6, 14, 2


def draw_grid(
    images: Sequence[Image.Image], titles: Sequence[str] | None = None, columns: int | None = None
) -> Image.Image:
    """Draw images in a grid, which is about square if `columns` is None. Titles are cut to two lines."""
    columns = columns or math.ceil(math.sqrt(len(images)))
    factor, height = _cell(images[0].size, titles is not None)
    width = images[0].width * factor
    picture = Image.new("RGB", (columns * width, math.ceil(len(images) / columns) * height), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(_FONT_SIZE)
    for k, image in enumerate(images):
        left, top = k % columns * width, k // columns * height
        scaled = image.convert("RGBA").resize((width, image.height * factor), Image.Resampling.NEAREST)
        picture.paste(scaled, (left, top), scaled)
        if titles is not None:
            lines = textwrap.wrap(printable(titles[k]), width // _LETTER_WIDTH, max_lines=_LINES, placeholder=" ...")
            draw.multiline_text((left + 2, top + scaled.height), "\n".join(lines), "black", font, spacing=2)
    return picture


def cut_grid(picture: Image.Image, size: tuple[int, int], has_titles: bool) -> list[Image.Image]:
    """Return the cells of a grid of images of this size, row by row. The last ones may be empty."""
    factor, height = _cell(size, has_titles)
    width = size[0] * factor
    corners = [(x, y) for y in range(0, picture.height, height) for x in range(0, picture.width, width)]
    cells = [picture.crop((x, y, x + width, y + size[1] * factor)) for x, y in corners]
    return [cell.resize(size, Image.Resampling.NEAREST) for cell in cells]


def _cell(size: tuple[int, int], has_titles: bool) -> tuple[int, int]:
    """Return the factor by which images are enlarged, and the height of a cell."""
    factor = math.ceil(_MIN_WIDTH / size[0])
    return factor, size[1] * factor + (_LINES * _LINE_HEIGHT if has_titles else 0)
