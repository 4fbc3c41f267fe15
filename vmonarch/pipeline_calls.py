"""Functions that are called when modules of diffusers have been imported, and when a call of a pipeline ends.

`import vmonarch` must not import diffusers, which takes seconds, and may come before or after it: `after_import`.

Only the call knows when a run has ended that did not reach its last step: by an exception, by Ctrl-C, or because
guidance has sat out. So the calls of diffusers' pipelines are wrapped once a processor shares residuals.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# By the module that defines it, diffusers' base class of pipelines.
PIPELINES = {
    "diffusers.pipelines.pipeline_utils": "DiffusionPipeline",
    "diffusers.modular_pipelines.modular_pipeline": "ModularPipeline",
}
# Attribute of a pipeline that is running: what is to be called afterwards.
_AT_END = "_vmonarch_at_end"

_Function = Callable[[ModuleType], None]


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
        spec = next((spec for finder in following if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec
        # Loaders may be shared between modules.
        loader: Any = copy.copy(spec.loader)
        execute, spec.loader = loader.exec_module, loader

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            for function in self.functions[fullname]:
                function(module)

        loader.exec_module = exec_module
        return spec


_finder = _Finder()


def is_ours(processor: object) -> bool:
    """Whether an attention processor is of ours, bound or a class by mistake too; imports nothing."""
    base, cls = sys.modules.get("vmonarch.base"), processor if isinstance(processor, type) else type(processor)
    return base is not None and issubclass(cls, (base.VideoAttentionProcessor, sys.modules["vmonarch.own"].Bound))


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


def watch_calls() -> None:
    """Have what `at_end_of_call` names called at the end of every pipeline's call, for good; may be called again."""
    for name in PIPELINES:
        after_import(name, _wrap_calls)


def _wrap_calls(module: ModuleType) -> None:
    """Wrap the calls of a module's class of pipelines and of those derived from it, now or later."""
    pipeline: Any = getattr(module, PIPELINES[module.__name__], None)
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
            for function in vars(self).pop(_AT_END, ()):
                function(self)

    # What is below torch.no_grad() stays at hand for those who sample with gradients.
    vars(wrapped).update(__wrapped__=getattr(call, "__wrapped__", call), _wrapped=wrapped)
    cls.__call__ = wrapped


def at_end_of_call(pipeline: Any, function: Callable[[Any], None]) -> None:
    """Call `function(pipeline)` when the call of the pipeline that the thread is in has returned or raised."""
    vars(pipeline).setdefault(_AT_END, set()).add(function)
