"""What the kernels that own rows and those that own keys share; see the package."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vmonarch.kernels.common.blocks import Places
from vmonarch.kernels.common.launch import block_dim
from vmonarch.kernels.common.replay import launcher
from vmonarch.kernels.hopper.attend import (
    BLOCK_M,
    HALF,
    allocate_barriers,
    divides_exactly,
    factor_descriptors,
)

# Rows or keys of the two warpgroups of a program.
TILE = BLOCK_M
# log2 p of what is not there: p is 0.
NOWHERE = -1e30
# Integer arguments of both kernels. Nothing is compiled anew where one of them is 1 or a multiple of 16.
SIZES = ["row_tiles", "heads", "tokens", "blocks", "positions", "offset", "keys", "padded"]

_HALF = gl.constexpr(HALF)
_TILE = gl.constexpr(TILE)


@gluon.jit
def r_item(item, row_tiles, heads, blocks, positions, offset):
    """(batch, head, group, first token of the block, first position of the tile) of an item of the R-step."""
    group = item // row_tiles
    token = group % blocks * positions - offset
    return group // blocks // heads, group // blocks % heads, group, token, item % row_tiles * _TILE


@gluon.jit
def allocate_all_barriers(STAGES: gl.constexpr):
    """`full` and `empty` barriers of what the program keeps and of the stages; see the package."""
    kept_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kept_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(kept_full, count=1)
    mbarrier.init(kept_empty, count=2)
    full, empty = allocate_barriers(STAGES)
    fence_async_shared()
    return kept_full, kept_empty, full, empty


@gluon.jit
def add_rows(ptr, stride, row, stop, x, WIDTH: gl.constexpr, ACCUMULATE: gl.constexpr):
    """Write x [64, D] into rows of WIDTH numbers, or add it to what is there; no other program touches these rows.

    Rows before the first of a tensor and from `stop` on are not there.
    """
    D: gl.constexpr = x.shape[1]
    layout: gl.constexpr = x.type.layout
    rows = row + gl.arange(0, _HALF, gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, gl.SliceLayout(0, layout))
    pointers = ptr + rows.to(gl.int64)[:, None] * stride + columns[None, :]
    inside = ((rows >= 0) & (rows < stop))[:, None] & (columns < WIDTH)[None, :]
    if ACCUMULATE:
        x += gl.load(pointers, mask=inside, other=0.0).to(gl.float32)
    gl.store(pointers, x.to(ptr.dtype.element_ty), mask=inside)


@gluon.jit
def store_factor_gradient(
    ptr, like, b, h, row, stop, x, inverse_scale, HEAD_DIM: gl.constexpr, RANK: gl.constexpr
):  # fmt: skip
    """Write the gradient of 64 rows of a factor; x came from scale·dS.

    `like` is dk or dq: both tensors are contiguous, and strides of its own would take registers.
    """
    ptr += (b.to(gl.int64) * like.stride_b + h.to(gl.int64) * like.stride_h) // HEAD_DIM * RANK
    add_rows(ptr, like.stride_s // HEAD_DIM * RANK, row, stop, x * inverse_scale, RANK, False)


def rank_of(factors: tuple[torch.Tensor, torch.Tensor] | None) -> int:
    """Columns that factors take in shared memory."""
    return 0 if factors is None else block_dim(factors[0].shape[3])


def bias_arguments(
    factors: tuple[torch.Tensor, torch.Tensor] | None, rows: tuple[int, int], dtype: torch.dtype, scale: float
) -> tuple[Sequence[TensorDescriptor | None], tuple[int, ...], float, bool]:
    """Descriptors for tiles of `rows` rows of φq and φk, what their indices are times, 1 / scale, and CHAINED."""
    if factors is None:
        return (None, None), (0, 0, 0, 0), 1.0, False
    return *factor_descriptors(factors, rows), 1.0 / scale, divides_exactly(dtype, scale)


def sizes_of(places: Places | None, tokens: int, key: torch.Tensor) -> tuple[int, ...]:
    """tokens, blocks, positions, offset and, where keys are blocks, their number."""
    if places is None:
        return tokens, 0, 0, 0, 0
    return places.tokens, places.blocks, places.positions, places.offset, key.shape[1] if key.ndim == 3 else 0


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
