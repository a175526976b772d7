"""The HTML of the app: images, the table of skips, curves, and a style sheet that loads nothing."""

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence

from PIL.Image import Image

from scalelong_diffusers.charts import HEIGHT, WIDTH, Curve, chart
from scalelong_diffusers.patching import SkipConnections


_SMALL = 128  # smaller images are enlarged without smoothing
STYLE = """
.gradio-container .min_value, .gradio-container .max_value { color: var(--body-text-color-subdued); }
.gradio-container { max-width: 78rem !important; margin: 0 auto !important; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(16rem, 100%), 1fr)); gap: 1rem; }
.pair figure { margin: 0; min-width: 0; }
.pair figcaption { font-weight: 600; margin-bottom: .25rem; }
.images { display: grid; gap: 4px; }
.images span { min-width: 0; font-size: .75rem; line-height: 1.3; text-align: center; overflow: hidden;
  text-overflow: ellipsis; white-space: nowrap; color: var(--body-text-color); }
.images img { width: 100%; display: block; border-radius: 3px; }
.images img.small { image-rendering: pixelated; }
.picture { margin: 1rem 0 0; } .picture img { width: min(30rem, 100%); image-rendering: pixelated; }
table.skips { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
table.skips th, table.skips td { padding: .15rem .6rem .15rem 0; text-align: left; font-weight: normal;
  border-bottom: 1px solid var(--border-color-primary); overflow-wrap: anywhere; }
svg.curves { --a: #c2410c; --b: #2563eb; width: 100%; max-width: 40rem; height: auto; }
.dark svg.curves { --a: #fdba74; --b: #93c5fd; }
svg.curves text { fill: var(--body-text-color); font-size: 16px; }
svg.curves .axis { stroke: var(--border-color-primary); }
svg.curves .curve { fill: none; stroke-width: 2.5; }
svg.curves .curve.a { stroke: var(--a); } svg.curves text.a { fill: var(--a); }
svg.curves .curve.b { stroke: var(--b); stroke-dasharray: 7 4; } svg.curves text.b { fill: var(--b); }
iframe.report { width: 100%; height: 75vh; border: 1px solid var(--border-color-primary); border-radius: 6px; }
"""


def pair_html(columns: Mapping[str, Sequence[Image]], labels: Sequence[str]) -> str:
    """Return columns of images by title, next to each other if the screen is wide enough."""
    figures = [_images(html.escape(title), images, labels) for title, images in columns.items()]
    return f'<div class="pair">{"".join(figures)}</div>'


def picture_html(image: Image, title: str) -> str:
    """Return one image, enlarged without smoothing."""
    name = html.escape(title)
    return (
        f'<figure class="picture"><figcaption>{name}</figcaption><img src="{_data_url(image)}" alt="{name}"></figure>'
    )


def _images(title: str, images: Sequence[Image], labels: Sequence[str]) -> str:
    cells = []
    for k, image in enumerate(images):
        label = html.escape(labels[k] if labels else f"image {k}")
        small = ' class="small"' if max(image.size) < _SMALL else ""
        text = label if labels else ""
        cells.append(
            f'<span title="{label}"><img{small} src="{_data_url(image)}" alt="{title}: {label}">{text}</span>'
        )
    columns = math.ceil(math.sqrt(len(images)))
    style = f"grid-template-columns: repeat({columns}, minmax(0, 1fr))"
    return (
        f'<figure><figcaption>{title}</figcaption><div class="images" style="{style}">{"".join(cells)}</div></figure>'
    )


def _data_url(image: Image) -> str:
    png = io.BytesIO()
    image.save(png, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"


def skips_html(skips: SkipConnections) -> str:
    """Return the table that `scalelong inspect` prints."""
    rows = [(skip.i, html.escape(skip.where), skip.width, html.escape(skip.scaling)) for skip in skips]
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("i", "where", "width", "factor"))
    table = f'<table class="skips"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
    return f"{table}<p>{html.escape(skips.summary())}</p>"


def curves_html(curves: Mapping[str, Curve], name: str) -> str:
    """Return a chart of at most two curves by label. Curves without two finite, positive values are left out."""
    drawn = {
        style: (label, [(x, y) for x, y in curve if y is not None and 0 < y < math.inf])
        for style, (label, curve) in zip("ab", curves.items())
    }
    drawn = {style: (label, curve) for style, (label, curve) in drawn.items() if len(curve) > 1}
    if not drawn:
        return "<p>The curves appear after the first steps.</p>"
    content = chart(
        {style: curve for style, (_, curve) in drawn.items()},
        name, right=150, labels={style: label for style, (label, _) in drawn.items()},
    )  # fmt: skip
    ends = "; ".join(f"{label}: {curve[-1][1]:.4g} at step {curve[-1][0]}" for label, curve in drawn.values())
    return (
        f'<svg class="curves" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(name)}. '
        f'{html.escape(ends)}">{content}</svg><p>{html.escape(ends)}</p>'
    )


def page_html(page: str, title: str) -> str:
    """Return a frame with a page that loads nothing."""
    return f'<iframe class="report" title="{html.escape(title)}" sandbox srcdoc="{html.escape(page)}"></iframe>'
