"""The model card: what is known of a model, written anew at each push between two marks; the rest is the owner's."""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from diffusers import DiffusionPipeline, ModelMixin
from huggingface_hub import ModelCard, ModelCardData

from scalelong_diffusers.errors import did_you_mean
from scalelong_diffusers.patching import skip_connections
from scalelong_diffusers.pipelines.compatibility import required_conditions, unwrap_model
from scalelong_diffusers.scaling import SkipScalingConfig


START = "<!-- scalelong: written anew at each push; what you write above or below stays -->"
END = "<!-- scalelong: end -->"
SAMPLES = "samples.png"
TAGS = ("diffusers", "scalelong", "skip-scaling")

_OF_PAPER = "of [ScaleLong](https://arxiv.org/abs/2310.13545) (NeurIPS 2023)"
_SCALINGS = {
    "none": "The long skip connections are not scaled.",
    "inv_sqrt2": f"Every long skip is multiplied by 1/sqrt(2), a baseline {_OF_PAPER}.",
    "constant": f"Every long skip is multiplied by kappa = {{kappa}}, the universal scaling {_OF_PAPER}.",
    "cs": f"Long skip i is multiplied by kappa^(i-1) with kappa = {{kappa}}: constant scaling (CS) {_OF_PAPER}.",
    "reversed cs": f"Long skip i is multiplied by kappa^(N-i+1) with kappa = {{kappa}}: an ablation {_OF_PAPER}.",
    "ls": f"Each long skip is multiplied by what a small gate makes of it: learnable scaling (LS) {_OF_PAPER}.",
    "learnable": f"Each long skip is multiplied by a learned number, a variant {_OF_PAPER}.",
}
# By what a model is told what to draw: the task under which the Hub lists it, which has none for classes, and the
# argument of a pipeline's call.
_USES = {
    "encoder_hidden_states": ("text-to-image", '"a photograph"'),
    "class_labels": ("unconditional-image-generation", "0"),
    None: ("unconditional-image-generation", ""),
}


@dataclass(frozen=True)
class CardFacts:
    """
    What a card says beyond what the model itself tells.

    Args:
        preset: the experiment of the paper that was run: `scalelong presets`.
        training_data: what the model was trained on.
        training: anything else about training, in the order in which it is to be listed.
        metrics: figures of merit, each with its name, which had better say how it was measured.
        samples: a picture of samples, a `PIL.Image`, which is uploaded with the card.
        license: the license of the weights, as the Hub spells it.
        base_model: the repository of the model that this one was fine-tuned from.
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
        if facts is None or isinstance(facts, cls):
            return facts or cls()
        for name in facts:
            if name not in cls.__dataclass_fields__:
                accepted = ", ".join(cls.__dataclass_fields__)
                raise ValueError(
                    f"unknown card field {name!r}{did_you_mean(name, cls.__dataclass_fields__)}; accepted: {accepted}"
                )
        return cls(**facts)


def make_card(
    model_or_pipeline: ModelMixin | DiffusionPipeline,
    repo_id: str,
    facts: CardFacts,
    previous: str | None = None,
    load_options: Mapping[str, Any] | None = None,
) -> ModelCard:
    """
    The card of a model or pipeline; of the previous one, all that was not written by this function is kept.

    `load_options` are the keywords that `from_pretrained` needs to load what is pushed.
    """
    use = _use_of(model_or_pipeline)
    return _make_card(_sections(model_or_pipeline, repo_id, facts, load_options or {}), use, repo_id, facts, previous)


def make_adapter_card(
    pipe: DiffusionPipeline,
    base_model: str,
    repo_id: str,
    facts: CardFacts,
    previous: str | None = None,
    revision: str | None = None,
) -> ModelCard:
    """The card of what `save_adapter` saves of a pipeline, which says what it is loaded into."""
    name = type(pipe).__name__
    loading = [
        f"from {_library(pipe)} import {name}",
        "from scalelong_diffusers import load_adapter",
        "",
        f"pipe = {name}.from_pretrained({_literal(base_model)})",
        f"load_adapter(pipe, {_literal(repo_id)}" + (f", revision={_literal(revision)})" if revision else ")"),
        *_drawing(_use_of(pipe)),
    ]
    intro = [
        f"An adapter of [{base_model}](https://huggingface.co/{base_model}): the scaling of its long skip connections "
        "and, where there is one, a LoRA.",
        "",
    ]
    sections = _sections_with(loading, pipe, repo_id, facts, intro, package="'scalelong-diffusers[lora]'")
    card = _make_card(sections, _use_of(pipe), repo_id, facts, previous)
    card.data.base_model = base_model
    card.data.base_model_relation = "adapter"
    return card


def _make_card(
    sections: list[str], use: tuple[str, str] | None, repo_id: str, facts: CardFacts, previous: str | None
) -> ModelCard:
    card = _card_of(previous, repo_id) if previous else ModelCard("---\n{}\n---\n")
    _complete_metadata(card.data, use, facts)
    generated = "\n".join([START, *sections, END])
    # From the last mark that an end follows: where somebody removed an end, the text after it is theirs.
    start, end = re.escape(START), re.escape(END)
    marked = re.compile(f"{start}(?:(?!{start}).)*?{end}", re.DOTALL)
    if marked.search(card.text):
        card.text = marked.sub(lambda _: generated, card.text, count=1)
    else:
        card.text = f"{card.text.rstrip()}\n\n{generated}\n".lstrip()
    return card


def _card_of(text: str, repo_id: str) -> ModelCard:
    try:
        return ModelCard(text)
    except (yaml.YAMLError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"the README.md of {repo_id} begins with metadata that can not be read: {said}") from error


def _complete_metadata(data: ModelCardData, use: tuple[str, str] | None, facts: CardFacts):
    data.library_name = "diffusers"
    data.tags = list(dict.fromkeys([*(data.tags or []), *TAGS]))
    data.pipeline_tag = data.pipeline_tag or (use and use[0])
    data.license = facts.license or data.license
    if facts.base_model is not None:
        data.base_model, data.base_model_relation = facts.base_model, "finetune"


def _use_of(model_or_pipeline: ModelMixin | DiffusionPipeline) -> tuple[str, str] | None:
    """The task and the argument of `_USES`; None where more than text or a class is needed."""
    conditions = set(required_conditions(_model_of(model_or_pipeline)))
    condition = next((name for name in _USES if name in conditions), None)
    if "image_embeds" in conditions or (conditions and condition is None):
        return None
    if isinstance(model_or_pipeline, DiffusionPipeline):
        needs_image = "image" in inspect.signature(type(model_or_pipeline).__call__).parameters
        has_encoder = model_or_pipeline.components.get("text_encoder") is not None
        if needs_image or (condition == "encoder_hidden_states" and not has_encoder):
            return None
    return _USES[condition]


def _model_of(model_or_pipeline: ModelMixin | DiffusionPipeline) -> ModelMixin:
    is_pipeline = isinstance(model_or_pipeline, DiffusionPipeline)
    return unwrap_model(model_or_pipeline.unet if is_pipeline else model_or_pipeline)


def _sections(
    model_or_pipeline: ModelMixin | DiffusionPipeline,
    repo_id: str,
    facts: CardFacts,
    load_options: Mapping[str, Any],
) -> list[str]:
    return _sections_with(_snippet(model_or_pipeline, repo_id, load_options), model_or_pipeline, repo_id, facts)


def _sections_with(
    snippet: list[str],
    model_or_pipeline: ModelMixin | DiffusionPipeline,
    repo_id: str,
    facts: CardFacts,
    intro: Sequence[str] = (),
    package: str = "scalelong-diffusers",
) -> list[str]:
    lines = [f"# {repo_id.split('/')[-1]}", ""]
    if facts.samples is not None:
        lines += [f"![samples]({SAMPLES})", ""]
    lines += [
        *intro,
        "Made with [scalelong-diffusers](https://pypi.org/project/scalelong-diffusers), which has to be installed:",
        f"`pip install {package}`",
        "",
        "```python",
        *snippet,
        "```",
        "",
        "## Skip scaling",
        "",
    ]
    skips = skip_connections(_model_of(model_or_pipeline))
    lines += [_scaling_sentence(skips.config), "", "```text", str(skips), "```", ""]
    lines += _table("Training", {"preset": facts.preset, "data": facts.training_data, **(facts.training or {})})
    lines += _table("Results", facts.metrics or {})
    return lines


def _scaling_sentence(scaling: SkipScalingConfig) -> str:
    sentence = _SCALINGS["reversed cs" if scaling.reverse else scaling.method].format(kappa=scaling.kappa)
    if scaling.strength in (None, 1.0):
        return sentence
    return f"{sentence} With strength {scaling.strength:g}, a factor k is really 1 + {scaling.strength:g} (k - 1)."


def _snippet(
    model_or_pipeline: ModelMixin | DiffusionPipeline, repo_id: str, load_options: Mapping[str, Any]
) -> list[str]:
    name = type(model_or_pipeline).__name__
    source = ", ".join([_literal(repo_id), *(f"{key}={_literal(value)}" for key, value in load_options.items())])
    is_ours = _library(model_or_pipeline) == "scalelong_diffusers"
    imports = (
        [f"from scalelong_diffusers import {name}"]
        if is_ours
        else [
            "import scalelong_diffusers  # diffusers finds the scaled U-Net through it",
            f"from diffusers import {name}",
        ]
    )
    if not isinstance(model_or_pipeline, DiffusionPipeline):
        return [*imports, "", f"model = {name}.from_pretrained({source})"]
    loading = [*imports, "", f"pipe = {name}.from_pretrained({source})"]
    return [*loading, *_drawing(_use_of(model_or_pipeline))]


def _drawing(use: tuple[str, str] | None) -> list[str]:
    return [] if use is None else [f"image = pipe({use[1]}).images[0]", 'image.save("image.png")']


def _library(model_or_pipeline: ModelMixin | DiffusionPipeline) -> str:
    return type(model_or_pipeline).__module__.split(".")[0]


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _table(title: str, rows: Mapping[str, Any]) -> list[str]:
    known = {name: value for name, value in rows.items() if value is not None}
    if not known:
        return []
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in known.items()]
    return [f"## {title}", "", "| | |", "|---|---|", *lines, ""]


def _cell(value: Any) -> str:
    return " ".join(str(value).splitlines()).replace("|", "\\|")
