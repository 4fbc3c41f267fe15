"""Loading and storing tiles of rows, for jit code."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(ptr, stride, rows, valid, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """[rows, BLOCK_WIDTH] of a tensor [R, WIDTH], zeros beyond WIDTH and, if MASKED, where a row is not `valid`."""
    columns = tl.arange(0, BLOCK_WIDTH)
    pointers = ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if MASKED:
        return tl.load(pointers, mask=valid[:, None] & (columns[None, :] < WIDTH), other=0.0)
    elif WIDTH == BLOCK_WIDTH:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=columns[None, :] < WIDTH, other=0.0)


@triton.jit
def store_rows(ptr, stride, rows, valid, x, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Write x [rows, BLOCK_WIDTH] into a tensor [R, WIDTH], in its dtype, where a row is `valid`."""
    columns = tl.arange(0, BLOCK_WIDTH)
    pointers = ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(pointers, x.to(ptr.dtype.element_ty), mask=valid[:, None] & (columns[None, :] < WIDTH))


@triton.jit
def add_rows(ptr, stride, rows, valid, x, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Add x [rows, BLOCK_WIDTH] to a tensor [R, WIDTH] where a row is `valid`. No other program may touch them."""
    there = load_rows(ptr, stride, rows, valid, WIDTH, BLOCK_WIDTH, True).to(tl.float32)
    store_rows(ptr, stride, rows, valid, there + x, WIDTH, BLOCK_WIDTH)
