"""Fine-tuning a Stable Diffusion begins with the model as it was, and leaves behind what loads scaled."""

import importlib.util
import json
import shutil

import diffusers
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file

from scalelong_diffusers import ScaleLongUNet2DConditionModel, apply_skip_scaling, load_adapter
from scalelong_diffusers.data import DataConfig, load_training_data
from scalelong_diffusers.train import finetune_text_to_image, precompute_latents
from scalelong_diffusers.train.finetune_text_to_image import parse_args
from scalelong_diffusers.training import TrainingStopped
from scalelong_diffusers.training.stable_diffusion import encode_prompts, load_stable_diffusion, training_schedule


FAST = {"max_train_steps": 3, "validation_steps": 0}
METHODS = {
    "ls": {"skip_scaling": "ls", "skip_scaling_reduction": 4},
    "cs": {"skip_scaling": "cs", "skip_scaling_warmup_steps": 2},
}


@pytest.fixture
def base(build_kind, tmp_path):
    """`base("sd1")`: the folder of a pipeline."""

    def save(kind="sd1"):
        build_kind(kind).save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return save


@pytest.fixture
def tune(train, base):
    """`tune(output_dir, flag=value)` fine-tunes the tiny Stable Diffusion 1, or another base."""

    def run(output_dir, base_model=None, **changes):
        settings = {"model_config_name_or_path": None, "resolution": None, "learning_rate": None, **FAST, **changes}
        settings |= {"pretrained_model_name_or_path": base() if base_model is None else base_model}
        return train(output_dir, script=finetune_text_to_image, **settings)

    return run


@pytest.fixture
def refused_tuning(refused, base):
    def run(**changes):
        settings = {"model_config_name_or_path": None, "pretrained_model_name_or_path": base(), **changes}
        return refused(script=finetune_text_to_image, **settings)

    return run


def first_batch():
    settings = DataConfig(resolution=16, num_shapes=30, validation_size=3)
    data = load_training_data(settings, channels=3, needs_labels=False, needs_captions=True, seed=0)
    return next(iter(data.train.batches(batch_size=4, num_steps=1)))


def stock_loss(folder, noise_offset=0.0, snr_gamma=None, captions=None):
    """The loss of the first batch, or of its images with other captions, as diffusers' own parts compute it."""
    pipe, batch = load_stable_diffusion(folder), first_batch()
    schedule = training_schedule(pipe)
    with torch.no_grad():
        moments = pipe.vae.encode(batch["pixel_values"]).latent_dist
        latents = moments.mean + moments.std * batch.normal_like(moments.mean, "latents")
        latents = latents * pipe.vae.config.scaling_factor
        noise = batch.normal_like(latents, "noise")
        noise = noise + noise_offset * batch.normal_like(latents[:, :, :1, :1], "noise offset")
        timesteps = (batch.uniform("timestep") * 1000).long()
        noisy = schedule.add_noise(latents, noise, timesteps)
        prediction = pipe.unet(noisy, timesteps, **encode_prompts(pipe, captions or batch["captions"])).sample
        is_v = schedule.config.prediction_type == "v_prediction"
        target = schedule.get_velocity(latents, noise, timesteps) if is_v else noise
        losses = F.mse_loss(prediction, target, reduction="none").mean(dim=(1, 2, 3))
        if snr_gamma is not None:
            snr = schedule.alphas_cumprod[timesteps] / (1 - schedule.alphas_cumprod[timesteps])
            losses = losses * snr.clamp(max=snr_gamma) / (snr + 1 if is_v else snr)
    return float(losses.mean())


class TestTheFirstStep:
    @pytest.mark.parametrize("kind", ["sd1", "sd2", "sdxl"])
    def test_has_the_loss_of_the_model_as_it_was_bit_for_bit(self, tune, base, metrics_of, tmp_path, kind):
        folder = base(kind)
        runs = {"none": {"skip_scaling": "none"}, **METHODS}
        runs |= {f"{name} with lora": {**flags, "lora_rank": 2} for name, flags in METHODS.items()}
        losses = {name: metrics_of(tune(tmp_path / name, folder, **flags))[0]["loss"] for name, flags in runs.items()}
        assert losses == dict.fromkeys(runs, losses["none"])
        assert losses["none"] == pytest.approx(stock_loss(folder), rel=1e-5)

    @pytest.mark.parametrize("kind", ["sd1", "sd2"])
    def test_noise_offset_and_min_snr(self, tune, base, metrics_of, tmp_path, kind):
        folder = base(kind)
        run = tune(tmp_path / "run", folder, noise_offset=0.3, snr_gamma=0.5)
        expected = stock_loss(folder, noise_offset=0.3, snr_gamma=0.5)
        assert metrics_of(run)[0]["loss"] == pytest.approx(expected, rel=1e-5)
        assert expected != pytest.approx(stock_loss(folder), rel=1e-2)

    @pytest.mark.parametrize("kind", ["sd1", "sdxl"])
    def test_with_nearly_all_captions_left_out(self, tune, base, metrics_of, tmp_path, kind):
        folder = base(kind)
        run = tune(tmp_path / "run", folder, proportion_empty_prompts=0.999999)
        expected = stock_loss(folder, captions=[""] * 4)
        assert metrics_of(run)[0]["loss"] == pytest.approx(expected, rel=1e-5)
        assert expected != pytest.approx(stock_loss(folder), rel=1e-4)

    def test_in_half_precision_is_nearly_that_of_full_and_the_weights_stay_full(self, tune, metrics_of, tmp_path):
        half, full = (tune(tmp_path / name, mixed_precision=name) for name in ("bf16", "no"))
        losses = [metrics_of(run)[0]["loss"] for run in (half, full)]
        assert losses[0] == pytest.approx(losses[1], rel=0.02)
        assert losses[0] != losses[1]
        weights = load_file(half / "unet" / "diffusion_pytorch_model.safetensors")
        assert {weight.dtype for weight in weights.values()} == {torch.float32}

    def test_gradient_checkpointing_changes_nothing(self, tune, metrics_of, tmp_path):
        runs = (tune(tmp_path / str(on), gradient_checkpointing=on, learning_rate=0.01) for on in (None, True))
        one, other = ([line["loss"] for line in metrics_of(run)] for run in runs)
        assert one == pytest.approx(other, abs=1e-5)


@pytest.fixture
def precompute(fresh_accelerator, tmp_path):
    """`precompute(pipeline_folder)`: the folder of features by its encoders, or by its autoencoder alone."""

    def run(folder, with_captions=True):
        fresh_accelerator()
        captions = ["--pretrained_text_encoder_name_or_path", folder] if with_captions else []
        words = [
            "--pretrained_vae_model_name_or_path",
            folder / "vae",
            *captions,
            "--output_dir",
            tmp_path / "features",
        ]
        words += ["--resolution", 16, "--center_crop", "--num_shapes", 30]
        precompute_latents.main([str(word) for word in words])
        return tmp_path / "features"

    return run


class TestFeatures:
    IMAGES = {"num_shapes": None, "resolution": 16, "center_crop": True}

    @pytest.mark.parametrize("kind", ["sd1", "sdxl"])
    def test_have_every_loss_of_the_encoders_in_the_loop(self, tune, base, precompute, metrics_of, tmp_path, kind):
        folder = base(kind)
        in_the_loop = tune(tmp_path / "in_the_loop", folder, center_crop=True)
        from_features = tune(tmp_path / "out", folder, precomputed_dir=precompute(folder), **self.IMAGES)
        losses = [[line["loss"] for line in metrics_of(run)] for run in (from_features, in_the_loop)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)

    def test_of_another_autoencoder_are_refused(self, refused_tuning, build_kind, base, precompute, tmp_path):
        folder, other = base(), tmp_path / "other"
        features = precompute(folder)
        pipe = build_kind("sd1")
        torch.nn.init.normal_(pipe.vae.encoder.conv_in.weight)
        pipe.save_pretrained(other)
        sentence = refused_tuning(pretrained_model_name_or_path=other, precomputed_dir=features, **self.IMAGES)
        assert f"were made by the autoencoder {folder / 'vae'} (weights" in sentence
        assert f"and that of {other} (weights" in sentence

    def test_without_captions_are_refused(self, refused_tuning, base, precompute):
        features = precompute(base(), with_captions=False)
        sentence = refused_tuning(precomputed_dir=features, **self.IMAGES)
        assert "have no captions: precompute them with --pretrained_text_encoder_name_or_path" in sentence


class TestWhatIsLeftBehind:
    def test_a_pipeline_that_a_fresh_process_loads_scaled(self, tune, base, in_fresh_process, tmp_path):
        folder = base()
        out = tune(tmp_path / "out", folder, learning_rate=0.01, **METHODS["ls"])
        for name in ("vae", "text_encoder"):
            weights, before = (load_file(next((path / name).glob("*.safetensors"))) for path in (out, folder))
            assert all(torch.equal(weights[key], before[key]) for key in before)
        pipe = diffusers.StableDiffusionPipeline.from_pretrained(out)
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(0)
        image = pipe("a red circle", num_inference_steps=2, generator=generator, output_type="pt").images
        save_file({"image": torch.as_tensor(image)}, tmp_path / "image.safetensors")
        code = """
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
        printed = in_fresh_process(code, out, tmp_path / "image.safetensors").stdout
        assert printed.split() == ["ls", "ScaleLongUNet2DConditionModel"]

    @pytest.mark.parametrize(("kind", "method"), [("sd1", "ls"), ("sdxl", "cs")])
    def test_an_adapter_that_is_loaded_into_the_base(self, tune, base, tmp_path, kind, method):
        folder = base(kind)
        out = tune(tmp_path / "out", folder, lora_rank=2, lora_alpha=6, learning_rate=0.01, **METHODS[method])
        names = {path.name for path in out.iterdir() if path.is_file()}
        gates = {"skip_scaling.safetensors"} if method == "ls" else set()
        adapter = {"pytorch_lora_weights.safetensors", "skip_scaling.json"} | gates
        assert names == adapter | {"metrics.jsonl", "settings.json"}

        trained = load_file(out / "checkpoint-3" / "unet" / "trained.safetensors")
        assert any(".lora_" in name for name in trained)
        assert all(".lora_" in name or name.startswith("skip_scaler.") for name in trained)
        pipe = load_adapter(load_stable_diffusion(folder), out)
        loaded = dict(pipe.unet.named_parameters())
        for name, weight in trained.items():
            torch.testing.assert_close(loaded[name.replace("default", "default_0")], weight, rtol=0, atol=0)
        assert pipe.unet.peft_config["default_0"].lora_alpha == 6
        assert pipe.unet.skip_scaler.config.method == method
        assert pipe.unet.skip_scaler.config.strength == 1

    def test_samples_of_all_prompts(self, tune, tmp_path):
        prompts = ["a red circle", "purple", "a green triangle"]
        out = tune(tmp_path / "out", validation_prompts=prompts, num_inference_steps=2, sample_steps=3, num_samples=2)
        with Image.open(out / "samples" / "step-000003.png") as grid:
            assert grid.size == (32, 32)  # two by two of 16 pixels, the last one empty

    def test_on_the_hub(self, hub, build_kind, tmp_path):
        build_kind("sd1").save_pretrained(tmp_path / "base")
        code = """
import torch
torch.set_num_threads(1)
from diffusers import StableDiffusionPipeline
from huggingface_hub import ModelCard, hf_hub_download
from scalelong_diffusers import load_adapter
from scalelong_diffusers.train import finetune_text_to_image
StableDiffusionPipeline.from_pretrained("base").push_to_hub("owner/base")
shared = "--pretrained_model_name_or_path owner/base --num_shapes 30 --train_batch_size 2 --max_train_steps 2"
shared += " --sample_steps 0 --skip_scaling_reduction 4 --push_to_hub"
for name, flags in {"adapter": "--lora_rank 2", "whole": ""}.items():
    flags = f"{shared} {flags} --hub_model_id owner/{name} --output_dir {name}"
    finetune_text_to_image.main(flags.split())
    card = ModelCard(open(hf_hub_download(f"owner/{name}", "README.md")).read()).data
    print(card.base_model, card.base_model_relation)
pipe = load_adapter(StableDiffusionPipeline.from_pretrained("owner/base"), "owner/adapter")
print(pipe.unet.skip_scaler.config.method, len(pipe.unet.peft_config))
pipe = StableDiffusionPipeline.from_pretrained("owner/whole")
here = StableDiffusionPipeline.from_pretrained("whole")
same = all(torch.equal(*weights) for weights in zip(pipe.unet.parameters(), here.unet.parameters()))
print(pipe.unet.skip_scaler.config.method, same)
"""
        result = hub(code)
        assert "failed" not in result.stderr
        printed = result.stdout.splitlines()
        assert [line for line in printed if line.startswith("owner/")] == ["owner/base adapter", "owner/base finetune"]
        assert printed[-2:] == ["ls 1", "ls True"]


class TestWarmingUp:
    def strengths(self, folder):
        configs = [json.loads(path.read_text()) for path in sorted(folder.glob("checkpoint-*/unet/config.json"))]
        return [config["skip_scaling"]["strength"] for config in configs]

    def test_from_nothing_to_all_of_it(self, tune, tmp_path):
        changes = {"skip_scaling": "cs", "skip_scaling_warmup_steps": 4, "checkpointing_steps": 1}
        out = tune(tmp_path / "out", max_train_steps=6, **changes)
        assert self.strengths(out) == [0, 0.25, 0.5, 0.75, 1, 1]
        assert ScaleLongUNet2DConditionModel.from_pretrained(out / "unet").skip_scaler.config.strength == 1

    def test_to_what_was_asked_for(self, tune, tmp_path):
        changes = {"skip_scaling": "ls", "skip_scaling_init": "paper", "skip_scaling_reduction": 4}
        changes |= {"skip_scaling_strength": 0.5, "skip_scaling_warmup_steps": 2, "checkpointing_steps": 1}
        out = tune(tmp_path / "out", **changes)
        assert self.strengths(out) == [0, 0.25, 0.5]

    @pytest.mark.parametrize(
        ("scaling", "changes"),
        [
            ({"method": "cs", "strength": 0.7}, {"skip_scaling": "cs"}),
            ({"method": "cs", "kappa": 0.8, "strength": 0.7}, {}),
            ({"method": "ls", "reduction": 4, "strength": 0.7}, {}),
        ],
    )
    def test_a_pipeline_that_is_scaled_goes_on_as_it_is(self, tune, base, tmp_path, scaling, changes):
        pipe = apply_skip_scaling(load_stable_diffusion(base()), scaling)
        pipe.save_pretrained(tmp_path / "scaled")
        out = tune(tmp_path / "out", tmp_path / "scaled", **changes)
        trained = ScaleLongUNet2DConditionModel.from_pretrained(out / "unet")
        assert trained.skip_scaler.config == pipe.unet.skip_scaler.config
        assert self.strengths(out) == [0.7]
        assert json.loads((out / "settings.json").read_text())["skip_scaling"] == scaling["method"]


class TestResuming:
    @pytest.mark.parametrize(
        "changes",
        [
            {**METHODS["ls"], "lora_rank": 2, "use_ema": True},
            {**METHODS["cs"], "lora_rank": 2, "skip_scaling_warmup_steps": 6},
            {**METHODS["cs"], "skip_scaling_warmup_steps": 6},
        ],
        ids=str,
    )
    def test_bit_for_bit(self, tune, base, assert_same_run, tmp_path, changes):
        changes = {"max_train_steps": 8, "checkpointing_steps": 3, "learning_rate": 0.01, **changes}
        folder = base()
        expected = tune(tmp_path / "unbroken", folder, **changes)
        broken = shutil.copytree(expected, tmp_path / "broken")
        for step in (6, 8):
            shutil.rmtree(broken / f"checkpoint-{step}")
        tune(broken, folder, resume_from_checkpoint="latest", **changes)
        assert_same_run(broken, expected)

    @pytest.mark.parametrize("lora_rank", [None, 2])
    def test_a_run_that_only_has_to_be_saved(self, tune, base, tmp_path, lora_rank):
        changes = {**METHODS["cs"], "lora_rank": lora_rank, "learning_rate": 0.01}
        folder, out = base(), tmp_path / "out"
        tune(out, folder, **changes)
        file = out / ("skip_scaling.json" if lora_rank else "unet/config.json")
        before = json.loads(file.read_text())["skip_scaling"]
        file.unlink()
        tune(out, folder, resume_from_checkpoint="latest", **changes)
        assert json.loads(file.read_text())["skip_scaling"] == before
        assert before["strength"] == 1


@pytest.mark.slow
def test_two_processes_train_a_lora_as_one_does(tune, launch, base, metrics_of, tmp_path):
    folder, changes = base(), {**METHODS["ls"], **FAST, "lora_rank": 2, "learning_rate": 0.01}
    two = launch(
        tmp_path / "two",
        processes=2,
        script=finetune_text_to_image.__file__,
        **{**changes, "train_batch_size": 2, "resolution": None, "model_config_name_or_path": None},
        pretrained_model_name_or_path=folder,
    )
    one = tune(tmp_path / "one", folder, **changes)
    code, _, errors = two.wait()
    assert code == 0, errors
    losses = [[line["loss"] for line in metrics_of(path)] for path in (one, tmp_path / "two")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


class EightBits(torch.optim.Optimizer):
    """Its momentum is stored as places in a table that all parameters share, as in 8-bit Adam."""

    def __init__(self, args, parameters):
        super().__init__(parameters, {"lr": args.learning_rate})
        self.table = torch.linspace(-1, 1, 255)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["places"] = torch.full_like(parameter, 127, dtype=torch.uint8)
                    state["table"] = self.table
                momentum = state["table"][state["places"].long()].lerp(parameter.grad.clamp(-1, 1), 0.5)
                state["places"] = ((momentum + 1) * 127).round().to(torch.uint8)
                parameter.sub_(group["lr"] * momentum)


@pytest.mark.parametrize("package", ["bitsandbytes", None])
def test_eight_bit_adam_is_resumed_bit_for_bit(tune, base, assert_same_run, monkeypatch, tmp_path, package):
    if package is None:
        monkeypatch.setattr(finetune_text_to_image, "eight_bit_adam", EightBits)
    else:
        pytest.importorskip(package)
    changes = {"max_train_steps": 4, "checkpointing_steps": 2, "learning_rate": 0.01, "use_8bit_adam": True}
    folder = base()
    expected = tune(tmp_path / "unbroken", folder, **changes)
    broken = shutil.copytree(expected, tmp_path / "broken")
    shutil.rmtree(broken / "checkpoint-4")
    tune(broken, folder, resume_from_checkpoint="latest", **changes)
    assert_same_run(broken, expected)
    state = load_file(expected / "checkpoint-4" / "optimizer.safetensors")
    assert any(tensor.dtype == torch.uint8 for tensor in state.values())


class TestDefaults:
    def test_the_rate_is_that_of_what_is_trained(self):
        whole, lora = (
            parse_args(["--pretrained_model_name_or_path", "x"]),
            parse_args(["--pretrained_model_name_or_path", "x", "--lora_rank", "4"]),
        )
        assert (whole.learning_rate, lora.learning_rate) == (1e-5, 1e-4)
        assert (whole.lr_scheduler, whole.use_ema) == ("constant", False)


# As where it is not installed.
WITHOUT_PEFT = (
    "import runpy, sys; sys.modules['peft'] = None; sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"preset": "mscoco-unet"}, "unknown argument '--preset'"),
            ({"prediction_type": "epsilon"}, "unknown argument '--prediction_type'"),
            ({"lora_ranks": 4}, "unknown argument '--lora_ranks' (did you mean '--lora_rank'?)"),
            ({"lora_rank": 0}, "lora_rank must be a whole number of at least 1"),
            ({"lora_alpha": 2}, "lora_alpha=2.0 is not used without lora_rank"),
            ({"noise_offset": -1}, "--noise_offset must be at least 0, got -1.0"),
            ({"skip_scaling": "cs", "skip_scaling_warmup_steps": 0}, "would change what the model makes at once"),
            ({"skip_scaling_warmup_steps": 5}, "has nothing to warm up: --skip_scaling ls starts with factors of 1"),
            ({"skip_scaling": "cs", "skip_scaling_warmup_steps": 16}, "does not end within the run's 16 steps"),
            ({"skip_scaling": "cs"}, "--skip_scaling_warmup_steps 500 does not end within the run's 16 steps"),
            ({"resolution": 15}, "--resolution=15 does not fit"),
            ({"proportion_empty_prompts": 1}, "--proportion_empty_prompts must be in [0, 1), got 1.0"),
            ({"lora_rank": 2, "push_to_hub": True}, "is a folder: give an id, or push later with push_adapter"),
            ({"validation_prompts": ["red " * 9]}, "has 11 tokens, and its encoder and model read 10: shorten it"),
            ({"pretrained_model_name_or_path": "some/sd"}, "some/sd is no local folder, and the Hub can not be"),
        ],
        ids=str,
    )
    def test_with_a_sentence(self, refused_tuning, changes, message):
        assert message in refused_tuning(**{"resolution": None, **changes})

    @pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="the package is there")
    def test_eight_bits_without_the_package(self, refused_tuning):
        sentence = refused_tuning(use_8bit_adam=True, resolution=None)
        assert sentence == "--use_8bit_adam needs a package that is not there: pip install bitsandbytes"

    def test_another_pipeline(self, refused_tuning, ddpm, tmp_path):
        diffusers.DDPMPipeline(ddpm.build(), diffusers.DDPMScheduler()).save_pretrained(tmp_path / "ddpm")
        sentence = refused_tuning(pretrained_model_name_or_path=tmp_path / "ddpm")
        assert "is a DDPMPipeline; what can be fine-tuned as Stable Diffusion is" in sentence

    def test_a_model_without_attention(self, refused_tuning, build_kind, sd, tmp_path):
        pipe = build_kind("sd1")
        pipe.unet = sd.build(
            down_block_types=("DownBlock2D",) * 2, mid_block_type="UNetMidBlock2D", up_block_types=("UpBlock2D",) * 2
        )
        pipe.save_pretrained(tmp_path / "plain")
        sentence = refused_tuning(pretrained_model_name_or_path=tmp_path / "plain", lora_rank=2)
        assert "takes encoder_hidden_states; this UNet2DConditionModel takes no condition" in sentence

    def test_a_scaling_that_is_there_is_not_warmed_up(self, refused_tuning, base, tmp_path):
        apply_skip_scaling(load_stable_diffusion(base()), "cs").save_pretrained(tmp_path / "scaled")
        changes = {"pretrained_model_name_or_path": tmp_path / "scaled", "resolution": None, "skip_scaling": "cs"}
        assert "scaled is scaled already" in refused_tuning(skip_scaling_warmup_steps=2, **changes)
        assert "was trained with SkipScalingConfig(method='cs'" in refused_tuning(**{**changes, "skip_scaling": "ls"})
        said = refused_tuning(**{**changes, "skip_scaling": None, "kappa": 0.5})
        assert said.startswith("--kappa needs --skip_scaling METHOD")

    @pytest.mark.parametrize("size", [None, [8, 8]])
    def test_a_unet_that_names_no_size(self, refused_tuning, tune, build_kind, sd, tmp_path, size):
        pipe = build_kind("sd1")
        pipe.unet = sd.build(sample_size=size)
        pipe.save_pretrained(tmp_path / "sizeless")
        sentence = refused_tuning(pretrained_model_name_or_path=tmp_path / "sizeless", resolution=None)
        assert f"sizeless has sample_size={size}, which names no side of square images: give --resolution" in sentence
        tune(tmp_path / "out", tmp_path / "sizeless", resolution=16, max_train_steps=1)

    def test_a_folder_with_an_adapter(self, tune, base, tmp_path):
        out = tune(tmp_path / "out", lora_rank=2, **METHODS["ls"])
        shutil.rmtree(out / "checkpoint-3")
        before = {path.name for path in out.iterdir()}
        for lora_rank in (2, None):
            with pytest.raises(TrainingStopped, match=r"out holds an adapter: give another folder") as stopped:
                tune(out, tmp_path / "sd1", lora_rank=lora_rank, **METHODS["cs"])
            assert stopped.value.exit_code == 2
        assert {path.name for path in out.iterdir()} == before

    @pytest.mark.parametrize(
        ("changes", "code", "message"),
        [
            (
                {"validation_prompts": ["red " * 9]},
                None,
                "has 11 tokens, and its encoder and model read 10: shorten it",
            ),
            (
                {"lora_rank": 2},
                WITHOUT_PEFT,
                "--lora_rank 2: LoRA needs the package peft: pip install 'scalelong-diffu",
            ),
        ],
    )
    def test_in_one_line_and_with_exit_code_2(self, launch, base, tmp_path, changes, code, message):
        settings = {"model_config_name_or_path": None, "resolution": None, "pretrained_model_name_or_path": base()}
        script = finetune_text_to_image.__file__
        status, _, errors = launch(tmp_path / "run", script=script, python_code=code, **settings, **changes).wait()
        assert status == 2
        # transformers says something of its own as it is imported, where torchvision is missing.
        (line,) = [line for line in errors.strip().splitlines() if "requires torchvision" not in line]
        assert line.startswith("finetune_text_to_image")
        assert message in line
