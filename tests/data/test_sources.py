"""Datasets in all layouts: their images, labels, captions and splits, and the fingerprint."""

import gc
import os
import pickle

import datasets
import numpy as np
import pytest
from PIL import Image

from scalelong_diffusers.data.config import DataConfig
from scalelong_diffusers.data.training_data import open_sources
from scalelong_diffusers.errors import UserError


def contents(data):
    """Return labels and captions by the number of the image, which is a tenth of its red channel."""
    read = {}
    for stream in (data.train, data.validation):
        for position in range(stream.num_samples):
            sample = stream[position].columns
            red = int(sample.pop("pixel_values")[0, 0, 0])
            read[round(red / 10)] = tuple(sample[name] for name in sorted(sample, reverse=True))  # labels first
    return dict(sorted(read.items()))


def test_subfolders_are_classes(load, image_folder):
    folder = image_folder(["cat/1.png", "cat/2.jpg", "dog/deep.png", "cat/3.PNG", "emu/1.webp"])
    data = load(train_data_dir=folder, needs_labels=True)
    assert (data.class_names, data.num_classes) == (["cat", "dog", "emu"], 3)
    assert contents(data) == {0: (0,), 1: (0,), 2: (1,), 3: (0,), 4: (2,)}
    assert (data.train.num_samples, data.validation.num_samples) == (4, 1)
    assert data.description == "the folder pictures, 5 images"


def test_subfolders_named_like_splits_are_splits(load, image_folder):
    names = [f"{split}/{kind}/{i}.png" for split in ("train", "test") for kind in ("cat", "dog") for i in range(2)]
    data = load(train_data_dir=image_folder(names), needs_labels=True)
    assert contents(data) == {0: (0,), 1: (0,), 2: (1,), 3: (1,), 4: (0,), 5: (0,), 6: (1,), 7: (1,)}
    assert sorted(int(data.train[i].columns["pixel_values"][0, 0, 0]) for i in range(4)) == [0, 10, 20, 30]


def test_a_class_may_be_named_train(load, image_folder):
    data = load(train_data_dir=image_folder(["train/1.png", "car/1.png", "bus/1.png"]), needs_labels=True)
    assert data.class_names == ["bus", "car", "train"]


def test_file_names_are_not_splits(load, image_folder):
    data = load(train_data_dir=image_folder(["cat/test_1.png", "dog/train-2.png", "dog/val 3.png"]))
    assert data.train.num_samples + data.validation.num_samples == 3


def test_folder_names_may_have_brackets(load, image_folder):
    data = load(train_data_dir=image_folder(["a[1]/1.png", "b/2.png"], folder="set [1-2] *"), needs_labels=True)
    assert data.class_names == ["a[1]", "b"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_reads_metadata_files(load, image_folder, kind):
    folder = image_folder(["1.png", "2.png", "3.png"])
    lines = {
        "csv": ["file_name,text,label", "1.png,one,b", "2.png,two,a", "3.png,three,b"],
        "jsonl": [
            f'{{"file_name": "{i}.png", "text": ["{word}"], "label": "{label}"}}'
            for i, word, label in ((1, "one", "b"), (2, "two", "a"), (3, "three", "b"))
        ],
    }
    (folder / f"metadata.{kind}").write_text("\n".join(lines[kind]))
    data = load(train_data_dir=folder, needs_labels=True, needs_captions=True)
    assert contents(data) == {0: (1, "one"), 1: (0, "two"), 2: (1, "three")}
    assert data.class_names == ["a", "b"]
    gc.collect()  # datasets leaves the csv file open, and a later test would get the warning


def columns(png, count=4, **others):
    return {"image": [{"bytes": png((10 * i, 0, 0)), "path": None} for i in range(count)], **others}


def test_reads_saved_datasets(load, saved, png):
    folder = saved(columns(png, label=[1, 0, 1, 2], text=["a", "b", "c", "d"]))
    data = load(train_data_dir=folder, needs_labels=True, needs_captions=True)
    assert contents(data) == {0: (1, "a"), 1: (0, "b"), 2: (1, "c"), 3: (2, "d")}
    assert (data.num_classes, data.class_names) == (3, None)


def test_reads_saved_splits(load, saved, png):
    splits = {
        split: {"image": [png((10 * i, 0, 0)) for i in numbers], "cls": [str(i % 2) for i in numbers]}
        for split, numbers in {"train": range(3), "test": range(5, 7), "validation": range(3, 5)}.items()
    }
    data = load(train_data_dir=saved(splits), needs_labels=True)
    assert contents(data) == {0: (0,), 1: (1,), 2: (0,), 3: (1,), 4: (0,)}


def test_ignores_validation_splits_without_labels(load, saved, png):
    splits = {"train": columns(png, 3, label=[0, 1, 0]), "test": columns(png, 2, label=[-1, -1])}
    data = load(train_data_dir=saved(splits), needs_labels=True)
    assert (data.train.num_samples, data.validation.num_samples) == (2, 1)


@pytest.mark.parametrize("split", [False, True])
def test_reads_parquet_files(load, tmp_path, png, split):
    (tmp_path / "rows" / "data").mkdir(parents=True)
    for i, name in enumerate(["train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"]):
        rows = datasets.Dataset.from_dict(
            {"img": [{"bytes": png((10 * k, 0, 0)), "path": f"{k}.png"} for k in (2 * i, 2 * i + 1)],
             "fine_label": [0, 1]},
            features=datasets.Features({"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["x", "y"])}),
        )  # fmt: skip
        rows.to_parquet(str(tmp_path / "rows" / "data" / f"{name if split else i}.parquet"))
    data = load(train_data_dir=tmp_path / "rows", needs_labels=True)
    assert contents(data) == {i: (i % 2,) for i in range(6)}
    assert data.class_names == ["x", "y"]
    assert (data.train.num_samples, data.validation.num_samples) == ((4, 2) if split else (5, 1))


def test_reads_given_columns(load, saved, png):
    folder = saved({"scan": columns(png)["image"], "image": ["x"] * 4, "kind": [0, 1, 0, 1], "note": list("abcd")})
    data = load(
        train_data_dir=folder, needs_labels=True, needs_captions=True,
        image_column="scan", label_column="kind", caption_column="note",
    )  # fmt: skip
    assert contents(data) == {0: (0, "a"), 1: (1, "b"), 2: (0, "c"), 3: (1, "d")}


def test_chooses_one_of_several_captions(load, saved, png):
    data = load(train_data_dir=saved(columns(png, 2, caption=[["a", "b"], ["a", "b"]])), needs_captions=True)
    assert {data.train[position].columns["captions"] for position in range(40)} == {"a", "b"}


def test_limits_training_images(load, image_folder):
    folder = image_folder([f"{i}.png" for i in range(25)])
    data = load(train_data_dir=folder, max_train_samples=5)
    assert (data.train.num_samples, data.validation.num_samples) == (5, 2)
    assert load(train_data_dir=folder).train.num_samples == 23


@pytest.mark.parametrize(
    ("count", "validation_size", "held_out"), [(2, 256, 1), (100, 256, 10), (100, 4, 4), (19, 256, 1)]
)
def test_holds_out_validation_images(load, count, validation_size, held_out):
    data = load(num_shapes=count, validation_size=validation_size)
    assert data.validation.num_samples == held_out
    assert sorted([*data.train.indices, *data.validation.indices]) == list(range(count))


def test_limits_the_validation_split(load, image_folder):
    folder = image_folder([f"{split}/{i}.png" for split in ("train", "val") for i in range(6)])
    data = load(train_data_dir=folder, validation_size=4)
    assert (data.train.num_samples, data.validation.num_samples) == (6, 4)


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("1", 1), ("RGB", 3), ("RGBA", 3), ("I;16", 1)])
def test_detects_channels(load, tmp_path, mode, channels):
    color = {"RGB": (1, 2, 3), "RGBA": (1, 2, 3, 255)}.get(mode, 1)
    (tmp_path / "some").mkdir()
    for i in range(3):
        Image.new(mode, (8, 8), color).save(tmp_path / "some" / f"{i}.png")
    data = load(train_data_dir=tmp_path / "some", channels=None)
    assert data.channels == channels
    assert data.train[0].columns["pixel_values"].shape == (8, 8, channels)


def test_a_dataset_with_some_gray_images_has_three_channels(load, tmp_path):
    for i in range(9):
        Image.new("L" if i < 5 else "RGB", (8, 8), 9 if i < 5 else (1, 2, 3)).save(tmp_path / f"{i}.png")
    assert load(train_data_dir=tmp_path, channels=None).channels == 3


def test_first_image_size_is_the_size_before_cropping(load, tmp_path):
    for i in range(3):
        Image.new("RGB", (30, 20)).save(tmp_path / f"{i}.png")
    assert load(train_data_dir=tmp_path).first_image_size == (30, 20)


class TestFingerprint:
    def test_is_equal_for_the_same_data_in_another_folder(self, load, image_folder, tmp_path):
        one = load(train_data_dir=image_folder(["a/1.png", "b/2.png"], folder="one"), needs_labels=True)
        os.utime(tmp_path / "one" / "a" / "1.png", (0, 0))
        two = load(train_data_dir=image_folder(["a/1.png", "b/2.png"], folder="two"), needs_labels=True)
        assert one.fingerprint == two.fingerprint

    @pytest.mark.parametrize(
        "change",
        [
            {"resolution": 16}, {"crop_size": 4}, {"center_crop": True}, {"random_flip": True}, {"num_shapes": 99},
            {"image_interpolation_mode": "box"}, {"max_train_samples": 9}, {"validation_size": 3}, {"channels": 4},
            {"needs_captions": True}, {"needs_labels": True},
        ],
        ids=lambda change: next(iter(change)),
    )  # fmt: skip
    def test_changes_with_the_preprocessing(self, load, change):
        assert load(**{"num_shapes": 100, **change}).fingerprint != load(num_shapes=100).fingerprint

    @pytest.mark.parametrize("change", [{"dataloader_num_workers": 2}, {"on_bad_image": "skip"}])
    def test_does_not_change_with_workers_and_skipping(self, load, change):
        assert load(**change).fingerprint == load().fingerprint

    def test_changes_with_the_files(self, load, image_folder, tmp_path):
        folder = image_folder(["a/1.png", "a/2.png", "b/3.png"])
        fingerprints = [load(train_data_dir=folder, needs_labels=True).fingerprint]
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8)).save(folder / "a" / "1.png")
        fingerprints.append(load(train_data_dir=folder, needs_labels=True).fingerprint)
        (folder / "a" / "2.png").rename(folder / "b" / "2.png")
        fingerprints.append(load(train_data_dir=folder, needs_labels=True).fingerprint)
        Image.new("RGB", (8, 8)).save(folder / "a" / "4.png")
        fingerprints.append(load(train_data_dir=folder, needs_labels=True).fingerprint)
        assert len(set(fingerprints)) == 4

    def test_changes_with_labels_captions_and_columns(self, load, saved, png):
        rows = columns(png, label=[0, 1, 0, 1], other=[1, 0, 1, 0], text=list("abcd"))
        changed = {
            "label": rows | {"label": [0, 1, 1, 1]},
            "text": rows | {"text": list("abce")},
            "image": rows | {"image": [*rows["image"][:3], {"bytes": png(size=(9, 9)), "path": None}]},
        }
        folders = {"same": saved(rows)} | {name: saved(change, folder=name) for name, change in changed.items()}
        fingerprints = {
            name: load(train_data_dir=folder, needs_labels=True, needs_captions=True).fingerprint
            for name, folder in folders.items()
        }
        fingerprints["column"] = load(
            train_data_dir=folders["same"], label_column="other", needs_labels=True, needs_captions=True
        ).fingerprint
        assert len(set(fingerprints.values())) == 5


def test_pickles_without_the_images(saved, png):
    folder = saved({"image": [png(size=(40, 40)) + bytes(10_000)] * 50})
    source, _ = open_sources(DataConfig(train_data_dir=folder), needs_labels=False, needs_captions=False)
    assert len(pickle.dumps(source)) < 50_000
    assert pickle.loads(pickle.dumps(source)).image(3).size == (40, 40)


def test_caption_files(load, image_folder):
    """Each line is a caption, as in kohya's scripts."""
    folder = image_folder(["a.png", "b.c.png", "sub/d.png"])
    (folder / "a.txt").write_text("a cat\n\n a kitten \n")
    (folder / "b.c.txt").write_text("\ufeffein Hündchen", encoding="utf-8")
    (folder / "sub" / "d.txt").write_text("a dog")
    (folder / "notes.txt").write_text("not a caption")
    data = load(train_data_dir=folder, needs_captions=True)
    rows = data.train.rows.source
    assert sorted(map(tuple, map(rows.captions, range(3)))) == [("a cat", "a kitten"), ("a dog",), ("ein Hündchen",)]
    assert data.description.endswith("3 images (ignored: 1 .txt file)")
    assert load(train_data_dir=folder).description.endswith("3 images (ignored: 4 .txt files)")
    changed = data.fingerprint
    (folder / "a.txt").write_text("another caption")
    assert load(train_data_dir=folder, needs_captions=True).fingerprint != changed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_metadata_comes_before_caption_files(load, image_folder):
    folder = image_folder(["a.png", "b.png"])
    (folder / "metadata.csv").write_text("file_name,text\na.png,one\nb.png,two\n")
    (folder / "a.txt").write_text("three")
    data = load(train_data_dir=folder, needs_captions=True)
    assert [data.train.rows.source.captions(k) for k in range(2)] == [["one"], ["two"]]
    assert "(ignored: 1 .txt file)" in data.description
    gc.collect()  # datasets leaves the csv file open, and a later test would get the warning


def test_images_without_captions_can_be_skipped(load, image_folder):
    folder = image_folder([f"{k}.png" for k in range(20)])
    for k in set(range(20)) - {0, 3}:
        (folder / f"{k}.txt").write_text(f"number {k}")
    (folder / "2.txt").write_text("  \n")
    with pytest.raises(
        UserError, match=r"0.png has no caption: 'text' is \[\]; --on_bad_image skip leaves out images with"
    ):
        load(train_data_dir=folder, needs_captions=True)
    data = load(train_data_dir=folder, needs_captions=True, on_bad_image="skip")
    batches = [*data.train.batches(18, num_steps=1), *data.validation.batches(1)]
    captions = {caption for batch in batches for caption in batch["captions"]}
    assert captions == {f"number {k}" for k in set(range(20)) - {0, 2, 3}}
    assert {name.rsplit("/", 1)[-1] for batch in batches for name in batch.unreadable} >= {"0.png", "2.png", "3.png"}
    for file in folder.glob("*.txt"):
        file.write_text("")
    with pytest.raises(UserError, match=r"none of the .* can be read"):
        load(train_data_dir=folder, needs_captions=True, on_bad_image="skip")


def test_rejects_caption_files_in_other_encodings(load, image_folder):
    folder = image_folder(["a.png", "b.png"])
    (folder / "a.txt").write_bytes("ein Hündchen".encode("latin-1"))
    with pytest.raises(UserError, match=r"a.txt is not a text in UTF-8"):
        load(train_data_dir=folder, needs_captions=True)
