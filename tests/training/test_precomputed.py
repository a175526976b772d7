"""Training from features is training with the encoders in the loop, and no other features are taken for them."""

import json
import os
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
from scalelong_diffusers.data.precomputed import save_shard, shard_is_complete
from scalelong_diffusers.pipelines.text_encoding import CaptionEncoder
from scalelong_diffusers.train import (
    precompute_latents,
    train_class_conditional,
    train_text_to_image,
    train_unconditional,
)
from scalelong_diffusers.training import TrainingStopped, check_text_encoder
from scalelong_diffusers.training.small_clip import build_small_clip


SCRIPT = Path(__file__).parents[2] / "train" / "precompute_latents.py"
LATENT = {"sample_size": 8, "in_channels": 4, "patch_size": 2, "num_layers": 4, "num_attention_heads": 2}
IMAGES = {"resolution": 16, "center_crop": True, "random_flip": True}
TEXT = {"vocab_size": 520, "num_layers": 2, "num_attention_heads": 2, "context_length": 12}


def save_vae(folder, seed):
    torch.manual_seed(seed)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    diffusers.AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=4, **blocks).save_pretrained(folder)
    return folder


def save_clip(folder, seed):
    torch.manual_seed(seed)
    for part in build_small_clip(["a red circle"], 16, **TEXT):
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
def flags_of_precomputing(encoders, vae):
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
def precompute(flags_of_precomputing, fresh_accelerator, tmp_path):
    """`precompute(flag=value)` runs the script in this process, and returns the folder of features."""

    def run(output_dir=tmp_path / "features", **changes):
        fresh_accelerator()
        precompute_latents.main(flags_of_precomputing(output_dir, **changes))
        return output_dir

    return run


@pytest.fixture(scope="session")
def features(encoders, tmp_path_factory):
    """Of the built-in shapes, with all that can be precomputed; only to be read."""
    folder = tmp_path_factory.mktemp("precomputed") / "features"
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
    """Trains with the encoder in the loop and from features, and compares every loss that is logged."""

    def run(features, script, images, **changes):
        settings = {**vae, **IMAGES, **changes}
        in_the_loop = train(tmp_path / "in_the_loop", script=script, **{"num_shapes": None, **settings, **images})
        from_features = train(
            tmp_path / "from_features", script=script, precomputed_dir=features, **settings | {"num_shapes": None}
        )
        expected, lines = metrics_of(in_the_loop), metrics_of(from_features)
        assert len(lines) == 16
        for line, wanted in zip(lines, expected, strict=True):
            assert line.keys() == wanted.keys()
            for name in ("loss", "validation_loss", "validation_loss_raw"):
                assert line.get(name) == pytest.approx(wanted.get(name), abs=1e-6)

    return run


@pytest.mark.parametrize(
    ("script", "model"),
    [
        (train_unconditional, "model"),
        (train_class_conditional, "model_of_classes"),
        (train_text_to_image, "model_of_text"),
    ],
)
def test_every_loss_is_that_of_the_encoders_in_the_loop(both_ways, encoders, features, script, model):
    text = {"pretrained_text_encoder_name_or_path": encoders / "clip0"} if script is train_text_to_image else {}
    changes = {"model_config_name_or_path": encoders / model, "dataloader_num_workers": 1, **text}
    both_ways(features, script, {"num_shapes": 30}, **changes)


def test_with_a_validation_split_oblong_images_and_some_that_can_not_be_read(
    both_ways, precompute, encoders, tmp_path
):
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


def test_a_data_set_that_is_streamed_has_the_same_features(precompute, tmp_path):
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
    whole = precompute(tmp_path / "whole", **images)
    streamed = precompute(tmp_path / "streamed", **images, streaming=True)
    assert len(list(whole.glob("train-*"))) == 3
    for shard in whole.glob("*.safetensors"):
        columns, others = load_file(shard), load_file(streamed / shard.name)
        assert columns.keys() == others.keys()
        assert all(torch.equal(column, others[name]) for name, column in columns.items())
    [batch] = open_features(streamed).train.batches(16, num_steps=1)
    assert set(batch["captions"]) <= {f"number {n}" for n in range(10)}


def open_features(folder, needs_captions=True, needs_labels=False, **changes):
    settings = DataConfig(precomputed_dir=str(folder), **{**IMAGES, **changes})
    return load_training_data(settings, channels=3, needs_labels=needs_labels, needs_captions=needs_captions, seed=0)


def test_captions_are_those_of_the_images_and_have_the_hidden_states_of_the_encoder(features, encoders):
    data = open_features(features, needs_labels=True)
    settings = DataConfig(num_shapes=30, **IMAGES)
    images = load_training_data(settings, channels=3, needs_labels=True, needs_captions=True, seed=0)
    encoder = caption_encoder(encoders / "clip0")
    check_text_encoder(data, encoder, "clip0")
    for batch, wanted in zip(data.train.batches(9, num_steps=8), images.train.batches(9, num_steps=8), strict=True):
        assert batch["captions"] == wanted["captions"]
        assert torch.equal(batch["labels"], wanted["labels"])
        torch.testing.assert_close(batch["text_features"], encoder(batch["captions"]).detach(), rtol=0, atol=1e-6)
        left = ["" if row % 3 else caption for row, caption in enumerate(batch["captions"])]
        torch.testing.assert_close(data.features.text_states(batch, left), encoder(left).detach(), rtol=0, atol=1e-6)


def caption_encoder(folder, context_length=77):
    from transformers import CLIPTextModel, CLIPTokenizer

    model = UViTModel(hidden_size=16, cross_attention_dim=16, context_length=context_length, **LATENT)
    text_encoder = CLIPTextModel.from_pretrained(folder).requires_grad_(False)
    return CaptionEncoder(text_encoder, CLIPTokenizer.from_pretrained(folder), model)


def test_half_the_room(precompute, features):
    half = precompute(dtype="fp16")
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in (half, features)]
    assert sizes[0] < 0.65 * sizes[1]
    [batch] = open_features(half).train.batches(8, num_steps=1)
    [wanted] = open_features(features).train.batches(8, num_steps=1)
    assert batch["moments"].dtype == batch["text_features"].dtype == torch.float32
    torch.testing.assert_close(batch["moments"], wanted["moments"], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_killed_in_two_processes_and_gone_on_with(launch_script, flags_of_precomputing, precompute, tmp_path):
    folder = tmp_path / "features"
    arguments = flags_of_precomputing(folder, rows_per_shard=1, num_shapes=160)
    running = launch_script([SCRIPT, *arguments], processes=2)
    deadline = time.monotonic() + 100
    while len(list(folder.glob("train-*"))) < 6:
        assert running.process.poll() is None, running.process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    running.kill()
    before = {file.name: file.stat().st_ino for file in folder.glob("train-*")}
    assert 6 <= len(before) < 160
    assert not json.loads((folder / "index.json").read_text())["finished"]
    broken = folder / sorted(before)[2]
    broken.write_bytes(broken.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match=r"unfinished: run the same precompute_latents\.py command again"):
        open_features(folder)
    code, printed, errors = launch_script([SCRIPT, *arguments], processes=2).wait()
    assert code == 0, errors
    assert printed.count("the built-in shapes, 160 images") == 1
    after = {file.name: file.stat().st_ino for file in folder.glob("train-*")}
    assert len(after) == 160
    assert {name for name in before if after[name] != before[name]} <= {broken.name}
    assert not list(folder.glob(".*"))
    open_features(folder, num_shapes=160)
    whole = precompute(tmp_path / "whole", num_shapes=160)
    one, other = (open_features(where).train.batches(50, num_steps=8) for where in (folder, whole))
    for batch, wanted in zip(one, other, strict=True):
        assert batch["captions"] == wanted["captions"]
        torch.testing.assert_close(batch["moments"], wanted["moments"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"resolution": 32}, r"are of images with resolution=16, and resolution=32 is asked for"),
        ({"center_crop": False}, r"with center_crop=True, and center_crop=False is asked for"),
        ({"image_interpolation_mode": "box", "crop_size": 12}, r"crop_size=None, interpolation='lanczos', and crop_"),
    ],
)
def test_features_of_other_images_are_refused(features, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        open_features(features, **changes)


def test_what_was_not_precomputed_is_refused(precompute):
    folder = precompute(pretrained_text_encoder_name_or_path=None, with_labels=False, random_flip=False)
    with pytest.raises(
        ValueError, match="have no mirrored images for random_flip: precompute them with --random_flip"
    ):
        open_features(folder, needs_captions=False)
    with pytest.raises(ValueError, match="have no classes: precompute them with --with_labels"):
        open_features(folder, needs_labels=True, random_flip=False)
    with pytest.raises(ValueError, match="have no captions: precompute them with --pretrained_text_encoder_name_or_"):
        open_features(folder, random_flip=False)


def test_scripts_refuse_in_one_sentence(refused, features, encoders, vae, network, tmp_path):
    settings = {**IMAGES, "precomputed_dir": features, "model_config_name_or_path": encoders / "model"}
    other = refused(**settings, pretrained_vae_model_name_or_path=encoders / "vae1")
    assert f"were made by the autoencoder {encoders / 'vae0'} (weights" in other
    assert f"and {encoders / 'vae1'} (weights" in other
    assert f"give --pretrained_vae_model_name_or_path {encoders / 'vae0'}" in refused(**settings)
    assert "there is no index.json in" in refused(**settings | {"precomputed_dir": tmp_path}, **vae)
    assert "are both given; train on one of them" in refused(**settings, **vae, train_data_dir="pictures")
    evaluated = {"eval_steps": 2, "eval_features": network}
    assert "which --precomputed_dir does not have: give --eval_reference" in refused(**settings, **vae, **evaluated)


def test_another_text_encoder_is_refused(features, encoders):
    data = open_features(features)
    with pytest.raises(ValueError, match=r"made by the text_encoder .*clip0 .* and clip1 \(weights"):
        check_text_encoder(data, caption_encoder(encoders / "clip1"), "clip1")
    with pytest.raises(
        ValueError, match="of captions of 12 tokens, and the model takes 7: make it with context_length"
    ):
        check_text_encoder(data, caption_encoder(encoders / "clip0", context_length=7), "clip0")
    trained = caption_encoder(encoders / "clip0")
    trained.text_encoder.requires_grad_(True)
    with pytest.raises(ValueError, match="this one is to be trained: leave --train_text_encoder out and give"):
        check_text_encoder(data, trained, "clip0")


@pytest.fixture
def damaged(features, tmp_path):
    return shutil.copytree(features, tmp_path / "damaged")


def test_broken_folders_are_refused(damaged):
    shard = damaged / "train-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match=r"train-00002.safetensors has [\d,]+ bytes, and had [\d,]+; run the same"):
        open_features(damaged)
    shard.unlink()
    with pytest.raises(ValueError, match=r"train-00002.safetensors is missing"):
        open_features(damaged)
    index = json.loads((damaged / "index.json").read_text())
    (damaged / "index.json").write_text(json.dumps({**index, "format_version": 7}))
    with pytest.raises(ValueError, match="has format_version 7, and 2 can be read"):
        open_features(damaged)


def test_a_byte_that_is_not_what_was_written_ends_the_run(train, damaged, encoders, vae, tmp_path):
    for shard in damaged.glob("train-*"):  # it is found whichever rows are read
        content = bytearray(shard.read_bytes())
        start = 8 + int.from_bytes(content[:8], "little")
        for i in range(start, len(content), 700):
            content[i] ^= 1
        shard.write_bytes(content)
    settings = {**IMAGES, **vae, "precomputed_dir": damaged, "model_config_name_or_path": encoders / "model"}
    with pytest.raises(
        TrainingStopped, match=r"is not what was written: run the same precompute_latents\.py"
    ) as stopped:
        train(tmp_path / "run", **settings)
    assert stopped.value.exit_code == 2


def test_any_bit_that_is_not_what_was_written_is_seen(tmp_path):
    """Also one of a class, of a caption or of the header."""
    columns = {
        "moments": torch.randn(3, 2, 1, 1),
        "labels": torch.tensor([0, 1, 2]),
        "text_features": torch.randn(4, 1, 2),
    }
    whole, shard = tmp_path / "whole.safetensors", tmp_path / "shard.safetensors"
    save_shard(whole, columns, [["a"], ["b", "c"], ["d"]], {1: "it is no image"})
    assert shard_is_complete(whole)
    content = whole.read_bytes()
    for place, byte in enumerate(content):
        shard.write_bytes(content[:place] + bytes([byte ^ 1 << place % 8]) + content[place + 1 :])
        assert not shard_is_complete(shard), (place, content[max(0, place - 20) : place + 20])


@pytest.mark.parametrize("part", ["labels", "captions", "empty caption"])
def test_what_is_not_what_was_written_is_named_and_made_anew(precompute, damaged, part):
    file = damaged / ("empty_caption.safetensors" if part == "empty caption" else "train-00001.safetensors")
    content = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    if part == "captions":
        content[content.index(b'"captions":"[[') + len(b'"captions":"[')] ^= 1  # no valid JSON any longer
    else:
        name = "labels" if part == "labels" else "text_features"
        content[header + json.loads(content[8:header])[name]["data_offsets"][0]] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{file.name} is not what was written: run the same precompute_latents"):
        list(open_features(damaged, needs_labels=True).train.batches(9, num_steps=3))
    precompute(damaged)
    list(open_features(damaged, needs_labels=True).train.batches(9, num_steps=3))


def test_precomputing_refuses(precompute, features, encoders, capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        precompute(center_crop=False)
    assert stopped.value.code == 2
    assert "one crop of each image, not of a new one in each epoch: give --center_crop" in capsys.readouterr().err
    with pytest.raises(
        TrainingStopped, match=r"holds other features: autoencoder was .*vae0.* and is .*vae1"
    ) as stopped:
        precompute(features, pretrained_vae_model_name_or_path=encoders / "vae1")
    assert stopped.value.exit_code == 2
    with pytest.raises(TrainingStopped, match="is not empty and holds no features"):
        precompute(encoders)
    with pytest.raises(TrainingStopped, match="is no AutoencoderKL"):
        precompute(tmp_path / "other", pretrained_vae_model_name_or_path=encoders / "clip0")


@pytest.fixture
def sixty_images(tmp_path):
    """Of which the thirteenth can not be read, and is none of those that are looked at before encoding begins."""
    (tmp_path / "images").mkdir()
    for number in range(60):
        Image.new("RGB", (16, 16), (4 * number, 80, 0)).save(tmp_path / "images" / f"{number:02}.png")
    (tmp_path / "images" / "12.png").write_bytes(b"\x89PNG nothing")
    images = {"train_data_dir": tmp_path / "images", "cache_dir": tmp_path / "cache", "num_shapes": None}
    return {**images, "pretrained_text_encoder_name_or_path": None, "with_labels": False}


def test_features_are_not_lost_at_an_image_that_can_not_be_read(precompute, sixty_images, tmp_path):
    folder = tmp_path / "features"
    with pytest.raises(TrainingStopped, match=r"12\.png can not be read: .*; on_bad_image='skip' leaves it out$"):
        precompute(folder, **sixty_images)
    before = {file: file.stat().st_mtime_ns for file in folder.glob("train-*")}
    assert len(before) == 1
    precompute(folder, **sixty_images, on_bad_image="skip")
    assert before.items() <= {file: file.stat().st_mtime_ns for file in folder.glob("train-*")}.items()
    batches = open_features(folder, needs_captions=False, on_bad_image="skip").train.batches(9, num_steps=6)
    assert [name for batch in batches for name in batch.unreadable] == [f"row 12 of the train split of {folder}"]


@pytest.mark.slow
def test_an_image_that_another_process_can_not_read_is_named_once(
    launch_script, flags_of_precomputing, sixty_images, tmp_path
):
    arguments = flags_of_precomputing(tmp_path / "features", **sixty_images)
    code, _, errors = launch_script([SCRIPT, *arguments], processes=2).wait()
    assert code != 0
    named = [line for line in errors.splitlines() if "12.png can not be read" in line]
    assert len(named) == 1
    assert named[0].startswith("precompute_latents: ")
    assert named[0].endswith("on_bad_image='skip' leaves it out")
    assert "Connection closed" not in errors
    # The first turn of both is over; the other process did not go on alone.
    assert {file.name for file in (tmp_path / "features").glob("train-*")} == {"train-00000.safetensors"}


def test_finished_features_are_kept_as_they_are(precompute, features):
    before = {file.name: file.stat().st_mtime_ns for file in features.glob("train-*")}
    precompute(features)
    assert {file.name: file.stat().st_mtime_ns for file in features.glob("train-*")} == before
    assert os.path.exists(features / "index.json")
