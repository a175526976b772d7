"""What the benchmarks share: interleaved timing with confidence intervals, counted memory, the machine, an end."""

import argparse
import math
import os
import platform
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable

import torch


# With fewer the least and the largest ratio are no interval of 95 %.
_FEWEST_ROUNDS = 6


def enough_rounds(text: str) -> int:
    """The type of --rounds, for argparse."""
    if not text.isdecimal() or int(text) < _FEWEST_ROUNDS:
        raise argparse.ArgumentTypeError(f"an interval of 95 % needs at least {_FEWEST_ROUNDS} rounds, got {text}")
    return int(text)


def exit_when_told():
    """A signal, and the end of the terminal, end a benchmark as Ctrl-C does: with what it has started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # which it is under nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))


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
    """
    The median of time / baseline over the rounds, and its 95 % interval by order statistics, which takes nothing for
    granted about the noise.
    """
    ratios = sorted(t / b for t, b in zip(times, baseline))
    n = len(ratios)
    # The largest rank whose tail of a binomial with p = 1/2 is at most 2.5 %.
    tails = [sum(math.comb(n, i) for i in range(rank + 1)) / 2**n for rank in range(n // 2)]
    rank = sum(tail <= 0.025 for tail in tails) - 1
    return {"ratio": statistics.median(ratios), "low": ratios[rank], "high": ratios[n - 1 - rank]}


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
    if not os.path.exists("/proc/cpuinfo"):
        return platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as lines:
        return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
