"""Write to the terminal. Names and texts in files of others can hold characters that control it."""

import errno
import sys
from typing import TextIO

from tqdm import tqdm


def printable(text: object) -> str:
    """Escape all characters that a terminal acts on or does not show. JSON stays valid."""
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in str(text))


def print_lines(*lines: object, file: TextIO | None = None):
    """Print each argument as one line, to stdout or `file`, above the progress bars."""
    try:
        tqdm.write("\n".join(map(printable, lines)), file=file or sys.stdout)
    except OSError as error:
        if error.errno != errno.EIO:  # of a terminal that is gone, because its connection was dropped
            raise
