"""Models on a fake `cuda` device, which finds device mismatches and reads of values without a GPU."""

import pytest
import torch
from fake_cuda import DEVICE, fake_cuda
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from scalelong_diffusers import UViTModel, apply_skip_scaling, set_skip_scaling_strength, skip_connections


ENTRIES = ["cs", "ls", {"method": "ls", "shared": True, "init": "paper", "reduction": 4}, "learnable"]
UVIT = {"sample_size": 8, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 4}


def replace_weights(model, **factory):
    """Replace all weights by new tensors of the same shapes: `nn.Module.to` does not work with fake tensors."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, **factory)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.empty(buffer.shape, **factory))
    return model


def build_models(ddpm, entry):
    """Return a U-Net and a U-ViT with real weights, and their inputs by shape and dtype."""
    unet = ddpm.build_scaled(entry)
    uvit = UViTModel(**UVIT, num_class_embeds=3, cross_attention_dim=12, context_length=5, skip_scaling=entry)
    shapes = {"sample": ((2, 3, 8, 8), torch.float32), "timestep": ((2,), torch.int64)}
    condition = {
        "class_labels": ((2,), torch.int64),
        "encoder_hidden_states": ((2, 4, 12), torch.float32),
        "encoder_attention_mask": ((2, 4), torch.int64),
    }
    return (unet, shapes), (uvit, shapes | condition)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_forward_stays_on_the_device_and_reads_no_values(ddpm, entry):
    models = build_models(ddpm, entry)
    with fake_cuda(), DEVICE:
        for model, shapes in models:
            inputs = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
            sample = replace_weights(model.train())(**inputs).sample
            assert (sample.device.type, sample.shape) == ("cuda", (2, 3, 8, 8))
            assert sample.requires_grad
            set_skip_scaling_strength(model, 0.5)
            assert model(**inputs).sample.device.type == "cuda"
            with pytest.raises((RuntimeError, AssertionError), match="device"):
                model(**inputs | {"sample": torch.zeros(2, 3, 8, 8, device="cpu")})
        with pytest.raises(DataDependentOutputException):
            torch.zeros(2).tolist()


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_backward_reads_no_values(ddpm, entry):
    """torch cannot run autograd on `cuda` in a build without CUDA, so this uses fake tensors on the CPU."""
    models = build_models(ddpm, entry)
    with FakeTensorMode():
        for model, shapes in models:
            inputs = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
            replace_weights(model.train())(**inputs).sample.mean().backward()
            assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patching_puts_gates_on_the_device_and_in_the_dtype_of_the_model(sd, dtype):
    for entry in ("none", *ENTRIES):
        model = sd.build()
        with fake_cuda():
            replace_weights(model, device=DEVICE, dtype=dtype)
            apply_skip_scaling(model, entry)
            placed = {(gate.device.type, gate.dtype) for gate in model.skip_scaler.parameters()}
            assert placed == ({("cuda", dtype)} if model.skip_scaler.config.has_gates else set())
            inputs = {name: torch.zeros(shape, device=DEVICE, dtype=dtype) for name, shape in sd.inputs.items()}
            assert model(**inputs, timestep=torch.zeros(2, device=DEVICE)).sample.device.type == "cuda"
            assert len(skip_connections(model)) == 6
