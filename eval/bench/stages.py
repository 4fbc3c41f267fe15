"""The stages of one operator: watched, called alone, timed."""

from __future__ import annotations

import contextlib
import functools
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vmonarch.eval.bench.clock import Clock
from vmonarch.flops import StageWork


@dataclass(frozen=True)
class StageCall:
    """One call of a stage as `fused.forward` or `fused.backward` made it."""

    stage: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextlib.contextmanager
def watched_stages(watch: Callable[[StageCall], Any]) -> Iterator[None]:
    """Let `watch` make every call of a stage in `kernels.monarch.fused` and of FlashBias, in place of the call itself.

    So the stages run in the order and with the tensors of the real operator, whatever these are.
    """
    from vmonarch.kernels.flash_bias import op as bias_op
    from vmonarch.kernels.monarch import fused

    counts = {"R": 0, "L": 0, "R backward": 0, "L backward": 0}

    def numbered(kind: str) -> str:
        if kind.endswith("backward"):
            # The backward pass takes the iterations in reverse.
            counts[kind] += 1
            return f"{kind[0]}{counts[kind[0]] - counts[kind] + 1} backward"
        counts[kind] += 1
        return f"{kind}{counts[kind]}"

    def method(original: Callable[..., Any], name: Callable[[], str]) -> Callable[..., Any]:
        @functools.wraps(original)
        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            return watch(StageCall(name(), functools.partial(original, self), args, kwargs))

        return watched

    def function(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            return watch(StageCall(name, original, args, kwargs))

        return watched

    of_r: dict[str, Callable[[], str]] = {
        "forward": functools.partial(numbered, "R"),
        "backward": functools.partial(numbered, "R backward"),
    }
    methods: dict[str, dict[str, Callable[[], str]]] = {
        "RStep": {"pool": lambda: "pool", **of_r},
        "LastRStep": of_r,
        "LStep": {
            "centroids": functools.partial(numbered, "L"),
            "output": functools.partial(numbered, "L"),
            "backward": functools.partial(numbered, "L backward"),
        },
        "Rows": {"forward": lambda: "exact", "backward": lambda: "exact backward"},
    }

    def stand_in(name: str, names: dict[str, Callable[[], str]]) -> type:
        original = getattr(fused, name)
        return type(name, (original,), {entry: method(getattr(original, entry), of) for entry, of in names.items()})

    stand_ins: dict[str, Any] = {
        **{name: stand_in(name, names) for name, names in methods.items()},
        "flash_forward": function(fused.flash_forward, "exact"),
        "flash_backward": function(fused.flash_backward, "exact backward"),
    }
    of_bias = {
        "forward_kernel": function(bias_op.forward_kernel, "bias"),
        "backward_kernels": function(bias_op.backward_kernels, "bias backward"),
    }
    changes = [(fused, name, new) for name, new in stand_ins.items()]
    changes += [(bias_op, name, new) for name, new in of_bias.items()]
    originals = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, new in changes:
        setattr(module, name, new)
    try:
        yield
    finally:
        for module, name, old in originals:
            setattr(module, name, old)


def measure_stages(
    run: Callable[[], Any], work: Sequence[StageWork], clock: Clock, rounds: int
) -> list[tuple[StageWork, float]]:
    """Median milliseconds of every stage of `run`, in order; the gaps between them are in none."""
    by_stage: list[list[float]] = []
    names: list[str] = []
    for _ in range(rounds):
        marks: list[tuple[str, Any, Any]] = []

        def watch(stage: StageCall, marks: list[tuple[str, Any, Any]] = marks) -> Any:
            start = clock.mark()
            result = stage.function(*stage.args, **stage.kwargs)
            marks.append((stage.stage, start, clock.mark()))
            return result

        with watched_stages(watch):
            # As long as the host takes, whose gaps would count as the stages'.
            clock.flush(64)
            run()
        clock.wait()
        names = [name for name, _, _ in marks]
        by_stage.append([clock.between(start, stop) for _, start, stop in marks])
    medians = [statistics.median(times) for times in zip(*by_stage, strict=True)]
    rest = list(work)
    stages = []
    for name, ms in zip(names, medians, strict=True):
        known = next((stage for stage in rest if stage.stage == name), StageWork(name, 0.0, 0.0))
        if known in rest:
            rest.remove(known)
        stages.append((known, ms))
    return stages


# What the calls of other stages are made of; without the rest their values are arbitrary.
RETURNING = "exact|pool|bias|bias backward"


def call_stages(run: Callable[[], Any], needed: str) -> list[StageCall]:
    """Run an operator, of its stages only those whose names `needed` matches (all if empty); returns all calls."""
    calls: list[StageCall] = []

    def watch(stage: StageCall) -> Any:
        calls.append(stage)
        if needed and re.fullmatch(f"{needed}|{RETURNING}", stage.stage) is None:
            return None
        return stage.function(*stage.args, **stage.kwargs)

    with watched_stages(watch):
        run()
    return calls
