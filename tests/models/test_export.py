"""Scaled models as ONNX and AOTInductor files, compared with the models in torch."""

import os

import onnxruntime
import pytest
import torch

from scalelong_diffusers import UViTModel, apply_skip_scaling, fuse_skip_scaling


# torch's exporter uses deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
LS = {"method": "ls", "reduction": 4, "init": "paper"}


@pytest.fixture
def uvit():
    torch.manual_seed(0)
    return UViTModel(sample_size=8, patch_size=2, hidden_size=32, num_layers=2, num_attention_heads=2).eval()


class ByPosition(torch.nn.Module):
    """Calls a model with positional arguments and returns its sample, as ONNX needs it."""

    def __init__(self, model, names):
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *values):
        return self.model(**dict(zip(self.names, values))).sample


def prepare(model, inputs):
    wrapped = ByPosition(model, list(inputs)).eval()
    with torch.no_grad():
        return wrapped, tuple(inputs.values()), wrapped(*inputs.values())


def run_onnx(model, inputs, folder):
    wrapped, values, expected = prepare(model, inputs)
    file = str(folder / "model.onnx")
    torch.onnx.export(wrapped, values, file, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    feeds = {entry.name: value.numpy() for entry, value in zip(session.get_inputs(), values)}
    return torch.from_numpy(session.run(None, feeds)[0]), expected


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config"), [("ddpm", "cs"), ("sd", LS)], ids=str)
def test_onnx(few_layers, name, config, tmp_path):
    case = few_layers[name]
    sample, expected = run_onnx(apply_skip_scaling(case.build(), config), case.make_inputs(), tmp_path)
    torch.testing.assert_close(sample, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_onnx_of_a_fused_uvit_equals_the_scaled_one(uvit, tmp_path):
    inputs = {"sample": torch.randn(2, 3, 8, 8), "timestep": torch.tensor([3, 700])}
    apply_skip_scaling(uvit, {"method": "constant", "kappa": 0.5})
    scaled, expected = run_onnx(uvit, inputs, tmp_path)
    fused, _ = run_onnx(fuse_skip_scaling(uvit), inputs, tmp_path)
    torch.testing.assert_close(scaled, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(fused, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(os.system("c++ --version > /dev/null 2>&1") != 0, reason="inductor needs a C++ compiler")
def test_aot_inductor(uvit, tmp_path):
    inputs = {"sample": torch.randn(2, 3, 8, 8), "timestep": torch.tensor([3, 700])}
    wrapped, values, expected = prepare(apply_skip_scaling(uvit, LS), inputs)
    file = torch._inductor.aoti_compile_and_package(
        torch.export.export(wrapped, values), package_path=str(tmp_path / "model.pt2")
    )
    torch.testing.assert_close(torch._inductor.aoti_load_package(file)(*values), expected, rtol=1e-3, atol=1e-4)
