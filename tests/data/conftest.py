"""Data sets on the disk, made by the tests."""

import datasets
import numpy as np
import pytest
from PIL import Image

from scalelong_diffusers.data import DataConfig, load_training_data


datasets.disable_progress_bars()


@pytest.fixture
def load(tmp_path):
    """`load_training_data` with less to say; what `datasets` prepares stays with the test."""

    def run(channels=3, needs_labels=False, needs_captions=False, seed=0, **settings):
        if "train_data_dir" in settings or "dataset_name" in settings:
            settings = {"cache_dir": str(tmp_path / "cache"), **settings}
        return load_training_data(
            DataConfig(**{"resolution": 8, **settings}),
            channels=channels,
            needs_labels=needs_labels,
            needs_captions=needs_captions,
            seed=seed,
        )

    return run


@pytest.fixture
def image_folder(tmp_path):
    """Makes files of 8 x 8 pixels; the red of the i-th is 10 i, so that it is known again."""

    def make(names, folder="pictures"):
        for i, name in enumerate(names):
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (10 * i, 0, 0)).save(path)
        return tmp_path / folder

    return make


@pytest.fixture
def numbers():
    """Which images of `image_folder` a batch has."""

    def read(batch):
        reds = (batch["pixel_values"][:, 0, 0, 0] + 1) * 12.75
        return np.asarray(reds.round(), int).tolist()

    return read


@pytest.fixture
def png():
    """The content of a file of one colour."""

    def encode(colour=(200, 0, 0), size=(8, 8), mode="RGB"):
        from io import BytesIO

        file = BytesIO()
        Image.new(mode, size, colour).save(file, "png")
        return file.getvalue()

    return encode


@pytest.fixture
def saved(tmp_path):
    """Saves columns as `datasets` does, and gives the folder; dicts of columns by split make a DatasetDict."""

    def save(columns, features=None, folder="saved"):
        def dataset(columns):
            return datasets.Dataset.from_dict(columns, features=features and datasets.Features(features))

        whole = all(isinstance(column, list) for column in columns.values())
        data = dataset(columns) if whole else datasets.DatasetDict({k: dataset(v) for k, v in columns.items()})
        data.save_to_disk(tmp_path / folder)
        return tmp_path / folder

    return save
