"""The scripts from a data set to a pipeline folder: every kind of model and data, every way to start them, and the
Hub."""

import json
import subprocess
import sys

import diffusers
import pytest
import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from PIL import Image

from scalelong_diffusers import (
    ScaleLongClassConditionalPipeline,
    ScaleLongUnconditionalPipeline,
    UViTModel,
    skip_connections,
)
from scalelong_diffusers.data import SHAPE_CLASSES
from scalelong_diffusers.presets import PRESETS
from scalelong_diffusers.train import train_class_conditional
from scalelong_diffusers.training import parse_training_arguments, start, training_parser


FAST = {"max_train_steps": 4, "sample_steps": 4, "num_samples": 4, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vae")
    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    model = AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=4, scaling_factor=0.5, **blocks)
    model.save_pretrained(folder)
    return folder


def size_of(file):
    with Image.open(file) as image:
        return image.size


def test_unconditional(train, tmp_path):
    folder = train(tmp_path / "run", **FAST)
    pipe = ScaleLongUnconditionalPipeline.from_pretrained(folder)
    assert skip_connections(pipe).config.method == "cs"
    (image,) = pipe(num_inference_steps=2).images
    assert image.size == (8, 8)
    assert size_of(folder / "samples" / "step-000004.png") == (16, 16)
    settings = json.loads((folder / "settings.json").read_text())
    parameters = sum(parameter.numel() for parameter in pipe.unet.parameters())
    assert settings["model"] == f"UViTModel, {parameters:,} parameters, {skip_connections(pipe).config}"
    assert settings["data"].endswith(": 27 to train on, 3 to validate with")
    ours = {"checkpoint-4", "metrics.jsonl", "samples", "settings.json"}
    assert {path.name for path in folder.iterdir()} == {"model_index.json", "scheduler", "unet"} | ours


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


def test_left_out_classes_train_the_null_class(train, tmp_path):
    settings = {"script": train_class_conditional, "model_config_name_or_path": None, "resolution": 8}
    folder = train(tmp_path / "run", class_dropout=0.5, lr_warmup_steps=0, **settings, **FAST)
    still = train(tmp_path / "still", class_dropout=0.5, learning_rate=0.0, lr_warmup_steps=0, **settings, **FAST)
    trained, start = (
        UViTModel.from_pretrained(path / "checkpoint-4", subfolder="unet").class_embed.weight
        for path in (folder, still)
    )
    # Weight decay is all that moves the embedding of a class that was not met.
    moved = (trained - start * (1 - 0.01 * 0.01) ** 4).abs().amax(dim=1)
    assert moved[30] > 1e-3


@pytest.mark.parametrize("model", ["uvit", "unet"])
def test_latents(train, vae, tmp_path, model):
    folder = train(
        tmp_path / "run",
        model_config_name_or_path=None,
        model_type=model,
        resolution=16,
        pretrained_vae_model_name_or_path=vae,
        latent_scale=0.7,
        **FAST,
    )
    pipe = ScaleLongUnconditionalPipeline.from_pretrained(folder)
    assert pipe.unet.config.in_channels == 4
    assert pipe.unet.config.sample_size == 8
    assert pipe.config.latent_scale == 0.7
    assert pipe(num_inference_steps=1).images[0].size == (16, 16)


def test_latents_are_what_the_autoencoder_makes_drawn_anew(vae):
    from scalelong_diffusers.data import DataConfig, load_training_data
    from scalelong_diffusers.training import encode_images

    settings = DataConfig(resolution=16, num_shapes=10)
    data = load_training_data(settings, channels=3, needs_labels=False, needs_captions=False, seed=0)
    model = AutoencoderKL.from_pretrained(vae).eval()
    # Nine are trained on, so that the second batch begins with the first's images again, in another order.
    first, second = list(data.train.batches(batch_size=9, num_steps=2))
    with torch.no_grad():
        distribution = model.encode(first["pixel_values"]).latent_dist
    latents = encode_images(first, model)
    deviation = (latents / 0.5 - distribution.mean) / distribution.std
    assert abs(float(deviation.mean())) < 0.1
    assert float(deviation.std()) == pytest.approx(1, abs=0.1)
    assert torch.equal(latents, encode_images(first, model))
    assert encode_images(second, model, latent_scale=2.0).std() > latents.std()


def test_grey_pictures_make_a_grey_model(train, tmp_path):
    for k in range(12):
        Image.new("L", (9, 8), 20 * k).save(tmp_path / f"{k}.png")
    folder = train(
        tmp_path / "run",
        train_data_dir=tmp_path,
        num_shapes=None,
        model_config_name_or_path=None,
        model_type="unet",
        **FAST,
    )
    pipe = ScaleLongUnconditionalPipeline.from_pretrained(folder)
    assert pipe.unet.config.in_channels == 1
    assert pipe(num_inference_steps=1).images[0].mode == "L"


def test_the_flags_make_the_scaling(train, tmp_path):
    flags = {"skip_scaling": "ls", "no-skip_scaling_shared": True, "skip_scaling_reduction": 4}
    folder = train(tmp_path / "run", **flags, **FAST)
    config = skip_connections(ScaleLongUnconditionalPipeline.from_pretrained(folder)).config
    assert (config.method, config.shared, config.reduction) == ("ls", False, 4)
    plain = train(tmp_path / "plain", skip_scaling="none", **FAST)
    assert skip_connections(ScaleLongUnconditionalPipeline.from_pretrained(plain)).config.method == "none"


def test_settings_are_printed_and_kept(train, tmp_path, capsys):
    folder = train(tmp_path / "run", **FAST)
    settings = json.loads((folder / "settings.json").read_text())
    printed = capsys.readouterr().out
    assert settings["total_batch_size"] == 4
    assert settings["skip_scaling"] == "cs"
    for name, value in settings.items():
        assert f"{name}: {value}\n" in printed


@pytest.mark.parametrize("name", [row.name for row in PRESETS.values() if row.condition != "text"])
def test_every_preset_sets_what_no_flag_does(name):
    preset = PRESETS[name]
    parser = training_parser("", preset.condition)
    parser.add_argument("--class_dropout", type=float, default=0.1)
    latent = ["--pretrained_vae_model_name_or_path", "vae"] if preset.is_latent else []
    args = parse_training_arguments(parser, ["--preset", name, *latent])
    assert args.resolution == preset.config["sample_size"] * (8 if preset.is_latent else 1)
    for flag in ("learning_rate", "lr_warmup_steps", "max_train_steps", "ema_decay", "random_flip", "latent_scale"):
        if getattr(preset, flag) is not None:
            assert getattr(args, flag) == getattr(preset, flag), flag
    if preset.adam_betas is not None:
        assert (args.adam_beta1, args.adam_beta2) == preset.adam_betas
    assert args.class_dropout == (preset.condition_dropout or 0)
    assert args.total_batch_size == preset.train_batch_size
    assert args.skip_scaling == "cs"
    changed = parse_training_arguments(parser, ["--preset", name, *latent, "--learning_rate", "7", "--no-random_flip"])
    assert changed.learning_rate == 7
    assert changed.random_flip is False


def test_a_preset_trains(train, tmp_path):
    """The smallest of them, for one step of two images."""
    folder = train(
        tmp_path / "run",
        preset="cifar10-uvit-s-2",
        model_config_name_or_path=None,
        resolution=None,
        train_batch_size=2,
        max_train_steps=1,
        validation_steps=0,
        lr_warmup_steps=None,
    )
    assert json.loads((folder / "settings.json").read_text())["continuous_time"] is True
    model = ScaleLongUnconditionalPipeline.from_pretrained(folder).unet
    assert sum(p.numel() for p in model.parameters()) == PRESETS["cifar10-uvit-s-2"].parameters


def test_the_batch_of_a_preset_is_shared_out(fresh_accelerator, tmp_path):
    words = ["--preset=cifar10-uvit-s-2", "--gradient_accumulation_steps=4", f"--output_dir={tmp_path / 'run'}"]
    args = parse_training_arguments(training_parser("", condition=None), words)
    start(args)
    assert args.train_batch_size == 32


@pytest.mark.parametrize(
    "start",
    [
        ["-m", "accelerate.commands.launch", "--num_processes=1", "--num_machines=1", "--mixed_precision=no",
         "--dynamo_backend=no", "-m", "scalelong_diffusers.train.train_class_conditional"],
        ["-m", "scalelong_diffusers.train.train_class_conditional"],
    ],
    ids=["accelerate launch -m", "python -m"],
)  # fmt: skip
@pytest.mark.slow
def test_ways_to_start(start, tmp_path):
    flags = ["--resolution=8", "--num_shapes=20", "--train_batch_size=2", "--max_train_steps=2", "--sample_steps=0"]
    command = [sys.executable, *start, *flags, f"--output_dir={tmp_path / 'run'}"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, timeout=120)
    assert ScaleLongClassConditionalPipeline.from_pretrained(tmp_path / "run").num_classes == 30


def test_the_folder_loads_in_a_fresh_process_and_by_the_sample_command(train, in_fresh_process, tmp_path):
    folder = train(tmp_path / "run", script=train_class_conditional, model_config_name_or_path=None, **FAST)
    code = """
import sys
from scalelong_diffusers.cli import main
sys.exit(main(["sample", sys.argv[1], "--out", sys.argv[2], "-n", "2", "--steps", "2", "--class", "red circle"]))
"""
    in_fresh_process(code, folder, tmp_path / "images")
    assert size_of(tmp_path / "images" / "000001.png") == (8, 8)


def test_tensorboard(train, tmp_path):
    folder = train(tmp_path / "run", report_to="tensorboard", **FAST)
    assert list((folder / "logs").rglob("events.out.tfevents.*"))


PUSHED = """
import sys
from scalelong_diffusers.train import train_unconditional
train_unconditional.main(["--output_dir", sys.argv[1], *sys.argv[2:]])
"""


@pytest.mark.slow
def test_a_run_is_pushed_with_its_card_and_a_push_that_fails_costs_nothing(hub, tiny_config, tmp_path):
    words = ["--model_config_name_or_path", str(tiny_config), "--resolution=8", "--num_shapes=30", "--push_to_hub"]
    words += ["--max_train_steps=2", "--train_batch_size=4", "--num_samples=4", "--num_inference_steps=1"]
    done = hub(PUSHED, tmp_path / "run", *words, "--hub_model_id=tester/shapes")
    assert "pushed: " in done.stdout
    card = hub(
        "from huggingface_hub import hf_hub_download as d; print(open(d('tester/shapes', 'README.md')).read())\n"
        "print(d('tester/shapes', 'samples.png'))"
    ).stdout
    assert "| data | the built-in shapes, 30 images |" in card
    assert "validation loss (fixed noise, held-out images)" in card
    assert "| steps | 2 |" in card
    assert hub.owner_token not in card + done.stdout + done.stderr
    failed = hub(PUSHED, tmp_path / "failed", *words, "--hub_model_id=other/name", f"--hub_token={hub.reader_token}")
    (warning,) = [line for line in failed.stderr.splitlines() if line.startswith("warning: the push")]
    assert "the model is whole in" in warning
    assert hub.reader_token not in failed.stdout + failed.stderr
    for folder in ("run", "failed"):
        ScaleLongUnconditionalPipeline.from_pretrained(tmp_path / folder)
        assert "hub_token" not in (tmp_path / folder / "settings.json").read_text()


def test_a_stock_pipeline_takes_the_model(train, tmp_path):
    folder = train(tmp_path / "run", **FAST)
    pipe = ScaleLongUnconditionalPipeline.from_pretrained(folder)
    stock = diffusers.DDPMPipeline(pipe.unet, diffusers.DDPMScheduler())
    stock.save_pretrained(tmp_path / "stock")
    again = DiffusionPipeline.from_pretrained(tmp_path / "stock")
    assert type(again.unet) is UViTModel
