"""The factors are the paper's, and S(k, N) is the table that was worked out from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelong_diffusers import SkipScalingConfig
from scalelong_diffusers.scaling import skip_energy, skip_factors, solve_kappa


# N, then kappa for S = 1.22, 2 and 5, then S of kappa = 0.5, 0.7, 0.9 and 0.95.
TABLE = [
    (6, 0.4247, 0.7132, 0.9626, 1.333, 1.934, 3.777, 4.714),
    (8, 0.4247, 0.7085, 0.9272, 1.333, 1.954, 4.288, 5.742),
    (9, 0.4247, 0.7078, 0.9182, 1.333, 1.958, 4.473, 6.182),
    (10, 0.4247, 0.7075, 0.9120, 1.333, 1.959, 4.623, 6.580),
    (12, 0.4247, 0.7072, 0.9044, 1.333, 1.960, 4.843, 7.262),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"N={row[0]}")
def test_the_table_of_s(row):
    n, *values = row
    solved = [solve_kappa(target, n) for target in (1.22, 2, 5)]
    assert solved == pytest.approx(values[:3], abs=5e-5)
    assert [skip_energy(kappa, n) for kappa in (0.5, 0.7, 0.9, 0.95)] == pytest.approx(values[3:], abs=5e-4)


def test_factors_by_hand():
    assert skip_factors("cs", 3, 0.5) == [1.0, 0.5, 0.25]
    assert skip_factors("cs", 3, 0.5, reverse=True) == [0.125, 0.25, 0.5]
    assert skip_factors("constant", 2, 0.5) == [0.5, 0.5]
    assert skip_factors("inv_sqrt2", 2) == [2**-0.5] * 2
    with pytest.raises(ValueError, match="'ls' has no constant factors"):
        skip_factors("ls", 2)


@given(st.floats(0.01, 1), st.integers(1, 40))
def test_s_is_the_sum_of_squared_factors_and_its_closed_form(kappa, n):
    energy = skip_energy(kappa, n)
    assert energy == pytest.approx(sum(k * k for k in skip_factors("cs", n, kappa)))
    if kappa < 0.999:
        assert energy == pytest.approx((1 - kappa ** (2 * n)) / (1 - kappa**2))


@given(st.floats(1.001, 30), st.integers(2, 40))
def test_the_solved_kappa_gives_the_target_or_is_one(target, n):
    kappa = solve_kappa(target, n)
    assert 0 < kappa <= 1
    assert skip_energy(kappa, n) == pytest.approx(min(target, n))


@given(st.integers(1, 40))
def test_auto_gives_s_of_five_where_there_are_skips_enough(n):
    uniform = SkipScalingConfig("constant", kappa="auto").resolve(n, "channels").kappa
    assert n * uniform**2 == pytest.approx(min(5, n))
    if n > 1:
        kappa = SkipScalingConfig("cs", kappa="auto").resolve(n, "channels").kappa
        assert skip_energy(kappa, n) == pytest.approx(min(5, n))
        assert (kappa == 1) == (n <= 5)
    config = SkipScalingConfig("cs", kappa="auto", reverse=True).resolve(n, "channels")
    assert sum(k * k for k in skip_factors("cs", n, config.kappa, reverse=True)) == pytest.approx(min(5, n))


@pytest.mark.parametrize("target", [1, 0.5, -1, float("nan")])
def test_a_target_that_the_outermost_skip_exceeds_is_refused(target):
    with pytest.raises(ValueError, match="the target for S must be above 1"):
        solve_kappa(target, 12)
