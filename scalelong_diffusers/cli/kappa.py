"""`scalelong kappa` relates the decay factor kappa to S, the sum of all k_i^2, for a number of skips."""

import argparse
import json
from dataclasses import MISSING, dataclass

from scalelong_diffusers.options import add_options, build_config, check_options, option
from scalelong_diffusers.scaling.factors import MEAN_NOISE_RATIO, UPPER_NOISE_RATIO, skip_energy, solve_kappa
from scalelong_diffusers.terminal import print_lines


@dataclass(frozen=True)
class KappaConfig:
    skips: int = option(MISSING, "number of long skip connections", at_least=1, at_most=10_000, metavar="N")
    target: float | None = option(None, "print only the kappa that gives this S", above=1, at_most=10_000, metavar="S")

    def __post_init__(self):
        check_options(self)


def add_command(commands: argparse._SubParsersAction):
    parser = commands.add_parser("kappa", help="show S = sum of k_i^2 for values of kappa and a number of skips")
    add_options(parser, KappaConfig)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = build_config(KappaConfig, vars(arguments))
    n = config.skips
    targets = [MEAN_NOISE_RATIO, 2.0, UPPER_NOISE_RATIO] if config.target is None else [config.target]
    kappas = [0.5, 0.7, 0.9, 0.95, 1.0] if config.target is None else []
    solved = [(solve_kappa(target, n), target) for target in targets]
    table = [(kappa, skip_energy(kappa, n)) for kappa in [*(kappa for kappa, _ in solved), *kappas]]
    if arguments.json:
        print_lines(json.dumps({"skips": n, "table": [{"kappa": kappa, "S": energy} for kappa, energy in table]}))
        return 0
    print_lines(f"N = {n} long skips, S = sum of kappa^(2(i-1))", "   kappa       S")
    for kappa, energy in table:
        print_lines(f"{kappa:8.4f}  {energy:6.3f}")
    if any(energy < target - 1e-6 for (_, target), (_, energy) in zip(solved, table)):
        print_lines(f"S cannot be more than N = {n}, which kappa = 1 gives")
    return 0
