"""Patching in place: the same as the subclass, taken back without a trace, and refused where it could not work."""

import json
from copy import deepcopy

import diffusers
import pytest
import torch
from diffusers.configuration_utils import FrozenDict, register_to_config

import scalelong_diffusers
from scalelong_diffusers import (
    SkipScalingConfig,
    SkipScalingMixin,
    apply_skip_scaling,
    remove_skip_scaling,
    set_skip_scaling_strength,
    skip_connections,
)
from scalelong_diffusers.models.skips import SKIP_LAYOUTS, SkipHook, SkipLayout, up_block_skips


LS = {"method": "ls", "reduction": 4}


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
    assert any(isinstance(hook, SkipHook) for hook in hooks) == issubclass(model_class, SkipScalingMixin)


@pytest.mark.parametrize("entry", ["none", "inv_sqrt2", "cs", "learnable"])
def test_a_patched_model_is_the_subclass(case, entry):
    patched = case.build()
    assert apply_skip_scaling(patched, entry) is patched
    subclass = case.build_scaled(entry)
    assert type(patched) is type(subclass) is getattr(scalelong_diffusers, case.scaled_name)
    assert {k: v for k, v in patched.config.items() if k[0] != "_"} == {
        k: v for k, v in subclass.config.items() if k[0] != "_"
    }
    assert patched.state_dict().keys() == subclass.state_dict().keys()
    inputs = case.make_inputs()
    assert torch.equal(output(patched, inputs), output(subclass, inputs))


@pytest.mark.parametrize("entry", ["cs", LS, "learnable"], ids=str)
def test_removal_gives_back_the_stock_model_bit_for_bit(case, entry):
    model, inputs = case.build(), case.make_inputs()
    before, expected = snapshot(model), output(model, inputs)
    apply_skip_scaling(model, entry)
    assert remove_skip_scaling(model) is model
    assert_untouched(model, before)
    assert torch.equal(output(model, inputs), expected)
    assert not hasattr(model, "skip_scaler")


def test_removal_from_a_model_that_was_loaded_scaled(ddpm, tmp_path):
    ddpm.build_scaled("cs").save_pretrained(tmp_path / "scaled")
    ddpm.build().save_pretrained(tmp_path / "stock")
    model = remove_skip_scaling(scalelong_diffusers.ScaleLongUNet2DModel.from_pretrained(tmp_path / "scaled"))
    model.save_pretrained(tmp_path / "removed")
    removed, stock = tmp_path / "removed", tmp_path / "stock"
    weights = "diffusion_pytorch_model.safetensors"
    assert (removed / weights).read_bytes() == (stock / weights).read_bytes()
    removed, stock = (json.loads((folder / "config.json").read_text()) for folder in (removed, stock))
    assert removed == stock | {"_name_or_path": str(tmp_path / "scaled")}


def test_the_same_config_keeps_trained_gates_and_another_replaces_them(ddpm):
    model = apply_skip_scaling(ddpm.build(), LS)
    with torch.no_grad():
        for parameter in model.skip_scaler.parameters():
            parameter.fill_(0.25)
    trained = {key: weight.clone() for key, weight in model.skip_scaler.state_dict().items()}
    apply_skip_scaling(model, LS)
    apply_skip_scaling(model, {**LS, "strength": 0.5})  # only the strength moves
    assert all(torch.equal(weight, trained[key]) for key, weight in model.skip_scaler.state_dict().items())
    assert model.config.skip_scaling["strength"] == 0.5
    apply_skip_scaling(model, {**LS, "init": "identity"})
    assert not any(torch.equal(weight, trained[key]) for key, weight in model.skip_scaler.state_dict().items())


def test_from_one_method_to_another_and_back(case):
    model, inputs = case.build(), case.make_inputs()
    expected = output(model, inputs)
    for entry in ("cs", LS, "learnable", {**LS, "shared": False}, "inv_sqrt2", "none"):
        apply_skip_scaling(model, entry)
        assert model.config.skip_scaling["method"] == SkipScalingConfig.parse(entry).method
    assert torch.equal(output(model, inputs), expected)
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    assert len(hooks) <= len(model.up_blocks)


def test_gates_take_the_models_dtype_and_train_where_the_model_is_frozen(sd):
    model = sd.build().to(torch.bfloat16).requires_grad_(False)
    apply_skip_scaling(model, LS)
    assert {p.dtype for p in model.skip_scaler.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad for p in model.skip_scaler.parameters())
    assert not model.conv_in.weight.requires_grad


def test_gates_in_full_precision_train_on_a_model_in_half(sd):
    model = apply_skip_scaling(sd.build().to(torch.bfloat16).requires_grad_(False), LS)
    model.skip_scaler.float()
    inputs = {key: v.bfloat16() if v.is_floating_point() else v for key, v in sd.make_inputs().items()}
    result = model(**inputs).sample
    assert result.dtype == torch.bfloat16
    result.float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.skip_scaler.parameters())


class TestStrength:
    @pytest.mark.parametrize("entry", ["cs", LS, "learnable"], ids=str)
    def test_zero_leaves_the_model_as_it_was_and_one_scales_fully(self, ddpm, entry):
        model, inputs = ddpm.build(), ddpm.make_inputs()
        plain = output(model, inputs)
        full = output(apply_skip_scaling(model, entry), inputs)
        assert set_skip_scaling_strength(model, 0.0) is model
        assert torch.equal(output(model, inputs), plain)
        set_skip_scaling_strength(model, 1.0)
        assert torch.equal(output(model, inputs), full)

    def test_it_is_saved_so_that_a_checkpoint_reloads_with_the_output_it_had(self, ddpm, tmp_path):
        model, inputs = ddpm.build_scaled("cs"), ddpm.make_inputs()
        set_skip_scaling_strength(model, 0.3)
        model.save_pretrained(tmp_path)
        reloaded = scalelong_diffusers.ScaleLongUNet2DModel.from_pretrained(tmp_path)
        assert reloaded.config.skip_scaling["strength"] == 0.3
        torch.testing.assert_close(output(reloaded, inputs), output(model, inputs), rtol=1e-5, atol=1e-6)
        assert [skip.factor for skip in skip_connections(model)] == pytest.approx(
            [1 + 0.3 * (0.9 ** (i - 1) - 1) for i in range(1, 7)]
        )

    @pytest.mark.parametrize("strength", [-0.1, 1.1, float("nan"), "half", None], ids=str)
    def test_bad_values_change_nothing(self, ddpm, strength):
        model = ddpm.build_scaled("cs")
        before = snapshot(model)
        with pytest.raises(ValueError, match=r"strength must be a number in \[0, 1\], got"):
            set_skip_scaling_strength(model, strength)
        assert_untouched(model, before)

    def test_where_nothing_is_scaled(self, ddpm):
        with pytest.raises(ValueError, match="this UNet2DModel has no skip scaling; apply_skip_scaling gives it one"):
            set_skip_scaling_strength(ddpm.build(), 0.5)
        with pytest.raises(ValueError, match="not used by method 'none'"):
            set_skip_scaling_strength(ddpm.build_scaled("none"), 0.5)


class TestRefused:
    def refuses(self, model, config, message, error=ValueError):
        before = snapshot(model) if isinstance(model, diffusers.ModelMixin) else None
        with pytest.raises(error, match=message) as raised:
            apply_skip_scaling(model, config)
        assert "\n" not in str(raised.value)
        if before:
            assert_untouched(model, before)

    def test_a_config_that_does_not_fit(self, ddpm):
        self.refuses(ddpm.build(), {"method": "ls", "reduction": 32}, "skip of width 16 no hidden unit")
        self.refuses(ddpm.build_scaled(LS), {"method": "ls", "reduction": 32}, "skip of width 16 no hidden unit")
        self.refuses(ddpm.build(), {"method": "ls", "gate_axis": "tokens"}, "is for a U-ViT")
        self.refuses(ddpm.build(), "cz", "unknown skip scaling method 'cz'")
        self.refuses(ddpm.build(), {"kappa": 0.9}, "names no method")

    def test_cs_for_a_single_skip(self):
        model = diffusers.UNet2DModel(
            sample_size=8, layers_per_block=0, block_out_channels=(16,), norm_num_groups=8,
            down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
        )  # fmt: skip
        assert len(skip_connections(model)) == 1
        self.refuses(model, "cs", "leaves the outermost skip as it is .* this model has only one; use 'constant'")
        assert skip_connections(apply_skip_scaling(model, "constant"))[0].factor == 0.9

    def test_models_without_long_skips_by_name(self):
        dit = diffusers.DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=1, sample_size=8, norm_num_groups=4
        )
        self.refuses(dit, "cs", "DiTTransformer2DModel has no long skips that this package knows; .* UNet2DModel, ")
        uvit = diffusers.UVit2DModel(
            hidden_size=16, cond_embed_dim=16, micro_cond_encode_dim=4, micro_cond_embed_dim=20,
            encoder_hidden_size=16, vocab_size=8, codebook_size=8, in_channels=16, block_out_channels=16,
            num_res_blocks=1, num_hidden_layers=1, num_attention_heads=2, block_num_heads=2, intermediate_size=32,
        )  # fmt: skip
        self.refuses(uvit, "cs", "UVit2DModel has no long skips that this package knows")

    def test_what_is_no_model(self):
        self.refuses("some/sd", "cs", "a model or a pipeline is needed, got str", TypeError)

    def test_a_subclass_that_somebody_wrote_is_told_how_to_be_scaled(self, ddpm):
        class MyUNet(diffusers.UNet2DModel):
            @register_to_config
            def __init__(self, sample_size=None, block_out_channels=(16, 32), brightness=0.0):
                blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
                super().__init__(sample_size, block_out_channels=block_out_channels, norm_num_groups=8, **blocks)

            def forward(self, sample, timestep):
                return super().forward(sample + self.config.brightness, timestep)

        message = r"MyUNet is a subclass of UNet2DModel .* `class ScaleLongMyUNet\(SkipScalingMixin, MyUNet\)`"
        self.refuses(MyUNet(8), "cs", message)

        class ScaleLongMyUNet(SkipScalingMixin, MyUNet):
            pass

        scaled = ScaleLongMyUNet(8, brightness=0.5, skip_scaling="cs")
        assert skip_connections(scaled)[1].factor == 0.9
        assert (scaled.config.brightness, scaled.config.skip_scaling["method"]) == (0.5, "cs")
        assert type(apply_skip_scaling(MyUNet(8), "cs")) is ScaleLongMyUNet
        assert type(remove_skip_scaling(scaled)) is MyUNet
        assert type(apply_skip_scaling(ddpm.build(), "cs")) is scalelong_diffusers.ScaleLongUNet2DModel

    def test_wrapped_models(self, ddpm, sd):
        from peft import LoraConfig, get_peft_model

        inner = sd.build()
        wrapped = get_peft_model(inner, LoraConfig(target_modules=["to_q"]))
        for model, name in ((wrapped, "PeftModel"), (torch.compile(inner), "OptimizedModule")):
            self.refuses(model, "cs", f"{name} wraps a UNet2DConditionModel: patch before wrapping")
        assert type(inner) is diffusers.UNet2DConditionModel

        compiled = ddpm.build()
        compiled.compile()
        self.refuses(compiled, "cs", "this UNet2DModel is compiled, .* patch before compiling")

    def test_removing_what_is_not_there(self, ddpm):
        with pytest.raises(ValueError, match="this UNet2DModel has no skip scaling"):
            remove_skip_scaling(ddpm.build())


class TestList:
    def test_it_prints_as_a_table(self, ddpm):
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

    def test_gates_are_shown_with_their_parameters_and_shared_ones_counted_once(self, ddpm):
        listed = skip_connections(ddpm.build_scaled(LS))
        assert {skip.gate for skip in listed} == {"width_16", "width_32"}
        size = {w: 2 * w * (w // 4) + w // 4 + w for w in (16, 32)}
        assert [skip.parameters for skip in listed] == [size[skip.width] for skip in listed]
        assert listed.parameters == size[16] + size[32]
        assert "width_16 (148)" in repr(listed)

    def test_it_looks_at_what_runs_and_not_at_the_config(self, ddpm):
        model = ddpm.build_scaled("cs")
        model._internal_dict = FrozenDict({**model.config, "skip_scaling": {"method": "inv_sqrt2"}})
        assert skip_connections(model).config.method == "cs"
        assert [skip.factor for skip in skip_connections(ddpm.build())] == [1.0] * 6


def test_another_model_takes_one_row_of_the_table_and_a_class_of_two_lines(monkeypatch):
    """AudioLDM 2's U-Net is not among ours; this is all that it takes."""
    from diffusers import AudioLDM2UNet2DConditionModel

    monkeypatch.setitem(
        SKIP_LAYOUTS,
        "AudioLDM2UNet2DConditionModel",
        SkipLayout(argument="res_hidden_states_tuple", find=up_block_skips),
    )

    class ScaleLongAudioLDM2UNet(SkipScalingMixin, AudioLDM2UNet2DConditionModel):
        pass

    torch.manual_seed(0)
    config = {
        "block_out_channels": (16, 32), "norm_num_groups": 8, "sample_size": 8, "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": (16, 16),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4,
    }  # fmt: skip
    model = AudioLDM2UNet2DConditionModel(**config).eval()
    inputs = {"sample": torch.randn(1, 4, 8, 8), "timestep": 5, "encoder_hidden_states": torch.randn(1, 3, 16)}
    plain = output(model, inputs)
    apply_skip_scaling(model, "cs")
    assert type(model) is ScaleLongAudioLDM2UNet
    assert len(skip_connections(model)) == 4
    assert not torch.allclose(output(model, inputs), plain)
    assert torch.equal(output(remove_skip_scaling(model), inputs), plain)


def test_the_config_that_training_scripts_load_is_what_runs(ddpm):
    """Their load hook hands a checkpoint's config to `register_to_config`, and its weights to `load_state_dict`."""
    checkpoint, inputs = ddpm.build_scaled({"method": "cs", "kappa": 0.5, "strength": 0.25}), ddpm.make_inputs()
    resumed = ddpm.build_scaled("cs")
    resumed.register_to_config(**checkpoint.config)
    resumed.load_state_dict(checkpoint.state_dict())
    assert torch.equal(output(resumed, inputs), output(checkpoint, inputs))
    assert resumed.skip_scaler.config.to_dict() == resumed.config.skip_scaling == checkpoint.config.skip_scaling

    learned = ddpm.build_scaled(LS)
    gate = learned.skip_scaler.gate(1)
    learned.register_to_config(skip_scaling={**LS, "strength": 0.5})
    assert learned.skip_scaler.gate(1) is gate


def test_the_same_config_again_draws_no_random_number(ddpm):
    model = ddpm.build_scaled(LS)
    before = torch.get_rng_state()
    apply_skip_scaling(model, LS)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stale_entry_of_a_plain_model_is_removed(ddpm, sd, tmp_path):
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

    def test_one_that_does_not_fit_leaves_all_as_they_were(self, ddpm, sd):
        narrow = diffusers.UNet2DModel(
            sample_size=8, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
            down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
        )  # fmt: skip
        pair = self.Pair(ddpm.build(), narrow)
        with pytest.raises(ValueError, match="reduction=16 leaves a skip of width 8 no hidden unit"):
            apply_skip_scaling(pair, "ls")
        assert type(pair.first) is type(pair.second) is diffusers.UNet2DModel

    def test_strength_is_set_on_all_or_none(self, ddpm, sd):
        pair = self.Pair(ddpm.build_scaled("cs"), sd.build_scaled("none"))
        with pytest.raises(ValueError, match="not used by method 'none'"):
            set_skip_scaling_strength(pair, 0.5)
        assert pair.first.skip_scaler.strength == 1.0

    def test_the_same_model_in_two_places_is_patched_once(self, ddpm):
        unet = ddpm.build()
        pair = self.Pair(unet, unet)
        apply_skip_scaling(pair, "cs")
        assert pair.config["first"] == pair.config["second"] == ("scalelong_diffusers", "ScaleLongUNet2DModel")
        remove_skip_scaling(pair)
        assert type(unet) is diffusers.UNet2DModel

    def test_they_are_listed_one_by_one(self, ddpm, sd):
        pair = self.Pair(ddpm.build_scaled("cs"), sd.build())
        with pytest.raises(ValueError, match=r"several models \(ScaleLongUNet2DModel, UNet2DConditionModel\)"):
            skip_connections(pair)
        assert skip_connections(pair.first)[1].factor == 0.9


def test_copies_of_a_patched_model_are_taken_apart_on_their_own(ddpm):
    model, inputs = apply_skip_scaling(ddpm.build(), "cs"), ddpm.make_inputs()
    scaled = output(model, inputs)
    remove_skip_scaling(deepcopy(model))
    assert torch.equal(output(model, inputs), scaled)
