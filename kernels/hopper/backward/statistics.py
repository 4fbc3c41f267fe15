"""Statistics of the rows in the form that the backward kernels take; see the package."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vmonarch.kernels.common.replay import launcher
from vmonarch.kernels.hopper.backward.common import TILE


@triton.jit(do_not_specialize=["groups", "rows", "padded"])
def _fold_kernel(
    lse_ptr, delta_ptr, folded_ptr, groups, rows, padded, scale, log_keys,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """[shift_s, shift_dp] of every row, and of places between groups, where p is 0.

    Every key stands for n keys, log_keys = log n.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = groups.to(tl.int64) * padded
    row = at // padded * rows + at % padded
    inside = (at < size) & (at % padded < rows)
    lse = tl.load(lse_ptr + row, mask=inside, other=-float("inf"))
    delta = tl.load(delta_ptr + row, mask=inside, other=0.0)
    # Where p is 0, log2 p must still be a number.
    shift_s = tl.where(lse == -float("inf"), -1e30, 1.4426950408889634 * (log_keys - lse))
    tl.store(folded_ptr + at, shift_s, mask=at < size)
    tl.store(folded_ptr + size + at, -scale * delta, mask=at < size)


def fold(lse: torch.Tensor, delta: torch.Tensor, rows: int, scale: float, keys_per_key: int = 1) -> torch.Tensor:
    """[2, groups, padded rows] statistics of the rows in the form the kernels take."""
    groups, padded = lse.numel() // rows, triton.cdiv(rows, TILE) * TILE
    folded = lse.new_empty(2, groups, padded)
    launcher(_fold_kernel, (triton.cdiv(groups * padded, 1024),))(
        lse,
        delta,
        folded,
        groups,
        rows,
        padded,
        scale,
        math.log(keys_per_key),
        BLOCK=1024,
        num_warps=4,
    )
    return folded


def folded_descriptor(folded: torch.Tensor, rows: int) -> TensorDescriptor:
    size = folded[0].numel()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(folded, [2, size], [size, 1], [1, rows], layout)
