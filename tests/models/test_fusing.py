"""Moving constant factors into weights and out of them, without changing the output."""

import copy

import pytest
import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode

from scalelong_diffusers import (
    UserError,
    UViTModel,
    apply_skip_scaling,
    fuse_skip_scaling,
    register_skip_method,
    skip_connections,
)
from scalelong_diffusers.scaling import METHODS, ConstantFactor


LINEAR = ("1d", "1d-temporal", "stable-cascade", "unidiffuser")
CONSTANT = [
    "cs",
    {"method": "cs", "kappa": 0.5, "strength": 0.5},
    "compensated_cs",
    {"method": "mp_cat", "balance": 0.3},
]


def double(inputs):
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def output(model, inputs):
    with torch.no_grad():
        return model(**inputs).sample


@pytest.fixture
def trained_uvit():
    torch.manual_seed(0)
    model = UViTModel(sample_size=8, patch_size=2, hidden_size=32, num_layers=6, num_attention_heads=2).double()
    return model, {"sample": torch.randn(2, 3, 8, 8).double(), "timestep": 10}


def test_refuses_models_that_read_their_skips_behind_a_norm(case):
    if case.name in LINEAR:
        return
    model = case.build_scaled("cs")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for move in (fuse_skip_scaling, lambda model: apply_skip_scaling(model, "inv_sqrt2", preserve_output=True)):
        with pytest.raises(UserError, match=r"factors cannot move into the weights of this .* are not linear"):
            move(model)
    assert model.config.skip_scaling["method"] == "cs"
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("config", CONSTANT, ids=str)
def test_fused_model_is_plain_and_computes_the_same(cases, name, config):
    case = cases[name]
    model, inputs = case.build_scaled(config).double(), double(case.make_inputs())
    scaled = output(model, inputs)
    fused = fuse_skip_scaling(model)
    assert type(fused) is case.plain_class
    assert "skip_scaling" not in fused.config
    torch.testing.assert_close(output(fused, inputs), scaled, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(output(case.build().double(), inputs), scaled)


class Operations(TorchDispatchMode):
    """Records the names of all operations of torch."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", LINEAR)
def test_fused_model_runs_the_operations_of_the_stock_model(cases, name):
    case, inputs = cases[name], cases[name].make_inputs()
    scaled = case.build_scaled("cs")
    seen = []
    for model in (case.build(), scaled, fuse_skip_scaling(copy.deepcopy(scaled))):
        with Operations() as operations:
            output(model, inputs)
        seen.append(operations.names)
    stock, with_factors, fused = seen
    assert fused == stock
    assert len(with_factors) > len(stock)


@pytest.mark.parametrize("config", CONSTANT, ids=str)
def test_scaling_a_trained_model_can_preserve_its_output(cases, config):
    for name in LINEAR:
        model, inputs = cases[name].build().double(), double(cases[name].make_inputs())
        expected = output(model, inputs)
        apply_skip_scaling(model, config, preserve_output=True)
        torch.testing.assert_close(output(model, inputs), expected, rtol=1e-10, atol=1e-10)
        apply_skip_scaling(model, {"method": "constant", "kappa": 0.7}, preserve_output=True)  # replaces the factors
        assert {skip.factor for skip in skip_connections(model)} == {0.7}
        torch.testing.assert_close(output(model, inputs), expected, rtol=1e-10, atol=1e-10)
        apply_skip_scaling(model, "none", preserve_output=True)
        torch.testing.assert_close(output(model, inputs), expected, rtol=1e-10, atol=1e-10)
        stock = cases[name].build().double().state_dict()
        for key, weight in fuse_skip_scaling(model).state_dict().items():
            torch.testing.assert_close(weight, stock[key], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("config", CONSTANT, ids=str)
def test_uvit(trained_uvit, config, tmp_path):
    model, inputs = trained_uvit
    expected = output(model, inputs)
    apply_skip_scaling(model, config, preserve_output=True)
    torch.testing.assert_close(output(model, inputs), expected, rtol=1e-10, atol=1e-10)
    model.save_pretrained(tmp_path / "scaled")
    fuse_skip_scaling(model).save_pretrained(tmp_path / "fused")
    scaled, fused = (
        UViTModel.from_pretrained(tmp_path / name, torch_dtype=torch.float64) for name in ("scaled", "fused")
    )
    assert (scaled.config.skip_scaling["method"], fused.config.skip_scaling["method"]) != ("none", "none")
    assert fused.config.skip_scaling["method"] == "none"
    for loaded in (scaled, fused):
        torch.testing.assert_close(output(loaded, inputs), expected, rtol=1e-10, atol=1e-10)


def test_refuses_learned_factors(trained_uvit):
    model, _ = trained_uvit
    with pytest.raises(UserError, match=r"only constant factors can move into weights; .*'ls'"):
        apply_skip_scaling(model, "ls", preserve_output=True)
    assert model.config.skip_scaling["method"] == "none"
    with pytest.raises(UserError, match=r"only constant factors can move into weights; .*'ls'"):
        fuse_skip_scaling(apply_skip_scaling(model, "ls"))
    assert model.config.skip_scaling["method"] == "ls"


def test_refuses_a_preserve_output_that_is_not_a_bool(trained_uvit):
    with pytest.raises(UserError, match="preserve_output must be True or False, got 'no'"):
        apply_skip_scaling(trained_uvit[0], "cs", preserve_output="no")


def test_refuses_a_factor_of_zero(trained_uvit):
    @register_skip_method("no_skips", has_parameters=False)
    def no_skips(skip):
        return ConstantFactor(skip, 0.0)

    try:
        with pytest.raises(UserError, match="the factor of skip 1 is 0, so no weight can preserve the output"):
            apply_skip_scaling(trained_uvit[0], "no_skips", preserve_output=True)
    finally:
        del METHODS["no_skips"]


def test_refuses_a_model_with_a_lora(trained_uvit):
    model, _ = trained_uvit
    apply_skip_scaling(model, "cs").add_adapter(LoraConfig(target_modules=["skip_proj"]), adapter_name="mine")
    with pytest.raises(UserError, match="has the LoRA 'mine', which reads the skips as well: call fuse_lora"):
        fuse_skip_scaling(model)


def test_refuses_quantized_weights(trained_uvit):
    model, _ = trained_uvit
    apply_skip_scaling(model, "cs")
    for block in model.out_blocks:
        block.skip_proj.weight = torch.nn.Parameter(block.skip_proj.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(UserError, match="the weights of this UViTModel are quantized"):
        fuse_skip_scaling(model)


def test_refuses_an_unscaled_model(cases):
    with pytest.raises(UserError, match="this UTransformer2DModel has no skip scaling"):
        fuse_skip_scaling(cases["unidiffuser"].build())
