"""The constant factors k_i of the paper and the sum S = sum k_i^2 that bounds features and gradients."""

import math

from scalelong_diffusers.errors import UserError


# Mean of |eps|^2 / |x_t|^2 over the paper's datasets (figure 3b), its lower estimate of S (section 4.1).
MEAN_NOISE_RATIO = 1.22

# The paper's upper estimate of S, which `kappa="auto"` solves for.
UPPER_NOISE_RATIO = 5.0


def skip_factors(method: str, num_skips: int, kappa: float | None = None, reverse: bool | None = None) -> list[float]:
    """Return k_1 .. k_N of a method without gates. k_1 belongs to the outermost skip."""
    if method == "cs" and reverse:  # Table 4
        return [kappa ** (num_skips - i + 1) for i in range(1, num_skips + 1)]
    if method == "cs":  # equation 8
        return [kappa ** (i - 1) for i in range(1, num_skips + 1)]
    if method == "linear":  # Skip-Tuning
        return [1 + (kappa - 1) * (i - 1) / (num_skips - 1) for i in range(1, num_skips + 1)]
    return num_skips * [{"none": 1.0, "inv_sqrt2": 2**-0.5, "constant": kappa}[method]]


def skip_energy(kappa: float, num_skips: int) -> float:
    """Return S(kappa, N) = sum of kappa^(2(i-1)), the factor of |x_t|^2 in theorems 3.1 and 3.3."""
    return math.fsum(kappa ** (2 * i) for i in range(num_skips))


def solve_kappa(target: float, num_skips: int, method: str = "cs", reverse: bool | None = None) -> float:
    """Return the kappa in (0, 1] for which sum k_i^2 equals `target`, or 1 if the sum stays below it."""
    if not target > 1:
        raise UserError(f"the target for S must be above 1, the share of the outermost skip, got {target}")
    if num_skips <= target:
        return 1.0

    def energy(kappa: float) -> float:
        return math.fsum(k * k for k in skip_factors(method, num_skips, kappa, reverse))

    if energy(0.0) > target:
        raise UserError(
            f"no kappa gives S = {target:g} for the method {method!r} and {num_skips} skips: pass a number"
        )
    low, high = 0.0, 1.0
    while (kappa := (low + high) / 2) not in (low, high):
        low, high = (kappa, high) if energy(kappa) < target else (low, kappa)
    return kappa
