"""The machine a benchmark runs on: its device, clock, rates, versions and processes."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from vmonarch.configs import InputError
from vmonarch.kernels.common.launch import interpreted
from vmonarch.pipelines.environment import choose_device, environment

# The fewest rounds planned for a way, however long its calls take.
MIN_ROUNDS = 3


def check_device(name: str) -> torch.device:
    """The device to measure on.

    Raises:
        InputError: there is no such device, or the kernels cannot run there.
    """
    if name == "cuda" and not torch.cuda.device_count():
        raise InputError("device", "must be a CUDA GPU, as times are of one; this torch sees none")
    device = choose_device(name)
    if device.type == "cpu":
        if not interpreted():
            raise InputError("device", "cpu needs TRITON_INTERPRET=1 and tells nothing of speed; supported: cuda")
        return device
    if interpreted():
        raise InputError("device", f"{name!r} cannot be measured with TRITON_INTERPRET=1: unset it")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def measured_dtype(device: torch.device) -> torch.dtype:
    """bfloat16; in the interpreter float32, because its bfloat16 products are wrong."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Clock:
    """Durations on a device: by CUDA events on a GPU, by the host's clock in the interpreter."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._scratch: torch.Tensor | None = None
        if device.type == "cuda":
            # Several times the L2 of any chip.
            self._scratch = torch.empty(256 * 2**20, dtype=torch.int8, device=device)

    def flush(self, times: int = 1) -> None:
        """Overwrite the L2; repeated, this also keeps the chip busy while the host prepares the next measurement."""
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
        """The values of all processes that measure together, this one included."""
        return [value]


def release_memory(device: torch.device) -> None:
    """Free a GPU's memory that nothing refers to."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def allocated(device: torch.device) -> int:
    """Bytes in use on a GPU; 0 elsewhere."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum, 20th and 80th percentile."""
    percentiles = {f"p{share}": float(np.percentile(values, share)) for share in (20, 80)}
    return {"median": statistics.median(values), "min": min(values), **percentiles}


def measure(
    runs: dict[str, Callable[[], Any]], rounds: dict[str, int], clock: Clock, deadline: float, flushes: int = 1
) -> dict[str, list[float]]:
    """Time the runs in turns: each once per round, in an order that rotates from round to round.

    Args:
        rounds: how often each is measured, at most.
        deadline: value of `time.monotonic()` after which no round begins, except the first.
        flushes: how often the L2 is overwritten before each call; several keep the host ahead of short kernels.

    Returns:
        milliseconds by name.
    """
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
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
            runs[name]()
            marks.append((name, start, clock.mark()))
        clock.wait()
        for name, start, stop in marks:
            times[name].append(clock.between(start, stop))
    return times


def measure_rates(device: torch.device) -> dict[str, float | str] | None:
    """FLOP/s of an 8192³ bf16 matmul and bytes/s (read + written) of a 2 GiB copy; None in the interpreter."""
    if device.type != "cuda":
        return None
    a, b, product = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(3))
    source, target = (torch.empty(2**31, dtype=torch.int8, device=device) for _ in range(2))
    runs = {"matmul": lambda: torch.mm(a, b, out=product), "copy": lambda: target.copy_(source)}
    for run in runs.values():
        run()
    times = measure(runs, dict.fromkeys(runs, 15), Clock(device), math.inf)
    matmul, copy = (statistics.median(times[name]) / 1e3 for name in runs)
    return {
        "matmul_flops_per_second": 2 * 8192**3 / matmul,
        "copy_bytes_per_second": 2 * 2**31 / copy,
        "how": "median of 15: bf16 8192x8192x8192 matmul; copy of 2 GiB, bytes read + written",
    }


def provenance(device: torch.device, command: str) -> dict[str, Any]:
    """The head of every record: date, hardware, versions and command."""
    about = environment(device)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": about["device_name"],
        "versions": {
            **about.pop("packages"),
            **about,
            # The build's version names its CUDA.
            "torch_build": torch.__version__,
            "cudnn": str(torch.backends.cudnn.version()) if device.type == "cuda" else None,
        },
        "command": command,
    }


def count_done(function: Callable[[Any], Any], tasks: Sequence[Any], seconds: float) -> int:
    """Call `function` on every task in worker processes; return how many finished within these seconds.

    Compiled kernels stay in Triton's cache on disk, where this process finds them.
    """
    done, deadline = 0, time.monotonic() + seconds
    if not tasks:
        return done
    processes = max(1, min((os.cpu_count() or 2) - 1, 15, len(tasks)))
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        answers = pool.imap_unordered(function, tasks)
        for _ in tasks:
            try:
                # A task whose process has died never ends.
                answers.next(max(0.0, min(120.0, deadline - time.monotonic())))
                done += 1
            except multiprocessing.TimeoutError:
                break
            except Exception as error:
                print(f"a process failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return done
