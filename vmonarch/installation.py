"""Switching an attention processor on in a pipeline or transformer, and off again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.configuration_utils import FrozenDict

from vmonarch.dense import DenseSet
from vmonarch.families import (
    OUT_OF_SCOPE,
    SUPPORTED,
    Family,
    describe,
    diffusers_class,
    family_of,
    forward_arguments,
    known_family,
    transformers_in,
)
from vmonarch.forward_context import ForwardContext, carry_call
from vmonarch.grid import LatentGrid
from vmonarch.parallelism import (
    check_parallelism,
    check_restorable,
    replace_enabling,
    restore_enabling,
    share_parallel_config,
)
from vmonarch.pipeline_calls import watch_calls
from vmonarch.preset import preset_processor
from vmonarch.residuals import NO_REFRESH, ResidualSharing
from vmonarch.seam import borrow, ours_of
from vmonarch.video_processor import DenseLayerProcessor, VideoAttentionProcessor

_ATTRIBUTE = "_vmonarch_record"
# Entry of a transformer's config, saved with its weights, that tells which processor the parameters among them are of.
# diffusers loads such a folder without it and passes over names that begin with an underscore.
CONFIG_ENTRY = "_vmonarch_processor"
_KEEP = "save its parameters with vmonarch.save_adapter if they are to be kept, then call vmonarch.restore"


@dataclasses.dataclass
class _Record:
    """Kept on a transformer while a processor is applied to it; copied with it.

    Args:
        family: of the transformer.
        grid: the one that the processor was given, if it was.
        names: of the arguments of the transformer's forward.
        processor: the one that was given.
        idle: whether others have replaced all processors of ours since (`note_processors`).
        lora: name of the LoRA layers that came with the processor's parameters (`load_adapter`), which go with it.
    """

    context: ForwardContext
    originals: list[tuple[torch.nn.Module, Any]]
    family: Family
    grid: LatentGrid | None
    names: tuple[str, ...]
    processor: VideoAttentionProcessor
    lora: str | None = None
    idle: bool = False


@dataclasses.dataclass(frozen=True)
class Installation:
    """What `apply` did; also a context manager that restores the original processors at its end.

    The original ones, not those of an earlier `apply`: such contexts do not nest.

    Args:
        processor: the processor that was applied.
        transformers: the transformers it was applied to, by component name.
    """

    processor: VideoAttentionProcessor
    transformers: dict[str, torch.nn.Module]

    @property
    def grid(self) -> LatentGrid | None:
        """The latent grid of the most recent forward call of the first transformer that was called; None before."""
        for transformer in self.transformers.values():
            record = getattr(transformer, _ATTRIBUTE, None)
            if record is not None and record.context.call is not None:
                return record.context.call.grid
        return None

    def __repr__(self) -> str:
        parts = [type(self.processor).__name__]
        parts += [f"{name}={type(transformer).__name__}" for name, transformer in self.transformers.items()]
        return f"Installation({', '.join(parts)})"

    def restore(self) -> None:
        """Put the original processors back; see `restore`."""
        _restore(self.transformers)

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def _record_call(transformer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook. Stateless: what it writes to belongs to the module, so that copies of it stay apart."""
    record: _Record = getattr(transformer, _ATTRIBUTE)
    if record.idle:
        return
    arguments = dict(zip(record.names, args, strict=False)) | kwargs
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        carry_call(transformer, record.context)
    grid = record.family.grid(arguments, transformer.config) or record.grid
    if grid is None:
        record.context.begin_unknown()
    else:
        if not torch.compiler.is_compiling() and (record.context.call is None or record.context.call.grid != grid):
            record.processor.warn_of_size(grid)
        record.context.begin(transformer, grid, record.family.before(arguments), arguments, record.family.by_step)


def _end_call(transformer: torch.nn.Module, *_: Any) -> None:
    """Forward hook, stateless as well."""
    getattr(transformer, _ATTRIBUTE).context.end()


def note_processors(transformer: Any) -> None:
    """Others have set processors: while none is ours, forward calls are not recorded. They may set ours back."""
    record: _Record | None = getattr(transformer, _ATTRIBUTE, None)
    if record is not None:
        record.idle = not _has_ours(transformer)


def is_bound_to(transformer: Any, processor: Any) -> bool:
    """Whether a processor of ours is one that `apply` has made for this transformer."""
    record: _Record | None = getattr(transformer, _ATTRIBUTE, None)
    ours = getattr(processor, "ours", processor)
    return record is not None and getattr(ours, "_context", None) is record.context


def find_transformers(pipe_or_transformer: object) -> dict[str, torch.nn.Module]:
    """The supported transformers of a pipeline, or the transformer itself (inside a compiled or training wrapper too).

    Raises:
        TypeError: there is a transformer of another kind, or none.
        ValueError: the pipeline's transformers are all None.
    """
    if isinstance(pipe_or_transformer, torch.nn.Module):
        return {"transformer": _unwrap(pipe_or_transformer)}
    kind, present = type(pipe_or_transformer).__name__, transformers_in(pipe_or_transformer)
    for name, component in present.items():
        if not isinstance(component, torch.nn.Module):
            raise TypeError(f"{kind}.{name} must be one of {SUPPORTED}, got {type(component).__name__}")
    return {name: _unwrap(component, f"{kind}.{name}") for name, component in present.items()}


def _unwrap(module: torch.nn.Module, argument: str = "pipe_or_transformer") -> torch.nn.Module:
    found = [child for child in module.modules() if family_of(child) is not None]
    if len(found) != 1:
        refused = diffusers_class(module, OUT_OF_SCOPE)
        reason = "" if refused is None else f", {OUT_OF_SCOPE[refused.__name__]}"
        raise TypeError(f"{argument} must be (or wrap) one of {SUPPORTED}, got {type(module).__name__}{reason}")
    return found[0]


def self_attention_modules(transformer: Any) -> list[tuple[int, torch.nn.Module]]:
    """(layer, module) of every self-attention module of the video."""
    return known_family(transformer).layers(transformer)


def _with_processor(transformer: torch.nn.Module) -> list[Any]:
    return [module for module in transformer.modules() if hasattr(module, "processor")]


def _original_processors(transformer: Any) -> list[tuple[Any, Any]]:
    """(module, its processor) of all modules that have one; where it is ours, the one before, or else the model's own.

    What is not ours now is the user's, whatever was there before.
    """
    record = getattr(transformer, _ATTRIBUTE, None)
    known = {} if record is None else dict(record.originals)
    modules = made = _with_processor(transformer)
    if any(ours_of(module) is not None and module not in known for module in modules):
        stock: Any = diffusers_class(transformer)
        with torch.device("meta"):
            made = _with_processor(stock.from_config(transformer.config))
    return [
        (module, module.processor if ours_of(module) is None else known.get(module, new.processor))
        for module, new in zip(modules, made, strict=True)
    ]


def apply(pipe_or_transformer: Any, processor: VideoAttentionProcessor | str = "near-lossless") -> Installation:
    """Compute the self-attention of a pipeline's transformers (or of one transformer) with `processor`.

    A forward pre-hook on each transformer tells the processors the latent grid of every call, so sizes may change from
    call to call. (Call the transformer itself, as pipelines do; its `.forward` would pass the hook by.) Applying again
    replaces the processor; `restore` returns to the original ones all the same. A transformer put into the pipeline
    later has its own processors: apply again. Cross-attention is not touched. `pipe.set_attn_processor(processor)` and
    `transformer.set_attn_processor(processor)` do the same. diffusers' `enable_parallelism` may come before or after,
    beyond the Wan family after; the transformers may be xfuser's (docs/parallel.md).

    `dense_steps` and `refresh` need the calls of a pipeline that has the transformer. Any other call of it raises
    RuntimeError.

    A `BasedProcessor` has parameters: they are added to the transformer, and nothing but `restore` takes them away.

    Args:
        pipe_or_transformer: a stock diffusers pipeline, one of `vmonarch.pipelines`, or a video transformer. Of a
            pipeline `transformer`, `transformer_2` and `transformer_ref` are changed, whichever exist.
        processor: a `VMonarchProcessor` or another of ours, which is not changed and may be applied elsewhere too; or
            the name of a preset (`vmonarch.presets`), perhaps with options of its own, "fast:refresh=6".

    Returns:
        The installation, with `.grid` seen last and `.restore()`; also a context manager that restores.

    Raises:
        TypeError: `pipe_or_transformer` has no supported transformer, or `processor` is not one of ours.
        ValueError: there is no preset of this name, or an unknown option of one; `dense_layers`, or an option of the
            processor, does not fit the transformer; `dense_steps` or `refresh` was asked for in a diffusion-forcing
            pipeline; a processor with parameters is applied already, or cannot be because the weights are offloaded; a
            transformer runs with context parallelism and its ranks cannot share its heads, or have its tokens in
            another way than is needed.
        NotImplementedError: the transformer runs with ring attention (`enable_parallelism`), or with context
            parallelism and is of a model that is not supported so.
        RuntimeError: diffusers computes attention beyond the Wan family in another way than is known.
    """
    transformers = find_transformers(pipe_or_transformer)
    if isinstance(processor, str):
        processor = preset_processor(processor)
    if not isinstance(processor, VideoAttentionProcessor):
        raise TypeError(
            "processor must be a VMonarchProcessor(...) or another of vmonarch's, or the name of a preset, got"
            f" {describe(processor)}; vmonarch.restore switches it off"
        )
    dense_steps = DenseSet("dense_steps", processor.dense_steps)
    # Diffusion forcing gives every latent frame its own noise level and its own copy of the scheduler.
    stepwise = "dense_steps" if dense_steps.some else None if processor.refresh is None else "refresh"
    if stepwise and "DiffusionForcing" in (kind := type(pipe_or_transformer).__name__):
        instead = NO_REFRESH if stepwise == "refresh" else "use dense_steps=0"
        raise ValueError(f"{stepwise} is not supported with {kind}: its frames are at different steps; {instead}")

    sharing = None
    if processor.refresh is not None:
        watch_calls()
        sharing = ResidualSharing(processor.refresh)

    # Everything that can fail comes before the first change.
    plans = []
    for name, transformer in transformers.items():
        record = getattr(transformer, _ATTRIBUTE, None)
        attention = _with_processor(transformer)
        check_parallelism(transformer, processor, applied=record is not None)
        originals = _original_processors(transformer)
        if any(parameters_of(module.processor) for module in attention):
            raise ValueError(f"{name} has a processor with parameters, which applying another would lose: {_KEEP}")
        _check_family(transformer, processor)
        if processor.LEARNS:
            _check_not_offloaded(name, transformer)
        context = ForwardContext(dense_steps, name, sharing)
        plans.append((transformer, context, originals, bind_all(transformer, processor, context, dict(originals))))

    for transformer, context, originals, bound in plans:
        for attn, original in originals:
            _set_processor(attn, bound.get(attn, original))
            if processor.LEARNS:
                # Bound to nothing but this module: a copy of it gets its own.
                attn.set_processor = functools.partial(_refuse_processor, attn)
        _write_config(transformer, processor)
        if hasattr(transformer, _ATTRIBUTE):
            getattr(transformer, _ATTRIBUTE).context.forget()
        else:
            transformer.register_forward_pre_hook(_record_call, with_kwargs=True)
            transformer.register_forward_hook(_end_call, always_call=True)
        family, names = known_family(transformer), forward_arguments(transformer)
        setattr(transformer, _ATTRIBUTE, _Record(context, originals, family, processor.grid, names, processor))
        share_parallel_config(transformer)
        replace_enabling(transformer)
    return Installation(processor, transformers)


def _set_processor(attn: torch.nn.Module, processor: Any) -> None:
    vars(attn).pop("set_processor", None)
    # Mochi's modules have no way to set it.
    setter = getattr(attn, "set_processor", functools.partial(setattr, attn, "processor"))
    setter(processor)


def _refuse_processor(attn: Any, processor: Any) -> None:
    """`set_processor` of a module while a processor that learns is applied: `set_attn_processor` sets all of them.

    Raises:
        ValueError: it is another than the module has.
    """
    if processor is not attn.processor:
        raise ValueError(
            f"set_attn_processor({type(processor).__name__}) would lose what a BasedProcessor has learnt: {_KEEP}"
        )


def note_lora(transformer: torch.nn.Module, name: str) -> None:
    """Let `restore` remove these LoRA layers together with the processor that is applied."""
    getattr(transformer, _ATTRIBUTE).lora = name


def _remove_lora(transformer: Any, name: str | None) -> None:
    there = getattr(transformer, "peft_config", None) or {}
    if name not in there:
        return
    if len(there) == 1:
        # Leaves the plain layers behind, not ones wrapped for adapters to come.
        transformer.unload_lora()
    else:
        transformer.delete_adapters(name)


def bind_all(
    transformer: Any,
    processor: VideoAttentionProcessor,
    context: ForwardContext | None = None,
    originals: Mapping[torch.nn.Module, Any] | None = None,
) -> dict[torch.nn.Module, Any]:
    """What `processor` makes of itself for each self-attention module of the video; nothing is installed.

    Args:
        originals: the modules' processors so far; None to only look at what they get.

    Raises:
        ValueError: `dense_layers`, or an option of the processor, does not fit the transformer.
    """
    family = known_family(transformer)
    dense_layers, layers = DenseSet("dense_layers", processor.dense_layers), family.number_of_layers(transformer)
    bound = {}
    for layer, attn in family.layers(transformer):
        original = None if originals is None else originals[attn]
        dense = dense_layers.contains(layer, layers)
        ours: Any = original if dense else processor.bind(context, original, attn, layer, layers)
        if not family.own and original is not None:
            if ours is original and family.spread is not None:
                ours = DenseLayerProcessor().bind(context, original, attn, layer, layers)
            if ours is not original:
                ours.videos, ours.spread = family.videos(transformer.config, layer, layers), family.spread
                ours = borrow(family, original, ours)
        bound[attn] = ours
    return bound


def parameters_of(processor: Any) -> dict[str, torch.nn.Parameter]:
    """What one of our processors learns, by name; nothing of others'."""
    if isinstance(processor, VideoAttentionProcessor) and isinstance(processor, torch.nn.Module):
        return dict(processor.named_parameters())
    return {}


def own_processors(transformer: torch.nn.Module) -> list[tuple[Any, VideoAttentionProcessor, Any]]:
    """(module, our processor, the one it had before) of all that `apply` gave one of ours, in the order of layers."""
    record = getattr(transformer, _ATTRIBUTE, None)
    return [
        (attn, ours, original)
        for attn, original in (record.originals if record else ())
        if (ours := ours_of(attn)) is not None
    ]


def _write_config(transformer: Any, processor: VideoAttentionProcessor | None) -> None:
    """Name a processor with parameters in the transformer's config; take the name of one before it out."""
    entries = {name: value for name, value in transformer.config.items() if name != CONFIG_ENTRY}
    if processor is not None and processor.LEARNS:
        entries[CONFIG_ENTRY] = {"processor": type(processor).__name__, "config": processor.config}
    if entries.keys() != transformer.config.keys() or CONFIG_ENTRY in entries:
        transformer._internal_dict = FrozenDict(entries)


def _check_family(transformer: torch.nn.Module, processor: VideoAttentionProcessor) -> None:
    family, model = known_family(transformer), type(transformer).__name__
    if processor.LEARNS and not family.own:
        raise ValueError(f"{type(processor).__name__} supports the transformers of the Wan family, got {model}")
    if processor.refresh is not None and not family.batched:
        raise ValueError(f"refresh is not supported with {model}, whose samples attend one by one; {NO_REFRESH}")


def _check_not_offloaded(name: str, transformer: torch.nn.Module) -> None:
    for module in transformer.modules():
        registry: Any = getattr(module, "_diffusers_hook", None)
        if registry is not None and registry.get_hook("group_offloading") is not None:
            raise ValueError(
                f"{name} is offloaded in groups, whose hooks would leave new parameters where they are: apply the"
                " processor before enable_group_offload"
            )


def restore(pipe_or_transformer: Any) -> None:
    """Undo `apply`: the original processors are back, and no hook or attribute is left behind.

    Where nothing is applied it does nothing. Processors that others have set since `apply` stay. Processors of ours
    that were set on modules one by one are replaced by the model's default ones. The parameters of a `BasedProcessor`
    go with it, and so do the LoRA layers that `vmonarch.load_adapter` added; `vmonarch.save_adapter` saves both. Unfuse
    LoRA layers first if they were fused.

    Raises:
        TypeError: `pipe_or_transformer` has no supported transformer.
        ValueError: the pipeline's transformers are all None.
        RuntimeError: tokens are spread over ranks by a plan of ours (docs/parallel.md).
    """
    _restore(find_transformers(pipe_or_transformer))


def is_applied(pipe_or_transformer: Any) -> bool:
    """Whether one of our processors is at work in any of the transformers."""
    transformers = find_transformers(pipe_or_transformer).values()
    return any(map(_has_ours, transformers))


def _has_ours(transformer: torch.nn.Module) -> bool:
    """Whether a module has a processor of ours, applied or not."""
    return any(ours_of(module) is not None for module in transformer.modules())


def _remove_hooks(transformer: torch.nn.Module) -> None:
    # Not by their handles, which a copied transformer does not have.
    for hooks, ours, options in (
        (transformer._forward_pre_hooks, _record_call, transformer._forward_pre_hooks_with_kwargs),
        (transformer._forward_hooks, _end_call, transformer._forward_hooks_always_called),
    ):
        for key in [key for key, hook in hooks.items() if hook is ours]:
            del hooks[key]
            options.pop(key, None)


def _restore(transformers: dict[str, torch.nn.Module]) -> None:
    for transformer in transformers.values():
        if hasattr(transformer, _ATTRIBUTE):
            check_restorable(transformer)
    for transformer in transformers.values():
        record = getattr(transformer, _ATTRIBUTE, None)
        if record is None and not _has_ours(transformer):
            continue
        originals = _original_processors(transformer)
        if record is not None:
            _remove_hooks(transformer)
            carry_call(transformer, None)
            delattr(transformer, _ATTRIBUTE)
            restore_enabling(transformer)
            record.context.forget()
            _remove_lora(transformer, record.lora)
        for attn, original in originals:
            _set_processor(attn, original)
        share_parallel_config(transformer)
        _write_config(transformer, None)
