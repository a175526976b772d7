"""What is asked wrongly ends in one sentence and exit code 2, before anything long begins."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scalelong_diffusers.data import DataConfig, load_training_data
from scalelong_diffusers.train import train_class_conditional
from scalelong_diffusers.training import TrainingStopped


@pytest.fixture
def pictures(tmp_path):
    """`pictures(class_name=count)` is a folder of 8 x 8 pictures."""

    def make(size=8, mode="RGB", **counts):
        random = np.random.default_rng(0)
        for name, count in counts.items():
            folder = tmp_path / "pictures" / name.strip("_")
            folder.mkdir(parents=True)
            for k in range(count):
                pixels = random.integers(0, 256, (size, size, 3), dtype=np.uint8)
                Image.fromarray(pixels).convert(mode).save(folder / f"{k}.png")
        return tmp_path / "pictures"

    return make


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"learning_rat": 1}, ["'--learning_rat'", "--learning_rate"]),
        ({"preset": "cifar10-uvit"}, ["unknown preset 'cifar10-uvit'", "cifar10-uvit-s-2"]),
        ({"preset": "imagenet64-uvit-m-4"}, ["train_class_conditional.py", "accepted here: cifar10-uvit-s-2"]),
        ({"preset": "mscoco-unet"}, ["train_text_to_image.py"]),
        ({"preset": "cifar10-uvit-s-2"}, ["--preset and --model_config_name_or_path"]),
        ({"train_batch_size": 0}, ["--train_batch_size must be at least 1, got 0"]),
        ({"train_batch_size": 28}, ["28 images", "there are 27 to train on"]),
        ({"gradient_accumulation_steps": 7}, ["--gradient_accumulation_steps 7", "there are 27"]),
        ({"resolution": 12}, ["made for images of 8 pixels", "--resolution gives 12"]),
        ({"model_config_name_or_path": None, "resolution": 13}, ["--resolution 13", "nearest that can is 12"]),
        ({"model_config_name_or_path": None, "resolution": 30, "model_type": "unet"}, ["resolution=30", "28 or 32"]),
        ({"model_config_name_or_path": "nowhere"}, ["nowhere"]),
        ({"num_shapes": 1}, ["num_shapes", "at least 2"]),
        ({"continuous_time": True, "ddpm_beta_schedule": "scaled_linear"}, ["--continuous_time", "scaled_linear"]),
        ({"snr_gamma": 0}, ["--snr_gamma must be above 0, got 0"]),
        ({"ema_decay": 1}, ["--ema_decay must be in [0, 1), got 1"]),
        ({"kappa": 2}, ["kappa"]),
        ({"skip_scaling": "cd"}, ["cd"]),
        ({"skip_scaling": "none", "skip_scaling_warmup_steps": 5}, ["nothing to warm up"]),
        ({"latent_scale": 0.2}, ["--latent_scale needs --pretrained_vae_model_name_or_path"]),
        ({"hub_model_id": "user/name"}, ["--hub_model_id needs --push_to_hub"]),
        ({"dataset_name": "user/data", "train_data_dir": "folder"}, ["user/data", "folder", "one of them"]),
        ({"train_data_dir": "nowhere"}, ["nowhere"]),
        ({"lr_scheduler": "cosin"}, ["cosin", "cosine_with_restarts"]),
        (
            {"preset": "cifar10-unet", "model_config_name_or_path": None, "model_type": "unet"},
            ["--preset and --model_type"],
        ),
        ({"skip_scaling_warmup_steps": 5, "skip_scaling_strength": 0}, ["--skip_scaling_strength 0"]),
        ({"hub_private_repo": True}, ["--hub_private_repo needs --push_to_hub"]),
        ({"report_to": "comet_ml"}, ["--report_to comet_ml", "pip install"]),
        ({"report_to": "tensorbord"}, ["--report_to tensorbord is unknown", "tensorboard"]),
        ({"checkpoints_total_limit": 0}, ["--checkpoints_total_limit must be at least 1"]),
    ],
    ids=str,
)
def test_flags(refused, changes, parts):
    sentence = refused(**changes)
    assert all(part in sentence for part in parts), sentence


def test_a_preset_of_latents_needs_an_autoencoder(refused):
    sentence = refused(
        script=train_class_conditional, preset="imagenet256-uvit-l-2", model_config_name_or_path=None, resolution=None
    )
    assert "preset imagenet256-uvit-l-2 makes latents: it needs --pretrained_vae_model_name_or_path" in sentence


def test_an_autoencoder_that_is_none(refused, tiny_config):
    assert "is no AutoencoderKL" in refused(pretrained_vae_model_name_or_path=tiny_config)


def test_a_batch_of_a_preset_that_can_not_be_shared_out(refused):
    sentence = refused(
        preset="cifar10-uvit-s-2",
        model_config_name_or_path=None,
        train_batch_size=None,
        gradient_accumulation_steps=3,
        resolution=None,
    )
    assert "batches of 128, which 1 processes x 3 accumulations can not share out evenly" in sentence


@pytest.mark.parametrize(
    ("counts", "options", "parts"),
    [
        ({"_": 1}, {}, ["1 image", "two at least"]),
        ({"_": 5}, {"image_column": "picture"}, ["picture", "image"]),
        ({"_": 5, "size": 1}, {}, ["1 x 1", "smaller than the 2 x 2"]),
        ({"_": 5}, {"script": train_class_conditional}, ["label"]),
    ],
    ids=str,
)
def test_pictures(refused, pictures, counts, options, parts):
    sentence = refused(train_data_dir=pictures(**counts), num_shapes=None, train_batch_size=1, **options)
    assert all(part in sentence for part in parts), sentence


def test_an_empty_folder(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(train_data_dir=tmp_path / "empty", num_shapes=None)


def test_more_classes_than_the_model_has(refused, tiny_config):
    sentence = refused(script=train_class_conditional, model_config_name_or_path=tiny_config / "five_classes")
    assert "num_class_embeds=5, and the data asks for 31" in sentence


def test_a_model_of_another_task(refused, tiny_config):
    sentence = refused(model_config_name_or_path=tiny_config / "five_classes")
    assert "needs class_labels, and this script gives none" in sentence
    assert "needs no condition" in refused(script=train_class_conditional)


def test_channels_that_do_not_match(refused, tmp_path):
    from scalelong_diffusers import UViTModel

    UViTModel(sample_size=8, hidden_size=16, num_layers=2, num_attention_heads=2, in_channels=4).save_config(tmp_path)
    sentence = refused(model_config_name_or_path=tmp_path)
    assert "the model takes 4 channels, and the images have 3" in sentence
    assert "--pretrained_vae_model_name_or_path" in sentence


def test_a_folder_of_another_run(train, tmp_path):
    folder = train(tmp_path / "run", max_train_steps=4)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(Exception, match="holds another run: go on with it by --resume_from_checkpoint latest"):
        train(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_folder_that_can_not_be_written(refused, tmp_path):
    (tmp_path / "refused").write_text("")
    assert "refused can not be written" in refused()


def test_one_line_and_exit_code_2(launch, tmp_path):
    code, _, errors = launch(tmp_path / "run", resolution=12).wait()
    assert code == 2
    (line,) = errors.strip().splitlines()
    assert line.startswith("train_unconditional: the model is made for images of 8 pixels")


def test_a_bad_picture_ends_the_run_or_is_passed_over(train, refused, pictures, metrics_of, tmp_path, capsys):
    folder = pictures(_=12)
    whole = (folder / "3.png").read_bytes()
    (folder / "3.png").write_bytes(whole[:60])
    settings = {"train_data_dir": folder, "num_shapes": None, "train_batch_size": 2, "validation_size": 1}
    assert "3.png" in refused(**settings)
    capsys.readouterr()
    train(tmp_path / "run", on_bad_image="skip", dataloader_num_workers=1, **settings)
    said = capsys.readouterr()
    assert (said.out + said.err).count("3.png can not be read and is left out (1 so far)") == 1
    assert len(metrics_of(tmp_path / "run")) == 16


def test_a_bad_picture_that_is_held_out_is_found_before_the_first_step(refused, pictures):
    folder = pictures(_=200)
    held_out = load_training_data(
        DataConfig(train_data_dir=str(folder), resolution=8, validation_size=20),
        channels=None,
        needs_labels=False,
        needs_captions=False,
        seed=0,
    ).validation
    # The last one, at which none of those lie that are looked at to tell the channels.
    file = Path(held_out.rows.source.name(int(held_out.indices[-1])))
    file.write_bytes(file.read_bytes()[:60])
    assert file.name in refused(train_data_dir=folder, num_shapes=None, validation_size=20)


def test_where_all_checkpoints_are_damaged(train, tmp_path):
    folder = train(tmp_path / "run", max_train_steps=8)
    for checkpoint in folder.glob("checkpoint-*"):
        with open(checkpoint / "state.json", "a") as file:
            file.write(" ")
    with pytest.raises(TrainingStopped) as stopped:
        train(folder, resume_from_checkpoint="latest")
    sentence = str(stopped.value)
    assert "no whole checkpoint to resume from" in sentence
    assert "checkpoint-8 is passed over" in sentence
    assert "checkpoint-4 is passed over" in sentence
    assert sentence.endswith("to start anew remove them, or give another folder")


def test_a_warm_up_that_never_ends_is_said(train, tmp_path, capsys):
    train(tmp_path / "short", max_train_steps=4, lr_warmup_steps=4)
    sentence = "warning: the rate is warmed up for 4 steps (--lr_warmup_steps), which the run of 4 does not reach"
    assert sentence in capsys.readouterr().out
    train(tmp_path / "long", max_train_steps=4, lr_warmup_steps=3)
    assert "warning" not in capsys.readouterr().out


def test_help_is_light():
    """The flags are known without a model being imported... by people who look for one."""
    shown = subprocess.run(
        [sys.executable, "-m", "scalelong_diffusers.train.train_unconditional", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--train_data_dir" in shown.stdout
    assert "--skip_scaling" in shown.stdout


def test_a_bad_picture_that_is_held_out_ends_the_run_with_its_name_too(train, pictures, tmp_path, capsys):
    folder = pictures(_=30)
    settings = {"train_data_dir": folder, "num_shapes": None, "train_batch_size": 2, "validation_size": 3}
    data = load_training_data(
        DataConfig(train_data_dir=str(folder), resolution=8, validation_size=3),
        channels=3, needs_labels=False, needs_captions=False, seed=0,
    )  # fmt: skip
    # Not the first: that one is looked at before training.
    name = Path(data.validation.rows.name(int(data.validation.indices[1])))
    name.write_bytes(name.read_bytes()[:60])
    with pytest.raises(TrainingStopped, match=name.name) as stopped:
        train(tmp_path / "run", **settings)
    assert stopped.value.exit_code == 2
    capsys.readouterr()
    train(tmp_path / "skipping", on_bad_image="skip", **settings)
    assert f"{name.name} can not be read and is left out" in capsys.readouterr().out


def test_a_log_that_can_not_be_written_ends_the_run_with_a_sentence(launch, tmp_path):
    """Files are limited to what the settings need, and the log outgrows that."""
    script = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, 4_000)); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    running = launch(tmp_path / "run", python_code=script, max_train_steps=400, checkpointing_steps=1000)
    code, _, errors = running.wait()
    assert code == 1
    assert "the log could not be written: [Errno 27] File too large; there is no checkpoint" in errors.splitlines()[-1]
    assert "Traceback" not in errors
