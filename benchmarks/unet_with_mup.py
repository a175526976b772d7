"""
Train a U-Net with the optimizer settings of muP, for mup.py.

    python benchmarks/unet_with_mup.py '{"block_out_channels": [16, 32, 32], "norm_num_groups": 8}' FLAGS

The first argument is the base config; with {} the U-Net is its own base, so all parameters have the same settings.
It takes the flags of train_unconditional.py.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from scalelong_diffusers import mup_param_groups
from scalelong_diffusers.training import Batch, TrainingConfig, TrainingRun, parse_config, run_script


def train(config: TrainingConfig, base_config: Mapping[str, Any]):
    run = TrainingRun(config)
    run.load_data()
    unet = run.build_model()
    nn.init.zeros_(unet.conv_out.weight)
    noising = run.noise_process()
    options = config.optimization
    groups = mup_param_groups(
        unet, options.learning_rate, options.adam_weight_decay, options.adam_epsilon, base_config=base_config
    )
    run.start({"unet": unet}, torch.optim.AdamW(groups, fused=True))

    def losses_of(models: Mapping[str, nn.Module], batch: Batch) -> torch.Tensor:
        clean = run.encode_images(batch)
        noise = batch.normal_like(clean, "noise")
        timesteps = noising.timesteps(batch.uniform("timestep"))
        prediction = models["unet"](noising.add_noise(clean, noise, timesteps), timesteps).sample
        return F.mse_loss(prediction, noise, reduction="none").mean(dim=(1, 2, 3))

    for batch in run:
        run.step(losses_of(run.models, batch))
        if run.is_due(config.monitoring.validation_steps):
            run.validate(losses_of)


if __name__ == "__main__":
    base, *flags = sys.argv[1:]
    run_script(lambda: train(parse_config(TrainingConfig, __doc__, flags), json.loads(base)))
