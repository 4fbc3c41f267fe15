"""R-steps in Triton: plain attention inside every key block, with the key as its own value (`reference.r_step`).

Legend: B batch, S tokens, H heads, D head dim, E value dim, m blocks, b positions per block, c pooled cells per block.
Tokens are [B, S, H, D] with any strides but the last; block tensors are [B·H·m, b, D], contiguous; row statistics are
[B·H·m, b], float32. With `Places` the kernels find tokens by arithmetic: nothing is copied, padded or transposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from vmonarch.kernels.common.launch import block_dim, dot_precision, hopper_fits, launch_options, unspecialised
from vmonarch.kernels.common.replay import launcher
from vmonarch.kernels.common.softmax import log2_partition, log2_scale_of, online_softmax, probabilities
from vmonarch.kernels.common.tiles import Strided, broadcast, head_of, load_rows, store_rows, strided
from vmonarch.kernels.flash_entropy.backward import row_deltas
from vmonarch.kernels.monarch.call import MonarchCall
from vmonarch.kernels.monarch.places import plain_places, token_at, token_in_cell


@triton.jit
def _parts_of(group, places, heads):
    """Block, head and batch entry of a group."""
    return group % places.blocks, group // places.blocks % heads, group // places.blocks // heads


@triton.jit
def _key_rows(places, block, i, stop, POOLED: tl.constexpr):
    """Row of key `i` of a block in its tensor, and whether there is one."""
    if POOLED:
        return i, i < stop
    else:
        return block * places.positions - places.offset + i, i < stop


@triton.jit
def _key_range(places, block, POOLED: tl.constexpr):
    """First and last + 1 of the keys `i` of a block; places outside hold none."""
    if POOLED:
        return 0, places.cells
    else:
        start = block * places.positions - places.offset
        return tl.maximum(0, -start), tl.minimum(places.positions, places.tokens - start)


@triton.jit
def _attended(mask, batch, rows, valid):
    """Which keys of these rows the mask names."""
    at = batch.to(tl.int64) * mask.stride_b + rows.to(tl.int64) * mask.stride_s
    return tl.load(mask.ptr + at, mask=valid, other=0) != 0


@triton.jit
def _masked_scores(
    scores, rows, valid, i, bias_ptr, mask, batch, log2_scale, POOLED: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Scores [M, N] whose keys lie along the last axis: masked, and for pooled keys scaled, log2 n added."""
    if mask is not None:
        valid = valid & _attended(mask, batch, rows, valid)
    if POOLED:
        # A pooled key stands for n keys: log n is added to its logit (docs/attention.md, "Pooled keys").
        scores = scores * log2_scale + tl.load(bias_ptr + i, mask=valid, other=-float("inf"))[None, :]
    elif MASKED:
        scores = tl.where(valid[None, :], scores, -float("inf"))
    return scores


@triton.jit
def _r_step_keys(
    acc_k, acc_v, row_max, row_sum, z, start, stop,
    k_ptr, v_ptr, stride_ks, stride_vs, bias_ptr, mask, batch, places, block, range_stop, log2_scale,
    D: tl.constexpr, E: tl.constexpr, SUM_K: tl.constexpr, LAST: tl.constexpr, POOLED: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Take the keys [start, stop) of a block into the running sums, BLOCK_N at a time."""
    for first in range(start, stop, BLOCK_N):
        i = first + tl.arange(0, BLOCK_N)
        rows, valid = _key_rows(places, block, i, range_stop, POOLED)
        k = load_rows(k_ptr, stride_ks, rows, valid, D, BLOCK_D, MASKED)  # [N, D]
        scores = tl.dot(z, tl.trans(k), input_precision=PRECISION)  # [M, N]
        scores = _masked_scores(scores, rows, valid, i, bias_ptr, mask, batch, log2_scale, POOLED, MASKED)
        p, alpha, row_max, row_sum, _ = online_softmax(
            scores, row_max, row_sum, row_sum, 1.0 if POOLED else log2_scale, False, mask is not None
        )
        p = p.to(k.dtype)
        if SUM_K:
            acc_k = tl.dot(p, k, acc_k * alpha[:, None], input_precision=PRECISION)
        if LAST:
            v = load_rows(v_ptr, stride_vs, rows, valid, E, BLOCK_E, MASKED)
            acc_v = tl.dot(p, v, acc_v * alpha[:, None], input_precision=PRECISION)
    return acc_k, acc_v, row_max, row_sum


@triton.jit
def _load_z(
    centroids, places, heads, group, j,
    D: tl.constexpr, BLOCK_D: tl.constexpr, Z_IS_QUERY: tl.constexpr, MASKED: tl.constexpr = True,
):  # fmt: skip
    """Centroid queries [M, D] of positions j: the query itself in the first iteration, a block tensor later."""
    block, head, batch = _parts_of(group, places, heads)
    if Z_IS_QUERY:
        token, valid = token_at(places, block, j)
        return load_rows(head_of(centroids, batch, head), centroids.stride_s, token, valid, D, BLOCK_D, MASKED)
    else:
        base = centroids.ptr + group.to(tl.int64) * places.positions * D
        return load_rows(base, D, j, j < places.positions, D, BLOCK_D, MASKED)


@triton.jit(do_not_specialize=["heads", "row_tiles"])
def _r_step_kernel(
    centroids, key, value, mask, bias_ptr, aL_ptr, y_ptr, cL_ptr, lse_ptr,
    heads, places, row_tiles, scale, log2_scale,
    D: tl.constexpr, E: tl.constexpr, LAST: tl.constexpr, Z_IS_QUERY: tl.constexpr, POOLED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_TAIL: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One tile of positions of one key block: aL and cL, unless there is no aL_ptr, and in the last iteration y.

    The keys after the last whole BLOCK_N go through in tiles of BLOCK_TAIL.
    """
    places = plain_places(places)
    pid = tl.program_id(0)
    group = pid // row_tiles
    j = pid % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    block, head, batch = _parts_of(group, places, heads)
    z = _load_z(centroids, places, heads, group, j, D, BLOCK_D, Z_IS_QUERY)
    k_ptr = head_of(key, batch, head)
    v_ptr = head_of(value, batch, head)
    if POOLED:
        k_ptr = key.ptr + group.to(tl.int64) * places.cells * D
        bias_ptr += block * places.cells

    acc_k = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_M, BLOCK_E], tl.float32) if LAST else acc_k
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    start, stop = _key_range(places, block, POOLED)
    full_stop = start
    if mask is None:
        full_stop = start + (stop - start) // BLOCK_N * BLOCK_N
        acc_k, acc_v, row_max, row_sum = _r_step_keys(
            acc_k, acc_v, row_max, row_sum, z, start, full_stop,
            k_ptr, v_ptr, key.stride_s, value.stride_s, bias_ptr, mask, batch, places, block, stop, log2_scale,
            D, E, aL_ptr is not None, LAST, POOLED, False, PRECISION, BLOCK_N, BLOCK_D, BLOCK_E,
        )  # fmt: skip
    acc_k, acc_v, row_max, row_sum = _r_step_keys(
        acc_k, acc_v, row_max, row_sum, z, full_stop, stop,
        k_ptr, v_ptr, key.stride_s, value.stride_s, bias_ptr, mask, batch, places, block, stop, log2_scale,
        D, E, aL_ptr is not None, LAST, POOLED, True, PRECISION, BLOCK_TAIL, BLOCK_D, BLOCK_E,
    )  # fmt: skip

    inverse = 1.0 / tl.where(row_sum == 0, 1.0, row_sum)
    lse = log2_partition(row_max, row_sum) * 0.6931471805599453
    row = group.to(tl.int64) * places.positions + j
    inside = j < places.positions
    if aL_ptr is not None:
        aL = (acc_k * inverse[:, None]).to(z.dtype)
        # The entropy is free when the value is the key (docs/attention.md, "The entropy"). Taken with the rounded aL
        # that the L-step reads, it cancels the rounding for queries near z.
        cL = scale * tl.sum(z.to(tl.float32) * aL.to(tl.float32), 1) - lse
        store_rows(aL_ptr, D, row, inside, aL, D, BLOCK_D)
        tl.store(cL_ptr + row, cL, mask=inside)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, lse, mask=inside)
    if LAST:
        # y may take the memory of z: all warps must have read their rows of z before any writes y.
        tl.debug_barrier()
        store_rows(y_ptr, E, row, inside, acc_v * inverse[:, None], E, BLOCK_E)


@triton.jit(do_not_specialize=["heads", "cell_tiles"])
def _pool_kernel(
    key, pooled_ptr, bias_ptr, heads, places, cell_tiles,
    D: tl.constexpr, COARSE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Mean key of every cell, and log2 of the number of its keys."""
    places = plain_places(places)
    pid = tl.program_id(0)
    group = pid // cell_tiles
    cell = pid % cell_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    block, head, batch = _parts_of(group, places, heads)
    k_ptr = head_of(key, batch, head)
    inside = cell < places.cells
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    count = tl.zeros([BLOCK_N], tl.float32)
    for step in tl.static_range(COARSE * COARSE):
        token, valid = token_in_cell(places, block, cell, step // COARSE, step % COARSE, COARSE)
        valid = valid & inside
        total += load_rows(k_ptr, key.stride_s, token, valid, D, BLOCK_D, True).to(tl.float32)
        count += valid.to(tl.float32)
    mean = total / tl.maximum(count, 1.0)[:, None]
    row = group.to(tl.int64) * places.cells + cell
    store_rows(pooled_ptr, D, row, inside, mean, D, BLOCK_D)
    if group < places.blocks:
        bias = tl.where(count > 0, tl.log2(tl.maximum(count, 1.0)), -float("inf"))
        tl.store(bias_ptr + group * places.cells + cell, bias, mask=inside)


@triton.jit(do_not_specialize=["heads", "cell_tiles"])
def _unpool_kernel(
    grad_key, d_pooled_ptr, bias_ptr, heads, places, cell_tiles,
    D: tl.constexpr, COARSE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add to every key's gradient its share of its cell's."""
    places = plain_places(places)
    pid = tl.program_id(0)
    group = pid // cell_tiles
    cell = pid % cell_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    block, head, batch = _parts_of(group, places, heads)
    dk_ptr = head_of(grad_key, batch, head)
    inside = cell < places.cells
    row = group.to(tl.int64) * places.cells + cell
    d_pooled = load_rows(d_pooled_ptr, D, row, inside, D, BLOCK_D, True).to(tl.float32)
    bias = tl.load(bias_ptr + block * places.cells + cell, mask=inside, other=0.0)
    share = d_pooled * tl.exp2(-tl.where(bias == -float("inf"), 0.0, bias))[:, None]
    for step in tl.static_range(COARSE * COARSE):
        token, valid = token_in_cell(places, block, cell, step // COARSE, step % COARSE, COARSE)
        store_rows(dk_ptr, grad_key.stride_s, token, valid & inside, share, D, BLOCK_D, ADD=True)


@triton.jit
def _r_backward_z_keys(
    dz, z, daL, dy, delta, lse, start, stop,
    k_ptr, v_ptr, stride_ks, stride_vs, bias_ptr, mask, batch, places, block, range_stop, scale, log2_scale,
    D: tl.constexpr, E: tl.constexpr, SUM_K: tl.constexpr, LAST: tl.constexpr, POOLED: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Add to dz / scale what the keys [start, stop) of a block contribute, BLOCK_N at a time."""
    for first in tl.range(start, stop, BLOCK_N):
        i = first + tl.arange(0, BLOCK_N)
        rows, valid = _key_rows(places, block, i, range_stop, POOLED)
        k = load_rows(k_ptr, stride_ks, rows, valid, D, BLOCK_D, MASKED)
        scores = tl.dot(z, tl.trans(k), input_precision=PRECISION)
        masked = _masked_scores(scores, rows, valid, i, bias_ptr, mask, batch, log2_scale, POOLED, MASKED)
        p = probabilities(masked, lse, 1.0 if POOLED else log2_scale)
        if SUM_K:
            dp = tl.dot(daL, tl.trans(k), input_precision=PRECISION)
        else:
            dp = tl.zeros(scores.shape, tl.float32)
        if LAST:
            v = load_rows(v_ptr, stride_vs, rows, valid, E, BLOCK_E, MASKED)
            dp = tl.dot(dy, tl.trans(v), dp, input_precision=PRECISION)
        ds = p * (dp - delta)
        dz = tl.dot(ds.to(k.dtype), k, dz, input_precision=PRECISION)
    return dz


@triton.jit(do_not_specialize=["heads", "row_tiles"])
def _r_backward_z_kernel(
    centroids, key, value, mask, bias_ptr, daL_ptr, dy_ptr, delta_ptr, lse_ptr,
    grad_query, cR_ptr, daR_ptr, dcR_ptr, heads, places, row_tiles, scale, log2_scale, min_mass,
    D: tl.constexpr, E: tl.constexpr, LAST: tl.constexpr, Z_IS_QUERY: tl.constexpr, POOLED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of z. For z = q it is added to dq; else αR and cR, of which z was made, get theirs.

    Those are times max(cR, min_mass): divided by it, they might leave the range of float16.
    """
    places = plain_places(places)
    pid = tl.program_id(0)
    group = pid // row_tiles
    j = pid % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    block, head, batch = _parts_of(group, places, heads)
    inside = j < places.positions
    row = group.to(tl.int64) * places.positions + j
    z = _load_z(centroids, places, heads, group, j, D, BLOCK_D, Z_IS_QUERY)
    daL = z
    if daL_ptr is not None:
        daL = load_rows(daL_ptr, D, row, inside, D, BLOCK_D, True)
    delta = tl.load(delta_ptr + row, mask=inside, other=0.0)[:, None]
    lse = tl.load(lse_ptr + row, mask=inside, other=0.0)[:, None]
    dy = z
    if LAST:
        dy = load_rows(dy_ptr, E, row, inside, E, BLOCK_E, True)
    k_ptr = head_of(key, batch, head)
    v_ptr = head_of(value, batch, head)
    if POOLED:
        k_ptr = key.ptr + group.to(tl.int64) * places.cells * D
        bias_ptr += block * places.cells

    dz = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    start, stop = _key_range(places, block, POOLED)
    full_stop = start
    if mask is None:
        full_stop = start + (stop - start) // BLOCK_N * BLOCK_N
        dz = _r_backward_z_keys(
            dz, z, daL, dy, delta, lse, start, full_stop,
            k_ptr, v_ptr, key.stride_s, value.stride_s, bias_ptr, mask, batch, places, block, stop, scale, log2_scale,
            D, E, daL_ptr is not None, LAST, POOLED, False, PRECISION, BLOCK_N, BLOCK_D, BLOCK_E,
        )  # fmt: skip
    dz = _r_backward_z_keys(
        dz, z, daL, dy, delta, lse, full_stop, stop,
        k_ptr, v_ptr, key.stride_s, value.stride_s, bias_ptr, mask, batch, places, block, stop, scale, log2_scale,
        D, E, daL_ptr is not None, LAST, POOLED, True, PRECISION, BLOCK_N, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    dz *= scale

    if Z_IS_QUERY:
        token, valid = token_at(places, block, j)
        store_rows(head_of(grad_query, batch, head), grad_query.stride_s, token, valid, dz, D, BLOCK_D, ADD=True)
    else:
        # z = αR / max(cR, min_mass)
        cR = tl.load(cR_ptr + row, mask=inside, other=1.0)
        dcR = tl.where(cR >= min_mass, -tl.sum(dz * z.to(tl.float32), 1), 0.0)
        # daR may take the memory of dy: all warps must have read their rows of dy before any writes daR.
        tl.debug_barrier()
        store_rows(daR_ptr, D, row, inside, dz, D, BLOCK_D)
        tl.store(dcR_ptr + row, dcR, mask=inside)


@triton.jit
def _r_backward_keys_rows(
    dk, dv, k, v, attended, bias, start, stop, centroids, daL_ptr, dy_ptr, delta_ptr, lse_ptr,
    heads, places, group, scale, log2_scale,
    D: tl.constexpr, E: tl.constexpr, LAST: tl.constexpr, Z_IS_QUERY: tl.constexpr, POOLED: tl.constexpr,
    HAS_MASK: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv what the rows [start, stop) of a block contribute, BLOCK_M at a time."""
    for first in tl.range(start, stop, BLOCK_M):
        j = first + tl.arange(0, BLOCK_M)
        inside = j < places.positions
        row = group.to(tl.int64) * places.positions + j
        z = _load_z(centroids, places, heads, group, j, D, BLOCK_D, Z_IS_QUERY, MASKED)
        daL = z
        if daL_ptr is not None:
            daL = load_rows(daL_ptr, D, row, inside, D, BLOCK_D, MASKED)
        # A position beyond the block gets lse = inf, hence p = 0.
        lse = _load_statistics(lse_ptr, row, inside, float("inf"), MASKED)
        delta = _load_statistics(delta_ptr, row, inside, 0.0, MASKED)
        scores = tl.dot(k, tl.trans(z), input_precision=PRECISION)  # [N, M]
        masked = scores
        if POOLED:
            masked = scores * log2_scale + bias[:, None]
        elif HAS_MASK:
            masked = tl.where(attended[:, None], scores, -float("inf"))
        p = probabilities(masked, lse, 1.0 if POOLED else log2_scale)
        if daL_ptr is not None:
            dp = tl.dot(k, tl.trans(daL), input_precision=PRECISION)
        else:
            dp = tl.zeros(scores.shape, tl.float32)
        p_rounded = p.to(k.dtype)
        if daL_ptr is not None:
            dk = tl.dot(p_rounded, daL, dk, input_precision=PRECISION)
        if LAST:
            dy = load_rows(dy_ptr, E, row, inside, E, BLOCK_E, MASKED)
            dp = tl.dot(v, tl.trans(dy), dp, input_precision=PRECISION)
            dv = tl.dot(p_rounded, dy, dv, input_precision=PRECISION)
        ds = p * (dp - delta) * scale
        dk = tl.dot(ds.to(k.dtype), z, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _load_statistics(ptr, row, inside, other, MASKED: tl.constexpr):
    """[1, M] numbers of rows."""
    if MASKED:
        return tl.load(ptr + row, mask=inside, other=other)[None, :]
    else:
        return tl.load(ptr + row)[None, :]


@triton.jit(do_not_specialize=["heads", "key_tiles"])
def _r_backward_keys_kernel(
    centroids, key, value, mask, bias_ptr, daL_ptr, dy_ptr, delta_ptr, lse_ptr,
    grad_key, grad_value, heads, places, key_tiles, scale, log2_scale,
    D: tl.constexpr, E: tl.constexpr, LAST: tl.constexpr, Z_IS_QUERY: tl.constexpr, POOLED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys' gradients, as keys and as values, and in the last iteration those of V.

    Scores are computed transposed, [N, M], so that no accumulator has to be. Keys that are not there need no mask:
    every key has its own row of the sums.
    """
    places = plain_places(places)
    pid = tl.program_id(0)
    group = pid // key_tiles
    block, head, batch = _parts_of(group, places, heads)
    k_ptr = head_of(key, batch, head)
    dk_ptr = head_of(grad_key, batch, head)
    if POOLED:
        k_ptr = key.ptr + group.to(tl.int64) * places.cells * D
        dk_ptr = grad_key.ptr + group.to(tl.int64) * places.cells * D
        bias_ptr += block * places.cells
    start, stop = _key_range(places, block, POOLED)
    i = start + pid % key_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    rows, valid = _key_rows(places, block, i, stop, POOLED)
    k = load_rows(k_ptr, key.stride_s, rows, valid, D, BLOCK_D, True)
    v = k
    if LAST:
        v = load_rows(head_of(value, batch, head), value.stride_s, rows, valid, E, BLOCK_E, True)
    attended = valid
    if mask is not None:
        attended = valid & _attended(mask, batch, rows, valid)
    bias = tl.zeros([BLOCK_N], tl.float32)
    if POOLED:
        bias = tl.load(bias_ptr + i, mask=valid, other=-float("inf"))

    # As a key and as a value.
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_E], tl.float32) if LAST else dk
    full_stop = 0
    first_token = block * places.positions - places.offset
    if not Z_IS_QUERY or (first_token >= 0 and first_token + places.positions <= places.tokens):
        full_stop = places.positions // BLOCK_M * BLOCK_M
    dk, dv = _r_backward_keys_rows(
        dk, dv, k, v, attended, bias, 0, full_stop, centroids, daL_ptr, dy_ptr, delta_ptr, lse_ptr,
        heads, places, group, scale, log2_scale, D, E, LAST, Z_IS_QUERY, POOLED, mask is not None, False,
        PRECISION, BLOCK_M, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    dk, dv = _r_backward_keys_rows(
        dk, dv, k, v, attended, bias, full_stop, places.positions, centroids, daL_ptr, dy_ptr, delta_ptr, lse_ptr,
        heads, places, group, scale, log2_scale, D, E, LAST, Z_IS_QUERY, POOLED, mask is not None, True,
        PRECISION, BLOCK_M, BLOCK_D, BLOCK_E,
    )  # fmt: skip

    # The last iteration is differentiated first.
    store_rows(dk_ptr, grad_key.stride_s, rows, valid, dk, D, BLOCK_D, ADD=not (POOLED or LAST))
    if LAST:
        store_rows(head_of(grad_value, batch, head), grad_value.stride_s, rows, valid, dv, E, BLOCK_E)


def _tokens_or_blocks(x: torch.Tensor) -> Strided | None:
    """Tokens [B, S, H, D] with their strides, or a block tensor [B·H·m, ·, D], of which only the rows have one."""
    return strided(x) if x.ndim == 4 else Strided(x, 0, x.shape[-1], 0)


@dataclass(frozen=True)
class RStep:
    """What all R-steps of one call share: keys, values and the way to find them.

    Args:
        key: [B, S, H, D]. value: [B, S, H, E]. key_mask: [B, S] bool or None.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_mask: torch.Tensor | None
    call: MonarchCall

    @property
    def groups(self) -> int:
        return self.key.shape[0] * self.key.shape[2] * self.call.places.blocks

    def pooled(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(mean key of every cell [B·H·m, c, D], log2 of the number of its keys [m, c]); None without `coarse`."""
        if self.call.options.coarse == 1:
            return None
        places = self.call.places
        pooled = self.key.new_empty(self.groups, places.cells, self.key.shape[3])
        bias = self.key.new_empty(places.blocks, places.cells, dtype=torch.float32)
        self._launch(_pool_kernel, self.key, (pooled, bias), places.cells, COARSE=self.call.options.coarse)
        return pooled, bias

    def unpool(self, d_pooled: torch.Tensor, bias: torch.Tensor, dk: torch.Tensor) -> None:
        """Add the gradient of the pooled keys to dk [B, S, H, D]."""
        self._launch(_unpool_kernel, dk, (d_pooled, bias), self.call.places.cells, COARSE=self.call.options.coarse)

    def _launch(self, kernel, tokens: torch.Tensor, tensors: tuple[torch.Tensor, ...], rows: int, **options) -> None:
        """Launch a kernel that works on this many rows of every block."""
        D = tokens.shape[3]
        block = 32
        tiles = triton.cdiv(rows, block)
        launcher(kernel, (tiles * self.groups,))(
            strided(tokens), *tensors, self.key.shape[2], unspecialised(self.call.places), tiles,
            D=D, BLOCK_N=block, BLOCK_D=block_dim(D), num_warps=4, **options,
        )  # fmt: skip

    def _shared(
        self, z: torch.Tensor, pooled: tuple[torch.Tensor, torch.Tensor] | None, last: bool
    ) -> tuple[tuple, dict]:
        """z, key, value, mask and bias, and the constants that forward and backward have in common."""
        z_is_query = z.ndim == 4
        key, bias = (self.key, None) if pooled is None else pooled
        mask = None if self.key_mask is None else self.key_mask[:, :, None]
        tensors = (_tokens_or_blocks(z), _tokens_or_blocks(key), strided(self.value), broadcast(mask), bias)
        D, E = self.key.shape[3], self.value.shape[3]
        constants = dict(
            D=D, E=E, LAST=last, Z_IS_QUERY=z_is_query, POOLED=pooled is not None,
            PRECISION=dot_precision(self.key.dtype), BLOCK_D=block_dim(D), BLOCK_E=block_dim(E if last else 1),
        )  # fmt: skip
        return tensors, constants

    def _options(self, kernel: str) -> dict[str, int]:
        return launch_options(kernel, self.key.device, self.key.dtype, max(self.key.shape[3], self.value.shape[3]))

    def _tail_block(self, block: int, pooled: bool) -> int:
        """Keys per tile after the last whole block: as few as hold them in one tile of a power of two."""
        if self.key_mask is not None:
            return block
        keys = self.call.places.cells if pooled else self.call.places.positions
        return min(block, max(16, triton.next_power_of_2(keys % block)))

    def _cells_are_full(self) -> bool:
        """Whether every pooled key is the mean of coarse × coarse keys."""
        places = self.call.places
        return places.blocks * places.cells * self.call.options.coarse**2 == places.tokens

    def forward(
        self,
        z: torch.Tensor,
        pooled: tuple[torch.Tensor, torch.Tensor] | None,
        *,
        aL: torch.Tensor | None = None,
        cL: torch.Tensor | None = None,
        y: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Write what is given of aL and cL, which go together, y (the last iteration) and lse.

        `z` is the query [B, S, H, D] in the first iteration, else [B·H·m, b, D]; `y` may be the memory of such a z.
        """
        written = aL if aL is not None else y
        assert written is not None
        # Pooled keys have rows like those of aL and y: contiguous.
        if self.key_mask is None and hopper_fits("monarch", z, self.key, self.value, written):
            from vmonarch.kernels.hopper.r_step import r_step

            key, bias, keys_per_key = self.key, None, 1
            if pooled is not None:
                key, bias = pooled
                if self._cells_are_full():
                    bias, keys_per_key = None, self.call.options.coarse**2
            if y is not None:
                stage = "r_step_last" if aL is not None else "r_step_values"
            else:
                stage = "r_step" if pooled is None else "r_step_pooled"
            r_step(
                z, key, self.value, aL=aL, cL=cL, y=y, lse=lse, bias=bias, keys_per_key=keys_per_key,
                places=self.call.places, heads=self.key.shape[2], scale=self.call.scale,
                options=self._options(f"hopper_{stage}"),
            )  # fmt: skip
            return
        tensors, constants = self._shared(z, pooled, y is not None)
        options = self._options("r_step" if y is None else "r_step_last")
        row_tiles = triton.cdiv(self.call.places.positions, options["BLOCK_M"])
        options["BLOCK_TAIL"] = self._tail_block(options["BLOCK_N"], pooled is not None)
        launcher(_r_step_kernel, (row_tiles * self.groups,))(
            *tensors, aL, y, cL, lse, self.key.shape[2], unspecialised(self.call.places), row_tiles,
            self.call.scale, log2_scale_of(self.call.scale), **constants, **options,
        )  # fmt: skip

    def backward(
        self,
        z: torch.Tensor,
        pooled: tuple[torch.Tensor, torch.Tensor] | None,
        *,
        lse: torch.Tensor,
        daL: torch.Tensor | None,
        dy: torch.Tensor | None,
        delta: torch.Tensor,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        cR: torch.Tensor | None = None,
        daR: torch.Tensor | None = None,
        dcR: torch.Tensor | None = None,
    ) -> None:
        """Write dk and dv if dy is given (the last iteration), else add to dk; add to dq where z is the query, else
        write daR and dcR.

        `daL` is None for y alone; `delta` = daL·aL + dy·y, one number per row. No gradient flows through cL.
        """
        key, bias = (self.key, None) if pooled is None else pooled
        d_key = dk if pooled is None else torch.empty_like(key)
        loaded = [x for x in (key, z, daL, dy, None if dy is None else self.value) if x is not None]
        even = pooled is None or self._cells_are_full()
        if even and self.key_mask is None and hopper_fits("monarch", *loaded):
            from vmonarch.kernels.hopper import backward as hopper_kernels

            tile, places = hopper_kernels.TILE, self.call.places
            positions, keys = places.positions, places.positions if pooled is None else places.cells
            per_key = 1 if pooled is None else self.call.options.coarse**2
            folded = hopper_kernels.fold(lse, delta, positions, self.call.scale, keys_per_key=per_key)
            shared: dict[str, Any] = dict(heads=self.key.shape[2], scale=self.call.scale, places=places)
            hopper_kernels.launch_keys(
                z, key, self.value, daL, dy, folded, d_key, None if dy is None else dv,
                tiles=(triton.cdiv(keys, tile), self.groups), add=(dy is None and pooled is None, False),
                half_tiles=0 < keys % tile <= tile // 2, **shared,
            )  # fmt: skip
            hopper_kernels.launch_rows(
                z, key, self.value, daL, dy, folded, dq, tiles=(triton.cdiv(positions, tile), self.groups),
                cR=cR, daR=daR, dcR=dcR, min_mass=self.call.min_mass,
                ragged=pooled is None and positions * places.blocks != places.tokens,
                half_tiles=0 < positions % tile <= tile // 2, **shared,
            )  # fmt: skip
            if bias is not None:
                self.unpool(d_key, bias, dk)
            return
        tensors, constants = self._shared(z, pooled, dy is not None)
        numbers = (self.call.scale, log2_scale_of(self.call.scale))
        saved = (daL, dy, delta, lse)
        options = self._options("r_backward_keys")
        keys = self.call.places.positions if pooled is None else self.call.places.cells
        tiles = triton.cdiv(keys, options["BLOCK_N"])
        launcher(_r_backward_keys_kernel, (tiles * self.groups,))(
            *tensors, *saved, _tokens_or_blocks(d_key), strided(dv), self.key.shape[2],
            unspecialised(self.call.places), tiles, *numbers, **constants, **options,
        )  # fmt: skip
        if bias is not None:
            self.unpool(d_key, bias, dk)
        options = self._options("r_backward_z")
        tiles = triton.cdiv(self.call.places.positions, options["BLOCK_M"])
        launcher(_r_backward_z_kernel, (tiles * self.groups,))(
            *tensors, *saved, strided(dq), cR, daR, dcR, self.key.shape[2],
            unspecialised(self.call.places), tiles, *numbers, self.call.min_mass, **constants, **options,
        )  # fmt: skip

    def row_dots(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a·b of every row of two block tensors, [B·H·m, b] in float32; every block is a frame."""
        B, S, H, _ = self.key.shape
        dots = a.new_empty(a.shape[:2], dtype=torch.float32)
        a, b = (blocks.view(B, H, S, -1).transpose(1, 2) for blocks in (a, b))
        row_deltas(a, b, None, None, None, dots.view(B, H, S))
        return dots
