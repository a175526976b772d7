"""
Train a plain U-ViT with parts of what makes constant scaling (CS) differ, to find out which part matters.

    python benchmarks/without_factors.py --of_cs init|rate|both [flags of train_unconditional.py]

CS multiplies the i-th skip by k before `skip_proj` reads it: W (k x) = (k W) x. So a plain model with V = k W has the
same output. AdamW moves V like k W if V starts with the initial weights times k and trains with its learning rate
times k, eps / k (the gradients of V are the gradients of W divided by k) and weight decay / k (AdamW multiplies it by
the learning rate). So `both` equals CS as long as gradients are not clipped (the total gradient norm contains the
gradients of V). `init` and `rate` are its two parts.
"""

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from scalelong_diffusers import UViTModel, remove_skip_scaling, skip_connections
from scalelong_diffusers.data import Batch, DataConfig, load_training_data
from scalelong_diffusers.options import build_config
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
    validation_losses,
)


def without_factors(model: UViTModel, args: argparse.Namespace) -> torch.optim.AdamW:
    """Remove the factors of a CS model and apply the part of CS that `--of_cs` names to its weights and optimizer."""
    factors = {model.get_submodule(skip.where).weight: skip.factor for skip in skip_connections(model)}
    remove_skip_scaling(model)
    if args.of_cs in ("init", "both"):
        with torch.no_grad():
            for weight, factor in factors.items():
                weight.mul_(factor)
    groups = []
    for parameter in model.parameters():
        factor = factors.get(parameter, 1.0)
        rate = factor if args.of_cs in ("rate", "both") else 1.0
        inverse = 1 / factor if args.of_cs == "both" else 1.0
        groups.append(
            {
                "params": [parameter],
                "lr": args.learning_rate * rate,
                "weight_decay": args.adam_weight_decay * inverse,
                "eps": args.adam_epsilon * inverse,
            }
        )
    return torch.optim.AdamW(groups, betas=(args.adam_beta1, args.adam_beta2))


def main(argv: Sequence[str] | None = None):
    parser = training_parser("Train a plain U-ViT with parts of CS.", condition=None)
    parser.add_argument("--of_cs", choices=("init", "rate", "both"), required=True, help="part of CS to apply")
    args = parse_training_arguments(parser, argv)
    with mistakes_as_sentences():
        accelerator = start(args)
        settings = build_config(DataConfig, vars(args))
        data = load_training_data(settings, channels=None, needs_labels=False, needs_captions=False, seed=args.seed)
        unet = build_model(args, data)
        optimizer = without_factors(unet, args)
        process = NoiseProcess.from_arguments(args)
        loop = TrainingLoop(args, accelerator, {"unet": unet}, data, settle(args, accelerator, data, unet), optimizer)

    def losses_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        clean = batch["pixel_values"]
        noise = batch.normal_like(clean, "noise")
        timesteps = process.timesteps(batch.uniform("timestep")).to(clean.device)
        prediction = model(process.add_noise(clean, noise, timesteps), timesteps).sample
        return F.mse_loss(prediction, process.target(clean, noise, timesteps), reduction="none").mean(dim=(1, 2, 3))

    for batch in loop:
        loop.step(losses_of(loop.models["unet"], batch))
        if loop.is_due(args.validation_steps):
            loop.record(validation_losses(loop, losses_of))
    loop.finish()


if __name__ == "__main__":
    run_script(main)
