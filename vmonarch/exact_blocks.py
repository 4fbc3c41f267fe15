"""Exact blocks: which pairs of frames are attended exactly instead of through the Monarch factors."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self


def _frame_indices(name: str, frames: object) -> tuple[int, ...]:
    """Sorted, unique frame indices from one integer or an iterable of them."""
    items = frames if isinstance(frames, Iterable) and not isinstance(frames, (str, bytes)) else (frames,)
    indices = set()
    for item in items:
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            raise TypeError(f"ExactBlocks.{name} must hold frame indices (integers), got {item!r}")
        if operator.index(item) < 0:
            raise ValueError(f"ExactBlocks.{name} must hold frame indices of at least 0, got {item}")
        indices.add(operator.index(item))
    return tuple(sorted(indices))


@dataclass(frozen=True)
class ExactBlocks:
    """A pattern of exact blocks, the union of rows, columns and a band (quality dial from VMonarch to full attention).

    Block (l, k) is query frame l against key frame k. Exact blocks are merged with the Monarch part of each row by
    their log-weights, so no weight is counted twice and the rows of the resulting attention map still sum to one.

    Args:
        rows: query frames that attend to every key exactly.
        columns: key frames that every query attends to exactly (0: the sink frame).
        band: attend exactly wherever |l - k| <= band; 0 is the own frame, T - 1 or more is full attention.
        aware: whether the L-steps know which blocks are answered exactly. If they do, those queries no longer pull
            the centroids of the others; if not, exact and Monarch parts meet only in the output (the paper's order).

    Raises:
        TypeError, ValueError: an entry is not a frame index, `band` is negative or `aware` is no bool.
    """

    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    band: int | None = None
    aware: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", _frame_indices("rows", self.rows))
        object.__setattr__(self, "columns", _frame_indices("columns", self.columns))
        if self.band is not None:
            if isinstance(self.band, bool) or not hasattr(self.band, "__index__"):
                raise TypeError(f"ExactBlocks.band must be None or an integer, got {self.band!r}")
            if self.band < 0:
                raise ValueError(f"ExactBlocks.band must be at least 0, got {self.band}")
            object.__setattr__(self, "band", int(self.band))
        if not isinstance(self.aware, bool):
            raise TypeError(f"ExactBlocks.aware must be True or False, got {self.aware!r}")

    @classmethod
    def of(cls, exact: Mapping[str, Any]) -> Self:
        """The pattern that a mapping of the arguments gives.

        Raises:
            ValueError: it does not fit; the message begins with the option `exact`.
        """
        unknown = next((name for name in exact if name not in cls.__dataclass_fields__), None)
        if unknown is not None:
            raise ValueError(f"exact.{unknown} is no known key; known: {', '.join(cls.__dataclass_fields__)}")
        try:
            return cls(**exact)
        except (TypeError, ValueError) as error:
            raise ValueError(f"exact must fit: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The arguments that differ from the defaults, as JSON has them."""
        return {name: value for name, value in vars(self).items() if value != getattr(ExactBlocks, name)}

    def key_frames(self, frames: int) -> tuple[tuple[int, ...], ...]:
        """E(l) for every query frame l: the key frames that it attends to exactly, sorted.

        Raises:
            ValueError: a row or column lies outside the `frames` frames of the video.
        """
        for name in ("rows", "columns"):
            for frame in getattr(self, name):
                if frame >= frames:
                    raise ValueError(f"ExactBlocks.{name} names frame {frame}, but there are {frames} latent frames")
        everything = tuple(range(frames))
        band = -1 if self.band is None else self.band
        return tuple(
            everything if l in self.rows else tuple(k for k in everything if k in self.columns or abs(l - k) <= band)
            for l in range(frames)
        )


# The paper's first-frame recomputation (VMonarch, Eq. 8): rows of frame 0 replaced after the L-steps.
FIRST_FRAME = ExactBlocks(rows=(0,), aware=False)


def resolve_exact(exact: object) -> ExactBlocks | None:
    """Turn the `exact` argument of the ops into a pattern, or None for no exact block.

    Raises:
        TypeError, ValueError: `exact` is none of None, "first_frame" and an `ExactBlocks`.
    """
    if exact is None or isinstance(exact, ExactBlocks):
        return exact
    supported = 'None, "first_frame" or an ExactBlocks(rows=…, columns=…, band=…)'
    if isinstance(exact, str):
        if exact == "first_frame":
            return FIRST_FRAME
        raise ValueError(f"exact must be {supported}, got {exact!r}")
    raise TypeError(f"exact must be {supported}, got {type(exact).__name__}")
