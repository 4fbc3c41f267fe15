"""Checks of numbers and words. Each error names the argument and what is supported."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

IMPLEMENTATIONS = ("auto", "triton", "torch")


def plain(value: Any) -> Any:
    """A number as Python has it, which JSON can hold, in place of NumPy's and torch's; lists as tuples of such."""
    if isinstance(value, (tuple, list)):
        return tuple(map(plain, value))
    # torch.compile of torch 2.11 cannot follow `operator.index` to its error.
    if type(value) in (bool, int, float, str, type(None)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return float(value) if isinstance(value, numbers.Real) else value


def check_positive_integer(name: str, number: object) -> None:
    """Raise TypeError or ValueError unless `number` is an integer of at least 1."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"{name} must be a positive integer, got {number!r}")
    if number < 1:  # type: ignore[operator]
        raise ValueError(f"{name} must be at least 1, got {number}")


def check_flag(name: str, flag: object) -> None:
    """Raise TypeError unless `flag` is True or False."""
    if not isinstance(flag, bool):
        raise TypeError(f"{name} must be True or False, got {flag!r}")


def check_implementation(implementation: object) -> None:
    """Raise unless `implementation` is one of "auto", "triton" and "torch"."""
    if not isinstance(implementation, str):
        raise TypeError(f"implementation must be a string, got {type(implementation).__name__}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")


def resolve_scale(scale: object, head_dim: int) -> float:
    """The softmax scale: `scale`, or 1/√D when it is None.

    Raises:
        TypeError, ValueError: `scale` is no finite number.
    """
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale must be None or a number, got {scale!r}")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)
