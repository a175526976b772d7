"""What is read at a position depends on the seed and the position alone, however a run is cut into batches."""

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
    """Eighteen shapes to train on and two to validate with, cut and mirrored at random."""
    return lambda seed=0: load(seed=seed, needs_labels=True, needs_captions=True, random_flip=True, num_shapes=20)


def joined(batches):
    batches = list(batches)
    return {
        "positions": [position for batch in batches for position in batch.positions],
        "pixels": torch.cat([batch["pixel_values"] for batch in batches]),
        "labels": torch.cat([batch["labels"] for batch in batches]).tolist(),
        "captions": [caption for batch in batches for caption in batch["captions"]],
    }


def same(one, other):
    return torch.equal(one.pop("pixels"), other.pop("pixels")) and one == other


def test_every_image_once_in_each_epoch(load, image_folder, numbers):
    folder = image_folder([f"{i}.png" for i in range(20)])
    data = load(train_data_dir=folder, channels=3)
    assert (data.train.num_samples, data.validation.num_samples) == (18, 2)
    held_out = [n for batch in data.validation.batches(8) for n in numbers(batch)]
    read = [n for batch in data.train.batches(4, num_steps=27) for n in numbers(batch)]
    epochs = [read[start : start + 18] for start in range(0, 108, 18)]
    assert all(sorted(epoch + held_out) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6


def test_columns(shapes):
    data = shapes()
    [batch] = data.train.batches(5, num_steps=1)
    assert batch.positions == [0, 1, 2, 3, 4]
    assert (batch["pixel_values"].shape, batch["pixel_values"].dtype) == ((5, 3, 8, 8), torch.float32)
    assert (batch["labels"].shape, batch["labels"].dtype) == ((5,), torch.int64)
    for label, caption in zip(batch["labels"], batch["captions"]):
        assert all(word in caption for word in data.class_names[label].split())
    assert (batch.stream, batch.seed, batch.unreadable) == ("train", 0, [])


def test_only_what_is_needed_is_there(load):
    [batch] = load(needs_labels=False).train.batches(2, num_steps=1)
    assert list(batch.columns) == ["pixel_values"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_is_starting_at_a_step(shapes, num_workers):
    whole = joined(shapes().train.batches(4, num_steps=12))
    rest = joined(shapes().train.batches(4, first_step=7, num_steps=5, num_workers=num_workers))
    assert rest["positions"] == list(range(28, 48))
    assert torch.equal(rest["pixels"], whole["pixels"][28:])
    assert rest["labels"] == whole["labels"][28:]
    assert rest["captions"] == whole["captions"][28:]


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_processes_and_accumulations_share_a_step(shapes, processes, accumulation):
    batch_size = 8 // processes // accumulation
    loaders = [
        shapes().train.batches(batch_size, num_steps=5, accumulation=accumulation, num_processes=processes, rank=rank)
        for rank in range(processes)
    ]
    turns = [batch for turn in zip(*loaders) for batch in turn]
    assert len(turns) == 5 * processes * accumulation
    assert same(joined(turns), joined(shapes().train.batches(8, num_steps=5)))


def test_seeds_differ_in_order_and_draws(load):
    def epoch(seed):
        data = load(seed=seed, needs_captions=True, needs_labels=True, random_flip=True, num_shapes=40)
        return data, joined(data.train.batches(36, num_steps=1))

    (first, one), (_, again), (second, other) = epoch(0), epoch(0), epoch(1)
    assert one["labels"] != other["labels"]
    assert torch.equal(one["pixels"], again["pixels"])
    assert (first.train.indices == second.train.indices).all()  # what is held out does not depend on the seed
    assert first.fingerprint == second.fingerprint


def test_flips_and_captions_change_from_epoch_to_epoch(load):
    data = load(needs_captions=True, random_flip=True, resolution=16, num_shapes=20)
    variants = {}
    for position in range(18 * 12):
        columns = data.train[position].columns
        pixels, mirrored = columns["pixel_values"].tobytes(), columns["pixel_values"][:, ::-1].tobytes()
        variants.setdefault(min(pixels, mirrored), set()).add((pixels, columns["captions"]))
    assert len(variants) == 18
    assert all(len({pixels for pixels, _ in variant}) == 2 for variant in variants.values())
    assert all(len({caption for _, caption in variant}) >= 3 for variant in variants.values())


def test_validation_is_plain_and_comes_once(load, image_folder, numbers):
    folder = image_folder([f"{split}/{i}.png" for split in ("train", "validation") for i in range(7)])
    validation = load(train_data_dir=folder, random_flip=True).validation
    batches = list(validation.batches(3))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    read = [n for batch in batches for n in numbers(batch)]
    assert read == list(range(7, 14))
    assert batches[0].stream == "validation"
    assert [n for batch in validation.batches(3) for n in numbers(batch)] == read


@pytest.mark.parametrize(("processes", "batch_size"), [(2, 3), (3, 2), (4, 1), (2, 9)])
def test_validation_is_split_over_processes(load, processes, batch_size):
    validation = load(num_shapes=100).validation
    read = [
        position
        for rank in range(processes)
        for batch in validation.batches(batch_size, num_processes=processes, rank=rank)
        for position in batch.positions
    ]
    assert sorted(read) == list(range(10))
    assert validation.num_samples == 10


def test_validation_is_neither_mirrored_nor_cut_at_random(load, tmp_path):
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


def test_positions_of_a_step_are_those_of_the_design():
    r, a, b = 3, 2, 4
    for rank in range(r):
        batches = list(Positions(b, 5, 2, a, r, rank, None))
        expected = [
            list(range(start, start + b))
            for step in (5, 6)
            for start in (step * r * a * b + (part * r + rank) * b for part in range(a))
        ]
        assert batches == expected


def test_reading_leaves_the_generator_of_torch_alone(shapes):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    list(shapes().train.batches(4, num_steps=3, num_workers=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_outlive_the_signals_of_the_main_process(shapes):
    """Ctrl-C and the end of a job reach a whole group of processes; the main one still wants to save."""
    batches = iter(shapes().train.batches(2, num_steps=200, num_workers=2))
    first = next(batches)
    workers = children()
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker, signal.SIGINT)
        os.kill(worker, signal.SIGTERM)
    rest = list(batches)
    assert [p for batch in [first, *rest] for p in batch.positions] == list(range(400))


def test_workers_are_gone_when_iteration_ends_early(shapes):
    for batch in shapes().train.batches(2, num_workers=2):
        assert batch.positions == [0, 1]
        break
    deadline = time.monotonic() + 10
    while children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert children() == []


def children():
    return [process.pid for process in multiprocessing.active_children()]


ENDED_IN_THE_MIDDLE = """
import os, signal, sys
import multiprocessing
from scalelong_diffusers.data import DataConfig, load_training_data

data = load_training_data(DataConfig(resolution=8), channels=3, needs_labels=False, needs_captions=False, seed=0)
batches = iter(data.train.batches(2, num_workers=2))
next(batches)
for worker in multiprocessing.active_children():
    os.kill(worker.pid, signal.SIGTERM)
print("leaving", flush=True)
sys.exit(3)
"""


def test_a_process_ends_though_its_workers_were_told_to_end_before(in_fresh_process):
    start = time.monotonic()
    ended = in_fresh_process(ENDED_IN_THE_MIDDLE, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "leaving\n", "")
    assert time.monotonic() - start < 60
