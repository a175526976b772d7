"""The code blocks of README and docs that are marked as runnable."""

import re
from pathlib import Path
from typing import NamedTuple


_BLOCK = re.compile(r"<!-- runnable( with the Hub)? -->\n```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


class Block(NamedTuple):
    page: str
    needs_hub: bool
    code: str
    printed: str | None  # what the page shows


def runnable_blocks(page: Path) -> list[Block]:
    """Return the blocks of a page."""
    return [
        Block(page.name, bool(hub), code, printed or None) for hub, code, printed in _BLOCK.findall(page.read_text())
    ]
