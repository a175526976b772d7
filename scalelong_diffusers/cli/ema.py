"""`scalelong ema` reconstructs EMA weights of any length from the snapshots of a training run."""

import argparse
import dataclasses
import json

from scalelong_diffusers.terminal import print_lines


def add_command(commands: argparse._SubParsersAction):
    parser = commands.add_parser(
        "ema",
        help="make EMA weights of any length after training",
        description=(
            "Write a pipeline for each EMA length. The run must be finished, and trained with --ema_snapshot_steps."
        ),
    )
    parser.add_argument("run_folder", metavar="RUN", help="output folder of the training")
    parser.add_argument(
        "--sigma_rel",
        type=float,
        nargs="+",
        required=True,
        metavar="X",
        help="lengths: the standard deviation of the average's profile as a fraction of the training time; 0.05 to "
        "0.15 is usual",
    )
    parser.add_argument("--output_dir", required=True, metavar="DIR", help="folder for the pipelines sigma_rel-X")
    parser.add_argument(
        "--step", type=int, metavar="N", help="average up to this step, one with a snapshot (default: the last step)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from scalelong_diffusers.training.posthoc_ema import reconstruct_ema  # imports the training code, which is slow

    results = reconstruct_ema(arguments.run_folder, arguments.output_dir, arguments.sigma_rel, arguments.step)
    if arguments.json:
        print_lines(json.dumps([dataclasses.asdict(result) for result in results]))
        return 0
    for result in results:
        print_lines(
            f"{result.folder}: EMA after step {result.step} with sigma_rel {result.sigma_rel:g}, from "
            f"{result.num_snapshots} snapshots; error of the profile {result.profile_error:.2g}"
        )
    return 0
