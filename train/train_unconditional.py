r"""
Train an unconditional diffusion model with scaled long skips: a U-ViT or a diffusers U-Net.

    accelerate launch train/train_unconditional.py --train_data_dir pictures --resolution 64 --output_dir out
    accelerate launch -m scalelong_diffusers.train.train_unconditional --preset cifar10-uvit-s-2 \
        --dataset_name uoft-cs/cifar10 --output_dir out

Without a dataset, the script trains on shapes that the package draws. The output folder is a pipeline:
`ScaleLongUnconditionalPipeline.from_pretrained("out")`.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from scalelong_diffusers import ScaleLongUnconditionalPipeline
from scalelong_diffusers.training import Batch, TrainingConfig, TrainingRun, parse_config, run_script


def train(config: TrainingConfig):
    run = TrainingRun(config)
    vae = run.load_vae()
    run.load_data()
    unet = run.build_model()
    noising = run.noise_process()

    def losses_of(models: Mapping[str, nn.Module], batch: Batch) -> torch.Tensor:
        clean = run.encode_images(batch)
        noise = batch.normal_like(clean, "noise")
        timesteps = noising.timesteps(batch.uniform("timestep"))
        prediction = models["unet"](noising.add_noise(clean, noise, timesteps), timesteps).sample
        target = noising.target(clean, noise, timesteps)
        losses = F.mse_loss(prediction, target, reduction="none").mean(dim=(1, 2, 3))
        return noising.weights(timesteps) * losses

    def pipeline() -> ScaleLongUnconditionalPipeline:
        scheduler = noising.sampling_scheduler()
        pipe = ScaleLongUnconditionalPipeline(unet, scheduler, vae, latent_scale=config.model.latent_scale)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def samples(numbers: Sequence[int]) -> list:
        steps = config.monitoring.num_inference_steps
        return pipeline()(len(numbers), num_inference_steps=steps, generator=run.generators(numbers)).images

    run.start({"unet": unet}, pipeline=pipeline)
    for batch in run:
        run.step(losses_of(run.models, batch))
        if run.is_due(config.monitoring.validation_steps):
            run.validate(losses_of)
        if run.is_due(config.monitoring.sample_steps):
            run.save_samples(samples)
        if run.is_due(config.monitoring.eval_steps):
            run.evaluate(samples)

    run.save(pipeline())


def main(argv: Sequence[str] | None = None):
    train(parse_config(TrainingConfig, __doc__, argv))


if __name__ == "__main__":
    run_script(main)
