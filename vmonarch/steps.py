"""Which denoising step a transformer is called in.

A transformer may be in several pipelines, each with a schedule of its own. They may take turns, run in each other's
callbacks or in several threads, and end by an exception. Nothing is therefore remembered of them: the pipeline that is
at work is the one whose method has called the transformer, and its scheduler tells the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch


def method_calls() -> Iterator[Mapping[str, Any]]:
    """The variables, with `self`, of each method that has been called and has not returned, from the innermost.

    diffusers does not tell a processor which model, block's hook or pipeline it is called by, and nothing that could be
    remembered would tell as surely.
    """
    frame = inspect.currentframe()
    while frame is not None:
        # Locals are copied when they are read: only where one of them is wanted.
        if frame.f_code.co_varnames[:1] == ("self",) and "self" in frame.f_locals:
            yield frame.f_locals
        frame = frame.f_back


def callers() -> Iterator[Any]:
    """The `self` of each method that has been called and has not returned, from the innermost."""
    return (variables["self"] for variables in method_calls())


def running_pipeline(transformer: torch.nn.Module | None) -> Any:
    """The diffusers pipeline with this transformer whose method the running thread is in, the innermost; None if none.

    It may be a modular one. The transformer may be inside a wrapper (torch.compile, accelerate) there.
    """
    # Only imported where a pipeline cannot run without it.
    from diffusers import DiffusionPipeline, ModularPipeline

    pipelines = (caller for caller in callers() if isinstance(caller, (DiffusionPipeline, ModularPipeline)))
    return next((pipe for pipe in pipelines if _has(pipe, transformer)), None)


def _has(pipe: Any, transformer: torch.nn.Module | None) -> bool:
    parts = [part for part in vars(pipe).values() if isinstance(part, torch.nn.Module)]
    # A whole part in most cases, which is found without a walk through all modules.
    return any(part is transformer for part in parts) or any(
        module is transformer for part in parts for module in part.modules()
    )


class DenoisingStep(NamedTuple):
    """Where a denoising loop is.

    Of a video-to-video pipeline that starts inside the schedule these are the steps that run; an evaluation of a
    scheduler of order 2 is half a step.

    Args:
        step: which it is, from 0.
        steps: how many there are.
        evaluation: of the model, from 0; a scheduler of order 2 has two of them in a step.
        last: whether there is no evaluation after it.
        timesteps: of the scheduler; a pipeline makes another tensor for every loop.
        pipeline: which runs the loop.
    """

    step: int
    steps: int
    evaluation: int
    last: bool
    timesteps: torch.Tensor
    pipeline: Any


@torch.compiler.disable(reason="dense_steps and refresh look for the pipeline; compile_repeated_blocks leaves that out")
def denoising_step(transformer: torch.nn.Module | None, needed_by: str, instead: str) -> DenoisingStep:
    """The step that the pipeline which calls this transformer is in; never waits for a GPU.

    Args:
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
    timesteps, order = getattr(scheduler, "timesteps", None), getattr(scheduler, "order", 1)
    timestep, loop = _loop(pipe, timesteps)
    if timestep is None:
        raise RuntimeError(
            f"{needed_by} needs the denoising step, but {type(pipe).__name__} calls this transformer outside of its"
            f" denoising loop; {instead}"
        )
    evaluation = _place(timestep, loop)
    if evaluation is not None and timesteps is not None and 0 <= evaluation < len(loop):
        steps, last = -(-len(loop) // order), evaluation == len(loop) - 1
        return DenoisingStep(evaluation // order, steps, evaluation, last, timesteps, pipe)
    raise RuntimeError(
        f"{needed_by} needs the denoising step, but the timestep of {type(pipe).__name__} is none of its scheduler's"
        f" ({type(scheduler).__name__}): it may go through others, or another pipeline with the same scheduler may have"
        f" begun since, then give each its own, copy.deepcopy(pipe.scheduler); or {instead}"
    )


def _loop(pipe: Any, timesteps: Any) -> tuple[Any, Any]:
    """(where the denoising loop of a pipeline is, None outside of the loop; the timesteps that it goes through).

    Args:
        timesteps: of its scheduler. A pipeline that starts inside the schedule goes through the last of them.
    """
    from diffusers import ModularPipeline

    if isinstance(pipe, ModularPipeline):
        # The loop is in a block, which gets the pipeline as `components`; the pipeline itself knows nothing of it.
        of_loop = (call for call in method_calls() if call.get("components") is pipe and "t" in call)
        call = next(of_loop, {"t": None})
        own = call.get("timesteps", getattr(call.get("block_state"), "timesteps", None))
        return call["t"], timesteps if own is None else own
    run = getattr(pipe, "_num_timesteps", 0)
    own = timesteps[max(0, len(timesteps) - run) :] if isinstance(timesteps, torch.Tensor) else None
    return _timestep(pipe, timesteps), own


def _timestep(pipe: Any, timesteps: Any) -> Any:
    """Where the denoising loop of a pipeline is in the timesteps of its scheduler; None outside of the loop.

    Some pipelines do not keep it, or keep a number that they have computed from it. They have it in the variable `t` of
    the method that runs the loop.
    """
    kept = getattr(pipe, "_current_timestep", None)
    if hasattr(pipe, "_current_timestep") and (kept is None or _place(kept, timesteps) is not None):
        return kept
    return next((call["t"] for call in method_calls() if call["self"] is pipe and "t" in call), kept)


def _place(timestep: Any, timesteps: Any) -> int | None:
    """Which entry of `timesteps` [N] the tensor `timestep` is a view of; None if of none.

    Values would not tell: they may occur twice, and to read them is to wait for the GPU.
    """
    if not isinstance(timestep, torch.Tensor) or not isinstance(timesteps, torch.Tensor):
        return None
    if timestep.ndim or timestep.untyped_storage().data_ptr() != timesteps.untyped_storage().data_ptr():
        return None
    return (timestep.storage_offset() - timesteps.storage_offset()) // timesteps.stride(0)
