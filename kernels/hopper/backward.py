"""The backward kernels on Hopper: of the R-step (`monarch/r_step.py`) and of flash attention (`flash_entropy`,
`flash_bias`).

As in the portable form, one kernel owns rows (dz, dq) and another owns keys (dk, dv), so that there are no atomics and
every sum has one order. Both serve four cases, by the products they take part in:
    first R-steps   the key is its own value: dP = daL·kᵀ                   SUM_K
    last R-step     the value is [k | v]:     dP = daL·kᵀ + dy·vᵀ           SUM_K and SUM_V
    flash           plain attention:          dP = dO·vᵀ (dO is called dy)  SUM_V
    FlashBias       flash with a low-rank bias, and the gradients of its factors: dφq = dS·φk, dφk = dSᵀ·φq  FACTORS
A producer warp copies tiles into stages of shared memory, two warpgroups of 64 rows (or keys) each consume them. What
the program keeps (its rows or keys) and every stage have two barriers: `full` (the copies have arrived) and `empty`
(both warpgroups are done); `n` counts stages, `t` items of work.

Statistics of the rows are folded beforehand (`_fold_kernel`): p = 2^(s·log2_scale + shift_s) and
scale·dS = p·(scale·dP + shift_dp + slope·log2 p). They are sums because a minus would cost the loop an instruction.

FACTORS and CHAINED are those of `attend.py`. `bias` is (descriptor of φq, of φk, their places in shared memory, what
their indices are times, 1 / scale): one of the two belongs to what the program keeps, the other to the stages.

Legend: B batch, S tokens, H heads, D head dim, R bias rank, m blocks, b positions per block, M rows and N keys of a
tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vmonarch.kernels.common.launch import block_dim
from vmonarch.kernels.common.softmax import log2_scale_of
from vmonarch.kernels.flash_entropy.segments import Work, processors
from vmonarch.kernels.hopper.attend import (
    BLOCK_M,
    HALF,
    accumulator_layout,
    begin_scores,
    copy_rows,
    divide_by_scale,
    divides_exactly,
    factor_descriptors,
    hopper_dim,
    operand_layout,
    own_items,
    rows_descriptor,
    shared_layout,
    stages_that_fit,
)
from vmonarch.kernels.hopper.gluon import async_load
from vmonarch.kernels.hopper.schedule import even_order
from vmonarch.kernels.monarch.places import Places

# Rows or keys of the two warpgroups of a program.
TILE = BLOCK_M
# log2 p of what is not there: p is 0.
NOWHERE = -1e30

_HALF = gl.constexpr(HALF)
_TILE = gl.constexpr(TILE)
_NOWHERE = gl.constexpr(NOWHERE)


def _folded_descriptor(folded: torch.Tensor, rows: int) -> TensorDescriptor:
    size = folded[0].numel()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(folded, [folded.shape[0], size], [size, 1], [1, rows], layout)


@triton.jit(do_not_specialize=["groups", "rows", "padded"])
def _fold_kernel(
    lse_ptr, delta_ptr, cL_ptr, dcL_ptr, dH_ptr, folded_ptr, groups, rows, padded, scale, log_keys,
    SLOPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[shift_s, shift_dp, slope] of every row, and of places between groups, where p is 0.

    Every key stands for n keys, log_keys = log n: p has it in, the entropy's gradient has not.
    SLOPE: "" without a gradient through the entropy, else whether it comes as dcL, with cL, or as dH.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = groups.to(tl.int64) * padded
    row = at // padded * rows + at % padded
    inside = (at < size) & (at % padded < rows)
    lse = tl.load(lse_ptr + row, mask=inside, other=-float("inf"))
    delta = tl.load(delta_ptr + row, mask=inside, other=0.0)
    if SLOPE == "dcL":
        slope = tl.load(dcL_ptr + row, mask=inside, other=0.0)
        delta += slope * (tl.load(cL_ptr + row, mask=inside, other=0.0) + log_keys)
    elif SLOPE == "dH":
        slope = -tl.load(dH_ptr + row, mask=inside, other=0.0)
    # Where p is 0, log2 p must still be a number.
    shift_s = tl.where(lse == -float("inf"), -1e30, 1.4426950408889634 * (log_keys - lse))
    tl.store(folded_ptr + at, shift_s, mask=at < size)
    tl.store(folded_ptr + size + at, -scale * delta, mask=at < size)
    if SLOPE != "":
        tl.store(folded_ptr + 2 * size + at, slope * scale * 0.6931471805599453, mask=at < size)


def fold(
    lse: torch.Tensor,
    delta: torch.Tensor,
    rows: int,
    scale: float,
    *,
    dcL: torch.Tensor | None = None,
    cL: torch.Tensor | None = None,
    dH: torch.Tensor | None = None,
    keys_per_key: int = 1,
) -> torch.Tensor:
    """[2 or 3, groups, padded rows] statistics of the rows in the form the kernels take."""
    groups, padded = lse.numel() // rows, triton.cdiv(rows, TILE) * TILE
    slope = "dcL" if dcL is not None else "dH" if dH is not None else ""
    folded = lse.new_empty(3 if slope else 2, groups, padded)
    _fold_kernel[(triton.cdiv(groups * padded, 1024),)](
        lse,
        delta,
        cL,
        dcL,
        dH,
        folded,
        groups,
        rows,
        padded,
        scale,
        math.log(keys_per_key),
        SLOPE=slope,
        BLOCK=1024,
        num_warps=4,
    )
    return folded


@gluon.jit
def _r_item(item, row_tiles, heads, blocks, positions, offset):
    """(batch, head, group, first token of the block, first position of the tile) of an item of the R-step."""
    group = item // row_tiles
    token = group % blocks * positions - offset
    return group // blocks // heads, group // blocks % heads, group, token, item % row_tiles * _TILE


@gluon.jit
def _keys_item(
    item, items_ptr, ranges_ptr, row_tiles, heads, tokens, blocks, positions, offset, keys, padded,
    FLASH: gl.constexpr, Z_IS_QUERY: gl.constexpr, KEYS_ARE_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Where an item of the keys' kernel finds its keys and rows.

    Returns:
        (the keys' two outer indices, first key of the tile, key stop, z's two outer indices, z's first row, the outer
        indices and first row of daL and dy, rows, number of the first row among all statistics).
    """
    if FLASH:
        # `row_tiles` items per head, `tokens` queries.
        bh = item // row_tiles
        entry = items_ptr + item % row_tiles * 5
        key = gl.load(entry)
        key_stop = gl.load(entry + 1)
        span = ranges_ptr + 2 * gl.load(entry + 2)
        row = gl.load(span)
        rows = gl.load(span + 1) - row
        batch = bh // heads
        head = bh % heads
        first = bh * padded + row
        return batch, head, key, key_stop, batch, head, row, batch, head, row, rows, first
    else:
        batch, head, group, token, tile = _r_item(item, row_tiles, heads, blocks, positions, offset)
        first = group * padded
        if KEYS_ARE_BLOCKS:
            k_i = group * 0
            k_j = group
            key = tile
            key_stop = keys
        else:
            k_i = batch
            k_j = head
            key = gl.maximum(token, 0) + tile
            key_stop = gl.minimum(token + positions, tokens)
        if Z_IS_QUERY:
            return k_i, k_j, key, key_stop, batch, head, token, 0, group, 0, positions, first
        else:
            return k_i, k_j, key, key_stop, 0, group, 0, 0, group, 0, positions, first


@gluon.jit
def _rows_item(
    item, items_ptr, ranges_ptr, row_tiles, heads, tokens, blocks, positions, offset, keys, padded,
    FLASH: gl.constexpr, Z_IS_QUERY: gl.constexpr, KEYS_ARE_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Where an item of the rows' kernel finds its rows and keys.

    Returns:
        (z's two outer indices, z's first row, the outer indices and first row of daL and dy, rows of the tile, number
        of the first row among all statistics, the keys' two outer indices, first key, key stop, slot of the partial
        result or -1).
    """
    if FLASH:
        bh = item // row_tiles
        entry = items_ptr + item % row_tiles * 5
        row = gl.load(entry)
        rows = gl.load(entry + 1) - row
        span = ranges_ptr + 2 * gl.load(entry + 2)
        slot = gl.load(entry + 4)
        batch = bh // heads
        head = bh % heads
        first = bh * padded + row
        return batch, head, row, batch, head, row, rows, first, batch, head, gl.load(span), gl.load(span + 1), slot
    else:
        batch, head, group, token, tile = _r_item(item, row_tiles, heads, blocks, positions, offset)
        first = group * padded + tile
        if KEYS_ARE_BLOCKS:
            k_i = group * 0
            k_j = group
            key = group * 0
            key_stop = keys
        else:
            k_i = batch
            k_j = head
            key = gl.maximum(token, 0)
            key_stop = gl.minimum(token + positions, tokens)
        rows = positions - tile
        if Z_IS_QUERY:
            return batch, head, token + tile, 0, group, tile, rows, first, k_i, k_j, key, key_stop, -1
        else:
            return 0, group, tile, 0, group, tile, rows, first, k_i, k_j, key, key_stop, -1


@gluon.jit
def _allocate_barriers(STAGES: gl.constexpr):
    """`full` and `empty` barriers of what the program keeps and of the stages; see the top."""
    kept_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kept_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kept_full, count=1)
    mbarrier.init(kept_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    return kept_full, kept_empty, full, empty


@gluon.jit
def _allocate_factors(like, R: gl.constexpr, KEPT: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr):
    """Shared memory for what the kept rows (or keys) and the stages have of the bias; `like`, not read, without one."""
    kept = like
    staged = like
    if R > 0:
        kept = gl.allocate_shared_memory(like.dtype, [KEPT, _HALF, R], shared_layout(R))
        staged = gl.allocate_shared_memory(like.dtype, [STAGES, BLOCK, R], shared_layout(R))
    return kept, staged


@gluon.jit
def _d_scores(p, t, dp, shift, slope, scale, ENTROPY_GRAD: gl.constexpr):
    """scale·dS of a tile from p, t = log2 p and dP; see the top."""
    ds = dp * scale + shift
    if ENTROPY_GRAD:
        ds += slope * t
    return p * ds


@gluon.jit
def _load_for_keys(
    z_desc, k_desc, v_desc, daL_desc, dy_desc, folded_desc, k_bufs, v_bufs, z_bufs, daL_bufs, dy_bufs, folded_bufs,
    bias, kept_full, kept_empty, full, empty, items_ptr, ranges_ptr,
    order_ptr, row_tiles, heads, tokens, blocks, positions, offset, keys, padded,
    FLASH: gl.constexpr, Z_IS_QUERY: gl.constexpr, KEYS_ARE_BLOCKS: gl.constexpr,
    SUM_K: gl.constexpr, SUM_V: gl.constexpr, FACTORS: gl.constexpr,
    ENTROPY_GRAD: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Producer of the keys' kernel: the keys of every item, and the tiles of rows that attend to them."""
    fq_desc, fk_desc, fq_bufs, fk_bufs, shares, inverse_scale = bias
    fq_batch, fq_head, fk_batch, fk_head = shares
    n = 0
    t = 0
    begin, end, item = own_items(order_ptr)
    for place in range(begin, end):
        next_item = gl.load(order_ptr + place + 1)
        k_i, k_j, key, _, z_i, z_j, z_row, g_i, g_j, g_row, rows, first_row = _keys_item(
            item,
            items_ptr,
            ranges_ptr,
            row_tiles,
            heads,
            tokens,
            blocks,
            positions,
            offset,
            keys,
            padded,
            FLASH,
            Z_IS_QUERY,
            KEYS_ARE_BLOCKS,
        )
        mbarrier.wait(kept_empty, (t & 1) ^ 1)
        of_values: gl.constexpr = v_desc.block_type.nbytes if SUM_V else 0
        of_factors: gl.constexpr = fk_desc.block_type.nbytes if FACTORS else 0
        mbarrier.expect(kept_full, 2 * (k_desc.block_type.nbytes + of_values + of_factors))
        for half in gl.static_range(2):
            copy_rows(k_desc, k_i, k_j, key + half * _HALF, kept_full, k_bufs.index(half))
            if SUM_V:
                copy_rows(v_desc, k_i, k_j, key + half * _HALF, kept_full, v_bufs.index(half))
            if FACTORS:
                copy_rows(fk_desc, k_i * fk_batch, k_j * fk_head, key + half * _HALF, kept_full, fk_bufs.index(half))
        for first in range(0, rows, BLOCK):
            stage = n % STAGES
            mbarrier.wait(empty.index(stage), (n // STAGES & 1) ^ 1)
            barrier = full.index(stage)
            of_rows: gl.constexpr = (1 + SUM_K + SUM_V) * z_desc.block_type.nbytes
            of_row_factors: gl.constexpr = fq_desc.block_type.nbytes if FACTORS else 0
            mbarrier.expect(barrier, of_rows + of_row_factors + (2 + ENTROPY_GRAD) * BLOCK * 4)
            copy_rows(z_desc, z_i, z_j, z_row + first, barrier, z_bufs.index(stage))
            if SUM_K:
                copy_rows(daL_desc, g_i, g_j, g_row + first, barrier, daL_bufs.index(stage))
            if SUM_V:
                copy_rows(dy_desc, g_i, g_j, g_row + first, barrier, dy_bufs.index(stage))
            if FACTORS:
                copy_rows(fq_desc, z_i * fq_batch, z_j * fq_head, z_row + first, barrier, fq_bufs.index(stage))
            for i in gl.static_range(2 + ENTROPY_GRAD):
                buffer = folded_bufs.index(stage * (2 + ENTROPY_GRAD) + i)
                async_load(folded_desc, [i, first_row + first], barrier, buffer)
            n += 1
        item = next_item
        t += 1


@gluon.jit
def _add_rows(ptr, stride, row, stop, x, WIDTH: gl.constexpr, ACCUMULATE: gl.constexpr):
    """Write x [64, D] into rows of WIDTH numbers, or add it to what is there; no other program touches these rows."""
    D: gl.constexpr = x.shape[1]
    layout: gl.constexpr = x.type.layout
    rows = row + gl.arange(0, _HALF, gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, gl.SliceLayout(0, layout))
    pointers = ptr + rows.to(gl.int64)[:, None] * stride + columns[None, :]
    inside = (rows < stop)[:, None] & (columns < WIDTH)[None, :]
    if ACCUMULATE:
        x += gl.load(pointers, mask=inside, other=0.0).to(gl.float32)
    gl.store(pointers, x.to(ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _store_factor_gradient(
    ptr, head, stride, row, stop, x, inverse_scale, HEAD_DIM: gl.constexpr, RANK: gl.constexpr
):  # fmt: skip
    """Write the gradient of 64 rows of a factor; x came from scale·dS.

    `head` and `stride` are those of dk or dq: both tensors are contiguous, and strides of their own would take
    registers.
    """
    _add_rows(ptr + head // HEAD_DIM * RANK, stride // HEAD_DIM * RANK, row, stop, x * inverse_scale, RANK, False)


@gluon.jit
def _sum_for_keys(
    half: gl.constexpr, k_bufs, v_bufs, z_bufs, daL_bufs, dy_bufs, folded_bufs, bias, kept_full, kept_empty, full,
    empty, items_ptr, ranges_ptr, dk_ptr, dv_ptr, dfk_ptr,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    order_ptr, row_tiles, heads, tokens, blocks, positions, offset, keys, padded, scale, log2_scale,
    FLASH: gl.constexpr, Z_IS_QUERY: gl.constexpr, KEYS_ARE_BLOCKS: gl.constexpr,
    SUM_K: gl.constexpr, SUM_V: gl.constexpr, FACTORS: gl.constexpr, CHAINED: gl.constexpr,
    ENTROPY_GRAD: gl.constexpr, ADD_K: gl.constexpr, ADD_V: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr,
    KEEP: gl.constexpr, HEAD_DIM: gl.constexpr, RANK: gl.constexpr,
):  # fmt: skip
    """Consumer of the keys' kernel: dk, dv and dφk of 64 keys. Scores are transposed, [keys, rows]."""
    fq_desc, fk_desc, fq_bufs, fk_bufs, shares, inverse_scale = bias
    R: gl.constexpr = fk_bufs.shape[2]
    D: gl.constexpr = k_bufs.shape[2]
    dtype: gl.constexpr = k_bufs.dtype
    layout: gl.constexpr = accumulator_layout(BLOCK)
    operand: gl.constexpr = operand_layout(BLOCK)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    sums: gl.constexpr = accumulator_layout(D)
    n = 0
    t = 0
    begin, end, item = own_items(order_ptr)
    for place in range(begin, end):
        next_item = gl.load(order_ptr + place + 1)
        k_i, k_j, key, key_stop, _, _, _, _, _, _, rows, _ = _keys_item(
            item,
            items_ptr,
            ranges_ptr,
            row_tiles,
            heads,
            tokens,
            blocks,
            positions,
            offset,
            keys,
            padded,
            FLASH,
            Z_IS_QUERY,
            KEYS_ARE_BLOCKS,
        )
        key += half * _HALF
        mbarrier.wait(kept_full, t & 1)
        if key < key_stop:
            if KEEP:
                k = k_bufs.index(half).load(operand)
                v = v_bufs.index(half).load(operand) if SUM_V else k
                mbarrier.arrive(kept_empty, pred=not FACTORS)
            else:
                k = k_bufs.index(half)
                v = v_bufs.index(half)
            fk = fk_bufs.index(half)
            if CHAINED:
                divide_by_scale(fk, inverse_scale)
            dk = gl.zeros([_HALF, D], gl.float32, sums)
            dv = gl.zeros([_HALF, D], gl.float32, sums) if SUM_V else dk
            dfk = gl.zeros([_HALF, R], gl.float32, accumulator_layout(R)) if FACTORS else dk
            for first in range(0, rows, BLOCK):
                stage = n % STAGES
                mbarrier.wait(full.index(stage), n // STAGES & 1)
                z = z_bufs.index(stage)
                daL = daL_bufs.index(stage)
                dy = dy_bufs.index(stage)
                fq = fq_bufs.index(stage)
                zero = gl.zeros([_HALF, BLOCK], gl.float32, layout)
                scores = begin_scores(k, z, fk, fq, inverse_scale, FACTORS, CHAINED)
                if SUM_K:
                    dp = warpgroup_mma(k, daL.permute((1, 0)), zero, use_acc=False, is_async=True)
                    if SUM_V:
                        dp = warpgroup_mma(v, dy.permute((1, 0)), dp, is_async=True)
                else:
                    dp = warpgroup_mma(v, dy.permute((1, 0)), zero, use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(SUM_K + SUM_V, [scores])
                statistics = stage * (2 + ENTROPY_GRAD)
                shift = folded_bufs.index(statistics).load(layout)
                if FLASH and rows - first < BLOCK:
                    # The next rows are not of this segment.
                    present = gl.arange(0, BLOCK, columns) < rows - first
                    shift = gl.where(present[None, :], shift, _NOWHERE)
                p = gl.exp2(scores * log2_scale + shift)
                rounded = gl.convert_layout(p.to(dtype), operand)
                if SUM_V:
                    dv = warpgroup_mma(rounded, dy, dv, is_async=True)
                if SUM_K:
                    dk = warpgroup_mma(rounded, daL, dk, is_async=True)
                shift = folded_bufs.index(statistics + 1).load(layout)
                slope = folded_bufs.index(statistics + 2).load(layout) if ENTROPY_GRAD else shift
                dp = warpgroup_mma_wait(SUM_K + SUM_V, [dp])
                # There are no registers to keep it.
                log2_p = gl.log2(gl.maximum(p, 1e-37)) if ENTROPY_GRAD else p
                ds = _d_scores(p, log2_p, dp, shift, slope, scale, ENTROPY_GRAD)
                ds = gl.convert_layout(ds.to(dtype), operand)
                dk = warpgroup_mma(ds, z, dk, is_async=True)
                if FACTORS:
                    dfk = warpgroup_mma(ds, fq, dfk, is_async=True)
                    dk, dv, dfk = warpgroup_mma_wait(0, [dk, dv, dfk])
                elif SUM_V:
                    dk, dv = warpgroup_mma_wait(0, [dk, dv])
                else:
                    dk = warpgroup_mma_wait(0, [dk])
                mbarrier.arrive(empty.index(stage))
                n += 1
            if FACTORS or not KEEP:
                mbarrier.arrive(kept_empty)
            b = k_i.to(gl.int64)
            h = k_j.to(gl.int64)
            _add_rows(dk_ptr + b * stride_dkb + h * stride_dkh, stride_dks, key, key_stop, dk, HEAD_DIM, ADD_K)
            if SUM_V:
                _add_rows(dv_ptr + b * stride_dvb + h * stride_dvh, stride_dvs, key, key_stop, dv, HEAD_DIM, ADD_V)
            if FACTORS:
                _store_factor_gradient(
                    dfk_ptr, b * stride_dkb + h * stride_dkh, stride_dks, key, key_stop, dfk, inverse_scale, HEAD_DIM,
                    RANK,
                )  # fmt: skip
        else:
            for _ in range(0, rows, BLOCK):
                mbarrier.wait(full.index(n % STAGES), n // STAGES & 1)
                mbarrier.arrive(empty.index(n % STAGES))
                n += 1
            mbarrier.arrive(kept_empty)
        item = next_item
        t += 1


_SIZES = ["row_tiles", "heads", "tokens", "blocks", "positions", "offset", "keys", "padded"]


@gluon.jit(do_not_specialize=[*_SIZES, "shares"])
def _hopper_keys_kernel(
    z_desc, k_desc, v_desc, daL_desc, dy_desc, fq_desc, fk_desc, folded_desc, items_ptr, ranges_ptr,
    dk_ptr, dv_ptr, dfk_ptr,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    order_ptr, row_tiles, heads, tokens, blocks, positions, offset, keys, padded,
    scale, log2_scale, shares, inverse_scale,
    FLASH: gl.constexpr, Z_IS_QUERY: gl.constexpr, KEYS_ARE_BLOCKS: gl.constexpr,
    SUM_K: gl.constexpr, SUM_V: gl.constexpr, CHAINED: gl.constexpr,
    ENTROPY_GRAD: gl.constexpr, ADD_K: gl.constexpr, ADD_V: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr,
    KEEP: gl.constexpr, HEAD_DIM: gl.constexpr, RANK: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """dk, dv and dφk; a program takes one tile of keys after the other."""
    D: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    layout: gl.constexpr = shared_layout(D)
    k_bufs = gl.allocate_shared_memory(dtype, [2, _HALF, D], layout)
    v_bufs = gl.allocate_shared_memory(dtype, [2, _HALF, D], layout) if SUM_V else k_bufs
    z_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], layout)
    daL_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], layout) if SUM_K else z_bufs
    dy_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], layout) if SUM_V else z_bufs
    statistics: gl.constexpr = STAGES * (2 + ENTROPY_GRAD)
    folded_bufs = gl.allocate_shared_memory(gl.float32, [statistics, 1, BLOCK], folded_desc.layout)
    fk_bufs, fq_bufs = _allocate_factors(z_bufs, R, 2, STAGES, BLOCK)
    bias = (fq_desc, fk_desc, fq_bufs, fk_bufs, shares, inverse_scale)
    kept_full, kept_empty, full, empty = _allocate_barriers(STAGES)
    gl.warp_specialize(
        [
            (_load_for_keys, (
                z_desc, k_desc, v_desc, daL_desc, dy_desc, folded_desc,
                k_bufs, v_bufs, z_bufs, daL_bufs, dy_bufs, folded_bufs,
                bias, kept_full, kept_empty, full, empty, items_ptr, ranges_ptr,
                order_ptr, row_tiles, heads, tokens, blocks, positions, offset, keys, padded,
                FLASH, Z_IS_QUERY, KEYS_ARE_BLOCKS, SUM_K, SUM_V, R > 0, ENTROPY_GRAD, STAGES, BLOCK,
            )),
            (_sum_for_keys, (
                0, k_bufs, v_bufs, z_bufs, daL_bufs, dy_bufs, folded_bufs, bias, kept_full, kept_empty, full, empty,
                items_ptr, ranges_ptr, dk_ptr, dv_ptr, dfk_ptr, stride_dkb, stride_dks, stride_dkh,
                stride_dvb, stride_dvs, stride_dvh,
                order_ptr, row_tiles, heads, tokens, blocks, positions, offset, keys, padded, scale, log2_scale,
                FLASH, Z_IS_QUERY, KEYS_ARE_BLOCKS, SUM_K, SUM_V, R > 0, CHAINED, ENTROPY_GRAD, ADD_K, ADD_V, STAGES,
                BLOCK, KEEP, HEAD_DIM, RANK,
            )),
            (_sum_for_keys, (
                1, k_bufs, v_bufs, z_bufs, daL_bufs, dy_bufs, folded_bufs, bias, kept_full, kept_empty, full, empty,
                items_ptr, ranges_ptr, dk_ptr, dv_ptr, dfk_ptr, stride_dkb, stride_dks, stride_dkh,
                stride_dvb, stride_dvs, stride_dvh,
                order_ptr, row_tiles, heads, tokens, blocks, positions, offset, keys, padded, scale, log2_scale,
                FLASH, Z_IS_QUERY, KEYS_ARE_BLOCKS, SUM_K, SUM_V, R > 0, CHAINED, ENTROPY_GRAD, ADD_K, ADD_V, STAGES,
                BLOCK, KEEP, HEAD_DIM, RANK,
            )),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip


@gluon.jit
def _load_for_rows(
    z_desc, k_desc, v_desc, daL_desc, dy_desc, k_bufs, v_bufs, z_bufs, daL_bufs, dy_bufs,
    bias, kept_full, kept_empty, full, empty, items_ptr, ranges_ptr,
    order_ptr, row_tiles, heads, tokens, blocks, positions, offset, keys, padded,
    FLASH: gl.constexpr, Z_IS_QUERY: gl.constexpr, KEYS_ARE_BLOCKS: gl.constexpr,
    SUM_K: gl.constexpr, SUM_V: gl.constexpr, FACTORS: gl.constexpr,
    STAGES: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Producer of the rows' kernel: the rows of every item, and the tiles of keys, the last and ragged one first."""
    fq_desc, fk_desc, fq_bufs, fk_bufs, shares, inverse_scale = bias
    fq_batch, fq_head, fk_batch, fk_head = shares
    n = 0
    t = 0
    begin, end, item = own_items(order_ptr)
    for place in range(begin, end):
        next_item = gl.load(order_ptr + place + 1)
        z_i, z_j, z_row, g_i, g_j, g_row, _, _, k_i, k_j, key, key_stop, _ = _rows_item(
            item,
            items_ptr,
            ranges_ptr,
            row_tiles,
            heads,
            tokens,
            blocks,
            positions,
            offset,
            keys,
            padded,
            FLASH,
            Z_IS_QUERY,
            KEYS_ARE_BLOCKS,
        )
        mbarrier.wait(kept_empty, (t & 1) ^ 1)
        of_row_factors: gl.constexpr = fq_desc.block_type.nbytes if FACTORS else 0
        mbarrier.expect(kept_full, 2 * ((1 + SUM_K + SUM_V) * z_desc.block_type.nbytes + of_row_factors))
        for half in gl.static_range(2):
            copy_rows(z_desc, z_i, z_j, z_row + half * _HALF, kept_full, z_bufs.index(half))
            if SUM_K:
                copy_rows(daL_desc, g_i, g_j, g_row + half * _HALF, kept_full, daL_bufs.index(half))
            if SUM_V:
                copy_rows(dy_desc, g_i, g_j, g_row + half * _HALF, kept_full, dy_bufs.index(half))
            if FACTORS:
                copy_rows(fq_desc, z_i * fq_batch, z_j * fq_head, z_row + half * _HALF, kept_full, fq_bufs.index(half))
        tiles = (key_stop - key + BLOCK - 1) // BLOCK
        for tile in range(tiles):
            first = key + gl.where(tile == 0, tiles - 1, tile - 1) * BLOCK
            stage = n % STAGES
            mbarrier.wait(empty.index(stage), (n // STAGES & 1) ^ 1)
            barrier = full.index(stage)
            of_values: gl.constexpr = v_desc.block_type.nbytes if SUM_V else 0
            of_factors: gl.constexpr = fk_desc.block_type.nbytes if FACTORS else 0
            mbarrier.expect(barrier, k_desc.block_type.nbytes + of_values + of_factors)
            copy_rows(k_desc, k_i, k_j, first, barrier, k_bufs.index(stage))
            if SUM_V:
                copy_rows(v_desc, k_i, k_j, first, barrier, v_bufs.index(stage))
            if FACTORS:
                copy_rows(fk_desc, k_i * fk_batch, k_j * fk_head, first, barrier, fk_bufs.index(stage))
            n += 1
        item = next_item
        t += 1


@gluon.jit
def _add_tile_for_rows(
    dz, dfq, z, daL, dy, fq, k, v, fk, shift_s, shift_dp, slope, keys_left, done, inverse_scale, scale, log2_scale,
    SUM_K: gl.constexpr, SUM_V: gl.constexpr, FACTORS: gl.constexpr, CHAINED: gl.constexpr,
    ENTROPY_GRAD: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add what the keys of one tile contribute to dz and dφq, and give the tile back."""
    N: gl.constexpr = k.shape[0]
    dtype: gl.constexpr = k.dtype
    layout: gl.constexpr = accumulator_layout(N)
    zero = gl.zeros([_HALF, N], gl.float32, layout)
    scores = begin_scores(z, k, fq, fk, inverse_scale, FACTORS, CHAINED)
    if SUM_K:
        dp = warpgroup_mma(daL, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        if SUM_V:
            dp = warpgroup_mma(dy, v.permute((1, 0)), dp, is_async=True)
    else:
        dp = warpgroup_mma(dy, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(SUM_K + SUM_V, [scores])
    log2_p = scores * log2_scale + shift_s[:, None]
    if MASKED:
        present = gl.arange(0, N, gl.SliceLayout(0, layout)) < keys_left
        log2_p = gl.where(present[None, :], log2_p, _NOWHERE)
    p = gl.exp2(log2_p)
    dp = warpgroup_mma_wait(0, [dp])
    ds = _d_scores(p, log2_p, dp, shift_dp[:, None], slope[:, None], scale, ENTROPY_GRAD)
    ds = gl.convert_layout(ds.to(dtype), operand_layout(N))
    dz = warpgroup_mma(ds, k, dz, is_async=True)
    if FACTORS:
        dfq = warpgroup_mma(ds, fk, dfq, is_async=True)
        dz, dfq = warpgroup_mma_wait(0, [dz, dfq])
    else:
        dz = warpgroup_mma_wait(0, [dz])
    mbarrier.arrive(done)
    return dz, dfq


@gluon.jit
def _sum_for_rows(
    half: gl.constexpr, k_bufs, v_bufs, z_bufs, daL_bufs, dy_bufs, bias, kept_full, kept_empty, full, empty,
    items_ptr, ranges_ptr, folded_ptr, statistics, part_ptr, slots, cR_ptr, daR_ptr, dcR_ptr, dq_ptr, dfq_ptr,
    stride_dqb, stride_dqs, stride_dqh,
    order_ptr, row_tiles, heads, tokens, blocks, positions, offset, keys, padded, scale, log2_scale, min_mass,
    FLASH: gl.constexpr, Z_IS_QUERY: gl.constexpr, KEYS_ARE_BLOCKS: gl.constexpr,
    SUM_K: gl.constexpr, SUM_V: gl.constexpr, FACTORS: gl.constexpr, CHAINED: gl.constexpr,
    ENTROPY_GRAD: gl.constexpr, ADD_Q: gl.constexpr, HAS_PARTS: gl.constexpr, STAGES: gl.constexpr,
    BLOCK: gl.constexpr, BLOCK_TAIL: gl.constexpr, KEEP: gl.constexpr, HEAD_DIM: gl.constexpr, RANK: gl.constexpr,
):  # fmt: skip
    """Consumer of the rows' kernel: dz and dφq of 64 rows."""
    fq_desc, fk_desc, fq_bufs, fk_bufs, shares, inverse_scale = bias
    R: gl.constexpr = fq_bufs.shape[2]
    D: gl.constexpr = k_bufs.shape[2]
    sums: gl.constexpr = accumulator_layout(D)
    layout: gl.constexpr = accumulator_layout(BLOCK)
    tail_layout: gl.constexpr = accumulator_layout(BLOCK_TAIL)
    n = 0
    t = 0
    begin, end, item = own_items(order_ptr)
    for place in range(begin, end):
        next_item = gl.load(order_ptr + place + 1)
        z_i, z_j, z_row, _, _, _, rows, first_row, _, _, key, key_stop, slot = _rows_item(
            item,
            items_ptr,
            ranges_ptr,
            row_tiles,
            heads,
            tokens,
            blocks,
            positions,
            offset,
            keys,
            padded,
            FLASH,
            Z_IS_QUERY,
            KEYS_ARE_BLOCKS,
        )
        z_row += half * _HALF
        rows -= half * _HALF
        first_row += half * _HALF
        tiles = (key_stop - key + BLOCK - 1) // BLOCK
        mbarrier.wait(kept_full, t & 1)
        if rows > 0:
            if KEEP:
                z = z_bufs.index(half).load(operand_layout(BLOCK))
                daL = daL_bufs.index(half).load(operand_layout(BLOCK)) if SUM_K else z
                dy = dy_bufs.index(half).load(operand_layout(BLOCK)) if SUM_V else z
                mbarrier.arrive(kept_empty, pred=not FACTORS)
            else:
                z = z_bufs.index(half)
                daL = daL_bufs.index(half)
                dy = dy_bufs.index(half)
            fq = fq_bufs.index(half)
            if CHAINED:
                divide_by_scale(fq, inverse_scale)
            i = gl.arange(0, _HALF, gl.SliceLayout(1, sums))
            statistic_ptr = folded_ptr + first_row
            shift_s = gl.load(statistic_ptr + i, mask=i < rows, other=0.0)
            shift_dp = gl.load(statistic_ptr + statistics + i, mask=i < rows, other=0.0)
            slope = shift_dp
            if ENTROPY_GRAD:
                slope = gl.load(statistic_ptr + 2 * statistics + i, mask=i < rows, other=0.0)
            in_tail: gl.constexpr = gl.SliceLayout(1, tail_layout)
            in_tile: gl.constexpr = gl.SliceLayout(1, layout)
            dz = gl.zeros([_HALF, D], gl.float32, sums)
            dfq = gl.zeros([_HALF, R], gl.float32, accumulator_layout(R)) if FACTORS else dz
            stage = n % STAGES
            mbarrier.wait(full.index(stage), n // STAGES & 1)
            dz, dfq = _add_tile_for_rows(
                dz, dfq, z, daL, dy, fq, k_bufs.index(stage).slice(0, BLOCK_TAIL),
                v_bufs.index(stage).slice(0, BLOCK_TAIL), fk_bufs.index(stage).slice(0, BLOCK_TAIL),
                gl.convert_layout(shift_s, in_tail), gl.convert_layout(shift_dp, in_tail),
                gl.convert_layout(slope, in_tail), key_stop - key - (tiles - 1) * BLOCK, empty.index(stage),
                inverse_scale, scale, log2_scale, SUM_K, SUM_V, FACTORS, CHAINED, ENTROPY_GRAD, True,
            )  # fmt: skip
            n += 1
            shift_s = gl.convert_layout(shift_s, in_tile)
            shift_dp = gl.convert_layout(shift_dp, in_tile)
            slope = gl.convert_layout(slope, in_tile)
            for _ in range(1, tiles):
                stage = n % STAGES
                mbarrier.wait(full.index(stage), n // STAGES & 1)
                dz, dfq = _add_tile_for_rows(
                    dz, dfq, z, daL, dy, fq, k_bufs.index(stage), v_bufs.index(stage), fk_bufs.index(stage),
                    shift_s, shift_dp, slope, 0, empty.index(stage), inverse_scale, scale, log2_scale,
                    SUM_K, SUM_V, FACTORS, CHAINED, ENTROPY_GRAD, False,
                )  # fmt: skip
                n += 1
            columns = gl.arange(0, D, gl.SliceLayout(0, sums))
            if FLASH or Z_IS_QUERY:
                if FACTORS or not KEEP:
                    mbarrier.arrive(kept_empty)
                if FACTORS:
                    head = z_i.to(gl.int64) * stride_dqb + z_j.to(gl.int64) * stride_dqh
                    _store_factor_gradient(
                        dfq_ptr, head, stride_dqs, z_row, z_row + rows, dfq, inverse_scale, HEAD_DIM, RANK
                    )
                if HAS_PARTS and slot >= 0:
                    part = ((z_i * heads + z_j).to(gl.int64) * slots + slot) * _TILE + half * _HALF + i
                    inside = (i < rows)[:, None] & (columns < HEAD_DIM)[None, :]
                    gl.store(part_ptr + part[:, None] * HEAD_DIM + columns[None, :], dz, mask=inside)
                else:
                    b = z_i.to(gl.int64)
                    h = z_j.to(gl.int64)
                    # A position before the first token or after the last holds none.
                    first = gl.maximum(z_row, 0)
                    stop = gl.minimum(z_row + rows, tokens)
                    q = z_row + i
                    pointers = dq_ptr + b * stride_dqb + h * stride_dqh + q.to(gl.int64)[:, None] * stride_dqs
                    pointers += columns[None, :]
                    inside = ((q >= first) & (q < stop))[:, None] & (columns < HEAD_DIM)[None, :]
                    if ADD_Q:
                        dz += gl.load(pointers, mask=inside, other=0.0).to(gl.float32)
                    gl.store(pointers, dz.to(dq_ptr.dtype.element_ty), mask=inside)
            else:
                # z = αR / max(cR, min_mass)
                at = (z_j * positions + z_row).to(gl.int64) + i
                cR = gl.load(cR_ptr + at, mask=i < rows, other=1.0)
                if KEEP:
                    product = gl.sum(dz * gl.convert_layout(z, sums).to(gl.float32), 1)
                else:
                    product = gl.sum(dz * z.load(sums).to(gl.float32), 1)
                    mbarrier.arrive(kept_empty)
                gl.store(dcR_ptr + at, gl.where(cR >= min_mass, -product, 0.0), mask=i < rows)
                inside = (i < rows)[:, None] & (columns < HEAD_DIM)[None, :]
                daR = dz.to(daR_ptr.dtype.element_ty)
                gl.store(daR_ptr + at[:, None] * HEAD_DIM + columns[None, :], daR, mask=inside)
        else:
            for _ in range(tiles):
                mbarrier.wait(full.index(n % STAGES), n // STAGES & 1)
                mbarrier.arrive(empty.index(n % STAGES))
                n += 1
            mbarrier.arrive(kept_empty)
        item = next_item
        t += 1


@gluon.jit(do_not_specialize=[*_SIZES, "slots", "statistics", "shares"])
def _hopper_rows_kernel(
    z_desc, k_desc, v_desc, daL_desc, dy_desc, fq_desc, fk_desc, items_ptr, ranges_ptr,
    folded_ptr, statistics, part_ptr, slots, cR_ptr, daR_ptr, dcR_ptr, dq_ptr, dfq_ptr,
    stride_dqb, stride_dqs, stride_dqh,
    order_ptr, row_tiles, heads, tokens, blocks, positions, offset, keys, padded, scale, log2_scale, min_mass,
    shares, inverse_scale,
    FLASH: gl.constexpr, Z_IS_QUERY: gl.constexpr, KEYS_ARE_BLOCKS: gl.constexpr,
    SUM_K: gl.constexpr, SUM_V: gl.constexpr, CHAINED: gl.constexpr,
    ENTROPY_GRAD: gl.constexpr, ADD_Q: gl.constexpr, HAS_PARTS: gl.constexpr, STAGES: gl.constexpr,
    BLOCK: gl.constexpr, BLOCK_TAIL: gl.constexpr, KEEP: gl.constexpr, HEAD_DIM: gl.constexpr,
    RANK: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """dz, as dq, as partial sums of it or, where z was made of αR and cR, as their gradients; and dφq."""
    D: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    layout: gl.constexpr = shared_layout(D)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], layout)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], layout) if SUM_V else k_bufs
    z_bufs = gl.allocate_shared_memory(dtype, [2, _HALF, D], layout)
    daL_bufs = gl.allocate_shared_memory(dtype, [2, _HALF, D], layout) if SUM_K else z_bufs
    dy_bufs = gl.allocate_shared_memory(dtype, [2, _HALF, D], layout) if SUM_V else z_bufs
    fq_bufs, fk_bufs = _allocate_factors(k_bufs, R, 2, STAGES, BLOCK)
    bias = (fq_desc, fk_desc, fq_bufs, fk_bufs, shares, inverse_scale)
    kept_full, kept_empty, full, empty = _allocate_barriers(STAGES)
    gl.warp_specialize(
        [
            (_load_for_rows, (
                z_desc, k_desc, v_desc, daL_desc, dy_desc, k_bufs, v_bufs, z_bufs, daL_bufs, dy_bufs,
                bias, kept_full, kept_empty, full, empty, items_ptr, ranges_ptr,
                order_ptr, row_tiles, heads, tokens, blocks, positions, offset, keys, padded,
                FLASH, Z_IS_QUERY, KEYS_ARE_BLOCKS, SUM_K, SUM_V, R > 0, STAGES, BLOCK,
            )),
            (_sum_for_rows, (
                0, k_bufs, v_bufs, z_bufs, daL_bufs, dy_bufs, bias, kept_full, kept_empty, full, empty,
                items_ptr, ranges_ptr, folded_ptr, statistics, part_ptr, slots, cR_ptr, daR_ptr, dcR_ptr,
                dq_ptr, dfq_ptr, stride_dqb, stride_dqs, stride_dqh,
                order_ptr, row_tiles, heads, tokens, blocks, positions, offset, keys, padded,
                scale, log2_scale, min_mass,
                FLASH, Z_IS_QUERY, KEYS_ARE_BLOCKS, SUM_K, SUM_V, R > 0, CHAINED, ENTROPY_GRAD, ADD_Q, HAS_PARTS,
                STAGES, BLOCK, BLOCK_TAIL, KEEP, HEAD_DIM, RANK,
            )),
            (_sum_for_rows, (
                1, k_bufs, v_bufs, z_bufs, daL_bufs, dy_bufs, bias, kept_full, kept_empty, full, empty,
                items_ptr, ranges_ptr, folded_ptr, statistics, part_ptr, slots, cR_ptr, daR_ptr, dcR_ptr,
                dq_ptr, dfq_ptr, stride_dqb, stride_dqs, stride_dqh,
                order_ptr, row_tiles, heads, tokens, blocks, positions, offset, keys, padded,
                scale, log2_scale, min_mass,
                FLASH, Z_IS_QUERY, KEYS_ARE_BLOCKS, SUM_K, SUM_V, R > 0, CHAINED, ENTROPY_GRAD, ADD_Q, HAS_PARTS,
                STAGES, BLOCK, BLOCK_TAIL, KEEP, HEAD_DIM, RANK,
            )),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip


def keys_choice(D: int, sum_v: bool, R: int = 0) -> dict[str, int]:
    """Rows of a tile, and whether the keys are kept in registers, which saves reading them for every tile.

    What was fastest on an H200. Registers are the limit: with 128 dimensions there are none left beside values, and
    with the gradient of a wide factor too few for 64 rows.
    """
    block = 128 if D <= 64 and not sum_v else 32 if D == 128 and R > 32 else 64
    return {"block": block, "keep": (D <= 64) is sum_v}


def rows_choice(D: int, R: int = 0) -> dict[str, int]:
    """Keys of a tile, and whether the rows are kept in registers."""
    return {"block": 128 if D <= 64 and R <= 32 else 64, "keep": D <= 64}


def launch_keys(
    z: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    daL: torch.Tensor | None,
    dy: torch.Tensor | None,
    folded: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor | None,
    *,
    tiles: tuple[int, int],
    heads: int,
    scale: float,
    places: Places | None = None,
    work: Work | None = None,
    tokens: int = 0,
    add: tuple[bool, bool] = (True, True),
    half_tiles: bool = False,
    factors: tuple[torch.Tensor, torch.Tensor] | None = None,
    dfk: torch.Tensor | None = None,
) -> None:
    """dk and dv of all keys.

    Args:
        tiles: items per head (or group), and how many of those there are.
        half_tiles: whether the last item of each has keys for one warpgroup only.
        factors: of a bias, as `hopper.flash.flash` takes them, only for plain attention with one range of keys.
        dfk: [B, Sk, H, R], gets the gradient of φk; it and dk are contiguous.
    """
    D = hopper_dim(key.shape[-1])
    R = _rank(factors)
    block, keep = keys_choice(D, dy is not None, R).values()
    sums = (daL is not None) + (dy is not None)
    stage = ((1 + sums) * D + R) * block * 2 + folded.shape[0] * block * 4
    stages = stages_that_fit(((1 + (dy is not None)) * D + R) * TILE * 2, stage)
    k_desc, z_desc = rows_descriptor(key, HALF), rows_descriptor(z, block)
    factor_descs, shares, inverse_scale, chained = _bias_arguments(factors, (block, HALF), z.dtype, scale)
    order = even_order(*tiles, half_tiles, processors(key.device), key.device)
    _hopper_keys_kernel[(min(tiles[0] * tiles[1], processors(key.device)),)](
        z_desc, k_desc, None if dy is None else rows_descriptor(value, HALF),
        None if daL is None else rows_descriptor(daL, block), None if dy is None else rows_descriptor(dy, block),
        *factor_descs, _folded_descriptor(folded, block),
        None if work is None else work.items, None if work is None else work.ranges,
        dk, dv, dfk, *_outer_strides(dk), *_outer_strides(dv),
        order, tiles[0], heads, *_sizes(places, tokens, key), folded.shape[2], scale, log2_scale_of(scale),
        shares, inverse_scale,
        FLASH=work is not None, Z_IS_QUERY=z.ndim == 4, KEYS_ARE_BLOCKS=key.ndim == 3,
        SUM_K=daL is not None, SUM_V=dy is not None, CHAINED=chained,
        ENTROPY_GRAD=folded.shape[0] == 3, ADD_K=add[0], ADD_V=add[1], STAGES=stages, BLOCK=block, KEEP=keep,
        HEAD_DIM=key.shape[-1], RANK=0 if dfk is None else dfk.shape[3], R=R, num_warps=4, maxnreg=168,
    )  # fmt: skip


def launch_rows(
    z: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    daL: torch.Tensor | None,
    dy: torch.Tensor | None,
    folded: torch.Tensor,
    dq: torch.Tensor,
    *,
    tiles: tuple[int, int],
    heads: int,
    scale: float,
    places: Places | None = None,
    work: Work | None = None,
    tokens: int = 0,
    parts: torch.Tensor | None = None,
    cR: torch.Tensor | None = None,
    daR: torch.Tensor | None = None,
    dcR: torch.Tensor | None = None,
    min_mass: float = 0.0,
    add: bool = True,
    ragged: bool = True,
    half_tiles: bool = False,
    factors: tuple[torch.Tensor, torch.Tensor] | None = None,
    dfq: torch.Tensor | None = None,
) -> None:
    """dz of all rows: added to dq, written to `parts`, or turned into daR and dcR; with `factors` also dφq.

    Args:
        tiles, half_tiles, factors: as in `launch_keys`.
        dfq: [B, Sq, H, R], gets the gradient of φq; it and dq are contiguous.
    """
    D, R = hopper_dim(key.shape[-1]), _rank(factors)
    block, keep = rows_choice(D, R).values()
    left = 0 if places is None else (key.shape[1] if key.ndim == 3 else places.positions) % block
    # Where all blocks end alike, what is left of the last tile may fit half of one.
    tail = block if ragged or left == 0 else max(64, triton.next_power_of_2(left))
    sums = (daL is not None) + (dy is not None)
    stages = stages_that_fit(((1 + sums) * D + R) * TILE * 2, ((1 + (dy is not None)) * D + R) * block * 2)
    k_desc, z_desc = rows_descriptor(key, block), rows_descriptor(z, HALF)
    factor_descs, shares, inverse_scale, chained = _bias_arguments(factors, (HALF, block), z.dtype, scale)
    order = even_order(*tiles, half_tiles, processors(key.device), key.device)
    _hopper_rows_kernel[(min(tiles[0] * tiles[1], processors(key.device)),)](
        z_desc, k_desc, None if dy is None else rows_descriptor(value, block),
        None if daL is None else rows_descriptor(daL, HALF), None if dy is None else rows_descriptor(dy, HALF),
        *factor_descs, None if work is None else work.items, None if work is None else work.ranges,
        folded, folded[0].numel(), parts, 0 if work is None else work.slots, cR, daR, dcR, dq, dfq,
        *dq.stride()[:3],
        order, tiles[0], heads, *_sizes(places, tokens, key), folded.shape[2], scale, log2_scale_of(scale), min_mass,
        shares, inverse_scale,
        FLASH=work is not None, Z_IS_QUERY=z.ndim == 4, KEYS_ARE_BLOCKS=key.ndim == 3,
        SUM_K=daL is not None, SUM_V=dy is not None, CHAINED=chained,
        ENTROPY_GRAD=folded.shape[0] == 3, ADD_Q=add, HAS_PARTS=parts is not None,
        STAGES=stages, BLOCK=block, BLOCK_TAIL=tail, KEEP=keep, HEAD_DIM=key.shape[-1],
        RANK=0 if dfq is None else dfq.shape[3], R=R, num_warps=4, maxnreg=168,
    )  # fmt: skip


def _rank(factors: tuple[torch.Tensor, torch.Tensor] | None) -> int:
    """Columns that factors take in shared memory."""
    return 0 if factors is None else block_dim(factors[0].shape[3])


def _bias_arguments(
    factors: tuple[torch.Tensor, torch.Tensor] | None, rows: tuple[int, int], dtype: torch.dtype, scale: float
) -> tuple[Sequence[TensorDescriptor | None], tuple[int, ...], float, bool]:
    """Descriptors for tiles of so many rows of φq and of φk, what their indices are times, 1 / scale, and CHAINED."""
    if factors is None:
        return (None, None), (0, 0, 0, 0), 1.0, False
    return *factor_descriptors(factors, rows), 1.0 / scale, divides_exactly(dtype, scale)


def _sizes(places: Places | None, tokens: int, key: torch.Tensor) -> tuple[int, ...]:
    """tokens, blocks, positions, offset and, where keys are blocks, their number."""
    if places is None:
        return tokens, 0, 0, 0, 0
    return places.tokens, places.blocks, places.positions, places.offset, key.shape[1] if key.ndim == 3 else 0


def _outer_strides(x: torch.Tensor | None) -> tuple[int, ...]:
    """Strides of the outer index, the row and the inner index of tokens [B, S, H, D] or blocks (0, G) [G, c, D]."""
    if x is None:
        return 0, 0, 0
    return x.stride()[:3] if x.ndim == 4 else (0, x.stride(1), x.stride(0))


def r_backward(
    key: torch.Tensor,
    value: torch.Tensor,
    places: Places,
    heads: int,
    scale: float,
    z: torch.Tensor,
    *,
    keys_per_key: int,
    lse: torch.Tensor,
    cL: torch.Tensor,
    daL: torch.Tensor,
    dy: torch.Tensor | None,
    dcL: torch.Tensor | None,
    delta: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cR: torch.Tensor | None,
    daR: torch.Tensor | None,
    dcR: torch.Tensor | None,
    min_mass: float,
) -> None:
    """What `RStep.backward` does; arguments are not checked.

    Args:
        key, dk: [B, S, H, D]; or pooled, [B·H·m, c, D], one key for `keys_per_key`: then dk is written.
    """
    positions = places.positions
    pooled = key.ndim == 3
    folded = fold(lse, delta, positions, scale, dcL=dcL, cL=cL, keys_per_key=keys_per_key)
    groups, keys = daL.shape[0], key.shape[1] if pooled else positions
    launch_keys(
        z, key, value, daL, dy, folded, dk, None if dy is None else dv,
        tiles=(triton.cdiv(keys, TILE), groups), heads=heads, scale=scale, places=places,
        add=(dy is None and not pooled, False), half_tiles=0 < keys % TILE <= HALF,
    )  # fmt: skip
    launch_rows(
        z, key, value, daL, dy, folded, dq, tiles=(triton.cdiv(positions, TILE), groups), heads=heads, scale=scale,
        places=places, cR=cR, daR=daR, dcR=dcR, min_mass=min_mass,
        ragged=not pooled and positions * places.blocks != places.tokens, half_tiles=0 < positions % TILE <= HALF,
    )  # fmt: skip
