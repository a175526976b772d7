"""Pipelines that sample any of our models, or a stock diffusers U-Net, with any scheduler that fits."""

from scalelong_diffusers.pipelines.class_conditional import ScaleLongClassConditionalPipeline
from scalelong_diffusers.pipelines.loading import load_pipeline
from scalelong_diffusers.pipelines.text_to_image import ScaleLongTextToImagePipeline
from scalelong_diffusers.pipelines.unconditional import ScaleLongUnconditionalPipeline


__all__ = [
    "ScaleLongClassConditionalPipeline",
    "ScaleLongTextToImagePipeline",
    "ScaleLongUnconditionalPipeline",
    "load_pipeline",
]
