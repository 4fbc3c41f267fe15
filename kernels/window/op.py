"""Attention in windows by the kernels of two resolutions, of which a list has the tiles that windows reach into.

Shapes: B batch, Sq queries, Sk keys, H heads, D head dim, E value dim.
"""

from __future__ import annotations

import torch

from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.launch import needs_operator
from vmonarch.kernels.two_resolution.op import forward, two_resolution_forward
from vmonarch.kernels.two_resolution.tiling import Reach, best_box, tiling_of
from vmonarch.kernels.window.reference import Window, extents
from vmonarch.options import TwoResolutionOptions

# Tokens of a tile of queries, and of one of keys.
TILE_TOKENS = 64


def window_attention_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid: LatentGrid,
    window: Window,
    causal_axis: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by the kernels; arguments as in `window_attention_reference`, already checked."""
    if scale < 0:
        # The kernels take the maximum of raw scores, which only a scale that is not negative keeps in order.
        query, scale = -query, -scale
    reach = [extents(size, axis == causal_axis) for axis, size in enumerate(window)]
    if query.shape[1] < key.shape[1]:
        # The queries are the last frames of a video: a sequence is one of a token in each.
        grid, reach = LatentGrid(key.shape[1], 1, 1), [reach[2], (0, 0), (0, 0)]
    box = best_box(grid, TILE_TOKENS)
    frames = query.shape[1] // (grid.height * grid.width)
    tiling = tiling_of(grid, TwoResolutionOptions(tile=box, query_tile=box), frames)
    windows = Reach(grid.frames - frames, *(back for back, _ in reach), *(ahead for _, ahead in reach))
    attend = two_resolution_forward if needs_operator(query, key, value) else forward
    out, lse, _ = attend(query, key, value, None, None, [*tiling, *windows], 1.0, False, scale)
    return out, lse
