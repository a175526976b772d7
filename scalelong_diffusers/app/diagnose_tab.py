"""The tab that runs `scalelong diagnose` in its own process and shows its page."""

from pathlib import Path
from typing import TYPE_CHECKING

import gradio as gr

from scalelong_diffusers.app.events import follow, shows_errors
from scalelong_diffusers.app.markup import page_html
from scalelong_diffusers.errors import UserError


if TYPE_CHECKING:
    from scalelong_diffusers.app.app import App

_COMMAND = "scalelong_diffusers.cli"
_PAGE = "index.html"


def diagnose_tab(app: "App"):
    """Build the tab."""
    job = app.diagnosis
    with gr.Row():
        model = gr.Textbox(label="Model", info="all that `scalelong diagnose` takes", scale=5)
        num_images = gr.Slider(8, 64, 16, step=1, label="Images", scale=2, min_width=160)
        start = gr.Button("Diagnose", variant="primary", scale=1, min_width=80)
        stop = gr.Button("Stop", variant="stop", scale=1, min_width=80)
    state = gr.Textbox(label="State", interactive=False)
    report = gr.HTML(apply_default_css=False)

    @shows_errors
    def start_diagnosis(source: str, count: int):
        if not source.strip():
            raise UserError("enter a model: a folder, an id on the Hub, a config.json or a preset")
        folder = job.folder / "diagnosis"
        (folder / _PAGE).unlink(missing_ok=True)
        flags = {"num_images": count, "output_dir": folder, "device": app.device}
        job.start(_COMMAND, ["diagnose", source.strip()], flags, output=folder)

    @shows_errors
    def watch():
        yield from follow(job, _report)

    def own_model() -> str:
        return "" if app.comparison is None else app.comparison.source

    followed = {"fn": watch, "outputs": [state, report], "show_progress": "hidden", "concurrency_limit": None}
    start.click(start_diagnosis, [model, num_images]).success(**followed)
    stop.click(job.stop, show_progress="hidden")
    app.page.load(own_model, outputs=model).then(**followed)


def _report(folder: Path) -> str:
    """Return the finished page."""
    file = folder / _PAGE
    return page_html(file.read_text(encoding="utf-8"), "Diagnosis") if file.is_file() else ""
