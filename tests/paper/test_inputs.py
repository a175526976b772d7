"""Noisy inputs: Lemma 3.2 and Figures 3a and 3b."""

import pytest

from scalelong_diffusers.paper.experiment import Workspace
from scalelong_diffusers.paper.inputs import PERCENTS, SHAPES, UNIFORM, NoisyInputs, expected_energy, measure


def test_lemma_32_for_linear_betas():
    """E_t[abar_t] is 0.27551 for the linear betas 1e-4 to 0.02 in 1,000 steps."""
    assert expected_energy() == pytest.approx(1 - 2 * 0.27551 / 3, abs=1e-5)


@pytest.mark.parametrize("dataset", [UNIFORM, SHAPES])
def test_energy_is_what_the_lemma_expects(dataset, tmp_path):
    line = measure(NoisyInputs(dataset, 1_000), Workspace(tmp_path, "nowhere"))
    assert line["energy"] == pytest.approx(expected_energy(line["clean"]), abs=3 * line["error"])
    if dataset == UNIFORM:
        assert line["clean"] == pytest.approx(1 / 3, abs=1e-3)
    assert [row[0] for row in line["quantiles"]] == list(PERCENTS)
    for column in (1, 2):
        values = [row[column] for row in line["quantiles"]]
        assert values == sorted(values)


def test_number_of_pixels():
    assert NoisyInputs(SHAPES).num_pixels == 3 * 32 * 32
