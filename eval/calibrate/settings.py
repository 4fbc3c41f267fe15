"""What a calibration is made of: what a plan may cost, what is recorded, and the methods that heads may get."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vmonarch.configs import InputError, suggest
from vmonarch.configs.methods import AttentionMethod
from vmonarch.eval.calibrate import MEASURES
from vmonarch.eval.settings import check_least, resolved
from vmonarch.options import Options, VMonarchOptions
from vmonarch.pipelines.config import SamplingConfig

if TYPE_CHECKING:
    from vmonarch.eval.calibrate.planning import InPlace
    from vmonarch.grid import LatentGrid
    from vmonarch.plan import AttentionPlan

CANDIDATES = (
    "vmonarch-plain:num_iterations=1",
    "vmonarch-plain:coarse=2,last_l_update=false",
    "vmonarch-plain",
    "vmonarch-lite",
    "vmonarch-t1",
    "vmonarch:coarse=2,row_share=0.25",
    "vmonarch:coarse=2",
    "vmonarch",
    "vmonarch-t3",
    "vmonarch-own",
    "vmonarch-band1",
    "vmonarch-first-own",
    "vmonarch-first-band1",
    "vmonarch:exact={rows: [0], band: 2}",
    "vmonarch:exact={rows: [0], band: 3}",
    "two-resolution",
    "two-resolution:share=0.2",
    "two-resolution:share=0.4",
    "first-order",
    "first-order:parts=[1,2,2]",
    "first-order:parts=[1,4,4]",
)
# A head can get methods of these processors.
_PROCESSORS = ("vmonarch", "two_resolution", "first_order")


@dataclass(frozen=True)
class Budget:
    """What a plan may cost; at most one of the first three, and none for as much work as VMonarch with its defaults.

    Args:
        budget: the most that a head may lose, of `measure`.
        flops: work of all heads, relative to default VMonarch.
        time: the same of their time, as measured on this GPU.
        measure: error, layer_error, output_error or kl (default: error with a budget, else the first that was measured
            of output_error, with layer_error beside it, and layer_error).
        limit: with flops or time: also keep another measure to that share of default VMonarch's, such as kl=0.5.
    """

    budget: float | None = None
    flops: float | None = None
    time: float | None = None
    measure: str | None = None
    limit: str | None = field(default=None, metadata={"option": {"metavar": "MEASURE=SHARE"}})

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("budget", "flops", "time")}
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise InputError(named[0], f"and {named[1]} exclude each other: give one")
        for name in named:
            if not math.isfinite(given[name]) or given[name] < 0:
                raise InputError(name, f"must be finite and at least 0, got {given[name]}")
        if self.limit is not None and self.budget is not None:
            raise InputError("limit", "is for flops and time; with budget, every head keeps to that")
        for name, measure in self.measures.items():
            if measure not in MEASURES:
                raise InputError(name, f"must be of {', '.join(MEASURES)}, got {measure!r}{suggest(measure, MEASURES)}")

    @property
    def measures(self) -> dict[str, str]:
        """The measures that are named, by the argument that names them."""
        named = {"measure": self.measure, "limit": self.parsed_limit and self.parsed_limit[0]}
        return {name: measure for name, measure in named.items() if measure}

    @property
    def parsed_limit(self) -> tuple[str, float] | None:
        """Measure and share of `limit`."""
        if self.limit is None:
            return None
        name, _, share = str(self.limit).partition("=")
        with contextlib.suppress(ValueError):
            if name and 0 < float(share) < math.inf:
                return name, float(share)
        raise InputError("limit", f"must be measure=share with a positive share, such as kl=0.5, got {self.limit!r}")

    def plan(self, diagnosis: Mapping[str, Any], found: Sequence[InPlace] = ()) -> AttentionPlan:
        """The plan for a diagnosis.

        Args:
            found: see `plan_within_work`.
        """
        from vmonarch.eval.calibrate.planning import plan_within_error, plan_within_work

        if self.budget is not None:
            return plan_within_error(diagnosis, self.budget, self.measure or "error")
        cost = "flops" if self.time is None else "time"
        work = getattr(self, cost)
        limit = self.parsed_limit
        return plan_within_work(diagnosis, 1.0 if work is None else work, self.measure, limit, cost=cost, found=found)


@dataclass(frozen=True)
class CalibrateConfig(Budget, SamplingConfig):
    """`SamplingConfig` and `Budget`, plus what to record.

    Args:
        candidates: what a head may get besides full attention: methods of the processors vmonarch, two_resolution or
            first_order, without a bias, a plan, or dense steps and layers.
        every: record every N steps (default: about ten of them).
        maps: attention maps to keep, LAYER:HEAD (default: of the first, the middle and the last layer's first head).
        sensitivity: what errors change in the model's output, which takes gradients and up to eight calls.
        refine: measure N plans in place, each made from what the ones before it showed, and keep the best; the first
            goes by the error of layers (default 0: keep the first, unmeasured).
    """

    output_dir: str = "outputs/calibrate"
    candidates: tuple[Any, ...] = field(default=CANDIDATES, metadata={"option": {"metavar": "METHOD"}})
    every: int | None = None
    maps: tuple[str, ...] = field(default=(), metadata={"option": {"metavar": "LAYER:HEAD"}})
    sensitivity: bool = True
    refine: int = 0

    def __post_init__(self) -> None:
        SamplingConfig.__post_init__(self)
        if self.refine and self.measure is None:
            object.__setattr__(self, "measure", "layer_error")
        Budget.__post_init__(self)
        if not self.candidates:
            raise InputError("candidates", "must be one or more methods, got none")
        methods = resolved(self.candidates, "candidates", recipes=False)
        for method in methods:
            _check_candidate(method)
        object.__setattr__(self, "candidates", methods)
        check_least(self, every=1, refine=0)
        if not self.sensitivity and "output_error" in self.measures.values():
            raise InputError("measure", "cannot be output_error without sensitivity, which measures it")
        without = {"no-sensitivity": not self.sensitivity, "budget": self.budget is not None, "limit": self.limit}
        if self.refine and (given := [name for name, is_given in without.items() if is_given]):
            raise InputError("refine", f"measures plans for flops or time, with gradients; leave out {given[0]}")
        for name in ("limit", "time"):
            if getattr(self, name) is not None and VMonarchOptions() not in map(options_of, methods):
                raise InputError(name, "is relative to VMonarch with its defaults, which is not among the candidates")
        parse_maps(self.maps)

    @property
    def attention_methods(self) -> Mapping[str, Sequence[AttentionMethod]]:
        """As in `SamplingConfig`."""
        return {"candidates": self.candidates}

    def check_grid(self, grid: LatentGrid) -> None:
        """Raise InputError if heads of videos of this grid cannot do with so much work."""
        from vmonarch.eval.calibrate.planning import check_work, default_flops
        from vmonarch.plan import method_flops

        if self.flops is not None:
            cheapest = min(method_flops(options_of(method), grid, 1) for method in self.candidates)
            check_work(self.flops, cheapest / method_flops(None, grid, 1), default_flops(grid))


def _check_candidate(method: AttentionMethod) -> None:
    if method.processor_name not in _PROCESSORS:
        known, got = " or ".join(_PROCESSORS), f"{method.label!r} of {method.processor_name}"
        raise InputError("candidates", f"must be of the processors {known}, got {got}")
    if not method.countable:
        raise InputError("candidates", f"must have work that is known beforehand, but {method.label!r} sets beta")
    for name in ("bias", "plan", "dense_steps", "dense_layers", "refresh"):
        if method.options.get(name) not in (None, 0, []):
            raise InputError("candidates", f"must leave {name} alone, but {method.label!r} sets it")


def options_of(method: AttentionMethod) -> Options:
    """What the op of a candidate takes."""
    options: Options = method.processor().options
    return options


def parse_maps(maps: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """(layer, head) of every "layer:head".

    Raises:
        InputError: an entry is not of this form.
    """
    found = []
    for entry in maps:
        layer, colon, head = str(entry).partition(":")
        if not colon or not layer.isdecimal() or not head.isdecimal():
            raise InputError("maps", f"must be layer:head, such as 3:0, got {entry!r}")
        found.append((int(layer), int(head)))
    return tuple(found)
