"""`scalelong presets` lists the paper's experiments, or everything about one of them."""

import argparse
import json

from scalelong_diffusers.presets import PRESETS, Preset, get_preset
from scalelong_diffusers.terminal import print_lines


def add_command(commands: argparse._SubParsersAction):
    parser = commands.add_parser("presets", help="list the paper's experiments, or show one of them")
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of a preset")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.name is not None:
        preset = get_preset(arguments.name)
        lines = [json.dumps(preset.to_dict())] if arguments.json else _preset_lines(preset)
        print_lines(*lines)
    elif arguments.json:
        print_lines(json.dumps([preset.to_dict() for preset in PRESETS.values()]))
    else:
        print_lines(f"{'preset':<22}{'model':<31}{'parameters':>11}  {'N':>2}  data")
        for preset in PRESETS.values():
            model = preset.model_class.__name__
            print_lines(f"{preset.name:<22}{model:<31}{preset.parameters:>11,}  {preset.num_skips:>2}  {preset.data}")
    return 0


def _preset_lines(preset: Preset) -> list[str]:
    """Return one line for each field, and one for each entry of a field that is a dict."""
    lines = []
    for name, value in preset.to_dict().items():
        if isinstance(value, dict):
            lines += [f"{name}:", *(f"  {key}: {entry}" for key, entry in value.items())]
        else:
            lines.append(f"{name}: {'-' if value is None else f'{value:,}' if name == 'parameters' else value}")
    return lines
