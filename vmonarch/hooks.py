"""The record on a transformer to which a processor is applied, and the forward hooks that make the `Call`.

A processor that predicts the output of some steps also replaces the transformer's forward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from vmonarch.base import VideoAttentionProcessor
from vmonarch.call import Call, carry_calls, running
from vmonarch.families import Family
from vmonarch.grid import LatentGrid
from vmonarch.own import Bound, ours_of
from vmonarch.parallelism import check_no_first_block_cache
from vmonarch.residuals import ResidualSharing
from vmonarch.steps import denoising_step
from vmonarch.validation import is_dense

_ATTRIBUTE = "_vmonarch_record"


@dataclasses.dataclass
class Record:
    """Kept on a transformer while a processor is applied to it; copied with it.

    Args:
        processor: the processor that was applied.
        family: that of the transformer. names: those of its forward's arguments.
        modules: those of the video's self-attention, in the order of layers.
        bound: what `apply` made of the processor for them, in the same order.
        sharing: the residuals of the pipeline, if steps share them.
        grid: that of the latest call, in any thread.
        steps: number of steps of the latest run, if `dense_steps` needs it.
        lora: name of the LoRA layers that `load_adapter` added; they are removed with the processor.
        hooks: handles of the transformer's forward hooks.
    """

    processor: VideoAttentionProcessor
    family: Family
    names: tuple[str, ...]
    modules: list[torch.nn.Module]
    bound: list[Bound]
    sharing: ResidualSharing | None
    grid: LatentGrid | None = None
    steps: int = 0
    lora: str | None = None
    hooks: Sequence[RemovableHandle] = ()


def record_of(transformer: Any) -> Record | None:
    """The record of a transformer; None where nothing is applied."""
    return getattr(transformer, _ATTRIBUTE, None)


def keep(transformer: torch.nn.Module, record: Record | None) -> None:
    """Set a transformer's record and register its hooks, or remove both (None)."""
    before = record_of(transformer)
    if before is not None and before.sharing is not None:
        before.sharing.forget()
    _put_forward_back(transformer)
    if record is None:
        assert before is not None
        for handle in before.hooks:
            handle.remove()
        carry_calls(transformer, False)
        delattr(transformer, _ATTRIBUTE)
        return
    if before is not None:
        record.hooks = before.hooks
    else:
        pre_hook = transformer.register_forward_pre_hook(_begin_call, with_kwargs=True)
        record.hooks = pre_hook, transformer.register_forward_hook(_end_call, always_call=True)
    setattr(transformer, _ATTRIBUTE, record)
    if record.sharing is not None and record.sharing.refresh.cache is not None:
        _wrap_forward(transformer)


def _wrap_forward(transformer: torch.nn.Module) -> None:
    own = transformer.forward
    transformer.forward = functools.update_wrapper(functools.partial(_forward, transformer, own), own)


def _forward(transformer: torch.nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces a transformer's own forward: computes the output, or predicts it from earlier ones.

    A later hook of diffusers or accelerate may keep this function when nothing is applied any more, or inside another
    one of its kind, which has decided already.
    """
    call = running.now["call"]
    branch = None if call is None or record_of(transformer) is None else call.branch
    if branch is None or branch.foretold is not None or _skips_blocks(transformer):
        return own(*args, **kwargs)
    output = branch.predicted(call.dense)
    if output is None:
        output = own(*args, **kwargs)
        branch.keep_output(output)
    return output


def _skips_blocks(transformer: torch.nn.Module) -> bool:
    """Whether a cache of diffusers decides what the forward computes; it counts the calls on its own."""
    config = getattr(transformer, "_cache_config", None)
    return config is not None and type(config).__name__ != "TextKVCacheConfig"


def _is_outermost(transformer: torch.nn.Module) -> bool:
    return getattr(vars(transformer).get("forward"), "func", None) is _forward


def _put_forward_back(transformer: torch.nn.Module) -> None:
    if _is_outermost(transformer):
        _, own = transformer.forward.args  # type: ignore[attr-defined]
        del transformer.forward
        # A hook's forward was there before.
        if own != transformer.forward:
            transformer.forward = own


def _begin_call(transformer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: give the layers what they need to know about this call.

    It writes to the module and to the running thread alone, so that copies of the module stay independent.

    Raises:
        ValueError: the processor was given another grid.
        RuntimeError: `dense_steps` or `refresh` needs the step, which is not known.
        NotImplementedError: First Block Cache under context parallelism.
    """
    record, compiling = record_of(transformer), torch.compiler.is_compiling()
    assert record is not None
    running.now["call"] = None
    if not record.processor.LEARNS and all(ours_of(module) is None for module in record.modules):
        # Others have replaced all our processors. Processors that learn are called by their replacements.
        return
    check_no_first_block_cache(transformer)
    arguments = dict(zip(record.names, args, strict=False)) | kwargs
    if torch.is_grad_enabled() and not compiling:
        carry_calls(transformer, True)
    given, found = record.processor.grid, record.family.grid(arguments, transformer.config)
    if given is not None and found not in (None, given):
        raise ValueError(f"grid={tuple(given)}, but the transformer was given the grid {tuple(found)}")
    grid = given or found
    if grid is None:
        return
    if not compiling and record.grid != grid:
        record.processor.warn_of_size(grid)
    record.grid = grid
    dense, branch, dense_steps = False, None, record.processor.dense_steps
    if dense_steps:
        step = denoising_step(transformer, arguments.get("timestep"), "dense_steps", "use dense_steps=0")
        dense, record.steps = is_dense("dense_steps", dense_steps, step.step, step.steps), step.steps
    if record.sharing is not None:
        branch = record.sharing.begin(transformer, arguments)
    exact = branch is not None and branch.exact
    running.now["call"] = Call(grid, record.family.before(arguments), dense=dense, exact=exact, branch=branch)


def _end_call(transformer: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook; it also runs after an error."""
    call, record = running.now["call"], record_of(transformer)
    running.now["call"] = None
    if record is not None and record.sharing is not None and call is not None and call.branch is not None:
        record.sharing.end(call.branch)
        if record.sharing.refresh.cache is not None and not _is_outermost(transformer):
            # A later hook wraps our forward, or an earlier hook has removed it.
            _wrap_forward(transformer)
