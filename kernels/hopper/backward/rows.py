"""The kernel that owns rows: dz and dφq; see the package."""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from vmonarch.kernels.common.blocks import Places
from vmonarch.kernels.common.launch import block_dim
from vmonarch.kernels.common.replay import launcher
from vmonarch.kernels.common.softmax import log2_scale_of
from vmonarch.kernels.common.tiles import strided
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
    skip_keys,
    stages_that_fit,
)
from vmonarch.kernels.hopper.backward.common import (
    NOWHERE,
    SIZES,
    TILE,
    add_rows,
    allocate_all_barriers,
    bias_arguments,
    r_item,
    rank_of,
    sizes_of,
    store_factor_gradient,
)
from vmonarch.kernels.hopper.schedule import even_order

_HALF = gl.constexpr(HALF)
_TILE = gl.constexpr(TILE)
_NOWHERE = gl.constexpr(NOWHERE)


@gluon.jit
def _rows_item(item, items, numbers, FLASH: gl.constexpr, Z_IS_QUERY: gl.constexpr, KEYS_ARE_BLOCKS: gl.constexpr):
    """Where an item of the rows' kernel finds its rows and keys.

    Returns:
        (z's two outer indices, z's first row, the outer indices and first row of daL and dy, rows of the tile, number
        of the first row among all statistics, the keys' two outer indices, first key, key stop, slot of the partial
        result or -1).
    """
    items_ptr, ranges_ptr = items
    row_tiles, heads, tokens, blocks, positions, offset, keys, padded = numbers
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
        batch, head, group, token, tile = r_item(item, row_tiles, heads, blocks, positions, offset)
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
def _load_for_rows(
    z_desc, k_desc, v_desc, daL_desc, dy_desc, k_bufs, v_bufs, z_bufs, daL_bufs, dy_bufs,
    bias, kept_full, kept_empty, full, empty, items, order_ptr, numbers,
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
            item, items, numbers, FLASH, Z_IS_QUERY, KEYS_ARE_BLOCKS
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
    dz, dfq, z, daL, dy, fq, k, v, fk, shift_s, shift_dp, keys_left, done, inverse_scale, scale, log2_scale,
    SUM_K: gl.constexpr, SUM_V: gl.constexpr, FACTORS: gl.constexpr, CHAINED: gl.constexpr, MASKED: gl.constexpr,
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
    ds = p * (dp * scale + shift_dp[:, None])
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
    items, folded_ptr, statistics, part_ptr, slots, cR_ptr, daR_ptr, dcR_ptr, grad_query, dfq_ptr,
    order_ptr, numbers, scale, log2_scale, min_mass,
    FLASH: gl.constexpr, Z_IS_QUERY: gl.constexpr, KEYS_ARE_BLOCKS: gl.constexpr,
    SUM_K: gl.constexpr, SUM_V: gl.constexpr, FACTORS: gl.constexpr, CHAINED: gl.constexpr,
    ADD_Q: gl.constexpr, HAS_PARTS: gl.constexpr, STAGES: gl.constexpr,
    BLOCK: gl.constexpr, BLOCK_TAIL: gl.constexpr, KEEP: gl.constexpr, HEAD_DIM: gl.constexpr, RANK: gl.constexpr,
):  # fmt: skip
    """Consumer of the rows' kernel: dz and dφq of 64 rows."""
    fq_desc, fk_desc, fq_bufs, fk_bufs, shares, inverse_scale = bias
    _, heads, tokens, _, positions, _, _, _ = numbers
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
            item, items, numbers, FLASH, Z_IS_QUERY, KEYS_ARE_BLOCKS
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
                key_stop - key - (tiles - 1) * BLOCK, empty.index(stage),
                inverse_scale, scale, log2_scale, SUM_K, SUM_V, FACTORS, CHAINED, True,
            )  # fmt: skip
            n += 1
            shift_s = gl.convert_layout(shift_s, in_tile)
            shift_dp = gl.convert_layout(shift_dp, in_tile)
            for _ in range(1, tiles):
                stage = n % STAGES
                mbarrier.wait(full.index(stage), n // STAGES & 1)
                dz, dfq = _add_tile_for_rows(
                    dz, dfq, z, daL, dy, fq, k_bufs.index(stage), v_bufs.index(stage), fk_bufs.index(stage),
                    shift_s, shift_dp, 0, empty.index(stage), inverse_scale, scale, log2_scale,
                    SUM_K, SUM_V, FACTORS, CHAINED, False,
                )  # fmt: skip
                n += 1
            if FLASH or Z_IS_QUERY:
                if FACTORS or not KEEP:
                    mbarrier.arrive(kept_empty)
                if FACTORS:
                    store_factor_gradient(
                        dfq_ptr, grad_query, z_i, z_j, z_row, z_row + rows, dfq, inverse_scale, HEAD_DIM, RANK
                    )
                if HAS_PARTS and slot >= 0:
                    part = ((z_i * heads + z_j).to(gl.int64) * slots + slot) * _TILE + half * _HALF + i
                    columns = gl.arange(0, D, gl.SliceLayout(0, sums))
                    inside = (i < rows)[:, None] & (columns < HEAD_DIM)[None, :]
                    gl.store(part_ptr + part[:, None] * HEAD_DIM + columns[None, :], dz, mask=inside)
                else:
                    # A position before the first token or after the last holds none.
                    stop = gl.minimum(z_row + rows, tokens)
                    dq_ptr = head_of(grad_query, z_i, z_j)
                    add_rows(dq_ptr, grad_query.stride_s, z_row, stop, dz, HEAD_DIM, ADD_Q)
            else:
                # z = αR / max(cR, min_mass)
                row = z_j * positions + z_row
                at = row.to(gl.int64) + i
                cR = gl.load(cR_ptr + at, mask=i < rows, other=1.0)
                if KEEP:
                    product = gl.sum(dz * gl.convert_layout(z, sums).to(gl.float32), 1)
                else:
                    product = gl.sum(dz * z.load(sums).to(gl.float32), 1)
                    mbarrier.arrive(kept_empty)
                gl.store(dcR_ptr + at, gl.where(cR >= min_mass, -product, 0.0), mask=i < rows)
                add_rows(daR_ptr, HEAD_DIM, row, row + rows, dz, HEAD_DIM, False)
        else:
            n = skip_keys(full, empty, full, empty, n, key, key_stop, False, STAGES, BLOCK)
            mbarrier.arrive(kept_empty)
        item = next_item
        t += 1


@gluon.jit(do_not_specialize=[*SIZES, "slots", "statistics", "shares"])
def _hopper_rows_kernel(
    z_desc, k_desc, v_desc, daL_desc, dy_desc, fq_desc, fk_desc, items_ptr, ranges_ptr,
    folded_ptr, statistics, part_ptr, slots, cR_ptr, daR_ptr, dcR_ptr, grad_query, dfq_ptr,
    order_ptr, row_tiles, heads, tokens, blocks, positions, offset, keys, padded, scale, log2_scale, min_mass,
    shares, inverse_scale,
    FLASH: gl.constexpr, Z_IS_QUERY: gl.constexpr, KEYS_ARE_BLOCKS: gl.constexpr,
    SUM_K: gl.constexpr, SUM_V: gl.constexpr, CHAINED: gl.constexpr,
    ADD_Q: gl.constexpr, HAS_PARTS: gl.constexpr, STAGES: gl.constexpr,
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
    fq_bufs, fk_bufs = allocate_factors(k_bufs, R, 2, STAGES, BLOCK)
    bias = (fq_desc, fk_desc, fq_bufs, fk_bufs, shares, inverse_scale)
    kept_full, kept_empty, full, empty = allocate_all_barriers(STAGES)
    items = (items_ptr, ranges_ptr)
    numbers = (row_tiles, heads, tokens, blocks, positions, offset, keys, padded)
    gl.warp_specialize(
        [
            (_load_for_rows, (
                z_desc, k_desc, v_desc, daL_desc, dy_desc, k_bufs, v_bufs, z_bufs, daL_bufs, dy_bufs,
                bias, kept_full, kept_empty, full, empty, items, order_ptr, numbers,
                FLASH, Z_IS_QUERY, KEYS_ARE_BLOCKS, SUM_K, SUM_V, R > 0, STAGES, BLOCK,
            )) if half is None else (_sum_for_rows, (
                half, k_bufs, v_bufs, z_bufs, daL_bufs, dy_bufs, bias, kept_full, kept_empty, full, empty,
                items, folded_ptr, statistics, part_ptr, slots, cR_ptr, daR_ptr, dcR_ptr,
                grad_query, dfq_ptr, order_ptr, numbers, scale, log2_scale, min_mass,
                FLASH, Z_IS_QUERY, KEYS_ARE_BLOCKS, SUM_K, SUM_V, R > 0, CHAINED, ADD_Q, HAS_PARTS,
                STAGES, BLOCK, BLOCK_TAIL, KEEP, HEAD_DIM, RANK,
            ))
            for half in (None, 0, 1)
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip


def rows_choice(D: int, R: int = 0) -> dict[str, int]:
    """Keys of a tile, and whether the rows are kept in registers."""
    return {"block": 128 if D <= 64 and R <= 32 else 64, "keep": D <= 64}


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
    D, R = block_dim(key.shape[-1]), rank_of(factors)
    block, keep = rows_choice(D, R).values()
    left = 0 if places is None else (key.shape[1] if key.ndim == 3 else places.positions) % block
    # Where all blocks end alike, what is left of the last tile may fit half of one.
    tail = block if ragged or left == 0 else max(64, triton.next_power_of_2(left))
    sums = (daL is not None) + (dy is not None)
    stages = stages_that_fit(((1 + sums) * D + R) * TILE * 2, ((1 + (dy is not None)) * D + R) * block * 2)
    k_desc, z_desc = rows_descriptor(key, block), rows_descriptor(z, HALF)
    factor_descs, shares, inverse_scale, chained = bias_arguments(factors, (HALF, block), z.dtype, scale)
    order = even_order(*tiles, half_tiles, processors(key.device), key.device)
    launcher(_hopper_rows_kernel, (min(tiles[0] * tiles[1], processors(key.device)),))(
        z_desc, k_desc, None if dy is None else rows_descriptor(value, block),
        None if daL is None else rows_descriptor(daL, HALF), None if dy is None else rows_descriptor(dy, HALF),
        *factor_descs, None if work is None else work.items, None if work is None else work.ranges,
        folded, folded[0].numel(), parts, 0 if work is None else work.slots, cR, daR, dcR, strided(dq), dfq,
        order, tiles[0], heads, *sizes_of(places, tokens, key), folded.shape[2], scale, log2_scale_of(scale), min_mass,
        shares, inverse_scale,
        FLASH=work is not None, Z_IS_QUERY=z.ndim == 4, KEYS_ARE_BLOCKS=key.ndim == 3,
        SUM_K=daL is not None, SUM_V=dy is not None, CHAINED=chained,
        ADD_Q=add, HAS_PARTS=parts is not None,
        STAGES=stages, BLOCK=block, BLOCK_TAIL=tail, KEEP=keep, HEAD_DIM=key.shape[-1],
        RANK=0 if dfq is None else dfq.shape[3], R=R, num_warps=4, maxnreg=168,
    )  # fmt: skip
