"""The benchmark that reads from pixels whether a model drew what it was asked for."""

import sys
from itertools import pairwise

import pytest
from PIL import Image

from scalelong_diffusers.data import COLORS, SHAPES, recognize
from scalelong_diffusers.data.shapes import Shapes


@pytest.fixture
def benchmark(project_root, monkeypatch):
    monkeypatch.syspath_prepend(str(project_root / "benchmarks"))
    import text_to_shapes

    yield text_to_shapes
    for name in ("text_to_shapes", "measure"):
        sys.modules.pop(name)


def test_prompts_are_sixteen_of_every_colour_and_shape(benchmark):
    prompts = [prompt for prompt, _ in benchmark.PROMPTS]
    assert len(set(prompts)) == 16
    assert {colour for _, (colour, _) in benchmark.PROMPTS} == set(COLORS)
    assert {shape for _, (_, shape) in benchmark.PROMPTS} == set(SHAPES)
    assert all(" ".join(wanted) in prompt for prompt, wanted in benchmark.PROMPTS)


def test_what_is_drawn_is_counted_and_not_what_was_asked_for(benchmark):
    size = benchmark.TRAINING["resolution"]
    shapes = Shapes(60, size)
    drawn = [(tuple(shapes.class_names[shapes.label(k)].split()), shapes.image(k)) for k in range(60)]
    right = benchmark.count([("", wanted, recognize(image)) for wanted, image in drawn])
    assert right == {"images": 60, "colour": 60, "shape": 60, "both": 60}
    # One further: another shape each time, and another colour at every fifth.
    others = benchmark.count([("", wanted, recognize(image)) for (wanted, _), (_, image) in pairwise(drawn)])
    assert others["both"] == others["shape"] == 0
    assert others["colour"] == sum(one[0] == other[0] for (one, _), (other, _) in pairwise(drawn))
    nothing = Image.new("RGB", (size, size), "grey")
    assert benchmark.count([("", wanted, recognize(nothing)) for wanted, _ in drawn])["colour"] == 0
