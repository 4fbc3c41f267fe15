"""Gradients of flash attention with a low-rank bias (FlashBias, Eq. 3; they are products like those of q and k).

With S = q·kᵀ·scale + φq·φkᵀ, P = exp(S - lse) and dX the gradient of X:
    dS = P ∘ (dO·vᵀ - rowsum(dO ∘ O) + dlse),    dv = Pᵀ·dO,
    dq = scale·dS·k,    dφq = dS·φk,    dk = scale·dSᵀ·q,    dφk = dSᵀ·φq
One kernel owns rows (dq, dφq) and another keys (dk, dv, dφk), so there are no atomics and every sum has one order. The
second works on transposed tiles Sᵀ, so that no product is ever transposed.

Shapes: as in `forward.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vmonarch.kernels.common.launch import block_dim, hopper_fits, unit_stride
from vmonarch.kernels.common.softmax import probabilities, row_delta
from vmonarch.kernels.common.tiles import load_rows, store_rows
from vmonarch.kernels.flash_bias.forward import Launch, biased_scores, is_attended, key_bounds
from vmonarch.kernels.flash_entropy.backward import row_deltas
from vmonarch.kernels.flash_entropy.segments import Segment, column_work, row_work


@triton.jit
def _add_keys(
    dq, dfq, q, fq, do, lse, delta, start, stop, first_row,
    k_ptr, v_ptr, fk_ptr, mask_ptr, stride_ks, stride_vs, stride_fks, stride_ms, Sq, Sk, inverse_scale, log2_scale,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Add what the keys [start, stop) contribute to dq / scale and dφq."""
    for first in range(start, stop, BLOCK_N):
        j = first + tl.arange(0, BLOCK_N)
        inside = j < Sk
        k = load_rows(k_ptr, stride_ks, j, inside, D, BLOCK_D, MASKED)  # [N, D]
        v = load_rows(v_ptr, stride_vs, j, inside, E, BLOCK_E, MASKED)  # [N, E]
        fk = load_rows(fk_ptr, stride_fks, j, inside, R, BLOCK_R, MASKED) if R > 0 else k  # [N, R]
        scores = biased_scores(q, fq, k, fk, inverse_scale, R, PRECISION)  # [M, N]
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if MASKED:
            i = first_row + tl.arange(0, BLOCK_M)
            attended = is_attended(i[:, None], j[None, :], Sq, Sk, mask_ptr, stride_ms, CAUSAL, HAS_MASK)
            scores = tl.where(attended, scores, -float("inf"))
        ds = probabilities(scores, lse[:, None], log2_scale) * (dp - delta[:, None])
        ds = ds.to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
        if R > 0:
            dfq = tl.dot(ds, fk, dfq, input_precision=PRECISION)
    return dq, dfq


@triton.jit(do_not_specialize=["H", "Sq", "Sk", "row_tiles"])
def _flash_bias_rows_kernel(
    q_ptr, k_ptr, v_ptr, fq_ptr, fk_ptr, mask_ptr, do_ptr, out_ptr, lse_ptr, dlse_ptr, delta_ptr, dq_ptr, dfq_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_fqb, stride_fqs, stride_fqh, stride_fkb, stride_fks, stride_fkh, stride_mb, stride_ms,
    stride_gb, stride_gs, stride_gh, stride_ob, stride_os, stride_oh, H, Sq, Sk, row_tiles,
    scale, inverse_scale, log2_scale,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """dq [B, Sq, H, D] and dφq [B, Sq, H, R], contiguous, of one tile of rows; and δ for the kernel of the keys."""
    pid = tl.program_id(0)
    bh = (pid // row_tiles).to(tl.int64)
    b = bh // H
    h = bh % H
    first_row = (row_tiles - 1 - pid % row_tiles) * BLOCK_M
    i = first_row + tl.arange(0, BLOCK_M)
    present = i < Sq
    q = load_rows(q_ptr + b * stride_qb + h * stride_qh, stride_qs, i, present, D, BLOCK_D, True)
    fq = load_rows(fq_ptr + b * stride_fqb + h * stride_fqh, stride_fqs, i, present, R, BLOCK_R, True)
    do = load_rows(do_ptr + b * stride_gb + h * stride_gh, stride_gs, i, present, E, BLOCK_E, True)
    out = load_rows(out_ptr + b * stride_ob + h * stride_oh, stride_os, i, present, E, BLOCK_E, True)
    lse = tl.load(lse_ptr + bh * Sq + i, mask=present, other=float("inf"))
    delta = row_delta(do, out, dlse_ptr, bh * Sq + i, present)
    # A row without any key has no gradient, whatever its lse's is.
    delta = tl.where(lse == -float("inf"), 0.0, delta)
    tl.store(delta_ptr + bh * Sq + i, delta, mask=present)
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    fk_ptr += b * stride_fkb + h * stride_fkh
    if HAS_MASK:
        mask_ptr += b * stride_mb
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dfq = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    whole, stop = key_bounds(first_row, Sq, Sk, CAUSAL, HAS_MASK, BLOCK_M, BLOCK_N)
    dq, dfq = _add_keys(
        dq, dfq, q, fq, do, lse, delta, 0, whole, first_row,
        k_ptr, v_ptr, fk_ptr, mask_ptr, stride_ks, stride_vs, stride_fks, stride_ms, Sq, Sk, inverse_scale, log2_scale,
        D, E, R, CAUSAL, HAS_MASK, False, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, BLOCK_R,
    )  # fmt: skip
    dq, dfq = _add_keys(
        dq, dfq, q, fq, do, lse, delta, whole, stop, first_row,
        k_ptr, v_ptr, fk_ptr, mask_ptr, stride_ks, stride_vs, stride_fks, stride_ms, Sq, Sk, inverse_scale, log2_scale,
        D, E, R, CAUSAL, HAS_MASK, True, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, BLOCK_R,
    )  # fmt: skip
    row = (b * Sq + i) * H + h
    store_rows(dq_ptr, D, row, present, dq * scale, D, BLOCK_D)
    store_rows(dfq_ptr, R, row, present, dfq, R, BLOCK_R)


@triton.jit
def _add_rows(
    dk, dv, dfk, k, v, fk, start, stop, j, first_stat,
    q_ptr, fq_ptr, do_ptr, lse_ptr, delta_ptr, mask_ptr, stride_qs, stride_fqs, stride_gs, stride_ms,
    Sq, Sk, inverse_scale, log2_scale,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Add what the queries [start, stop) contribute to dk / scale, dv and dφk of the keys j."""
    for first in range(start, stop, BLOCK_M):
        i = first + tl.arange(0, BLOCK_M)
        present = i < Sq
        q = load_rows(q_ptr, stride_qs, i, present, D, BLOCK_D, MASKED)  # [M, D]
        fq = load_rows(fq_ptr, stride_fqs, i, present, R, BLOCK_R, MASKED) if R > 0 else q  # [M, R]
        do = load_rows(do_ptr, stride_gs, i, present, E, BLOCK_E, MASKED)  # [M, E]
        # Where there is no row, lse = inf makes p = 0.
        lse = tl.load(lse_ptr + first_stat + i, mask=present, other=float("inf"))
        delta = tl.load(delta_ptr + first_stat + i, mask=present, other=0.0)
        scores = biased_scores(k, fk, q, fq, inverse_scale, R, PRECISION)  # [N, M]
        if MASKED:
            attended = is_attended(i[None, :], j[:, None], Sq, Sk, mask_ptr, stride_ms, CAUSAL, HAS_MASK)
            scores = tl.where(attended, scores, -float("inf"))
        p = probabilities(scores, lse[None, :], log2_scale)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds = (p * (dp - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if R > 0:
            dfk = tl.dot(ds, fq, dfk, input_precision=PRECISION)
    return dk, dv, dfk


@triton.jit(do_not_specialize=["H", "Sq", "Sk", "key_tiles"])
def _flash_bias_keys_kernel(
    q_ptr, k_ptr, v_ptr, fq_ptr, fk_ptr, mask_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, dfk_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_fqb, stride_fqs, stride_fqh, stride_fkb, stride_fks, stride_fkh, stride_mb, stride_ms,
    stride_gb, stride_gs, stride_gh, H, Sq, Sk, key_tiles, scale, inverse_scale, log2_scale,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """dk [B, Sk, H, D], dv [B, Sk, H, E] and dφk [B, Sk, H, R], contiguous, of one tile of keys."""
    pid = tl.program_id(0)
    bh = (pid // key_tiles).to(tl.int64)
    b = bh // H
    h = bh % H
    first_key = pid % key_tiles * BLOCK_N
    j = first_key + tl.arange(0, BLOCK_N)
    inside = j < Sk
    k = load_rows(k_ptr + b * stride_kb + h * stride_kh, stride_ks, j, inside, D, BLOCK_D, True)
    v = load_rows(v_ptr + b * stride_vb + h * stride_vh, stride_vs, j, inside, E, BLOCK_E, True)
    fk = load_rows(fk_ptr + b * stride_fkb + h * stride_fkh, stride_fks, j, inside, R, BLOCK_R, True)
    q_ptr += b * stride_qb + h * stride_qh
    fq_ptr += b * stride_fqb + h * stride_fqh
    do_ptr += b * stride_gb + h * stride_gh
    if HAS_MASK:
        mask_ptr += b * stride_mb
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    dfk = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    # Rows from `start` on attend to some of these keys, those from `whole` to `stop` to all.
    start = 0
    whole = 0
    if CAUSAL:
        start = tl.maximum(0, first_key + Sq - Sk) // BLOCK_M * BLOCK_M
        whole = tl.cdiv(tl.maximum(0, first_key + BLOCK_N - 1 + Sq - Sk), BLOCK_M) * BLOCK_M
    if HAS_MASK:
        whole = Sq
    stop = tl.maximum(whole, Sq // BLOCK_M * BLOCK_M)
    dk, dv, dfk = _add_rows(
        dk, dv, dfk, k, v, fk, start, tl.minimum(whole, Sq), j, bh * Sq,
        q_ptr, fq_ptr, do_ptr, lse_ptr, delta_ptr, mask_ptr, stride_qs, stride_fqs, stride_gs, stride_ms,
        Sq, Sk, inverse_scale, log2_scale, D, E, R, CAUSAL, HAS_MASK, True, PRECISION,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, BLOCK_R,
    )  # fmt: skip
    dk, dv, dfk = _add_rows(
        dk, dv, dfk, k, v, fk, whole, stop, j, bh * Sq,
        q_ptr, fq_ptr, do_ptr, lse_ptr, delta_ptr, mask_ptr, stride_qs, stride_fqs, stride_gs, stride_ms,
        Sq, Sk, inverse_scale, log2_scale, D, E, R, CAUSAL, HAS_MASK, False, PRECISION,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, BLOCK_R,
    )  # fmt: skip
    dk, dv, dfk = _add_rows(
        dk, dv, dfk, k, v, fk, stop, Sq, j, bh * Sq,
        q_ptr, fq_ptr, do_ptr, lse_ptr, delta_ptr, mask_ptr, stride_qs, stride_fqs, stride_gs, stride_ms,
        Sq, Sk, inverse_scale, log2_scale, D, E, R, CAUSAL, HAS_MASK, True, PRECISION,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, BLOCK_R,
    )  # fmt: skip
    row = (b * Sk + j) * H + h
    store_rows(dk_ptr, D, row, inside, dk * scale, D, BLOCK_D)
    store_rows(dv_ptr, E, row, inside, dv, E, BLOCK_E)
    store_rows(dfk_ptr, R, row, inside, dfk, R, BLOCK_R)


def _backward_on_hopper(
    launch: Launch,
    factors: tuple[torch.Tensor, torch.Tensor],
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    gradients: tuple[torch.Tensor, ...],
) -> None:
    from vmonarch.kernels.hopper import backward as hopper_kernels

    query, key, value = launch.query, launch.key, launch.value
    B, Sq, H, D = query.shape
    Sk, R = key.shape[1], factors[0].shape[3]
    dq, dk, dv, dfq, dfk = gradients
    tile, width = hopper_kernels.TILE, block_dim(D)
    segments = (Segment(0, Sq, ((0, Sk),)),)
    rows = row_work(segments, tile, hopper_kernels.rows_choice(width, R)["block"], 1, 1, 1, query.device)
    block = hopper_kernels.keys_choice(width, True, R)["block"]
    columns = column_work(segments, block, tile, query.device)
    delta = torch.empty_like(lse)
    row_deltas(grad_out, out, grad_lse, None, None, delta, rows, tile)
    folded = hopper_kernels.fold(lse, delta, Sq, launch.scale)
    given = factors if R else None
    hopper_kernels.launch_rows(
        query, key, value, None, grad_out, folded, dq, tiles=(rows.items.shape[0], B * H), heads=H,
        scale=launch.scale, work=rows, tokens=Sq, add=False, half_tiles=0 < Sq % tile <= tile // 2,
        factors=given, dfq=dfq,
    )  # fmt: skip
    hopper_kernels.launch_keys(
        query, key, value, None, grad_out, folded, dk, dv, tiles=(columns.items.shape[0], B * H), heads=H,
        scale=launch.scale, work=columns, tokens=Sq, add=(False, False), half_tiles=0 < Sk % tile <= tile // 2,
        factors=given, dfk=dfk,
    )  # fmt: skip


def flash_bias_backward(
    launch: Launch,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    factor_dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) in the dtype of the query, (dφq, dφk), one for every head; arguments are not checked.

    Args:
        grad_out, out: [B, Sq, H, E]. grad_lse, lse: [B, H, Sq].
        factor_dtypes: of dφq and dφk.
    """
    query, key, value = launch.query, launch.key, launch.value
    B, Sq, H, _ = query.shape
    Sk, R = key.shape[1], launch.query_factor.shape[3]
    grad_out = unit_stride(grad_out)
    grad_lse = None if grad_lse is None else grad_lse.to(torch.float32).contiguous()
    out = unit_stride(out)
    dq, dk, dv = (x.new_empty(x.shape) for x in (query, key, value))
    dfq, dfk = (query.new_empty(B, S, H, R, dtype=dtype) for S, dtype in zip((Sq, Sk), factor_dtypes, strict=True))
    gradients = (dq, dk, dv, dfq, dfk)
    constants, numbers = launch.constants(), (launch.scale, *launch.numbers())
    with torch.cuda.device_of(query):
        factors = launch.hopper_factors(backward=True)
        if factors and hopper_fits("flash_bias", query, grad_out):
            _backward_on_hopper(launch, factors, grad_out, grad_lse, out, lse, gradients)
            return gradients
        delta = torch.empty_like(lse)
        options = launch.options("flash_bias_rows")
        tiles = triton.cdiv(Sq, options["BLOCK_M"])
        _flash_bias_rows_kernel[(tiles * B * H,)](
            *launch.tensors(), grad_out, out, lse, grad_lse, delta, dq, dfq, *launch.strides(),
            *grad_out.stride()[:3], *out.stride()[:3], H, Sq, Sk, tiles, *numbers, **constants, **options,
        )  # fmt: skip
        options = launch.options("flash_bias_keys")
        tiles = triton.cdiv(Sk, options["BLOCK_N"])
        _flash_bias_keys_kernel[(tiles * B * H,)](
            *launch.tensors(), grad_out, lse, delta, dk, dv, dfk, *launch.strides(), *grad_out.stride()[:3],
            H, Sq, Sk, tiles, *numbers, **constants, **options,
        )  # fmt: skip
    return gradients
