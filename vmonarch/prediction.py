"""A transformer's output in steps that are not computed: along the line through the latest two that were."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.utils import _pytree as pytree

from vmonarch.arguments import tensors_in


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
