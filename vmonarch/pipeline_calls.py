"""What is to be done at the end of a pipeline's call.

Only the call knows when a run has ended that did not reach its last step: by an exception, by Ctrl-C, or because
guidance has sat out. So the calls of diffusers' pipelines are wrapped once a processor shares residuals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vmonarch.after_import import after_import

# By the module that defines it, diffusers' base class of pipelines.
PIPELINES = {
    "diffusers.pipelines.pipeline_utils": "DiffusionPipeline",
    "diffusers.modular_pipelines.modular_pipeline": "ModularPipeline",
}
# Attribute of a pipeline that is running: what is to be called afterwards.
_AT_END = "_vmonarch_at_end"


def watch_calls() -> None:
    """Have `end_of_call` called at the end of every pipeline's call, for good; may be called again."""
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
            end_of_call(self)

    # What is below torch.no_grad() stays at hand for those who sample with gradients.
    vars(wrapped).update(__wrapped__=getattr(call, "__wrapped__", call), _wrapped=wrapped)
    cls.__call__ = wrapped


def at_end_of_call(pipeline: Any, function: Callable[[Any], None]) -> None:
    """Call `function(pipeline)` when the call of the pipeline that the thread is in has returned or raised."""
    vars(pipeline).setdefault(_AT_END, set()).add(function)


def end_of_call(pipeline: Any) -> None:
    """The call of a pipeline has returned or raised."""
    for function in vars(pipeline).pop(_AT_END, ()):
        function(pipeline)
