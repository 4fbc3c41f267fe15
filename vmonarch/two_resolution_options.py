"""The options of attention in two resolutions: one object from YAML to the kernels, checked when it is made."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

from vmonarch.grid import LatentGrid
from vmonarch.options import Options, VMonarchOptions, check_share
from vmonarch.validation import check_flag


@dataclass(frozen=True, kw_only=True)
class TwoResolutionOptions(Options):
    """Which key tiles are attended exactly, and what stands for the others.

    A tile is a box of neighbouring tokens, of keys or of queries. Every tile of queries ranks all tiles of keys, for
    each head, by the product of its mean query and their mean key.

    Args:
        share: of all key tiles, those that are exact, rounded up; None where `beta` is given.
        beta: a key tile is exact where its score exceeds μ + beta·σ, mean and standard deviation of the scores of that
            query tile over all key tiles; None where `share` is given.
        tile: at most this many (frames, rows, columns) of keys; every axis is cut evenly. None for the box, its edges
            powers of two, that fits the grid best: of at most 64 tokens, and of no more than an eighth of a frame, but
            for 16 tokens.
        cell: the same of the cells in a tile, of which each leaves a mean key and value where the tile is not exact;
            None for the tile itself.
        query_tile: the same of the queries that share a choice of tiles; None for the best box as for `tile`, but of
            at most 128 tokens.
        rest: whether tiles that are not exact leave their means. Without them this is block-sparse attention.
        local: tiles at most this many tiles away, along every axis, from one that holds a query of the query tile are
            always exact; None for no such tiles.
        sink: whether the tiles that hold the first frame are always exact.

    With `share` the tiles that are always exact count as the first of them; there may be more of them than `share` asks
    for, and then every query tile has as many exact tiles as the one with the most.

    Raises:
        TypeError, ValueError: an option has an unsupported value; the message begins with its name.

    Source: Li et al., Sol-Attn (2026, arXiv:2607.24027): the pooled rest in the same softmax, and the threshold; Zhang
    et al., VSA (2025), §3: boxes of tokens, and the best of them by mean scores.
    """

    kind: ClassVar[str] = "two_resolution"

    share: float | None = 0.1
    beta: float | None = None
    tile: tuple[int, int, int] | None = None
    cell: tuple[int, int, int] | None = None
    query_tile: tuple[int, int, int] | None = None
    rest: bool = True
    local: int | None = None
    sink: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.share is None) == (self.beta is None):
            raise ValueError(
                f"share must be None where beta is given, and only there, got share={self.share} and beta={self.beta}"
            )
        for name in ("share", "beta"):
            number = getattr(self, name)
            if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float))):
                raise TypeError(f"{name} must be a number or None, got {number!r}")
        if self.share is not None:
            check_share("share", self.share)
        if self.beta is not None and not math.isfinite(self.beta):
            raise ValueError(f"beta must be finite, got {self.beta}")
        for name in ("tile", "cell", "query_tile"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(LatentGrid.parse(getattr(self, name), argument=name)))
        check_flag("rest", self.rest)
        check_flag("sink", self.sink)
        if self.cell is not None and not self.rest:
            raise ValueError(f"cell must be None with rest=False, which has no means, got {self.cell}")
        if self.local is not None:
            if isinstance(self.local, bool) or not hasattr(self.local, "__index__"):
                raise TypeError(f"local must be an integer or None, got {self.local!r}")
            if self.local < 0:
                raise ValueError(f"local must be at least 0, got {self.local}")


def row_options(options: VMonarchOptions) -> TwoResolutionOptions:
    """How the exact rows of VMonarch attention attend, where that is in two resolutions."""
    return TwoResolutionOptions(share=options.row_share)


def r_options(options: VMonarchOptions) -> TwoResolutionOptions:
    """How the centroids of the last R-step of VMonarch attention attend, where that is in two resolutions."""
    return TwoResolutionOptions(share=options.r_share)


TWO_RESOLUTION_FIELDS = dataclasses.fields(TwoResolutionOptions)
