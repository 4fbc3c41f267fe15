"""What a calibration is made of: what a plan may cost, what is recorded, and the methods that heads may get."""

from __future__ import annotations

import contextlib
import math
import re
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
    from vmonarch.grid import LatentGrid

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
        given = {name: value for name in ("budget", "flops", "time") if (value := getattr(self, name)) is not None}
        if len(given) > 1:
            first, second, *_ = given
            raise InputError(first, f"and {second} exclude each other: give one")
        for name, value in given.items():
            if not 0 <= value < math.inf:
                raise InputError(name, f"must be finite and at least 0, got {value}")
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
        methods = resolved(self.candidates, "candidates", recipes=False)
        object.__setattr__(self, "candidates", methods)
        if not methods:
            raise InputError("candidates", "must be one or more methods, got none")
        for method in methods:
            if method.processor_name not in _PROCESSORS:
                known, got = " or ".join(_PROCESSORS), f"{method.label!r} of {method.processor_name}"
                raise InputError("candidates", f"must be of the processors {known}, got {got}")
            if not method.countable:
                raise InputError(
                    "candidates", f"must have work that is known beforehand, but {method.label!r} sets beta"
                )
            for name in ("bias", "plan", "dense_steps", "dense_layers", "refresh"):
                if method.options.get(name) not in (None, 0, []):
                    raise InputError("candidates", f"must leave {name} alone, but {method.label!r} sets it")
        check_least(self, every=1, refine=0)
        if not self.sensitivity and "output_error" in self.measures.values():
            raise InputError("measure", "cannot be output_error without sensitivity, which measures it")
        without = {"no-sensitivity": not self.sensitivity, "budget": self.budget is not None, "limit": self.limit}
        if self.refine and (given := [name for name, is_given in without.items() if is_given]):
            raise InputError("refine", f"measures plans for flops or time, with gradients; leave out {given[0]}")
        for name in ("limit", "time"):
            if getattr(self, name) is not None and VMonarchOptions() not in self.options.values():
                raise InputError(name, "is relative to VMonarch with its defaults, which is not among the candidates")
        self.places  # noqa: B018

    @property
    def options(self) -> dict[str, Options]:
        """What the ops of the candidates take, by their labels."""
        return {method.label: method.processor().options for method in self.candidates}

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """(layer, head) of every map.

        Raises:
            InputError: an entry is not of this form.
        """
        found = [re.fullmatch(r"([0-9]+):([0-9]+)", str(entry)) for entry in self.maps]
        if None in found:
            raise InputError("maps", f"must be layer:head, such as 3:0, got {self.maps[found.index(None)]!r}")
        return tuple((int(entry[1]), int(entry[2])) for entry in found if entry)

    @property
    def attention_methods(self) -> Mapping[str, Sequence[AttentionMethod]]:
        """As in `SamplingConfig`."""
        return {"candidates": self.candidates}

    def check_grid(self, grid: LatentGrid) -> None:
        """Raise InputError if heads of videos of this grid cannot do with so much work."""
        from vmonarch.eval.calibrate.planning import check_work
        from vmonarch.plan import method_flops

        if self.flops is not None:
            cheapest = min(method_flops(options, grid, 1) for options in self.options.values())
            check_work(self.flops, cheapest / method_flops(VMonarchOptions(), grid, 1))
