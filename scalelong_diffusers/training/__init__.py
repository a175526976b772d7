"""The building blocks of training scripts: typed configs, and `TrainingRun`, which does everything but the loss."""

from scalelong_diffusers.data import Batch, DataConfig
from scalelong_diffusers.noise import NoiseProcess
from scalelong_diffusers.options import option
from scalelong_diffusers.scaling import SkipScalingConfig
from scalelong_diffusers.training.config import (
    ModelConfig,
    MonitoringConfig,
    NoiseConfig,
    OptimizationConfig,
    OutputConfig,
    RunConfig,
    TrainingConfig,
    make_config,
    parse_config,
)
from scalelong_diffusers.training.run import TrainingRun
from scalelong_diffusers.training.script import TrainingStopped, run_script


__all__ = [
    "Batch",
    "DataConfig",
    "ModelConfig",
    "MonitoringConfig",
    "NoiseConfig",
    "NoiseProcess",
    "OptimizationConfig",
    "OutputConfig",
    "RunConfig",
    "SkipScalingConfig",
    "TrainingConfig",
    "TrainingRun",
    "TrainingStopped",
    "make_config",
    "option",
    "parse_config",
    "run_script",
]
