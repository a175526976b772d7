"""
Train a plain U-ViT with single parts of constant scaling (CS), to find out which part matters.

    python benchmarks/without_factors.py --of_cs init|rate|both [flags of train_unconditional.py]

CS multiplies the i-th skip by k before `skip_proj` reads it: W (k x) = (k W) x. So a plain model with V = k W has the
same output. AdamW moves V like k W if V starts with the initial weights times k and trains with its learning rate
times k, eps / k (the gradients of V are the gradients of W divided by k) and weight decay / k (AdamW multiplies it by
the learning rate). So `both` equals CS as long as gradients are not clipped (the total gradient norm contains the
gradients of V). `init` and `rate` are its two parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass

import torch
import torch.nn.functional as F
from torch import nn

from scalelong_diffusers import UViTModel, remove_skip_scaling, skip_connections
from scalelong_diffusers.training import Batch, TrainingConfig, TrainingRun, option, parse_config, run_script


@dataclass(frozen=True, kw_only=True)
class EquivalentConfig(TrainingConfig):
    of_cs: str = option(MISSING, "part of CS to apply", choices=("init", "rate", "both"), on_resume="fixed")


def without_factors(model: UViTModel, config: EquivalentConfig) -> torch.optim.AdamW:
    """Remove the factors of a CS model and apply the part of CS that `--of_cs` names to its weights and optimizer."""
    factors = {model.get_submodule(skip.where).weight: skip.factor for skip in skip_connections(model)}
    remove_skip_scaling(model)
    if config.of_cs in ("init", "both"):
        with torch.no_grad():
            for weight, factor in factors.items():
                weight.mul_(factor)
    options, groups = config.optimization, []
    for parameter in model.parameters():
        factor = factors.get(parameter, 1.0)
        rate = factor if config.of_cs in ("rate", "both") else 1.0
        inverse = 1 / factor if config.of_cs == "both" else 1.0
        groups.append(
            {
                "params": [parameter],
                "lr": options.learning_rate * rate,
                "weight_decay": options.adam_weight_decay * inverse,
                "eps": options.adam_epsilon * inverse,
            }
        )
    return torch.optim.AdamW(groups, betas=(options.adam_beta1, options.adam_beta2), fused=True)


def train(config: EquivalentConfig):
    run = TrainingRun(config)
    run.load_data()
    unet = run.build_model()
    noising = run.noise_process()
    run.start({"unet": unet}, without_factors(unet, config))

    def losses_of(models: Mapping[str, nn.Module], batch: Batch) -> torch.Tensor:
        clean = batch["pixel_values"]
        noise = batch.normal_like(clean, "noise")
        timesteps = noising.timesteps(batch.uniform("timestep"))
        prediction = models["unet"](noising.add_noise(clean, noise, timesteps), timesteps).sample
        return F.mse_loss(prediction, noising.target(clean, noise, timesteps), reduction="none").mean(dim=(1, 2, 3))

    for batch in run:
        run.step(losses_of(run.models, batch))
        if run.is_due(config.monitoring.validation_steps):
            run.validate(losses_of)
    run.finish()


def main(argv: Sequence[str] | None = None):
    train(parse_config(EquivalentConfig, __doc__, argv))


if __name__ == "__main__":
    run_script(main)
