"""What a transformer is called with: the tensors in there, whether they have changed, and whether two are the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that a value is, or that its sequences and mappings hold."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)


def versions_of(arguments: Mapping[str, Any]) -> list[int]:
    """Of the tensors in there, which tell of changes in place."""
    tensors = (tensor for value in arguments.values() for tensor in tensors_in(value))
    # What inference mode has made has no version.
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


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
