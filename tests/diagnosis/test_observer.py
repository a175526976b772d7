"""Statistics of the skips against what independent hooks see, for all models that can be scaled."""

import pytest
import torch

from scalelong_diffusers import UViTModel
from scalelong_diffusers.diagnosis.observer import QUANTITIES, SkipStatistics
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.models.skips import SkipLayout


UVIT = {"sample_size": 8, "patch_size": 2, "hidden_size": 16, "num_layers": 4, "num_attention_heads": 2}
SAMPLE = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
STEPS = torch.tensor([10, 500, 900])


def build_uvit(**changes) -> UViTModel:
    torch.manual_seed(0)
    return UViTModel(**UVIT, **changes).eval()


def measured(model, inputs) -> tuple[SkipStatistics, torch.Tensor]:
    """Run forward and backward, and return the statistics and the output."""
    statistics = SkipStatistics(model)
    sample = inputs.pop(next(iter(inputs))).clone().requires_grad_()
    with statistics.attached():
        output = model(sample, **inputs).sample
        torch.autograd.grad(output.square().flatten(1).mean(1).sum(), statistics.tensors)
    return statistics, output


def number_of_hooks(model) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("scaling", [None, "cs", "ls", "lerp", "normalized", "token_gates"])
def test_measures_every_skip_of_every_model_and_changes_nothing(case, scaling):
    model = case.build() if scaling is None else case.build_scaled(scaling)
    inputs, hooks = case.make_inputs(), number_of_hooks(model)
    with torch.no_grad():
        expected = model(**inputs).sample
    statistics, output = measured(model, inputs)
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    assert number_of_hooks(model) == hooks
    assert all(parameter.grad is None for parameter in model.parameters())
    every = set(range(1, len(statistics.skips) + 1))
    without_factor = {"factor", "factor_square"} if scaling in ("lerp", "normalized") else set()
    for name in QUANTITIES.keys() - without_factor - {"skip_share"}:
        values = statistics.values[name]
        assert set(values) == every, name
        assert all(value.isfinite().all() for value in values.values()), name
    assert all((statistics.values[name][i] > 0).all() for name in ("hidden_gradient", "skip_gradient") for i in every)


@pytest.mark.parametrize("kappa", [1.0, 0.7])
def test_equals_hooks_on_the_layers_of_a_uvit(kappa):
    model = build_uvit(skip_scaling={"method": "cs", "kappa": kappa})
    seen = {}

    def capture(name):
        def hook(module, args):
            seen[name] = args[0].view_as(args[0])
            seen[name].retain_grad()
            return (seen[name],)

        return hook

    for k, block in enumerate(model.out_blocks):
        block.hidden_proj.register_forward_pre_hook(capture(("hidden", 2 - k)))
        block.skip_proj.register_forward_pre_hook(capture(("skip", 2 - k)))
    model(SAMPLE, STEPS).sample.square().flatten(1).mean(1).sum().backward()
    model.zero_grad()
    statistics, _ = measured(model, {"sample": SAMPLE, "timestep": STEPS})
    for i in (1, 2):
        factor, block = kappa ** (i - 1), model.out_blocks[2 - i]
        hidden, skip = seen["hidden", i], seen["skip", i]
        expected = {
            "hidden_rms": hidden.square().mean((1, 2)).sqrt(),
            "skip_rms": factor * skip.square().mean((1, 2)).sqrt(),
            "factor": torch.full((3,), factor),
            "hidden_gradient": hidden.grad.flatten(1).norm(dim=1),
            "skip_gradient": skip.grad.flatten(1).norm(dim=1),
        }
        of_hidden = (hidden @ block.hidden_proj.weight.T).square().sum((1, 2))
        of_skip = (factor * skip @ block.skip_proj.weight.T).square().sum((1, 2))
        expected["skip_share"] = of_skip / (of_hidden + of_skip)
        for name, value in expected.items():
            torch.testing.assert_close(statistics.values[name][i], value.detach(), rtol=1e-4, atol=1e-7)


def test_equals_hooks_on_the_resnets_of_a_unet(ddpm):
    model = ddpm.build_scaled({"method": "cs", "kappa": 0.7})
    seen = {}
    for skip in model.skip_layout.find(model):

        def hook(module, args, skip=skip):
            both = args[0].view_as(args[0])
            both.retain_grad()
            seen[skip.index] = (skip, both)
            return (both, *args[1:])

        model.get_submodule(skip.where).register_forward_pre_hook(hook)
    inputs = ddpm.make_inputs()
    model(**inputs).sample.square().flatten(1).mean(1).sum().backward()
    statistics, _ = measured(model, inputs)
    for i, (skip, both) in seen.items():
        hidden, skipped = both.grad.tensor_split([skip.hidden_width], dim=1)
        expected = {
            "hidden_gradient": hidden.flatten(1).norm(dim=1),
            "skip_gradient": 0.7 ** (i - 1) * skipped.flatten(1).norm(dim=1),
            "skip_rms": both[:, skip.hidden_width :].square().mean((1, 2, 3)).sqrt().detach(),
        }
        for name, value in expected.items():
            torch.testing.assert_close(statistics.values[name][i], value, rtol=1e-4, atol=1e-7)


def test_gates_have_a_mean_and_a_spread():
    model = build_uvit(skip_scaling={"method": "ls", "init": "paper"})
    statistics, _ = measured(model, {"sample": SAMPLE, "timestep": STEPS})
    for i in (1, 2):
        mean, square = statistics.values["factor"][i], statistics.values["factor_square"][i]
        assert ((mean > 0) & (mean < 1)).all()
        assert (square > mean.square()).all()


def test_table_has_nan_where_a_quantity_does_not_exist():
    statistics, _ = measured(build_uvit(skip_scaling="normalized"), {"sample": SAMPLE, "timestep": STEPS})
    table = statistics.table()
    assert table.shape == (len(QUANTITIES), 2, 3)
    missing = table.isnan().all(2).all(1).tolist()
    assert [name for name, is_missing in zip(QUANTITIES, missing) if is_missing] == ["factor", "factor_square"]
    assert not any(statistics.values.values())
    assert not statistics.tensors


@pytest.mark.parametrize("name", ["ddpm", "sd"])
def test_measures_models_with_gradient_checkpointing(cases, name):
    tables = []
    for checkpointing in (False, True):
        model = cases[name].build_scaled("cs").train()
        if checkpointing:
            model.enable_gradient_checkpointing()
        statistics = SkipStatistics(model)
        with statistics.attached():
            model(**cases[name].make_inputs()).sample.square().mean().backward()
        tables.append(statistics.table())
    torch.testing.assert_close(*tables, equal_nan=True)


def test_layouts_without_observe_are_refused():
    statistics = SkipStatistics(build_uvit())
    statistics.layout = SkipLayout()
    with pytest.raises(UserError, match="the layout of UViTModel does not define observe"), statistics.attached():
        pass
