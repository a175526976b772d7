"""Data sets of the Hub and of folders, as tables of `datasets`; we decode the images, so that bad ones have names."""

import glob
import hashlib
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
from scalelong_diffusers.data.images import UnreadableImage, is_sample_grid, read_image
from scalelong_diffusers.download import hub_errors
from scalelong_diffusers.errors import did_you_mean


COLUMNS = {
    "image": ("image", "img", "images", "pixel_values", "picture", "photo", "png", "jpg", "jpeg", "webp"),
    "label": ("label", "labels", "class", "classes", "category", "fine_label", "target", "cls"),
    "caption": ("text", "caption", "captions", "texts", "prompt", "sentences", "description", "txt"),
}
VALIDATION_SPLITS = ("validation", "valid", "val", "dev", "test")
_SPLITS = ("train", *VALIDATION_SPLITS)


def open_tables(
    settings: DataConfig, needs_labels: bool, needs_captions: bool
) -> tuple["ImageTable", "ImageTable | None"]:
    splits, where = _load_hub(settings) if settings.train_data_dir is None else _load_folder(settings)
    if "train" not in splits:
        raise ValueError(f"{where} has no split 'train'; its splits: {', '.join(splits)}")
    train = ImageTable(splits["train"], where, settings, needs_labels, needs_captions)
    for name in (name for name in VALIDATION_SPLITS if len(splits.get(name, ())) > 0):
        try:
            return train, ImageTable(
                splits[name], f"{where}, split {name}", settings, needs_labels, needs_captions, classes_of=train
            )
        except MissingLabel:  # test images are often published without; images of another split may do
            continue
    return train, None


def _load_hub(settings: DataConfig) -> tuple[dict[str, Dataset], str]:
    name, revision = settings.dataset_name, settings.dataset_revision
    with dataset_errors(settings):
        config = settings.dataset_config_name
        return datasets.load_dataset(name, config, revision=revision, cache_dir=settings.cache_dir), name


@contextmanager
def dataset_errors(settings: DataConfig):
    """What `datasets` says of a data set on the Hub, in a sentence."""
    name, revision = settings.dataset_name, settings.dataset_revision
    if os.path.isdir(name):
        raise ValueError(f"dataset_name={name!r} is a local folder, not an id on the Hub; give it as train_data_dir")
    try:
        with hub_errors(name, revision):
            yield
    except ConnectionError as error:
        raise OSError(
            f"the data set {name} is not in the cache, and the Hub can not be reached to download it; check the "
            "connection and HF_HUB_OFFLINE, or train on a local folder with train_data_dir"
        ) from error
    except FileNotFoundError as error:
        at = f" at revision {revision!r}" if revision else ""
        raise FileNotFoundError(
            f"there is no data set {name}{at} on the Hub that you may read; for a private or gated one log in with "
            "`hf auth login`, for a local folder give train_data_dir"
        ) from error
    except (ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = one_line(error).split(" Example of usage")[0]
        advice = "; dataset_config_name says which config" if "config" in reason.lower() else ""
        raise ValueError(f"the data set {name} can not be loaded: {reason}{advice}") from error


def _load_folder(settings: DataConfig) -> tuple[dict[str, Dataset], str]:
    folder = Path(settings.train_data_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"train_data_dir: there is no folder {str(folder)!r}")
    where = f"the folder {folder.resolve().name}"
    try:
        return _open_folder(folder.resolve(), settings), where
    except (ValueError, OSError, pa.ArrowException, datasets.exceptions.DatasetsError) as error:
        reason = one_line(error)
        several = "from string to array" in reason or "from array to string" in reason
        advice = "; where some have several captions write those of all as lists" if several else ""
        raise ValueError(f"{where} can not be loaded: {reason}{advice}") from error


def _open_folder(folder: Path, settings: DataConfig) -> dict[str, Dataset]:
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        saved = _load_saved(folder)
        return saved if isinstance(saved, DatasetDict) else {"train": saved}
    if parquet := files_by_split(folder, ".parquet"):
        kind, data_files = "parquet", {split: list(map(glob.escape, files)) for split, files in parquet.items()}
    elif any(os.path.splitext(path)[1].lower() in Image.registered_extensions() for path in _files(folder)):
        kind, data_files = "imagefolder", _split_images(folder)
    else:
        raise ValueError("it holds no images, no parquet files, and nothing that datasets saved")
    loaded = datasets.load_dataset(kind, data_files=data_files, cache_dir=settings.cache_dir)
    return loaded if kind == "parquet" else {split: _without_sample_grids(rows) for split, rows in loaded.items()}


def _without_sample_grids(images: Dataset) -> Dataset:
    paths = pc.struct_field(images.data.column("image"), "path").to_pylist()
    kept = [row for row, path in enumerate(paths) if not is_sample_grid(path)]
    return images if len(kept) == len(paths) else images.select(kept).flatten_indices()


def _load_saved(folder: Path) -> Dataset | DatasetDict:
    try:
        return datasets.load_from_disk(str(folder))
    except IndexError as error:  # what datasets makes of a set without rows
        raise ValueError("it has no images") from error


def _files(folder: Path) -> list[str]:
    """All files below a folder that are not hidden; there may be millions."""
    found = []
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(where, name) for name in names if not name.startswith(".")]
    return found


def files_by_split(folder: Path, ending: str) -> dict[str, list[str]]:
    """By the names that the Hub gives: train-00000-of-00004.parquet; all is for training where none says so."""
    names = (path for path in _files(folder) if path.endswith(ending))
    files = sorted(path for path in names if os.path.basename(path) != "metadata.parquet")
    splits = {}
    for path in files:
        splits.setdefault(Path(path).stem.split("-")[0], []).append(path)
    named = {name: splits[name] for name in _SPLITS if name in splits}
    return named or ({"train": files} if files else {})


def _split_images(folder: Path) -> dict[str, str]:
    """
    Its sub-folders train, validation and test are splits; all is for training where there are no such.

    They are classes (there are pictures of trains) where other classes stand beside a single one of them.
    """
    names = {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
    splits = [name for name in _SPLITS if name in names]
    root = glob.escape(str(folder))
    if "train" in splits and (len(splits) > 1 or len(names) == 1):
        return {name: f"{root}/{name}/**" for name in splits}
    return {"train": f"{root}/**"}


def one_line(error: BaseException) -> str:
    """What went wrong, of an error whose message may have several lines and stand behind a general one."""
    if isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())


def find_column(columns: list[str], kind: str, given: str | None, where: str) -> str:
    """The column of images, labels or captions: the one that is named, or one of a usual name."""
    listed = f"its columns: {', '.join(columns)}"
    if given is not None:
        if given not in columns:
            raise ValueError(f"{where} has no column {given!r}{did_you_mean(given, columns)}; {listed}")
        return given
    found = next((name for name in COLUMNS[kind] if name in columns), None)
    if found is None:
        raise ValueError(
            f"{where} has no {kind} column of a usual name ({', '.join(COLUMNS[kind])}); {listed}; "
            f"say which it is with {kind}_column"
        )
    return found


class MissingLabel(ValueError):
    """A sentence that names an image without a label."""


class ImageTable:
    """One split of a data set: its images, with the labels and captions that are needed."""

    def __init__(
        self,
        dataset: Dataset,
        where: str,
        settings: DataConfig,
        needs_labels: bool,
        needs_captions: bool,
        classes_of: "ImageTable | None" = None,
    ):
        # The data set itself is kept, not its table: it travels to worker processes as the name of a file.
        self._dataset = dataset
        self._where = where
        if len(dataset) == 0:
            raise ValueError(f"{where} has no images")
        self._image_column = self._find_column("image", settings.image_column)
        self._check_images()
        self.labels = self.class_names = self.num_classes = self._caption_column = None
        if needs_labels:
            if settings.train_data_dir is not None and settings.label_column is None:
                self._refuse_folder_without_classes()
            self._read_labels(self._find_column("label", settings.label_column), classes_of)
        if needs_captions:
            self._caption_column = self._find_column("caption", settings.caption_column)
            self._check_captions()
        self.description = f"{where}, {len(dataset):,} image{'s' if len(dataset) != 1 else ''}"

    def __len__(self) -> int:
        return len(self._dataset)

    def image(self, index: int) -> Image.Image:
        file = self._file(index)
        try:
            if not file:
                raise ValueError(f"column {self._image_column!r} is empty there")
            return read_image(file)
        except ValueError as error:
            raise UnreadableImage(f"{self.name(index)} can not be read: {error}") from error

    def _file(self, index: int) -> bytes | str | None:
        """The content of an image file or else its path."""
        stored = self._column(self._image_column)[index].as_py()
        return stored["bytes"] or stored["path"] if isinstance(stored, dict) else stored

    def name(self, index: int) -> str:
        """The file of an image, or its row where it is stored in the table."""
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
        """By the names and sizes of all files, wherever they are, and the content of a few: all would take hours."""
        digest = hashlib.sha256(repr(self.class_names).encode())
        for chunk in self._column(self._image_column).chunks:
            digest.update(repr(_names_and_sizes(chunk)).encode())
        for index in np.linspace(0, len(self) - 1, 16).astype(int).tolist():
            digest.update(self._content(index))
        if self.labels is not None:
            digest.update(self.labels.tobytes())
        if self._caption_column is not None:
            for chunk in self._column(self._caption_column).chunks:
                digest.update(repr(chunk.to_pylist()).encode())
        return digest.hexdigest()

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
            raise self._wrong_type(self._image_column, "an image is stored as a file (datasets' Image, or its bytes)")

    def _refuse_folder_without_classes(self):
        if self._dataset.column_names == [self._image_column]:
            folders = [os.path.dirname(self.name(index)) for index in range(len(self))]
            root = os.path.commonpath(folders)
            loose = [index for index, folder in enumerate(folders) if folder == root]
            if 0 < len(loose) < len(self):
                raise ValueError(
                    f"{self._where} has classes in sub-folders and {len(loose)} of {len(self)} images beside them, "
                    f"which have none: put {self.name(loose[0])} into the folder of a class, or away"
                )
            raise ValueError(
                f"{self._where} has images of no class; put those of each class into a sub-folder of its name "
                "(cat/1.png, dog/2.png; two classes at least), or name the classes in the column 'label' of a "
                "metadata.csv beside the images, whose column 'file_name' names these"
            )

    def _read_labels(self, name: str, classes_of: "ImageTable | None"):
        column = self._column(name)
        if column.null_count:
            raise MissingLabel(f"{self.name(_first(pc.is_null(column)))} has no label in column {name!r}")
        if pat.is_string(column.type) or pat.is_large_string(column.type):
            self.class_names = classes_of.class_names if classes_of else sorted(pc.unique(column).to_pylist())
            self._refuse_unknown_classes(name)
            column = pc.index_in(column, pa.array(self.class_names, column.type))
        elif pat.is_integer(column.type) or pat.is_boolean(column.type):
            self.class_names = getattr(self._dataset.features[name], "names", None)
        else:
            raise self._wrong_type(name, "a label is the name of a class or a whole number")
        self.labels = column.to_numpy().astype(np.int64)
        self.num_classes = self._count_classes(classes_of)
        self._refuse_labels_out_of_range(name)

    def _count_classes(self, classes_of: "ImageTable | None") -> int:
        if self.class_names is not None:
            return len(self.class_names)
        return classes_of.num_classes if classes_of else int(self.labels.max()) + 1

    def _refuse_unknown_classes(self, name: str):
        column = self._column(name)
        unknown = pc.invert(pc.is_in(column, pa.array(self.class_names, column.type)))
        if pc.any(unknown).as_py():
            row = _first(unknown)
            raise ValueError(f"{self.name(row)} is of class {column[row].as_py()!r}, which no training image is of")

    def _refuse_labels_out_of_range(self, name: str):
        if (self.labels == -1).any():
            row = int((self.labels == -1).argmax())
            raise MissingLabel(f"{self.name(row)} has no label: column {name!r} is -1 there")
        wrong = (self.labels < 0) | (self.labels >= self.num_classes)
        if wrong.any():
            row = int(wrong.argmax())
            accepted = f"0..{self.num_classes - 1}" if self.num_classes > 0 else "0 and above"
            raise ValueError(
                f"{self.name(row)} has the label {self.labels[row]} in column {name!r}; accepted: {accepted}"
            )

    def _check_captions(self):
        column = self._column(self._caption_column)
        of_list = pat.is_list(column.type) or pat.is_large_list(column.type)
        text = column.type.value_type if of_list else column.type
        if not pat.is_string(text) and not pat.is_large_string(text):
            raise self._wrong_type(self._caption_column, "a caption is a text or a list of texts")
        if of_list:
            captions_of_rows = column.to_pylist()
            missing = pa.array([not texts or not all(map(_says_something, texts)) for texts in captions_of_rows])
        else:
            missing = pc.fill_null(pc.equal(pc.utf8_trim_whitespace(column), ""), True)
        row = _first(missing)
        if row is not None:
            raise ValueError(
                f"{self.name(row)} has no caption: column {self._caption_column!r} is {column[row].as_py()!r} there"
            )

    def _wrong_type(self, column: str, accepted: str) -> ValueError:
        first = self._column(column)[0].as_py()
        kind = self._column(column).type
        return ValueError(f"column {column!r} of {self._where} is of type {kind} (row 0: {first!r:.60}); {accepted}")


def _first(flags: pa.Array | pa.ChunkedArray) -> int | None:
    """Where the first True is."""
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


def _says_something(text: str | None) -> bool:
    return text is not None and bool(text.strip())
