"""The unconditional script's run in float64, where Adam does not magnify what rounding differs by."""

import sys

import torch.nn.functional as F

from scalelong_diffusers.data import DataConfig, load_training_data
from scalelong_diffusers.training import (
    NoiseProcess,
    TrainingLoop,
    build_model,
    mistakes_as_sentences,
    parse_training_arguments,
    run_script,
    settle,
    start,
    training_parser,
)


def main(argv=None):
    args = parse_training_arguments(training_parser("Train in float64.", condition=None), argv)
    with mistakes_as_sentences():
        accelerator = start(args)
        settings = DataConfig.from_arguments(args)
        data = load_training_data(settings, channels=None, needs_labels=False, needs_captions=False, seed=args.seed)
        unet = build_model(args, data).double()
        process = NoiseProcess.from_arguments(args)
        loop = TrainingLoop(args, accelerator, {"unet": unet}, data, settle(args, accelerator, data, unet))
    for batch in loop:
        clean = batch["pixel_values"].double()
        noise = batch.normal_like(clean, "noise")
        timesteps = process.timesteps(batch.uniform("timestep"))
        prediction = loop.models["unet"](process.add_noise(clean, noise, timesteps), timesteps).sample
        loop.step(F.mse_loss(prediction, noise, reduction="none").mean(dim=(1, 2, 3)))
    loop.finish()


if __name__ == "__main__":
    run_script(main)
    sys.exit(0)
