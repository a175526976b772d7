"""
Model cards. Each push rewrites the part between two marks; everything around it belongs to the owner of the card.
"""

import html
import inspect
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from diffusers import DiffusionPipeline, ModelMixin
from huggingface_hub import ModelCard
from PIL.Image import Image

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.image_files import read_image
from scalelong_diffusers.patching import skip_connections
from scalelong_diffusers.pipelines.class_conditional import ScaleLongClassConditionalPipeline
from scalelong_diffusers.pipelines.compatibility import required_conditions, unwrap_model
from scalelong_diffusers.scaling import METHODS, SkipScalingConfig
from scalelong_diffusers.terminal import printable


# To be replaced by `pip install scalelong-diffusers` once the package is on PyPI.
INSTALL = (
    "Made with scalelong-diffusers, which is needed to load it. The package is not on PyPI yet: install it from a "
    "checkout of its repository with `pip install -e .`, as its README describes."
)
START = "<!-- scalelong: each push rewrites this part; text above and below it stays -->"
END = "<!-- scalelong: end -->"
SAMPLES = "samples.png"
TAGS = ("diffusers", "scalelong", "skip-scaling")

# The last start mark before an end mark, up to the end mark. Older versions worded the start mark differently.
_ANY_START = r"<!-- scalelong: (?!end -->)"
_GENERATED = re.compile(f"{_ANY_START}(?:(?!{_ANY_START}).)*?{re.escape(END)}", re.DOTALL)
_MAX_CLASSES = 100

_PAPER = "[ScaleLong](https://arxiv.org/abs/2310.13545) (NeurIPS 2023)"
_SCALINGS = {
    "none": "The long skip connections are not scaled.",
    "inv_sqrt2": f"Every long skip is multiplied by 1/sqrt(2), a baseline in {_PAPER}.",
    "constant": f"Every long skip is multiplied by kappa = {{kappa}}, the universal scaling in {_PAPER}.",
    "cs": f"Long skip i is multiplied by kappa^(i-1) with kappa = {{kappa}}: constant scaling (CS) from {_PAPER}.",
    "reversed cs": f"Long skip i is multiplied by kappa^(N-i+1) with kappa = {{kappa}}: an ablation in {_PAPER}.",
    "ls": f"A small gate predicts the factor of each long skip: learnable scaling (LS) from {_PAPER}.",
    "learnable": f"Each long skip is multiplied by a learned number, a variant in {_PAPER}.",
}
# The Hub's task and the first argument of the pipeline's call, by condition. The Hub has no task for classes.
_TASKS = {
    "encoder_hidden_states": ("text-to-image", '"a photograph"'),
    "class_labels": ("unconditional-image-generation", "0"),
    None: ("unconditional-image-generation", ""),
}


@dataclass(frozen=True)
class CardFacts:
    """
    Facts for a model card that the model does not contain.

    Args:
        preset: the paper's experiment; see `scalelong presets`.
        training_data: the training dataset.
        training: other facts about training, in the order in which they are listed.
        metrics: results by name. The name should say how the metric was measured.
        samples: a `PIL.Image` of samples, uploaded with the card.
        license: the license of the weights, as the Hub spells it.
        base_model: the repository of the model that was fine-tuned.
    """

    preset: str | None = None
    training_data: str | None = None
    training: Mapping[str, Any] | None = None
    metrics: Mapping[str, Any] | None = None
    samples: Any = None
    license: str | None = None
    base_model: str | None = None

    @classmethod
    def parse(cls, facts: "CardFacts | Mapping[str, Any] | None") -> "CardFacts":
        """Return the facts of a `CardFacts`, of a dict of its fields, or of None."""
        return facts if isinstance(facts, cls) else cls(**(facts or {}))


def training_facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `CardFacts` that the `settings.json` of a training run holds. It may be another file."""
    flags = {"steps": "max_train_steps", "batch size": "total_batch_size", "learning rate": "learning_rate"}
    if not {"data", "use_ema", "ema_decay", *flags.values()} <= settings.keys():
        return {}
    return {
        "preset": settings.get("preset"),
        "training_data": settings["data"],
        "training": {
            **{name: settings[flag] for name, flag in flags.items()},
            "EMA": settings["ema_decay"] if settings["use_ema"] else "no",
        },
    }


def last_samples(folder: str | os.PathLike) -> Image | None:
    """Return the last sample grid in the folder of a training run, or None if there is none."""
    grids = Path(folder, "samples").glob("step-*.png")
    newest = max(grids, key=lambda path: int(path.stem.removeprefix("step-")), default=None)
    return None if newest is None else read_image(newest, str(newest))


def make_card(
    model_or_pipeline: ModelMixin | DiffusionPipeline,
    repo_id: str,
    facts: CardFacts,
    previous: str | None = None,
    load_options: Mapping[str, Any] | None = None,
) -> ModelCard:
    """
    Return the card of a model or pipeline. It keeps all parts of the `previous` card that this function did not write.

    `load_options` are the keywords that `from_pretrained` needs to load the pushed files.
    """
    name = type(model_or_pipeline).__name__
    source = ", ".join(
        [json.dumps(repo_id), *(f"{k}={json.dumps(value)}" for k, value in (load_options or {}).items())]
    )
    variable = "pipe" if isinstance(model_or_pipeline, DiffusionPipeline) else "model"
    imports = [f"from {_library(model_or_pipeline)} import {name}"]
    if _library(model_or_pipeline) != "scalelong_diffusers":
        imports.insert(0, "import scalelong_diffusers  # registers the scaled U-Net with diffusers")
    snippet = [*imports, "", f"{variable} = {name}.from_pretrained({source})"]
    return _build_card(model_or_pipeline, repo_id, facts, previous, snippet)


def make_adapter_card(
    pipe: DiffusionPipeline,
    base_model: str,
    repo_id: str,
    facts: CardFacts,
    previous: str | None = None,
    revision: str | None = None,
) -> ModelCard:
    """Return the card of an adapter, which shows how to load it into its base model."""
    name = type(pipe).__name__
    snippet = [
        f"from {_library(pipe)} import {name}",
        "from scalelong_diffusers import load_adapter",
        "",
        f"pipe = {name}.from_pretrained({json.dumps(base_model)})",
        f"load_adapter(pipe, {json.dumps(repo_id)}" + (f", revision={json.dumps(revision)})" if revision else ")"),
    ]
    intro = (
        f"An adapter for [{base_model}](https://huggingface.co/{base_model}): the scaling of its long skip "
        "connections and, if it has one, a LoRA, which needs `pip install peft`."
    )
    card = _build_card(pipe, repo_id, facts, previous, snippet, [intro, ""])
    card.data.base_model = base_model
    card.data.base_model_relation = "adapter"
    return card


def _build_card(
    model_or_pipeline: ModelMixin | DiffusionPipeline,
    repo_id: str,
    facts: CardFacts,
    previous: str | None,
    snippet: Sequence[str],
    intro: Sequence[str] = (),
) -> ModelCard:
    task, argument = _task_and_argument(model_or_pipeline)
    if isinstance(model_or_pipeline, DiffusionPipeline) and argument is not None:
        snippet = [*snippet, f"image = pipe({argument}).images[0]", 'image.save("image.png")']
    try:
        card = ModelCard(previous or "---\n{}\n---\n")
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"the metadata of the README.md of {repo_id} cannot be read: {error}") from error
    card.data.library_name = "diffusers"
    card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *TAGS]))
    card.data.pipeline_tag = card.data.pipeline_tag or task
    card.data.license = facts.license or card.data.license
    if facts.base_model is not None:
        card.data.base_model, card.data.base_model_relation = facts.base_model, "finetune"
    picture = [] if facts.samples is None else [f"![samples]({SAMPLES})", ""]
    skips = skip_connections(_model_of(model_or_pipeline))
    lines = [
        *(f"# {repo_id.split('/')[-1]}", "", *picture, *intro, INSTALL, "", "```python", *snippet, "```", ""),
        *("## Skip scaling", "", _describe_scaling(skips.config), "", "```text", str(skips), "```", ""),
        *_class_section(model_or_pipeline),
        *_table("Training", {"preset": facts.preset, "data": facts.training_data, **(facts.training or {})}),
        *_table("Results", facts.metrics or {}),
    ]
    text = "\n".join(lines).replace("<!--", "&lt;!--")  # a mark in a field would move the end of this part
    generated = f"{START}\n{text}\n{END}"
    if _GENERATED.search(card.text):
        card.text = _GENERATED.sub(lambda _: generated, card.text, count=1)
    else:
        card.text = f"{card.text.rstrip()}\n\n{generated}\n".lstrip()
    return card


def _task_and_argument(model_or_pipeline: ModelMixin | DiffusionPipeline) -> tuple[str | None, str | None]:
    """Return the entry of `_TASKS`, or (None, None) if the model needs more than text or a class."""
    conditions = set(required_conditions(_model_of(model_or_pipeline)))
    condition = next((name for name in _TASKS if name in conditions), None)
    if "image_embeds" in conditions or (conditions and condition is None):
        return None, None
    if isinstance(model_or_pipeline, DiffusionPipeline):
        needs_image = "image" in inspect.signature(type(model_or_pipeline).__call__).parameters
        has_encoder = model_or_pipeline.components.get("text_encoder") is not None
        if needs_image or (condition == "encoder_hidden_states" and not has_encoder):
            return None, None
    return _TASKS[condition]


def _model_of(model_or_pipeline: ModelMixin | DiffusionPipeline) -> ModelMixin:
    is_pipeline = isinstance(model_or_pipeline, DiffusionPipeline)
    return unwrap_model(model_or_pipeline.unet if is_pipeline else model_or_pipeline)


def _describe_scaling(scaling: SkipScalingConfig) -> str:
    name = "reversed cs" if scaling.method == "cs" and scaling.reverse else scaling.method
    if name in _SCALINGS:
        sentence = _SCALINGS[name].format(kappa=scaling.kappa)
    else:
        method = METHODS[name]
        source = (
            "" if method.is_built_in else f" Import `{method.build.__module__}`, which defines it, before loading."
        )
        sentence = f"The long skip connections use the method `{name}`: {method.summary}{source}"
    if scaling.strength in (None, 1.0):
        return sentence
    return f"{sentence} With strength {scaling.strength:g}, each factor k becomes 1 + {scaling.strength:g} (k - 1)."


def _class_section(model_or_pipeline: ModelMixin | DiffusionPipeline) -> list[str]:
    is_class_conditional = isinstance(model_or_pipeline, ScaleLongClassConditionalPipeline)
    names = model_or_pipeline.config.class_names if is_class_conditional else None
    if not names:
        return []
    listed = [f"{i}: {_escape(name)}" for i, name in list(names.items())[:_MAX_CLASSES]]
    more = f", ... ({len(names)} in `pipe.config.class_names`)" if len(names) > _MAX_CLASSES else ""
    return ["## Classes", "", ", ".join(listed) + more, ""]


def _library(model_or_pipeline: ModelMixin | DiffusionPipeline) -> str:
    return type(model_or_pipeline).__module__.split(".")[0]


def _table(title: str, rows: Mapping[str, Any]) -> list[str]:
    known = {name: value for name, value in rows.items() if value is not None}
    if not known:
        return []
    lines = [f"| {_escape(name)} | {_escape(value)} |" for name, value in known.items()]
    return [f"## {title}", "", "| | |", "|---|---|", *lines, ""]


def _escape(value: Any) -> str:
    """Return a value as one line of plain text, without HTML and markdown."""
    text = html.escape(printable(" ".join(str(value).split())), quote=False)
    return re.sub(r"[\\`*_~|\[\]]", r"\\\g<0>", text)
