"""The R-step on Hopper (`kernels/monarch/r_step.py` is the portable form): aL, cL and, in the last iteration, y.

A last iteration that does not update L has y alone.

Legend: B batch, S tokens, H heads, D head dim, m blocks, b positions per block, c keys of a block.
"""

from __future__ import annotations

import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from vmonarch.kernels.common.blocks import Places
from vmonarch.kernels.common.replay import launcher
from vmonarch.kernels.common.softmax import log2_scale_of
from vmonarch.kernels.flash_entropy.segments import processors
from vmonarch.kernels.hopper.attend import (
    BLOCK_M,
    HALF,
    accumulator_layout,
    allocate_tiles,
    attend_keys,
    copy_rows,
    load_keys,
    log2_partition,
    own_items,
    rows_descriptor,
    skip_keys,
    tail_of,
)
from vmonarch.kernels.hopper.gluon import async_store, reinterpret
from vmonarch.kernels.hopper.schedule import even_order

_HALF = gl.constexpr(HALF)
_BLOCK_M = gl.constexpr(BLOCK_M)


@gluon.jit
def _tile_of(tile, row_tiles, blocks, heads):
    """First row, group, block, head and batch entry of a tile of rows."""
    group = tile // row_tiles
    return tile % row_tiles * _BLOCK_M, group, group % blocks, group // blocks % heads, group // blocks // heads


@gluon.jit
def _key_range(block, tokens, positions, keys, offset, KEYS_ARE_BLOCKS: gl.constexpr):
    """First and last + 1 of the rows of the keys of a block in their tensor."""
    if KEYS_ARE_BLOCKS:
        return block * 0, keys
    else:
        start = block * positions - offset
        return gl.maximum(start, 0), gl.minimum(start + positions, tokens)


@gluon.jit
def _load(
    z_desc, k_desc, v_desc, buffers, numbers,
    LAST: gl.constexpr, Z_IS_QUERY: gl.constexpr, KEYS_ARE_BLOCKS: gl.constexpr,
    Q_STAGES: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_TAIL: gl.constexpr,
):  # fmt: skip
    """Producer: z of every tile of rows, and the keys of its block."""
    z_bufs, k_bufs, v_bufs, z_full, z_empty, _, full, empty = buffers
    order_ptr, row_tiles, heads, tokens, blocks, positions, keys, offset = numbers
    n = 0
    t = 0
    begin, end, tile = own_items(order_ptr)
    for place in range(begin, end):
        next_tile = gl.load(order_ptr + place + 1)
        row, group, block, head, batch = _tile_of(tile, row_tiles, blocks, heads)
        z_i = batch if Z_IS_QUERY else 0
        z_j = head if Z_IS_QUERY else group
        z_first = block * positions - offset if Z_IS_QUERY else 0
        k_i = 0 if KEYS_ARE_BLOCKS else batch
        k_j = group if KEYS_ARE_BLOCKS else head
        turn = t % Q_STAGES
        mbarrier.wait(z_empty.index(turn), (t // Q_STAGES & 1) ^ 1)
        barrier = z_full.index(turn)
        mbarrier.expect(barrier, 2 * z_desc.block_type.nbytes)
        for half in gl.static_range(2):
            z_row = z_first + row + half * _HALF
            copy_rows(z_desc, z_i, z_j, z_row, barrier, z_bufs.index(2 * turn + half))
        start, stop = _key_range(block, tokens, positions, keys, offset, KEYS_ARE_BLOCKS)
        n = load_keys(
            k_desc, v_desc, k_bufs, v_bufs, full, empty, full, empty, n, k_i, k_j, start, stop, None, None, 0, 0,
            LAST, False, STAGES, BLOCK_N, BLOCK_TAIL,
        )  # fmt: skip
        tile = next_tile
        t += 1


@gluon.jit
def _give_back(z_empty, t, Q_STAGES: gl.constexpr):
    """The results of the tile before have left its place in shared memory, which is free for another z now."""
    tma.store_wait(0)
    mbarrier.arrive(z_empty.index((t + Q_STAGES - 1) % Q_STAGES), pred=t > 0)


@gluon.jit
def _store_rows(desc, x, place, group, row):
    """Start the copy of rows x [64, D] of a block, by way of their place in shared memory."""
    place.store(x)
    fence_async_shared()
    async_store(desc, [0, group, row, 0], reinterpret(place, x.dtype, desc.block_type.shape, desc.layout))


@gluon.jit
def _attend(
    half: gl.constexpr, aL_desc, y_desc, bias_ptr, cL_ptr, lse_ptr, buffers, numbers, scales,
    SUM_K: gl.constexpr, LAST: gl.constexpr, KEYS_ARE_BLOCKS: gl.constexpr, BIASED: gl.constexpr,
    STORE_LSE: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_TAIL: gl.constexpr,
):  # fmt: skip
    """Consumer: one warpgroup, rows 64·half and on of every tile."""
    z_bufs, k_bufs, v_bufs, z_full, z_empty, lead, full, empty = buffers
    order_ptr, row_tiles, heads, tokens, blocks, positions, keys, offset = numbers
    log_keys, scale, log2_scale = scales
    D: gl.constexpr = k_bufs.shape[2]
    dtype: gl.constexpr = z_bufs.dtype
    layout: gl.constexpr = accumulator_layout(D)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    stats: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_N))
    n = 0
    t = 0
    begin, end, tile = own_items(order_ptr)
    for place in range(begin, end):
        next_tile = gl.load(order_ptr + place + 1)
        row, group, block, head, batch = _tile_of(tile, row_tiles, blocks, heads)
        row += half * _HALF
        start, stop = _key_range(block, tokens, positions, keys, offset, KEYS_ARE_BLOCKS)
        turn = t % Q_STAGES
        mbarrier.wait(z_full.index(turn), t // Q_STAGES & 1)
        if half == 1:
            mbarrier.wait(lead.index(turn), t // Q_STAGES & 1)
        if row < positions:
            z = z_bufs.index(2 * turn + half)
            zeros = gl.zeros([_HALF, D], gl.float32, layout)
            acc_k, acc_v = zeros, zeros
            row_max = gl.full([_HALF], -float("inf"), gl.float32, stats)
            row_sum = gl.zeros([_HALF], gl.float32, stats)
            acc_k, acc_v, row_max, row_sum, _, n = attend_keys(
                acc_k, acc_v, row_max, row_sum, row_sum, z, k_bufs, v_bufs, full, empty, full, empty,
                lead.index(turn), half == 0, n, start, stop, (bias_ptr, block * keys), None, 0, log2_scale,
                SUM_K, LAST, BIASED, False, False, False, False, STAGES, BLOCK_N, BLOCK_TAIL,
            )  # fmt: skip
            row_max = gl.convert_layout(row_max, rows)
            row_sum = gl.convert_layout(row_sum, rows)
            inverse = 1.0 / gl.where(row_sum == 0, 1.0, row_sum)
            lse = log2_partition(row_max, row_sum) * 0.6931471805599453 + log_keys
            if SUM_K:
                aL = (acc_k * inverse[:, None]).to(dtype)
                # The entropy is free (docs/attention.md, "The entropy"), here with the rounded aL.
                cL = scale * gl.sum(z.load(layout).to(gl.float32) * aL.to(gl.float32), 1) - lse
            j = row + gl.arange(0, _HALF, rows)
            at = group.to(gl.int64) * positions + j
            if SUM_K:
                gl.store(cL_ptr + at, cL, mask=j < positions)
            if STORE_LSE:
                gl.store(lse_ptr + at, lse, mask=j < positions)
            _give_back(z_empty, t, Q_STAGES)
            # The rows of z have been read: their place takes the results on the way out.
            if SUM_K:
                _store_rows(aL_desc, aL, z, group, row)
            if LAST:
                if SUM_K:
                    tma.store_wait(0)
                _store_rows(y_desc, (acc_v * inverse[:, None]).to(dtype), z, group, row)
        else:
            n = skip_keys(full, empty, full, empty, n, start, stop, False, STAGES, BLOCK_N)
            _give_back(z_empty, t, Q_STAGES)
        tile = next_tile
        t += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["row_tiles", "heads", "tokens", "blocks", "positions", "keys", "offset"])
def _hopper_r_step_kernel(
    z_desc, k_desc, v_desc, aL_desc, y_desc, bias_ptr, cL_ptr, lse_ptr,
    order_ptr, row_tiles, heads, tokens, blocks, positions, keys, offset, log_keys, scale, log2_scale,
    SUM_K: gl.constexpr, LAST: gl.constexpr, Z_IS_QUERY: gl.constexpr, KEYS_ARE_BLOCKS: gl.constexpr,
    BIASED: gl.constexpr, STORE_LSE: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_TAIL: gl.constexpr,
):  # fmt: skip
    """aL and cL (SUM_K) and y (LAST) of all blocks; a program takes one tile of rows after the other."""
    buffers = allocate_tiles(k_desc.dtype, k_desc.block_type.shape[3], LAST, Q_STAGES, STAGES, BLOCK_N)
    numbers = (order_ptr, row_tiles, heads, tokens, blocks, positions, keys, offset)
    scales = (log_keys, scale, log2_scale)
    gl.warp_specialize(
        [
            (_load, (
                z_desc, k_desc, v_desc, buffers, numbers,
                LAST, Z_IS_QUERY, KEYS_ARE_BLOCKS, Q_STAGES, STAGES, BLOCK_N, BLOCK_TAIL,
            )) if half is None else (_attend, (
                half, aL_desc, y_desc, bias_ptr, cL_ptr, lse_ptr, buffers, numbers, scales,
                SUM_K, LAST, KEYS_ARE_BLOCKS, BIASED, STORE_LSE, Q_STAGES, STAGES, BLOCK_N, BLOCK_TAIL,
            ))
            for half in (None, 0, 1)
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip


def r_step(
    z: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    aL: torch.Tensor | None,
    cL: torch.Tensor | None,
    y: torch.Tensor | None,
    lse: torch.Tensor | None,
    bias: torch.Tensor | None,
    keys_per_key: int,
    places: Places,
    heads: int,
    scale: float,
    options: dict[str, int],
) -> None:
    """One R-step; arguments are not checked.

    Args:
        z: [B, S, H, D] or [B·H·m, b, D].
        key: [B, S, H, D] or [B·H·m, c, D], pooled. value: like `key` if `y` is given, else not read.
        bias: [m, c], log2 of the number of keys that each key stands for; None if it is `keys_per_key` for each.
        aL, y: [B·H·m, b, D], at least one of them. cL, lse: [B·H·m, b], cL beside aL.
    """
    block_n = options["BLOCK_N"]
    blocks_of_keys = key.ndim == 3
    keys = key.shape[1] if blocks_of_keys else places.positions
    row_tiles = triton.cdiv(places.positions, BLOCK_M)
    half_tiles = 0 < places.positions % BLOCK_M <= HALF
    written = aL if aL is not None else y
    assert written is not None
    groups = written.shape[0]
    order = even_order(row_tiles, groups, half_tiles, processors(key.device), key.device)
    ragged = not blocks_of_keys and places.positions * places.blocks != places.tokens
    launcher(_hopper_r_step_kernel, (min(row_tiles * groups, processors(key.device)),))(
        rows_descriptor(z, HALF), rows_descriptor(key, block_n), None if y is None else rows_descriptor(value, block_n),
        None if aL is None else rows_descriptor(aL, HALF), None if y is None else rows_descriptor(y, HALF),
        bias, cL, lse,
        order, row_tiles, heads, places.tokens, places.blocks, places.positions, keys, places.offset,
        math.log(keys_per_key), scale, log2_scale_of(scale),
        SUM_K=aL is not None, LAST=y is not None, Z_IS_QUERY=z.ndim == 4, KEYS_ARE_BLOCKS=blocks_of_keys,
        BIASED=bias is not None, STORE_LSE=lse is not None, **options,
        BLOCK_TAIL=0 if ragged else tail_of(keys, block_n), num_warps=4, maxnreg=168,
    )  # fmt: skip
