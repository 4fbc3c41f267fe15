"""The loop of attention on Hopper: a producer warp loads tiles, two warpgroups of 64 query rows each consume them.

Legend: D head dim, E value dim, R bias rank, N keys of a tile. A tile of keys serves the scores and, where the value
is the key (R-steps), the first sum too: `acc_k` is Σ p·k, `acc_v` is Σ p·v. Every tile of keys has a place in shared
memory with two barriers: `full` (the copies have arrived) and `empty` (both warpgroups are done with it); `n` counts
the tiles.

FACTORS: logits have a bias of low rank (FlashBias, Eq. 3). `factors` is then (φq in shared memory [64, R], the places
of φk in the stages, 1 / softmax scale), else None. Keys and values of a tile have barriers of their own then, so that a
place of keys is free again as soon as there are scores, and two tiles in flight are enough; `k_full` and `k_empty` are
the keys' barriers, else not used. CHAINED: φq is divided by the scale in shared memory already, which is exact
(`divides_exactly`), and the two products of a score need no wait between them.
"""

from __future__ import annotations

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vmonarch.kernels.common import softmax, tiles
from vmonarch.kernels.common.launch import block_dim, tma_strides
from vmonarch.kernels.hopper.gluon import async_load, reinterpret

# Query rows of one warpgroup, and of the two of a program.
HALF = 64
BLOCK_M = 2 * HALF
# Shared memory of a program, less what the barriers take.
SHARED_MEMORY = 227 * 1024 - 256
_HALF = gl.constexpr(HALF)

online_softmax = gluon.jit(softmax.online_softmax.fn)
log2_partition = gluon.jit(softmax.log2_partition.fn)
entropy_of = gluon.jit(softmax.entropy_of.fn)
head_of = gluon.jit(tiles.head_of.fn)


@gluon.constexpr_function
def accumulator_layout(columns):
    """Registers of a product [64, columns] of one warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def operand_layout(columns):
    """Registers of a 16-bit [64, columns] that is the left side of a product."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator_layout(columns), k_width=2)


@gluon.constexpr_function
def shared_layout(columns, rank=2):
    """Shared memory of a 16-bit tile [rows, columns], as the copy engine writes and the tensor cores read it."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=rank)


def stages_that_fit(kept: int, stage: int, at_most: int = 4) -> int:
    """How many stages of `stage` bytes fit beside the bytes that the program keeps."""
    return max(1, min(at_most, (SHARED_MEMORY - kept) // stage))


def rows_descriptor(tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    """Descriptor of tokens [B, S, H, D] or blocks [G, b, D] for tiles of `rows` rows; zeros are read outside.

    Its indices are (batch, head, row, column) or (0, group, row, column).
    """
    tensor = tensor.transpose(1, 2) if tensor.ndim == 4 else tensor.unsqueeze(0)
    columns = block_dim(tensor.shape[3])
    shape = list(tensor.shape)
    strides = tma_strides(tensor.stride(), shape)
    return TensorDescriptor(tensor, shape, strides, [1, 1, rows, columns], shared_layout.fn(columns, 4))


def factor_descriptors(
    factors: tuple[torch.Tensor, torch.Tensor], rows: tuple[int, int]
) -> tuple[list[TensorDescriptor], tuple[int, ...]]:
    """Descriptors of φq and φk [B or 1, S, H or 1, R] for tiles of `rows` rows, and what their indices are times.

    The latter are (batch, head) of φq and of φk: 0 where all share a factor, else 1.
    """
    descriptors = [rows_descriptor(f, n) for f, n in zip(factors, rows, strict=True)]
    return descriptors, tuple(int(f.shape[axis] > 1) for f in factors for axis in (0, 2))


def divides_exactly(dtype: torch.dtype, scale: float) -> bool:
    """Whether numbers of `dtype` can be divided by the softmax scale without rounding and without overflow."""
    return dtype == torch.bfloat16 and math.frexp(scale)[0] == 0.5


@gluon.jit
def copy_rows(desc, i, j, row, barrier, buffer):
    """Start the copy of a tile of rows into `buffer` [rows, columns]."""
    tile: gl.constexpr = desc.block_type.shape
    async_load(desc, [i, j, row, 0], barrier, reinterpret(buffer, desc.dtype, tile, desc.layout))


@gluon.jit
def own_items(order_ptr):
    """What this program takes by the table of `even_order`: place of the first item, of the end, and the first item."""
    begin = gl.load(order_ptr + gl.program_id(0))
    return begin, gl.load(order_ptr + gl.program_id(0) + 1), gl.load(order_ptr + begin)


@gluon.jit
def allocate_barriers(STAGES: gl.constexpr, FULL: gl.constexpr = 1):
    """Barriers `full`, of FULL arrivals, and `empty` for STAGES tiles."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=FULL)
        mbarrier.init(empty.index(i), count=2)
    return full, empty


@gluon.jit
def allocate_tiles(
    dtype: gl.constexpr, D: gl.constexpr, HAS_V: gl.constexpr,
    Q_STAGES: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, FULL: gl.constexpr = 1,
    LEAD: gl.constexpr = True,
):  # fmt: skip
    """Shared memory for Q_STAGES tiles of query rows, in halves, for STAGES tiles of keys, and their barriers.

    FULL: arrivals that a barrier of keys counts. LEAD: whether the second half waits for the first; a barrier that
    nobody uses would share its memory with what is allocated later, which the hardware does not allow.
    """
    layout: gl.constexpr = shared_layout(D)
    q_bufs = gl.allocate_shared_memory(dtype, [2 * Q_STAGES, _HALF, D], layout)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], layout)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], layout) if HAS_V else k_bufs
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    lead = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout()) if LEAD else q_empty
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        if LEAD:
            mbarrier.init(lead.index(i), count=1)
    full, empty = allocate_barriers(STAGES, FULL)
    fence_async_shared()
    return q_bufs, k_bufs, v_bufs, q_full, q_empty, lead, full, empty


@gluon.jit
def allocate_factors(like, R: gl.constexpr, KEPT: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr):
    """Shared memory for what the kept rows (or keys) and the stages have of the bias; `like`, not read, without one."""
    kept = like
    staged = like
    if R > 0:
        kept = gl.allocate_shared_memory(like.dtype, [KEPT, _HALF, R], shared_layout(R))
        staged = gl.allocate_shared_memory(like.dtype, [STAGES, BLOCK, R], shared_layout(R))
    return kept, staged


@gluon.jit
def load_keys(
    k_desc, v_desc, k_bufs, v_bufs, k_full, k_empty, full, empty, n, i, j, start, stop, fk_desc, fk_bufs, fk_i, fk_j,
    LOAD_V: gl.constexpr, FACTORS: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_TAIL: gl.constexpr,
):  # fmt: skip
    """Producer: bring the keys (values, factors) [start, stop) in, in the order of `attend_keys`."""
    tiles = (stop - start + BLOCK_N - 1) // BLOCK_N
    for tile in range(tiles):
        first = start + (tile if BLOCK_TAIL else gl.where(tile == 0, tiles - 1, tile - 1)) * BLOCK_N
        stage = n % STAGES
        round = (n // STAGES & 1) ^ 1
        of_values: gl.constexpr = v_desc.block_type.nbytes if LOAD_V else 0
        if FACTORS:
            mbarrier.wait(k_empty.index(stage), round)
            barrier = k_full.index(stage)
            mbarrier.expect(barrier, k_desc.block_type.nbytes + fk_desc.block_type.nbytes)
        else:
            mbarrier.wait(empty.index(stage), round)
            barrier = full.index(stage)
            mbarrier.expect(barrier, k_desc.block_type.nbytes + of_values)
        copy_rows(k_desc, i, j, first, barrier, k_bufs.index(stage))
        if FACTORS:
            copy_rows(fk_desc, fk_i, fk_j, first, barrier, fk_bufs.index(stage))
            mbarrier.wait(empty.index(stage), round)
            barrier = full.index(stage)
            mbarrier.expect(barrier, of_values)
        if LOAD_V:
            copy_rows(v_desc, i, j, first, barrier, v_bufs.index(stage))
        n += 1
    return n


@gluon.jit
def skip_keys(
    k_full, k_empty, full, empty, n, start, stop, FACTORS: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Consumer without rows: give every tile back at once."""
    tiles = (stop - start + BLOCK_N - 1) // BLOCK_N
    for _ in range(tiles):
        if FACTORS:
            mbarrier.wait(k_full.index(n % STAGES), n // STAGES & 1)
            mbarrier.arrive(k_empty.index(n % STAGES))
        mbarrier.wait(full.index(n % STAGES), n // STAGES & 1)
        mbarrier.arrive(empty.index(n % STAGES))
        n += 1
    return n


@gluon.jit
def begin_scores(x, y, fx, fy, inverse_scale, FACTORS: gl.constexpr, CHAINED: gl.constexpr):
    """x·yᵀ + φx·φyᵀ / scale [64, N], begun; without FACTORS fx and fy are not read."""
    N: gl.constexpr = y.shape[0]
    scores = gl.zeros([_HALF, N], gl.float32, accumulator_layout(N))
    if FACTORS:
        scores = warpgroup_mma(fx, fy.permute((1, 0)), scores, use_acc=False, is_async=True)
        if not CHAINED:
            # Multiplied here, in float32: in 16 bit φx / scale would be rounded.
            scores = warpgroup_mma_wait(0, [scores]) * inverse_scale
    return warpgroup_mma(x, y.permute((1, 0)), scores, use_acc=FACTORS, is_async=True)


@gluon.jit
def divide_by_scale(factor, inverse_scale):
    """Divide a factor [64, R] in shared memory, which only this warpgroup reads, by the softmax scale; see CHAINED."""
    R: gl.constexpr = factor.shape[1]
    x = factor.load(accumulator_layout(R)).to(gl.float32) * inverse_scale
    factor.store(x.to(factor.dtype))
    fence_async_shared()


@gluon.jit
def _scores(q, keys, factors, stage, FACTORS: gl.constexpr, CHAINED: gl.constexpr):
    """q·kᵀ + φq·φkᵀ / scale [64, N], begun."""
    if FACTORS:
        fq, fk_bufs, inverse_scale = factors
        return begin_scores(q, keys, fq, fk_bufs.index(stage), inverse_scale, True, CHAINED)
    else:
        return begin_scores(q, keys, q, keys, 1.0, False, False)


@gluon.jit
def _load_bias(key_bias, first, stop, N: gl.constexpr, BIASED: gl.constexpr):
    """log2 of the keys that each of N keys stands for, -inf for those outside, from memory; nothing unless BIASED is 1.

    key_bias: (pointer, place of the first key of the block). Added to the pointer, the latter would leave places that
    are the same for all blocks, which Triton 3.9 keeps in registers that are not there. If BIASED is 2, the bias comes
    with the keys: it is shared memory for all stages, see `_staged_bias`.
    """
    if BIASED == 1:
        bias_ptr, place = key_bias
        i = first + gl.arange(0, N, gl.SliceLayout(0, accumulator_layout(N)))
        return gl.load(bias_ptr + (place + i), mask=i < stop, other=-float("inf"))
    else:
        return first


@gluon.jit
def _staged_bias(key_bias, stage, bias, N: gl.constexpr, BIASED: gl.constexpr):
    """The bias of N keys that has come with them, if BIASED is 2."""
    if BIASED == 2:
        return key_bias.index(stage).load(gl.SliceLayout(0, accumulator_layout(N)))
    else:
        return bias


@gluon.jit
def _softmax(
    scores, bias, row_max, row_sum, row_entropy, first, stop, diagonal, log2_scale,
    BIASED: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, ENTROPY: gl.constexpr,
):  # fmt: skip
    """Take scores [64, N] into the running sums, which keep their layout.

    CAUSAL, of masked tiles: row i attends to the keys up to `diagonal` + i.
    """
    N: gl.constexpr = scores.shape[1]
    layout: gl.constexpr = accumulator_layout(N)
    kept: gl.constexpr = row_max.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    if BIASED:
        # A key stands for n keys: log n is added to its logit (docs/attention.md, "Pooled keys").
        scores = scores * log2_scale + bias[None, :]
    elif MASKED:
        i = first + gl.arange(0, N, gl.SliceLayout(0, layout))
        attended = (i < stop)[None, :]
        if CAUSAL:
            last = diagonal + gl.arange(0, scores.shape[0], rows)
            attended = attended & (i[None, :] <= last[:, None])
        scores = gl.where(attended, scores, -float("inf"))
    p, alpha, row_max, row_sum, row_entropy = online_softmax(
        scores, gl.convert_layout(row_max, rows), gl.convert_layout(row_sum, rows),
        gl.convert_layout(row_entropy, rows), 1.0 if BIASED else log2_scale, ENTROPY, BIASED,
    )  # fmt: skip
    return (
        p,
        alpha,
        gl.convert_layout(row_max, kept),
        gl.convert_layout(row_sum, kept),
        gl.convert_layout(row_entropy, kept),
    )


@gluon.jit
def _begin_sums(acc_k, acc_v, p, k, v, SUM_K: gl.constexpr, SUM_V: gl.constexpr):
    """Σ p·k and Σ p·v of a tile, begun."""
    if SUM_K:
        acc_k = warpgroup_mma(p, k, acc_k, is_async=True)
    if SUM_V:
        acc_v = warpgroup_mma(p, v, acc_v, is_async=True)
    return acc_k, acc_v


@gluon.jit
def _end_sums(acc_k, acc_v, p, SUM_K: gl.constexpr, SUM_V: gl.constexpr):
    """Wait for the sums; until then the registers of p are read."""
    if SUM_K and SUM_V:
        acc_k, acc_v, p = warpgroup_mma_wait(0, [acc_k, acc_v, p])
    elif SUM_K:
        acc_k, p = warpgroup_mma_wait(0, [acc_k, p])
    else:
        acc_v, p = warpgroup_mma_wait(0, [acc_v, p])
    return acc_k, acc_v


@gluon.jit
def _scaled(acc_k, acc_v, alpha, SUM_K: gl.constexpr, SUM_V: gl.constexpr):
    if SUM_K:
        acc_k = acc_k * gl.convert_layout(alpha, gl.SliceLayout(1, acc_k.type.layout))[:, None]
    if SUM_V:
        acc_v = acc_v * gl.convert_layout(alpha, gl.SliceLayout(1, acc_v.type.layout))[:, None]
    return acc_k, acc_v


@gluon.jit
def attend_keys(
    acc_k, acc_v, row_max, row_sum, row_entropy, q, k_bufs, v_bufs, k_full, k_empty, full, empty, lead, leads,
    n, start, stop, key_bias, factors, diagonal, log2_scale, SUM_K: gl.constexpr, SUM_V: gl.constexpr,
    BIASED: gl.constexpr, FACTORS: gl.constexpr, CHAINED: gl.constexpr, CAUSAL: gl.constexpr,
    ENTROPY: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_TAIL: gl.constexpr,
):  # fmt: skip
    """Consumer: take the keys [start, stop), at least one, into the running sums of 64 rows.

    The softmax of a tile runs while the tensor cores sum the one before. BLOCK_TAIL: the keys after the last whole
    tile go through in a smaller one at the end, and there is at least one whole tile; 0: the last keys go through
    first, masked. `leads`: tell the other warpgroup, which waits for it, that the first softmax is done; so they are
    about a tile apart, and one computes products while the other does not. The statistics of the rows are in the
    layout of scores [64, BLOCK_N]. BIASED: as in `_load_bias`. BIASED 2, FACTORS, CAUSAL: without BLOCK_TAIL.
    CAUSAL: as in `_softmax`; the diagonal crosses the last keys only.
    """
    dtype: gl.constexpr = q.dtype
    tiles = (stop - start) // BLOCK_N if BLOCK_TAIL else (stop - start + BLOCK_N - 1) // BLOCK_N
    stage = n % STAGES
    mbarrier.wait((k_full if FACTORS else full).index(stage), n // STAGES & 1)
    scores = _scores(q, k_bufs.index(stage), factors, stage, FACTORS, CHAINED)
    first = start if BLOCK_TAIL else start + (tiles - 1) * BLOCK_N
    bias = _load_bias(key_bias, first, stop, BLOCK_N, BIASED)
    scores = warpgroup_mma_wait(0, [scores])
    bias = _staged_bias(key_bias, stage, bias, BLOCK_N, BIASED)
    if FACTORS:
        mbarrier.arrive(k_empty.index(stage))
    p, alpha, row_max, row_sum, row_entropy = _softmax(
        scores, bias, row_max, row_sum, row_entropy, first, stop, diagonal, log2_scale, BIASED, not BLOCK_TAIL, CAUSAL,
        ENTROPY,
    )  # fmt: skip
    p = gl.convert_layout(p.to(dtype), operand_layout(BLOCK_N))
    acc_k, acc_v = _scaled(acc_k, acc_v, alpha, SUM_K, SUM_V)
    n += 1
    mbarrier.arrive(lead, pred=leads)
    for tile in range(tiles - 1):
        previous = stage
        stage = n % STAGES
        mbarrier.wait((k_full if FACTORS else full).index(stage), n // STAGES & 1)
        scores = _scores(q, k_bufs.index(stage), factors, stage, FACTORS, CHAINED)
        if FACTORS:
            mbarrier.wait(full.index(previous), (n - 1) // STAGES & 1)
        acc_k, acc_v = _begin_sums(acc_k, acc_v, p, k_bufs.index(previous), v_bufs.index(previous), SUM_K, SUM_V)
        first = start + (tile + 1 if BLOCK_TAIL else tile) * BLOCK_N
        bias = _load_bias(key_bias, first, stop, BLOCK_N, BIASED)
        scores = warpgroup_mma_wait(SUM_K + SUM_V, [scores])
        bias = _staged_bias(key_bias, stage, bias, BLOCK_N, BIASED)
        if FACTORS:
            mbarrier.arrive(k_empty.index(stage))
        p_next, alpha, row_max, row_sum, row_entropy = _softmax(
            scores, bias, row_max, row_sum, row_entropy, first, stop, diagonal, log2_scale, BIASED, False, False,
            ENTROPY,
        )  # fmt: skip
        acc_k, acc_v = _end_sums(acc_k, acc_v, p, SUM_K, SUM_V)
        mbarrier.arrive(empty.index(previous))
        p = gl.convert_layout(p_next.to(dtype), operand_layout(BLOCK_N))
        acc_k, acc_v = _scaled(acc_k, acc_v, alpha, SUM_K, SUM_V)
        n += 1
    if BLOCK_TAIL:
        tail = n % STAGES
        mbarrier.wait(full.index(tail), n // STAGES & 1)
        k_tail = k_bufs.index(tail).slice(0, BLOCK_TAIL)
        v_tail = v_bufs.index(tail).slice(0, BLOCK_TAIL)
        scores_tail = _scores(q, k_tail, None, tail, False, False)
        acc_k, acc_v = _begin_sums(acc_k, acc_v, p, k_bufs.index(stage), v_bufs.index(stage), SUM_K, SUM_V)
        first = start + tiles * BLOCK_N
        bias_tail = _load_bias(key_bias, first, stop, BLOCK_TAIL, BIASED)
        scores_tail = warpgroup_mma_wait(SUM_K + SUM_V, [scores_tail])
        p_tail, alpha, row_max, row_sum, row_entropy = _softmax(
            scores_tail, bias_tail, row_max, row_sum, row_entropy, first, stop, diagonal, log2_scale, BIASED, True,
            False, ENTROPY,
        )  # fmt: skip
        acc_k, acc_v = _end_sums(acc_k, acc_v, p, SUM_K, SUM_V)
        mbarrier.arrive(empty.index(stage))
        p_tail = gl.convert_layout(p_tail.to(dtype), operand_layout(BLOCK_TAIL))
        acc_k, acc_v = _scaled(acc_k, acc_v, alpha, SUM_K, SUM_V)
        acc_k, acc_v = _begin_sums(acc_k, acc_v, p_tail, k_tail, v_tail, SUM_K, SUM_V)
        acc_k, acc_v = _end_sums(acc_k, acc_v, p_tail, SUM_K, SUM_V)
        mbarrier.arrive(empty.index(tail))
        n += 1
    else:
        if FACTORS:
            mbarrier.wait(full.index(stage), (n - 1) // STAGES & 1)
        acc_k, acc_v = _begin_sums(acc_k, acc_v, p, k_bufs.index(stage), v_bufs.index(stage), SUM_K, SUM_V)
        acc_k, acc_v = _end_sums(acc_k, acc_v, p, SUM_K, SUM_V)
        mbarrier.arrive(empty.index(stage))
    return acc_k, acc_v, row_max, row_sum, row_entropy, n


def tail_of(keys: int, block_n: int) -> int:
    """BLOCK_TAIL for ranges of `keys` keys: as few as hold those after the last whole tile."""
    left = keys % block_n
    tail = max(64, 1 << (left - 1).bit_length()) if left else 0
    return tail if keys > block_n and tail < block_n else 0
