"""
Predict what training the paper's presets costs on 1, 8 and 64 GPUs, and check the model with processes on CPUs.

    python benchmarks/scaling.py [--gpu A100] [--presets NAME ...] [--mixed_precision bf16] [--efficiency 0.4]
        [--bandwidth_share 0.7] [--json]
    python benchmarks/scaling.py --check [--processes 2 4]

Nothing here runs on a GPU. FLOPs and activations are counted in a forward and backward pass with fake tensors, which
take no memory. The rest is arithmetic: see `Training` and docs/many_gpus.md. `--check` compares memory and traffic
with what processes on CPUs allocate and send.
"""

import argparse
import contextlib
import copy
import json
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from scalelong_diffusers.presets import PRESETS, Preset
from scalelong_diffusers.training.sharding import block_names


GPU_COUNTS = (1, 8, 64)
GPUS_PER_NODE = 8
DEFAULT_BATCH = 1024  # of presets whose papers state none
USABLE_MEMORY = 0.9  # the rest is for the CUDA context, workspaces and fragmentation
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16}
# Bytes that AdamW (7 tensors) and the EMA (3 tensors) read and write per parameter.
UPDATE_BYTES = 40


@dataclass(frozen=True)
class GPU:
    """
    Published peak figures of a GPU and of a node with eight of them. docs/many_gpus.md names the sources.

    Args:
        flops: dense FLOP/s of products in fp32 without TF32, and in bf16.
        memory: bytes.
        memory_bandwidth: bytes per second.
        link: bytes per second that a GPU sends to the others of its node.
        network: bytes per second that a node sends to the others.
    """

    name: str
    flops: Mapping[str, float]
    memory: float
    memory_bandwidth: float
    link: float
    network: float


GPUS = {
    "A100": GPU("A100 SXM 80 GB", {"no": 19.5e12, "bf16": 312e12}, 80e9, 2039e9, link=300e9, network=8 * 25e9),
    "H100": GPU("H100 SXM", {"no": 67e12, "bf16": 989e12}, 80e9, 3350e9, link=450e9, network=8 * 50e9),
    # PCIe, and one port of 100 Gb/s per node, which is an assumption.
    "L40S": GPU("L40S", {"no": 91.6e12, "bf16": 362e12}, 48e9, 864e9, link=32e9, network=12.5e9),
}


# Counting


class LiveMemory(TorchDispatchMode):
    """
    Count the bytes of all tensors that are alive, except the weights and their gradients.

    `timeline` has, after each allocation, these bytes and the number of weights whose gradients are computed. Hooks on
    saved tensors would change what `UViTModel` saves, and would not see what a layer needs while it runs.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.timeline: list[tuple[int, int]] = []
        self._alive = self._gradients = 0
        self._counted: dict[int, weakref.finalize | None] = {}
        for weight in model.parameters():
            self._counted[id(weight.untyped_storage())] = None
            weight.register_post_accumulate_grad_hook(self._take_gradient)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in self._counted:
                self._allocate(tensor.untyped_storage())
        return result

    def _allocate(self, storage: torch.UntypedStorage):
        self._alive += storage.nbytes()
        self.timeline.append((self._alive, self._gradients))
        self._counted[id(storage)] = weakref.finalize(storage, self._free, id(storage), storage.nbytes())

    def _free(self, key: int, size: int):
        self._alive -= size
        del self._counted[key]

    def _take_gradient(self, weight: nn.Parameter):
        """Count a gradient as such, and not as any other tensor."""
        self._counted[id(weight.grad.untyped_storage())]()
        self._gradients += weight.numel()


class NormalizationInFp32(TorchFunctionMode):
    """Normalize in fp32, as autocast does on GPUs. On CPUs, it keeps the dtype of the input."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (F.layer_norm, F.group_norm):
            args = (args[0].float(), *args[1:])
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Pass:
    """FLOPs of a forward and backward pass, and the `timeline` of `LiveMemory`."""

    flops: int
    timeline: list[tuple[int, int]]


# FlopCounterMode knows only the attention of GPUs.
_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda *shapes, **_: sdpa_backward_flop_count(*shapes[:4])
    ),
}


def count_pass(skeleton: nn.Module, batch: int, dtype: torch.dtype, weights: torch.dtype, as_on_gpu=True) -> Pass:
    """Run a model of the meta device with fake tensors. `weights` is the dtype that the layers read."""
    model, shapes = copy.deepcopy(skeleton), {name: weight.shape for name, weight in skeleton.state_dict().items()}
    with FakeTensorMode():
        model.load_state_dict({name: torch.empty(shape, dtype=weights) for name, shape in shapes.items()}, assign=True)
        inputs = inputs_of(model, batch)
        memory, flops = LiveMemory(model), FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
        with memory, flops:
            run_pass(model, inputs, dtype, as_on_gpu)
    return Pass(flops.get_total_flops(), memory.timeline)


def run_pass(model: nn.Module, inputs: dict[str, torch.Tensor], dtype: torch.dtype, as_on_gpu: bool):
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32),
        NormalizationInFp32() if as_on_gpu else contextlib.nullcontext(),
    ):
        prediction = model(**inputs).sample
    F.mse_loss(prediction.float(), inputs["sample"]).backward()


def inputs_of(model: nn.Module, batch: int) -> dict[str, torch.Tensor]:
    config = model.config
    inputs = {
        "sample": torch.empty(batch, config.in_channels, config.sample_size, config.sample_size),
        "timestep": torch.zeros(batch),
    }
    if config.get("num_class_embeds"):
        inputs["class_labels"] = torch.zeros(batch, dtype=torch.long)
    if config.get("cross_attention_dim"):
        inputs["encoder_hidden_states"] = torch.empty(
            batch, config.get("context_length", 77), config.cross_attention_dim
        )
    return inputs


# The model of memory and traffic


@dataclass(frozen=True)
class Costs:
    """What a step costs in one process, in bytes. `images` are in a pass, and `sent` goes to other processes."""

    images: int
    weights: float
    gradients: float
    moments: float
    ema: float
    memory: float  # the peak of everything
    sent: float


class Training:
    """
    The memory and traffic of training a model, with fused AdamW and EMA as in the scripts.

    Weights, gradients, the two moments and EMA weights take 4 bytes each per parameter.
    """

    def __init__(self, skeleton: nn.Module, mixed_precision: str, as_on_gpu: bool = True):
        self.skeleton = skeleton
        self.dtype = DTYPES[mixed_precision]
        self.as_on_gpu = as_on_gpu
        self.parameters = sum(weight.numel() for weight in skeleton.parameters())

    @cached_property
    def _passes(self) -> dict[torch.dtype, tuple[Pass, Pass]]:
        """
        Passes of two and of three images, by the dtype of the weights: FSDP2 gathers them in the compute dtype.

        With one image, torch copies fewer tensors.
        """
        return {
            weights: tuple(count_pass(self.skeleton, n, self.dtype, weights, self.as_on_gpu) for n in (2, 3))
            for weights in {torch.float32, self.dtype}
        }

    @property
    def flops_per_image(self) -> int:
        return self._passes[torch.float32][0].flops // 2

    def pass_peak(self, images: int, weights: torch.dtype, gradient_bytes: float) -> float:
        """
        Return the peak of a pass without its weights.

        Args:
            gradient_bytes: what a gradient takes per weight, once it is computed.
        """
        two, three = self._passes[weights]
        return max(
            alive + (images - 2) * (more - alive) + gradient_bytes * gradients
            for (alive, gradients), (more, _) in zip(two.timeline, three.timeline, strict=True)
        )

    @cached_property
    def groups(self) -> list[int]:
        """The numbers of parameters that FSDP2 gathers together, first of the root and then of each block."""
        names = block_names(self.skeleton)
        units = [self.skeleton, *(part for part in self.skeleton.modules() if type(part).__name__ in names)]
        owner = {weight: unit for unit in units for weight in unit.parameters()}  # inner blocks come last
        return [sum(weight.numel() for weight, of in owner.items() if of is unit) for unit in units]

    def ddp(self, processes: int, images: int, accumulation: int = 1) -> Costs:
        """
        Return the costs with a copy of everything in each process, and a ring all-reduce of the gradients per step.

        DDP's buffers hold the gradients, and stay between the steps.
        """
        keeps_gradients = processes > 1 or accumulation > 1
        kept = 4 * self.parameters if keeps_gradients else 0
        peak = self.pass_peak(images, torch.float32, 0 if keeps_gradients else 4)
        return self._costs(images, 1, kept + peak, 2 * ring_share(processes) * 4 * self.parameters)

    def fsdp2(self, processes: int, images: int, accumulation: int = 1, reduce_rounds: int = 1) -> Costs:
        """
        Return the costs with everything divided: two all-gathers of the weights per pass, and a reduce-scatter of the
        gradients in fp32 per step.

        Memory also holds the gathered weights of the root and of two blocks (one computes while the next one is
        gathered) and the gradients of a block, once as computed and once as sent. Before the last pass of an
        accumulation, gradients are not divided. `reduce_rounds` is 2 for gloo, which runs a whole all-reduce.
        """
        root, *blocks = self.groups
        largest = max(blocks, default=0)
        size = self.dtype.itemsize
        gathered = size * (root + 2 * largest) + (size + 4) * largest
        undivided = size * self.parameters if accumulation > 1 else 0
        peak = self.pass_peak(images, self.dtype, 4 / processes)
        sent = (2 * accumulation * size + reduce_rounds * 4) * self.parameters
        return self._costs(images, processes, undivided + gathered + peak, ring_share(processes) * sent)

    def _costs(self, images: int, parts: int, rest: float, sent: float) -> Costs:
        size = 4 * self.parameters / parts
        return Costs(images, size, size, 2 * size, size, memory=4 * size + rest, sent=sent)


def ring_share(processes: int) -> float:
    """Return the fraction of the data that a process sends in an all-gather or a reduce-scatter on a ring."""
    return (processes - 1) / processes


# Predictions


@dataclass(frozen=True)
class Assumptions:
    """Fractions of the published peaks."""

    efficiency: float  # of FLOP/s
    bandwidth_share: float  # of all bandwidths


def predict(training: Training, total_batch: int, gpu: GPU, mixed_precision: str, assumed: Assumptions) -> list[dict]:
    """Return a row for each number of GPUs and each engine, without costs if the model does not fit."""
    rows = []
    for count in GPU_COUNTS:
        for engine in ("ddp", "fsdp2") if count > 1 else ("ddp",):
            row = {"gpus": count, "engine": engine, "flops": training.flops_per_image * total_batch // count}
            costs = largest_batch(getattr(training, engine), count, total_batch // count, gpu)
            if costs is not None:
                updated = UPDATE_BYTES * costs.weights / 4
                seconds = step_seconds(row["flops"], costs.sent, updated, count, gpu, mixed_precision, assumed)
                row |= asdict(costs) | {"images_per_second": [total_batch / second for second in seconds]}
            rows.append(row)
    return rows


def largest_batch(costs_of: Callable[..., Costs], count: int, images: int, gpu: GPU) -> Costs | None:
    """Return the costs with the fewest accumulation steps that fit into the memory of a GPU."""
    for accumulation in range(1, images + 1):
        if images % accumulation == 0:
            costs = costs_of(count, images // accumulation, accumulation)
            if costs.memory <= USABLE_MEMORY * gpu.memory:
                return costs
    return None


def step_seconds(
    flops: float, sent: float, updated: float, count: int, gpu: GPU, mixed_precision: str, assumed: Assumptions
) -> tuple[float, float]:
    """Return the time of a step without and with full overlap of communication and computation."""
    compute = flops / (gpu.flops[mixed_precision] * assumed.efficiency)
    update = updated / (gpu.memory_bandwidth * assumed.bandwidth_share)
    # All rings of a node together use its whole network.
    bandwidth = gpu.link if count <= GPUS_PER_NODE else min(gpu.link, gpu.network)
    communication = sent / (bandwidth * assumed.bandwidth_share)
    return compute + communication + update, max(compute, communication) + update


def build_preset(preset: Preset) -> nn.Module:
    with torch.device("meta"):
        return preset.model_class.from_config(preset.config).train()


# Output


COLUMNS = (
    "preset", "TFLOP per image", "images per GPU and pass, DDP", "memory DDP, GiB", "memory FSDP2, GiB",
    "sent DDP, GB", "sent FSDP2, GB", "images/s DDP", "images/s FSDP2",
)  # fmt: skip


def markdown(results: dict[str, list[dict]], totals: dict[str, int]) -> str:
    """Return a table with a row per preset. Its cells have the values for each number of GPUs."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for name, rows in results.items():
        cells = {engine: [row for row in rows if row["engine"] == engine] for engine in ("ddp", "fsdp2")}
        ddp, fsdp2 = cells.values()
        lines.append(
            (
                name,
                f"{ddp[0]['flops'] / totals[name] / 1e12:.3g}",
                joined(ddp, lambda row: f"{row['images']}"),
                joined(ddp, memory_cell),
                joined(fsdp2, memory_cell),
                joined(ddp[1:], lambda row: f"{row['sent'] / 1e9:.3g}"),
                joined(fsdp2, lambda row: f"{row['sent'] / 1e9:.3g}"),
                joined(ddp, speed_cell),
                joined(fsdp2, speed_cell),
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def joined(rows: list[dict], cell) -> str:
    return " / ".join(cell(row) if "images" in row else "too large" for row in rows)


def memory_cell(row: dict) -> str:
    return f"{row['memory'] / 2**30:.3g}"


def speed_cell(row: dict) -> str:
    slow, fast = (f"{round(speed, 2 - len(str(int(speed)))):,.0f}" for speed in row["images_per_second"])
    return slow if slow == fast else f"{slow} to {fast}"


def fraction(text: str) -> float:
    """Parse a fraction of a peak."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {text}")
    return value


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=GPUS, default="A100", help="type of the GPUs (default: %(default)s)")
    parser.add_argument(
        "--presets", nargs="+", choices=PRESETS, default=list(PRESETS), metavar="NAME",
        help="some of the presets (default: all; see scalelong presets)",
    )  # fmt: skip
    parser.add_argument("--mixed_precision", choices=DTYPES, default="bf16", help="default: %(default)s")
    for name, default, what in (("efficiency", 0.4, "FLOP/s"), ("bandwidth_share", 0.7, "bandwidths")):
        parser.add_argument(
            f"--{name}", type=fraction, default=default, help=f"fraction of the peak {what} (default: %(default)s)"
        )
    parser.add_argument("--check", action="store_true", help="compare memory and traffic with processes on CPUs")
    parser.add_argument("--processes", nargs="+", type=int, choices=(2, 4), default=[2, 4], help="for --check")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None):
    arguments = parse_arguments(argv)
    if arguments.check:
        from scaling_check import check  # it imports this module

        check(arguments.processes, arguments.json)
        return
    gpu, precision = GPUS[arguments.gpu], arguments.mixed_precision
    assumed = Assumptions(arguments.efficiency, arguments.bandwidth_share)
    totals = {name: PRESETS[name].training.get("total_batch_size", DEFAULT_BATCH) for name in arguments.presets}
    results = {
        name: predict(Training(build_preset(PRESETS[name]), precision), total, gpu, precision, assumed)
        for name, total in totals.items()
    }
    if arguments.json:
        print(json.dumps({"gpu": asdict(gpu), "assumed": asdict(assumed), "results": results}))
        return
    counts = ", ".join(map(str, GPU_COUNTS))
    print(
        f"predicted for {counts} x {gpu.name}, --mixed_precision {precision}, {assumed.efficiency:.0%} of the peak "
        f"FLOP/s and {assumed.bandwidth_share:.0%} of the bandwidths\n"
    )
    print(markdown(results, totals))


if __name__ == "__main__":
    main()
