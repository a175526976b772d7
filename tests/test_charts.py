"""Charts as SVG."""

import pytest

from scalelong_diffusers.charts import chart, even_values, round_values


@pytest.mark.parametrize(
    ("low", "high", "values"),
    [
        (0.0717, 0.118, [0.08, 0.09, 0.1]),
        (0.013, 0.6, [0.02, 0.05, 0.1, 0.2, 0.5]),
        (0.9, 1200, [1, 10, 100, 1000]),
        (0.0721, 0.0722, [0.0721, 0.0722]),
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
