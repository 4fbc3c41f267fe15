"""The L-steps on Hopper (`kernels/monarch/l_step.py` is the portable form): z, or in the last iteration the output.

Every position is a problem of its own with few products per byte, so what counts is that copies never pause. A producer
warp brings one item after the other into stages of shared memory, and warpgroups take the items in turns. A stage has
two barriers: `full` (the copies have arrived) and `empty` (its warpgroups are done); `n` counts items. A barrier cannot
tell a round from the one after next, so a stage always serves the same warpgroups: there are as many as a multiple of
the turns.

An item is one position of one head, or PACK positions where the blocks are few: row r of its tiles is block r // PACK
at position j + r % PACK, and positions do not see each other. Up to 64 rows are one warpgroup's, 128 are two's.

Legend: B batch, H heads, D head dim, m blocks, b positions per block, l query block, k key block. Vectors are taken as
[B, m, b, H, D], whatever their strides; cL, cR and log-partitions are [B, H, m, b], float32.
"""

from __future__ import annotations

import functools

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vmonarch.kernels.common.launch import tma_strides
from vmonarch.kernels.common.softmax import log2_scale_of
from vmonarch.kernels.flash_entropy.segments import processors
from vmonarch.kernels.hopper.attend import (
    HALF,
    accumulator_layout,
    hopper_dim,
    log2_partition,
    operand_layout,
    shared_layout,
    stages_that_fit,
)
from vmonarch.kernels.hopper.gluon import async_load, async_load_numbers, async_store, reinterpret
from vmonarch.kernels.monarch.places import Places

# More stages gain nothing.
MAX_STAGES = 6

_HALF = gl.constexpr(HALF)
_SIZES = ["items", "heads", "positions", "blocks"]


@gluon.constexpr_function
def _vectors_layout(columns):
    """Registers of a 16-bit [rows, columns] on its way to memory: 16 bytes per thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def _place_of(item, heads, positions, PACK: gl.constexpr):
    """Batch entry, head and first position of an item; heads, which are neighbours in memory, follow each other."""
    group = item // heads
    groups = (positions + PACK - 1) // PACK
    batch = group // groups
    return batch, item - group * heads, (group - batch * groups) * PACK


@gluon.jit
def _present(row, j, positions, blocks, PACK: gl.constexpr):
    """Whether there is what row `row` of an item stands for."""
    return (row // PACK < blocks) & (j + row % PACK < positions)


@gluon.jit
def _statistics(ptr, row, batch, head, j, heads, positions, blocks, PACK: gl.constexpr):
    """Where the numbers of the rows of an item are."""
    ptr += (batch * heads + head).to(gl.int64) * (blocks * positions) + j
    return ptr + (row // PACK * positions + row % PACK)


@gluon.jit
def _allocate(
    dtype: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
    EXACT: gl.constexpr, LAST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Stages of q, aL, y, cL and log-partitions of the exact part, and their barriers."""
    layout: gl.constexpr = shared_layout(D)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], layout)
    aL_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], layout)
    y_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], layout) if LAST else q_bufs
    cL_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], plain)
    lse_exact_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], plain) if EXACT else cL_bufs
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        # The engine's copies, and those of the producer's 128 threads.
        mbarrier.init(full.index(i), count=1 + 128)
        mbarrier.init(empty.index(i), count=BLOCK // _HALF)
    fence_async_shared()
    return q_bufs, aL_bufs, y_bufs, cL_bufs, lse_exact_bufs, full, empty


@gluon.jit
def _copy(desc, batch, head, j, barrier, buffer):
    """Start the copy of the rows of an item into `buffer` [rows, D]; zeros where there is nothing."""
    tile: gl.constexpr = desc.block_type.shape
    buffer = reinterpret(buffer, desc.dtype, tile, desc.layout)
    async_load(desc, [batch, 0, j, head, 0], barrier, buffer)


@gluon.jit
def _load(
    q_desc, aL_desc, y_desc, cL_ptr, lse_exact_ptr, buffers, items, heads, positions, blocks,
    EXACT: gl.constexpr, LAST: gl.constexpr, PACK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Producer: what belongs to every item."""
    q_bufs, aL_bufs, y_bufs, cL_bufs, lse_exact_bufs, full, empty = buffers
    row = gl.arange(0, q_bufs.shape[1], gl.BlockedLayout([1], [32], [4], [0]))
    n = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        batch, head, j = _place_of(item, heads, positions, PACK)
        present = _present(row, j, positions, blocks, PACK)
        stage = n % STAGES
        mbarrier.wait(empty.index(stage), (n // STAGES & 1) ^ 1)
        barrier = full.index(stage)
        mbarrier.expect(barrier, (2 + LAST) * q_desc.block_type.nbytes)
        _copy(q_desc, batch, head, j, barrier, q_bufs.index(stage))
        _copy(aL_desc, batch, head, j, barrier, aL_bufs.index(stage))
        if LAST:
            _copy(y_desc, batch, head, j, barrier, y_bufs.index(stage))
        # Neighbouring numbers are a whole block apart, which the engine cannot copy.
        pointers = _statistics(cL_ptr, row, batch, head, j, heads, positions, blocks, PACK)
        async_load_numbers(cL_bufs.index(stage), pointers, present)
        if EXACT:
            pointers = _statistics(lse_exact_ptr, row, batch, head, j, heads, positions, blocks, PACK)
            async_load_numbers(lse_exact_bufs.index(stage), pointers, present)
        async_copy.mbarrier_arrive(barrier, increment_count=False)
        n += 1


@gluon.jit
def _weights(q, aL, cL, lse_exact, present, log2_scale, EXACT: gl.constexpr, PACK: gl.constexpr):
    """exp of the logits [l, k] up to a factor per row.

    EXACT: rows where `lse_exact` is not -inf are exact throughout.

    Returns:
        (weights, what makes their rows sum to 1, log-partitions of the rows).
    """
    M: gl.constexpr = q.shape[0]
    N: gl.constexpr = aL.shape[0]
    layout: gl.constexpr = accumulator_layout(N)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    zero = gl.zeros([M, N], gl.float32, layout)
    scores = warpgroup_mma(q, aL.permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, [scores])
    cL = gl.where(present, cL.load(columns) * 1.4426950408889634, float("inf"))
    Z = scores * log2_scale - cL[None, :]
    if PACK > 1:
        together = (gl.arange(0, M, rows) % PACK)[:, None] == (gl.arange(0, N, columns) % PACK)[None, :]
        Z = gl.where(together, Z, -float("inf"))
    if EXACT:
        logit = lse_exact.load(rows) * 1.4426950408889634
        Z = gl.where((logit == -float("inf"))[:, None], Z, -float("inf"))
    row_max = gl.max(Z, 1)
    if EXACT:
        row_max = gl.maximum(row_max, logit)
    shift = gl.where(row_max == -float("inf"), 0.0, row_max)
    weights = gl.exp2(Z - shift[:, None])
    row_sum = gl.sum(weights, 1)
    if EXACT:
        # The exact part is one more column (docs/attention.md, "Exact parts").
        row_sum += gl.exp2(logit - shift)
    return weights, 1.0 / gl.where(row_sum == 0, 1.0, row_sum), log2_partition(shift, row_sum) * 0.6931471805599453


@gluon.jit
def _centroids(
    own: gl.constexpr, z_desc, lse_ptr, cR_ptr, buffers, items, heads, positions, blocks, log2_scale, min_mass,
    EXACT: gl.constexpr, STORE_STATISTICS: gl.constexpr, PACK: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer: z of every CONSUMERS-th item."""
    q_bufs, aL_bufs, _, cL_bufs, lse_exact_bufs, full, empty = buffers
    D: gl.constexpr = q_bufs.shape[2]
    dtype: gl.constexpr = q_bufs.dtype
    layout: gl.constexpr = accumulator_layout(_HALF)
    sums: gl.constexpr = accumulator_layout(D)
    tile: gl.constexpr = z_desc.block_type.shape
    l = gl.arange(0, _HALF, gl.SliceLayout(1, layout))
    k = gl.arange(0, _HALF, gl.SliceLayout(0, layout))
    k_stored = gl.arange(0, _HALF, gl.SliceLayout(1, sums))
    n = own
    for item in range(gl.program_id(0) + own * gl.num_programs(0), items, CONSUMERS * gl.num_programs(0)):
        batch, head, j = _place_of(item, heads, positions, PACK)
        if n >= CONSUMERS:
            # The results of the item before have left their place.
            tma.store_wait(0)
            mbarrier.arrive(empty.index((n - CONSUMERS) % STAGES))
        stage = n % STAGES
        q = q_bufs.index(stage)
        aL = aL_bufs.index(stage)
        mbarrier.wait(full.index(stage), n // STAGES & 1)
        present = _present(k, j, positions, blocks, PACK)
        L, inverse, lse = _weights(
            q, aL, cL_bufs.index(stage), lse_exact_bufs.index(stage), present, log2_scale, EXACT, PACK
        )
        # A place without a query counts for nothing.
        L = L * gl.where(_present(l, j, positions, blocks, PACK), inverse, 0.0)[:, None]
        cR = gl.sum(L, 0)
        # Once there are scores, nobody reads aL, which is as wide as L or wider.
        L_buf = reinterpret(aL, dtype, [D // _HALF, _HALF, _HALF], shared_layout(_HALF)).index(0)
        L_buf.store(L.to(dtype))
        fence_async_shared()
        aR = gl.zeros([_HALF, D], gl.float32, sums)
        aR = warpgroup_mma(L_buf.permute((1, 0)), q, aR, use_acc=False, is_async=True)
        aR = warpgroup_mma_wait(0, [aR])
        cR = gl.convert_layout(cR, gl.SliceLayout(1, sums))
        q.store((aR * (1.0 / gl.maximum(cR, min_mass))[:, None]).to(dtype))
        fence_async_shared()
        async_store(z_desc, [batch, 0, j, head, 0], reinterpret(q, dtype, tile, z_desc.layout))
        if STORE_STATISTICS:
            pointers = _statistics(cR_ptr, k_stored, batch, head, j, heads, positions, blocks, PACK)
            gl.store(pointers, cR, mask=_present(k_stored, j, positions, blocks, PACK))
            pointers = _statistics(lse_ptr, l, batch, head, j, heads, positions, blocks, PACK)
            gl.store(pointers, lse, mask=_present(l, j, positions, blocks, PACK))
        n += CONSUMERS
    tma.store_wait(0)


@gluon.jit
def _output(
    own: gl.constexpr, out_ptr, stride_b, stride_row, stride_j, stride_h, lse_ptr, buffers,
    items, heads, positions, blocks, log2_scale,
    EXACT: gl.constexpr, WIDTH: gl.constexpr, PACK: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer: the output of 64 rows of every item, or of all rows of every CONSUMERS-th."""
    q_bufs, aL_bufs, y_bufs, cL_bufs, lse_exact_bufs, full, empty = buffers
    BLOCK: gl.constexpr = q_bufs.shape[1]
    D: gl.constexpr = q_bufs.shape[2]
    dtype: gl.constexpr = q_bufs.dtype
    layout: gl.constexpr = accumulator_layout(BLOCK)
    sums: gl.constexpr = accumulator_layout(D)
    vectors: gl.constexpr = _vectors_layout(D)
    HALVES: gl.constexpr = BLOCK // _HALF
    TURNS: gl.constexpr = CONSUMERS // HALVES
    first: gl.constexpr = own % HALVES * _HALF
    l = first + gl.arange(0, _HALF, gl.SliceLayout(1, layout))
    k = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    row = first + gl.arange(0, _HALF, gl.SliceLayout(1, vectors))
    column = gl.arange(0, D, gl.SliceLayout(0, vectors))
    n = own // HALVES
    for item in range(gl.program_id(0) + n * gl.num_programs(0), items, TURNS * gl.num_programs(0)):
        batch, head, j = _place_of(item, heads, positions, PACK)
        stage = n % STAGES
        q = q_bufs.index(stage).slice(first, _HALF)
        lse_exact = lse_exact_bufs.index(stage).slice(first, _HALF)
        mbarrier.wait(full.index(stage), n // STAGES & 1)
        present = _present(k, j, positions, blocks, PACK)
        L, inverse, lse = _weights(
            q, aL_bufs.index(stage), cL_bufs.index(stage), lse_exact, present, log2_scale, EXACT, PACK
        )
        L = gl.convert_layout(L.to(dtype), operand_layout(BLOCK))
        out = gl.zeros([_HALF, D], gl.float32, sums)
        out = warpgroup_mma(L, y_bufs.index(stage), out, use_acc=False, is_async=True)
        out, L = warpgroup_mma_wait(0, [out, L])
        # The place of q turns the output from the order of products into that of memory.
        q.store((out * gl.convert_layout(inverse, gl.SliceLayout(1, sums))[:, None]).to(dtype))
        turned = q.load(vectors)
        stored = _present(row, j, positions, blocks, PACK)
        if EXACT:
            stored = stored & (lse_exact.load(gl.SliceLayout(1, vectors)) == -float("inf"))
        fence_async_shared()
        mbarrier.arrive(empty.index(stage))
        pointers = out_ptr + batch.to(gl.int64) * stride_b + j.to(gl.int64) * stride_j + head.to(gl.int64) * stride_h
        rows = (row // PACK).to(gl.int64) * stride_row + row % PACK * stride_j
        gl.store(pointers + rows[:, None] + column[None, :], turned, mask=stored[:, None] & (column < WIDTH)[None, :])
        pointers = _statistics(lse_ptr, l, batch, head, j, heads, positions, blocks, PACK)
        gl.store(pointers, lse, mask=_present(l, j, positions, blocks, PACK))
        n += TURNS


@gluon.jit(do_not_specialize=_SIZES)
def _hopper_l_centroids_kernel(
    q_desc, aL_desc, z_desc, cL_ptr, lse_exact_ptr, lse_ptr, cR_ptr,
    items, heads, positions, blocks, log2_scale, min_mass,
    EXACT: gl.constexpr, STORE_STATISTICS: gl.constexpr, PACK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """z and, with STORE_STATISTICS, cR and the log-partitions; a program takes one item after the other."""
    D: gl.constexpr = q_desc.block_type.shape[4]
    buffers = _allocate(q_desc.dtype, D, _HALF, EXACT, False, STAGES)
    gl.warp_specialize(
        [
            (_load, (
                q_desc, aL_desc, aL_desc, cL_ptr, lse_exact_ptr, buffers, items, heads, positions, blocks,
                EXACT, False, PACK, STAGES,
            )),
            (_centroids, (
                0, z_desc, lse_ptr, cR_ptr, buffers, items, heads, positions, blocks, log2_scale, min_mass,
                EXACT, STORE_STATISTICS, PACK, 3, STAGES,
            )),
            (_centroids, (
                1, z_desc, lse_ptr, cR_ptr, buffers, items, heads, positions, blocks, log2_scale, min_mass,
                EXACT, STORE_STATISTICS, PACK, 3, STAGES,
            )),
            (_centroids, (
                2, z_desc, lse_ptr, cR_ptr, buffers, items, heads, positions, blocks, log2_scale, min_mass,
                EXACT, STORE_STATISTICS, PACK, 3, STAGES,
            )),
        ],
        [4, 4, 4],
        [160, 160, 160],
    )  # fmt: skip


@gluon.jit(do_not_specialize=_SIZES)
def _hopper_l_output_kernel(
    q_desc, aL_desc, y_desc, cL_ptr, lse_exact_ptr, lse_ptr, out_ptr,
    stride_b, stride_row, stride_j, stride_h, items, heads, positions, blocks, log2_scale,
    EXACT: gl.constexpr, WIDTH: gl.constexpr, PACK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The output and the log-partitions; a program takes one item after the other."""
    BLOCK: gl.constexpr = q_desc.block_type.shape[1] * PACK
    D: gl.constexpr = q_desc.block_type.shape[4]
    buffers = _allocate(q_desc.dtype, D, BLOCK, EXACT, True, STAGES)
    gl.warp_specialize(
        [
            (_load, (
                q_desc, aL_desc, y_desc, cL_ptr, lse_exact_ptr, buffers, items, heads, positions, blocks,
                EXACT, True, PACK, STAGES,
            )),
            (_output, (
                0, out_ptr, stride_b, stride_row, stride_j, stride_h, lse_ptr, buffers,
                items, heads, positions, blocks, log2_scale, EXACT, WIDTH, PACK, 2, STAGES,
            )),
            (_output, (
                1, out_ptr, stride_b, stride_row, stride_j, stride_h, lse_ptr, buffers,
                items, heads, positions, blocks, log2_scale, EXACT, WIDTH, PACK, 2, STAGES,
            )),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip


@functools.cache
def _tile_layout(columns: int) -> gl.NVMMASharedLayout:
    return shared_layout.fn(columns, 5)


def _by_position(x: torch.Tensor, places: Places, heads: int) -> tuple[list[int], list[int]]:
    """Shape and strides of tokens [B, S, H, D] or blocks [B·H·m, b, D] as [B, m, b, H, D]."""
    m, b, D = places.blocks, places.positions, x.shape[-1]
    if x.ndim == 4:
        stride_b, stride_s, stride_h, _ = x.stride()
        return [x.shape[0], m, b, heads, D], [stride_b, b * stride_s, stride_s, stride_h, 1]
    return [x.shape[0] // (heads * m), m, b, heads, D], [heads * m * b * D, b * D, D, m * b * D, 1]


def _descriptor(x: torch.Tensor, places: Places, heads: int, block: int, pack: int) -> TensorDescriptor:
    """Descriptor of tokens or blocks as [B, m, b, H, D] for the tiles of items, `block` rows of `pack` positions."""
    shape, strides = _by_position(x, places, heads)
    columns, tile = hopper_dim(shape[4]), [1, block // pack, pack, 1]
    return TensorDescriptor(x, shape, tma_strides(strides, shape), [*tile, columns], _tile_layout(columns))


def _pack(places: Places) -> int:
    """Positions of an item: as many as fit 64 rows."""
    return max(1, HALF // triton.next_power_of_2(places.blocks))


def centroids(
    query: torch.Tensor,
    aL: torch.Tensor,
    cL: torch.Tensor,
    *,
    z: torch.Tensor,
    lse: torch.Tensor,
    cR: torch.Tensor | None,
    lse_exact: torch.Tensor | None,
    places: Places,
    scale: float,
    min_mass: float,
) -> None:
    """What `LStep.centroids` does where rows of L are exact throughout or not at all; arguments are not checked.

    Args:
        places: of whole consecutive tokens, up to 64 blocks.
    """
    heads, pack = query.shape[2], _pack(places)
    items = query.shape[0] * heads * triton.cdiv(places.positions, pack)
    stages = stages_that_fit(4096, 2 * HALF * hopper_dim(query.shape[3]) * 2 + HALF * 8, MAX_STAGES) // 3 * 3
    _hopper_l_centroids_kernel[(min(items, processors(query.device)),)](
        *(_descriptor(x, places, heads, HALF, pack) for x in (query, aL, z)),
        cL, lse_exact, lse, cR, items, heads, places.positions, places.blocks, log2_scale_of(scale), min_mass,
        EXACT=lse_exact is not None, STORE_STATISTICS=cR is not None, PACK=pack, STAGES=stages,
        num_warps=4, maxnreg=128,
    )  # fmt: skip


def output(
    query: torch.Tensor,
    aL: torch.Tensor,
    cL: torch.Tensor,
    y: torch.Tensor,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
    lse_exact: torch.Tensor | None,
    places: Places,
    scale: float,
) -> None:
    """What `LStep.output` does where rows of L are exact throughout or not at all; arguments are not checked.

    Args:
        places: of whole consecutive tokens, up to 128 blocks.
    """
    heads, pack = query.shape[2], _pack(places)
    block = HALF if places.blocks <= HALF else 2 * HALF
    items = query.shape[0] * heads * triton.cdiv(places.positions, pack)
    stages = stages_that_fit(4096, 3 * block * hopper_dim(query.shape[3]) * 2 + block * 8, MAX_STAGES) // 2 * 2
    _hopper_l_output_kernel[(min(items, processors(query.device)),)](
        *(_descriptor(x, places, heads, block, pack) for x in (query, aL, y)),
        cL, lse_exact, lse, out, *_by_position(out, places, heads)[1][:4],
        items, heads, places.positions, places.blocks, log2_scale_of(scale),
        EXACT=lse_exact is not None, WIDTH=query.shape[3], PACK=pack, STAGES=stages, num_warps=4, maxnreg=168,
    )  # fmt: skip
