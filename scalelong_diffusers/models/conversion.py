"""
Convert the `.pth` checkpoints that U-ViT and ScaleLong publish to `UViTModel`.

Both formats hold the same tensors, except that the reference keeps queries, keys and values in one matrix, and the two
halves of a decoder block's skip layer in another. Settings that the weights do not contain must be passed; nothing is
guessed.
"""

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

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.models.uvit import TIMESTEP_CONVENTIONS, UViTModel
from scalelong_diffusers.scaling import SkipScalingConfig


StateDict = dict[str, torch.Tensor]

# (our name, the reference's name). The names of gates are in `_reference_key`.
_RENAMED = (
    ("patch_embed.", "patch_embed.proj."),
    ("class_embed.", "label_emb."),
    (".attn.to_out.0.", ".attn.proj."),
    (".hidden_proj.bias", ".skip_linear.bias"),
    ("proj_out.", "decoder_pred."),
    ("conv_out.", "final_layer."),
)
# Groups of our tensors that the reference stores as one tensor, and the dimension of the concatenation.
_JOINED = (
    ((".attn.to_q.weight", ".attn.to_k.weight", ".attn.to_v.weight"), ".attn.qkv.weight", 0),
    ((".hidden_proj.weight", ".skip_proj.weight"), ".skip_linear.weight", 1),
)
_REFERENCE_METHODS = ("none", "inv_sqrt2", "constant", "cs", "ls")
_GATE_LAYERS = {"squeeze": "layer1", "excite": "layer2"}
# The tensors that determine the architecture: number of dimensions, and whether every U-ViT has the tensor.
_ARCHITECTURE_TENSORS = {
    "patch_embed.proj.weight": (4, True),
    "pos_embed": (3, True),
    "in_blocks.0.mlp.fc1.weight": (2, True),
    "decoder_pred.weight": (2, True),
    "label_emb.weight": (2, False),
    "context_embed.weight": (2, False),
    "se.layer1.weight": (2, False),
    "se.0.layer1.weight": (2, False),
}
# Exceptions that torch's restricted unpickler raises for invalid files.
_LOAD_ERRORS = (
    pickle.UnpicklingError,
    struct.error,
    AssertionError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class CheckpointDetails:
    """
    Settings of a model that the weights in a checkpoint do not contain.

    Args:
        num_attention_heads: number of heads in each block.
        timesteps: timesteps of the network: `"continuous"`, t * 999 with t in (0, 1], or `"discrete"`, 1 .. 1000.
        skip_scaling: a method and its fields as a dict. Required for a checkpoint without gates, because constant
            factors leave no trace in the weights. If the checkpoint has gates, their shapes determine some fields,
            which can be omitted.
        context_length: number of text tokens of a text-to-image model.
    """

    num_attention_heads: int | None = None
    timesteps: str | None = None
    skip_scaling: Mapping[str, Any] | None = None
    context_length: int | None = None


def convert_from_reference(source: str, target: str, details: CheckpointDetails) -> UViTModel:
    """Convert a `.pth` file, or `nnet_ema.pth` in a training folder, to a `UViTModel` in the folder `target`."""
    if os.path.lexists(target) and not (os.path.isdir(target) and not os.listdir(target)):
        raise UserError(f"{target} already exists and is not overwritten")
    model = model_from_reference(load_reference(source), details, source)
    parent = os.path.dirname(os.path.abspath(target))
    try:
        os.makedirs(parent, exist_ok=True)
        # Written to a folder on the same disk and renamed, so that a failed write leaves nothing.
        with tempfile.TemporaryDirectory(dir=parent, prefix=".") as folder:
            partial = os.path.join(folder, "model")
            model.save_pretrained(partial)
            os.rename(partial, target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error}") from error
    return model


def load_reference(source: str) -> StateDict:
    """Load the tensors of a `.pth` file, or of `nnet_ema.pth` in a training folder. Nothing else is unpickled."""
    path = os.path.join(source, "nnet_ema.pth") if os.path.isdir(source) else source
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)  # rejected below
            state = torch.load(path, map_location="cpu", weights_only=True)
    except _LOAD_ERRORS as error:
        damage = "it is damaged or holds more than tensors, which is rejected because a pickle can run code"
        raise UserError(f"cannot read {path}: {error if isinstance(error, OSError) else damage}") from error
    for key, value in (state if isinstance(state, Mapping) else {type(state).__name__: state}).items():
        is_tensor = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta
        if not isinstance(key, str) or not is_tensor or not value.is_floating_point():
            kind = f"{value.dtype} on {value.device}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise UserError(f"{path} is not a state dict of dense floating-point tensors: it holds {key!r}, {kind}")
    return dict(state)


def model_from_reference(state: StateDict, details: CheckpointDetails, source: str) -> UViTModel:
    """Build the model with the weights `state`. Errors name `source`."""
    config = _architecture(state, details, source)
    with torch.device("meta"):
        model = UViTModel(**config)
    _check_matches(state, to_reference(model.state_dict(), len(model.out_blocks)), source)
    model.load_state_dict(_from_reference(state, model), assign=True)
    return model


def to_reference(state: StateDict, num_skips: int) -> StateDict:
    """Return the weights of a `UViTModel` with the reference's names and layout."""
    parts: dict[tuple[str, int], list[torch.Tensor]] = {}
    for key, tensor in state.items():
        name, dim, *_ = _place(key, num_skips)
        parts.setdefault((name, dim), []).append(tensor)
    return {
        name: torch.cat(tensors, dim) if len(tensors) > 1 else tensors[0] for (name, dim), tensors in parts.items()
    }


def _from_reference(state: StateDict, model: UViTModel) -> StateDict:
    """Invert `to_reference` for a state that matches the model."""
    result = {}
    for key in model.state_dict():
        name, dim, number, count = _place(key, len(model.out_blocks))
        result[key] = state[name].chunk(count, dim)[number].contiguous() if count > 1 else state[name]
    return result


def _place(key: str, num_skips: int) -> tuple[str, int, int, int]:
    """Return the reference's name, the dimension of concatenation, the number of our part, and the number of parts."""
    for endings, name, dim in _JOINED:
        for number, ending in enumerate(endings):
            if key.endswith(ending):
                return key.removesuffix(ending) + name, dim, number, len(endings)
    return _reference_key(key, num_skips), 0, 0, 1


def _reference_key(key: str, num_skips: int) -> str:
    if gate := re.fullmatch(r"skip_scaler\.gates\.(width|skip)_(\d+)\.(squeeze|excite)\.(.*)", key):
        kind, number, layer, name = gate.groups()
        # The reference numbers its gates from the middle block, the paper from the outermost skip.
        place = "" if kind == "width" else f"{num_skips - int(number)}."
        return f"se.{place}{_GATE_LAYERS[layer]}.{name}"
    for ours, theirs in _RENAMED:
        if key.startswith(ours) or (ours.startswith(".") and ours in key):
            return key.replace(ours, theirs)
    return key


def _architecture(state: StateDict, details: CheckpointDetails, source: str) -> dict[str, Any]:
    """Return the model's config, from the shapes of the weights and the given details."""
    for key, (ndim, is_required) in _ARCHITECTURE_TENSORS.items():
        shape = tuple(state[key].shape) if key in state else None
        if (shape is None and is_required) or (shape is not None and (len(shape) != ndim or 0 in shape)):
            names = f"{len(state)} tensors ({', '.join(list(state)[:3])}, ...)"
            raise UserError(f"{source} is not a U-ViT: it needs a non-empty {ndim}-D {key}, got {shape} among {names}")
    hidden_size, in_channels, patch_size, _ = state["patch_embed.proj.weight"].shape
    text = state.get("context_embed.weight")
    labels = state.get("label_emb.weight")
    gates = _gates(state)
    _check_details(details, gates, text is not None, source)
    context_length = 0 if text is None else details.context_length
    num_patches = state["pos_embed"].shape[1] - 1 - (labels is not None) - context_length
    return {
        "sample_size": math.isqrt(max(num_patches, 1)) * patch_size,  # images are square
        "patch_size": patch_size,
        "in_channels": in_channels,
        "out_channels": state["decoder_pred.weight"].shape[0] // patch_size**2,
        "hidden_size": hidden_size,
        "num_layers": 2 * len({key.split(".")[1] for key in state if key.startswith("in_blocks.")}),
        "num_attention_heads": details.num_attention_heads,
        "mlp_ratio": state["in_blocks.0.mlp.fc1.weight"].shape[0] / hidden_size,
        "num_class_embeds": None if labels is None else labels.shape[0],
        **({} if text is None else {"cross_attention_dim": text.shape[1], "context_length": context_length}),
        "final_conv": "final_layer.weight" in state,
        **TIMESTEP_CONVENTIONS[details.timesteps],
        # Given fields override those that the shapes of the gates suggest.
        "skip_scaling": SkipScalingConfig.parse({**(gates or {}), **(details.skip_scaling or {})}),
    }


def _gates(state: StateDict) -> dict[str, Any] | None:
    """Return the fields of the skip scaling that the gates determine, or None for a checkpoint without gates."""
    is_shared = "se.layer1.weight" in state
    first = state.get("se.layer1.weight" if is_shared else "se.0.layer1.weight")
    if first is None:
        return None
    hidden, width = first.shape
    # Several reductions can give the same gate. The paper's is preferred.
    reduction = 16 if width // 16 == hidden else width // hidden
    return {"method": "ls", "shared": is_shared, "init": "paper", "reduction": reduction}


def _check_details(details: CheckpointDetails, gates: Mapping[str, Any] | None, has_text: bool, source: str):
    """Check that the details are complete and do not contradict the weights."""
    given = details.skip_scaling or {}
    needed = {
        "--num_attention_heads N": details.num_attention_heads is None,
        f"--timesteps {{{','.join(TIMESTEP_CONVENTIONS)}}}": details.timesteps is None,
        "--skip_scaling METHOD ('none' for a plain U-ViT)": not given and gates is None,
        "--context_length N": has_text and details.context_length is None,
    }
    if missing := [flag for flag, is_missing in needed.items() if is_missing]:
        raise UserError(f"{source}: the weights do not contain all settings: pass {', '.join(missing)}")
    if details.context_length is not None and not has_text:
        raise UserError(f"{source} is not a text-to-image model: leave out context_length={details.context_length}")
    method = given.get("method")
    if method not in (None, *_REFERENCE_METHODS):
        accepted = ", ".join(_REFERENCE_METHODS)
        raise UserError(f"{source}: skip_scaling={method!r} does not exist in the reference; accepted: {accepted}")
    if method in ("cs", "constant") and given.get("kappa", "auto") == "auto":
        raise UserError(f"{source}: --skip_scaling {method} needs the --kappa of the training, as a number")
    if gates and method not in (None, "ls"):
        raise UserError(f"{source}: skip_scaling={method!r} contradicts its gates, which belong to method 'ls'")


def _check_matches(given: StateDict, expected: StateDict, source: str):
    """Raise a `UserError` that names each key and shape that differs from the model."""
    faults = [f"{key} is missing" for key in expected if key not in given]
    faults += [f"{key} {tuple(tensor.shape)} is unexpected" for key, tensor in given.items() if key not in expected]
    faults += [
        f"{key} is {tuple(given[key].shape)} instead of {tuple(tensor.shape)}"
        for key, tensor in expected.items()
        if key in given and given[key].shape != tensor.shape
    ]
    if faults:
        raise UserError(f"{source} does not match a U-ViT of its shapes: {'; '.join(faults)}")
