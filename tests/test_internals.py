"""Every private part of torch, diffusers and transformers in `internals` still does what the package relies on."""

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers.pipelines.pipeline_loading_utils import LOADABLE_CLASSES
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint
from transformers.dynamic_module_utils import resolve_trust_remote_code

import scalelong_diffusers
from scalelong_diffusers import internals


def test_register_library():
    assert LOADABLE_CLASSES[scalelong_diffusers.__name__] == {"ModelMixin": ["save_pretrained", "from_pretrained"]}


def test_write_config_entry(ddpm):
    model = ddpm.build()
    stock = dict(model.config)
    default = next(name for name in stock["_use_default_values"] if name != "dropout")
    internals.write_config_entry(model, "dropout", 0.5)
    assert model.config.dropout == 0.5
    assert "dropout" not in model.config["_use_default_values"]
    assert default in model.config["_use_default_values"]
    assert type(model).from_config(model.config).config.dropout == 0.5  # would be the default if it were in the list
    internals.write_config_entry(model, "other", {"a": 1})
    assert model.config.other == {"a": 1}
    internals.write_config_entry(model, "other", None)
    assert "other" not in model.config
    assert model.config.keys() == stock.keys()
    named = type(model).from_config({**stock, "_class_name": "UNet2DModel"})
    named.__class__ = scalelong_diffusers.ScaleLongUNet2DModel
    internals.write_config_entry(named, "other", 1)
    assert named.config["_class_name"] == "ScaleLongUNet2DModel"


def test_single_file_repository(tmp_path):
    """diffusers tells Stable Diffusion 1 and 2 apart by their weights."""
    name = "model.diffusion_model.input_blocks.2.1.transformer_blocks.0.attn2.to_k.weight"
    save_file({name: torch.zeros(1, 768)}, tmp_path / "v1.safetensors")
    save_file({name: torch.zeros(1, 1024)}, tmp_path / "v2.safetensors")
    save_file({"up_blocks.0.weight": torch.zeros(1)}, tmp_path / "unet.safetensors")
    found = {kind: internals.single_file_repository(tmp_path / f"{kind}.safetensors") for kind in ("v1", "v2", "unet")}
    assert found == {
        "v1": "stable-diffusion-v1-5/stable-diffusion-v1-5",
        "v2": "stabilityai/stable-diffusion-2-1",
        "unet": None,
    }


def test_is_compiled():
    model = torch.nn.Linear(1, 1)
    assert not internals.is_compiled(model)
    model.compile()
    assert internals.is_compiled(model)


def test_are_plain_linear():
    linear, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    assert internals.are_plain_linear(linear, other)
    assert not internals.are_plain_linear(linear, torch.nn.Identity())
    handle = other.register_forward_hook(lambda *_: None)
    assert not internals.are_plain_linear(linear, other)
    handle.remove()
    handle = other.register_forward_pre_hook(lambda *_: None)
    assert not internals.are_plain_linear(linear, other)
    handle.remove()
    assert internals.are_plain_linear(linear, other)
    add_hook_to_module(other, ModelHook())
    assert not internals.are_plain_linear(linear, other)


def test_code_questions_refused(monkeypatch):
    questions = []
    monkeypatch.setattr("builtins.input", lambda text: questions.append(text) or "n")
    arguments = {"trust_remote_code": None, "model_name": "x", "has_local_code": False, "has_remote_code": True}
    with internals.code_questions_refused(), pytest.raises(ValueError, match="trust_remote_code"):
        resolve_trust_remote_code(**arguments)
    assert questions == []
    with pytest.raises(ValueError, match="trust_remote_code"):
        resolve_trust_remote_code(**arguments)
    assert len(questions) == 1


def test_has_functorch_transform():
    seen = []
    torch.func.grad(lambda x: seen.append(internals.has_functorch_transform()) or x.sum())(torch.ones(1))
    assert seen == [True]
    assert not internals.has_functorch_transform()


def test_has_saved_tensors_hooks():
    seen = []

    def block(x):
        seen.append(internals.has_saved_tensors_hooks())
        return x * x

    checkpoint(block, torch.ones(1, requires_grad=True), use_reentrant=False)
    assert seen == [True]
    assert not internals.has_saved_tensors_hooks()


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_adapter_names(sd):
    peft = pytest.importorskip("peft")
    unet = sd.build()
    assert internals.adapter_names(unet) == []
    for name in ("first", "second"):
        unet.add_adapter(peft.LoraConfig(target_modules=["to_q"]), adapter_name=name)
    assert internals.adapter_names(unet) == ["first", "second"]
    unet.unload_lora()
    assert internals.adapter_names(unet) == []
