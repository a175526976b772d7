"""Compare the model of scaling.py with what processes on CPUs allocate and send, for its `--check`."""

import json
import os
import socket
import struct
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from measure import live_bytes, profile_memory
from scaling import Training
from torch.distributed.tensor import DTensor
from training import make_run, our_step

from scalelong_diffusers import UViTModel
from scalelong_diffusers.experiments.results import machine


MODEL = {"sample_size": 32, "patch_size": 4, "hidden_size": 256, "num_layers": 12, "num_attention_heads": 4}
BATCH = 4
WARMUP_STEPS = 2  # The first step allocates the optimizer's state, and DDP its buffers anew after it.
_BYTES_SENT = 200  # Place of tcpi_bytes_sent in the tcp_info of Linux.


def check(process_counts: list[int], as_json: bool):
    """Train a small U-ViT in processes, and print measured / predicted bytes."""
    cases = {
        f"{engine.upper()}, {count} processes, {precision}": run_case(MODEL, engine, count, precision)
        for count in process_counts
        for engine in ("ddp", "fsdp2")
        for precision in ("no", "bf16")
    }
    if as_json:
        print(json.dumps({"machine": machine(), "model": MODEL, "batch": BATCH, "cases": cases}))
        return
    names = list(next(iter(cases.values())))
    print(f"| measured / predicted bytes | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for case, figures in cases.items():
        ratios = [f"{figure['measured'] / figure['predicted']:.3f}" for figure in figures.values()]
        print(f"| {case} | {' | '.join(ratios)} |")


def run_case(config: dict, engine: str, count: int, precision: str) -> dict[str, dict[str, float]]:
    """Return the measured and predicted bytes of each figure: the largest of all processes."""
    with torch.device("meta"):
        skeleton = UViTModel(**config)
    with tempfile.TemporaryDirectory() as folder:
        skeleton.save_config(folder)
        arguments = (count, engine, precision, free_port(), Path(folder))
        torch.multiprocessing.start_processes(train, arguments, count, start_method="fork")
        measured = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(count)]
    training = Training(skeleton, precision, as_on_gpu=False)
    # gloo reduces and scatters by a whole all-reduce.
    costs = training.ddp(count, BATCH) if engine == "ddp" else training.fsdp2(count, BATCH, reduce_rounds=2)
    return {
        name: {"measured": max(result[name] for result in measured), "predicted": getattr(costs, name)}
        for name in ("weights", "gradients", "moments", "ema", "memory", "sent")
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train(rank: int, count: int, engine: str, precision: str, port: int, folder: Path):
    """Train for a few steps, and write the bytes of the last one."""
    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    if engine == "fsdp2":
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    resolution = json.loads((folder / "config.json").read_text())["sample_size"]
    measured = {}
    with profile_memory() as profile:
        run, process = make_run(
            folder / "run", model_config_name_or_path=str(folder), resolution=resolution, num_shapes=64,
            train_batch_size=BATCH, mixed_precision=precision, skip_scaling="none", sample_steps=0,
        )  # fmt: skip
        step, optimizer = our_step(run, process), run.optimizer_step.optimizer
        for _ in range(WARMUP_STEPS):
            step()
        sent, started = bytes_sent(), time.time_ns()
        optimizer.register_step_pre_hook(
            lambda *_: measured.update(
                gradients=storage_bytes(weight.grad for weight in run.optimizer_step.parameters)
            )
        )
        step()
        measured["sent"] = bytes_sent() - sent
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    measured |= {
        "weights": storage_bytes(run.optimizer_step.parameters),
        "moments": storage_bytes(moments),
        "ema": storage_bytes(run.ema.shadow_params),
        "memory": max(alive for moment, alive in live_bytes(profile) if moment >= started),
    }
    (folder / f"{rank}.json").write_text(json.dumps(measured))
    run.finish()


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the memory behind tensors, in this process. Views of the same memory count once."""
    own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in own)}.values())


def bytes_sent() -> int:
    """Return the bytes that the TCP sockets of this process have sent, as the kernel counts them."""
    time.sleep(0.5)  # until it has sent what a finished step left
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        if not os.path.realpath(link).rpartition("/")[2].startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(link.name))) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT + 8)
                total += struct.unpack_from("Q", info, _BYTES_SENT)[0]
    return total
