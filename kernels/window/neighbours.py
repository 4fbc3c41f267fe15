"""Which keys lie in the window of a query.

In a sequence, a window of w tokens ends at the query if causal, else the query is in its middle (before the middle by
one for even w). In a video, a window is such a range along time, height and width at once; causal means along time.
Windows end where the sequence or the video does.
"""

from __future__ import annotations

import torch

from vmonarch.grid import LatentGrid

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
