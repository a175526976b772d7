r"""
Train an unconditional model as in the figures of the paper: with extra noise, and with a log of its features.

    python -m scalelong_diffusers.paper.training_script --extra_noise 0.1 --feature_steps 10 --output_dir out

It is `train_unconditional.py` with these two additions. The log holds the root mean square of the outputs of all
decoder blocks, from i = 1, for held-out images with fixed noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from scalelong_diffusers.models.uvit import UViTModel
from scalelong_diffusers.pipelines.unconditional import ScaleLongUnconditionalPipeline
from scalelong_diffusers.training import Batch, TrainingConfig, TrainingRun, option, parse_config, run_script


@dataclass(frozen=True)
class FigureConfig(TrainingConfig):
    extra_noise: float = option(
        0.0, "standard deviation of the noise that is added to x_t in training", at_least=0, at_most=100
    )
    feature_steps: int = option(
        0, "log the size of hidden features every N steps (0: never)", at_least=0, at_most=10**9, metavar="N"
    )


def train(config: FigureConfig):
    run = TrainingRun(config)
    run.load_data()
    unet = run.build_model()
    noising = run.noise_process()
    run.start({"unet": unet})

    def noisy_inputs(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        clean = run.encode_images(batch)
        noise = batch.normal_like(clean, "noise")
        timesteps = noising.timesteps(batch.uniform("timestep"))
        return noising.add_noise(clean, noise, timesteps), noise, timesteps

    def losses_of(models: Mapping[str, nn.Module], batch: Batch, extra_noise: float = 0.0) -> torch.Tensor:
        noisy, noise, timesteps = noisy_inputs(batch)
        if extra_noise:
            noisy = noisy + extra_noise * batch.normal_like(noisy, "extra noise")
        prediction = models["unet"](noisy, timesteps).sample
        return F.mse_loss(prediction, noise, reduction="none").mean(dim=(1, 2, 3))

    def pipeline() -> ScaleLongUnconditionalPipeline:
        scheduler = noising.sampling_scheduler()
        pipe = ScaleLongUnconditionalPipeline(unet, scheduler)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def samples(numbers: Sequence[int]) -> list:
        steps = config.monitoring.num_inference_steps
        return pipeline()(len(numbers), num_inference_steps=steps, generator=run.generators(numbers)).images

    for batch in run:
        run.step(losses_of(run.models, batch, config.extra_noise))
        if run.is_due(config.feature_steps):
            with run.evaluating(with_ema=False):
                noisy, _, timesteps = noisy_inputs(next(run.validation_batches()))
                run.record({"features": feature_sizes(unet, noisy, timesteps)})
        if run.is_due(config.monitoring.validation_steps):
            run.validate(losses_of)
        if run.is_due(config.monitoring.eval_steps):
            run.evaluate(samples)

    run.save(pipeline())


@torch.no_grad()
def feature_sizes(unet: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor) -> list[float]:
    """Return the root mean square of the outputs of all decoder blocks, from i = 1, the outermost."""
    outputs = []
    hooks = [
        block.register_forward_hook(lambda block, inputs, output: outputs.append(output))
        for block in decoder_blocks(unet)
    ]
    unet(noisy, timesteps)
    for hook in hooks:
        hook.remove()
    return [output.square().mean().sqrt().item() for output in reversed(outputs)]


def decoder_blocks(unet: nn.Module) -> list[nn.Module]:
    """Return the modules that read the long skips, in the order of the forward pass."""
    if isinstance(unet, UViTModel):
        return list(unet.out_blocks)
    return [resnet for block in unet.up_blocks for resnet in block.resnets]


def main(argv: Sequence[str] | None = None):
    train(parse_config(FigureConfig, __doc__, argv))


if __name__ == "__main__":
    run_script(main)
