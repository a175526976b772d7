"""Fine-tuning a Stable Diffusion: the first output is unchanged, and what is saved loads scaled."""

import importlib.util
import json
import shutil
from functools import partial

import diffusers
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file

from scalelong_diffusers import ScaleLongUNet2DConditionModel, apply_skip_scaling, load_adapter
from scalelong_diffusers.data import DataConfig, load_training_data
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.noise import trained_process
from scalelong_diffusers.train import finetune_text_to_image, precompute_latents
from scalelong_diffusers.training import fine_tuning
from scalelong_diffusers.training.posthoc_ema import reconstruct_ema
from scalelong_diffusers.training.stable_diffusion import (
    encode_tokens,
    load_stable_diffusion,
    tokenize_prompts,
)


pytestmark = pytest.mark.slow

FAST = {"max_train_steps": 3, "validation_steps": 0}
ONE_STEP = {"max_train_steps": 1, "lr_warmup_steps": 0}
METHODS = {
    "ls": {"skip_scaling": "ls", "skip_scaling_reduction": 4},
    "cs": {"skip_scaling": "cs", "skip_scaling_warmup_steps": 2},
}
RESUME = {"resume_from_checkpoint": "latest"}


@pytest.fixture(scope="module")
def base_folders(tmp_path_factory):
    return {"root": tmp_path_factory.mktemp("base")}


@pytest.fixture
def base(base_folders, build_kind):
    """`base("sd1")`: the folder of a pipeline. Tests only read it."""

    def save(kind="sd1"):
        if kind not in base_folders:
            base_folders[kind] = base_folders["root"] / kind
            build_kind(kind).save_pretrained(base_folders[kind])
        return base_folders[kind]

    return save


@pytest.fixture
def tune(train, base):
    """`tune(output_dir, base_model, flag=value)` fine-tunes the tiny Stable Diffusion 1, or another base."""

    def run(output_dir, base_model=None, **changes):
        settings = {"model_config_name_or_path": None, "resolution": None, "learning_rate": None, **FAST, **changes}
        settings |= {"pretrained_model_name_or_path": base() if base_model is None else base_model}
        return train(output_dir, script=finetune_text_to_image, **settings)

    return run


@pytest.fixture
def refused_tuning(refused, base):
    def run(**changes):
        settings = {"model_config_name_or_path": None, "pretrained_model_name_or_path": base(), "resolution": None}
        return refused(script=finetune_text_to_image, **{**settings, **changes})

    return run


def losses_of(metrics):
    return [line["loss"] for line in metrics]


def first_batch():
    config = DataConfig(resolution=16, num_shapes=30, validation_size=3)
    data = load_training_data(config, channels=3, needs_labels=False, needs_captions=True, seed=0)
    return next(iter(data.train.batches(batch_size=4, num_steps=1)))


def stock_loss(folder, noise_offset=0.0, snr_gamma=None, without_captions=False):
    """Return the loss of the first batch, with diffusers' own classes."""
    pipe, batch = load_stable_diffusion(folder), first_batch()
    schedule = trained_process(pipe).scheduler
    with torch.no_grad():
        moments = pipe.vae.encode(batch["pixel_values"]).latent_dist
        latents = moments.mean + moments.std * batch.normal_like(moments.mean, "latents")
        latents = latents * pipe.vae.config.scaling_factor
        noise = batch.normal_like(latents, "noise")
        noise = noise + noise_offset * batch.normal_like(latents[:, :, :1, :1], "noise offset")
        timesteps = (batch.uniform("timestep") * 1000).long()
        noisy = schedule.add_noise(latents, noise, timesteps)
        captions = [""] * 4 if without_captions else batch["captions"]
        condition = encode_tokens(pipe, {name: read(captions) for name, read in tokenize_prompts(pipe).items()})
        if without_captions and "added_cond_kwargs" in condition:  # SDXL is guided away from zeros
            condition["encoder_hidden_states"].zero_()
            condition["added_cond_kwargs"]["text_embeds"].zero_()
        prediction = pipe.unet(noisy, timesteps, **condition).sample
        is_v = schedule.config.prediction_type == "v_prediction"
        target = schedule.get_velocity(latents, noise, timesteps) if is_v else noise
        losses = F.mse_loss(prediction, target, reduction="none").mean(dim=(1, 2, 3))
        if snr_gamma is not None:
            snr = schedule.alphas_cumprod[timesteps] / (1 - schedule.alphas_cumprod[timesteps])
            losses = losses * snr.clamp(max=snr_gamma) / (snr + 1 if is_v else snr)
    return float(losses.mean())


class TestFirstStep:
    @pytest.mark.parametrize("kind", ["sd1", "sd2", "sdxl"])
    def test_loss_equals_the_loss_of_the_original_model(self, tune, base, metrics_of, tmp_path, kind):
        runs = {"none": {"skip_scaling": "none"}, **METHODS}
        runs |= {f"{name} with LoRA": {**flags, "lora_rank": 2} for name, flags in METHODS.items()}
        losses = {}
        for name, flags in runs.items():
            steps = 3 if "skip_scaling_warmup_steps" in flags else 1
            folder = tune(tmp_path / name, base(kind), **{**ONE_STEP, **flags, "max_train_steps": steps})
            losses[name] = metrics_of(folder)[0]["loss"]
        assert losses == dict.fromkeys(runs, losses["none"])
        assert losses["none"] == pytest.approx(stock_loss(base(kind)), rel=1e-5)

    @pytest.mark.parametrize("kind", ["sd1", "sd2"])
    def test_noise_offset_and_min_snr(self, tune, base, metrics_of, tmp_path, kind):
        run = tune(tmp_path / "run", base(kind), **ONE_STEP, noise_offset=0.3, snr_gamma=0.5)
        expected = stock_loss(base(kind), noise_offset=0.3, snr_gamma=0.5)
        assert metrics_of(run)[0]["loss"] == pytest.approx(expected, rel=1e-5)
        assert expected != pytest.approx(stock_loss(base(kind)), rel=1e-2)

    @pytest.mark.parametrize("kind", ["sd1", "sdxl"])
    def test_dropped_captions_are_unconditional(self, tune, base, metrics_of, tmp_path, kind):
        run = tune(tmp_path / "run", base(kind), **ONE_STEP, proportion_empty_prompts=0.999999)
        expected = stock_loss(base(kind), without_captions=True)
        assert metrics_of(run)[0]["loss"] == pytest.approx(expected, rel=1e-5)
        assert expected != pytest.approx(stock_loss(base(kind)), rel=1e-4)

    def test_half_precision_keeps_full_weights(self, tune, metrics_of, tmp_path):
        half, full = (tune(tmp_path / name, **ONE_STEP, mixed_precision=name) for name in ("bf16", "no"))
        losses = [metrics_of(run)[0]["loss"] for run in (half, full)]
        assert losses[0] == pytest.approx(losses[1], rel=0.02)
        assert losses[0] != losses[1]
        weights = load_file(half / "unet" / "diffusion_pytorch_model.safetensors")
        assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_gradient_checkpointing_changes_nothing(tune, metrics_of, tmp_path):
    runs = (tune(tmp_path / str(on), gradient_checkpointing=on, learning_rate=0.01) for on in (None, True))
    one, other = (losses_of(metrics_of(run)) for run in runs)
    assert one == pytest.approx(other, abs=1e-5)


@pytest.fixture
def precompute(fresh_accelerator, tmp_path):
    """`precompute(pipeline_folder)`: the folder of precomputed latents and text states, or of latents alone."""

    def run(folder, with_captions=True):
        fresh_accelerator()
        words = ["--pretrained_vae_model_name_or_path", folder / "vae", "--output_dir", tmp_path / "latents"]
        words += ["--pretrained_text_encoder_name_or_path", folder] if with_captions else []
        words += ["--resolution", 16, "--center_crop", "--num_shapes", 30]
        precompute_latents.main([str(word) for word in words])
        return tmp_path / "latents"

    return run


class TestPrecomputedLatents:
    IMAGES = {"num_shapes": None, "resolution": 16, "center_crop": True}

    def test_give_the_same_losses(self, tune, base, precompute, metrics_of, tmp_path):
        in_the_loop = tune(tmp_path / "in_the_loop", center_crop=True)
        precomputed = tune(tmp_path / "out", precomputed_dir=precompute(base()), **self.IMAGES)
        losses, expected = (losses_of(metrics_of(run)) for run in (precomputed, in_the_loop))
        assert losses == pytest.approx(expected, abs=1e-6)

    def test_must_have_captions_and_come_from_the_same_autoencoder(
        self, refused_tuning, build_kind, base, precompute, tmp_path
    ):
        other, latents = tmp_path / "other", precompute(base())
        pipe = build_kind("sd1")
        torch.nn.init.normal_(pipe.vae.encoder.conv_in.weight)
        pipe.save_pretrained(other)
        message = refused_tuning(pretrained_model_name_or_path=other, precomputed_dir=latents, **self.IMAGES)
        assert f"were computed with the autoencoder {base() / 'vae'} (weights" in message
        assert f"got {other} (weights" in message
        shutil.rmtree(latents)
        precompute(base(), with_captions=False)
        message = refused_tuning(precomputed_dir=latents, **self.IMAGES)
        assert "have no captions: precompute with --pretrained_text_encoder_name_or_path" in message


LOAD_AND_SAMPLE = """
import sys, torch, diffusers, scalelong_diffusers
from safetensors.torch import load_file
torch.set_num_threads(1)
pipe = diffusers.StableDiffusionPipeline.from_pretrained(sys.argv[1])
pipe.set_progress_bar_config(disable=True)
generator = torch.Generator().manual_seed(0)
image = pipe("a red circle", num_inference_steps=2, generator=generator, output_type="pt").images
assert torch.equal(torch.as_tensor(image), load_file(sys.argv[2])["image"])
print(scalelong_diffusers.skip_connections(pipe).config.method, type(pipe.unet).__name__)
"""

PUSH_AND_LOAD = """
import torch
torch.set_num_threads(1)
from diffusers import StableDiffusionPipeline
from huggingface_hub import ModelCard, hf_hub_download
from scalelong_diffusers import load_adapter
from scalelong_diffusers.train import finetune_text_to_image
StableDiffusionPipeline.from_pretrained("base").push_to_hub("owner/base")
shared = "--pretrained_model_name_or_path owner/base --num_shapes 30 --train_batch_size 2 --max_train_steps 2"
shared += " --sample_steps 0 --skip_scaling_reduction 4 --skip_scaling ls --push_to_hub"
for name, flags in {"adapter": "--lora_rank 2", "full": ""}.items():
    flags = f"{shared} {flags} --hub_model_id owner/{name} --output_dir {name}"
    finetune_text_to_image.main(flags.split())
    card = ModelCard(open(hf_hub_download(f"owner/{name}", "README.md")).read()).data
    print(card.base_model, card.base_model_relation)
pipe = load_adapter(StableDiffusionPipeline.from_pretrained("owner/base"), "owner/adapter")
print(pipe.unet.skip_scaler.config.method, len(pipe.unet.peft_config))
pipe = StableDiffusionPipeline.from_pretrained("owner/full")
here = StableDiffusionPipeline.from_pretrained("full")
same = all(torch.equal(*weights) for weights in zip(pipe.unet.parameters(), here.unet.parameters()))
print(pipe.unet.skip_scaler.config.method, same)
"""


class TestOutput:
    def test_pipeline_loads_scaled_in_a_fresh_process(self, tune, base, in_fresh_process, tmp_path):
        out = tune(tmp_path / "out", learning_rate=0.01, **METHODS["ls"])
        for name in ("vae", "text_encoder"):
            weights, before = (load_file(next((path / name).glob("*.safetensors"))) for path in (out, base()))
            assert all(torch.equal(weights[key], before[key]) for key in before)
        pipe = diffusers.StableDiffusionPipeline.from_pretrained(out)
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(0)
        image = pipe("a red circle", num_inference_steps=2, generator=generator, output_type="pt").images
        save_file({"image": torch.as_tensor(image)}, tmp_path / "image.safetensors")
        printed = in_fresh_process(LOAD_AND_SAMPLE, out, tmp_path / "image.safetensors").stdout
        assert printed.split() == ["ls", "ScaleLongUNet2DConditionModel"]

    @pytest.mark.parametrize(("kind", "method"), [("sd1", "ls"), ("sdxl", "cs")])
    def test_adapter_loads_into_the_base_model(self, tune, base, tmp_path, kind, method):
        out = tune(tmp_path / "out", base(kind), lora_rank=2, lora_alpha=6, learning_rate=0.01, **METHODS[method])
        names = {path.name for path in out.iterdir() if path.is_file()}
        gates = {"skip_scaling.safetensors"} if method == "ls" else set()
        adapter = {"pytorch_lora_weights.safetensors", "skip_scaling.json"} | gates
        assert names == adapter | {"metrics.jsonl", "settings.json"}

        trained = load_file(out / "checkpoint-3" / "unet" / "trained.safetensors")
        assert any(".lora_" in name for name in trained)
        assert all(".lora_" in name or name.startswith("skip_scaler.") for name in trained)
        pipe = load_adapter(load_stable_diffusion(base(kind)), out)
        loaded = dict(pipe.unet.named_parameters())
        for name, weight in trained.items():
            torch.testing.assert_close(loaded[name.replace("default", "default_0")], weight, rtol=0, atol=0)
        assert pipe.unet.peft_config["default_0"].lora_alpha == 6
        assert pipe.unet.skip_scaler.config.method == method
        assert pipe.unet.skip_scaler.config.strength == 1

    def test_sample_grid_has_all_prompts(self, tune, tmp_path):
        prompts = ["a red circle", "purple", "a green triangle"]
        options = {"validation_prompts": prompts, "num_inference_steps": 2, "sample_steps": 1, "num_samples": 2}
        out = tune(tmp_path / "out", **ONE_STEP, **options)
        with Image.open(out / "samples" / "step-000001.png") as grid:
            assert grid.size == (256, 312)  # two by two, the last one empty

    def test_is_pushed_with_its_base_model(self, hub, build_kind, tmp_path):
        build_kind("sd1").save_pretrained(tmp_path / "base")
        result = hub(PUSH_AND_LOAD)
        assert "failed" not in result.stderr
        printed = result.stdout.splitlines()
        assert [line for line in printed if line.startswith("owner/")] == ["owner/base adapter", "owner/base finetune"]
        assert printed[-2:] == ["ls 1", "ls True"]


def strengths_of(folder):
    configs = [json.loads(path.read_text()) for path in sorted(folder.glob("checkpoint-*/unet/config.json"))]
    return [config["skip_scaling"]["strength"] for config in configs]


class TestWarmUp:
    def test_raises_the_strength_to_its_value(self, tune, tmp_path):
        changes = {"skip_scaling": "cs", "skip_scaling_warmup_steps": 4, "checkpointing_steps": 1}
        out = tune(tmp_path / "cs", max_train_steps=6, **changes)
        assert strengths_of(out) == [0, 0.25, 0.5, 0.75, 1, 1]
        assert ScaleLongUNet2DConditionModel.from_pretrained(out / "unet").skip_scaler.config.strength == 1
        changes = {"skip_scaling": "ls", "skip_scaling_init": "paper", "skip_scaling_reduction": 4}
        changes |= {"skip_scaling_strength": 0.5, "skip_scaling_warmup_steps": 2, "checkpointing_steps": 1}
        assert strengths_of(tune(tmp_path / "ls", **changes)) == [0, 0.25, 0.5]

    @pytest.mark.parametrize(
        ("scaling", "changes"),
        [
            ({"method": "cs", "strength": 0.7}, {"skip_scaling": "cs"}),
            ({"method": "ls", "reduction": 4, "strength": 0.7}, {}),
        ],
    )
    def test_scaled_pipeline_keeps_its_scaling(self, tune, base, tmp_path, scaling, changes):
        pipe = apply_skip_scaling(load_stable_diffusion(base()), scaling)
        pipe.save_pretrained(tmp_path / "scaled")
        out = tune(tmp_path / "out", tmp_path / "scaled", **ONE_STEP, **changes)
        trained = ScaleLongUNet2DConditionModel.from_pretrained(out / "unet")
        assert trained.skip_scaler.config == pipe.unet.skip_scaler.config
        assert strengths_of(out) == [0.7]
        settings = json.loads((out / "settings.json").read_text())
        assert (settings["skip_scaling"], settings["skip_scaling_strength"]) == (scaling["method"], 0.7)


class TestResuming:
    @pytest.mark.parametrize(
        "changes",
        [
            {**METHODS["ls"], "lora_rank": 2, "use_ema": True},
            {**METHODS["cs"], "skip_scaling_warmup_steps": 5, "lora_rank": 2},
            {**METHODS["cs"], "skip_scaling_warmup_steps": 5},
        ],
        ids=str,
    )
    def test_is_exact(self, tune, stopped_at, assert_same_run, tmp_path, changes):
        changes = {"max_train_steps": 6, "checkpointing_steps": 3, "learning_rate": 0.01, **changes}
        expected = tune(tmp_path / "uninterrupted", **changes)
        folder = stopped_at(3, expected)
        tune(folder, **changes, **RESUME)
        assert_same_run(folder, expected)

    @pytest.mark.parametrize("lora_rank", [None, 2])
    def test_finished_run_is_saved_again(self, tune, tmp_path, lora_rank):
        changes = {**METHODS["cs"], "lora_rank": lora_rank, "learning_rate": 0.01}
        out = tune(tmp_path / "out", **changes)
        file = out / ("skip_scaling.json" if lora_rank else "unet/config.json")
        before = json.loads(file.read_text())["skip_scaling"]
        file.unlink()
        tune(out, **changes, **RESUME)
        assert json.loads(file.read_text())["skip_scaling"] == before
        assert before["strength"] == 1

    def test_needs_the_same_scaling(self, tune, tmp_path):
        out = tune(tmp_path / "out", **ONE_STEP)  # ls, by default
        with pytest.raises(UserError, match=r"skip_scaling was 'ls' and is 'cs'"):
            tune(out, **{**ONE_STEP, **METHODS["cs"], "max_train_steps": 3}, **RESUME)


def test_two_processes_train_a_lora_as_one(tune, launch, base, metrics_of, tmp_path):
    changes = {**METHODS["ls"], **FAST, "lora_rank": 2, "learning_rate": 0.01}
    settings = {"resolution": None, "model_config_name_or_path": None, "pretrained_model_name_or_path": base()}
    two = launch(
        tmp_path / "two", processes=2, script=finetune_text_to_image, **changes, **settings, train_batch_size=2
    )
    one = tune(tmp_path / "one", **changes)
    code, _, errors = two.wait()
    assert code == 0, errors
    losses, expected = (losses_of(metrics_of(path)) for path in (tmp_path / "two", one))
    assert losses == pytest.approx(expected, abs=1e-5)


class EightBits(torch.optim.Optimizer):
    """Stores its momentum as indices into a table that all parameters share, as 8-bit Adam does."""

    def __init__(self, options, parameters):
        super().__init__(parameters, {"lr": options.learning_rate})
        self.table = torch.linspace(-1, 1, 255)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["indices"] = torch.full_like(parameter, 127, dtype=torch.uint8)
                    state["table"] = self.table
                momentum = state["table"][state["indices"].long()].lerp(parameter.grad.clamp(-1, 1), 0.5)
                state["indices"] = ((momentum + 1) * 127).round().to(torch.uint8)
                parameter.sub_(group["lr"] * momentum)


@pytest.mark.parametrize("package", ["bitsandbytes", None])
def test_eight_bit_adam_resumes_exactly(tune, stopped_at, assert_same_run, monkeypatch, tmp_path, package):
    if package is None:
        monkeypatch.setattr(fine_tuning, "eight_bit_adam", EightBits)
    else:
        pytest.importorskip(package)
    changes = {"max_train_steps": 4, "checkpointing_steps": 2, "learning_rate": 0.01, "use_8bit_adam": True}
    expected = tune(tmp_path / "uninterrupted", **changes)
    folder = stopped_at(2, expected)
    tune(folder, **changes, **RESUME)
    assert_same_run(folder, expected)
    state = load_file(expected / "checkpoint-4" / "optimizer.safetensors")
    assert any(tensor.dtype == torch.uint8 for tensor in state.values())


class TestRejects:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"preset": "mscoco-unet"}, "unknown argument '--preset'"),
            ({"lora_ranks": 4}, "unknown argument '--lora_ranks' (did you mean '--lora_rank'?)"),
            ({"lora_rank": 0}, "--lora_rank must be an integer, at least 1 and at most 8,192, got 0"),
            ({"lora_alpha": 2}, "lora_alpha=2.0 needs lora_rank"),
            ({"kappa": 0.5}, "--kappa needs a method in skip_scaling"),
            (
                {"skip_scaling": "cs", "skip_scaling_warmup_steps": 0},
                "would change the output abruptly: pass a",
            ),
            ({"skip_scaling_warmup_steps": 5}, "--skip_scaling_warmup_steps 5 has nothing to warm up: ls starts with"),
            ({"skip_scaling": "cs", "skip_scaling_warmup_steps": 16}, "does not end within the run's 16 steps"),
            ({"skip_scaling": "cs"}, "--skip_scaling_warmup_steps 500 does not end within the run's 16 steps"),
            ({"resolution": 15}, "--resolution must be a multiple of 2 (the nearest: 14 or 16), got 15"),
            ({"lora_rank": 2, "push_to_hub": True}, "is local: pass a Hub id, or push later with push_adapter"),
            (
                {"validation_prompts": ["red " * 9]},
                "has 11 tokens, but its encoder and model read only 10",
            ),
            ({"pretrained_model_name_or_path": "some/sd"}, "some/sd"),
        ],
        ids=str,
    )
    def test_options(self, refused_tuning, changes, message):
        assert message in refused_tuning(**changes)

    @pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
    @pytest.mark.parametrize(("kind", "component"), [("sd1", "text_encoder"), ("sdxl", "text_encoder_2")])
    def test_a_text_encoder_that_lacks_weights(self, refused_tuning, base, tmp_path, kind, component):
        folder = shutil.copytree(base(kind), tmp_path / "base")
        save_file({"x": torch.zeros(1)}, folder / component / "model.safetensors", {"format": "pt"})
        message = refused_tuning(pretrained_model_name_or_path=folder)
        assert f"the {component} of {folder} lacks" in message

    def test_eight_bits_without_bitsandbytes(self, refused_tuning):
        assert refused_tuning(use_8bit_adam=True) == "--use_8bit_adam needs a package: pip install bitsandbytes"

    def test_lora_without_peft(self, refused_tuning, monkeypatch):
        monkeypatch.setattr(fine_tuning, "is_peft_available", lambda: False)
        assert refused_tuning(lora_rank=2) == "--lora_rank 2 needs a package: pip install peft"

    def test_other_pipelines(self, refused_tuning, ddpm, build_kind, sd, tmp_path):
        diffusers.DDPMPipeline(ddpm.build(), diffusers.DDPMScheduler()).save_pretrained(tmp_path / "ddpm")
        message = refused_tuning(pretrained_model_name_or_path=tmp_path / "ddpm")
        assert "is a DDPMPipeline; only StableDiffusionPipeline or StableDiffusionXLPipeline can be" in message
        pipe = build_kind("sd1")
        pipe.unet = sd.build(
            down_block_types=("DownBlock2D",) * 2, mid_block_type="UNetMidBlock2D", up_block_types=("UpBlock2D",) * 2
        )
        pipe.save_pretrained(tmp_path / "plain")
        message = refused_tuning(pretrained_model_name_or_path=tmp_path / "plain", lora_rank=2)
        assert "has a UNet2DConditionModel that must take encoder_hidden_states but takes no condition" in message

    def test_other_scalings_of_a_scaled_pipeline(self, refused_tuning, base, tmp_path):
        apply_skip_scaling(load_stable_diffusion(base()), "cs").save_pretrained(tmp_path / "scaled")
        reject = partial(refused_tuning, pretrained_model_name_or_path=tmp_path / "scaled")
        message = reject(skip_scaling="cs", skip_scaling_warmup_steps=2)
        assert "has nothing to warm up: the U-Net is already scaled" in message
        assert "was trained with SkipScalingConfig(method='cs'" in reject(skip_scaling="ls")

    @pytest.mark.parametrize("size", [None, [8, 16]])
    def test_unet_without_a_size_needs_a_resolution(self, refused_tuning, tune, build_kind, sd, tmp_path, size):
        pipe = build_kind("sd1")
        pipe.unet = sd.build(sample_size=size)
        pipe.save_pretrained(tmp_path / "sizeless")
        message = refused_tuning(pretrained_model_name_or_path=tmp_path / "sizeless")
        assert f"the unet has sample_size={size}, which is not a square: pass --resolution" in message
        tune(tmp_path / "out", tmp_path / "sizeless", resolution=16, **ONE_STEP)

    def test_folder_with_an_adapter(self, tune, base, tmp_path):
        out = tune(tmp_path / "out", lora_rank=2, **METHODS["ls"])
        shutil.rmtree(out / "checkpoint-3")
        before = {path.name for path in out.iterdir()}
        for lora_rank in (2, None):
            with pytest.raises(UserError, match=r"out holds an adapter: pass another folder"):
                tune(out, lora_rank=lora_rank, **METHODS["cs"])
        assert {path.name for path in out.iterdir()} == before

    def test_in_one_line_with_exit_code_2(self, launch, base, tmp_path):
        settings = {"model_config_name_or_path": None, "resolution": None, "pretrained_model_name_or_path": base()}
        prompts = {"validation_prompts": ["red " * 9]}
        code, _, errors = launch(tmp_path / "run", script=finetune_text_to_image, **settings, **prompts).wait()
        assert code == 2
        assert errors.startswith("finetune_text_to_image: --validation_prompts: ")
        assert errors.count("\n") == 1


def test_ema_of_any_length_keeps_the_class_of_the_pipeline(tune, tmp_path):
    folder = tune(tmp_path / "tuned", max_train_steps=4, ema_snapshot_steps=1)
    [result] = reconstruct_ema(str(folder), str(tmp_path / "ema"), [0.1])
    pipe, tuned = (diffusers.StableDiffusionPipeline.from_pretrained(path) for path in (result.folder, folder))
    expected = load_file(folder / "ema_snapshots" / "step-4.safetensors")
    for name, parameter in pipe.unet.named_parameters():
        torch.testing.assert_close(parameter.data, expected[f"0.1/unet.{name}"])
    assert any(not torch.equal(p, q) for p, q in zip(pipe.unet.parameters(), tuned.unet.parameters()))
    assert all(torch.equal(p, q) for p, q in zip(pipe.vae.parameters(), tuned.vae.parameters()))
