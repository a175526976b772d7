"""FSDP2 trains like one process, its checkpoints resume exactly, and its pipelines are ordinary ones."""

import json
import math
import os
import re
import resource
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from scalelong_diffusers import ScaleLongTextToImagePipeline, ScaleLongUnconditionalPipeline, load_adapter
from scalelong_diffusers.train import finetune_text_to_image, train_text_to_image
from scalelong_diffusers.training import TrainingRun
from scalelong_diffusers.training.stable_diffusion import load_stable_diffusion


pytestmark = pytest.mark.slow

TWENTY = {"max_train_steps": 20, "checkpointing_steps": 10, "skip_scaling": "ls"}
MUP = {"hidden_size": 32, "mup_base_width": 16, "mup_base_depth": 2}
RESUME = {"resume_from_checkpoint": "latest"}


def use_fsdp(version: int = 2, **settings):
    """Return a function that sets accelerate's environment variables, as `accelerate launch --use_fsdp` does."""
    settings = {"version": version, "cpu_ram_efficient_loading": "true", **settings}
    variables = {"ACCELERATE_USE_FSDP": "true"}
    variables |= {f"FSDP_{name.upper()}": str(value) for name, value in settings.items()}
    return lambda: os.environ.update(variables)


@pytest.fixture
def shard(launch):
    """`shard(output_dir, processes, flag=value)` starts a run with FSDP2."""

    def run(output_dir, processes=2, prepare=lambda: None, fsdp=None, **changes):
        set_variables = use_fsdp(**(fsdp or {}))
        return launch(output_dir, processes, prepare=lambda: (set_variables(), prepare()), **changes)

    return run


def succeed(*runs):
    for run in runs:
        code, _, errors = run.wait()
        assert code == 0, errors


def read_shards(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the whole tensors in the shards of a checkpoint."""
    reader = dcp.HuggingFaceStorageReader(str(checkpoint / "shards"))
    entries = reader.read_metadata().state_dict_metadata.items()
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def assert_equal(tensors, expected, atol=0.0):
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=atol, msg=name)


def forget_later_checkpoints(folder: Path, step: int):
    for path in folder.glob("checkpoint-*"):
        if int(path.name.split("-")[1]) > step:
            shutil.rmtree(path)


def test_trains_and_resumes_like_one_process(train, shard, double_script, weights_of, metrics_of, tmp_path):
    """
    Train in float64 with muP. Two processes are killed, and resumed by two, by four and by one.

    Two resume bit-identically. All of them train like one process throughout.
    """
    changes = {"script": double_script, **TWENTY, **MUP}
    whole = train(tmp_path / "whole", train_batch_size=8, **changes)
    runs = [shard(tmp_path / "sharded", train_batch_size=4, **changes)]
    killed = shard(tmp_path / "killed", train_batch_size=4, **{**changes, "max_train_steps": 400})
    killed.wait_until(lambda: (tmp_path / "killed" / "checkpoint-10").exists())
    killed.kill()
    forget_later_checkpoints(tmp_path / "killed", 10)
    for name in ("by four", "by one"):
        shutil.copytree(tmp_path / "killed", tmp_path / name)
    runs.append(shard(tmp_path / "killed", train_batch_size=4, **changes, **RESUME))
    fsdp = {"state_dict_type": "FULL_STATE_DICT", "auto_wrap_policy": "NO_WRAP", "reshard_after_forward": "false"}
    runs.append(shard(tmp_path / "by four", 4, fsdp=fsdp, train_batch_size=2, **changes, **RESUME))
    train(tmp_path / "by one", train_batch_size=8, **changes, **RESUME)
    succeed(*runs)

    sharded, resumed = (tmp_path / name / "checkpoint-20" for name in ("sharded", "killed"))
    files = sorted(path.name for path in (sharded / "shards").iterdir())
    one, other = ((sharded / "shards" / name).stat().st_size for name in files)
    assert one == pytest.approx(other, rel=0.1)  # each process keeps one half
    for name in files:
        assert_equal(load_file(resumed / "shards" / name), load_file(sharded / "shards" / name))
    assert metrics_of(tmp_path / "killed") == metrics_of(tmp_path / "sharded")

    expected = weights_of(whole, 20), weights_of(whole, 20, "unet_ema")
    assert expected[0]["norm.weight"].dtype == torch.float64
    tensors = read_shards(sharded)
    for prefix, weights in zip(("unet/", "ema/unet."), expected):
        assert_equal({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}, weights, 1e-9)
    for name in ("by four", "by one"):
        assert_equal(weights_of(tmp_path / name, 20), expected[0], 1e-9)
        assert_equal(weights_of(tmp_path / name, 20, "unet_ema"), expected[1], 1e-9)
    # Four processes wrote whole models, which two processes read again.
    changes["max_train_steps"] = 21
    again = shard(tmp_path / "by four", train_batch_size=4, **changes, **RESUME)
    succeed(again)


class Watch(TorchDispatchMode):
    """Count the operations that wait for the device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            Watch.count += 1
        return function(*args, **kwargs or {})


def count_waits():
    """Write the number of waits in steps between two log lines."""
    step = TrainingRun.step

    def watched(run, losses):
        with Watch():
            step(run, losses)
        if run.global_step == run.size.max_train_steps:
            (run.folder / f"waits-{run.accelerator.process_index}").write_text(str(Watch.count))

    TrainingRun.step = watched


def test_saves_an_ordinary_pipeline_and_skips_nonfinite_steps(
    shard, train, metrics_of, weights_of, tmp_path, poisoned_data
):
    """One of two processes has a non-finite loss in step 4."""
    poisoned_data(first=3, last=4)
    folder = tmp_path / "sharded"
    changes = {"sample_steps": 8, "num_samples": 1, "num_inference_steps": 1, "max_train_steps": 8, "logging_steps": 3}
    changes |= {"diagnose_steps": 5, "skip_scaling_warmup_steps": 4}
    running = shard(folder, prepare=count_waits, train_batch_size=2, **changes)
    expected = train(tmp_path / "whole", train_batch_size=4, **changes)
    succeed(running)
    assert [(folder / f"waits-{rank}").read_text() for rank in range(2)] == ["0", "0"]
    assert "skipped updates with a non-finite loss or gradient (at most 1 in a row)" in running.process.read("out")
    for line, wanted in zip(metrics_of(folder), metrics_of(expected), strict=True):
        for name in ("loss", "grad_norm", "validation_loss", "validation_loss_raw"):
            assert line.get(name) == pytest.approx(wanted.get(name), abs=1e-4), name
        for name, values in wanted.get("skips", {}).items():
            assert line["skips"][name] == pytest.approx(values, rel=0.02, nan_ok=True), name
    assert (folder / "samples" / "step-000008.png").exists()

    config = json.loads((folder / "unet" / "config.json").read_text())
    assert config == json.loads((expected / "unet" / "config.json").read_text())
    unet = ScaleLongUnconditionalPipeline.from_pretrained(folder).unet
    average = read_shards(folder / "checkpoint-8")
    assert_equal(unet.state_dict(), {name: average[f"ema/unet.{name}"] for name in unet.state_dict()})


def test_trains_two_models_in_bf16_with_activation_checkpointing(shard, train, tiny_config, metrics_of, tmp_path):
    changes = {"script": train_text_to_image, "model_config_name_or_path": tiny_config / "text", "max_train_steps": 4}
    changes |= {"mixed_precision": "bf16", "gradient_checkpointing": True, "gradient_accumulation_steps": 2}
    changes |= {"skip_scaling": "ls", "continuous_time": True, "checkpointing_steps": 4, "validation_steps": 4}
    sharded = tmp_path / "sharded"
    running = shard(sharded, train_batch_size=1, **changes)
    whole = train(tmp_path / "whole", train_batch_size=2, **changes)
    succeed(running)
    for line, wanted in zip(metrics_of(sharded), metrics_of(whole), strict=True):
        for name in ("loss", "validation_loss"):
            assert line.get(name) == pytest.approx(wanted.get(name), abs=0.01), (line, wanted)
    pipe = ScaleLongTextToImagePipeline.from_pretrained(sharded)
    average = read_shards(sharded / "checkpoint-4")
    for name, model in (("unet", pipe.unet), ("text_encoder", pipe.text_encoder)):
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        assert_equal(
            dict(model.named_parameters()), {n: average[f"ema/{name}.{n}"] for n, _ in model.named_parameters()}
        )


def test_trains_a_lora_and_gates(shard, train, build_kind, tmp_path):
    build_kind("sd1").save_pretrained(tmp_path / "base")
    changes = {
        "model_config_name_or_path": None,
        "resolution": None,
        "learning_rate": 1e-3,
        "script": finetune_text_to_image,
    }
    changes |= {"pretrained_model_name_or_path": tmp_path / "base", "lora_rank": 2, "skip_scaling": "ls"}
    changes |= {"skip_scaling_reduction": 4, "max_train_steps": 4, "checkpointing_steps": 2, "validation_steps": 4}
    sharded = tmp_path / "sharded"
    running = shard(sharded, train_batch_size=2, **changes)
    whole = train(tmp_path / "whole", **changes)
    succeed(running)
    trained = read_shards(sharded / "checkpoint-4")
    assert not any("base_layer" in name for name in trained)
    for file in ("pytorch_lora_weights.safetensors", "skip_scaling.safetensors"):
        weights = load_file(sharded / file)
        assert_equal(weights, load_file(whole / file), 1e-4)
    pipe = load_adapter(load_stable_diffusion(tmp_path / "base"), sharded)
    assert pipe.unet.skip_scaler.config.method == "ls"
    forget_later_checkpoints(sharded, 2)
    train(sharded, **changes, **RESUME)
    assert_equal(load_file(sharded / file), load_file(whole / file), 1e-4)


def test_fine_tunes_all_weights_of_sdxl(shard, train, build_kind, tmp_path):
    build_kind("sdxl").save_pretrained(tmp_path / "base")
    changes = {"model_config_name_or_path": None, "resolution": None, "script": finetune_text_to_image}
    changes |= {"pretrained_model_name_or_path": tmp_path / "base", "learning_rate": 1e-3, "max_train_steps": 4}
    changes |= {"skip_scaling": "ls", "skip_scaling_reduction": 4, "checkpointing_steps": 4, "validation_steps": 4}
    running = shard(tmp_path / "sharded", train_batch_size=2, **changes)
    train(tmp_path / "whole", **changes)
    succeed(running)
    trained, whole, base = (load_stable_diffusion(tmp_path / name).unet for name in ("sharded", "whole", "base"))
    assert_equal(trained.state_dict(), whole.state_dict(), 1e-4)
    assert not torch.equal(trained.conv_in.weight, base.conv_in.weight)


FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "configured for DeepSpeed, .*; accepted: DDP, or FSDP2"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "configured for Megatron-LM, .*; accepted: DDP, or FSDP2"),
        ({"ACCELERATE_USE_FSDP": "true"}, "configured for FSDP version 1; accepted: DDP, or FSDP2"),
        (FSDP2 | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "use --gradient_checkpointing of the script"),
        (FSDP2 | {"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params is not supported, because each step would"),
    ],
)
def test_refuses_other_engines_and_their_options(refused, monkeypatch, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert re.search(message, refused())


def test_refuses_snapshots_of_the_ema(refused, monkeypatch):
    for name, value in FSDP2.items():
        monkeypatch.setenv(name, value)
    assert "--ema_snapshot_steps does not read the sharded weights of FSDP2" in refused(ema_snapshot_steps=2)


def test_refuses_8_bit_adam(shard, build_kind, tmp_path):
    build_kind("sd1").save_pretrained(tmp_path / "base")
    changes = {"pretrained_model_name_or_path": tmp_path / "base", "use_8bit_adam": True}
    changes |= {"model_config_name_or_path": None, "script": finetune_text_to_image}
    code, _, errors = shard(tmp_path / "run", **changes).wait()
    assert code == 2
    assert "--use_8bit_adam does not read the sharded weights of FSDP2: omit it, or use DDP" in errors
    assert not (tmp_path / "run").exists()


def test_gradient_scaler_skips_an_overflow_in_one_shard(shard, tmp_path):
    """accelerate has a scaler only on GPUs. The gradient of the first process overflows in step 2."""
    start, backward = TrainingRun.start, Accelerator.backward

    def start_with_scaler(run, *args, **options):
        run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        start(run, *args, **options)
        run.accelerator.trained = run.optimizer_step

    def overflow(accelerator, loss):
        backward(accelerator, loss)
        steps = accelerator.trained.optimizer.param_groups[0]["params"][0]
        accelerator.count = getattr(accelerator, "count", 0) + 1
        if accelerator.count == 2 and accelerator.is_main_process:
            steps.grad.to_local().fill_(math.inf)

    def prepare():
        TrainingRun.start, Accelerator.backward = start_with_scaler, overflow

    folder = tmp_path / "run"
    running = shard(folder, train_batch_size=2, prepare=prepare, max_train_steps=3, checkpointing_steps=1)
    succeed(running)
    first, second, third = (read_shards(folder / f"checkpoint-{step}") for step in (1, 2, 3))
    weights = [name for name in first if name.startswith("unet/")]
    assert all(torch.equal(first[name], second[name]) for name in weights)
    assert not any(torch.equal(second[name], third[name]) for name in weights)
    assert json.loads((folder / "checkpoint-2" / "state.json").read_text())["scaler"]["scale"] == 2.0**9


def test_full_disk_ends_the_run_with_one_line(shard, tmp_path):
    folder = tmp_path / "run"
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # noqa: E731
    code, _, errors = shard(folder, train_batch_size=2, prepare=limit, max_train_steps=400).wait()
    assert code == 1
    assert re.search(f"cannot write the checkpoint of step 4 in {folder}: process [01]: .*; there is no", errors)
    assert "Traceback" not in errors
    assert not list(folder.glob("*checkpoint-*")) + list(folder.glob(".scalelong-partial-*"))


def test_refuses_a_folder_that_nodes_do_not_share(shard, tmp_path):
    """The second process has another current folder."""

    def move():
        folder = tmp_path / f"node-{os.environ['RANK']}"
        folder.mkdir()
        os.chdir(folder)

    code, _, errors = shard("run", train_batch_size=2, prepare=move).wait()
    assert code == 2
    assert re.search("--output_dir run does not exist on .*: with FSDP2, all nodes must see the same folder", errors)
