"""Attention in windows in plain torch: the specification of the kernels (Based, §4.2 and Listing 3).

Shapes: B batch, Sq queries, Sk keys, H heads, D head dim, E value dim, W keys in a window; G = B·H groups.
"""

from __future__ import annotations

import torch

from vmonarch.grid import LatentGrid
from vmonarch.kernels.flash_entropy.reference import recomputed, softmax_parts, to_groups
from vmonarch.kernels.window.neighbours import Window, neighbours

# Gathered keys and values that one chunk of queries may hold, in elements.
MAX_CHUNK_ELEMENTS = 2**25


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, index: torch.Tensor, present: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries [G, M, D], scaled, to the keys [M, W] of each.

    Returns:
        (out [G, M, E], lse [G, M]).
    """
    k, v = key[:, index], value[:, index]  # [G, M, W, ·]
    scores = torch.einsum("gmd,gmwd->gmw", query, k).masked_fill(~present, -torch.inf)
    p, row_sum, lse = softmax_parts(scores)
    return torch.einsum("gmw,gmwe->gme", p / row_sum, v), lse


def window_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid: LatentGrid,
    window: Window,
    causal_axis: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, Sq, H, E], lse [B, H, Sq]); a sequence is the grid (1, 1, Sk)."""
    B, Sq, H, _ = query.shape
    q, k, v = to_groups(query) * scale, to_groups(key), to_groups(value)
    index, present = neighbours(grid, Sq, window, causal_axis, query.device)
    rows = max(1, MAX_CHUNK_ELEMENTS // (index.shape[1] * k.shape[0] * (k.shape[2] + v.shape[2])))
    parts = [
        recomputed(_attend, q[:, r : r + rows], k, v, index[r : r + rows], present[r : r + rows])
        for r in range(0, Sq, rows)
    ]
    out, lse = (torch.cat(column, 1) for column in zip(*parts, strict=True))
    return out.unflatten(0, (B, H)).transpose(1, 2).to(query.dtype), lse.unflatten(0, (B, H))
