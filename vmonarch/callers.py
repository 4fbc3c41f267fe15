"""The objects whose methods the running thread is in.

diffusers does not tell a processor which model, block's hook or pipeline it is called by, and nothing that could be
remembered would tell as surely.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any


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
