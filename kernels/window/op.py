"""Attention in windows as a torch operator.

Shapes: B batch, Sq queries, Sk keys, H heads, D head dim, E value dim. An operator takes numbers, not objects: a
`Neighbourhood` travels as a list of integers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.launch import (
    block_dim,
    dot_precision,
    launch_options,
    positively_scaled,
    unit_stride,
    unspecialised,
)
from vmonarch.kernels.common.operators import new_results, operator
from vmonarch.kernels.common.softmax import log2_scale_of
from vmonarch.kernels.window.kernels import Neighbourhood, window_kernel, window_keys_kernel, window_rows_kernel
from vmonarch.kernels.window.reference import Window, extents


def brick_of(n: Neighbourhood, tokens: int) -> tuple[int, int, int]:
    """Frames, rows and columns, powers of two, of a brick of `tokens` tokens: as nearly alike as the grid allows."""
    brick = [1, 1, 1]
    sizes = [triton.next_power_of_2(size) for size in n[:3]]
    while math.prod(brick) < tokens:
        open_axes = [axis for axis in range(3) if brick[axis] < sizes[axis]]
        # A small grid leaves places of the brick empty; along the columns, as good as anywhere.
        axis = min(open_axes, key=lambda a: (brick[a], -a)) if open_axes else 2
        brick[axis] *= 2
    return brick[0], brick[1], brick[2]


def _launch(
    name: str, query: torch.Tensor, value: torch.Tensor, n: Neighbourhood, skipped: int
) -> tuple[int, dict[str, Any]]:
    """Bricks of the columns from `skipped` on, and the options and constants of a kernel."""
    D, E = query.shape[3], value.shape[3]
    options = launch_options(name, query.device, query.dtype, max(D, E))
    BT, BH, BW = brick_of(n, options.pop("BLOCK"))
    bricks = triton.cdiv(n.frames, BT) * triton.cdiv(n.rows, BH) * triton.cdiv(n.columns - skipped, BW)
    return bricks, {
        "D": D, "E": E, "BLOCK_D": block_dim(D), "BLOCK_E": block_dim(E), "PRECISION": dot_precision(query.dtype),
        "BT": BT, "BH": BH, "BW": BW, **options,
    }  # fmt: skip


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, numbers: list[int], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, Sq, H, E], lse [B, H, Sq])."""
    B, Sq, H, _ = query.shape
    n = Neighbourhood(*numbers)
    out, lse = new_results(query, key, value)
    bricks, constants = _launch("window", query, value, n, n.skipped)
    with torch.cuda.device_of(query):
        window_kernel[(bricks * B * H,)](
            query, key, value, out, lse, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            *out.stride()[:3], H, Sq, bricks, unspecialised(n), log2_scale_of(scale), **constants,
        )  # fmt: skip
    return out, lse


def _backward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), each in the shape and dtype of its input."""
    grad_out, grad_lse, query, key, value, out, lse, numbers, scale = inputs
    B, Sq, H, _ = query.shape
    n = Neighbourhood(*numbers)
    grad_out = unit_stride(grad_out)
    grad_lse = None if grad_lse is None else grad_lse.to(torch.float32).contiguous()
    out = unit_stride(out)
    delta = torch.empty_like(lse)
    dq, dk, dv = (x.new_empty(x.shape) for x in (query, key, value))
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad_out.stride()[:3])
    numbers_of_all = (unspecialised(n), scale, log2_scale_of(scale))
    with torch.cuda.device_of(query):
        bricks, constants = _launch("window_rows", query, value, n, n.skipped)
        window_rows_kernel[(bricks * B * H,)](
            query, key, value, grad_out, out, lse, grad_lse, delta, dq, *strides, *out.stride()[:3],
            H, Sq, bricks, *numbers_of_all, **constants,
        )  # fmt: skip
        bricks, constants = _launch("window_keys", query, value, n, 0)
        window_keys_kernel[(bricks * B * H,)](
            query, key, value, grad_out, lse, delta, dk, dv, *strides, H, Sq, key.shape[1], bricks, *numbers_of_all,
            **constants,
        )  # fmt: skip
    return dq, dk, dv


_operator = operator(
    "vmonarch::window",
    _forward,
    _backward,
    "Tensor query, Tensor key, Tensor value, int[] numbers, float scale",
    gradients=3,
)


def window_attention_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid: LatentGrid,
    window: Window,
    causal_axis: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by the kernels; arguments as in `window_attention_reference`, already checked."""
    query, scale = positively_scaled(query, scale)
    reach = [extents(size, axis == causal_axis) for axis, size in enumerate(window)]
    n = Neighbourhood(
        *grid, key.shape[1] - query.shape[1], *(back for back, _ in reach), *(ahead for _, ahead in reach)
    )
    return _operator(query, key, value, list(n), scale)
