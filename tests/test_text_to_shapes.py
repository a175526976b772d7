"""The benchmark that checks in the pixels whether a model draws what the prompt says."""

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
    sys.modules.pop("text_to_shapes")


def test_sixteen_prompts_cover_every_color_and_shape(benchmark):
    prompts = [prompt for prompt, _ in benchmark.PROMPTS]
    assert len(set(prompts)) == 16
    assert {color for _, (color, _) in benchmark.PROMPTS} == set(COLORS)
    assert {shape for _, (_, shape) in benchmark.PROMPTS} == set(SHAPES)
    assert all(" ".join(wanted) in prompt for prompt, wanted in benchmark.PROMPTS)


def test_counts_what_the_images_show(benchmark):
    size = benchmark.TRAINING["resolution"]
    shapes = Shapes(60, size)
    drawn = [(tuple(shapes.class_names[shapes.label(k)].split()), shapes.image(k)) for k in range(60)]
    right = benchmark.count([("", wanted, recognize(image)) for wanted, image in drawn])
    assert right == {"images": 60, "color": 60, "shape": 60, "both": 60}
    # Shifted by one: the shape always differs, the color every fifth time.
    others = benchmark.count([("", wanted, recognize(image)) for (wanted, _), (_, image) in pairwise(drawn)])
    assert others["both"] == others["shape"] == 0
    assert others["color"] == sum(one[0] == other[0] for (one, _), (other, _) in pairwise(drawn))
    nothing = Image.new("RGB", (size, size), "gray")
    assert benchmark.count([("", wanted, recognize(nothing)) for wanted, _ in drawn])["color"] == 0
