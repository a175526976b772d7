"""The wheel is complete, and importing the package is cheap."""

import ast
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from doc_blocks import runnable_blocks

import scalelong_diffusers


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    root, folder = Path(__file__).parent.parent, tmp_path_factory.mktemp("wheel")
    # Build a copy without hidden folders and earlier builds, since building leaves files behind.
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "runs")
    source = shutil.copytree(root, folder / "source", ignore=ignored)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        source,
    ]
    subprocess.run(build, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


# Folders of the checkout and their places in the wheel.
SOURCES = {
    "scalelong_diffusers": "scalelong_diffusers",
    "pipelines": "scalelong_diffusers/pipelines",
    "train": "scalelong_diffusers/train",
}


def modules_in_the_checkout(root: Path) -> set[str]:
    """Return the paths in the wheel of all modules of the checkout."""
    return {
        f"{packaged}/{file.relative_to(root / folder).as_posix()}"
        for folder, packaged in SOURCES.items()
        for file in (root / folder).rglob("*.py")
    }


@pytest.mark.slow
def test_wheel_contains_every_module_and_nothing_else(wheel, project_root):
    names = set(zipfile.ZipFile(wheel).namelist())
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == modules_in_the_checkout(project_root) | {"scalelong_diffusers/py.typed"}
    (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    assert f"{info}/licenses/LICENSE" in names


@pytest.mark.slow
def test_links_of_the_page_on_pypi_are_absolute(wheel, project_root):
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    page = zipfile.ZipFile(wheel).read(metadata).decode()
    links = re.findall(r'\]\(([^)]+)\)|(?:src|srcset)="([^"]+)"', page)
    assert len(links) > 30
    for link in map("".join, links):
        address, _, _ = link.partition("#")
        assert not address or address.startswith("https://")
        _, is_here, path = address.partition("/scalelong-diffusers/main/")
        if not is_here:
            _, is_here, path = address.partition("/scalelong-diffusers/blob/main/")
        assert not is_here or (project_root / path).exists()


@pytest.mark.slow
def test_wheel_imports_outside_the_checkout(wheel, project_root, in_fresh_process, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    modules = [name[:-3].replace("/", ".") for name in modules_in_the_checkout(project_root)]
    modules = [name.removesuffix(".__init__") for name in modules]
    code = f"""
import importlib, sys
sys.path.insert(0, sys.argv[1])
import scalelong_diffusers
assert scalelong_diffusers.__file__.startswith(sys.argv[1]), scalelong_diffusers.__file__
for name in {modules!r}:
    importlib.import_module(name)
for name in scalelong_diffusers.__all__:
    getattr(scalelong_diffusers, name)
"""
    in_fresh_process(code, tmp_path / "site")


@pytest.mark.slow
def test_installed_wheel_runs_the_code_of_the_readme(wheel, project_root, tmp_path):
    """The new environment shares the dependencies but not the checkout."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    pip = [sys.executable, "-m", "pip", "--python", python, "--quiet"]
    subprocess.run([*pip, "install", "--no-deps", "--ignore-installed", wheel], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(python, "-c", "import scalelong_diffusers; print(scalelong_diffusers.__file__)")
    assert where.startswith(str(tmp_path))
    for block in runnable_blocks(project_root / "README.md"):
        assert run(python, "-c", block.code) == block.printed
    scalelong = python.with_name("scalelong")
    assert run(scalelong, "--version") == f"scalelong-diffusers {scalelong_diffusers.__version__}\n"
    assert "residual start" in run(scalelong, "demo", "--help")


@pytest.mark.slow
def test_import_loads_no_other_library(in_fresh_process):
    code = """
import sys
import torch, diffusers
diffusers.UNet2DModel
before = set(sys.modules)
import scalelong_diffusers
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
print(*sorted(name for name in sys.modules if name.startswith("scalelong_diffusers.")))
"""
    brought, own = in_fresh_process(code).stdout.splitlines()
    assert set(brought.split()) <= {"scalelong_diffusers", "diffusers", *sys.stdlib_module_names}
    assert "scalelong_diffusers.models.unets" not in own


def test_type_checkers_see_all_public_names(project_root):
    tree = ast.parse((project_root / "scalelong_diffusers" / "__init__.py").read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    names = {alias.name for node in checked.body for alias in node.names}
    (imported,) = (n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "scalelong_diffusers.scaling")
    names |= {alias.name for alias in imported.names}
    assert names | {"__version__"} == set(scalelong_diffusers.__all__)
    assert set(scalelong_diffusers.__all__) <= set(dir(scalelong_diffusers))
    with pytest.raises(AttributeError, match="has no attribute 'ScaleLongUNet'"):
        _ = scalelong_diffusers.ScaleLongUNet


def test_diffusers_can_load_our_classes():
    """Pipelines load from the Hub only if this private table of diffusers has an entry for our library."""
    from diffusers.pipelines.pipeline_loading_utils import LOADABLE_CLASSES

    assert LOADABLE_CLASSES["scalelong_diffusers"] == {"ModelMixin": ["save_pretrained", "from_pretrained"]}
    assert issubclass(scalelong_diffusers.ScaleLongUNet2DModel, scalelong_diffusers.ModelMixin)
