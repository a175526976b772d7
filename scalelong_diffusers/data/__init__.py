"""A data set becomes batches."""

from scalelong_diffusers.data.arguments import DataSettings, add_data_arguments
from scalelong_diffusers.data.batch import Batch
from scalelong_diffusers.data.images import BadImage
from scalelong_diffusers.data.shapes import COLOURS, SHAPE_CLASSES, SHAPES, recognise
from scalelong_diffusers.data.streams import Stream
from scalelong_diffusers.data.training_data import TrainingData, load_training_data


__all__ = [
    "COLOURS",
    "SHAPES",
    "SHAPE_CLASSES",
    "BadImage",
    "Batch",
    "DataSettings",
    "Stream",
    "TrainingData",
    "add_data_arguments",
    "load_training_data",
    "recognise",
]
