"""The tab that trains a small model on the built-in shapes, with the training script in its own process."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from scalelong_diffusers.app.events import follow, shows_errors
from scalelong_diffusers.app.jobs import Job
from scalelong_diffusers.app.markup import curves_html, picture_html
from scalelong_diffusers.data import SHAPE_CLASSES
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.experiments.trainings import read_log
from scalelong_diffusers.image_files import read_image
from scalelong_diffusers.training.config import TrainingConfig, make_config


if TYPE_CHECKING:
    from scalelong_diffusers.app.app import App

_SCRIPT = "scalelong_diffusers.train.train_class_conditional"
_SIZE = 16
_FLAGS = {
    "model_type": "tiny",
    "resolution": _SIZE,
    "logging_steps": 5,
    "checkpoints_total_limit": 1,
    "num_samples": len(SHAPE_CLASSES),
}
_LOOKS = 20  # at the validation loss and the samples
_NOTE = (
    "A small U-ViT learns to draw the built-in shapes in {size} x {size} pixels. docs/train_on_your_images.md shows "
    "how to train on your own images."
)


def train_tab(app: "App"):
    """Build the tab."""
    job = app.training
    gr.Markdown(_NOTE.format(size=_SIZE))
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            inputs = _inputs()
            with gr.Row():
                start = gr.Button("Start", variant="primary", min_width=80)
                stop = gr.Button("Stop", variant="stop", min_width=80)
        with gr.Column(scale=5, min_width=300):
            state = gr.Textbox(label="State", interactive=False)
            results = gr.HTML(apply_default_css=False)

    @shows_errors
    def start_training(*values):
        _start(job, dict(zip(inputs, values)))

    @shows_errors
    def watch():
        yield from follow(job, _results)

    followed = {"fn": watch, "outputs": [state, results], "show_progress": "hidden", "concurrency_limit": None}
    start.click(start_training, [*inputs.values()]).success(**followed)
    stop.click(job.stop, show_progress="hidden")
    app.page.load(**followed)


def _inputs() -> dict[str, Any]:
    return {
        "max_train_steps": gr.Number(2000, precision=0, minimum=1, label="Steps"),
        "learning_rate": gr.Number(4e-3, label="Learning rate"),
        "skip_scaling": gr.Dropdown(["cs", "ls", "none"], value="cs", label="Skip scaling"),
        "kappa": gr.Slider(0.05, 1, 0.7, step=0.01, label="Kappa", info="for cs"),
        "output_dir": gr.Textbox("runs/app", label="Output folder", info="an interrupted run is resumed"),
    }


def _start(job: Job, chosen: Mapping[str, Any]):
    """Start the training, or resume it if its folder has a checkpoint."""
    folder, steps = Path(chosen["output_dir"]), chosen["max_train_steps"]
    if steps is None:
        raise UserError("enter a number of steps")
    every = max(1, steps // _LOOKS)
    flags = {
        **_FLAGS,
        **chosen,
        "kappa": chosen["kappa"] if chosen["skip_scaling"] == "cs" else None,
        "validation_steps": every,
        "sample_steps": every,
        "checkpointing_steps": every,
        "resume_from_checkpoint": "latest" if any(folder.glob("checkpoint-*")) else None,
    }
    make_config(TrainingConfig, **flags)  # reports wrong values before the slow start of the process
    job.start(_SCRIPT, [], flags, output=folder)


def _results(folder: Path) -> str:
    """Return the curves and the newest samples of a run."""
    log = read_log(folder)
    curves = {
        label: [(line["step"], line[name]) for line in log if line.get(name) is not None]
        for label, name in (("validation", "validation_loss"), ("training", "loss"))
    }
    samples = sorted((folder / "samples").glob("step-*.png"))
    pictures = "" if not samples else picture_html(read_image(samples[-1], samples[-1].name), samples[-1].stem)
    return curves_html(curves, "loss") + pictures
