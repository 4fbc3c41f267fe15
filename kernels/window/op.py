"""Attention in windows in Triton: tokens in bricks, so that a tile of queries meets few tiles of keys (Based, §4.2).

A brick is a small box of neighbouring tokens, BT frames × BH rows × BW columns; a sequence is a video of one row. A
program takes one brick of queries and goes through the bricks that the windows of its queries touch; what lies outside
of a window is masked. Tokens are found by arithmetic and stay where they are.

One kernel owns queries (out; dq) and another keys (dk, dv), so there are no atomics and every sum has one order.

Shapes: B batch, Sq queries, Sk keys, H heads, D head dim, E value dim; M queries or keys of a brick. Tensors are
[B, S, H, D] with any strides but the last; lse and δ [B, H, Sq] in float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

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
from vmonarch.kernels.common.replay import launcher, replayed
from vmonarch.kernels.common.softmax import log2_partition, log2_scale_of, online_softmax, probabilities, row_delta
from vmonarch.kernels.common.tiles import head_of, item_of_a_head, load_rows, store_rows, strided
from vmonarch.kernels.window.reference import Window, extents


class Neighbourhood(NamedTuple):
    """Run-time numbers of a call.

    Attributes:
        frames, rows, columns: of the keys' grid.
        skipped: tokens before the first query; not 0 in sequences only.
        back_t, back_h, back_w, ahead_t, ahead_h, ahead_w: how far a window reaches from its query.
    """

    frames: int
    rows: int
    columns: int
    skipped: int
    back_t: int
    back_h: int
    back_w: int
    ahead_t: int
    ahead_h: int
    ahead_w: int


@triton.jit
def _tokens_of(brick, n, first_column, BT: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr):
    """Tokens [M] of a brick, whether they exist, their frames, rows and columns; columns begin at `first_column`."""
    bricks_w = tl.cdiv(n.columns - first_column, BW)
    bricks_h = tl.cdiv(n.rows, BH)
    i = tl.arange(0, BT * BH * BW)
    t = brick // (bricks_h * bricks_w) * BT + i // (BH * BW)
    h = brick // bricks_w % bricks_h * BH + i // BW % BH
    w = first_column + brick % bricks_w * BW + i % BW
    exists = (t < n.frames) & (h < n.rows) & (w < n.columns)
    return (t * n.rows + h) * n.columns + w, exists, t, h, w


@triton.jit
def _touched(first, stop, size, before, after, begin, BLOCK: tl.constexpr):
    """First brick along an axis that holds a place up to `before` in front of or `after` behind [first, stop), and
    how many there are; places go from `begin` to `size`, and so do bricks.
    """
    low = (tl.maximum(first - before, begin) - begin) // BLOCK
    high = (tl.minimum(stop - 1 + after, size - 1) - begin) // BLOCK
    return low, tl.maximum(high - low + 1, 0)


@triton.jit
def _near(t, h, w, kt, kh, kw, n):
    """Whether keys (kt, kh, kw) lie in the windows of queries (t, h, w); they broadcast."""
    near = (kt >= t - n.back_t) & (kt <= t + n.ahead_t)
    near = near & (kh >= h - n.back_h) & (kh <= h + n.ahead_h)
    return near & (kw >= w - n.back_w) & (kw <= w + n.ahead_w)


@triton.jit
def _bricks_around(
    brick, n, own_column, column, before_t, before_h, before_w, after_t, after_h, after_w,
    BT: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """The bricks of the other side within reach of a brick: the first along each axis, and how many.

    own_column, column: where columns begin on this side, and on the other.
    """
    bricks_w = tl.cdiv(n.columns - own_column, BW)
    bricks_h = tl.cdiv(n.rows, BH)
    t = brick // (bricks_h * bricks_w) * BT
    h = brick // bricks_w % bricks_h * BH
    w = own_column + brick % bricks_w * BW
    low_t, count_t = _touched(t, tl.minimum(t + BT, n.frames), n.frames, before_t, after_t, 0, BT)
    low_h, count_h = _touched(h, tl.minimum(h + BH, n.rows), n.rows, before_h, after_h, 0, BH)
    low_w, count_w = _touched(w, tl.minimum(w + BW, n.columns), n.columns, before_w, after_w, column, BW)
    return low_t, low_h, low_w, count_t, count_h, count_w


@triton.jit
def _brick_at(step, low_t, low_h, low_w, count_h, count_w, n, column, BH: tl.constexpr, BW: tl.constexpr):
    """Number of the brick that a walk through the bricks around comes to."""
    bricks_w = tl.cdiv(n.columns - column, BW)
    bricks_h = tl.cdiv(n.rows, BH)
    t = low_t + step // (count_h * count_w)
    h = low_h + step // count_w % count_h
    return (t * bricks_h + h) * bricks_w + low_w + step % count_w


@triton.jit
def _keys_at(
    step, low_t, low_h, low_w, count_h, count_w, n, t, h, w, BT: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr
):
    """Keys [N] of the brick that a walk comes to, whether they exist, and whether they lie in the windows of queries
    (t, h, w) [M, N].
    """
    brick = _brick_at(step, low_t, low_h, low_w, count_h, count_w, n, 0, BH, BW)
    key, there, kt, kh, kw = _tokens_of(brick, n, 0, BT, BH, BW)
    near = _near(t[:, None], h[:, None], w[:, None], kt[None, :], kh[None, :], kw[None, :], n)
    return key, there, near & there[None, :]


@triton.jit(do_not_specialize=["H", "Sq", "bricks"])
def window_kernel(
    query, key, value, output, lse_ptr, H, Sq, bricks, neighbourhood, log2_scale,
    D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """out and lse of one brick of queries of one head."""
    n = Neighbourhood(*[number >> 4 for number in neighbourhood])
    brick, bh, b, head = item_of_a_head(bricks, H)
    token, exists, t, h, w = _tokens_of(brick, n, n.skipped, BT, BH, BW)
    row = token - n.skipped
    q = load_rows(head_of(query, b, head), query.stride_s, row, exists, D, BLOCK_D, True)
    k_ptr = head_of(key, b, head)
    v_ptr = head_of(value, b, head)
    acc = tl.zeros([BT * BH * BW, BLOCK_E], tl.float32)
    row_max = tl.full([BT * BH * BW], -float("inf"), tl.float32)
    row_sum = tl.zeros([BT * BH * BW], tl.float32)
    low_t, low_h, low_w, count_t, count_h, count_w = _bricks_around(
        brick, n, n.skipped, 0, n.back_t, n.back_h, n.back_w, n.ahead_t, n.ahead_h, n.ahead_w, BT, BH, BW
    )
    for step in range(count_t * count_h * count_w):
        keys, there, near = _keys_at(step, low_t, low_h, low_w, count_h, count_w, n, t, h, w, BT, BH, BW)
        k = load_rows(k_ptr, key.stride_s, keys, there, D, BLOCK_D, True)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(near, scores, -float("inf"))
        p, alpha, row_max, row_sum, _ = online_softmax(scores, row_max, row_sum, row_sum, log2_scale, False, True)
        v = load_rows(v_ptr, value.stride_s, keys, there, E, BLOCK_E, True)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    out = acc * (1.0 / tl.where(row_sum == 0, 1.0, row_sum))[:, None]
    store_rows(head_of(output, b, head), output.stride_s, row, exists, out, E, BLOCK_E)
    tl.store(lse_ptr + bh * Sq + row, log2_partition(row_max, row_sum) * 0.6931471805599453, mask=exists)


@triton.jit(do_not_specialize=["H", "Sq", "bricks"])
def window_rows_kernel(
    query, key, value, grad_output, output, lse_ptr, dlse_ptr, delta_ptr, dq_ptr,
    H, Sq, bricks, neighbourhood, scale, log2_scale,
    D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dq [B, Sq, H, D], contiguous, of one brick of queries; and δ = rowsum(dO ∘ O) - dlse for the keys' kernel."""
    n = Neighbourhood(*[number >> 4 for number in neighbourhood])
    brick, bh, b, head = item_of_a_head(bricks, H)
    token, exists, t, h, w = _tokens_of(brick, n, n.skipped, BT, BH, BW)
    row = token - n.skipped
    q = load_rows(head_of(query, b, head), query.stride_s, row, exists, D, BLOCK_D, True)
    do = load_rows(head_of(grad_output, b, head), grad_output.stride_s, row, exists, E, BLOCK_E, True)
    out = load_rows(head_of(output, b, head), output.stride_s, row, exists, E, BLOCK_E, True)
    lse = tl.load(lse_ptr + bh * Sq + row, mask=exists, other=float("inf"))
    delta = row_delta(do, out, dlse_ptr, bh * Sq + row, exists)
    tl.store(delta_ptr + bh * Sq + row, delta, mask=exists)
    k_ptr = head_of(key, b, head)
    v_ptr = head_of(value, b, head)
    dq = tl.zeros([BT * BH * BW, BLOCK_D], tl.float32)
    low_t, low_h, low_w, count_t, count_h, count_w = _bricks_around(
        brick, n, n.skipped, 0, n.back_t, n.back_h, n.back_w, n.ahead_t, n.ahead_h, n.ahead_w, BT, BH, BW
    )
    for step in range(count_t * count_h * count_w):
        keys, there, near = _keys_at(step, low_t, low_h, low_w, count_h, count_w, n, t, h, w, BT, BH, BW)
        k = load_rows(k_ptr, key.stride_s, keys, there, D, BLOCK_D, True)
        v = load_rows(v_ptr, value.stride_s, keys, there, E, BLOCK_E, True)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        scores = tl.where(near, scores, -float("inf"))
        ds = probabilities(scores, lse[:, None], log2_scale) * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_rows(dq_ptr, D, (b * Sq + row) * H + head, exists, dq * scale, D, BLOCK_D)


@triton.jit(do_not_specialize=["H", "Sq", "Sk", "bricks"])
def window_keys_kernel(
    query, key, value, grad_output, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    H, Sq, Sk, bricks, neighbourhood, scale, log2_scale,
    D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dk [B, Sk, H, D] and dv [B, Sk, H, E], contiguous, of one brick of keys; tiles are [keys, queries]."""
    n = Neighbourhood(*[number >> 4 for number in neighbourhood])
    brick, bh, b, head = item_of_a_head(bricks, H)
    keys, there, kt, kh, kw = _tokens_of(brick, n, 0, BT, BH, BW)
    k = load_rows(head_of(key, b, head), key.stride_s, keys, there, D, BLOCK_D, True)
    v = load_rows(head_of(value, b, head), value.stride_s, keys, there, E, BLOCK_E, True)
    q_ptr = head_of(query, b, head)
    do_ptr = head_of(grad_output, b, head)
    dk = tl.zeros([BT * BH * BW, BLOCK_D], tl.float32)
    dv = tl.zeros([BT * BH * BW, BLOCK_E], tl.float32)
    # A key lies in the windows of queries that are as far ahead of it as windows reach back.
    low_t, low_h, low_w, count_t, count_h, count_w = _bricks_around(
        brick, n, 0, n.skipped, n.ahead_t, n.ahead_h, n.ahead_w, n.back_t, n.back_h, n.back_w, BT, BH, BW
    )
    for step in range(count_t * count_h * count_w):
        other = _brick_at(step, low_t, low_h, low_w, count_h, count_w, n, n.skipped, BH, BW)
        token, exists, t, h, w = _tokens_of(other, n, n.skipped, BT, BH, BW)
        row = token - n.skipped
        q = load_rows(q_ptr, query.stride_s, row, exists, D, BLOCK_D, True)
        do = load_rows(do_ptr, grad_output.stride_s, row, exists, E, BLOCK_E, True)
        # Where there is no query, lse = inf makes p = 0.
        lse = tl.load(lse_ptr + bh * Sq + row, mask=exists, other=float("inf"))
        delta = tl.load(delta_ptr + bh * Sq + row, mask=exists, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        near = _near(t[None, :], h[None, :], w[None, :], kt[:, None], kh[:, None], kw[:, None], n)
        p = probabilities(tl.where(near, scores, -float("inf")), lse[None, :], log2_scale)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    target = (b * Sk + keys) * H + head
    store_rows(dk_ptr, D, target, there, dk * scale, D, BLOCK_D)
    store_rows(dv_ptr, E, target, there, dv, E, BLOCK_E)


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


@replayed
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, numbers: list[int], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, Sq, H, E], lse [B, H, Sq])."""
    B, Sq, H, _ = query.shape
    n = Neighbourhood(*numbers)
    out, lse = new_results(query, key, value)
    bricks, constants = _launch("window", query, value, n, n.skipped)
    launcher(window_kernel, (bricks * B * H,))(
        strided(query), strided(key), strided(value), strided(out), lse, H, Sq, bricks, unspecialised(n),
        log2_scale_of(scale), **constants,
    )  # fmt: skip
    return out, lse


@replayed
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
    tensors = (strided(query), strided(key), strided(value), strided(grad_out))
    numbers_of_all = (unspecialised(n), scale, log2_scale_of(scale))
    bricks, constants = _launch("window_rows", query, value, n, n.skipped)
    launcher(window_rows_kernel, (bricks * B * H,))(
        *tensors, strided(out), lse, grad_lse, delta, dq, H, Sq, bricks, *numbers_of_all, **constants
    )
    bricks, constants = _launch("window_keys", query, value, n, 0)
    launcher(window_keys_kernel, (bricks * B * H,))(
        *tensors, lse, delta, dk, dv, H, Sq, key.shape[1], bricks, *numbers_of_all, **constants
    )
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
