"""Tiny models of all kinds that the pipelines take, with and without skip scaling."""

from dataclasses import dataclass
from typing import Any

import diffusers
import pytest
import torch

import scalelong_diffusers


_UNET = {
    "sample_size": 8,
    "layers_per_block": 1,
    "block_out_channels": (16, 32),
    "norm_num_groups": 8,
}
_UNET_2D = {
    **_UNET,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
_UNET_WITH_TEXT = {
    **_UNET,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}
# A UNet2DConditionModel without cross-attention.
_UNET_WITHOUT_TEXT = {
    **_UNET,
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ("DownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D"),
    "mid_block_type": None,
}
_UVIT = {"sample_size": 8, "patch_size": 2, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 2}

# Config entries by condition.
CONDITIONS = {
    "nothing": {},
    "classes": {"num_class_embeds": 5},
    "text": {"cross_attention_dim": 16, "context_length": 12},
}


@dataclass(frozen=True)
class Kind:
    """A model class and its config for each condition that it supports."""

    class_name: str
    configs: dict[str, dict[str, Any]]

    def build(self, condition: str, **overrides) -> torch.nn.Module:
        torch.manual_seed(0)
        library = diffusers if hasattr(diffusers, self.class_name) else scalelong_diffusers
        return getattr(library, self.class_name)(**{**self.configs[condition], **overrides}).eval()


_PIXELS_2D = {name: {**_UNET_2D, **CONDITIONS[name]} for name in ("nothing", "classes")}
_CONDITION = {
    "text": {**_UNET_WITH_TEXT, "in_channels": 4, "out_channels": 4},
    "nothing": _UNET_WITHOUT_TEXT,
    "classes": {**_UNET_WITHOUT_TEXT, **CONDITIONS["classes"]},
}
_SCALED = {"skip_scaling": "cs"}
KINDS = {
    "UNet2DModel": Kind("UNet2DModel", _PIXELS_2D),
    "scaled UNet2DModel": Kind("ScaleLongUNet2DModel", {c: {**v, **_SCALED} for c, v in _PIXELS_2D.items()}),
    "UNet2DConditionModel": Kind("UNet2DConditionModel", _CONDITION),
    "scaled UNet2DConditionModel": Kind(
        "ScaleLongUNet2DConditionModel", {c: {**v, **_SCALED} for c, v in _CONDITION.items()}
    ),
    "UViTModel": Kind("UViTModel", {c: {**_UVIT, **v, **_SCALED} for c, v in CONDITIONS.items()}),
}


def kinds_of(condition: str) -> list[str]:
    return [name for name, kind in KINDS.items() if condition in kind.configs]


def pytest_generate_tests(metafunc):
    for condition in CONDITIONS:
        fixture = f"model_of_{condition}"
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, kinds_of(condition), indirect=True)


@pytest.fixture
def model_of_nothing(request):
    return KINDS[request.param].build("nothing")


@pytest.fixture
def model_of_classes(request):
    return KINDS[request.param].build("classes")


@pytest.fixture
def model_of_text(request):
    return KINDS[request.param].build("text")


@pytest.fixture
def build():
    """`build(kind, condition, **config)` builds a model."""
    return lambda kind, condition, **config: KINDS[kind].build(condition, **config)


@pytest.fixture
def quiet():
    """`quiet(pipeline_class, *args)` builds a pipeline without a progress bar."""

    def make(pipeline_class, *args, **kwargs):
        pipe = pipeline_class(*args, **kwargs)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return make


def seeded(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.fixture
def generators():
    """`generators(0, 1)` returns a generator for each seed."""
    return seeded


class CountCalls:
    """Counts a model's forward passes and keeps their inputs."""

    def __init__(self, model):
        self.inputs = []
        model.register_forward_pre_hook(
            lambda module, args, kwargs: self.inputs.append((args, kwargs)), with_kwargs=True
        )

    def __len__(self):
        return len(self.inputs)


@pytest.fixture
def count_calls():
    return CountCalls
