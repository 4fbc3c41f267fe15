"""L-steps in Triton: at every position, T×T attention of the queries over the centroids (`reference.l_step`).

Legend: B batch, S tokens, H heads, D head dim, E value dim, m blocks, b positions per block, l query block, k key
block. Tokens are [B, S, H, D] with any strides but the last; block tensors are [B·H·m, b, D], contiguous; cL, cR and
δ of the R-step are [B·H·m, b]; lse and δ of the rows of L are [B, H, S]; all of them float32.

A program serves one position, and programs that read neighbouring memory are neighbours. Little is computed per byte,
so what counts is how many programs share a processor: few registers, few instructions. ONE_TILE: all m blocks fit one
tile, which is so for whole frames of usual videos. Then one kernel does all; else `rows` gives the centroid kernel the
log-partitions first, and the backward has a kernel for rows and one for columns.

L is [l, k] in all products. Sums over l are taken as (qᵀ L)ᵀ, so that no accumulator is transposed for a product.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vmonarch.kernels.common.blocks import Places
from vmonarch.kernels.common.launch import (
    block_dim,
    dot_precision,
    launch_options,
    tma_fits,
    tma_strides,
    unspecialised,
)
from vmonarch.kernels.common.replay import launcher
from vmonarch.kernels.common.softmax import log2_partition, log2_scale_of, online_softmax
from vmonarch.kernels.common.tiles import head_of, load_rows, store_rows, strided
from vmonarch.kernels.monarch.call import MonarchCall, exact_table_of

# Divided by such a mass, what float16 rounds to 0 counts for less than its precision.
_LEAST_MASS_IN_FLOAT16 = 2**-8


@triton.jit
def _program(places, tiles, heads, BLOCK: tl.constexpr):
    """First block, position, head and batch of this program, and row (b, h, 0, j) in the block tensors.

    Block k is k·b rows further.
    """
    pid = tl.program_id(0)
    head = pid // tiles % heads
    group = pid // tiles // heads
    first = pid % tiles * BLOCK
    j = group % places.positions
    batch = group // places.positions
    return first, j, head, batch, ((batch * heads + head) * places.blocks).to(tl.int64) * places.positions + j


@triton.jit
def _store_block(
    x, first_row, row, inside, bh, j, first_k, tile,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_WIDTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Write a transposed tile [WIDTH, k]. TMA: x is a descriptor of [B·H, b, m, WIDTH], else a pointer.

    The descriptor saves a detour: converting a transposed tile for a coalesced store takes Triton many barriers.
    """
    tile = tl.trans(tile)
    if TMA:
        x.store([bh, j, first_k, 0], tile.to(x.dtype).reshape(1, 1, BLOCK_N, BLOCK_WIDTH))
    else:
        store_rows(x + first_row * WIDTH, WIDTH, row, inside, tile, WIDTH, BLOCK_WIDTH)


@triton.jit
def _tokens(places, l, j, FULL: tl.constexpr):
    """Token at position j of the blocks l, and whether there is one. FULL: all blocks are consecutive whole tokens."""
    if FULL:
        token = l * places.positions + j
        valid = l < places.blocks
    else:
        token = l * places.positions - places.offset + j
        valid = (j < places.positions) & (token >= 0) & (token < places.tokens)
        valid = valid & (l < places.blocks)
    return token, valid


@triton.jit
def _is_exact(exact_ptr, places, l, valid, first, BLOCK_N: tl.constexpr):
    """[l, k] true in exact blocks, k from `first`; `exact_ptr` is a table of bits, int32 [T, ⌈m/32⌉]."""
    words = (places.blocks + 31) // 32
    word_ptr = exact_ptr + l * words
    word = first // 32
    bits = tl.load(word_ptr + word, mask=valid, other=0)[:, None]
    k = (first + tl.arange(0, BLOCK_N))[None, :]
    for n in tl.static_range(1, (BLOCK_N + 31) // 32):
        more = tl.load(word_ptr + word + n, mask=valid & (word + n < words), other=0)
        bits = tl.where(k // 32 == word + n, more[:, None], bits)
    return ((bits >> (k % 32)) & 1) != 0


@triton.jit
def _logits(
    q, aL, cL, logit, exact_ptr, places, l, valid, first, log2_scale,
    EXACT: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Z [l, k] in units of log 2, -inf in exact blocks and where cL is inf. `logit` is that of the exact part."""
    Z = tl.dot(q, tl.trans(aL), input_precision=PRECISION) * log2_scale - (cL * 1.4426950408889634)[None, :]
    if EXACT == "rows":
        Z = tl.where((logit == -float("inf"))[:, None], Z, -float("inf"))
    if EXACT == "blocks":
        Z = tl.where(_is_exact(exact_ptr, places, l, valid, first, BLOCK_N), -float("inf"), Z)
    return Z


@triton.jit(do_not_specialize=["heads", "row_tiles"])
def _l_rows_kernel(
    query, aL_ptr, cL_ptr, y_ptr, exact_ptr, lse_exact_ptr, exact_output, output, lse_ptr,
    heads, places, row_tiles, log2_scale,
    D: tl.constexpr, E: tl.constexpr, LAST: tl.constexpr, EXACT: tl.constexpr, FULL: tl.constexpr,
    ONE_TILE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Log-partition of the rows of L; in the last iteration also o[l] = Σ_k L[l,k] y[k], merged with the exact part.

    EXACT: None; "rows" if rows of L are exact throughout, with their outputs in `out` already, or not at all; "blocks".
    """
    places = Places(*[number >> 4 for number in places])
    first_l, j, head, batch, first_row = _program(places, row_tiles, heads, BLOCK_M)
    q_ptr = head_of(query, batch, head)
    aL_ptr += first_row * D
    cL_ptr += first_row
    first_token = (batch * heads + head).to(tl.int64) * places.tokens
    lse_ptr += first_token
    l = first_l + tl.arange(0, BLOCK_M)
    token, valid = _tokens(places, l, j, FULL)
    q = load_rows(q_ptr, query.stride_s, token, valid, D, BLOCK_D, True)  # [M, D]
    logit = 0.0
    if EXACT is not None:
        logit = tl.load(lse_exact_ptr + first_token + token, mask=valid, other=-float("inf")) * 1.4426950408889634
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for first in range(0, BLOCK_N if ONE_TILE else places.blocks, BLOCK_N):
        k = first + tl.arange(0, BLOCK_N)
        inside = k < places.blocks
        aL = load_rows(aL_ptr, D, k * places.positions, inside, D, BLOCK_D, True)  # [N, D]
        cL = tl.load(cL_ptr + k * places.positions, mask=inside, other=float("inf"))
        if LAST:
            y = load_rows(y_ptr + first_row * E, E, k * places.positions, inside, E, BLOCK_E, True)  # [N, E]
        Z = _logits(q, aL, cL, logit, exact_ptr, places, l, valid, first, log2_scale, EXACT, BLOCK_N, PRECISION)
        L, alpha, row_max, row_sum, _ = online_softmax(Z, row_max, row_sum, row_sum, 1.0, False, True)
        if LAST:
            if not ONE_TILE:
                acc = acc * alpha[:, None]
            acc = tl.dot(L.to(y.dtype), y, acc, input_precision=PRECISION)
    if EXACT is not None:
        # The exact part is one more column, with its log-weight as logit (docs/attention.md, "Exact parts").
        new_max = tl.maximum(row_max, logit)
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        alpha = tl.exp2(row_max - shift)
        weight = tl.exp2(logit - shift)
        row_sum = row_sum * alpha + weight
        row_max = new_max
        if LAST and EXACT == "blocks":
            # Rows without exact keys may hold anything, so they are not read.
            out_exact_ptr = head_of(exact_output, batch, head)
            out_exact = load_rows(out_exact_ptr, exact_output.stride_s, token, valid & (weight > 0), E, BLOCK_E, True)
            acc = acc * alpha[:, None] + out_exact.to(tl.float32) * weight[:, None]
    tl.store(lse_ptr + token, log2_partition(row_max, row_sum) * 0.6931471805599453, mask=valid)
    if LAST:
        if EXACT == "rows":
            valid = valid & (logit == -float("inf"))
        out = acc * (1.0 / tl.where(row_sum == 0, 1.0, row_sum))[:, None]
        store_rows(head_of(output, batch, head), output.stride_s, token, valid, out, E, BLOCK_E)


@triton.jit(do_not_specialize=["heads", "column_tiles"])
def _l_centroids_kernel(
    z_ptr, query, aL_ptr, cL_ptr, exact_ptr, lse_exact_ptr, lse_ptr, cR_ptr,
    heads, places, column_tiles, log2_scale, min_mass,
    D: tl.constexpr, EXACT: tl.constexpr, FULL: tl.constexpr, ONE_TILE: tl.constexpr,
    STORE_STATISTICS: tl.constexpr, RELATIVE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Centroid queries: αR[k] = Σ_l L[l,k] q[l], cR[k] = Σ_l L[l,k], z = αR / max(cR, min_mass).

    ONE_TILE: the softmax is done here; else `lse_ptr` has the log-partitions. RELATIVE: products are of L over the
    largest of its column, so that no column vanishes in float16, however small its sum.
    """
    places = Places(*[number >> 4 for number in places])
    first_k, j, head, batch, first_row = _program(places, column_tiles, heads, BLOCK_N)
    q_ptr = head_of(query, batch, head)
    first_token = (batch * heads + head).to(tl.int64) * places.tokens
    lse_ptr += first_token
    k = first_k + tl.arange(0, BLOCK_N)
    inside = k < places.blocks
    aL = load_rows(aL_ptr + first_row * D, D, k * places.positions, inside, D, BLOCK_D, True)  # [N, D]
    cL = tl.load(cL_ptr + first_row + k * places.positions, mask=inside, other=float("inf"))
    aR = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)  # transposed
    cR = tl.zeros([BLOCK_N], tl.float32)
    unit = tl.full([BLOCK_N], 1.1754943508222875e-38 if RELATIVE else 1.0, tl.float32)
    for first in range(0, BLOCK_M if ONE_TILE else places.blocks, BLOCK_M):
        l = first + tl.arange(0, BLOCK_M)
        token, valid = _tokens(places, l, j, FULL)
        q = load_rows(q_ptr, query.stride_s, token, valid, D, BLOCK_D, True)  # [M, D]
        logit = 0.0
        if EXACT is not None:
            logit = tl.load(lse_exact_ptr + first_token + token, mask=valid, other=-float("inf")) * 1.4426950408889634
        Z = _logits(q, aL, cL, logit, exact_ptr, places, l, valid, first_k, log2_scale, EXACT, BLOCK_N, PRECISION)
        if ONE_TILE:
            row_max = tl.max(Z, 1)
            if EXACT is not None:
                row_max = tl.maximum(row_max, logit)
            shift = tl.where(row_max == -float("inf"), 0.0, row_max)
            L = tl.exp2(Z - shift[:, None])
            row_sum = tl.sum(L, 1)
            if EXACT is not None:
                row_sum += tl.exp2(logit - shift)
            if STORE_STATISTICS:
                tl.store(lse_ptr + token, log2_partition(shift, row_sum) * 0.6931471805599453, mask=valid)
            # A place without a query counts for nothing.
            L = L * tl.where(valid, 1.0 / tl.where(row_sum == 0, 1.0, row_sum), 0.0)[:, None]
        else:
            lse = tl.load(lse_ptr + token, mask=valid, other=float("inf")) * 1.4426950408889634
            L = tl.exp2(Z - tl.where(lse == -float("inf"), float("inf"), lse)[:, None])
        cR += tl.sum(L, 0)
        if RELATIVE:
            new_unit = tl.maximum(unit, tl.max(L, 0))
            L = L / new_unit[None, :]
            aR = aR * (unit / new_unit)[None, :]
            unit = new_unit
        aR = tl.dot(tl.trans(q), L.to(q.dtype), aR, input_precision=PRECISION)
    z = aR * (unit / tl.maximum(cR, min_mass))[None, :]
    bh = batch * heads + head
    _store_block(z_ptr, first_row, k * places.positions, inside, bh, j, first_k, z, D, BLOCK_N, BLOCK_D, TMA)
    if STORE_STATISTICS:
        tl.store(cR_ptr + first_row + k * places.positions, cR, mask=inside)


@triton.jit
def _row_probabilities(
    q, do, lse, aL, cL, v, dcR, mass, logit, exact_ptr, places, l, valid, first, log2_scale,
    LAST: tl.constexpr, EXACT: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """L, L / mass and L·dL [l, k]; dL is do·yᵀ in the last iteration, else (q·daRᵀ + dcR) / mass; v is y or daR.

    Where mass is small, L / mass is not, while dL may leave the range of the dtype.
    """
    Z = _logits(q, aL, cL, logit, exact_ptr, places, l, valid, first, log2_scale, EXACT, BLOCK_N, PRECISION)
    L = tl.exp2(Z - lse[:, None])
    if LAST:
        return L, L, L * tl.dot(do, tl.trans(v), input_precision=PRECISION)
    else:
        over_mass = L * (1.0 / mass)[None, :]
        return L, over_mass, over_mass * (tl.dot(q, tl.trans(v), input_precision=PRECISION) + dcR[None, :])


@triton.jit
def _store_columns(
    daL, dy, aL, v, daL_ptr, dy_ptr, delta_r_ptr, first_row, row, inside, bh, j, first_k,
    D: tl.constexpr, E: tl.constexpr, LAST: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write the gradients of aL and y, and δ = daL·aL + dy·y for the R-step's backward; daL and dy are transposed.

    δ is the diagonal of a product, because aL and y are in shared memory, not in registers.
    """
    daL = daL.to(aL.dtype)
    _store_block(daL_ptr, first_row, row, inside, bh, j, first_k, daL, D, BLOCK_N, BLOCK_D, TMA)
    products = tl.dot(aL, daL, input_precision=PRECISION)
    if LAST:
        dy = dy.to(v.dtype)
        _store_block(dy_ptr, first_row, row, inside, bh, j, first_k, dy, E, BLOCK_N, BLOCK_E, TMA)
        products = tl.dot(v, dy, products, input_precision=PRECISION)
    k = tl.arange(0, BLOCK_N)
    delta_r = tl.sum(tl.where(k[:, None] == k[None, :], products, 0.0), 1)
    tl.store(delta_r_ptr + first_row + row, delta_r, mask=inside)


@triton.jit(do_not_specialize=["heads", "row_tiles"])
def _l_backward_rows_kernel(
    daL_ptr, dy_ptr, query, aL_ptr, cL_ptr, lse_ptr, v_ptr, grad_output, output, dcR_ptr, cR_ptr, dlse_ptr,
    exact_ptr, lse_exact_ptr, exact_output, grad_query, delta_ptr, dlse_exact_ptr, do_exact_ptr, delta_r_ptr,
    heads, places, row_tiles, scale, log2_scale, min_mass,
    D: tl.constexpr, E: tl.constexpr, LAST: tl.constexpr, EXACT: tl.constexpr,
    FULL: tl.constexpr, ONE_TILE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write dq of the last iteration, add to it that of others; and the gradients of the exact part, and δ of the rows.

    v is y or daR; δ = do·o - dlse, or Σ_k L dL. ONE_TILE: all blocks are in the tile. Then Σ_k L dL stands for do·o,
    and what `_l_backward_columns_kernel` writes is written here, in place of δ.
    """
    places = Places(*[number >> 4 for number in places])
    first_l, j, head, batch, first_row = _program(places, row_tiles, heads, BLOCK_M)
    q_ptr = head_of(query, batch, head)
    dq_ptr = head_of(grad_query, batch, head)
    aL_ptr += first_row * D
    v_ptr += first_row * E
    cL_ptr += first_row
    first_token = (batch * heads + head).to(tl.int64) * places.tokens
    l = first_l + tl.arange(0, BLOCK_M)
    token, valid = _tokens(places, l, j, FULL)
    q = load_rows(q_ptr, query.stride_s, token, valid, D, BLOCK_D, True)  # [M, D]
    # A place without a query gets lse = inf, hence L = 0.
    lse = tl.load(lse_ptr + first_token + token, mask=valid, other=float("inf")) * 1.4426950408889634
    lse = tl.where(lse == -float("inf"), float("inf"), lse)
    do = q
    delta = tl.zeros([BLOCK_M], tl.float32)
    if LAST:
        do = load_rows(head_of(grad_output, batch, head), grad_output.stride_s, token, valid, E, BLOCK_E, True)
        if not ONE_TILE:
            out = load_rows(head_of(output, batch, head), output.stride_s, token, valid, E, BLOCK_E, True)
            delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    logit = 0.0
    if EXACT is not None:
        logit = tl.load(lse_exact_ptr + first_token + token, mask=valid, other=-float("inf")) * 1.4426950408889634
        weight = tl.exp2(logit - lse)
        d_weight = delta
        if LAST and EXACT == "blocks":
            out_exact_ptr = head_of(exact_output, batch, head)
            # do_exact has the strides of out_exact.
            do_exact_ptr += batch.to(tl.int64) * exact_output.stride_b + head.to(tl.int64) * exact_output.stride_h
            out_exact = load_rows(out_exact_ptr, exact_output.stride_s, token, valid & (weight > 0), E, BLOCK_E, True)
            d_weight = tl.sum(do.to(tl.float32) * out_exact.to(tl.float32), 1)
            do_exact = do.to(tl.float32) * weight[:, None]
            store_rows(do_exact_ptr, exact_output.stride_s, token, valid, do_exact, E, BLOCK_E)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + first_token + token, mask=valid, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for sweep in tl.static_range(1 if LAST or ONE_TILE else 0, 2):
        for first in range(0, BLOCK_N if ONE_TILE else places.blocks, BLOCK_N):
            k = first + tl.arange(0, BLOCK_N)
            inside = k < places.blocks
            row = k * places.positions
            aL = load_rows(aL_ptr, D, row, inside, D, BLOCK_D, True)  # [N, D]
            v = load_rows(v_ptr, E, row, inside, E, BLOCK_E, True)
            cL = tl.load(cL_ptr + row, mask=inside, other=float("inf"))
            dcR, mass = cL, cL
            if not LAST:
                dcR = tl.load(dcR_ptr + first_row + row, mask=inside, other=0.0)
                mass = tl.maximum(tl.load(cR_ptr + first_row + row, mask=inside, other=1.0), min_mass)
            L, over_mass, LdL = _row_probabilities(
                q, do, lse, aL, cL, v, dcR, mass, logit, exact_ptr, places, l, valid, first, log2_scale,
                LAST, EXACT, BLOCK_N, PRECISION,
            )  # fmt: skip
            if ONE_TILE:
                # Recomputed from a log-partition, L does not quite sum to 1; with large logits that is no small error.
                total, mean = tl.sum(L, 1), tl.sum(LdL, 1)
                if EXACT is not None:
                    total += weight
                if LAST and EXACT == "blocks":
                    mean += weight * d_weight
                delta += mean / tl.where(total == 0, 1.0, total)
            elif sweep == 0:
                delta += tl.sum(LdL, 1)
            if sweep == 1:
                dZ = LdL - L * delta[:, None]
                scaled = (dZ * scale).to(aL.dtype)
                dq = tl.dot(scaled, aL, dq, input_precision=PRECISION)
                if not LAST:
                    dq = tl.dot(over_mass.to(v.dtype), v, dq, input_precision=PRECISION)
            if ONE_TILE:
                store_rows(dq_ptr, grad_query.stride_s, token, valid, dq, D, BLOCK_D, ADD=not LAST)
                dy = L
                if LAST:
                    dy = tl.dot(tl.trans(do), L.to(do.dtype), input_precision=PRECISION)
                _store_columns(
                    tl.dot(tl.trans(q), scaled, input_precision=PRECISION), dy, aL, v,
                    daL_ptr, dy_ptr, delta_r_ptr, first_row, row, inside, batch * heads + head, j, first,
                    D, E, LAST, TMA, PRECISION, BLOCK_N, BLOCK_D, BLOCK_E,
                )  # fmt: skip
    if EXACT is not None:
        # With EXACT="rows" a row has either L = 0 or weight = 0, so that d_weight may lack its part of δ.
        d_logit = weight * (d_weight - delta)
        if not LAST:
            d_logit += tl.load(dlse_exact_ptr + first_token + token, mask=valid, other=0.0)
        tl.store(dlse_exact_ptr + first_token + token, d_logit, mask=valid)
    if not ONE_TILE:
        tl.store(delta_ptr + first_token + token, delta, mask=valid)
        store_rows(dq_ptr, grad_query.stride_s, token, valid, dq, D, BLOCK_D, ADD=not LAST)


@triton.jit(do_not_specialize=["heads", "column_tiles"])
def _l_backward_columns_kernel(
    daL_ptr, dy_ptr, query, aL_ptr, cL_ptr, lse_ptr, v_ptr, grad_output, dcR_ptr, cR_ptr, exact_ptr, lse_exact_ptr,
    delta_ptr, delta_r_ptr, heads, places, column_tiles, scale, log2_scale, min_mass,
    D: tl.constexpr, E: tl.constexpr, LAST: tl.constexpr, EXACT: tl.constexpr, FULL: tl.constexpr,
    ONE_TILE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Gradients of aL and y where the blocks are several tiles, from the δ of the rows."""
    places = Places(*[number >> 4 for number in places])
    first_k, j, head, batch, first_row = _program(places, column_tiles, heads, BLOCK_N)
    q_ptr = head_of(query, batch, head)
    if LAST:
        do_ptr = head_of(grad_output, batch, head)
    first_token = (batch * heads + head).to(tl.int64) * places.tokens
    k = first_k + tl.arange(0, BLOCK_N)
    inside = k < places.blocks
    row = k * places.positions
    aL = load_rows(aL_ptr + first_row * D, D, row, inside, D, BLOCK_D, True)  # [N, D]
    v = load_rows(v_ptr + first_row * E, E, row, inside, E, BLOCK_E, True)
    cL = tl.load(cL_ptr + first_row + row, mask=inside, other=float("inf"))
    dcR, mass = cL, cL
    if not LAST:
        dcR = tl.load(dcR_ptr + first_row + row, mask=inside, other=0.0)
        mass = tl.maximum(tl.load(cR_ptr + first_row + row, mask=inside, other=1.0), min_mass)
    daL = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)  # transposed, as dy
    dy = tl.zeros([BLOCK_E, BLOCK_N], tl.float32)
    for first in range(0, places.blocks, BLOCK_M):
        l = first + tl.arange(0, BLOCK_M)
        token, valid = _tokens(places, l, j, FULL)
        q = load_rows(q_ptr, query.stride_s, token, valid, D, BLOCK_D, True)  # [M, D]
        do = q
        if LAST:
            do = load_rows(do_ptr, grad_output.stride_s, token, valid, E, BLOCK_E, True)
        lse = tl.load(lse_ptr + first_token + token, mask=valid, other=float("inf")) * 1.4426950408889634
        lse = tl.where(lse == -float("inf"), float("inf"), lse)
        delta = tl.load(delta_ptr + first_token + token, mask=valid, other=0.0)
        logit = 0.0
        if EXACT is not None:
            logit = tl.load(lse_exact_ptr + first_token + token, mask=valid, other=-float("inf"))
        L, _, LdL = _row_probabilities(
            q, do, lse, aL, cL, v, dcR, mass, logit, exact_ptr, places, l, valid, first_k, log2_scale,
            LAST, EXACT, BLOCK_N, PRECISION,
        )  # fmt: skip
        dZ = LdL - L * delta[:, None]
        daL = tl.dot(tl.trans(q), (dZ * scale).to(q.dtype), daL, input_precision=PRECISION)
        if LAST:
            dy = tl.dot(tl.trans(do), L.to(do.dtype), dy, input_precision=PRECISION)
    _store_columns(
        daL, dy, aL, v, daL_ptr, dy_ptr, delta_r_ptr, first_row, row, inside,
        batch * heads + head, j, first_k, D, E, LAST, TMA, PRECISION, BLOCK_N, BLOCK_D, BLOCK_E,
    )  # fmt: skip


@dataclass(frozen=True)
class LStep:
    """Everything that all L-steps of one call share.

    Args:
        query: [B, S, H, D].
    """

    query: torch.Tensor
    call: MonarchCall

    @functools.cached_property
    def exact(self) -> torch.Tensor | None:
        """int32 [T, ⌈m/32⌉], bits that are 1 where a key block is answered exactly for a query frame; or None."""
        return exact_table_of(self.call.options.pattern, self.call.places, self.query.device)

    def _options(self, name: str) -> dict[str, int]:
        """Launch options; BLOCK is the table's, or what holds all blocks if that is at most MAX_TILE."""
        options = launch_options(name, self.query.device, self.query.dtype, self.query.shape[3])
        if self.call.places.blocks <= options.pop("MAX_TILE"):
            options["BLOCK"] = max(16, triton.next_power_of_2(self.call.places.blocks))
        return options

    def _one_tile(self, name: str) -> bool:
        return self._options(name)["BLOCK"] >= self.call.places.blocks

    def _exact_mode(self, lse_exact: torch.Tensor | None) -> str | None:
        """Whether rows of L are exact throughout ("rows") or in some blocks ("blocks"); None without an exact part."""
        if lse_exact is None or self.call.exact is None:
            return None
        return "rows" if self.call.exact.whole_rows else "blocks"

    def _launch(self, kernel, name: str, tensors: tuple, numbers: tuple, written: tuple = (), **constants) -> None:
        """Start one program per position and tile of blocks; block tensors `written` are the first arguments."""
        B, S, H, D = self.query.shape
        m, b = self.call.places.blocks, self.call.places.positions
        options = self._options(name)
        tile, warps = options.pop("BLOCK"), options.pop("MAX_WARPS", 8)
        if tile < 64:
            # Hopper's wgmma, which takes four warps, reads beyond its memory in Triton 3.6 where a tile is 32 wide.
            warps = min(warps, 2)
        options["num_warps"] = min(warps, max(1, tile // options.pop("ROWS_PER_WARP")))
        tiles = triton.cdiv(m, tile)
        tma = bool(options.pop("TMA", 0))
        if written:
            constants["TMA"] = tma and tma_fits(*(x for x in written if x is not None))
            if constants["TMA"]:
                written = tuple(x if x is None else self._descriptor(x, tile) for x in written)
        launcher(kernel, (tiles * H * b * B,))(
            *written, *tensors, H, unspecialised(self.call.places), tiles, *numbers,
            D=D, FULL=m * b == S, ONE_TILE=tiles == 1,
            PRECISION=dot_precision(self.query.dtype), BLOCK_M=tile, BLOCK_N=tile, BLOCK_D=block_dim(D),
            **constants, **options,
        )  # fmt: skip

    def _descriptor(self, x: torch.Tensor, tile: int) -> TensorDescriptor:
        """Descriptor of a block tensor, as [B·H, b, m, ·] in tiles of blocks at one position."""
        m, b, width = self.call.places.blocks, self.call.places.positions, x.shape[-1]
        shape, strides = [x.shape[0] // m, b, m, width], [m * b * width, width, b * width, 1]
        return TensorDescriptor(x, shape, tma_strides(strides, shape), [1, 1, tile, block_dim(width)])

    def centroids(
        self,
        aL: torch.Tensor,
        cL: torch.Tensor,
        *,
        z: torch.Tensor,
        lse: torch.Tensor,
        cR: torch.Tensor | None,
        lse_exact: torch.Tensor | None,
    ) -> None:
        """Write z [B·H·m, b, D] and, where cR is given (training), cR and the log-partitions lse [B, H, S]."""
        relative = self.query.dtype == torch.float16 and self.call.min_mass < _LEAST_MASS_IN_FLOAT16
        if not self._one_tile("l_centroids"):
            self.output(aL, cL, None, lse=lse, lse_exact=lse_exact)
        self._launch(
            _l_centroids_kernel,
            "l_centroids",
            (strided(self.query), aL, cL, self.exact, lse_exact, lse, cR),
            (log2_scale_of(self.call.scale), self.call.min_mass),
            (z,),
            EXACT=self._exact_mode(lse_exact),
            STORE_STATISTICS=cR is not None,
            RELATIVE=relative,
        )

    def output(
        self,
        aL: torch.Tensor,
        cL: torch.Tensor,
        y: torch.Tensor | None,
        *,
        lse: torch.Tensor,
        lse_exact: torch.Tensor | None,
        out: torch.Tensor | None = None,
        out_exact: torch.Tensor | None = None,
    ) -> None:
        """Write lse [B, H, S], and out [B, S, H, E] if there is y.

        `out_exact` [B, S, H, E] may be `out`, and is with `whole_rows`.
        """
        E = self.query.shape[3] if y is None else y.shape[-1]
        self._launch(
            _l_rows_kernel,
            "l_rows" if y is None else "l_output",
            (strided(self.query), aL, cL, y, self.exact, lse_exact, strided(out_exact), strided(out), lse),
            (log2_scale_of(self.call.scale),),
            E=E,
            BLOCK_E=block_dim(E) if y is not None else 16,
            LAST=y is not None,
            EXACT=self._exact_mode(lse_exact),
        )

    def backward(
        self,
        aL: torch.Tensor,
        cL: torch.Tensor,
        lse: torch.Tensor,
        *,
        dq: torch.Tensor,
        daL: torch.Tensor,
        delta_r: torch.Tensor,
        y: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        do: torch.Tensor | None = None,
        dlse: torch.Tensor | None = None,
        dy: torch.Tensor | None = None,
        daR: torch.Tensor | None = None,
        dcR: torch.Tensor | None = None,
        cR: torch.Tensor | None = None,
        lse_exact: torch.Tensor | None = None,
        out_exact: torch.Tensor | None = None,
        dlse_exact: torch.Tensor | None = None,
        do_exact: torch.Tensor | None = None,
    ) -> None:
        """Backward of `output` (which has y, out, do and dy) or of `centroids` (which has daR, dcR and cR).

        daR and dcR are the gradients of αR and cR times max(cR, min_mass), by which αR was divided.
        Writes daL, delta_r and dy. Of the output, dq, dlse_exact and do_exact are written; of centroids added to.
        With `whole_rows`, `out_exact` is `out` and do_exact is not written.
        """
        v = daR if y is None else y
        assert v is not None
        E = v.shape[-1]
        one_tile = self._one_tile("l_backward_rows")
        delta = None if one_tile else torch.empty_like(lse)
        constants = dict(E=E, BLOCK_E=block_dim(E), LAST=y is not None, EXACT=self._exact_mode(lse_exact))
        query, grad_output = strided(self.query), strided(do)
        self._launch(
            _l_backward_rows_kernel,
            "l_backward_rows",
            (
                query, aL, cL, lse, v, grad_output, strided(out), dcR, cR, dlse, self.exact, lse_exact,
                strided(out_exact), strided(dq), delta, dlse_exact, do_exact, delta_r,
            ),
            (self.call.scale, log2_scale_of(self.call.scale), self.call.min_mass),
            (daL, dy),
            **constants,
        )  # fmt: skip
        if not one_tile:
            self._launch(
                _l_backward_columns_kernel,
                "l_backward_columns",
                (query, aL, cL, lse, v, grad_output, dcR, cR, self.exact, lse_exact, delta, delta_r),
                (self.call.scale, log2_scale_of(self.call.scale), self.call.min_mass),
                (daL, dy),
                **constants,
            )
