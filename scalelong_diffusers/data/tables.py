"""
Datasets of the Hub and of local folders, loaded by `datasets`.

Images are decoded here and not by `datasets`, so that error messages can name the file.
"""

import glob
import os
from contextlib import contextmanager
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from datasets import Dataset, DatasetDict
from PIL import Image

from scalelong_diffusers.data.config import DataConfig
from scalelong_diffusers.data.images import UnreadableImage, read_image
from scalelong_diffusers.download import hub_errors
from scalelong_diffusers.errors import UserError, did_you_mean
from scalelong_diffusers.files import checksum
from scalelong_diffusers.pipelines.sampling import is_sample_grid


COLUMNS = {
    "image": ("image", "img", "images", "pixel_values", "picture", "photo", "png", "jpg", "jpeg", "webp"),
    "label": ("label", "labels", "class", "classes", "category", "fine_label", "target", "cls"),
    "caption": ("text", "caption", "captions", "texts", "prompt", "sentences", "description", "txt"),
}
VALIDATION_SPLITS = ("validation", "valid", "val", "dev", "test")
_SPLITS = ("train", *VALIDATION_SPLITS)


def open_tables(
    config: DataConfig, needs_labels: bool, needs_captions: bool
) -> tuple["ImageTable", "ImageTable | None"]:
    """Open the training split, and the validation split if there is one with labels."""
    splits, where = _load_hub(config) if config.train_data_dir is None else _load_folder(config)
    if "train" not in splits:
        raise UserError(f"{where} has no train split; it has {', '.join(splits)}")
    needs = (needs_labels, needs_captions)
    train = ImageTable(splits["train"], where, config, *needs)
    for name in (name for name in VALIDATION_SPLITS if len(splits.get(name, ())) > 0):
        try:
            return train, ImageTable(splits[name], f"{where}, split {name}", config, *needs, classes_of=train)
        except MissingLabel:  # the labels of test splits are often not published
            continue
    return train, None


def _load_hub(config: DataConfig) -> tuple[dict[str, Dataset], str]:
    name, revision = config.dataset_name, config.dataset_revision
    with dataset_errors(config):
        splits = datasets.load_dataset(name, config.dataset_config_name, revision=revision, cache_dir=config.cache_dir)
    return splits, name


@contextmanager
def dataset_errors(config: DataConfig):
    """Turn errors of `datasets` about a dataset on the Hub into a `UserError`."""
    name, revision = config.dataset_name, config.dataset_revision
    if os.path.isdir(name):
        raise UserError(f"dataset_name={name} is a local folder; pass it as train_data_dir")
    try:
        with hub_errors(name, revision):
            yield
    except ConnectionError as error:
        raise UserError(
            f"cannot reach the Hub, and the dataset {name} is not in the cache; check the connection and "
            "HF_HUB_OFFLINE, or use a local folder with train_data_dir"
        ) from error
    except FileNotFoundError as error:
        at = f" at revision {revision!r}" if revision else ""
        raise UserError(
            f"cannot find the dataset {name}{at} on the Hub; if it is private or gated, log in with `hf auth login`; "
            "if it is a local folder, use train_data_dir"
        ) from error
    except UserError:
        raise
    except (ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = one_line(error).split(" Example of usage")[0]
        advice = "; choose one with dataset_config_name" if "config" in reason.lower() else ""
        raise UserError(f"cannot load the dataset {name}: {reason}{advice}") from error


def _load_folder(config: DataConfig) -> tuple[dict[str, Dataset], str]:
    folder = Path(config.train_data_dir)
    if not folder.is_dir():
        raise UserError(f"train_data_dir: {folder} is not a folder")
    where = f"the folder {folder.resolve().name}"
    try:
        return _open_folder(folder.resolve(), config), where
    except (ValueError, OSError, pa.ArrowException, datasets.exceptions.DatasetsError) as error:
        reason = one_line(error)
        several = "from string to array" in reason or "from array to string" in reason
        advice = "; if some images have several captions, write the captions of all images as lists" if several else ""
        raise UserError(f"cannot load {where}: {reason}{advice}") from error


def _open_folder(folder: Path, config: DataConfig) -> dict[str, Dataset]:
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        saved = _load_saved(folder)
        return saved if isinstance(saved, DatasetDict) else {"train": saved}
    if parquet := files_by_split(folder, ".parquet"):
        kind, data_files = "parquet", {split: list(map(glob.escape, files)) for split, files in parquet.items()}
    elif any(os.path.splitext(path)[1].lower() in Image.registered_extensions() for path in _files(folder)):
        kind, data_files = "imagefolder", _split_images(folder)
    else:
        raise UserError("found no images, no parquet files, and no dataset saved by datasets.save_to_disk")
    loaded = datasets.load_dataset(kind, data_files=data_files, cache_dir=config.cache_dir)
    return loaded if kind == "parquet" else {split: _without_sample_grids(rows) for split, rows in loaded.items()}


def _without_sample_grids(images: Dataset) -> Dataset:
    paths = pc.struct_field(images.data.column("image"), "path").to_pylist()
    kept = [row for row, path in enumerate(paths) if not is_sample_grid(path)]
    return images if len(kept) == len(paths) else images.select(kept).flatten_indices()


def _load_saved(folder: Path) -> Dataset | DatasetDict:
    try:
        return datasets.load_from_disk(str(folder))
    except IndexError as error:  # raised by datasets if there are no rows
        raise UserError("it has no images") from error


def _files(folder: Path) -> list[str]:
    """Return all files below a folder, except for hidden ones."""
    found = []
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(where, name) for name in names if not name.startswith(".")]
    return found


def files_by_split(folder: Path, ending: str) -> dict[str, list[str]]:
    """Group files by the split in their name (train-00000-of-00004.parquet). Without splits, all are for training."""
    names = (path for path in _files(folder) if path.endswith(ending))
    files = sorted(path for path in names if os.path.basename(path) != "metadata.parquet")
    splits = {}
    for path in files:
        splits.setdefault(Path(path).stem.split("-")[0], []).append(path)
    named = {name: splits[name] for name in _SPLITS if name in splits}
    return named or ({"train": files} if files else {})


def _split_images(folder: Path) -> dict[str, str]:
    """
    Return the splits of an image folder: its subfolders train, validation and test. Without them, all is for training.

    A single folder with such a name next to other folders is a class, such as pictures of trains.
    """
    names = {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
    splits = [name for name in _SPLITS if name in names]
    root = glob.escape(str(folder))
    if "train" in splits and (len(splits) > 1 or len(names) == 1):
        return {name: f"{root}/{name}/**" for name in splits}
    return {"train": f"{root}/**"}


def one_line(error: BaseException) -> str:
    """Return the message of an error, or of the cause that `datasets` wraps in a general error, as one line."""
    if isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())


def find_column(columns: list[str], kind: str, given: str | None, where: str) -> str:
    """Return the column of images, labels or captions: the given one, or one with a common name."""
    listed = f"its columns: {', '.join(columns)}"
    if given is not None:
        if given not in columns:
            raise UserError(f"{where} has no column {given!r}{did_you_mean(given, columns)}; {listed}")
        return given
    found = next((name for name in COLUMNS[kind] if name in columns), None)
    if found is None:
        metadata = ", or add them in a metadata.jsonl next to the images" if kind == "caption" else ""
        raise UserError(f"found no {kind} column in {where}; {listed}; choose one with {kind}_column{metadata}")
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
        if len(dataset) == 0:
            raise UserError(f"{where} has no images")
        self._image_column = self._find_column("image", config.image_column)
        self._check_images()
        self.labels = self.class_names = self.num_classes = self._caption_column = None
        if needs_labels:
            if config.train_data_dir is not None and config.label_column is None:
                self._check_class_folders()
            self._read_labels(self._find_column("label", config.label_column), classes_of)
        if needs_captions:
            self._caption_column = self._find_column("caption", config.caption_column)
            self._check_captions()
        self.description = f"{where}, {len(dataset):,} image{'s' if len(dataset) != 1 else ''}"

    def __len__(self) -> int:
        return len(self._dataset)

    def image(self, index: int) -> Image.Image:
        file = self._file(index)
        try:
            if not file:
                raise UserError(f"column {self._image_column!r} is empty")
            return read_image(file)
        except UserError as error:
            raise UnreadableImage(f"{self.name(index)} cannot be read: {error}") from error

    def _file(self, index: int) -> bytes | str | None:
        """Return the content of an image file, or its path if the content is not stored."""
        stored = self._column(self._image_column)[index].as_py()
        return stored["bytes"] or stored["path"] if isinstance(stored, dict) else stored

    def name(self, index: int) -> str:
        """Return the path of an image, or its row if the image is stored in the table."""
        stored = self._column(self._image_column)[index]
        if pat.is_struct(stored.type) and stored.is_valid and not stored["bytes"].is_valid and stored["path"].is_valid:
            return stored["path"].as_py()
        return f"row {index} of {self._where}"

    def label(self, index: int) -> int:
        return int(self.labels[index])

    def captions(self, index: int) -> list[str]:
        stored = self._column(self._caption_column)[index].as_py()
        return stored if isinstance(stored, list) else [stored]

    def identity(self) -> str:
        """Identify the dataset by the names and sizes of its images, the content of 16, the labels and captions."""
        parts = [repr(self.class_names)]
        parts += [repr(_names_and_sizes(chunk)) for chunk in self._column(self._image_column).chunks]
        parts += [self._content(index) for index in np.linspace(0, len(self) - 1, 16).astype(int).tolist()]
        if self.labels is not None:
            parts.append(self.labels.tobytes())
        if self._caption_column is not None:
            parts += [repr(chunk.to_pylist()) for chunk in self._column(self._caption_column).chunks]
        return checksum(*parts)

    def _content(self, index: int) -> bytes:
        file = self._file(index)
        if isinstance(file, str):
            return Path(file).read_bytes() if os.path.exists(file) else b""
        return file or b""

    def _column(self, name: str) -> pa.ChunkedArray:
        return self._dataset.data.column(name)

    def _find_column(self, kind: str, given: str | None) -> str:
        return find_column(self._dataset.column_names, kind, given, self._where)

    def _check_images(self):
        kind = self._column(self._image_column).type
        is_file = pat.is_struct(kind) and {"bytes", "path"} <= {field.name for field in kind}
        if not is_file and not pat.is_binary(kind) and not pat.is_large_binary(kind):
            raise self._wrong_type(
                self._image_column, "images must be stored as datasets.Image or as the bytes of a file"
            )

    def _check_class_folders(self):
        if self._dataset.column_names == [self._image_column]:
            folders = [os.path.dirname(self.name(index)) for index in range(len(self))]
            root = os.path.commonpath(folders)
            loose = [index for index, folder in enumerate(folders) if folder == root]
            if 0 < len(loose) < len(self):
                raise UserError(
                    f"{self._where} has classes in subfolders, but {len(loose)} of {len(self)} images are outside of "
                    f"them: move {self.name(loose[0])} into the folder of a class, or remove it"
                )
            raise UserError(
                f"{self._where} has no classes; move the images of each class into its own subfolder (cat/1.png, "
                "dog/2.png; at least two), or add a metadata.csv with the columns file_name and label"
            )

    def _read_labels(self, name: str, classes_of: "ImageTable | None"):
        column = self._column(name)
        if column.null_count:
            raise MissingLabel(f"{self.name(_first(pc.is_null(column)))} has no label in column {name!r}")
        if pat.is_string(column.type) or pat.is_large_string(column.type):
            self.class_names = classes_of.class_names if classes_of else sorted(pc.unique(column).to_pylist())
            self._check_known_classes(name)
            column = pc.index_in(column, pa.array(self.class_names, column.type))
        elif pat.is_integer(column.type) or pat.is_boolean(column.type):
            self.class_names = getattr(self._dataset.features[name], "names", None)
        else:
            raise self._wrong_type(name, "labels must be integers or class names")
        self.labels = column.to_numpy().astype(np.int64)
        self.num_classes = self._count_classes(classes_of)
        self._check_label_range(name)

    def _count_classes(self, classes_of: "ImageTable | None") -> int:
        if self.class_names is not None:
            return len(self.class_names)
        return classes_of.num_classes if classes_of else int(self.labels.max()) + 1

    def _check_known_classes(self, name: str):
        column = self._column(name)
        unknown = pc.invert(pc.is_in(column, pa.array(self.class_names, column.type)))
        if pc.any(unknown).as_py():
            row = _first(unknown)
            raise UserError(f"{self.name(row)} has class {column[row].as_py()!r}, which no training image has")

    def _check_label_range(self, name: str):
        if (self.labels == -1).any():
            row = int((self.labels == -1).argmax())
            raise MissingLabel(f"{self.name(row)} has no label: column {name!r} is -1")
        wrong = (self.labels < 0) | (self.labels >= self.num_classes)
        if wrong.any():
            row = int(wrong.argmax())
            accepted = f"from 0 to {self.num_classes - 1}" if self.num_classes > 0 else "at least 0"
            raise UserError(
                f"label in column {name!r} must be {accepted}, got {self.labels[row]} for {self.name(row)}"
            )

    def _check_captions(self):
        column = self._column(self._caption_column)
        of_list = pat.is_list(column.type) or pat.is_large_list(column.type)
        text = column.type.value_type if of_list else column.type
        if not pat.is_string(text) and not pat.is_large_string(text):
            raise self._wrong_type(self._caption_column, "captions must be texts or lists of texts")
        if of_list:
            captions_of_rows = column.to_pylist()
            missing = pa.array([not texts or any(_is_blank(text) for text in texts) for texts in captions_of_rows])
        else:
            missing = pc.fill_null(pc.equal(pc.utf8_trim_whitespace(column), ""), True)
        row = _first(missing)
        if row is not None:
            raise UserError(f"{self.name(row)} has no caption: {self._caption_column!r} is {column[row].as_py()!r}")

    def _wrong_type(self, column: str, accepted: str) -> UserError:
        first = self._column(column)[0].as_py()
        kind = self._column(column).type
        return UserError(f"column {column!r} of {self._where} has type {kind} (row 0: {first!r:.60}); {accepted}")


def _first(flags: pa.Array | pa.ChunkedArray) -> int | None:
    """Return the index of the first True."""
    row = pc.index(flags, True).as_py()
    return None if row == -1 else row


def _names_and_sizes(images: pa.Array) -> list:
    if not pat.is_struct(images.type):
        return pc.binary_length(images).to_pylist()
    paths, sizes = images.field("path").to_pylist(), pc.binary_length(images.field("bytes")).to_pylist()
    return [
        (path and os.path.basename(path), _file_size(path) if size is None else size)
        for path, size in zip(paths, sizes)
    ]


def _file_size(path: str | None) -> int | None:
    return os.path.getsize(path) if path and os.path.exists(path) else None


def _is_blank(text: str | None) -> bool:
    return text is None or not text.strip()
