"""
Compare `import scalelong_diffusers` with importing diffusers' U-Net, in fresh interleaved processes.

    python benchmarks/import_time.py [--rounds 15] [--json]
"""

import argparse
import json
import subprocess
import sys

from measure import paired_ratio, paired_times, round_count

from scalelong_diffusers.experiments.results import machine


LIMIT = 1.15
IMPORTS = {
    "diffusers": "import torch, diffusers; diffusers.UNet2DModel",
    "scalelong_diffusers": "import scalelong_diffusers",
    "with its U-Net": "import scalelong_diffusers; scalelong_diffusers.ScaleLongUNet2DModel",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=round_count, default=15, help="number of rounds (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    functions = {
        name: lambda code=code: subprocess.run([sys.executable, "-c", code], check=True)
        for name, code in IMPORTS.items()
    }
    times = paired_times(functions, arguments.rounds, warmup=1)
    ratios = {name: paired_ratio(times[name], times["diffusers"]) for name in list(IMPORTS)[1:]}
    if arguments.json:
        print(json.dumps({"machine": machine(), "rounds": arguments.rounds, "ratios": ratios}))
        return
    for name, ratio in ratios.items():
        time = "{ratio:.3f} [{low:.3f}, {high:.3f}]".format(**ratio)
        print(f"{name:<22} {time} times diffusers, {'ok' if ratio['low'] <= LIMIT else f'above {LIMIT}'}")


if __name__ == "__main__":
    main()
