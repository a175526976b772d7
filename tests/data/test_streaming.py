"""Streaming from parquet and tar files: each row once per epoch, exact resume, and damaged files."""

import io
import logging
import pickle
import tarfile
import weakref
from itertools import pairwise

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelong_diffusers.data import shards as shards_module
from scalelong_diffusers.data.shards import ParquetFile, ShardTable, TarFile
from scalelong_diffusers.data.stream import RowGroups, ShardOrder
from scalelong_diffusers.errors import UserError


FEATURES = datasets.Features(
    {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"]), "text": datasets.Value("string")}
)


def write_parquet(file, numbers, png, features=FEATURES, rows_in_group=4, label=lambda n: n % 2):
    columns = {
        "image": [{"bytes": png((n, 0, 0)), "path": None} for n in numbers],
        "label": [label(n) for n in numbers],
        "text": [f"number {n}" for n in numbers],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    dataset = datasets.Dataset.from_dict(columns, features=features)
    dataset.to_parquet(file, batch_size=rows_in_group)
    assert pq.ParquetFile(file).num_row_groups == -(-len(numbers) // rows_in_group)


@pytest.fixture
def shards(tmp_path, png):
    """Five files of 11 images in row groups of 4, 4 and 3. Red channel and caption are the number of the image."""
    for i in range(5):
        write_parquet(tmp_path / "shards" / f"train-{i:05}-of-00005.parquet", range(11 * i, 11 * i + 11), png)
    return tmp_path / "shards"


@pytest.fixture
def stream(load, shards):
    def open_stream(**config):
        needs = {"needs_labels": True, "needs_captions": True}
        return load(train_data_dir=shards, streaming=True, **{"validation_size": 3, **needs, **config})

    return open_stream


def reds(batches):
    """Return the numbers of the images by position, after checking labels and captions."""
    found = {}
    for batch in batches:
        pixels = ((batch["pixel_values"][:, 0, 0, 0] + 1) * 127.5).round().int().tolist()
        assert batch["captions"] == [f"number {n}" for n in pixels]
        assert batch["labels"].tolist() == [n % 2 for n in pixels]
        assert not set(batch.positions) & found.keys()
        found |= dict(zip(batch.positions, pixels))
    return found


def read(data, batch_size, num_processes=1, **options):
    batches = [
        batch
        for rank in range(num_processes)
        for batch in data.train.batches(batch_size, num_processes=num_processes, rank=rank, **options)
    ]
    assert {len(batch) for batch in batches} == {batch_size}
    return reds(batches)


# 52 training images. Three epochs are 39 steps of 4.
@pytest.mark.parametrize(("processes", "workers"), [(1, 0), (2, 0), (1, 2), (2, 2)])
def test_each_epoch_has_each_image_once(stream, processes, workers):
    data = stream()
    held_out = reds(data.validation.batches(2))
    assert sorted(held_out.values()) == [44, 45, 46]  # the first of the last file
    found = read(data, 4 // processes, processes, num_steps=39, num_workers=workers)
    assert sorted(found) == list(range(156))
    epochs = [[found[position] for position in range(start, start + 52)] for start in (0, 52, 104)]
    assert all(sorted(epoch) == sorted({*range(55)} - {44, 45, 46}) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3


def test_resumes_exactly_with_the_same_processes_and_workers(stream):
    options = {"batch_size": 2, "num_processes": 2, "accumulation": 3, "num_workers": 2}
    uninterrupted = read(stream(), num_steps=12, **options)
    resumed = read(stream(), first_step=5, num_steps=7, **options)
    assert resumed == {position: uninterrupted[position] for position in range(60, 144)}


def test_order_depends_on_the_seed_and_held_out_images_do_not(stream):
    one, other = stream(seed=0), stream(seed=1)
    assert read(one, 4, num_steps=13) != read(other, 4, num_steps=13)
    assert reds(one.validation.batches(3)) == reds(other.validation.batches(3))
    assert one.fingerprint == other.fingerprint


def test_draws_depend_on_the_position(stream):
    [batch] = stream(random_flip=True).train.batches(4, first_step=2, num_steps=1, num_workers=2)
    [again] = stream(random_flip=True).train.batches(4, first_step=2, num_steps=1)
    assert batch.positions == again.positions == [8, 9, 10, 11]
    noise = batch.normal_like(batch["pixel_values"], "noise")
    assert torch.equal(noise, again.normal_like(again["pixel_values"], "noise"))


def test_reads_validation_splits_and_limits_training_images(stream, shards, png):
    write_parquet(shards / "validation-00000-of-00001.parquet", range(100, 105), png)
    data = stream(max_train_samples=9)
    assert reds(data.validation.batches(2)) == {0: 100, 1: 101, 2: 102}
    assert data.train.num_samples == 9
    assert sorted(read(data, 3, num_steps=3).values()) == list(range(9))


def row_groups(count, size):
    starts = np.arange(0, count, size)
    return RowGroups(starts + 1000, np.minimum(size, count - starts))


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 120),
    size=st.integers(1, 20),
    window=st.integers(1, 8),
    batch_size=st.integers(1, 20),
    readers=st.integers(1, 20),
    epoch=st.integers(0, 3),
)
def test_order_has_each_row_once_per_epoch(count, size, window, batch_size, readers, epoch):
    order = ShardOrder(row_groups(count, size), 3, window, batch_size, readers)
    rows = [order.row(position) for position in range(epoch * count, (epoch + 1) * count)]
    assert sorted(rows) == list(range(1000, 1000 + count))


def test_each_reader_reads_its_own_row_groups():
    order = ShardOrder(row_groups(4000, 10), seed=0, window=4, batch_size=8, readers=16)
    groups = [set() for _ in range(16)]
    for position in range(4000):
        groups[position // 8 % 16].add((order.row(position) - 1000) // 10)
    assert set().union(*groups) == set(range(400))
    assert sum(map(len, groups)) <= 400 + 15 * 4  # windows at the boundaries have two readers


def test_windows_are_shuffled():
    order = ShardOrder(row_groups(4000, 10), seed=0, window=4)
    groups = [(order.row(position) - 1000) // 10 for position in range(4000)]
    windows = [groups[start : start + 40] for start in range(0, 4000, 40)]
    assert all(len(set(window)) == 4 for window in windows)
    assert all(sum(a == b for a, b in pairwise(window)) < 25 for window in windows)  # 36 if not shuffled
    firsts = [min(window) for window in windows]
    assert firsts != sorted(firsts)


def test_replacements_of_unreadable_rows_stay_with_the_reader():
    order = ShardOrder(row_groups(400, 10), seed=0, window=1, batch_size=8, readers=4)
    own = {order.row(position) for position in range(400) if position // 8 % 4 == 2}
    assert {order.row(16, skipped) for skipped in range(len(own))} == own


def test_keeps_few_large_row_groups_in_memory(stream, monkeypatch):
    largest = max(size for file in stream().train.rows.source._files for _, size in file.groups)
    monkeypatch.setattr(shards_module, "_MEMORY", 3 * largest)
    read_group, in_memory, counts = ShardTable.read_group, weakref.WeakSet(), []

    def count_groups(table, group, kinds):
        rows = read_group(table, group, kinds)
        in_memory.add(rows)
        counts.append(len(in_memory))
        return rows

    monkeypatch.setattr(ShardTable, "read_group", count_groups)
    data = stream()
    opened = len(counts)
    read(data, 4, num_steps=13)
    assert max(counts) == 3
    assert len(counts) - opened <= 15  # each row group is read once per epoch
    assert b"InMemoryTable" not in pickle.dumps(data.train.rows.source)  # workers get no row groups


def test_skips_unreadable_images(stream, load, shards, png):
    file = shards / "train-00002-of-00005.parquet"
    table = pq.read_table(file)
    images = table["image"].to_pylist()
    images[5]["bytes"] = b"\x89PNG nothing"
    broken = table.set_column(0, table.schema.field("image"), pa.array(images, table.schema.field("image").type))
    pq.write_table(broken, file, row_group_size=4)
    data = stream(on_bad_image="skip")
    batches = list(data.train.batches(4, num_steps=13, num_workers=2))
    assert [name for batch in batches for name in batch.unreadable] == [
        "row 1 of row group 1 of train-00002-of-00005.parquet"
    ]
    assert 27 not in reds(batches).values()
    with pytest.raises(UserError, match=r"row 1 of row group 1 of train-00002-of-00005\.parquet cannot be read"):
        list(stream().train.batches(4, num_steps=13, num_workers=2))


def test_first_row_group_without_a_readable_image(load, tmp_path):
    samples = pa.table({"image": [{"bytes": b"\x89PNG nothing", "path": None}] * 6})
    pq.write_table(samples, tmp_path / "train.parquet")
    with pytest.raises(UserError, match=r"none of the \d images that were tried can be read"):
        load(train_data_dir=tmp_path, streaming=True, on_bad_image="skip")


def test_stops_at_damaged_files(stream, shards):
    data = stream()
    file = shards / "train-00003-of-00005.parquet"
    content = file.read_bytes()
    file.write_bytes(b"\0" * len(content))
    for workers in (0, 1):
        with pytest.raises(UserError, match=r"row group \d of train-00003-of-00005.parquet cannot be read: ") as error:
            list(data.train.batches(4, num_steps=26, num_workers=workers))
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"train-00003-of-00005\.parquet cannot be read: "):
        stream()


def test_warns_of_more_readers_than_row_groups(stream, caplog):
    data = stream(max_train_samples=10)  # in three row groups
    with caplog.at_level(logging.WARNING):
        assert sorted(read(data, 5, num_processes=2, num_steps=1, num_workers=2).values()) == list(range(10))
        read(data, 5, num_processes=2, num_steps=1, num_workers=1)
    [record] = caplog.records
    assert record.message == (
        "the dataset has 3 row groups for 4 readers (processes x workers): some readers read the same row groups; use "
        "fewer workers, or write smaller row groups"
    )


@pytest.fixture
def tars(tmp_path, png):
    """Two files of 70 images, each with a class and a caption."""
    folder = tmp_path / "tars"
    folder.mkdir()
    for i in range(2):
        with tarfile.open(folder / f"{i}.tar", "w") as tar:
            for n in range(70 * i, 70 * i + 70):
                files = {"png": png((n, 0, 0)), "cls": b"%d" % (n % 2), "txt": b"number %d" % n}
                add_sample(tar, f"some/folder.of/{n:04}", files)
    return folder


def add_sample(tar, name, files):
    for column, content in files.items():
        member = tarfile.TarInfo(f"{name}.{column}")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))


def test_reads_tar_files(load, tars):
    needs = {"needs_labels": True, "needs_captions": True, "streaming": True, "validation_size": 4}
    data = load(train_data_dir=tars, **needs)
    assert data.description == "the folder tars, 140 images in 2 files"
    assert (data.num_classes, data.class_names) == (2, None)
    assert sorted(reds(data.validation.batches(4)).values()) == [70, 71, 72, 73]
    found = read(data, 4, num_processes=2, num_steps=17, num_workers=2)
    assert sorted(found.values()) == sorted({*range(140)} - {70, 71, 72, 73})
    for size in (215_000, 120_000, 100_000):
        with open(tars / "1.tar", "r+b") as file:
            file.truncate(size)
        with pytest.raises(UserError, match=r"1\.tar cannot be read: "):
            load(train_data_dir=tars, **needs)


@pytest.fixture
def load_samples(load, tmp_path):
    """Load a tar file of the given samples."""

    def run(samples, **config):
        (tmp_path / "own").mkdir(exist_ok=True)
        with tarfile.open(tmp_path / "own" / "a.tar", "w") as tar:
            for number, files in enumerate(samples):
                add_sample(tar, f"{number:04}", files)
        return load(train_data_dir=tmp_path / "own", streaming=True, **config)

    return run


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"cls": b"cat"}, r"a\.tar cannot be read: invalid literal for int\(\) with base 10: b'cat'"),
        (
            {"txt": b"caf\xe9"},
            r"of a\.tar cannot be read: 'utf-8' codec can't decode byte 0xe9 in position 3: .*",
        ),
    ],
)
def test_rejects_invalid_members(load_samples, png, files, message):
    samples = [{"png": png(), "cls": b"1", "txt": b"a"} for _ in range(20)]
    with pytest.raises(UserError, match=f"{message}$"):
        load_samples([*samples[:7], samples[7] | files, *samples[8:]], needs_labels=True, needs_captions=True)


def test_sample_without_the_image_column_is_unreadable(load_samples, png):
    samples = [{"png": png((number, 0, 0))} for number in range(20)]
    samples[7] = {"jpg": png()}
    message = (
        r"row 7 of row group 0 of a\.tar cannot be read: not a PNG, JPEG, WebP, GIF, BMP or TIFF image \(it is empty\)"
    )
    with pytest.raises(UserError, match=message):
        list(load_samples(samples).train.batches(4, num_steps=5))
    batches = list(load_samples(samples, on_bad_image="skip").train.batches(3, num_steps=6))
    assert {name for batch in batches for name in batch.unreadable} == {"row 7 of row group 0 of a.tar"}


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_reads_captions_without_images(load, shards, tars, monkeypatch, kind):
    folder = shards if kind == "parquet" else tars
    data = load(train_data_dir=folder, streaming=True, validation_size=3, needs_labels=True, needs_captions=True)
    expected = [caption for index in data.train.indices.rows() for caption in data.train.rows.source.captions(index)]
    columns = []
    for file in (ParquetFile, TarFile):
        read = file.read
        monkeypatch.setattr(file, "read", lambda f, g, names, read=read: columns.append(names) or read(f, g, names))
    assert list(data.train.captions()) == expected
    assert len(columns) == len(data.train.indices.counts)
    assert set(map(tuple, columns)) == {("text",) if kind == "parquet" else ("txt",)}


def test_rejects_missing_captions_without_reading_images(load, shards):
    file = shards / "train-00002-of-00005.parquet"
    table = pq.read_table(file)
    text = table.schema.field("text")
    table = table.set_column(2, text, pa.array([*table["text"].to_pylist()[:-1], " "], text.type))
    pq.write_table(table, file, row_group_size=4)
    data = load(train_data_dir=shards, streaming=True, needs_captions=True)
    message = r"row 2 of row group 2 of train-00002-of-00005\.parquet has no caption: 'text' is ' '"
    with pytest.raises(UserError, match=message):
        list(data.train.captions())


class TestRejects:
    def test_folders_of_images(self, load, image_folder):
        folder = image_folder(["1.png", "2.png"])
        with pytest.raises(UserError, match="the folder pictures has no parquet or tar files to stream"):
            load(train_data_dir=folder, streaming=True)

    def test_files_with_different_columns(self, stream, shards, png):
        features = datasets.Features({**FEATURES, "label": datasets.Value("string")})
        write_parquet(shards / "train-00004-of-00005.parquet", range(4), png, features, label=str)
        with pytest.raises(UserError, match=r"same columns: train-00004-of-00005.parquet has .*label \(string\)"):
            stream()

    def test_class_names_without_a_list_of_classes(self, load, tmp_path, png):
        features = datasets.Features({**FEATURES, "label": datasets.Value("string")})
        write_parquet(tmp_path / "named" / "a.parquet", range(8), png, features, label=str)
        with pytest.raises(UserError, match=r"needs a list of all classes: .* \(string\) as datasets.ClassLabel"):
            load(train_data_dir=tmp_path / "named", streaming=True, needs_labels=True)

    def test_unknown_columns(self, stream):
        with pytest.raises(UserError, match=r"has no column 'txt' \(did you mean 'text'\?\); its columns:"):
            stream(caption_column="txt")


def test_counts_numbered_classes_without_reading_rows(load, tmp_path, png):
    features = datasets.Features({**FEATURES, "label": datasets.Value("int32")})
    write_parquet(tmp_path / "numbers" / "a.parquet", range(9), png, features)
    write_parquet(tmp_path / "numbers" / "b.parquet", range(9, 18), png, features, label=lambda n: n % 7)
    data = load(train_data_dir=tmp_path / "numbers", streaming=True, needs_labels=True)
    assert (data.num_classes, data.class_names) == (7, None)


def test_accepts_empty_files_and_row_groups(load, tmp_path, png):
    features = datasets.Features({**FEATURES, "label": datasets.Value("int32")})
    write_parquet(tmp_path / "numbers" / "a.parquet", range(9), png, features, label=lambda n: n % 5)
    table = pq.read_table(tmp_path / "numbers" / "a.parquet")
    with pq.ParquetWriter(tmp_path / "numbers" / "b.parquet", table.schema):
        pass
    with pq.ParquetWriter(tmp_path / "numbers" / "c.parquet", table.schema) as writer:
        writer.write_table(table[:0])
        writer.write_table(table)
    groups = [pq.ParquetFile(tmp_path / "numbers" / f"{name}.parquet").num_row_groups for name in "bc"]
    assert groups == [0, 2]
    data = load(train_data_dir=tmp_path / "numbers", streaming=True, needs_labels=True)
    assert data.num_classes == 5
    assert data.train.num_samples + data.validation.num_samples == 18


def test_rejects_missing_labels(load, tmp_path, png):
    features = datasets.Features({**FEATURES, "label": datasets.Value("int32")})
    write_parquet(tmp_path / "numbers" / "a.parquet", range(9), png, features, label=lambda n: None)
    with pytest.raises(UserError, match=r"must be from 0 to 0, got None for row 0 of row group 0 of a\.parquet"):
        load(train_data_dir=tmp_path / "numbers", streaming=True, needs_labels=True)
