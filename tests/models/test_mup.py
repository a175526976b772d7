"""muP: roles, init and Adam's settings of a U-ViT that is wider than the model whose learning rate was tuned."""

import math

import pytest
import torch
from diffusers import UNet2DModel
from peft import LoraConfig
from torch import nn

from scalelong_diffusers import (
    LongSkip,
    ScaleLongUNet2DConditionModel,
    ScaleLongUNet2DModel,
    SkipFactor,
    UserError,
    UViTModel,
    mup_param_groups,
    register_skip_method,
)
from scalelong_diffusers.models.mup import mixes_mup_settings, mup_scales


SMALL = {"sample_size": 8, "patch_size": 4, "num_layers": 4, "num_class_embeds": 5}
TEXT = {"cross_attention_dim": 6, "context_length": 3}
UNET = {
    "sample_size": 8,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "attention_head_dim": 8,
}
STARTS = {
    "reference": {},
    "residual": {"skip_init": "sum", "block_scale": "rezero"},
    "balanced": {"skip_init": "balanced"},
}
TOKEN_GATES = {"method": "ls", "reduction": 2}
CHANNEL_GATES = {"method": "ls", "gate_axis": "channels", "reduction": 4}


def uvit(width, base=None, **changes):
    torch.manual_seed(0)
    config = {**SMALL, "hidden_size": width, "num_attention_heads": width // 8, "mup_base_width": base, **changes}
    return UViTModel(**config)


def groups_of(model, **settings):
    """Return the settings of each parameter by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    settings = {"learning_rate": 1e-2, "weight_decay": 0.1, "eps": 1e-6, **settings}
    groups = mup_param_groups(model, **settings)
    found = [(names[p], (g["lr"], g["weight_decay"], g["eps"])) for g in groups for p in g["params"]]
    assert len(found) == len(names) == len(dict(found))
    return dict(found)


def train(model, optimizer, steps=3):
    """Return the losses of some steps."""
    draw = torch.Generator().manual_seed(0)
    noise, labels = torch.randn(4, 3, 8, 8, generator=draw), torch.arange(4)
    losses = []
    for _ in range(steps):
        loss = (model(noise, torch.tensor([10, 300, 600, 900]), class_labels=labels).sample - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("scaling", ["none", "cs", TOKEN_GATES, "token_gates"])
def test_base_width_changes_nothing(start, scaling):
    config = {"skip_scaling": scaling, **start}
    plain, base = uvit(16, **config), uvit(16, base=16, **config)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), base.parameters()))
    gates = set(plain.skip_scaler.parameters()) if scaling == "token_gates" else set()  # they learn more slowly
    settings = [(gates, 5e-4, 0.0), (set(plain.parameters()) - gates, 1e-2, 0.1)]
    order = list(plain.parameters())
    groups = [
        {"params": [p for p in order if p in chosen], "lr": lr, "weight_decay": decay}
        for chosen, lr, decay in settings if chosen
    ]  # fmt: skip
    losses = train(plain, torch.optim.AdamW(groups))
    assert losses == train(base, torch.optim.AdamW(mup_param_groups(base, 1e-2, weight_decay=0.1)))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), base.parameters()))


def test_roles():
    model = uvit(32, base=16, **TEXT, skip_scaling=CHANNEL_GATES, block_scale="rezero")
    roles = {name: scale.role for name, scale in mup_scales(model).items()}
    expected = {
        "input": (
            *("pos_embed", "class_embed.weight", "patch_embed.weight", "patch_embed.bias", "context_embed.weight"),
            *("context_embed.bias", "norm.weight", "norm.bias", "in_blocks.0.norm1.weight", "mid_block.mlp.fc1.bias"),
            *("out_blocks.0.hidden_proj.bias", "skip_scaler.gates.skip_1.excite.bias"),
        ),
        "hidden": (
            *("in_blocks.0.attn.to_q.weight", "in_blocks.0.attn.to_out.0.weight", "mid_block.mlp.fc2.weight"),
            *("out_blocks.0.hidden_proj.weight", "out_blocks.0.skip_proj.weight"),
            *("skip_scaler.gates.skip_1.squeeze.weight", "skip_scaler.gates.skip_1.excite.weight"),
        ),
        "output": ("proj_out.weight",),
        "fixed": ("proj_out.bias", "conv_out.weight", "conv_out.bias", "out_blocks.0.attn_residual.scale"),
    }
    assert {name: role for role, names in expected.items() for name in names}.items() <= roles.items()
    assert {name for name, role in roles.items() if role == "output"} == {"proj_out.weight"}


@pytest.mark.parametrize(
    ("scaling", "roles"),
    [
        (TOKEN_GATES, {"fixed"}),
        ({**CHANNEL_GATES, "shared": True}, {"hidden", "input"}),
        ({"method": "ls", "gate": "ie", "gate_axis": "channels"}, {"input"}),
        ("token_gates", {"output", "fixed"}),
        ("learnable", {"fixed"}),
        ("lerp", {"fixed"}),
        ("normalized", {"input"}),
    ],
)
def test_roles_of_scaling_methods(scaling, roles):
    scales = mup_scales(uvit(32, base=16, skip_scaling=scaling))
    assert {scale.role for name, scale in scales.items() if name.startswith("skip_scaler")} == roles


def test_settings_follow_the_width():
    settings = groups_of(uvit(64, base=16, skip_scaling="token_gates"))
    assert settings["in_blocks.0.mlp.fc2.weight"] == (2.5e-3, 0.4, 2.5e-7)
    assert settings["out_blocks.0.skip_proj.weight"] == (2.5e-3, 0.4, 2.5e-7)
    assert settings["proj_out.weight"] == (2.5e-3, 0.4, 2.5e-7)
    assert settings["pos_embed"] == settings["norm.bias"] == (1e-2, 0.1, 2.5e-7)
    assert settings["conv_out.weight"] == (1e-2, 0.1, 1e-6)
    # The method's own learning rate and decay are on top.
    assert settings["skip_scaler.gates.token_gates_1.linear.weight"] == pytest.approx((1.25e-4, 0, 2.5e-7))


def test_hidden_and_output_weights_start_smaller():
    plain, wide = uvit(64, skip_scaling=CHANNEL_GATES), uvit(64, base=16, skip_scaling=CHANNEL_GATES)
    scales = mup_scales(wide)
    for (name, a), b in zip(plain.named_parameters(), wide.parameters()):
        is_gate = name.startswith("skip_scaler")  # it starts in proportion to its own width
        factor = 1.0 if is_gate else {"hidden": 0.5, "output": 0.25}.get(scales[name].role, 1.0)
        torch.testing.assert_close(a * factor, b)


@pytest.mark.parametrize("mode", ["eager", "compiled", "checkpointed"])
def test_gradient_of_the_last_layer_shrinks_like_the_others(mode):
    """Otherwise, the norm of all gradients would grow with the width, and clipping would begin earlier."""
    plain, wide = uvit(64, base=64), uvit(64, base=16)
    wide.load_state_dict(plain.state_dict())
    assert torch.equal(uvit_output(wide), uvit_output(plain))
    if mode == "checkpointed":
        wide.enable_gradient_checkpointing()
    for model in (plain, wide):
        runs = torch.compile(model, backend="aot_eager") if mode == "compiled" else model
        runs(torch.ones(1, 3, 8, 8), 5, class_labels=torch.tensor([0])).sample.square().mean().backward()
    for (name, a), b in zip(plain.named_parameters(), wide.parameters()):
        torch.testing.assert_close(a.grad * (0.25 if name == "proj_out.weight" else 1), b.grad)


def test_residual_start_does_not_depend_on_the_width():
    block = uvit(64, base=16, skip_init="sum").out_blocks[0]
    assert torch.equal(block.hidden_proj.weight, torch.eye(64))
    assert torch.equal(block.skip_proj.weight, torch.eye(64))


def test_changes_of_features_do_not_depend_on_the_width():
    """A coordinate check. `benchmarks/mup.py` has the full one."""

    def change(width, is_mup):
        model = uvit(width, base=16 if is_mup else None, **STARTS["residual"])
        groups = mup_param_groups(model, 1e-2) if is_mup else model.parameters()
        features = []
        model.out_blocks[-1].register_forward_hook(lambda block, args, output: features.append(output.detach()))
        train(model, torch.optim.AdamW(groups, lr=1e-2, weight_decay=0), steps=5)
        return (features[-1] - features[0]).abs().mean().item()

    slopes = {
        is_mup: math.log2(change(256, is_mup) / change(32, is_mup)) / math.log2(256 / 32) for is_mup in (True, False)
    }
    assert abs(slopes[True]) < 0.15
    assert slopes[False] > 0.3


def test_depth_scales_the_residual_branches():
    for scale in (1.0, 0.5, "rezero"):
        model = uvit(16, num_layers=8, mup_base_depth=2, block_scale=scale)
        residual, hidden, branch = model.mid_block.mlp_residual, torch.randn(3), torch.randn(3)
        t = residual.scale.data.fill_(0.5).item() if scale == "rezero" else scale
        torch.testing.assert_close(residual(hidden, branch), hidden + t * branch / 4)


def test_depth_slows_the_skip_layers():
    settings = groups_of(uvit(64, base=16, num_layers=8, mup_base_depth=2))
    for name in ("hidden_proj.weight", "skip_proj.weight"):
        assert settings[f"out_blocks.0.{name}"] == pytest.approx((2.5e-3 / 4, 0.4, 2.5e-7))
    assert settings["out_blocks.0.hidden_proj.bias"] == pytest.approx((1e-2 / 4, 0.1, 2.5e-7))
    assert settings["out_blocks.0.mlp.fc1.weight"] == pytest.approx((2.5e-3, 0.4, 2.5e-7))
    only_depth = groups_of(uvit(64, num_layers=8, mup_base_depth=2))
    assert only_depth["out_blocks.0.skip_proj.weight"] == pytest.approx((1e-2 / 4, 0.1, 1e-6))
    assert only_depth["out_blocks.0.mlp.fc1.weight"] == pytest.approx((1e-2, 0.1, 1e-6))


def test_saves_and_loads(tmp_path):
    model = uvit(32, base=16, mup_base_depth=4)
    model.save_pretrained(tmp_path)
    loaded = UViTModel.from_pretrained(tmp_path)
    assert (loaded.config.mup_base_width, loaded.config.mup_base_depth) == (16, 4)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters()))
    assert groups_of(loaded) == groups_of(model)
    # The base width does not change the output, so code that does not know the field computes the same.
    assert torch.equal(*(uvit_output(UViTModel.from_pretrained(tmp_path, mup_base_width=b)) for b in (16, None)))


def uvit_output(model):
    with torch.no_grad():
        return model(torch.ones(1, 3, 8, 8), 5, class_labels=torch.tensor([0])).sample


class _LinearGate(SkipFactor):
    def __init__(self, skip: LongSkip):
        super().__init__(skip)
        self.linear = nn.Linear(skip.width, skip.width)

    def reset_parameters(self):
        self.linear.weight.zero_()
        self.linear.bias.zero_()

    def forward(self, skip):
        return 1 + self.linear(skip)


class _OddGate(_LinearGate):
    def __init__(self, skip: LongSkip):
        super().__init__(skip)
        self.table = nn.Parameter(torch.zeros(2, skip.width))


def test_methods_of_users_have_roles_or_are_refused():
    register_skip_method("mup_linear_gate")(_LinearGate)
    register_skip_method("mup_odd_gate")(_OddGate)
    scales = mup_scales(uvit(32, base=16, skip_scaling="mup_linear_gate"))
    assert scales["skip_scaler.gates.mup_linear_gate_1.linear.weight"].role == "hidden"
    with pytest.raises(UserError, match=r"muP has no rule for the parameter skip_scaler\.gates\.\S+table"):
        uvit(32, base=16, skip_scaling="mup_odd_gate")


class TestUNets:
    """The base model of a U-Net is given by the entries of its config that differ."""

    BASE = {"block_out_channels": (8, 16), "norm_num_groups": 4}

    def unet(self, cls=UNet2DModel, **changes):
        torch.manual_seed(0)
        return cls(**{**UNET, "block_out_channels": (32, 64), "norm_num_groups": 16, **changes})

    def test_roles_follow_from_shapes(self):
        settings = groups_of(self.unet(num_class_embeds=5), base_config=self.BASE)
        assert settings["mid_block.resnets.0.conv1.weight"] == (2.5e-3, 0.4, 2.5e-7)
        assert settings["mid_block.attentions.0.to_q.weight"] == (2.5e-3, 0.4, 2.5e-7)
        assert settings["time_embedding.linear_1.weight"] == (2.5e-3, 0.4, 2.5e-7)
        assert settings["conv_out.weight"] == (2.5e-3, 0.4, 2.5e-7)
        for name in ("conv_in.weight", "class_embedding.weight", "conv_norm_out.bias"):
            assert settings[name] == (1e-2, 0.1, 2.5e-7)
        assert settings["conv_out.bias"] == (1e-2, 0.1, 1e-6)

    @pytest.mark.parametrize("cls", [UNet2DModel, ScaleLongUNet2DModel])
    def test_base_has_equal_settings(self, cls):
        assert len(mup_param_groups(self.unet(cls), 1e-2, base_config={})) == 1

    def test_text_conditioned(self):
        blocks = {"down_block_types": ("CrossAttnDownBlock2D",) * 2, "up_block_types": ("CrossAttnUpBlock2D",) * 2}
        changes = {**blocks, "mid_block_type": "UNetMidBlock2DCrossAttn", "cross_attention_dim": 12}
        # In this class `attention_head_dim` is the number of heads.
        unet = self.unet(ScaleLongUNet2DConditionModel, **changes, attention_head_dim=(4, 8))
        settings = groups_of(unet, base_config={**self.BASE, "attention_head_dim": (1, 2)})
        attention = "mid_block.attentions.0.transformer_blocks.0.attn2"
        assert settings[f"{attention}.to_q.weight"] == (2.5e-3, 0.4, 2.5e-7)
        assert settings[f"{attention}.to_k.weight"] == (1e-2, 0.1, 2.5e-7)  # it reads the text

    @pytest.mark.parametrize(
        ("base_config", "message"),
        [
            ({"block_out_channels": (16, 32)}, r"keep their width, but \S+norm1 has 2 channels in each, and 1 in"),
            (
                {**BASE, "attention_head_dim": 4},
                r"keep their width, but \S+attentions\.0 has 8 channels in each",
            ),
            ({**BASE, "layers_per_block": 2}, "differ in width only, but this UNet2DModel has"),
            ({"block_out_chanels": (8, 16)}, r"'block_out_chanels', .* \(did you mean 'block_out_channels'\?\)"),
            ({"block_out_channels": 8}, "UNet2DModel does not take base_config="),
        ],
    )
    def test_rejects_wrong_base_configs(self, base_config, message):
        with pytest.raises(UserError, match=message):
            mup_param_groups(self.unet(), 1e-3, base_config=base_config)

    def test_rejects_a_missing_or_a_second_base(self):
        with pytest.raises(UserError, match=r"this UNet2DModel has no base model: .* or pass the base_config"):
            mup_param_groups(self.unet(), 1e-3)
        with pytest.raises(UserError, match="base_config is for U-Nets: build the UViTModel with mup_base_width"):
            mup_param_groups(uvit(16), 1e-3, base_config={"hidden_size": 8})

    def test_changes_of_the_output_do_not_depend_on_the_width(self):
        """A coordinate check of the output."""

        def change(width, base_config):
            unet = self.unet(block_out_channels=(width, 2 * width), norm_num_groups=width // 2)
            nn.init.zeros_(unet.conv_out.weight)
            groups = mup_param_groups(unet, 1e-2, base_config=base_config)
            sample = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
            optimizer = torch.optim.AdamW(groups)
            for _ in range(4):
                output = unet(sample, torch.tensor([10, 300, 600, 900])).sample
                optimizer.zero_grad()
                (output - sample).square().mean().backward()
                optimizer.step()
            return output.abs().mean().item()

        slopes = {
            is_mup: math.log2(change(64, self.BASE if is_mup else {}) / change(8, self.BASE if is_mup else {})) / 3
            for is_mup in (True, False)
        }
        assert abs(slopes[True]) < 0.15
        assert slopes[False] > 0.3


@pytest.mark.parametrize(
    ("width", "message"),
    [(0, "an integer, at least 1 and"), (-16, "an integer, at least 1 and"), (12, "a multiple of the head width 8")],
)
def test_rejects_wrong_base_widths(width, message):
    with pytest.raises(UserError, match=f"mup_base_width must be {message} .* got {width}"):
        uvit(16, base=width)


def test_rejects_wrong_base_depths():
    with pytest.raises(UserError, match="mup_base_depth must be an integer, at least 1 and at most 1,000, got 0"):
        uvit(16, mup_base_depth=0)


def test_rejects_models_without_mup():
    with pytest.raises(UserError, match="this UViTModel has no base model: build a UViTModel with mup_base_width"):
        mup_param_groups(uvit(16), 1e-3)


def test_rejects_lora():
    model = uvit(32, base=16)
    model.add_adapter(LoraConfig(target_modules=["to_q"]))
    with pytest.raises(UserError, match=r"differ in width only, .* train adapters with a usual optimizer"):
        mup_param_groups(model, 1e-3)
    assert not mixes_mup_settings(model, torch.optim.AdamW(model.parameters()))


def test_rejects_wrapped_models():
    with pytest.raises(UserError, match="muP is for models of diffusers, got OptimizedModule: pass the model without"):
        mup_param_groups(torch.compile(uvit(32, base=16)), 1e-3)


def test_width_may_be_the_default():
    """diffusers drops entries of a config that have their default."""
    with torch.device("meta"):
        scales = mup_scales(UViTModel(num_layers=2, mup_base_width=128))
    assert (scales["proj_out.weight"].role, scales["proj_out.weight"].ratio) == ("output", 4)


def test_rules_draw_no_random_numbers():
    states = []
    for base in (None, 16):
        model = uvit(32, base=base, skip_scaling=CHANNEL_GATES)
        if base is not None:
            mup_param_groups(model, 1e-3)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
