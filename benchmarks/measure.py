"""Shared parts of the benchmarks: interleaved timing with confidence intervals, and memory."""

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator

import torch


# With OMP_NUM_THREADS=1, the time of the processor, which other programs disturb less.
CLOCK = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
# With fewer rounds not even the smallest and largest ratio form a 95 % interval.
_MIN_ROUNDS = 6


def round_count(text: str) -> int:
    """Parse the value of `--rounds`."""
    if not text.isdecimal() or int(text) < _MIN_ROUNDS:
        raise argparse.ArgumentTypeError(f"must be at least {_MIN_ROUNDS} for a 95 % interval, got {text}")
    return int(text)


def paired_times(
    functions: dict[str, Callable[[], None]],
    rounds: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each function in each round. Every round runs all of them in a random order."""
    for _ in range(warmup):
        for function in functions.values():
            function()
    order = random.Random(0)
    times = {name: [] for name in functions}
    for _ in range(rounds):
        for name in order.sample(list(functions), len(functions)):
            start = clock()
            functions[name]()
            times[name].append(clock() - start)
    return times


def paired_ratio(times: list[float], baseline: list[float]) -> dict[str, float]:
    """
    Return the median of time / baseline over the rounds and its 95 % interval.

    The interval uses order statistics and assumes nothing about the distribution.
    """
    ratios = sorted(t / b for t, b in zip(times, baseline))
    n = len(ratios)
    # The largest rank whose tail probability under Binomial(n, 1/2) is at most 2.5 %.
    tails = [sum(math.comb(n, i) for i in range(rank + 1)) / 2**n for rank in range(n // 2)]
    rank = sum(tail <= 0.025 for tail in tails) - 1
    return {"ratio": statistics.median(ratios), "low": ratios[rank], "high": ratios[n - 1 - rank]}


def verdict(ratio: dict[str, float], limit: float) -> str:
    """Compare a measured ratio with a limit. An interval wider than 2 % is inconclusive."""
    if ratio["high"] - ratio["low"] > 0.02:
        return "inconclusive"
    return "ok" if ratio["low"] <= limit else f"above {limit}"


def peak_allocated(function: Callable[[], None]) -> int:
    """Return the peak number of bytes that `function` allocates, counted by torch's allocator."""
    function()  # allocates what stays between steps
    with profile_memory() as profile:
        function()
    return max((alive for _, alive in live_bytes(profile)), default=0)


def profile_memory() -> torch.profiler.profile:
    """Return a profiler that records each allocation of torch's allocator for CPUs."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


def live_bytes(profile: torch.profiler.profile) -> Iterator[tuple[int, int]]:
    """Yield the time in nanoseconds of each allocation and release, and the bytes that are allocated afterwards."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        yield event.start_ns(), alive
