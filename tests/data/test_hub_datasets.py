"""Datasets on the Hub: the real client in its own processes, with a Hub on loopback."""

import pytest


COMMON = """
import datasets, os, sys, tempfile
from huggingface_hub import HfApi
from PIL import Image
from scalelong_diffusers.data import DataConfig, load_training_data
from scalelong_diffusers.errors import UserError

datasets.disable_progress_bars()


def load(**settings):
    settings = DataConfig(resolution=8, **settings)
    return load_training_data(settings, channels=3, needs_labels=True, needs_captions=False, seed=0)


def print_error(**settings):
    try:
        load(**settings)
    except UserError as error:
        print(error)
"""

PUSH = (
    COMMON
    + """
def table(count, first=0):
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    images = [Image.new("RGB", (8, 8), (7 * (first + i), 0, 0)) for i in range(count)]
    return datasets.Dataset.from_dict({"img": images, "label": [i % 2 for i in range(count)]}, features=features)


api = HfApi()
api.create_repo("tester/pets", repo_type="dataset")
with tempfile.TemporaryDirectory() as folder:
    for config, count in (("small", 3), ("large", 20)):
        table(count).to_parquet(f"{folder}/{config}/train-00000-of-00001.parquet")
    table(5).to_parquet(f"{folder}/large/test-00000-of-00001.parquet")
    with open(f"{folder}/README.md", "w") as file:
        file.write("---\\nconfigs:\\n")
        for config in ("small", "large"):
            file.write(f"- config_name: {config}\\n  data_dir: {config}\\n")
        file.write("---\\n")
    api.upload_folder(repo_id="tester/pets", repo_type="dataset", folder_path=folder)
"""
)

IMAGES = """
api.create_repo("tester/images", repo_type="dataset")
with tempfile.TemporaryDirectory() as folder:
    for kind in ("cat", "dog"):
        os.mkdir(f"{folder}/{kind}")
        for k in range(2):
            Image.new("RGB", (8, 8)).save(f"{folder}/{kind}/{k}.png")
    api.upload_folder(repo_id="tester/images", repo_type="dataset", folder_path=folder)
data = load(dataset_name="tester/images", cache_dir="kept")
print(data.description, data.class_names)
"""

LOAD = """
data = load(dataset_name="tester/pets", dataset_config_name="large", dataset_revision="main", cache_dir="kept")
print(data.description, data.train.num_samples, data.validation.num_samples, data.class_names)
print(sorted({int(data.train[i].columns["pixel_values"][0, 0, 0]) // 7 for i in range(20)}))
print_error(dataset_name="tester/pets")
print_error(dataset_name="tester/pets", dataset_config_name="tiny")
print_error(dataset_name="tester/pets", dataset_revision="v2")
print_error(dataset_name="tester/birds")
"""

STREAM = """
api.create_repo("tester/large", repo_type="dataset")
with tempfile.TemporaryDirectory() as folder:
    for k in range(4):
        table(8, first=8 * k).to_parquet(f"{folder}/data/train-{k:05}-of-00004.parquet", batch_size=4)
    api.upload_folder(repo_id="tester/large", repo_type="dataset", folder_path=folder)
api.create_repo("tester/tars", repo_type="dataset")
api.upload_file(path_or_fileobj=b"not a tar", path_in_repo="0.tar", repo_id="tester/tars", repo_type="dataset")


def numbers(**options):
    batches = data.train.batches(3, num_steps=10, **options)
    return [round(float(v + 1) * 127.5 / 7) for batch in batches for v in batch["pixel_values"][:, 0, 0, 0]]


streamed = {"streaming": True, "validation_size": 2, "cache_dir": "streamed"}
data = load(dataset_name="tester/large", **streamed)
print(data.description, data.train.num_samples, data.class_names)
once = numbers()
print(sorted(once), once == numbers(), sorted(once) == sorted(numbers(num_workers=2)))
print([file for where, _, files in os.walk("streamed") for file in files if file.endswith((".parquet", ".arrow"))])
print_error(dataset_name="tester/tars", **streamed)
print_error(dataset_name="tester/nothing", **streamed)
"""

PRIVATE = "; if it is private or gated, log in with `hf auth login`; use train_data_dir for a local folder"

OFFLINE = (
    COMMON
    + """
data = load(dataset_name="tester/pets", dataset_config_name="large", cache_dir="kept")
print(data.description)
print_error(dataset_name="tester/birds", cache_dir="kept")
"""
)


@pytest.mark.slow
def test_loads_and_streams_datasets_from_the_hub_and_the_cache(hub):
    """Streaming leaves no copy of the files on the disk."""
    assert hub(PUSH + LOAD + IMAGES + STREAM).stdout.splitlines() == [
        "tester/pets, 20 images 20 5 ['cat', 'dog']",
        str(list(range(20))),
        "cannot load the dataset tester/pets: Config name is missing. Please pick one among the available configs: "
        "['small', 'large']; choose one with --dataset_config_name",
        "cannot load the dataset tester/pets: BuilderConfig 'tiny' not found. Available: ['small', 'large']; choose "
        "one with --dataset_config_name",
        "cannot load the dataset tester/pets: Revision 'v2' doesn't exist for dataset 'tester/pets' on the Hub"
        + PRIVATE,
        "cannot load the dataset tester/birds: Dataset 'tester/birds' doesn't exist on the Hub or cannot be accessed"
        + PRIVATE,
        "tester/images, 4 images ['cat', 'dog']",
        "tester/large, 32 images in 4 files 30 ['cat', 'dog']",
        f"{[*range(24), *range(26, 32)]} True True",
        "[]",
        "tester/tars has 0.tar, and only parquet files can be streamed from the Hub; try "
        "dataset_revision='refs/convert/parquet'",
        "cannot load the dataset tester/nothing: Dataset 'tester/nothing' doesn't exist on the Hub or cannot be "
        "accessed" + PRIVATE,
    ]
    assert hub(OFFLINE, HF_HUB_OFFLINE="1").stdout.splitlines() == [
        "tester/pets, 20 images",
        "cannot load the dataset tester/birds: Couldn't reach 'tester/birds' on the Hub (OfflineModeIsEnabled); check "
        "the connection and HF_HUB_OFFLINE",
    ]
