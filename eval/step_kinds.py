"""What attention does in every denoising step of a method, on which the seconds of its videos depend."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from vmonarch.configs.methods import AttentionMethod
from vmonarch.refresh import Refresh, Schedule
from vmonarch.validation import DenseSet

# See `step_kinds`.
STEP_KINDS = ("dense", "exact", "exact, int8", "kept", "kept, int8", "predicted", "approximate")


def transformers_by_step(pipe: Any, steps: int) -> list[str]:
    """Which of a pipeline's transformers computes every step: two share them at the pipeline's `boundary_ratio`."""
    names = [name for name in ("transformer", "transformer_2") if getattr(pipe, name, None) is not None]
    boundary = pipe.config.get("boundary_ratio")
    if len(names) == 1 or boundary is None:
        return names[:1] * steps
    scheduler = copy.deepcopy(pipe.scheduler)
    scheduler.set_timesteps(steps)
    # Solvers of higher order have several timesteps a step.
    timesteps = scheduler.timesteps[:: max(1, len(scheduler.timesteps) // steps)][:steps]
    return [names[int(t < boundary * scheduler.config.num_train_timesteps)] for t in timesteps]


def exact_kind(schedule: Schedule, step: int, kept: bool) -> str:
    """Of `STEP_KINDS`, that of a step which `refresh` makes exact."""
    precision = schedule.precision(step)
    return ("kept" if kept else "exact") + ("" if precision is None else f", {precision}")


def step_kinds(method: AttentionMethod, transformers: Sequence[str]) -> list[str]:
    """What a method does in every denoising step, each of `STEP_KINDS`.

    "dense": the model's own attention, by `dense_steps`. "exact": exact attention, by `refresh`; "kept": the same, and
    its residual is kept; "exact, int8" and "kept, int8": in eight bits. "approximate": the method itself, with the last
    residual if there is one. "predicted": none, by `refresh.cache`, which a run alone decides on.

    Args:
        transformers: of every step (`transformers_by_step`).

    Raises:
        ValueError: the method asks for more steps than there are.
    """
    steps = len(transformers)
    dense = DenseSet("dense_steps", method.options.get("dense_steps", 0))
    refresh = Refresh.parse(method.options.get("refresh"))
    schedules = {name: Schedule(refresh, steps) for name in transformers if refresh is not None}
    kinds = []
    for step, name in enumerate(transformers):
        schedule = schedules.get(name)
        if schedule is not None:
            schedule.enter(step)
        if dense.contains(step, steps):
            kinds.append("dense")
        elif schedule is None or schedule.due < step:
            kinds.append("approximate")
        else:
            schedule.computed = True
            kinds.append(exact_kind(schedule, step, schedule.kept))
    return kinds
