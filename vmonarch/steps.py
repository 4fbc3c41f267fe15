"""Which denoising step a transformer is called in.

A transformer may be in several pipelines, each with a schedule of its own. They may take turns, run in each other's
callbacks or in several threads, and end by an exception. Nothing is therefore remembered of them: the pipeline that is
at work is the one whose method has called the transformer, and its scheduler tells the step.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


def running_pipeline(transformer: torch.nn.Module | None) -> Any:
    """The diffusers pipeline with this transformer whose method the running thread is in, the innermost; None if none.

    It may be a modular one. The transformer may be inside a wrapper (torch.compile, accelerate) there. diffusers does
    not tell a model by which pipeline it is called, and a transformer may be in several: the frames of the running
    thread tell it as surely as nothing that could be remembered.
    """
    # Only imported where a pipeline cannot run without it.
    from diffusers import DiffusionPipeline, ModularPipeline

    frame = inspect.currentframe()
    while frame is not None:
        # Locals are copied when they are read: only those of methods.
        caller = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
        frame = frame.f_back
        if isinstance(caller, (DiffusionPipeline, ModularPipeline)):
            parts = [part for part in vars(caller).values() if isinstance(part, torch.nn.Module)]
            # A whole part in most cases, which is found without a walk through all modules.
            modules = itertools.chain(parts, (module for part in parts for module in part.modules()))
            if any(module is transformer for module in modules):
                return caller
    return None


class DenoisingStep(NamedTuple):
    """Where a denoising loop is.

    Of a video-to-video pipeline that starts inside the schedule these are the steps that run. A step is one evaluation
    of the model: a scheduler of order 2 has nearly twice as many as the user asked for.

    Args:
        step: which it is, from 0.
        steps: how many there are.
        timesteps: of the scheduler, the last of which the loop goes through; another tensor for every loop.
        pipeline: which runs the loop.
    """

    step: int
    steps: int
    timesteps: torch.Tensor
    pipeline: Any


def noise_changes(levels: Sequence[float]) -> list[float]:
    """How far the noise level has moved before each of these, up or down."""
    moves = (abs(after - before) for before, after in itertools.pairwise(levels))
    return list(itertools.accumulate(moves, initial=0.0))


@torch.compiler.disable(reason="dense_steps and refresh look for the pipeline; compile_repeated_blocks leaves that out")
def denoising_step(transformer: torch.nn.Module | None, timestep: Any, needed_by: str, instead: str) -> DenoisingStep:
    """The step that the pipeline which calls this transformer is in; never waits for a GPU.

    Args:
        timestep: that the transformer is called with.
        needed_by, instead: for the errors: what needs the step, and what else can be done.

    Raises:
        RuntimeError: no pipeline has called the transformer, or its scheduler does not tell the step.
    """
    pipe = running_pipeline(transformer)
    if pipe is None:
        raise RuntimeError(
            f"{needed_by} needs the denoising step, but no pipeline calls this transformer here: run it by a diffusers"
            f" pipeline that has it, in the same thread, or {instead}"
        )
    scheduler = pipe.scheduler
    timesteps = getattr(scheduler, "timesteps", None)
    if isinstance(timesteps, torch.Tensor):
        # A pipeline that starts inside the schedule goes through the last of the timesteps. Not all tell how many.
        run = min(getattr(pipe, "_num_timesteps", None) or len(timesteps), len(timesteps))
        skipped = len(timesteps) - run
        kept = getattr(pipe, "_current_timestep", None)
        place = next((place for t in (kept, timestep) if (place := _place(t, timesteps)) is not None), None)
        # A pipeline that keeps a timestep of another schedule does not step this one. Mochi keeps 1000 - t, and Allegro
        # that of an equal schedule, since it sets the timesteps twice.
        steps_it = not isinstance(kept, torch.Tensor) or any(
            cls.__name__ in ("MochiPipeline", "AllegroPipeline") for cls in type(pipe).__mro__
        )
        if place is None and steps_it and hasattr(scheduler, "step_index"):
            # It counts from its first step on.
            place = skipped if scheduler.step_index is None else scheduler.step_index
        if place is not None and skipped <= place < len(timesteps):
            return DenoisingStep(place - skipped, run, timesteps, pipe)
    raise RuntimeError(
        f"{needed_by} needs the denoising step, but {type(scheduler).__name__}, the scheduler of {type(pipe).__name__},"
        " does not tell it here: the pipeline goes through other timesteps than its scheduler's, or another has begun"
        f" since; then give each a scheduler of its own, copy.deepcopy(pipe.scheduler); or {instead}"
    )


def _place(timestep: Any, timesteps: torch.Tensor) -> int | None:
    """Which entry of `timesteps` [N] the tensor `timestep` is a view of; None if of none.

    Values would not tell: they may occur twice, and to read them is to wait for the GPU.
    """
    if not isinstance(timestep, torch.Tensor):
        return None
    if timestep.untyped_storage().data_ptr() != timesteps.untyped_storage().data_ptr():
        return None
    return (timestep.storage_offset() - timesteps.storage_offset()) // timesteps.stride(0)
