"""Attention in windows in plain torch: the specification of the kernels (Based, §4.2 and Listing 3).

In a sequence, a window of w tokens ends at the query if causal, else the query is in its middle (before the middle by
one for even w). In a video, a window is such a range along time, height and width at once; causal means along time.
Windows end where the sequence or the video does.

Shapes: B batch, Sq queries, Sk keys, H heads, D head dim, E value dim, W keys in a window; G = B·H groups.
"""

from __future__ import annotations

import torch

from vmonarch.grid import LatentGrid
from vmonarch.kernels.flash_entropy.reference import recomputed, softmax_parts, to_groups

# Gathered keys and values that one chunk of queries may hold, in elements.
MAX_CHUNK_ELEMENTS = 2**25

Window = tuple[int, int, int]


def extents(window: int, causal: bool) -> tuple[int, int]:
    """How far a window of this many tokens reaches back and ahead of the query."""
    return (window - 1, 0) if causal else ((window - 1) // 2, window // 2)


def neighbours(
    grid: LatentGrid, queries: int, window: Window, causal_axis: int | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys in the windows of the last `queries` tokens.

    Args:
        grid: of the keys; (1, 1, Sk) for a sequence.
        window: along (time, height, width).
        causal_axis: along which a window ends at the query; None for none.

    Returns:
        (index [queries, W] of keys, present [queries, W], whether they are in the window); W = ∏ min(window, grid).
    """
    token = torch.arange(grid.tokens - queries, grid.tokens, device=device)
    place = (token // grid.tokens_per_frame, token // grid.width % grid.height, token % grid.width)
    index = torch.zeros(queries, 1, dtype=torch.int64, device=device)
    present = torch.ones(queries, 1, dtype=torch.bool, device=device)
    for axis, size in enumerate(grid):
        back, ahead = (min(reach, size) for reach in extents(window[axis], axis == causal_axis))
        keys, query = min(window[axis], size), place[axis][:, None]
        # At the borders as many keys as elsewhere, some of which are too far away.
        at = (query - back).clamp(0, size - keys) + torch.arange(keys, device=device)
        near = (at >= query - back) & (at <= query + ahead)
        index = (index[:, :, None] * size + at[:, None]).flatten(1)
        present = (present[:, :, None] & near[:, None]).flatten(1)
    return index, present


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
