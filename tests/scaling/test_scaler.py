"""The scaler's gates: sizes, init, dtypes, and what stays when another scaling is taken over."""

import math

import pytest
import torch

from scalelong_diffusers.scaling import SkipScaler, SkipScalingConfig


def scaler(widths=(32, 32, 64), **fields):
    method = fields.pop("method", "ls")
    return SkipScaler(SkipScalingConfig(method, **fields).resolve(len(widths), "channels"), widths)


def parameter_names(module):
    return sorted(name for name, _ in module.named_parameters())


def test_shared_and_separate_gates_have_no_key_in_common():
    shared, separate = scaler(), scaler(shared=False)
    assert {name.split(".")[1] for name in parameter_names(shared)} == {"width_32", "width_64"}
    assert {name.split(".")[1] for name in parameter_names(separate)} == {"skip_1", "skip_2", "skip_3"}
    assert shared.gate(1) is shared.gate(2)
    assert shared.gate(2) is not shared.gate(3)


@pytest.mark.parametrize("width", [64, 100, 257])
def test_a_gate_has_the_papers_size(width):
    hidden = width // 16
    assert sum(p.numel() for p in scaler([width]).parameters()) == width * hidden + hidden + hidden * width + width


def test_the_papers_init_is_that_of_torch_linear():
    torch.manual_seed(0)
    gate = scaler([512]).gate(1)
    for layer, fan_in in ((gate.squeeze, 512), (gate.excite, 32)):
        bound = 1 / math.sqrt(fan_in)
        for parameter in (layer.weight, layer.bias):
            assert parameter.abs().max() <= bound
            assert parameter.abs().max() > 0.8 * bound
            assert parameter.mean().abs() < 0.2 * bound
    k = gate(torch.randn(4, 512, 8, 8))
    assert k.shape == (4, 512, 1, 1)
    assert (k - 0.5).abs().max() < 0.1


@pytest.mark.parametrize("gate", ["se", "ie"])
def test_identity_is_exactly_one(gate):
    k = scaler([64], init="identity", gate=gate).gate(1)(torch.randn(2, 64, 5))
    assert torch.equal(k, torch.ones(2, 64, 1))


def test_a_gate_along_the_last_axis_pools_the_tokens():
    config = SkipScalingConfig("ls", gate_axis="channels")
    gate = SkipScaler(config, [32], gate_dim=2).gate(1)
    skip = torch.randn(2, 7, 32)
    k = gate(skip)
    assert k.shape == (2, 1, 32)
    assert torch.equal(k, gate(skip[:, torch.randperm(7)])) or torch.allclose(k, gate(skip[:, torch.randperm(7)]))


def test_a_reduction_wider_than_the_skip_says_what_fits():
    with pytest.raises(
        ValueError, match=r"reduction=64 leaves a skip of width 32 no hidden unit; take one of at most 32"
    ):
        scaler(reduction=64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fields", [{"method": "cs"}, {"method": "ls"}, {"method": "learnable"}])
def test_the_skip_keeps_its_dtype_also_with_gates_in_full_precision(dtype, fields):
    module = scaler(**fields)
    assert module(torch.randn(2, 32, 4, 4, dtype=dtype), 2).dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert module(torch.randn(2, 32, 4, 4), 2).dtype == torch.float32


def test_memory_format_is_left_alone():
    skip = torch.randn(2, 32, 4, 4).to(memory_format=torch.channels_last)
    for method in ("cs", "ls"):
        assert scaler(method=method)(skip, 2).is_contiguous(memory_format=torch.channels_last)


def test_a_factor_of_one_passes_the_very_tensor_through():
    skip = torch.randn(2, 32, 4, 4)
    assert scaler(method="cs")(skip, 1) is skip
    assert scaler(method="cs")(skip, 2) is not skip
    assert scaler(method="cs", strength=0.0)(skip, 2) is skip


@pytest.mark.parametrize("method", ["inv_sqrt2", "constant", "cs"])
def test_constant_scaling_has_no_state(method):
    assert scaler(method=method).state_dict() == {}


def test_gates_are_real_while_parameters_are_put_on_the_meta_device():
    from accelerate import init_empty_weights

    with init_empty_weights():
        module = scaler()
    assert not any(parameter.is_meta for parameter in module.parameters())
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in scaler().parameters())
