import os
import pickle
import re

import pytest
import torch
from diffusers import UNet2DModel

from scalelong_diffusers import SkipScalingConfig, UViTModel, model_from_preset
from scalelong_diffusers.cli import main
from scalelong_diffusers.models.conversion import (
    CheckpointDetails,
    convert_from_reference,
    convert_to_reference,
    to_reference,
)


TINY = {"sample_size": 8, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 4}
CONTINUOUS = {"timestep_scale": 0.999, "timestep_offset": 1.0}
TOLD = ["--num_attention_heads", "4", "--timesteps", "continuous"]

# The config of a model, and the flags that say what its weights do not.
MODELS = {
    "plain": ({}, ["--skip_scaling", "none"]),
    "inv_sqrt2": ({"skip_scaling": "inv_sqrt2"}, ["--skip_scaling", "inv_sqrt2"]),
    "cs": ({"skip_scaling": {"method": "cs", "kappa": 0.7}}, ["--skip_scaling", "cs", "--kappa", "0.7"]),
    "shared gates": ({"skip_scaling": "ls"}, []),
    "gates per skip": ({"skip_scaling": {"method": "ls", "shared": False, "reduction": 4}}, []),
    "mish": (
        {"skip_scaling": {"method": "ls", "activation": "mish"}},
        ["--skip_scaling", "ls", "--skip_scaling_activation", "mish"],
    ),
    "classes": ({"num_class_embeds": 11, "final_conv": False}, ["--skip_scaling", "none"]),
    "text": (
        {"cross_attention_dim": 24, "context_length": 5, "in_channels": 4, "skip_scaling": "ls"},
        ["--context_length", "5"],
    ),
    "odd widths": ({"patch_size": 4, "sample_size": 16, "mlp_ratio": 2.125}, ["--skip_scaling", "none"]),
}


def save_reference(path, dtype=torch.float32, **config):
    """A published checkpoint, and the model that it is of."""
    torch.manual_seed(0)
    model = UViTModel(**{**TINY, **CONTINUOUS, **config}).to(dtype)
    torch.save(to_reference(model.state_dict(), len(model.out_blocks)), path)
    return model


def run(capsys, *arguments):
    code = main(["convert", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_key_by_key(name, dtype, tmp_path, capsys):
    config, flags = MODELS[name]
    original = save_reference(tmp_path / "in.pth", dtype, **config)
    code, output = run(capsys, tmp_path / "in.pth", tmp_path / "out/", *TOLD, *flags)
    assert code == 0, output

    model = UViTModel.from_pretrained(tmp_path / "out", torch_dtype=dtype)
    expected = {**original.config, "out_channels": original.config.in_channels}
    assert {name: model.config[name] for name in expected if name[0] != "_"} == {
        name: value for name, value in expected.items() if name[0] != "_"
    }
    for key, tensor in original.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), key

    assert run(capsys, tmp_path / "out/", tmp_path / "again.pth")[0] == 0
    first, again = torch.load(tmp_path / "in.pth"), torch.load(tmp_path / "again.pth")
    assert list(again) == list(first)
    for key, tensor in first.items():
        assert again[key].dtype == tensor.dtype, key
        assert torch.equal(again[key], tensor), key


def test_the_published_names_of_cifar10():
    with torch.device("meta"):
        model = model_from_preset("cifar10-uvit-s-2", skip_scaling={"method": "ls", "shared": False})
    shapes = {key: tuple(tensor.shape) for key, tensor in to_reference(model.state_dict(), 6).items()}
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


def test_reads_the_ema_weights_of_a_training_folder(tmp_path, capsys):
    ema = save_reference(tmp_path / "nnet_ema.pth")
    torch.save({"other": torch.zeros(1)}, tmp_path / "nnet.pth")
    assert run(capsys, tmp_path, tmp_path / "out", *TOLD, "--skip_scaling", "none")[0] == 0
    model = UViTModel.from_pretrained(tmp_path / "out")
    assert torch.equal(model.pos_embed, ema.pos_embed)


def test_writes_a_sharded_folder(tmp_path, capsys):
    model = UViTModel(**TINY)
    model.save_pretrained(tmp_path / "out", max_shard_size="100KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert run(capsys, tmp_path / "out", tmp_path / "again.pth")[0] == 0
    again, expected = torch.load(tmp_path / "again.pth"), to_reference(model.state_dict(), 2)
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize(
    ("config", "flags", "asked_for"),
    [
        ({}, [], ["--num_attention_heads", "--timesteps", "--skip_scaling"]),
        ({"skip_scaling": "ls"}, ["--timesteps", "discrete"], ["--num_attention_heads"]),
        ({"cross_attention_dim": 24, "skip_scaling": "ls"}, TOLD, ["--context_length"]),
        ({}, [*TOLD, "--skip_scaling", "cs"], ["--skip_scaling", "--kappa"]),
    ],
)
def test_what_the_weights_do_not_tell_is_asked_for(config, flags, asked_for, tmp_path, capsys):
    save_reference(tmp_path / "in.pth", **config)
    code, output = run(capsys, tmp_path / "in.pth", tmp_path / "out", *flags)
    assert code == 2
    assert re.findall(r"--\w+", output) == asked_for
    assert os.listdir(tmp_path) == ["in.pth"]


def with_another_key(state):
    state["time_embed.0.weight"] = torch.zeros(128, 32)


def without_a_key(state):
    del state["norm.bias"]


def with_another_shape(state):
    state["out_blocks.1.skip_linear.weight"] = torch.zeros(32, 32)


def without_an_essential_key(state):
    del state["pos_embed"]


def with_a_flat_position_embedding(state):
    state["pos_embed"] = state["pos_embed"][0]


def with_a_token_more(state):
    state["pos_embed"] = torch.zeros(1, 18, 32)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (with_another_key, r"time_embed\.0\.weight \(128, 32\) has no place"),
        (without_a_key, r"norm\.bias is missing"),
        (with_another_shape, r"out_blocks\.1\.skip_linear\.weight is \(32, 32\) instead of \(32, 64\)"),
        (without_an_essential_key, "is no U-ViT: it has no pos_embed among"),
        (with_a_flat_position_embedding, "is no U-ViT: it has a 2-D pos_embed among"),
        (with_a_token_more, "17 tokens for the patches, which is no square"),
    ],
)
def test_keys_and_shapes_that_do_not_fit_are_named(spoil, message, tmp_path, capsys):
    save_reference(tmp_path / "in.pth")
    state = torch.load(tmp_path / "in.pth")
    spoil(state)
    torch.save(state, tmp_path / "in.pth")
    code, output = run(capsys, tmp_path / "in.pth", tmp_path / "out", *TOLD, "--skip_scaling", "none")
    assert code == 2
    assert re.search(message, output)
    assert output.count("\n") == 1
    assert os.listdir(tmp_path) == ["in.pth"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*TOLD, "--skip_scaling", "cs", "--kappa", "0.5"], "has the gates of the method 'ls'"),
        (
            [*TOLD, "--skip_scaling", "ls", "--skip_scaling_reduction", "4"],
            r"se.layer1.weight is \(1, 17\) instead of \(4, 17\)",
        ),
        ([*TOLD, "--context_length", "5"], "context_length=5 was given, but .* is a model without text"),
        (["--num_attention_heads", "5", "--timesteps", "discrete"], "hidden_size=32 can not be divided among .*=5"),
        (
            ["--num_attention_heads", "0", "--timesteps", "discrete"],
            "num_attention_heads must be .* at least 1, got 0",
        ),
        (["--num_attention_heads", "4", "--timesteps", "0-1"], "invalid choice: '0-1'"),
    ],
)
def test_flags_that_the_weights_contradict(flags, message, tmp_path, capsys):
    save_reference(tmp_path / "in.pth", skip_scaling="ls")
    try:
        code, output = run(capsys, tmp_path / "in.pth", tmp_path / "out", *flags)
    except SystemExit as exit:
        code, output = exit.code, capsys.readouterr().err
    assert code == 2
    assert re.search(message, output)
    assert os.listdir(tmp_path) == ["in.pth"]


def test_the_weights_of_another_model_are_no_uvit(tmp_path, capsys):
    unet = UNet2DModel(
        sample_size=8, block_out_channels=(32,), down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",)
    )
    torch.save(unet.state_dict(), tmp_path / "in.pth")
    code, output = run(capsys, tmp_path / "in.pth", tmp_path / "out", *TOLD, "--skip_scaling", "none")
    assert code == 2
    assert "is no U-ViT: it has no patch_embed.proj.weight" in output
    assert "conv_in.weight" in output


class WantsToRun:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_pickle_that_wants_to_run_code_is_refused(write, tmp_path, capsys):
    marker = tmp_path / "it ran"
    write({"pos_embed": WantsToRun(marker)}, tmp_path / "in.pth")
    code, output = run(capsys, tmp_path / "in.pth", tmp_path / "out", *TOLD, "--skip_scaling", "none")
    assert code == 2
    assert "can run code" in output
    assert not marker.exists()
    assert os.listdir(tmp_path) == ["in.pth"]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_text("not a checkpoint"), "not a file of tensors alone"),
        (lambda path: path.write_text("hello"), "not a file of tensors alone"),
        (lambda path: path.write_bytes(b"\x80\x02}q\x00X\xff\xff"), "not a file of tensors alone"),
        (lambda path: path.write_bytes(b""), "not a file of tensors alone"),
        (lambda path: torch.save([torch.zeros(1)], path), "is no state dict, .* it holds a list"),
        (lambda path: torch.save({"state_dict": {}, "step": 3}, path), "is no state dict, .* it has 'state_dict'"),
        (lambda path: torch.save({3: torch.zeros(1)}, path), "is no state dict, .* it has 3"),
        (lambda path: path.mkdir(), "there is no .*in.pth/nnet_ema.pth; accepted"),
    ],
)
def test_what_is_no_state_dict(write, message, tmp_path, capsys):
    write(tmp_path / "in.pth")
    code, output = run(capsys, tmp_path / "in.pth", tmp_path / "out", *TOLD, "--skip_scaling", "none")
    assert code == 2
    assert re.search(message, output)


@pytest.mark.parametrize(
    ("key", "tensor", "message"),
    [
        ("norm.bias", torch.zeros(32, dtype=torch.int64), "has norm.bias as torch.int64"),
        ("norm.bias", torch.zeros(32, dtype=torch.complex64), "has norm.bias as torch.complex64"),
        ("norm.bias", torch.zeros(32, device="meta"), "has norm.bias as .* on meta"),
        ("patch_embed.proj.weight", torch.zeros(32, 3, 0, 0), "its patch_embed.proj.weight is empty"),
        ("se.layer1.weight", torch.zeros(0, 17), "its se.layer1.weight is empty"),
        ("se.layer1.weight", torch.zeros(20, 17), "a hidden width of 20, above the 17 tokens"),
    ],
)
def test_tensors_that_no_uvit_has(key, tensor, message, tmp_path, capsys):
    save_reference(tmp_path / "in.pth")
    torch.save(torch.load(tmp_path / "in.pth") | {key: tensor}, tmp_path / "in.pth")
    code, output = run(capsys, tmp_path / "in.pth", tmp_path / "out", *TOLD, "--skip_scaling", "ls")
    assert code == 2
    assert re.search(message, output)
    assert os.listdir(tmp_path) == ["in.pth"]


def test_what_the_gates_tell_need_not_be_said_beside_what_they_do_not(tmp_path, capsys):
    save_reference(tmp_path / "in.pth", skip_scaling={"method": "ls", "reduction": 4, "activation": "mish"})
    flags = ["--skip_scaling", "ls", "--skip_scaling_activation", "mish"]
    assert run(capsys, tmp_path / "in.pth", tmp_path / "out", *TOLD, *flags)[0] == 0
    assert UViTModel.from_pretrained(tmp_path / "out").skip_scaler.config == SkipScalingConfig(
        "ls", reduction=4, activation="mish", gate_axis="tokens"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--skip_scaling", "cs", "--kappa", "auto"], "--skip_scaling cs needs the --kappa that .* as a number"),
        (["--skip_scaling", "learnable"], "'learnable' is not for .* the reference has no such method"),
    ],
)
def test_scaling_that_a_reference_can_not_have_had(flags, message, tmp_path, capsys):
    save_reference(tmp_path / "in.pth")
    code, output = run(capsys, tmp_path / "in.pth", tmp_path / "out", *TOLD, *flags)
    assert code == 2
    assert re.search(message, output)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("diffusion_pytorch_model.safetensors", b"", "the weights of .* are damaged"),
        ("diffusion_pytorch_model.safetensors.index.json", b"{}", "the weights of .* are damaged: KeyError"),
        ("config.json", b"{}", "is of the class None, and only a UViTModel can be converted"),
    ],
)
def test_a_damaged_folder(file, content, message, tmp_path, capsys):
    UViTModel(**TINY).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / file).write_bytes(content)
    code, output = run(capsys, tmp_path / "model", tmp_path / "out.pth")
    assert code == 2
    assert re.search(message, output)
    assert os.listdir(tmp_path) == ["model"]


def test_a_pth_is_not_written_over_a_folder(tmp_path, capsys):
    UViTModel(**TINY).save_pretrained(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    assert run(capsys, tmp_path / "model", tmp_path / "empty") == (
        2, f"scalelong: {tmp_path / 'empty'} is already there and is not overwritten\n"
    )  # fmt: skip
    code, output = run(capsys, tmp_path / "model", f"{tmp_path}/new/")
    assert (code, "is the name of a folder, and a .pth is a file" in output) == (2, True)


def test_nothing_is_overwritten(tmp_path, capsys):
    save_reference(tmp_path / "in.pth")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").touch()
    code, output = run(capsys, tmp_path / "in.pth", out, *TOLD, "--skip_scaling", "none")
    assert code == 2
    assert "is already there" in output
    assert os.listdir(out) == ["mine"]


@pytest.mark.parametrize("target_is_there", [False, True])
def test_a_write_that_fails_leaves_nothing(target_is_there, tmp_path, monkeypatch):
    def fill_the_disk(self, folder):
        os.makedirs(folder)
        open(os.path.join(folder, "config.json"), "w").close()
        raise OSError("No space left on device")

    save_reference(tmp_path / "in.pth")
    if target_is_there:
        (tmp_path / "out").mkdir()
    monkeypatch.setattr(UViTModel, "save_pretrained", fill_the_disk)
    untold = CheckpointDetails(4, "discrete", {"method": "none"})
    with pytest.raises(OSError, match="No space left"):
        convert_from_reference(str(tmp_path / "in.pth"), str(tmp_path / "out"), untold)
    assert sorted(os.listdir(tmp_path)) == (["in.pth", "out"] if target_is_there else ["in.pth"])
    assert not target_is_there or os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sample_size": (8, 16)}, "images are square"),
        ({"out_channels": 6}, "out_channels=6"),
        ({"block_scale": "rezero"}, "block_scale='rezero'"),
        ({"num_class_embeds": 3, "cross_attention_dim": 8}, "classes and text"),
        ({"skip_scaling": "learnable"}, "'learnable'"),
        ({"skip_scaling": {"method": "ls", "gate": "ie"}}, "gate='ie'"),
        ({"skip_scaling": {"method": "ls", "gate_axis": "channels"}}, "gate_axis='channels'"),
        ({"skip_scaling": {"method": "ls", "init": "identity"}}, "init='identity'"),
        ({"skip_scaling": {"method": "cs", "strength": 0.5}}, "strength=0.5"),
    ],
)
def test_what_the_reference_can_not_express_is_not_written(config, message, tmp_path):
    UViTModel(**{**TINY, **config}).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        convert_to_reference(str(tmp_path / "model"), str(tmp_path / "again.pth"))
    assert os.listdir(tmp_path) == ["model"]


def test_a_folder_is_written_without_flags_and_only_of_a_uvit(tmp_path, capsys):
    UViTModel(**TINY).save_pretrained(tmp_path / "model")
    code, output = run(capsys, tmp_path / "model", tmp_path / "again.pth", "--timesteps", "discrete")
    assert code == 2
    assert "--timesteps is for reading a .pth" in output
    unet = UNet2DModel(
        sample_size=8, block_out_channels=(32,), down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",)
    )
    unet.save_pretrained(tmp_path / "unet")
    code, output = run(capsys, tmp_path / "unet", tmp_path / "again.pth")
    assert code == 2
    assert "is of the class UNet2DModel" in output
    assert not (tmp_path / "again.pth").exists()
