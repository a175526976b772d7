"""
How large are features and gradients at each depth of an untrained U-ViT, for each start of its skip layers?

    python benchmarks/depth.py [--json]

Prints the root mean square of each block's output and the norm of the loss gradient with respect to it, and draws the
figure of docs/how_it_works.md. It takes a few seconds.
"""

import argparse
import json
from pathlib import Path

import torch

from scalelong_diffusers import UViTModel
from scalelong_diffusers.charts import HEIGHT, WIDTH, Curve, chart


FIGURES = Path(__file__).parents[1] / "docs" / "images"
WIDTHS = (64, 512)
LAYERS = 20
STARTS = ("reference", "zero", "sum", "balanced")
QUANTITIES = ("output (root mean square)", "gradient (norm)")
_LIGHT = ("#59636e", "#d1d9e0", ("#9a3412", "#15803d", "#1d4ed8", "#7e22ce"))
_DARK = ("#9198a1", "#3d444d", ("#fdba74", "#86efac", "#93c5fd", "#d8b4fe"))
_DASHES = ("7 4", "2 3", "none", "10 3 2 3")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    arguments = parser.parse_args()
    measured = {width: {start: measure(width, start) for start in STARTS} for width in WIDTHS}
    if arguments.json:
        print(json.dumps(measured))
    else:
        print(table(measured))
    for name, colors in {"light": _LIGHT, "dark": _DARK}.items():
        (FIGURES / f"depth-{name}.svg").write_text(figure(measured, *colors))


def measure(width: int, start: str, seed: int = 0) -> dict[str, list[float]]:
    """Return the size of the output of each block, and of the gradient of the loss with respect to it."""
    torch.manual_seed(seed)
    model = UViTModel(
        sample_size=28, patch_size=4, in_channels=1, hidden_size=width, num_layers=LAYERS,
        num_attention_heads=width // 16, skip_init=start,
    )  # fmt: skip
    outputs = []
    for block in (*model.in_blocks, model.mid_block, *model.out_blocks):
        block.register_forward_hook(lambda block, args, output: outputs.append(output))
    noise = torch.randn(16, 1, 28, 28)
    loss = (model(noise, torch.linspace(0, 999, 16)).sample - noise).square().mean()
    gradients = torch.autograd.grad(loss, outputs)
    sizes = [output.square().mean().sqrt().item() for output in outputs]
    return dict(zip(QUANTITIES, (sizes, [gradient.norm().item() for gradient in gradients])))


def table(measured: dict[int, dict[str, dict[str, list[float]]]]) -> str:
    """Return the values of the middle block and of the last block as a Markdown table."""
    rows = [("width", "start", *(f"{name}, {place}" for name in QUANTITIES for place in ("middle", "last")))]
    rows.append(("---",) * len(rows[0]))
    for width, starts in measured.items():
        for start, sizes in starts.items():
            values = [sizes[name][index] for name in QUANTITIES for index in (LAYERS // 2, -1)]
            rows.append((str(width), start, *(f"{value:.2g}" for value in values)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def figure(
    measured: dict[int, dict[str, dict[str, list[float]]]], text: str, line: str, colors: tuple[str, ...]
) -> str:
    """Draw four charts: output and gradient for each width."""
    styles = {start: f"c{k}" for k, start in enumerate(STARTS)}
    strokes = "".join(
        f".curve.{style} {{ stroke: {color}; stroke-dasharray: {dashes}; }} text.{style} {{ fill: {color}; }} "
        for style, color, dashes in zip(styles.values(), colors, _DASHES)
    )
    charts = []
    for row, quantity in enumerate(QUANTITIES):
        for column, width in enumerate(measured):
            curves: dict[str, Curve] = {
                styles[start]: list(enumerate(sizes[quantity], start=1)) for start, sizes in measured[width].items()
            }
            content = chart(
                curves, f"{quantity}, width {width}", first=1, right=80,
                labels={style: start for start, style in styles.items()}, axis="block",
            )  # fmt: skip
            charts.append(
                f'<svg x="{column * WIDTH}" y="{row * HEIGHT}" width="{WIDTH}" height="{HEIGHT}">{content}</svg>'
            )
    title = "Features and gradients over the depth of an untrained U-ViT"
    style = (
        f"text {{ fill: {text}; font: 14px system-ui, sans-serif; }} .axis {{ stroke: {line}; }} "
        f".curve {{ fill: none; stroke-width: 2; }} {strokes}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {2 * HEIGHT}" role="img" '
        f'aria-label="{title}"><title>{title}</title><style>{style}</style>{"".join(charts)}</svg>\n'
    )


if __name__ == "__main__":
    main()
