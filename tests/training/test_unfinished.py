"""Sampling a run that has not finished."""

import json
import shutil
import signal

import numpy as np
import pytest
from PIL import Image

from scalelong_diffusers import ScaleLongClassConditionalPipeline, UserError, cli
from scalelong_diffusers.train import train_class_conditional, train_text_to_image
from scalelong_diffusers.training.unfinished import PARTS_FOLDER, load_checkpoint


def interrupted(launch, folder, script, **settings):
    """Start a run, and stop it after its first checkpoint."""
    running = launch(
        folder, script=script, model_config_name_or_path=None, model_type="tiny", max_train_steps=10_000,
        lr_scheduler="constant", checkpointing_steps=2, validation_steps=0, **settings,
    )  # fmt: skip
    running.wait_until((folder / "checkpoint-2").is_dir)
    running.process.send_signal(signal.SIGINT)
    assert running.wait()[0] == 130
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


def sample(*words):
    return cli.main(["sample", *map(str, words), "--num_inference_steps", "2", "--num_images", "2"])


@pytest.mark.slow
def test_samples_the_latest_checkpoint_with_ema_weights(launch, tmp_path, capsys):
    run = tmp_path / "run"
    checkpoint = interrupted(launch, run, train_class_conditional)
    assert sample(run, "--output_dir", tmp_path / "images") == 0
    assert f"{run} is not finished: sampling {checkpoint.name}" in capsys.readouterr().out
    assert json.loads((tmp_path / "images" / "sample.json").read_text())["model"] == str(checkpoint)
    # The finished pipeline, put together by hand.
    whole = shutil.copytree(run / PARTS_FOLDER, tmp_path / "whole")
    shutil.copytree(checkpoint / "unet_ema", whole / "unet")
    assert ScaleLongClassConditionalPipeline.from_pretrained(whole).config.class_names["0"] == "red circle"
    assert sample(whole, "--output_dir", tmp_path / "expected") == 0
    for name in ("000000.png", "000001.png"):
        first, second = (np.asarray(Image.open(tmp_path / folder / name)) for folder in ("images", "expected"))
        assert np.array_equal(first, second)
    # A checkpoint can be named, and a damaged one is refused.
    assert sample(checkpoint, "--output_dir", tmp_path / "images") == 0
    printed = capsys.readouterr().out
    assert "2 images, 0 of them new" in printed
    assert "is not finished" not in printed
    (checkpoint / "unet_ema" / "config.json").write_text("{}")
    assert sample(checkpoint, "--output_dir", tmp_path / "others") == 2
    assert "unet_ema/config.json has changed since it was written" in capsys.readouterr().err
    assert not (tmp_path / "others").exists()


@pytest.mark.slow
def test_samples_a_text_model_with_the_text_encoder_of_the_checkpoint(launch, tmp_path, capsys):
    run = tmp_path / "run"
    interrupted(launch, run, train_text_to_image)
    assert sample(run, "--output_dir", tmp_path / "images", "--prompt", "a red circle", "a blue star") == 0
    assert (tmp_path / "images" / "grid.png").is_file()
    shutil.rmtree(run / PARTS_FOLDER)
    assert sample(run, "--output_dir", tmp_path / "others", "--prompt", "a red circle") == 2
    error = capsys.readouterr().err
    assert "unfinished is missing" in error
    assert "--resume_from_checkpoint latest" in error


@pytest.mark.slow
def test_a_finished_run_has_only_its_pipeline(train, tmp_path):
    folder = train(tmp_path / "run", max_train_steps=2, validation_steps=0, checkpointing_steps=1, lr_warmup_steps=1)
    assert (folder / "model_index.json").is_file()
    assert not (folder / PARTS_FOLDER).exists()


def test_refuses_sharded_checkpoints(tmp_path):
    (tmp_path / "checkpoint-1" / "shards").mkdir(parents=True)
    (tmp_path / PARTS_FOLDER).mkdir()
    (tmp_path / PARTS_FOLDER / "model_index.json").write_text("{}")
    with pytest.raises(UserError, match="because FSDP2 wrote it in shards"):
        load_checkpoint(tmp_path / "checkpoint-1")
