"""What a transformer is called with and what it returns, tensors alone or in nests of them (torch's "pytrees")."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that a value is, or that its tuples, lists and dictionaries hold."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def versions_of(arguments: Mapping[str, Any]) -> list[int]:
    """Of the tensors in there, which tell of changes in place."""
    # What inference mode has made has no version.
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors_in(arguments)]


def same_values(expected: Any, given: Any) -> bool:
    """Whether two values have the same form and equal leaves; tensors that are not the same object are read."""
    (leaves, form), (others, other_form) = pytree.tree_flatten(expected), pytree.tree_flatten(given)
    return form == other_form and all(map(_same, leaves, others))


def _same(expected: Any, given: Any) -> bool:
    if expected is given:
        return True
    tensors = [isinstance(x, torch.Tensor) for x in (expected, given)]
    if not any(tensors):
        return bool(expected == given)
    facts = lambda x: (x.shape, x.dtype, x.device)
    return all(tensors) and facts(expected) == facts(given) and torch.equal(expected, given)


@dataclasses.dataclass
class Line:
    """Through the latest two outputs that were computed, each of tensors [B, …] in tuples or mappings.

    Attributes:
        outputs: (step, time, output) of them.
    """

    outputs: list[tuple[int, float, Any]] = dataclasses.field(default_factory=list)

    def at(self, time: float) -> Any:
        """The output at a time."""
        (_, before, first), (_, latest, second) = self.outputs
        along = (time - before) / (latest - before) if latest != before else 1.0
        between = lambda x, y: torch.lerp(x.float(), y.float(), along).to(y.dtype) if isinstance(y, torch.Tensor) else y
        return pytree.tree_map(between, first, second)

    def error(self, time: float, output: Any) -> torch.Tensor:
        """‖computed − predicted‖ / ‖computed‖ at a time, of the worst sample of the worst tensor: a number."""
        errors = []
        for computed, predicted in zip(tensors_in(output), tensors_in(self.at(time)), strict=True):
            change, size = computed.float() - predicted.float(), computed.float()
            errors.append((change.flatten(1).norm(dim=1) / size.flatten(1).norm(dim=1)).max())
        return torch.stack([error.to(errors[0].device) for error in errors]).max()

    def add(self, step: int, time: float, output: Any) -> None:
        """Go on with an output that was computed; a copy, because whoever gets it may write to it."""
        kept = pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, output)
        self.outputs = [*self.outputs[-1:], (step, time, kept)]
