"""Tensors with their strides; tiles of rows: loading and storing them; and the tokens of a head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vmonarch.kernels.common.launch import block_dim
from vmonarch.kernels.common.replay import launcher

_NUM_WARPS = 4


class Strided(NamedTuple):
    """A tensor [B, S, H, …] as kernels take it."""

    ptr: Any
    stride_b: int
    stride_s: int
    stride_h: int


def strided(tensor: torch.Tensor | None) -> Strided | None:
    """The tensor as kernels take it; None for none."""
    return None if tensor is None else Strided(tensor, *tensor.stride()[:3])


def broadcast(tensor: torch.Tensor | None) -> Strided | None:
    """A tensor [B or 1, S, H or 1, …] for all batch entries and heads."""
    if tensor is None:
        return None
    stride_b, stride_s, stride_h = tensor.stride()[:3]
    return Strided(tensor, stride_b if tensor.shape[0] > 1 else 0, stride_s, stride_h if tensor.shape[2] > 1 else 0)


@triton.jit
def head_of(x, b, h):
    """Where a head of a `Strided` begins."""
    # int64: a stride times an index may pass 2^31.
    return x.ptr + b.to(tl.int64) * x.stride_b + h.to(tl.int64) * x.stride_h


@triton.jit
def item_of_a_head(items, H):
    """Number of the program's item, b·H + h, batch entry b and head h; a head has `items`, one after the other."""
    pid = tl.program_id(0)
    bh = (pid // items).to(tl.int64)
    return pid % items, bh, bh // H, bh % H


def launch_on_tokens(kernel: Any, result: torch.Tensor, *arguments: Any, **options: Any) -> None:
    """Run a kernel, which takes `arguments` and sizes, with a program for each tile of `tokens_of_a_head`.

    Args:
        result: [B, S, H, E], what the kernel writes.
        options: of the launch.
    """
    B, S, H, E = result.shape
    BLOCK_E = block_dim(E)
    # Each thread writes 16 bytes.
    ROWS = _NUM_WARPS * 32 * 16 // result.itemsize // BLOCK_E
    with torch.cuda.device_of(result):
        launcher(kernel, (triton.cdiv(S, ROWS) * H, B))(
            *arguments, S, H, E=E, BLOCK_E=BLOCK_E, ROWS=ROWS, num_warps=_NUM_WARPS, **options
        )


@triton.jit
def tokens_of_a_head(S, H, ROWS: tl.constexpr):
    """Batch entry and head of the program, its tokens [ROWS], and whether these exist.

    The heads of some tokens are numbered one after the other.
    """
    token = tl.program_id(0) // H * ROWS + tl.arange(0, ROWS)
    return tl.program_id(1).to(tl.int64), (tl.program_id(0) % H).to(tl.int64), token, token < S


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
def store_rows(ptr, stride, rows, valid, x, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, ADD: tl.constexpr = False):
    """Write x [rows, BLOCK_WIDTH] into a tensor [R, WIDTH], in its dtype, where a row is `valid`.

    ADD: or add it to what is there, which no other program may touch.
    """
    if ADD:
        x = load_rows(ptr, stride, rows, valid, WIDTH, BLOCK_WIDTH, True).to(tl.float32) + x
    columns = tl.arange(0, BLOCK_WIDTH)
    pointers = ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(pointers, x.to(ptr.dtype.element_ty), mask=valid[:, None] & (columns[None, :] < WIDTH))


@triton.jit
def nearest_int8(x):
    """The nearest whole number, in int8; x is float32 and from -127 to 127. Halves go to even ones."""
    # At 1.5 · 2²³ numbers lie 1 apart, and the lowest byte is the number's own.
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
