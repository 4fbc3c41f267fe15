"""Switching an attention processor on in a pipeline or transformer, and off again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import torch

from vmonarch.attend import Exact
from vmonarch.base import FullAttentionProcessor, Layer, VideoAttentionProcessor
from vmonarch.borrowed import borrow
from vmonarch.families import SUPPORTED, diffusers_class, forward_arguments, known_family, transformers_in
from vmonarch.hooks import Record, keep, record_of
from vmonarch.own import Bound, ours_of
from vmonarch.parallelism import (
    check_parallelism,
    check_restorable,
    enable_parallelism,
    has_hook,
    share_parallel_config,
)
from vmonarch.residuals import NO_REFRESH, ResidualSharing
from vmonarch.validation import is_dense

# By component name: a transformer, and what its modules of video self-attention get in place of their processors.
Bindings = dict[str, tuple[torch.nn.Module, dict[torch.nn.Module, Any]]]
KEEP = "save its parameters with vmonarch.save_adapter if they are to be kept, then call vmonarch.restore"


@dataclasses.dataclass(frozen=True)
class Installation(contextlib.AbstractContextManager["Installation"]):
    """What `apply` did; also a context manager that restores the original processors at its end.

    It does not restore the processors of an earlier `apply`: such contexts do not nest.

    Args:
        processor: the processor that was applied.
        transformers: the transformers that it was applied to, by component name.
    """

    processor: VideoAttentionProcessor
    transformers: dict[str, torch.nn.Module] = dataclasses.field(repr=False)

    def restore(self) -> None:
        """Put the original processors back; see `restore`."""
        _restore(self.transformers)

    def __exit__(self, *_: object) -> None:
        self.restore()


def find_transformers(pipe_or_transformer: object) -> dict[str, torch.nn.Module]:
    """The supported transformers of a pipeline, or the transformer itself (inside a compiled or training wrapper too).

    Raises:
        TypeError: a transformer is of another class, or there is none.
        ValueError: the pipeline's transformers are all None.
    """
    if isinstance(pipe_or_transformer, torch.nn.Module):
        return {"transformer": _unwrap(pipe_or_transformer)}
    owner, present = type(pipe_or_transformer).__name__, transformers_in(pipe_or_transformer)
    return {name: _unwrap(component, f"{owner}.{name}") for name, component in present.items()}


def _unwrap(module: torch.nn.Module, argument: str = "pipe_or_transformer") -> torch.nn.Module:
    found = [child for child in module.modules() if diffusers_class(child) is not None]
    if len(found) != 1:
        problem = f"must be (or wrap) one supported video transformer, got {type(module).__name__}"
        raise TypeError(f"{argument} {problem}; supported: {SUPPORTED}")
    return found[0]


def apply(pipe_or_transformer: Any, processor: VideoAttentionProcessor | str = "near-lossless") -> Installation:
    """Compute the self-attention of a pipeline's transformers (or of one transformer) with `processor`.

    A forward pre-hook on each transformer gives the processors the latent grid of every call, so sizes may change from
    call to call. (Call the transformer itself, as pipelines do; its `.forward` bypasses the hook.) Applying again
    replaces the processor, and `restore` still returns to the original ones. A transformer that is put into the
    pipeline later keeps its own processors: apply again. Cross-attention is not touched. `set_attn_processor` of a
    pipeline or transformer does the same. diffusers' `enable_parallelism` may come before or after; beyond the Wan
    family it must come after. The transformers may be xfuser's (docs/parallel.md).

    With `dense_steps` or `refresh`, a pipeline that has the transformer must call it. Any other call raises
    RuntimeError.

    A `BasedProcessor` has parameters: they are added to the transformer, and `restore` takes them away. It cannot
    replace another processor with parameters.

    Args:
        pipe_or_transformer: a stock diffusers pipeline, one of `vmonarch.pipelines`, or a video transformer. In a
            pipeline this changes `transformer`, `transformer_2` and `transformer_ref`, whichever exist.
        processor: a `VMonarchProcessor` or another of ours, which is not changed and may be applied elsewhere too; or
            the name of a preset (`vmonarch.presets`), with options if you like: "fast:refresh=6".

    Returns:
        The installation, with `.restore()`; also a context manager that restores.

    Raises:
        TypeError: `pipe_or_transformer` has no supported transformer, or `processor` is not one of ours.
        ValueError: there is no preset of this name, or an unknown option of one; `dense_layers`, or an option of the
            processor, does not fit the transformer; `dense_steps` or `refresh` was asked for in a diffusion-forcing
            pipeline; a processor with parameters is applied already, or cannot be because the weights are offloaded; a
            transformer runs with context parallelism and its ranks cannot share its heads, or have its tokens in
            another way than is needed.
        NotImplementedError: the transformer runs with ring attention (`enable_parallelism`), or with context
            parallelism that its model does not support.
        RuntimeError: beyond the Wan family, diffusers computes attention in a way that is not known.
    """
    processor = _checked(pipe_or_transformer, processor)
    # Everything that can fail comes before the first change.
    return install(processor, bind_all(pipe_or_transformer, processor))


def bind_all(pipe_or_transformer: Any, processor: VideoAttentionProcessor) -> Bindings:
    """What `install` would put on the modules of a pipeline or transformer; changes nothing. Raises as `apply`."""
    transformers = find_transformers(pipe_or_transformer)
    plan = getattr(processor, "plan", None)
    if plan is not None and isinstance(pipe_or_transformer, torch.nn.Module):
        if len(plan.layers) > 1:
            raise ValueError(
                f"plan: it is for {', '.join(plan.layers)}, and a transformer does not tell which of them it is:"
                " use vmonarch.apply with the pipeline"
            )
        # A transformer alone gets the plan's only part, whatever its pipeline calls it.
        transformers = dict(zip(plan.layers, transformers.values(), strict=True))
    return {name: (transformer, _bind(name, transformer, processor)) for name, transformer in transformers.items()}


def install(processor: VideoAttentionProcessor, made: Bindings) -> Installation:
    """Put what `bind_all` has made for a processor on the modules."""
    sharing = None if processor.refresh is None else ResidualSharing(processor.refresh)
    for transformer, bound in made.values():
        for attn, given in bound.items():
            _set_processor(attn, given)
        family, names = known_family(transformer), forward_arguments(transformer)
        ours = [given for given in bound.values() if isinstance(given, Bound)]
        keep(transformer, Record(processor, family, names, list(bound), ours, sharing))
        share_parallel_config(transformer)
        if not family.own:
            vars(transformer)["enable_parallelism"] = functools.partial(enable_parallelism, transformer)
    return Installation(processor, {name: transformer for name, (transformer, _) in made.items()})


def _checked(pipe_or_transformer: object, processor: object) -> VideoAttentionProcessor:
    """The processor that a pipeline or transformer will have; raises as `apply`."""
    if isinstance(processor, str):
        from vmonarch.configs.methods import resolve_method

        processor = resolve_method(processor, argument="processor").processor()
    if not isinstance(processor, VideoAttentionProcessor):
        raise TypeError(
            "processor must be a VMonarchProcessor(...) or another of vmonarch's, or the name of a preset, got"
            f" {processor!r}; vmonarch.restore switches it off"
        )
    # Diffusion forcing gives every latent frame its own noise level and its own copy of the scheduler.
    stepwise = "dense_steps" if processor.dense_steps else None if processor.refresh is None else "refresh"
    if stepwise and "DiffusionForcing" in (name := type(pipe_or_transformer).__name__):
        instead = NO_REFRESH if stepwise == "refresh" else "use dense_steps=0"
        raise ValueError(f"{stepwise} is not supported with {name}: its frames are at different steps; {instead}")
    return processor


def _bind(name: str, transformer: torch.nn.Module, processor: VideoAttentionProcessor) -> dict[torch.nn.Module, Any]:
    """`bind_all` for one transformer."""
    family, model = known_family(transformer), type(transformer).__name__
    if processor.LEARNS and not family.own:
        raise ValueError(f"{type(processor).__name__} supports the transformers of the Wan family, got {model}")
    check_parallelism(transformer, processor, applied=record_of(transformer) is not None)
    if any(parameters_of(attn.processor) for _, attn in family.layers(transformer)):
        raise ValueError(f"{name} has a processor with parameters, which applying another would lose: {KEEP}")
    if processor.LEARNS and has_hook(transformer, "group_offloading"):
        raise ValueError(
            f"{name} is offloaded in groups, whose hooks would leave new parameters where they are: apply the processor"
            " before enable_group_offload"
        )
    blocks = len(family.blocks_of(transformer))
    bound = {}
    for place, (block, attn) in enumerate(family.layers(transformer)):
        before: Any = ours_of(attn)
        original: Any = attn.processor if before is None else before.original
        layer = Layer(attn, place, block, blocks, family, transformer, name)
        dense = is_dense("dense_layers", processor.dense_layers, block, blocks)
        made = original if dense else processor.bind(layer, original)
        if made is original and family.spread is not None:
            made = borrow(FullAttentionProcessor(), Exact(), original, family, kept=True)
        if hasattr(before, "_attention_backend"):
            # The user chose it for the model.
            made._attention_backend = before._attention_backend
        bound[attn] = made
    return bound


def _set_processor(attn: torch.nn.Module, processor: Any) -> None:
    # Mochi's modules lack the method.
    setter = getattr(attn, "set_processor", functools.partial(setattr, attn, "processor"))
    setter(processor)


def parameters_of(processor: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters of one of our processors, by name; none for other processors."""
    if isinstance(processor, Bound) and isinstance(processor, torch.nn.Module):
        return dict(processor.named_parameters())
    return {}


def own_processors(transformer: torch.nn.Module) -> list[tuple[Any, Bound, Any]]:
    """(module, our processor, its processor before) for every module that has one of ours, in the order of layers."""
    record = record_of(transformer)
    modules = () if record is None else record.modules
    return [(attn, ours, ours.original) for attn in modules if (ours := ours_of(attn)) is not None]


def restore(pipe_or_transformer: Any) -> None:
    """Undo `apply`: the original processors are back, and no hook or attribute is left on a model.

    Without an applied processor it does nothing. Processors that others have set since `apply` stay. The parameters of
    a `BasedProcessor` are removed with it, and so are the LoRA layers that `vmonarch.load_adapter` added;
    `vmonarch.save_adapter` saves both. Unfuse fused LoRA layers first.

    Raises:
        TypeError: `pipe_or_transformer` has no supported transformer.
        ValueError: the pipeline's transformers are all None.
        RuntimeError: tokens are spread over ranks by a `cp_plan` of ours (docs/parallel.md).
    """
    _restore(find_transformers(pipe_or_transformer))


def is_applied(pipe_or_transformer: Any) -> bool:
    """Whether one of our processors is at work in any of the transformers."""
    return any(map(own_processors, find_transformers(pipe_or_transformer).values()))


def _restore(transformers: dict[str, Any]) -> None:
    applied = {each: record for each in transformers.values() if (record := record_of(each)) is not None}
    for transformer in applied:
        check_restorable(transformer)
    for transformer, record in applied.items():
        keep(transformer, None)
        vars(transformer).pop("enable_parallelism", None)
        there = getattr(transformer, "peft_config", None) or {}
        if record.lora in there and len(there) == 1:
            # This leaves plain layers behind, not ones wrapped for later adapters.
            transformer.unload_lora()
        elif record.lora in there:
            transformer.delete_adapters(record.lora)
        for attn in record.modules:
            if (ours := ours_of(attn)) is not None:
                _set_processor(attn, ours.original)
        share_parallel_config(transformer)
