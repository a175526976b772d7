"""Charts as SVG."""

import re
from itertools import pairwise

import pytest

from scalelong_diffusers.charts import Panel, chart, even_values, figure, round_values


@pytest.mark.parametrize(
    ("low", "high", "values"),
    [
        (0.0717, 0.118, [0.08, 0.09, 0.1, 0.11]),
        (0.013, 0.6, [0.02, 0.05, 0.1, 0.2, 0.5]),
        (0.9, 1200, [1, 10, 100, 1000]),
        (4.83329, 6.6382, [5, 5.5, 6, 6.5]),
        (0.0721, 0.0722, [0.0721, 0.07215, 0.0722]),
        (3, 3, [3]),
    ],
)
def test_chart_lines_have_round_values(low, high, values):
    assert round_values(low, high) == values


@pytest.mark.parametrize(
    ("low", "high", "values"),
    [
        (10.2, 91.0, [20, 40, 60, 80]),
        (81.2, 84.9, [82, 83, 84]),
        (-0.4, 0.7, [-0.4, -0.2, 0, 0.2, 0.4, 0.6]),
        (0.0, 1.0, [0, 0.5, 1]),
        (3.0, 3.0, [3]),
    ],
)
def test_linear_charts_have_round_values_at_equal_distances(low, high, values):
    assert even_values(low, high) == values


def test_a_linear_axis_places_values_in_proportion():
    content = chart({"a": [(0, 1.0), (1, 2.0), (2, 3.0)]}, "accuracy", linear=True)
    points = content.split('points="')[1].split('"')[0].split()
    first, second, third = (float(point.split(",")[1]) for point in points)
    assert first - second == pytest.approx(second - third)
    assert ">2</text>" in content


def test_a_dot_marks_the_lowest_value():
    drawing = chart({"a": [(0, 3.0), (1, 1.0), (2, 2.0)]}, "loss", mark_lowest=True)
    lowest = re.search(r'points="([^"]*)"', drawing).group(1).split()[1]
    assert re.findall(r'<circle class="a" cx="([\d.]+)" cy="([\d.]+)"', drawing) == [tuple(lowest.split(","))]


def test_labels_of_the_axis_are_where_they_belong():
    """Six skips have four gaps of 1.25 between the labels, which move to integers."""
    drawing = chart({"a": [(i, 1.0 + i) for i in range(1, 7)]}, "size", first=1)
    labels = re.findall(r'<text x="([\d.]+)" y="284" [^>]*>(\d+)<', drawing)
    points = re.findall(r"([\d.]+),[\d.]+", re.search(r'points="([^"]*)"', drawing).group(1))
    assert [int(step) for _, step in labels] == [1, 2, 4, 5, 6]
    assert all(place == points[int(step) - 1] for place, step in labels)


def test_labels_stay_in_the_chart():
    ends = {f"curve {k}": [(0, k), (1, 100 + k / 100)] for k in range(5)}
    content = figure([Panel("loss", ends, linear=True)], "title", dark=False)
    heights = sorted(float(height) for height in re.findall(r'y="([\d.]+)">curve', content))
    assert heights[0] > 20
    assert all(b - a >= 15 for a, b in pairwise(heights))
