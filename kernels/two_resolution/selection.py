"""Which key tiles every tile of queries attends exactly.

Shapes: B batch, S tokens, H heads, D head dim, n tiles of queries, m tiles of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from vmonarch.kernels.two_resolution.tiling import Tiling
from vmonarch.options import TwoResolutionOptions


class Selection(NamedTuple):
    """The exact tiles.

    Attributes:
        exact: bool [B or 1, H or 1, n, m], true where tile of keys k is exact for tile of queries l.
        number: how many there are for every query tile, where that is the same for all data; else None.
    """

    exact: torch.Tensor
    number: int | None


def best_of(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Whether each score [..., m] is among the `count` largest of its row."""
    best = scores.topk(count, -1, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)


def select_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    tiling: Tiling,
    options: TwoResolutionOptions,
    best: Callable[[torch.Tensor, int], torch.Tensor] = best_of,
) -> Selection:
    """The exact tiles by the scores of mean queries and keys.

    Args:
        query, key: means of the tiles [B, H, n and m, D]; that of a tile without any key is zero.
        best: does what `best_of` does.
    """
    scores = (query @ key.transpose(-1, -2)).detach()
    if options.beta is not None:
        std, mean = torch.std_mean(scores, -1, correction=0, keepdim=True)
        return Selection(scores > mean + options.beta * std, None)
    assert options.share is not None
    count = exact_tiles(tiling, options.share)
    return Selection(best(scores, count), count)


def exact_tiles(tiling: Tiling, share: float) -> int:
    """How many tiles are exact for every tile of queries: `share` of them, rounded up to at least one."""
    return max(1, math.ceil(share * tiling.tiles - 1e-9))
