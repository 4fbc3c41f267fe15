"""The objects whose methods the running thread is in, and the calls of modules among them.

diffusers does not tell a processor which model, block's hook or pipeline it is called by, and nothing that could be
remembered would tell as surely.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def method_calls() -> Iterator[Mapping[str, Any]]:
    """The variables, with `self`, of each method that has been called and has not returned, from the innermost."""
    frame = inspect.currentframe()
    while frame is not None:
        # Locals are copied when they are read: only where one of them is wanted.
        if frame.f_code.co_varnames[:1] == ("self",) and "self" in frame.f_locals:
            yield frame.f_locals
        frame = frame.f_back


def callers() -> Iterator[Any]:
    """The `self` of each method that has been called and has not returned, from the innermost."""
    return (variables["self"] for variables in method_calls())


def module_calls() -> Iterator[tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """(module, positional arguments, named arguments) of each call of a module that has not returned, from the
    innermost.
    """
    code = torch.nn.Module._call_impl.__code__
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            values = frame.f_locals
            yield values["self"], values["args"], values["kwargs"]
        frame = frame.f_back
