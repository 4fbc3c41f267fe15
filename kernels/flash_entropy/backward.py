"""Gradients of flash attention with log-partition and entropy (VMonarch, Algorithm 2), on segments.

With S the logits, P = exp(S - lse), H the entropy and dX the gradient of X:
    dS = P ∘ (dO·Vᵀ - rowsum(dO ∘ O) + dlse - dH·(S - lse + H)),    dV = Pᵀ·dO,    dQ = scale·dS·K,    dK = scale·dSᵀ·Q
With a bias φq·φkᵀ of the logits (FlashBias, Eq. 3) also dφq = dS·φk and dφk = dSᵀ·φq. In an R-step keys are values,
too: dP gains daL·Kᵀ and dK gains Pᵀ·daL.
One kernel owns blocks of queries and gives dQ, another owns blocks of keys and gives dK and dV, so there are no atomics
and every sum has one order. The second works on transposed tiles Sᵀ = K·Qᵀ, so that no product is ever transposed.

Shapes: B batch, Sq queries, Sk keys, H heads, D head dim, Dv value dim, R bias rank; M queries and N keys of one tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from vmonarch.kernels.common.launch import block_dim, dot_precision, hopper_fits, launch_options, unit_stride
from vmonarch.kernels.common.replay import launcher
from vmonarch.kernels.common.softmax import log2_scale_of, probabilities, row_delta
from vmonarch.kernels.common.tiles import head_of, item_of_a_head, store_rows, strided
from vmonarch.kernels.flash_entropy.forward import (
    COMBINE_ROWS,
    NO_BIAS,
    Bias,
    biased,
    item_of_work,
    keys_of_range,
    load_factor,
    load_tile,
    merge_of_work,
    scores_of_keys,
)
from vmonarch.kernels.flash_entropy.segments import (
    Segment,
    Work,
    all_pairs,
    one_range,
    processors,
    row_work,
    transposed,
)


@triton.jit(do_not_specialize=["num_items", "H", "Sq"])
def _delta_kernel(
    grad_output,
    output,
    grad_lse_ptr,  # [B, H, Sq]
    entropy_ptr,  # [B, H, Sq]
    grad_entropy_ptr,  # [B, H, Sq]
    delta_ptr,  # [B, H, Sq]
    items_ptr,  # [I, 5]
    num_items,
    H,
    Sq,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """delta = rowsum(dO ∘ O) - dlse + dH·H: what every dP of a row is lessened by."""
    item, bh, b, h = item_of_a_head(num_items, H)
    item_ptr = items_ptr + item * 5
    row_start = tl.load(item_ptr)
    row_stop = tl.load(item_ptr + 1)

    rows = tl.arange(0, BLOCK_M)
    do = load_tile(grad_output, b, h, row_start, row_stop, BLOCK_M, VALUE_DIM, BLOCK_DV, False)
    o = load_tile(output, b, h, row_start, row_stop, BLOCK_M, VALUE_DIM, BLOCK_DV, False)
    present = rows < row_stop - row_start
    stat_rows = bh * Sq + row_start + rows
    delta = row_delta(do, o, grad_lse_ptr, stat_rows, present)
    if grad_entropy_ptr is not None:
        grad_entropy = tl.load(grad_entropy_ptr + stat_rows, mask=present, other=0.0)
        delta += grad_entropy * tl.load(entropy_ptr + stat_rows, mask=present, other=0.0)
    tl.store(delta_ptr + stat_rows, delta, mask=present)


def row_deltas(
    grad_out: torch.Tensor,
    out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    entropy: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    delta: torch.Tensor,
    rows: Work | None = None,
    block_rows: int = 64,
) -> None:
    """Write what every dP of a row is lessened by.

    Args:
        grad_out, out: [B, Sq, H, Dv]. grad_lse, entropy, grad_entropy, delta: [B, H, Sq].
        rows: which rows, whose keys are not split; None for all.
        block_rows: of an item of `rows`.
    """
    _, Sq, H, Dv = out.shape
    if rows is None:
        rows = row_work(all_pairs(Sq, Sq), block_rows, block_rows, 1, 1, 1, out.device)
    num_items = rows.items.shape[0]
    launcher(_delta_kernel, (num_items * delta.shape[0] * H,))(
        strided(grad_out), strided(out), grad_lse, entropy, grad_entropy, delta, rows.items, num_items, H, Sq,
        VALUE_DIM=Dv, BLOCK_DV=block_dim(Dv), BLOCK_M=block_rows, num_warps=4,
    )  # fmt: skip


@triton.jit
def _grad_scores(p, scores, grad_p, lse, delta, grad_entropy, log2_scale, ENTROPY_GRAD: tl.constexpr):
    """dS of one tile; lse, delta and dH are shaped to broadcast along the keys."""
    grad_p -= delta
    if ENTROPY_GRAD:
        # S - lse = log p; the bound keeps 0·(-inf) away where p is 0.
        log_p = tl.maximum((scores * log2_scale - lse * 1.4426950408889634) * 0.6931471805599453, -1000.0)
        grad_p -= grad_entropy * log_p
    return p * grad_p


@triton.jit(do_not_specialize=["num_items", "num_slots", "H", "Sq", "Sk"])
def _backward_q_kernel(
    query,
    key,
    value,
    query_factor,
    key_factor,
    log2_number_ptr,  # [Sk]
    key_mask,
    grad_output,
    grad_aL,
    lse_ptr,  # [B, H, Sq]
    delta_ptr,  # [B, H, Sq]
    grad_entropy_ptr,  # [B, H, Sq]
    grad_query,
    grad_fq_ptr,  # [B, Sq, H, R], contiguous
    cR_ptr,  # [B, H, Sq]
    dcR_ptr,  # [B, H, Sq]
    part_ptr,  # [B·H, slots, M, D]
    items_ptr,  # [I, 5]
    ranges_ptr,  # [R, 2]
    num_items,
    num_slots,
    H,
    Sq,
    Sk,
    scale,
    log2_scale,
    min_mass,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANK: tl.constexpr,
    CAUSAL: tl.constexpr,
    ONE_RANGE: tl.constexpr,
    ENTROPY_GRAD: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dQ and dφq. With cR the queries are z = αR / max(cR, min_mass): αR and cR get gradients, dαR in the place of dQ.

    Those are times max(cR, min_mass): divided by it, they might leave the range of float16.
    """
    item, bh, b, h = item_of_a_head(num_items, H)
    if CAUSAL:
        item = num_items - 1 - item
    row_start, row_stop, ranges_ptr, ranges, slot = item_of_work(items_ptr, ranges_ptr, item, ONE_RANGE)
    rows_left = row_stop - row_start

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    first_row = row_start.to(tl.int64)
    q = load_tile(query, b, h, row_start, row_stop, BLOCK_M, HEAD_DIM, BLOCK_D, False)
    fq = load_factor(query_factor, b, h, row_start, row_stop, q, RANK, False)
    SUM_KEYS: tl.constexpr = grad_aL is not None
    grad_out = q
    if value is not None:
        grad_out = load_tile(grad_output, b, h, row_start, row_stop, BLOCK_M, VALUE_DIM, BLOCK_DV, False)
    daL = q
    if SUM_KEYS:
        daL = load_tile(grad_aL, b, h, row_start, row_stop, BLOCK_M, HEAD_DIM, BLOCK_D, False)
    last_key = row_start + Sk - Sq
    present = rows < rows_left
    stat_rows = bh * Sq + row_start + rows
    lse = tl.load(lse_ptr + stat_rows, mask=present, other=float("inf"))[:, None]
    delta = tl.load(delta_ptr + stat_rows, mask=present, other=0.0)[:, None]
    grad_entropy = delta
    if ENTROPY_GRAD:
        grad_entropy = tl.load(grad_entropy_ptr + stat_rows, mask=present, other=0.0)[:, None]

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_f = acc
    if RANK > 0:
        acc_f = tl.zeros([BLOCK_M, RANK], tl.float32)
    for r in range(ranges):
        start, whole, stop = keys_of_range(ranges_ptr + 2 * r, last_key, key_mask, CAUSAL, BLOCK_M, BLOCK_N)
        for tail in tl.static_range(2):
            for first_key in range(whole if tail else start, stop if tail else whole, BLOCK_N):
                k = load_tile(key, b, h, first_key, stop, BLOCK_N, HEAD_DIM, BLOCK_D, not tail)
                fk = load_factor(key_factor, b, h, first_key, stop, k, RANK, not tail)
                scores = scores_of_keys(
                    q, k, fq, fk, first_key, stop, last_key, log2_number_ptr, key_mask, b, log2_scale,
                    RANK, CAUSAL, not tail, PRECISION,
                )  # fmt: skip
                # tl.trans of a loaded tile is free and safe; that of a product is neither.
                grad_p = tl.zeros(scores.shape, tl.float32)
                if SUM_KEYS:
                    grad_p = tl.dot(daL, tl.trans(k), grad_p, input_precision=PRECISION)
                if value is not None:
                    v = load_tile(value, b, h, first_key, stop, BLOCK_N, VALUE_DIM, BLOCK_DV, not tail)
                    grad_p = tl.dot(grad_out, tl.trans(v), grad_p, input_precision=PRECISION)  # [M, N]
                p = probabilities(scores, lse, log2_scale)
                grad_s = _grad_scores(p, scores, grad_p, lse, delta, grad_entropy, log2_scale, ENTROPY_GRAD)
                grad_s = grad_s.to(k.dtype)
                acc = tl.dot(grad_s, k, acc, input_precision=PRECISION)
                if RANK > 0:
                    acc_f = tl.dot(grad_s, fk, acc_f, input_precision=PRECISION)

    if part_ptr is not None:
        if slot >= 0:
            part_rows = (bh * num_slots + slot) * BLOCK_M + rows
            part_rows_ptr = part_ptr + part_rows[:, None] * HEAD_DIM
            tl.store(part_rows_ptr + dims[None, :], acc, mask=dims[None, :] < HEAD_DIM)
            # The sum kernel writes these rows.
            rows_left = 0
    grad_q_rows_ptr = head_of(grad_query, b, h) + first_row * grad_query.stride_s
    present = rows < rows_left
    acc *= scale
    if cR_ptr is not None:
        cR = tl.load(cR_ptr + stat_rows, mask=present, other=1.0)
        dcR = tl.where(cR >= min_mass, -tl.sum(acc * q.to(tl.float32), 1), 0.0)
        tl.store(dcR_ptr + stat_rows, dcR, mask=present)
        # dαR may take the memory of dO: all warps must have read their rows before any writes.
        tl.debug_barrier()
    store_rows(grad_q_rows_ptr, grad_query.stride_s, rows, present, acc, HEAD_DIM, BLOCK_D, ACCUMULATE)
    if RANK > 0:
        grad_fq_rows_ptr = grad_fq_ptr + ((b * Sq + first_row) * H + h) * RANK
        store_rows(grad_fq_rows_ptr, H * RANK, rows, present, acc_f, RANK, RANK)


@triton.jit(do_not_specialize=["H"])
def _sum_parts_kernel(
    grad_query,
    part_ptr,  # [B·H·slots, BLOCK_M, D]
    merges_ptr,  # [J, 5]
    H,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """dQ of rows whose keys were split: the sum of the parts, always in the order of the keys."""
    row_start, rows, present, first_slot, slots, bh = merge_of_work(merges_ptr, BLOCK_M, ROWS)
    dims = tl.arange(0, BLOCK_D)
    mask = present[:, None] & (dims[None, :] < HEAD_DIM)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for slot in range(slots):
        part_rows = (first_slot + slot) * BLOCK_M + rows
        acc += tl.load(part_ptr + part_rows[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    grad_q_rows_ptr = head_of(grad_query, bh // H, bh % H) + row_start.to(tl.int64) * grad_query.stride_s
    store_rows(grad_q_rows_ptr, grad_query.stride_s, rows, present, acc * scale, HEAD_DIM, BLOCK_D, ACCUMULATE)


@triton.jit(do_not_specialize=["num_items", "H", "Sq", "Sk"])
def _backward_kv_kernel(
    query,
    key,
    value,
    query_factor,
    key_factor,
    log2_number_ptr,  # [Sk]
    key_mask,
    grad_output,
    grad_aL,
    lse_ptr,  # [B, H, Sq]
    delta_ptr,  # [B, H, Sq]
    grad_entropy_ptr,  # [B, H, Sq]
    grad_key,
    grad_fk_ptr,  # [B, Sk, H, R], contiguous
    grad_value,
    items_ptr,  # [I, 5], of keys
    ranges_ptr,  # [R, 2], of queries
    num_items,
    H,
    Sq,
    Sk,
    scale,
    log2_scale,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANK: tl.constexpr,
    CAUSAL: tl.constexpr,
    ONE_RANGE: tl.constexpr,
    ENTROPY_GRAD: tl.constexpr,
    ACCUMULATE_K: tl.constexpr,
    ACCUMULATE_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dK, dφk and dV. With aL keys are values, too, and dK gains Pᵀ·daL."""
    item, bh, b, h = item_of_a_head(num_items, H)
    key_start, key_stop, ranges_ptr, ranges, _ = item_of_work(items_ptr, ranges_ptr, item, ONE_RANGE)
    keys_left = key_stop - key_start

    keys = tl.arange(0, BLOCK_N)
    first_key = key_start.to(tl.int64)
    # Keys that are not there are zeros; their rows of dK and dV are not stored, so p needs no mask.
    k = load_tile(key, b, h, key_start, key_stop, BLOCK_N, HEAD_DIM, BLOCK_D, False)
    fk = load_factor(key_factor, b, h, key_start, key_stop, k, RANK, False)
    v = k
    if value is not None:
        v = load_tile(value, b, h, key_start, key_stop, BLOCK_N, VALUE_DIM, BLOCK_DV, False)
    if log2_number_ptr is not None:
        log2_number = tl.load(log2_number_ptr + key_start + keys, mask=keys < keys_left, other=0.0)
    lse_ptr += bh * Sq
    delta_ptr += bh * Sq
    if ENTROPY_GRAD:
        grad_entropy_ptr += bh * Sq
    grad_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    grad_fk = grad_k
    if RANK > 0:
        grad_fk = tl.zeros([BLOCK_N, RANK], tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32) if value is not None else grad_k
    for r in range(ranges):
        start = tl.load(ranges_ptr + 2 * r)
        stop = tl.load(ranges_ptr + 2 * r + 1)
        # Rows of which some keys are attended to, whole tiles of others, and what is left.
        for part in tl.static_range(0 if CAUSAL else 1, 3):
            if part == 0:
                first = tl.maximum(0, key_start + Sq - Sk) // BLOCK_M * BLOCK_M
                start = tl.cdiv(tl.maximum(0, key_start + BLOCK_N - 1 + Sq - Sk), BLOCK_M) * BLOCK_M
                last = tl.minimum(start, stop)
            elif part == 1:
                first = start
                last = start + tl.maximum(0, stop - start) // BLOCK_M * BLOCK_M
            else:
                first = last
                last = stop
            for first_row in range(first, last, BLOCK_M):
                q = load_tile(query, b, h, first_row, stop, BLOCK_M, HEAD_DIM, BLOCK_D, part == 1)
                fq = load_factor(query_factor, b, h, first_row, stop, q, RANK, part == 1)
                rows = first_row + tl.arange(0, BLOCK_M)
                if part == 1:
                    lse = tl.load(lse_ptr + rows)[None, :]
                    delta = tl.load(delta_ptr + rows)[None, :]
                else:
                    # Where there is no row, lse = inf makes p = 0.
                    lse = tl.load(lse_ptr + rows, mask=rows < stop, other=float("inf"))[None, :]
                    delta = tl.load(delta_ptr + rows, mask=rows < stop, other=0.0)[None, :]
                grad_entropy = delta
                if ENTROPY_GRAD:
                    grad_entropy = tl.load(grad_entropy_ptr + rows, mask=rows < stop, other=0.0)[None, :]
                scores_t = biased(k, q, fk, fq, log2_scale, RANK, PRECISION)  # [N, M]
                if part == 0:
                    attended = (key_start + keys)[:, None] <= (Sk - Sq + rows)[None, :]
                    scores_t = tl.where(attended, scores_t, -float("inf"))
                if log2_number_ptr is not None:
                    scores_t += (log2_number / log2_scale)[:, None]
                p_t = probabilities(scores_t, lse, log2_scale)
                grad_p_t = tl.zeros(scores_t.shape, tl.float32)
                if grad_aL is not None:
                    daL = load_tile(grad_aL, b, h, first_row, stop, BLOCK_M, HEAD_DIM, BLOCK_D, part == 1)
                    grad_p_t = tl.dot(k, tl.trans(daL), grad_p_t, input_precision=PRECISION)  # [N, M]
                    grad_k = tl.dot(p_t.to(q.dtype), daL, grad_k, input_precision=PRECISION)
                if value is not None:
                    do = load_tile(grad_output, b, h, first_row, stop, BLOCK_M, VALUE_DIM, BLOCK_DV, part == 1)
                    if RANK == 0:
                        grad_p_t = tl.dot(v, tl.trans(do), grad_p_t, input_precision=PRECISION)
                    # With factors, registers are scarce: the uses of p come first.
                    grad_v = tl.dot(p_t.to(q.dtype), do, grad_v, input_precision=PRECISION)
                    if RANK > 0:
                        grad_p_t = tl.dot(v, tl.trans(do), grad_p_t, input_precision=PRECISION)
                grad_s_t = _grad_scores(p_t, scores_t, grad_p_t, lse, delta, grad_entropy, log2_scale, ENTROPY_GRAD)
                if grad_aL is not None:
                    grad_s_t *= scale
                grad_s_t = grad_s_t.to(q.dtype)
                grad_k = tl.dot(grad_s_t, q, grad_k, input_precision=PRECISION)
                if RANK > 0:
                    grad_fk = tl.dot(grad_s_t, fq, grad_fk, input_precision=PRECISION)

    if key_mask is not None:
        key_mask_ptr = key_mask.ptr + b * key_mask.stride_b + (first_key + keys) * key_mask.stride_s
        counts = (tl.load(key_mask_ptr, mask=keys < keys_left, other=0) != 0)[:, None]
        grad_k = tl.where(counts, grad_k, 0.0)
        grad_fk = tl.where(counts, grad_fk, 0.0)
        grad_v = tl.where(counts, grad_v, 0.0)
    if grad_aL is None:
        grad_k *= scale
    grad_k_rows_ptr = head_of(grad_key, b, h) + first_key * grad_key.stride_s
    present = keys < keys_left
    store_rows(grad_k_rows_ptr, grad_key.stride_s, keys, present, grad_k, HEAD_DIM, BLOCK_D, ACCUMULATE_K)
    if value is not None:
        grad_v_rows_ptr = head_of(grad_value, b, h) + first_key * grad_value.stride_s
        store_rows(grad_v_rows_ptr, grad_value.stride_s, keys, present, grad_v, VALUE_DIM, BLOCK_DV, ACCUMULATE_V)
    if RANK > 0:
        grad_fk_rows_ptr = grad_fk_ptr + ((b * Sk + first_key) * H + h) * RANK
        store_rows(grad_fk_rows_ptr, H * RANK, keys, present, grad_fk, RANK, RANK)


@dataclass(frozen=True)
class Portable:
    """The arguments of both portable kernels of a backward pass.

    Args:
        query: [B, Sq, H, D]. key: [B, Sk, H, D]. value: [B, Sk, H, Dv] and grad_out: [B, Sq, H, Dv], or both None.
        lse, delta, grad_entropy: [B, H, Sq], contiguous.
        daL: [B, Sq, H, D], of an R-step, whose keys are values, too; or None.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor | None
    grad_out: torch.Tensor | None
    lse: torch.Tensor
    delta: torch.Tensor
    scale: float
    grad_entropy: torch.Tensor | None = None
    bias: Bias = NO_BIAS
    daL: torch.Tensor | None = None

    def _arguments(self) -> tuple[Any, ...]:
        tensors = (strided(x) for x in (self.query, self.key, self.value))
        gradients = strided(self.grad_out), strided(self.daL)
        return *tensors, *self.bias.arguments(), *gradients, self.lse, self.delta, self.grad_entropy

    def _constants(self) -> dict[str, Any]:
        D, Dv = self.query.shape[3], 1 if self.value is None else self.value.shape[3]
        return {
            "HEAD_DIM": D, "BLOCK_D": block_dim(D), "VALUE_DIM": Dv, "BLOCK_DV": block_dim(Dv),
            "ENTROPY_GRAD": self.grad_entropy is not None, "PRECISION": dot_precision(self.query.dtype),
            **self.bias.constants(),
        }  # fmt: skip

    def rows(
        self,
        work: Work,
        options: dict[str, int],
        dq: torch.Tensor,
        *,
        add: bool,
        parts: torch.Tensor | None = None,
        dfq: torch.Tensor | None = None,
        cR: torch.Tensor | None = None,
        dcR: torch.Tensor | None = None,
        min_mass: float = 0.0,
    ) -> None:
        """Write dq [B, Sq, H, D], or add to it, and dfq; with cR and dcR [B, H, Sq] see `_backward_q_kernel`."""
        B, Sq, H, _ = self.query.shape
        items = work.items.shape[0]
        launcher(_backward_q_kernel, (items * B * H,))(
            *self._arguments(), strided(dq), dfq, cR, dcR, parts, work.items, work.ranges, items, work.slots, H, Sq,
            self.key.shape[1], self.scale, log2_scale_of(self.scale), min_mass, ACCUMULATE=add,
            ONE_RANGE=work.one_range, **self._constants(), **options,
        )  # fmt: skip

    def columns(
        self,
        work: Work,
        options: dict[str, int],
        dk: torch.Tensor,
        dv: torch.Tensor | None,
        *,
        add: tuple[bool, bool],
        dfk: torch.Tensor | None = None,
    ) -> None:
        """Write dk [B, Sk, H, D] and dv [B, Sk, H, Dv], or add to them, and dfk."""
        B, Sq, H, _ = self.query.shape
        items = work.items.shape[0]
        launcher(_backward_kv_kernel, (items * B * H,))(
            *self._arguments(), strided(dk), dfk, strided(dv), work.items, work.ranges, items, H, Sq,
            self.key.shape[1], self.scale, log2_scale_of(self.scale), ACCUMULATE_K=add[0], ACCUMULATE_V=add[1],
            ONE_RANGE=work.one_range,
            **self._constants(), **options,
        )  # fmt: skip


def flash_backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor | None,
    segments: tuple[Segment, ...],
    *,
    scale: float,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    splits: int | None = None,
    bias: Bias = NO_BIAS,
    dfq: torch.Tensor | None = None,
    dfk: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Differentiate `flash_forward`; arguments are not checked.

    Args:
        grad_out: [B, Sq, H, Dv]. grad_lse, grad_entropy: [B, H, Sq], or None for no gradient through them.
        query, key, value, segments, scale: as in the forward pass.
        out, lse, entropy: what it returned; the entropy is only needed with `grad_entropy`. Only the rows of the
            segments are read.
        dq, dk, dv: tensors of any dtype to add the gradients to, in the shapes of query, key and value; new ones, in
            their dtypes, if None.
        splits: as in the forward pass, for dQ; 1 with a bias.
        bias: as in the forward pass. dfq, dfk: dφq [B, Sq, H, R] and dφk [B, Sk, H, R] to write, contiguous.

    Returns:
        (dq, dk, dv).
    """
    B, Sq, H, D = query.shape
    Dv = value.shape[3]
    device = query.device
    grad_out = unit_stride(grad_out)
    # The copy engine loads the statistics of queries, 4 bytes each, from multiples of 16 bytes only.
    if bias is NO_BIAS:
        # Those for Hopper lack the gradient through the entropy, which training stops.
        fits = grad_entropy is None and hopper_fits("flash_entropy", query, key, value, grad_out)
        on_hopper = fits and one_range(segments, multiple=4)
        names = ("flash_backward_q", "flash_backward_kv")
    else:
        on_hopper = bias.programs > 0
        names = ("flash_bias_rows", "flash_bias_keys")
    if on_hopper:
        from vmonarch.kernels.hopper import backward as hopper_kernels

        tile, width = hopper_kernels.TILE, block_dim(D)
        row_options = {"BLOCK_M": tile, "BLOCK_N": hopper_kernels.rows_choice(width, bias.rank)["block"]}
        column_options = {"BLOCK_M": hopper_kernels.keys_choice(width, True, bias.rank)["block"], "BLOCK_N": tile}
        # Whether the last tile of rows, and of keys, is no more than half of one.
        half_tiles = [bias is not NO_BIAS and 0 < S % tile <= tile // 2 for S in (Sq, key.shape[1])]
    else:
        widest = max(D, Dv, bias.rank)
        row_options, column_options = (launch_options(name, device, query.dtype, widest) for name in names)
    BLOCK_M, BLOCK_N = row_options["BLOCK_M"], row_options["BLOCK_N"]
    rows = row_work(segments, BLOCK_M, BLOCK_N, B * H, processors(device), splits, device)
    rows_once = rows if rows.merges is None else row_work(segments, BLOCK_M, BLOCK_N, 1, 1, 1, device)
    columns = row_work(transposed(segments), column_options["BLOCK_N"], column_options["BLOCK_M"], 1, 1, 1, device)
    out = unit_stride(out)
    lse = lse.contiguous()
    entropy, grad_lse, grad_entropy = (
        None if x is None else x.to(torch.float32).contiguous() for x in (entropy, grad_lse, grad_entropy)
    )
    # For Hopper every row is folded, even rows of no segment.
    delta = (query.new_zeros if on_hopper else query.new_empty)(B, H, Sq, dtype=torch.float32)
    add_to_q, add_to_k, add_to_v = (given is not None for given in (dq, dk, dv))
    dq = _new_gradient(query, rows.covered) if dq is None else dq
    dk = _new_gradient(key, columns.covered) if dk is None else dk
    dv = _new_gradient(value, columns.covered) if dv is None else dv
    portable = Portable(query, key, value, grad_out, lse, delta, scale, grad_entropy=grad_entropy, bias=bias)
    parts = None
    if rows.merges is not None:
        parts = query.new_empty(B * H, rows.slots, BLOCK_M, D, dtype=torch.float32)
    row_deltas(grad_out, out, grad_lse, entropy, grad_entropy, delta, rows_once, BLOCK_M)
    if on_hopper:
        folded = hopper_kernels.fold(lse, delta, Sq, scale)
        hopper_kernels.launch_rows(
            query, key, value, None, grad_out, folded, dq, tiles=(rows.items.shape[0], B * H), heads=H, scale=scale,
            work=rows, tokens=Sq, parts=parts, add=add_to_q, half_tiles=half_tiles[0], factors=bias.factors,
            dfq=dfq,
        )  # fmt: skip
    else:
        portable.rows(rows, row_options, dq, add=add_to_q, parts=parts, dfq=dfq)
    if rows.merges is not None:
        # The kernel for Hopper has the scale in already.
        launcher(_sum_parts_kernel, (rows.merges.shape[0] * (BLOCK_M // COMBINE_ROWS),))(
            strided(dq), parts, rows.merges, H, 1.0 if on_hopper else scale, HEAD_DIM=D, BLOCK_D=block_dim(D),
            BLOCK_M=BLOCK_M, ROWS=COMBINE_ROWS, ACCUMULATE=add_to_q, num_warps=4,
        )  # fmt: skip
    if on_hopper:
        hopper_kernels.launch_keys(
            query, key, value, None, grad_out, folded, dk, dv, tiles=(columns.items.shape[0], B * H), heads=H,
            scale=scale, work=columns, tokens=Sq, add=(add_to_k, add_to_v), half_tiles=half_tiles[1],
            factors=bias.factors, dfk=dfk,
        )  # fmt: skip
    else:
        portable.columns(columns, column_options, dk, dv, add=(add_to_k, add_to_v), dfk=dfk)
    return dq, dk, dv


def _new_gradient(tensor: torch.Tensor, covered: int) -> torch.Tensor:
    """A contiguous tensor for the gradient of `tensor` [B, S, H, D]; zero if only some of its rows will be written."""
    return tensor.new_empty(tensor.shape) if covered == tensor.shape[1] else tensor.new_zeros(tensor.shape)
