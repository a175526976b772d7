"""docs/diffusers_training_scripts.md: the hooks, EMA and resuming of diffusers' scripts, with the lines it adds."""

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


def assert_same_run(resumed, unbroken, start, entry):
    resumed, unbroken = map(ScaleLongUNet2DConditionModel.from_pretrained, (resumed / "unet", unbroken / "unet"))
    start = ScaleLongUNet2DConditionModel.from_pretrained(start, subfolder="unet", skip_scaling=entry)
    assert resumed.config.skip_scaling == unbroken.config.skip_scaling == start.config.skip_scaling
    for (name, weight), expected, first in zip(
        resumed.named_parameters(), unbroken.parameters(), start.parameters(), strict=True
    ):
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5, msg=name)
        if name.endswith("excite.weight"):
            assert not torch.equal(weight, first), f"{name} did not learn, or EMA lost it"


@pytest.mark.parametrize("entry", ["cs", {"method": "ls", "reduction": 4, "init": "identity"}], ids=["cs", "ls"])
def test_a_script_of_diffusers_trains_resumes_and_saves_scaled(sd, recipe, entry, tmp_path):
    base = tmp_path / "base"
    sd.build().save_pretrained(base / "unet")
    recipe.train(base, tmp_path / "unbroken", entry, until=recipe.STEPS)
    recipe.train(base, tmp_path / "broken", entry, until=recipe.STEPS // 2)
    checkpoint = tmp_path / "broken" / "checkpoint"
    recipe.train(base, tmp_path / "resumed", entry, until=recipe.STEPS, resume_from=checkpoint)
    assert_same_run(tmp_path / "resumed", tmp_path / "unbroken", base, entry)


@pytest.mark.slow
def test_and_over_two_processes(sd, recipe, tmp_path):
    """Each process sees the same batch here, so the run is that of one."""
    base = tmp_path / "base"
    sd.build().save_pretrained(base / "unet")
    recipe.train(base, tmp_path / "unbroken", "learnable", until=recipe.STEPS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*launch, SCRIPT, base, tmp_path, "learnable"], check=True, env=environment, capture_output=True, timeout=240
    )
    assert_same_run(tmp_path / "resumed", tmp_path / "unbroken", base, "learnable")
