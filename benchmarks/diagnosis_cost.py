"""
What do `scalelong diagnose` and `--diagnose_steps` cost?

    python benchmarks/diagnosis_cost.py [--rounds 12] [--only steps|memory|time] [--threads 2]

- steps: a training step that is measured against one that is not, interleaved in one run.
- memory: the peak of a diagnosis against the peak of a training step with AdamW, both with the weights and, for the
  training step, with the state of the optimizer. Batches have the same size.
- time: a diagnosis of U-ViT S/2 with 64 images, and of a U-Net of Stable Diffusion 1.5 with 8 latents of 64 x 64.
"""

import argparse
import contextlib
import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import ModelMixin
from measure import paired_ratio, paired_times, peak_allocated, round_count
from training import make_run, our_step

from scalelong_diffusers import ScaleLongUNet2DConditionModel, UViTModel
from scalelong_diffusers.diagnosis.diagnose import diagnose
from scalelong_diffusers.diagnosis.measure import Samples, measure_skips, spread_positions
from scalelong_diffusers.noise import BetaProcess
from scalelong_diffusers.training import TrainingRun


EVERY = 500
# The step before: the next one is measured if it is a multiple of EVERY.
STEPS = {"plain": 10, "measured": EVERY - 1}
NOISING = BetaProcess()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=round_count, default=12, help="rounds of steps (default: 12)")
    parser.add_argument("--only", choices=("steps", "memory", "time"), help="measure only this")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.only in (None, "steps"):
        for model_type in ("uvit", "unet"):
            show_steps(model_type, arguments.rounds)
    if arguments.only in (None, "memory"):
        show_memory("U-ViT S/2", build_uvit(), (3, 32, 32), batch_size=8)
    if arguments.only in (None, "time"):
        show_time("U-ViT S/2", build_uvit(), (3, 32, 32), batch_size=8, count=64)
        show_time("Stable Diffusion 1.5", build_sd(), (4, 64, 64), batch_size=1, count=8)


def build_uvit() -> UViTModel:
    torch.manual_seed(0)
    return UViTModel.from_preset("cifar10-uvit-s-2")


def build_sd() -> ScaleLongUNet2DConditionModel:
    torch.manual_seed(0)
    return ScaleLongUNet2DConditionModel(sample_size=64, cross_attention_dim=768)


def show_steps(model_type: str, rounds: int):
    with tempfile.TemporaryDirectory() as folder:
        options = {"model_type": model_type, "train_batch_size": 8, "num_shapes": 500, "diagnose_steps": EVERY}
        run, process = make_run(Path(folder), **options, validation_steps=0, logging_steps=10**6)
        with contextlib.redirect_stderr(io.StringIO()):  # the progress bar
            step = our_step(run, process)
            times = paired_times({name: _step_at(run, step, number) for name, number in STEPS.items()}, rounds)
    ratio = paired_ratio(times["measured"], times["plain"])
    share = 100 * (ratio["ratio"] - 1) / EVERY
    interval = f"{ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
    print(f"{model_type}: time of a measured step / of another one {interval}; {share:.3f} % with N = {EVERY}")


def _step_at(run: TrainingRun, step: Callable[[], None], number: int) -> Callable[[], None]:
    def call():
        run.global_step = number
        step()

    return call


def make_batches(model: ModelMixin, shape: tuple[int, ...], batch_size: int, count: int) -> list[Samples]:
    batches = []
    for first in range(0, count, batch_size):
        clean, noise, perturbation = torch.randn(3, batch_size, *shape)
        width = model.config.get("cross_attention_dim")
        conditions = {"encoder_hidden_states": torch.randn(batch_size, 77, width)} if width else {}
        batches.append(Samples(clean, noise, spread_positions(first, batch_size), perturbation, conditions))
    return batches


def show_memory(name: str, model: ModelMixin, shape: tuple[int, ...], batch_size: int):
    weights = sum(parameter.nbytes for parameter in model.parameters())
    batches = make_batches(model, shape, batch_size, batch_size)
    peaks = {
        "the skips": weights + peak_allocated(lambda: measure_skips(model, batches, NOISING)),
        "all": weights + peak_allocated(lambda: diagnose(model, batches, NOISING, show_progress=False)),
    }
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        timesteps = NOISING.timesteps(batches[0].uniform)
        noisy = NOISING.add_noise(batches[0].clean, batches[0].noise, timesteps)
        (model(noisy, timesteps, **batches[0].conditions).sample - batches[0].noise).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    training = 3 * weights + peak_allocated(step)  # with both moments of AdamW
    for what, peak in peaks.items():
        print(f"{name}, {what}: {peak / 2**20:,.0f} MiB, {peak / training:.2f} of a training step's "
              f"{training / 2**20:,.0f} MiB")  # fmt: skip


def show_time(name: str, model: ModelMixin, shape: tuple[int, ...], batch_size: int, count: int):
    batches = make_batches(model, shape, batch_size, count)
    started, cpu = time.perf_counter(), time.process_time()
    diagnose(model, batches, NOISING, show_progress=False)
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    print(f"{name}, {count} images: {wall:.0f} s, {cpu:.0f} CPU seconds on {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
