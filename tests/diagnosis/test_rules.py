"""The rules at and beyond their thresholds."""

import dataclasses

import pytest

from scalelong_diffusers.diagnosis.diagnose import diagnose
from scalelong_diffusers.diagnosis.figures import Headroom, Spread
from scalelong_diffusers.diagnosis.rules import (
    NOTHING_FOUND,
    RULES,
    UNTRAINED,
    judge,
    number_ranges,
    rounded,
    verdict,
)


@pytest.fixture
def calm(build, batches, noising):
    return diagnose(build(num_layers=6, skip_init="sum"), batches, noising, show_progress=False)


def with_gradients(diagnosis, quantity: str, spreads: list[Spread]):
    skips = [dataclasses.replace(skip, **{quantity: spread}) for skip, spread in zip(diagnosis.skips, spreads)]
    return dataclasses.replace(diagnosis, skips=skips)


def applied(diagnosis) -> list[str]:
    return [finding.rule for finding in judge(diagnosis) if finding.applies]


def test_a_calm_model_gets_no_advice(calm):
    assert applied(calm) == []
    assert verdict(judge(calm), is_trained=True) == [NOTHING_FOUND]
    assert verdict(judge(calm), is_trained=False) == [NOTHING_FOUND, UNTRAINED]


def test_each_rule_is_stated():
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.statement.startswith("If the ") and rule.statement.endswith(".") for rule in RULES)


def test_fading_main_path(calm):
    def faded(smallest: float):
        return with_gradients(calm, "hidden_gradient", [Spread(g, 0.3, 1) for g in (1.0, smallest, 0.5)])

    assert applied(faded(0.02)) == []
    assert applied(faded(0.005)) == ["fading"]
    assert "fades 200-fold" in verdict(judge(faded(0.005)), is_trained=True)[0]
    assert applied(faded(0.0)) == []  # a block that starts at zero says nothing


def test_varying_gradients_name_their_skips(calm):
    calm = with_gradients(calm, "hidden_gradient", [Spread(1, 0.1, 1)] * 3)
    varying = with_gradients(calm, "skip_gradient", [Spread(1, cv, 2) for cv in (0.1, 0.7, 1.4)])
    (sentence,) = verdict(judge(varying), is_trained=True)
    assert sentence.startswith("Gradients through skips 2 to 3 vary up to 14 times more over timesteps and images")
    assert applied(with_gradients(calm, "skip_gradient", [Spread(1, 0.25, 2)] * 3)) == []
    outermost = with_gradients(calm, "skip_gradient", [Spread(1, cv, 2) for cv in (0.9, 0.1, 0.1)])
    assert applied(outermost) == []  # CS would not change it
    constant = with_gradients(varying, "hidden_gradient", [Spread(1, 0, 1)] * 3)
    assert applied(constant) == []


def test_peaks_noise_and_headroom(calm):
    assert applied(with_gradients(calm, "skip_gradient", [Spread(1, 0.1, 30)] * 3)) == ["peaks"]
    sensitive = dataclasses.replace(calm, sensitivity={"plain": [1, 2], "cs": [1, 1]})
    assert applied(sensitive) == ["noise"]
    full = dataclasses.replace(calm, headroom=Headroom({"mid_block": 3, "out_blocks.0": 32_752}, {}))
    assert applied(full) == ["headroom"]
    (sentence,) = verdict(judge(full), is_trained=True)
    assert sentence.startswith("The largest activation, 33,000 in out_blocks.0, is 50 % of the largest fp16 number:")


@pytest.mark.parametrize(
    ("numbers", "words"),
    [([3], "skip 3"), ([1, 2, 3], "skips 1 to 3"), ([1, 4, 5, 9], "skips 1, 4 to 5, 9")],
)
def test_ranges_of_skips(numbers, words):
    assert number_ranges(numbers) == words


def test_large_numbers_have_no_exponent():
    assert [rounded(value) for value in (8.28e6, 217.3, 12.4, 3.14159)] == ["8,300,000", "220", "12", "3.1"]
