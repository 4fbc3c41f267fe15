"""Flash attention with log-partition and entropy, or with a bias of low rank (FlashBias, Eq. 3), on Hopper.

`kernels/flash_entropy/forward.py` is the portable form.

Legend: B batch, Sq queries, Sk keys, H heads, D head dim, which is that of the values too, R bias rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vmonarch.kernels.common.launch import block_dim
from vmonarch.kernels.common.replay import launcher
from vmonarch.kernels.common.softmax import log2_scale_of
from vmonarch.kernels.common.tiles import strided
from vmonarch.kernels.flash_entropy.forward import Bias
from vmonarch.kernels.flash_entropy.segments import Work
from vmonarch.kernels.hopper.attend import (
    BLOCK_M,
    HALF,
    accumulator_layout,
    allocate_barriers,
    allocate_factors,
    allocate_tiles,
    attend_keys,
    copy_rows,
    divide_by_scale,
    divides_exactly,
    entropy_of,
    factor_descriptors,
    head_of,
    load_keys,
    log2_partition,
    rows_descriptor,
    skip_keys,
    stages_that_fit,
)
from vmonarch.kernels.hopper.schedule import schedule

__all__ = ["BLOCK_M", "flash", "schedule"]

# By programs of a processor: registers of a thread that consumes, and of any thread on average.
_REGISTERS = {1: (240, 168), 2: (104, 80)}

_HALF = gl.constexpr(HALF)
_BLOCK_M = gl.constexpr(BLOCK_M)


@gluon.jit
def _load(
    q_desc, k_desc, v_desc, fq_desc, fk_desc, buffers, factor_buffers, shares, items_ptr, firsts_ptr, ranges_ptr, H,
    FACTORS: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Producer: the queries of every item, and its keys and values; with FACTORS also what they have of the bias."""
    q_bufs, k_bufs, v_bufs, q_full, q_empty, _, full, empty = buffers
    fq_bufs, fk_bufs, k_full, k_empty = factor_buffers
    # 0 where batch or heads share a factor.
    fq_batch, fq_head, fk_batch, fk_head = shares
    n = 0
    t = 0
    for item in range(gl.load(firsts_ptr + gl.program_id(0)), gl.load(firsts_ptr + gl.program_id(0) + 1)):
        item_ptr = items_ptr + item * 8
        bh = gl.load(item_ptr)
        row = gl.load(item_ptr + 1)
        first_range = gl.load(item_ptr + 4)
        last_range = gl.load(item_ptr + 5)
        turn = t % Q_STAGES
        mbarrier.wait(q_empty.index(turn), (t // Q_STAGES & 1) ^ 1)
        barrier = q_full.index(turn)
        of_factors: gl.constexpr = fq_desc.block_type.nbytes if FACTORS else 0
        mbarrier.expect(barrier, 2 * (q_desc.block_type.nbytes + of_factors))
        for half in gl.static_range(2):
            copy_rows(q_desc, bh // H, bh % H, row + half * _HALF, barrier, q_bufs.index(2 * turn + half))
            if FACTORS:
                fq_buf = fq_bufs.index(2 * turn + half)
                copy_rows(fq_desc, bh // H * fq_batch, bh % H * fq_head, row + half * _HALF, barrier, fq_buf)
        for r in range(first_range, last_range):
            start = gl.load(ranges_ptr + 2 * r)
            stop = gl.load(ranges_ptr + 2 * r + 1)
            n = load_keys(
                k_desc, v_desc, k_bufs, v_bufs, k_full, k_empty, full, empty, n, bh // H, bh % H, start, stop,
                fk_desc, fk_bufs, bh // H * fk_batch, bh % H * fk_head, True, FACTORS, STAGES, BLOCK_N, 0,
            )  # fmt: skip
        t += 1


@gluon.jit
def _attend(
    half: gl.constexpr, buffers, factor_buffers, items_ptr, firsts_ptr, ranges_ptr,
    output, lse_ptr, entropy_ptr, part_out_ptr, part_lse_ptr, part_entropy_ptr,
    H, Sq, skipped, inverse_scale, log2_scale, D: gl.constexpr, ENTROPY: gl.constexpr, HAS_PARTS: gl.constexpr,
    FACTORS: gl.constexpr, CHAINED: gl.constexpr, CAUSAL: gl.constexpr,
    Q_STAGES: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Consumer: one warpgroup, rows 64·half and on of every item."""
    q_bufs, k_bufs, v_bufs, q_full, q_empty, lead, full, empty = buffers
    fq_bufs, fk_bufs, k_full, k_empty = factor_buffers
    BLOCK_D: gl.constexpr = k_bufs.shape[2]
    layout: gl.constexpr = accumulator_layout(BLOCK_D)
    stats: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_N))
    n = 0
    t = 0
    for item in range(gl.load(firsts_ptr + gl.program_id(0)), gl.load(firsts_ptr + gl.program_id(0) + 1)):
        item_ptr = items_ptr + item * 8
        bh = gl.load(item_ptr)
        row = gl.load(item_ptr + 1) + half * _HALF
        row_stop = gl.load(item_ptr + 2)
        slot = gl.load(item_ptr + 3)
        first_range = gl.load(item_ptr + 4)
        last_range = gl.load(item_ptr + 5)
        start = gl.load(item_ptr + 6)
        stop = gl.load(item_ptr + 7)
        turn = t % Q_STAGES
        mbarrier.wait(q_full.index(turn), t // Q_STAGES & 1)
        if half == 1:
            mbarrier.wait(lead.index(turn), t // Q_STAGES & 1)
        q = q_bufs.index(2 * turn + half)
        factors = (fq_bufs.index(2 * turn + half) if FACTORS else q, fk_bufs, inverse_scale)
        if row < row_stop:
            if CHAINED:
                divide_by_scale(factors[0], inverse_scale)
            acc = gl.zeros([_HALF, BLOCK_D], gl.float32, layout)
            row_max = gl.full([_HALF], -float("inf"), gl.float32, stats)
            row_sum = gl.zeros([_HALF], gl.float32, stats)
            row_entropy = gl.zeros([_HALF], gl.float32, stats)
            for r in range(first_range, last_range):
                _, acc, row_max, row_sum, row_entropy, n = attend_keys(
                    acc, acc, row_max, row_sum, row_entropy, q, k_bufs, v_bufs, k_full, k_empty, full, empty,
                    lead.index(turn), (half == 0) & (r == first_range), n, start, stop, None, factors,
                    row + skipped, log2_scale, False, True, False, FACTORS, CHAINED, CAUSAL, ENTROPY,
                    STAGES, BLOCK_N, 0,
                )  # fmt: skip
                if r + 1 < last_range:
                    start = gl.load(ranges_ptr + 2 * (r + 1))
                    stop = gl.load(ranges_ptr + 2 * (r + 1) + 1)
            mbarrier.arrive(q_empty.index(turn))
            # Every row has met a key.
            acc = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, layout))[:, None]
            log2_lse = log2_partition(row_max, row_sum)
            rows = gl.arange(0, _HALF, gl.SliceLayout(1, layout))
            stat_rows = gl.arange(0, _HALF, stats)
            columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))
            if HAS_PARTS and slot >= 0:
                part = slot.to(gl.int64) * _BLOCK_M + half * _HALF
                gl.store(part_out_ptr + (part + rows)[:, None] * D + columns[None, :], acc, mask=columns[None, :] < D)
                gl.store(part_lse_ptr + part + stat_rows, log2_lse)
                if ENTROPY:
                    gl.store(part_entropy_ptr + part + stat_rows, entropy_of(row_sum, row_entropy))
            else:
                out_ptr = head_of(output, bh // H, bh % H)
                at = (row + rows).to(gl.int64)[:, None] * output.stride_s + columns[None, :]
                mask = (row + rows < row_stop)[:, None] & (columns < D)[None, :]
                gl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)
                at = bh.to(gl.int64) * Sq + row + stat_rows
                inside = row + stat_rows < row_stop
                gl.store(lse_ptr + at, log2_lse * 0.6931471805599453, mask=inside)
                if ENTROPY:
                    gl.store(entropy_ptr + at, entropy_of(row_sum, row_entropy), mask=inside)
        else:
            for r in range(first_range, last_range):
                start = gl.load(ranges_ptr + 2 * r)
                stop = gl.load(ranges_ptr + 2 * r + 1)
                n = skip_keys(k_full, k_empty, full, empty, n, start, stop, FACTORS, STAGES, BLOCK_N)
            mbarrier.arrive(q_empty.index(turn))
        t += 1


@gluon.jit(do_not_specialize=["H", "Sq", "skipped", "shares"])
def _hopper_flash_kernel(
    q_desc, k_desc, v_desc, fq_desc, fk_desc, output, lse_ptr, entropy_ptr,
    part_out_ptr, part_lse_ptr, part_entropy_ptr, items_ptr, firsts_ptr, ranges_ptr,
    shares, H, Sq, skipped, inverse_scale, log2_scale,
    D: gl.constexpr, R: gl.constexpr, ENTROPY: gl.constexpr, HAS_PARTS: gl.constexpr, CAUSAL: gl.constexpr,
    CHAINED: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Out, log-partition and entropy of all items; a program takes one of its items after the other."""
    buffers = allocate_tiles(k_desc.dtype, k_desc.block_type.shape[3], True, Q_STAGES, STAGES, BLOCK_N)
    _, k_bufs, _, _, _, _, k_full, k_empty = buffers
    fq_bufs, fk_bufs = allocate_factors(k_bufs, R, 2 * Q_STAGES, STAGES, BLOCK_N)
    if R > 0:
        k_full, k_empty = allocate_barriers(STAGES)
        fence_async_shared()
    factor_buffers = (fq_bufs, fk_bufs, k_full, k_empty)
    gl.warp_specialize(
        [
            (_load, (
                q_desc, k_desc, v_desc, fq_desc, fk_desc, buffers, factor_buffers, shares,
                items_ptr, firsts_ptr, ranges_ptr, H, R > 0, Q_STAGES, STAGES, BLOCK_N,
            )) if half is None else (_attend, (
                half, buffers, factor_buffers, items_ptr, firsts_ptr, ranges_ptr,
                output, lse_ptr, entropy_ptr, part_out_ptr, part_lse_ptr, part_entropy_ptr,
                H, Sq, skipped, inverse_scale, log2_scale,
                D, ENTROPY, HAS_PARTS, R > 0, CHAINED, CAUSAL, Q_STAGES, STAGES, BLOCK_N,
            ))
            for half in (None, 0, 1)
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    work: Work,
    *,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor | None,
    parts: tuple[torch.Tensor | None, ...],
    options: dict[str, int],
    bias: Bias,
) -> None:
    """Attend as `work` says; arguments are not checked.

    Args:
        query: [B, Sq, H, D]. key, value: [B, Sk, H, D]. out: [B, Sq, H, D], any strides but the last. lse, entropy:
            [B, H, Sq].
        parts: partial outputs [slots, 128, D], log-partitions and entropies [slots, 128].
        bias: without a key mask. If it is causal, `work` must end the keys of a tile of rows at its last; and `work` is
            for all programs. Two of a processor have registers for narrow heads only.
    """
    assert work.firsts is not None
    block_n = options["BLOCK_N"]
    descriptors: Sequence[TensorDescriptor | None] = (None, None)
    shares: tuple[int, ...] = (0, 0, 0, 0)
    R = 0
    if bias.factors is not None:
        R = block_dim(bias.rank)
        descriptors, shares = factor_descriptors(bias.factors, (HALF, block_n))
        columns = block_dim(query.shape[3])
        kept, stage = (options["Q_STAGES"] * BLOCK_M * (columns + R), block_n * (2 * columns + R))
        options = {**options, "STAGES": stages_that_fit(2 * kept, 2 * stage, options["STAGES"])}
    launcher(_hopper_flash_kernel, (work.firsts.shape[0] - 1,))(
        rows_descriptor(query, HALF),
        rows_descriptor(key, block_n),
        rows_descriptor(value, block_n),
        *descriptors,
        strided(out), lse, entropy, *parts, work.items, work.firsts, work.ranges, shares,
        query.shape[2], query.shape[1], key.shape[1] - query.shape[1], 1.0 / scale if R else 1.0, log2_scale_of(scale),
        D=query.shape[3], R=R, ENTROPY=entropy is not None, HAS_PARTS=work.merges is not None, CAUSAL=bias.causal,
        CHAINED=R > 0 and divides_exactly(query.dtype, scale), **options, REGISTERS=_REGISTERS[bias.programs][0],
        num_warps=4, maxnreg=_REGISTERS[bias.programs][1],
    )  # fmt: skip
