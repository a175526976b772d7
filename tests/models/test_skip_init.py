"""The starts of the layers that read the long skips."""

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D, ResnetBlockCondNorm2D
from peft import LoraConfig

from scalelong_diffusers import (
    UserError,
    UViTModel,
    apply_skip_init,
    apply_skip_scaling,
    skip_connections,
)


UVIT = {"sample_size": 8, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 2, "final_conv": False}
SCALINGS = {
    "none": "none",
    "cs": {"method": "cs", "kappa": 0.5},
    "gates from 1": "ls",
    "paper's gates": {"method": "ls", "init": "paper", "shared": True},
    "lerp": "lerp",
}


def uvit(**changes):
    torch.manual_seed(0)
    return UViTModel(**{**UVIT, **changes})


def inputs_of(model):
    """Run a U-ViT and return for each decoder block its hidden state, skip, factor, and the input of its residuals."""
    seen = []

    def remember(block, args):
        hidden, _, skip, factor = args
        seen.append((hidden, skip, factor, block._add_skip(hidden, skip, factor)))

    for block in model.out_blocks:
        block.register_forward_pre_hook(remember)
    with torch.no_grad():
        model(torch.randn(2, 3, 8, 8), 10)
    return seen


def test_reference_is_the_default_and_changes_nothing():
    plain, reference = uvit(), uvit(skip_init="reference")
    assert plain.config.skip_init == "reference"
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), reference.parameters()))
    before = [p.clone() for p in plain.parameters()]
    apply_skip_init(plain, "reference")
    assert all(torch.equal(a, b) for a, b in zip(before, plain.parameters()))


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("block_scale", [1.0, 0.3, "rezero"])
def test_decoder_blocks_of_a_uvit_receive_the_stated_sum(scaling, block_scale):
    for hidden, _, _, received in inputs_of(uvit(skip_init="zero", skip_scaling=scaling)):
        assert torch.equal(received, hidden)
    model = uvit(skip_init="sum", skip_scaling=scaling, block_scale=block_scale)
    for hidden, skip, factor, received in inputs_of(model):
        torch.testing.assert_close(received, hidden + factor * skip)
    for i, (hidden, skip, factor, received) in enumerate(inputs_of(uvit(skip_init="balanced", skip_scaling=scaling))):
        k = {"none": 1, "cs": [0.5, 1][i], "paper's gates": 0.5}.get(_name(scaling), 1)
        scale = 2**0.5 if scaling == "lerp" else (1 + k**2) ** -0.5  # lerp has already halved both
        torch.testing.assert_close(received, scale * (hidden + factor * skip))


def _name(scaling):
    return next(name for name, value in SCALINGS.items() if value == scaling)


def test_other_weights_of_a_uvit_keep_their_init():
    reference, balanced = (dict(uvit(skip_init=start).named_parameters()) for start in ("reference", "balanced"))
    changed = {name for name in reference if not torch.equal(reference[name], balanced[name])}
    layers = ("hidden_proj", "skip_proj")
    assert changed == {f"out_blocks.{b}.{layer}.weight" for b in (0, 1) for layer in layers}


@pytest.mark.parametrize("width", [64, 512])
def test_norms_of_a_uvit_stay_within_bounds_over_depth(width):
    def norms(start):
        model = uvit(skip_init=start, hidden_size=width, num_layers=20, num_attention_heads=width // 32)
        found = []
        for block in (model.mid_block, *model.out_blocks):
            block.register_forward_hook(lambda block, args, output: found.append(output.pow(2).mean().sqrt().item()))
        model(torch.randn(2, 3, 8, 8), 10)
        return torch.tensor(found) / found[0]

    assert norms("reference")[1:].max() < (0.5 if width == 64 else 0.8)  # the random layer shrinks the residual stream
    assert norms("zero").sub(1).abs().max() < 0.5
    balanced = norms("balanced")
    assert (balanced > 0.9).all()
    assert (balanced < 4).all()
    assert norms("sum")[-1] > balanced[-1]


def resnet_shortcuts(unet, sample):
    """Run a U-Net and return for each consumed skip the hidden state, the skip, and the output of the shortcut."""
    seen = {}
    for skip in skip_connections(unet):
        unet.get_submodule(skip.where).conv_shortcut.register_forward_hook(
            lambda conv, args, output, i=skip.i: seen.update({i: (args[0], output)})
        )
    with torch.no_grad():
        unet(sample, 10)
    return {
        skip.i: (*seen[skip.i][0].tensor_split([seen[skip.i][0].shape[1] - skip.width], dim=1), seen[skip.i][1])
        for skip in skip_connections(unet)
    }


@pytest.mark.parametrize("kappa", [None, 0.5])
def test_shortcuts_of_a_unet_add_the_channels_that_exist(kappa, ddpm):
    unet = ddpm.build()
    if kappa is not None:
        apply_skip_scaling(unet, {"method": "cs", "kappa": kappa})
    apply_skip_init(unet, "balanced")
    widths = set()
    for i, (hidden, skip, output) in resnet_shortcuts(unet, torch.randn(2, 3, 8, 8)).items():
        k, out_width = (kappa or 1.0) ** (i - 1), output.shape[1]
        both = torch.zeros_like(output)
        counts = torch.zeros(out_width)
        for tensor, weight in ((hidden, 1.0), (skip, k)):
            n = min(out_width, tensor.shape[1])
            both[:, :n] += tensor[:, :n]  # the skip is scaled already
            counts[:n] += weight**2
        torch.testing.assert_close(output, both / counts.sqrt()[:, None, None])
        widths.add((hidden.shape[1], skip.shape[1], out_width))
    assert len(widths) > 2
    assert any(hidden != out for hidden, _, out in widths)


def test_start_is_saved_and_loaded_weights_are_not_started_again(tmp_path):
    model = uvit(skip_init="sum", skip_scaling="cs")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    model.save_pretrained(tmp_path)
    for options in ({}, {"low_cpu_mem_usage": False}):
        loaded = UViTModel.from_pretrained(tmp_path, **options)
        assert loaded.config.skip_init == "sum"
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters()))
    fresh = UViTModel.from_config(loaded.config)
    assert torch.equal(fresh.out_blocks[0].hidden_proj.weight, torch.eye(32))


def test_folder_saved_before_skip_init_existed(tmp_path):
    model = uvit()
    model.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    assert '"skip_init": "reference",' in config
    (tmp_path / "config.json").write_text(config.replace('"skip_init": "reference",', ""))
    loaded = UViTModel.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters()))
    assert loaded.config.skip_init == "reference"


def test_function_and_config_field_agree():
    built = uvit(skip_init="balanced", skip_scaling="cs")
    changed = apply_skip_init(apply_skip_scaling(uvit(), "cs"), "balanced")
    assert changed.config.skip_init == "balanced"
    assert all(torch.equal(a, b) for a, b in zip(built.parameters(), changed.parameters()))


def test_model_with_zero_branches_is_its_residual_path(case):
    """Then all blocks that keep the width and size pass on what they receive."""
    if case.name in ("1d", "1d-temporal", "kandinsky3", "stable-cascade", "hunyuan-dit", "unidiffuser", "dreamlite"):
        with pytest.raises(UserError, match=r"layout of .* does not define skip_layer and branch_ends"):
            apply_skip_init(case.build(), "reference", zero_init_residual=True)
        return
    model = apply_skip_init(case.build(), "reference", zero_init_residual=True)
    kinds = ResnetBlock2D | ResnetBlockCondNorm2D
    assert not any(m.proj_out.weight.any() for m in model.modules() if hasattr(m, "proj_out"))
    resnets = [m for m in model.modules() if isinstance(m, kinds) and m.conv_shortcut is None]
    seen = []
    for resnet in resnets:
        resnet.register_forward_hook(
            lambda resnet, args, kwargs, output: seen.append(
                (next(iter([*args, *kwargs.values()])) / resnet.output_scale_factor, output)
            ),
            with_kwargs=True,
        )
    with torch.no_grad():
        model(**case.make_inputs())
    assert seen
    for received, output in seen:
        if received.shape == output.shape:
            assert torch.equal(output, received)


def test_uvit_with_zero_branches_is_its_residual_path():
    model = uvit(skip_init="sum", zero_init_residual=True, skip_scaling="cs")
    assert model.config.zero_init_residual
    assert not model.mid_block.attn.to_out[0].weight.any()
    sample = torch.randn(2, 3, 8, 8)
    seen = {}
    model.in_blocks[0].register_forward_pre_hook(lambda block, args: seen.update(first=args[0]))
    model.norm.register_forward_pre_hook(lambda norm, args: seen.update(last=args[0]))
    with torch.no_grad():
        model(sample, 10)
    expected = seen["first"] * (1 + 0.9 + 1)  # the middle and two skips
    torch.testing.assert_close(seen["last"], expected[:, 1:])
    changed = apply_skip_init(apply_skip_scaling(uvit(), "cs"), "sum", zero_init_residual=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), changed.parameters()))


def test_rejects_an_unknown_start():
    message = r"skip_init must be one of reference, zero, sum, balanced, got 'balance' \(did you mean 'balanced'\?\)"
    with pytest.raises(UserError, match=message):
        uvit(skip_init="balance")
    with pytest.raises(UserError, match=message):
        apply_skip_init(uvit(), "balance")


def test_refuses_trained_weights(ddpm, tmp_path):
    uvit().save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"skip_init='sum' is for models that are trained from scratch, and .* has train"
    ):
        UViTModel.from_pretrained(tmp_path, skip_init="sum")
    for model in (uvit(), ddpm.build_scaled("none")):
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 3, 8, 8), 10).sample.sum().backward()
        optimizer.step()
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(UserError, match=r"weights of this .* are trained .* and skip_init would destroy them"):
            apply_skip_init(model, "balanced")
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


@pytest.mark.parametrize("combination", [{}, {"zero_init_residual": True}, {"block_scale": "rezero"}], ids=str)
@pytest.mark.parametrize("start", ["reference", "zero", "sum", "balanced"])
def test_every_parameter_learns(start, combination):
    model = uvit(skip_init=start, **combination)
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0)
    for _ in range(3):
        optimizer.zero_grad()
        sample = torch.randn(4, 3, 8, 8)
        (model(sample, 10).sample - sample).square().mean().backward()
        optimizer.step()
    assert not [name for name, p in model.named_parameters() if torch.equal(p, before[name])]


def test_compiles_and_takes_a_lora(fresh_compiler):
    model = uvit(skip_init="balanced", skip_scaling="cs").eval()
    sample = torch.randn(2, 3, 8, 8)
    expected = model(sample, 10).sample
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(sample, 10).sample, expected)
    model.add_adapter(LoraConfig(r=2, target_modules=["hidden_proj", "skip_proj", "to_q"]))
    torch.testing.assert_close(model(sample, 10).sample, expected)  # a LoRA starts at zero


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.10 draws other initial weights")
def test_reference_init_is_frozen():
    """These sums are of the version before `skip_init` existed."""
    sums = {name: p.double().abs().sum().item() for name, p in uvit(sample_size=8).named_parameters()}
    assert sums["out_blocks.0.hidden_proj.weight"] == pytest.approx(15.837657090038192)
    assert sum(sums.values()) == pytest.approx(1475.5389291448032)


@pytest.mark.slow
def test_starts_a_stock_unet_in_a_fresh_process(in_fresh_process):
    """Nothing else has imported the classes that can be scaled."""
    code = """
from diffusers import UNet2DModel
from scalelong_diffusers import apply_skip_init
blocks = dict(down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2)
unet = apply_skip_init(UNet2DModel(block_out_channels=(8, 8), norm_num_groups=4, **blocks), "zero")
assert not unet.up_blocks[0].resnets[0].conv_shortcut.weight[:, 8:].any()
"""
    in_fresh_process(code)
