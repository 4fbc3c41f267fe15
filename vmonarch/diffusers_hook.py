"""`set_attn_processor`, diffusers' own way to choose attention, with processors of ours.

diffusers' pipelines lack this method. On a model it gives one object to all attention modules, to cross-attention too,
and tells it neither its layer nor the video's grid nor the step, which ours need. So pipelines get the method, and on
models it hands our processors to `vmonarch.apply`. Nothing else changes classes of diffusers.

`import vmonarch` must not import diffusers, which takes seconds, and may come before or after it: `install`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of `_CHANGES` as the finders after it do, and has them changed when they have been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _CHANGES:
            return None
        following = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next((spec for finder in following if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            _CHANGES[fullname](module)

        loader.exec_module = exec_module
        return spec


_finder = _Finder()


def _is_ours(processor: object) -> bool:
    """Whether an attention processor is of ours, bound or a class by mistake too; imports nothing."""
    base, cls = sys.modules.get("vmonarch.base"), processor if isinstance(processor, type) else type(processor)
    return base is not None and issubclass(cls, (base.VideoAttentionProcessor, sys.modules["vmonarch.own"].Bound))


def _change_models(module: ModuleType) -> None:
    # Other versions of diffusers may have none.
    mixin = getattr(module, "AttentionMixin", None)
    if mixin is None or hasattr(mixin.set_attn_processor, "_takes_ours"):
        return
    own = mixin.set_attn_processor

    @functools.wraps(own)
    def set_on_model(self: Any, processor: Any) -> None:
        from vmonarch.hooks import record_of
        from vmonarch.installation import KEEP, apply, is_applied
        from vmonarch.parallelism import check_restorable

        if isinstance(processor, type) or not (callable(processor) or isinstance(processor, Mapping)):
            raise TypeError(
                "processor must be a VMonarchProcessor(...) or another attention processor (presets are for"
                f" vmonarch.apply), got {processor!r}"
            )
        several, record = isinstance(processor, Mapping), record_of(self)
        given = list(processor.values()) if several else [processor]
        bound = [] if record is None else record.bound
        ours = [known for known in given if _is_ours(known)]
        if type(processor).__name__.startswith("Fused") or (
            several and processor is getattr(self, "original_attn_processors", None)
        ):
            # diffusers fuses projections, or unfuses them: what is applied stays.
            spec = record.processor if record is not None and is_applied(self) else None
            stock = lambda known: known.original if _is_ours(known) else known
            own(self, {name: stock(known) for name, known in processor.items()} if several else processor)
            if spec is not None:
                apply(self, spec)
        elif ours and not several:
            apply(self, getattr(processor, "spec", processor))
        elif any(known not in bound for known in ours):
            raise ValueError(
                "processor must not be a dictionary with processors of vmonarch: pass one of them, which serves all"
                " layers but its dense_layers, or a plan, which gives every layer options of its own"
            )
        else:
            if record is not None and any(known not in given for known in bound):
                check_restorable(self)
                if record.processor.LEARNS:
                    name = type(processor).__name__
                    raise ValueError(f"set_attn_processor({name}) would lose what a BasedProcessor has learnt: {KEEP}")
            own(self, processor)

    vars(set_on_model)["_takes_ours"] = True
    mixin.set_attn_processor = set_on_model


def _change_pipelines(name: str, module: ModuleType) -> None:
    # Other versions of diffusers may have none.
    pipeline: Any = getattr(module, name, None)
    if pipeline is not None and not hasattr(pipeline, "set_attn_processor"):
        pipeline.set_attn_processor = set_attn_processor


def set_attn_processor(self: Any, processor: Any) -> None:
    """Compute the attention of the pipeline's transformers with `processor`.

    Args:
        processor: one of vmonarch's, for `vmonarch.apply`; None to undo that, for `vmonarch.restore`; any other
            processor, or a dictionary of them, for `set_attn_processor` of every transformer.

    Raises:
        TypeError: `processor` is no processor.
        AttributeError: another's was given, and a transformer has no `set_attn_processor`.
        TypeError, ValueError, NotImplementedError, RuntimeError: as `vmonarch.apply`.
    """
    from vmonarch.families import transformers_in
    from vmonarch.installation import apply, restore

    if _is_ours(processor):
        apply(self, getattr(processor, "spec", processor))
    elif processor is None:
        restore(self)
    else:
        for transformer in transformers_in(self).values():
            # It empties a dictionary.
            transformer.set_attn_processor(dict(processor) if isinstance(processor, Mapping) else processor)


# By the module of diffusers, what changes a class in it. A module that is reloaded is changed again.
_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "diffusers.models.attention": _change_models,
    "diffusers.pipelines.pipeline_utils": functools.partial(_change_pipelines, "DiffusionPipeline"),
    "diffusers.modular_pipelines.modular_pipeline": functools.partial(_change_pipelines, "ModularPipeline"),
}


def install() -> None:
    """Have `set_attn_processor` of diffusers' pipelines and models take our processors; may be called again."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    for name, change in _CHANGES.items():
        if sys.modules.get(name) is not None:
            # Waits for the thread that is importing it.
            change(importlib.import_module(name))
