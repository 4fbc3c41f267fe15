"""Settings of a calibration: what a plan may cost, what is recorded, and the methods that heads may get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vmonarch.configs import InputError, Settings, choice, number
from vmonarch.configs.methods import AttentionMethod
from vmonarch.eval.calibrate import MEASURES
from vmonarch.eval.settings import resolved
from vmonarch.options import Options, VMonarchOptions
from vmonarch.pipelines.config import SamplingConfig

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
class Budget(Settings):
    """What a plan may cost: flops or time, or neither for the work of VMonarch with its defaults.

    Args:
        flops: work of all heads, relative to VMonarch with its defaults.
        time: time of all heads, as measured on this GPU, relative to VMonarch with its defaults.
        measure: the loss to minimise: error, layer_error, output_error or kl (default: output_error, combined with
            layer_error, if it was measured, else layer_error).
    """

    flops: float | None = number(None, "[0, inf)")
    time: float | None = number(None, "[0, inf)")
    measure: str | None = choice(None, *MEASURES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.flops is not None and self.time is not None:
            raise InputError("flops", "and time exclude each other: give one")


@dataclass(frozen=True)
class CalibrateConfig(Budget, SamplingConfig):
    """`SamplingConfig` and `Budget`, plus what to record.

    Args:
        candidates: methods that a head may get besides full attention, of the processors vmonarch, two_resolution or
            first_order, without a bias, a plan, refresh, or dense steps and layers.
        every: record every N-th step (default: about ten steps in all).
        sensitivity: measuring what errors change in the model's output, with gradients and up to eight more calls.
        refine: measure N plans in place, each made with the measurements of those before it, and keep the best; the
            default measure is then layer_error (default 0: keep the first, unmeasured).
    """

    output_dir: str = "outputs/calibrate"
    candidates: tuple[Any, ...] = field(default=CANDIDATES, metadata={"option": {"metavar": "METHOD"}})
    every: int | None = number(None, "[1, inf)")
    sensitivity: bool = True
    refine: int = number(0, "[0, inf)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refine and self.measure is None:
            object.__setattr__(self, "measure", "layer_error")
        methods = resolved(self.candidates, "candidates", recipes=False)
        object.__setattr__(self, "candidates", methods)
        if not methods:
            raise InputError("candidates", "must be one or more methods, got none")
        for method in methods:
            if method.processor_name not in _PROCESSORS:
                known, got = " or ".join(_PROCESSORS), f"{method.label!r} of {method.processor_name}"
                raise InputError("candidates", f"must be of the processors {known}, got {got}")
            for name in ("bias", "plan", "dense_steps", "dense_layers", "refresh"):
                if method.options.get(name) not in (None, 0, []):
                    raise InputError("candidates", f"must leave {name} alone, but {method.label!r} sets it")
        if not self.sensitivity and self.measure == "output_error":
            raise InputError("measure", "cannot be output_error without sensitivity, which measures it")
        if self.refine and not self.sensitivity:
            raise InputError("refine", "measures plans with gradients; leave out no-sensitivity")
        if self.time is not None and VMonarchOptions() not in self.options.values():
            raise InputError("time", "is relative to VMonarch with its defaults, which is not among the candidates")

    @property
    def options(self) -> dict[str, Options]:
        """The candidates' options for the ops, by label."""
        return {method.label: method.processor().options for method in self.candidates}

    @property
    def attention_methods(self) -> Mapping[str, Sequence[AttentionMethod]]:
        """As in `SamplingConfig`."""
        return {"candidates": self.candidates}
