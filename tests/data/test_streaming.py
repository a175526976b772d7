"""Parquet files that are read row group by row group: every row once in an epoch, whoever reads it."""

import io
import logging
import pickle
import tarfile
import weakref

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from scalelong_diffusers.data import shards as shards_module
from scalelong_diffusers.data.orders import GroupOrder, Groups
from scalelong_diffusers.data.shard_files import ParquetFile, TarFile
from scalelong_diffusers.data.shards import ShardTable


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
    """Five files of 11 images, in row groups of 4, 4 and 3; the red of an image is its number, its caption says it."""
    for i in range(5):
        write_parquet(tmp_path / "shards" / f"train-{i:05}-of-00005.parquet", range(11 * i, 11 * i + 11), png)
    return tmp_path / "shards"


@pytest.fixture
def stream(load, shards):
    def open_stream(**settings):
        needs = {"needs_labels": True, "needs_captions": True}
        return load(train_data_dir=shards, streaming=True, **{"validation_size": 3, **needs, **settings})

    return open_stream


def reds(batches):
    """The numbers of the images by position, each read from its pixels, its label and its caption."""
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


# 52 images to train on, 4 in each step: an epoch has 13 steps.
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_image_once_in_each_epoch_whoever_reads_it(stream, processes, workers):
    data = stream()
    held_out = reds(data.validation.batches(2))
    assert sorted(held_out.values()) == [44, 45, 46]  # the first of the last file
    found = read(data, 4 // processes, processes, num_steps=39, num_workers=workers)
    assert sorted(found) == list(range(156))
    epochs = [[found[position] for position in range(start, start + 52)] for start in (0, 52, 104)]
    assert all(sorted(epoch) == sorted({*range(55)} - {44, 45, 46}) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert found == read(stream(), 4, num_steps=39)


def test_accumulation_and_resuming_change_nothing(stream):
    whole = read(stream(), 6, num_steps=20)
    assert read(stream(), 3, accumulation=2, num_steps=20) == whole
    rest = read(stream(), 2, num_processes=3, first_step=7, num_steps=13, num_workers=2)
    assert rest == {position: whole[position] for position in range(42, 120)}


def test_seeds_differ_in_order_and_hold_out_the_same(stream):
    one, other = stream(seed=0), stream(seed=1)
    assert read(one, 4, num_steps=13) != read(other, 4, num_steps=13)
    assert reds(one.validation.batches(3)) == reds(other.validation.batches(3))
    assert one.fingerprint == other.fingerprint


def test_draws_are_those_of_the_position(stream):
    [batch] = stream(random_flip=True).train.batches(4, first_step=2, num_steps=1, num_workers=2)
    [again] = stream(random_flip=True).train.batches(4, first_step=2, num_steps=1)
    assert batch.positions == again.positions == [8, 9, 10, 11]
    noise = batch.normal_like(batch["pixel_values"], "noise")
    assert torch.equal(noise, again.normal_like(again["pixel_values"], "noise"))


def test_a_split_for_validation_and_fewer_samples(stream, shards, png):
    write_parquet(shards / "validation-00000-of-00001.parquet", range(100, 105), png)
    data = stream(max_train_samples=9)
    assert reds(data.validation.batches(2)) == {0: 100, 1: 101, 2: 102}
    assert data.train.num_samples == 9
    assert sorted(read(data, 3, num_steps=3).values()) == list(range(9))


@pytest.mark.parametrize("count", [1, 7, 16, 53, 400])
@pytest.mark.parametrize("batch_size", [1, 6, 16, 50])
@pytest.mark.parametrize("lanes", [1, 3, 16])
def test_an_order_has_each_row_once(count, batch_size, lanes):
    starts = np.arange(0, count, 7)
    groups = Groups(starts + 1000, np.minimum(7, count - starts))
    order = GroupOrder(groups, seed=3, lanes=lanes, batch_size=batch_size)
    for epoch in range(2):
        assert sorted(order.row(epoch, place, 0) for place in range(count)) == list(range(1000, 1000 + count))


@pytest.mark.parametrize(("lanes", "readers", "reads"), [(16, 4, 400), (16, 16, 400), (16, 32, 800), (2, 4, 800)])
def test_each_reader_reads_its_own_part(lanes, readers, reads):
    """Of 400 row groups, where there are as many lanes as readers; otherwise those of a lane read the same ones."""
    groups = Groups(np.arange(0, 4000, 10), np.full(400, 10))
    order = GroupOrder(groups, seed=0, lanes=lanes, batch_size=32)
    read = [set() for _ in range(readers)]
    for place in range(4000):
        read[place % 32 * readers // 32].add(order.row(0, place, 0) // 10)
    assert set().union(*read) == set(range(400))
    assert reads <= sum(map(len, read)) <= reads + 4 * 16  # but for those at the ends of lanes


def test_a_batch_is_mixed_and_few_row_groups_are_open_at_a_time():
    groups = Groups(np.arange(0, 4000, 10), np.full(400, 10))
    order = GroupOrder(groups, seed=0, lanes=16, batch_size=32)
    batches = [[order.row(0, place, 0) // 10 for place in range(start, start + 32)] for start in range(0, 4000, 32)]
    assert all(len(set(batch)) >= 14 for batch in batches)
    opened, last = 0, set()
    for batch in batches:
        opened += len(set(batch) - last)
        last = set(batch)
    assert opened <= 400 + 2 * 16  # each once, but for those at the ends of lanes


def test_large_row_groups_are_few_in_memory(stream, monkeypatch):
    """Those of the places that a batch is mixed from, and two more where it goes from one to the next."""
    largest = max(size for file in stream().train.rows.source._files for _, size in file.groups)
    monkeypatch.setattr(shards_module, "_MEMORY", 3 * largest)
    read_group, in_memory, most = ShardTable.read_group, weakref.WeakSet(), []

    def counted(table, group):
        rows = read_group(table, group)
        in_memory.add(rows)
        most.append(len(in_memory))
        return rows

    monkeypatch.setattr(ShardTable, "read_group", counted)
    data = stream()
    read(data, 6, num_steps=24)
    assert max(most) == 3 + 2
    assert b"InMemoryTable" not in pickle.dumps(data.train.rows.source)  # none of them goes to a worker process


def test_what_can_not_be_read_is_passed_over(stream, load, shards, png):
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
    with pytest.raises(ValueError, match=r"row 1 of row group 1 of train-00002-of-00005\.parquet can not be read"):
        list(stream().train.batches(4, num_steps=13, num_workers=2))


def test_a_file_that_breaks_off_ends_the_run_in_a_sentence(stream, shards):
    data = stream()
    file = shards / "train-00003-of-00005.parquet"
    content = file.read_bytes()
    file.write_bytes(b"\0" * len(content))
    for workers in (0, 1):
        with pytest.raises(OSError, match=r"row group \d of train-00003-of-00005.parquet can not be used: ") as error:
            list(data.train.batches(4, num_steps=26, num_workers=workers))
        assert "\n" not in str(error.value)
    with pytest.raises(OSError, match=r"train-00003-of-00005\.parquet can not be read: "):
        stream()


def test_fewer_row_groups_than_readers_are_said(stream, caplog):
    data = stream(max_train_samples=10)  # of three row groups
    with caplog.at_level(logging.WARNING):
        assert sorted(read(data, 5, num_processes=2, num_steps=1, num_workers=2).values()) == list(range(10))
    [record] = caplog.records
    assert record.message == (
        "the data set has 3 row groups, and 4 processes x workers read it: each row still comes once in an epoch, but "
        "several of them read the same row groups"
    )


@pytest.mark.parametrize(
    ("processes", "workers", "accumulation", "said"),
    [(1, 0, 4, False), (3, 1, 1, False), (2, 2, 1, True), (2, 1, 2, True)],
)
def test_more_readers_than_places_are_said(stream, caplog, monkeypatch, processes, workers, accumulation, said):
    largest = max(size for file in stream().train.rows.source._files for _, size in file.groups)
    monkeypatch.setattr(shards_module, "_MEMORY", 3 * largest)
    with caplog.at_level(logging.WARNING):
        stream().train.batches(4, num_processes=processes, num_workers=workers, accumulation=accumulation)
    sentence = (
        "a step is of 3 places of the data set, and 4 processes x workers x accumulations share it: each row still "
        "comes once in an epoch, but several of them read the same row groups"
    )
    assert [record.message for record in caplog.records] == [sentence] * said


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


def test_tar_files(load, tars):
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
        with pytest.raises(OSError, match=r"1\.tar can not be read: "):
            load(train_data_dir=tars, **needs)


@pytest.fixture
def load_samples(load, tmp_path):
    """Loads a tar file of the samples that are given."""

    def run(samples, **settings):
        (tmp_path / "own").mkdir(exist_ok=True)
        with tarfile.open(tmp_path / "own" / "a.tar", "w") as tar:
            for number, files in enumerate(samples):
                add_sample(tar, f"{number:04}", files)
        return load(train_data_dir=tmp_path / "own", streaming=True, **settings)

    return run


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"cls": b"cat"}, r"a\.tar can not be read: 0007\.cls in it starts with b'cat', and has to be a whole number"),
        (
            {"txt": b"caf\xe9"},
            r"of a\.tar can not be used: 0007\.txt in it starts with b'caf\\xe9', and has to be text in UTF-8",
        ),
    ],
)
def test_a_file_of_a_sample_that_is_not_what_it_should_be_is_named(load_samples, png, files, sentence):
    samples = [{"png": png(), "cls": b"1", "txt": b"a"} for _ in range(20)]
    with pytest.raises(OSError, match=f"{sentence}$"):
        load_samples([*samples[:7], samples[7] | files, *samples[8:]], needs_labels=True, needs_captions=True)


def test_a_sample_without_an_image_like_the_first_is_one_that_can_not_be_read(load_samples, png):
    samples = [{"png": png((number, 0, 0))} for number in range(20)]
    samples[7] = {"jpg": png()}
    sentence = r"row 7 of row group 0 of a\.tar can not be read: column 'png' is empty there"
    with pytest.raises(ValueError, match=sentence):
        list(load_samples(samples).train.batches(4, num_steps=5))
    batches = list(load_samples(samples, on_bad_image="skip").train.batches(3, num_steps=6))
    assert {name for batch in batches for name in batch.unreadable} == {"row 7 of row group 0 of a.tar"}


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_captions_are_read_without_images(load, shards, tars, monkeypatch, kind):
    folder = shards if kind == "parquet" else tars
    data = load(train_data_dir=folder, streaming=True, validation_size=3, needs_labels=True, needs_captions=True)
    expected = [caption for index in data.train.indices for caption in data.train.rows.source.captions(index)]
    columns = []
    for file in (ParquetFile, TarFile):
        read = file.read
        monkeypatch.setattr(file, "read", lambda f, g, names, read=read: columns.append(names) or read(f, g, names))
    assert list(data.train.captions()) == expected
    assert len(columns) == len(data.train.groups.counts)
    assert set(map(tuple, columns)) == {("text",) if kind == "parquet" else ("txt",)}


def test_a_caption_that_is_missing_is_named_before_its_image_is_read(load, shards):
    file = shards / "train-00002-of-00005.parquet"
    table = pq.read_table(file)
    text = table.schema.field("text")
    table = table.set_column(2, text, pa.array([*table["text"].to_pylist()[:-1], " "], text.type))
    pq.write_table(table, file, row_group_size=4)
    data = load(train_data_dir=shards, streaming=True, needs_captions=True)
    sentence = r"row 2 of row group 2 of train-00002-of-00005\.parquet has no caption: column 'text' is ' ' there"
    with pytest.raises(OSError, match=sentence):
        list(data.train.captions())


class TestRefused:
    def test_without_a_data_set(self, load):
        with pytest.raises(ValueError, match="streaming needs a data set to read: dataset_name or train_data_dir"):
            load(streaming=True)

    def test_a_folder_without_parquet_files(self, load, image_folder):
        folder = image_folder(["1.png", "2.png"])
        with pytest.raises(ValueError, match="streaming reads parquet and tar files, and the folder pictures"):
            load(train_data_dir=folder, streaming=True)

    def test_files_of_different_columns(self, stream, shards, png):
        features = datasets.Features({**FEATURES, "label": datasets.Value("string")})
        write_parquet(shards / "train-00004-of-00005.parquet", range(4), png, features, label=str)
        with pytest.raises(ValueError, match=r"train-00004-of-00005.parquet has the columns .*label \(string\)"):
            stream()

    def test_classes_that_are_texts(self, load, tmp_path, png):
        features = datasets.Features({**FEATURES, "label": datasets.Value("string")})
        write_parquet(tmp_path / "named" / "a.parquet", range(8), png, features, label=str)
        with pytest.raises(ValueError, match=r"is of type string: to stream it, .* store it as datasets' ClassLabel"):
            load(train_data_dir=tmp_path / "named", streaming=True, needs_labels=True)

    def test_no_such_column(self, stream):
        with pytest.raises(ValueError, match=r"has no column 'txt' \(did you mean 'text'\?\); its columns:"):
            stream(caption_column="txt")


def test_classes_that_are_numbers_are_counted_without_reading_them(load, tmp_path, png):
    features = datasets.Features({**FEATURES, "label": datasets.Value("int32")})
    write_parquet(tmp_path / "numbers" / "a.parquet", range(9), png, features)
    write_parquet(tmp_path / "numbers" / "b.parquet", range(9, 18), png, features, label=lambda n: n % 7)
    data = load(train_data_dir=tmp_path / "numbers", streaming=True, needs_labels=True)
    assert (data.num_classes, data.class_names) == (7, None)


def test_classes_of_files_and_row_groups_without_rows(load, tmp_path, png):
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


def test_labels_that_are_all_missing(load, tmp_path, png):
    features = datasets.Features({**FEATURES, "label": datasets.Value("int32")})
    write_parquet(tmp_path / "numbers" / "a.parquet", range(9), png, features, label=lambda n: None)
    with pytest.raises(OSError, match=r"row 0 of row group 0 of a\.parquet has no label in column 'label'"):
        load(train_data_dir=tmp_path / "numbers", streaming=True, needs_labels=True)


HUB = """
import io, os, sys, tempfile
import datasets
from huggingface_hub import HfApi
from PIL import Image
from scalelong_diffusers.data import DataConfig, load_training_data

datasets.disable_progress_bars()


def png(n):
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (n, 0, 0)).save(file, "png")
    return {"bytes": file.getvalue(), "path": None}


api = HfApi()
api.create_repo("tester/large", repo_type="dataset")
features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
with tempfile.TemporaryDirectory() as folder:
    for k in range(4):
        numbers = range(8 * k, 8 * k + 8)
        columns = {"image": [png(n) for n in numbers], "label": [n % 2 for n in numbers]}
        table = datasets.Dataset.from_dict(columns, features=features)
        table.to_parquet(f"{folder}/data/train-{k:05}-of-00004.parquet", batch_size=4)
    api.upload_folder(repo_id="tester/large", repo_type="dataset", folder_path=folder)
    api.create_repo("tester/tars", repo_type="dataset")
    api.upload_file(path_or_fileobj=b"no tar", path_in_repo="0.tar", repo_id="tester/tars", repo_type="dataset")


def load(name, **settings):
    settings = DataConfig(
        dataset_name=name, streaming=True, resolution=8, validation_size=2, cache_dir="kept", **settings
    )
    return load_training_data(settings, channels=3, needs_labels=True, needs_captions=False, seed=0)


def numbers(**options):
    batches = data.train.batches(3, num_steps=10, **options)
    return [int((v + 1) * 127.5 + 0.5) for batch in batches for v in batch["pixel_values"][:, 0, 0, 0]]


data = load("tester/large")
print(data.description, data.train.num_samples, data.class_names)
once = numbers()
print(sorted(once), once == numbers(num_workers=2))
print([file for where, _, files in os.walk("kept") for file in files if file.endswith((".parquet", ".arrow"))])
for name in ("tester/tars", "tester/nothing"):
    try:
        load(name)
    except (OSError, ValueError) as error:
        print(type(error).__name__, str(error))
"""


def test_from_the_hub_without_a_copy_on_the_disk(hub):
    ended = hub(HUB)
    assert ended.stdout.splitlines() == [
        "tester/large, 32 images in 4 files 30 ['cat', 'dog']",
        f"{sorted({*range(32)} - {24, 25})} True",
        "[]",
        "ValueError from the Hub streaming reads parquet files, and the data set tester/tars has 0.tar; of many data "
        "sets the Hub keeps a copy that is: dataset_revision='refs/convert/parquet'",
        "FileNotFoundError there is no data set tester/nothing on the Hub that you may read; for a private or gated "
        "one log in with `hf auth login`, for a local folder give train_data_dir",
    ]
