"""
The node for ComfyUI computes what the library computes.

A stub of ComfyUI's interface is always used. Set COMFYUI to the folder of a ComfyUI to use its own U-Net and patcher.
"""

import os
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from diffusers import UNet2DConditionModel

from scalelong_diffusers import apply_skip_scaling


# The shape of Stable Diffusion 1.5: four levels with 12 skips.
CROSS = "CrossAttn"
SD15 = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (32, 64, 64, 64),
    "layers_per_block": 2,
    "down_block_types": (*[f"{CROSS}DownBlock2D"] * 3, "DownBlock2D"),
    "up_block_types": ("UpBlock2D", *[f"{CROSS}UpBlock2D"] * 3),
    "cross_attention_dim": 16,
    "attention_head_dim": 2,
}
# The same model in ComfyUI's config.
COMFYUI_CONFIG = {
    "image_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 32,
    "num_res_blocks": [2, 2, 2, 2],
    "channel_mult": (1, 2, 2, 2),
    "transformer_depth": [1] * 6 + [0] * 2,
    "transformer_depth_output": [1] * 9 + [0] * 3,
    "transformer_depth_middle": 1,
    "num_heads": 2,
    "use_spatial_transformer": True,
    "context_dim": 16,
    "legacy": False,
}
METHODS = [
    *[("cs", 0.7, 1.0), ("cs", 0.5, 0.25), ("constant", 0.8, 1.0), ("constant", 0.6, 0.5)],
    *[("linear", 0.7, 1.0), ("linear", 0.5, 0.25)],
]


@pytest.fixture
def module(project_root):
    return runpy.run_path(str(project_root / "integrations" / "comfyui" / "__init__.py"))


@pytest.fixture
def node(module):
    return module["NODE_CLASS_MAPPINGS"]["SkipScaling"]()


@pytest.fixture
def unet():
    torch.manual_seed(0)
    return UNet2DConditionModel(**SD15).eval()


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    latents, text = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 5, 16, generator=generator)
    return {"sample": latents, "timestep": torch.tensor([7, 400]), "encoder_hidden_states": text}


class StubPatcher:
    """What the node uses of ComfyUI's ModelPatcher."""

    def __init__(self, num_blocks: int):
        self.model = SimpleNamespace(diffusion_model=SimpleNamespace(output_blocks=[None] * num_blocks))
        self.patches = []

    def clone(self) -> "StubPatcher":
        other = StubPatcher(len(self.model.diffusion_model.output_blocks))
        other.patches = list(self.patches)
        return other

    def set_model_output_block_patch(self, patch):
        self.patches.append(patch)


@pytest.mark.parametrize(("method", "kappa", "strength"), METHODS)
def test_patch_changes_a_model_as_the_library_does(node, unet, inputs, paper_reading, method, kappa, strength):
    model = StubPatcher(12)
    (patched,) = node.scale(model, method, kappa, strength)
    assert model.patches == []
    (patch,) = patched.patches

    def factor(i, n, skip):
        assert n == 12
        return patch(None, torch.ones(()), {"block": ("output", n - i)})[1]

    by_node = paper_reading(unet)(inputs, factor)
    with torch.no_grad():
        plain = unet(**inputs).sample
        apply_skip_scaling(unet, {"method": method, "kappa": kappa, "strength": strength})
        by_library = unet(**inputs).sample
    torch.testing.assert_close(by_node, by_library)
    assert not torch.allclose(plain, by_library, atol=1e-4)


def test_linear_falls_from_1_to_kappa(module):
    assert module["skip_factors"]("linear", 5, 0.6, 1.0) == pytest.approx([1, 0.9, 0.8, 0.7, 0.6])
    assert module["skip_factors"]("linear", 5, 0.6, 0.5) == pytest.approx([1, 0.95, 0.9, 0.85, 0.8])
    assert module["skip_factors"]("linear", 1, 0.6, 1.0) == [1]


def test_node_offers_what_it_computes(module, node):
    inputs = node.INPUT_TYPES()["required"]
    methods, _ = inputs["method"]
    for method in methods:
        for name in ("kappa", "strength"):
            kind, bounds = inputs[name]
            assert kind == "FLOAT"
            values = [{"kappa": 0.5, "strength": 1.0, name: bounds[end]} for end in ("min", "max", "default")]
            assert all(len(module["skip_factors"](method, 12, **value)) == 12 for value in values)
    assert getattr(node, node.FUNCTION)
    assert module["NODE_DISPLAY_NAME_MAPPINGS"].keys() == module["NODE_CLASS_MAPPINGS"].keys()


def test_refuses_models_without_long_skips(node):
    transformer = SimpleNamespace(model=SimpleNamespace(diffusion_model=torch.nn.Linear(1, 1)))
    with pytest.raises(ValueError, match=r"needs a U-Net, as in Stable Diffusion 1, 2 and XL, got .*Linear"):
        node.scale(transformer, "cs", 0.9, 1.0)


@pytest.fixture
def comfyui(monkeypatch):
    folder = os.environ.get("COMFYUI")
    if folder is None:
        pytest.skip("set COMFYUI to the folder of a ComfyUI")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "argv", ["comfyui", "--cpu"])
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.ldm.modules.diffusionmodules.openaimodel
    import comfy.model_patcher
    import comfy.ops
    import comfy.utils

    return comfy


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "kappa", "strength"), METHODS)
def test_comfyui_computes_the_same(comfyui, node, unet, inputs, method, kappa, strength):
    network = comfyui.ldm.modules.diffusionmodules.openaimodel.UNetModel(
        **COMFYUI_CONFIG, operations=comfyui.ops.disable_weight_init
    ).eval()
    names = comfyui.utils.unet_to_diffusers(COMFYUI_CONFIG)
    network.load_state_dict({names[name]: weight for name, weight in unet.state_dict().items()})
    holder = torch.nn.Module()
    holder.diffusion_model = network
    device = torch.device("cpu")
    patcher = comfyui.model_patcher.ModelPatcher(holder, device, device)
    (scaled,) = node.scale(patcher, method, kappa, strength)

    def run(patched):
        options = {**patched.model_options["transformer_options"]}
        latents, timesteps, text = inputs.values()
        with torch.no_grad():
            return network(latents, timesteps, text, transformer_options=options)

    with torch.no_grad():
        torch.testing.assert_close(run(patcher), unet(**inputs).sample, rtol=1e-4, atol=1e-4)
        apply_skip_scaling(unet, {"method": method, "kappa": kappa, "strength": strength})
        torch.testing.assert_close(run(scaled), unet(**inputs).sample, rtol=1e-4, atol=1e-4)
