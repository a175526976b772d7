"""Load a pipeline without naming its class, which diffusers can do for its own pipelines alone."""

import os
from typing import Any

from diffusers import ModelMixin

from scalelong_diffusers.download import DOWNLOAD_OPTIONS, read_json
from scalelong_diffusers.pipelines.base import SamplingPipeline
from scalelong_diffusers.pipelines.class_conditional import ScaleLongClassConditionalPipeline
from scalelong_diffusers.pipelines.source import pipeline_index
from scalelong_diffusers.pipelines.text_to_image import ScaleLongTextToImagePipeline
from scalelong_diffusers.pipelines.unconditional import ScaleLongUnconditionalPipeline


PIPELINES = (ScaleLongUnconditionalPipeline, ScaleLongClassConditionalPipeline, ScaleLongTextToImagePipeline)


def load_pipeline(source: str | os.PathLike, **options) -> SamplingPipeline:
    """
    Load a pipeline of ours, or the components of a stock one (of DDPM, DDIM or Stable Diffusion, say) into ours, from
    a folder or the Hub. The options are those of `from_pretrained`.

    ```python
    pipe = load_pipeline("some/model", dtype=torch.bfloat16)
    ```
    """
    return _pipeline_class(source, options).from_pretrained(source, **options)


def _pipeline_class(source: str | os.PathLike, options: dict[str, Any]) -> type[SamplingPipeline]:
    """The class that is written down, or else the one whose condition the components make."""
    index = pipeline_index(source, options)
    written = index["_class_name"]
    written = written[1] if isinstance(written, list) else written
    for pipeline_class in PIPELINES:
        if pipeline_class.__name__ == written:
            return pipeline_class
    if "text_encoder" in index:
        return ScaleLongTextToImagePipeline
    hub = {name: options[name] for name in DOWNLOAD_OPTIONS if name in options}
    unet = read_json(source, f"unet/{ModelMixin.config_name}", **hub) or {}
    has_classes = unet.get("num_class_embeds") is not None
    return ScaleLongClassConditionalPipeline if has_classes else ScaleLongUnconditionalPipeline
