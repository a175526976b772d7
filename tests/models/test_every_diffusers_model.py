"""Every model class of the installed diffusers that hands encoder features to a decoder is supported or listed."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import diffusers
import pytest
from diffusers import ModelMixin

from scalelong_diffusers.patching import scaled_class


# Lists that a loop fills and another loop reads, but not with features of an encoder.
OTHER_LISTS = {
    "BriaTransformer2DModel": "hidden_states",  # the text tokens are sliced off
    "ChromaTransformer2DModel": "hidden_states",
    "Cosmos3OmniTransformer": "original_latent_shapes",
    "UNet2DConditionModel": "sample",
    "UniDiffuserTextDecoder": "is_stopped",
    "ZImageControlNetModel": "x",
    "ZImageTransformer2DModel": "x_size, cap_end_pos",
}


def model_classes() -> Iterator[type[ModelMixin]]:
    root = Path(diffusers.__file__).parent
    for file in sorted([*root.glob("models/**/*.py"), *root.glob("pipelines/**/modeling*.py")]):
        parts = ["diffusers", *file.relative_to(root).with_suffix("").parts]
        if "flax" in file.name or "autoencoders" in parts:  # an autoencoder does not denoise
            continue
        module = importlib.import_module(".".join(part for part in parts if part != "__init__"))
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, ModelMixin) and value.__module__ == module.__name__:
                yield value


def lists_between_loops(model_class: type) -> set[str]:
    """Return the lists that a loop of the class fills and a loop reads, as an encoder and a decoder do."""
    filled, read = set(), set()
    for method in ast.parse(textwrap.dedent(inspect.getsource(model_class))).body[0].body:
        if isinstance(method, ast.FunctionDef) and method.name != "__init__":
            for loop in (node for node in ast.walk(method) if isinstance(node, ast.For)):
                filled |= set(_filled(loop))
                read |= set(_read(loop))
    return {name for name in filled & read if not name.startswith("self.")}


def _filled(loop: ast.For) -> Iterator[str]:
    for node in ast.walk(loop):
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="append" | "extend" | "insert")):
                yield ast.unparse(owner)
            case ast.AugAssign(target=target, op=ast.Add()):
                yield ast.unparse(target)
            case ast.Assign(targets=[target], value=ast.BinOp(left=left, op=ast.Add())):
                if ast.unparse(target) == ast.unparse(left):
                    yield ast.unparse(target)


def _read(loop: ast.For) -> Iterator[str]:
    yield from (ast.unparse(node) for node in ast.walk(loop.iter) if isinstance(node, ast.Name))
    for node in ast.walk(loop):
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="pop")):
                yield ast.unparse(owner)
            case ast.Subscript(value=owner, ctx=ast.Load()):
                yield ast.unparse(owner)


@pytest.fixture
def listed(project_root) -> dict[str, str]:
    """The classes of diffusers in docs/skip_scaling.md, and what the page says about them."""
    page = (project_root / "docs" / "skip_scaling.md").read_text()
    section = page.split("## Supported models")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {name: row[-1].strip() for row in rows for name in re.findall(r"`(\w+)`", row[0])}


@pytest.fixture(scope="module")
def classes() -> dict[str, type[ModelMixin]]:
    return {found.__name__: found for found in model_classes()}


def test_scan_finds_the_known_skips(classes):
    found = {
        name: lists_between_loops(classes[name])
        for name in ("UNet2DModel", "HunyuanDiT2DModel", "FluxTransformer2DModel")
    }
    assert found == {
        "UNet2DModel": {"down_block_res_samples"},
        "HunyuanDiT2DModel": {"skips"},
        "FluxTransformer2DModel": set(),
    }


def test_page_lists_every_class_that_hands_features_to_a_decoder(classes, listed):
    assert len(classes) > 100
    found = {name: lists_between_loops(model_class) for name, model_class in classes.items()}
    found = {name: lists - set(OTHER_LISTS.get(name, "").split(", ")) for name, lists in found.items()}
    unknown = {name: lists for name, lists in found.items() if lists and name not in listed}
    assert not unknown, "add a scaled class, or a line to docs/skip_scaling.md that says why not"


def test_page_says_which_classes_are_scaled(classes, listed):
    assert set(listed) - {"UViTModel"} <= set(classes) | {"ConsistencyDecoderVAE"}
    for name, model_class in classes.items():
        assert (scaled_class(model_class) is not None) == listed.get(name, "").startswith("scaled"), name
