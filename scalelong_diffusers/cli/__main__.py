"""Lets `python -m scalelong_diffusers.cli` and `accelerate launch -m scalelong_diffusers.cli` run the command."""

import sys

from scalelong_diffusers.cli import main


if __name__ == "__main__":
    sys.exit(main())
