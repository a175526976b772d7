"""Words that error messages share."""

import difflib
from collections.abc import Iterable
from typing import Any


def near_miss(word: Any, accepted: Iterable[str]) -> str:
    """` (did you mean 'kappa'?)` for a word that is nearly one of the accepted, nothing otherwise."""
    close = difflib.get_close_matches(str(word), list(accepted), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
