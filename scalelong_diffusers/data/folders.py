"""List the files in the folder of a dataset, and count the ones that are ignored."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.image_files import resolve_inside


# Kinds of ignored files and folders: a noun and what follows its plural.
Kind = tuple[str, str]
BROKEN_LINK: Kind = ("broken link", "")
EMPTY_FOLDER: Kind = ("empty folder", "")
LINK_OUT: Kind = ("link", " out of the folder")
LINKED_FOLDER: Kind = ("linked folder", "")
SPECIAL_FILE: Kind = ("special file", "")
_SHOWN_KINDS = 8


def list_files(folder: Path, folders: Sequence[Path]) -> tuple[list[str], Counter[Kind]]:
    """
    Return the regular files below a folder in order, and the numbers of other entries. Hidden ones do not count.

    Args:
        folders: resolved folders in which linked files must lie.
    """
    files, ignored = [], Counter()
    for where, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        names = [name for name in names if not name.startswith(".")]
        if not names and not subfolders:
            ignored[EMPTY_FOLDER] += 1
        # os.walk does not follow linked folders.
        ignored[LINKED_FOLDER] += sum(os.path.islink(os.path.join(where, name)) for name in subfolders)
        for path in (os.path.join(where, name) for name in names):
            problem = _problem(path, folders)
            if problem is None:
                files.append(path)
            else:
                ignored[problem] += 1
    return sorted(files), ignored


def check_outside(output_dir: str | Path, data_folder: str | None):
    """Reject an output folder inside a data folder, if there is one: its files would be taken for data later."""
    if data_folder is None or not os.path.isdir(data_folder):
        return
    if Path(output_dir).resolve().is_relative_to(Path(data_folder).resolve()):
        raise UserError(
            f"--output_dir {output_dir} is inside the data folder {data_folder}, and its files would be taken for "
            "data later: pass a folder outside of it"
        )


def _problem(path: str, folders: Sequence[Path]) -> Kind | None:
    if not os.path.exists(path):
        return BROKEN_LINK
    if os.path.islink(path):
        try:
            resolve_inside(path, folders)
        except UserError:
            return LINK_OUT
    return None if os.path.isfile(path) else SPECIAL_FILE


def count_suffixes(files: Iterable[str]) -> Counter[Kind]:
    """Count files by their suffix."""
    suffixes = (os.path.splitext(file)[1].lower() for file in files)
    return Counter(
        (f"{suffix} file", "") if suffix[1:].isalnum() else ("file", " without a suffix") for suffix in suffixes
    )


def describe_ignored(ignored: Counter[Kind]) -> str:
    """Return ` (ignored: 2 .heic files, 1 empty folder)`, or an empty string if nothing is ignored."""
    return f" (ignored: {list_kinds(ignored)})" if +ignored else ""


def list_kinds(ignored: Counter[Kind]) -> str:
    """Return `2 .heic files, 1 empty folder`."""
    ordered = sorted((+ignored).items(), key=lambda item: (-item[1], item[0]))
    kinds = [f"{count:,} {noun}{'s' * (count != 1)}{rest}" for (noun, rest), count in ordered]
    more = ", ..." if len(kinds) > _SHOWN_KINDS else ""
    return ", ".join(kinds[:_SHOWN_KINDS]) + more
