"""The options `dense_steps`, `dense_layers` and `refresh`: what is left to exact attention."""

from __future__ import annotations

import math
from collections.abc import Iterable

from vmonarch.validation import plain

Dense = int | float | tuple[int, ...]


class DenseSet:
    """Which of `total` steps or layers are computed with exact attention.

    Args:
        argument: name of the option, for the errors.
        dense: the first `dense` of them if an integer, that fraction of them (rounded up, from the first) if a float,
            exactly those indices if a collection of integers.

    Raises:
        TypeError: `dense` is none of these.
        ValueError: a negative count or index, or a fraction outside 0 … 1.
    """

    def __init__(self, argument: str, dense: object) -> None:
        self.argument = argument
        supported = "a count (int), a fraction from 0.0 to 1.0 (float) or a collection of indices"
        dense = plain(dense)
        if isinstance(dense, (bool, str, bytes, dict)) or not isinstance(dense, (int, float, Iterable)):
            raise TypeError(f"{argument} must be {supported}, got {dense!r}")
        if isinstance(dense, float) and not 0.0 <= dense <= 1.0:
            raise ValueError(f"{argument} as a fraction must lie between 0.0 and 1.0, got {dense}")
        if isinstance(dense, int) and dense < 0:
            raise ValueError(f"{argument} as a count must be at least 0, got {dense}")
        if isinstance(dense, Iterable):
            indices = plain(list(dense))
            for index in indices:
                if isinstance(index, bool) or not isinstance(index, int):
                    raise TypeError(f"{argument} as a collection must hold integers, got {index!r}")
                if index < 0:
                    raise ValueError(f"{argument} as a collection must hold indices of at least 0, got {index}")
            dense = tuple(sorted(set(indices)))
        self.dense: Dense = dense
        # Whether anything at all is dense. A plain attribute, because older torch.compile cannot trace `__bool__`.
        self.some = self.dense != () and self.dense != 0

    def contains(self, index: int, total: int) -> bool:
        """Whether `index` is among the dense ones of `total`.

        Raises:
            ValueError: the option asks for more than there are.
        """
        noun = "layers" if self.argument == "dense_layers" else "steps"
        if isinstance(self.dense, float):
            return index < math.ceil(self.dense * total - 1e-9)
        if isinstance(self.dense, int):
            if self.dense > total:
                raise ValueError(f"{self.argument}={self.dense}, but there are only {total} {noun}")
            return index < self.dense
        if self.dense and self.dense[-1] >= total:
            raise ValueError(
                f"{self.argument} names index {self.dense[-1]}, but there are only {total} {noun} (0 to {total - 1})"
            )
        return any(index == dense for dense in self.dense)
