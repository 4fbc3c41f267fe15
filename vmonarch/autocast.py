"""Ops choose the precision of their sums and products themselves, whatever autocast says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Results = TypeVar("Results")


def without_autocast(op: Callable[Arguments, Results]) -> Callable[Arguments, Results]:
    """Turn autocast off in an op, where it would round float32 numbers to 16 bits in every product.

    A backward pass runs under its caller's autocast. As for any model, call it outside of autocast.
    """

    @functools.wraps(op)
    def unaffected(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Results:
        given = (x if isinstance(x, (tuple, list)) else (x,) for x in (*args, *kwargs.values()))
        device = next((x.device.type for several in given for x in several if isinstance(x, torch.Tensor)), None)
        # Autocast does not know the meta device.
        if device in (None, "meta") or not torch.is_autocast_enabled(device):
            return op(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return op(*args, **kwargs)

    return unaffected
