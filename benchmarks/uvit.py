"""
Compare `UViTModel` with a straightforward implementation with the same weights, interleaved in one run.

    python benchmarks/uvit.py [--rounds 12] [--only models|scaling|parts] [--model S/2] [--num_layers 12] [--compile]
        [--json]
    OMP_NUM_THREADS=1 python benchmarks/uvit.py --only compile_time [--rounds 6] [--model S/2]

The straightforward model multiplies the skip by its factor, concatenates it to the hidden state and applies one linear
layer. It uses torch's attention, in the autocast dtype and, as a separate row, in float32. Speed is the time of the
straightforward model / ours with its 95 % interval, so values above 1 mean that ours is faster. Memory is ours /
straightforward, the peak of what a step allocates, counted by torch's allocator. `compile_time` is the time of the
first training step with `--compile_repeated_blocks` of the scripts / compiled as a whole.
"""

import argparse
import contextlib
import json
import os
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from measure import CLOCK, paired_ratio, paired_times, peak_allocated, round_count
from torch import nn
from torch._inductor import config as inductor_config

from scalelong_diffusers import UViTModel, apply_skip_scaling
from scalelong_diffusers.experiments.results import machine
from scalelong_diffusers.models.conversion import to_reference
from scalelong_diffusers.training.run import compile_model


BATCH = 8
MODELS = {"S/2": "cifar10-uvit-s-2", "S/2 Deep": "mscoco-uvit-s-2-deep"}
METHODS = {
    "cs": "cs",
    "ls": {"method": "ls", "shared": True, "init": "paper"},
    "ls per skip": {"method": "ls", "shared": False, "init": "paper"},
}
CHANGES = {}  # of the presets
DTYPES = {"fp32": None, "bf16": torch.bfloat16}


class StraightforwardAttention(nn.Module):
    def __init__(self, width: int, heads: int, attention_in_fp32: bool):
        super().__init__()
        self.heads = heads
        self.attention_in_fp32 = attention_in_fp32
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.attention_in_fp32:
            with torch.autocast(x.device.type, enabled=False):
                x = F.scaled_dot_product_attention(*qkv.float())
        else:
            x = F.scaled_dot_product_attention(*qkv)
        return self.proj(x.transpose(1, 2).flatten(2))


class StraightforwardMLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class StraightforwardBlock(nn.Module):
    def __init__(self, width: int, heads: int, has_skip: bool, attention_in_fp32: bool):
        super().__init__()
        self.skip_linear = nn.Linear(2 * width, width) if has_skip else None
        self.norm1 = nn.LayerNorm(width)
        self.attn = StraightforwardAttention(width, heads, attention_in_fp32)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = StraightforwardMLP(width)

    def add_skip(self, x: torch.Tensor, skip: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
        if not isinstance(factor, float) or factor != 1.0:
            skip = skip * factor
        return self.skip_linear(torch.cat([x, skip], dim=-1))

    def forward(self, x: torch.Tensor, skip: torch.Tensor | None = None, factor: float | torch.Tensor = 1.0):
        if skip is not None:
            x = self.add_skip(x, skip, factor)
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class StraightforwardUViT(nn.Module):
    """A U-ViT with straightforward blocks. Embeddings, gates and output layer come from our model."""

    def __init__(self, ours: UViTModel, attention_in_fp32: bool):
        super().__init__()
        config = ours.config
        self.ours = ours
        half = config.num_layers // 2

        def blocks(n: int, has_skip: bool) -> nn.ModuleList:
            block = (config.hidden_size, config.num_attention_heads, has_skip, attention_in_fp32)
            return nn.ModuleList(StraightforwardBlock(*block) for _ in range(n))

        self.in_blocks, self.mid_block, self.out_blocks = blocks(half, False), blocks(1, False)[0], blocks(half, True)
        weights = to_reference(ours.state_dict(), half)
        own = {key for key in self.state_dict() if not key.startswith("ours.")}
        self.load_state_dict({key: weights[key] for key in own}, strict=False)
        for name in ("in_blocks", "mid_block", "out_blocks"):  # only the blocks of this class are trained and counted
            setattr(ours, name, None)

    def forward(self, sample, timestep, encoder_hidden_states=None):
        ours = self.ours
        grid = tuple(size // ours.config.patch_size for size in sample.shape[2:])
        x = ours._embed(sample, timestep, encoder_hidden_states, None) + ours._positions(grid)
        skips = []
        for block in self.in_blocks:
            x = block(x)
            skips.append(x)
        x = self.mid_block(x)
        for block in self.out_blocks:
            i, skip = len(skips), skips.pop()
            x = block(x, skip, ours.skip_scaler.factor(skip, i))
        return ours.conv_out(ours._assemble(ours.proj_out(ours.norm(x[:, ours.num_extra_tokens :])), grid))


def build(preset: str, scaling="none") -> UViTModel:
    torch.manual_seed(0)
    return apply_skip_scaling(UViTModel.from_preset(preset, **CHANGES), scaling)


def inputs_of(model: UViTModel) -> dict[str, torch.Tensor]:
    config = model.config
    size = config.sample_size
    inputs = {"sample": torch.randn(BATCH, config.in_channels, size, size), "timestep": torch.rand(BATCH) * 999}
    if config.cross_attention_dim:
        inputs["encoder_hidden_states"] = torch.randn(BATCH, config.context_length, config.cross_attention_dim)
    return inputs


def autocast(dtype: torch.dtype | None):
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def forward_step(model: nn.Module, inputs: dict[str, torch.Tensor], dtype: torch.dtype | None) -> Callable[[], None]:
    def step():
        with torch.no_grad(), autocast(dtype):
            model(**inputs)

    return step


def training_step(model: nn.Module, inputs: dict[str, torch.Tensor], dtype: torch.dtype | None) -> Callable[[], None]:
    noise = torch.randn_like(inputs["sample"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)  # as in the training scripts

    def step():
        with autocast(dtype):
            output = model(**inputs)
            loss = F.mse_loss((output if isinstance(output, torch.Tensor) else output.sample).float(), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


STEPS = {"forward": forward_step, "training": training_step}


def speeds(steps: dict[str, Callable[[], None]], rounds: int, reference: str) -> dict[str, dict[str, float]]:
    """Return the speed of `reference` relative to each other step."""
    times = paired_times(steps, rounds, clock=CLOCK)
    return {name: paired_ratio(times[name], times[reference]) for name in steps if name != reference}


def compare_models(preset: str, rounds: int, compiled: bool) -> list[dict]:
    rows = []
    for dtype_name, dtype in DTYPES.items():
        models = {
            "ours": build(preset),
            "straightforward": StraightforwardUViT(build(preset), attention_in_fp32=False),
            "straightforward, attention in fp32": StraightforwardUViT(build(preset), attention_in_fp32=True),
        }
        inputs = inputs_of(models["ours"])
        check_equal(models, inputs)
        runnable = {name: torch.compile(model) if compiled else model for name, model in models.items()}
        if compiled:
            runnable["straightforward, not compiled"] = models["straightforward"]
        for step_name, make_step in STEPS.items():
            steps = {name: make_step(model, inputs, dtype) for name, model in runnable.items()}
            peaks = {name: peak_allocated(step) for name, step in steps.items()}
            for name, speed in speeds(steps, rounds, "ours").items():
                row = {"dtype": dtype_name, "step": step_name, "against": name, "speed": speed}
                rows.append(row | {"memory": peaks["ours"] / peaks[name], "ours_mib": peaks["ours"] / 2**20})
    return rows


def check_equal(models: dict[str, nn.Module], inputs: dict[str, torch.Tensor]):
    with torch.no_grad():
        outputs = [model(**inputs) for model in models.values()]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0].sample, rtol=1e-4, atol=1e-4)


def compare_scaling(preset: str, rounds: int, compiled: bool) -> list[dict]:
    """Compare CS and LS with the plain model, all with our implementation."""
    rows = []
    for dtype_name, dtype in DTYPES.items():
        models = {"plain": build(preset)} | {name: build(preset, entry) for name, entry in METHODS.items()}
        inputs = inputs_of(models["plain"])
        runnable = {name: torch.compile(model) if compiled else model for name, model in models.items()}
        for step_name, make_step in STEPS.items():
            steps = {name: make_step(model, inputs, dtype) for name, model in runnable.items()}
            peaks = {name: peak_allocated(step) for name, step in steps.items()}
            times = paired_times(steps, rounds, clock=CLOCK)
            for name in METHODS:
                row = {"dtype": dtype_name, "step": step_name, "method": name}
                row["time"] = paired_ratio(times[name], times["plain"])
                rows.append(row | {"memory": peaks[name] / peaks["plain"]})
    return rows


def compare_parts(rounds: int) -> list[dict]:
    """Compare forward and backward passes of the parts of a decoder block, with the shapes of S/2."""
    rows = []
    for scaling in ("none", "cs", "ls"):
        for part, functions in decoder_parts(scaling).items():
            for dtype_name, dtype in DTYPES.items():
                steps = {name: forward_backward(function, dtype) for name, function in functions.items()}
                speed = speeds(steps, 4 * rounds, "ours")["straightforward"]
                peaks = {name: peak_allocated(step) for name, step in steps.items()}
                memory = peaks["ours"] / peaks["straightforward"]
                rows.append({"part": part, "dtype": dtype_name, "speed": speed, "memory": memory})
    return rows


def decoder_parts(scaling: str) -> dict[str, dict[str, Callable[[], torch.Tensor]]]:
    """Return each part of the first decoder block in both implementations."""
    config = METHODS.get(scaling, scaling)
    model = build(MODELS["S/2"], config)
    ours = model.out_blocks[0]
    theirs = StraightforwardUViT(build(MODELS["S/2"], config), attention_in_fp32=False).out_blocks[0]
    hidden, skip = (torch.randn(BATCH, 257, 512, requires_grad=True) for _ in range(2))

    def factor() -> float | torch.Tensor:
        return model.skip_scaler.factor(skip, len(model.out_blocks))

    skip_path = {
        "ours": lambda: ours._add_skip(hidden, skip, factor()),
        "straightforward": lambda: theirs.add_skip(hidden, skip, factor()),
    }
    if scaling != "none":
        return {f"skip path, {scaling}": skip_path}
    return {
        "skip path, plain": skip_path,
        "attention": {"ours": lambda: ours.attn(hidden, None), "straightforward": lambda: theirs.attn(hidden)},
        "MLP": {"ours": lambda: ours.mlp(hidden), "straightforward": lambda: theirs.mlp(hidden)},
    }


def compare_compile_time(preset: str, rounds: int) -> list[dict]:
    """Compare the processor time of the first training step, of this process and of the compilers that it starts."""
    steps = {}
    for name, only_blocks in {"whole": False, "repeated blocks": True}.items():
        model = build(preset)
        compile_model(model, only_blocks)
        steps[name] = first_step(training_step(model, inputs_of(model), dtype=None))
    with inductor_config.patch(compile_threads=1, force_disable_caches=True):
        times = paired_times(steps, rounds, warmup=0, clock=lambda: sum(os.times()[:4]))
    seconds = {f"{name}_seconds": statistics.median(values) for name, values in times.items()}
    return [{"step": "first", "time": paired_ratio(times["repeated blocks"], times["whole"]), **seconds}]


def first_step(step: Callable[[], None]) -> Callable[[], None]:
    def compile_and_run():
        torch.compiler.reset()
        step()

    return compile_and_run


def forward_backward(function: Callable[[], torch.Tensor], dtype: torch.dtype | None) -> Callable[[], None]:
    gradient = torch.randn_like(function())

    def step():
        with autocast(dtype):
            result = function()
        result.float().backward(gradient)

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=round_count, default=12, help="number of rounds (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="compile all models with inductor")
    parser.add_argument(
        "--only", choices=["models", "scaling", "parts", "compile_time"],
        help="run one comparison (default: all but compile_time, which takes minutes per round)",
    )  # fmt: skip
    parser.add_argument("--model", choices=MODELS, help="run one of the two models")
    parser.add_argument("--num_layers", type=int, help="number of layers, for a quick look (default: the preset's)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if arguments.num_layers is not None:
        CHANGES["num_layers"] = arguments.num_layers
    results = {}
    for name, preset in MODELS.items():
        if arguments.model not in (None, name):
            continue
        if arguments.only in (None, "models"):
            results[f"{name} against the straightforward model"] = compare_models(
                preset, arguments.rounds, arguments.compile
            )
        if arguments.only in (None, "scaling"):
            results[f"{name}, scaled against plain"] = compare_scaling(preset, arguments.rounds, arguments.compile)
        if arguments.only == "compile_time":
            results[f"{name}, compile time, repeated blocks / whole"] = compare_compile_time(preset, arguments.rounds)
    if arguments.only in (None, "parts"):
        results["parts of a decoder block"] = compare_parts(arguments.rounds)
    if arguments.json:
        print(json.dumps({"machine": machine(), "batch": BATCH, "compiled": arguments.compile, "results": results}))
        return
    print(", ".join(f"{key} {value}" for key, value in machine().items()) + f", batch {BATCH}")
    for title, rows in results.items():
        print(f"\n{title}{', compiled' if arguments.compile else ''}")
        for row in rows:
            kind = "speed" if "speed" in row else "time"
            labels = "  ".join(f"{value:<9}" for value in row.values() if isinstance(value, str))
            result = "{kind} {ratio:.3f} [{low:.3f}, {high:.3f}]".format(kind=kind, **row[kind])
            rest = "  ".join(f"{label} {value:.3f}" for label, value in row.items() if isinstance(value, float))
            print(f"  {labels}  {result}  {rest}")


if __name__ == "__main__":
    main()
