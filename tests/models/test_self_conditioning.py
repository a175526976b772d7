"""Self-conditioning of the U-ViT and of the 2D U-Nets: definition, start, saving, and what it must work with."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from scalelong_diffusers import (
    ScaleLongUNet2DConditionModel,
    ScaleLongUNet2DModel,
    ScaleLongUNetMotionModel,
    UserError,
    UViTModel,
    apply_skip_cache,
    apply_skip_scaling,
    fuse_skip_scaling,
    mup_param_groups,
    remove_skip_scaling,
)


UNET = {"sample_size": 8, "block_out_channels": (16, 32), "norm_num_groups": 4, "layers_per_block": 1}
TEXT = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(2))
MODELS = {
    "uvit": (UViTModel, {"sample_size": 8, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 4}, {}),
    "unet": (
        ScaleLongUNet2DModel,
        {
            **UNET,
            "attention_head_dim": 8,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        {},
    ),
    "text unet": (
        ScaleLongUNet2DConditionModel,
        {
            **UNET,
            "in_channels": 3,
            "out_channels": 3,
            "attention_head_dim": 2,
            "cross_attention_dim": 8,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        },
        {"encoder_hidden_states": TEXT},
    ),
}
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=MODELS)
def case(request):
    return MODELS[request.param]


def build(case, trained=True, **config):
    """Return a model whose projection is not zero if it counts as trained."""
    model_class, arguments, _ = case
    torch.manual_seed(0)
    model = model_class(**arguments, **{"self_conditioning": True, **config})
    if trained and getattr(model, "self_conditioner", None) is not None:
        with torch.no_grad():
            for parameter in model.self_conditioner.proj.parameters():
                parameter.normal_()
    return model


def run(model, case):
    return model(IMAGES, torch.tensor(500), **case[2]).sample


def test_a_new_model_computes_what_it_computes_without(case):
    plain = build(case, self_conditioning=False, skip_scaling="ls")
    model = build(case, trained=False, skip_scaling="ls")
    assert torch.equal(run(model, case), run(plain, case))
    run(model, case).square().mean().backward()
    assert model.self_conditioner.proj.weight.grad.abs().max() > 0
    assert not torch.equal(run(build(case), case), run(plain, case))


def test_the_decoder_of_a_uvit_receives_the_projected_mean_of_the_patches():
    model, seen = build(MODELS["uvit"]), []
    model.mid_block.register_forward_hook(lambda block, args, output: seen.append(output))
    for block in model.out_blocks:
        block.register_forward_pre_hook(lambda block, args: seen.append(args[0]))
        block.register_forward_hook(lambda block, args, output: seen.append(output))
    run(model, MODELS["uvit"])
    middle, *pairs = seen
    norm, proj = model.self_conditioner.norm, model.self_conditioner.proj
    shifts = proj(norm(middle[:, model.num_extra_tokens :].mean(1))).unflatten(1, (2, 32))
    for b, before in enumerate([middle, pairs[1]]):
        torch.testing.assert_close(pairs[2 * b], before + shifts[:, b, None], rtol=0, atol=1e-6)


def test_the_up_blocks_of_a_unet_receive_the_projection_with_the_time_embedding():
    case = MODELS["text unet"]
    model, seen = build(case), {}
    model.mid_block.register_forward_hook(lambda block, args, output: seen.update(middle=output))
    model.time_embedding.register_forward_hook(lambda block, args, output: seen.update(time=output))
    for b, block in enumerate(model.up_blocks):
        block.resnets[0].register_forward_pre_hook(lambda resnet, args, b=b: seen.update({b: args[1]}))
    run(model, case)
    norm, proj = model.self_conditioner.norm, model.self_conditioner.proj
    expected = seen["time"] + proj(norm(seen["middle"].mean((2, 3))))
    for b in range(2):
        torch.testing.assert_close(seen[b], expected, rtol=0, atol=1e-6)


def test_a_saved_model_and_a_copy_compute_the_same(case, tmp_path):
    model = build(case)
    expected = run(model, case)
    model.save_pretrained(tmp_path)
    assert torch.equal(run(case[0].from_pretrained(tmp_path).train(), case), expected)
    other = copy.deepcopy(model)
    assert torch.equal(run(other, case), expected)
    torch.nn.init.zeros_(other.self_conditioner.proj.weight)
    assert torch.equal(run(model, case), expected)
    apply_skip_scaling(model, "none")
    assert torch.equal(run(model, case), expected)


def test_folders_of_models_without_it_do_not_change(case, tmp_path):
    model = build(case, self_conditioning=False)
    model.save_pretrained(tmp_path)
    assert not any("self_conditioner" in name for name in model.state_dict())
    assert not case[0].from_pretrained(tmp_path).config.get("self_conditioning")


def test_gradient_checkpointing_and_compiling_change_nothing(case):
    model = build(case).train()
    expected = run(model, case)
    expected.square().mean().backward()
    gradient = model.self_conditioner.proj.weight.grad.clone()
    model.zero_grad()
    model.enable_gradient_checkpointing()
    run(model, case).square().mean().backward()
    assert torch.equal(model.self_conditioner.proj.weight.grad, gradient)
    model.disable_gradient_checkpointing()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(compiled, case), expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_skip_cache_reuses_the_projection(case):
    model = build(case).eval()
    expected = run(model, case)
    apply_skip_cache(model, interval=2)
    assert torch.equal(run(model, case), expected)
    torch.testing.assert_close(model(IMAGES, torch.tensor(499), **case[2]).sample, expected, rtol=0, atol=0.1)


def test_mup_trains_the_projection_as_a_hidden_matrix():
    case = MODELS["uvit"]
    model = build(case, mup_base_width=8, trained=False)
    groups = mup_param_groups(model, learning_rate=1.0)
    rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    assert rates[id(model.self_conditioner.proj.weight)] == 1 / 4
    assert rates[id(model.self_conditioner.norm.weight)] == 1
    assert torch.equal(run(model, case), run(build(case, mup_base_width=8, self_conditioning=False), case))


@pytest.mark.parametrize("change", [remove_skip_scaling, fuse_skip_scaling])
def test_a_unet_cannot_become_its_plain_class(change):
    model = build(MODELS["unet"], skip_scaling={"method": "cs", "kappa": 0.7})
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match="has self_conditioning, which UNet2DModel does not have: apply_skip_scaling"):
        change(model)
    assert type(model) is ScaleLongUNet2DModel
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_motion_model_is_not_made_without_it():
    with pytest.raises(UserError, match="has self_conditioning"):
        ScaleLongUNetMotionModel.from_unet2d(build(MODELS["text unet"]))


def test_it_is_true_or_false(case):
    with pytest.raises(UserError, match="self_conditioning must be True or False, got 'false'"):
        build(case, self_conditioning="false")


def test_a_unet_without_a_middle_block_is_refused():
    with pytest.raises(UserError, match="self_conditioning needs a middle block, and this ScaleLongUNet2DModel has"):
        build(MODELS["unet"], mid_block_type=None)


def test_a_checkpoint_of_a_whole_up_block_is_refused():
    case = MODELS["unet"]
    model = build(case)
    block = model.up_blocks[0]
    model.up_blocks[0] = _Checkpointed(block)
    with pytest.raises(UserError, match="turn off activation checkpointing of whole blocks"):
        run(model, case).mean().backward()


class _Checkpointed(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block, self.resnets, self.has_cross_attention = block, block.resnets, False

    def forward(self, *args):
        return checkpoint(self.block, *args, use_reentrant=False)
