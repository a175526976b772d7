"""The factors equal the paper's, and S(k, N) equals a table of published values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelong_diffusers import SkipScalingConfig, UserError
from scalelong_diffusers.scaling import skip_energy, skip_factors, solve_kappa


# N, then kappa for S = 1.22, 2 and 5, then S for kappa = 0.5, 0.7, 0.9 and 0.95.
TABLE = [
    (6, 0.4247, 0.7132, 0.9626, 1.333, 1.934, 3.777, 4.714),
    (8, 0.4247, 0.7085, 0.9272, 1.333, 1.954, 4.288, 5.742),
    (9, 0.4247, 0.7078, 0.9182, 1.333, 1.958, 4.473, 6.182),
    (10, 0.4247, 0.7075, 0.9120, 1.333, 1.959, 4.623, 6.580),
    (12, 0.4247, 0.7072, 0.9044, 1.333, 1.960, 4.843, 7.262),
]


def test_table_of_kappa_and_s():
    for n, *values in TABLE:
        solved = [solve_kappa(target, n) for target in (1.22, 2, 5)]
        assert solved == pytest.approx(values[:3], abs=5e-5)
        assert [skip_energy(kappa, n) for kappa in (0.5, 0.7, 0.9, 0.95)] == pytest.approx(values[3:], abs=5e-4)


def test_factors_by_hand():
    assert skip_factors("cs", 3, 0.5) == [1.0, 0.5, 0.25]
    assert skip_factors("cs", 3, 0.5, reverse=True) == [0.125, 0.25, 0.5]
    assert skip_factors("linear", 3, 0.5) == [1.0, 0.75, 0.5]
    assert skip_factors("constant", 2, 0.5) == [0.5, 0.5]
    assert skip_factors("inv_sqrt2", 2) == [2**-0.5] * 2
    assert skip_factors("none", 2) == [1.0, 1.0]


@given(st.floats(0.01, 1), st.integers(1, 40))
def test_s_equals_the_sum_of_squares_and_its_closed_form(kappa, n):
    energy = skip_energy(kappa, n)
    assert energy == pytest.approx(sum(k * k for k in skip_factors("cs", n, kappa)))
    if kappa < 0.999:
        assert energy == pytest.approx((1 - kappa ** (2 * n)) / (1 - kappa**2))


@given(st.floats(1.001, 30), st.integers(2, 40))
def test_solved_kappa_reaches_the_target_or_is_one(target, n):
    kappa = solve_kappa(target, n)
    assert 0 < kappa <= 1
    assert skip_energy(kappa, n) == pytest.approx(min(target, n))


@given(st.integers(1, 40))
def test_auto_solves_s_of_five(n):
    uniform = SkipScalingConfig("constant", kappa="auto").resolve(n, "channels").kappa
    assert n * uniform**2 == pytest.approx(min(5, n))
    if n > 1:
        kappa = SkipScalingConfig("cs", kappa="auto").resolve(n, "channels").kappa
        assert skip_energy(kappa, n) == pytest.approx(min(5, n))
        assert (kappa == 1) == (n <= 5)
    config = SkipScalingConfig("cs", kappa="auto", reverse=True).resolve(n, "channels")
    assert sum(k * k for k in skip_factors("cs", n, config.kappa, reverse=True)) == pytest.approx(min(5, n))


def test_rejects_a_target_of_at_most_one():
    for target in (1, 0.5, -1, float("nan")):
        with pytest.raises(UserError, match=r"the target for S must be above 1, .*, got"):
            solve_kappa(target, 12)


@given(st.integers(2, 40))
def test_auto_of_linear_factors_solves_s_of_five_or_says_that_it_is_impossible(n):
    lowest = sum((i / (n - 1)) ** 2 for i in range(n))
    config = SkipScalingConfig("linear", kappa="auto")
    if lowest > 5:
        message = f"no kappa gives S = 5 for the method 'linear' and {n} skips: pass a number"
        with pytest.raises(UserError, match=message):
            config.resolve(n, "channels")
    else:
        factors = skip_factors("linear", n, config.resolve(n, "channels").kappa)
        assert sum(k * k for k in factors) == pytest.approx(min(5, n))
