"""Small datasets on the disk."""

import datasets
import numpy as np
import pytest
from PIL import Image

from scalelong_diffusers.data import DataConfig, load_training_data


datasets.disable_progress_bars()


@pytest.fixture
def load(tmp_path):
    """`load_training_data` with defaults for tests. Each test has its own cache."""

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
    """Create image files of 8 x 8 pixels. The red channel of the i-th is 10 i."""

    def make(names, folder="pictures"):
        for i, name in enumerate(names):
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (10 * i, 0, 0)).save(path)
        return tmp_path / folder

    return make


@pytest.fixture
def numbers():
    """Return the numbers of the images of `image_folder` in a batch."""

    def read(batch):
        reds = (batch["pixel_values"][:, 0, 0, 0] + 1) * 12.75
        return np.asarray(reds.round(), int).tolist()

    return read


@pytest.fixture
def png():
    """Return the content of a PNG file of one color."""

    def encode(color=(200, 0, 0), size=(8, 8), mode="RGB"):
        from io import BytesIO

        file = BytesIO()
        Image.new(mode, size, color).save(file, "png")
        return file.getvalue()

    return encode


@pytest.fixture
def saved(tmp_path):
    """Save columns, or columns by split, with `datasets` and return the folder."""

    def save(columns, features=None, folder="saved"):
        def dataset(columns):
            return datasets.Dataset.from_dict(columns, features=features and datasets.Features(features))

        is_single = all(isinstance(column, list) for column in columns.values())
        data = dataset(columns) if is_single else datasets.DatasetDict({k: dataset(v) for k, v in columns.items()})
        data.save_to_disk(tmp_path / folder)
        return tmp_path / folder

    return save
