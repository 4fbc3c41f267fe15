"""The options of VMonarch attention: one object from YAML to the kernels, checked when it is made."""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from vmonarch.exact_blocks import ExactBlocks, resolve_exact
from vmonarch.grid import LatentGrid
from vmonarch.validation import check_flag, check_positive_integer, plain

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)


class Options:
    """What an op computes, as one frozen dataclass, which checks its fields when it is made.

    Attributes:
        kind: what plans and methods call the op.
    """

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError if an option has an unsupported value."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))

    @classmethod
    def of(cls, options: object, named: Mapping[str, Any]) -> Self:
        """`options`, or those that are named.

        Raises:
            TypeError, ValueError: both are given, or one of them is not as described.
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
        usual = {field.name: field.default for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {name: value for name, default in usual.items() if (value := getattr(self, name)) != default}

    def check_grid(self, grid: LatentGrid) -> None:
        """Raise ValueError if an option does not fit videos of this latent grid."""


@dataclass(frozen=True, kw_only=True)
class NoOptions(Options):
    """Those of attention that has none."""


@dataclass(frozen=True, kw_only=True)
class FirstOrderOptions(Options):
    """Around which mean queries attention is computed to the first order.

    Args:
        parts: into how many parts time, height and width are cut, as evenly as they can be, and into no more than they
            have tokens; the queries of each box have a mean of their own.

    Raises:
        TypeError, ValueError: an option has an unsupported value; the message begins with its name.
    """

    kind: ClassVar[str] = "first_order"

    parts: tuple[int, int, int] = (1, 1, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "parts", tuple(LatentGrid.parse(self.parts, argument="parts")))

    def parts_of(self, grid: LatentGrid) -> LatentGrid:
        """Into how many parts each axis of a video is cut."""
        return LatentGrid(*map(min, self.parts, grid))


@dataclass(frozen=True, kw_only=True)
class VMonarchOptions(Options):
    """What VMonarch attention computes.

    Args:
        num_iterations: steps of alternating maximisation (the paper's t, 2 by default).
        frames_per_block: latent frames per Monarch block (the paper's "F"; a short last block is masked).
        tiles: cut every frame into this many (vertical, horizontal) tiles, each a block of its own. Less work in the
            R-steps; sizes that do not divide are masked.
        coarse: average the keys over coarse × coarse cells in all R-steps but the last, which only prepare centroids.
        exact: None; "first_frame", the paper's recomputation (the L-steps do not know of it); or an `ExactBlocks`
            pattern or a mapping of its arguments. With frames_per_block > 1, exact key frames are rounded outward to
            whole blocks.
        row_share: of all key tiles, those that the rows of `exact` attend exactly, rounded up; the others leave their
            means, as in `two_resolution_attention`. 1 is all of them.
        r_share: of the key tiles of a frame, those that the last R-step attends exactly, rounded up; the others leave
            the means of four cells each. 1 is all of them, which tiles and frames_per_block need.
        last_l_update: whether the last R-step updates L. Without it L stays that of the iteration before, and the last
            R-step is plain attention of every frame's centroids, for the values alone: half an iteration less. It needs
            blocks of one whole frame, and two iterations at least.
        min_mass: lower bound of cR where it divides (0.1 in the paper; 0 only keeps empty columns finite).

    Raises:
        TypeError, ValueError: an option has an unsupported value; the message begins with its name.

    Source: VMonarch, Eq. 3-8 and §4.1; docs/attention.md.
    """

    kind: ClassVar[str] = "vmonarch"

    num_iterations: int = 2
    frames_per_block: int = 1
    tiles: tuple[int, int] = (1, 1)
    coarse: int = 1
    # None | str | ExactBlocks, which OmegaConf has no word for.
    exact: Any = "first_frame"
    row_share: float = 1.0
    r_share: float = 1.0
    last_l_update: bool = True
    min_mass: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer("num_iterations", self.num_iterations)
        check_positive_integer("frames_per_block", self.frames_per_block)
        if not isinstance(self.tiles, tuple) or len(self.tiles) != 2:
            raise TypeError(f"tiles must be a pair (vertical, horizontal) of positive integers, got {self.tiles!r}")
        for n, tiles in enumerate(self.tiles):
            check_positive_integer(f"tiles[{n}]", tiles)
        check_positive_integer("coarse", self.coarse)
        if self.coarse != 1 and self.num_iterations == 1:
            raise ValueError("coarse pools the keys of all iterations but the last; with num_iterations=1 it must be 1")
        if isinstance(self.exact, Mapping):
            object.__setattr__(self, "exact", ExactBlocks.of(self.exact))
        pattern = resolve_exact(self.exact)
        check_share("row_share", self.row_share)
        check_share("r_share", self.r_share)
        check_flag("last_l_update", self.last_l_update)
        for name, usual in {"r_share": 1, "last_l_update": True}.items():
            value = getattr(self, name)
            if value != usual and (self.frames_per_block, self.tiles) != (1, (1, 1)):
                raise ValueError(f"{name} must be {usual} where a block is not one whole frame, got {value}")
        if not self.last_l_update and self.num_iterations == 1:
            raise ValueError("last_l_update must be True with num_iterations=1, which has no L before")
        if self.row_share != 1 and (pattern is None or not pattern.rows):
            raise ValueError(f"row_share must be 1 where exact has no rows, got {self.row_share}")
        check_min_mass(self.min_mass)

    @property
    def pattern(self) -> ExactBlocks | None:
        """The exact blocks; None if there are none."""
        return resolve_exact(self.exact)

    def cut(self, frames: int) -> dict[str, Any]:
        """How a video of this many latent frames is cut into blocks; arguments of `grid_layout` and `grid_places`."""
        blocks = min(self.frames_per_block, frames)
        return {"frames_per_block": blocks, "tiles": self.tiles, "coarse": self.coarse}

    def check_grid(self, grid: LatentGrid) -> None:
        """Raise ValueError if a tile of a frame has no tokens, or `exact` names a frame that is not there."""
        self.check_tiles(grid)
        try:
            if self.pattern is not None:
                self.pattern.key_frames(grid.frames)
        except ValueError as error:
            raise ValueError(f"exact does not fit: {error}") from error

    def check_tiles(self, grid: LatentGrid) -> None:
        """Raise ValueError unless every one of the `tiles` of a frame has tokens."""
        if self.tiles[0] > grid.height or self.tiles[1] > grid.width:
            raise ValueError(f"tiles {self.tiles} must not exceed the rows and columns of a frame, {tuple(grid[1:])}")


OPTION_FIELDS = dataclasses.fields(VMonarchOptions)


def check_share(name: str, share: object) -> None:
    """Raise TypeError or ValueError unless `share` is a number above 0 and at most 1."""
    if isinstance(share, bool) or not isinstance(share, numbers.Real):
        raise TypeError(f"{name} must be a number, got {share!r}")
    if not 0 < float(share) <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {share}")


def check_min_mass(min_mass: object) -> None:
    """Raise TypeError or ValueError unless `min_mass` is a finite number of at least 0."""
    if isinstance(min_mass, bool) or not isinstance(min_mass, numbers.Real):
        raise TypeError(f"min_mass must be a number, got {min_mass!r}")
    if not math.isfinite(min_mass) or min_mass < 0:
        raise ValueError(f"min_mass must be finite and at least 0, got {min_mass}")


def takes_options(function: Function) -> Function:
    """Name the options in the signature of a function that takes them as `**named`."""
    signature = inspect.signature(function)
    own = [entry for entry in signature.parameters.values() if entry.kind is not entry.VAR_KEYWORD]
    options = inspect.signature(VMonarchOptions).parameters.values()
    function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return function


def has_options(kind: type, *own: str, without: tuple[str, ...] = ()) -> Callable[[Class], Class]:
    """Give a processor the options of an op, in its signature too, and list all that it has.

    Args:
        kind: the dataclass of the op's options.
        own: options of the class itself.
        without: of the options that all processors have those that this one has not.
    """

    def decorate(owner: Class) -> Class:
        names = [field.name for field in dataclasses.fields(kind)]
        cls: Any = owner
        cls._KIND = kind
        cls._OPTIONS = (*names, *own, *(name for name in cls.COMMON if name not in without))
        shown: dict[str, inspect.Parameter] = {}
        for source in (*(vars(base)["__init__"] for base in cls.__mro__[:-1] if "__init__" in vars(base)), kind):
            for name, entry in inspect.signature(source).parameters.items():
                shown.setdefault(name, entry)
        cls.__signature__ = inspect.Signature([entry for name, entry in shown.items() if name in cls._OPTIONS])
        return owner

    return decorate
