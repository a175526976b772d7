"""Preparation for fine-tuning: it keeps the model's output and selects the parameters to train."""

import pytest
import torch

from scalelong_diffusers import (
    SkipScalingConfig,
    UserError,
    apply_skip_scaling,
    remove_skip_scaling,
    set_skip_scaling_strength,
    skip_connections,
)
from scalelong_diffusers.training.fine_tuning import config_without_jump, prepare_for_fine_tuning
from scalelong_diffusers.training.stable_diffusion import encode_tokens, freeze_all_but_unet, tokenize_prompts


PROMPTS = ["a red circle", "a green triangle"]
METHODS = {
    "ls": {"method": "ls", "reduction": 4, "init": "identity"},
    "ls paper": {"method": "ls", "reduction": 4, "shared": True, "init": "paper"},
    "cs": "cs",
    "constant": SkipScalingConfig("constant", kappa=0.5),
    "inv_sqrt2": "inv_sqrt2",
    "learnable": "learnable",
}


def encoded(pipe):
    return encode_tokens(pipe, {name: function(PROMPTS) for name, function in tokenize_prompts(pipe).items()})


@pytest.mark.parametrize("lora_rank", [None, 4])
@pytest.mark.parametrize("method", METHODS)
def test_keeps_the_output_of_the_model(build_kind, predict, method, lora_rank):
    pipe = build_kind("sd1")
    arguments = encoded(pipe)
    expected = predict(pipe, arguments)
    prepare_for_fine_tuning(pipe, METHODS[method], lora_rank)
    assert torch.equal(predict(pipe, arguments), expected)
    if method in ("cs", "constant", "inv_sqrt2", "ls paper"):
        set_skip_scaling_strength(pipe, 1)
        assert not torch.allclose(predict(pipe, arguments), expected, atol=1e-4)


def test_keeps_the_output_of_sdxl(build_kind, predict):
    pipe = build_kind("sdxl")
    arguments = encoded(pipe)
    expected = predict(pipe, arguments)
    prepare_for_fine_tuning(pipe, METHODS["ls"], lora_rank=4)
    assert torch.equal(predict(pipe, arguments), expected)


@pytest.mark.parametrize("method", ["ls", "learnable", "cs"])
def test_with_lora_only_lora_and_gates_are_trained(build_kind, predict, method):
    pipe = build_kind("sd2")
    freeze_all_but_unet(pipe)
    pipe.unet.to(torch.bfloat16)
    trained = prepare_for_fine_tuning(pipe, METHODS[method], lora_rank=2, lora_alpha=6)
    gates = {name for name in trained if name.startswith("skip_scaler.")}
    assert bool(gates) == (method != "cs")
    assert gates == {f"skip_scaler.{name}" for name, _ in pipe.unet.skip_scaler.named_parameters()}
    lora = set(trained) - gates
    assert lora == {name for name, _ in pipe.unet.named_parameters() if ".lora_" in name}
    attentions = sum(name.endswith(("attn1", "attn2")) for name, _ in pipe.unet.named_modules())
    assert len(lora) == attentions * 4 * 2
    assert trained == {name: p for name, p in pipe.unet.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert pipe.unet.conv_in.weight.dtype == torch.bfloat16
    config = pipe.unet.peft_config["default"]
    assert (config.r, config.lora_alpha, config.init_lora_weights) == (2, 6, "gaussian")
    assert not any(p.requires_grad for name in ("vae", "text_encoder") for p in getattr(pipe, name).parameters())


def test_without_lora_the_full_unet_is_trained(build_kind):
    pipe = build_kind("sd1")
    trained = prepare_for_fine_tuning(pipe, "learnable")
    assert trained.keys() == dict(pipe.unet.named_parameters()).keys()
    assert any(name.startswith("skip_scaler.") for name in trained)


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_all_trained_parameters_get_gradients(build_kind, lora_rank):
    pipe = build_kind("sd1")
    trained = prepare_for_fine_tuning(pipe, METHODS["ls"], lora_rank)
    # LoRA's B is zero at the start, so A gets a gradient only from the second step.
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    latents, arguments = torch.randn(2, 4, 8, 8), encoded(pipe)
    for _ in range(3):
        optimizer.zero_grad()
        pipe.unet(latents, 10, **arguments).sample.square().mean().backward()
        optimizer.step()
    without_gradient = {
        name for name, p in trained.items() if p.grad is None or (lora_rank is not None and not p.grad.abs().max() > 0)
    }
    assert not {name for name in without_gradient if ".lora_" in name or name.startswith("skip_scaler.")}


class TestScaledModels:
    def test_keeps_gates_and_strength(self, build_kind, predict):
        pipe = build_kind("sd1")
        apply_skip_scaling(pipe, METHODS["ls"] | {"shared": True})
        torch.nn.init.normal_(pipe.unet.skip_scaler.gates["width_16"].excite.weight)
        set_skip_scaling_strength(pipe, 0.5)
        arguments = encoded(pipe)
        expected = predict(pipe, arguments)
        prepare_for_fine_tuning(pipe, METHODS["ls"] | {"shared": True}, lora_rank=2)
        assert torch.equal(predict(pipe, arguments), expected)

    def test_rejects_another_scaling(self, build_kind):
        pipe = apply_skip_scaling(build_kind("sd1"), "cs")
        with pytest.raises(
            UserError, match=r"was trained with .*'cs'.*; use the same scaling, or call remove_skip_scaling"
        ):
            prepare_for_fine_tuning(pipe, "inv_sqrt2")
        assert skip_connections(pipe).config.method == "cs"
        prepare_for_fine_tuning(remove_skip_scaling(pipe), "inv_sqrt2")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"method": "ls", "init": "identity"}, SkipScalingConfig("ls", init="identity")),
        (SkipScalingConfig("ls", init="paper"), SkipScalingConfig("ls", init="paper", strength=0)),
        (
            SkipScalingConfig("ls", init="identity", strength=0.3),
            SkipScalingConfig("ls", init="identity", strength=0.3),
        ),
        ("cs", SkipScalingConfig("cs", strength=0)),
        ("learnable", SkipScalingConfig("learnable")),
        ("none", SkipScalingConfig("none")),
    ],
)
def test_config_without_jump(given, expected):
    assert config_without_jump(given) == expected


class TestErrors:
    def test_rejects_a_wrong_rank(self, build_kind):
        with pytest.raises(ValueError, match="`r` should be a positive integer"):
            prepare_for_fine_tuning(build_kind("sd1"), "ls", lora_rank=0)

    def test_rejects_alpha_without_rank(self, build_kind):
        with pytest.raises(UserError, match="lora_alpha=4 needs lora_rank"):
            prepare_for_fine_tuning(build_kind("sd1"), "ls", lora_alpha=4)

    def test_rejects_a_second_adapter(self, build_kind):
        pipe = build_kind("sd1")
        prepare_for_fine_tuning(pipe, "cs", lora_rank=2)
        for rank in (2, None):
            with pytest.raises(UserError, match=r"has the adapter default; merge it into the weights"):
                prepare_for_fine_tuning(pipe, "cs", lora_rank=rank)
