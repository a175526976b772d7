"""IP-Adapter, T2I-Adapter, LoRA, quantization and group offloading on scaled U-Nets: exactly as on a plain one."""

import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from scalelong_diffusers import apply_skip_scaling


def cs(i, n, skip):
    return 0.9 ** (i - 1)


def output(model, inputs):
    with torch.no_grad():
        return model(**inputs).sample


def check_on_top(prepare, sd, paper_reading, inputs=None):
    """Check that a scaled model to which something was added equals the plain one with scaled skips."""
    inputs = inputs or sd.make_inputs()
    expected = paper_reading(prepare(sd.build()))(inputs, cs)
    for model in (prepare(sd.build_scaled("cs")), apply_skip_scaling(prepare(sd.build()), "cs")):
        torch.testing.assert_close(output(model, inputs), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(output(prepare(sd.build()), inputs), expected, atol=1e-3)


def ip_adapter_weights(unet):
    generator = torch.Generator().manual_seed(0)
    layers = {}
    for number, name in enumerate(unet.attn_processors):
        if "attn2" in name:
            width = unet.get_submodule(name.removesuffix(".processor")).to_q.in_features
            for key in ("to_k_ip", "to_v_ip"):
                layers[f"{number}.{key}.weight"] = torch.randn(width, 16, generator=generator)
    projection = {
        "proj.weight": torch.randn(4 * 16, 24, generator=generator),
        "proj.bias": torch.zeros(64),
        "norm.weight": torch.ones(16),
        "norm.bias": torch.zeros(16),
    }
    return {"image_proj": projection, "ip_adapter": layers}


def test_ip_adapter(sd, paper_reading):
    def prepare(unet):
        unet._load_ip_adapter_weights([ip_adapter_weights(unet)], low_cpu_mem_usage=False)
        return unet

    inputs = sd.make_inputs() | {"added_cond_kwargs": {"image_embeds": [torch.randn(2, 1, 24)]}}
    check_on_top(prepare, sd, paper_reading, inputs)


def test_t2i_adapter(sd):
    """Its features are added to the encoder, whose skips are then scaled: the same hooks act on both models."""
    inputs = sd.make_inputs()
    features = [torch.randn(2, 16, 8, 8), torch.randn(2, 32, 4, 4)]  # one for each level

    def run(model):
        return output(model, inputs | {"down_intrablock_additional_residuals": [each.clone() for each in features]})

    def halve(block, args, kwargs):
        return args, kwargs | {"res_hidden_states_tuple": tuple(0.5 * s for s in kwargs["res_hidden_states_tuple"])}

    stock, scaled = sd.build(), sd.build_scaled({"method": "constant", "kappa": 0.5})
    for block in stock.up_blocks:
        block.register_forward_pre_hook(halve, with_kwargs=True)
    torch.testing.assert_close(run(scaled), run(stock), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(run(scaled), output(scaled, inputs), atol=1e-3)


def trained_lora(unet):
    """Return the weights of a LoRA that was trained on a plain model."""
    unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v", "conv_shortcut"]))
    for name, parameter in unet.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return get_peft_model_state_dict(unet)


@pytest.mark.parametrize("fuse", [False, True], ids=["loaded", "fused"])
def test_lora_of_a_plain_model(sd, paper_reading, fuse):
    torch.manual_seed(0)
    weights = {f"unet.{name}": weight for name, weight in trained_lora(sd.build()).items()}

    def prepare(unet):
        unet.load_lora_adapter(weights, prefix="unet")
        if fuse:
            unet.fuse_lora()
            unet.unload_lora()
        return unet

    check_on_top(prepare, sd, paper_reading)


def test_torchao_quantization(sd, paper_reading):
    # Not among the test dependencies: diffusers imports it, and it prints to stderr whenever it is imported.
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def prepare(unet):
        quantize_(unet, Int8WeightOnlyConfig())
        return unet

    check_on_top(prepare, sd, paper_reading)


@pytest.mark.parametrize("offload_type", ["leaf_level", "block_level"])
def test_group_offloading(sd, paper_reading, offload_type):
    def prepare(unet):
        unet.enable_group_offload(onload_device=torch.device("cpu"), offload_type=offload_type, num_blocks_per_group=1)
        return unet

    expected = paper_reading(sd.build())(sd.make_inputs(), cs)
    for config in ("cs", {"method": "ls", "reduction": 4}):
        model = prepare(sd.build_scaled(config))
        found = output(model, sd.make_inputs())
        assert torch.isfinite(found).all()
        if config == "cs":
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
