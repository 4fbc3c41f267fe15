"""Which denoising step a transformer is called in.

A transformer may belong to several pipelines, each with its own schedule. They may take turns, run in each other's
callbacks or in several threads, and end by an exception. So nothing about them is remembered: the pipeline at work is
the one whose method has called the transformer, and its scheduler gives the step.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


def running_pipeline(transformer: torch.nn.Module | None) -> Any:
    """The innermost diffusers pipeline with this transformer that has a method running in this thread, or None.

    It may be modular, and the transformer may be wrapped there (torch.compile, accelerate). diffusers does not tell a
    model which pipeline calls it, and a transformer may be in several. The frames of the running thread are the only
    reliable source.
    """
    # Imported here: whoever runs a pipeline has imported diffusers.
    from diffusers import DiffusionPipeline, ModularPipeline

    frame = inspect.currentframe()
    while frame is not None:
        # Reading locals copies them, so only methods' locals are read.
        caller = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
        frame = frame.f_back
        if isinstance(caller, (DiffusionPipeline, ModularPipeline)):
            parts = [part for part in vars(caller).values() if isinstance(part, torch.nn.Module)]
            # The transformer is usually a whole part, which is found without walking through all modules.
            modules = itertools.chain(parts, (module for part in parts for module in part.modules()))
            if any(module is transformer for module in modules):
                return caller
    return None


class DenoisingStep(NamedTuple):
    """The position of a denoising loop.

    In a video-to-video pipeline that starts inside the schedule, only the steps that run count. A step is one
    evaluation of the model: a scheduler of order 2 has nearly twice as many as the user asked for.

    Args:
        step: index from 0.
        steps: number of steps.
        timesteps: the scheduler's; the loop goes through the last of them. Every loop has another tensor.
        pipeline: runs the loop.
    """

    step: int
    steps: int
    timesteps: torch.Tensor
    pipeline: Any


def noise_changes(levels: Sequence[float]) -> list[float]:
    """How far the noise level has moved, up or down, before each of these levels."""
    moves = (abs(after - before) for before, after in itertools.pairwise(levels))
    return list(itertools.accumulate(moves, initial=0.0))


@torch.compiler.disable(reason="dense_steps and refresh look for the pipeline; compile_repeated_blocks leaves that out")
def denoising_step(transformer: torch.nn.Module | None, timestep: Any, needed_by: str, instead: str) -> DenoisingStep:
    """The step of the pipeline that is calling this transformer; never waits for a GPU.

    Args:
        timestep: the transformer's argument.
        needed_by, instead: for the errors: what needs the step, and what the user can do instead.

    Raises:
        RuntimeError: no pipeline has called the transformer, or its scheduler does not give the step.
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
        # A pipeline that starts inside the schedule goes through the last timesteps. Not all know their number.
        run = min(getattr(pipe, "_num_timesteps", None) or len(timesteps), len(timesteps))
        skipped = len(timesteps) - run
        kept = getattr(pipe, "_current_timestep", None)
        place = next((place for t in (kept, timestep) if (place := _place(t, timesteps)) is not None), None)
        # A pipeline that keeps a timestep of another schedule does not step this one, with two exceptions: Mochi keeps
        # 1000 - t, and Allegro a timestep of an equal schedule, since it sets the timesteps twice.
        steps_it = not isinstance(kept, torch.Tensor) or any(
            cls.__name__ in ("MochiPipeline", "AllegroPipeline") for cls in type(pipe).__mro__
        )
        if place is None and steps_it and hasattr(scheduler, "step_index"):
            # The scheduler counts from its first step on.
            place = skipped if scheduler.step_index is None else scheduler.step_index
        if place is not None and skipped <= place < len(timesteps):
            return DenoisingStep(place - skipped, run, timesteps, pipe)
    raise RuntimeError(
        f"{needed_by} needs the denoising step, but {type(scheduler).__name__}, the scheduler of {type(pipe).__name__},"
        " does not tell it here: the pipeline goes through other timesteps than its scheduler's, or another has begun"
        f" since; then give each a scheduler of its own, copy.deepcopy(pipe.scheduler); or {instead}"
    )


def _place(timestep: Any, timesteps: torch.Tensor) -> int | None:
    """Index of the entry of `timesteps` [N] that the tensor `timestep` is a view of; None if it is no such view.

    Values would not do: they may occur twice, and reading them waits for the GPU.
    """
    if not isinstance(timestep, torch.Tensor):
        return None
    if timestep.untyped_storage().data_ptr() != timesteps.untyped_storage().data_ptr():
        return None
    return (timestep.storage_offset() - timesteps.storage_offset()) // timesteps.stride(0)
