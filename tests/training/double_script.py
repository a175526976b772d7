"""The unconditional training in float64, where Adam does not amplify rounding errors."""

import torch.nn.functional as F

from scalelong_diffusers.training import TrainingConfig, TrainingRun, parse_config


def main(argv=None):
    run = TrainingRun(parse_config(TrainingConfig, "Train in float64.", argv))
    run.load_data()
    unet = run.build_model().double()
    noising = run.noise_process()
    run.start({"unet": unet})
    for batch in run:
        clean = batch["pixel_values"].double()
        noise = batch.normal_like(clean, "noise")
        timesteps = noising.timesteps(batch.uniform("timestep"))
        prediction = run.models["unet"](noising.add_noise(clean, noise, timesteps), timesteps).sample
        run.step(F.mse_loss(prediction, noise, reduction="none").mean(dim=(1, 2, 3)))
    run.finish()
