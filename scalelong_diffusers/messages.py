"""Words that error messages share."""

import difflib
from collections.abc import Iterable
from typing import Any


def near_miss(word: Any, accepted: Iterable[str]) -> str:
    """` (did you mean 'kappa'?)` for a word that is nearly one of the accepted, nothing otherwise."""
    by_lower = {known.lower(): known for known in accepted}
    close = [by_lower[near] for near in difflib.get_close_matches(str(word).lower(), by_lower, n=1)]
    return f" (did you mean {close[0]!r}?)" if close else ""
