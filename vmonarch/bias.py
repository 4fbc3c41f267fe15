"""Biases as products of two thin factors, for `flash_bias_attention` and `FlashBiasProcessor`.

Some biases have exact factors (FlashBias, Examples 3.4 and 3.5). Any matrix has factors by its singular values
(FlashBias, §3.2). `BiasOption` is the option of the processors.

Exact factors are float32: positions and squared distances are sums of large terms that cancel, of which 16 bits would
keep nothing. Shapes: Sq queries, Sk keys, H heads, C coordinates, R rank; factors are [1, S, H or 1, R].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

from vmonarch.grid import LatentGrid
from vmonarch.validation import check_positive_integer

if TYPE_CHECKING:
    from vmonarch.context_parallel import Part

Factors = tuple[torch.Tensor, torch.Tensor]
# A pair (φq, φk), or a function that makes one for a grid.
GridBias = Factors | Callable[[LatentGrid], Factors]


def alibi_slopes(heads: int) -> torch.Tensor:
    """[H] slopes of ALiBi: 2^(-8h/H) for h = 1 … H; between powers of two, those of the next lower one come first.

    Source: Press et al., Train Short, Test Long, §3; their code for other numbers of heads.
    """
    check_positive_integer("heads", heads)

    def of_a_power(n: int) -> list[float]:
        return [2.0 ** (-8.0 * h / n) for h in range(1, n + 1)]

    power = 1 << (heads.bit_length() - 1)
    return torch.tensor(of_a_power(power) + of_a_power(2 * power)[::2][: heads - power])


def alibi_factors(queries: int, keys: int, slopes: torch.Tensor | float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of rank 2 of the bias -slope·(i - j) for causal attention; the last query is at the last key.

    Above the diagonal, where causal attention has no keys, the bias would be positive.

    Args:
        slopes: a number, or [H], which may require gradients.

    Returns:
        (φq [1, Sq, 1, 2], φk [1, Sk, H or 1, 2]).

    Source: FlashBias, Example 3.4.
    """
    check_positive_integer("queries", queries)
    check_positive_integer("keys", keys)
    slopes = torch.as_tensor(slopes, dtype=torch.float32)
    if slopes.ndim > 1:
        raise ValueError(f"slopes must be a number or [H], got shape {tuple(slopes.shape)}")
    # Counted from the middle, which keeps numbers small: the bias depends on differences alone.
    positions = torch.arange(keys, device=slopes.device) - keys // 2
    i, j = positions[keys - queries :].to(torch.float32), positions.to(torch.float32)
    query_factor = torch.stack([i, torch.ones_like(i)], -1)[None, :, None]
    ones = torch.ones_like(j)[None, :, None]
    return query_factor, torch.stack([-slopes * ones, slopes * j[None, :, None]], -1)


def distance_factors(
    query_points: torch.Tensor, key_points: torch.Tensor, weight: torch.Tensor | float = -1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of the bias weight·‖x - y‖², of rank C + 2; with a weight per axis, Σ_c weight_c·(x_c - y_c)², 2C + 1.

    Args:
        query_points: [Sq, C]. key_points: [Sk, C]; any number of coordinates.
        weight: a number; or broadcastable to [Sq, H], one for every query and head; or, per axis, to [Sq, H, C].
            It may require gradients, and is negative where far keys should count for less.

    Returns:
        (φq [1, Sq, H or 1, R], φk [1, Sk, 1, R]).

    Raises:
        ValueError: shapes that do not fit; the message names the argument.

    Source: FlashBias, Example 3.5 (there of rank 3C), with the learnable weight αᵢ of §4.4.
    """
    for name, points in (("query_points", query_points), ("key_points", key_points)):
        if not isinstance(points, torch.Tensor) or points.ndim != 2 or 0 in points.shape:
            got = tuple(points.shape) if isinstance(points, torch.Tensor) else type(points).__name__
            raise ValueError(f"{name} must be a tensor [S, C], got {got}")
    Sq, C = query_points.shape
    if key_points.shape[1] != C:
        raise ValueError(f"key_points must have as many coordinates as query_points ({C}), got {key_points.shape[1]}")
    # Distances do not change with the origin; in the middle of the keys, squares are smallest.
    wide = torch.float64
    origin = key_points.detach().to(wide).mean(0)
    x, y = ((points.to(wide) - origin).to(torch.float32) for points in (query_points, key_points))
    weights = _weights(weight, Sq, C).to(x.device)
    x, y = x[:, None], y[:, None]  # [S, 1, C]
    squares = y.square()
    if weights.ndim < 3:
        weights, squares = weights.unsqueeze(-1), squares.sum(-1, keepdim=True)
    query_parts = [(weights * x.square()).sum(-1, keepdim=True), weights.expand(Sq, -1, -1), -2 * weights * x]
    key_parts = [torch.ones_like(y[..., :1]), squares, y]
    return torch.cat(query_parts, -1)[None], torch.cat(key_parts, -1)[None]


def _weights(weight: torch.Tensor | float, queries: int, coordinates: int) -> torch.Tensor:
    """float32 [1 or Sq, 1 or H] or, with as many dimensions, [1 or Sq, 1 or H, C]."""
    tensor = torch.as_tensor(weight, dtype=torch.float32)
    if tensor.ndim < 2:
        tensor = tensor.reshape(1, -1)
    fits = tensor.shape[0] in (1, queries) and (tensor.ndim == 2 or tensor.shape[2:] == (coordinates,))
    if not fits or 0 in tensor.shape:
        shapes = f"a number, [H], [{queries} or 1, H] or [{queries} or 1, H, {coordinates}]"
        raise ValueError(f"weight must be {shapes}, got shape {tuple(tensor.shape)}")
    return tensor


def svd_factors(bias: torch.Tensor, *, energy: float = 0.99) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of a bias that is given as a matrix, by its singular values.

    All heads get the rank R of the most demanding one, a multiple of 8. A rank above half of min(Sq, Sk) saves nothing.

    Args:
        bias: [H, Sq, Sk]; it is decomposed in float64 and has no gradient.
        energy: share of Σσ² that every head keeps, above 0 and at most 1 (the paper uses 0.95, 0.99 and 0.995).

    Returns:
        (φq [1, Sq, H, R], φk [1, Sk, H, R]), of the dtype of the bias.

    Raises:
        ValueError: an argument is not as described; the message names it.

    Source: FlashBias, §3.2 and Appendix D.
    """
    if not isinstance(bias, torch.Tensor) or bias.ndim != 3 or 0 in bias.shape:
        got = tuple(bias.shape) if isinstance(bias, torch.Tensor) else type(bias).__name__
        raise ValueError(f"bias must be a tensor [H, Sq, Sk], got {got}")
    if not isinstance(energy, (int, float)) or not 0 < energy <= 1:
        raise ValueError(f"energy must be above 0 and at most 1, got {energy!r}")
    U, sigma, Vh = torch.linalg.svd(bias.detach().double(), full_matrices=False)
    kept = sigma.square().cumsum(-1)
    # Slightly below 1, because rounding may keep the last sum from reaching it.
    needed = (kept < min(energy, 1 - 1e-12) * kept[:, -1:]).sum(-1) + 1
    R = -(-int(needed.max()) // 8) * 8
    root = sigma[:, None, :R].sqrt()
    factors = (torch.nn.functional.pad(x[..., :R] * root, (0, R - root.shape[2])) for x in (U, Vh.mT))
    query_factor, key_factor = (x.transpose(0, 1)[None].to(bias.dtype).contiguous() for x in factors)
    return query_factor, key_factor


class SpatioTemporalDecay(torch.nn.Module):
    """A bias for video: -Σ_axis (Δaxis / reach)², learnable for every head, of rank 7; axes are time, height, width.

    A key as far as `reach` along an axis counts e⁻¹ times as much as a near one with the same logit.

    Args:
        heads: H, or 1 for one decay that all heads share.
        reach: initial reach along (time, height, width), in latent frames, rows and columns; math.inf for an axis
            along which nothing decays at first.
        decay: [H lists of three numbers], learnt values in place of both.

    The parameter `decay` [H, 3] is 1 / reach². It is not constrained: training may make an axis favour far keys.
    """

    def __init__(
        self,
        heads: int = 1,
        reach: Sequence[float] = (16.0, 64.0, 64.0),
        decay: Sequence[Sequence[float]] | None = None,
    ) -> None:
        super().__init__()
        check_positive_integer("heads", heads)
        numbers = reach if isinstance(reach, Sequence) and len(reach) == 3 else [None]
        if not all(isinstance(r, (int, float)) and not isinstance(r, bool) and r > 0 for r in numbers):
            raise ValueError(f"reach must be three numbers above 0 (time, height, width), got {reach!r}")
        start = [0.0 if math.isinf(r) else float(r) ** -2 for r in reach]
        self.decay = torch.nn.Parameter(torch.tensor([start] * heads if decay is None else decay))

    @property
    def config(self) -> dict[str, object]:
        """The arguments for an equal bias with the present decays, as JSON values."""
        return {"decay": self.decay.tolist()}

    def forward(self, grid: LatentGrid) -> tuple[torch.Tensor, torch.Tensor]:
        """(φq [1, S, H, 7], φk [1, S, 1, 7]) for the tokens of a grid."""
        device = self.decay.device
        axes = torch.meshgrid(*(torch.arange(size, device=device) for size in grid), indexing="ij")
        points = torch.stack([axis.flatten() for axis in axes], -1)
        return distance_factors(points, points, -self.decay[None])


class BiasOption:
    """A processor's bias.

    Args:
        bias: a pair of tensors (φq, φk), each [1, S, H or 1, R], for the one grid that they fit; or a callable, such as
            a module, that makes such a pair for a `LatentGrid`; or the arguments of a `SpatioTemporalDecay` as a
            mapping.

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
            ValueError: some heads are asked for, but the factors have another number of heads than attention.
        """
        factors = self.bias if isinstance(self.bias, tuple) else self.bias(grid)
        query_factor, key_factor = (factor.to(device) for factor in factors)
        # The op refuses other shapes.
        own = lambda x: x if heads is None or x.ndim != 4 or x.shape[2] == 1 else heads.of(x, 2, "bias")
        return own(query_factor), own(key_factor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Copies of a model share the bias, whose owner saves what it learns.
        return self

    def config(self) -> Any:
        """The bias as JSON values.

        Raises:
            TypeError: it has no `config`.
        """
        config = getattr(self.bias, "config", None)
        if config is None:
            raise TypeError(f"a {type(self.bias).__name__} cannot be written as a config: it has no attribute config")
        return config
