"""The option `bias` of the processors: factors for the tokens of any latent grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

from vmonarch.bias import SpatioTemporalDecay
from vmonarch.context_parallel import Part
from vmonarch.grid import LatentGrid

Factors = tuple[torch.Tensor, torch.Tensor]
# A pair (φq, φk), or what makes one for a grid.
GridBias = Factors | Callable[[LatentGrid], Factors]


class BiasOption:
    """A processor's bias.

    Args:
        bias: a pair of tensors (φq, φk), each [1, S, H or 1, R], for the one grid that they fit; or a callable that
            makes such a pair for a `LatentGrid`, for example a `SpatioTemporalDecay`, a module with parameters or not;
            or its arguments.

    Raises:
        TypeError, ValueError: it is none of these.
    """

    def __init__(self, bias: object) -> None:
        self.bias: GridBias
        if isinstance(bias, Mapping):
            try:
                self.bias = SpatioTemporalDecay(**bias)
            except (TypeError, ValueError) as error:
                raise type(error)(f"bias must be the arguments of a SpatioTemporalDecay: {error}") from error
        elif callable(bias):
            self.bias = bias
        elif isinstance(bias, (tuple, list)) and len(bias) == 2 and all(isinstance(x, torch.Tensor) for x in bias):
            self.bias = (bias[0], bias[1])
        else:
            raise TypeError(
                "bias must be a pair of tensors (query_factor, key_factor), or a callable that makes one for a latent"
                f" grid, such as vmonarch.bias.SpatioTemporalDecay(heads); got {type(bias).__name__}"
            )

    def __repr__(self) -> str:
        return f"BiasOption({type(self.bias).__name__})"

    def factors(self, grid: LatentGrid, device: torch.device, heads: Part | None = None) -> Factors:
        """(φq, φk) for the tokens of a grid, on the device of the query; for some of the heads, or all (None).

        Raises:
            ValueError: some heads are asked for, and the factors are of another number of heads than there are.
        """
        factors = self.bias if isinstance(self.bias, tuple) else self.bias(grid)
        query_factor, key_factor = (factor.to(device) for factor in factors)
        # Other shapes are for the op to refuse.
        own = lambda x: x if heads is None or x.ndim != 4 or x.shape[2] == 1 else heads.of(x, 2, "bias")
        return own(query_factor), own(key_factor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # What it learns is saved by its owner, and copies of a model share it.
        return self

    def config(self) -> Any:
        """The bias as JSON-serialisable values.

        Raises:
            TypeError: it has no `config`.
        """
        config = getattr(self.bias, "config", None)
        if config is None:
            raise TypeError(f"a {type(self.bias).__name__} cannot be written as a config: it has no attribute config")
        return config
