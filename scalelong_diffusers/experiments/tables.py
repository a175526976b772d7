"""Markdown tables of results."""

import statistics
from collections.abc import Sequence


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, or a remark if it has no rows."""
    lines = [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]
    return "\n".join(lines) if rows else "(no finished runs)"


def with_range(middle: float, low: float, high: float, digits: str = ".3g") -> str:
    """Return a number and its range."""
    return f"{middle:{digits}} ({low:{digits}} to {high:{digits}})"


def over_seeds(values: Sequence[float], digits: str = ".3g") -> str:
    """Return the median of the seeds, and their range if there are several. Without a seed, return nothing."""
    if len(values) < 2:
        return "".join(f"{value:{digits}}" for value in values)
    return with_range(statistics.median(values), min(values), max(values), digits)
