"""Functions that are called when a module has been imported, without importing it."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

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
