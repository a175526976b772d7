"""`diagnose` on tiny models: what it measures, prints and leaves alone."""

import json

import pytest
import torch

from scalelong_diffusers.diagnosis.diagnose import diagnose
from scalelong_diffusers.diagnosis.measure import Samples
from scalelong_diffusers.diagnosis.report import report_lines
from scalelong_diffusers.diagnosis.rules import NOTHING_FOUND, RULES, UNTRAINED


def state_of(model) -> list:
    return [
        torch.random.get_rng_state(),
        [(name, module.training, len(module._forward_pre_hooks), len(module._forward_hooks))
         for name, module in model.named_modules()],
        [(name, tensor.clone()) for name, tensor in model.state_dict().items()],
        [(parameter.requires_grad, parameter.grad) for parameter in model.parameters()],
        dict(model.config),
        type(model),
    ]  # fmt: skip


@pytest.mark.parametrize("scaling", ["none", "cs", "ls", "lerp"])
def test_leaves_the_model_unchanged(build, batches, noising, scaling):
    model = build(skip_scaling=scaling)
    model.train()
    model.mid_block.eval()
    before = state_of(model)
    diagnose(model, batches, noising, show_progress=False)
    after = state_of(model)
    assert str(after) == str(before)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(after[2], before[2]))
    assert torch.equal(after[0], before[0])


def test_equal_inputs_give_equal_figures(build, batches, noising):
    first, second = (diagnose(build(), batches, noising, show_progress=False) for _ in range(2))
    assert first == second


def test_is_json(build, batches, noising):
    diagnosis = diagnose(build(skip_scaling="ls"), batches, noising, show_progress=False)
    content = json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))
    assert [skip["i"] for skip in content["skips"]] == [1, 2]
    assert content["scaling"]["method"] == "ls"
    assert list(content["sensitivity"]) == ["plain", "ls"]
    assert [finding["rule"] for finding in content["findings"]] == [rule.name for rule in RULES]
    assert content["verdict"] == diagnosis.verdict
    assert content["headroom"]["depths"].keys() == {"12", "28", "48"}


def test_prints_a_table(build, batches, noising):
    lines = report_lines(diagnose(build(), batches, noising, show_progress=False))
    assert "parameters, N = 2, SkipScalingConfig(method='none'); 16 samples, loss " in lines[0]
    assert lines[1].split()[:6] == ["i", "where", "factor", "hidden", "skip", "share"]
    assert [line.split()[:3] for line in lines[2:4]] == [
        ["1", "out_blocks.1.skip_proj", "1"], ["2", "out_blocks.0.skip_proj", "1"]
    ]  # fmt: skip
    assert len({len(line) for line in lines[1:4]}) == 1
    assert "With N = 2 skips, CS has S = 1.39 with kappa = 0.6" in lines[4]
    assert lines[-2:] == ["verdict:", NOTHING_FOUND]


def test_says_that_a_model_is_untrained(build, batches, noising):
    diagnosis = diagnose(build(), batches, noising, is_trained=False, show_progress=False)
    assert "parameters, untrained, N = 2" in report_lines(diagnosis)[0]
    assert diagnosis.verdict == [NOTHING_FOUND, UNTRAINED]


def test_says_that_no_kappa_gives_the_targets(build, batches, noising):
    loud = [Samples(3 * b.clean, b.noise, b.uniform, b.perturbation) for b in batches]
    lines = report_lines(diagnose(build(), loud, noising, show_progress=False))
    assert any("With N = 2 skips, no kappa below 1 gives S = 0." in line for line in lines)


def test_a_model_with_nan_is_reported(build, batches, noising):
    model = build()
    with torch.no_grad():
        model.mid_block.mlp.fc1.weight[0, 0] = torch.nan
    diagnosis = diagnose(model, batches, noising, show_progress=False)
    assert diagnosis.nonfinite == 16
    assert len(diagnosis.verdict) == 1
    assert diagnosis.verdict[0].startswith("16 of 16 samples have losses or gradients that are not finite")
    json.dumps(diagnosis.to_dict(), allow_nan=False)


def test_counts_forward_passes(build, batches, noising, capsys):
    diagnose(build(), batches, noising)
    assert "diagnosis: 100%" in capsys.readouterr().err
