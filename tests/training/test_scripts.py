"""The scripts from a dataset to a pipeline folder: models, data, latents, trackers, ways to start, and the Hub."""

import json
import subprocess
import sys

import pytest
import torch
from diffusers import AutoencoderKL, DDPMPipeline, DDPMScheduler, DiffusionPipeline
from PIL import Image

from scalelong_diffusers import (
    ScaleLongClassConditionalPipeline,
    ScaleLongUnconditionalPipeline,
    UViTModel,
    skip_connections,
)
from scalelong_diffusers.cli import main as scalelong
from scalelong_diffusers.data import SHAPE_CLASSES, DataConfig, load_training_data
from scalelong_diffusers.presets import PRESETS
from scalelong_diffusers.train import train_class_conditional
from scalelong_diffusers.training.latents import encode_images


FAST = {"max_train_steps": 4, "sample_steps": 4, "num_samples": 4, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vae")
    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    model = AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=4, scaling_factor=0.5, **blocks)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def unconditional(train_once, tmp_path_factory):
    """A short unconditional run. Tests only read it."""
    return train_once(tmp_path_factory.mktemp("unconditional") / "run", **FAST, report_to="tensorboard")


def size_of(file):
    with Image.open(file) as image:
        return image.size


@pytest.mark.slow
def test_unconditional(unconditional):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pipe = ScaleLongUnconditionalPipeline.from_pretrained(unconditional)
    assert skip_connections(pipe).config.method == "cs"
    (image,) = pipe(num_inference_steps=2).images
    assert image.size == (8, 8)
    assert size_of(unconditional / "samples" / "step-000004.png") == (256, 256)
    run = {"checkpoint-4", "metrics.jsonl", "samples", "settings.json", "logs"}
    assert {path.name for path in unconditional.iterdir()} == {"model_index.json", "scheduler", "unet"} | run
    events = EventAccumulator(str(next((unconditional / "logs").rglob("events.out.tfevents.*")).parent))
    events.Reload()
    (logged,) = events.Images("samples")
    assert (logged.step, logged.width, logged.height) == (4, 256, 256)


@pytest.mark.slow
def test_settings_are_printed_and_saved(train, unconditional, tmp_path, capsys):
    folder = train(tmp_path / "run", **{**FAST, "sample_steps": 0}, train_batch_size=2, gradient_accumulation_steps=2)
    printed = capsys.readouterr().out
    settings = json.loads((folder / "settings.json").read_text())
    for name, value in settings.items():
        assert f"{name}: {value}\n" in printed
    unet = ScaleLongUnconditionalPipeline.from_pretrained(folder).unet
    parameters = sum(parameter.numel() for parameter in unet.parameters())
    assert settings["model"] == f"UViTModel, {parameters:,} parameters, {skip_connections(unet).config}"
    assert settings["data"].endswith(": 27 for training, 3 for validation")
    assert len(settings["data_fingerprint"]) == 16
    assert (settings["train_batch_size"], settings["total_batch_size"]) == (2, 4)
    assert (settings["max_train_steps"], settings["resolution"], settings["mixed_precision"]) == (4, 8, "no")
    assert (settings["skip_scaling"], settings["kappa"]) == ("cs", 0.9)
    other = json.loads((unconditional / "settings.json").read_text())
    assert {name for name in settings if settings[name] != other[name]} == {
        *("output_dir", "report_to", "sample_steps", "train_batch_size", "gradient_accumulation_steps")
    }


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.1, 0])
def test_class_conditional(train, tmp_path, dropout):
    folder = train(
        tmp_path / "run",
        script=train_class_conditional,
        model_config_name_or_path=None,
        model_type="unet",
        class_dropout=dropout,
        **FAST,
    )
    pipe = ScaleLongClassConditionalPipeline.from_pretrained(folder)
    assert pipe.num_classes == len(SHAPE_CLASSES)
    assert list(pipe.config.class_names.values()) == SHAPE_CLASSES
    assert pipe.config.null_class == (30 if dropout else None)
    images = pipe(["red circle", 3], num_inference_steps=2, guidance_scale=2.0 if dropout else 1.0).images
    assert [image.size for image in images] == [(8, 8)] * 2


@pytest.mark.slow
def test_dropped_labels_train_the_null_class(train, tiny_config, tmp_path):
    options = {"script": train_class_conditional, "model_config_name_or_path": tiny_config / "classes"}
    options |= {"class_dropout": 0.5, "lr_warmup_steps": 0, "max_train_steps": 4}
    trained, start = (
        UViTModel.from_pretrained(
            train(tmp_path / str(rate), learning_rate=rate, **options) / "checkpoint-4", subfolder="unet"
        ).class_embed.weight
        for rate in (0.01, 1e-12)
    )
    # The embeddings of classes that were not seen move only by weight decay.
    moved = (trained - start * (1 - 0.01 * 0.01) ** 4).abs().amax(dim=1)
    assert moved[30] > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["uvit", "unet"])
def test_latents(train, vae, tmp_path, model_type):
    folder = train(
        tmp_path / "run",
        model_config_name_or_path=None,
        model_type=model_type,
        resolution=16,
        pretrained_vae_model_name_or_path=vae,
        latent_scale=0.7,
        max_train_steps=1,
        validation_steps=0,
    )
    pipe = ScaleLongUnconditionalPipeline.from_pretrained(folder)
    assert pipe.unet.config.in_channels == 4
    assert pipe.unet.config.sample_size == 8
    assert pipe.config.latent_scale == 0.7
    assert pipe(num_inference_steps=1).images[0].size == (16, 16)


def test_a_sample_size_can_be_a_pair(train, tmp_path):
    config = {"sample_size": [8, 8], "patch_size": 2, "hidden_size": 16, "num_layers": 4, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "UViTModel", **config}))
    folder = train(tmp_path / "run", model_config_name_or_path=tmp_path / "config.json", max_train_steps=1)
    assert list(ScaleLongUnconditionalPipeline.from_pretrained(folder).unet.config.sample_size) == [8, 8]


def test_latents_follow_the_distribution_of_the_autoencoder(vae):
    config = DataConfig(resolution=16, num_shapes=10)
    data = load_training_data(config, channels=3, needs_labels=False, needs_captions=False, seed=0)
    model = AutoencoderKL.from_pretrained(vae).eval()
    # There are nine training images, so the second batch has the same ones in another order.
    first, second = list(data.train.batches(batch_size=9, num_steps=2))
    with torch.no_grad():
        distribution = model.encode(first["pixel_values"]).latent_dist
    latents = encode_images(first, model)
    deviation = (latents / 0.5 - distribution.mean) / distribution.std
    assert abs(float(deviation.mean())) < 0.1
    assert float(deviation.std()) == pytest.approx(1, abs=0.1)
    assert torch.equal(latents, encode_images(first, model))
    assert encode_images(second, model, latent_scale=2.0).std() > latents.std()


@pytest.mark.slow
def test_gray_images_make_a_gray_model(train, tmp_path):
    (tmp_path / "images").mkdir()
    for k in range(12):
        Image.new("L", (9, 8), 20 * k).save(tmp_path / "images" / f"{k}.png")
    options = {"model_config_name_or_path": None, "model_type": "unet", "num_shapes": None, "max_train_steps": 1}
    folder = train(tmp_path / "run", train_data_dir=tmp_path / "images", **options)
    pipe = ScaleLongUnconditionalPipeline.from_pretrained(folder)
    assert pipe.unet.config.in_channels == 1
    assert pipe(num_inference_steps=1).images[0].mode == "L"


@pytest.mark.slow
def test_flags_choose_the_scaling(train, tmp_path):
    flags = {"skip_scaling": "ls", "skip_scaling_shared": True, "skip_scaling_reduction": 4, "max_train_steps": 1}
    folder = train(tmp_path / "run", **flags)
    config = skip_connections(ScaleLongUnconditionalPipeline.from_pretrained(folder)).config
    assert (config.method, config.shared, config.reduction) == ("ls", True, 4)
    plain = train(tmp_path / "plain", skip_scaling="none", max_train_steps=1)
    assert skip_connections(ScaleLongUnconditionalPipeline.from_pretrained(plain)).config.method == "none"


@pytest.mark.slow
def test_preset_trains(train, tmp_path):
    """The smallest one, for one step of two images."""
    folder = train(
        tmp_path / "run",
        preset="cifar10-uvit-s-2",
        model_config_name_or_path=None,
        resolution=None,
        train_batch_size=2,
        max_train_steps=1,
        validation_steps=0,
        lr_warmup_steps=None,
        **{"no-use_ema": True},
    )
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["continuous_time"] is True
    assert settings["total_batch_size"] == 2
    model = ScaleLongUnconditionalPipeline.from_pretrained(folder).unet
    assert sum(p.numel() for p in model.parameters()) == PRESETS["cifar10-uvit-s-2"].parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["-m", "accelerate.commands.launch", "--cpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no",
         "--dynamo_backend=no", "-m", "scalelong_diffusers.train.train_class_conditional"],
        ["-m", "scalelong_diffusers.train.train_class_conditional"],
    ],
    ids=["accelerate launch", "python -m"],
)  # fmt: skip
def test_ways_to_start(launcher, tiny_config, tmp_path):
    flags = ["--resolution=8", "--num_shapes=20", "--train_batch_size=2", "--max_train_steps=2", "--sample_steps=0"]
    flags += [f"--model-config-name-or-path={tiny_config / 'classes'}", f"--output_dir={tmp_path / 'run'}"]
    subprocess.run([sys.executable, *launcher, *flags], check=True, capture_output=True, cwd=tmp_path, timeout=120)
    assert ScaleLongClassConditionalPipeline.from_pretrained(tmp_path / "run").num_classes == 30


@pytest.mark.slow
def test_folder_loads_in_the_sample_command_and_stock_pipelines(train, tiny_config, tmp_path):
    options = {"script": train_class_conditional, "model_config_name_or_path": tiny_config / "classes"}
    folder = train(tmp_path / "run", max_train_steps=1, **options)
    images = str(tmp_path / "images")
    words = ["--output_dir", images, "--num_images", "2", "--num_inference_steps", "2", "--class", "red circle"]
    assert scalelong(["sample", str(folder), *words]) in (None, 0)
    assert size_of(tmp_path / "images" / "000001.png") == (8, 8)


@pytest.mark.slow
def test_stock_pipeline_takes_the_model(unconditional, tmp_path):
    pipe = ScaleLongUnconditionalPipeline.from_pretrained(unconditional)
    DDPMPipeline(pipe.unet, DDPMScheduler()).save_pretrained(tmp_path / "stock")
    again = DiffusionPipeline.from_pretrained(tmp_path / "stock")
    assert type(again.unet) is UViTModel


PUSH = """
import os
import sys
from pathlib import Path
from huggingface_hub import hf_hub_download
from PIL import Image
from scalelong_diffusers import load_pipeline
from scalelong_diffusers.train import train_unconditional
from scalelong_diffusers.training import run_script

reader_token, *words = sys.argv[1:]


def train(repository, token=os.environ["HF_TOKEN"]):
    os.environ["HF_TOKEN"] = token
    folder = repository.replace("/", "-")
    flags = [f"--output_dir={folder}", f"--hub_model_id={repository}", *words]
    try:
        run_script(lambda: train_unconditional.main(flags))
    except SystemExit as stopped:
        print(f"{folder}: code {stopped.code}", file=sys.stderr)


def print_card(repository):
    print(f"card of {repository}", open(hf_hub_download(repository, "README.md")).read())


train("tester/shapes")
print_card("tester/shapes")
train("tester/no-space")
os.rename("tester-shapes", "run")
load_pipeline("run").push_to_hub("tester/again", card={"preset": "of mine"})
print_card("tester/again")
grid = Image.open(max(Path("run/samples").iterdir())).convert("RGB").tobytes()
for name in ("shapes", "again"):
    print(name, Image.open(hf_hub_download(f"tester/{name}", "samples.png")).convert("RGB").tobytes() == grid)
train("tester/shapes", reader_token)
train("other/new", reader_token)
train("tester/new", "")
"""


@pytest.mark.slow
def test_run_is_pushed_and_a_push_that_fails_stops_it_early_or_keeps_the_model(hub, tiny_config, tmp_path):
    words = ["--model_config_name_or_path", tiny_config, "--resolution=8", "--num_shapes=30", "--push_to_hub"]
    words += ["--max_train_steps=2", "--train_batch_size=4", "--num_samples=4", "--num_inference_steps=1"]
    done = hub(PUSH, hub.reader_token, *words)
    assert "pushed: " in done.stdout
    first, second = done.stdout.split("card of ")[1:]
    for card in (first, second):
        assert "| data | the built-in shapes, 30 images: 27 for training, 3 for validation |" in card
        assert "| steps | 2 |" in card
        assert "![samples](samples.png)" in card
    assert "shapes True\nagain True\n" in done.stdout, "the last grid of the run"
    assert "validation loss (fixed noise, held-out images)" in first
    assert "| preset | of mine |" in second
    refused = "the Hub refused the request for"
    lines = done.stderr.splitlines()
    for message, code in (
        (f"the push to tester/no-space failed ({refused} tester/no-space with status 403", "tester-no-space: code 1"),
        (f"{refused} tester/shapes with status 403; your token (`hf auth whoami`)", "tester-shapes: code 2"),
        (f"{refused} other/new with status 403; your token (`hf auth whoami`)", "other-new: code 2"),
        (f"{refused} tester/new with status 401; log in with `hf auth login`, or", "tester-new: code 2"),
    ):
        line = lines[lines.index(code) - 1]
        assert message in line
    assert "the model is saved in tester-no-space; to push it again, run push_to_hub(ScaleLongUncond" in done.stderr
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"home", "run", "tester-no-space"}
    written = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    for token in (hub.owner_token, hub.reader_token):
        assert token not in done.stdout + done.stderr
        assert not any(token.encode() in content for content in written)
    ScaleLongUnconditionalPipeline.from_pretrained(tmp_path / "tester-no-space")
