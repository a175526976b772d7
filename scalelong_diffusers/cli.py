"""The command `scalelong`. What is asked wrongly ends in one line on stderr and exit code 2."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from scalelong_diffusers.arguments import ArgumentParser, add_skip_scaling_arguments, skip_scaling_from_arguments
from scalelong_diffusers.inspection import model_skeleton
from scalelong_diffusers.patching import skip_connections
from scalelong_diffusers.scaling.factors import MEAN_NOISE_RATIO, UPPER_NOISE_RATIO, skip_energy, solve_kappa
from scalelong_diffusers.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, TypeError, OSError) as error:
        print(f"scalelong: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="scalelong", description="Scale the long skips of diffusion U-Nets.")
    parser.add_argument("--version", action="version", version=f"scalelong-diffusers {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    inspect = commands.add_parser("inspect", help="list the long skips of a model and what happens to each")
    inspect.add_argument("model", help="a model or pipeline: a local folder or the id of one on the Hub")
    add_skip_scaling_arguments(inspect)
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=_inspect)

    kappa = commands.add_parser("kappa", help="what kappa means for a number of skips: S = sum of k_i^2")
    kappa.add_argument("--skips", type=int, required=True, metavar="N", help="how many long skips the model has")
    kappa.add_argument("--target", type=float, metavar="S", help="solve S(kappa, N) for this one only")
    kappa.add_argument("--json", action="store_true", help="print JSON")
    kappa.set_defaults(run=_kappa)
    return parser


def _inspect(arguments: argparse.Namespace) -> int:
    config = skip_scaling_from_arguments(arguments)
    skips = skip_connections(model_skeleton(arguments.model, config))
    if arguments.json:
        rows = [dataclasses.asdict(skip) for skip in skips]
        print(json.dumps({"skip_scaling": skips.config.to_dict(), "parameters": skips.parameters, "skips": rows}))
    else:
        print(skips)
    return 0


def _kappa(arguments: argparse.Namespace) -> int:
    n = arguments.skips
    if n < 1:
        raise ValueError(f"--skips must be at least 1, got {n}")
    targets = [MEAN_NOISE_RATIO, 2.0, UPPER_NOISE_RATIO] if arguments.target is None else [arguments.target]
    kappas = [0.5, 0.7, 0.9, 0.95, 1.0] if arguments.target is None else []
    solved = [(solve_kappa(target, n), target) for target in targets]
    table = [(kappa, skip_energy(kappa, n)) for kappa in [*(kappa for kappa, _ in solved), *kappas]]
    if arguments.json:
        print(json.dumps({"skips": n, "table": [{"kappa": kappa, "S": energy} for kappa, energy in table]}))
        return 0
    print(f"N = {n} long skips, S = sum of kappa^(2(i-1))\n   kappa       S")
    for kappa, energy in table:
        print(f"{kappa:8.4f}  {energy:6.3f}")
    if any(energy < target - 1e-6 for (_, target), (_, energy) in zip(solved, table)):
        print(f"S can not be more than N = {n}, which kappa = 1 gives")
    return 0


if __name__ == "__main__":
    sys.exit(main())
