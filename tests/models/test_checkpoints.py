"""Plain and scaled checkpoints survive every way in which diffusers saves and loads them."""

import json
import pickle
from copy import deepcopy

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

import scalelong_diffusers
from scalelong_diffusers import ScaleLongUNet2DModel, UserError, UViTModel, apply_skip_scaling


LS = {"method": "ls", "reduction": 4, "shared": True, "init": "paper"}


def scaled_class_of(case):
    return getattr(scalelong_diffusers, case.scaled_name)


def output(model, inputs):
    with torch.no_grad():
        return model(**inputs).sample


def assert_same_weights(model, expected):
    weights, expected = model.state_dict(), expected.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)


def learn(model):
    """Move the gates away from their init, as training would."""
    with torch.no_grad():
        for parameter in model.skip_scaler.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def test_scaled_model_survives_saving_copying_and_pickling(case, tmp_path):
    inputs = case.make_inputs()
    for entry in ("cs", LS, {**LS, "shared": False}, "learnable"):
        model = learn(case.build_scaled(entry))
        expected = output(model, inputs)
        model.save_pretrained(tmp_path)
        reloaded = scaled_class_of(case).from_pretrained(tmp_path)
        assert reloaded.config.skip_scaling == model.config.skip_scaling
        assert_same_weights(reloaded, model)
        # The sums over weights in a mapped file can have another order.
        torch.testing.assert_close(output(reloaded, inputs), expected, rtol=1e-5, atol=1e-5)
        copies = [deepcopy(model)]
        if case.name != "skip-blocks":  # diffusers has a lambda there, which cannot be pickled
            copies.append(pickle.loads(pickle.dumps(model)))
        for copy in copies:
            assert torch.equal(output(copy, inputs), expected)
            assert copy.skip_scaler is not model.skip_scaler
            if list(copy.skip_scaler.parameters()):  # a copy uses its own gates
                assert not torch.equal(output(learn(copy), inputs), expected)
        assert torch.equal(output(model, inputs), expected)


UNPICKLE = """
import sys
import torch
from scalelong_diffusers import remove_skip_scaling

# torch numbers hooks per process. These must not replace the hooks that came with the model.
model = torch.load(sys.argv[1], weights_only=False)
model.conv_in.register_forward_pre_hook(lambda module, args: None)
for block in model.up_blocks:
    block.register_forward_pre_hook(lambda module, args: None)
inputs = torch.load(sys.argv[2])
with torch.no_grad():
    scaled = model(**inputs).sample
    torch.save([scaled, remove_skip_scaling(model)(**inputs).sample], sys.argv[3])
"""


@pytest.mark.slow
def test_hooks_survive_unpickling_in_another_process(ddpm, in_fresh_process, tmp_path):
    model, inputs = ddpm.build_scaled("cs"), ddpm.make_inputs()
    torch.save(model, tmp_path / "model.pt")
    torch.save(inputs, tmp_path / "inputs.pt")
    in_fresh_process(UNPICKLE, tmp_path / "model.pt", tmp_path / "inputs.pt", tmp_path / "outputs.pt")
    scaled, plain = torch.load(tmp_path / "outputs.pt")
    torch.testing.assert_close(scaled, output(model, inputs), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain, output(ddpm.build(), inputs), rtol=1e-5, atol=1e-5)


def test_constant_scaling_leaves_the_weights_file_byte_identical(ddpm, tmp_path):
    name = "diffusion_pytorch_model.safetensors"
    ddpm.build().save_pretrained(tmp_path / "stock")
    for method in ("none", "inv_sqrt2", "constant", "cs"):
        ddpm.build_scaled(method).save_pretrained(tmp_path / "scaled")
        assert (tmp_path / "stock" / name).read_bytes() == (tmp_path / "scaled" / name).read_bytes()


WAYS = {
    "default": {},
    "low_cpu_mem_usage=False": {"low_cpu_mem_usage": False},
    "bf16": {"torch_dtype": torch.bfloat16},
    "fp16": {"torch_dtype": torch.float16},
    "bf16, low_cpu_mem_usage=False": {"torch_dtype": torch.bfloat16, "low_cpu_mem_usage": False},
    "device_map": {"device_map": {"": "cpu"}},
    "no mmap": {"disable_mmap": True},
}


# How a plain checkpoint is saved, and the keywords that load it.
FILES = {
    "single file": ({}, {}),
    "sharded": ({"max_shard_size": "100KB"}, {}),
    "variant": ({"variant": "ema"}, {"variant": "ema"}),
    "pickled": ({"safe_serialization": False}, {"use_safetensors": False}),
}


@pytest.mark.parametrize(
    ("files", "way"),
    [("single file", way) for way in WAYS]
    + [(files, way) for files in ("sharded", "variant", "pickled") for way in ("default", "low_cpu_mem_usage=False")],
)
def test_new_gates_are_initialized_when_a_plain_checkpoint_is_loaded(ddpm, tmp_path, files, way, recwarn):
    save, load = FILES[files]
    ddpm.build().save_pretrained(tmp_path, **save)
    dtype = WAYS[way].get("torch_dtype", torch.float32)
    stock = ddpm.build().to(dtype).state_dict()
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in ddpm.make_inputs().items()}
    for entry in (LS, {**LS, "gate": "ie", "reduction": None}, {**LS, "init": "identity"}, "learnable"):
        torch.manual_seed(0)
        model = ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scaling=entry, **load, **WAYS[way])
        for name, parameter in model.named_parameters():
            assert (parameter.device.type, parameter.dtype) == ("cpu", dtype), name
            assert parameter.requires_grad, name
            assert torch.isfinite(parameter).all(), name
        assert model.training is False
        assert all(torch.equal(weight, stock[key]) for key, weight in model.state_dict().items() if key in stock)
        assert_initialized(model.skip_scaler)
        assert torch.isfinite(output(model, inputs)).all()


def assert_initialized(scaler):
    for gate in scaler.gates.values():
        if scaler.config.method == "learnable":
            assert gate.value.item() == 1
        elif scaler.config.init == "identity":
            assert (gate.excite.weight == 0).all()
            assert (gate.squeeze.weight != 0).any()
        elif scaler.config.gate == "ie":
            assert gate.weight.float().std() > 0.2
            assert gate.weight.abs().max() <= 1
        else:
            for layer in (gate.squeeze, gate.excite):
                bound = layer.weight.shape[1] ** -0.5
                assert 0.8 * bound < layer.weight.abs().max().float() <= bound * 1.01
                assert layer.bias.abs().max().float() <= bound * 1.01


def test_trained_gates_survive_every_way_of_loading(ddpm, tmp_path, recwarn):
    model = learn(ddpm.build_scaled(LS))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    expected = model.skip_scaler.state_dict()
    assert expected
    for way, options in WAYS.items():
        reloaded = ScaleLongUNet2DModel.from_pretrained(tmp_path, **options)
        for key, weight in reloaded.skip_scaler.state_dict().items():
            assert torch.equal(weight, expected[key].to(options.get("torch_dtype", torch.float32))), (way, key)


def test_automatic_device_map(sd, tmp_path):
    sd.build().save_pretrained(tmp_path)
    model = scaled_class_of(sd).from_pretrained(tmp_path, skip_scaling=LS, device_map="auto")
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert torch.isfinite(output(model, sd.make_inputs())).all()


def test_accepts_a_method_a_dict_or_a_config(ddpm, tmp_path):
    ddpm.build().save_pretrained(tmp_path)
    entry = {"version": 1, "method": "cs", "kappa": 0.9, "reverse": False, "strength": 1.0}
    for given in ("cs", {"method": "cs"}, scalelong_diffusers.SkipScalingConfig("cs")):
        assert ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scaling=given).config.skip_scaling == entry
        assert ScaleLongUNet2DModel(**ddpm.config, skip_scaling=given).config.skip_scaling == entry


def test_keyword_replaces_the_whole_stored_entry(ddpm, tmp_path):
    ddpm.build_scaled({"method": "cs", "kappa": 0.5, "strength": 0.25}).save_pretrained(tmp_path)
    model = ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scaling={"method": "constant"})
    assert model.config.skip_scaling == {"version": 1, "method": "constant", "kappa": 0.9, "strength": 1.0}


def test_from_config_keeps_the_scaling(case):
    model = case.build_scaled({"method": "cs", "kappa": 0.5})
    again = scaled_class_of(case).from_config(model.config)
    assert again.config.skip_scaling == model.config.skip_scaling
    assert {k: v for k, v in again.config.items() if k[0] != "_"} == {
        k: v for k, v in model.config.items() if k[0] != "_"
    }
    plain = case.build()
    assert scaled_class_of(case).from_config(plain.config).config.skip_scaling == {"version": 1, "method": "none"}
    assert scaled_class_of(case).from_config(plain.config, skip_scaling="cs").skip_scaler.config.kappa == 0.9


def test_takes_the_positional_arguments_of_the_plain_class():
    kwargs = {"block_out_channels": (16, 32), "norm_num_groups": 8}
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    model = ScaleLongUNet2DModel(8, 1, 2, **kwargs, **blocks, skip_scaling="cs")
    assert (model.config.sample_size, model.config.in_channels, model.config.out_channels) == (8, 1, 2)


def test_saved_config_and_keys_are_frozen(ddpm, tmp_path):
    """Folders that users have saved must load."""
    ddpm.build_scaled(LS).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["_class_name"] == "ScaleLongUNet2DModel"
    assert config["skip_scaling"] == {
        "version": 1, "method": "ls", "shared": True, "reduction": 4, "activation": "relu", "gate": "se",
        "gate_axis": "channels", "init": "paper", "strength": 1.0,
    }  # fmt: skip
    keys = {key for key in load_file(tmp_path / "diffusion_pytorch_model.safetensors") if "skip_scaler" in key}
    assert keys == {
        f"skip_scaler.gates.width_{width}.{layer}.{kind}"
        for width in (16, 32)
        for layer in ("squeeze", "excite")
        for kind in ("weight", "bias")
    }


OTHER_KEYS = [
    (
        {**LS, "shared": False},
        [
            f"skip_{i}.{layer}.{kind}"
            for i in range(1, 7)
            for layer in ("squeeze", "excite")
            for kind in ("weight", "bias")
        ],
    ),
    (
        {**LS, "gate": "ie", "reduction": None},
        [f"width_{width}.{kind}" for width in (16, 32) for kind in ("weight", "bias")],
    ),
    ("learnable", [f"scalar_{i}.value" for i in range(1, 7)]),
]


@pytest.mark.parametrize(("entry", "keys"), OTHER_KEYS, ids=["per skip", "ie", "learnable"])
def test_keys_of_other_gates_are_frozen(ddpm, entry, keys):
    assert set(ddpm.build_scaled(entry).skip_scaler.state_dict()) == {f"gates.{key}" for key in keys}


def test_other_keys_are_the_keys_of_diffusers(case):
    stock = set(case.build().state_dict())
    assert {key for key in case.build_scaled(LS).state_dict() if not key.startswith("skip_scaler.")} == stock


class TestRejected:
    def test_checkpoint_with_some_of_the_gates(self, ddpm, tmp_path):
        ddpm.build_scaled(LS).save_pretrained(tmp_path)
        file = tmp_path / "diffusion_pytorch_model.safetensors"
        weights = load_file(file)
        del weights["skip_scaler.gates.width_16.squeeze.weight"]
        save_file(weights, file, metadata={"format": "pt"})
        with pytest.raises(
            UserError, match=r"lacks 1 weights of this .*gates\.width_16\.squeeze\.weight; it was saved"
        ):
            ScaleLongUNet2DModel.from_pretrained(tmp_path)

    def test_gates_that_were_trained_as_another_function(self, ddpm, tmp_path):
        ddpm.build_scaled({**LS, "reduction": 16}).save_pretrained(tmp_path)
        for other in ({"shared": False}, {"reduction": 2}, {"init": "identity"}, {"gate": "ie", "reduction": None}):
            with pytest.raises(
                UserError, match=r"has the gates of .*reduction=16.*, got .*: load it without"
            ) as error:
                ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scaling={**LS, "reduction": 16, **other})
            assert "\n" not in str(error.value)
        entry = {**LS, "reduction": 16, "strength": 0.5}
        assert ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scaling=entry).skip_scaler.strength == 0.5
        ddpm.build_scaled({**LS, "shared": False}).save_pretrained(tmp_path)
        with pytest.raises(UserError, match=r"has the gates of .*shared=False.*, got .*shared=True"):
            ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scaling=LS)

    def test_gates_in_the_config_but_not_in_the_weights(self, ddpm, tmp_path):
        """The plain class saves such a folder."""
        ddpm.build_scaled(LS).save_pretrained(tmp_path / "scaled")
        diffusers.UNet2DModel.from_pretrained(tmp_path / "scaled").save_pretrained(tmp_path / "plain")
        with pytest.raises(UserError, match="lacks 8 weights of this ScaleLongUNet2DModel"):
            ScaleLongUNet2DModel.from_pretrained(tmp_path / "plain")

    def test_misspelled_keyword(self, ddpm, tmp_path):
        ddpm.build().save_pretrained(tmp_path)
        message = r"has no argument 'skip_scalling' \(did you mean 'skip_scaling'\?\)"
        with pytest.raises(UserError, match=message):
            ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scalling="cs")
        for config in (ddpm.build().config, str(tmp_path)):
            with pytest.raises(UserError, match=message):
                ScaleLongUNet2DModel.from_config(config, skip_scalling="cs")
        with pytest.raises(TypeError, match="skip_scalling"):
            ScaleLongUNet2DModel(**ddpm.config, skip_scalling="cs")

    def test_reduction_above_the_width(self, ddpm, tmp_path):
        ddpm.build().save_pretrained(tmp_path)
        with pytest.raises(UserError, match=r"reduction must be at most 16, .* got 32"):
            ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scaling={"method": "ls", "reduction": 32})

    @pytest.mark.parametrize("damage", ["truncated", "garbage"])
    def test_damaged_weights_file(self, ddpm, tmp_path, damage):
        ddpm.build().save_pretrained(tmp_path)
        file = tmp_path / "diffusion_pytorch_model.safetensors"
        file.write_bytes(file.read_bytes()[:1000] if damage == "truncated" else b"\x00" * 1000)
        with pytest.raises(UserError, match=r"^the weights in .* are damaged or incompletely downloaded \(.*copy it"):
            ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scaling="cs")

    def test_config_that_is_not_json(self, ddpm, tmp_path):
        ddpm.build().save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(UserError, match=r"config\.json is not valid JSON"):
            ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scaling="cs")

    @pytest.mark.parametrize(
        ("name", "misspelled"),
        [("skip_scaling", "skip_scalling"), ("layers_per_block", "layer_per_block"), ("norm_eps", "norm_epsilon")],
    )
    def test_misspelled_entry(self, ddpm, tmp_path, name, misspelled):
        ddpm.build_scaled("cs").save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        config[misspelled] = config.pop(name)
        (tmp_path / "config.json").write_text(json.dumps(config))
        message = (
            rf"the config of ScaleLongUNet2DModel has the unknown entry '{misspelled}' \(did you mean '{name}'\?\)"
        )
        for load in (ScaleLongUNet2DModel.from_pretrained, ScaleLongUNet2DModel.from_config):
            with pytest.raises(UserError, match=message):
                load(tmp_path)

    def test_entry_of_a_newer_version(self, ddpm, tmp_path):
        ddpm.build_scaled("cs").save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        config["skip_scaling"] |= {"version": 7, "schedule": "cosine"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(
            UserError, match=r"format version 7, but this package reads version 1: upgrade .*'schedule'"
        ):
            ScaleLongUNet2DModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"decay": 0.99, "optimization_step": 7},  # as EMAModel writes them
        {"resnet_cache_size": 3},  # of another version of diffusers
        {"norm_eps": None, "resnet_cache_size": 3},  # of another version, without an argument of this one
    ],
)
def test_loads_configs_with_entries_of_others(ddpm, tmp_path, changes):
    ddpm.build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps({n: v for n, v in config.items() if v is not None}))
    loaded = ScaleLongUNet2DModel.from_pretrained(tmp_path)
    assert_same_weights(loaded, ddpm.build())


def test_plain_class_loads_a_scaled_folder_unscaled(ddpm, tmp_path):
    ddpm.build_scaled("cs").save_pretrained(tmp_path)
    plain = diffusers.UNet2DModel.from_pretrained(tmp_path)
    listed = scalelong_diffusers.skip_connections(plain)
    assert [skip.factor for skip in listed] == [1.0] * 6
    assert "its config has the method 'cs', which the plain class UNet2DModel ignores: load it with" in str(listed)
    apply_skip_scaling(plain, plain.config.skip_scaling)
    assert torch.equal(output(plain, ddpm.make_inputs()), output(ddpm.build_scaled("cs"), ddpm.make_inputs()))


def test_returns_the_loading_info_of_diffusers(ddpm, tmp_path):
    ddpm.build().save_pretrained(tmp_path)
    model, info = ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scaling=LS, output_loading_info=True)
    assert isinstance(model, ScaleLongUNet2DModel)
    assert len(info["missing_keys"]) == 8


def test_loading_and_patching_do_not_write_to_the_folder(ddpm, tmp_path):
    ddpm.build_scaled("cs").save_pretrained(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    apply_skip_scaling(ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scaling="inv_sqrt2"), "constant")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("content", ["[]", "null", "5", "[" * 10_000], ids=("list", "null", "number", "nested"))
@pytest.mark.parametrize("name", ["config.json", "diffusion_pytorch_model.safetensors.index.json"])
def test_names_json_that_is_not_an_object(tmp_path, name, content):
    UViTModel(sample_size=8, hidden_size=32, num_layers=2, num_attention_heads=2).save_pretrained(tmp_path / "unet")
    (tmp_path / "unet" / name).write_text(content)
    for source, subfolder in ((tmp_path / "unet", None), (tmp_path, "unet")):
        with pytest.raises(UserError, match=rf"unet/{name} (must hold a JSON object, got|is not valid JSON)"):
            UViTModel.from_pretrained(source, subfolder=subfolder)


@pytest.mark.parametrize("path", ["../model.safetensors", "/model.safetensors"])
def test_rejects_shards_in_other_folders(tmp_path, path):
    model = UViTModel(sample_size=8, hidden_size=32, num_layers=2, num_attention_heads=2)
    model.save_pretrained(tmp_path / "unet", max_shard_size="20KB")
    index = tmp_path / "unet" / "diffusion_pytorch_model.safetensors.index.json"
    UViTModel.from_pretrained(tmp_path / "unet")
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(model.state_dict(), path)}))
    with pytest.raises(UserError, match=r"index\.json must name files in its folder, got '.*/model\.safetensors'"):
        UViTModel.from_pretrained(tmp_path / "unet")
