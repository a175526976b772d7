"""`UserError`, the error that commands show as one line, and the suggestion that its messages share."""

import difflib
from collections.abc import Iterable
from typing import Any

from scalelong_diffusers.terminal import printable


class UserError(ValueError):
    """
    Invalid input from the user. The message says what was given, what is accepted and what to do.

    Commands and training scripts print it as one line and exit with code 2. Any other exception is a bug and keeps its
    traceback.
    """

    def __str__(self) -> str:
        return printable(" ".join(super().__str__().split()))


def did_you_mean(word: Any, accepted: Iterable[str]) -> str:
    """Return ` (did you mean 'kappa'?)` if `word` is close to an accepted name, else an empty string."""
    by_lower = {known.lower(): known for known in accepted}
    spelled_out = str(word).lower().replace("pp", "++")  # as in dpmpp for dpm++
    if spelled_out in by_lower:
        return f" (did you mean {by_lower[spelled_out]!r}?)"
    close = [by_lower[near] for near in difflib.get_close_matches(str(word).lower(), by_lower, n=1)]
    return f" (did you mean {close[0]!r}?)" if close else ""
