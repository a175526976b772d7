"""
Precomputed latents and text states: a folder of safetensors shards that `precompute_latents.py` writes.

Each shard holds a fixed number of consecutive rows of the dataset. So a row is found by its number, and the same rows
are held out for validation as without precomputing.
"""

import dataclasses
import json
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from scalelong_diffusers.data.batch import Batch, Draws
from scalelong_diffusers.data.config import DataConfig
from scalelong_diffusers.data.images import Transform
from scalelong_diffusers.download import read_json
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import atomic_write, checksum, write_json
from scalelong_diffusers.image_files import UnreadableImage


FORMAT_VERSION = 4
INDEX_FILE = "index.json"
EMPTY_CAPTION_FILE = "empty_caption.safetensors"
RERUN = "run the same precompute_latents.py command again"

# Columns that are read entry by entry and have a checksum per entry. "text_states" has one entry per caption, the
# others have one per row.
_LARGE = ("moments", "mirrored_moments", "text_states")
_CHECKSUMS = ".checksums"


class PrecomputedDataset:
    """
    A finished folder of precomputed latents (`precomputed_dir`).

    Attributes:
        made_of: encoders, transform and columns that the folder was computed with.
        images: description, classes and sizes of the images.
        splits: the rows, by the name of the split.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        index = read_index(self.folder)
        if index is None:
            raise UserError(f"{folder} holds no precomputed latents: precompute_latents.py writes them")
        if not index["finished"]:
            raise UserError(f"the precomputed latents in {folder} are unfinished: {RERUN} to resume")
        self.made_of: dict[str, Any] = index["made_of"]
        self.images: dict[str, Any] = index["images"]
        # Checksums are verified when rows are read: verifying all of them here could take an hour.
        for name, split in index["splits"].items():
            for number, size in enumerate(split["bytes"]):
                file = shard_path(self.folder, name, number)
                with _damage_errors(file):
                    _verify(file, file.stat().st_size == size, f", it should have {size:,} bytes")
        if self.has("text_states"):
            self.empty_caption = _load_empty_caption(self.folder)
        rows_per_shard = self.made_of["rows_per_shard"]
        self.splits = {
            name: PrecomputedSplit(self.folder, name, split["rows"], rows_per_shard)
            for name, split in index["splits"].items()
        }

    def check(self, config: DataConfig, needs_labels: bool, needs_captions: bool):
        """Raise a `UserError` if the folder lacks columns that a config needs, or was made with another transform."""
        for is_needed, column, missing, flag in (
            (needs_labels, "labels", "classes", "--with_labels"),
            (needs_captions, "text_states", "captions", "--pretrained_text_encoder_name_or_path"),
            (config.random_flip, "mirrored_moments", "mirrored images for random_flip", "--random_flip"),
        ):
            if is_needed and not self.has(column):
                raise UserError(f"the precomputed latents in {self.folder} have no {missing}: precompute with {flag}")
        wanted = transform_settings(config, self.images["channels"])
        for name, value in self.made_of["transform"].items():
            if value != wanted[name]:
                raise UserError(f"{self.folder} holds latents of images with {name}={value!r}, got {wanted[name]!r}")

    def has(self, column: str) -> bool:
        """Return whether a column was precomputed."""
        return column in self.made_of["columns"]

    def check_encoder(self, kind: str, name: str, checksum: str):
        """Raise a `UserError` if another encoder was used. `kind` is "autoencoder" or "text_encoder"."""
        used = self.made_of[kind]
        if used["checksum"] != checksum:
            before, now = f"{used['name']} (weights {used['checksum']})", f"{name} (weights {checksum})"
            raise UserError(f"the latents in {self.folder} were computed with the {kind} {before}, got {now}")

    def text_states(self, batch: Batch, dropped: torch.Tensor) -> torch.Tensor:
        """Return the text states of a batch. Where the bool tensor `dropped` is True, the caption counts as empty."""
        states = batch["text_states"]
        if self.empty_caption.device != states.device:
            self.empty_caption = self.empty_caption.to(states.device)  # once, not in each step
        return torch.where(dropped[:, None, None], self.empty_caption, states)


@dataclass(frozen=True)
class PrecomputedSplit:
    """The rows of one split, by their number in the dataset."""

    folder: Path
    split: str
    num_rows: int
    rows_per_shard: int

    def __len__(self) -> int:
        return self.num_rows

    def shard(self, index: int) -> tuple["Shard", int]:
        """Return the shard of a row, and the number of the row in it."""
        number, row = divmod(index, self.rows_per_shard)
        return open_shard(shard_path(self.folder, self.split, number)), row

    def captions(self, index: int) -> list[str]:
        shard, row = self.shard(index)
        return shard.captions[row]

    def name(self, index: int) -> str:
        return f"row {index} of the {self.split} split of {self.folder}"


@dataclass(frozen=True)
class PrecomputedRows:
    """Rows with the moments of an image or its mirror image and, if needed, its label and text states of a caption."""

    source: PrecomputedSplit
    random_flip: bool
    needs_labels: bool
    needs_captions: bool

    def read(self, index: int, draws: Draws) -> dict[str, Any]:
        shard, row = self.source.shard(index)
        if row in shard.unreadable:
            raise UnreadableImage(shard.unreadable[row])
        # The same draws as for images, so that both kinds of runs see the same samples.
        mirrored = self.random_flip and draws.below(2, "flip")
        columns = {"moments": shard.entry("mirrored_moments" if mirrored else "moments", row)}
        if self.needs_labels:
            columns["labels"] = int(shard.small["labels"][row])
        if self.needs_captions:
            captions = shard.captions[row]
            chosen = draws.below(len(captions), "caption")
            columns["captions"] = captions[chosen]
            columns["text_states"] = shard.entry("text_states", shard.first_caption[row] + chosen)
        return columns

    def name(self, index: int) -> str:
        return self.source.name(index)


class Shard:
    """An open shard. Large columns are read entry by entry, the others when the shard is opened."""

    def __init__(self, file: Path):
        self.file = file
        self._handle = safe_open(file, "pt")
        names, metadata = self._handle.keys(), self._handle.metadata() or {}
        self.small = {name: self._handle.get_tensor(name) for name in names if name not in _LARGE}
        self._large = {name: self._handle.get_slice(name) for name in names if name in _LARGE}
        _verify(file, metadata["checksum"] == _checksum_of_rest(self.small, metadata))
        self.unreadable = {int(row): reason for row, reason in json.loads(metadata["unreadable"]).items()}
        self.captions = json.loads(metadata["captions"])
        self.first_caption = [0]
        for captions in self.captions:
            self.first_caption.append(self.first_caption[-1] + len(captions))

    def entry(self, column: str, number: int) -> torch.Tensor:
        """Read one entry of a large column as float32."""
        entry = self._large[column][number : number + 1][0]
        is_right = _entry_checksum(entry) == int(self.small[column + _CHECKSUMS][number])
        _verify(self.file, is_right, f" in entry {number} of {column}")
        return entry.float()

    def check(self):
        """Read all entries to verify their checksums."""
        for column, stored in self._large.items():
            for number in range(stored.get_shape()[0]):
                self.entry(column, number)


@lru_cache(maxsize=256)
def open_shard(file: Path) -> Shard:
    """Open a shard, or return it from the cache."""
    with _damage_errors(file):
        return Shard(file)


@contextmanager
def _damage_errors(file: Path):
    try:
        yield
    except (SafetensorError, OSError, KeyError, TypeError) as error:
        raise UnreadableImage(f"{file} is damaged ({' '.join(str(error).split())}): {RERUN}") from error


def _verify(file: Path, is_right: bool, where: str = ""):
    if not is_right:
        raise UnreadableImage(f"{file} is damaged{where}: {RERUN}")


def is_complete_shard(file: Path) -> bool:
    """Return whether a shard exists and all of its checksums are right."""
    try:
        with _damage_errors(file):
            Shard(file).check()
    except UnreadableImage:
        return False
    return True


def save_shard(file: Path, columns: dict[str, torch.Tensor], captions: list[list[str]], unreadable: dict[int, str]):
    """Write a shard atomically, with the captions of each row, and the reasons why rows are unreadable."""
    large = {name: column for name, column in columns.items() if name in _LARGE}
    small = {name: column for name, column in columns.items() if name not in _LARGE}
    for name, column in large.items():
        small[name + _CHECKSUMS] = torch.tensor([_entry_checksum(entry) for entry in column])
    metadata = {"captions": json.dumps(captions), "unreadable": json.dumps(unreadable)}
    metadata["checksum"] = _checksum_of_rest(small, metadata)
    _save(file, {**large, **small}, metadata)


def save_empty_caption(folder: Path, states: torch.Tensor):
    """Write the text states of the empty caption atomically."""
    _save(folder / EMPTY_CAPTION_FILE, {"text_states": states}, {"checksum": checksum(states)})


def _load_empty_caption(folder: Path) -> torch.Tensor:
    file = folder / EMPTY_CAPTION_FILE
    with _damage_errors(file), safe_open(file, "pt") as opened:
        states = opened.get_tensor("text_states")
        _verify(file, checksum(states) == opened.metadata()["checksum"])
    return states.float()


def _save(file: Path, columns: dict[str, torch.Tensor], metadata: dict[str, str]):
    atomic_write(file, lambda partial: save_file(columns, partial, metadata))


def _entry_checksum(entry: torch.Tensor) -> int:
    return int(checksum(entry)[:15], 16)


def _checksum_of_rest(small: dict[str, torch.Tensor], metadata: dict[str, str]) -> str:
    """Return the checksum of the metadata and all small columns."""
    columns = [part for name in sorted(small) for part in (name, small[name])]
    return checksum(*columns, metadata["captions"], metadata["unreadable"])


def shard_path(folder: Path, split: str, number: int) -> Path:
    return folder / f"{split}-{number:05}.safetensors"


def transform_settings(config: DataConfig, channels: int) -> dict[str, Any]:
    """Return the settings of the transform, except for mirroring, since both versions of an image are stored."""
    settings = dataclasses.asdict(Transform.from_config(config, channels))
    return {name: value for name, value in settings.items() if name != "random_flip"}


def write_index(folder: Path, index: dict[str, Any]):
    """Write the index of a folder of precomputed latents atomically."""
    index = {"format_version": FORMAT_VERSION, **index}
    write_json(folder / INDEX_FILE, {**index, "checksum": _checksum_of_index(index)})


def read_index(folder: Path) -> dict[str, Any] | None:
    """Return the index of a folder of precomputed latents, or None if it has none."""
    index = read_json(folder, INDEX_FILE) if folder.is_dir() else None
    if index is None:
        return None
    file, version = folder / INDEX_FILE, index.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(f"{file} must have format_version {FORMAT_VERSION}, got {version!r:.100}")
    if index.pop("checksum", None) != _checksum_of_index(index):
        raise UserError(f"{file} has changed since it was written: copy the folder again, or precompute into another")
    return index


def _checksum_of_index(index: dict[str, Any]) -> str:
    return checksum(json.dumps(index, sort_keys=True))
