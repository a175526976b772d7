"""The command `scalelong`. A user's error prints one line to stderr and exits with code 2."""

import os
import sys
from collections.abc import Sequence

from scalelong_diffusers import __version__
from scalelong_diffusers.cli import (
    app,
    convert,
    demo,
    diagnose,
    ema,
    evaluate,
    inspect,
    kappa,
    paper,
    presets,
    probe,
    sample,
)
from scalelong_diffusers.download import use_cache_if_offline
from scalelong_diffusers.errors import UserError, did_you_mean
from scalelong_diffusers.evaluation.images import SHAPES
from scalelong_diffusers.evaluation.metrics import INCEPTION
from scalelong_diffusers.options import ArgumentParser, as_flags
from scalelong_diffusers.terminal import print_lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        sources = {vars(arguments).get(name) for name in ("model", "reference", "features")}
        use_cache_if_offline(sources - {None, SHAPES, INCEPTION})
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has stopped, as `head` does. Without this, Python would try to flush again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # the code of a program that SIGPIPE ends
    except KeyboardInterrupt:
        print_lines("scalelong: interrupted; run the same command again to resume", file=sys.stderr)
        return 130
    except UserError as error:
        print_lines(f"scalelong: {as_flags(str(error), vars(arguments))}", file=sys.stderr)
        return 2


def _parse(argv: Sequence[str]):
    parser = ArgumentParser(prog="scalelong", description="Scale the long skip connections of diffusion U-Nets.")
    parser.add_argument("--version", action="version", version=f"scalelong-diffusers {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=ArgumentParser)
    for module in (presets, inspect, kappa, convert, sample, evaluate, ema, diagnose, probe, paper, demo, app):
        module.add_command(commands)
    if argv and not argv[0].startswith("-") and argv[0] not in commands.choices:
        suggestion = did_you_mean(argv[0], commands.choices)
        parser.error(f"unknown command {argv[0]!r}{suggestion}; accepted: {', '.join(commands.choices)}")
    return parser.parse_args(argv)
