"""Build the page of the linear probes of a model."""

from scalelong_diffusers.diagnosis.page_parts import IN_ORDER, curves_figure, document, html_table, key, section
from scalelong_diffusers.diagnosis.probe import PIXELS, ProbeResult


_NOTE = (
    "<p>A linear classifier reads the class of an image from a block's output, averaged over the cells of a grid. The "
    "first block makes the outermost skip, and the last block reads it. The baseline reads the class from the pixels "
    "of the same noisy images.</p>"
)


def build_probe_page(result: ProbeResult, source: str, data: str) -> str:
    """
    Return the page as HTML.

    Args:
        source: name of the model.
        data: description of the data.
    """
    sections = [
        section("What the blocks know", _NOTE, key(PIXELS, "blocks"), f'<div class="pair">{_charts(result)}</div>'),
        section("All accuracies", html_table(result.rows())),
    ]
    about = f"{result.model}; {data}. {result.size}."
    return document(f"Linear probes of {source}", [result.summary], about, sections)


def _charts(result: ProbeResult) -> str:
    pixels, *blocks = result.blocks
    charts = []
    for k, timestep in enumerate(result.timesteps):
        baseline = 100 * pixels.accuracies[k]
        curve = [(number, 100 * block.accuracies[k]) for number, block in enumerate(blocks, 1)]
        curves = {PIXELS: [(1, baseline), (len(blocks), baseline)], "blocks": curve}
        charts.append(curves_figure(f"Accuracy in %, timestep {timestep}", curves, IN_ORDER, linear=True))
    return "".join(charts)
