"""Flash attention with log-partition and entropy, forward (VMonarch, Algorithm 1), on segments of queries and keys.

A bias may be added to the logits (FlashBias, Eq. 3): two small products make it for one tile, and it never exists
beyond that. Scores are kept without the softmax scale, so φq·φk is divided by it in float32; folded into a 16-bit φq,
the quotient would be rounded.

An R-step (`kernels/monarch/r_step.py`) is attention in blocks with the key as its own value, which gives aL; it may
have no other value.

Queries and keys may be bytes with scales (`kernels/int8`); then these take the place of factors, and scores are whole.

Shapes: B batch, Sq queries, Sk keys, H heads, D head dim, Dv value dim, R bias rank; M queries and N keys of one tile.
Tensors are [B, S, H, D] with any strides but that of D, which is 1. Long key ranges are split among several programs,
whose partial results the combine kernel merges (docs/attention.md, "Merging").
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vmonarch.kernels.common.launch import block_dim, dot_precision, hopper_fits, launch_options
from vmonarch.kernels.common.replay import launcher
from vmonarch.kernels.common.softmax import entropy_of, log2_partition, log2_scale_of, online_softmax
from vmonarch.kernels.common.tiles import broadcast, head_of, item_of_a_head, load_rows, store_rows, strided
from vmonarch.kernels.flash_entropy.reference import SCALE_BLOCK
from vmonarch.kernels.flash_entropy.segments import Segment, Work, processors, row_work

# Rows that one program of the combine kernel merges; divides every BLOCK_M.
COMBINE_ROWS = 16
# Keys of a tile of the kernel for Hopper with a bias, of all programs that share a processor.
HOPPER_KEYS = 128
_SCALE_BLOCK = tl.constexpr(SCALE_BLOCK)


class Bias(NamedTuple):
    """What a call adds to logits, the factor of scores, and the pairs that count.

    Attributes:
        factors: φq [B or 1, Sq, H or 1, R] and φk [B or 1, Sk, H or 1, R] of the dtype of the query; R is a power of
            two from 16 on, for Hopper a multiple of 8 up to 64. None for no bias.
        key_mask: bool [B, Sk], True where a key counts; or None.
        causal: whether query i attends only to the keys up to i + Sk - Sq, in one segment of all pairs.
        programs: number of programs of the kernel for Hopper that share a processor; 0 for the portable kernels.
        log2_number: Sk adjacent numbers in float32, log2 of the number of keys that each stands for; or None.
        scales: those of int8 queries [B, Sq, H] and of blocks of int8 keys [B, Sk / SCALE_BLOCK, H], whose product
            turns scores into logits in units of log 2; or None.
    """

    factors: tuple[torch.Tensor, torch.Tensor] | None = None
    key_mask: torch.Tensor | None = None
    causal: bool = False
    programs: int = 1
    log2_number: torch.Tensor | None = None
    scales: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def rank(self) -> int:
        return self.factors[0].shape[3] if self.factors else 0

    def arguments(self) -> tuple[Any, ...]:
        """φq, φk or the scales, the numbers of keys, and the key mask of the portable kernels."""
        query_factor, key_factor = self.factors or self.scales or (None, None)
        key_mask = None if self.key_mask is None else self.key_mask[:, :, None]
        return broadcast(query_factor), broadcast(key_factor), self.log2_number, broadcast(key_mask)

    def constants(self) -> dict[str, Any]:
        return {"RANK": self.rank, "CAUSAL": self.causal}


NO_BIAS = Bias()


@triton.jit
def load_tile(
    x, b, h, first, stop, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, ALL: tl.constexpr
):
    """Rows [ROWS, BLOCK_WIDTH] of a head from `first` on; unless ALL are there, zeros from `stop` on."""
    rows = tl.arange(0, ROWS)
    # The same for all threads: pointers of rows found from their numbers would cost each thread products.
    ptr = head_of(x, b, h) + tl.cast(first, tl.int64) * x.stride_s
    return load_rows(ptr, x.stride_s, rows, rows < stop - first, WIDTH, BLOCK_WIDTH, not ALL)


@triton.jit
def load_factor(factor, b, h, first, stop, x, RANK: tl.constexpr, ALL: tl.constexpr):
    """φ [rows, R] of a tile x [rows, D]; arguments as in `load_tile`. Without a bias it is x, and not looked at."""
    if RANK == 0:
        return x
    else:
        return load_tile(factor, b, h, first, stop, x.shape[0], RANK, RANK, ALL)


@triton.jit
def biased(x, y, fx, fy, log2_scale, RANK: tl.constexpr, PRECISION: tl.constexpr):
    """x·yᵀ + φx·φyᵀ / scale; without a bias (RANK = 0) the factors are not looked at, but for bytes are scales."""
    y_t = tl.trans(y)
    if x.dtype == tl.int8:
        scores = tl.dot(x, y_t).to(tl.float32) * (fx * fy)[:, None]
    elif RANK == 0:
        scores = tl.dot(x, y_t, input_precision=PRECISION)
    else:
        bias = tl.dot(fx, tl.trans(fy), input_precision=PRECISION) * (1.4426950408889634 / log2_scale)
        scores = tl.dot(x, y_t, bias, input_precision=PRECISION)
    return scores


@triton.jit
def scores_of_keys(
    q, k, fq, fk, first_key, stop, last_key, log2_number_ptr, key_mask, b, log2_scale,
    RANK: tl.constexpr, CAUSAL: tl.constexpr, ALL_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Raw scores [M, N] of one tile of keys, -inf where a query does not attend.

    Args:
        q: [M, D]. k: [N, D], from `first_key` up to `stop`. fq: [M, R]. fk: [N, R].
        last_key: that the first query attends to, if CAUSAL.
        ALL_KEYS: whether every query attends to the whole tile.
    """
    scores = biased(q, k, fq, fk, log2_scale, RANK, PRECISION)
    keys = first_key + tl.arange(0, k.shape[0])
    if log2_number_ptr is not None:
        # A key that stands for n keys: log n is added to its logit (docs/attention.md, "Pooled keys").
        scores += (tl.load(log2_number_ptr + keys, mask=keys < stop, other=0.0) / log2_scale)[None, :]
    if not ALL_KEYS:
        scores = tl.where((keys < stop)[None, :], scores, -float("inf"))
        if CAUSAL:
            last_keys = last_key + tl.arange(0, q.shape[0])
            scores = tl.where(keys[None, :] <= last_keys[:, None], scores, -float("inf"))
        if key_mask is not None:
            key_mask_ptr = key_mask.ptr + b * key_mask.stride_b + keys.to(tl.int64) * key_mask.stride_s
            counts = tl.load(key_mask_ptr, mask=keys < stop, other=0) != 0
            scores = tl.where(counts[None, :], scores, -float("inf"))
    return scores


@triton.jit
def keys_of_range(range_ptr, last_key, key_mask, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first key of a range, the end of the whole tiles that all queries of a tile attend to, and of all keys."""
    start = tl.load(range_ptr)
    stop = tl.load(range_ptr + 1)
    whole = stop
    if CAUSAL:
        whole = tl.minimum(stop, last_key + 1)
        stop = tl.minimum(stop, last_key + BLOCK_M)
    if key_mask is not None:
        whole = start
    return start, start + (whole - start) // BLOCK_N * BLOCK_N, stop


@triton.jit
def item_of_work(items_ptr, ranges_ptr, item, ONE_RANGE: tl.constexpr):
    """An item of `Work`: row start and stop, where its ranges begin, their number, and the slot."""
    item_ptr = items_ptr + item * 5
    row_start = tl.load(item_ptr)
    row_stop = tl.load(item_ptr + 1)
    first_range = tl.load(item_ptr + 2)
    ranges = 1 if ONE_RANGE else tl.load(item_ptr + 3) - first_range
    return row_start, row_stop, ranges_ptr + 2 * first_range, ranges, tl.load(item_ptr + 4)


@triton.jit
def merge_of_work(merges_ptr, block_rows, ROWS: tl.constexpr):
    """Of the merge in `Work` that a program has ROWS rows of: row start, these rows [ROWS], whether they are there,
    first slot, slots, and batch·H + head.
    """
    pid = tl.program_id(0)
    merge_ptr = merges_ptr + (pid // (block_rows // ROWS)) * 5
    row_start = tl.load(merge_ptr)
    row_stop = tl.load(merge_ptr + 1)
    first_slot = tl.load(merge_ptr + 2).to(tl.int64)
    slots = tl.load(merge_ptr + 3)
    rows = pid % (block_rows // ROWS) * ROWS + tl.arange(0, ROWS)
    return row_start, rows, rows < row_stop - row_start, first_slot, slots, tl.load(merge_ptr + 4).to(tl.int64)


@triton.jit(do_not_specialize=["num_items", "num_slots", "H", "Sq", "Sk"])
def _forward_kernel(
    query,
    key,
    value,
    query_factor,
    key_factor,
    log2_number_ptr,  # [Sk]
    key_mask,
    output,
    lse_ptr,  # [B, H, Sq]
    entropy_ptr,  # [B, H, Sq]
    key_output,
    cL_ptr,  # [B, H, Sq]
    part_out_ptr,  # [B·H, slots, M, Dv]
    part_lse_ptr,  # [B·H, slots, M], in units of log 2
    part_entropy_ptr,  # [B·H, slots, M]
    items_ptr,  # [I, 5]
    ranges_ptr,  # [R, 2]
    num_items,
    num_slots,
    H,
    Sq,
    Sk,
    log2_scale,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    RANK: tl.constexpr,
    CAUSAL: tl.constexpr,
    ONE_RANGE: tl.constexpr,
    ENTROPY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out and its statistics; of an R-step aL and cL, and unless there is no value, y for out.

    The keys of a range after the last whole BLOCK_N go through in tiles of BLOCK_TAIL.
    """
    # Row blocks run fastest, so that programs at work at the same time read the same keys.
    item, bh, b, h = item_of_a_head(num_items, H)
    if CAUSAL:
        # The last rows have most keys, so they begin.
        item = num_items - 1 - item
    row_start, row_stop, ranges_ptr, ranges, slot = item_of_work(items_ptr, ranges_ptr, item, ONE_RANGE)

    rows = tl.arange(0, BLOCK_M)
    value_dims = tl.arange(0, BLOCK_DV)
    rows_left = row_stop - row_start
    q = load_tile(query, b, h, row_start, row_stop, BLOCK_M, HEAD_DIM, BLOCK_D, False)
    fq = load_factor(query_factor, b, h, row_start, row_stop, q, RANK, False)
    if q.dtype == tl.int8:
        scale_ptr = head_of(query_factor, b, h)
        fq = tl.load(scale_ptr + (row_start + rows) * query_factor.stride_s, mask=rows < rows_left, other=0.0)
    last_key = row_start + Sk - Sq
    SUM_KEYS: tl.constexpr = key_output is not None
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    acc_k = tl.zeros([BLOCK_M, BLOCK_D], tl.float32) if SUM_KEYS else acc
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_entropy = tl.zeros([BLOCK_M], tl.float32)
    for r in range(ranges):
        start, whole, stop = keys_of_range(ranges_ptr + 2 * r, last_key, key_mask, CAUSAL, BLOCK_M, BLOCK_N)
        for tail in tl.static_range(2):
            for first_key in range(whole if tail else start, stop if tail else whole, BLOCK_TAIL if tail else BLOCK_N):
                k = load_tile(key, b, h, first_key, stop, BLOCK_TAIL if tail else BLOCK_N, HEAD_DIM, BLOCK_D, not tail)
                fk = load_factor(key_factor, b, h, first_key, stop, k, RANK, not tail)
                if q.dtype == tl.int8:
                    tl.static_assert(_SCALE_BLOCK % BLOCK_N == 0)
                    fk = tl.load(head_of(key_factor, b, h) + first_key // _SCALE_BLOCK * key_factor.stride_s)
                scores = scores_of_keys(
                    q, k, fq, fk, first_key, stop, last_key, log2_number_ptr, key_mask, b, log2_scale,
                    RANK, CAUSAL, not tail, PRECISION,
                )  # fmt: skip
                p, alpha, row_max, row_sum, row_entropy = online_softmax(
                    scores, row_max, row_sum, row_entropy, log2_scale, ENTROPY, key_mask is not None
                )
                if SUM_KEYS:
                    acc_k = tl.dot(p.to(k.dtype), k, acc_k * alpha[:, None], input_precision=PRECISION)
                if value is not None:
                    v = load_tile(value, b, h, first_key, stop, k.shape[0], VALUE_DIM, BLOCK_DV, not tail)
                    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)

    inverse = (1.0 / tl.where(row_sum == 0, 1.0, row_sum))[:, None]
    out = acc * inverse
    log2_lse = log2_partition(row_max, row_sum)
    if part_out_ptr is not None:
        if slot >= 0:
            part_rows = (bh * num_slots + slot) * BLOCK_M + rows
            part_rows_ptr = part_out_ptr + part_rows[:, None] * VALUE_DIM
            tl.store(part_rows_ptr + value_dims[None, :], out, mask=value_dims[None, :] < VALUE_DIM)
            tl.store(part_lse_ptr + part_rows, log2_lse)
            if ENTROPY:
                tl.store(part_entropy_ptr + part_rows, entropy_of(row_sum, row_entropy))
            # The combine kernel writes these rows.
            rows_left = 0
    present = rows < rows_left
    lse = log2_lse * 0.6931471805599453
    stat_rows = bh * Sq + row_start + rows
    if SUM_KEYS:
        aL = (acc_k * inverse).to(q.dtype)
        # The entropy is free when the value is the key (docs/attention.md, "The entropy"). Taken with the rounded aL
        # that the L-step reads, it cancels the rounding for queries near z.
        cL = log2_scale * 0.6931471805599453 * tl.sum(q.to(tl.float32) * aL.to(tl.float32), 1) - lse
        store_rows(head_of(key_output, b, h), key_output.stride_s, row_start + rows, present, aL, HEAD_DIM, BLOCK_D)
        tl.store(cL_ptr + stat_rows, cL, mask=present)
    if output is not None:
        # y may take the memory of z, the query: all warps must have read their rows before any writes.
        tl.debug_barrier()
        store_rows(head_of(output, b, h), output.stride_s, row_start + rows, present, out, VALUE_DIM, BLOCK_DV)
    if lse_ptr is not None:
        tl.store(lse_ptr + stat_rows, lse, mask=present)
    if ENTROPY:
        tl.store(entropy_ptr + stat_rows, entropy_of(row_sum, row_entropy), mask=present)


@triton.jit(do_not_specialize=["block_rows", "H", "stride_h"])
def _combine_kernel(
    output,
    lse_ptr,  # [B, H, Sq], heads stride_h apart, and samples H·stride_h
    entropy_ptr,  # the same
    part_out_ptr,  # [slots, block_rows, Dv]
    part_lse_ptr,  # [slots, block_rows], in units of log 2
    part_entropy_ptr,  # [slots, block_rows]
    merges_ptr,  # [J, 5]
    block_rows,
    H,
    stride_h,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Merge the partial results of rows whose keys were split; always in the order of the keys."""
    row_start, rows, present, first_slot, slots, bh = merge_of_work(merges_ptr, block_rows, ROWS)
    value_dims = tl.arange(0, BLOCK_DV)
    mask = present[:, None] & (value_dims[None, :] < VALUE_DIM)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    row_entropy = tl.zeros([ROWS], tl.float32)
    for slot in range(slots):
        part_rows = (first_slot + slot) * block_rows + rows
        log2_weight = tl.load(part_lse_ptr + part_rows, mask=present, other=0.0)
        # One "key" of every row is a whole part; its weight is its partition.
        p, alpha, row_max, row_sum, row_entropy = online_softmax(
            log2_weight[:, None], row_max, row_sum, row_entropy, 1.0, ENTROPY=ENTROPY, MAY_BE_EMPTY=True
        )
        part = tl.load(part_out_ptr + part_rows[:, None] * VALUE_DIM + value_dims[None, :], mask=mask, other=0.0)
        acc = acc * alpha[:, None] + part * p
        if ENTROPY:
            # Entropy of a mixture of disjoint parts: that of the weights plus the weighted mean of the parts'.
            part_entropy = tl.load(part_entropy_ptr + part_rows, mask=present, other=0.0)
            row_entropy -= tl.sum(p, 1) * part_entropy * 1.4426950408889634

    out = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    store_rows(head_of(output, bh // H, bh % H), output.stride_s, row_start + rows, present, out, VALUE_DIM, BLOCK_DV)
    stat_rows = bh * stride_h + row_start + rows
    tl.store(lse_ptr + stat_rows, log2_partition(row_max, row_sum) * 0.6931471805599453, mask=present)
    if ENTROPY:
        tl.store(entropy_ptr + stat_rows, entropy_of(row_sum, row_entropy), mask=present)


def combine_parts(
    parts: tuple[torch.Tensor | None, ...],
    merges: torch.Tensor | None,
    block_rows: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor | None,
) -> None:
    """Write the outputs, log-partitions and entropies of rows whose keys were split.

    Args:
        merges: of a `Work`.
        out: [B, Sq, H, Dv]. lse, entropy: [B, H, Sq], consecutive queries of contiguous tensors.
    """
    if merges is None:
        return
    H, Dv = out.shape[2:]
    launcher(_combine_kernel, (merges.shape[0] * (block_rows // COMBINE_ROWS),))(
        strided(out), lse, entropy, *parts, merges, block_rows, H, lse.stride(1), VALUE_DIM=Dv,
        BLOCK_DV=block_dim(Dv), ROWS=COMBINE_ROWS, ENTROPY=entropy is not None, num_warps=4,
    )  # fmt: skip


def launch_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    work: Work,
    options: dict[str, int],
    scale: float,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    entropy: torch.Tensor | None = None,
    *,
    parts: tuple[torch.Tensor | None, ...] = (None, None, None),
    bias: Bias = NO_BIAS,
    aL: torch.Tensor | None = None,
    cL: torch.Tensor | None = None,
) -> None:
    """Launch the portable kernel, which writes what is given of its results.

    Args:
        query: [B, Sq, H, D]. key: [B, Sk, H, D]. value: [B, Sk, H, Dv], or None with aL alone.
        work: at least one item. options: of the launch.
        out: [B, Sq, H, Dv]. lse, entropy, cL: [B, H, Sq]. aL: [B, Sq, H, D].
        parts: partial outputs [slots, rows, Dv], log-partitions and entropies [slots, rows], each or None.
    """
    B, Sq, H, D = query.shape
    Dv, values = (1, key) if value is None else (value.shape[3], value)
    items = work.items.shape[0]
    launcher(_forward_kernel, (items * B * H,))(
        strided(query), strided(key), strided(value), *bias.arguments(), strided(out), lse, entropy, strided(aL), cL,
        *parts, work.items, work.ranges, items, work.slots, H, Sq, key.shape[1], log2_scale_of(scale), HEAD_DIM=D,
        VALUE_DIM=Dv, BLOCK_D=block_dim(D), BLOCK_DV=block_dim(Dv), ENTROPY=entropy is not None,
        PRECISION=dot_precision(values.dtype), ONE_RANGE=work.one_range, **bias.constants(),
        **{"BLOCK_TAIL": options["BLOCK_N"], **options},
    )  # fmt: skip


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: tuple[Segment, ...],
    *,
    scale: float,
    entropy: bool,
    out: torch.Tensor | None = None,
    splits: int | None = None,
    bias: Bias = NO_BIAS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Attend from the queries to the keys of their segments; arguments are not checked.

    Args:
        query: [B, Sq, H, D]. key: [B, Sk, H, D]. value: [B, Sk, H, Dv].
        segments: at least one; queries in none get out 0, lse -inf and entropy 0.
        scale: softmax scale, at least 0.
        entropy: whether to compute the entropy.
        out: [B, Sq, H, Dv] of any dtype to write into, only the rows of the segments; a new tensor if None.
        splits: parts that the keys of every segment are cut into; None to choose them for this device.
        bias: FlashBias's, which says what kernels take it.

    Returns:
        (out [B, Sq, H, Dv], in the dtype of `query` if new, lse [B, H, Sq] and entropy [B, H, Sq] or None, both in
        nats and in float32).
    """
    B, Sq, H, D = query.shape
    Dv = value.shape[3]
    device = query.device
    if bias is NO_BIAS:
        on_hopper = splits is None and hopper_fits("flash_entropy", query, key, value)
    else:
        on_hopper = bias.programs > 0
    portable = "flash_forward" if bias is NO_BIAS else "flash_bias_forward"
    options = launch_options("hopper_flash" if on_hopper else portable, device, value.dtype, max(D, Dv, bias.rank))
    if on_hopper:
        from vmonarch.kernels.hopper import flash as hopper_kernels

        if bias is not NO_BIAS:
            options = {**options, "BLOCK_N": HOPPER_KEYS // bias.programs}
        BLOCK_M = hopper_kernels.BLOCK_M
        work = hopper_kernels.schedule(
            segments, BLOCK_M, options["BLOCK_N"], B * H, bias.programs * processors(device), device
        )
    else:
        BLOCK_M = options["BLOCK_M"]
        work = row_work(segments, BLOCK_M, options["BLOCK_N"], B * H, processors(device), splits, device)
    whole = work.covered == Sq

    def statistic(fill: float) -> torch.Tensor:
        new = query.new_empty(B, H, Sq, dtype=torch.float32)
        return new if whole else new.fill_(fill)

    if out is None:
        out = query.new_empty(B, Sq, H, Dv) if whole else query.new_zeros(B, Sq, H, Dv)
    lse = statistic(-torch.inf)
    row_entropy = statistic(0.0) if entropy else None
    parts: tuple[torch.Tensor | None, ...] = (None, None, None)
    if work.slots:
        shape = (work.slots * (B * H if work.firsts is None else 1), BLOCK_M)
        part_out = query.new_empty(*shape, Dv, dtype=torch.float32)
        part_lse = query.new_empty(shape, dtype=torch.float32)
        parts = (part_out, part_lse, torch.empty_like(part_lse) if entropy else None)
    if on_hopper:
        hopper_kernels.flash(
            query, key, value, work, scale=scale, out=out, lse=lse, entropy=row_entropy, parts=parts, options=options,
            bias=bias,
        )  # fmt: skip
    else:
        launch_forward(query, key, value, work, options, scale, out, lse, row_entropy, parts=parts, bias=bias)
    combine_parts(parts, work.merges, BLOCK_M, out, lse, row_entropy)
    return out, lse, row_entropy
