"""The tab that samples a model with and without skip scaling, and changes the scaling with sliders."""

import html
from typing import TYPE_CHECKING, Any

import gradio as gr

from scalelong_diffusers.app.comparison import Comparison
from scalelong_diffusers.app.events import shows_errors
from scalelong_diffusers.app.markup import pair_html, skips_html
from scalelong_diffusers.pipelines.sampling import SampleConfig
from scalelong_diffusers.scaling import SkipScalingConfig


if TYPE_CHECKING:
    from scalelong_diffusers.app.app import App

_MAX_IMAGES, _MAX_STEPS = 64, 250
_OWN_SCHEDULER = ("the model's own", "")
_PROGRESS = gr.Progress()  # as a default argument, it tells gradio to show the progress
_HINT = "<p>Press Sample. Then move the sliders: the noise stays the same.</p>"


def sample_tab(app: "App"):
    """Build the tab."""
    with gr.Row(visible=not app.is_public):
        model = gr.Textbox(label="Model", info="a pipeline folder, or an id on the Hub", scale=5)
        load = gr.Button("Load", scale=1, min_width=80)
    about = gr.HTML(apply_default_css=False)
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            conditions = _condition_inputs()
            settings = _setting_inputs()
            start = gr.Button("Sample", variant="primary")
        with gr.Column(scale=5, min_width=300):
            sliders = _scaling_inputs()
            pictures = gr.HTML("<p>Load a model first.</p>", apply_default_css=False)
            with gr.Accordion("Long skips and their factors"):
                skips = gr.HTML(apply_default_css=False)
    inputs = {**conditions, **settings, **sliders}

    @shows_errors
    def draw(*values, progress=_PROGRESS):
        return _draw(app.loaded, dict(zip(inputs, values)), progress)

    @shows_errors
    def show():
        return _model_values(app.comparison)

    @shows_errors
    def load_model(source: str):
        app.load(source)
        return _model_values(app.comparison)

    @shows_errors
    def show_kappa(method: str):
        return gr.update(interactive=app.loaded.scaling(method, 1.0, 1.0).kappa is not None)

    everything = [model, about, pictures, skips, *conditions.values(), settings["scheduler"], *sliders.values()]
    app.page.load(show, outputs=everything)
    if not app.is_public:  # what is hidden could still be called
        gr.on([load.click, model.submit], load_model, model, everything)
    sliders["method"].input(show_kappa, sliders["method"], sliders["kappa"])
    start.click(draw, [*inputs.values()], [pictures, skips])
    # While images are being made, only the last change waits for its turn.
    changes = [slider.input for slider in sliders.values()]
    gr.on(changes, draw, [*inputs.values()], [pictures, skips], trigger_mode="always_last", show_progress="hidden")


def _condition_inputs() -> dict[str, Any]:
    """Return inputs that depend on the model, which are hidden until one is loaded."""
    return {
        "class_labels": gr.Dropdown(
            [], multiselect=True, label="Classes", info="used in turn; none selected: all classes", visible=False
        ),
        "prompt": gr.Textbox(label="Prompts", info="one per line, used in turn", lines=3, visible=False),
        "negative_prompt": gr.Textbox(label="Negative prompt", visible=False),
        "guidance_scale": gr.Slider(0, 20, 1, step=0.1, label="Guidance", info="1 turns it off", visible=False),
    }


def _setting_inputs() -> dict[str, Any]:
    return {
        "num_images": gr.Slider(1, _MAX_IMAGES, 9, step=1, label="Images"),
        "num_inference_steps": gr.Slider(1, _MAX_STEPS, 25, step=1, label="Steps"),
        "seed": gr.Number(0, precision=0, minimum=0, label="Seed"),
        "scheduler": gr.Dropdown([_OWN_SCHEDULER], value="", label="Scheduler"),
    }


def _scaling_inputs() -> dict[str, Any]:
    with gr.Row():
        return {
            "strength": gr.Slider(0, 1, 1, step=0.01, label="Strength", info="0: no scaling", min_width=200),
            "kappa": gr.Slider(
                0.05, 1, 0.9, step=0.01, label="Kappa", info="cs: factor i is kappa^(i-1)", min_width=200
            ),
            "method": gr.Dropdown(
                ["cs"], value="cs", label="Method", info="the model's own comes first", min_width=160
            ),
        }


def _model_values(comparison: Comparison | None) -> Any:
    """Return the values of everything that depends on the model, or gradio's mark for no change."""
    if comparison is None:
        return gr.skip()
    method, kappa = comparison.methods[0], comparison.own.kappa or SkipScalingConfig("cs").kappa
    strength = 1.0 if comparison.own.strength is None else comparison.own.strength
    skips = comparison.skips(comparison.scaling(method, kappa, strength))
    return [
        comparison.source,
        f"<p>{html.escape(_description(comparison))}</p>",
        _HINT,
        skips_html(skips),
        gr.update(choices=comparison.class_names, value=[], visible=comparison.is_class),
        gr.update(visible=comparison.is_text),
        gr.update(visible=comparison.is_text),
        gr.update(value=comparison.guidance_scale, visible=comparison.has_guidance),
        gr.update(choices=[_OWN_SCHEDULER, *comparison.schedulers], value=""),
        strength,
        gr.update(value=kappa, interactive=comparison.scaling(method, 1.0, 1.0).kappa is not None),
        gr.update(choices=comparison.methods, value=method),
    ]


def _description(comparison: Comparison) -> str:
    own = comparison.own
    scaling = "without skip scaling" if own.method == "none" else f"scaled with {scaling_name(own)}"
    return f"{comparison.source}: {type(comparison.pipe.unet).__name__}, {scaling}."


def scaling_name(scaling: SkipScalingConfig) -> str:
    """Return a short name of a scaling, such as `cs, kappa 0.7`."""
    kappa = "" if scaling.kappa is None else f", kappa {scaling.kappa:.4g}"
    strength = "" if scaling.strength in (None, 1.0) else f", strength {scaling.strength:g}"
    return f"{scaling.method}{kappa}{strength}"


def _draw(comparison: Comparison, values: dict[str, Any], progress: gr.Progress) -> tuple[str, str]:
    """Return both sets of images and the table of skips."""
    scaling = comparison.scaling(values["method"], values["kappa"], values["strength"])
    pair = comparison.sample(_sample_config(comparison, values), values["num_images"], scaling, progress)
    columns = {"without scaling": pair.plain, f"with {scaling_name(scaling)}": pair.scaled}
    return pair_html(columns, pair.labels), skips_html(pair.skips)


def _sample_config(comparison: Comparison, values: dict[str, Any]) -> SampleConfig:
    """Return the settings as `scalelong sample` takes them. Inputs of other kinds of models are hidden."""
    prompts = tuple(line.strip() for line in (values["prompt"] or "").splitlines() if line.strip())
    return SampleConfig(
        comparison.source,
        prompt=prompts if comparison.is_text and prompts else None,
        negative_prompt=(values["negative_prompt"] or None) if comparison.is_text else None,
        class_labels=tuple(values["class_labels"] or ()) or None if comparison.is_class else None,
        scheduler=values["scheduler"] or None,
        num_inference_steps=values["num_inference_steps"],
        guidance_scale=values["guidance_scale"] if comparison.has_guidance else None,
        seed=values["seed"],
    )
