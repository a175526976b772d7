"""Saving and loading: plain and scaled checkpoints, in every way that diffusers loads them."""

import json
import pickle
from copy import deepcopy

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

import scalelong_diffusers
from scalelong_diffusers import ScaleLongUNet2DModel, apply_skip_scaling


LS = {"method": "ls", "reduction": 4}


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


@pytest.mark.parametrize("entry", ["none", "cs", LS, {**LS, "shared": False}, "learnable"], ids=str)
def test_a_scaled_model_reloads_with_its_scaling_and_its_output(case, entry, tmp_path):
    model, inputs = learn(case.build_scaled(entry)), case.make_inputs()
    model.save_pretrained(tmp_path)
    reloaded = scaled_class_of(case).from_pretrained(tmp_path)
    assert reloaded.config.skip_scaling == model.config.skip_scaling
    assert_same_weights(reloaded, model)
    # weights that lie in a mapped file may be summed in another order
    torch.testing.assert_close(output(reloaded, inputs), output(model, inputs), rtol=1e-5, atol=1e-5)
    copy = deepcopy(model)
    assert torch.equal(output(copy, inputs), output(model, inputs))
    assert copy.skip_scaler is not model.skip_scaler


@pytest.mark.parametrize("entry", ["cs", LS], ids=str)
def test_what_can_be_pickled_of_diffusers_can_be_pickled_scaled(case, entry):
    try:
        pickle.dumps(case.build())
    except AttributeError:
        assert case.name == "skip-blocks"  # diffusers keeps a lambda there
        return
    model, inputs = learn(case.build_scaled(entry)), case.make_inputs()
    assert torch.equal(output(pickle.loads(pickle.dumps(model)), inputs), output(model, inputs))


UNPICKLE = """
import sys
import torch
from scalelong_diffusers import remove_skip_scaling

# Hooks are counted in each process: these would take the places that ours had where it was pickled.
model = torch.load(sys.argv[1], weights_only=False)
model.conv_in.register_forward_pre_hook(lambda module, args: None)
for block in model.up_blocks:
    block.register_forward_pre_hook(lambda module, args: None)
inputs = torch.load(sys.argv[2])
with torch.no_grad():
    scaled = model(**inputs).sample
    torch.save([scaled, remove_skip_scaling(model)(**inputs).sample], sys.argv[3])
"""


def test_unpickled_elsewhere_the_hooks_stay(ddpm, in_fresh_process, tmp_path):
    model, inputs = ddpm.build_scaled("cs"), ddpm.make_inputs()
    torch.save(model, tmp_path / "model.pt")
    torch.save(inputs, tmp_path / "inputs.pt")
    in_fresh_process(UNPICKLE, tmp_path / "model.pt", tmp_path / "inputs.pt", tmp_path / "outputs.pt")
    scaled, plain = torch.load(tmp_path / "outputs.pt")
    torch.testing.assert_close(scaled, output(model, inputs), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain, output(ddpm.build(), inputs), rtol=1e-5, atol=1e-5)


def test_a_copy_goes_through_its_own_gates(ddpm):
    model, inputs = ddpm.build_scaled(LS), ddpm.make_inputs()
    before = output(model, inputs)
    for copy in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        learn(copy)
        assert not torch.equal(output(copy, inputs), before)
    assert torch.equal(output(model, inputs), before)


@pytest.mark.parametrize("method", ["none", "inv_sqrt2", "constant", "cs"])
def test_constant_scaling_leaves_the_weights_file_byte_identical(ddpm, method, tmp_path):
    ddpm.build().save_pretrained(tmp_path / "stock")
    ddpm.build_scaled(method).save_pretrained(tmp_path / "scaled")
    name = "diffusion_pytorch_model.safetensors"
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


@pytest.fixture(params=["single file", "sharded", "variant", "pickled"])
def plain_checkpoint(request, ddpm, tmp_path):
    """A stock model's folder, and the keywords that it is loaded with."""
    save = {
        "sharded": {"max_shard_size": "100KB"},
        "variant": {"variant": "ema"},
        "pickled": {"safe_serialization": False},
    }.get(request.param, {})
    ddpm.build().save_pretrained(tmp_path, **save)
    load = {"variant": {"variant": "ema"}, "pickled": {"use_safetensors": False}}
    return tmp_path, load.get(request.param, {})


@pytest.mark.parametrize(
    "entry", [LS, {"method": "ls", "gate": "ie"}, {**LS, "init": "identity"}, "learnable"], ids=str
)
@pytest.mark.parametrize("way", WAYS)
def test_gates_that_a_plain_checkpoint_lacks_get_their_own_init(ddpm, plain_checkpoint, way, entry, recwarn):
    folder, kwargs = plain_checkpoint
    torch.manual_seed(0)
    model = ScaleLongUNet2DModel.from_pretrained(folder, skip_scaling=entry, **kwargs, **WAYS[way])
    dtype = WAYS[way].get("torch_dtype", torch.float32)
    for name, parameter in model.named_parameters():
        assert parameter.device.type == "cpu", name
        assert parameter.dtype == dtype, name
        assert torch.isfinite(parameter).all(), name
    assert model.training is False
    assert all(parameter.requires_grad for parameter in model.parameters())
    stock = ddpm.build().to(dtype).state_dict()
    assert all(torch.equal(weight, stock[key]) for key, weight in model.state_dict().items() if key in stock)

    gates = list(model.skip_scaler.gates.values())
    if entry == "learnable":
        assert all(gate.value.item() == 1 for gate in gates)
    elif entry.get("init") == "identity":
        assert all((gate.excite.weight == 0).all() and (gate.squeeze.weight != 0).any() for gate in gates)
    elif entry.get("gate") == "ie":
        assert all(gate.weight.float().std() > 0.2 and gate.weight.abs().max() <= 1 for gate in gates)
    else:
        for gate in gates:
            for layer in (gate.squeeze, gate.excite):
                bound = layer.weight.shape[1] ** -0.5
                assert 0.8 * bound < layer.weight.abs().max().float() <= bound * 1.01
                assert layer.bias.abs().max().float() <= bound * 1.01
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in ddpm.make_inputs().items()}
    assert torch.isfinite(output(model, inputs)).all()


@pytest.mark.parametrize("way", WAYS)
def test_a_scaled_checkpoint_keeps_its_gates_in_every_way_of_loading(ddpm, way, tmp_path, recwarn):
    model = learn(ddpm.build_scaled(LS))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    reloaded = ScaleLongUNet2DModel.from_pretrained(tmp_path, **WAYS[way])
    dtype = WAYS[way].get("torch_dtype", torch.float32)
    expected = model.skip_scaler.state_dict()
    assert expected
    for key, weight in reloaded.skip_scaler.state_dict().items():
        assert torch.equal(weight, expected[key].to(dtype)), key


def test_a_device_map_that_is_worked_out(sd, tmp_path):
    """`auto` needs a class that says what may not be split, as that of Stable Diffusion does."""
    sd.build().save_pretrained(tmp_path)
    model = scaled_class_of(sd).from_pretrained(tmp_path, skip_scaling=LS, device_map="auto")
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert torch.isfinite(output(model, sd.make_inputs())).all()


def test_scaling_is_given_as_a_name_a_dict_or_a_config(ddpm, tmp_path):
    ddpm.build().save_pretrained(tmp_path)
    entry = {"version": 1, "method": "cs", "kappa": 0.9, "reverse": False, "strength": 1.0}
    for given in ("cs", {"method": "cs"}, scalelong_diffusers.SkipScalingConfig("cs")):
        assert ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scaling=given).config.skip_scaling == entry
        assert ScaleLongUNet2DModel(**ddpm.config, skip_scaling=given).config.skip_scaling == entry


def test_a_keyword_replaces_the_stored_entry_whole(ddpm, tmp_path):
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


def test_positional_arguments_are_those_of_the_plain_class():
    kwargs = {"block_out_channels": (16, 32), "norm_num_groups": 8}
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    model = ScaleLongUNet2DModel(8, 1, 2, **kwargs, **blocks, skip_scaling="cs")
    assert (model.config.sample_size, model.config.in_channels, model.config.out_channels) == (8, 1, 2)


def test_the_config_and_the_keys_are_frozen(ddpm, tmp_path):
    """What is stored can not change any more: folders that people have saved must load."""
    ddpm.build_scaled({"method": "ls", "reduction": 4}).save_pretrained(tmp_path)
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
    ({"method": "ls", "gate": "ie"}, [f"width_{width}.{kind}" for width in (16, 32) for kind in ("weight", "bias")]),
    ("learnable", [f"scalar_{i}.value" for i in range(1, 7)]),
]


@pytest.mark.parametrize(("entry", "keys"), OTHER_KEYS, ids=["per skip", "ie", "learnable"])
def test_the_keys_of_the_other_gates_are_frozen(ddpm, entry, keys):
    assert set(ddpm.build_scaled(entry).skip_scaler.state_dict()) == {f"gates.{key}" for key in keys}


def test_everything_else_keeps_the_keys_of_diffusers(case):
    stock = set(case.build().state_dict())
    assert {key for key in case.build_scaled(LS).state_dict() if not key.startswith("skip_scaler.")} == stock


class TestRefused:
    def test_a_checkpoint_with_only_some_gates(self, ddpm, tmp_path):
        ddpm.build_scaled(LS).save_pretrained(tmp_path)
        file = tmp_path / "diffusion_pytorch_model.safetensors"
        weights = load_file(file)
        del weights["skip_scaler.gates.width_16.squeeze.weight"]
        save_file(weights, file, metadata={"format": "pt"})
        with pytest.raises(
            ValueError, match=r"lacks 1 weights of this .*gates\.width_16\.squeeze\.weight; it was saved"
        ):
            ScaleLongUNet2DModel.from_pretrained(tmp_path)

    @pytest.mark.parametrize(("saved", "wanted"), [(True, False), (False, True)])
    def test_shared_gates_as_gates_of_each_skip_and_the_reverse(self, ddpm, tmp_path, saved, wanted):
        ddpm.build_scaled({**LS, "shared": saved}).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"was saved with the gates of .* which can not serve .*shared="):
            ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scaling={**LS, "shared": wanted})

    @pytest.mark.parametrize(
        "other", [{"reduction": 2}, {"init": "identity"}, {"activation": "mish"}, {"gate": "ie"}], ids=str
    )
    def test_gates_that_were_learned_as_another_function(self, ddpm, tmp_path, other):
        ddpm.build_scaled("ls").save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"was saved with the gates of .*reduction=16.* can not serve") as error:
            ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scaling={"method": "ls", **other})
        assert "\n" not in str(error.value)
        model = ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scaling={"method": "ls", "strength": 0.5})
        assert model.skip_scaler.strength == 0.5

    def test_gates_that_the_config_promises_and_the_file_lacks(self, ddpm, tmp_path):
        """As EMA and the plain class leave a folder when they are used the wrong way."""
        ddpm.build_scaled(LS).save_pretrained(tmp_path / "scaled")
        diffusers.UNet2DModel.from_pretrained(tmp_path / "scaled").save_pretrained(tmp_path / "plain")
        with pytest.raises(ValueError, match="lacks 8 weights of this ScaleLongUNet2DModel"):
            ScaleLongUNet2DModel.from_pretrained(tmp_path / "plain")

    def test_a_single_file(self, sd, tmp_path):
        with pytest.raises(ValueError, match=r"load UNet2DConditionModel\.from_single_file.* apply_skip_scaling"):
            scaled_class_of(sd).from_single_file(tmp_path / "model.safetensors", skip_scaling="cs")

    def test_a_misspelt_keyword(self, ddpm, tmp_path):
        ddpm.build().save_pretrained(tmp_path)
        with pytest.raises(TypeError, match=r"takes no argument 'skip_scalling' \(did you mean 'skip_scaling'\?\)"):
            ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scalling="cs")
        with pytest.raises(TypeError, match="takes no argument 'skip_scalling'"):
            ScaleLongUNet2DModel.from_config(ddpm.build().config, skip_scalling="cs")
        with pytest.raises(TypeError, match="takes no argument 'skip_scalling'"):
            ScaleLongUNet2DModel.from_config(str(tmp_path), skip_scalling="cs")
        with pytest.raises(TypeError, match="skip_scalling"):
            ScaleLongUNet2DModel(**ddpm.config, skip_scalling="cs")

    def test_a_reduction_that_leaves_a_skip_no_hidden_unit(self, ddpm, tmp_path):
        ddpm.build().save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="reduction=32 leaves a skip of width 16 no hidden unit"):
            ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scaling={"method": "ls", "reduction": 32})

    @pytest.mark.parametrize("damage", ["truncated", "garbage"])
    def test_a_damaged_weights_file(self, ddpm, tmp_path, damage):
        ddpm.build().save_pretrained(tmp_path)
        file = tmp_path / "diffusion_pytorch_model.safetensors"
        file.write_bytes(file.read_bytes()[:1000] if damage == "truncated" else b"\x00" * 1000)
        with pytest.raises(OSError, match=r"Unable to load weights from checkpoint file for .*diffusion_pytorch_mod"):
            ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scaling="cs")

    def test_a_config_that_is_not_json(self, ddpm, tmp_path):
        ddpm.build().save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(OSError, match=r"config file at '.*config\.json' is not a valid JSON file"):
            ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scaling="cs")

    def test_an_entry_of_a_newer_version(self, ddpm, tmp_path):
        ddpm.build_scaled("cs").save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        config["skip_scaling"] |= {"version": 7, "schedule": "cosine"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(
            ValueError, match=r"format version 7, and this package reads version 1: upgrade .*'schedule'"
        ):
            ScaleLongUNet2DModel.from_pretrained(tmp_path)


def test_the_plain_class_loads_a_scaled_folder_unscaled_and_its_list_says_so(ddpm, tmp_path):
    ddpm.build_scaled("cs").save_pretrained(tmp_path)
    plain = diffusers.UNet2DModel.from_pretrained(tmp_path)
    listed = scalelong_diffusers.skip_connections(plain)
    assert [skip.factor for skip in listed] == [1.0] * 6
    assert "its config asks for 'cs', which the plain class UNet2DModel does not run" in str(listed)
    apply_skip_scaling(plain, plain.config.skip_scaling)
    assert torch.equal(output(plain, ddpm.make_inputs()), output(ddpm.build_scaled("cs"), ddpm.make_inputs()))


def test_the_loading_info_of_diffusers_is_still_to_be_had(ddpm, tmp_path):
    ddpm.build().save_pretrained(tmp_path)
    model, info = ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scaling=LS, output_loading_info=True)
    assert isinstance(model, ScaleLongUNet2DModel)
    assert len(info["missing_keys"]) == 8


def test_a_folder_that_two_loaders_share_is_not_written_to(ddpm, tmp_path):
    """Loading with another scaling is a matter of the model in memory: the folder keeps what it says."""
    ddpm.build_scaled("cs").save_pretrained(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    apply_skip_scaling(ScaleLongUNet2DModel.from_pretrained(tmp_path, skip_scaling="inv_sqrt2"), "constant")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
