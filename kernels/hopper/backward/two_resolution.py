"""Backward of attention in two resolutions; see the package. `two_resolution/kernels.py` has the portable form.

The kernel that owns queries takes tiles of 128 queries with their lists of keys, by the producer of the forward pass.
The kernel that owns keys takes two tiles of 64 keys at a time, one for each warpgroup, with their lists of queries, of
which a step takes half a tile; they are paired by the lengths of these lists. Means are left to
`two_resolution_means_kernel`.

Legend: n tiles of queries, m tiles of keys.
"""

from __future__ import annotations

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from vmonarch.kernels.common.launch import block_dim, unspecialised
from vmonarch.kernels.common.replay import launcher
from vmonarch.kernels.common.softmax import log2_scale_of
from vmonarch.kernels.flash_entropy.segments import processors
from vmonarch.kernels.hopper.attend import (
    BLOCK_M,
    HALF,
    accumulator_layout,
    allocate_tiles,
    operand_layout,
    shared_layout,
)
from vmonarch.kernels.hopper.backward.common import NOWHERE, allocate_all_barriers, folded_descriptor
from vmonarch.kernels.hopper.gluon import async_load
from vmonarch.kernels.hopper.two_resolution import (
    copy_tile,
    in_video,
    key_box,
    launch_of,
    load_tiles,
    parts_of,
    plain_tiling,
    store_rows,
    tile_boxes,
    tiles_of_part,
    token_of,
    two_resolution_fits,
    video_descriptor,
)
from vmonarch.kernels.two_resolution.tiling import Tiling

_HALF = gl.constexpr(HALF)
_TILE = gl.constexpr(BLOCK_M)
_NOWHERE = gl.constexpr(NOWHERE)
# Keys of a block of the kernel that owns queries, and of a tile of the one that owns keys.
BLOCK_N = HALF
_QUERIES_STAGES, _KEYS_STAGES = 4, 2


@gluon.constexpr_function
def _lines_layout(columns):
    """Registers of [64, columns], 16 bytes of a row in each thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def _sum_for_queries(
    half: gl.constexpr, number_ptr, box_ptr, out_ptr, lse_ptr, dlse_ptr, delta_ptr, folded_ptr, dq_ptr, do_bufs,
    buffers, bias_bufs, numbers, S, all_rows, rows, columns, scale, log2_scale, D: gl.constexpr, REST: gl.constexpr,
    FULL: gl.constexpr, BOX: gl.constexpr, SECOND: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer of the queries' kernel: dq of half of the places of every tile, or of a part of its keys."""
    q_bufs, k_bufs, v_bufs, q_full, q_empty, lead, full, empty = buffers
    H, items, width, queries, tiles, all_means = numbers
    N: gl.constexpr = k_bufs.shape[1]
    BLOCK_D: gl.constexpr = k_bufs.shape[2]
    layout: gl.constexpr = accumulator_layout(N)
    stats: gl.constexpr = gl.SliceLayout(1, layout)
    lines: gl.constexpr = _lines_layout(BLOCK_D)
    place = 0
    t = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        at = item // PARTS
        part = item % PARTS
        first_tile, number = tiles_of_part(at, part, number_ptr, all_means, N, PARTS)
        bh = at // queries
        own_ptr = box_ptr + at % queries * 8
        mbarrier.wait(q_full.index(0), t & 1)
        q = q_bufs.index(half)
        do = do_bufs.index(half)

        i = gl.arange(0, _HALF, gl.SliceLayout(1, lines))
        token, there = token_of(i, half, own_ptr, rows, columns, BOX, SECOND)
        dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, lines))
        row = (bh // H).to(gl.int64) * S * H + bh % H
        out_at = (row + token.to(gl.int64) * H)[:, None] * D + dims[None, :]
        out = gl.load(out_ptr + out_at, mask=there[:, None] & (dims < D)[None, :], other=0.0)
        delta = gl.sum(do.load(lines).to(gl.float32) * out.to(gl.float32), 1)
        delta = gl.convert_layout(delta, stats)
        i = gl.arange(0, _HALF, stats)
        token, there = token_of(i, half, own_ptr, rows, columns, BOX, SECOND)
        stat = bh.to(gl.int64) * S + token
        if dlse_ptr is not None:
            delta -= gl.load(dlse_ptr + stat, mask=there, other=0.0)
        lse = gl.load(lse_ptr + stat, mask=there, other=-float("inf"))
        shift_s = gl.where(lse == -float("inf"), _NOWHERE, -1.4426950408889634 * lse)
        shift_dp = -scale * delta
        # The other parts would write the same.
        first = part == 0
        gl.store(delta_ptr + stat, delta, mask=there & first)
        fold = folded_ptr + (at * _TILE + half * _HALF).to(gl.int64) + i
        gl.store(fold, shift_s, mask=(i >= 0) & first)
        gl.store(fold + items // PARTS * _TILE, shift_dp, mask=(i >= 0) & first)

        dq = gl.zeros([_HALF, BLOCK_D], gl.float32, accumulator_layout(BLOCK_D))
        means = gl.where(first, (all_means + N - 1) // N, 0)
        # A tile of keys is a block.
        for block in range(means + number):
            stage = place % STAGES
            mbarrier.wait(full.index(stage), place // STAGES & 1)
            k = k_bufs.index(stage)
            zero = gl.zeros([_HALF, N], gl.float32, layout)
            scores = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            dp = warpgroup_mma(do, v_bufs.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(1, [scores])
            log2_p = scores * log2_scale + shift_s[:, None]
            if REST or not FULL:
                bias = bias_bufs.index(stage).load(gl.SliceLayout(0, layout))
                # Tokens of full tiles have none.
                log2_p += (gl.where(block < means, bias, 0.0) if FULL else bias)[None, :]
            p = gl.exp2(log2_p)
            dp = warpgroup_mma_wait(0, [dp])
            ds = p * (dp * scale + shift_dp[:, None])
            ds = gl.convert_layout(ds.to(k.dtype), operand_layout(N))
            dq = warpgroup_mma(ds, k, dq, is_async=True)
            dq = warpgroup_mma_wait(0, [dq])
            mbarrier.arrive(empty.index(stage))
            place += 1
        mbarrier.arrive(q_empty.index(0))
        dq = dq.to(dq_ptr.dtype.element_ty)
        store_rows(dq_ptr, dq, part * all_rows + row, H, half, own_ptr, rows, columns, D, BOX, SECOND)
        t += 1


@gluon.jit(do_not_specialize=["H", "items", "width", "S", "all_rows"])
def _hopper_two_resolution_queries_kernel(
    q_desc, do_desc, k_desc, v_desc, k_mean_desc, v_mean_desc, gain_ptr, list_ptr, number_ptr, there_ptr, box_ptr,
    out_ptr, lse_ptr, dlse_ptr, delta_ptr, folded_ptr, dq_ptr, tiling, H, items, width, S, all_rows, scale, log2_scale,
    D: gl.constexpr, REST: gl.constexpr, FULL: gl.constexpr, BOX: gl.constexpr, SECOND: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """dq [PARTS, B, S, H, D] of all tiles of queries, δ [B, H, S], and the folded statistics [2, B·H·n·128]."""
    n = plain_tiling(tiling)
    queries = n.queries_t * n.queries_h * n.queries_w
    tiles = n.tiles_t * n.tiles_h * n.tiles_w
    all_means = tiles if REST else tiles * 0
    numbers = (H, items, width, queries, tiles, all_means)
    BIASED: gl.constexpr = REST or not FULL
    BLOCK_D: gl.constexpr = q_desc.block_type.shape[4]
    buffers = allocate_tiles(k_desc.dtype, BLOCK_D, True, 1, STAGES, BLOCK_N, 129 if BIASED else 1, LEAD=False)
    do_bufs = gl.allocate_shared_memory(k_desc.dtype, [2, _HALF, BLOCK_D], shared_layout(BLOCK_D))
    shared: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    bias_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], shared)
    gl.warp_specialize(
        [
            (load_tiles, (
                q_desc, do_desc, k_desc, v_desc, k_mean_desc, v_mean_desc, gain_ptr, list_ptr, number_ptr, there_ptr,
                do_bufs, buffers, bias_bufs, n, numbers, REST, FULL, SECOND, BLOCK_N, PARTS, 1, STAGES, BLOCK_N,
            )) if half is None else (_sum_for_queries, (
                half, number_ptr, box_ptr, out_ptr, lse_ptr, dlse_ptr, delta_ptr, folded_ptr, dq_ptr, do_bufs, buffers,
                bias_bufs, numbers, S, all_rows, n.rows, n.columns, scale, log2_scale, D, REST, FULL, BOX, SECOND,
                PARTS, STAGES,
            ))
            for half in (None, 0, 1)
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip


@gluon.jit
def _own_tile(order_ptr, number_ptr, item, pairs, tiles, half: gl.constexpr):
    """The tile of keys that a warpgroup takes, or -1, its place in [B·H, m], and how many tiles of queries it has."""
    bh = item // pairs
    tile = gl.load(order_ptr + 2 * item + half)
    at = bh * tiles + gl.maximum(tile, 0)
    return tile, at, gl.where(tile < 0, 0, gl.load(number_ptr + at))


@gluon.jit
def _load_for_keys(
    q_desc, do_desc, k_desc, v_desc, folded_desc, list_ptr, number_ptr, order_ptr, query_box_ptr, q_bufs, do_bufs,
    k_bufs, v_bufs, folded_bufs, kept_full, kept_empty, full, empty, n, numbers, SECOND: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Producer of the keys' kernel: two tiles of keys, and the halves of tiles of queries that attend to each."""
    H, items, pairs, queries, tiles = numbers
    kept_bytes: gl.constexpr = 4 * _HALF * k_bufs.shape[2] * 2
    place = 0
    t = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        bh = item // pairs
        b = bh // H
        h = bh % H
        mbarrier.wait(kept_empty, (t & 1) ^ 1)
        mbarrier.expect(kept_full, kept_bytes)
        steps = item * 0
        for half in gl.static_range(2):
            tile, _, number = _own_tile(order_ptr, number_ptr, item, pairs, tiles, half)
            copy_tile(k_desc, b, h, gl.maximum(tile, 0), n, kept_full, k_bufs.index(half), 0)
            copy_tile(v_desc, b, h, gl.maximum(tile, 0), n, kept_full, v_bufs.index(half), 0)
            steps = gl.maximum(steps, 2 * number)
        for step in range(steps):
            stage = place % STAGES
            mbarrier.wait(empty.index(stage), (place // STAGES & 1) ^ 1)
            barrier = full.index(stage)
            mbarrier.expect(barrier, 4 * q_desc.block_type.nbytes + 4 * _HALF * 4)
            second = step % 2
            for half in gl.static_range(2):
                # What the shorter list lacks is its last tile again, of which nothing is used.
                _, at, number = _own_tile(order_ptr, number_ptr, item, pairs, tiles, half)
                entry = gl.maximum(gl.minimum(step // 2, number - 1), 0)
                query = gl.load(list_ptr + gl.to_tensor(at).to(gl.int64) * queries + entry).to(gl.int32)
                query = gl.where(number > 0, query, 0)
                own_ptr = query_box_ptr + query * 8
                frame = b * n.query_frames + gl.load(own_ptr) + second * SECOND[0]
                row = gl.load(own_ptr + 1) + second * SECOND[1]
                column = gl.load(own_ptr + 2) + second * SECOND[2]
                own = 2 * stage + half
                box = [frame, row, column, h, 0]
                async_load(q_desc, box, barrier, in_video(q_bufs.index(own), q_desc))
                async_load(do_desc, box, barrier, in_video(do_bufs.index(own), do_desc))
                for statistic in gl.static_range(2):
                    first = (bh * queries + query) * _TILE + second * _HALF
                    async_load(folded_desc, [statistic, first], barrier, folded_bufs.index(2 * own + statistic))
            place += 1
        t += 1


@gluon.jit
def _sum_for_keys(
    half: gl.constexpr, number_ptr, order_ptr, box_ptr, log2_number_ptr, dk_mean_ptr, dv_mean_ptr, dk_ptr, dv_ptr,
    q_bufs, do_bufs, k_bufs, v_bufs, folded_bufs, kept_full, kept_empty, full, empty, numbers, all_keys, rows, columns,
    scale, log2_scale, D: gl.constexpr, REST: gl.constexpr, ADD: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer of the keys' kernel: dk and dv of one tile. Scores are transposed, [keys, queries]."""
    H, items, pairs, queries, tiles = numbers
    BLOCK_D: gl.constexpr = k_bufs.shape[2]
    dtype: gl.constexpr = k_bufs.dtype
    layout: gl.constexpr = accumulator_layout(_HALF)
    operand: gl.constexpr = operand_layout(_HALF)
    sums: gl.constexpr = accumulator_layout(BLOCK_D)
    place = 0
    t = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, _, others = _own_tile(order_ptr, number_ptr, item, pairs, tiles, 1 - half)
        tile, at, number = _own_tile(order_ptr, number_ptr, item, pairs, tiles, half)
        mbarrier.wait(kept_full, t & 1)
        k = k_bufs.index(half)
        v = v_bufs.index(half)
        dk = gl.zeros([_HALF, BLOCK_D], gl.float32, sums)
        dv = gl.zeros([_HALF, BLOCK_D], gl.float32, sums)
        for _ in range(2 * number):
            stage = place % STAGES
            mbarrier.wait(full.index(stage), place // STAGES & 1)
            q = q_bufs.index(2 * stage + half)
            do = do_bufs.index(2 * stage + half)
            zero = gl.zeros([_HALF, _HALF], gl.float32, layout)
            scores = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(1, [scores])
            statistics = 2 * (2 * stage + half)
            p = gl.exp2(scores * log2_scale + folded_bufs.index(statistics).load(layout))
            dv = warpgroup_mma(gl.convert_layout(p.to(dtype), operand), do, dv, is_async=True)
            shift_dp = folded_bufs.index(statistics + 1).load(layout)
            dp = warpgroup_mma_wait(1, [dp])
            ds = p * (dp * scale + shift_dp)
            dk = warpgroup_mma(gl.convert_layout(ds.to(dtype), operand), q, dk, is_async=True)
            dk, dv = warpgroup_mma_wait(0, [dk, dv])
            mbarrier.arrive(empty.index(stage))
            place += 1
        for _ in range(2 * number, 2 * others):
            mbarrier.wait(full.index(place % STAGES), place // STAGES & 1)
            mbarrier.arrive(empty.index(place % STAGES))
            place += 1
        mbarrier.arrive(kept_empty)

        bh = item // pairs
        own_ptr = box_ptr + gl.maximum(tile, 0) * 8
        token, there = token_of(gl.arange(0, _HALF, gl.SliceLayout(1, sums)), 0, own_ptr, rows, columns, BOX, BOX)
        there = there & (tile >= 0)
        dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, sums))
        if REST:
            # Every token has its part of the gradient of the tile's means.
            share = gl.exp2(-gl.load(log2_number_ptr + bh // H * tiles + gl.maximum(tile, 0)))
            mean = gl.to_tensor(at).to(gl.int64) * D + dims
            dk += (share * gl.load(dk_mean_ptr + mean, mask=dims < D, other=0.0))[None, :]
            dv += (share * gl.load(dv_mean_ptr + mean, mask=dims < D, other=0.0))[None, :]
        row = (bh // H).to(gl.int64) * all_keys + token
        pointers = (row * H + bh % H)[:, None] * D + dims[None, :]
        inside = there[:, None] & (dims < D)[None, :]
        if ADD:
            dk += gl.load(dk_ptr + pointers, mask=inside, other=0.0).to(gl.float32)
        gl.store(dk_ptr + pointers, dk.to(dtype), mask=inside)
        if ADD:
            dv += gl.load(dv_ptr + pointers, mask=inside, other=0.0).to(gl.float32)
        gl.store(dv_ptr + pointers, dv.to(dtype), mask=inside)
        t += 1


@gluon.jit(do_not_specialize=["H", "items", "pairs", "all_keys"])
def _hopper_two_resolution_keys_kernel(
    q_desc, do_desc, k_desc, v_desc, folded_desc, list_ptr, number_ptr, order_ptr, query_box_ptr, box_ptr,
    log2_number_ptr, dk_mean_ptr, dv_mean_ptr, dk_ptr, dv_ptr, tiling, H, items, pairs, all_keys, scale, log2_scale,
    D: gl.constexpr, REST: gl.constexpr, ADD: gl.constexpr, BOX: gl.constexpr, SECOND: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Write, or ADD to, dk and dv [B, T·H·W, H, D] of all tiles of keys, two at a time."""
    n = plain_tiling(tiling)
    queries = n.queries_t * n.queries_h * n.queries_w
    tiles = n.tiles_t * n.tiles_h * n.tiles_w
    numbers = (H, items, pairs, queries, tiles)
    BLOCK_D: gl.constexpr = q_desc.block_type.shape[4]
    dtype: gl.constexpr = k_desc.dtype
    layout: gl.constexpr = shared_layout(BLOCK_D)
    k_bufs = gl.allocate_shared_memory(dtype, [2, _HALF, BLOCK_D], layout)
    v_bufs = gl.allocate_shared_memory(dtype, [2, _HALF, BLOCK_D], layout)
    q_bufs = gl.allocate_shared_memory(dtype, [2 * STAGES, _HALF, BLOCK_D], layout)
    do_bufs = gl.allocate_shared_memory(dtype, [2 * STAGES, _HALF, BLOCK_D], layout)
    folded_bufs = gl.allocate_shared_memory(gl.float32, [4 * STAGES, 1, _HALF], folded_desc.layout)
    kept_full, kept_empty, full, empty = allocate_all_barriers(STAGES)
    gl.warp_specialize(
        [
            (_load_for_keys, (
                q_desc, do_desc, k_desc, v_desc, folded_desc, list_ptr, number_ptr, order_ptr, query_box_ptr, q_bufs,
                do_bufs, k_bufs, v_bufs, folded_bufs, kept_full, kept_empty, full, empty, n, numbers, SECOND, STAGES,
            )) if half is None else (_sum_for_keys, (
                half, number_ptr, order_ptr, box_ptr, log2_number_ptr, dk_mean_ptr, dv_mean_ptr, dk_ptr, dv_ptr, q_bufs,
                do_bufs, k_bufs, v_bufs, folded_bufs, kept_full, kept_empty, full, empty, numbers, all_keys, n.rows,
                n.columns, scale, log2_scale, D, REST, ADD, BOX, STAGES,
            ))
            for half in (None, 0, 1)
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip


def backward_fits(tiling: Tiling, *tensors: torch.Tensor) -> bool:
    """Whether these kernels take such tiles and tensors [B, S, H, D] that `hopper_fits`."""
    box = key_box(tiling)
    return box is not None and math.prod(box) == BLOCK_N and two_resolution_fits(tiling, *tensors)


def launch_queries(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_mean: torch.Tensor | None,
    v_mean: torch.Tensor | None,
    gain: torch.Tensor | None,
    lists: torch.Tensor,
    number: torch.Tensor,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_lse: torch.Tensor | None,
    delta: torch.Tensor,
    *,
    tiling: Tiling,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write δ [B, H, S]; returns dq and, for `launch_keys`, the folded statistics [2, B·H·n·128].

    Args:
        query, …, number: as `hopper.two_resolution.two_resolution`.
        grad_out: [B, S, H, D]. out: the same, contiguous. lse, grad_lse: [B, H, S], contiguous.
    """
    B, S, H, D = query.shape
    launch = launch_of(tiling)
    width, means = lists.shape[3], 0 if k_mean is None else k_mean.shape[1]
    parts = parts_of(number.numel(), width * BLOCK_N + means, processors(query.device))
    items = parts * number.numel()
    dq = query.new_empty(parts, B, S, H, D, dtype=query.dtype if parts == 1 else torch.float32)
    folded = lse.new_empty(2, number.numel() * BLOCK_M)
    launcher(_hopper_two_resolution_queries_kernel, (min(items, processors(query.device)),))(
        *(video_descriptor(x, tiling.of_queries, launch.half, block_dim(D)) for x in (query, grad_out)),
        *launch.of_keys(key, value, k_mean, v_mean, BLOCK_N), gain, lists, number,
        launch.there(query.device), tile_boxes(tiling.of_queries, query.device), out, lse, grad_lse, delta, folded, dq,
        unspecialised(tiling), H, items, width, S, B * S * H, scale, log2_scale_of(scale),
        D=D, REST=k_mean is not None, FULL=launch.full, BOX=launch.half, SECOND=launch.second,
        PARTS=parts, STAGES=_QUERIES_STAGES, BLOCK_N=BLOCK_N, num_warps=4, maxnreg=168,
    )  # fmt: skip
    return (dq[0] if parts == 1 else dq.sum(0).to(query.dtype)), folded


def launch_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log2_number: torch.Tensor | None,
    lists: torch.Tensor,
    number: torch.Tensor,
    grad_out: torch.Tensor,
    folded: torch.Tensor,
    dk_mean: torch.Tensor | None,
    dv_mean: torch.Tensor | None,
    dk: torch.Tensor,
    dv: torch.Tensor,
    *,
    tiling: Tiling,
    scale: float,
    add: bool,
) -> None:
    """Write, or add to, dk and dv [B, T·H·W, H, D], contiguous.

    Args:
        lists, number: [B, H, m, n] and [B, H, m], the tiles of queries that every tile of keys is exact for.
        log2_number, dk_mean, dv_mean: as the portable kernel takes them; None without the rest.
    """
    _, N, H, D = key.shape
    launch = launch_of(tiling)
    # Tiles with lists of about the same length, the longest first.
    order = number.flatten(0, 1).argsort(-1, descending=True).to(torch.int32)
    if tiling.tiles % 2:
        order = torch.nn.functional.pad(order, (0, 1), value=-1)
    items, pairs = order.numel() // 2, order.shape[1] // 2
    launcher(_hopper_two_resolution_keys_kernel, (min(items, processors(key.device)),))(
        *(video_descriptor(x, tiling.of_queries, launch.half, block_dim(D)) for x in (query, grad_out)),
        *launch.of_keys(key, value)[:2], folded_descriptor(folded, HALF),
        lists, number, order, *(tile_boxes(cut, key.device) for cut in (tiling.of_queries, tiling)),
        log2_number, dk_mean, dv_mean, dk, dv,
        unspecialised(tiling), H, items, pairs, N, scale, log2_scale_of(scale), D=D, REST=log2_number is not None,
        ADD=add, BOX=launch.keys, SECOND=launch.second, STAGES=_KEYS_STAGES, num_warps=4, maxnreg=168,
    )  # fmt: skip
