"""Whether two calls have the same arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def same_arguments(expected: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether two sets of arguments, by name, have the same values; tensors that are not the same object are read."""
    return expected.keys() == given.keys() and all(same_value(expected[name], given[name]) for name in given)


def same_value(expected: Any, given: Any) -> bool:
    """Whether two arguments are the same object, equal tensors, equal values, or sequences or mappings of such."""
    if expected is given:
        return True
    if isinstance(expected, Mapping) and isinstance(given, Mapping):
        return same_arguments(expected, given)
    if isinstance(expected, (tuple, list)) and isinstance(given, (tuple, list)):
        return len(expected) == len(given) and all(map(same_value, expected, given))
    if isinstance(expected, torch.Tensor) and isinstance(given, torch.Tensor):
        alike = (expected.shape, expected.dtype, expected.device) == (given.shape, given.dtype, given.device)
        return alike and torch.equal(expected, given)
    return not isinstance(expected, torch.Tensor) and not isinstance(given, torch.Tensor) and expected == given


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that an argument is, or that its sequences and mappings hold."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)
