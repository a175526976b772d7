r"""
Train a class-conditional diffusion model with scaled long skips: a U-ViT or a diffusers U-Net.

    accelerate launch train/train_class_conditional.py --train_data_dir flowers --resolution 64 --output_dir out
    accelerate launch -m scalelong_diffusers.train.train_class_conditional --preset imagenet64-uvit-m-4 \
        --dataset_name ILSVRC/imagenet-1k

The data can be a folder with one subfolder per class. Without a dataset, the script trains on shapes that the package
draws. The output folder is a pipeline: `ScaleLongClassConditionalPipeline.from_pretrained("out")("cat")`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from scalelong_diffusers import ScaleLongClassConditionalPipeline
from scalelong_diffusers.training import Batch, TrainingConfig, TrainingRun, option, parse_config, run_script


@dataclass(frozen=True)
class ClassConditionalConfig(TrainingConfig):
    task = "class-conditional"

    class_dropout: float = option(
        0.1,
        "probability of replacing a label with the null class, for guidance; 0: no null class",
        at_least=0,
        below=1,
    )
    guidance_scale: float = option(2.0, "guidance of sample grids; 1 turns it off", at_least=0, at_most=1000)


def train(config: ClassConditionalConfig):
    run = TrainingRun(config)
    vae = run.load_vae()
    data = run.load_data(needs_labels=True)
    # The last class means "no class".
    null_class = data.num_classes if config.class_dropout else None
    unet = run.build_model(num_class_embeds=data.num_classes + (null_class is not None))
    noising = run.noise_process()

    def losses_of(models: Mapping[str, nn.Module], batch: Batch) -> torch.Tensor:
        clean = run.encode_images(batch)
        noise = batch.normal_like(clean, "noise")
        timesteps = noising.timesteps(batch.uniform("timestep"))
        labels = batch["labels"]
        if null_class is not None:
            labels = labels.masked_fill(batch.uniform("dropped condition") < config.class_dropout, null_class)
        prediction = models["unet"](noising.add_noise(clean, noise, timesteps), timesteps, class_labels=labels).sample
        target = noising.target(clean, noise, timesteps)
        losses = F.mse_loss(prediction, target, reduction="none").mean(dim=(1, 2, 3))
        return noising.weights(timesteps) * losses

    def pipeline() -> ScaleLongClassConditionalPipeline:
        scheduler = noising.sampling_scheduler()
        pipe = ScaleLongClassConditionalPipeline(
            unet, scheduler, vae, data.class_names, null_class, latent_scale=config.model.latent_scale
        )
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def samples(numbers: Sequence[int]) -> list:
        return pipeline()(
            [k % data.num_classes for k in numbers],
            num_inference_steps=config.monitoring.num_inference_steps,
            guidance_scale=1.0 if null_class is None else config.guidance_scale,
            generator=run.generators(numbers),
        ).images

    run.start({"unet": unet}, pipeline=pipeline)
    for batch in run:
        run.step(losses_of(run.models, batch))
        if run.is_due(config.monitoring.validation_steps):
            run.validate(losses_of)
        if run.is_due(config.monitoring.sample_steps):
            run.save_samples(samples, data.class_titles(config.monitoring.num_samples))
        if run.is_due(config.monitoring.eval_steps):
            run.evaluate(samples)

    run.save(pipeline())


def main(argv: Sequence[str] | None = None):
    train(parse_config(ClassConditionalConfig, __doc__, argv))


if __name__ == "__main__":
    run_script(main)
