"""Invalid data settings and datasets: one line that names the problem and says what to do, before a run starts."""

import dataclasses
import re
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest
from PIL import Image

from scalelong_diffusers.data import DataConfig, UnreadableImage
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.options import ArgumentParser, add_options, options_of, parse_options


CONFIGS = [
    ({"dataset_name": "a/b", "train_data_dir": "c"}, "dataset_name and train_data_dir are both given; choose one"),
    ({"train_data_dir": "c", "precomputed_dir": "d"}, "train_data_dir and precomputed_dir are both given; choose one"),
    ({"resolution": 0}, "resolution must be an integer, at least 1 and at most 4,096, got 0"),
    ({"resolution": 2.5}, "resolution must be an integer, at least 1 and at most 4,096, got 2.5"),
    ({"resolution": 100_000}, "resolution must be an integer, at least 1 and at most 4,096, got 100000"),
    ({"num_shapes": 10**12}, "num_shapes must be an integer, at least 2 and at most 10,000,000, got 1000000000000"),
    ({"crop_size": 0}, "crop_size must be an integer, at least 1 and at most 10,000, got 0"),
    ({"validation_size": 0}, "validation_size must be an integer, at least 1 and at most 1,000,000, got 0"),
    ({"max_train_samples": 0}, "max_train_samples must be an integer, at least 1 and "),
    ({"num_shapes": 1}, "num_shapes must be an integer, at least 2 and at most 10,000,000, got 1"),
    ({"dataloader_num_workers": -1}, "dataloader_num_workers must be an integer, at least 0 and at most 512, got -1"),
    (
        {"image_interpolation_mode": "lanczoz"},
        "image_interpolation_mode must be one of lanczos, bicubic, bilinear, hamming, box, got 'lanczoz' (did "
        "you mean 'lanczos'?)",
    ),
    ({"on_bad_image": "ignore"}, "on_bad_image must be one of error, skip, got 'ignore'"),
    ({"streaming": True}, "streaming needs dataset_name or train_data_dir"),
    ({"dataset_name": ""}, "dataset_name must be a string that is not empty, got ''"),
    ({"train_data_dir": ""}, "train_data_dir must be a string that is not empty, got ''"),
    ({"dataset_revision": "main"}, "dataset_revision needs dataset_name"),
    ({"train_data_dir": "x", "dataset_config_name": "c"}, "dataset_config_name needs dataset_name"),
    ({"image_column": "img"}, "image_column needs dataset_name or train_data_dir"),
]


def test_config_rejects_invalid_settings():
    for settings, message in CONFIGS:
        with pytest.raises(UserError, match=f"^{re.escape(message)}"):
            DataConfig(**settings)


def assert_rejected(load, message, error=UserError, **options):
    """Check that the error is one line that starts with the message."""
    with pytest.raises(error) as caught:
        load(**options)
    found = str(caught.value)
    assert "\n" not in found
    assert found.startswith(message), found


def test_rejects_two_channels(load):
    assert_rejected(load, "channels must be 1 (gray), 3 (RGB) or 4 (RGBA), got 2", channels=2)


def test_rejects_colored_images_for_a_gray_model(load, image_folder):
    assert_rejected(load, "the model takes gray images, but shape ", channels=1)
    folder = image_folder(["0.png", "1.png", "2.png"])
    assert_rejected(load, f"the model takes gray images, but {folder}/", channels=1, train_data_dir=folder)


def test_rejects_missing_folders(load, tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path / ("long" * 100)):
        assert_rejected(load, f"train_data_dir: {folder} is not a folder", train_data_dir=folder)


def test_rejects_folders_without_images(load, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("nothing")
    (tmp_path / "empty" / ".hidden.png").write_text("nothing")
    message = "the folder empty has no images (ignored: 1 .txt file); accepted: .apng, .bmp, .gif, "
    assert_rejected(load, message, train_data_dir=tmp_path / "empty")


def test_rejects_empty_datasets(load, saved):
    message = "cannot load the folder saved: it has no images, or metadata without entries"
    assert_rejected(load, message, train_data_dir=saved({"image": []}))


def test_rejects_empty_parquet_files(load, tmp_path):
    datasets.Dataset.from_dict({"image": []}).to_parquet(str(tmp_path / "train.parquet"))
    message = f'cannot load the folder {tmp_path.name}: Instruction "train" corresponds to no data!'
    assert_rejected(load, message, train_data_dir=tmp_path)


def test_rejects_a_single_image(load, image_folder):
    message = "the folder pictures, 1 image: at least two images are needed, one for training and one for validation"
    assert_rejected(load, message, train_data_dir=image_folder(["only.png"]))


def test_accepts_a_single_image_with_a_validation_split(load, image_folder):
    assert load(train_data_dir=image_folder(["train/a.png", "validation/b.png"])).train.num_samples == 1


def test_rejects_datasets_without_a_train_split(load, saved, png):
    folder = saved({"training": {"image": [png()]}, "test": {"image": [png()]}})
    assert_rejected(load, "the folder saved has no train split; it has training, test", train_data_dir=folder)


def test_rejects_invalid_parquet_files(load, tmp_path):
    (tmp_path / "rows.parquet").write_text("nothing")
    assert_rejected(load, f"cannot load the folder {tmp_path.name}: Parquet file size is", train_data_dir=tmp_path)


@pytest.mark.parametrize(
    ("file", "before", "after", "message"),
    [
        ("state.json", "_format_columns", "_format_colums", "KeyError: '_format_columns'"),
        ("state.json", "_data_files", "_data_filet", "KeyError: '_data_files'"),
        ("dataset_info.json", '"features": {', '"features": [], "other": {', "argument after"),
    ],
)
def test_rejects_saved_datasets_with_damaged_metadata(load, saved, png, file, before, after, message):
    folder = saved({"image": [png()] * 4})
    text = (folder / file).read_text()
    assert before in text
    (folder / file).write_text(text.replace(before, after))
    with pytest.raises(UserError, match=f"^cannot load the folder saved: .*{message}"):
        load(train_data_dir=folder)


def test_rejects_parquet_files_with_damaged_metadata(load, tmp_path):
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b"]))
    rows = {"image": [Image.new("RGB", (8, 8))] * 4, "label": [0, 1, 0, 1]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    table = pq.read_table(tmp_path / "rows.parquet")
    for damaged in (b"\xff", b"[]", b'{"info": {"features": {"image": {"_type": "Imagf"}}}}'):
        pq.write_table(table.replace_schema_metadata({"huggingface": damaged}), tmp_path / "rows.parquet")
        with pytest.raises(UserError, match=" cannot be read: "):
            load(train_data_dir=tmp_path, streaming=True, needs_labels=True)


def test_rejects_metadata_without_file_names(load, image_folder):
    folder = image_folder(["a.png", "b.png"])
    (folder / "metadata.jsonl").write_text('{"text": "a"}\n')
    assert_rejected(load, "cannot load the folder pictures: `file_name`, ", train_data_dir=folder)


def test_rejects_empty_metadata(load, image_folder):
    folder = image_folder(["0.png", "1.png"])
    (folder / "metadata.jsonl").touch()
    message = "cannot load the folder pictures: it has no images, or metadata without entries"
    assert_rejected(load, message, train_data_dir=folder)


def test_rejects_metadata_of_missing_files(load, image_folder):
    folder = image_folder(["a.png"])
    lines = [f'{{"file_name": "{name}.png", "text": "a"}}\n' for name in "abc"]
    (folder / "metadata.jsonl").write_text("".join(lines))
    with pytest.raises(
        UnreadableImage, match=r"[bc]\.png cannot be read: .*No such file or directory.*; --on_bad_image skip"
    ):
        load(train_data_dir=folder)


def test_rejects_folders_without_classes(load, image_folder):
    message = (
        "the folder pictures has no label column; its columns: image; choose one with --label_column, or put the "
    )
    assert_rejected(load, message, train_data_dir=image_folder(["a.png", "b.png"]), needs_labels=True)


def test_rejects_captions_of_different_types(load, image_folder):
    folder = image_folder(["0.png", "1.png"])
    (folder / "metadata.jsonl").write_text(
        '{"file_name": "0.png", "text": "one"}\n{"file_name": "1.png", "text": ["two", "three"]}\n'
    )
    with pytest.raises(UserError, match="captions, write the captions of all images as lists"):
        load(train_data_dir=folder, needs_captions=True)


COLUMNS = {
    "image by flag": (
        {"image": "png"}, {"image_column": "imge"},
        "the folder saved has no column 'imge' (did you mean 'image'?); its columns: image",
    ),
    "no image": (
        {"scan": "png", "n": [0, 1]}, {},
        "the folder saved has no image column; its columns: scan, n; choose one with --image_column",
    ),
    "no label": (
        {"image": "png", "kind": [0, 1]}, {"needs_labels": True},
        "the folder saved has no label column; its columns: image, kind; choose one with --label_column",
    ),
    "no caption": (
        {"image": "png", "words": ["a", "b"]}, {"needs_captions": True},
        "the folder saved has no caption column; its columns: image, words; choose one with --caption_column, or "
        "add them next to the images: in a metadata.jsonl, or 01.txt for 01.jpg",
    ),
    "images that are texts": (
        {"image": ["a.png", "b.png"]}, {},
        "column 'image' of the folder saved has type string (row 0: 'a.png'); images must be stored as datasets.Image",
    ),
    "a label is missing": (
        {"image": "png", "label": [1, None]}, {"needs_labels": True},
        "label in column 'label' must be from 0 to 1, got None for row 1 of the folder saved",
    ),
    "a label is -1": (
        {"image": "png", "label": [1, -1]}, {"needs_labels": True},
        "label in column 'label' must be from 0 to 1, got -1 for row 1 of the folder saved",
    ),
    "a label is negative": (
        {"image": "png", "label": [1, -2]}, {"needs_labels": True},
        "label in column 'label' must be from 0 to 1, got -2 for row 1 of the folder saved",
    ),
    "labels are floats": (
        {"image": "png", "label": [1.0, 2.5]}, {"needs_labels": True},
        "column 'label' of the folder saved has type double (row 0: 1.0); labels must be integers or class names",
    ),
    "labels are lists": (
        {"image": "png", "label": [[1], [2]]}, {"needs_labels": True},
        "column 'label' of the folder saved has type list",
    ),
    "labels are all missing": (
        {"image": "png", "label": [None, None]}, {"needs_labels": True},
        "column 'label' of the folder saved has type null (row 0: None); labels must be integers or class names",
    ),
    "captions are numbers": (
        {"image": "png", "text": [3, 4]}, {"needs_captions": True},
        "column 'text' of the folder saved has type int64 (row 0: 3); captions must be texts or lists of texts",
    ),
    "a caption is missing": (
        {"image": "png", "text": ["a", None]}, {"needs_captions": True},
        "row 1 of the folder saved has no caption: 'text' is None",
    ),
    "a caption is empty": (
        {"image": "png", "text": ["a", " "]}, {"needs_captions": True},
        "row 1 of the folder saved has no caption: 'text' is ' '",
    ),
    "one of the captions is empty": (
        {"image": "png", "text": [["a"], ["", "b"]]}, {"needs_captions": True},
        "row 1 of the folder saved has no caption: 'text' is ['', 'b']",
    ),
    "a list of captions is empty": (
        {"image": "png", "text": [["a"], []]}, {"needs_captions": True},
        "row 1 of the folder saved has no caption: 'text' is []",
    ),
    "one of the captions is missing": (
        {"image": "png", "text": [["a"], ["b", None]]}, {"needs_captions": True},
        "row 1 of the folder saved has no caption: 'text' is ['b', None]",
    ),
    "an image is missing": (
        {"image": "png and none"}, {},
        "row 1 of the folder saved cannot be read: not a PNG, JPEG, WebP, GIF, BMP or TIFF image "
        "(it is empty); --on_bad_image skip",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("columns", "options", "message"), COLUMNS.values(), ids=COLUMNS)
def test_rejects_invalid_columns(load, saved, png, columns, options, message):
    files = {"png": [png(), png()], "png and none": [png(), None]}
    columns = {name: files[column] if isinstance(column, str) else column for name, column in columns.items()}
    assert_rejected(load, message, train_data_dir=saved(columns), **options)


def test_rejects_validation_labels_out_of_range(load, saved, png):
    features = {"image": datasets.Image(), "label": datasets.Value("int64")}
    splits = {"train": [0, 1], "validation": [0, 2]}
    splits = {name: {"image": [png(), png()], "label": labels} for name, labels in splits.items()}
    message = "label in column 'label' must be from 0 to 1, got 2 for row 1 of the folder saved, split validation"
    assert_rejected(load, message, train_data_dir=saved(splits, features), needs_labels=True)


def test_rejects_validation_classes_without_training_images(load, saved, png):
    splits = {"train": ["cat", "dog"], "validation": ["cat", "eel"]}
    splits = {name: {"image": [png(), png()], "label": labels} for name, labels in splits.items()}
    message = (
        "label in column 'label' must be a class of the training images, got 'eel' for row 1 of the folder saved, "
    )
    assert_rejected(load, message, train_data_dir=saved(splits), needs_labels=True)


class TestHub:
    def test_offline_without_a_copy_in_the_cache(self, load):
        message = "cannot load the dataset tester/nothing: Couldn't reach 'tester/nothing' on the Hub"
        assert_rejected(load, message, dataset_name="tester/nothing")

    def test_rejects_local_folders(self, load, image_folder):
        folder = str(image_folder(["a.png", "b.png"]))
        message = f"dataset_name={folder} is a local folder; pass it as train_data_dir"
        assert_rejected(load, message, dataset_name=folder)


class TestUnreadableImages:
    @pytest.fixture
    def half_broken(self, image_folder):
        """Twenty images. Those with even numbers are broken."""
        folder = image_folder([f"{i:02}.png" for i in range(20)])
        for i in range(0, 20, 2):
            (folder / f"{i:02}.png").write_bytes(b"broken")
        return folder

    def test_stops_before_training(self, load, half_broken):
        with pytest.raises(UnreadableImage) as caught:
            load(train_data_dir=half_broken)
        assert re.fullmatch(
            rf"{re.escape(str(half_broken))}/\d[02468]\.png cannot be read: "
            r"not a PNG, JPEG, WebP, GIF, BMP or TIFF image \(it starts with b'broken'\); "
            "--on_bad_image skip leaves them out",
            str(caught.value),
        )

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_stops_during_training(self, load, image_folder, num_workers):
        folder = image_folder([f"{i:02}.png" for i in range(24)])
        data = load(train_data_dir=folder)
        broken = folder / f"{data.train.indices[3]:02}.png"
        broken.write_bytes(b"broken")
        with pytest.raises(UnreadableImage) as caught:
            for _ in data.train.batches(4, num_steps=6, num_workers=num_workers):
                pass
        reason = "not a PNG, JPEG, WebP, GIF, BMP or TIFF image (it starts with b'broken')"
        assert str(caught.value) == f"{broken} cannot be read: {reason}; --on_bad_image skip leaves them out"

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_skips_and_replaces_them(self, load, half_broken, numbers, num_workers):
        data = load(train_data_dir=half_broken, on_bad_image="skip")
        batches = list(data.train.batches(6, num_steps=3, num_workers=num_workers))
        assert all(number % 2 for batch in batches for number in numbers(batch))
        named = {name for batch in batches for name in batch.unreadable}
        assert named == {str(half_broken / f"{i:02}.png") for i in data.train.indices if i % 2 == 0}
        again = list(data.train.batches(2, num_steps=9))
        assert [n for batch in batches for n in numbers(batch)] == [n for batch in again for n in numbers(batch)]

    def test_stops_if_no_image_can_be_read(self, load, image_folder):
        folder = image_folder([f"{i}.png" for i in range(30)])
        for path in folder.iterdir():
            path.write_bytes(b"broken")
        message = (
            "the folder pictures, 30 images: none of the 27 images that were tried can be read, starting with "
            f"{folder}/"
        )
        assert_rejected(load, message, train_data_dir=folder, on_bad_image="skip")

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_stops_if_no_image_can_be_read_any_more(self, load, image_folder, num_workers):
        folder = image_folder([f"{i}.png" for i in range(30)])
        data = load(train_data_dir=folder, on_bad_image="skip")
        for path in folder.iterdir():
            path.unlink()
        with pytest.raises(
            UnreadableImage, match="none of the 27 images of the train stream can be read, starting with "
        ):
            next(iter(data.train.batches(2, num_workers=num_workers)))

    def test_rejects_images_smaller_than_crop_size(self, load, image_folder):
        folder = image_folder(["0.png", "1.png"])
        with pytest.raises(
            UnreadableImage, match=r"\d.png cannot be used: its 8 x 8 pixels are smaller than crop_size=9; --on_bad"
        ):
            load(train_data_dir=folder, crop_size=9)

    def test_skips_images_smaller_than_crop_size(self, load, image_folder, tmp_path):
        folder = image_folder([f"{split}/{i}.png" for split in ("train", "test") for i in range(10)])
        for split in ("train", "test"):
            Image.new("RGB", (9, 9), (250, 0, 0)).save(folder / split / "large.png")
        data = load(train_data_dir=folder, crop_size=9, on_bad_image="skip")
        [batch] = data.train.batches(5, num_steps=1)
        assert (batch["pixel_values"][:, 0].min() > 0.9).all()


class TestFlags:
    @pytest.fixture
    def parse(self):
        def run(*words):
            parser = ArgumentParser("train")
            add_options(parser, DataConfig, "data")
            return parse_options(parser, DataConfig, words)

        return run

    def test_no_flags_give_the_defaults(self, parse):
        assert parse() == DataConfig()

    def test_every_field_has_a_flag(self, parse):
        flags = (
            "--dataset_config_name c --dataset_revision r --cache_dir d --image_column i --label_column l "
            "--caption_column t --max_train_samples 5 --validation_size 6 --resolution 7 --crop_size 8 --center_crop "
            "--random_flip --image_interpolation_mode box --on_bad_image skip --dataloader_num_workers 9 "
            "--num_shapes 10 --dataset_name n --streaming"
        )
        config = parse(*flags.split())
        assert config == DataConfig(
            dataset_name="n", dataset_config_name="c", dataset_revision="r", cache_dir="d", image_column="i",
            label_column="l", caption_column="t", max_train_samples=5, validation_size=6, resolution=7, crop_size=8,
            center_crop=True, random_flip=True, image_interpolation_mode="box", on_bad_image="skip",
            dataloader_num_workers=9, num_shapes=10, streaming=True,
        )  # fmt: skip
        assert parse("--train_data_dir", "x").train_data_dir == "x"
        assert parse("--precomputed_dir", "x").precomputed_dir == "x"
        assert {flag for flag, _, _ in options_of(DataConfig)} == DataConfig.__dataclass_fields__.keys()

    def test_invalid_values_name_the_flag(self, parse, capsys):
        for words, message in (
            (["--num_shapes", "1"], "--num_shapes must be an integer, at least 2 and at most 10,000,000, got 1"),
            (["--center_corp"], "'--center_corp' (did you mean '--center_crop'?)"),
        ):
            with pytest.raises(SystemExit) as stopped:
                parse(*words)
            assert stopped.value.code == 2
            assert message in capsys.readouterr().err

    def test_location_and_workers_may_change_on_resume(self):
        free = {flag for flag, _, option in options_of(DataConfig) if option.on_resume == "free"}
        assert free == {"train_data_dir", "precomputed_dir", "cache_dir", "dataloader_num_workers", "on_bad_image"}


def test_config_works_from_python(tmp_path):
    config = dataclasses.replace(DataConfig(), train_data_dir=Path("pictures"), resolution=64)
    assert (config.train_data_dir, config.resolution, config.num_shapes) == ("pictures", 64, 10_000)
