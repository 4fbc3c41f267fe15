"""`set_attn_processor`, diffusers' own way to choose attention, with processors of ours.

diffusers' pipelines lack this method. On a model it gives one object to all attention modules, to cross-attention too,
and tells it neither its layer nor the video's grid nor the step, which ours need. So pipelines get the method, and on
models it hands our processors to `vmonarch.apply`. This is the only place that changes classes of diffusers.

Once a processor shares residuals, the calls of pipelines are wrapped as well. Only they know when a run has ended that
did not reach its last step: by an exception, by Ctrl-C, or because guidance has sat out.

`import vmonarch` must not import diffusers, which takes seconds, and may come before or after it. So the classes are
changed when their modules have been imported, or at once if they have been already.
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

from vmonarch.callers import end_of_call
from vmonarch.requirements import warn_of_versions

_Function = Callable[[ModuleType], None]
# By the module that defines it, diffusers' base class of pipelines.
_PIPELINES = {
    "diffusers.pipelines.pipeline_utils": "DiffusionPipeline",
    "diffusers.modular_pipelines.modular_pipeline": "ModularPipeline",
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds some modules as the finders after it do, and has functions called when they have been imported."""

    def __init__(self) -> None:
        self.functions: dict[str, list[_Function]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.functions:
            return None
        following = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in following if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self.functions[fullname])
        return spec


class _Loader(importlib.abc.Loader):
    """Another loader until the module is executed, which is left with that one."""

    def __init__(self, loader: Any, functions: Sequence[_Function]) -> None:
        self._loader, self._functions = loader, functions

    def __getattr__(self, name: str) -> Any:
        # Copying asks before there is a loader.
        return getattr(vars(self).get("_loader"), name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for function in self._functions:
            function(module)


_finder = _Finder()


def after_import(name: str, function: _Function) -> None:
    """Call `function(module)` whenever the module of this name has been imported, and now if it has been already.

    A thread may be importing it just now, or someone may reload it: the function must bear to be called again.
    """
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    functions = _finder.functions.setdefault(name, [])
    if function not in functions:
        functions.append(function)
    if sys.modules.get(name) is not None:
        # Waits for the thread that is importing it.
        function(importlib.import_module(name))


def install() -> None:
    """Have `set_attn_processor` of diffusers' pipelines and models take our processors; may be called again.

    Another version of diffusers than ours gives a warning.
    """
    after_import("diffusers", warn_of_versions)
    after_import("diffusers.models.attention", _change_models)
    for name in _PIPELINES:
        after_import(name, _change_pipelines)


def watch_calls() -> None:
    """Have `callers.end_of_call` called at the end of every pipeline's call, for good; may be called again."""
    for name in _PIPELINES:
        after_import(name, _wrap_calls)


def _is_ours(processor: object) -> bool:
    """Whether an attention processor is of ours, borrowed or a class by mistake too; imports nothing."""
    module, found = sys.modules.get("vmonarch.video_processor"), getattr(processor, "ours", processor)
    kind = found if isinstance(found, type) else type(found)
    return module is not None and issubclass(kind, module.VideoAttentionProcessor)


def _change_models(module: ModuleType) -> None:
    # Other versions of diffusers may have none.
    mixin = getattr(module, "AttentionMixin", None)
    if mixin is None or hasattr(mixin.set_attn_processor, "_takes_ours"):
        return
    own = mixin.set_attn_processor

    @functools.wraps(own)
    def set_on_model(self: Any, processor: Any) -> None:
        if isinstance(processor, Mapping):
            there = self.attn_processors
            if any(_is_ours(ours) and ours is not there.get(name) for name, ours in processor.items()):
                raise ValueError(
                    "processor must not be a dictionary with processors of vmonarch: pass one of them, which serves all"
                    " layers but its dense_layers, or a plan, which gives every layer options of its own"
                )
        elif _is_ours(processor):
            from vmonarch import apply

            apply(self, processor)
            return
        own(self, processor)

    vars(set_on_model)["_takes_ours"] = True
    mixin.set_attn_processor = set_on_model


def _change_pipelines(module: ModuleType) -> None:
    pipeline: Any = getattr(module, _PIPELINES[module.__name__], None)
    # Other versions of diffusers may have none.
    if pipeline is not None and not hasattr(pipeline, "set_attn_processor"):
        pipeline.set_attn_processor = set_attn_processor


def _wrap_calls(module: ModuleType) -> None:
    """Wrap the calls of a module's class of pipelines and of those derived from it, now or later."""
    pipeline: Any = getattr(module, _PIPELINES[module.__name__], None)
    if pipeline is None or "__init_subclass__" in vars(pipeline):
        return

    def init_subclass(cls: Any, **options: Any) -> None:
        super(pipeline, cls).__init_subclass__(**options)
        _wrap_call(cls)

    pipeline.__init_subclass__ = classmethod(init_subclass)
    classes = [pipeline]
    for cls in classes:
        _wrap_call(cls)
        classes += cls.__subclasses__()


def _wrap_call(cls: Any) -> None:
    call = vars(cls).get("__call__")
    if call is None or getattr(call, "_wrapped", None) is call:
        return

    @functools.wraps(call)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        finally:
            end_of_call(self)

    # What is below torch.no_grad() stays at hand for those who sample with gradients.
    vars(wrapped).update(__wrapped__=getattr(call, "__wrapped__", call), _wrapped=wrapped)
    cls.__call__ = wrapped


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
    from vmonarch import apply, restore
    from vmonarch.families import transformers_in

    # A base after diffusers' pipeline may have the method.
    owner = next(base for base in type(self).__mro__ if vars(base).get("set_attn_processor") is set_attn_processor)
    own = getattr(super(owner, self), "set_attn_processor", None)
    if own is not None:
        own(processor)
    elif _is_ours(processor):
        apply(self, processor)
    elif processor is None:
        restore(self)
    elif isinstance(processor, type) or not (callable(processor) or isinstance(processor, Mapping)):
        raise TypeError(
            f"processor must be a VMonarchProcessor(...), another attention processor, or None, got {processor!r}"
        )
    else:
        for transformer in transformers_in(self).values():
            # It empties a dictionary.
            transformer.set_attn_processor(dict(processor) if isinstance(processor, Mapping) else processor)
