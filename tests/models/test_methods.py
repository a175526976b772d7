"""Methods that also change the hidden state, methods of users, and layouts for models of other shapes."""

import copy
import pickle

import pytest
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from scalelong_diffusers import (
    BlockSkips,
    ScaleLongUNet2DModel,
    SkipScalingMixin,
    UserError,
    UViTModel,
    apply_skip_init,
    apply_skip_scaling,
    remove_skip_scaling,
    set_skip_scaling_strength,
    skip_connections,
)
from scalelong_diffusers.scaling import METHODS


MIXES = ("compensated_cs", "mp_cat", "lerp", "normalized")
UVIT = {"sample_size": 8, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 2, "final_conv": False}


def output(model, inputs):
    with torch.no_grad():
        return model(**inputs).sample


def randomized(model):
    with torch.no_grad():
        for parameter in model.skip_scaler.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def test_layer_reads_what_the_method_makes_of_the_concatenation(case):
    model = randomized(apply_skip_scaling(case.build(), "normalized"))  # which changes both sides of all skips
    if case.reads:
        check_output(case, model)
    else:
        check_inputs_of_resnets(case, model)


def check_output(case, model):
    """Compare with the plain model, whose layers named by the case read the result of the method."""
    plain, handles = case.build(), []
    for i, (name, dim, width) in enumerate(case.reads, start=1):

        def mix(layer, args, i=i, dim=dim, width=width):
            hidden, skip = args[0].tensor_split([width], dim)
            return torch.cat(model.skip_scaler.method(i)(hidden, skip), dim), *args[1:]

        handles.append(plain.get_submodule(name).register_forward_pre_hook(mix))
    inputs = case.make_inputs()
    mixed = output(plain, inputs)
    torch.testing.assert_close(output(model, inputs), mixed)
    for handle in handles:
        handle.remove()
    assert not torch.allclose(mixed, output(plain, inputs))


def check_inputs_of_resnets(case, model):
    """Compare the inputs of each resnet with an own split, method and concatenation."""
    skips = model.skip_layout.find(model)
    before, after = {}, {}
    for skip in skips:
        layer = model.get_submodule(skip.where)
        for seen, is_first in ((before, True), (after, False)):

            def remember(layer, args, kwargs, seen=seen, i=skip.index):
                seen[i] = (*args, *kwargs.values())[0]

            layer.register_forward_pre_hook(remember, prepend=is_first, with_kwargs=True)
    output(model, case.make_inputs())
    assert len(after) == len(skips) > 1
    for skip in skips:
        hidden, s = before[skip.index][:, : skip.hidden_width], before[skip.index][:, skip.hidden_width :]
        assert s.shape[1] == skip.width
        expected = torch.cat(model.skip_scaler.method(skip.index)(hidden, s), dim=1)
        assert torch.equal(after[skip.index], expected)


def test_is_saved_copied_weakened_and_removed_in_every_model(case, tmp_path):
    check_copies(case, "normalized", tmp_path)


@pytest.mark.parametrize("name", ["ddpm", "hunyuan-dit"])
@pytest.mark.parametrize(
    "method", ["compensated_cs", {"method": "mp_cat", "balance": 0.3}, "lerp", "token_gates"], ids=str
)
def test_every_method_is_saved_copied_weakened_and_removed(cases, name, method, tmp_path):
    check_copies(cases[name], method, tmp_path)


def check_copies(case, method, tmp_path):
    plain, inputs = case.build(), case.make_inputs()
    expected = output(plain, inputs)
    model = randomized(apply_skip_scaling(plain, method))
    scaled = output(model, inputs)
    assert not torch.allclose(scaled, expected)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    copies = [loaded, copy.deepcopy(model)]
    if case.name not in ("skip-blocks", "resnet-up-blocks"):  # diffusers' resampling in them cannot be pickled
        copies.append(pickle.loads(pickle.dumps(model)))
    for other in copies:
        torch.testing.assert_close(output(other, inputs), scaled)
    set_skip_scaling_strength(model, 0.0)
    assert torch.equal(output(model, inputs), expected)
    assert torch.equal(output(remove_skip_scaling(model), inputs), expected)


@pytest.mark.parametrize("method", [*MIXES, "token_gates"])
def test_uvit_equals_its_layer_on_the_concatenation(method):
    torch.manual_seed(0)
    model = randomized(UViTModel(**UVIT, skip_scaling=method))
    seen = {}
    for i, block in enumerate(reversed(model.out_blocks), start=1):
        block.norm1.register_forward_pre_hook(lambda norm, args, i=i: seen.setdefault(i, []).append(args[0]))
    scaler, forward = model.skip_scaler, model.skip_scaler.forward

    def remember(hidden, skip, index):
        seen[index] = [(hidden, skip)]
        return forward(hidden, skip, index)

    scaler.forward = remember
    with torch.no_grad():
        model(torch.randn(2, 3, 8, 8), 10)
        for i, block in enumerate(reversed(model.out_blocks), start=1):
            (hidden, skip), received = seen[i]
            factor = 1.0
            if scaler.changes_hidden(i):
                hidden, skip = scaler.method(i)(hidden, skip)
            else:
                factor = scaler.method(i)(skip)
            weight = torch.cat([block.hidden_proj.weight, block.skip_proj.weight], dim=1)
            both = torch.cat([hidden, factor * skip], dim=2)
            torch.testing.assert_close(received, nn.functional.linear(both, weight, block.hidden_proj.bias))


@pytest.mark.parametrize("method", ["compensated_cs", "normalized"])  # without and with parameters
def test_gradient_checkpointing_and_compiling(few_layers, method, fresh_compiler):
    torch.manual_seed(0)
    case, results = few_layers["ddpm"], []
    inputs = case.make_inputs()
    for change in ("none", "checkpointing", "compile"):
        model = case.build_scaled(method).train()
        if change == "checkpointing":
            model.enable_gradient_checkpointing()
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if change == "compile" else model
        run(**inputs).sample.square().mean().backward()
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def test_prints_what_multiplies_both_sides():
    model = UViTModel(**UVIT, skip_scaling={"method": "compensated_cs", "kappa": 0.7})
    assert "0.810998, hidden state 1.15857" in str(skip_connections(model))
    assert "lerp_2 (1)" in str(skip_connections(UViTModel(**UVIT, skip_scaling="lerp")))
    assert "normalized_1 (128)" in str(skip_connections(UViTModel(**UVIT, skip_scaling="normalized")))


def test_method_of_a_user_works_on_every_model(case, channel_factors, tmp_path):
    plain, inputs = case.build(), case.make_inputs()
    expected = output(plain, inputs)
    plain.save_pretrained(tmp_path / "plain")
    model = apply_skip_scaling(plain, "channel_factors")
    assert torch.equal(output(model, inputs), expected)
    randomized(model).save_pretrained(tmp_path / "scaled")
    loaded = type(model).from_pretrained(tmp_path / "scaled")
    torch.testing.assert_close(output(loaded, inputs), output(model, inputs))
    # A plain checkpoint has no such weights, so they are initialized.
    for options in ({}, {"low_cpu_mem_usage": False}):
        entry = {"method": "channel_factors", "start": 0.5}
        fresh = type(model).from_pretrained(tmp_path / "plain", skip_scaling=entry, **options)
        assert all(torch.equal(p, torch.full_like(p, 0.5)) for p in fresh.skip_scaler.parameters())
        assert all(torch.equal(b, torch.full_like(b, 3.0)) for b in fresh.skip_scaler.buffers())


def test_unregistered_method_is_named_when_a_model_is_loaded(ddpm, channel_factors, tmp_path):
    ddpm.build_scaled("channel_factors").save_pretrained(tmp_path)
    del METHODS["channel_factors"]
    message = "skip_scaling must be one of none, .* got 'channel_factors'; import the file that registers a method"
    with pytest.raises(UserError, match=message):
        ScaleLongUNet2DModel.from_pretrained(tmp_path)


class OneSkipPerBlock(ModelMixin, ConfigMixin):
    """A small U-Net whose decoder blocks take one tensor, and which passes unknown keywords on."""

    config_name = "config.json"

    @register_to_config
    def __init__(self, width: int = 8, depth: int = 3, **kwargs):
        super().__init__()
        self.encoder = nn.ModuleList([nn.Conv2d(3 if i == 0 else width, width, 3, padding=1) for i in range(depth)])
        self.decoder = nn.ModuleList([Decoder(width) for _ in range(depth)])
        self.conv_out = nn.Conv2d(width, 3, 1)

    def forward(self, sample):
        skips = []
        for layer in self.encoder:
            sample = layer(sample).relu()
            skips.append(sample)
        for block in self.decoder:
            sample = block(sample, skip=skips.pop())
        return self.conv_out(sample)


class Decoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, hidden, skip):
        return self.conv(torch.cat([hidden, skip], dim=1)).relu()


def widths(block):
    return block.conv.in_channels // 2, block.conv.in_channels // 2


class ScaleLongOneSkipPerBlock(SkipScalingMixin, OneSkipPerBlock):
    skip_layout = BlockSkips("decoder", widths, argument="skip")


@pytest.mark.parametrize("method", [{"method": "cs", "kappa": 0.5}, "ls", *MIXES])
def test_blocks_that_take_one_skip_tensor(method, tmp_path):
    torch.manual_seed(0)
    plain, sample = OneSkipPerBlock(width=32, depth=3), torch.randn(2, 3, 8, 8)
    expected = plain(sample)
    model = apply_skip_scaling(copy.deepcopy(plain), method)
    assert type(model) is ScaleLongOneSkipPerBlock
    assert [skip.where for skip in skip_connections(model)] == ["decoder.2", "decoder.1", "decoder.0"]
    randomized(model)
    hidden, skips = sample, []
    for layer in plain.encoder:
        hidden = layer(hidden).relu()
        skips.append(hidden)
    for i, block in zip((3, 2, 1), plain.decoder):
        hidden, skip, factor = model.skip_scaler(hidden, skips.pop(), i)
        hidden = block(hidden, skip * factor)
    torch.testing.assert_close(model(sample), plain.conv_out(hidden))
    model.save_pretrained(tmp_path)
    assert torch.equal(ScaleLongOneSkipPerBlock.from_pretrained(tmp_path)(sample), model(sample))
    assert torch.equal(remove_skip_scaling(model)(sample), expected)


def test_skip_init_names_a_layout_that_does_not_support_it():
    for start in ({"skip_init": "sum"}, {"skip_init": "reference", "zero_init_residual": True}):
        with pytest.raises(UserError, match="the layout of OneSkipPerBlock does not define skip_layer"):
            apply_skip_init(OneSkipPerBlock(), **start)


def test_own_init_with_keywords_of_the_parent(tmp_path):
    class MyUNet(SkipScalingMixin, ScaleLongUNet2DModel.__bases__[1]):
        skip_layout = ScaleLongUNet2DModel.skip_layout

        @register_to_config
        def __init__(self, skip_scaling="none", **kwargs):
            super().__init__(**kwargs)
            self._init_skip_scaling(skip_scaling)

    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    model = MyUNet(skip_scaling="cs", sample_size=8, block_out_channels=(8,), norm_num_groups=4, **blocks)
    model.save_pretrained(tmp_path)
    loaded = MyUNet.from_pretrained(tmp_path)
    assert loaded.config.block_out_channels == [8]
    assert [skip.factor for skip in skip_connections(loaded)] == [skip.factor for skip in skip_connections(model)]
