"""Scaled U-Nets against an independent implementation of the paper, and against the stock classes."""

import pytest
import torch

from scalelong_diffusers import ScaleLongUNet2DModel, SkipScalingConfig, UserError, skip_connections


# A second implementation of the paper's factors, independent of the package.
CONSTANT_FACTORS = {
    "none": lambda i, n: 1.0,
    "inv_sqrt2": lambda i, n: 1 / 2**0.5,
    "constant": lambda i, n: 0.8,
    "cs": lambda i, n: 0.8 ** (i - 1),
    "cs-reversed": lambda i, n: 0.8 ** (n - i + 1),
    "cs-half-strength": lambda i, n: 1 + 0.5 * (0.8 ** (i - 1) - 1),
}
CONFIGS = {
    "none": "none",
    "inv_sqrt2": "inv_sqrt2",
    "constant": {"method": "constant", "kappa": 0.8},
    "cs": {"method": "cs", "kappa": 0.8},
    "cs-reversed": {"method": "cs", "kappa": 0.8, "reverse": True},
    "cs-half-strength": {"method": "cs", "kappa": 0.8, "strength": 0.5},
}


def test_constant_methods_scale_the_trailing_channels_of_each_decoder_resnet(case, paper_reading):
    inputs = case.make_inputs()
    reading = paper_reading(case.build())
    unscaled = reading(inputs, lambda i, n, skip: 1.0)
    for name, config in CONFIGS.items():
        expected = reading(inputs, lambda i, n, skip, name=name: CONSTANT_FACTORS[name](i, n))
        with torch.no_grad():
            assert torch.equal(case.build_scaled(config)(**inputs).sample, expected), name
        assert torch.equal(expected, unscaled) == (name == "none")


def squeeze_excite(weights, prefix, skip, activation=torch.relu):
    pooled = skip.flatten(2).mean(2)
    hidden = activation(pooled @ weights[f"{prefix}.squeeze.weight"].T + weights[f"{prefix}.squeeze.bias"])
    return hidden @ weights[f"{prefix}.excite.weight"].T + weights[f"{prefix}.excite.bias"]


def instance_enhance(weights, prefix, skip):
    return skip.flatten(2).mean(2) * weights[f"{prefix}.weight"] + weights[f"{prefix}.bias"]


PAPER = {"method": "ls", "shared": True, "init": "paper"}
GATED = {
    "shared": ({**PAPER, "reduction": 4}, squeeze_excite),
    "per skip": ({**PAPER, "reduction": 4, "shared": False}, squeeze_excite),
    "ie": ({**PAPER, "gate": "ie"}, instance_enhance),
    "identity": ({**PAPER, "reduction": 4, "init": "identity"}, squeeze_excite),
    "half strength": ({**PAPER, "reduction": 4, "strength": 0.5}, squeeze_excite),
}


def gate_weights(model):
    return {key.removeprefix("gates."): weight for key, weight in model.skip_scaler.state_dict().items()}


@pytest.mark.parametrize("name", GATED)
def test_gates_are_sigmoids_of_the_pooled_skip(case, name, paper_reading):
    entry, predict = GATED[name]
    scaled = case.build_scaled(entry).double()
    with torch.no_grad():  # at its init an "identity" gate is constant
        for parameter in scaled.skip_scaler.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    weights = gate_weights(scaled)

    def factor(i, n, skip):
        prefix = f"skip_{i}" if name == "per skip" else f"width_{skip.shape[1]}"
        k = torch.sigmoid(predict(weights, prefix, skip))
        k = 2 * k if name == "identity" else k
        k = 1 + 0.5 * (k - 1) if name == "half strength" else k
        return k.reshape(*k.shape, *[1] * (skip.ndim - 2))

    inputs = {key: _double(value) for key, value in case.make_inputs().items()}
    stock = case.build().double()
    stock.load_state_dict({key: w for key, w in scaled.state_dict().items() if not key.startswith("skip_scaler.")})
    with torch.no_grad():
        torch.testing.assert_close(
            scaled(**inputs).sample, paper_reading(stock)(inputs, factor), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("activation", ["elu", "mish"])
def test_gates_use_the_activations_of_table_2(ddpm, paper_reading, activation):
    scaled = ddpm.build_scaled({**PAPER, "reduction": 4, "activation": activation}).double()
    weights = gate_weights(scaled)

    def factor(i, n, skip):
        act = getattr(torch.nn.functional, activation)
        return torch.sigmoid(squeeze_excite(weights, f"width_{skip.shape[1]}", skip, act))[..., None, None]

    inputs = {key: _double(value) for key, value in ddpm.make_inputs().items()}
    expected = paper_reading(ddpm.build().double())(inputs, factor)
    with torch.no_grad():
        torch.testing.assert_close(scaled(**inputs).sample, expected, rtol=1e-12, atol=1e-12)


def test_learnable_has_one_scalar_per_skip_which_starts_at_one(case, paper_reading):
    scaled = case.build_scaled("learnable")
    inputs = case.make_inputs()
    with torch.no_grad():
        assert torch.equal(scaled(**inputs).sample, paper_reading(case.build())(inputs, lambda i, n, skip: 1.0))
        for i in range(1, len(skip_connections(scaled)) + 1):
            scaled.skip_scaler.gates[f"scalar_{i}"].value.fill_(1 / (1 + i))
        expected = paper_reading(case.build())(inputs, lambda i, n, skip: torch.tensor(1 / (1 + i)))
        assert torch.equal(scaled(**inputs).sample, expected)


def test_identity_gates_and_kappa_one_equal_the_stock_model(case):
    inputs, scaled = case.make_inputs(), case.build_scaled({"method": "ls", "reduction": 4})
    with torch.no_grad():
        expected = case.build()(**inputs).sample
        assert torch.equal(scaled(**inputs).sample, expected)
        assert torch.equal(case.build_scaled({"method": "cs", "kappa": 1.0})(**inputs).sample, expected)
    scaled(**inputs).sample.square().mean().backward()
    assert all(gate.excite.bias.grad.abs().sum() > 0 for gate in scaled.skip_scaler.gates.values())


def test_lists_the_skips_that_the_encoder_produces(case, paper_reading):
    seen = {}
    paper_reading(case.build())(case.make_inputs(), lambda i, n, skip: seen.setdefault(i, skip.shape[1]) and 1.0)
    listed = skip_connections(case.build_scaled("cs"))
    assert [(skip.i, skip.width) for skip in listed] == sorted(seen.items())
    assert [skip.factor for skip in listed] == [0.9 ** (i - 1) for i in sorted(seen)]


def test_controlnet_residuals_are_scaled_together_with_the_skip(sd, paper_reading):
    inputs = sd.make_inputs()
    stock = sd.build()
    # The encoder has six skips: conv_in, two layers, a downsampler, two layers.
    shapes = [(16, 8), (16, 8), (16, 8), (16, 4), (32, 4), (32, 4)]
    residuals = {
        "down_block_additional_residuals": tuple(torch.randn(2, c, s, s) for c, s in shapes),
        "mid_block_additional_residual": torch.randn(2, 32, 4, 4),
    }
    expected = paper_reading(stock)(inputs | residuals, lambda i, n, skip: 0.9 ** (i - 1))
    with torch.no_grad():
        assert torch.equal(sd.build_scaled("cs")(**inputs, **residuals).sample, expected)


def test_freeu_works_on_top(sd):
    inputs = sd.make_inputs()
    freeu = {"s1": 0.9, "s2": 0.2, "b1": 1.2, "b2": 1.4}
    stock, scaled = sd.build().double(), sd.build_scaled({"method": "constant", "kappa": 0.5}).double()
    inputs = {key: _double(value) for key, value in inputs.items()}
    # FreeU is linear in the skip, so halving all skips in front of the stock up-blocks gives the same output.
    stock.enable_freeu(**freeu)
    scaled.enable_freeu(**freeu)
    hooks = [
        block.register_forward_pre_hook(
            lambda block, args, kwargs: (
                args,
                kwargs | {"res_hidden_states_tuple": tuple(skip * 0.5 for skip in kwargs["res_hidden_states_tuple"])},
            ),
            with_kwargs=True,
        )
        for block in stock.up_blocks
    ]
    with torch.no_grad():
        torch.testing.assert_close(scaled(**inputs).sample, stock(**inputs).sample, rtol=1e-12, atol=1e-12)
        for hook in hooks:
            hook.remove()
        assert not torch.allclose(scaled(**inputs).sample, stock(**inputs).sample)


def test_rejects_an_up_block_without_skips():
    with pytest.raises(UserError, match=r"up_blocks\.0 .* UpDecoderBlock2D, which takes no long skips"):
        ScaleLongUNet2DModel(
            block_out_channels=(16, 32),
            norm_num_groups=8,
            down_block_types=("DownBlock2D", "DownBlock2D"),
            up_block_types=("UpDecoderBlock2D", "UpBlock2D"),
            skip_scaling="cs",
        )


def test_gates_of_a_unet_scale_channels(ddpm):
    with pytest.raises(UserError, match="gate_axis must be channels for this model, got 'tokens'"):
        ddpm.build_scaled({"method": "ls", "gate_axis": "tokens"})
    assert ddpm.build_scaled("ls").config.skip_scaling["gate_axis"] == "channels"


def test_stores_the_number_for_kappa_auto(ddpm):
    model = ddpm.build_scaled(SkipScalingConfig("cs", kappa="auto"))
    assert model.config.skip_scaling["kappa"] == pytest.approx(0.9626, abs=1e-4)  # N = 6
    assert model.skip_scaler.config.kappa == model.config.skip_scaling["kappa"]


def test_parameters_added_to_the_unet_of_the_paper():
    for entry, added in ((PAPER, 10_648), ("ls", 76_448), ("cs", 0)):
        with torch.device("meta"):
            model = ScaleLongUNet2DModel.from_preset("cifar10-unet", skip_scaling=entry)
        assert model.num_parameters() == 35_746_307 + added
        listed = skip_connections(model)
        assert listed.parameters == added
        assert [skip.width for skip in listed] == [128] * 4 + [256] * 8


def _double(value):
    if isinstance(value, dict):
        return {key: _double(tensor) for key, tensor in value.items()}
    return value.double() if value.is_floating_point() else value
