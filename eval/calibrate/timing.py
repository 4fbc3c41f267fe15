"""What a head's attention costs on this GPU: the unit of plans for a time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

from vmonarch.eval.bench.clock import Clock, measure
from vmonarch.grid import LatentGrid
from vmonarch.options import Options
from vmonarch.plan import FULL, method_attention

_ROUNDS = 9
# Overwrites of the L2 before each call, which keep the GPU busy until the host has queued it.
_FLUSHES = 64


def head_times(
    tensors: tuple[torch.Tensor, ...], grid: LatentGrid, candidates: Mapping[str, Options]
) -> dict[str, float]:
    """Milliseconds of a head, by candidate, and of exact attention ("full"): of a forward call with all heads, L2 cold,
    over their number. Nothing on a CPU.

    Args:
        tensors: query, key and value [B, S, H, D].
        candidates: options by name.
    """
    query, key, value = tensors
    if query.device.type != "cuda":
        return {}
    runs: dict[str, Callable[[], Any]] = {FULL: partial(dispatch_attention_fn, query, key, value)}
    for name, options in candidates.items():
        runs[name] = partial(method_attention, query, key, value, options, grid=grid)
    with torch.no_grad():
        for run in runs.values():
            # The first call compiles.
            run()
        milliseconds, _ = measure(runs, dict.fromkeys(runs, _ROUNDS), Clock(query.device), math.inf, _FLUSHES)
    return {name: statistics.median(found) / query.shape[2] for name, found in milliseconds.items()}
