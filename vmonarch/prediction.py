"""A transformer's output in steps that are not computed: along the line through the latest two that were."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclasses.dataclass
class Line:
    """Through the latest two outputs that were computed, each of tensors [B, …] in tuples or mappings.

    Attributes:
        outputs: (time, output) of them.
    """

    outputs: list[tuple[float, Any]] = dataclasses.field(default_factory=list)

    @property
    def known(self) -> bool:
        return len(self.outputs) == 2

    def at(self, time: float) -> Any:
        """The output at a time."""
        (before, first), (latest, second) = self.outputs
        along = (time - before) / (latest - before) if latest != before else 1.0

        def between(x: Any, y: Any) -> Any:
            return torch.lerp(x.float(), y.float(), along).to(y.dtype) if isinstance(y, torch.Tensor) else y

        return pytree.tree_map(between, first, second)

    def error(self, time: float, output: Any) -> torch.Tensor:
        """‖computed − predicted‖ / ‖computed‖ at a time, of the worst sample of the worst tensor: a number."""
        errors = []
        for computed, predicted in zip(tensors_in(output), tensors_in(self.at(time)), strict=True):
            change, size = computed.float() - predicted.float(), computed.float()
            errors.append((change.flatten(1).norm(dim=1) / size.flatten(1).norm(dim=1)).max())
        return torch.stack([error.to(errors[0].device) for error in errors]).max()

    def add(self, time: float, output: Any) -> None:
        """Go on with an output that was computed; a copy, because whoever gets it may write to it."""
        kept = pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, output)
        self.outputs = [*self.outputs[-1:], (time, kept)]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that a value is, or that its sequences and mappings hold."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)
