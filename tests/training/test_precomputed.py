"""Precomputed latents: training with them equals training with the encoders, and other or damaged data is rejected."""

import json
import shutil
import time
from pathlib import Path

import datasets
import diffusers
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from scalelong_diffusers import UViTModel
from scalelong_diffusers.data import DataConfig, load_training_data
from scalelong_diffusers.data.precomputed import is_complete_shard, read_index, save_shard
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.pipelines.text_encoding import CaptionEncoder
from scalelong_diffusers.train import (
    precompute_latents,
    train_class_conditional,
    train_text_to_image,
    train_unconditional,
)
from scalelong_diffusers.training import TrainingStopped
from scalelong_diffusers.training.latents import check_text_encoder
from scalelong_diffusers.training.small_clip import build_text_model, build_tokenizer


SCRIPT = Path(__file__).parents[2] / "train" / "precompute_latents.py"
LATENT = {"sample_size": 8, "in_channels": 4, "patch_size": 2, "num_layers": 4, "num_attention_heads": 2}
IMAGES = {"resolution": 16, "center_crop": True, "random_flip": True}


def save_vae(folder, seed):
    torch.manual_seed(seed)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    diffusers.AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=4, **blocks).save_pretrained(folder)
    return folder


def save_clip(folder, seed):
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(["a red circle"], context_length=12, vocab_size=520)
    for part in (build_text_model(tokenizer, 16, num_layers=2, num_attention_heads=2), tokenizer):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def encoders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoders")
    for seed in (0, 1):
        save_vae(folder / f"vae{seed}", seed)
        save_clip(folder / f"clip{seed}", seed)
    UViTModel(hidden_size=16, **LATENT).save_config(folder / "model")
    UViTModel(hidden_size=16, num_class_embeds=31, **LATENT).save_config(folder / "model_of_classes")
    UViTModel(hidden_size=16, cross_attention_dim=16, context_length=12, **LATENT).save_config(
        folder / "model_of_text"
    )
    return folder


@pytest.fixture
def vae(encoders):
    return {"pretrained_vae_model_name_or_path": encoders / "vae0"}


@pytest.fixture
def precompute_flags(encoders, vae):
    def flags(output_dir, **changes):
        text = {"pretrained_text_encoder_name_or_path": encoders / "clip0"}
        settings = {**IMAGES, **vae, **text, "num_shapes": 30, "rows_per_shard": 8, "batch_size": 5} | changes
        return flags_of(output_dir=output_dir, **{"with_labels": True, **settings})

    return flags


def flags_of(**settings):
    words = []
    for name, value in settings.items():
        if value is not None and value is not False:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


@pytest.fixture
def precompute(precompute_flags, fresh_accelerator, tmp_path):
    """`precompute(flag=value)` runs the script in this process and returns its output folder."""

    def run(output_dir=tmp_path / "latents", **changes):
        fresh_accelerator()
        precompute_latents.main(precompute_flags(output_dir, **changes))
        return output_dir

    return run


@pytest.fixture(scope="session")
def latents(encoders, tmp_path_factory):
    """A folder with all columns of the built-in shapes. Tests only read it."""
    folder = tmp_path_factory.mktemp("precomputed") / "latents"
    precompute_latents.main(
        flags_of(
            **IMAGES,
            pretrained_vae_model_name_or_path=encoders / "vae0",
            pretrained_text_encoder_name_or_path=encoders / "clip0",
            **{"num_shapes": 30, "rows_per_shard": 8, "batch_size": 5, "with_labels": True, "output_dir": folder},
        )
    )
    return folder


@pytest.fixture
def both_ways(train, encoders, vae, metrics_of, tmp_path):
    """Train with the encoder in the loop and from precomputed latents, and compare all logged losses."""

    def run(folder, script, images, **changes):
        settings = {**vae, **IMAGES, **changes}
        in_the_loop = train(tmp_path / "in_the_loop", script=script, **{"num_shapes": None, **settings, **images})
        precomputed = train(
            tmp_path / "precomputed", script=script, precomputed_dir=folder, **settings | {"num_shapes": None}
        )
        expected, lines = metrics_of(in_the_loop), metrics_of(precomputed)
        assert len(lines) == 16
        for line, wanted in zip(lines, expected, strict=True):
            assert line.keys() == wanted.keys()
            for name in ("loss", "validation_loss", "validation_loss_raw"):
                assert line.get(name) == pytest.approx(wanted.get(name), abs=1e-6)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "model"),
    [
        (train_unconditional, "model"),
        (train_class_conditional, "model_of_classes"),
        (train_text_to_image, "model_of_text"),
    ],
)
def test_training_equals_training_with_the_encoders(both_ways, encoders, latents, script, model):
    text = {"pretrained_text_encoder_name_or_path": encoders / "clip0"} if script is train_text_to_image else {}
    changes = {"model_config_name_or_path": encoders / model, "dataloader_num_workers": 1, **text}
    both_ways(latents, script, {"num_shapes": 30}, **changes)


@pytest.mark.slow
def test_training_equals_training_with_the_encoders_with_unreadable_images(both_ways, precompute, encoders, tmp_path):
    for split, count in (("train", 22), ("validation", 6)):
        (tmp_path / "images" / split).mkdir(parents=True)
        for i in range(count):
            image = Image.linear_gradient("L").resize((20 + i, 30)).rotate(90 * i)
            Image.merge("RGB", (image, image, image.point(lambda v, i=i: (v * i) % 256))).save(
                tmp_path / "images" / split / f"{i:02}.png"
            )
    for broken in ("train/03.png", "train/11.png", "validation/00.png"):
        (tmp_path / "images" / broken).write_bytes(b"\x89PNG nothing")
    images = {"train_data_dir": tmp_path / "images", "cache_dir": tmp_path / "cache"}
    changes = {"on_bad_image": "skip", "crop_size": 20}
    without = {"pretrained_text_encoder_name_or_path": None, "num_shapes": None}
    folder = precompute(**images, **changes, **without, with_labels=False)
    assert json.loads((folder / "index.json").read_text())["splits"]["validation"]["rows"] == 6
    both_ways(folder, train_unconditional, images, **changes, model_config_name_or_path=encoders / "model")


def test_streamed_datasets_give_the_same_latents(precompute, tmp_path):
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "text": datasets.Value("string"),
        }
    )
    for i in range(2):
        images = [Image.new("RGB", (16, 16), (9 * n, 80, 200 - n)) for n in range(10 * i, 10 * i + 10)]
        rows = {"image": images, "label": [0, 1] * 5, "text": [f"number {n}" for n in range(10)]}
        table = datasets.Dataset.from_dict(rows, features=features)
        (tmp_path / "images").mkdir(exist_ok=True)
        table.to_parquet(tmp_path / "images" / f"train-{i}.parquet", batch_size=4)
    images = {"train_data_dir": tmp_path / "images", "cache_dir": tmp_path / "cache", "num_shapes": None}
    prepared = precompute(tmp_path / "prepared", **images)
    streamed = precompute(tmp_path / "streamed", **images, streaming=True)
    assert len(list(prepared.glob("train-*"))) == 3
    for shard in prepared.glob("*.safetensors"):
        columns, others = load_file(shard), load_file(streamed / shard.name)
        assert columns.keys() == others.keys()
        assert all(torch.equal(column, others[name]) for name, column in columns.items())
    [batch] = load(streamed).train.batches(16, num_steps=1)
    assert set(batch["captions"]) <= {f"number {n}" for n in range(10)}


def load(folder, needs_captions=True, needs_labels=False, **changes):
    config = DataConfig(precomputed_dir=folder, **{**IMAGES, **changes})
    return load_training_data(config, channels=3, needs_labels=needs_labels, needs_captions=needs_captions, seed=0)


def test_batches_have_labels_captions_and_text_states(latents, encoders):
    data = load(latents, needs_labels=True)
    images = load_training_data(
        DataConfig(num_shapes=30, **IMAGES), channels=3, needs_labels=True, needs_captions=True, seed=0
    )
    encoder = caption_encoder(encoders / "clip0")
    check_text_encoder(data, encoder, "clip0")
    for batch, wanted in zip(data.train.batches(9, num_steps=8), images.train.batches(9, num_steps=8), strict=True):
        assert batch["captions"] == wanted["captions"]
        assert torch.equal(batch["labels"], wanted["labels"])
        expected = encoder(batch["captions"]).detach()
        torch.testing.assert_close(batch["text_states"], expected, rtol=0, atol=1e-6)
        dropped = torch.arange(9) % 3 == 1
        expected[dropped] = encoder([""]).detach()
        states = data.precomputed.text_states(batch, dropped)
        torch.testing.assert_close(states, expected, rtol=0, atol=1e-6)


def caption_encoder(folder, context_length=77):
    from transformers import CLIPTextModel, CLIPTokenizer

    model = UViTModel(hidden_size=16, cross_attention_dim=16, context_length=context_length, **LATENT)
    text_encoder = CLIPTextModel.from_pretrained(folder).requires_grad_(False)
    return CaptionEncoder(text_encoder, CLIPTokenizer.from_pretrained(folder), model)


def test_fp16_halves_the_size(precompute, latents):
    half = precompute(dtype="fp16")
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in (half, latents)]
    assert sizes[0] < 0.65 * sizes[1]
    [batch] = load(half).train.batches(8, num_steps=1)
    [wanted] = load(latents).train.batches(8, num_steps=1)
    assert batch["moments"].dtype == batch["text_states"].dtype == torch.float32
    torch.testing.assert_close(batch["moments"], wanted["moments"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resolution": 32}, r"holds latents of images with resolution=16, got 32"),
        ({"center_crop": False}, r"with center_crop=True, got False"),
        (
            {"image_interpolation_mode": "box", "crop_size": 12},
            r"crop_size=None, got 12",
        ),
    ],
)
def test_rejects_other_transforms(latents, changes, message):
    with pytest.raises(UserError, match=message):
        load(latents, **changes)


def test_rejects_missing_columns(precompute):
    folder = precompute(pretrained_text_encoder_name_or_path=None, with_labels=False, random_flip=False)
    with pytest.raises(UserError, match="have no mirrored images for random_flip: precompute with --random_flip"):
        load(folder, needs_captions=False)
    with pytest.raises(UserError, match="have no classes: precompute with --with_labels"):
        load(folder, needs_labels=True, random_flip=False)
    with pytest.raises(UserError, match="have no captions: precompute with --pretrained_text_encoder_name_or_"):
        load(folder, random_flip=False)


@pytest.mark.slow
def test_scripts_reject_other_encoders_and_folders(train, latents, encoders, vae, network, tmp_path):
    valid = {**IMAGES, **vae, "precomputed_dir": latents, "model_config_name_or_path": encoders / "model"}
    for changes, message in (
        (
            {"pretrained_vae_model_name_or_path": encoders / "vae1"},
            rf"computed with the autoencoder {encoders / 'vae0'} \(weights .* got {encoders / 'vae1'} \(weights",
        ),
        (
            {"pretrained_vae_model_name_or_path": None},
            f"--pretrained_vae_model_name_or_path {encoders / 'vae0'}",
        ),
        ({"precomputed_dir": tmp_path}, "holds no precomputed latents"),
        ({"eval_steps": 2, "eval_features": network}, "--eval_reference"),
    ):
        with pytest.raises(UserError, match=message):
            train(tmp_path / "rejected", **valid | changes)
        assert not (tmp_path / "rejected").is_dir()


def test_rejects_other_text_encoders(latents, encoders):
    data = load(latents)
    with pytest.raises(ValueError, match=r"computed with the text_encoder .*clip0 .* got clip1 \(weights"):
        check_text_encoder(data, caption_encoder(encoders / "clip1"), "clip1")
    with pytest.raises(ValueError, match="context_length=12"):
        check_text_encoder(data, caption_encoder(encoders / "clip0", context_length=7), "clip0")
    trained = caption_encoder(encoders / "clip0")
    trained.text_encoder.requires_grad_(True)
    with pytest.raises(ValueError, match="--train_text_encoder"):
        check_text_encoder(data, trained, "clip0")


@pytest.fixture
def damaged(latents, tmp_path):
    return shutil.copytree(latents, tmp_path / "damaged")


def test_rejects_damaged_folders(damaged):
    shard = damaged / "train-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(
        UserError, match=r"train-00002.safetensors is damaged, it should have [\d,]+ bytes: run the same"
    ):
        load(damaged)
    shard.unlink()
    with pytest.raises(UserError, match=r"train-00002.safetensors is damaged \(.*No such file"):
        load(damaged)
    index = json.loads((damaged / "index.json").read_text())
    (damaged / "index.json").write_text(json.dumps({**index, "format_version": 7}))
    with pytest.raises(UserError, match="must have format_version 4, got 7"):
        load(damaged)


def test_rejects_an_index_with_a_flipped_bit(damaged):
    index = damaged / "index.json"
    content = index.read_bytes()
    for place in range(0, len(content), 7):
        index.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        with pytest.raises(
            UserError, match=r"index\.json (is not valid JSON|has changed since|must have format_version)"
        ):
            read_index(damaged)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_stops_at_damaged_bytes(damaged, num_workers):
    for shard in damaged.glob("train-*"):
        content = bytearray(shard.read_bytes())
        start = 8 + int.from_bytes(content[:8], "little")
        for i in range(start, len(content), 700):
            content[i] ^= 1
        shard.write_bytes(content)
    with pytest.raises(UserError, match=r"is damaged( in entry .*)?: run the same precompute_latents\.py") as caught:
        list(load(damaged).train.batches(4, num_steps=3, num_workers=num_workers))
    assert "\n" not in str(caught.value)


def test_checksums_detect_any_flipped_bit(tmp_path):
    columns = {
        "moments": torch.randn(3, 2, 1, 1),
        "labels": torch.tensor([0, 1, 2]),
        "text_states": torch.randn(4, 1, 2),
    }
    shard = tmp_path / "shard.safetensors"
    save_shard(shard, columns, [["a"], ["b", "c"], ["d"]], {1: "not an image"})
    assert is_complete_shard(shard)
    content = shard.read_bytes()
    for place, byte in enumerate(content):
        shard.write_bytes(content[:place] + bytes([byte ^ 1 << place % 8]) + content[place + 1 :])
        assert not is_complete_shard(shard), (place, content[max(0, place - 20) : place + 20])


@pytest.mark.parametrize("part", ["labels", "captions", "empty caption"])
def test_names_and_rewrites_damaged_files(precompute, damaged, part):
    file = damaged / ("empty_caption.safetensors" if part == "empty caption" else "train-00001.safetensors")
    content = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    if part == "captions":
        content[content.index(b'"captions":"[[') + len(b'"captions":"[')] ^= 1  # the JSON becomes invalid
    else:
        name = "labels" if part == "labels" else "text_states"
        content[header + json.loads(content[8:header])[name]["data_offsets"][0]] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=rf"{file.name} is damaged: run the same precompute_latents"):
        list(load(damaged, needs_labels=True).train.batches(9, num_steps=3))
    precompute(damaged)
    list(load(damaged, needs_labels=True).train.batches(9, num_steps=3))


def test_precomputing_rejects_invalid_settings(precompute, latents, encoders, capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        precompute(center_crop=False)
    assert stopped.value.code == 2
    assert "center_crop must be on: latents are computed from a single crop" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"or precomputed latents: autoencoder was .*vae0.* and is now .*vae1"):
        precompute(latents, pretrained_vae_model_name_or_path=encoders / "vae1")
    with pytest.raises(UserError, match=r"it has no index.json; use the same settings, or another"):
        precompute(encoders)
    with pytest.raises(UserError, match="/latents is inside the data folder"):
        precompute(tmp_path / "latents", train_data_dir=tmp_path, num_shapes=None)
    with pytest.raises(UserError, match="AutoencoderKL"):
        precompute(tmp_path / "other", pretrained_vae_model_name_or_path=encoders / "clip0")


@pytest.fixture
def make_images(tmp_path):
    """Save a folder of images, one of which cannot be read. Return flags for it."""

    def run(count, unreadable):
        (tmp_path / "images").mkdir()
        for number in range(count):
            Image.new("RGB", (16, 16), (number, 80, 0)).save(tmp_path / "images" / f"{number:03}.png")
        (tmp_path / "images" / f"{unreadable:03}.png").write_bytes(b"\x89PNG nothing")
        images = {"train_data_dir": tmp_path / "images", "cache_dir": tmp_path / "cache", "num_shapes": None}
        return {**images, "pretrained_text_encoder_name_or_path": None, "with_labels": False}

    return run


def test_keeps_shards_after_an_unreadable_image(precompute, make_images, tmp_path):
    images = make_images(60, unreadable=12)  # not among the images that are read before encoding
    folder = tmp_path / "latents"
    with pytest.raises(UserError, match=r"012\.png cannot be read: .*; --on_bad_image skip leaves them out$"):
        precompute(folder, **images)
    before = {file: file.stat().st_mtime_ns for file in folder.glob("train-*")}
    assert len(before) == 1
    precompute(folder, **images, on_bad_image="skip")
    assert before.items() <= {file: file.stat().st_mtime_ns for file in folder.glob("train-*")}.items()
    batches = load(folder, needs_captions=False, on_bad_image="skip").train.batches(9, num_steps=6)
    assert [name for batch in batches for name in batch.unreadable] == [f"row 12 of the train split of {folder}"]


@pytest.mark.slow
def test_resumes_two_killed_processes(launch_script, precompute_flags, precompute, make_images, tmp_path):
    images = make_images(160, unreadable=150) | {"rows_per_shard": 1}
    folder = tmp_path / "latents"
    command = [SCRIPT, *precompute_flags(folder, **images)]
    running = launch_script(command, processes=2)
    deadline = time.monotonic() + 100
    while len(list(folder.glob("train-*"))) < 6:
        assert running.process.poll() is None, running.process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    running.kill()
    before = {file.name: file.stat().st_ino for file in folder.glob("train-*")}
    assert 6 <= len(before) < 150
    assert not json.loads((folder / "index.json").read_text())["finished"]
    damaged = folder / sorted(before)[2]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match=r"are unfinished: run the same precompute_latents\.py command again"):
        load(folder)

    # Both processes resume, and stop together at an unreadable image.
    code, _, errors = launch_script(command, processes=2).wait()
    assert code != 0
    [line] = {line for line in errors.splitlines() if "150.png cannot be read" in line}
    assert line.startswith("precompute_latents: ")
    assert line.endswith("--on_bad_image skip leaves them out")
    assert "Connection closed" not in errors
    numbers = {int(file.name[6:11]) for file in folder.glob("train-*")}
    assert numbers == {*range(150), 151}

    # A single process finishes.
    precompute(folder, **images, on_bad_image="skip")
    after = {file.name: file.stat().st_ino for file in folder.glob("train-*")}
    assert len(after) == 160
    assert {name for name in before if after[name] != before[name]} <= {damaged.name}
    assert not list(folder.glob(".*"))
    uninterrupted = precompute(tmp_path / "uninterrupted", **images, on_bad_image="skip")
    options = {"needs_captions": False, "on_bad_image": "skip"}
    one, other = (load(where, **options).train.batches(50, num_steps=8) for where in (folder, uninterrupted))
    for batch, expected in zip(one, other, strict=True):
        torch.testing.assert_close(batch["moments"], expected["moments"], rtol=0, atol=1e-5)


def test_interruption_says_how_to_resume(precompute, monkeypatch, tmp_path):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(precompute_latents.PrecomputedWriter, "write", interrupt)
    with pytest.raises(TrainingStopped, match="run the same command again to resume") as stopped:
        precompute(tmp_path / "interrupted")
    assert stopped.value.exit_code == 130


def test_keeps_finished_shards(precompute, latents):
    before = {file.name: file.stat().st_mtime_ns for file in latents.glob("train-*")}
    precompute(latents)
    assert {file.name: file.stat().st_mtime_ns for file in latents.glob("train-*")} == before


def test_removes_only_its_own_leftovers(precompute, tmp_path):
    """A process was killed while it wrote the first index, and another one while it wrote a shard."""
    folder = tmp_path / "latents"
    leftover = folder / ".scalelong-partial-0123"
    for name in ("index.json", "train-00000.safetensors"):
        leftover.mkdir(parents=True)
        (leftover / name).write_text("{")
        precompute(folder)
        assert not leftover.exists()
        (folder / ".tmp-notes").write_text("mine")
    assert (folder / ".tmp-notes").read_text() == "mine"
