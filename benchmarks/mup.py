"""
Is the learning rate of a narrow U-ViT right for wider and deeper ones, with muP and without?

    python benchmarks/mup.py coordinates    how far features move in four steps, over width and depth: minutes
    python benchmarks/mup.py rates          final loss over learning rates, widths and depths: hours
    python benchmarks/mup.py report         tables and figure of the finished runs

Methods: the plain U-ViT, and the residual start of `convergence.py`. Heads are 16 wide. The base width is 64.

Coordinate check: models of 8 layers on one fixed batch of 16 noisy images take four steps of AdamW. Measured is the
mean |change| of the output of each block, branch and skip layer, and of the model, for three seeds. The slope of its
logarithm over the logarithm of the width should be 0; the check passes if all slopes are within 0.15. It is repeated
with the standard parametrization, and with each rule of muP switched off: then it should fail. Over the depth, at
width 64, the changes are measured relative to the outputs before the steps, with both rules of `mup_base_depth`, with
each of them alone, and with none. The skip layers of the residual start learn at a tenth of the rate, as in training.

Learning rates: the package's script on Fashion-MNIST at 16 x 16 pixels, batches of 32, 500 steps, 50 warm-up steps
and then a constant rate, AdamW with weight decay 0.03, clipping at 1, EMA decay of at most 0.99, 12 layers and patch
size 4. A patch has 16 values, fewer than the narrowest model has channels, so that no width limits what a model can
predict. The rates are powers of 2, from 2^-12 to 2^-4. From the middle, they are tried outwards until two in a row end
above 1.25 times the lowest loss, or diverge: they stop, or end above 0.8. The final loss is the mean of the last three
of ten validations in EMA weights. The residual start is also trained with 20 and 28 layers, with `mup_base_depth` and
without. The U-Net has three levels, 16, 32 or 64 channels at the highest resolution, and a last layer that starts at
zero. Two more seeds repeat the best rate of each model, and the largest model at the best rate of the base model.

Each run is a process with one thread. To resume after an interruption, run the same command again.
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scalelong_diffusers import UViTModel
from scalelong_diffusers.charts import Panel, figure
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.experiments.fashion_mnist import data_source
from scalelong_diffusers.experiments.results import ResultFile
from scalelong_diffusers.experiments.tables import markdown_table
from scalelong_diffusers.experiments.trainings import Scheduler, exit_on_signals
from scalelong_diffusers.models.mup import mup_scales, param_groups


HERE = Path(__file__).parent
FIGURES = HERE.parent / "docs" / "images"
METHODS = {"plain": {}, "residual": {"skip_init": "sum", "block_scale": "rezero"}}
SKIP_LR_SCALE = {"plain": 1.0, "residual": 0.1}
BASE_WIDTH, HEAD_WIDTH, BASE_DEPTH = 64, 16, 12

# Coordinate check
CHECKED_WIDTHS, CHECKED_DEPTHS, CHECK_SEEDS = (32, 64, 128, 256, 512), (12, 20, 28), (0, 1, 2)
CHECK_LAYERS, CHECK_STEPS, LIMIT = 8, 4, 0.15
CHECK_RATE = {"plain": 1e-3, "residual": 1e-2}
RULES = ("init", "learning rate", "output", "eps")
STANDARD, MUP = "standard", "muP"
BOTH, BRANCHES, SKIP_LAYERS, NONE = DEPTH_RULES = ("both", "branches", "skip layers", "none")

# Learning rates
UNET = "U-Net"
RATE_METHODS = ("residual", UNET, "plain")
WIDTHS, DEPTHS = (32, 64, 128, 256), (12, 20, 28)
UNET_WIDTHS, UNET_LAYERS = (16, 32, 64), 3
EXPONENTS, TOO_HIGH, OUTWARDS, SEEDS = range(-12, -3), 1.25, 2, (0, 1, 2)
DIVERGED = 0.8  # a model that predicts zero has a loss of 1
RESOLUTION, PATCH_SIZE = 16, 4
STEPS, VALIDATIONS = 500, 10
TRAINING = {
    "resolution": RESOLUTION,
    "train_batch_size": 32,
    "max_train_steps": STEPS,
    "lr_warmup_steps": 50,
    "adam_weight_decay": 0.03,
    "ema_decay": 0.99,
    "validation_size": 256,
    "validation_steps": STEPS // VALIDATIONS,
    "logging_steps": STEPS // VALIDATIONS,
    "sample_steps": 0,
    "checkpointing_steps": STEPS // 2,
    "skip_scaling": "none",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("coordinates", "rates", "report"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trainings at a time (default: one per core)")
    parser.add_argument("--data", default="/usr/share/datasets/fashion-mnist", help="folder with Fashion-MNIST")
    parser.add_argument("--folder", type=Path, default=Path("runs/mup"), help="folder of the runs")
    arguments = parser.parse_args()
    exit_on_signals()
    checks = ResultFile(HERE / "mup_coordinates.jsonl", Check)
    rates = ResultFile(HERE / "mup_rates.jsonl", RateRun)
    try:
        if arguments.part == "coordinates":
            run_checks(checks)
        if arguments.part == "rates":
            run_rates(rates, arguments)
    except KeyboardInterrupt:
        sys.exit("interrupted; run the same command again to resume")
    except UserError as error:
        parser.error(str(error))
    print(report(checks, rates))
    draw_figure(rates)


# Coordinate check


@dataclass(frozen=True)
class Check:
    """
    A model that is trained for a few steps.

    Args:
        rule: "muP", "standard", or the rule of muP that is switched off.
        depth_rule: the rule of `mup_base_depth` that is in force.
    """

    method: str
    rule: str
    width: int
    seed: int
    layers: int = CHECK_LAYERS
    depth_rule: str = NONE


def planned_checks() -> list[Check]:
    width_checks = [
        Check(method, rule, width, seed)
        for method in METHODS
        for rule in (MUP, STANDARD, *RULES)
        for width in CHECKED_WIDTHS
        for seed in CHECK_SEEDS
    ]
    depth_checks = [
        Check(method, MUP, BASE_WIDTH, seed, layers, depth_rule)
        for method in METHODS
        for depth_rule in DEPTH_RULES
        for layers in CHECKED_DEPTHS
        for seed in CHECK_SEEDS
    ]
    return width_checks + depth_checks


def run_checks(results: ResultFile[Check]):
    torch.set_num_threads(1)
    with results.locked():
        for check in planned_checks():
            if check not in results:
                results.add(check, feature_changes(check))


def feature_changes(check: Check) -> dict[str, dict[str, float]]:
    """Train a model for a few steps. Return the mean |output| of its parts before, and the mean |change|."""
    torch.manual_seed(check.seed)
    model = UViTModel(
        sample_size=16, patch_size=4, hidden_size=check.width, num_layers=check.layers, num_class_embeds=11,
        num_attention_heads=check.width // HEAD_WIDTH, mup_base_width=BASE_WIDTH,
        mup_base_depth=BASE_DEPTH if check.depth_rule in (BOTH, BRANCHES) else None, **METHODS[check.method],
    )  # fmt: skip
    optimizer = torch.optim.AdamW(parameter_groups(model, check), weight_decay=0)
    draw = torch.Generator().manual_seed(check.seed)
    noise, labels = torch.randn(16, 3, 16, 16, generator=draw), torch.randint(0, 11, (16,), generator=draw)
    timesteps = torch.randint(0, 1000, (16,), generator=draw)
    clean = (2 * torch.rand(16, 3, 1, 1, generator=draw) - 1).expand_as(noise)
    share = (1 - timesteps / 1000).view(-1, 1, 1, 1)
    noisy = share.sqrt() * clean + (1 - share).sqrt() * noise

    outputs: dict[str, torch.Tensor] = {}
    for name, module in observed(model):
        module.register_forward_hook(lambda module, args, output, name=name: outputs.update({name: output}))

    def predict() -> torch.Tensor:
        outputs["output"] = model(noisy, timesteps, class_labels=labels).sample
        return outputs["output"]

    with torch.no_grad():
        predict()
    before = dict(outputs)
    for _ in range(CHECK_STEPS):
        optimizer.zero_grad()
        (predict() - noise).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        predict()
    return {
        "sizes": {name: output.abs().mean().item() for name, output in before.items()},
        "changes": {name: (output - before[name]).abs().mean().item() for name, output in outputs.items()},
    }


def observed(model: UViTModel) -> Iterable[tuple[str, nn.Module]]:
    """Yield the blocks, their branches, and their skip layers."""
    for name, module in model.named_modules():
        if type(module).__name__ in ("UViTBlock", "UViTAttention", "UViTMLP") or name.endswith("_proj"):
            yield name, module


def parameter_groups(model: UViTModel, check: Check) -> list[dict[str, Any]]:
    """Return the optimizer's groups without the rules that are switched off, and undo these in the new weights."""
    rate, slow = CHECK_RATE[check.method], SKIP_LR_SCALE[check.method]
    groups = param_groups([model], model.parameters(), rate, weight_decay=0, eps=1e-8, skip_lr_scale=slow)
    groups = {p: {**group, "params": [p]} for group in groups for p in group["params"]}
    for name, scale in mup_scales(model).items():
        weight, is_skip_layer = model.get_parameter(name), "blocks" in name and "_proj" in name
        init, learning_rate = ("output", "output") if scale.role == "output" else ("init", "learning rate")
        if check.rule in (STANDARD, init) and not (is_skip_layer and "skip_init" in METHODS[check.method]):
            weight.data /= scale.init_std
        if check.rule in (STANDARD, learning_rate):
            groups[weight]["lr"] *= scale.weight_decay  # m, if the learning rate is divided by it
        if check.rule in (STANDARD, "eps"):
            groups[weight]["eps"] /= scale.eps
        if is_skip_layer and check.depth_rule == BRANCHES:
            groups[weight]["lr"] /= BASE_DEPTH / check.layers
        if is_skip_layer and check.depth_rule == SKIP_LAYERS:
            groups[weight]["lr"] *= BASE_DEPTH / check.layers
    return list(groups.values())


def slope(sizes: Iterable[int], changes: Iterable[float]) -> float:
    """Return the slope of a line through the logarithms of the changes over the logarithms of the sizes."""
    x, y = ([math.log2(value) for value in values] for values in (sizes, changes))
    return statistics.linear_regression(x, y).slope


def width_slopes(results: ResultFile[Check], method: str, rule: str) -> dict[str, float]:
    """Return the slope over the width of each part of the model."""
    by_width = [
        [results.lines[Check(method, rule, width, seed)]["changes"] for seed in CHECK_SEEDS]
        for width in CHECKED_WIDTHS
    ]
    return {
        name: slope(CHECKED_WIDTHS, [statistics.mean(changes[name] for changes in seeds) for seeds in by_width])
        for name in by_width[0][0]
    }


def width_table(results: ResultFile[Check]) -> str:
    rows = []
    for method in METHODS:
        for rule in (MUP, *RULES, STANDARD):
            slopes = width_slopes(results, method, rule)
            outside = sum(abs(value) > LIMIT for value in slopes.values())
            shown = rule if rule in (MUP, STANDARD) else f"muP without its rule for {rule}"
            values = (slopes["output"], min(slopes.values()), max(slopes.values()))
            verdict = "passes" if not outside else f"fails ({outside} of {len(slopes)} parts)"
            rows.append([method, shown, *(f"{value:+.2f}" for value in values), verdict])
    return markdown_table(("method", "parametrization", "output", "lowest slope", "highest slope", "check"), rows)


def depth_table(results: ResultFile[Check]) -> str:
    """Return the relative change of the middle and of the last block, and the change of the output, over the depth."""
    rows = []
    for method in METHODS:
        for depth_rule in reversed(DEPTH_RULES):
            cells = []
            for part in ("middle block", "last block", "output"):
                for layers in CHECKED_DEPTHS:
                    name = {"middle block": "mid_block", "last block": f"out_blocks.{layers // 2 - 1}"}.get(part, part)
                    checks = [Check(method, MUP, BASE_WIDTH, seed, layers, depth_rule) for seed in CHECK_SEEDS]
                    lines = [results.lines[check] for check in checks]
                    sizes = [1.0 if part == "output" else line["sizes"][name] for line in lines]
                    cells.append(
                        f"{statistics.mean(line['changes'][name] / size for line, size in zip(lines, sizes)):.3f}"
                    )
            rows.append([method, depth_rule, *cells])
    parts = ("middle block", "last block", "output")
    heads = [f"{part}, {layers} layers" for part in parts for layers in CHECKED_DEPTHS]
    return markdown_table(("method", "rules for the depth", *heads), rows)


# Learning rates


@dataclass(frozen=True)
class RateSweep:
    """A model that is trained with several learning rates."""

    method: str
    has_mup: bool
    width: int
    layers: int
    has_base_depth: bool = False

    def run(self, exponent: int, seed: int = SEEDS[0]) -> "RateRun":
        return RateRun(**asdict(self), exponent=exponent, seed=seed)


@dataclass(frozen=True, kw_only=True)
class RateRun(RateSweep):
    """A training with the learning rate 2^exponent."""

    exponent: int
    seed: int

    @property
    def name(self) -> str:
        parts = ("muP" if self.has_mup else STANDARD, f"w{self.width}", f"d{self.layers}")
        depth = "-depth" if self.has_base_depth else ""
        return f"{self.method}-{'-'.join(parts)}{depth}-2e{self.exponent}-seed{self.seed}"

    @property
    def model(self) -> dict[str, Any]:
        """The config of the model."""
        if self.method == UNET:
            return {**_UNET_CONFIG, **unet_widths(self.width)}
        return {
            "_class_name": "UViTModel",
            **{"sample_size": RESOLUTION, "in_channels": 1, "patch_size": PATCH_SIZE},
            **{"hidden_size": self.width, "num_attention_heads": self.width // HEAD_WIDTH, "num_layers": self.layers},
            **({"mup_base_width": BASE_WIDTH} if self.has_mup else {}),
            **({"mup_base_depth": BASE_DEPTH} if self.has_base_depth else {}),
            **METHODS[self.method],
        }


def unet_widths(width: int) -> dict[str, Any]:
    """Return the entries of a U-Net's config that depend on its width."""
    return {"block_out_channels": [width, 2 * width, 2 * width], "norm_num_groups": width // 2}


_UNET_CONFIG = {
    "_class_name": "ScaleLongUNet2DModel",
    "sample_size": RESOLUTION,
    "in_channels": 1,
    "out_channels": 1,
    "layers_per_block": 2,
    "attention_head_dim": 16,
    "down_block_types": ["DownBlock2D", "DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D", "UpBlock2D"],
}


@dataclass(frozen=True)
class Comparison:
    """Models of several sizes. Does the best learning rate of the base model fit the largest one?"""

    method: str
    parametrization: str
    varied: str
    models: dict[int, RateSweep]
    base: int

    @property
    def largest(self) -> RateSweep:
        return self.models[max(self.models)]


def comparisons() -> list[Comparison]:
    """Return all comparisons, in the order of their runs."""
    over_width = [compared_widths(method, has_mup) for method in RATE_METHODS for has_mup in (True, False)]
    return [*over_width, compared_depths(has_base_depth=False), compared_depths(has_base_depth=True)]


def compared_widths(method: str, has_mup: bool) -> Comparison:
    """Compare widths. At the base width, muP changes nothing, so both parametrizations share its runs."""
    widths, layers = (UNET_WIDTHS, UNET_LAYERS) if method == UNET else (WIDTHS, BASE_DEPTH)
    base = UNET_WIDTHS[0] if method == UNET else BASE_WIDTH
    models = {width: RateSweep(method, has_mup or width == base, width, layers) for width in widths}
    return Comparison(method, MUP if has_mup else STANDARD, "width", models, base)


def compared_depths(has_base_depth: bool) -> Comparison:
    """Compare depths. At the base depth, `mup_base_depth` changes nothing."""
    models = {n: RateSweep("residual", True, BASE_WIDTH, n, has_base_depth and n != BASE_DEPTH) for n in DEPTHS}
    return Comparison("residual", f"{MUP}, {'' if has_base_depth else 'no '}base depth", "layers", models, BASE_DEPTH)


def planned_rates(results: ResultFile[RateRun]) -> list[RateRun]:
    return [run for comparison in comparisons() for run in next_runs(results, comparison)]


def next_runs(results: ResultFile[RateRun], comparison: Comparison) -> list[RateRun]:
    """Return the next learning rates of the first seed. If they are finished, return the runs of the other seeds."""
    models = comparison.models.values()
    if runs := [model.run(k) for model in models for k in next_exponents(results, model)]:
        return runs
    rates = [(model, best_exponent(results, model)) for model in models]
    rates.append((comparison.largest, best_exponent(results, comparison.models[comparison.base])))
    return [run for model, k in rates for seed in SEEDS if (run := model.run(k, seed)) not in results]


def next_exponents(results: ResultFile[RateRun], model: RateSweep) -> list[int]:
    """Return the learning rates that are still to be tried."""
    losses = first_losses(results, model)
    middle, lowest = EXPONENTS[len(EXPONENTS) // 2], min(losses.values(), default=math.inf)
    if middle not in losses:
        return [middle]
    waiting = []
    for direction in (-1, 1):
        in_a_row, k = 0, middle + direction
        while k in EXPONENTS and k in losses and in_a_row < OUTWARDS:
            is_too_high = losses[k] > TOO_HIGH * lowest or math.isinf(losses[k])
            in_a_row, k = in_a_row + 1 if is_too_high else 0, k + direction
        if k in EXPONENTS and in_a_row < OUTWARDS:
            waiting.append(k)
    return waiting


def first_losses(results: ResultFile[RateRun], model: RateSweep) -> dict[int, float]:
    """Return the final losses of the first seed by exponent."""
    return {k: final_loss(results, model.run(k)) for k in EXPONENTS if model.run(k) in results}


def best_exponent(results: ResultFile[RateRun], model: RateSweep) -> int:
    losses = first_losses(results, model)
    return min(losses, key=losses.get)


class RateScheduler(Scheduler[RateRun]):
    def __init__(self, folder: Path, data: dict[str, str], results: ResultFile[RateRun], jobs: int):
        super().__init__(folder, results, jobs)
        self.data = data

    def script(self, run: RateRun) -> list[str]:
        if run.method != UNET:
            return super().script(run)
        base = unet_widths(UNET_WIDTHS[0]) if run.has_mup else {}
        return [str(HERE / "unet_with_mup.py"), json.dumps(base)]

    def settings(self, run: RateRun) -> dict[str, Any]:
        own = {"learning_rate": 2**run.exponent, "seed": run.seed, "skip_lr_scale": SKIP_LR_SCALE.get(run.method, 1.0)}
        return {**TRAINING, **self.data, **own}

    def outcome(self, run: RateRun) -> str:
        return f"loss {final_loss(self.results, run):.4f}"


def run_rates(results: ResultFile[RateRun], arguments: argparse.Namespace):
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with results.locked():
        scheduler = RateScheduler(folder, data_source(arguments.data, folder), results, arguments.jobs)
        scheduler.run_all(partial(planned_rates, results))


def final_loss(results: ResultFile[RateRun], run: RateRun) -> float:
    """Return the final loss of a finished run. It is infinite if the run diverged."""
    line = results.lines[run]
    losses = [math.inf if loss is None else loss for _, loss, _ in line["evaluations"]]
    last = statistics.mean(losses[-3:]) if losses else math.inf
    return last if line["stopped"] is None and last < DIVERGED else math.inf


def rate_table(results: ResultFile[RateRun]) -> str:
    """Return the final losses of the first seed for the models whose learning rates are finished."""
    rows = []
    for model in dict.fromkeys(model for comparison in comparisons() for model in comparison.models.values()):
        if next_exponents(results, model):
            continue
        losses = first_losses(results, model)
        cells = ["" if k not in losses else _shown(losses[k]) for k in EXPONENTS]
        best = best_exponent(results, model) - EXPONENTS[0]
        cells[best] = f"**{cells[best]}**"
        depth = f"{model.layers}{' (scaled)' if model.has_base_depth else ''}"
        rows.append([model.method, MUP if model.has_mup else STANDARD, str(model.width), depth, *cells])
    return markdown_table(("method", "parametrization", "width", "layers", *(f"2^{k}" for k in EXPONENTS)), rows)


def transfer_table(results: ResultFile[RateRun]) -> str:
    """Return the best rates and losses of the finished comparisons, and how well the base's rate fits the largest."""
    rows = []
    for comparison in comparisons():
        if next_runs(results, comparison):
            continue
        models = comparison.models
        best = {size: best_exponent(results, model) for size, model in models.items()}
        rows.append(
            [
                *(comparison.method, comparison.parametrization),
                f"{comparison.varied} {', '.join(map(str, models))}",
                ", ".join(f"2^{k}" for k in best.values()),
                ", ".join(mean_loss(results, models[size], k) for size, k in best.items()),
                mean_loss(results, comparison.largest, best[comparison.base]),
            ]
        )
    heads = ("method", "parametrization", "models", "best rates", "final losses", "largest model at the base's rate")
    return markdown_table(heads, rows)


def mean_loss(results: ResultFile[RateRun], model: RateSweep, exponent: int) -> str:
    """Return the mean final loss of all seeds, and their standard deviation."""
    losses = [final_loss(results, model.run(exponent, seed)) for seed in SEEDS]
    if diverged := sum(map(math.isinf, losses)):
        return f"{diverged} of {len(losses)} diverge"
    return f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}"


def _shown(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "diverges"


# Report


def report(checks: ResultFile[Check], rates: ResultFile[RateRun]) -> str:
    """Return all tables as Markdown sections."""
    sections = {}
    if all(check in checks for check in planned_checks()):
        sections = {"Coordinate check": width_table(checks), "Coordinate check over the depth": depth_table(checks)}
    sections["Best learning rates"] = transfer_table(rates)
    sections["Learning rates"] = rate_table(rates)
    return "\n\n".join(f"### {title}\n\n{table}" for title, table in sections.items())


def draw_figure(results: ResultFile[RateRun]):
    """Draw the final loss over the learning rate for each width, without muP and with it, for light and dark pages."""
    panels = []
    for has_mup in (False, True):
        models = compared_widths("residual", has_mup).models
        if any(next_exponents(results, model) for model in models.values()):
            return
        curves = {
            f"width {width}": [(k, loss) for k, loss in first_losses(results, model).items() if math.isfinite(loss)]
            for width, model in models.items()
        }
        name = f"final validation loss, {'with muP' if has_mup else 'standard parametrization'}"
        panels.append(Panel(name, curves, "log2 of the learning rate", EXPONENTS[0], mark_lowest=True))
    title = "Final loss over the learning rate, for four widths"
    for name in ("light", "dark"):
        (FIGURES / f"mup-{name}.svg").write_text(figure(panels, title, dark=name == "dark"))


if __name__ == "__main__":
    main()
