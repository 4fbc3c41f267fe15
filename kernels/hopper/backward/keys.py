"""The kernel that owns keys: dk, dv and dφk; see the package."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from vmonarch.kernels.common.blocks import Places
from vmonarch.kernels.common.launch import block_dim
from vmonarch.kernels.common.replay import launcher
from vmonarch.kernels.common.softmax import log2_scale_of
from vmonarch.kernels.common.tiles import Strided, strided
from vmonarch.kernels.flash_entropy.segments import Work, processors
from vmonarch.kernels.hopper.attend import (
    HALF,
    accumulator_layout,
    allocate_factors,
    begin_scores,
    copy_rows,
    divide_by_scale,
    head_of,
    operand_layout,
    own_items,
    rows_descriptor,
    shared_layout,
    stages_that_fit,
)
from vmonarch.kernels.hopper.backward.common import (
    NOWHERE,
    SIZES,
    TILE,
    add_rows,
    allocate_all_barriers,
    bias_arguments,
    folded_descriptor,
    r_item,
    rank_of,
    sizes_of,
    store_factor_gradient,
)
from vmonarch.kernels.hopper.gluon import async_load
from vmonarch.kernels.hopper.schedule import even_order

_HALF = gl.constexpr(HALF)
_NOWHERE = gl.constexpr(NOWHERE)


@gluon.jit
def _keys_item(item, items, numbers, FLASH: gl.constexpr, Z_IS_QUERY: gl.constexpr, KEYS_ARE_BLOCKS: gl.constexpr):
    """Where an item of the keys' kernel finds its keys and rows.

    Returns:
        (the keys' two outer indices, first key of the tile, key stop, z's two outer indices, z's first row, the outer
        indices and first row of daL and dy, rows, number of the first row among all statistics).
    """
    items_ptr, ranges_ptr = items
    row_tiles, heads, tokens, blocks, positions, offset, keys, padded = numbers
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
        batch, head, group, token, tile = r_item(item, row_tiles, heads, blocks, positions, offset)
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
def _load_for_keys(
    z_desc, k_desc, v_desc, daL_desc, dy_desc, folded_desc, k_bufs, v_bufs, z_bufs, daL_bufs, dy_bufs, folded_bufs,
    bias, kept_full, kept_empty, full, empty, items, order_ptr, numbers,
    FLASH: gl.constexpr, Z_IS_QUERY: gl.constexpr, KEYS_ARE_BLOCKS: gl.constexpr,
    SUM_K: gl.constexpr, SUM_V: gl.constexpr, FACTORS: gl.constexpr,
    STAGES: gl.constexpr, BLOCK: gl.constexpr,
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
            item, items, numbers, FLASH, Z_IS_QUERY, KEYS_ARE_BLOCKS
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
            mbarrier.expect(barrier, of_rows + of_row_factors + 2 * BLOCK * 4)
            copy_rows(z_desc, z_i, z_j, z_row + first, barrier, z_bufs.index(stage))
            if SUM_K:
                copy_rows(daL_desc, g_i, g_j, g_row + first, barrier, daL_bufs.index(stage))
            if SUM_V:
                copy_rows(dy_desc, g_i, g_j, g_row + first, barrier, dy_bufs.index(stage))
            if FACTORS:
                copy_rows(fq_desc, z_i * fq_batch, z_j * fq_head, z_row + first, barrier, fq_bufs.index(stage))
            for i in gl.static_range(2):
                async_load(folded_desc, [i, first_row + first], barrier, folded_bufs.index(2 * stage + i))
            n += 1
        item = next_item
        t += 1


@gluon.jit
def _sum_for_keys(
    half: gl.constexpr, k_bufs, v_bufs, z_bufs, daL_bufs, dy_bufs, folded_bufs, bias, kept_full, kept_empty, full,
    empty, items, grad_key, grad_value, dfk_ptr, order_ptr, numbers, scale, log2_scale,
    FLASH: gl.constexpr, Z_IS_QUERY: gl.constexpr, KEYS_ARE_BLOCKS: gl.constexpr,
    SUM_K: gl.constexpr, SUM_V: gl.constexpr, FACTORS: gl.constexpr, CHAINED: gl.constexpr,
    ADD_K: gl.constexpr, ADD_V: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr,
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
            item, items, numbers, FLASH, Z_IS_QUERY, KEYS_ARE_BLOCKS
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
                shift = folded_bufs.index(2 * stage).load(layout)
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
                shift = folded_bufs.index(2 * stage + 1).load(layout)
                dp = warpgroup_mma_wait(SUM_K + SUM_V, [dp])
                ds = p * (dp * scale + shift)
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
            add_rows(head_of(grad_key, k_i, k_j), grad_key.stride_s, key, key_stop, dk, HEAD_DIM, ADD_K)
            if SUM_V:
                add_rows(head_of(grad_value, k_i, k_j), grad_value.stride_s, key, key_stop, dv, HEAD_DIM, ADD_V)
            if FACTORS:
                store_factor_gradient(dfk_ptr, grad_key, k_i, k_j, key, key_stop, dfk, inverse_scale, HEAD_DIM, RANK)
        else:
            for _ in range(0, rows, BLOCK):
                mbarrier.wait(full.index(n % STAGES), n // STAGES & 1)
                mbarrier.arrive(empty.index(n % STAGES))
                n += 1
            mbarrier.arrive(kept_empty)
        item = next_item
        t += 1


@gluon.jit(do_not_specialize=[*SIZES, "shares"])
def _hopper_keys_kernel(
    z_desc, k_desc, v_desc, daL_desc, dy_desc, fq_desc, fk_desc, folded_desc, items_ptr, ranges_ptr,
    grad_key, grad_value, dfk_ptr, order_ptr, row_tiles, heads, tokens, blocks, positions, offset, keys, padded,
    scale, log2_scale, shares, inverse_scale,
    FLASH: gl.constexpr, Z_IS_QUERY: gl.constexpr, KEYS_ARE_BLOCKS: gl.constexpr,
    SUM_K: gl.constexpr, SUM_V: gl.constexpr, CHAINED: gl.constexpr,
    ADD_K: gl.constexpr, ADD_V: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr,
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
    folded_bufs = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, BLOCK], folded_desc.layout)
    fk_bufs, fq_bufs = allocate_factors(z_bufs, R, 2, STAGES, BLOCK)
    bias = (fq_desc, fk_desc, fq_bufs, fk_bufs, shares, inverse_scale)
    kept_full, kept_empty, full, empty = allocate_all_barriers(STAGES)
    items = (items_ptr, ranges_ptr)
    numbers = (row_tiles, heads, tokens, blocks, positions, offset, keys, padded)
    gl.warp_specialize(
        [
            (_load_for_keys, (
                z_desc, k_desc, v_desc, daL_desc, dy_desc, folded_desc,
                k_bufs, v_bufs, z_bufs, daL_bufs, dy_bufs, folded_bufs,
                bias, kept_full, kept_empty, full, empty, items, order_ptr, numbers,
                FLASH, Z_IS_QUERY, KEYS_ARE_BLOCKS, SUM_K, SUM_V, R > 0, STAGES, BLOCK,
            )) if half is None else (_sum_for_keys, (
                half, k_bufs, v_bufs, z_bufs, daL_bufs, dy_bufs, folded_bufs, bias, kept_full, kept_empty, full, empty,
                items, grad_key, grad_value, dfk_ptr, order_ptr, numbers, scale, log2_scale,
                FLASH, Z_IS_QUERY, KEYS_ARE_BLOCKS, SUM_K, SUM_V, R > 0, CHAINED, ADD_K, ADD_V, STAGES,
                BLOCK, KEEP, HEAD_DIM, RANK,
            ))
            for half in (None, 0, 1)
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
    D = block_dim(key.shape[-1])
    R = rank_of(factors)
    block, keep = keys_choice(D, dy is not None, R).values()
    sums = (daL is not None) + (dy is not None)
    stage = ((1 + sums) * D + R) * block * 2 + 2 * block * 4
    stages = stages_that_fit(((1 + (dy is not None)) * D + R) * TILE * 2, stage)
    k_desc, z_desc = rows_descriptor(key, HALF), rows_descriptor(z, block)
    factor_descs, shares, inverse_scale, chained = bias_arguments(factors, (block, HALF), z.dtype, scale)
    order = even_order(*tiles, half_tiles, processors(key.device), key.device)
    launcher(_hopper_keys_kernel, (min(tiles[0] * tiles[1], processors(key.device)),))(
        z_desc, k_desc, None if dy is None else rows_descriptor(value, HALF),
        None if daL is None else rows_descriptor(daL, block), None if dy is None else rows_descriptor(dy, block),
        *factor_descs, folded_descriptor(folded, block),
        None if work is None else work.items, None if work is None else work.ranges,
        _rows_of(dk), _rows_of(dv), dfk,
        order, tiles[0], heads, *sizes_of(places, tokens, key), folded.shape[2], scale, log2_scale_of(scale),
        shares, inverse_scale,
        FLASH=work is not None, Z_IS_QUERY=z.ndim == 4, KEYS_ARE_BLOCKS=key.ndim == 3,
        SUM_K=daL is not None, SUM_V=dy is not None, CHAINED=chained,
        ADD_K=add[0], ADD_V=add[1], STAGES=stages, BLOCK=block, KEEP=keep,
        HEAD_DIM=key.shape[-1], RANK=0 if dfk is None else dfk.shape[3], R=R, num_warps=4, maxnreg=168,
    )  # fmt: skip


def _rows_of(x: torch.Tensor | None) -> Strided | None:
    """Tokens [B, S, H, D], or the blocks [G, c, D] as those of one sample, with a head for each."""
    return strided(x) if x is None or x.ndim == 4 else Strided(x, 0, x.stride(1), x.stride(0))
