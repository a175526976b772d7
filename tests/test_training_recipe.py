"""The recipe of docs/diffusers_training_scripts.md works with the hooks, EMA and resuming of diffusers' scripts."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scalelong_diffusers import ScaleLongUNet2DConditionModel


SCRIPT = Path(__file__).parent / "recipe_script.py"


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("recipe_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_same_run(resumed, uninterrupted, start, entry):
    resumed, uninterrupted = map(
        ScaleLongUNet2DConditionModel.from_pretrained, (resumed / "unet", uninterrupted / "unet")
    )
    start = ScaleLongUNet2DConditionModel.from_pretrained(start, subfolder="unet", skip_scaling=entry)
    assert resumed.config.skip_scaling == uninterrupted.config.skip_scaling == start.config.skip_scaling
    for (name, weight), expected, first in zip(
        resumed.named_parameters(), uninterrupted.parameters(), start.parameters(), strict=True
    ):
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5, msg=name)
        if name.endswith("excite.bias"):
            assert not torch.equal(weight, first), f"{name} did not learn, or EMA dropped it"


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["cs", {"method": "ls", "reduction": 4}], ids=["cs", "ls"])
def test_script_of_diffusers_trains_resumes_and_saves_scaled(sd, recipe, entry, tmp_path):
    base = tmp_path / "base"
    sd.build().save_pretrained(base / "unet")
    recipe.train(base, tmp_path / "uninterrupted", entry, until=recipe.STEPS)
    recipe.train(base, tmp_path / "broken", entry, until=recipe.STEPS // 2)
    checkpoint = tmp_path / "broken" / "checkpoint"
    recipe.train(base, tmp_path / "resumed", entry, until=recipe.STEPS, resume_from=checkpoint)
    assert_same_run(tmp_path / "resumed", tmp_path / "uninterrupted", base, entry)


@pytest.mark.slow
def test_two_processes_equal_one(sd, recipe, tmp_path):
    """Both processes get the same batch."""
    base = tmp_path / "base"
    sd.build().save_pretrained(base / "unet")
    recipe.train(base, tmp_path / "uninterrupted", "learnable", until=recipe.STEPS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*launch, SCRIPT, base, tmp_path, "learnable"], check=True, env=environment, capture_output=True, timeout=240
    )
    assert_same_run(tmp_path / "resumed", tmp_path / "uninterrupted", base, "learnable")
