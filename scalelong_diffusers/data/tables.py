"""
Datasets of the Hub and of local folders, loaded by `datasets`.

Images are decoded here and not by `datasets`, so that error messages can name the file.
"""

import glob
import os
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from datasets import Dataset, DatasetDict
from huggingface_hub import constants
from PIL import Image

from scalelong_diffusers.data.config import DataConfig
from scalelong_diffusers.data.folders import (
    LINK_OUT,
    SPECIAL_FILE,
    Kind,
    count_suffixes,
    describe_ignored,
    list_files,
    list_kinds,
)
from scalelong_diffusers.download import hub_errors, read_json
from scalelong_diffusers.errors import UserError, did_you_mean
from scalelong_diffusers.files import checksum
from scalelong_diffusers.image_files import IMAGE_SUFFIXES, read_file, read_image, resolve_inside
from scalelong_diffusers.pipelines.sampling import is_sample_grid


COLUMNS = {
    "image": ("image", "img", "images", "pixel_values", "picture", "photo", "png", "jpg", "jpeg", "webp"),
    "label": ("label", "labels", "class", "classes", "category", "fine_label", "target", "cls"),
    "caption": ("text", "caption", "captions", "texts", "prompt", "sentences", "description", "txt"),
}
_METADATA_ADVICE = {
    "image": "",
    "label": ", or put the images of each class into a separate subfolder",
    "caption": ", or add them next to the images: in a metadata.jsonl, or 01.txt for 01.jpg",
}
VALIDATION_SPLITS = ("validation", "valid", "val", "dev", "test")
_SPLITS = ("train", *VALIDATION_SPLITS)
MAX_CLASSES = 1_000_000  # if the classes are plain numbers
_CAPTION_SUFFIX = ".txt"
_METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def open_tables(
    config: DataConfig, needs_labels: bool, needs_captions: bool
) -> tuple["ImageTable", "ImageTable | None"]:
    """Open the training split, and the validation split if there is one with labels."""
    loaded = _load_hub(config) if config.train_data_dir is None else _load_folder(config, needs_labels, needs_captions)
    splits, where, ignored = loaded

    def open_split(rows: Dataset, where: str, train: ImageTable | None = None) -> ImageTable:
        return ImageTable(rows, where, config, needs_labels, needs_captions, classes_of=train)

    train, validation = open_splits(splits, where, open_split)
    train.description += describe_ignored(ignored)
    return train, validation


def open_splits(splits: dict[str, Any], where: str, open_split: Callable[..., Any]) -> tuple[Any, Any | None]:
    """Open the training split, and the first validation split that has labels."""
    if "train" not in splits:
        raise UserError(f"{where} has no train split; it has {', '.join(splits)}")
    train = open_split(splits["train"], where)
    for name in (name for name in VALIDATION_SPLITS if len(splits.get(name, ())) > 0):
        try:
            return train, open_split(splits[name], f"{where}, split {name}", train)
        except MissingLabel:  # the labels of test splits are often not published
            continue
    return train, None


def _load_hub(config: DataConfig) -> tuple[dict[str, Dataset], str, Counter[Kind]]:
    name, revision = config.dataset_name, config.dataset_revision
    with dataset_errors(config):
        splits = datasets.load_dataset(name, config.dataset_config_name, revision=revision, cache_dir=config.cache_dir)
    return splits, name, Counter()


@contextmanager
def dataset_errors(config: DataConfig):
    """Turn errors of `datasets` about a dataset on the Hub into a `UserError`."""
    name = config.dataset_name
    if os.path.isdir(name):
        raise UserError(f"dataset_name={name} is a local folder; pass it as train_data_dir")
    try:
        with hub_errors(name, config.dataset_revision):
            yield
    except UserError:
        raise
    except (ValueError, RuntimeError, OSError, datasets.exceptions.DatasetsError) as error:
        reason, advice = one_line(error).split(" Example of usage")[0].rstrip("."), ""
        if isinstance(error, ConnectionError):
            advice = "; check the connection and HF_HUB_OFFLINE"
        elif isinstance(error, FileNotFoundError):
            advice = "; if it is private or gated, log in with `hf auth login`; use train_data_dir for a local folder"
        elif "config" in reason.lower():
            advice = "; choose one with --dataset_config_name"
        raise UserError(f"cannot load the dataset {name}: {reason}{advice}") from error


def data_folder(config: DataConfig) -> tuple[Path, str]:
    """Return the absolute `train_data_dir`, and how messages name it."""
    folder = Path(config.train_data_dir).resolve()
    if not os.path.isdir(folder):
        raise UserError(f"train_data_dir: {config.train_data_dir} is not a folder")
    return folder, f"the folder {folder.name}"


def dataset_folders(config: DataConfig) -> list[Path]:
    """Return the folders in which the paths of a dataset must lie. For the Hub, these are the caches."""
    if config.train_data_dir is None:
        caches = (constants.HF_HUB_CACHE, config.cache_dir or datasets.config.HF_DATASETS_CACHE)
        return [Path(cache).expanduser().resolve() for cache in caches]
    folder, _ = data_folder(config)
    # The snapshots that `hf download` makes have links to the blobs of their repository.
    snapshots = (path for path in (folder, *folder.parents) if path.parent.name == "snapshots")
    return [folder, *(snapshot.parents[1] / "blobs" for snapshot in snapshots)]


def _load_folder(
    config: DataConfig, needs_labels: bool, needs_captions: bool
) -> tuple[dict[str, Dataset], str, Counter[Kind]]:
    """Return the splits of a folder, how messages name it, and the numbers of files that are ignored."""
    folder, where = data_folder(config)
    files, ignored = list_files(folder, dataset_folders(config))
    try:
        if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
            return _load_saved(folder, files, ignored, where), where, Counter()
        if parquet := files_by_split(files, ".parquet"):
            ignored += count_suffixes(set(files).difference(*parquet.values()))
            return _load_files("parquet", parquet, config), where, ignored
        loaded, others = _load_images(folder, files, config, needs_labels, needs_captions, where)
        return loaded, where, ignored + others
    except (UserError, MemoryError):
        raise
    except Exception as error:  # `datasets` raises almost any exception for damaged files
        reason = "it has no images, or metadata without entries" if isinstance(error, IndexError) else one_line(error)
        several = "from string to array" in reason or "from array to string" in reason
        advice = "; if some images have several captions, write the captions of all images as lists" if several else ""
        raise UserError(f"cannot load {where}: {reason}{advice}") from error


def _load_files(kind: str, files: dict[str, list[str]], config: DataConfig) -> dict[str, Dataset]:
    escaped = {split: [glob.escape(file) for file in names] for split, names in files.items()}
    return datasets.load_dataset(kind, data_files=escaped, cache_dir=config.cache_dir)


def _load_saved(folder: Path, files: list[str], ignored: Counter[Kind], where: str) -> dict[str, Dataset]:
    """Load a dataset that `datasets` saved. Its paths are checked first, because `datasets` follows any path."""
    if unsafe := +Counter({kind: ignored[kind] for kind in (LINK_OUT, SPECIAL_FILE)}):
        raise UserError(f"{where} must have only regular files, got {list_kinds(unsafe)}")
    paths = [folder / split for split in (read_json(folder, "dataset_dict.json") or {}).get("splits", ())]
    for state in (Path(file) for file in files if os.path.basename(file) == "state.json"):
        paths += [state.parent / data["filename"] for data in read_json(state.parent, state.name)["_data_files"]]
    for path in paths:
        try:
            resolve_inside(path, [folder])
        except UserError as error:
            raise UserError(f"{where} cannot be read because of {path}: {error}") from error
    saved = datasets.load_from_disk(str(folder))
    splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
    for rows in splits.values():
        rows.data.validate(full=True)  # Arrow maps the files into memory, and offsets in them may point outside
    return splits


def _load_images(
    folder: Path, files: list[str], config: DataConfig, needs_labels: bool, needs_captions: bool, where: str
) -> tuple[dict[str, Dataset], Counter[Kind]]:
    """Load a folder of images, and count the files that are ignored."""
    images = [file for file in files if file.lower().endswith(IMAGE_SUFFIXES) and not is_sample_grid(file)]
    metadata = [file for file in files if os.path.basename(file) in _METADATA_FILES]
    splits = _image_splits(folder)
    by_split = {
        split: [file for file in images + metadata if file.startswith(f"{folder / split}{os.sep}")] for split in splits
    } or {"train": images + metadata}
    used = set().union(*by_split.values())
    used_images = [file for file in images if file in used]
    ignored = count_suffixes(set(files).difference(images, used))
    ignored["image", f" outside of the splits {', '.join(splits)}"] = len(images) - len(used_images)
    if not used_images:
        accepted = ", ".join(sorted(IMAGE_SUFFIXES))
        raise UserError(f"{where} has no images{describe_ignored(ignored)}; accepted: {accepted}")
    has_metadata = not used.isdisjoint(metadata)
    if needs_labels and not has_metadata:
        _check_depths(used_images, folder, where)
    loaded = _load_files("imagefolder", by_split, config)
    if needs_captions and not has_metadata and (captions := _caption_files(used_images, files)):
        ignored -= count_suffixes(captions.values())
        loaded = {split: _with_captions(rows, captions, dataset_folders(config)) for split, rows in loaded.items()}
    if has_metadata:
        ignored["image", " without an entry in the metadata"] = len(set(used_images) - _paths(loaded))
    return loaded, ignored


def _caption_files(images: list[str], files: list[str]) -> dict[str, str]:
    """Return the caption files by image: `01.txt` belongs to `01.jpg`."""
    texts = {file for file in files if file.endswith(_CAPTION_SUFFIX)}
    by_image = {image: os.path.splitext(image)[0] + _CAPTION_SUFFIX for image in images}
    return {image: text for image, text in by_image.items() if text in texts}


def _with_captions(rows: Dataset, captions: dict[str, str], folders: list[Path]) -> Dataset:
    """Add a column with the captions of each image: the lines of its file, or none without a file."""
    paths = pc.struct_field(rows.data.column("image"), "path").to_pylist()
    lines = [_read_lines(captions[path], folders) if path in captions else [] for path in paths]
    feature = datasets.List(datasets.Value("string"))
    return rows.add_column(COLUMNS["caption"][0], lines, feature=feature)


def _read_lines(file: str, folders: list[Path]) -> list[str]:
    try:
        lines = read_file(file, folders).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not a text in UTF-8") from error
    return [line.strip() for line in lines if line.strip()]


def _paths(splits: dict[str, Dataset]) -> set[str]:
    """Return the paths of all images that the metadata names."""
    columns = [rows.data.column("image") for rows in splits.values() if "image" in rows.column_names]
    return {path for column in columns for path in pc.struct_field(column, "path").to_pylist()}


def _check_depths(images: list[str], folder: Path, where: str):
    """Check that all images are at the same depth. Otherwise `datasets` ignores the class folders."""
    [(usual, _), *others] = Counter(file.count(os.sep) for file in images).most_common()
    if others:
        strays = [os.path.relpath(file, folder) for file in images if file.count(os.sep) != usual]
        count = f"{len(strays):,} image{'s' * (len(strays) != 1)} at another depth than the others"
        raise UserError(f"{where} has {count}, such as {strays[0]}; put each image directly into its class folder")


def files_by_split(files: list[str], ending: str) -> dict[str, list[str]]:
    """Group files by the split in their name (train-00000-of-00004.parquet). Without splits, all are for training."""
    files = [path for path in files if path.endswith(ending) and os.path.basename(path) not in _METADATA_FILES]
    splits = {}
    for path in files:
        splits.setdefault(Path(path).stem.split("-")[0], []).append(path)
    named = {name: splits[name] for name in _SPLITS if name in splits}
    return named or ({"train": files} if files else {})


def _image_splits(folder: Path) -> list[str]:
    """
    Return the splits of an image folder: its subfolders train, validation and test. Without them, all is for training.

    A single folder with such a name next to other folders is a class, such as pictures of trains.
    """
    subfolders = (path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    names = {path.name for path in subfolders if not path.name.startswith(".")}
    splits = [name for name in _SPLITS if name in names]
    return splits if "train" in splits and (len(splits) > 1 or len(names) == 1) else []


def one_line(error: BaseException) -> str:
    """Return the message of an error, or of the cause that `datasets` wraps in a general error, as one line."""
    if isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__ is not None:
        error = error.__cause__
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if isinstance(error, LookupError) else message


def find_columns(
    columns: list[str], config: DataConfig, needs_labels: bool, needs_captions: bool, where: str
) -> dict[str, str]:
    """Return the needed columns by kind: the ones that the config names, or ones with common names."""
    found = {}
    for kind in ["image"] + ["label"] * needs_labels + ["caption"] * needs_captions:
        given = getattr(config, f"{kind}_column")
        name = next((name for name in (given and (given,)) or COLUMNS[kind] if name in columns), None)
        if name is None:
            wanted = f"column {given!r}{did_you_mean(given, columns)}" if given else f"{kind} column"
            advice = f"choose one with --{kind}_column{_METADATA_ADVICE[kind]}"
            raise UserError(f"{where} has no {wanted}; its columns: {', '.join(columns)}; {advice}")
        found[kind] = name
    return found


class MissingLabel(UserError):
    """An image has no label. The message names it."""


class ImageTable:
    """One split of a dataset as a `Source`. Labels and captions are read only if they are needed."""

    def __init__(
        self,
        dataset: Dataset,
        where: str,
        config: DataConfig,
        needs_labels: bool,
        needs_captions: bool,
        classes_of: "ImageTable | None" = None,
    ):
        # Keep the dataset instead of its table: it is pickled for workers as the name of its file.
        self._dataset = dataset
        self._where = where
        self._folders = dataset_folders(config)
        self._columns = find_columns(dataset.column_names, config, needs_labels, needs_captions, where)
        self._skips_bad = config.on_bad_image == "skip"
        kind = self._column("image").type
        is_file = pat.is_struct(kind) and {"bytes", "path"} <= {field.name for field in kind}
        is_image = is_file or pat.is_binary(kind) or pat.is_large_binary(kind)
        self._check_type("image", is_image, "images must be stored as datasets.Image or as the bytes of a file")
        self.labels = self.class_names = self.num_classes = None
        if needs_labels:
            self._read_labels(classes_of)
        if needs_captions:
            self._check_captions()
        self.description = f"{where}, {len(dataset):,} image{'s' if len(dataset) != 1 else ''}"

    def __len__(self) -> int:
        return len(self._dataset)

    def image(self, index: int) -> Image.Image:
        return read_image(self._file(index), self.name(index), self._folders)

    def _file(self, index: int) -> bytes | str:
        """Return the content of an image file, or its path if the content is not stored."""
        stored = self._column("image")[index].as_py()
        return (stored["bytes"] or stored["path"] if isinstance(stored, dict) else stored) or b""

    def name(self, index: int) -> str:
        """Return the path of an image, or its row if the image is stored in the table."""
        stored = self._column("image")[index]
        if pat.is_struct(stored.type) and stored.is_valid and not stored["bytes"].is_valid and stored["path"].is_valid:
            return stored["path"].as_py()
        return f"row {index} of {self._where}"

    def label(self, index: int) -> int:
        return int(self.labels[index])

    def captions(self, index: int) -> list[str]:
        stored = self._column("caption")[index].as_py()
        texts = stored if isinstance(stored, list) else [stored]
        return [text for text in texts if text and not text.isspace()]

    def identity(self) -> str:
        """Identify the dataset by the names and sizes of its images, the content of 16, the labels and captions."""
        parts = [repr(self.class_names)]
        parts += [repr(_names_and_sizes(chunk)) for chunk in self._column("image").chunks]
        for index in np.linspace(0, len(self) - 1, 16).astype(int).tolist():
            file = self._file(index)
            parts.append(file if isinstance(file, bytes) else self._content(file))
        if self.labels is not None:
            parts.append(self.labels.tobytes())
        if "caption" in self._columns:
            parts += [repr(chunk.to_pylist()) for chunk in self._column("caption").chunks]
        return checksum(*parts)

    def _content(self, path: str) -> bytes:
        try:
            return read_file(path, self._folders)
        except (OSError, ValueError):  # reading the image reports it, if the image is used
            return b""

    def _column(self, kind: str) -> pa.ChunkedArray:
        return self._dataset.data.column(self._columns[kind])

    def _check_type(self, kind: str, is_right: bool, accepted: str):
        if not is_right:
            column = self._column(kind)
            found = f"type {column.type} (row 0: {column[0].as_py()!r:.60})"
            raise UserError(f"column {self._columns[kind]!r} of {self._where} has {found}; {accepted}")

    def _read_labels(self, classes_of: "ImageTable | None"):
        column = self._column("label")
        is_text = pat.is_string(column.type) or pat.is_large_string(column.type)
        is_number = pat.is_integer(column.type) or pat.is_boolean(column.type)
        self._check_type("label", is_text or is_number, "labels must be integers or class names")
        labels = column
        if is_text:
            own = sorted(pc.unique(column.drop_null()).to_pylist())
            self.class_names = classes_of.class_names if classes_of else own
            labels = pc.index_in(column, pa.array(self.class_names, column.type))
        else:
            self.class_names = getattr(self._dataset.features[self._columns["label"]], "names", None)
        # Unsigned numbers that are too large become negative, which is also wrong.
        self.labels = pc.fill_null(labels.cast(pa.int64(), safe=False), -1).to_numpy()
        if self.class_names is not None:
            self.num_classes = len(self.class_names)
        else:
            own = min(MAX_CLASSES, max(1, int(self.labels.max()) + 1))
            self.num_classes = classes_of.num_classes if classes_of else own
        wrong = (self.labels < 0) | (self.labels >= self.num_classes)
        if wrong.any():
            row = int(wrong.argmax())
            found = column[row].as_py()
            accepted = "a class of the training images" if is_text else f"from 0 to {self.num_classes - 1}"
            # -1 is the usual label of a test split whose labels are not published.
            raise (MissingLabel if found in (None, -1) else UserError)(
                f"label in column {self._columns['label']!r} must be {accepted}, got {found!r} for {self.name(row)}"
            )

    def _check_captions(self):
        column = self._column("caption")
        of_list = pat.is_list(column.type) or pat.is_large_list(column.type)
        text = column.type.value_type if of_list else column.type
        is_text = pat.is_string(text) or pat.is_large_string(text)
        self._check_type("caption", is_text, "captions must be texts or lists of texts")
        if of_list:
            rows = column.to_pylist()
            missing = pa.array([not texts or any(not (text or "").strip() for text in texts) for texts in rows])
        else:
            missing = pc.fill_null(pc.equal(pc.utf8_trim_whitespace(column), ""), True)
        row = pc.index(missing, True).as_py()
        if row != -1 and not self._skips_bad:
            found = f"{self._columns['caption']!r} is {column[row].as_py()!r}"
            advice = "--on_bad_image skip leaves out images without captions"
            raise UserError(f"{self.name(row)} has no caption: {found}; {advice}")


def _names_and_sizes(images: pa.Array) -> list:
    if not pat.is_struct(images.type):
        return pc.binary_length(images).to_pylist()
    result = []
    for path, size in zip(images.field("path").to_pylist(), pc.binary_length(images.field("bytes")).to_pylist()):
        if size is None and path and os.path.exists(path):
            size = os.path.getsize(path)
        result.append((path and os.path.basename(path), size))
    return result
