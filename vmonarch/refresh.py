"""Which denoising steps are exact, and which are computed at all: chosen beforehand, or by measured errors.

An exact step also measures, at no extra cost, how wrong residual sharing was. With the exact output o, the approximate
output a and the residual r of the last exact step, the error of a layer is

    e = ‖o − (a + r)‖ / ‖o‖.

Its mean over layers and guidance branches grows about evenly with the change of the noise level since the last exact
step. The next exact step is the last one before which it stays below the tolerance, like the step size of a solver for
differential equations. One decision holds for all layers, guidance branches and videos of a batch.

In the same way a computed step measures the error of predicting the model's output along the line through the last two
computed outputs. Steps are predicted as long as that error stays below another tolerance.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from vmonarch.configs import Settings, build, choice, naming_the_option, number
from vmonarch.validation import check_dense, is_dense

# The first steps, this share of them, decide the video's layout. With a tolerance all of them are exact.
START = 0.12
# The next interval between two exact steps may be at most this many times as long as the last.
GROWTH = 2


def spaced_steps(count: int, steps: int) -> tuple[int, ...]:
    """`count` of `steps` denoising steps, from the first on at intervals that grow evenly.

    The i-th is at steps · (i / count)², rounded, and at least at i: 8 of 50 are 0, 1, 3, 7, 12, 20, 28, 38. Attention
    changes most at the start of a run.
    """
    return tuple(max(i, round(steps * (i / count) ** 2)) for i in range(count))


@dataclasses.dataclass(frozen=True)
class Refresh(Settings):
    """Which denoising steps compute exact attention and renew the residual, and how the residual is kept.

    Args:
        steps: a number (int) or fraction (float, rounded up) of steps, spaced by `spaced_steps`; or a collection of
            step indices. None with a tolerance.
        offload: keep residuals in the host's pinned memory and bring them back one layer ahead. On a GPU only.
        tolerance: the largest error of residual sharing, relative to exact attention's output (0.1 is 10 %), before
            attention is exact again. The steps follow from the errors measured; see `Schedule`.
        at_most: with a tolerance, the number (int) or fraction (float) of steps that may be exact.
        cache: the largest error of the transformer's predicted output, relative to that output (0.1 is 10 %), before
            it is computed again. None: every step is computed. A step that a tolerance makes exact is always computed;
            if one of `steps` is predicted, the next computed step is exact instead.
        precision: of exact attention: None, the model's own; or "int8", products of eight bits (`int8_attention`) in
            all steps but the first 12 %. Dense steps and layers keep the model's own.

    A step in which a layer has no residual is always exact: the first step, the second transformer's first step, and
    the first step after one that a cache has skipped.

    Raises:
        InputError, TypeError, ValueError: an option has an unsupported value.
    """

    steps: Any = None
    offload: bool = False
    tolerance: float | None = number(None, "(0, inf)")
    at_most: Any = 0.5
    cache: float | None = number(None, "(0, inf)")
    precision: str | None = choice(None, "int8")

    def __post_init__(self) -> None:
        with naming_the_option("refresh."):
            super().__post_init__()
        at_most = check_dense("refresh.at_most", self.at_most)
        if isinstance(at_most, tuple) or not at_most:
            raise ValueError(f"refresh.at_most must be a count or a fraction above 0, got {self.at_most!r}")
        object.__setattr__(self, "at_most", at_most)
        if (self.steps is None) == (self.tolerance is None):
            raise ValueError(
                f"refresh needs either steps or a tolerance, got steps={self.steps!r}, tolerance={self.tolerance!r}"
            )
        if self.tolerance is not None:
            return
        if self.at_most != type(self).at_most:
            raise ValueError(f"refresh.at_most is for a tolerance, got {self.at_most!r} with steps={self.steps!r}")
        chosen = check_dense("refresh", self.steps)
        if not chosen:
            raise ValueError(f"refresh must name at least one step, got {self.steps!r}; None leaves residuals out")
        object.__setattr__(self, "steps", chosen)

    def __repr__(self) -> str:
        changed = {f.name: v for f in dataclasses.fields(self) if (v := getattr(self, f.name)) != f.default}
        return f"Refresh({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    @property
    def decides(self) -> bool:
        """Whether errors measured in a run decide about its steps."""
        return self.tolerance is not None or self.cache is not None

    @classmethod
    def parse(cls, refresh: object) -> Refresh | None:
        """The option `refresh` from None, a `Refresh`, a mapping of its arguments, or its `steps`.

        Raises:
            TypeError, ValueError: it is none of these, or has an unsupported value.
        """
        if isinstance(refresh, Mapping):
            return build(cls, refresh, prefix="refresh.")
        return refresh if refresh is None or isinstance(refresh, Refresh) else cls(refresh)

    def schedule(self, steps: int) -> tuple[int, ...]:
        """The exact steps of a run of `steps`; with a tolerance, the earliest step that the i-th exact one may be.

        Raises:
            ValueError: there are fewer steps than asked for.
        """
        chosen = self.at_most if self.steps is None else self.steps
        if self.steps is None and isinstance(chosen, int):
            return spaced_steps(min(chosen, steps), steps)
        found = tuple(step for step in range(steps) if is_dense("refresh", chosen, step, steps))
        return found if isinstance(chosen, tuple) else spaced_steps(len(found), steps)


@dataclasses.dataclass
class Schedule:
    """What each step of a transformer's run computes.

    Args:
        refresh: the option.
        steps: N, number of steps of the run.
        times: [N], how far the noise has changed before each step, in any unit; only a tolerance or a cache needs them.
        spent: number of exact steps of other transformers in the same denoising loop.

    Attributes:
        step: that of the latest call.
        due: the latest exact step; residuals of earlier steps are not used.
        exact: the exact steps, with the error of residual sharing; None where there was no residual to measure it, and
            without a tolerance.
        computed: whether a layer has computed exact attention in this step.
        renewals: the exact steps that also compute approximate attention, for a residual.
        forward: the steps that computed the transformer, with the error of predicting its output; None where two
            outputs to predict it from were missing, and without a cache.
        predicted: the steps that predicted the output.
        held: whether `at_most` may have let the error grow beyond the tolerance; true also where none was measured.
    """

    refresh: Refresh
    steps: int
    times: Sequence[float] = ()
    spent: int = 0
    step: int = -1
    due: int = -1
    exact: dict[int, float | None] = dataclasses.field(default_factory=dict)
    computed: bool = False
    renewals: set[int] = dataclasses.field(default_factory=set)
    forward: dict[int, float | None] = dataclasses.field(default_factory=dict)
    predicted: set[int] = dataclasses.field(default_factory=set)
    held: bool = False
    _earliest: tuple[int, ...] = dataclasses.field(init=False)
    _next: int = 0
    _next_forward: int = 0
    # Whether the next exact step comes later than the error asks for.
    _waited: bool = False
    _errors: list[_Error] = dataclasses.field(default_factory=list)
    _forward_errors: list[_Error] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._earliest = self.refresh.schedule(self.steps)

    def enter(self, step: int) -> None:
        """Begin a forward call in this step. After a step that has measured an error, this waits for the GPU."""
        if step == self.step:
            return
        self.read()
        self._errors.clear()
        self._forward_errors.clear()
        if self.step in self.exact and self.computed:
            self._next = self._following(self.exact[self.step])
        elif self.step in self.exact:
            # A cache of diffusers has skipped it, or it was dense; the exact step is still due.
            del self.exact[self.step]
        if self.step in self.forward and (tolerance := self.refresh.cache) is not None:
            # No later step corrects the last one.
            self._next_forward = min(self._last_below(tolerance, self.forward), self.steps - 1)
        self.step, self.computed = step, False
        exact = step >= self._next
        if step >= self._next_forward or exact and self.refresh.tolerance is not None:
            self.forward[step] = None
            if exact:
                self.due, self.exact[step] = step, None

    def compute(self) -> None:
        """Note that a call of a predicted step was computed: its branch has no line, and all branches begin anew."""
        if self.step not in self.forward:
            self.forward[self.step], self._next_forward = None, self.step + 1

    @property
    def kept(self) -> bool:
        """Whether a residual of this step is of use: the next step adds it, or measures its error."""
        following = self.step + 1
        if self.refresh.tolerance is None:
            return following < self.steps and following not in self._earliest
        return following < self.steps and (following >= self._start - 1 or following < self._soonest)

    def measured(self, error: torch.Tensor) -> None:
        """Note the error of residual sharing in a forward call of this step; a number on any device."""
        if self.due == self.step:
            self._errors.append(_Error(error))

    def measured_forward(self, error: torch.Tensor) -> None:
        """Note the error of predicting the output of a forward call in this step; a number on any device."""
        self._forward_errors.append(_Error(error))

    def precision(self, step: int) -> str | None:
        """The precision of exact attention in a step; None for the model's own."""
        return self.refresh.precision if step >= self._start else None

    @property
    def _start(self) -> int:
        return math.ceil(START * self.steps)

    @property
    def _soonest(self) -> int:
        """The earliest step that `at_most` allows for the next exact one."""
        count = self.spent + len(self.exact)
        return self._earliest[count] if count < len(self._earliest) else self.steps

    def read(self) -> None:
        """Note the mean errors of this step's forward calls, if there are any. This waits for the GPU."""
        # Copies, because another thread may report in the middle of a step.
        for errors, found in (([*self._errors], self.exact), ([*self._forward_errors], self.forward)):
            if errors:
                found[self.step] = sum(error.read() for error in errors) / len(errors)

    def _stays_below(self, tolerance: float, found: Mapping[int, float | None], following: int) -> bool:
        """Whether the error just before a step will be below the tolerance, extrapolated from the last one measured."""
        last, step = list(found)[-2:]
        change = lambda start, end: self.times[min(end, self.steps - 1)] - self.times[start]
        # False for NaN.
        return found[step] / max(change(last, step), 1e-9) * change(step, following) <= tolerance

    def _last_below(self, tolerance: float, found: Mapping[int, float | None]) -> int:
        """The last step before which the error stays below the tolerance; the next step if none has been measured.

        Args:
            found: the errors measured so far, by step; this step is the last.
        """
        step, following = self.step, self.step + 1
        if following < self._start or found[step] is None or len(found) < 2:
            return following
        last = list(found)[-2]
        furthest = min(step + GROWTH * (step - last), self.steps)
        while following < furthest and self._stays_below(tolerance, found, following + 1):
            following += 1
        return following

    def _following(self, error: float | None) -> int:
        """The next exact step, after one with this error."""
        step, tolerance, earliest = self.step, self.refresh.tolerance, self._soonest
        if tolerance is None:
            return min((chosen for chosen in self._earliest if chosen > step), default=self.steps)
        following = self._last_below(tolerance, self.exact)
        if error is None or len(self.exact) < 2:
            self.held |= following < self.steps == earliest
        else:
            small = self._stays_below(tolerance, self.exact, earliest)
            self.held |= self._waited and not error <= tolerance or earliest == self.steps and not small
        self._waited = earliest > following
        return max(following, earliest)


class _Error:
    """A number that a GPU may still be computing, and its asynchronous copy to the host.

    A reader in any thread and stream waits for this copy alone, and a CUDA graph may overwrite the tensor.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self._event = None
        self._value = value
        if value.device.type == "cuda":
            self._value = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
            self._event = torch.cuda.current_stream(value.device).record_event()

    def read(self) -> float:
        if self._event is not None:
            self._event.synchronize()
        return float(self._value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that a value is, or that its tuples, lists and dictionaries hold."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@dataclasses.dataclass
class Line:
    """The line through the last two computed outputs, each of tensors [B, …] in tuples or mappings.

    Attributes:
        outputs: (step, time, output) of the two.
    """

    outputs: list[tuple[int, float, Any]] = dataclasses.field(default_factory=list)

    def at(self, time: float) -> Any:
        """The output at a time."""
        (_, before, first), (_, latest, second) = self.outputs
        along = (time - before) / (latest - before) if latest != before else 1.0
        between = lambda x, y: torch.lerp(x.float(), y.float(), along).to(y.dtype) if isinstance(y, torch.Tensor) else y
        return pytree.tree_map(between, first, second)

    def error(self, time: float, output: Any) -> torch.Tensor:
        """‖computed − predicted‖ / ‖computed‖ at a time, for the worst sample of the worst tensor: a number."""
        errors = []
        for computed, predicted in zip(tensors_in(output), tensors_in(self.at(time)), strict=True):
            change, size = computed.float() - predicted.float(), computed.float()
            errors.append((change.flatten(1).norm(dim=1) / size.flatten(1).norm(dim=1)).max())
        return torch.stack([error.to(errors[0].device) for error in errors]).max()

    def add(self, step: int, time: float, output: Any) -> None:
        """Add a computed output, as a copy, because its receiver may write to it."""
        kept = pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, output)
        self.outputs = [*self.outputs[-1:], (step, time, kept)]
