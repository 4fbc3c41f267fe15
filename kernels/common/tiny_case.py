"""What the tiny case of an op is, by which `trust` checks its kernels.

`tiny_case(gpu)` in the op's `api.py` gives it: on a GPU as large as kernels for Hopper want it, in the interpreter as
small as can be. Tensors are [B, S, H, D].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

Shapes = Mapping[str, tuple[int, ...]]


class Case(NamedTuple):
    """`call(*inputs, implementation=…)` gives the results; all inputs get gradients if there are any."""

    inputs: Shapes
    call: Callable[..., tuple[torch.Tensor, ...]]
    gradients: bool = True


def qkv_shapes(queries: int, keys: int, head_dim: int) -> Shapes:
    """Query, key and value [1, S, 2, D]."""
    return {"query": (1, queries, 2, head_dim), "key": (1, keys, 2, head_dim), "value": (1, keys, 2, head_dim)}
