"""Streaming runs: a killed and resumed run equals an uninterrupted one."""

import io
import json
import time

import datasets
import pytest
from PIL import Image

from scalelong_diffusers.errors import UserError


@pytest.fixture
def shards(tmp_path):
    """Thirty images in five files with two row groups each."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(5):
        images = []
        for n in range(6 * shard, 6 * shard + 6):
            file = io.BytesIO()
            gradients = [Image.linear_gradient("L").rotate(turn * n).resize((8, 8)) for turn in (12, 24, 36)]
            Image.merge("RGB", gradients).save(file, "png")
            images.append({"bytes": file.getvalue(), "path": None})
        table = datasets.Dataset.from_dict({"image": images}, features=datasets.Features({"image": datasets.Image()}))
        table.to_parquet(folder / f"train-{shard:05}-of-00005.parquet", batch_size=3)
    data = {"train_data_dir": folder, "streaming": True, "random_flip": True, "num_shapes": None}
    return {**data, "dataloader_num_workers": 2}


def count_lines(folder) -> int:
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


@pytest.mark.slow
def test_killed_run_resumes_exactly(train, launch, shards, assert_same_run, tmp_path):
    expected = train(tmp_path / "uninterrupted", **shards)
    assert json.loads((expected / "metrics.jsonl").read_text().splitlines()[-1])["epoch"] == 16 * 4 / 27
    killed = tmp_path / "killed"
    running = launch(killed, max_train_steps=400, **shards)
    deadline = time.monotonic() + 100
    while count_lines(killed) <= 10:
        assert running.process.poll() is None, running.process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    running.kill()
    train(killed, resume_from_checkpoint="latest", **shards)
    assert_same_run(killed, expected)


@pytest.mark.slow
def test_rejects_invalid_settings(train, shards, network, tmp_path):
    missing = shards["train_data_dir"] / "missing"
    for changes, message in (
        ({"eval_steps": 2, "eval_features": network}, "--eval_reference"),
        ({"train_data_dir": missing}, "train_data_dir: .*missing is not a folder"),
    ):
        with pytest.raises(UserError, match=message):
            train(tmp_path / "rejected", **shards | changes)
        assert not (tmp_path / "rejected").is_dir()
