"""Attention with a low-rank bias in plain torch: the specification of the fused kernels (FlashBias, Eq. 3).

Shapes: B batch, Sq queries, Sk keys, H heads, D head dim, E value dim, R bias rank; G = B·H groups, M rows of a chunk.
"""

from __future__ import annotations

import torch

from vmonarch.kernels.flash_entropy.reference import in_row_chunks, softmax_parts, to_groups


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masked: torch.Tensor | None, last_key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention.

    Args:
        query: [G, M, D + R], [q·scale | φq]. key: [G, N, D + R], [k | φk]. value: [G, N, E]. masked: [G, N].
        last_key: [G, M, 1], number of the last key that the row attends to.

    Returns:
        (lse [G, M], out [G, M, E]).
    """
    scores = query @ key.transpose(-1, -2)
    scores = scores.masked_fill(torch.arange(key.shape[1], device=key.device) > last_key, -torch.inf)
    if masked is not None:
        scores = scores.masked_fill(masked.unsqueeze(-2), -torch.inf)
    p, row_sum, lse = softmax_parts(scores)
    return lse, p @ value / row_sum


def flash_bias_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_factor: torch.Tensor,
    key_factor: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    key_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q·kᵀ·scale + φq·φkᵀ)·v; arguments as in `flash_bias_attention`.

    Returns:
        (out [B, Sq, H, E], lse [B, H, Sq]).
    """
    B, Sq, H, _ = query.shape
    Sk = key.shape[1]
    scaled_query = to_groups(query) * scale
    last_key = torch.arange(Sk - Sq if causal else Sk - 1, Sk, device=query.device)[:, None]
    extended_query = torch.cat([scaled_query, to_groups(query_factor.expand(B, -1, H, -1))], -1)
    extended_key = torch.cat([to_groups(key), to_groups(key_factor.expand(B, -1, H, -1))], -1)
    masked = None if key_mask is None else ~key_mask.repeat_interleave(H, 0)
    by_row = (last_key.expand(B * H, Sq, 1),)
    lse, out = in_row_chunks(_attend, extended_query, extended_key, to_groups(value), masked, by_row=by_row)
    return out.unflatten(0, (B, H)).transpose(1, 2).to(query.dtype), lse.unflatten(0, (B, H))
