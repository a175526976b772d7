"""FSDP2 trains like one process, and its checkpoints resume exactly."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch


pytestmark = pytest.mark.slow

EIGHT = {"train_batch_size": 8, "max_train_steps": 20, "checkpointing_steps": 10, "skip_scaling": "ls"}
MUP = {"hidden_size": 32, "mup_base_width": 16, "mup_base_depth": 2}
FULL = "FULL_STATE_DICT"


def use_fsdp(version: int = 2, **settings):
    """Return a function that sets accelerate's environment variables, as `accelerate launch --use_fsdp` does."""
    settings = {"version": version, **settings}
    variables = {"ACCELERATE_USE_FSDP": "true"}
    variables |= {f"FSDP_{name.upper()}": str(value) for name, value in settings.items()}
    return lambda: os.environ.update(variables)


@pytest.fixture(scope="module")
def double_script():
    spec = importlib.util.spec_from_file_location("double_script", Path(__file__).parent / "double_script.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_weights_agree_in_float64(train, launch, double_script, weights_of, tmp_path):
    changes = {"script": double_script, **EIGHT, **MUP}
    sharded = launch(
        tmp_path / "sharded", 2, prepare=use_fsdp(state_dict_type=FULL), **{**changes, "train_batch_size": 4}
    )
    expected = weights_of(train(tmp_path / "whole", **changes), 20)
    code, _, errors = sharded.wait()
    assert code == 0, errors
    weights = weights_of(tmp_path / "sharded", 20)
    for key, tensor in expected.items():
        torch.testing.assert_close(weights[key], tensor, rtol=0, atol=1e-9, msg=key)
