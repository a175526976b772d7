"""Charts as SVG."""

import pytest

from scalelong_diffusers.charts import round_values


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
