"""Which key tiles every tile of queries attends exactly.

Shapes: B batch, S tokens, H heads, D head dim, m tiles, c cells of a tile.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from vmonarch.kernels.two_resolution.tiling import Tiling
from vmonarch.two_resolution_options import TwoResolutionOptions


class Selection(NamedTuple):
    """The exact tiles.

    Attributes:
        exact: bool [B or 1, H or 1, m, m], true where key tile n is exact for query tile l.
        number: how many there are for every query tile, where that is the same for all data; else None.
    """

    exact: torch.Tensor
    number: int | None


def kept_tiles(tiles: int, share: float) -> int:
    """How many of so many tiles are a share of them, rounded up; at least one."""
    return max(1, math.ceil(share * tiles - 1e-9))


def select_tiles(query: torch.Tensor, key: torch.Tensor, tiling: Tiling, options: TwoResolutionOptions) -> Selection:
    """The exact tiles by the scores of mean queries and keys.

    Args:
        query, key: means of the tiles [B, H, m, D], -inf nowhere; that of a tile without any key is zero.
    """
    scores = (query @ key.transpose(-1, -2)).detach()
    always = always_exact(tiling, options.local, options.sink, scores.device)
    if options.beta is not None:
        std, mean = torch.std_mean(scores, -1, correction=0, keepdim=True)
        exact = scores > mean + options.beta * std
        return Selection(exact if always is None else exact | always, None)
    assert options.share is not None
    count = exact_tiles(tiling, options)
    if always is not None:
        scores = scores.masked_fill(always, torch.inf)
    best = scores.topk(count, -1, sorted=False).indices
    return Selection(torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True), count)


def exact_tiles(tiling: Tiling, options: TwoResolutionOptions) -> int:
    """How many tiles are exact for every query tile, with `share`."""
    assert options.share is not None
    reach = -1 if options.local is None else options.local

    def near(place: int, tiles: int) -> int:
        """Places of an axis within reach of one."""
        return max(0, min(tiles, place + reach + 1) - max(0, place - reach))

    h, w = (max(near(place, tiles) for place in range(tiles)) for tiles in (tiling.tiles_h, tiling.tiles_w))
    always = 0
    for t in range(tiling.tiles_t):
        # Of the tiles nearby, those that hold the first frame are counted with the others that do.
        frames = near(t, tiling.tiles_t) - (options.sink and t <= reach)
        always = max(always, frames * h * w + options.sink * tiling.tiles_h * tiling.tiles_w)
    return max(kept_tiles(tiling.tiles, options.share), always)


def always_exact(tiling: Tiling, local: int | None, sink: bool, device: torch.device) -> torch.Tensor | None:
    """[m, m] the tiles that are exact whatever the scores; None if there are none."""
    if local is None and not sink:
        return None
    places = torch.cartesian_prod(*(torch.arange(count, device=device) for count in tiling[3:6])).view(-1, 3)
    always = torch.zeros(len(places), len(places), dtype=torch.bool, device=device)
    if local is not None:
        always |= (places[:, None] - places).abs().amax(-1) <= local
    # The first tiles along time hold the first frame.
    return always | (places[:, 0] == 0) if sink else always
