"""The notebooks run from top to bottom in a real kernel, with tiny models, and are stored without outputs."""

import base64
import io
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image


FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs a notebook with other parameters and returns its outputs."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # The kernel is this Python, even if another one is registered on the machine.
    kernels = tmp_path / "jupyter" / "kernels" / "python3"
    kernels.mkdir(parents=True)
    command = f'["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"]'
    (kernels / "kernel.json").write_text(f'{{"argv": {command}, "display_name": "Python 3", "language": "python"}}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))

    def execute(name: str, **parameters) -> list:
        notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
        (place,) = [k for k, cell in enumerate(notebook.cells) if "parameters" in tags(cell)]
        known = {line.split(" = ")[0] for line in notebook.cells[place].source.splitlines()}
        assert set(parameters) <= known
        changes = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
        notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(changes))
        notebook.cells = [cell for cell in notebook.cells if "install" not in tags(cell)]
        NotebookClient(notebook, timeout=250, resources={"metadata": {"path": tmp_path}}).execute()
        return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]

    return execute


def tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


def text_of(outputs) -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def images_of(outputs) -> list[Image.Image]:
    found = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    return [Image.open(io.BytesIO(base64.b64decode(data))) for data in found]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_is_stored_without_outputs_and_opens_in_colab(file):
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
    assert [tags(cell) for cell in cells if tags(cell)] == [["install"], ["parameters"]]
    assert cells[0].source.startswith("%pip install -q ")
    assert f"/blob/main/notebooks/{file.name})" in notebook.cells[0].source
    assert file.stat().st_size < 20_000


def test_all_notebooks_are_listed():
    page = (FOLDER / "README.md").read_text()
    assert NOTEBOOKS
    assert all(f"({file.name})" in page for file in NOTEBOOKS)


@pytest.mark.slow
def test_train_on_your_images(run, tmp_path):
    outputs = run("train_on_your_images", resolution=8, width=64, steps=4, batch_size=4, inference_steps=2)
    assert "30 classes" in text_of(outputs)
    assert "SkipScalingConfig(method='cs', kappa=0.7" in text_of(outputs)
    (curve,) = [output.data["image/svg+xml"] for output in outputs if "image/svg+xml" in output.get("data", {})]
    assert curve.count("<polyline") == 2
    samples, strengths = images_of(outputs)
    assert (samples.size, strengths.size) == ((1024, 128), (1024, 384))
    assert (tmp_path / "model" / "model_index.json").exists()


@pytest.mark.slow
def test_fine_tune_stable_diffusion(run, build_kind, tmp_path):
    build_kind("sd1").save_pretrained(tmp_path / "sd")
    outputs = run(
        "fine_tune_stable_diffusion", base_model="sd", steps=2, batch_size=2, inference_steps=2, precision="no"
    )
    assert "same image: True" in text_of(outputs)
    _, both = images_of(outputs)
    assert both.size == (256, 128)  # images of 16 pixels are enlarged
    assert (tmp_path / "adapter").is_dir()


@pytest.mark.slow
def test_rerun_a_figure(run, tmp_path):
    outputs = run("rerun_a_figure")
    assert "### theorem3.1: " in text_of(outputs)
    assert any("image/svg+xml" in output.get("data", {}) for output in outputs)
    last = outputs[-1].data["text/plain"]
    assert "'machine': {" in last
