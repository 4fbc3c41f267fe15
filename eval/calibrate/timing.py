"""What a head's attention costs on this GPU: the unit of plans for a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

from vmonarch.grid import LatentGrid
from vmonarch.options import Options
from vmonarch.plan import FULL, method_attention


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
    from triton.testing import do_bench

    runs: dict[str, Callable[[], Any]] = {FULL: partial(dispatch_attention_fn, query, key, value)}
    for name, options in candidates.items():
        runs[name] = partial(method_attention, query, key, value, options, grid=grid)
    with torch.no_grad():
        return {name: do_bench(run, return_mode="median") / query.shape[2] for name, run in runs.items()}
