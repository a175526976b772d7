"""Flags that several commands share, and the check whether the Hub can be reached."""

import argparse
import os

from huggingface_hub import constants, get_session
from huggingface_hub.errors import HTTPError

from scalelong_diffusers.options import add_options


# Short names of flags.
ALIASES = {
    "--class_labels": ["--class"],
    "--guidance_scale": ["--guidance"],
    "--num_images": ["-n"],
    "--num_inference_steps": ["--steps"],
    "--output_dir": ["--out"],
    "--prompt_file": ["--prompts"],
}


class AliasedGroup:
    """A group of flags in which each flag also gets its short names."""

    def __init__(self, parser: argparse.ArgumentParser, title: str):
        self._group = parser.add_argument_group(title)

    def add_argument(self, flag: str, **settings):
        self._group.add_argument(flag, *ALIASES.get(flag, []), **settings)

    def add_options(self, config_class: type, without: tuple[str, ...] = ()):
        """Add a flag for each option of a config class."""
        add_options(self, config_class, without=without)


def use_cache_if_offline(*sources: str):
    """
    Switch to the Hub's offline mode if a source is not local and the Hub cannot be reached.

    Otherwise the Hub's client would retry for half a minute for each file before it uses its cache.
    """
    if constants.HF_HUB_OFFLINE or all(os.path.exists(source) for source in sources):
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except HTTPError:
        constants.HF_HUB_OFFLINE = True


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number
