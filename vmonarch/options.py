"""The options of the ops, one object per op from YAML to the kernels, checked when it is made; and exact blocks."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from vmonarch.grid import LatentGrid
from vmonarch.validation import check_flag, check_integer, check_number, check_positive_integer, plain

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class ExactBlocks:
    """A pattern of exact blocks, the union of rows, columns and a band (quality dial from VMonarch to full attention).

    Block (l, k) is query frame l against key frame k. Exact blocks are merged with the Monarch part of each row by
    their log-weights, so no weight is counted twice and the rows of the resulting attention map still sum to one.

    Args:
        rows: query frames that attend to every key exactly.
        columns: key frames that every query attends to exactly (0: the sink frame).
        band: attend exactly wherever |l - k| <= band; 0 is a query's own frame, T - 1 or more is full attention.
        aware: whether the L-steps know which blocks are exact. If they do, the queries of those blocks no longer pull
            the centroids of the others; if not, exact and Monarch parts meet in the output alone (the paper's order).

    Raises:
        TypeError, ValueError: an entry is not a frame index, `band` is negative or `aware` is no bool.
    """

    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    band: int | None = None
    aware: bool = True

    def __post_init__(self) -> None:
        for name in ("rows", "columns"):
            frames: Any = getattr(self, name)
            items = [frames] if isinstance(frames, (str, bytes)) or not isinstance(frames, Iterable) else list(frames)
            for item in items:
                check_integer(f"a frame in ExactBlocks.{name}", item)
            object.__setattr__(self, name, tuple(sorted({int(item) for item in items})))
        if self.band is not None:
            check_integer("ExactBlocks.band", self.band)
            object.__setattr__(self, "band", int(self.band))
        check_flag("ExactBlocks.aware", self.aware)

    @classmethod
    def of(cls, exact: Mapping[str, Any]) -> Self:
        """The pattern from a mapping of the arguments.

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


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of the options of an op, checked when they are made.

    Attributes:
        op: the op's name in plans and methods.
    """

    op: ClassVar[str]

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError if an option has an unsupported value."""
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))

    @classmethod
    def of(cls, options: object, named: Mapping[str, Any]) -> Self:
        """`options`, or the options given by name.

        Raises:
            TypeError, ValueError: both are given, or one is not as described.
        """
        if options is None:
            return cls(**named)
        if not isinstance(options, cls):
            raise TypeError(f"options must be None or {cls.__name__}, got {type(options).__name__}")
        if named:
            raise TypeError(f"{next(iter(named))} must not be given beside options, which have it")
        return options

    def changed(self) -> dict[str, Any]:
        """The options that differ from the defaults."""
        fields = (field for field in dataclasses.fields(self) if field.init)
        return {field.name: value for field in fields if (value := getattr(self, field.name)) != field.default}

    def check_grid(self, grid: LatentGrid) -> None:
        """Raise ValueError if an option does not fit videos of this latent grid."""


@dataclass(frozen=True, kw_only=True)
class FirstOrderOptions(Options):
    """The mean queries around which attention is computed to the first order.

    Args:
        parts: numbers of parts of time, height and width, cut as evenly as possible, and at most one per token; the
            queries of each box have their own mean.

    Raises:
        TypeError, ValueError: an option has an unsupported value; the message begins with its name.
    """

    op: ClassVar[str] = "first_order"

    parts: tuple[int, int, int] = (1, 1, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "parts", tuple(LatentGrid.parse(self.parts, argument="parts")))

    def parts_of(self, grid: LatentGrid) -> LatentGrid:
        """Number of parts of each axis of a video."""
        return LatentGrid(*map(min, self.parts, grid))


@dataclass(frozen=True, kw_only=True)
class VMonarchOptions(Options):
    """What VMonarch attention computes.

    Args:
        num_iterations: steps of alternating maximisation (the paper's t, 2 by default).
        coarse: average the keys over coarse × coarse cells in all R-steps but the last. They only prepare centroids.
        exact: None; "first_frame", the paper's recomputation, which the L-steps do not know of; or an `ExactBlocks`
            pattern or a mapping of its arguments.
        row_share: share of all key tiles, rounded up, that the rows of `exact` attend to exactly; of the other tiles
            they see the means, as in `two_resolution_attention`. 1 is all tiles.
        last_l_update: whether the last R-step updates L. If not, L stays as the iteration before left it, and the last
            R-step is plain attention of every frame's centroids to the values: half an iteration less. It needs at
            least two iterations.
        min_mass: lower bound of cR where it divides (0.1 in the paper; 0 only keeps empty columns finite).

    Raises:
        TypeError, ValueError: an option has an unsupported value; the message begins with its name.

    Source: VMonarch, Eq. 3-8 and §4.1; docs/attention.md.
    """

    op: ClassVar[str] = "vmonarch"

    num_iterations: int = 2
    coarse: int = 1
    exact: Any = "first_frame"
    row_share: float = 1.0
    last_l_update: bool = True
    min_mass: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer("num_iterations", self.num_iterations)
        check_positive_integer("coarse", self.coarse)
        if self.coarse != 1 and self.num_iterations == 1:
            raise ValueError("coarse pools the keys of all iterations but the last; with num_iterations=1 it must be 1")
        if isinstance(self.exact, Mapping):
            object.__setattr__(self, "exact", ExactBlocks.of(self.exact))
        if not isinstance(self.exact, (ExactBlocks, type(None))) and self.exact != "first_frame":
            supported = 'None, "first_frame" or an ExactBlocks(rows=…, columns=…, band=…)'
            raise ValueError(f"exact must be {supported}, got {self.exact!r}")
        check_share("row_share", self.row_share)
        check_flag("last_l_update", self.last_l_update)
        if not self.last_l_update and self.num_iterations == 1:
            raise ValueError("last_l_update must be True with num_iterations=1, which has no L before")
        if self.row_share != 1 and (self.pattern is None or not self.pattern.rows):
            raise ValueError(f"row_share must be 1 where exact has no rows, got {self.row_share}")
        check_number("min_mass", self.min_mass)
        if self.min_mass < 0:
            raise ValueError(f"min_mass must be at least 0, got {self.min_mass}")

    @property
    def pattern(self) -> ExactBlocks | None:
        """The exact blocks; None if there are none."""
        pattern: ExactBlocks | None = FIRST_FRAME if self.exact == "first_frame" else self.exact
        return pattern

    def check_grid(self, grid: LatentGrid) -> None:
        """Raise ValueError if `exact` names a frame that the grid does not have."""
        try:
            if self.pattern is not None:
                self.pattern.key_frames(grid.frames)
        except ValueError as error:
            raise ValueError(f"exact does not fit: {error}") from error


def check_share(name: str, share: object) -> None:
    """Raise TypeError or ValueError unless `share` is a number above 0 and at most 1."""
    check_number(name, share)
    if not 0 < share <= 1:  # type: ignore[operator]
        raise ValueError(f"{name} must be above 0 and at most 1, got {share}")


@dataclass(frozen=True, kw_only=True)
class TwoResolutionOptions(Options):
    """Which key tiles are attended exactly, and what represents the others.

    A tile is a box of neighbouring tokens, of keys or of queries. In each head, every query tile ranks all key tiles by
    the product of its mean query and their mean key.

    Args:
        share: share of the key tiles that are exact, rounded up.
        tile: at most this many (frames, rows, columns) of keys; every axis is cut evenly. None for the box, its edges
            powers of two, that fits the grid best: at most 64 tokens, and at most an eighth of a frame unless that is
            below 16 tokens.
        query_tile: the same for the queries that share a choice of tiles; None for the best box as for `tile`, with
            at most 128 tokens.
        rest: whether the means of tiles that are not exact count. Without them this is block-sparse attention.

    Raises:
        TypeError, ValueError: an option has an unsupported value; the message begins with its name.

    Source: Li et al., Sol-Attn (2026, arXiv:2607.24027): the pooled rest in the same softmax; Zhang et al.,
    VSA (2025), §3: boxes of tokens, and the best of them by mean scores.
    """

    op: ClassVar[str] = "two_resolution"

    share: float = 0.1
    tile: tuple[int, int, int] | None = None
    query_tile: tuple[int, int, int] | None = None
    rest: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("share", self.share)
        for name in ("tile", "query_tile"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(LatentGrid.parse(getattr(self, name), argument=name)))
        check_flag("rest", self.rest)


def row_options(options: VMonarchOptions) -> TwoResolutionOptions:
    """The options of exact rows in two resolutions, for VMonarch attention with `row_share`."""
    return TwoResolutionOptions(share=options.row_share)


def takes_options(function: Function) -> Function:
    """Show the options by name in the signature of a function that takes them as `**named`."""
    signature = inspect.signature(function)
    own = [entry for entry in signature.parameters.values() if entry.kind is not entry.VAR_KEYWORD]
    options = inspect.signature(VMonarchOptions).parameters.values()
    function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return function
