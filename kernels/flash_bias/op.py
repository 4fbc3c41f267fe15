"""FlashBias as a torch operator, on the kernels of flash attention (`flash_entropy`), which add the bias to the logits.

Shapes: B batch, Sq queries, Sk keys, H heads, D head dim, E value dim, R bias rank. Factors are [B or 1, S, H or 1, R].
"""

from __future__ import annotations

from typing import Any

import torch

from vmonarch.kernels.common.launch import block_dim, hopper_fits, tma_fits, unit_stride
from vmonarch.kernels.common.operators import operator
from vmonarch.kernels.common.replay import replayed
from vmonarch.kernels.flash_bias.factors import gradients_of_cut, in_dtype
from vmonarch.kernels.flash_entropy.backward import flash_backward
from vmonarch.kernels.flash_entropy.forward import HOPPER_KEYS, Bias, flash_forward
from vmonarch.kernels.flash_entropy.segments import Segment, all_pairs

# The kernels for Hopper take ranks up to this, and this many rows of a tile.
HOPPER_RANK = 64
HOPPER_ROWS = 128
# Heads and ranks up to this leave registers for two programs.
NARROW = 32


def bias_for_kernels(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_factor: torch.Tensor,
    key_factor: torch.Tensor,
    key_mask: torch.Tensor | None,
    causal: bool,
    grad_out: torch.Tensor | None = None,
) -> Bias:
    """The bias in the form of the kernels that can take these tensors, those for Hopper where they can.

    Args:
        query_factor: [B or 1, Sq, H or 1, R]. key_factor: [B or 1, Sk, H or 1, R].
        grad_out: [B, Sq, H, E] in the backward pass.
    """
    cut = in_dtype(query_factor, key_factor, query.dtype)
    rank = cut[0].shape[3]
    if (
        key_mask is None
        and rank <= HOPPER_RANK
        # The diagonal has to be in the last tile of keys of a tile of rows.
        and not (causal and (grad_out is not None or (key.shape[1] - query.shape[1]) % HOPPER_KEYS))
        and hopper_fits("flash_bias", query, key, value, *(() if grad_out is None else (grad_out,)))
    ):
        # There rows of factors take a multiple of 16 bytes.
        factors = _with_columns(cut, -(-rank // 8) * 8)
        # A second program works while the other begins or ends a tile of rows.
        programs = 2 if max(query.shape[3], rank) <= NARROW and not causal else 1
        if tma_fits(*factors):
            return Bias(factors, None, causal, programs)
    # Masked columns would cost registers.
    return Bias(_with_columns(cut, block_dim(rank)), key_mask, causal, programs=0)


def _with_columns(factors: tuple[torch.Tensor, torch.Tensor], columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors with zero columns after their own, and of expanded dimensions what is there."""
    added = columns - factors[0].shape[3]
    there = (f[: 1 if f.stride(0) == 0 else None, :, : 1 if f.stride(2) == 0 else None] for f in factors)
    query_factor, key_factor = (torch.nn.functional.pad(f, (0, added)) if added else unit_stride(f) for f in there)
    return query_factor, key_factor


@replayed
def _forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, Sq, H, E] in the dtype of the query, lse [B, H, Sq] in float32)."""
    query, key, value, *factors, key_mask, scale, causal = inputs
    bias = bias_for_kernels(query, key, value, factors[0], factors[1], key_mask, causal)
    Sq, Sk = query.shape[1], key.shape[1]
    # The kernel for Hopper is told where the keys of a tile of rows end.
    rows = HOPPER_ROWS if bias.programs and causal else Sq
    segments = tuple(
        Segment(first, min(first + rows, Sq), ((0, min(first + rows + Sk - Sq, Sk)),)) for first in range(0, Sq, rows)
    )
    splits = None if bias.programs else 1
    out, lse, _ = flash_forward(query, key, value, segments, scale=scale, entropy=False, splits=splits, bias=bias)
    return out, lse


@replayed
def _backward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv, dφq, dφk), each in the shape and dtype of its input."""
    grad_out, grad_lse, query, key, value, *factors, key_mask, out, lse, scale, causal = inputs
    B, Sq, H, _ = query.shape
    rank = factors[0].shape[3]
    grad_out = unit_stride(grad_out)
    if grad_lse is not None and key_mask is not None:
        # A query without any key has no gradient, whatever its lse's is.
        grad_lse = grad_lse.masked_fill(lse == -torch.inf, 0.0)
    bias = bias_for_kernels(query, key, value, factors[0], factors[1], key_mask, causal, grad_out)
    # Sums of gradients are taken in float32.
    whole = (B, H, query.dtype)
    dtypes = [f.dtype if (f.shape[0], f.shape[2], f.dtype) == whole else torch.float32 for f in factors]
    dfq, dfk = (query.new_empty(B, f.shape[1], H, bias.rank, dtype=d) for f, d in zip(factors, dtypes, strict=True))
    gradients = flash_backward(
        grad_out, grad_lse, None, query, key, value, out, lse, None, all_pairs(Sq, key.shape[1]),
        scale=scale, splits=1, bias=bias, dfq=dfq, dfk=dfk,
    )  # fmt: skip
    if factors[0].dtype == query.dtype:
        dfq, dfk = dfq[..., :rank], dfk[..., :rank]
    else:
        dfq, dfk = gradients_of_cut(dfq, dfk, rank, query.dtype)
    # A factor that batch entries or heads share has the sum of their gradients.
    return *gradients, *(
        d.sum_to_size(f.shape).to(f.dtype).contiguous() for d, f in zip((dfq, dfk), factors, strict=True)
    )


_operator = operator(
    "vmonarch::flash_bias",
    _forward,
    _backward,
    "Tensor query, Tensor key, Tensor value, Tensor query_factor, Tensor key_factor, Tensor? key_mask,"
    " float scale, bool causal",
    gradients=5,
)


def flash_bias_attention_triton(
    query: torch.Tensor, *others: torch.Tensor, scale: float, causal: bool, key_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by the kernels; arguments as in `flash_bias_attention`, already checked; `others` in its order."""
    if scale <= 0:
        # The kernels divide the bias by the scale and take the maximum of what is left.
        query, scale = (-query, -scale) if scale < 0 else (query * 0, 1.0)
    return _operator(query, *others, key_mask, scale, causal)
