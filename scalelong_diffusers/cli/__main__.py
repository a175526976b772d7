"""`python -m scalelong_diffusers.cli`, which `accelerate launch -m` needs."""

import sys

from scalelong_diffusers.cli import main


if __name__ == "__main__":
    sys.exit(main())
