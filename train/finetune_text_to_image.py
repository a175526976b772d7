r"""
Fine-tune Stable Diffusion 1, 2 or XL with scaled long skips: the whole U-Net or a LoRA.

    accelerate launch train/finetune_text_to_image.py --pretrained_model_name_or_path some/sd --output_dir out \
        --train_data_dir pictures_with_captions --skip_scaling ls
    accelerate launch -m scalelong_diffusers.train.finetune_text_to_image --pretrained_model_name_or_path some/sd \
        --dataset_name user/pictures --skip_scaling cs --skip_scaling_warmup_steps 500 --lora_rank 16

Before the first step, the model's output is the same as without scaling. The output folder is a pipeline, which
`StableDiffusionPipeline.from_pretrained("out")` loads scaled after `import scalelong_diffusers`. With `--lora_rank`,
it holds only the LoRA and the scaling, for `load_adapter(pipe, "out")`.

There is no `--skip_init`, because a start of the skip layers would overwrite trained weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.training import (
    Batch,
    MonitoringConfig,
    OptimizationConfig,
    RunConfig,
    TrainingRun,
    option,
    parse_config,
    run_script,
)
from scalelong_diffusers.training.fine_tuning import FineTuning, FineTuningDataConfig
from scalelong_diffusers.training.text import grid_prompts, held_out_captions


@dataclass(frozen=True, kw_only=True)
class FineTuningConfig(RunConfig):
    # As in diffusers' own script: a constant learning rate and no EMA.
    data: FineTuningDataConfig = field(default_factory=FineTuningDataConfig)
    optimization: OptimizationConfig = field(
        default_factory=lambda: OptimizationConfig(
            learning_rate=1e-5, lr_scheduler="constant", adam_epsilon=1e-8, use_ema=False
        )
    )
    monitoring: MonitoringConfig = field(default_factory=lambda: MonitoringConfig(num_samples=4))

    pretrained_model_name_or_path: str = option(
        MISSING, "folder, file or Hub id of the pipeline", metavar="PATH", common=True
    )
    lora_rank: int | None = option(
        None,
        "train a LoRA of this rank and the gates instead of the whole U-Net",
        at_least=1,
        at_most=8192,
        on_resume="fixed",
        common=True,
    )
    lora_alpha: float | None = option(
        None,
        "the LoRA is scaled by lora_alpha / lora_rank (default: the rank, a scale of 1)",
        at_least=0.001,
        at_most=1_000_000,
    )
    noise_offset: float = option(
        0.0, "strength of noise that is constant over each channel; 0.1 is usual", at_least=0, at_most=10
    )
    proportion_empty_prompts: float = option(0.0, "probability of dropping a caption", at_least=0, below=1)
    use_8bit_adam: bool = option(False, "use the 8-bit AdamW of bitsandbytes")
    validation_prompts: tuple[str, ...] | None = option(
        None,
        "prompts of sample grids (default: held-out captions)",
        metavar="TEXT",
        on_resume="free",
        common=True,
    )
    guidance_scale: float = option(7.5, "guidance of sample grids; 1 turns it off", at_least=0, at_most=1000)

    def __post_init__(self):
        super().__post_init__()
        self.data.check_is_given()
        if self.lora_rank is not None and self.optimization.ema_snapshot_steps is not None:
            raise UserError(
                "--ema_snapshot_steps needs a whole U-Net, and --lora_rank trains an adapter: pass one of them"
            )

    @classmethod
    def implied_options(cls, values: Mapping) -> Mapping:
        return {"learning_rate": 1e-4} if values.get("lora_rank") is not None else {}


def train(config: FineTuningConfig):
    run = TrainingRun(config)
    tuning = FineTuning(run)
    pipe = tuning.pipe
    noising = tuning.noise_process()
    tuning.start()

    def losses_of(models: Mapping[str, nn.Module], batch: Batch) -> torch.Tensor:
        clean = run.encode_images(batch)
        noise = batch.normal_like(clean, "noise")
        if config.noise_offset:
            noise = noise + config.noise_offset * batch.normal_like(clean[:, :, :1, :1], "noise offset")
        timesteps = noising.timesteps(batch.uniform("timestep"))
        condition = tuning.encode_captions(batch)
        prediction = models["unet"](noising.add_noise(clean, noise, timesteps), timesteps, **condition).sample
        target = noising.target(clean, noise, timesteps)
        losses = F.mse_loss(prediction, target, reduction="none").mean(dim=(1, 2, 3))
        return noising.weights(timesteps) * losses

    def samples(numbers: Sequence[int], prompts: Sequence[str]) -> list:
        return pipe(
            [prompts[k % len(prompts)] for k in numbers],
            height=run.resolution,
            width=run.resolution,
            num_inference_steps=config.monitoring.num_inference_steps,
            guidance_scale=config.guidance_scale,
            generator=run.generators(numbers),
        ).images

    for batch in run:
        run.step(losses_of(run.models, batch))
        if run.is_due(config.monitoring.validation_steps):
            run.validate(losses_of)
        if run.is_due(config.monitoring.sample_steps):
            prompts = grid_prompts(config.validation_prompts, run.data, config.monitoring.num_samples)
            run.save_samples(partial(samples, prompts=prompts), prompts)
        if run.is_due(config.monitoring.eval_steps):
            run.evaluate(partial(samples, prompts=held_out_captions(run.data)))

    tuning.save()


def main(argv: Sequence[str] | None = None):
    train(parse_config(FineTuningConfig, __doc__, argv))


if __name__ == "__main__":
    run_script(main)
