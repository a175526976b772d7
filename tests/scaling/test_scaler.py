"""The gates of a scaler: sizes, init, dtypes and devices."""

import math

import pytest
import torch
from accelerate import init_empty_weights

from scalelong_diffusers import UserError
from scalelong_diffusers.scaling import LongSkip, SkipScaler, SkipScalingConfig


PAPER = {"shared": True, "init": "paper"}


def scaler(widths=(32, 32, 64), method="ls", device=None, dtype=None, **fields):
    config = SkipScalingConfig(method, **fields).resolve(len(widths), "channels")
    return SkipScaler(config, long_skips(widths), device=device, dtype=dtype)


def long_skips(widths, **others):
    return [LongSkip(i, len(widths), "", "", width, width, **others) for i, width in enumerate(widths, start=1)]


def gate_names(module):
    return {name.split(".")[1] for name, _ in module.named_parameters()}


def test_shared_and_separate_gates_have_different_keys():
    shared, separate = scaler(shared=True), scaler(shared=False)
    assert gate_names(shared) == {"width_32", "width_64"}
    assert gate_names(separate) == {"skip_1", "skip_2", "skip_3"}
    assert shared.method(1) is shared.method(2)
    assert shared.method(2) is not shared.method(3)


def test_gate_has_the_size_of_the_paper():
    for width in (64, 100, 257):
        hidden = width // 16
        assert sum(p.numel() for p in scaler([width]).parameters()) == width * hidden + hidden + hidden * width + width


def test_paper_init_equals_torch_linear():
    torch.manual_seed(0)
    gate = scaler([512], **PAPER).method(1)
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
def test_identity_gate_starts_at_exactly_one(gate):
    k = scaler([64], gate=gate).method(1)(torch.randn(2, 64, 5))
    assert torch.equal(k, torch.ones(2, 64, 1))


def test_gate_along_the_last_axis_pools_the_tokens():
    config = SkipScalingConfig("ls", gate_axis="channels", **PAPER)
    gate = SkipScaler(config, long_skips([32], channel_dim=2)).method(1)
    skip = torch.randn(2, 7, 32)
    k = gate(skip)
    assert k.shape == (2, 1, 32)
    torch.testing.assert_close(k, gate(skip[:, torch.randperm(7)]))


def test_rejects_a_reduction_above_the_width():
    with pytest.raises(UserError, match="reduction must be at most 32, the width of the narrowest skip, got 64"):
        scaler(reduction=64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", ["cs", "ls", "learnable"])
def test_keeps_the_dtype_of_the_skip(dtype, method):
    module = scaler(method=method)
    assert module.scale(torch.randn(2, 32, 4, 4, dtype=dtype), 2).dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert module.scale(torch.randn(2, 32, 4, 4), 2).dtype == torch.float32


def test_keeps_the_memory_format():
    skip = torch.randn(2, 32, 4, 4).to(memory_format=torch.channels_last)
    for method in ("cs", "ls"):
        assert scaler(method=method).scale(skip, 2).is_contiguous(memory_format=torch.channels_last)


def test_factor_of_one_returns_the_skip_itself():
    skip = torch.randn(2, 32, 4, 4)
    assert scaler(method="cs").scale(skip, 1) is skip
    assert scaler(method="cs").scale(skip, 2) is not skip
    assert scaler(method="cs", strength=0.0).scale(skip, 2) is skip


def test_constant_scaling_has_no_state():
    for method in ("inv_sqrt2", "constant", "cs"):
        assert scaler(method=method).state_dict() == {}


def test_gates_have_memory_while_parameters_go_to_the_meta_device():
    with init_empty_weights():
        module = scaler()
    assert not any(parameter.is_meta for parameter in module.parameters())
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in scaler().parameters())


@pytest.mark.parametrize("fields", [{}, {"gate": "ie"}, {"method": "learnable"}], ids=str)
def test_gates_get_the_requested_device_and_dtype(fields):
    module = scaler(device="meta", dtype=torch.bfloat16, **fields)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}
