"""The command `scalelong`. What is asked wrongly ends in one line on stderr and exit code 2."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence

from scalelong_diffusers.arguments import (
    ArgumentParser,
    CommandParser,
    add_skip_scaling_arguments,
    skip_scaling_fields,
)
from scalelong_diffusers.cli.evaluate import add_evaluate_command
from scalelong_diffusers.cli.inspect import model_skeleton
from scalelong_diffusers.cli.sample import add_sample_command
from scalelong_diffusers.models.conversion import (
    CheckpointDetails,
    convert_from_reference,
    convert_to_reference,
    is_model_folder,
)
from scalelong_diffusers.models.uvit import TIMESTEP_CONVENTIONS, UViTModel
from scalelong_diffusers.patching import skip_connections
from scalelong_diffusers.presets import PRESETS, Preset, get_preset
from scalelong_diffusers.scaling.factors import MEAN_NOISE_RATIO, UPPER_NOISE_RATIO, skip_energy, solve_kappa
from scalelong_diffusers.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Who reads has seen enough, as `head` has; Python would try to print the rest again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as of a program that SIGPIPE ends
    except (ValueError, TypeError, OSError) as error:
        print(f"scalelong: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="scalelong", description="Scale the long skips of diffusion U-Nets.")
    parser.add_argument("--version", action="version", version=f"scalelong-diffusers {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=CommandParser)

    presets = commands.add_parser("presets", help="list the paper's experiments, or all that is known of one")
    presets.add_argument("name", nargs="?", metavar="NAME", help="a preset")
    presets.add_argument("--json", action="store_true", help="print JSON")
    presets.set_defaults(run=_presets)

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

    convert = commands.add_parser(
        "convert",
        help="turn a .pth of U-ViT or ScaleLong into the folder of a UViTModel, or such a folder into a .pth",
        description="The flags say what the weights of a .pth do not tell, and are for reading one alone.",
    )
    convert.add_argument("source", metavar="IN", help="a .pth, a training folder with nnet_ema.pth, or a UViTModel")
    convert.add_argument("target", metavar="OUT", help="what is written; it must not be there yet")
    convert.add_argument("--num_attention_heads", "--num-attention-heads", type=int, metavar="N")
    convert.add_argument(
        "--timesteps",
        choices=TIMESTEP_CONVENTIONS,
        help="what the network was shown: t * 999 with t in (0, 1] (continuous), or 1 .. 1000 (discrete)",
    )
    convert.add_argument(
        "--context_length", "--context-length", type=int, metavar="N", help="text tokens, where there is text"
    )
    add_skip_scaling_arguments(convert)
    convert.set_defaults(run=_convert)

    add_sample_command(commands)
    add_evaluate_command(commands)
    return parser


def _presets(arguments: argparse.Namespace) -> int:
    if arguments.name is not None:
        preset = get_preset(arguments.name)
        print(json.dumps(preset.to_dict()) if arguments.json else _preset_lines(preset))
    elif arguments.json:
        print(json.dumps([preset.to_dict() for preset in PRESETS.values()]))
    else:
        print(f"{'preset':<22}{'model':<31}{'parameters':>11}  {'N':>2}  data")
        for preset in PRESETS.values():
            model = preset.model_class.__name__
            print(f"{preset.name:<22}{model:<31}{preset.parameters:>11,}  {preset.num_skips:>2}  {preset.data}")
    return 0


def _preset_lines(preset: Preset) -> str:
    """One line for each field, and for each entry of those that are dicts."""
    lines = []
    for name, value in preset.to_dict().items():
        if isinstance(value, dict):
            lines += [f"{name}:", *(f"  {key}: {entry}" for key, entry in value.items())]
        else:
            lines.append(f"{name}: {'-' if value is None else f'{value:,}' if name == 'parameters' else value}")
    return "\n".join(lines)


def _inspect(arguments: argparse.Namespace) -> int:
    skips = skip_connections(model_skeleton(arguments.model, skip_scaling_fields(arguments)))
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


def _convert(arguments: argparse.Namespace) -> int:
    scaling = skip_scaling_fields(arguments)
    flags = {name: getattr(arguments, name) for name in ("num_attention_heads", "timesteps", "context_length")}
    if is_model_folder(arguments.source):
        if given := [name for name, value in {**flags, "skip_scaling": scaling}.items() if value is not None]:
            raise ValueError(f"--{given[0]} is for reading a .pth, and {arguments.source} is the folder of a model")
        model = convert_to_reference(arguments.source, arguments.target)
        print(f"{arguments.target}: {_described(model)} (heads, timesteps and factors are not in the file)")
        return 0
    model = convert_from_reference(
        arguments.source, arguments.target, CheckpointDetails(**flags, skip_scaling=scaling)
    )
    print(f"{arguments.target}: {_described(model)}")
    return 0


def _described(model: UViTModel) -> str:
    config = model.config
    return (
        f"UViTModel of {sum(p.numel() for p in model.parameters()):,} parameters, {config.num_layers} + 1 blocks, "
        f"{config.num_attention_heads} heads, shown (timestep + {config.timestep_offset:g}) * "
        f"{config.timestep_scale:g}, {model.skip_scaler.config}"
    )
