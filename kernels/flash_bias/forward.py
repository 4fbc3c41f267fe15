"""Flash attention with a low-rank bias, forward (FlashBias, Eq. 3): two small products make the logits of a tile.

The bias never exists beyond a tile. Scores are kept without the softmax scale, so φq·φk is divided by it in float32;
folded into a 16-bit φq, the quotient would be rounded.

Shapes: B batch, Sq queries, Sk keys, H heads, D head dim, E value dim, R bias rank; M queries and N keys of one tile.
Tensors are [B, S, H, D] with any strides but the last; factors have stride 0 where batch or heads share them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from vmonarch.kernels.common.launch import block_dim, dot_precision, hopper_fits, launch_options, tma_fits
from vmonarch.kernels.common.softmax import log2_partition, log2_scale_of, online_softmax
from vmonarch.kernels.common.tiles import load_rows, store_rows
from vmonarch.kernels.flash_entropy.forward import combine_parts, new_parts
from vmonarch.kernels.flash_entropy.segments import Segment, processors

# What the kernels for Hopper take: a rank up to this, and this many keys of a tile.
HOPPER_RANK = 64
HOPPER_KEYS = 128
# Heads and ranks up to this leave registers for two programs.
NARROW = 32


@triton.jit
def is_attended(i, j, Sq, Sk, mask_ptr, stride_ms, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr):
    """Whether query i attends to key j; they broadcast. Query Sq - 1 sees all keys."""
    attended = j < Sk
    if CAUSAL:
        attended = attended & (j <= i + Sk - Sq)
    if HAS_MASK:
        attended = attended & (tl.load(mask_ptr + j.to(tl.int64) * stride_ms, mask=j < Sk, other=0) != 0)
    return attended


@triton.jit
def key_bounds(
    first_row, Sq, Sk, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Keys that all rows of a tile attend to, a whole number of tiles, and keys that any of them attends to."""
    stop = Sk
    whole = Sk
    if CAUSAL:
        stop = tl.minimum(Sk, first_row + BLOCK_M + Sk - Sq)
        whole = tl.minimum(Sk, first_row + 1 + Sk - Sq)
    if HAS_MASK:
        whole = 0
    return whole // BLOCK_N * BLOCK_N, stop


@triton.jit
def biased_scores(x, fx, y, fy, inverse_scale, R: tl.constexpr, PRECISION: tl.constexpr):
    """x·yᵀ + φx·φyᵀ / scale [X, Y]; without a bias (R = 0) the factors are not read."""
    scores = tl.zeros([x.shape[0], y.shape[0]], tl.float32)
    if R > 0:
        scores = tl.dot(fx, tl.trans(fy), input_precision=PRECISION) * inverse_scale
    return tl.dot(x, tl.trans(y), scores, input_precision=PRECISION)


@triton.jit
def _attend_keys(
    acc, row_max, row_sum, q, fq, start, stop, first_row,
    k_ptr, v_ptr, fk_ptr, mask_ptr, stride_ks, stride_vs, stride_fks, stride_ms, Sq, Sk, inverse_scale, log2_scale,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Take the keys [start, stop) into the running sums, BLOCK_N at a time."""
    for first in range(start, stop, BLOCK_N):
        j = first + tl.arange(0, BLOCK_N)
        inside = j < Sk
        k = load_rows(k_ptr, stride_ks, j, inside, D, BLOCK_D, MASKED)  # [N, D]
        fk = load_rows(fk_ptr, stride_fks, j, inside, R, BLOCK_R, MASKED) if R > 0 else k  # [N, R]
        scores = biased_scores(q, fq, k, fk, inverse_scale, R, PRECISION)  # [M, N]
        if MASKED:
            i = first_row + tl.arange(0, BLOCK_M)
            attended = is_attended(i[:, None], j[None, :], Sq, Sk, mask_ptr, stride_ms, CAUSAL, HAS_MASK)
            scores = tl.where(attended, scores, -float("inf"))
        p, alpha, row_max, row_sum, _ = online_softmax(scores, row_max, row_sum, row_sum, log2_scale, False, HAS_MASK)
        v = load_rows(v_ptr, stride_vs, j, inside, E, BLOCK_E, MASKED)  # [N, E]
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["H", "Sq", "Sk", "row_tiles"])
def _flash_bias_kernel(
    q_ptr, k_ptr, v_ptr, fq_ptr, fk_ptr, mask_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_fqb, stride_fqs, stride_fqh, stride_fkb, stride_fks, stride_fkh, stride_mb, stride_ms,
    stride_ob, stride_os, stride_oh, H, Sq, Sk, row_tiles, inverse_scale, log2_scale,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out and lse of one tile of queries of one head."""
    pid = tl.program_id(0)
    bh = (pid // row_tiles).to(tl.int64)
    b = bh // H
    h = bh % H
    # With CAUSAL the last rows have most keys, so they begin.
    first_row = (row_tiles - 1 - pid % row_tiles) * BLOCK_M
    i = first_row + tl.arange(0, BLOCK_M)
    present = i < Sq
    q = load_rows(q_ptr + b * stride_qb + h * stride_qh, stride_qs, i, present, D, BLOCK_D, True)
    fq = load_rows(fq_ptr + b * stride_fqb + h * stride_fqh, stride_fqs, i, present, R, BLOCK_R, True)
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    fk_ptr += b * stride_fkb + h * stride_fkh
    if HAS_MASK:
        mask_ptr += b * stride_mb
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    whole, stop = key_bounds(first_row, Sq, Sk, CAUSAL, HAS_MASK, BLOCK_M, BLOCK_N)
    acc, row_max, row_sum = _attend_keys(
        acc, row_max, row_sum, q, fq, 0, whole, first_row,
        k_ptr, v_ptr, fk_ptr, mask_ptr, stride_ks, stride_vs, stride_fks, stride_ms, Sq, Sk, inverse_scale, log2_scale,
        D, E, R, CAUSAL, HAS_MASK, False, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, BLOCK_R,
    )  # fmt: skip
    acc, row_max, row_sum = _attend_keys(
        acc, row_max, row_sum, q, fq, whole, stop, first_row,
        k_ptr, v_ptr, fk_ptr, mask_ptr, stride_ks, stride_vs, stride_fks, stride_ms, Sq, Sk, inverse_scale, log2_scale,
        D, E, R, CAUSAL, HAS_MASK, True, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, BLOCK_R,
    )  # fmt: skip
    out = acc * (1.0 / tl.where(row_sum == 0, 1.0, row_sum))[:, None]
    store_rows(out_ptr + b * stride_ob + h * stride_oh, stride_os, i, present, out, E, BLOCK_E)
    tl.store(lse_ptr + bh * Sq + i, log2_partition(row_max, row_sum) * 0.6931471805599453, mask=present)


@dataclass(frozen=True)
class Launch:
    """What the kernels of one call share.

    Args:
        query: [B, Sq, H, D]. key: [B, Sk, H, D]. value: [B, Sk, H, E].
        query_factor: [B, Sq, H, R]. key_factor: [B, Sk, H, R]; expanded, of the dtype of `query`. With R = 0 there is
            no bias, which benchmarks compare with.
        key_mask: bool [B, Sk], True where a key counts; or None.
        scale: above 0.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_factor: torch.Tensor
    key_factor: torch.Tensor
    key_mask: torch.Tensor | None
    scale: float
    causal: bool

    def options(self, kernel: str) -> dict[str, int]:
        widest = max(self.query.shape[3], self.value.shape[3], self.query_factor.shape[3])
        return launch_options(kernel, self.query.device, self.query.dtype, widest)

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.query, self.key, self.value, self.query_factor, self.key_factor, self.key_mask

    def strides(self) -> tuple[int, ...]:
        inputs = (self.query, self.key, self.value, self.query_factor, self.key_factor)
        strides = [stride for tensor in inputs for stride in tensor.stride()[:3]]
        return *strides, *((0, 0) if self.key_mask is None else self.key_mask.stride())

    def numbers(self) -> tuple[float, ...]:
        return 1.0 / self.scale, log2_scale_of(self.scale)

    def constants(self) -> dict[str, object]:
        D, E, R = self.query.shape[3], self.value.shape[3], self.query_factor.shape[3]
        return {
            "D": D,
            "E": E,
            "R": R,
            "BLOCK_D": block_dim(D),
            "BLOCK_E": block_dim(E),
            "BLOCK_R": block_dim(R),
            "CAUSAL": self.causal,
            "HAS_MASK": self.key_mask is not None,
            "PRECISION": dot_precision(self.query.dtype),
        }

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """φq and φk without the expanded dimensions, [B or 1, S, H or 1, R]."""
        query_factor, key_factor = (
            f[: 1 if f.stride(0) == 0 else None, :, : 1 if f.stride(2) == 0 else None]
            for f in (self.query_factor, self.key_factor)
        )
        return query_factor, key_factor

    def on_hopper(self, backward: bool) -> bool:
        """Whether the kernels for Hopper can take this, if they can address the factors."""
        skipped = self.key.shape[1] - self.query.shape[1]
        return (
            self.key_mask is None
            and self.query_factor.shape[3] <= HOPPER_RANK
            # The diagonal has to be in the last tile of keys of a tile of rows.
            and not (self.causal and (backward or skipped % HOPPER_KEYS))
            and hopper_fits("flash_bias", self.query, self.key, self.value)
        )

    def hopper_factors(self, backward: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """φq and φk as the kernels for Hopper take them, not expanded; None if the portable ones are to be used."""
        factors = self.factors()
        rank = self.query_factor.shape[3]
        return factors if self.on_hopper(backward) and (rank == 0 or tma_fits(*factors)) else None

    def padded(self, backward: bool) -> Launch:
        """The same with zero columns of the factors where the kernels need them.

        On Hopper the rows of factors take a multiple of 16 bytes; elsewhere masked columns would cost registers.
        """
        rank = self.query_factor.shape[3]
        columns = -(-rank // 8) * 8 if self.on_hopper(backward) else block_dim(rank) if rank else 0
        if columns == rank:
            return self
        B, _, H, _ = self.query.shape
        query_factor, key_factor = (
            torch.nn.functional.pad(factor, (0, columns - rank)).expand(B, -1, H, -1) for factor in self.factors()
        )
        return replace(self, query_factor=query_factor, key_factor=key_factor)


def _forward_on_hopper(
    launch: Launch, factors: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, lse: torch.Tensor
) -> None:
    from vmonarch.kernels.hopper.flash import BLOCK_M, flash, schedule

    query, key = launch.query, launch.key
    B, Sq, H, D = query.shape
    Sk = key.shape[1]
    # Narrow heads leave registers for a second program, which works while the other begins or ends a tile of rows.
    narrow = max(D, factors[0].shape[3]) <= NARROW and not launch.causal
    programs, block_n = (2, HOPPER_KEYS // 2) if narrow else (1, HOPPER_KEYS)
    options = {**launch.options("hopper_flash"), "BLOCK_N": block_n}
    rows = BLOCK_M if launch.causal else Sq
    segments = tuple(
        Segment(first, min(first + rows, Sq), ((0, min(first + rows + Sk - Sq, Sk)),)) for first in range(0, Sq, rows)
    )
    work = schedule(segments, BLOCK_M, block_n, B * H, programs * processors(query.device), query.device)
    parts = new_parts(query, work.slots, BLOCK_M, D, False)
    flash(
        query, key, launch.value, work, scale=launch.scale, out=out, lse=lse, entropy=None, parts=parts,
        options=options, factors=factors if factors[0].shape[3] else None, causal=launch.causal, programs=programs,
    )  # fmt: skip
    combine_parts(parts, work.merges, BLOCK_M, 1, out, lse, None)


def flash_bias_forward(launch: Launch) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, Sq, H, E] in the dtype of the query, lse [B, H, Sq] in float32); arguments are not checked."""
    B, Sq, H, _ = launch.query.shape
    out = launch.query.new_empty(B, Sq, H, launch.value.shape[3])
    lse = launch.query.new_empty(B, H, Sq, dtype=torch.float32)
    with torch.cuda.device_of(launch.query):
        if factors := launch.hopper_factors(backward=False):
            _forward_on_hopper(launch, factors, out, lse)
            return out, lse
        options = launch.options("flash_bias_forward")
        row_tiles = triton.cdiv(Sq, options["BLOCK_M"])
        _flash_bias_kernel[(row_tiles * B * H,)](
            *launch.tensors(), out, lse, *launch.strides(), *out.stride()[:3], H, Sq, launch.key.shape[1], row_tiles,
            *launch.numbers(), **launch.constants(), **options,
        )  # fmt: skip
    return out, lse
