"""Streams: the sample at a position depends only on the seed and the position."""

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
import torch
from PIL import Image

from scalelong_diffusers.data.stream import Positions


@pytest.fixture
def shapes(load):
    """Eighteen training and two validation images, with random flips."""
    return lambda seed=0: load(seed=seed, needs_labels=True, needs_captions=True, random_flip=True, num_shapes=20)


def join(batches):
    batches = list(batches)
    return {
        "positions": [position for batch in batches for position in batch.positions],
        "pixels": torch.cat([batch["pixel_values"] for batch in batches]),
        "labels": torch.cat([batch["labels"] for batch in batches]).tolist(),
        "captions": [caption for batch in batches for caption in batch["captions"]],
    }


def are_equal(one, other):
    return torch.equal(one.pop("pixels"), other.pop("pixels")) and one == other


def test_each_epoch_has_each_image_once(load, image_folder, numbers):
    folder = image_folder([f"{i}.png" for i in range(20)])
    data = load(train_data_dir=folder, channels=3)
    assert (data.train.num_samples, data.validation.num_samples) == (18, 2)
    held_out = [n for batch in data.validation.batches(8) for n in numbers(batch)]
    read = [n for batch in data.train.batches(4, num_steps=27) for n in numbers(batch)]
    epochs = [read[start : start + 18] for start in range(0, 108, 18)]
    assert all(sorted(epoch + held_out) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6


def test_batches_have_all_columns(shapes):
    data = shapes()
    [batch] = data.train.batches(5, num_steps=1)
    assert batch.positions == [0, 1, 2, 3, 4]
    assert (batch["pixel_values"].shape, batch["pixel_values"].dtype) == ((5, 3, 8, 8), torch.float32)
    assert (batch["labels"].shape, batch["labels"].dtype) == ((5,), torch.int64)
    for label, caption in zip(batch["labels"], batch["captions"]):
        assert all(word in caption for word in data.class_names[label].split())
    assert (batch.stream, batch.unreadable) == ("train", [])


def test_batches_have_only_needed_columns(load):
    [batch] = load(needs_labels=False).train.batches(2, num_steps=1)
    assert list(batch.columns) == ["pixel_values"]


def count_words(captions):
    return torch.tensor([len(caption.split()) for caption in captions])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_tokenizers_add_columns_to_both_streams(shapes, num_workers):
    data = shapes()
    data.add_tokenizers({"input_ids": count_words})
    for stream in (data.train, data.validation):
        for batch in stream.batches(2, num_steps=1, num_workers=num_workers):
            assert torch.equal(batch["input_ids"], count_words(batch["captions"]))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resumes_at_a_step(shapes, num_workers):
    uninterrupted = join(shapes().train.batches(4, num_steps=12))
    rest = join(shapes().train.batches(4, first_step=7, num_steps=5, num_workers=num_workers))
    assert rest["positions"] == list(range(28, 48))
    assert torch.equal(rest["pixels"], uninterrupted["pixels"][28:])
    assert rest["labels"] == uninterrupted["labels"][28:]
    assert rest["captions"] == uninterrupted["captions"][28:]


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_processes_and_accumulations_divide_the_same_steps(shapes, processes, accumulation):
    batch_size = 8 // processes // accumulation
    loaders = [
        shapes().train.batches(batch_size, num_steps=5, accumulation=accumulation, num_processes=processes, rank=rank)
        for rank in range(processes)
    ]
    turns = [batch for turn in zip(*loaders) for batch in turn]
    assert len(turns) == 5 * processes * accumulation
    assert are_equal(join(turns), join(shapes().train.batches(8, num_steps=5)))


def test_order_depends_on_the_seed(load):
    def epoch(seed):
        data = load(seed=seed, needs_captions=True, needs_labels=True, random_flip=True, num_shapes=40)
        return data, join(data.train.batches(36, num_steps=1))

    (first, one), (_, again), (second, other) = epoch(0), epoch(0), epoch(1)
    assert one["labels"] != other["labels"]
    assert torch.equal(one["pixels"], again["pixels"])
    assert (first.train.indices == second.train.indices).all()  # held-out images do not depend on the seed
    assert first.fingerprint == second.fingerprint


def test_flips_and_captions_change_between_epochs(load):
    data = load(needs_captions=True, random_flip=True, resolution=16, num_shapes=20)
    variants = {}
    for position in range(18 * 12):
        columns = data.train[position].columns
        pixels, mirrored = columns["pixel_values"].tobytes(), columns["pixel_values"][:, ::-1].tobytes()
        variants.setdefault(min(pixels, mirrored), set()).add((pixels, columns["captions"]))
    assert len(variants) == 18
    assert all(len({pixels for pixels, _ in variant}) == 2 for variant in variants.values())
    assert all(len({caption for _, caption in variant}) >= 3 for variant in variants.values())


def test_validation_has_each_image_once_in_order(load, image_folder, numbers):
    folder = image_folder([f"{split}/{i}.png" for split in ("train", "validation") for i in range(7)])
    validation = load(train_data_dir=folder, random_flip=True).validation
    batches = list(validation.batches(3))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    read = [n for batch in batches for n in numbers(batch)]
    assert read == list(range(7, 14))
    assert batches[0].stream == "validation"
    assert [n for batch in validation.batches(3) for n in numbers(batch)] == read


@pytest.mark.parametrize(("processes", "batch_size"), [(2, 3), (3, 2), (4, 1), (2, 9)])
def test_validation_is_divided_between_processes(load, processes, batch_size):
    validation = load(num_shapes=100).validation
    read = [
        position
        for rank in range(processes)
        for batch in validation.batches(batch_size, num_processes=processes, rank=rank)
        for position in batch.positions
    ]
    assert sorted(read) == list(range(10))
    assert validation.num_samples == 10


def test_validation_has_no_random_crops_and_flips(load, tmp_path):
    pixels = np.zeros((8, 20, 3), np.uint8)
    pixels[..., 0] = np.arange(20)
    (tmp_path / "wide").mkdir()
    for i in range(100):
        Image.fromarray(pixels).save(tmp_path / "wide" / f"{i}.png")
    data = load(train_data_dir=tmp_path / "wide", random_flip=True)
    assert {first_row(data.validation[i]) for i in range(10)} == {tuple(range(6, 14))}
    assert len({first_row(data.train[i]) for i in range(90)}) > 10


def first_row(sample):
    return tuple(sample.columns["pixel_values"][0, :, 0].tolist())


def test_positions_of_a_step_are_consecutive():
    r, a, b = 3, 2, 4
    for rank in range(r):
        batches = list(Positions(b, 5, 2, a, r, rank, None))
        expected = [
            list(range(start, start + b))
            for step in (5, 6)
            for start in (step * r * a * b + (part * r + rank) * b for part in range(a))
        ]
        assert batches == expected


def test_does_not_use_the_global_generator(shapes):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    list(shapes().train.batches(4, num_steps=3, num_workers=1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_workers_ignore_signals_until_the_main_process_ends(shapes):
    batches = iter(shapes().train.batches(2, num_steps=200, num_workers=2))
    first = next(batches)
    workers = children()
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker, signal.SIGINT)
        os.kill(worker, signal.SIGTERM)
    rest = list(batches)
    assert [p for batch in [first, *rest] for p in batch.positions] == list(range(400))


@pytest.mark.slow
def test_workers_end_with_the_iteration(shapes):
    for batch in shapes().train.batches(2, num_workers=2):
        assert batch.positions == [0, 1]
        break
    deadline = time.monotonic() + 10
    while children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert children() == []


def children():
    return [process.pid for process in multiprocessing.active_children()]


SIGNALED_WORKERS = """
import os, signal, sys, time
import multiprocessing
from scalelong_diffusers.data import DataConfig, load_training_data, stream

set_handlers = stream._leave_signals_to_main_process

def set_handlers_late(worker):
    time.sleep(worker)
    set_handlers(worker)

stream._leave_signals_to_main_process = set_handlers_late

options = {"channels": 3, "needs_labels": True, "needs_captions": False, "seed": 5}
data = load_training_data(DataConfig(resolution=8), **options)
batches = iter(data.train.batches(2, num_workers=2))
next(batches)
for worker in multiprocessing.active_children():
    os.kill(worker.pid, signal.SIGTERM)
print(data.fingerprint, "datasets" in sys.modules, flush=True)
sys.exit(3)
"""


@pytest.mark.slow
def test_process_ends_after_its_workers_were_signaled(in_fresh_process, load):
    """
    The second worker is still starting, so the signals of this script and of `multiprocessing` reach it as one.

    Also, its data has the same fingerprint, and the built-in dataset does not import `datasets`, which is slow.
    """
    start = time.monotonic()
    ended = in_fresh_process(SIGNALED_WORKERS, check=False)
    expected = f"{load(needs_labels=True).fingerprint} False\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, expected, "")
    assert time.monotonic() - start < 60
