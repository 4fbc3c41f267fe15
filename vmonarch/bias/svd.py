"""Biases given as matrices, by singular value decomposition (FlashBias, §3.2; heads are split as in §4.3).

Shapes: B batch, Sq queries, Sk keys, H heads, D head dim, E value dim, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vmonarch.kernels.flash_bias.api import flash_bias_attention
from vmonarch.validation import check_positive_integer

# Columns of the factors are a multiple of it.
_MULTIPLE = 8


@dataclass(frozen=True)
class LowRankBias:
    """A bias matrix per head: factors for heads of low rank, the matrix itself for the others.

    Args:
        query_factor: φq [1, Sq, heads of low rank, R]. key_factor: φk [1, Sk, heads of low rank, R]. Heads that need
            less than R columns have them all the same, and are the closer for it.
        dense: [heads of high rank, Sq, Sk].
        low_rank_heads, dense_heads: which heads of the bias these are.
    """

    query_factor: torch.Tensor
    key_factor: torch.Tensor
    dense: torch.Tensor
    low_rank_heads: tuple[int, ...]
    dense_heads: tuple[int, ...]


def svd_factors(bias: torch.Tensor, *, energy: float = 0.99, max_rank: int | None = None) -> LowRankBias:
    """Factorise a bias by its singular values.

    Args:
        bias: [H, Sq, Sk]; it is decomposed in float64 and has no gradient.
        energy: share of Σσ² that every head keeps, above 0 and at most 1 (the paper uses 0.95, 0.99 and 0.995).
        max_rank: heads that need more stay dense; None for half of min(Sq, Sk), above which factors save nothing.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.

    Source: FlashBias, §3.2 and Appendix D.
    """
    if not isinstance(bias, torch.Tensor) or bias.ndim != 3 or 0 in bias.shape:
        got = tuple(bias.shape) if isinstance(bias, torch.Tensor) else type(bias).__name__
        raise ValueError(f"bias must be a tensor [H, Sq, Sk], got {got}")
    if not isinstance(energy, (int, float)) or not 0 < energy <= 1:
        raise ValueError(f"energy must be above 0 and at most 1, got {energy!r}")
    if max_rank is not None:
        check_positive_integer("max_rank", max_rank)
    H, Sq, Sk = bias.shape
    budget = max(1, min(Sq, Sk) // 2) if max_rank is None else max_rank
    U, sigma, Vh = torch.linalg.svd(bias.detach().double(), full_matrices=False)
    kept = sigma.square().cumsum(-1)
    total = kept[:, -1:]
    # A bias of zeros keeps all of its energy with one column.
    share = torch.where(total > 0, kept / total.clamp(min=torch.finfo(kept.dtype).tiny), 1.0)
    # Not quite 1: the last of the sums may miss it by rounding.
    ranks = (share < min(energy, 1 - 1e-12)).sum(-1) + 1
    low = [head for head in range(H) if ranks[head] <= budget]
    high = [head for head in range(H) if ranks[head] > budget]
    most = max((int(ranks[head]) for head in low), default=1)
    rank = min(-(-most // _MULTIPLE) * _MULTIPLE, sigma.shape[1])
    root = sigma[low, :rank].sqrt()
    padding = -(-rank // _MULTIPLE) * _MULTIPLE - rank
    query_factor, key_factor = (
        torch.nn.functional.pad(vectors * root[:, None], (0, padding)).transpose(0, 1)[None].to(bias.dtype).contiguous()
        for vectors in (U[low, :, :rank], Vh[low, :rank].transpose(1, 2))
    )
    return LowRankBias(query_factor, key_factor, bias.detach()[high].contiguous(), tuple(low), tuple(high))


def low_rank_bias_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: LowRankBias,
    *,
    scale: float | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """Attention with a `LowRankBias`: heads of low rank by `flash_bias_attention`, the others with their matrix.

    Args:
        query: [B, Sq, H, D]. key: [B, Sk, H, D]. value: [B, Sk, H, E].
        scale, implementation: as in `flash_bias_attention`.

    Returns:
        [B, Sq, H, E].

    Raises:
        ValueError: the bias has other heads or lengths than query and key.

    Source: FlashBias, §4.3.
    """
    heads = len(bias.low_rank_heads) + len(bias.dense_heads)
    Sq, Sk = bias.query_factor.shape[1], bias.key_factor.shape[1]
    if (query.shape[1], query.shape[2], key.shape[1]) != (Sq, heads, Sk):
        raise ValueError(
            f"bias must be of {query.shape[2]} heads, {query.shape[1]} queries and {key.shape[1]} keys, got {heads},"
            f" {Sq} and {Sk}"
        )
    low, high = list(bias.low_rank_heads), list(bias.dense_heads)
    out = value.new_empty(*query.shape[:3], value.shape[3])
    if low:
        q, k, v = (query, key, value) if not high else (x[:, :, low] for x in (query, key, value))
        query_factor, key_factor = bias.query_factor.to(q.dtype), bias.key_factor.to(q.dtype)
        found = flash_bias_attention(q, k, v, query_factor, key_factor, scale=scale, implementation=implementation)
        if not high:
            return found
        out = out.index_copy(2, torch.tensor(low, device=out.device), found)
    q, k, v = (x[:, :, high].transpose(1, 2) for x in (query, key, value))
    found = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias.dense[None].to(q.dtype), scale=scale
    )
    return out.index_copy(2, torch.tensor(high, device=out.device), found.transpose(1, 2))
