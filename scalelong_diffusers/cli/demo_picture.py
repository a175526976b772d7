"""Draw the samples of the demo's two runs during training as one picture, for a README or a talk."""

import io
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from scalelong_diffusers.cli.demo_page import Run


# In pixels; twice the size at which a README shows the picture.
_PANEL, _GAP, _TEXT, _LINE = (384, 320), 32, 28, 44
# Readable on white and on black, because the background is transparent.
_GRAY = "#767e88"


def draw_film(runs: Sequence[Run]) -> bytes:
    """Return a PNG with a row of sample grids for each run, and a column for each step."""
    columns, height = max(len(run.film) for run in runs), _PANEL[1] + 2 * _LINE + _GAP
    picture = Image.new("RGBA", (columns * (_PANEL[0] + _GAP) - _GAP, len(runs) * height - _GAP))
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(_TEXT)
    for row, run in enumerate(runs):
        draw.text((0, row * height), run.label, _GRAY, font)
        for column, frame in enumerate(run.film):
            left, top = column * (_PANEL[0] + _GAP), row * height + _LINE
            draw.text((left, top + _PANEL[1]), f"step {frame.step:,}: {frame.outcome}", _GRAY, font)
            if frame.png is not None:
                grid = Image.open(io.BytesIO(frame.png))
                picture.paste(grid.resize(_PANEL, Image.Resampling.NEAREST), (left, top))
    file = io.BytesIO()
    # A palette of 255 colors is a quarter of the size and looks the same.
    palette = picture.quantize(255, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    palette.save(file, "PNG", optimize=True)
    return file.getvalue()
