"""
What `import scalelong_diffusers` costs against importing diffusers' U-Net, in fresh processes, interleaved.

    python benchmarks/import_time.py [--rounds 15] [--json]
"""

import argparse
import json
import subprocess
import sys

from measure import enough_rounds, machine, paired_ratio, paired_times


LIMIT = 1.15
IMPORTS = {
    "diffusers": "import torch, diffusers; diffusers.UNet2DModel",
    "scalelong_diffusers": "import scalelong_diffusers",
    "with its U-Net": "import scalelong_diffusers; scalelong_diffusers.ScaleLongUNet2DModel",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=enough_rounds, default=15)
    parser.add_argument("--json", action="store_true")
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
        figures = "{ratio:.3f} [{low:.3f}, {high:.3f}]".format(**ratio)
        print(f"{name:<22} {figures} of diffusers, {'ok' if ratio['low'] <= LIMIT else f'above {LIMIT}'}")


if __name__ == "__main__":
    main()
