"""Bad input ends in one line and exit code 2 before anything takes long, and leaves nothing behind."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scalelong_diffusers import UViTModel
from scalelong_diffusers.data import DataConfig, load_training_data
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.train import train_class_conditional
from scalelong_diffusers.training import TrainingStopped


pytestmark = pytest.mark.slow

BUILT_IN = {"model_config_name_or_path": None}


@pytest.fixture
def make_images(tmp_path):
    """`make_images(name, count)` makes a folder of noise images."""

    def make(name: str, count: int, size: int = 8) -> Path:
        random = np.random.default_rng(0)
        folder = tmp_path / name
        folder.mkdir(parents=True)
        for k in range(count):
            Image.fromarray(random.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(folder / f"{k}.png")
        return folder

    return make


def truncate(file: Path) -> str:
    file.write_bytes(file.read_bytes()[:60])
    return file.name


def held_out(folder: Path, validation_size: int, number: int) -> Path:
    """Return the file of a held-out image."""
    config = DataConfig(train_data_dir=str(folder), resolution=8, validation_size=validation_size)
    data = load_training_data(config, channels=3, needs_labels=False, needs_captions=False, seed=0)
    return Path(data.validation.rows.source.name(int(data.validation.indices[number])))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Rejected by the parser. test_config.py has more such cases.
        ({"learning_rat": 1}, "unknown argument '--learning_rat' (did you mean '--learning_rate'?)"),
        ({"train_batch_size": 0}, "--train_batch_size must be an integer, at least 1 and at most 1,000,000, got 0"),
        ({"skip_scaling": "cd"}, "--skip_scaling must be one of none, inv_sqrt2, constant, cs, compensated_cs, "),
        ({"preset": "cifar10-uvit-s-2"}, "--preset and --model_config_name_or_path cannot be combined"),
        ({"dataset_name": ""}, "dataset_name must be a string that is not empty, got ''"),
        ({"dataset_name": "user/data", "train_data_dir": "folder"}, "dataset_name and train_data_dir are both given"),
        ({"compile_repeated_blocks": True}, "--compile_repeated_blocks needs --compile"),
        # Rejected by the run, because of the number of images and processes.
        ({"train_batch_size": 28}, "28 images (--train_batch_size 28 x --gradient_accumulation_steps 1 x 1 process"),
        ({"gradient_accumulation_steps": 7}, "but there are only 27 to train on: use a smaller batch"),
        ({"train_batch_size": None, "total_batch_size": 9, "gradient_accumulation_steps": 2},
         "--total_batch_size 9 is not divisible by 1 processes x 2 accumulations: pass --train_batch_size"),
        ({"total_batch_size": 8}, "--total_batch_size 8 is not --train_batch_size 4 x 1 processes x 1 accum"),
        ({"skip_scaling_warmup_steps": 16}, "--skip_scaling_warmup_steps 16 does not end within the run's 16 steps"),
        ({"continuous_time": True, "ddpm_beta_schedule": "scaled_linear"}, "--continuous_time needs --ddpm_beta"),
        ({"report_to": "comet_ml"}, "--report_to comet_ml needs a package: pip install comet_ml"),
        ({"report_to": "tensorbord"}, "got 'tensorbord' (did you mean 'tensorboard'?)"),
        # Rejected because of the model and the data.
        ({"resolution": 12}, "the model has sample_size=8, but --resolution 12 needs 12"),
        ({**BUILT_IN, "resolution": 13}, "--resolution 13 is not divisible into patches for the small U-ViT; the"),
        ({**BUILT_IN, "resolution": 30, "model_type": "unet"}, "--resolution must be a multiple of 4 (the nearest: "),
        ({"model_config_name_or_path": "nowhere"}, "nowhere"),
        ({"model_config_name_or_path": "no/where.json"}, "no/where.json has no config.json of a model; accepted: a"),
        ({"train_data_dir": "nowhere"}, "nowhere"),
    ],
    ids=str,
)  # fmt: skip
def test_rejects_options(refused, changes, message):
    assert message in refused(**changes)


def test_rejects_models_that_do_not_fit(refused, tiny_config, tmp_path):
    UViTModel(sample_size=8, hidden_size=16, num_layers=2, num_attention_heads=2, in_channels=4).save_config(tmp_path)
    classes = {"script": train_class_conditional}
    few_classes = tmp_path / "few"
    UViTModel(sample_size=8, hidden_size=16, num_layers=2, num_attention_heads=2, num_class_embeds=5).save_config(
        few_classes
    )
    (tmp_path / "empty").mkdir()
    huge, misspelled = tmp_path / "huge.json", tmp_path / "misspelled.json"
    huge.write_text(json.dumps({"_class_name": "UNet2DModel", "block_out_channels": [200_000] * 4}))
    misspelled.write_text(json.dumps({"_class_name": "UViTModel", "sample_size": 8, "hiden_size": 16}))
    rows = [
        ({"model_config_name_or_path": huge}, f"the weights of {huge} would take at least "),
        ({"model_config_name_or_path": misspelled}, "unknown entry 'hiden_size' (did you mean 'hidden_size'?)"),
        ({"model_config_name_or_path": tmp_path}, "the model takes 4 channels, but the images have 3"),
        ({"model_config_name_or_path": few_classes, **classes}, "has num_class_embeds=5, but the data needs 31"),
        ({"model_config_name_or_path": few_classes}, "takes class_labels, but this script passes none"),
        (classes, "is a model that takes no condition, but this script passes class_labels"),
        ({"model_config_name_or_path": tmp_path / "empty"}, "has no config.json of a model"),
        ({"pretrained_vae_model_name_or_path": tiny_config}, "is not an AutoencoderKL; pass the vae folder of one"),
    ]
    for changes, message in rows:
        assert message in refused(**changes), message


def test_rejects_data_that_does_not_fit(refused, make_images, tmp_path):
    (tmp_path / "empty").mkdir()
    five = make_images("five", 5)
    rows = [
        ({"train_data_dir": make_images("one", 1)}, "at least two images are needed"),
        ({"train_data_dir": five, "image_column": "picture"}, "picture"),
        (
            {"train_data_dir": make_images("small", 5, size=1)},
            "the first image has 1 x 1 pixels, fewer than the 2",
        ),
        ({"train_data_dir": five, "script": train_class_conditional}, "label"),
        ({"train_data_dir": tmp_path / "empty"}, "empty"),
    ]
    for changes, message in rows:
        assert message in refused(**{"num_shapes": None, "train_batch_size": 1, **changes}), message


def test_rejects_an_output_folder_inside_the_data(refused, make_images, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    for folder in (tmp_path, tmp_path / "link"):
        message = refused(train_data_dir=folder, num_shapes=None)
        assert message.startswith(f"--output_dir {tmp_path}/refused is inside the data folder {folder}, and its files")


def test_foreign_names_cannot_control_the_terminal(train, make_images, tmp_path, capfd):
    for name in ("cat", "\x1b[31mdog\n", "e\u202eel"):
        make_images(f"animals\x07/{name}", 3)
    bad = tmp_path / "animals\x07" / "cat" / "\x1b[2J.png"
    bad.write_bytes(b"no image")
    options = {"script": train_class_conditional, "model_config_name_or_path": None, "num_shapes": None}
    train(
        tmp_path / "run", train_data_dir=bad.parents[1], train_batch_size=2, on_bad_image="skip",
        max_train_steps=8, **options,
    )  # fmt: skip
    printed = capfd.readouterr()
    lines = printed.out.splitlines()
    (data,) = [line for line in lines if line.startswith("data: ")]
    assert data.startswith("data: the folder animals\\u0007, 10 images: ")
    assert data.endswith("; 3 classes: \\u001b[31mdog\\u000a, cat, e\\u202eel")
    assert any("skipped " in line and "\\u001b[2J.png" in line for line in lines)
    assert {char for char in printed.out + printed.err if not char.isprintable()} <= {"\n", "\r"}


def test_rejects_folders_with_other_contents(train, stopped_at, tmp_path):
    folder = stopped_at(2)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="holds another run: pass --resume_from_checkpoint latest to resume it, or"):
        train(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    contents = {"model_index.json": "a pipeline", "skip_scaling.json": "an adapter"}
    replaced = ("settings.json", "metrics.jsonl", "unet", "scheduler")
    contents |= {name: f"{name}, which the run would replace" for name in replaced}
    for name, content in contents.items():
        other = tmp_path / f"with {name}"
        other.mkdir()
        (other / name).write_text("{}")
        with pytest.raises(UserError, match=f"holds {content}: pass another folder"):
            train(other)
        assert [path.name for path in other.iterdir()] == [name]


def test_starts_again_in_the_folder_of_a_run_without_checkpoints(train, finished, metrics_of, tmp_path):
    """The run was killed before its first checkpoint."""
    killed = tmp_path / "killed"
    killed.mkdir()
    for name in ("settings.json", "metrics.jsonl"):
        (killed / name).write_bytes((finished / name).read_bytes())
    train(killed)
    assert metrics_of(killed) == metrics_of(finished)


def test_rejects_unwritable_folder(refused, tmp_path):
    (tmp_path / "refused").write_text("")
    assert f"cannot write to --output_dir {tmp_path}/refused: " in refused()


def test_script_prints_one_line_and_exits_with_2(launch, tmp_path):
    code, _, errors = launch(tmp_path / "run", resolution=12).wait()
    assert code == 2
    assert errors == "train_unconditional: the model has sample_size=8, but --resolution 12 needs 12\n"
    code, _, errors = launch(tmp_path / "run", processes=2, train_batch_size=14).wait()
    assert code == 2
    assert errors.startswith("train_unconditional: a step takes 28 images (--train_batch_size 14 x ")
    assert errors.count("\n") == 1
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model_index.json").touch()
    code, _, errors = launch(tmp_path / "full", processes=2).wait()  # only the main process looks into the folder
    assert code == 2
    assert errors == f"train_unconditional: --output_dir {tmp_path}/full holds a pipeline: pass another folder\n"


def test_bug_in_a_script_shows_its_traceback(launch, tmp_path, monkeypatch):
    def slip(batch, tensor, purpose):
        raise ValueError("a slip of the pen")

    monkeypatch.setattr("scalelong_diffusers.data.Batch.normal_like", slip)
    for processes in (1, 2):
        code, _, errors = launch(tmp_path / str(processes), processes, train_batch_size=2).wait()
        assert code == 1
        assert "Traceback" in errors
        assert "in losses_of" in errors
        assert "ValueError: a slip of the pen" in errors


def test_unreadable_image_stops_the_run_or_is_skipped(train, refused, make_images, metrics_of, tmp_path, capsys):
    folder = make_images("images", 12)
    truncate(folder / "3.png")
    options = {"train_data_dir": folder, "num_shapes": None, "train_batch_size": 2, "validation_size": 1}
    assert "3.png" in refused(**options)
    capsys.readouterr()
    train(tmp_path / "run", on_bad_image="skip", dataloader_num_workers=1, **options)
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("3.png, which cannot be used (1 so far)") == 1
    assert len(metrics_of(tmp_path / "run")) == 16


def test_image_that_becomes_unreadable_stops_the_run_with_its_name(train, make_images, tmp_path, monkeypatch):
    """The image is damaged during the run."""
    folder = make_images("images", 30)
    options = {"train_data_dir": folder, "num_shapes": None, "train_batch_size": 2, "validation_size": 3}
    name = held_out(folder, 3, 1)
    make_parent = Path.mkdir

    def damage_later(path, *args, **kwargs):
        if path.name == ".scalelong-partial-4":
            truncate(name)
        make_parent(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", damage_later)
    with pytest.raises(TrainingStopped, match=name.name) as stopped:
        train(tmp_path / "run", **options)
    assert stopped.value.exit_code == 2


def test_held_out_images_are_checked_first(train, refused, make_images, tmp_path, capsys):
    folder = make_images("images", 100)
    # One that is not among the images from which the number of channels is guessed.
    name = truncate(held_out(folder, 10, -1))
    options = {"train_data_dir": folder, "num_shapes": None, "validation_size": 10}
    assert name in refused(**options)
    capsys.readouterr()
    train(tmp_path / "skipping", on_bad_image="skip", **options)
    assert f"{name}, which cannot be used" in capsys.readouterr().out


def test_warns_of_a_learning_rate_that_only_warms_up(train, tmp_path, capsys):
    train(tmp_path / "short", max_train_steps=4, lr_warmup_steps=4)
    message = "warning: the learning rate warms up for 4 steps (--lr_warmup_steps), and the run has only 4"
    assert message in capsys.readouterr().out
    train(tmp_path / "long", max_train_steps=4, lr_warmup_steps=3)
    assert "warning" not in capsys.readouterr().out
