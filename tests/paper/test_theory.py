"""Random networks of the paper's theory, against closed forms and an independent implementation."""

import dataclasses

import pytest
import torch

from scalelong_diffusers.paper import theorems
from scalelong_diffusers.paper.network import PaperNetworks, expected_energies
from scalelong_diffusers.paper.theory import Draws, measure


SMALL = {"width": 32, "count": 10}


def networks(factors, draws=3, width=16, layers=2, **options):
    return PaperNetworks(factors, draws, width, layers, torch.Generator().manual_seed(0), **options)


def test_networks_compute_equation_3():
    """f_i(x) = b_{i+1}(k_{i+1} a_{i+1}(x) + f_{i+1}(a_{i+1}(x))), written as a recursion."""
    factors = [1.0, 0.5, 0.25]
    drawn = networks(factors, layers=3)
    x = torch.randn(3, 16)

    def apply(block, draw, x):
        return block[2][draw] @ torch.relu(block[1][draw] @ torch.relu(block[0][draw] @ x))

    def f(i, draw, x):
        if i == len(factors):
            return apply(drawn.middle, draw, x)
        skip = apply(drawn.encoders[i], draw, x)
        return apply(drawn.decoders[i], draw, factors[i] * skip + f(i + 1, draw, skip))

    for draw in range(3):
        torch.testing.assert_close(drawn(x)[draw], f(0, draw, x[draw]), rtol=1e-3, atol=1e-4)


def test_features_are_the_outputs_of_the_decoder_blocks():
    drawn = networks([1.0, 1.0])
    outermost, inner = drawn.features(torch.randn(3, 16))
    assert not torch.equal(outermost, inner)
    assert drawn.factors == [1.0, 1.0]
    drawn.decoders[1] = [torch.zeros_like(matrix) for matrix in drawn.decoders[1]]
    assert drawn.features(torch.randn(3, 16))[1].abs().max() == 0


@pytest.mark.parametrize("factors", [[1.0] * 4, [1.0, 0.7, 0.49], [0.0, 0.0]])
@pytest.mark.parametrize("gain", [1.0, 2.0])
def test_energies_have_the_expectation_of_theorem_31(factors, gain):
    """Check that blocks that keep the norm give E|h_i|^2 = (S_i + 1)|x|^2: c_1 = 1 and c_2 = |x|^2."""
    drawn = networks(factors, draws=2_000, width=32, last_gain=gain)
    x = torch.randn(2_000, 32, generator=torch.Generator().manual_seed(1))
    energy = x.square().sum(1)
    measured = [(feature.square().sum(1) / energy).mean().item() for feature in drawn.features(x)]
    expected = expected_energies(factors, gain)
    assert measured == pytest.approx(expected, rel=0.2)
    if gain == 1:
        sums = [sum(k * k for k in factors[i:]) for i in range(len(factors))]
        assert expected == pytest.approx([s + 1 for s in sums])


def test_kaiming_init_as_written_grows_by_four_per_skip():
    ratios = [expected_energies([1.0] * (n + 1), 2.0)[0] / expected_energies([1.0] * n, 2.0)[0] for n in (4, 8, 12)]
    assert ratios == pytest.approx([4, 4, 4], rel=0.01)


def test_gradients_agree_with_a_loop():
    draws = Draws(2, last_gain=1.0, **SMALL)
    from scalelong_diffusers.paper import theory

    (drawn, x, noise, _), *_ = theory._batches(draws)
    _, gradients = theory._features_and_gradients(drawn, x, noise)
    single = PaperNetworks.__new__(PaperNetworks)
    single.factors, single.join, single.norm = drawn.factors, "sum", "none"
    pick = lambda block: [matrix[4:5].clone().requires_grad_() for matrix in block]  # noqa: E731
    single.encoders, single.decoders = [[*map(pick, blocks)] for blocks in (drawn.encoders, drawn.decoders)]
    single.middle = pick(drawn.middle)
    loss = (single(x[4:5]) - noise[4:5]).square().sum()
    loss.backward()
    for i in range(2):
        squares = [w.grad.square().sum() for w in (*single.encoders[i], *single.decoders[i])]
        torch.testing.assert_close(gradients[4, i], max(squares) / loss.detach(), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "scaling", [{}, {"method": "cs", "kappa": 0.7}, {"method": "cs", "kappa": 0.7, "reverse": True}]
)
def test_no_draw_exceeds_the_bound_of_theorem_34(scaling):
    line = measure(Draws(3, bounds=True, **scaling, **SMALL))
    assert line["within"]["bound"] == 1
    assert line["change"][4] <= line["worst"][4] * 1.01
    assert line["M0"][1] > 1  # as the paper says


def test_bound_unrolls_equation_3():
    """Without skips, only c_0 = L_0 M_0^N is left."""
    line = measure(Draws(3, "constant", 1e-9, bounds=True, **SMALL))
    assert line["share of c0"][0] == pytest.approx(1)


def test_names_tell_draws_of_a_theorem_apart():
    for planned in (theorems.feature_draws, theorems.gradient_draws, theorems.bound_draws, theorems.variant_draws):
        draws = set(planned())
        assert len({each.name for each in draws}) == len(draws)


def test_statistics_are_repeatable_and_depend_on_the_seed():
    draws = Draws(2, **SMALL)
    assert measure(draws) == measure(draws)
    assert measure(draws) != measure(dataclasses.replace(draws, seed=1))


def test_layer_norm_keeps_features_level():
    """Check that the prediction of Theorem 3.1 for the sum fails with a norm in front of each block."""
    plain, normed = (
        [measure(Draws(n, last_gain=1.0, norm=norm, width=32, count=100))["features"][0][0] for n in (2, 12)]
        for norm in ("none", "LayerNorm")
    )
    assert plain[1] / plain[0] > 2.5
    assert 0.7 < normed[1] / normed[0] < 1.4


def test_group_norm_cancels_factors_of_concatenated_skips():
    """No group holds both hidden state and skip, so a constant factor has no effect."""
    variant = {"join": "concatenation", "norm": "GroupNorm", **SMALL}
    plain, scaled = (measure(Draws(4, **variant, **case)) for case in ({}, {"method": "constant", "kappa": 0.5}))
    assert scaled["features"][0] == pytest.approx(plain["features"][0], rel=1e-3)


def test_fit_recovers_constants(tmp_path):
    from scalelong_diffusers.experiments.results import ResultFile

    results = ResultFile(tmp_path / "lines.jsonl", Draws)
    draws = Draws(3)
    results.add(draws, {"features": [[2 * energy + 5] for energy in draws.energies]})
    assert theorems.fitted_constants(results, [draws]) == pytest.approx((2, 5))
