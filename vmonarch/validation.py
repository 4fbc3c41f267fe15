"""Checks of options. Each error names the argument and what is supported."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable
from typing import Any

IMPLEMENTATIONS = ("auto", "triton", "torch")


def plain(value: Any) -> Any:
    """Python's own number, which JSON can hold, for one of NumPy or torch; lists become tuples of such."""
    if isinstance(value, (tuple, list)):
        return tuple(map(plain, value))
    # torch.compile of torch 2.11 cannot follow `operator.index` to its error.
    if type(value) in (bool, int, float, str, type(None)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return float(value) if isinstance(value, numbers.Real) else value


def check_integer(name: str, number: object, least: int = 0) -> None:
    """Raise TypeError or ValueError unless `number` is an integer of at least `least`."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        supported = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise TypeError(f"{name} must be {supported}, got {number!r}")
    if number < least:  # type: ignore[operator]
        raise ValueError(f"{name} must be at least {least}, got {number}")


def check_positive_integer(name: str, number: object) -> None:
    """Raise TypeError or ValueError unless `number` is an integer of at least 1."""
    check_integer(name, number, 1)


def check_number(name: str, number: object) -> None:
    """Raise TypeError or ValueError unless `number` is a finite number."""
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise TypeError(f"{name} must be a number, got {number!r}")
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")


def check_flag(name: str, flag: object) -> None:
    """Raise TypeError unless `flag` is True or False."""
    if not isinstance(flag, bool):
        raise TypeError(f"{name} must be True or False, got {flag!r}")


def check_implementation(implementation: object) -> None:
    """Raise ValueError unless `implementation` is one of "auto", "triton" and "torch"."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")


def resolve_scale(scale: object, head_dim: int) -> float:
    """The softmax scale: `scale`, or 1/√D when it is None.

    Raises:
        TypeError, ValueError: `scale` is no finite number.
    """
    if scale is None:
        return head_dim**-0.5
    check_number("scale", scale)
    return float(scale)  # type: ignore[arg-type]


def check_dense(argument: str, dense: object) -> int | float | tuple[int, ...]:
    """The steps or layers that are computed with exact attention, in the form that `is_dense` takes; false if none are.

    Args:
        argument: name of the option, for the errors.
        dense: an integer n for the first n, a float for the first fraction (rounded up), or a collection of indices.

    Raises:
        TypeError: `dense` is none of these.
        ValueError: a negative count or index, or a fraction outside 0 … 1.
    """
    supported = "a count (int), a fraction from 0.0 to 1.0 (float) or a collection of indices"
    dense = plain(dense)
    if isinstance(dense, (bool, str, bytes, dict)) or not isinstance(dense, (int, float, Iterable)):
        raise TypeError(f"{argument} must be {supported}, got {dense!r}")
    if isinstance(dense, float) and not 0.0 <= dense <= 1.0:
        raise ValueError(f"{argument} as a fraction must lie between 0.0 and 1.0, got {dense}")
    if isinstance(dense, int):
        check_integer(f"{argument} as a count", dense)
    if not isinstance(dense, Iterable):
        return dense
    indices = plain(list(dense))
    for index in indices:
        check_integer(f"an index in {argument}", index)
    return tuple(sorted(set(indices)))


def is_dense(argument: str, dense: int | float | tuple[int, ...], index: int, total: int) -> bool:
    """Whether step or layer `index` of `total` is dense; `dense` is what `check_dense` returned.

    Raises:
        ValueError: the option asks for more steps or layers than there are.
    """
    noun = "layers" if argument == "dense_layers" else "steps"
    if isinstance(dense, float):
        return index < math.ceil(dense * total - 1e-9)
    if isinstance(dense, int):
        if dense > total:
            raise ValueError(f"{argument}={dense}, but there are only {total} {noun}")
        return index < dense
    if dense and dense[-1] >= total:
        raise ValueError(f"{argument} names index {dense[-1]}, but there are only {total} {noun} (0 to {total - 1})")
    return any(index == chosen for chosen in dense)
