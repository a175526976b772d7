"""`scalelong convert` and `model_from_reference`, against checkpoints in the reference's names and layout."""

import os
import pickle
import re

import pytest
import torch
from diffusers import UNet2DModel

from scalelong_diffusers import SkipScalingConfig, UserError, UViTModel, model_from_preset
from scalelong_diffusers.cli import main
from scalelong_diffusers.models.conversion import (
    CheckpointDetails,
    convert_from_reference,
    load_reference,
    model_from_reference,
    to_reference,
)


TINY = {"sample_size": 8, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 4}
CONTINUOUS = {"timestep_scale": 0.999, "timestep_offset": 1.0}
DETAILS = ["--num_attention_heads", "4", "--timesteps", "continuous"]
PAPER = {"method": "ls", "shared": True, "init": "paper"}

# The config of a model, and the flags for settings that its weights do not contain.
MODELS = {
    "plain": ({}, ["--skip_scaling", "none"]),
    "inv_sqrt2": ({"skip_scaling": "inv_sqrt2"}, ["--skip_scaling", "inv_sqrt2"]),
    "cs": ({"skip_scaling": {"method": "cs", "kappa": 0.7}}, ["--skip_scaling", "cs", "--kappa", "0.7"]),
    "shared gates": ({"skip_scaling": PAPER}, []),
    "gates per skip": ({"skip_scaling": {**PAPER, "shared": False, "reduction": 4}}, []),
    "mish": (
        {"skip_scaling": {**PAPER, "activation": "mish"}},
        ["--skip_scaling", "ls", "--skip_scaling_activation", "mish"],
    ),
    "classes": ({"num_class_embeds": 11, "final_conv": False}, ["--skip_scaling", "none"]),
    "text": (
        {"cross_attention_dim": 24, "context_length": 5, "in_channels": 4, "skip_scaling": PAPER},
        ["--context_length", "5"],
    ),
    "odd widths": ({"patch_size": 4, "sample_size": 16, "mlp_ratio": 2.125}, ["--skip_scaling", "none"]),
}


def reference_state(model: UViTModel) -> dict[str, torch.Tensor]:
    """Write a model in the reference's layout, independently of the package: its names, joined matrices and gates."""
    ours = model.state_dict()
    state = {}
    names = [
        ("patch_embed.", "patch_embed.proj."), ("class_embed.", "label_emb."), (".to_out.0.", ".proj."),
        ("proj_out.", "decoder_pred."), ("conv_out.", "final_layer."), ("hidden_proj.bias", "skip_linear.bias"),
    ]  # fmt: skip
    for key, tensor in ours.items():
        if ".to_q." in key:
            parts = [ours[key.replace("to_q", part)] for part in ("to_q", "to_k", "to_v")]
            state[key.replace("to_q", "qkv")] = torch.cat(parts)
        elif key.endswith("hidden_proj.weight"):
            parts = [tensor, ours[key.replace("hidden_proj", "skip_proj")]]
            state[key.replace("hidden_proj", "skip_linear")] = torch.cat(parts, 1)
        elif key.startswith("skip_scaler."):
            _, _, gate, layer, kind = key.split(".")
            place = "" if "width" in gate else f"{len(model.out_blocks) - int(gate.split('_')[1])}."
            state[f"se.{place}{'layer1' if layer == 'squeeze' else 'layer2'}.{kind}"] = tensor
        elif not any(part in key for part in (".to_k.", ".to_v.", "skip_proj.")):
            for name, theirs in names:
                key = key.replace(name, theirs) if name in key else key
            state[key] = tensor
    return state


def save_reference(path, dtype=torch.float32, **config) -> UViTModel:
    """Save a checkpoint of the reference and return its model."""
    torch.manual_seed(0)
    model = UViTModel(**{**TINY, **CONTINUOUS, **config}).to(dtype)
    torch.save(reference_state(model), path)
    return model


def run(capsys, *arguments):
    try:
        code = main(["convert", *map(str, arguments)])
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize("name", MODELS)
def test_converts_every_weight_and_the_config(name, tmp_path, capsys):
    config, flags = MODELS[name]
    for dtype in (torch.float32, torch.float16):
        original = save_reference(tmp_path / "in.pth", dtype, **config)
        target = tmp_path / str(dtype)
        code, output = run(capsys, tmp_path / "in.pth", f"{target}/", *DETAILS, *flags)
        assert code == 0, output
        model = UViTModel.from_pretrained(target, torch_dtype=dtype)
        expected = {**original.config, "out_channels": original.config.in_channels}
        assert {name: model.config[name] for name in expected if name[0] != "_"} == {
            name: value for name, value in expected.items() if name[0] != "_"
        }
        for key, tensor in original.state_dict().items():
            assert torch.equal(model.state_dict()[key], tensor), key


def test_to_reference_has_the_published_names_of_cifar10():
    with torch.device("meta"):
        model = model_from_preset("cifar10-uvit-s-2", skip_scaling={"method": "ls", "shared": False})
    state = to_reference(model.state_dict(), 6)
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    assert shapes == {key: tuple(tensor.shape) for key, tensor in reference_state(model).items()}
    gates = {key for key in shapes if key.startswith("se.")}
    assert gates == {
        f"se.{i}.{layer}.{w}" for i in range(6) for layer in ("layer1", "layer2") for w in ("weight", "bias")
    }
    assert len(shapes) - len(gates) == 164
    assert shapes["patch_embed.proj.weight"] == (512, 3, 2, 2)
    assert shapes["in_blocks.5.attn.qkv.weight"] == shapes["mid_block.attn.qkv.weight"] == (1536, 512)
    assert shapes["out_blocks.0.skip_linear.weight"] == (512, 1024)
    assert shapes["decoder_pred.weight"] == (12, 512)
    assert shapes["se.0.layer1.weight"] == (16, 257)


def test_gates_of_the_reference_are_the_papers_with_any_default(tmp_path):
    for shared in (True, False):
        original = save_reference(tmp_path / "in.pth", skip_scaling={**PAPER, "shared": shared})
        details = CheckpointDetails(4, "continuous")
        model = model_from_reference(load_reference(str(tmp_path / "in.pth")), details, "in.pth")
        assert (model.skip_scaler.config.shared, model.skip_scaler.config.init) == (shared, "paper")
        sample, t = torch.randn(2, 3, 8, 8), torch.tensor([3, 700])
        assert torch.equal(model(sample, t).sample, original(sample, t).sample)


def test_reads_the_ema_weights_of_a_training_folder(tmp_path, capsys):
    ema = save_reference(tmp_path / "nnet_ema.pth")
    torch.save({"other": torch.zeros(1)}, tmp_path / "nnet.pth")
    assert run(capsys, tmp_path, tmp_path / "out", *DETAILS, "--skip_scaling", "none")[0] == 0
    model = UViTModel.from_pretrained(tmp_path / "out")
    assert torch.equal(model.pos_embed, ema.pos_embed)


@pytest.mark.parametrize(
    ("config", "flags", "missing"),
    [
        ({}, [], ["--num_attention_heads", "--timesteps", "--skip_scaling"]),
        ({"skip_scaling": PAPER}, ["--timesteps", "discrete"], ["--num_attention_heads"]),
        ({"cross_attention_dim": 24, "skip_scaling": PAPER}, DETAILS, ["--context_length"]),
        ({}, [*DETAILS, "--skip_scaling", "cs"], ["--skip_scaling", "--kappa"]),
    ],
)
def test_names_the_flags_that_are_needed(config, flags, missing, tmp_path, capsys):
    save_reference(tmp_path / "in.pth", **config)
    code, output = run(capsys, tmp_path / "in.pth", tmp_path / "out", *flags)
    assert code == 2
    assert re.findall(r"--\w+", output) == missing
    assert os.listdir(tmp_path) == ["in.pth"]


CHANGED_KEYS = {
    r"time_embed\.0\.weight \(128, 32\) is unexpected": {"time_embed.0.weight": torch.zeros(128, 32)},
    r"norm\.bias is missing": {"norm.bias": None},
    r"skip_linear\.weight is \(32, 32\) instead of \(32, 64\)": {
        "out_blocks.1.skip_linear.weight": torch.zeros(32, 32)
    },
    "is not a U-ViT: it needs a non-empty 3-D pos_embed, got None among": {"pos_embed": None},
    r"it needs a non-empty 3-D pos_embed, got \(17, 32\) among": {"pos_embed": torch.zeros(17, 32)},
    r"pos_embed is \(1, 18, 32\) instead of \(1, 17, 32\)": {"pos_embed": torch.zeros(1, 18, 32)},
    "it holds 'norm.bias', torch.int64": {"norm.bias": torch.zeros(32, dtype=torch.int64)},
    "it holds 'norm.bias', torch.complex64": {"norm.bias": torch.zeros(32, dtype=torch.complex64)},
    "it holds 'norm.bias', torch.float32 on meta": {"norm.bias": torch.zeros(32, device="meta")},
    r"non-empty 4-D patch_embed.proj.weight, got \(32, 3, 0, 0\)": {
        "patch_embed.proj.weight": torch.zeros(32, 3, 0, 0)
    },
}


def test_rejects_keys_shapes_and_dtypes_that_no_uvit_has(tmp_path, capsys):
    save_reference(tmp_path / "original.pth")
    for message, changes in CHANGED_KEYS.items():
        state = torch.load(tmp_path / "original.pth") | changes
        torch.save({key: value for key, value in state.items() if value is not None}, tmp_path / "in.pth")
        code, output = run(capsys, tmp_path / "in.pth", tmp_path / "out", *DETAILS, "--skip_scaling", "none")
        assert code == 2, message
        assert re.search(message, output), (message, output)
        assert output.count("\n") == 1
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("shape", "message"),
    [((0, 17), "a non-empty 2-D se.layer1.weight"), ((20, 17), "reduction must be an integer, at least 1 and")],
)
def test_rejects_impossible_gates(shape, message, tmp_path, capsys):
    save_reference(tmp_path / "in.pth")
    torch.save(torch.load(tmp_path / "in.pth") | {"se.layer1.weight": torch.zeros(shape)}, tmp_path / "in.pth")
    code, output = run(capsys, tmp_path / "in.pth", tmp_path / "out", *DETAILS)
    assert code == 2
    assert message in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*DETAILS, "--skip_scaling", "cs", "--kappa", "0.5"], "skip_scaling='cs' contradicts its gates"),
        (
            [*DETAILS, "--skip_scaling", "ls", "--skip_scaling_reduction", "4"],
            r"se.layer1.weight is \(1, 17\) instead of \(4, 17\)",
        ),
        ([*DETAILS, "--context_length", "5"], "not a text-to-image model: leave out context_length=5"),
        (["--num_attention_heads", "5", "--timesteps", "discrete"], "hidden_size.*num_attention_heads=5"),
        (["--num_attention_heads", "0", "--timesteps", "discrete"], "--num_attention_heads must be an integer, at"),
        (["--num_attention_heads", "4", "--timesteps", "0-1"], "invalid choice: '0-1'"),
    ],
)
def test_rejects_flags_that_contradict_the_weights(flags, message, tmp_path, capsys):
    save_reference(tmp_path / "in.pth", skip_scaling=PAPER)
    code, output = run(capsys, tmp_path / "in.pth", tmp_path / "out", *flags)
    assert code == 2
    assert re.search(message, output)
    assert os.listdir(tmp_path) == ["in.pth"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--skip_scaling", "cs", "--kappa", "auto"],
            "--skip_scaling cs needs the --kappa of the training, as a number",
        ),
        (["--skip_scaling", "learnable"], "skip_scaling='learnable' does not exist in the reference"),
    ],
)
def test_rejects_scaling_that_the_reference_does_not_have(flags, message, tmp_path, capsys):
    save_reference(tmp_path / "in.pth")
    code, output = run(capsys, tmp_path / "in.pth", tmp_path / "out", *DETAILS, *flags)
    assert code == 2
    assert re.search(message, output)


def test_passed_fields_complete_the_fields_of_the_gates(tmp_path, capsys):
    save_reference(tmp_path / "in.pth", skip_scaling={**PAPER, "reduction": 4, "activation": "mish"})
    flags = ["--skip_scaling", "ls", "--skip_scaling_activation", "mish"]
    assert run(capsys, tmp_path / "in.pth", tmp_path / "out", *DETAILS, *flags)[0] == 0
    assert UViTModel.from_pretrained(tmp_path / "out").skip_scaler.config == SkipScalingConfig(
        "ls", shared=True, init="paper", reduction=4, activation="mish", gate_axis="tokens"
    )


def test_rejects_weights_of_another_model(tmp_path, capsys):
    unet = UNet2DModel(
        sample_size=8, block_out_channels=(32,), down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",)
    )
    torch.save(unet.state_dict(), tmp_path / "in.pth")
    code, output = run(capsys, tmp_path / "in.pth", tmp_path / "out", *DETAILS, "--skip_scaling", "none")
    assert code == 2
    assert "is not a U-ViT: it needs a non-empty 4-D patch_embed.proj.weight, got None" in output
    assert "conv_in.weight" in output


class RunsCode:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


def write_to(path, content):
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)


def test_runs_no_code_of_a_pickle(tmp_path):
    marker = tmp_path / "it ran"
    content = {"pos_embed": RunsCode(marker)}
    for written in (content, pickle.dumps(content)):
        write_to(tmp_path / "in.pth", written)
        with pytest.raises(UserError, match="can run code"):
            load_reference(str(tmp_path / "in.pth"))
        assert not marker.exists()


def test_rejects_files_that_are_not_state_dicts(tmp_path):
    for content, message in [
        (b"not a checkpoint", "is damaged or holds more than tensors"),
        (b"hello", "is damaged or holds more than tensors"),
        (b"\x80\x02}q\x00X\xff\xff", "is damaged or holds more than tensors"),
        (b"", "is damaged or holds more than tensors"),
        ([torch.zeros(1)], "is not a state dict .* it holds 'list', list"),
        ({"state_dict": {}, "step": 3}, "is not a state dict .* it holds 'state_dict', dict"),
        ({3: torch.zeros(1)}, "is not a state dict .* it holds 3, Tensor|it holds 3, torch"),
    ]:
        write_to(tmp_path / "in.pth", content)
        with pytest.raises(UserError, match=message):
            load_reference(str(tmp_path / "in.pth"))
    with pytest.raises(UserError, match=r"cannot read .*No such file or directory: .*nnet_ema.pth"):
        load_reference(str(tmp_path))


def test_overwrites_nothing(tmp_path, capsys):
    save_reference(tmp_path / "in.pth")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    for target in (tmp_path / "out", tmp_path / "in.pth"):
        before = (tmp_path / "in.pth").read_bytes()
        code, output = run(capsys, tmp_path / "in.pth", target, *DETAILS, "--skip_scaling", "none")
        assert code == 2
        assert f"{target} already exists" in output
        assert os.listdir(tmp_path / "out") == ["mine"]
        assert (tmp_path / "in.pth").read_bytes() == before
    code, output = run(capsys, tmp_path / "in.pth", tmp_path / "in.pth" / "out", *DETAILS, "--skip_scaling", "none")
    assert code == 2
    assert "in.pth/out cannot be written: " in output


@pytest.mark.parametrize("target_exists", [False, True])
def test_failed_write_leaves_nothing(target_exists, tmp_path, monkeypatch):
    def fill_the_disk(self, folder):
        os.makedirs(folder)
        open(os.path.join(folder, "config.json"), "w").close()
        raise OSError("No space left on device")

    save_reference(tmp_path / "in.pth")
    if target_exists:
        (tmp_path / "out").mkdir()
    monkeypatch.setattr(UViTModel, "save_pretrained", fill_the_disk)
    details = CheckpointDetails(4, "discrete", {"method": "none"})
    with pytest.raises(UserError, match="out cannot be written: No space left"):
        convert_from_reference(str(tmp_path / "in.pth"), str(tmp_path / "out"), details)
    assert sorted(os.listdir(tmp_path)) == (["in.pth", "out"] if target_exists else ["in.pth"])
    assert not target_exists or os.listdir(tmp_path / "out") == []
