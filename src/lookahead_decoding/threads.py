"""How many CPU threads to compute with.

More are not always faster: threads that wait for one another at every layer wait for the slowest, and while
other work holds a core that can be very long (seen: one job in 112 s with two threads, in 3.5 s with one). So
the count is measured, once, on the model that is about to be used.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lookahead_decoding.engine import Engine

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_REPEATS = 3
_CLEARLY_FASTER = 0.9
"""Fewer threads are taken when they need less than this share of the time."""
_PROBE_TOKENS = 3


@dataclass(frozen=True)
class ThreadChoice:
    """A number of threads, and why."""

    threads: int
    reason: str


def available_threads(cpu_quota: Path = _CPU_QUOTA) -> int:
    """The cores this process may use: its CPU affinity, its control group's quota, ``OMP_NUM_THREADS``."""
    bounds = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    try:
        quota, period = cpu_quota.read_text().split()
        bounds.append(math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass  # no control group, or "max": no quota
    if (wanted := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        bounds.append(int(wanted))
    return max(1, min(bounds))


def choose_threads(measure: Callable[[int], float], available: int) -> ThreadChoice:
    """All that are available, or half of them, a quarter, ... where that is clearly faster.

    Args:
        measure: the seconds that a fixed piece of work takes with so many threads.
        available: the most to take.
    """
    if available == 1:
        return ThreadChoice(1, "this process may use one core")

    def seconds(threads: int) -> float:
        return statistics.median(measure(threads) for _ in range(_REPEATS))

    of_all = least = seconds(available)
    best = threads = available
    while threads > 1:
        threads //= 2
        time = seconds(threads)
        if time < _CLEARLY_FASTER * least:
            best, least = threads, time
        elif least < _CLEARLY_FASTER * time:
            break  # still fewer would take still longer
    if best == available:
        return ThreadChoice(best, f"all {available} cores that this process may use; fewer are not faster")
    return ThreadChoice(best, f"{of_all / least:.1f} times as fast as all {available} cores at the moment")


def settle_threads(engine: Engine, threads: int | None = None) -> ThreadChoice:
    """Set the number of threads from here on: the given one, or what a short probe of the engine finds."""
    if threads is not None:
        choice = ThreadChoice(threads, "as asked for")
    elif (device := engine.runner.device).type != "cpu":
        choice = ThreadChoice(torch.get_num_threads(), f"PyTorch's own, as the model is on {device}")
    else:
        measure = functools.partial(_seconds_of_plain_passes, engine)
        measure(torch.get_num_threads())  # warms up
        choice = choose_threads(measure, available_threads())
        engine.forget()
    _set(choice.threads)
    return choice


def _seconds_of_plain_passes(engine: Engine, threads: int) -> float:
    """The time of a few width-1 passes."""
    _set(threads)
    completion = engine.generate(
        [0] * 4, lookahead="plain", temperature=0, max_new_tokens=_PROBE_TOKENS, min_new_tokens=_PROBE_TOKENS
    )
    assert not isinstance(completion, list)
    return completion.statistics.decode_seconds


def _set(threads: int) -> None:
    torch.set_num_threads(threads)
