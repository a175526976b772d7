"""Data that can not be trained on is met with one sentence that names it and says what to do, before a run starts."""

import argparse
import re

import datasets
import pytest
from PIL import Image

from scalelong_diffusers.arguments import ArgumentParser
from scalelong_diffusers.data import DataConfig, UnreadableImage, add_data_arguments


SETTINGS = {
    "two data sets": (
        {"dataset_name": "a/b", "train_data_dir": "c"},
        "dataset_name='a/b' and train_data_dir='c' are both given; train on one of them",
    ),
    "resolution": ({"resolution": 0}, "resolution must be at least 1, got 0"),
    "crop size": ({"crop_size": 0}, "crop_size must be at least 1, got 0"),
    "validation size": ({"validation_size": 0}, "validation_size must be at least 1, got 0"),
    "max train samples": ({"max_train_samples": 0}, "max_train_samples must be at least 1, got 0"),
    "shapes": ({"num_shapes": 1}, "num_shapes must be at least 2, got 1"),
    "workers": ({"dataloader_num_workers": -1}, "dataloader_num_workers must be at least 0, got -1"),
    "interpolation": (
        {"image_interpolation_mode": "lanczoz"},
        "image_interpolation_mode is 'lanczoz' (did you mean 'lanczos'?); accepted: lanczos, bicubic, bilinear,",
    ),
    "bad image": ({"on_bad_image": "ignore"}, "on_bad_image is 'ignore'; accepted: error, skip"),
    "revision of nothing": ({"dataset_revision": "main"}, "dataset_revision='main' needs dataset_name"),
    "config of a folder": (
        {"train_data_dir": "x", "dataset_config_name": "c"}, "dataset_config_name='c' needs dataset_name",
    ),
    "column of the built-in set": (
        {"image_column": "img"}, "image_column='img' needs dataset_name or train_data_dir",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "sentence"), SETTINGS.values(), ids=SETTINGS)
def test_settings(settings, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        DataConfig(**settings)


def refused(load, sentence, error=ValueError, **options):
    """The whole message is one line, and begins with the sentence."""
    with pytest.raises(error) as caught:
        load(**options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(sentence), message


def test_channels(load):
    refused(load, "images have 1, 3 or 4 channels (grey, RGB, RGBA), but channels is 2", channels=2)


def test_coloured_images_for_a_grey_model(load, image_folder):
    refused(load, "the model takes images of 1 channel, but shape ", channels=1)
    folder = image_folder(["0.png", "1.png", "2.png"])
    refused(load, f"the model takes images of 1 channel, but {folder}/", channels=1, train_data_dir=folder)


def test_no_such_folder(load, tmp_path):
    folder = tmp_path / "nowhere"
    refused(load, f"train_data_dir: there is no folder '{folder}'", FileNotFoundError, train_data_dir=folder)


def test_no_images(load, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("nothing")
    (tmp_path / "empty" / ".hidden.png").write_text("nothing")
    sentence = "the folder empty can not be loaded: it holds no images, no parquet files, and nothing that datasets s"
    refused(load, sentence, train_data_dir=tmp_path / "empty")


def test_no_rows(load, saved):
    refused(load, "the folder saved can not be loaded: it has no images", train_data_dir=saved({"image": []}))


def test_no_rows_in_parquet(load, tmp_path):
    datasets.Dataset.from_dict({"image": []}).to_parquet(str(tmp_path / "train.parquet"))
    sentence = f'the folder {tmp_path.name} can not be loaded: Instruction "train" corresponds to no data!'
    refused(load, sentence, train_data_dir=tmp_path)


def test_one_image(load, image_folder):
    sentence = "the folder pictures, 1 image: there must be two at least, one to train on and one to validate with"
    refused(load, sentence, train_data_dir=image_folder(["only.png"]))


def test_one_image_and_another_for_validation(load, image_folder):
    assert load(train_data_dir=image_folder(["train/a.png", "validation/b.png"])).train.num_samples == 1


def test_no_split_to_train_on(load, saved, png):
    folder = saved({"training": {"image": [png()]}, "test": {"image": [png()]}})
    refused(load, "the folder saved has no split 'train'; its splits: training, test", train_data_dir=folder)


def test_parquet_that_is_none(load, tmp_path):
    (tmp_path / "rows.parquet").write_text("nothing")
    refused(load, f"the folder {tmp_path.name} can not be loaded: Parquet file size is", train_data_dir=tmp_path)


def test_metadata_without_names_of_files(load, image_folder):
    folder = image_folder(["a.png", "b.png"])
    (folder / "metadata.jsonl").write_text('{"text": "a"}\n')
    refused(load, "the folder pictures can not be loaded: `file_name`, ", train_data_dir=folder)


def test_metadata_of_missing_files(load, image_folder):
    folder = image_folder(["a.png"])
    lines = [f'{{"file_name": "{name}.png", "text": "a"}}\n' for name in "abc"]
    (folder / "metadata.jsonl").write_text("".join(lines))
    with pytest.raises(
        UnreadableImage, match=r"[bc]\.png can not be read: there is no such file; on_bad_image='skip'"
    ):
        load(train_data_dir=folder)


def test_folder_without_classes(load, image_folder):
    sentence = "the folder pictures has images of no class; put those of each class into a sub-folder of its name"
    refused(load, sentence, train_data_dir=image_folder(["a.png", "b.png"]), needs_labels=True)


def test_images_beside_the_folders_of_classes(load, image_folder):
    folder = image_folder(["a/a.png", "b/b.png", "loose.png"])
    sentence = (
        "the folder pictures has classes in sub-folders and 1 of 3 images beside them, which have none: put "
        f"{folder}/loose.png into the folder of a class, or away"
    )
    refused(load, sentence, train_data_dir=folder, needs_labels=True)


def test_captions_of_which_some_are_lists(load, image_folder):
    folder = image_folder(["0.png", "1.png"])
    (folder / "metadata.jsonl").write_text(
        '{"file_name": "0.png", "text": "one"}\n{"file_name": "1.png", "text": ["two", "three"]}\n'
    )
    with pytest.raises(ValueError, match="where some have several captions write those of all as lists"):
        load(train_data_dir=folder, needs_captions=True)


COLUMNS = {
    "image by flag": (
        {"image": "png"}, {"image_column": "imge"},
        "the folder saved has no column 'imge' (did you mean 'image'?); its columns: image",
    ),
    "no image": (
        {"scan": "png", "n": [0, 1]}, {},
        "the folder saved has no image column of a usual name (image, img, ",
    ),
    "no label": (
        {"image": "png", "kind": [0, 1]}, {"needs_labels": True},
        "the folder saved has no label column of a usual name (label, labels, ",
    ),
    "no caption": (
        {"image": "png", "words": ["a", "b"]}, {"needs_captions": True},
        "the folder saved has no caption column of a usual name (text, caption, ",
    ),
    "images that are texts": (
        {"image": ["a.png", "b.png"]}, {},
        "column 'image' of the folder saved is of type string (row 0: 'a.png'); an image is stored as a file",
    ),
    "a label is missing": (
        {"image": "png", "label": [1, None]}, {"needs_labels": True},
        "row 1 of the folder saved has no label in column 'label'",
    ),
    "a label is -1": (
        {"image": "png", "label": [1, -1]}, {"needs_labels": True},
        "row 1 of the folder saved has no label: column 'label' is -1 there",
    ),
    "a label is negative": (
        {"image": "png", "label": [1, -2]}, {"needs_labels": True},
        "row 1 of the folder saved has the label -2 in column 'label'; accepted: 0..1",
    ),
    "labels are floats": (
        {"image": "png", "label": [1.0, 2.5]}, {"needs_labels": True},
        "column 'label' of the folder saved is of type double (row 0: 1.0); a label is the name of a class or a whole",
    ),
    "labels are lists": (
        {"image": "png", "label": [[1], [2]]}, {"needs_labels": True},
        "column 'label' of the folder saved is of type list",
    ),
    "labels are all missing": (
        {"image": "png", "label": [None, None]}, {"needs_labels": True},
        "row 0 of the folder saved has no label in column 'label'",
    ),
    "captions are numbers": (
        {"image": "png", "text": [3, 4]}, {"needs_captions": True},
        "column 'text' of the folder saved is of type int64 (row 0: 3); a caption is a text or a list of texts",
    ),
    "a caption is missing": (
        {"image": "png", "text": ["a", None]}, {"needs_captions": True},
        "row 1 of the folder saved has no caption: column 'text' is None there",
    ),
    "a caption is empty": (
        {"image": "png", "text": ["a", " "]}, {"needs_captions": True},
        "row 1 of the folder saved has no caption: column 'text' is ' ' there",
    ),
    "one of the captions is empty": (
        {"image": "png", "text": [["a"], ["", "b"]]}, {"needs_captions": True},
        "row 1 of the folder saved has no caption: column 'text' is ['', 'b'] there",
    ),
    "a list of captions is empty": (
        {"image": "png", "text": [["a"], []]}, {"needs_captions": True},
        "row 1 of the folder saved has no caption: column 'text' is [] there",
    ),
    "one of the captions is missing": (
        {"image": "png", "text": [["a"], ["b", None]]}, {"needs_captions": True},
        "row 1 of the folder saved has no caption: column 'text' is ['b', None] there",
    ),
    "an image is missing": (
        {"image": "png and none"}, {},
        "row 1 of the folder saved can not be read: column 'image' is empty there; on_bad_image='skip'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("columns", "options", "sentence"), COLUMNS.values(), ids=COLUMNS)
def test_columns(load, saved, png, columns, options, sentence):
    files = {"png": [png(), png()], "png and none": [png(), None]}
    columns = {name: files[column] if isinstance(column, str) else column for name, column in columns.items()}
    refused(load, sentence, train_data_dir=saved(columns), **options)


def test_what_is_not_found_is_asked_for_and_the_rest_listed(load, saved, png):
    with pytest.raises(ValueError, match=r"; its columns: scan, n; say which it is with image_column$"):
        load(train_data_dir=saved({"scan": [png()], "n": [1]}))


def test_labels_beyond_the_names_of_classes(load, saved, png):
    features = {"image": datasets.Image(), "label": datasets.Value("int64")}
    splits = {"train": [0, 1], "validation": [0, 2]}
    splits = {name: {"image": [png(), png()], "label": labels} for name, labels in splits.items()}
    sentence = "row 1 of the folder saved, split validation has the label 2 in column 'label'; accepted: 0..1"
    refused(load, sentence, train_data_dir=saved(splits, features), needs_labels=True)


def test_classes_that_are_not_trained_on(load, saved, png):
    splits = {"train": ["cat", "dog"], "validation": ["cat", "eel"]}
    splits = {name: {"image": [png(), png()], "label": labels} for name, labels in splits.items()}
    sentence = "row 1 of the folder saved, split validation is of class 'eel', which no training image is of"
    refused(load, sentence, train_data_dir=saved(splits), needs_labels=True)


class TestHub:
    def test_offline(self, load):
        sentence = (
            "the data set tester/nothing is not in the cache, and the Hub can not be reached to download it; chec"
        )
        refused(load, sentence, OSError, dataset_name="tester/nothing")

    def test_a_local_folder(self, load, image_folder):
        folder = str(image_folder(["a.png", "b.png"]))
        sentence = f"dataset_name={folder!r} is a local folder, not an id on the Hub; give it as train_data_dir"
        refused(load, sentence, dataset_name=folder)


class TestBadImages:
    @pytest.fixture
    def half_broken(self, image_folder):
        """Twenty images; those of an even number do not decode."""
        folder = image_folder([f"{i:02}.png" for i in range(20)])
        for i in range(0, 20, 2):
            (folder / f"{i:02}.png").write_bytes(b"broken")
        return folder

    def test_the_first_is_named_at_once(self, load, half_broken):
        with pytest.raises(UnreadableImage) as caught:
            load(train_data_dir=half_broken)
        assert re.fullmatch(
            rf"{re.escape(str(half_broken))}/\d[02468]\.png can not be read: it is no image that Pillow knows; "
            "on_bad_image='skip' leaves it out",
            str(caught.value),
        )

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_one_that_is_met_later_ends_the_run_with_the_same_sentence(self, load, image_folder, num_workers):
        folder = image_folder([f"{i:02}.png" for i in range(24)])
        data = load(train_data_dir=folder)
        broken = folder / f"{data.train.indices[3]:02}.png"
        broken.write_bytes(b"broken")
        with pytest.raises(UnreadableImage) as caught:
            for _ in data.train.batches(4, num_steps=6, num_workers=num_workers):
                pass
        advice = "on_bad_image='skip' leaves it out"
        assert str(caught.value) == f"{broken} can not be read: it is no image that Pillow knows; {advice}"

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_skipped_ones_are_named_and_others_take_their_place(self, load, half_broken, numbers, num_workers):
        data = load(train_data_dir=half_broken, on_bad_image="skip")
        batches = list(data.train.batches(6, num_steps=3, num_workers=num_workers))
        assert all(number % 2 for batch in batches for number in numbers(batch))
        named = {name for batch in batches for name in batch.unreadable}
        assert named == {str(half_broken / f"{i:02}.png") for i in data.train.indices if i % 2 == 0}
        again = list(data.train.batches(2, num_steps=9))
        assert [n for batch in batches for n in numbers(batch)] == [n for batch in again for n in numbers(batch)]

    def test_nothing_that_can_be_read(self, load, image_folder):
        folder = image_folder([f"{i}.png" for i in range(30)])
        for path in folder.iterdir():
            path.write_bytes(b"broken")
        sentence = "the folder pictures, 30 images: none of those for training can be read"
        refused(load, sentence, train_data_dir=folder, on_bad_image="skip")

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_nothing_that_can_be_read_any_more(self, load, image_folder, num_workers):
        folder = image_folder([f"{i}.png" for i in range(30)])
        data = load(train_data_dir=folder, on_bad_image="skip")
        for path in folder.iterdir():
            path.unlink()
        with pytest.raises(UnreadableImage, match="none of the 27 images of the train stream can be used, not even "):
            next(iter(data.train.batches(2, num_workers=num_workers)))

    def test_smaller_than_the_crop(self, load, image_folder):
        folder = image_folder(["0.png", "1.png"])
        with pytest.raises(
            UnreadableImage, match=r"\d.png can not be used: it has 8 x 8 pixels, and crop_size is 9; on_bad"
        ):
            load(train_data_dir=folder, crop_size=9)

    def test_smaller_than_the_crop_and_skipped(self, load, image_folder, tmp_path):
        folder = image_folder([f"{split}/{i}.png" for split in ("train", "test") for i in range(10)])
        for split in ("train", "test"):
            Image.new("RGB", (9, 9), (250, 0, 0)).save(folder / split / "large.png")
        data = load(train_data_dir=folder, crop_size=9, on_bad_image="skip")
        [batch] = data.train.batches(5, num_steps=1)
        assert (batch["pixel_values"][:, 0].min() > 0.9).all()


class TestFlags:
    @pytest.fixture
    def parser(self):
        parser = ArgumentParser("train")
        add_data_arguments(parser)
        return parser

    def test_without_flags_they_are_the_defaults(self, parser):
        assert DataConfig.from_arguments(parser.parse_args([])) == DataConfig()

    def test_every_setting_has_a_flag(self, parser):
        given = (
            "--dataset_config_name c --dataset_revision r --cache_dir d --image_column i --label_column l "
            "--caption_column t --max_train_samples 5 --validation_size 6 --resolution 7 --crop_size 8 --center_crop "
            "--random_flip --image_interpolation_mode box --on_bad_image skip --dataloader_num_workers 9 "
            "--num_shapes 10 --dataset_name n --streaming"
        )
        settings = DataConfig.from_arguments(parser.parse_args(given.split()))
        assert settings == DataConfig(
            "n", "c", "r", None, "d", "i", "l", "t", 5, 6, 7, 8, True, True, "box", "skip", 9, 10, None, True
        )
        assert DataConfig.from_arguments(parser.parse_args(["--train_data_dir", "x"])).train_data_dir == "x"
        assert DataConfig.from_arguments(parser.parse_args(["--precomputed_dir", "x"])).precomputed_dir == "x"

    def test_a_preset_moves_the_defaults_and_a_flag_overrides_it(self, parser):
        parser.set_defaults(random_flip=True, crop_size=128, resolution=64)
        arguments = parser.parse_args(["--no-random_flip", "--resolution", "16"])
        settings = DataConfig.from_arguments(arguments)
        assert (settings.random_flip, settings.crop_size, settings.resolution) == (False, 128, 16)

    def test_a_near_miss(self, parser, capsys):
        with pytest.raises(SystemExit):
            parser.parse_args(["--centre_crop"])
        assert "unknown argument '--centre_crop' (did you mean '--center_crop'?)" in capsys.readouterr().err

    def test_help_fits_argparse(self):
        parser = argparse.ArgumentParser()
        add_data_arguments(parser)
        assert all(f"--{name}" in parser.format_help() for name in DataConfig.__dataclass_fields__)
