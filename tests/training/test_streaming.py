"""A streaming run that is killed and resumed is the run that was never killed."""

import io
import json
import time

import datasets
import pytest
from PIL import Image


@pytest.fixture
def shards(tmp_path):
    """Thirty images in five files, each of two row groups."""
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
    return {"train_data_dir": folder, "streaming": True, "random_flip": True, "num_shapes": None}


def lines_of(folder) -> int:
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


@pytest.mark.slow
def test_killed_and_resumed(train, launch, shards, assert_same_run, tmp_path):
    expected = train(tmp_path / "unbroken", **shards)
    assert json.loads((expected / "metrics.jsonl").read_text().splitlines()[-1])["epoch"] == 16 * 4 / 27
    broken = tmp_path / "broken"
    running = launch(broken, max_train_steps=400, dataloader_num_workers=2, **shards)
    deadline = time.monotonic() + 100
    while lines_of(broken) <= 10:
        assert running.process.poll() is None, running.process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    running.kill()
    train(broken, resume_from_checkpoint="latest", **shards)
    assert_same_run(broken, expected)


@pytest.mark.slow
def test_two_processes_learn_what_one_does(train, launch, shards, metrics_of, tmp_path):
    running = launch(tmp_path / "two", processes=2, train_batch_size=2, dataloader_num_workers=1, **shards)
    expected = metrics_of(train(tmp_path / "one", **shards))
    code, _, errors = running.wait()
    assert code == 0, errors
    for line, wanted in zip(metrics_of(tmp_path / "two"), expected, strict=True):
        assert line["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
        assert line.get("validation_loss") == pytest.approx(wanted.get("validation_loss"), abs=1e-5)


def test_refused_in_one_sentence(refused, shards, network):
    assert "streaming needs a data set to read: dataset_name or train_data_dir" in refused(streaming=True)
    assert "which --streaming does not have: give --eval_reference" in refused(
        **shards, eval_steps=2, eval_features=network
    )
    other = refused(**shards | {"train_data_dir": shards["train_data_dir"] / "none"})
    assert "train_data_dir: there is no folder" in other
