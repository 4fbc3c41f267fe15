"""Which denoising steps are exact or computed at all: chosen beforehand, or where a measured error asks for one.

An exact step measures for nothing how wrong residual sharing was: with the exact output o, the approximate one a and
the residual r of the last exact step, the error of a layer is

    e = ‖o − (a + r)‖ / ‖o‖.

Its mean over layers and guidance branches grows about evenly with the change of the noise level since the last exact
step. The next exact step is the last one before which it stays below the tolerance, like the step size of a solver for
differential equations. One decision holds for all layers, guidance branches and videos of a batch.

In the same way a step that is computed measures how wrong it would have been to predict the model's output, along the
line through the last two computed ones, and steps are predicted as long as that error stays below another tolerance.
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

# This share of the steps at the start decides the video's layout. With a tolerance it is exact throughout.
START = 0.12
# How much longer than the last interval between two exact steps the next may be.
GROWTH = 2


def spaced_steps(count: int, steps: int) -> tuple[int, ...]:
    """`count` of `steps` denoising steps, from the first on at intervals that grow evenly.

    The i-th is at steps · (i / count)², rounded, and at least at i: 8 of 50 are 0, 1, 3, 7, 12, 20, 28, 38. Attention
    changes most at the start of a run.
    """
    return tuple(max(i, round(steps * (i / count) ** 2)) for i in range(count))


@dataclasses.dataclass(frozen=True)
class Refresh(Settings):
    """Which denoising steps are computed with exact attention and renew the residual, and how that is kept.

    Args:
        steps: how many (int), which fraction, rounded up (float), both spaced by `spaced_steps`; or a collection of
            step indices. None with a tolerance.
        offload: keep them in the host's pinned memory, from where they come back one layer ahead. On a GPU only.
        tolerance: how large the error of residual sharing may become before attention is exact again, of the size of
            exact attention's output: 0.1 for 10 %. The steps follow from the errors measured; see `Schedule`.
        at_most: with a tolerance, the number (int) or fraction (float) of steps that may be exact.
        cache: how large the error of the transformer's predicted output may become before it is computed again, of the
            size of that output: 0.1 for 10 %. None: every step is computed. A step that a tolerance makes exact is
            computed in any case, and one of `steps` that is predicted leaves it to the next.
        precision: of exact attention: None, that of the model; or "int8", products of eight bits (`int8_attention`) in
            all steps but the first 12 %. Dense steps and layers have that of the model.

    A step in which a layer has no residual is exact in any case: the first, the first of the second transformer in a
    pipeline of two, and the first after one that a cache has skipped.

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
        """Whether errors measured in a run decide what its steps are."""
        return self.tolerance is not None or self.cache is not None

    @classmethod
    def parse(cls, refresh: object) -> Refresh | None:
        """What an option `refresh` stands for: None, a `Refresh`, a mapping of its arguments, or its `steps`.

        Raises:
            TypeError, ValueError: it is none of these, or has an unsupported value.
        """
        if isinstance(refresh, Mapping):
            return build(cls, refresh, prefix="refresh.")
        return refresh if refresh is None or isinstance(refresh, Refresh) else cls(refresh)

    def schedule(self, steps: int) -> tuple[int, ...]:
        """The steps of a run of `steps` that refresh; with a tolerance, the i-th exact step is no earlier than these.

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
    """What the steps of one run of a transformer are.

    Args:
        refresh: the option.
        steps: N, of the run.
        times: [N], how far the noise has changed before each step, in any unit; only a tolerance or a cache needs them.
        spent: exact steps of other transformers in the same denoising loop.

    Attributes:
        step: of the latest call.
        due: the latest exact step; residuals of earlier ones are not used.
        exact: the steps that were exact, with the error of residual sharing; None where there was no residual to
            measure it by, and without a tolerance.
        computed: whether a layer has computed exact attention in this step.
        renewals: those of them that compute approximate attention, too, for a residual.
        forward: the steps in which the transformer was computed, with the error of predicting its output; None where
            there were no two outputs to predict it from, and without a cache.
        predicted: the steps in which its output was predicted.
        held: whether `at_most` may have let the error grow beyond the tolerance; where none was measured, it may.
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
    # Whether the next exact step comes later than wanted.
    _waited: bool = False
    _errors: list[_Error] = dataclasses.field(default_factory=list)
    _forward_errors: list[_Error] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._earliest = self.refresh.schedule(self.steps)

    def enter(self, step: int) -> None:
        """A forward call begins in this step. It waits for the GPU after a step that has measured an error."""
        if step == self.step:
            return
        self.read()
        self._errors.clear()
        self._forward_errors.clear()
        if self.step in self.exact and self.computed:
            self._next = self._following(self.exact[self.step])
        elif self.step in self.exact:
            # A cache of diffusers has skipped it, or it was dense, so that it is still due.
            del self.exact[self.step]
        if self.step in self.forward and (tolerance := self.refresh.cache) is not None:
            # Nothing after the last step corrects it.
            self._next_forward = min(self._last_below(tolerance, self.forward), self.steps - 1)
        self.step, self.computed = step, False
        exact = step >= self._next
        if step >= self._next_forward or exact and self.refresh.tolerance is not None:
            self.forward[step] = None
            if exact:
                self.due, self.exact[step] = step, None

    def compute(self) -> None:
        """A call of a step that is predicted is computed, so that its branch cannot go on: all of them begin anew."""
        if self.step not in self.forward:
            self.forward[self.step], self._next_forward = None, self.step + 1

    @property
    def kept(self) -> bool:
        """Whether a residual of this step is of use: the next one adds it, or measures how wrong it is."""
        following = self.step + 1
        if self.refresh.tolerance is None:
            return following < self.steps and following not in self._earliest
        return following < self.steps and (following >= self._start - 1 or following < self._soonest)

    def measured(self, error: torch.Tensor) -> None:
        """A forward call in this step has found this error of residual sharing; a number on any device."""
        if self.due == self.step:
            self._errors.append(_Error(error))

    def measured_forward(self, error: torch.Tensor) -> None:
        """A forward call in this step has found this error of predicting its output; a number on any device."""
        self._forward_errors.append(_Error(error))

    def precision(self, step: int) -> str | None:
        """Of exact attention in a step: None for that of the model."""
        return self.refresh.precision if step >= self._start else None

    @property
    def _start(self) -> int:
        return math.ceil(START * self.steps)

    @property
    def _soonest(self) -> int:
        """The first step in which `at_most` allows the next exact one."""
        count = self.spent + len(self.exact)
        return self._earliest[count] if count < len(self._earliest) else self.steps

    def read(self) -> None:
        """Note the mean errors of the forward calls of this step, if there are any: waits for the GPU."""
        # Copies: a report of another thread may come amid a step.
        for errors, found in (([*self._errors], self.exact), ([*self._forward_errors], self.forward)):
            if errors:
                found[self.step] = sum(error.read() for error in errors) / len(errors)

    def _stays_below(self, tolerance: float, found: Mapping[int, float | None], following: int) -> bool:
        """Whether the error just before a step will be below the tolerance, by the last one that was measured."""
        last, step = list(found)[-2:]
        change = lambda start, end: self.times[min(end, self.steps - 1)] - self.times[start]
        # A NaN is no small one.
        return found[step] / max(change(last, step), 1e-9) * change(step, following) <= tolerance

    def _last_below(self, tolerance: float, found: Mapping[int, float | None]) -> int:
        """The last step before which the error stays below the tolerance: the next one where none has been measured.

        Args:
            found: the steps that have measured it so far, this one last.
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
    """A number that a GPU is still computing: it is on its way to the host from now on.

    Whoever reads it, in whatever thread and stream, waits for it alone, and a CUDA graph may write over the tensor.
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
    """Through the latest two outputs that were computed, each of tensors [B, …] in tuples or mappings.

    Attributes:
        outputs: (step, time, output) of them.
    """

    outputs: list[tuple[int, float, Any]] = dataclasses.field(default_factory=list)

    def at(self, time: float) -> Any:
        """The output at a time."""
        (_, before, first), (_, latest, second) = self.outputs
        along = (time - before) / (latest - before) if latest != before else 1.0
        between = lambda x, y: torch.lerp(x.float(), y.float(), along).to(y.dtype) if isinstance(y, torch.Tensor) else y
        return pytree.tree_map(between, first, second)

    def error(self, time: float, output: Any) -> torch.Tensor:
        """‖computed − predicted‖ / ‖computed‖ at a time, of the worst sample of the worst tensor: a number."""
        errors = []
        for computed, predicted in zip(tensors_in(output), tensors_in(self.at(time)), strict=True):
            change, size = computed.float() - predicted.float(), computed.float()
            errors.append((change.flatten(1).norm(dim=1) / size.flatten(1).norm(dim=1)).max())
        return torch.stack([error.to(errors[0].device) for error in errors]).max()

    def add(self, step: int, time: float, output: Any) -> None:
        """Go on with an output that was computed; a copy, because whoever gets it may write to it."""
        kept = pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, output)
        self.outputs = [*self.outputs[-1:], (step, time, kept)]
