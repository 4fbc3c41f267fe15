"""Attention in two resolutions on Hopper, forward (`kernels/two_resolution/kernels.py` is the portable form).

A program takes one tile of 128 queries after the other. The copy engine brings its exact tiles of keys from where they
lie, each a box of the video whose edges are powers of two; several of them make up a block of BLOCK_N keys.

Legend: B batch, S tokens, H heads, D head dim, which is that of the values too; n tiles of queries, m tiles of keys.
PLACES: of a box of keys, of which a ragged tile leaves some empty.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vmonarch.kernels.common.constants import kept
from vmonarch.kernels.common.launch import block_dim, launch_options, tma_strides, unspecialised
from vmonarch.kernels.common.replay import launcher
from vmonarch.kernels.common.softmax import log2_scale_of
from vmonarch.kernels.flash_entropy.forward import COMBINE_ROWS, combine_parts
from vmonarch.kernels.flash_entropy.segments import device_table, processors
from vmonarch.kernels.hopper.attend import (
    BLOCK_M,
    HALF,
    accumulator_layout,
    allocate_tiles,
    attend_keys,
    copy_rows,
    log2_partition,
    rows_descriptor,
    shared_layout,
)
from vmonarch.kernels.hopper.gluon import async_load, async_load_numbers, reinterpret
from vmonarch.kernels.two_resolution.kernels import GAINS, plain
from vmonarch.kernels.two_resolution.tiling import Box, Tiling, tile_layout

_HALF = gl.constexpr(HALF)
# Parts that the keys of a tile of queries may be cut into: the producer has no registers for other divisors.
_PARTS = (1, 2, 4, 8)
# What a part of its keys costs a tile of queries, and what it costs to merge it, in blocks of 128 keys.
_PART_COST, _MERGE_COST = 2, 2
# Columns of a tile that the copy engine brings at a time: they are one row of the swizzled shared memory.
_COLUMNS = 64

plain_tiling = gluon.jit(plain.fn)


@gluon.jit
def _start(place, length, parts):
    """Where part `place` of an axis begins that is cut evenly."""
    return place * length // parts


@gluon.jit
def _place_of(tile, tiles_h, tiles_w):
    """Along each axis, which of the tiles this is."""
    return tile // (tiles_h * tiles_w), tile // tiles_w % tiles_h, tile % tiles_w


@gluon.jit
def tiles_of_part(at, part, number_ptr, all_means, PLACES: gl.constexpr, PARTS: gl.constexpr):
    """First exact tile of a part of the keys, and how many; the first part has all means, and fewer tiles for it."""
    number = gl.load(number_ptr + at)
    if PARTS == 1:
        return number * 0, number
    else:
        means = all_means // PLACES
        first = gl.maximum(part * (number + means) // PARTS - means, 0)
        return first, gl.maximum((part + 1) * (number + means) // PARTS - means, 0) - first


@gluon.jit
def in_video(buffer, desc):
    """Rows of shared memory as the box of the video that a descriptor brings."""
    return reinterpret(buffer, desc.dtype, desc.block_type.shape, desc.layout)


@gluon.jit
def copy_tile(desc, b, h, tile, n, barrier, buffer, place: gl.constexpr):
    """Start the copies of a tile of keys into the rows of its place in `buffer` [BLOCK_N, D]."""
    box: gl.constexpr = desc.block_type.shape
    PLACES: gl.constexpr = box[0] * box[1] * box[2]
    tiles: gl.constexpr = buffer.shape[0] // PLACES
    parts: gl.constexpr = buffer.shape[1] // box[4]
    # The columns of a block lie in parts, and in each the rows one after the other.
    rows = reinterpret(buffer, desc.dtype, [parts * tiles, PLACES, box[4]], shared_layout(box[4]))
    i, j, k = _place_of(tile, n.tiles_h, n.tiles_w)
    frame = b * n.frames + _start(i, n.frames, n.tiles_t)
    row = _start(j, n.rows, n.tiles_h)
    column = _start(k, n.columns, n.tiles_w)
    for part in gl.static_range(parts):
        target = reinterpret(rows.index(part * tiles + place), desc.dtype, box, desc.layout)
        async_load(desc, [frame, row, column, h, part * box[4]], barrier, target)


@gluon.jit
def load_tiles(
    q_desc, do_desc, k_desc, v_desc, k_mean_desc, v_mean_desc, gain_ptr, list_ptr, number_ptr, there_ptr, do_bufs,
    buffers, bias_bufs, n, numbers, REST: gl.constexpr, FULL: gl.constexpr, SECOND: gl.constexpr, PLACES: gl.constexpr,
    PARTS: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Producer: of every tile of queries the queries (and dO), the means of all tiles, and its exact tiles."""
    q_bufs, k_bufs, v_bufs, q_full, q_empty, _, full, empty = buffers
    H, items, width, queries, tiles, all_means = numbers
    TILES: gl.constexpr = BLOCK_N // PLACES
    block_bytes: gl.constexpr = 2 * BLOCK_N * k_bufs.shape[2] * 2
    key = gl.arange(0, BLOCK_N, gl.BlockedLayout([1], [32], [4], [0]))
    place = 0
    t = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        at = item // PARTS
        part = item % PARTS
        b = at // queries // H
        h = at // queries % H
        turn = t % Q_STAGES
        mbarrier.wait(q_empty.index(turn), (t // Q_STAGES & 1) ^ 1)
        barrier = q_full.index(turn)
        of_gradient: gl.constexpr = 0 if do_desc is None else do_desc.block_type.nbytes
        mbarrier.expect(barrier, 2 * (q_desc.block_type.nbytes + of_gradient))
        i, j, k = _place_of(at % queries, n.queries_h, n.queries_w)
        frame = b * n.query_frames + _start(i, n.query_frames, n.queries_t)
        row = _start(j, n.rows, n.queries_h)
        column = _start(k, n.columns, n.queries_w)
        for half in gl.static_range(2):
            box = [frame + half * SECOND[0], row + half * SECOND[1], column + half * SECOND[2], h, 0]
            async_load(q_desc, box, barrier, in_video(q_bufs.index(2 * turn + half), q_desc))
            if do_desc is not None:
                async_load(do_desc, box, barrier, in_video(do_bufs.index(2 * turn + half), do_desc))
        if REST:
            own_ptr = gain_ptr + gl.to_tensor(at).to(gl.int64) * ((all_means + GAINS - 1) // GAINS * GAINS)
            blocks = gl.where(part == 0, (all_means + BLOCK_N - 1) // BLOCK_N, 0)
            for block in range(blocks):
                # The order of `attend_keys`.
                first = gl.where(block == 0, blocks - 1, block - 1) * BLOCK_N
                stage = place % STAGES
                mbarrier.wait(empty.index(stage), (place // STAGES & 1) ^ 1)
                barrier = full.index(stage)
                mbarrier.expect(barrier, block_bytes)
                copy_rows(k_mean_desc, b, h, first, barrier, k_bufs.index(stage))
                copy_rows(v_mean_desc, b, h, first, barrier, v_bufs.index(stage))
                async_load_numbers(bias_bufs.index(stage), own_ptr + first + key)
                async_copy.mbarrier_arrive(barrier, increment_count=False)
                place += 1
        first_tile, number = tiles_of_part(at, part, number_ptr, all_means, PLACES, PARTS)
        blocks = (number + TILES - 1) // TILES
        own_list_ptr = list_ptr + gl.to_tensor(at).to(gl.int64) * width + first_tile
        for block in range(blocks):
            # What is left of the last block, masked there, gets the last tile again.
            first = gl.where(block == 0, blocks - 1, block - 1) * TILES
            stage = place % STAGES
            mbarrier.wait(empty.index(stage), (place // STAGES & 1) ^ 1)
            barrier = full.index(stage)
            mbarrier.expect(barrier, block_bytes)
            for other in gl.static_range(TILES):
                tile = gl.load(own_list_ptr + gl.minimum(first + other, number - 1)).to(gl.int32)
                copy_tile(k_desc, b, h, tile, n, barrier, k_bufs.index(stage), other)
                copy_tile(v_desc, b, h, tile, n, barrier, v_bufs.index(stage), other)
            if not FULL:
                other = first + key // PLACES
                # No token is in the tile after the last.
                tile = gl.load(own_list_ptr + other, mask=other < number, other=tiles).to(gl.int32)
                async_load_numbers(bias_bufs.index(stage), there_ptr + tile * PLACES + key % PLACES)
            if REST or not FULL:
                async_copy.mbarrier_arrive(barrier, increment_count=False)
            place += 1
        t += 1


@gluon.jit
def _attend(
    half: gl.constexpr, number_ptr, box_ptr, out_ptr, lse_ptr, places_of_out, buffers, bias_bufs,
    numbers, rows, columns, log2_scale, D: gl.constexpr, REST: gl.constexpr,
    FULL: gl.constexpr, BOX: gl.constexpr, SECOND: gl.constexpr, PLACES: gl.constexpr, PARTS: gl.constexpr,
    Q_STAGES: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Consumer: one warpgroup, half of the places of every tile of queries."""
    q_bufs, k_bufs, v_bufs, q_full, q_empty, lead, full, empty = buffers
    H, items, width, queries, tiles, all_means = numbers
    out_b, out_s, out_h, lse_b, lse_h = places_of_out
    BLOCK_D: gl.constexpr = k_bufs.shape[2]
    layout: gl.constexpr = accumulator_layout(BLOCK_D)
    stats: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_N))
    place = 0
    t = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        at = item // PARTS
        part = item % PARTS
        first_tile, number = tiles_of_part(at, part, number_ptr, all_means, PLACES, PARTS)
        bh = at // queries
        turn = t % Q_STAGES
        mbarrier.wait(q_full.index(turn), t // Q_STAGES & 1)
        if half == 1:
            mbarrier.wait(lead.index(turn), t // Q_STAGES & 1)
        q = q_bufs.index(2 * turn + half)
        acc = gl.zeros([_HALF, BLOCK_D], gl.float32, layout)
        row_max = gl.full([_HALF], -float("inf"), gl.float32, stats)
        row_sum = gl.zeros([_HALF], gl.float32, stats)
        # Biases come with the keys, so that means and tokens are all alike.
        MERGED: gl.constexpr = REST and not FULL
        means = gl.where(part == 0, all_means, 0)
        tokens = number * PLACES
        if MERGED:
            means = ((means + BLOCK_N - 1) // BLOCK_N + (tokens + BLOCK_N - 1) // BLOCK_N) * BLOCK_N
            tokens = 0
        if REST:
            if means > 0:
                _, acc, row_max, row_sum, _, place = attend_keys(
                    acc, acc, row_max, row_sum, row_sum, q, k_bufs, v_bufs, full, empty, full, empty,
                    lead.index(turn), half == 0, place, 0, means, bias_bufs, None, 0, log2_scale,
                    False, True, 2, False, False, False, False, STAGES, BLOCK_N, 0,
                )  # fmt: skip
        if not MERGED:
            if tokens > 0:
                _, acc, row_max, row_sum, _, place = attend_keys(
                    acc, acc, row_max, row_sum, row_sum, q, k_bufs, v_bufs, full, empty, full, empty,
                    lead.index(turn), (half == 0) & (means == 0), place, 0, tokens, bias_bufs, None, 0, log2_scale,
                    False, True, 0 if FULL else 2, False, False, False, False, STAGES, BLOCK_N, 0,
                )  # fmt: skip
        mbarrier.arrive(lead.index(turn), pred=(half == 0) & (means + tokens == 0))
        inverse = gl.convert_layout(1.0 / gl.where(row_sum == 0, 1.0, row_sum), gl.SliceLayout(1, layout))
        log2_lse = log2_partition(row_max, row_sum)
        mbarrier.arrive(q_empty.index(turn))

        own_ptr = box_ptr + at % queries * 8
        b = (bh // H).to(gl.int64)
        h = bh % H
        token, there = token_of(gl.arange(0, _HALF, stats), half, own_ptr, rows, columns, BOX, SECOND)
        # Rows of the parts of a head follow each other.
        stat = b * lse_b + h * lse_h + part * (lse_h // PARTS) + token
        gl.store(lse_ptr + stat, log2_lse * 0.6931471805599453 if PARTS == 1 else log2_lse, mask=there)
        out = (acc * inverse[:, None]).to(out_ptr.dtype.element_ty)
        base = b * out_b + h * out_h + part * (out_h // PARTS)
        store_rows(out_ptr, out, base, out_s, half, own_ptr, rows, columns, D, BOX, SECOND)
        t += 1


@gluon.jit
def store_rows(
    ptr, x, base, stride, half: gl.constexpr, own_ptr, rows, columns,
    D: gl.constexpr, BOX: gl.constexpr, SECOND: gl.constexpr,
):  # fmt: skip
    """Store x [64, D] in the rows of this half of a tile of queries."""
    BLOCK_D: gl.constexpr = x.shape[1]
    layout: gl.constexpr = accumulator_layout(BLOCK_D)
    token, there = token_of(gl.arange(0, _HALF, gl.SliceLayout(1, layout)), half, own_ptr, rows, columns, BOX, SECOND)
    dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))
    at = (base + token.to(gl.int64) * stride)[:, None] * D + dims[None, :]
    gl.store(ptr + at, x, mask=there[:, None] & (dims < D)[None, :])


@gluon.jit
def token_of(place, half: gl.constexpr, box_ptr, rows, columns, BOX: gl.constexpr, SECOND: gl.constexpr):
    """Tokens of the places of half of a tile of queries, and whether they are in it; `box_ptr` as `tile_boxes`."""
    t = half * SECOND[0] + place // (BOX[1] * BOX[2])
    h = half * SECOND[1] + place // BOX[2] % BOX[1]
    w = half * SECOND[2] + place % BOX[2]
    there = (t < gl.load(box_ptr + 3)) & (h < gl.load(box_ptr + 4)) & (w < gl.load(box_ptr + 5))
    token = ((gl.load(box_ptr) + t) * rows + gl.load(box_ptr + 1) + h) * columns + gl.load(box_ptr + 2) + w
    return token, there


@gluon.jit(do_not_specialize=["H", "items", "width", "out_b", "out_s", "out_h", "lse_b", "lse_h"])
def _hopper_two_resolution_kernel(
    q_desc, k_desc, v_desc, k_mean_desc, v_mean_desc, gain_ptr, list_ptr, number_ptr, there_ptr,
    box_ptr, out_ptr, lse_ptr, out_b, out_s, out_h, lse_b, lse_h, tiling, H, items, width, log2_scale,
    D: gl.constexpr, REST: gl.constexpr, FULL: gl.constexpr, BOX: gl.constexpr,
    SECOND: gl.constexpr, PLACES: gl.constexpr, PARTS: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """out and lse of all tiles of queries; arguments as `two_resolution_kernel`.

    With PARTS, of as many parts of a tile's keys: rows in float32, lse in units of log 2.
    """
    n = plain_tiling(tiling)
    queries = n.queries_t * n.queries_h * n.queries_w
    tiles = n.tiles_t * n.tiles_h * n.tiles_w
    all_means = tiles if REST else tiles * 0
    numbers = (H, items, width, queries, tiles, all_means)
    places_of_out = (out_b, out_s, out_h, lse_b, lse_h)
    # Biases come by copies of the producer's 128 threads.
    BIASED: gl.constexpr = REST or not FULL
    buffers = allocate_tiles(
        k_desc.dtype, q_desc.block_type.shape[4], True, Q_STAGES, STAGES, BLOCK_N, 129 if BIASED else 1
    )
    shared: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    bias_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], shared)
    gl.warp_specialize(
        [
            (load_tiles, (
                q_desc, None, k_desc, v_desc, k_mean_desc, v_mean_desc, gain_ptr, list_ptr, number_ptr, there_ptr,
                None, buffers, bias_bufs, n, numbers, REST, FULL, SECOND, PLACES, PARTS, Q_STAGES, STAGES, BLOCK_N,
            )) if half is None else (_attend, (
                half, number_ptr, box_ptr, out_ptr, lse_ptr, places_of_out, buffers, bias_bufs, numbers,
                n.rows, n.columns, log2_scale, D, REST, FULL, BOX, SECOND, PLACES, PARTS, Q_STAGES,
                STAGES, BLOCK_N,
            ))
            for half in (None, 0, 1)
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


def _box_of(box: Box, places: int) -> Box | None:
    """The smallest box around this one whose edges are powers of two, of at least so many places; None above it."""
    t, h, w = (1 << (edge - 1).bit_length() for edge in box)
    return (t, h, max(w, places // (t * h))) if t * h * w <= places else None


def two_resolution_fits(tiling: Tiling, *tensors: torch.Tensor) -> bool:
    """Whether this form takes such tiles, and tensors [B, S, H, D] that `hopper_fits`."""
    frames_follow = all(x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in tensors)
    boxes = key_box(tiling), _box_of(tiling.of_queries.box, BLOCK_M)
    # Rows of the means follow each other.
    aligned = tensors[0].shape[3] * tensors[0].itemsize % 16 == 0
    return frames_follow and aligned and None not in boxes


def key_box(tiling: Tiling) -> Box | None:
    # Eight rows are the least that the swizzled shared memory repeats.
    return next((box for box in (_box_of(tiling.box, places) for places in (16, 32, 64, 128)) if box), None)


class Launch(NamedTuple):
    """How the kernels see a tiling.

    Args:
        keys: the box of a tile of keys. half: that of half a tile of queries. second: what the second half adds to the
            place of the first, along each axis.
        full: whether every place of every tile of keys holds a token.
    """

    tiling: Tiling
    keys: Box
    half: Box
    second: Box
    full: bool

    def there(self, device: torch.device) -> torch.Tensor | None:
        """What the places of the tiles of keys add to a logit; None where they add nothing."""
        return None if self.full else _present(self.tiling, self.keys, device)

    def of_keys(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k_mean: torch.Tensor | None = None,
        v_mean: torch.Tensor | None = None,
        rows: int = 0,
    ) -> list[TensorDescriptor | None]:
        """Descriptors of keys and values for tiles, and of their means, if there are any, for so many rows."""
        tiles = [video_descriptor(x, self.tiling, self.keys, _COLUMNS) for x in (key, value)]
        return [*tiles, *(None if x is None else rows_descriptor(x, rows) for x in (k_mean, v_mean))]


def launch_of(tiling: Tiling) -> Launch:
    """Of tiles that `two_resolution_fits`."""
    keys, queries = key_box(tiling), _box_of(tiling.of_queries.box, BLOCK_M)
    assert keys is not None and queries is not None
    # The second half of a tile of queries lies behind the first along the first axis that can be halved.
    axis = next(axis for axis, edge in enumerate(queries) if edge > 1)
    t, h, w = (edge // 2 if i == axis else edge for i, edge in enumerate(queries))
    second_t, second_h, second_w = (edge if i == axis else 0 for i, edge in enumerate((t, h, w)))
    full = tiling.box == keys and all(length % n == 0 for length, n in zip(tiling[:3], tiling[3:6], strict=True))
    return Launch(tiling, keys, (t, h, w), (second_t, second_h, second_w), full)


def video_descriptor(tensor: torch.Tensor, tiling: Tiling, box: Box, columns: int) -> TensorDescriptor:
    """Descriptor of tokens [B, S, H, D] for boxes of the video: its indices are (frame, row, column, head, dim)."""
    B, S, H, D = tensor.shape
    stride = tensor.stride(1)
    shape = [B * tiling.frames, tiling.rows, tiling.columns, H, D]
    strides = [tiling.rows * tiling.columns * stride, tiling.columns * stride, stride, tensor.stride(2), 1]
    columns = min(columns, block_dim(D))
    return TensorDescriptor(
        tensor, shape, tma_strides(strides, shape), [*box, 1, columns], shared_layout.fn(columns, 5)
    )


@kept
def _present(tiling: Tiling, box: Box, device: torch.device) -> torch.Tensor:
    """[(m + 1) · PLACES]: 0 at the places of the tiles of keys that hold a token, -inf at the others and at the end."""
    bias = torch.where(tile_layout(tiling, device, box).valid, 0.0, -torch.inf).flatten()
    return torch.nn.functional.pad(bias, (0, math.prod(box)), value=-torch.inf)


@kept
def tile_boxes(cut: Tiling, device: torch.device) -> torch.Tensor:
    """[tiles, 8], int32: of every tile its first frame, row and column, how many of each, and two zeros."""
    starts, sizes = [], []
    for length, tiles in zip(cut[:3], cut[3:6], strict=True):
        bounds = torch.arange(tiles + 1) * length // tiles
        starts.append(bounds[:-1])
        sizes.append(bounds.diff())
    columns = [torch.cartesian_prod(*axes).view(-1, 3) for axes in (starts, sizes)]
    return torch.nn.functional.pad(torch.cat(columns, 1), (0, 2)).to(device, torch.int32)


def parts_of(items: int, keys: int, processors: int) -> int:
    """Into how many parts the keys of every tile of queries are cut, so that all processors have work until the end."""
    blocks = keys / BLOCK_M

    def time(parts: int) -> float:
        merged = 0 if parts == 1 else _MERGE_COST * parts * items / processors
        return -(-items * parts // processors) * (blocks / parts + _PART_COST) + merged

    return min(_PARTS, key=time)


@kept
def _merges(rows: int, parts: int, heads: int, device: torch.device) -> torch.Tensor:
    return device_table([(0, rows, head * parts, parts, head) for head in range(heads)], 5, device)


def two_resolution(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_mean: torch.Tensor | None,
    v_mean: torch.Tensor | None,
    gain: torch.Tensor | None,
    lists: torch.Tensor,
    number: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    tiling: Tiling,
    scale: float,
) -> None:
    """Forward; arguments are not checked, see `two_resolution_fits`.

    Args:
        query: [B, S, H, D]. key, value: [B, T·H·W, H, D].
        k_mean, v_mean: [B, m, H, D], and gain [B, H, n, ≥ m], what their logits gain, its rows filled up with -inf
            to a multiple of GAINS; None without the rest.
        lists: [B, H, n, width], of which `number` [B, H, n] count.
        out, lse: as `two_resolution.op.attend` writes them.
    """
    B, S, H, D = query.shape
    options = launch_options("hopper_two_resolution", query.device, query.dtype, D)
    launch = launch_of(tiling)
    places = math.prod(launch.keys)
    options["BLOCK_N"] = max(options["BLOCK_N"], places)
    width, means = lists.shape[3], 0 if k_mean is None else k_mean.shape[1]
    parts = parts_of(number.numel(), width * places + means, processors(query.device))
    items = parts * number.numel()
    written, log2_lse = out, lse
    out_rows, lse_rows = [stride // D for stride in out.stride()[:3]], lse.stride()[:2]
    # The parts of a head lie one after the other.
    rows = triton.cdiv(S, COMBINE_ROWS) * COMBINE_ROWS
    of_head = parts * rows
    if parts > 1:
        written = query.new_empty(B * H * parts, rows, D, dtype=torch.float32)
        log2_lse = written.new_empty(written.shape[:2])
        out_rows, lse_rows = [H * of_head, 1, of_head], (H * of_head, of_head)
    launcher(_hopper_two_resolution_kernel, (min(items, processors(query.device)),))(
        video_descriptor(query, tiling.of_queries, launch.half, block_dim(D)),
        *launch.of_keys(key, value, k_mean, v_mean, options["BLOCK_N"]), gain, lists, number,
        launch.there(query.device),
        tile_boxes(tiling.of_queries, query.device), written, log2_lse,
        *out_rows, *lse_rows, unspecialised(tiling), H, items, width,
        log2_scale_of(scale), D=D, REST=k_mean is not None,
        FULL=launch.full, BOX=launch.half, SECOND=launch.second, PLACES=places, PARTS=parts, **options,
        # What consumers of narrow heads leave, the producer needs for small tiles and for parts.
        REGISTERS=240 if D > 64 and parts == 1 else 232, num_warps=4, maxnreg=168,
    )  # fmt: skip
    if parts > 1:
        merges = _merges(S, parts, B * H, query.device)
        combine_parts((written, log2_lse, None), merges, rows, out, lse, None)
