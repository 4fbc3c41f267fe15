"""Times of calls, in turns, with a cold L2."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

# Rounds that every way gets, however long its calls take.
MIN_ROUNDS = 3


class Clock:
    """Durations on a device: CUDA events there, the processor's clock in the interpreter."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._scratch: torch.Tensor | None = None
        if device.type == "cuda":
            # Several times the L2 of any chip.
            self._scratch = torch.empty(256 * 2**20, dtype=torch.int8, device=device)

    def flush(self, times: int = 1) -> None:
        """Overwrite the L2; several times also keeps the chip busy while the host prepares what is measured next."""
        if self._scratch is not None:
            for _ in range(times):
                self._scratch.zero_()

    def mark(self) -> Any:
        """A point in the stream's time."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, stop: Any) -> float:
        """Milliseconds between two marks, after `wait`."""
        return (stop - start) * 1e3 if self.device.type != "cuda" else start.elapsed_time(stop)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, run: Callable[[], Any]) -> float:
        """Milliseconds of one call."""
        start = self.mark()
        run()
        stop = self.mark()
        self.wait()
        return self.between(start, stop)

    def everywhere(self, value: Any) -> list[Any]:
        """`value` of every process that measures together with this one."""
        return [value]


def release_memory(device: torch.device) -> None:
    """Give what nothing refers to back to a GPU."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def allocated(device: torch.device) -> int:
    """Bytes in use on a GPU; 0 elsewhere."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum, 20th and 80th percentile."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "p20": float(np.percentile(values, 20)),
        "p80": float(np.percentile(values, 80)),
    }


def measure(
    runs: dict[str, Callable[[], Any]], rounds: dict[str, int], clock: Clock, deadline: float, flushes: int = 1
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Time the runs in turns: one of each per round, each round beginning with another.

    Args:
        rounds: how often each is measured.
        deadline: `time.monotonic()` after which no round begins, except the first.
        flushes: how often the L2 is overwritten before each call; many keep the host ahead of a chip that is done soon.

    Returns:
        (milliseconds on the device, milliseconds until the host had queued the call), lists by name.
    """
    names = list(runs)
    device_ms: dict[str, list[float]] = {name: [] for name in names}
    host_ms: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(max(rounds.values(), default=0)):
        if turn and max(clock.everywhere(time.monotonic() >= deadline)):
            break
        clock.flush(8)
        marks = []
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if turn >= rounds[name]:
                continue
            clock.flush(flushes)
            start = clock.mark()
            began = time.perf_counter()
            runs[name]()
            host_ms[name].append((time.perf_counter() - began) * 1e3)
            marks.append((name, start, clock.mark()))
        clock.wait()
        for name, start, stop in marks:
            device_ms[name].append(clock.between(start, stop))
    return device_ms, host_ms
