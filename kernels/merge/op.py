"""Merging two partial attentions as a torch operator.

Shapes: B batch, S tokens, H heads, E value dim.
"""

from __future__ import annotations

from typing import Any

import torch

from vmonarch.kernels.common.launch import unit_stride
from vmonarch.kernels.common.operators import operator
from vmonarch.kernels.common.replay import replayed
from vmonarch.kernels.common.tiles import launch_on_tokens
from vmonarch.kernels.merge.kernels import merge_backward_kernel, merge_kernel

Pair = tuple[torch.Tensor, torch.Tensor]


def _new_pair(out_1: torch.Tensor, lse_1: torch.Tensor, *_: Any) -> Pair:
    return out_1.new_empty(out_1.shape), lse_1.new_empty(lse_1.shape)


@replayed
def _forward(out_1: torch.Tensor, lse_1: torch.Tensor, out_2: torch.Tensor, lse_2: torch.Tensor) -> Pair:
    """(out [B, S, H, E], lse [B, H, S])."""
    out, lse = _new_pair(out_1, lse_1)
    strides = (*out_1.stride()[:3], *lse_1.stride(), *out_2.stride()[:3], *lse_2.stride())
    launch_on_tokens(merge_kernel, out, out_1, lse_1, out_2, lse_2, out, lse, *strides)
    return out, lse


@replayed
def _backward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    """(dout₁, dlse₁, dout₂, dlse₂)."""
    grad_out, grad_lse, *parts, lse = inputs
    grad_out = unit_stride(grad_out)
    found = [x.new_empty(x.shape) for x in parts]
    out_1, lse_1, out_2, lse_2 = parts
    strides = (out_1.stride()[:3], lse_1.stride(), out_2.stride()[:3], lse_2.stride())
    launch_on_tokens(
        merge_backward_kernel, found[0], grad_out, None if grad_lse is None else grad_lse.contiguous(), *parts, lse,
        *found, *grad_out.stride()[:3], *(stride for each in strides for stride in each),
    )  # fmt: skip
    return tuple(found)


# (out₁, lse₁, out₂, lse₂) of `merge_partials`, already checked, to (out, lse).
merge_pair = operator(
    "vmonarch::merge",
    _forward,
    _backward,
    "Tensor out_1, Tensor lse_1, Tensor out_2, Tensor lse_2",
    fake=_new_pair,
    gradients=4,
    kept=slice(1, 2),
)
