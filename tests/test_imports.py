"""Imports point one way: a module imports only from its own layer and the layers below."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
# From bottom to top. A name is a module or a folder of modules.
LAYERS = [
    {
        *("options", "errors", "files", "locks", "randomness", "processes", "internals", "download", "image_files"),
        *("terminal", "memory", "noise", "charts"),
    },
    {"scaling"},
    {"models"},
    {"patching"},
    {"skip_cache"},
    {"presets"},
    {"pipelines"},
    {"hub"},
    {"data"},
    {"evaluation"},
    {"diagnosis"},
    {"training"},
    {"experiments"},
    {"paper"},
    {"app"},
    {"train", "cli"},
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
FOLDERS = {
    "scalelong_diffusers": ROOT / "scalelong_diffusers",
    "scalelong_diffusers.pipelines": ROOT / "pipelines",
    "scalelong_diffusers.train": ROOT / "train",
}
# These modules look up names in the lazy top level when they are called, for example `push_to_hub` for its method.
USE_TOP_LEVEL = {"models.mixin", "pipelines.loading"}
# Optional or heavy packages, and modules that import them, which are imported only where they are used.
IMPORTED_IN_FUNCTIONS = (
    "bitsandbytes",
    "diffusers.models",
    "datasets",
    "huggingface_hub",
    "peft",
    "torch_fidelity",
    "torchmetrics",
    "transformers",
    "scalelong_diffusers.data.shards",
    "scalelong_diffusers.data.tables",
)


def modules() -> Iterator[tuple[str, ast.Module]]:
    for package, folder in FOLDERS.items():
        for file in sorted(folder.rglob("*.py")):
            parts = [package, *file.relative_to(folder).with_suffix("").parts]
            name = ".".join(part for part in parts if part != "__init__")
            if name != "scalelong_diffusers":  # the lazy top level names all public modules
                yield name, ast.parse(file.read_text())


MODULES = dict(modules())


def imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: imports are absolute"
            # `from package import module` imports the module, so all names count.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(name: str) -> str | None:
    """Return the layer of a module of the package, or None for other packages and the lazy top level."""
    parts = name.split(".")
    return parts[1] if parts[0] == "scalelong_diffusers" and len(parts) > 1 and parts[1] in LAYER else None


def wrong_imports(name: str, tree: ast.Module) -> list[str]:
    """Return the imports of a module that point up. The lazy top level is above all but scripts and commands."""
    own = layer_of(name)
    uses_top_level = own in LAYERS[-1] or name.removeprefix("scalelong_diffusers.") in USE_TOP_LEVEL
    found = []
    for imported in imported_names(tree):
        layer = layer_of(imported)
        if imported.split(".")[0] != "scalelong_diffusers" or (layer is None and uses_top_level):
            continue
        if layer is None or LAYER[layer] > LAYER[own] or (layer in LAYERS[-1] and layer != own):
            found.append(imported)
    return found


def imports_in_functions(tree: ast.Module) -> list[str]:
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    names = {name for function in functions for name in imported_names(function)}
    heavy = tuple(f"{name}." for name in IMPORTED_IN_FUNCTIONS)
    return sorted(name for name in names if not f"{name}.".startswith(heavy))


def test_every_module_has_a_layer():
    assert len(MODULES) > 50
    assert [name for name in MODULES if layer_of(name) is None] == []


@pytest.mark.parametrize("layer", sorted(LAYER))
def test_imports_come_from_the_same_or_a_lower_layer(layer):
    found = {name: wrong_imports(name, tree) for name, tree in MODULES.items() if layer_of(name) == layer}
    assert {name: imports for name, imports in found.items() if imports} == {}


def test_modules_import_at_the_top():
    # `internals` imports private modules of other libraries only where it uses them.
    library = {name: tree for name, tree in MODULES.items() if layer_of(name) not in ("cli", "train", "internals")}
    found = {name: imports_in_functions(tree) for name, tree in library.items()}
    assert {name: imports for name, imports in found.items() if imports} == {}


def test_finds_wrong_imports():
    upward = "from scalelong_diffusers.models.unets import X\n\ndef run():\n    import json, datasets\n"
    assert wrong_imports("scalelong_diffusers.scaling.gates", ast.parse(upward)) == [
        "scalelong_diffusers.models.unets.X"
    ]
    assert imports_in_functions(ast.parse(upward)) == ["json"]
    script = ast.parse("from scalelong_diffusers.train import precompute_latents\nfrom scalelong_diffusers import cli")
    assert len(wrong_imports("scalelong_diffusers.training.loop", script)) == 2
    assert wrong_imports("scalelong_diffusers.training.loop", ast.parse(upward)) == []
    assert imports_in_functions(ast.parse("def run():\n    from scalelong_diffusers.data.shards import x")) == []
    top_level = ast.parse("from scalelong_diffusers import UViTModel")
    assert wrong_imports("scalelong_diffusers.models.unets", top_level)
    assert wrong_imports("scalelong_diffusers.train.train_unconditional", top_level) == []
