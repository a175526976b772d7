"""
Measure the cost of scaling: scaled and fused models against the stock class, interleaved in one run. The same for
self-conditioning. A U-ViT is compared with itself without scaling.

    python benchmarks/overhead.py [--models NAME ...] [--rounds 30] [--json]

Times are paired ratios with their 95 % interval. Memory is the peak of what a step allocates, counted by torch's
allocator, with and without the weights and optimizer state that persist (without them is the stricter number).
"""

import argparse
import copy
import json
import statistics

import torch
from diffusers import UNet2DConditionModel, UNet2DModel
from diffusers.pipelines.deprecated.unidiffuser.modeling_uvit import UTransformer2DModel
from measure import paired_ratio, paired_times, peak_allocated, round_count, verdict
from torch import nn

from scalelong_diffusers import UViTModel, apply_skip_scaling, fuse_skip_scaling
from scalelong_diffusers.experiments.results import machine
from scalelong_diffusers.models.mixin import scaled_class
from scalelong_diffusers.presets import get_preset


# "ls" is the paper's LS, "ls per skip" the default of `SkipScalingConfig("ls")`.
METHODS = {
    "cs": "cs",
    "ls": {"method": "ls", "shared": True, "init": "paper"},
    "ls per skip": {"method": "ls", "shared": False, "init": "identity"},
}
FUSED, CONDITIONED = "cs, fused", "self-conditioning"
TIME_LIMITS = {"cs": 1.01, "ls": 1.02, "ls per skip": 1.02, FUSED: 1.0, CONDITIONED: 1.02}
MEMORY_LIMITS = {"training": 1.02, "inference": 1.10}


def ddpm_cifar10() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Build the DDPM U-Net of CIFAR-10: 35.7 million parameters, 12 skips."""
    model = UNet2DModel(**get_preset("cifar10-unet").config)
    return model, {"sample": torch.randn(16, 3, 32, 32), "timestep": torch.randint(0, 1000, (16,))}


def half_width_sd15() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Build the U-Net of Stable Diffusion 1.5 at half its width: 12 skips."""
    model = UNet2DConditionModel(
        sample_size=32, block_out_channels=(160, 320, 640, 640), cross_attention_dim=384, attention_head_dim=8
    )
    inputs = {
        "sample": torch.randn(2, 4, 32, 32),
        "timestep": torch.randint(0, 1000, (2,)),
        "encoder_hidden_states": torch.randn(2, 77, 384),
    }
    return model, inputs


def unidiffuser() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Build a small U-ViT of UniDiffuser, which reads its skips by linear layers, so that factors can be fused."""
    model = UTransformer2DModel(
        sample_size=32, patch_size=2, in_channels=4, num_layers=6, num_attention_heads=2, attention_head_dim=64,
        norm_type="layer_norm",
    )  # fmt: skip
    return model, {"hidden_states": torch.randn(2, 4, 32, 32)}


def uvit() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Build U-ViT S/2: 44 million parameters, 6 skips."""
    return UViTModel.from_preset("cifar10-uvit-s-2"), {
        "sample": torch.randn(8, 3, 32, 32),
        "timestep": torch.randint(0, 1000, (8,)),
    }


MODELS = {
    "ddpm-cifar10, batch 16": ddpm_cifar10,
    "half-width sd1.5, batch 2": half_width_sd15,
    "unidiffuser, batch 2": unidiffuser,
    "u-vit s/2, batch 8": uvit,
}


def variants(stock: nn.Module) -> dict[str, nn.Module]:
    models = {name: apply_skip_scaling(copy.deepcopy(stock), config) for name, config in METHODS.items()}
    if isinstance(stock, UTransformer2DModel):
        models[FUSED] = fuse_skip_scaling(copy.deepcopy(models["cs"]))
    else:
        models[CONDITIONED] = self_conditioned(stock)
    return {"stock": stock} | models


def self_conditioned(stock: nn.Module) -> nn.Module:
    """Return a model with the weights of `stock` and self-conditioning."""
    model = scaled_class(type(stock)).from_config(dict(stock.config), self_conditioning=True)
    model.load_state_dict({**model.state_dict(), **stock.state_dict()})
    return model


def inference(model: nn.Module, inputs: dict[str, torch.Tensor]):
    def step():
        with torch.no_grad():
            model(**inputs)

    return step


def training(model: nn.Module, inputs: dict[str, torch.Tensor]):
    with torch.no_grad():
        target = torch.randn_like(model(**inputs).sample)  # UniDiffuser's output has another shape than its input
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step():
        loss = nn.functional.mse_loss(model(**inputs).sample, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


STEPS = {"inference": inference, "training": training}


def resident_bytes(model: nn.Module, step_name: str) -> int:
    """Return the bytes that stay between steps: the weights and, in training, AdamW's two moments."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return weights * (3 if step_name == "training" else 1)


def measure(build, rounds: int) -> list[dict]:
    rows = []
    for step_name, make_step in STEPS.items():
        torch.manual_seed(0)
        stock, inputs = build()
        models = variants(stock)
        steps = {name: make_step(model, inputs) for name, model in models.items()}
        peaks = {name: peak_allocated(step) for name, step in steps.items()}
        totals = {name: peak + resident_bytes(models[name], step_name) for name, peak in peaks.items()}
        # A forward pass alone is shorter and therefore noisier.
        times = paired_times(steps, 4 * rounds if step_name == "inference" else rounds)
        for method in list(models)[1:]:
            ratio = paired_ratio(times[method], times["stock"])
            rows.append(
                {
                    "step": step_name,
                    "method": method,
                    "stock_seconds": statistics.median(times["stock"]),
                    "time": ratio,
                    "time_verdict": verdict(ratio, TIME_LIMITS[method]),
                    "stock_peak_mib": peaks["stock"] / 2**20,
                    "peak_ratio": peaks[method] / peaks["stock"],
                    "total_ratio": totals[method] / totals["stock"],
                    "memory_verdict": "ok"
                    if peaks[method] / peaks["stock"] <= MEMORY_LIMITS[step_name]
                    else f"above {MEMORY_LIMITS[step_name]}",
                }
            )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME",
        help=f"some of {', '.join(map(repr, MODELS))} (default: all)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=round_count, default=30, help="number of rounds (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    results = {name: measure(MODELS[name], arguments.rounds) for name in arguments.models}
    if arguments.json:
        print(json.dumps({"machine": machine(), "rounds": arguments.rounds, "results": results}))
        return
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    print(f"{'model':<26} {'step':<10} {'method':<17} {'time / stock [95 %]':<26} {'step memory':<18} with weights")
    for name, rows in results.items():
        for row in rows:
            time = "{ratio:.4f} [{low:.4f}, {high:.4f}]".format(**row["time"])
            memory = f"{row['peak_ratio']:.4f} {row['memory_verdict']}"
            print(
                f"{name:<26} {row['step']:<10} {row['method']:<17} {time} {row['time_verdict']:<13}"
                f"{memory:<18} {row['total_ratio']:.4f}"
            )


if __name__ == "__main__":
    main()
