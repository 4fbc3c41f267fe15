"""Attention in two resolutions in Triton: a tile of queries takes its exact tiles from a list, and the others' means.

A program takes a part of one tile of queries of one head. It goes through the means of all tiles, of which those of its
exact tiles are masked, and then through the tokens of its exact tiles, which it finds by arithmetic where they are. All
of it goes into one online softmax.

One kernel owns queries (out; dq), another keys (dk, dv), a third the means (their gradients, which the keys' kernel
hands on to the tokens), so there are no atomics and every sum has one order.

Shapes: B batch, S tokens, H heads, D head dim, E value dim, G = B·H groups; n tiles of queries, m tiles of keys.
Queries and what belongs to them are [B, S, H, D], keys [B, T·H·W, H, D], with any strides but the last; lse and δ are
[B, H, S] in float32. A tile of at most QT × QH × QW queries has PARTS_M parts of BLOCK_M queries, one of at most BT ×
BH × BW keys PARTS parts of BLOCK keys; means are taken BLOCK_N at a time. Logits are in units of log 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vmonarch.kernels.common.softmax import log2_partition, online_softmax, probabilities, row_delta
from vmonarch.kernels.common.tiles import head_of, load_rows, store_rows
from vmonarch.kernels.two_resolution.tiling import Tiling

# What the logits of means gain has rows of a multiple of so many numbers.
GAINS = tl.constexpr(128)


@triton.jit
def plain(n):
    """The inverse of `unspecialised`."""
    return Tiling(*[number >> 4 for number in n])


@triton.jit
def _of_queries(n):
    """`Tiling.of_queries`."""
    return Tiling(
        n.query_frames, n.rows, n.columns, n.queries_t, n.queries_h, n.queries_w,
        n.queries_t, n.queries_h, n.queries_w, n.query_frames,
    )  # fmt: skip


@triton.jit
def _part(place, length, parts):
    """Start and size of part `place` of an axis of this length that is cut evenly."""
    start = place * length // parts
    return start, (place + 1) * length // parts - start


@triton.jit
def _tokens_of(tile, part, n, BT: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens [BLOCK] of a part of a tile of at most BT × BH × BW, and whether they exist."""
    i = part * BLOCK + tl.arange(0, BLOCK)
    first_t, size_t = _part(tile // (n.tiles_h * n.tiles_w), n.frames, n.tiles_t)
    first_h, size_h = _part(tile // n.tiles_w % n.tiles_h, n.rows, n.tiles_h)
    first_w, size_w = _part(tile % n.tiles_w, n.columns, n.tiles_w)
    t = i // (BH * BW)
    h = i // BW % BH
    w = i % BW
    there = (t < size_t) & (h < size_h) & (w < size_w)
    token = ((first_t + t) * n.rows + first_h + h) * n.columns + first_w + w
    return tl.where(there, token, 0), there


@triton.jit
def _attended(key_mask_ptr, token, there):
    """Which of the tokens of a tile may be attended: those that exist, and that the mask, if there is one, names."""
    if key_mask_ptr is None:
        return there
    else:
        return there & (tl.load(key_mask_ptr + token, mask=there, other=0) != 0)


@triton.jit(do_not_specialize=["H", "S"])
def means_kernel(
    key, value, key_mask_ptr, k_mean_ptr, v_mean_ptr, log2_number_ptr, H, S, tiling,
    D: tl.constexpr, E: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Means [B, m, H, D and E] of one tile of one head, and log2 of its tokens [B, m].

    A tile has at most BT × BH × BW tokens. Without a value, of the first tensor alone.
    """
    n = plain(tiling)
    tiles = n.tiles_t * n.tiles_h * n.tiles_w
    # Heads of one token lie side by side in memory, and so do their programs in time.
    pid = tl.program_id(0)
    h = (pid % H).to(tl.int64)
    b = (pid // H // tiles).to(tl.int64)
    tile = pid // H % tiles
    k_ptr = head_of(key, b, h)
    if value is not None:
        v_ptr = head_of(value, b, h)
    if key_mask_ptr is not None:
        key_mask_ptr += b * S
    number = 0.0
    k = tl.zeros([BLOCK_D], tl.float32)
    v = tl.zeros([BLOCK_E], tl.float32)
    for part in range(PARTS):
        token, there = _tokens_of(tile, part, n, BT, BH, BW, BLOCK)
        own = _attended(key_mask_ptr, token, there)
        # All rows are on their way before the first sum waits.
        k_rows = load_rows(k_ptr, key.stride_s, token, own, D, BLOCK_D, True)
        if value is not None:
            v_rows = load_rows(v_ptr, value.stride_s, token, own, E, BLOCK_E, True)
            v += tl.sum(v_rows.to(tl.float32), 0)
        k += tl.sum(k_rows.to(tl.float32), 0)
        number += tl.sum(own.to(tl.float32), 0)
    divisor = tl.maximum(number, 1.0)
    row = pid.to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    tl.store(k_mean_ptr + row * D + columns, k / divisor, mask=columns < D)
    if value is not None:
        columns = tl.arange(0, BLOCK_E)
        tl.store(v_mean_ptr + row * E + columns, (v / divisor).to(v_mean_ptr.dtype.element_ty), mask=columns < E)
    # The log of 0 is -inf: nobody attends to an empty tile.
    tl.store(log2_number_ptr + pid // H, tl.where(number > 0, tl.log2(divisor), -float("inf")))


@triton.jit(do_not_specialize=["rows", "m", "width", "padded", "H"])
def lists_kernel(
    exact_ptr, log2_number_ptr, list_ptr, number_ptr, gain_ptr, stride_g, stride_row, stride_column,
    rows, m, width, padded, H, BLOCK: tl.constexpr, BLOCK_PAD: tl.constexpr,
):  # fmt: skip
    """The columns at which a row of exact [G, rows, m] is true, in order: [G, rows, width]; and their number.

    With log2_number [B, m], also what the logits of all means gain: it, or -inf in an exact tile and after the last
    one, [G, rows, padded].
    """
    pid = tl.program_id(0).to(tl.int64)
    exact_ptr += pid // rows * stride_g + pid % rows * stride_row
    list_ptr += pid * width
    if log2_number_ptr is not None:
        log2_number_ptr += pid // rows // H * m
        gain_ptr += pid * padded
        beyond = m + tl.arange(0, BLOCK_PAD)
        tl.store(gain_ptr + beyond, tl.full([BLOCK_PAD], -float("inf"), tl.float32), mask=beyond < padded)
    number = 0
    for start in range(0, m, BLOCK):
        j = start + tl.arange(0, BLOCK)
        chosen = tl.load(exact_ptr + j.to(tl.int64) * stride_column, mask=j < m, other=0).to(tl.int32)
        place = number + tl.cumsum(chosen, 0) - 1
        tl.store(list_ptr + place, j.to(list_ptr.dtype.element_ty), mask=(chosen != 0) & (place < width))
        number += tl.sum(chosen, 0)
        if log2_number_ptr is not None:
            gain = tl.load(log2_number_ptr + j, mask=j < m, other=0.0)
            gain = tl.where(chosen != 0, -float("inf"), gain)
            tl.store(gain_ptr + j, gain, mask=j < m)
    tl.store(number_ptr + pid, number)


@triton.jit(do_not_specialize=["m", "count"])
def best_kernel(scores_ptr, exact_ptr, m, count, BLOCK: tl.constexpr):
    """Whether each score of a row [rows, m] is among its `count` largest; of equal ones the first are."""
    pid = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    inside = j < m
    scores = tl.load(scores_ptr + pid * m + j, mask=inside, other=0.0)
    # A zero has two signs.
    bits = tl.where(scores == 0, 0.0, scores).to(tl.uint32, bitcast=True)
    # Ordered like the numbers: negative ones have all bits reversed, others the first.
    sign = bits >> 31
    keys = tl.where(inside, bits ^ tl.where(sign != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32), 0)
    # The largest key that `count` keys reach, bit by bit.
    reached = tl.zeros([1], tl.uint32)
    bit = tl.full([1], 0x80000000, tl.uint32)
    for _ in range(32):
        reaching = tl.sum((keys >= (reached | bit)).to(tl.int32), 0)
        reached = tl.where(reaching >= count, reached | bit, reached)
        bit = bit >> 1
    above = keys > reached
    equal = (keys == reached) & inside
    left = count - tl.sum(above.to(tl.int32), 0)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= left))
    tl.store(exact_ptr + pid * m + j, chosen, mask=inside)


@triton.jit
def _queries_of(
    pid, n, H, QT: tl.constexpr, QH: tl.constexpr, QW: tl.constexpr, BLOCK_M: tl.constexpr, PARTS_M: tl.constexpr
):
    """Of a program: its place in [G, n], batch entry, head, tokens [BLOCK_M], and whether they exist."""
    at = (pid // PARTS_M).to(tl.int64)
    queries = n.queries_t * n.queries_h * n.queries_w
    row, exists = _tokens_of((at % queries).to(tl.int32), pid % PARTS_M, _of_queries(n), QT, QH, QW, BLOCK_M)
    return at, at // queries // H, at // queries % H, row, exists


@triton.jit
def _means_from(start, gain_ptr, tiles, BLOCK_N: tl.constexpr):
    """Tiles [BLOCK_N] from `start` on, whether they exist, and what the logits of their means gain for some queries."""
    tile = start + tl.arange(0, BLOCK_N)
    inside = tile < tiles
    return tile, inside, tl.load(gain_ptr + tile, mask=inside, other=-float("inf"))


@triton.jit(do_not_specialize=["H", "width", "out_b", "out_s", "out_h", "lse_b", "lse_h"])
def two_resolution_kernel(
    query, key, value, k_mean_ptr, v_mean_ptr, gain_ptr, list_ptr, number_ptr, key_mask_ptr, out_ptr, lse_ptr,
    out_b, out_s, out_h, lse_b, lse_h, H, width, tiling, log2_scale,
    D: tl.constexpr, E: tl.constexpr, REST: tl.constexpr, PRECISION: tl.constexpr,
    QT: tl.constexpr, QH: tl.constexpr, QW: tl.constexpr, BLOCK_M: tl.constexpr, PARTS_M: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """out and lse of a part of a tile of queries. FULL: all tiles are full, no mask.

    Query s of head h of sample b has the row b·out_b + s·out_s + h·out_h of out [rows, E], and the place b·lse_b +
    h·lse_h + s in lse.
    """
    n = plain(tiling)
    tiles = n.tiles_t * n.tiles_h * n.tiles_w
    at, b, h, row, exists = _queries_of(tl.program_id(0), n, H, QT, QH, QW, BLOCK_M, PARTS_M)
    q = load_rows(head_of(query, b, h), query.stride_s, row, exists, D, BLOCK_D, not FULL)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if REST:
        gain_ptr += at * tl.cdiv(tiles, GAINS) * GAINS
        k_mean_ptr += b * tiles * H * D + h * D
        v_mean_ptr += b * tiles * H * E + h * E
        for start in range(0, tiles, BLOCK_N):
            tile, inside, gain = _means_from(start, gain_ptr, tiles, BLOCK_N)
            k = load_rows(k_mean_ptr, H * D, tile, inside, D, BLOCK_D, True)
            logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * log2_scale + gain[None, :]
            p, alpha, row_max, row_sum, unused = online_softmax(logits, row_max, row_sum, row_sum, 1.0, False, True)
            v = load_rows(v_mean_ptr, H * E, tile, inside, E, BLOCK_E, True)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    k_ptr = head_of(key, b, h)
    v_ptr = head_of(value, b, h)
    if key_mask_ptr is not None:
        key_mask_ptr += b * (n.frames * n.rows * n.columns)
    list_ptr += at * width
    for i in range(tl.load(number_ptr + at) * PARTS):
        other = tl.load(list_ptr + i // PARTS).to(tl.int32)
        keys, there = _tokens_of(other, i % PARTS, n, BT, BH, BW, BLOCK)
        k = load_rows(k_ptr, key.stride_s, keys, there, D, BLOCK_D, not FULL)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if not FULL:
            logits = tl.where(_attended(key_mask_ptr, keys, there)[None, :], logits, -float("inf"))
        p, alpha, row_max, row_sum, unused = online_softmax(
            logits, row_max, row_sum, row_sum, log2_scale, False, not FULL
        )
        v = load_rows(v_ptr, value.stride_s, keys, there, E, BLOCK_E, not FULL)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    inverse = (1.0 / tl.where(row_sum == 0, 1.0, row_sum))[:, None]
    lse = log2_partition(row_max, row_sum) * 0.6931471805599453
    out_row = b * out_b + row * out_s + h * out_h
    tl.store(lse_ptr + b * lse_b + h * lse_h + row, lse, mask=exists)
    store_rows(out_ptr, E, out_row, exists, acc * inverse, E, BLOCK_E)


@triton.jit(do_not_specialize=["H", "S", "width"])
def two_resolution_rows_kernel(
    k_mean_ptr, v_mean_ptr, gain_ptr, list_ptr, number_ptr, key_mask_ptr, lse_ptr, dlse_ptr, delta_ptr, dq_ptr,
    query, key, value, grad_output, output, H, S, width, tiling, scale, log2_scale,
    D: tl.constexpr, E: tl.constexpr, REST: tl.constexpr, PRECISION: tl.constexpr,
    QT: tl.constexpr, QH: tl.constexpr, QW: tl.constexpr, BLOCK_M: tl.constexpr, PARTS_M: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """dq [B, S, H, D], contiguous, of a part of a tile of queries; δ = rowsum(dO ∘ O) - dlse for the other kernels."""
    n = plain(tiling)
    tiles = n.tiles_t * n.tiles_h * n.tiles_w
    at, b, h, row, exists = _queries_of(tl.program_id(0), n, H, QT, QH, QW, BLOCK_M, PARTS_M)
    bh = b * H + h
    q = load_rows(head_of(query, b, h), query.stride_s, row, exists, D, BLOCK_D, not FULL)
    do = load_rows(head_of(grad_output, b, h), grad_output.stride_s, row, exists, E, BLOCK_E, not FULL)
    out = load_rows(head_of(output, b, h), output.stride_s, row, exists, E, BLOCK_E, not FULL)
    lse = tl.load(lse_ptr + bh * S + row, mask=exists, other=float("inf"))
    delta = row_delta(do, out, dlse_ptr, bh * S + row, exists)
    tl.store(delta_ptr + bh * S + row, delta, mask=exists)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if REST:
        gain_ptr += at * tl.cdiv(tiles, GAINS) * GAINS
        k_mean_ptr += b * tiles * H * D + h * D
        v_mean_ptr += b * tiles * H * E + h * E
        for start in range(0, tiles, BLOCK_N):
            tile, inside, gain = _means_from(start, gain_ptr, tiles, BLOCK_N)
            k = load_rows(k_mean_ptr, H * D, tile, inside, D, BLOCK_D, True)
            v = load_rows(v_mean_ptr, H * E, tile, inside, E, BLOCK_E, True)
            logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * log2_scale + gain[None, :]
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            ds = probabilities(logits, lse[:, None], 1.0) * (dp - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    k_ptr = head_of(key, b, h)
    v_ptr = head_of(value, b, h)
    if key_mask_ptr is not None:
        key_mask_ptr += b * (n.frames * n.rows * n.columns)
    list_ptr += at * width
    for i in range(tl.load(number_ptr + at) * PARTS):
        other = tl.load(list_ptr + i // PARTS).to(tl.int32)
        keys, there = _tokens_of(other, i % PARTS, n, BT, BH, BW, BLOCK)
        k = load_rows(k_ptr, key.stride_s, keys, there, D, BLOCK_D, not FULL)
        v = load_rows(v_ptr, value.stride_s, keys, there, E, BLOCK_E, not FULL)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * log2_scale
        if not FULL:
            logits = tl.where(_attended(key_mask_ptr, keys, there)[None, :], logits, -float("inf"))
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = probabilities(logits, lse[:, None], 1.0) * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_rows(dq_ptr + b * S * H * D + h * D, H * D, row, exists, dq * scale, D, BLOCK_D)


@triton.jit
def _gradients(
    k, v, gain, q_ptr, do_ptr, lse_ptr, delta_ptr, stride_qs, stride_gs, row, exists, dk, dv,
    scale, log2_scale, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what one tile of queries gives to dk [N, D] and dv [N, E]; logits of keys gain `gain` [N]."""
    q = load_rows(q_ptr, stride_qs, row, exists, D, BLOCK_D, True)
    do = load_rows(do_ptr, stride_gs, row, exists, E, BLOCK_E, True)
    # Where there is no query, lse = inf makes p = 0.
    lse = tl.load(lse_ptr + row, mask=exists, other=float("inf"))
    delta = tl.load(delta_ptr + row, mask=exists, other=0.0)
    logits = tl.dot(k, tl.trans(q), input_precision=PRECISION) * log2_scale + gain[:, None]
    p = probabilities(logits, lse[None, :], 1.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    ds = p * (dp - delta[None, :]) * scale
    return tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION), dv


@triton.jit(do_not_specialize=["H", "S", "splits", "span"])
def two_resolution_means_kernel(
    query, k_mean_ptr, v_mean_ptr, gain_ptr, grad_output, lse_ptr, delta_ptr, dk_mean_ptr, dv_mean_ptr,
    H, S, splits, span, tiling, scale, log2_scale,
    D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr, QT: tl.constexpr, QH: tl.constexpr, QW: tl.constexpr,
    BLOCK_M: tl.constexpr, PARTS_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Gradients [splits, B·H, m, D and E] of some means, by the query tiles of one split, `span` in each."""
    n = plain(tiling)
    tiles = n.tiles_t * n.tiles_h * n.tiles_w
    queries = n.queries_t * n.queries_h * n.queries_w
    pid = tl.program_id(0)
    blocks = tl.cdiv(tiles, BLOCK_N)
    start = pid % blocks * BLOCK_N
    split = pid // blocks % splits
    bh = (pid // blocks // splits).to(tl.int64)
    b = bh // H
    h = bh % H
    mean = start + tl.arange(0, BLOCK_N)
    inside = mean < tiles
    k = load_rows(k_mean_ptr + b * tiles * H * D + h * D, H * D, mean, inside, D, BLOCK_D, True)
    v = load_rows(v_mean_ptr + b * tiles * H * E + h * E, H * E, mean, inside, E, BLOCK_E, True)
    q_ptr = head_of(query, b, h)
    do_ptr = head_of(grad_output, b, h)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    padded = tl.cdiv(tiles, GAINS) * GAINS
    gain_ptr += bh * queries * padded
    for i in range(split * span * PARTS_M, tl.minimum((split + 1) * span, queries) * PARTS_M):
        tile = i // PARTS_M
        gain = tl.load(gain_ptr + tile.to(tl.int64) * padded + mean, mask=inside, other=-float("inf"))
        row, exists = _tokens_of(tile, i % PARTS_M, _of_queries(n), QT, QH, QW, BLOCK_M)
        dk, dv = _gradients(
            k, v, gain, q_ptr, do_ptr, lse_ptr + bh * S, delta_ptr + bh * S, query.stride_s, grad_output.stride_s,
            row, exists, dk, dv, scale, log2_scale, D, E, BLOCK_D, BLOCK_E, PRECISION,
        )  # fmt: skip
    target = (split * (tl.num_programs(0) // blocks // splits) + bh) * tiles + mean
    store_rows(dk_mean_ptr, D, target, inside, dk, D, BLOCK_D)
    store_rows(dv_mean_ptr, E, target, inside, dv, E, BLOCK_E)


@triton.jit(do_not_specialize=["H", "S"])
def two_resolution_keys_kernel(
    query, key, value, log2_number_ptr, list_ptr, number_ptr, key_mask_ptr, grad_output, lse_ptr, delta_ptr,
    dk_mean_ptr, dv_mean_ptr, dk_ptr, dv_ptr, H, S, tiling, scale, log2_scale,
    D: tl.constexpr, E: tl.constexpr, REST: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
    QT: tl.constexpr, QH: tl.constexpr, QW: tl.constexpr, BLOCK_M: tl.constexpr, PARTS_M: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write, or ADD to, dk [B, S, H, D] and dv [B, S, H, E], contiguous, of a part of a tile of keys.

    Its list is of the query tiles that it is exact for; a token also gets its part of the gradient of its tile's means,
    dk_mean and dv_mean [B·H, m, D and E].
    """
    n = plain(tiling)
    tiles = n.tiles_t * n.tiles_h * n.tiles_w
    queries = n.queries_t * n.queries_h * n.queries_w
    pid = tl.program_id(0)
    tile = pid // PARTS % tiles
    bh = (pid // PARTS // tiles).to(tl.int64)
    b = bh // H
    h = bh % H
    keys, there = _tokens_of(tile, pid % PARTS, n, BT, BH, BW, BLOCK)
    if key_mask_ptr is not None:
        key_mask_ptr += b * (n.frames * n.rows * n.columns)
    attended = _attended(key_mask_ptr, keys, there)
    k = load_rows(head_of(key, b, h), key.stride_s, keys, there, D, BLOCK_D, True)
    v = load_rows(head_of(value, b, h), value.stride_s, keys, there, E, BLOCK_E, True)
    gain = tl.where(attended, 0.0, -float("inf"))
    q_ptr = head_of(query, b, h)
    do_ptr = head_of(grad_output, b, h)
    dk = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_E], tl.float32)
    at = bh * tiles + tile
    for i in range(tl.load(number_ptr + at) * PARTS_M):
        other = tl.load(list_ptr + at * queries + i // PARTS_M).to(tl.int32)
        row, exists = _tokens_of(other, i % PARTS_M, _of_queries(n), QT, QH, QW, BLOCK_M)
        dk, dv = _gradients(
            k, v, gain, q_ptr, do_ptr, lse_ptr + bh * S, delta_ptr + bh * S, query.stride_s, grad_output.stride_s,
            row, exists, dk, dv, scale, log2_scale, D, E, BLOCK_D, BLOCK_E, PRECISION,
        )  # fmt: skip
    if REST:
        dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
        number = tl.load(log2_number_ptr + b * tiles + tile)
        part = tl.where(attended, tl.exp2(-number), 0.0)[:, None]
        dk += part * tl.load(dk_mean_ptr + at * D + dims, mask=dims < D, other=0.0)[None, :]
        dv += part * tl.load(dv_mean_ptr + at * E + value_dims, mask=value_dims < E, other=0.0)[None, :]
    row = b * (n.frames * n.rows * n.columns) * H + h
    store_rows(dk_ptr + row * D, H * D, keys, there, dk, D, BLOCK_D, ADD)
    store_rows(dv_ptr + row * E, H * E, keys, there, dv, E, BLOCK_E, ADD)
