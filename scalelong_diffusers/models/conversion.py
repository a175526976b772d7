"""
Read the `.pth` checkpoints that U-ViT and ScaleLong publish as a `UViTModel`, and write them again.

What the weights do not tell is asked for and never guessed. The two forms hold the same tensors, except that the
reference keeps queries, keys and values in one matrix, and the two halves of a decoder block's skip layer in another.
"""

import json
import math
import os
import pickle
import re
import struct
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from safetensors.torch import load_file

from scalelong_diffusers.models.uvit import TIMESTEP_CONVENTIONS, UViTModel
from scalelong_diffusers.scaling import SkipScalingConfig


StateDict = dict[str, torch.Tensor]

# (ours, the reference's). The skip gates have an entry for each of their layers, see `_reference_gate_key`.
_RENAMED = (
    ("patch_embed.", "patch_embed.proj."),
    ("class_embed.", "label_emb."),
    (".attn.to_out.0.", ".attn.proj."),
    (".hidden_proj.bias", ".skip_linear.bias"),
    ("proj_out.", "decoder_pred."),
    ("conv_out.", "final_layer."),
)
# Several of ours that are one of the reference's, and the dimension along which they follow each other.
_JOINED = (
    ((".attn.to_q.weight", ".attn.to_k.weight", ".attn.to_v.weight"), ".attn.qkv.weight", 0),
    ((".hidden_proj.weight", ".skip_proj.weight"), ".skip_linear.weight", 1),
)
# What the architecture is read from: its number of dimensions, and whether every U-ViT has it.
_TELLING = {
    "patch_embed.proj.weight": (4, True),
    "pos_embed": (3, True),
    "in_blocks.0.mlp.fc1.weight": (2, True),
    "decoder_pred.weight": (2, True),
    "label_emb.weight": (2, False),
    "context_embed.weight": (2, False),
    "se.layer1.weight": (2, False),
    "se.0.layer1.weight": (2, False),
}
_GATE_LAYERS = {"squeeze": "layer1", "excite": "layer2"}


# What torch's restricted unpickler lets through when it meets bytes that make no sense.
_DAMAGE = (
    pickle.UnpicklingError,
    struct.error,
    AssertionError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class CheckpointDetails:
    """
    What a checkpoint's weights do not tell of its model.

    Args:
        num_attention_heads: heads of a block.
        timesteps: what the network was shown: `"continuous"`, t * 999 with t in (0, 1], or `"discrete"`, 1 .. 1000.
        skip_scaling: a method and its fields, as a dict. Needed where there are no gates, as constant factors leave no
            trace in the weights; where there are, it need not say what their shapes tell.
        context_length: of a text-conditional model: the number of text tokens.
    """

    num_attention_heads: int | None = None
    timesteps: str | None = None
    skip_scaling: Mapping[str, Any] | None = None
    context_length: int | None = None


def convert_from_reference(source: str, target: str, untold: CheckpointDetails) -> UViTModel:
    """Read a `.pth`, or the `nnet_ema.pth` of a training folder, and write the folder `target` of a `UViTModel`."""
    _refuse_existing(target, is_folder=True)
    model = model_from_reference(load_reference(source), untold, source)
    with _beside(target) as folder:
        made = os.path.join(folder, "model")
        model.save_pretrained(made)
        os.rename(made, target)
    return model


def convert_to_reference(source: str, target: str) -> UViTModel:
    """Write the weights of a `UViTModel`'s folder as the `.pth` that the reference's code loads."""
    _refuse_existing(target, is_folder=False)
    model = _load_as_saved(source)
    _check_expressible(model)
    with _beside(target) as folder:
        made = os.path.join(folder, "weights.pth")
        torch.save(to_reference(model.state_dict(), len(model.out_blocks)), made)
        os.rename(made, target)
    return model


def is_model_folder(source: str) -> bool:
    return os.path.isfile(os.path.join(source, UViTModel.config_name))


def load_reference(source: str) -> StateDict:
    """The tensors of a `.pth` file, or of the one in a training folder; nothing else is unpickled."""
    path = os.path.join(source, "nnet_ema.pth") if os.path.isdir(source) else source
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"there is no {path}; accepted: a .pth, a training folder with nnet_ema.pth, or the folder of a UViTModel"
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)  # it is refused below
            state = torch.load(path, map_location="cpu", weights_only=True)
    except _DAMAGE as error:
        raise ValueError(
            f"{path} is not a file of tensors alone, and whatever else a pickle asks for is refused, since it can run "
            "code; a state dict that torch.save wrote is accepted"
        ) from error
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} is no state dict, which maps names to tensors: it holds a {type(state).__name__}")
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise ValueError(f"{path} is no state dict, which maps names to tensors: it has {key!r}")
        if not value.is_floating_point() or value.layout != torch.strided or value.is_meta:
            raise ValueError(
                f"{path} has {key} as {value.dtype}, {value.layout}, on {value.device}: no weight is that"
            )
    return dict(state)


def model_from_reference(state: StateDict, untold: CheckpointDetails, source: str) -> UViTModel:
    """The model whose weights are `state`; `source` is named in errors."""
    config = _architecture(state, untold, source)
    with torch.device("meta"):
        model = UViTModel(**config)
    _check_fits(
        state, to_reference(model.state_dict(), len(model.out_blocks)), source, "the U-ViT that it seems to be"
    )
    model.load_state_dict(_from_reference(state, model), assign=True)
    return model


def to_reference(state: StateDict, num_skips: int) -> StateDict:
    """The reference's names and layout of a `UViTModel`'s weights."""
    joined_with = {part: (parts, name, dim) for parts, name, dim in _JOINED for part in parts}
    result = {}
    for key, tensor in state.items():
        part = next((part for part in joined_with if key.endswith(part)), None)
        if part is None:
            result[_reference_key(key, num_skips)] = tensor
            continue
        parts, name, dim = joined_with[part]
        stem = key.removesuffix(part)
        if stem + name not in result:
            result[stem + name] = torch.cat([state[stem + other] for other in parts], dim)
    return result


def _from_reference(state: StateDict, model: UViTModel) -> StateDict:
    """The inverse of `to_reference`, for a state that is known to fit the model."""
    result = {}
    for key in model.state_dict():
        for parts, name, dim in _JOINED:
            if part := next((part for part in parts if key.endswith(part)), None):
                tensors = state[key.removesuffix(part) + name].chunk(len(parts), dim)
                result[key] = tensors[parts.index(part)].contiguous()
        if key not in result:
            result[key] = state[_reference_key(key, len(model.out_blocks))]
    return result


def _reference_key(key: str, num_skips: int) -> str:
    if gate := re.fullmatch(r"skip_scaler\.gates\.(width|skip)_(\d+)\.(squeeze|excite)\.(.*)", key):
        kind, number, layer, name = gate.groups()
        # The reference counts its gates from the middle block, and the paper from outside.
        place = "" if kind == "width" else f"{num_skips - int(number)}."
        return f"se.{place}{_GATE_LAYERS[layer]}.{name}"
    for ours, theirs in _RENAMED:
        if key.startswith(ours) or (ours.startswith(".") and ours in key):
            return key.replace(ours, theirs)
    return key


def _architecture(state: StateDict, untold: CheckpointDetails, source: str) -> dict:
    """The config that the weights tell, with what they do not."""
    for key, (ndim, is_essential) in _TELLING.items():
        if (key not in state and is_essential) or (key in state and state[key].ndim != ndim):
            what = f"a {state[key].ndim}-D" if key in state else "no"
            some = ", ".join(map(str, list(state)[:3]))
            raise ValueError(f"{source} is no U-ViT: it has {what} {key} among {len(state)} tensors ({some}, ...)")
        if key in state and 0 in state[key].shape:
            raise ValueError(f"{source} is no U-ViT: its {key} is empty, {tuple(state[key].shape)}")
    hidden_size, in_channels, patch_size, _ = state["patch_embed.proj.weight"].shape
    text = state.get("context_embed.weight")
    labels = state.get("label_emb.weight")
    told_scaling = _gates(state)
    _check_untold(untold, told_scaling, text is not None, source)
    context_length = untold.context_length if text is not None else 0
    num_patches = state["pos_embed"].shape[1] - 1 - (labels is not None) - context_length
    return {
        "sample_size": _side(num_patches, source) * patch_size,
        "patch_size": patch_size,
        "in_channels": in_channels,
        "out_channels": state["decoder_pred.weight"].shape[0] // patch_size**2,
        "hidden_size": hidden_size,
        "num_layers": 2 * len({key.split(".")[1] for key in state if key.startswith("in_blocks.")}),
        "num_attention_heads": untold.num_attention_heads,
        "mlp_ratio": state["in_blocks.0.mlp.fc1.weight"].shape[0] / hidden_size,
        "num_class_embeds": None if labels is None else labels.shape[0],
        **({} if text is None else {"cross_attention_dim": text.shape[1], "context_length": context_length}),
        "final_conv": "final_layer.weight" in state,
        **TIMESTEP_CONVENTIONS[untold.timesteps],
        "skip_scaling": _scaling(untold.skip_scaling, told_scaling),
    }


def _scaling(asked: Mapping[str, Any] | None, told: Mapping[str, Any] | None) -> SkipScalingConfig:
    """What the shapes of the gates tell goes before defaults, and what was asked for before both."""
    return SkipScalingConfig.parse({**(told or {}), **(asked or {})})


def _gates(state: StateDict) -> dict[str, Any] | None:
    """What a checkpoint with gates tells of its scaling; one without them may have any constant one."""
    shared = "se.layer1.weight" in state
    first = state.get("se.layer1.weight" if shared else "se.0.layer1.weight")
    if first is None:
        return None
    hidden, width = first.shape
    if hidden > width:
        raise ValueError(f"the gates have a hidden width of {hidden}, above the {width} tokens that they pool")
    # Several reductions can give the same gate; the paper's is named where it is one of them.
    return {"method": "ls", "shared": shared, "reduction": 16 if width // 16 == hidden else width // hidden}


def _check_untold(untold: CheckpointDetails, told_scaling: Mapping[str, Any] | None, has_text: bool, source: str):
    needed = {
        "--num_attention_heads N": untold.num_attention_heads is None,
        f"--timesteps {{{','.join(TIMESTEP_CONVENTIONS)}}}": untold.timesteps is None,
        "--skip_scaling METHOD ('none' for a plain U-ViT)": untold.skip_scaling is None and told_scaling is None,
        "--context_length N": has_text and untold.context_length is None,
    }
    if lacking := [flag for flag, is_lacking in needed.items() if is_lacking]:
        raise ValueError(f"the weights of {source} do not tell all of the model: give {', '.join(lacking)}")
    if untold.context_length is not None and not has_text:
        raise ValueError(f"context_length={untold.context_length} was given, but {source} is a model without text")
    asked = untold.skip_scaling or {}
    if asked.get("method") == "learnable":
        raise ValueError(f"skip_scaling='learnable' is not for {source}: the reference has no such method")
    if asked.get("method") in ("cs", "constant") and asked.get("kappa", "auto") == "auto":
        raise ValueError(
            f"--skip_scaling {asked['method']} needs the --kappa that {source} was trained with, as a number"
        )
    if told_scaling and asked.get("method", "ls") != "ls":
        raise ValueError(f"{source} has the gates of the method 'ls', which skip_scaling={asked['method']!r} has not")


def _side(num_patches: int, source: str) -> int:
    """The reference's images are square."""
    side = math.isqrt(max(num_patches, 0))
    if not side or side * side != num_patches:
        raise ValueError(
            f"the position embeddings of {source} leave {num_patches} tokens for the patches, which is no square; if "
            "it has text, its --context_length is another"
        )
    return side


def _check_fits(given: StateDict, expected: StateDict, source: str, what: str):
    """Name each key and shape that does not fit."""
    faults = [f"{key} is missing" for key in expected if key not in given]
    faults += [f"{key} {tuple(tensor.shape)} has no place" for key, tensor in given.items() if key not in expected]
    faults += [
        f"{key} is {tuple(given[key].shape)} instead of {tuple(tensor.shape)}"
        for key, tensor in expected.items()
        if key in given and given[key].shape != tensor.shape
    ]
    if faults:
        raise ValueError(f"{source} does not fit {what}: {'; '.join(faults)}")


def _load_as_saved(folder: str) -> UViTModel:
    """The model of a folder in the dtypes of its file, where `from_pretrained` would give it one for all weights."""
    config = UViTModel.load_config(folder)
    if config.get("_class_name") != UViTModel.__name__:
        raise ValueError(
            f"{folder} is of the class {config.get('_class_name')}, and only a {UViTModel.__name__} can be converted"
        )
    try:
        state = _load_weights(folder)
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"the weights of {folder} are damaged: {error!r}") from error
    with torch.device("meta"):
        model = UViTModel.from_config(config)
    _check_fits(state, model.state_dict(), folder, "its own config")
    model.load_state_dict(state, assign=True)
    return model


def _load_weights(folder: str) -> StateDict:
    index = os.path.join(folder, SAFE_WEIGHTS_INDEX_NAME)
    files = {SAFETENSORS_WEIGHTS_NAME}
    if os.path.isfile(index):
        with open(index) as file:
            files = set(json.load(file)["weight_map"].values())
    state = {}
    for file in files:
        state.update(load_file(os.path.join(folder, file)))
    return state


def _check_expressible(model: UViTModel):
    """The reference has no way to say some of what a `UViTModel` can be."""
    config, scaling = model.config, model.skip_scaler.config
    faults = {
        f"sample_size={config.sample_size}, its images are square": model.grid[0] != model.grid[1],
        f"out_channels={config.out_channels}, it has those of the input": config.out_channels
        not in (None, config.in_channels),
        f"block_scale={config.block_scale!r}": config.block_scale != 1,
        "classes and text in one model": bool(config.num_class_embeds and config.cross_attention_dim),
        "skip scaling 'learnable'": scaling.method == "learnable",
        f"gate={scaling.gate!r}": scaling.gate == "ie",
        f"gate_axis={scaling.gate_axis!r}": scaling.gate_axis == "channels",
        f"init={scaling.init!r}, whose gates are 2 sigmoid(z)": scaling.init == "identity",
        f"strength={scaling.strength}": scaling.strength not in (None, 1.0),
    }
    if named := [fault for fault, is_there in faults.items() if is_there]:
        raise ValueError(f"the reference's U-ViT has no {'; no '.join(named)}")


def _refuse_existing(target: str, is_folder: bool):
    may_be_there = is_folder and os.path.isdir(target) and not os.listdir(target)
    if os.path.lexists(target) and not may_be_there:
        raise ValueError(f"{target} is already there and is not overwritten")
    if not is_folder and target.endswith(os.sep):
        raise ValueError(f"{target} is the name of a folder, and a .pth is a file")


def _beside(target: str) -> tempfile.TemporaryDirectory:
    """A folder on the same disk, so that what is finished in it can be moved to `target` at once."""
    parent = os.path.dirname(os.path.abspath(target))
    os.makedirs(parent, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=parent, prefix=".")
