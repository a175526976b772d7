"""Patching in place equals the subclass, can be undone exactly, and fails early where it cannot work."""

import json
from copy import deepcopy

import diffusers
import pytest
import torch
from diffusers.configuration_utils import FrozenDict, register_to_config
from peft import LoraConfig, get_peft_model

import scalelong_diffusers
from scalelong_diffusers import (
    ScaleLongUNet2DConditionModel,
    ScaleLongUNet2DModel,
    SkipScalingConfig,
    SkipScalingMixin,
    UserError,
    apply_skip_scaling,
    remove_skip_scaling,
    set_skip_scaling_strength,
    skip_connections,
)
from scalelong_diffusers.models.mixin import scaled_class_by_name
from scalelong_diffusers.models.skips import SkipLayout, SkipTupleHook, UpBlockSkips


LS = {"method": "ls", "reduction": 4}
PAPER_LS = {**LS, "shared": True, "init": "paper"}


def output(model, inputs):
    with torch.no_grad():
        return model(**inputs).sample


def snapshot(model):
    return type(model), dict(model.config), {key: weight.clone() for key, weight in model.state_dict().items()}


def assert_untouched(model, before):
    model_class, config, weights = before
    assert type(model) is model_class
    assert dict(model.config) == config
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(weight, weights[key]) for key, weight in model.state_dict().items())
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    assert any(isinstance(hook, SkipTupleHook) for hook in hooks) == issubclass(model_class, SkipScalingMixin)


def public(config):
    return {key: value for key, value in config.items() if not key.startswith("_")}


def test_patched_model_equals_the_subclass_and_can_be_restored(case):
    inputs, model = case.make_inputs(), case.build()
    before, expected = snapshot(model), output(model, inputs)
    for entry in ("none", "inv_sqrt2", "cs", PAPER_LS, "learnable"):
        torch.manual_seed(1)
        assert apply_skip_scaling(model, entry) is model
        subclass = case.build_scaled(entry)
        assert type(model) is type(subclass) is getattr(scalelong_diffusers, case.scaled_name)
        assert public(model.config) == public(subclass.config)
        subclass.load_state_dict(model.state_dict())
        assert torch.equal(output(model, inputs), output(subclass, inputs))
        assert remove_skip_scaling(model) is model
        assert_untouched(model, before)
        assert not hasattr(model, "skip_scaler")
    assert torch.equal(output(model, inputs), expected)


def test_ls_keeps_the_output_of_a_trained_model(case):
    model, inputs = case.build(), case.make_inputs()
    expected = output(model, inputs)
    assert torch.equal(output(apply_skip_scaling(model, LS), inputs), expected)
    assert model.skip_scaler.state_dict()


def test_restored_model_saves_the_files_of_the_stock_model(ddpm, tmp_path):
    ddpm.build_scaled("cs").save_pretrained(tmp_path / "scaled")
    ddpm.build().save_pretrained(tmp_path / "stock")
    model = remove_skip_scaling(ScaleLongUNet2DModel.from_pretrained(tmp_path / "scaled"))
    model.save_pretrained(tmp_path / "removed")
    removed, stock = tmp_path / "removed", tmp_path / "stock"
    weights = "diffusion_pytorch_model.safetensors"
    assert (removed / weights).read_bytes() == (stock / weights).read_bytes()
    removed, stock = (json.loads((folder / "config.json").read_text()) for folder in (removed, stock))
    assert removed == stock | {"_name_or_path": str(tmp_path / "scaled")}


def test_same_config_keeps_trained_gates_and_another_replaces_them(ddpm):
    model = apply_skip_scaling(ddpm.build(), LS)
    with torch.no_grad():
        for parameter in model.skip_scaler.parameters():
            parameter.fill_(0.25)
    trained = {key: weight.clone() for key, weight in model.skip_scaler.state_dict().items()}
    apply_skip_scaling(model, LS)
    apply_skip_scaling(model, {**LS, "strength": 0.5})  # only the strength moves
    assert all(torch.equal(weight, trained[key]) for key, weight in model.skip_scaler.state_dict().items())
    assert model.config.skip_scaling["strength"] == 0.5
    apply_skip_scaling(model, {**LS, "init": "paper"})
    assert not any(torch.equal(weight, trained[key]) for key, weight in model.skip_scaler.state_dict().items())


def test_switching_between_methods_ends_at_the_plain_output(case):
    model, inputs = case.build(), case.make_inputs()
    expected = output(model, inputs)
    for entry in ("cs", LS, "learnable", PAPER_LS, "inv_sqrt2", "none"):
        apply_skip_scaling(model, entry)
        assert model.config.skip_scaling["method"] == SkipScalingConfig.parse(entry).method
    assert torch.equal(output(model, inputs), expected)
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    blocks = {skip.block for skip in model.skip_layout.find(model)}
    assert len(hooks) <= len(blocks) + len(skip_connections(model))


def test_gates_get_the_dtype_of_a_frozen_model_and_stay_trainable(sd):
    model = sd.build().to(torch.bfloat16).requires_grad_(False)
    apply_skip_scaling(model, LS)
    assert {p.dtype for p in model.skip_scaler.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad for p in model.skip_scaler.parameters())
    assert not model.conv_in.weight.requires_grad


def test_float32_gates_train_in_a_bfloat16_model(sd):
    model = apply_skip_scaling(sd.build().to(torch.bfloat16).requires_grad_(False), LS)
    model.skip_scaler.float()
    inputs = {key: v.bfloat16() if v.is_floating_point() else v for key, v in sd.make_inputs().items()}
    result = model(**inputs).sample
    assert result.dtype == torch.bfloat16
    result.float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.skip_scaler.parameters())


class TestStrength:
    def test_zero_turns_the_scaling_off_and_one_turns_it_on(self, ddpm):
        model, inputs = ddpm.build(), ddpm.make_inputs()
        plain = output(model, inputs)
        for entry in ("cs", PAPER_LS, "learnable"):
            full = output(apply_skip_scaling(model, entry), inputs)
            assert set_skip_scaling_strength(model, 0.0) is model
            assert torch.equal(output(model, inputs), plain)
            set_skip_scaling_strength(model, 1.0)
            assert torch.equal(output(model, inputs), full)
            assert torch.equal(full, plain) == (entry == "learnable")

    def test_saved_model_reproduces_its_output(self, ddpm, tmp_path):
        model, inputs = ddpm.build_scaled("cs"), ddpm.make_inputs()
        set_skip_scaling_strength(model, 0.3)
        model.save_pretrained(tmp_path)
        reloaded = ScaleLongUNet2DModel.from_pretrained(tmp_path)
        assert reloaded.config.skip_scaling["strength"] == 0.3
        torch.testing.assert_close(output(reloaded, inputs), output(model, inputs), rtol=1e-5, atol=1e-6)
        assert [skip.factor for skip in skip_connections(model)] == pytest.approx(
            [1 + 0.3 * (0.9 ** (i - 1) - 1) for i in range(1, 7)]
        )

    def test_bad_values_change_nothing(self, ddpm):
        model = ddpm.build_scaled("cs")
        before = snapshot(model)
        for strength in (-0.1, 1.1, float("nan"), "half", None):
            with pytest.raises(UserError, match=r"strength must be a number.*, got"):
                set_skip_scaling_strength(model, strength)
        assert_untouched(model, before)

    def test_rejects_models_without_scaling(self, ddpm):
        with pytest.raises(UserError, match="this UNet2DModel has no skip scaling; apply_skip_scaling adds it"):
            set_skip_scaling_strength(ddpm.build(), 0.5)
        with pytest.raises(UserError, match="not used by method 'none'"):
            set_skip_scaling_strength(ddpm.build_scaled("none"), 0.5)


def assert_rejected(model, config, message):
    before = snapshot(model) if isinstance(model, diffusers.ModelMixin) else None
    with pytest.raises(UserError, match=message) as error:
        apply_skip_scaling(model, config)
    assert "\n" not in str(error.value)
    if before:
        assert_untouched(model, before)


class TestRejected:
    def test_config_that_does_not_fit(self, ddpm):
        for model in (ddpm.build(), ddpm.build_scaled(LS)):
            assert_rejected(model, {"method": "ls", "reduction": 32}, "reduction must be at most 16, .* got 32")
        assert_rejected(model, {"method": "ls", "gate_axis": "tokens"}, "gate_axis must be channels for this model")
        assert_rejected(model, "cz", "skip_scaling must be one of .* got 'cz'")
        assert_rejected(model, {"kappa": 0.9}, "skip_scaling must be one of .* got None")

    def test_cs_for_a_single_skip(self):
        model = diffusers.UNet2DModel(
            sample_size=8, layers_per_block=0, block_out_channels=(16,), norm_num_groups=8,
            down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
        )  # fmt: skip
        assert len(skip_connections(model)) == 1
        assert_rejected(model, "cs", "one long skip, as k_1 = 1; use 'constant'")
        assert skip_connections(apply_skip_scaling(model, "constant"))[0].factor == 0.9

    def test_models_without_long_skips(self):
        dit = diffusers.DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=1, sample_size=8, norm_num_groups=4
        )
        message = "DiTTransformer2DModel has no long skips that this package knows; models .*: .*UNet2DModel, .*Motion"
        assert_rejected(dit, "cs", message)
        uvit = diffusers.UVit2DModel(
            hidden_size=16, cond_embed_dim=16, micro_cond_encode_dim=4, micro_cond_embed_dim=20,
            encoder_hidden_size=16, vocab_size=8, codebook_size=8, in_channels=16, block_out_channels=16,
            num_res_blocks=1, num_hidden_layers=1, num_attention_heads=2, block_num_heads=2, intermediate_size=32,
        )  # fmt: skip
        assert_rejected(uvit, "cs", "UVit2DModel has no long skips that this package knows")

    def test_wrapped_models(self, ddpm, sd):
        inner = sd.build()
        wrapped = get_peft_model(inner, LoraConfig(target_modules=["to_q"]))
        for model, name in ((wrapped, "PeftModel"), (torch.compile(inner), "OptimizedModule")):
            assert_rejected(model, "cs", f"{name} wraps a UNet2DConditionModel: patch before wrapping")
        assert type(inner) is diffusers.UNet2DConditionModel

        compiled = ddpm.build()
        compiled.compile()
        assert_rejected(compiled, "cs", "this UNet2DModel is compiled, .* patch before compiling")

    def test_removal_from_a_plain_model(self, ddpm):
        with pytest.raises(UserError, match="this UNet2DModel has no skip scaling"):
            remove_skip_scaling(ddpm.build())


class TestList:
    def test_prints_as_a_table(self, ddpm):
        assert str(skip_connections(ddpm.build_scaled({"method": "cs", "kappa": 0.5}))) == "\n".join(
            [
                "i  where                  width  factor",
                "1  up_blocks.1.resnets.2     16  1",
                "2  up_blocks.1.resnets.1     16  0.5",
                "3  up_blocks.1.resnets.0     16  0.25",
                "4  up_blocks.0.resnets.2     16  0.125",
                "5  up_blocks.0.resnets.1     32  0.0625",
                "6  up_blocks.0.resnets.0     32  0.03125",
                "N = 6, SkipScalingConfig(method='cs', kappa=0.5, reverse=False, strength=1.0), S = 1.333, "
                "0 parameters added",
            ]
        )

    def test_shows_gates_with_their_parameters_and_counts_shared_ones_once(self, ddpm):
        listed = skip_connections(ddpm.build_scaled({**LS, "shared": True}))
        assert {skip.gate for skip in listed} == {"width_16", "width_32"}
        size = {w: 2 * w * (w // 4) + w // 4 + w for w in (16, 32)}
        assert [skip.parameters for skip in listed] == [size[skip.width] for skip in listed]
        assert listed.parameters == size[16] + size[32]
        assert "width_16 (148)" in repr(listed)

    def test_lists_the_factors_that_the_model_applies(self, ddpm):
        model = ddpm.build_scaled("cs")
        model._internal_dict = FrozenDict({**model.config, "skip_scaling": {"method": "inv_sqrt2"}})
        assert skip_connections(model).config.method == "cs"
        assert [skip.factor for skip in skip_connections(ddpm.build())] == [1.0] * 6


class UserModels:
    """Model classes as a user writes them in their own file."""

    class Plain(diffusers.UNet2DConditionModel):
        def __init__(self, sample_size=None, brightness=0.0):
            super().__init__(sample_size, **USER_CONFIG)
            self.brightness = brightness

        def forward(self, sample, *args, **kwargs):
            return super().forward(sample + self.brightness, *args, **kwargs)

    class Registered(diffusers.UNet2DConditionModel):
        @register_to_config
        def __init__(self, sample_size=None, brightness=0.0):
            super().__init__(sample_size, **USER_CONFIG)

        def forward(self, sample, *args, **kwargs):
            return super().forward(sample + self.config.brightness, *args, **kwargs)

    class Keywords(diffusers.UNet2DConditionModel):
        def __init__(self, *args, brightness=0.0, **kwargs):
            super().__init__(*args, **{**USER_CONFIG, **kwargs})
            self.register_to_config(brightness=brightness)

        def forward(self, sample, *args, **kwargs):
            return super().forward(sample + self.config.brightness, *args, **kwargs)


USER_CONFIG = {
    "block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1, "cross_attention_dim": 16,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": 4,
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip
USER_INPUTS = {"timestep": 5, "encoder_hidden_states": torch.ones(1, 3, 16)}


def assert_scales(model, scaled_class, num_skips, tmp_path):
    """Check that a plain model can be scaled, saved, loaded and restored."""
    inputs = {"sample": torch.randn(1, 4, 8, 8), **USER_INPUTS}
    plain_class, plain = type(model), output(model.eval(), inputs)
    apply_skip_scaling(model, "cs")
    assert type(model) is scaled_class
    assert [skip.factor for skip in skip_connections(model)] == [0.9 ** (i - 1) for i in range(1, num_skips + 1)]
    scaled = output(model, inputs)
    assert not torch.allclose(scaled, plain)
    model.save_pretrained(tmp_path)
    reloaded = scaled_class.from_pretrained(tmp_path)
    assert reloaded.config.skip_scaling == model.config.skip_scaling
    torch.testing.assert_close(output(reloaded, inputs), scaled, rtol=1e-5, atol=1e-5)
    assert torch.equal(output(remove_skip_scaling(model), inputs), plain)
    assert type(model) is plain_class


class TestOtherModels:
    @pytest.mark.parametrize("name", ["Plain", "Registered", "Keywords"])
    def test_subclass_in_the_file_of_a_user(self, name, tmp_path):
        my_unet = type(f"My{name}", (getattr(UserModels, name),), {})
        message = (
            rf"My{name} has no scaled class; define `class ScaleLongMy{name}\(SkipScalingMixin, My{name}\)` with "
            "`skip_layout = ScaleLongUNet2DConditionModel.skip_layout`"
        )
        torch.manual_seed(0)
        assert_rejected(my_unet(8), "cs", message)

        class ScaleLongMyUNet(SkipScalingMixin, my_unet):
            skip_layout = ScaleLongUNet2DConditionModel.skip_layout

        scaled = ScaleLongMyUNet(sample_size=8, brightness=0.5, skip_scaling="cs")
        assert (scaled.config.sample_size, scaled.config.skip_scaling["method"]) == (8, "cs")
        assert scaled.config.get("brightness", scaled.__dict__.get("brightness")) == 0.5
        assert_scales(my_unet(8), ScaleLongMyUNet, 4, tmp_path)
        stock = diffusers.UNet2DConditionModel(**USER_CONFIG)
        assert type(apply_skip_scaling(stock, "cs")) is ScaleLongUNet2DConditionModel

    def test_keywords_of_the_parent_survive_saving(self, tmp_path):
        class ScaleLongMyUNet(SkipScalingMixin, UserModels.Keywords):
            skip_layout = UpBlockSkips(argument="res_hidden_states_tuple")

        model = ScaleLongMyUNet(8, block_out_channels=(8, 16), brightness=0.5, skip_scaling={**LS, "reduction": 2})
        model.save_pretrained(tmp_path)
        reloaded = ScaleLongMyUNet.from_pretrained(tmp_path)
        assert (reloaded.config.block_out_channels, reloaded.config.brightness) == ([8, 16], 0.5)
        assert reloaded.config.skip_scaling == model.config.skip_scaling
        with pytest.raises(UserError, match=r"has no argument 'brightnes' \(did you mean 'brightness'\?\)"):
            ScaleLongMyUNet.from_config(model.config, brightnes=1)

    def test_layout_that_finds_no_skips(self, ddpm):
        class NoSkips(SkipLayout):
            def find(self, model):
                return []

        class ScaleLongMyUNet(SkipScalingMixin, UserModels.Plain):
            skip_layout = NoSkips()

        with pytest.raises(UserError, match="this model has no long skips"):
            ScaleLongMyUNet(8)

    def test_finds_scaled_classes_by_name(self):
        for name in ("UNet2DModel", "ScaleLongUNet2DModel"):
            assert scaled_class_by_name(name) is ScaleLongUNet2DModel
        assert scaled_class_by_name("UViTModel") is scalelong_diffusers.UViTModel
        assert scaled_class_by_name("DiTTransformer2DModel") is None


def test_registering_the_config_of_a_checkpoint_applies_its_scaling(ddpm):
    """The load hooks of diffusers' training scripts call `register_to_config`, then `load_state_dict`."""
    checkpoint, inputs = ddpm.build_scaled({"method": "cs", "kappa": 0.5, "strength": 0.25}), ddpm.make_inputs()
    resumed = ddpm.build_scaled("cs")
    resumed.register_to_config(**checkpoint.config)
    resumed.load_state_dict(checkpoint.state_dict())
    assert torch.equal(output(resumed, inputs), output(checkpoint, inputs))
    assert resumed.skip_scaler.config.to_dict() == resumed.config.skip_scaling == checkpoint.config.skip_scaling

    learned = ddpm.build_scaled("none")
    learned.register_to_config(skip_scaling=LS, sample_size=9)
    assert learned.config.sample_size == 9
    assert learned.config.skip_scaling == ddpm.build_scaled(LS).config.skip_scaling
    gate = learned.skip_scaler.method(1)
    learned.register_to_config(skip_scaling={**LS, "strength": 0.5})
    assert learned.skip_scaler.method(1) is gate


def test_same_config_draws_no_random_number(ddpm):
    model = ddpm.build_scaled(LS)
    before = torch.get_rng_state()
    apply_skip_scaling(model, LS)
    assert torch.equal(torch.get_rng_state(), before)


def test_removes_the_unused_entry_of_a_plain_model(ddpm, sd, tmp_path):
    ddpm.build_scaled("cs").save_pretrained(tmp_path / "ddpm")
    plain = diffusers.UNet2DModel.from_pretrained(tmp_path / "ddpm")
    assert "skip_scaling" not in remove_skip_scaling(plain).config
    sd.build_scaled(LS).save_pretrained(tmp_path / "sd")
    plain = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "sd")
    motion = scalelong_diffusers.ScaleLongUNetMotionModel.from_unet2d(plain)
    assert motion.config.skip_scaling == {"version": 1, "method": "none"}
    assert not motion.skip_scaler.state_dict()


class TestSeveralModels:
    class Pair(diffusers.DiffusionPipeline):
        def __init__(self, first, second):
            super().__init__()
            self.register_modules(first=first, second=second)

    def test_error_leaves_all_models_unchanged(self, ddpm):
        narrow = diffusers.UNet2DModel(
            sample_size=8, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
            down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
        )  # fmt: skip
        pair = self.Pair(ddpm.build(), narrow)
        with pytest.raises(UserError, match="reduction must be at most 8"):
            apply_skip_scaling(pair, "ls")
        assert type(pair.first) is type(pair.second) is diffusers.UNet2DModel

    def test_sets_the_strength_of_all_or_none(self, ddpm, sd):
        pair = self.Pair(ddpm.build_scaled("cs"), sd.build_scaled("none"))
        with pytest.raises(UserError, match="not used by method 'none'"):
            set_skip_scaling_strength(pair, 0.5)
        assert pair.first.skip_scaler.strength == 1.0

    def test_patches_a_shared_model_once(self, ddpm):
        unet = ddpm.build()
        pair = self.Pair(unet, unet)
        apply_skip_scaling(pair, "cs")
        assert pair.config["first"] == pair.config["second"] == ("scalelong_diffusers", "ScaleLongUNet2DModel")
        remove_skip_scaling(pair)
        assert type(unet) is diffusers.UNet2DModel

    def test_lists_one_model_only(self, ddpm, sd):
        pair = self.Pair(ddpm.build_scaled("cs"), sd.build())
        with pytest.raises(
            UserError, match=r"several models \(ScaleLongUNet2DModel, UNet2DConditionModel\): pass one of them"
        ):
            skip_connections(pair)
        assert skip_connections(pair.first)[1].factor == 0.9


def test_restoring_a_copy_keeps_the_original_scaled(ddpm):
    model, inputs = apply_skip_scaling(ddpm.build(), "cs"), ddpm.make_inputs()
    scaled = output(model, inputs)
    remove_skip_scaling(deepcopy(model))
    assert torch.equal(output(model, inputs), scaled)


def test_second_class_for_a_plain_class_does_not_replace_ours(ddpm):
    class AnotherUNet(SkipScalingMixin, diffusers.UNet2DModel):
        skip_layout = UpBlockSkips(argument=1)

    assert type(apply_skip_scaling(ddpm.build(), "cs")) is ScaleLongUNet2DModel
    assert skip_connections(AnotherUNet(**ddpm.config, skip_scaling="cs")).config.method == "cs"
