"""Turn a dataset into batches."""

from scalelong_diffusers.data.batch import Batch
from scalelong_diffusers.data.config import DataConfig
from scalelong_diffusers.data.shapes import COLORS, SHAPE_CLASSES, SHAPES, recognize
from scalelong_diffusers.data.stream import Stream
from scalelong_diffusers.data.training_data import TrainingData, load_training_data
from scalelong_diffusers.image_files import UnreadableImage


__all__ = [
    "COLORS",
    "SHAPES",
    "SHAPE_CLASSES",
    "Batch",
    "DataConfig",
    "Stream",
    "TrainingData",
    "UnreadableImage",
    "load_training_data",
    "recognize",
]
