"""Snapshots of a run's power-function EMA, and the pipelines that `scalelong ema` reconstructs from them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from scalelong_diffusers import ScaleLongUnconditionalPipeline, UserError
from scalelong_diffusers.files import checksum
from scalelong_diffusers.train import finetune_text_to_image
from scalelong_diffusers.training import power_ema
from scalelong_diffusers.training.posthoc_ema import reconstruct_ema, reconstruction
from scalelong_diffusers.training.power_ema import KEPT_SIGMA_RELS, PowerEMA, gamma_of


STEPS, EVERY = 60, 3
RESUME = {"resume_from_checkpoint": "latest"}


def shares(sigma_rel: float, steps: int) -> torch.Tensor:
    """Return the shares of the steps in an average: the integrals of its profile over each step."""
    edges = (torch.arange(steps + 1, dtype=torch.float64) / steps) ** (gamma_of(sigma_rel) + 1)
    return edges.diff()


@pytest.fixture(scope="module")
def run(train_once, tmp_path_factory) -> Path:
    """A finished run with snapshots, and with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("ema") / "run"
    return train_once(folder, max_train_steps=STEPS, checkpointing_steps=1, ema_snapshot_steps=EVERY)


@pytest.fixture
def copy_of(run, tmp_path):
    """`copy_of(step)`: the run as if it had been killed after the checkpoint of `step`."""

    def copy(step: int = STEPS) -> Path:
        ignored = [path.name for path in run.glob("checkpoint-*") if int(path.name.split("-")[1]) > step]
        if step < STEPS:
            ignored += ["model_index.json", "unet", "scheduler"]
        return shutil.copytree(run, tmp_path / "copy", ignore=lambda folder, _: ignored if folder == str(run) else [])

    return copy


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("sigma_rel", [0.01, 0.05, 0.1, 0.28])
def test_gamma_gives_the_relative_width(sigma_rel):
    gamma = gamma_of(sigma_rel)
    assert ((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3))) ** 0.5 == pytest.approx(sigma_rel)
    times = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    density = times**gamma / (times**gamma).sum()
    mean = (density * times).sum()
    assert (density * (times - mean) ** 2).sum().sqrt().item() == pytest.approx(sigma_rel, rel=1e-3)


def test_averages_have_power_function_profiles():
    parameter = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    averages, values = PowerEMA({"weight": parameter}), torch.randn(40, 5, dtype=torch.float64)
    for value in values:
        parameter.data = value
        averages.update()
    for sigma_rel in KEPT_SIGMA_RELS:
        expected = shares(sigma_rel, 40) @ values
        torch.testing.assert_close(averages.averages[sigma_rel]["weight"], expected)


def test_kept_averages_are_reconstructed_exactly():
    factors, errors = reconstruction(range(10, 210, 10), 200, KEPT_SIGMA_RELS)
    expected = torch.zeros(2, 2, 20, dtype=torch.float64)
    expected[0, 0, -1] = expected[1, 1, -1] = 1
    torch.testing.assert_close(factors, expected, rtol=0, atol=1e-9)
    assert errors.max() < 1e-6


def test_more_snapshots_are_more_exact_and_factors_add_up_to_one():
    sigma_rels, last = [0.02, 0.03, 0.075, 0.15, 0.2], None
    for count in (10, 40, 160):
        factors, errors = reconstruction([100 * (k + 1) for k in range(count)], 100 * count, sigma_rels)
        torch.testing.assert_close(factors.sum((1, 2)), torch.ones(5, dtype=torch.float64))
        assert last is None or (errors < last / 3).all()
        last = errors
    assert last.max() < 0.002


def test_pipelines_equal_averages_that_were_trained_directly(run, weights_of, scalelong, tmp_path):
    history = torch.stack([flat(weights_of(run, step)) for step in range(1, STEPS + 1)])
    lengths = (0.04, 0.05, 0.075, 0.1, 0.15, 0.2)
    command = ("ema", run, "--sigma_rel", *lengths, "--output_dir", tmp_path / "ema", "--json")
    code, printed, _ = scalelong(*map(str, command))
    assert code == 0
    for length, result in zip(lengths, json.loads(printed), strict=True):
        pipe = ScaleLongUnconditionalPipeline.from_pretrained(result["folder"])
        expected = shares(length, STEPS) @ history
        assert distance(flat(pipe.unet.state_dict()), expected) < 1e-3
        assert result["num_snapshots"] == STEPS // EVERY
        assert result["profile_error"] < 0.05
        assert json.loads(Path(result["folder"], "ema.json").read_text())["sigma_rel"] == length
    # The lengths differ by much more than the tolerance.
    neighbors = [shares(length, STEPS) @ history for length in lengths]
    assert min(map(distance, neighbors, neighbors[1:])) > 5e-3


def test_an_earlier_step(run, weights_of, tmp_path):
    history = torch.stack([flat(weights_of(run, step)) for step in range(1, 46)])
    [result] = reconstruct_ema(str(run), str(tmp_path / "ema"), [0.12], step=45)
    assert (result.step, result.num_snapshots) == (45, 15)
    weights = flat(ScaleLongUnconditionalPipeline.from_pretrained(result.folder).unet.state_dict())
    assert distance(weights, shares(0.12, 45) @ history) < 1e-3


def test_interrupted_command_makes_only_the_missing_pipelines(run, tmp_path):
    first, second = reconstruct_ema(str(run), str(tmp_path / "ema"), [0.1, 0.2])
    shutil.rmtree(second.folder)
    (tmp_path / "ema" / ".scalelong-partial-sigma_rel-0.2").mkdir()
    marker = Path(first.folder, "marker")
    marker.touch()
    assert reconstruct_ema(str(run), str(tmp_path / "ema"), [0.1, 0.2]) == [first, second]
    assert marker.exists()
    assert Path(second.folder, "model_index.json").exists()
    assert len(list((tmp_path / "ema").iterdir())) == 2


def test_pipelines_of_an_earlier_training_in_the_same_folder_are_not_taken_for_new_ones(copy_of, tmp_path):
    folder = copy_of()
    [result] = reconstruct_ema(str(folder), str(tmp_path / "ema"), [0.1])
    last = folder / "ema_snapshots" / f"step-{STEPS}.safetensors"
    others = {name: average + 1 for name, average in load_file(last).items()}
    power_ema.write_snapshot(folder, STEPS, others)
    with pytest.raises(UserError, match=r"sigma_rel-0\.1 already exists: remove it, or pass another"):
        reconstruct_ema(str(folder), str(tmp_path / "ema"), [0.1])
    shutil.rmtree(result.folder)
    assert reconstruct_ema(str(folder), str(tmp_path / "ema"), [0.1]) == [result]


def snapshots_of(folder: Path) -> dict[str, dict[str, str]]:
    """Return the checksums of the averages in each snapshot, by file."""
    return {path.name: dict(checksums_of(path)) for path in (folder / "ema_snapshots").iterdir()}


def checksums_of(file: Path):
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata().keys() == set(opened.keys())
        for name in opened.keys():  # noqa: SIM118
            yield name, checksum(opened.get_tensor(name))


def test_snapshots_are_taken_at_intervals_and_at_the_end(train, tmp_path):
    folder = train(tmp_path / "run", max_train_steps=7, ema_snapshot_steps=3)
    assert sorted(snapshots_of(folder)) == ["step-3.safetensors", "step-6.safetensors", "step-7.safetensors"]


def test_accumulation_and_resuming_without_the_usual_ema(train, weights_of, assert_same_run, tmp_path):
    settings = {"max_train_steps": 12, "ema_snapshot_steps": 1, "checkpointing_steps": 1, "no-use_ema": True}
    settings |= {"gradient_accumulation_steps": 2, "train_batch_size": 2}
    whole, folder = train(tmp_path / "whole", **settings), tmp_path / "resumed"
    later = [*(f"checkpoint-{step}" for step in range(8, 13)), "model_index.json", "scheduler"]
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns(*later))
    shutil.rmtree(folder / "unet")
    train(folder, **settings, **RESUME)
    assert_same_run(folder, whole)
    assert snapshots_of(folder) == snapshots_of(whole)
    history = torch.stack([flat(weights_of(whole, step)) for step in range(1, 13)])
    [result] = reconstruct_ema(str(folder), str(tmp_path / "ema"), [0.1])
    weights = flat(ScaleLongUnconditionalPipeline.from_pretrained(result.folder).unet.state_dict())
    assert distance(weights, shares(0.1, 12) @ history) < 1e-5


@pytest.mark.slow
def test_killed_run_resumes_with_identical_snapshots(launch, train, run, tmp_path):
    folder, settings = tmp_path / "run", {"max_train_steps": STEPS, "ema_snapshot_steps": EVERY}
    running = launch(folder, checkpointing_steps=7, **settings)
    running.wait_until(lambda: (folder / "checkpoint-14").exists() and (folder / "ema_snapshots").exists())
    running.kill()
    train(folder, checkpointing_steps=7, **settings, **RESUME)
    assert snapshots_of(folder) == snapshots_of(run)


def test_resumed_run_replaces_later_snapshots(train, copy_of, run, assert_same_run):
    folder = copy_of(40)
    for step in (42, 60):
        (folder / f"ema_snapshots/step-{step}.safetensors").write_bytes(b"of a run that was killed")
    train(folder, max_train_steps=STEPS, checkpointing_steps=1, ema_snapshot_steps=EVERY, **RESUME)
    assert snapshots_of(folder) == snapshots_of(run)
    assert_same_run(folder, run)


def test_averages_must_be_kept_from_the_first_step(train, finished, stopped_at):
    folder = stopped_at(8)
    with pytest.raises(UserError, match="ema_snapshot_steps was None and is 4"):
        train(folder, ema_snapshot_steps=4, **RESUME)
    with pytest.raises(UserError, match="checkpoint-8 has no averages for --ema_snapshot_steps, which must be kept"):
        train(folder, ema_snapshot_steps=4, allow_changed_settings=True, **RESUME)


def test_new_run_refuses_snapshots_of_another(train, tmp_path):
    (tmp_path / "run" / "ema_snapshots").mkdir(parents=True)
    with pytest.raises(UserError, match="holds ema_snapshots, which the run would replace: pass another folder"):
        train(tmp_path / "run")


def test_a_lora_is_refused(refused):
    message = refused(
        script=finetune_text_to_image,
        model_config_name_or_path=None,
        pretrained_model_name_or_path="some/sd",
        lora_rank=2,
        ema_snapshot_steps=5,
    )
    assert "--ema_snapshot_steps needs a whole U-Net, and --lora_rank trains an adapter" in message


class TestBadInput:
    @pytest.fixture
    def error(self, scalelong, tmp_path):
        def run(folder, *lengths, **flags):
            flags = {"output_dir": tmp_path / "ema", **flags}
            words = ["ema", folder, "--sigma_rel", *lengths, *(x for k, v in flags.items() for x in (f"--{k}", v))]
            code, printed, errors = scalelong(*map(str, words))
            assert (code, printed) == (2, "")
            assert len(errors.splitlines()) == 1
            assert not (tmp_path / "ema").exists() or not list((tmp_path / "ema").glob("sigma_rel-*/unet"))
            return errors

        return run

    @pytest.mark.parametrize("length", [0, 1e-200, -0.1, 0.3, "nan", "inf"])
    def test_lengths_out_of_range(self, error, run, length):
        message = error(run, 0.1, length)
        assert "--sigma_rel must be a list of numbers, at least 0.001 and at most 0.28, got [" in message

    def test_lengths_that_need_more_snapshots(self, error, run):
        message = error(run, 0.1, 0.005)
        assert "sigma_rel 0.005 cannot be reconstructed from 20 snapshots, which allow 0.0" in message

    def test_a_run_without_snapshots(self, error, finished, tmp_path):
        for folder in (finished, tmp_path / "missing"):
            assert f"{folder} has no EMA snapshots: pass the output folder of a training with" in error(folder, 0.1)

    def test_an_unfinished_run(self, error, copy_of):
        folder = copy_of(20)
        assert "the training run is unfinished (last checkpoint: checkpoint-20)" in error(folder, 0.1)
        for step in range(21, STEPS + 1, EVERY):
            (folder / f"ema_snapshots/step-{step}.safetensors").unlink()
        message = error(folder, 0.1)
        assert (
            "is not finished: its last snapshot is of step 18 of 60; resume the training, or pass step 18" in message
        )

    def test_a_step_without_a_snapshot(self, error, run):
        assert "--step must be one with a snapshot, 3, 6, 9, 12, ..., 51, 54, 57, 60, got 50" in error(
            run, 0.1, step=50
        )
        assert "--step must be an integer, at least 1" in error(run, 0.1, step=0)

    def test_an_existing_folder(self, error, run, tmp_path):
        (tmp_path / "ema" / "sigma_rel-0.2").mkdir(parents=True)
        assert f"{tmp_path / 'ema' / 'sigma_rel-0.2'} already exists: remove it, or pass" in error(run, 0.1, 0.2)

    def test_a_folder_that_cannot_be_written(self, error, run, tmp_path):
        (tmp_path / "file").touch()
        assert f"cannot lock {tmp_path / 'file' / 'ema'}" in error(run, 0.1, output_dir=tmp_path / "file" / "ema")

    @pytest.mark.parametrize("damage", ["flip", "cut", "header"])
    def test_a_damaged_snapshot(self, error, copy_of, damage):
        folder = copy_of()
        file = folder / "ema_snapshots" / "step-30.safetensors"
        content = bytearray(file.read_bytes())
        if damage == "flip":
            content[-3] ^= 1
        file.write_bytes(
            {"flip": content, "cut": content[:-10], "header": content[:100] + b"x" + content[101:]}[damage]
        )
        assert str(file) in error(folder, 0.15)


def test_a_run_that_is_killed_while_it_writes_leaves_the_old_snapshot(tmp_path, monkeypatch):
    tensors = {"0.05/unet.weight": torch.ones(3)}
    power_ema.write_snapshot(tmp_path, 5, tensors)

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(power_ema, "save_file", fail)
    with pytest.raises(OSError, match=r"step-5\.safetensors cannot be written: no space left"):
        power_ema.write_snapshot(tmp_path, 5, {"0.05/unet.weight": torch.zeros(3)})
    [file] = (tmp_path / "ema_snapshots").iterdir()
    assert torch.equal(load_file(file)["0.05/unet.weight"], torch.ones(3))
