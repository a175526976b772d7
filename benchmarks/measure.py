"""What the benchmarks share: interleaved timing with confidence intervals, counted memory, and the machine's name."""

import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable

import torch


# Student's t, two-sided 95 %, for up to 30 degrees of freedom; beyond that the normal value is close enough.
_T95 = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
]  # fmt: skip


def paired_times(functions: dict[str, Callable[[], None]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of each function in each round; all run in every round, in a new order, so that noise hits all alike."""
    for _ in range(warmup):
        for function in functions.values():
            function()
    order = random.Random(0)
    times = {name: [] for name in functions}
    for _ in range(rounds):
        for name in order.sample(list(functions), len(functions)):
            start = time.perf_counter()
            functions[name]()
            times[name].append(time.perf_counter() - start)
    return times


def paired_ratio(times: list[float], baseline: list[float]) -> dict[str, float]:
    """The geometric mean of time / baseline over the rounds and its 95 % interval, outlying rounds trimmed."""
    logs = sorted(math.log(t / b) for t, b in zip(times, baseline))
    trim = len(logs) // 10
    logs = logs[trim : len(logs) - trim]
    mean = statistics.fmean(logs)
    t95 = _T95[len(logs) - 2] if len(logs) - 2 < len(_T95) else 1.96
    half = t95 * statistics.stdev(logs) / math.sqrt(len(logs))
    return {"ratio": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}


def verdict(ratio: dict[str, float], limit: float) -> str:
    """Whether a measured ratio stays below a limit; an interval wider than 2 % says nothing."""
    if ratio["high"] - ratio["low"] > 0.02:
        return "inconclusive"
    return "ok" if ratio["low"] <= limit else f"above {limit}"


def peak_allocated(function: Callable[[], None]) -> int:
    """The most bytes that are alive at once among those that `function` allocates, counted by torch's allocator."""
    function()  # what is allocated once and kept is not part of a step
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def machine() -> dict[str, str | int]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }


def _processor() -> str:
    with open("/proc/cpuinfo") as lines:
        return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
