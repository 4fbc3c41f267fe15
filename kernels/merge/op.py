"""Merging two partial attentions as a torch operator: opaque to torch.compile, differentiable.

Shapes: B batch, S tokens, H heads, E value dim.
"""

from __future__ import annotations

from typing import Any

import torch

from vmonarch.kernels.common.launch import needs_operator, unit_stride
from vmonarch.kernels.common.operators import differentiable
from vmonarch.kernels.common.replay import replayed
from vmonarch.kernels.common.tiles import launch_on_tokens
from vmonarch.kernels.merge.kernels import merge_backward_kernel, merge_kernel

Pair = tuple[torch.Tensor, torch.Tensor]


@replayed
def _forward(out_1: torch.Tensor, lse_1: torch.Tensor, out_2: torch.Tensor, lse_2: torch.Tensor) -> Pair:
    """(out [B, S, H, E], lse [B, H, S])."""
    out, lse = out_1.new_empty(out_1.shape), lse_1.new_empty(lse_1.shape)
    strides = (*out_1.stride()[:3], *lse_1.stride(), *out_2.stride()[:3], *lse_2.stride())
    launch_on_tokens(merge_kernel, out, out_1, lse_1, out_2, lse_2, out, lse, *strides)
    return out, lse


merge_forward = torch.library.custom_op(
    "vmonarch::merge_forward",
    _forward,
    mutates_args=(),
    schema="(Tensor out_1, Tensor lse_1, Tensor out_2, Tensor lse_2) -> (Tensor, Tensor)",
)


@merge_forward.register_fake
def _(out_1: torch.Tensor, lse_1: torch.Tensor, *_: Any) -> Pair:
    return out_1.new_empty(out_1.shape), lse_1.new_empty(lse_1.shape)


@torch.library.custom_op(
    "vmonarch::merge_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor? grad_lse, Tensor out_1, Tensor lse_1, Tensor out_2, Tensor lse_2, Tensor lse)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
@replayed
def merge_backward(*inputs: Any) -> tuple[torch.Tensor, ...]:
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


differentiable(merge_forward, merge_backward, tensors=4, gradients=4, kept=slice(1, 2))


def merge_pair(out_1: torch.Tensor, lse_1: torch.Tensor, out_2: torch.Tensor, lse_2: torch.Tensor) -> Pair:
    """Merging by the kernels; arguments as in `merge_partials`, already checked."""
    forward = merge_forward if needs_operator(out_1, lse_1, out_2, lse_2) else _forward
    out, lse = forward(out_1, lse_1, out_2, lse_2)
    return out, lse
