"""How a video is cut into tiles of keys and tiles of queries, boxes of neighbouring tokens.

Every axis is cut evenly: part i of n of an axis of length L holds the places from ⌊i·L/n⌋ to ⌊(i+1)·L/n⌋, so sizes
differ by at most one. Tokens stay where they are; tiles are found by arithmetic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.blocks import BlockLayout
from vmonarch.options import TwoResolutionOptions

# Tokens of a tile, where the options do not say: at most an eighth of a frame, but 16 at least.
KEY_TOKENS, QUERY_TOKENS, FEWEST_TOKENS = 64, 128, 16
# Edges along frames, rows and columns.
Box = tuple[int, int, int]
# Of two boxes that fill their tiles alike to this degree, the one that is more of a cube is better: queries that share
# a choice of tiles, and keys that share a mean, should be near each other.
_SLACK = 0.1


class Tiling(NamedTuple):
    """Run-time numbers of a cut.

    Attributes:
        frames, rows, columns: of the grid.
        tiles_t, tiles_h, tiles_w: tiles of keys along each axis.
        queries_t, queries_h, queries_w: tiles of queries along each axis.
        query_frames: frames that have queries, as many as the others or fewer.
    """

    frames: int
    rows: int
    columns: int
    tiles_t: int
    tiles_h: int
    tiles_w: int
    queries_t: int
    queries_h: int
    queries_w: int
    query_frames: int

    @property
    def tiles(self) -> int:
        """m, the tiles of keys."""
        return self.tiles_t * self.tiles_h * self.tiles_w

    @property
    def box(self) -> Box:
        """(frames, rows, columns) of the largest tile of keys."""
        return -(-self.frames // self.tiles_t), -(-self.rows // self.tiles_h), -(-self.columns // self.tiles_w)

    @property
    def of_queries(self) -> Tiling:
        """The cut into n tiles of queries, as if they were keys."""
        tiles = dict(tiles_t=self.queries_t, tiles_h=self.queries_h, tiles_w=self.queries_w)
        return self._replace(frames=self.query_frames, **tiles)


def tiling_of(grid: LatentGrid, options: TwoResolutionOptions, query_frames: int | None = None) -> Tiling:
    """The cut of a grid by `tile` and `query_tile`.

    Args:
        query_frames: frames that have queries; None for all.
    """

    def parts(sizes: Sequence[int], box: Sequence[int]) -> list[int]:
        return [-(-size // min(size, edge)) for size, edge in zip(sizes, box, strict=True)]

    def box_of(of: LatentGrid, tokens: int) -> Box:
        while tokens > FEWEST_TOKENS and 8 * tokens > grid.tokens_per_frame:
            tokens //= 2
        return best_box(of, tokens)

    tiles = parts(grid, options.tile or box_of(grid, KEY_TOKENS))
    asking = grid if query_frames is None else grid._replace(frames=query_frames)
    queries = parts(asking, options.query_tile or box_of(asking, QUERY_TOKENS))
    numbers = (*grid, *tiles, *queries, asking.frames)
    return Tiling(*numbers)


def exact_tiles(tiling: Tiling, share: float) -> int:
    """How many tiles are exact for every tile of queries: `share` of them, rounded up to at least one."""
    return max(1, math.ceil(share * tiling.tiles - 1e-9))


@functools.cache
def best_box(grid: LatentGrid, tokens: int) -> Box:
    """The box of `tokens` places, edges powers of two, by which a grid is cut into the fewest tiles.

    Of boxes that are nearly as good, it is the one with the shortest edges together.
    """
    edges = [1 << power for power in range(tokens.bit_length())]
    boxes = [(t, h, tokens // (t * h)) for t in edges for h in edges if t * h <= tokens]

    def filled(box: Box) -> float:
        t, h, w = box
        tiles = -(-grid.frames // t) * -(-grid.height // h) * -(-grid.width // w)
        return grid.tokens / (tiles * tokens)

    best = max(filled(box) for box in boxes)
    # torch.compile, which looks through the cache, traces a sort but not a minimum by a key.
    good = [box for box in boxes if filled(box) >= best * (1 - _SLACK)]
    return sorted(good, key=lambda box: (sum(box), -filled(box), box))[0]


def tile_layout(tiling: Tiling, device: torch.device, box: Box | None = None) -> BlockLayout:
    """Where the tokens of each tile of keys are; b is the places of `box`, by default that of the largest tile.

    Its tensors are made for every call: they have numbers for every token, which is too much to keep.
    """
    # [tiles, edge] of each axis: the coordinate at each place of the tiles, and 1 where there is one.
    places, present = [], []
    box = box or tiling.box
    for length, tiles, edge in zip(tiling[:3], tiling[3:6], box, strict=True):
        bounds = torch.arange(tiles + 1, device=device) * length // tiles
        offset = torch.arange(edge, device=device)
        places.append(bounds[:-1, None] + offset)
        present.append((offset < bounds.diff()[:, None]).long())

    def combined(sizes: tuple[int, int], t: torch.Tensor, h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """[tiles_t, edge_t], [tiles_h, edge_h] and [tiles_w, edge_w] -> [m, b]: (t · sizes[0] + h) · sizes[1] + w."""
        boxes = (t[:, None, None, :, None, None] * sizes[0] + h[:, None, None, :, None]) * sizes[1]
        return (boxes + w[:, None, None, :]).flatten(3).flatten(0, 2)

    token = combined((tiling.rows, tiling.columns), *places)
    # A sum of three ones: every axis has a token there.
    valid = combined((1, 1), *present) == 3
    tokens = math.prod(tiling[:3])
    # Sorted by their tokens, places come in the order of tokens, and the empty ones after all of them.
    place = token.where(valid, tokens).flatten().argsort()[:tokens]
    return BlockLayout(tiling.tiles, math.prod(box), token.where(valid, 0), valid, place)
