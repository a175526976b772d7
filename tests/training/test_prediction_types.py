"""The scripts with flow matching and EDM: what they save, log and refuse."""

import json
import shutil

import pytest
import torch

from scalelong_diffusers import ScaleLongUnconditionalPipeline
from scalelong_diffusers.cli import main as scalelong
from scalelong_diffusers.train import train_class_conditional, train_text_to_image


FAST = {"max_train_steps": 2, "checkpointing_steps": 2, "validation_steps": 2, "validation_size": 10}
OPTIONS = {
    "flow": {"prediction_type": "flow", "weighting_scheme": "logit_normal", "flow_shift": 2.0},
    "edm": {"prediction_type": "edm", "edm_sigma_data": 0.6},
}
SAVED = {
    "flow": ("FlowMatchEulerDiscreteScheduler", "shift", 2.0),
    "edm": ("EDMDPMSolverMultistepScheduler", "sigma_data", 0.6),
}
SAMPLE = """
import sys
import torch
from scalelong_diffusers import load_pipeline

pipe = load_pipeline(sys.argv[1])
pipe.set_progress_bar_config(disable=True)
images = pipe(2, num_inference_steps=3, generator=torch.Generator().manual_seed(0), output_type="pt").images
torch.save(images, sys.argv[2])
"""


@pytest.fixture(scope="module", params=OPTIONS)
def run(request, train_once, tmp_path_factory):
    """A short run, and the prediction type."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    return train_once(folder, **FAST, **OPTIONS[request.param], sample_steps=2, num_inference_steps=2), request.param


@pytest.mark.slow
def test_saves_a_pipeline_that_samples_in_a_fresh_process(run, in_fresh_process, tmp_path):
    folder, kind = run
    name, entry, value = SAVED[kind]
    pipe = ScaleLongUnconditionalPipeline.from_pretrained(folder)
    assert type(pipe.scheduler).__name__ == name
    assert pipe.scheduler.config[entry] == value
    pipe.set_progress_bar_config(disable=True)
    images = pipe(2, num_inference_steps=3, generator=torch.Generator().manual_seed(0), output_type="pt").images
    in_fresh_process(SAMPLE, str(folder), str(tmp_path / "images.pt"))
    torch.testing.assert_close(torch.load(tmp_path / "images.pt"), images, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_resumes_exactly(run, train, assert_same_run, tmp_path):
    folder, kind = run
    flags = {**FAST, **OPTIONS[kind], "sample_steps": 2, "num_inference_steps": 2}
    stopped = train(tmp_path / "run", **flags | {"max_train_steps": 1, "validation_steps": 0})
    for name in ("unet", "scheduler"):
        shutil.rmtree(stopped / name)
    (stopped / "model_index.json").unlink()
    train(stopped, **flags, resume_from_checkpoint="latest")
    assert_same_run(stopped, folder)


@pytest.mark.slow
def test_logs_the_validation_loss_of_each_tenth(run):
    folder, _ = run
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert len(last["validation_loss_bins"]) == 10
    assert any(last["validation_loss_bins"])
    assert (folder / "samples" / "step-000002.png").exists()


@pytest.mark.slow
def test_command_line_samples_and_refuses(run, tmp_path, capsys):
    folder, kind = run
    words = ["sample", str(folder), "--output_dir", str(tmp_path / "samples"), "--num_images", "1"]
    assert scalelong([*words, "--scheduler", "ddim"]) == 2
    accepted = {"flow": "euler or heun", "edm": "dpm++ or euler"}[kind]
    assert accepted in capsys.readouterr().err
    assert not (tmp_path / "samples").exists()
    assert not scalelong([*words, "--scheduler", "euler", "--num_inference_steps", "2"])
    assert (tmp_path / "samples" / "000000.png").exists()


@pytest.mark.slow
def test_diagnose_reads_the_process(run, capsys):
    folder, _ = run
    assert not scalelong(["diagnose", str(folder), "--num_images", "8", "--json"])
    skips = json.loads(capsys.readouterr().out)["skips"]
    assert len(skips) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize(("script", "config"), [(train_class_conditional, "classes"), (train_text_to_image, "text")])
def test_other_scripts(train, tiny_config, tmp_path, script, config, kind):
    flags = {**FAST, **OPTIONS[kind], "validation_steps": 0}
    folder = train(tmp_path / "run", script=script, model_config_name_or_path=tiny_config / config, **flags)
    assert json.loads((folder / "scheduler" / "scheduler_config.json").read_text())["_class_name"] == SAVED[kind][0]
