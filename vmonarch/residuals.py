"""Residual sharing: what approximate attention lacks changes little from one denoising step to the next.

In a few steps attention is exact, and its difference from approximate attention, the residual, is kept for every layer
and guidance branch. In the steps between, the last residual is added to approximate attention.

Source: Yuan et al., DiTFastAttn: Attention Compression for Diffusion Transformer Models (2024), "window attention with
residual sharing", where the approximation is attention in a window.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from vmonarch.arguments import same_arguments
from vmonarch.dense import DenseSet
from vmonarch.kernels.residual.api import DTYPES, add_residual, attention_residual
from vmonarch.kernels.residual.reference import Residual
from vmonarch.steps import DenoisingStep, denoising_step

# How much denser the refreshes are at the start of a run than at its end.
_DENSITY_RATIO = 8.0
# Steps that a guidance branch may sit out and still find its residual.
_IDLE_STEPS = 2


def spaced_steps(count: int, steps: int) -> tuple[int, ...]:
    """`count` of `steps` denoising steps, from the first on at intervals that grow geometrically.

    The i-th is at floor(steps · (r^i - 1) / (r^count - 1)), and at least at i, with r^count = 8: 8 of 50 are 0, 2, 4,
    8, 13, 19, 26, 36. Attention changes most at the start of a run.
    """
    growth = _DENSITY_RATIO ** (1 / max(count, 1))
    return tuple(max(i, math.floor(steps * (growth**i - 1) / (_DENSITY_RATIO - 1) + 1e-9)) for i in range(count))


@dataclasses.dataclass(frozen=True)
class Refresh:
    """Which denoising steps are computed with exact attention and renew the residual, and how that is kept.

    Args:
        steps: how many (int), which fraction, rounded up (float), both spaced by `spaced_steps`; or a collection of
            step indices. A step in which a layer has no residual is always such a step: the first, the first of the
            second transformer in a pipeline of two, and the first after one that a cache has skipped.
        dtype: of the residuals: "int8", with a scale for every token and head, or "bfloat16", of twice the size.
        offload: keep them in the host's pinned memory, from where they come back one layer ahead.

    Raises:
        TypeError, ValueError: an option has an unsupported value.
    """

    steps: Any
    dtype: str = "int8"
    offload: bool = False

    def __post_init__(self) -> None:
        chosen = DenseSet("refresh", self.steps)
        if not chosen.some:
            raise ValueError(f"refresh must name at least one step, got {self.steps!r}; None leaves residuals out")
        if self.dtype not in DTYPES:
            raise ValueError(f"refresh.dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if not isinstance(self.offload, bool):
            raise TypeError(f"refresh.offload must be True or False, got {self.offload!r}")
        object.__setattr__(self, "steps", chosen.dense)

    @classmethod
    def parse(cls, refresh: object) -> Refresh | None:
        """What an option `refresh` stands for: None, a `Refresh`, a mapping of its arguments, or its `steps`.

        Raises:
            TypeError, ValueError: it is none of these, or has an unsupported value.
        """
        if refresh is None or isinstance(refresh, Refresh):
            return refresh
        if not isinstance(refresh, Mapping):
            return cls(refresh)
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(refresh) - set(names))
        if unknown or "steps" not in refresh:
            raise TypeError(f"refresh must have steps, and of {', '.join(names)} no others, got {dict(refresh)!r}")
        return cls(**refresh)

    def schedule(self, steps: int) -> tuple[int, ...]:
        """The steps of a run of `steps` that refresh.

        Raises:
            ValueError: there are fewer steps than asked for.
        """
        chosen = DenseSet("refresh", self.steps)
        found = tuple(step for step in range(steps) if chosen.contains(step, steps))
        return found if isinstance(chosen.dense, tuple) else spaced_steps(len(found), steps)

    def at(self, step: int, steps: int) -> tuple[int, bool]:
        """(the step since which a residual must have been made to be used in this one, whether one of this is kept).

        The first step has no residual, whether it is in the schedule or not; one that the next step renews is not made.
        """
        schedule = self.schedule(steps)
        due = max((chosen for chosen in schedule if chosen <= step), default=0)
        return due, step + 1 < steps and step + 1 not in schedule


@dataclasses.dataclass
class Branch:
    """The calls of a transformer in one run of a pipeline that differ in nothing but step and latents, one a step.

    Args:
        run: the timesteps of the run: they are there as long as the pipeline has not begun another one.
        conditioning: what the transformer is called with, without latents and timestep.
        versions: of the tensors in there, which tell of changes in place.
        step, evaluation: of the latest call.
        last: whether no other one follows.
        due: a residual must have been made in this step or later to be used.
        kept: whether the residual of this step is of use in the next.
        residuals: by the processor of the layer, with the step in which they were made.
    """

    run: weakref.ref[torch.Tensor]
    conditioning: Mapping[str, Any]
    versions: list[int]
    step: int = -1
    evaluation: int = -1
    last: bool = False
    due: int = 0
    kept: bool = False
    residuals: dict[Any, tuple[int, Residual]] = dataclasses.field(default_factory=dict)

    def enter(self, step: DenoisingStep, refresh: Refresh) -> None:
        """A forward call begins in this step."""
        self.step, self.evaluation, self.last = step.step, step.evaluation, step.last
        self.due, self.kept = refresh.at(step.step, step.steps)

    def may_go_on(self, step: DenoisingStep) -> bool:
        """Whether what the branch holds may be of use in that step or after it."""
        if self.run() is not step.timesteps:
            return self.run() is not None
        return step.step - 1 - _IDLE_STEPS <= self.step <= step.step

    def is_of(self, step: DenoisingStep, conditioning: Mapping[str, Any]) -> bool:
        """Whether a call is the next one of the branch."""
        follows = self.run() is step.timesteps and self.evaluation < step.evaluation
        unchanged = self.versions == _versions(self.conditioning)
        return follows and unchanged and same_arguments(self.conditioning, conditioning)


def _versions(conditioning: Mapping[str, Any]) -> list[int]:
    tensors = (value for value in conditioning.values() if isinstance(value, torch.Tensor))
    # What inference mode has made has no version.
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


class ResidualSharing:
    """The residuals of one transformer, and what they are used for. A copy holds none.

    They belong to a *run*, one denoising loop of one pipeline, and in it to a branch (prompt, negative prompt, both in
    one batch), which is told by what the transformer is called with. Those of a run are freed in its last step; those
    of one that was interrupted, when any pipeline calls the transformer next, or by `vmonarch.restore`.

    Args:
        refresh: the option.
    """

    def __init__(self, refresh: Refresh) -> None:
        self.refresh = refresh
        self._branches: list[Branch] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ResidualSharing, (self.refresh,)

    @torch.compiler.disable(reason="refresh looks for the pipeline; compile_repeated_blocks leaves that out")
    def begin(self, transformer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Branch:
        """The branch of a forward call that begins.

        Raises:
            RuntimeError: no pipeline has called the transformer, or its scheduler does not tell the step.
        """
        step = denoising_step(transformer, "refresh", "use refresh=None")
        # Of the class: an instance's own `forward` may be one of hooks and wrappers.
        given = inspect.signature(type(transformer).forward).bind(transformer, *args, **kwargs).arguments
        conditioning = {name: value for name, value in given.items() if name not in ("self", "timestep")}
        latents = conditioning.pop("hidden_states")
        conditioning["latents"] = (latents.shape, latents.dtype, latents.device)
        with self._lock:
            self._branches = [branch for branch in self._branches if branch.may_go_on(step)]
            branch = next((branch for branch in self._branches if branch.is_of(step, conditioning)), None)
            if branch is None:
                branch = Branch(weakref.ref(step.timesteps), conditioning, _versions(conditioning))
                self._branches.append(branch)
            branch.enter(step, self.refresh)
        return branch

    def end(self, branch: Branch | None) -> None:
        """The forward call is over: after a run's last one its residuals are freed."""
        if branch is not None and branch.last:
            with self._lock:
                self._branches = [other for other in self._branches if other is not branch]
            branch.residuals.clear()

    def forget(self) -> None:
        """Free all residuals."""
        with self._lock:
            for branch in self._branches:
                branch.residuals.clear()
            self._branches = []

    def attend(
        self,
        branch: Branch,
        layer: Any,
        exact: Callable[[], torch.Tensor],
        approximate: Callable[[], torch.Tensor],
        implementation: str,
    ) -> torch.Tensor:
        """Attention of one layer: exact where the residual is due, else approximate with the residual.

        Args:
            layer: its processor.
            exact, approximate: compute [B, S, H, E]; what the second returns may be written to.
        """
        made, residual = branch.residuals.get(layer, (-1, None))
        if residual is not None and made >= branch.due:
            return add_residual(approximate(), residual, implementation=implementation)
        # The memory of the old one is free for the new one.
        branch.residuals.pop(layer, None)
        del residual
        out = exact()
        if branch.kept:
            kept = attention_residual(out, approximate(), dtype=self.refresh.dtype, implementation=implementation)
            branch.residuals[layer] = branch.step, kept
        return out
