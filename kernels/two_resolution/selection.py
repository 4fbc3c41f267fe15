"""Which key tiles every tile of queries attends exactly.

Shapes: B batch, S tokens, H heads, D head dim, n tiles of queries, m tiles of keys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from vmonarch.kernels.common.constants import kept
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
    always = None
    if options.local is not None or options.sink:
        always = always_exact(tiling, options.local, options.sink, scores.device)
    if options.beta is not None:
        std, mean = torch.std_mean(scores, -1, correction=0, keepdim=True)
        exact = scores > mean + options.beta * std
        return Selection(exact if always is None else exact | always, None)
    assert options.share is not None
    count = exact_tiles(tiling, options)
    if always is not None:
        scores = scores.masked_fill(always, torch.inf)
    return Selection(best(scores, count), count)


def exact_tiles(tiling: Tiling, options: TwoResolutionOptions) -> int:
    """How many tiles are exact for every tile of queries, with `share`, which is rounded up to at least one."""
    assert options.share is not None
    wanted = max(1, math.ceil(options.share * tiling.tiles - 1e-9))
    if options.local is None and not options.sink:
        return wanted
    first, *others = _near(tiling, options.local)
    rows, columns = (max(map(sum, axis)) for axis in others)
    always = 0
    for near in first:
        # Of the tiles nearby, those that hold the first frame are counted with the others that do.
        frames = sum(near) - (options.sink and near[0])
        always = max(always, frames * rows * columns + options.sink * tiling.tiles_h * tiling.tiles_w)
    return max(wanted, always)


def always_exact(tiling: Tiling, local: int | None, sink: bool, device: torch.device) -> torch.Tensor:
    """[n, m] the tiles that are exact whatever the scores."""
    t, h, w = _near_tables(tiling, local, device)
    always = t[:, None, None, :, None, None] & h[:, None, None, :, None] & w[:, None, None, :]
    if sink:
        # The first tiles along time hold the first frame.
        always[:, :, :, 0] = True
    return always.flatten(3).flatten(0, 2)


@kept
def _near_tables(tiling: Tiling, local: int | None, device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(axis, device=device) for axis in _near(tiling, local))


def _near(tiling: Tiling, local: int | None) -> list[list[list[bool]]]:
    """[queries, tiles] of every axis: whether a part of it is at most `local` parts from one that holds a query."""
    reach = -math.inf if local is None else local
    axes = []
    for length, tiles, queries in zip(tiling[:3], tiling[3:6], tiling[9:12], strict=True):
        # Part i of n holds the places from ⌊i·L/n⌋ on, so place p is in part ⌊((p + 1)·n - 1)/L⌋.
        bounds = [i * length // queries for i in range(queries + 1)]
        ends = [
            [((place + 1) * tiles - 1) // length for place in (start, stop - 1)]
            for start, stop in itertools.pairwise(bounds)
        ]
        axes.append([[first - reach <= part <= last + reach for part in range(tiles)] for first, last in ends])
    return axes
