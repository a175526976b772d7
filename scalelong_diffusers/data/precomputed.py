"""
What encoders made of images and captions, written once by `precompute_latents.py`: a folder of safetensors shards.

A shard holds a fixed number of rows of the data set, in its order, so that a row is found by its number alone and the
share held out for validation is the same as without precomputing.
"""

import dataclasses
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from scalelong_diffusers.data.batch import Batch
from scalelong_diffusers.data.config import DataConfig
from scalelong_diffusers.data.draws import Draws
from scalelong_diffusers.data.images import Transform, UnreadableImage


FORMAT_VERSION = 2
INDEX_FILE = "index.json"
EMPTY_CAPTION_FILE = "empty_caption.safetensors"
AGAIN = "run the same precompute_latents.py command again"

# Columns with a checksum for each entry. Those of captions have one entry for each caption of each row.
_OF_IMAGES = ("moments", "mirrored_moments")
_OF_CAPTIONS = ("text_features",)
_CHECKSUMS = ".crc32"
# Of all else that a file holds; it is read when the file is opened.
_CHECKSUM_OF_REST = "crc32"
_UNREADABLE = (SafetensorError, OSError, KeyError)


class Features:
    """A finished folder of features, as `--precomputed_dir` names it."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.index = read_index(self.folder)
        if self.index is None:
            raise FileNotFoundError(
                f"precomputed_dir: there is no {INDEX_FILE} in {str(folder)!r}; precompute_latents.py writes one"
            )
        if not self.index["finished"]:
            raise ValueError(f"the features in {folder} are unfinished: {AGAIN}, which goes on with them")
        self._check_sizes()
        self.made_of: dict[str, Any] = self.index["made_of"]
        self.images: dict[str, Any] = self.index["images"]
        if self.has("text_features"):
            self.empty_caption = _read_empty_caption(self.folder)
        self.splits = {name: FeatureSplit(self.folder, name, self.index) for name in self.index["splits"]}

    def _check_sizes(self):
        """That every byte is right is checked as rows are read: to read all of them first could take an hour."""
        for name, split in self.index["splits"].items():
            for number, size in enumerate(split["bytes"]):
                file = shard_path(self.folder, name, number)
                found = file.stat().st_size if file.exists() else None
                if found != size:
                    what = "is missing" if found is None else f"has {found:,} bytes, and had {size:,}"
                    raise ValueError(f"the features in {self.folder} are broken: {file.name} {what}; {AGAIN}")

    def check(self, settings: DataConfig, needs_labels: bool, needs_captions: bool):
        """Refuse what they can not give."""
        here = f"the features in {self.folder}"
        if needs_labels and not self.has("labels"):
            raise ValueError(f"{here} have no classes: precompute them with --with_labels")
        if needs_captions and not self.has("text_features"):
            raise ValueError(f"{here} have no captions: precompute them with --pretrained_text_encoder_name_or_path")
        if settings.random_flip and not self.has("mirrored_moments"):
            raise ValueError(f"{here} have no mirrored images for random_flip: precompute them with --random_flip")
        asked = transform_of(settings, self.images["channels"])
        made = self.made_of["transform"]
        changed = [name for name in made if made[name] != asked[name]]
        if changed:
            were = ", ".join(f"{name}={made[name]!r}" for name in changed)
            are = ", ".join(f"{name}={asked[name]!r}" for name in changed)
            raise ValueError(f"{here} are of images with {were}, and {are} is asked for: give the same, or precompute")

    def has(self, column: str) -> bool:
        return column in self.made_of["columns"]

    def check_encoder(self, kind: str, name: str, checksum: str):
        """Refuse an encoder (`kind` is "autoencoder" or "text_encoder") that is not the one they were made by."""
        made_by = self.made_of[kind]
        if made_by["checksum"] != checksum:
            raise ValueError(
                f"the features in {self.folder} were made by the {kind} {made_by['name']} (weights "
                f"{made_by['checksum']}), and {name} (weights {checksum}) is given: give the same, or precompute"
            )

    def text_states(self, batch: Batch, captions: Sequence[str]) -> torch.Tensor:
        """The hidden states of a batch's captions, where some of `captions` were left out: are empty."""
        states = batch["text_features"]
        left_out = torch.tensor([not caption for caption in captions], device=states.device)
        return torch.where(left_out[:, None, None], self.empty_caption.to(states), states)


class FeatureSplit:
    """The rows of one split, by the numbers that they have in the data set."""

    def __init__(self, folder: Path, name: str, index: dict[str, Any]):
        self._folder = folder
        self._name = name
        self._rows = index["splits"][name]["rows"]
        self._rows_per_shard = index["made_of"]["rows_per_shard"]

    def __len__(self) -> int:
        return self._rows

    def shard(self, index: int) -> tuple["Shard", int]:
        number, row = divmod(index, self._rows_per_shard)
        return open_shard(shard_path(self._folder, self._name, number)), row

    def captions(self, index: int) -> list[str]:
        shard, row = self.shard(index)
        return shard.captions[row]

    def name(self, index: int) -> str:
        return f"row {index} of the {self._name} split of {self._folder}"


@dataclass(frozen=True)
class FeatureRows:
    """The moments of an image or of its mirror image, with its label, a caption's hidden states, both or neither."""

    source: FeatureSplit
    random_flip: bool
    needs_labels: bool
    needs_captions: bool

    def read(self, index: int, draws: Draws) -> dict[str, Any]:
        shard, row = self.source.shard(index)
        if row in shard.unreadable:
            raise UnreadableImage(shard.unreadable[row])
        # Drawn as for the images themselves, which makes both runs the same.
        mirrored = self.random_flip and draws.below(2, "flip")
        columns = {"moments": shard.entry("mirrored_moments" if mirrored else "moments", row)}
        if self.needs_labels:
            columns["labels"] = int(shard.whole["labels"][row])
        if self.needs_captions:
            captions = shard.captions[row]
            drawn = draws.below(len(captions), "caption")
            columns["captions"] = captions[drawn]
            columns["text_features"] = shard.entry("text_features", shard.first_caption[row] + drawn)
        return columns

    def name(self, index: int) -> str:
        return self.source.name(index)


class Shard:
    """An open file, of which rows are read one by one."""

    def __init__(self, file: Path):
        self.file = file
        self._handle = safe_open(file, "pt")
        about = self._handle.metadata() or {}
        large = {*_OF_IMAGES, *_OF_CAPTIONS}
        self.whole = {name: self._handle.get_tensor(name) for name in self._handle.keys() if name not in large}  # noqa: SIM118
        self._columns = {name: self._handle.get_slice(name) for name in self._handle.keys() if name in large}  # noqa: SIM118
        if about[_CHECKSUM_OF_REST] != _checksum_of_rest(self.whole, about):
            raise UnreadableImage(f"{file} is not what was written: {AGAIN}")
        self.unreadable = {int(row): reason for row, reason in json.loads(about["unreadable"]).items()}
        self.captions = json.loads(about["captions"])
        self.first_caption = [0]
        for captions in self.captions:
            self.first_caption.append(self.first_caption[-1] + len(captions))

    def entry(self, column: str, number: int) -> torch.Tensor:
        stored = self._columns[column][number : number + 1][0]
        if _checksum_of(stored) != int(self.whole[column + _CHECKSUMS][number]):
            raise UnreadableImage(f"entry {number} of {column} in {self.file} is not what was written: {AGAIN}")
        return stored.float()

    def check(self):
        """Read all of it."""
        for column, stored in self._columns.items():
            for number in range(stored.get_shape()[0]):
                self.entry(column, number)


@lru_cache(maxsize=256)
def open_shard(file: Path) -> Shard:
    try:
        return Shard(file)
    except _UNREADABLE as error:
        raise UnreadableImage(f"{file} can not be read ({' '.join(str(error).split())}): {AGAIN}") from error


def _read_empty_caption(folder: Path) -> torch.Tensor:
    file = folder / EMPTY_CAPTION_FILE
    try:
        columns = load_file(file)
        states, checksum = columns["text_features"], columns["text_features" + _CHECKSUMS]
    except _UNREADABLE as error:
        raise ValueError(f"{file} can not be read ({' '.join(str(error).split())}): {AGAIN}") from error
    if checksum.tolist() != [_checksum_of(states)]:
        raise ValueError(f"{file} is not what was written: {AGAIN}")
    return states.float()


def save_empty_caption(file: Path, states: torch.Tensor):
    checksum = torch.tensor([_checksum_of(states)])
    save_file({"text_features": states, "text_features" + _CHECKSUMS: checksum}, file)


def shard_is_complete(file: Path) -> bool:
    if not file.exists():
        return False
    try:
        Shard(file).check()
    except (SafetensorError, UnreadableImage, KeyError):
        return False
    return True


def save_shard(file: Path, columns: dict[str, torch.Tensor], captions: list[list[str]], unreadable: dict[int, str]):
    large = {name: column for name, column in columns.items() if name in _OF_IMAGES + _OF_CAPTIONS}
    whole = {name: column for name, column in columns.items() if name not in large}
    for name, column in large.items():
        whole[name + _CHECKSUMS] = torch.tensor([_checksum_of(entry) for entry in column])
    about = {"captions": json.dumps(captions), "unreadable": json.dumps(unreadable)}
    about[_CHECKSUM_OF_REST] = _checksum_of_rest(whole, about)
    try:
        save_file({**large, **whole}, file, about)
    except SafetensorError as error:  # a disk that is full, among others
        raise OSError(f"{file} can not be written: {error}") from error


def _checksum_of(tensor: torch.Tensor) -> int:
    """Of its type and shape, too: the same bytes may be other numbers."""
    kind = f"{tensor.dtype} {list(tensor.shape)}".encode()
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy(), zlib.crc32(kind))


def _checksum_of_rest(whole: dict[str, torch.Tensor], about: dict[str, str]) -> str:
    columns = sorted((name, _checksum_of(column)) for name, column in whole.items())
    return str(zlib.crc32(repr((columns, about["captions"], about["unreadable"])).encode()))


def shard_path(folder: Path, split: str, number: int) -> Path:
    return folder / f"{split}-{number:05}.safetensors"


def transform_of(settings: DataConfig, channels: int) -> dict[str, Any]:
    """What is done to every image; mirroring is not, which features may have or not."""
    transform = Transform(
        resolution=settings.resolution,
        channels=channels,
        crop_size=settings.crop_size,
        center_crop=settings.center_crop,
        interpolation=settings.image_interpolation_mode,
    )
    return {name: value for name, value in dataclasses.asdict(transform).items() if name != "random_flip"}


def read_index(folder: Path) -> dict[str, Any] | None:
    file = folder / INDEX_FILE
    if not file.is_file():
        return None
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    version = index.get("format_version") if isinstance(index, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{file} has format_version {version!r}, and {FORMAT_VERSION} can be read: precompute into another folder"
        )
    return index
