"""Work of attention: floating-point operations (a multiply-add counts 2), and the bytes that it must move.

For one head. A backward pass has every product twice, and the recomputed scores:

    full attention    4·S²·d, +10·S²·d backward
    R-steps           4·P·c·d each, c keys or pooled cells; the last, which also multiplies values, 6·P·S·d
    L-steps           4·S·T·d each
    first order       S·(2·(n + 1)·d² + (6·n + 2)·d), n boxes of queries
    exact blocks      4·d for every pair of tokens in them; in rows in two resolutions, of tokens or means

S tokens, T frames of P positions, d head dim. Source: docs/attention.md, "FLOPs".
"""

from __future__ import annotations

from typing import Any

from vmonarch.grid import LatentGrid
from vmonarch.kernels.two_resolution.tiling import Tiling, exact_tiles, tiling_of
from vmonarch.options import FirstOrderOptions, TwoResolutionOptions, VMonarchOptions, row_options


def pair_flops(pairs: float, head_dim: int, *, training: bool = False) -> float:
    """FLOPs of softmax attention over `pairs` pairs of a query and a key."""
    return pairs * (4 + 10 * training) * head_dim


def full_flops(grid: LatentGrid, head_dim: int, *, training: bool = False) -> float:
    """FLOPs of exact attention between all tokens."""
    return float(pair_flops(grid.tokens**2, head_dim, training=training))


def least_bytes(grid: LatentGrid, head_dim: int, *, itemsize: int, training: bool) -> int:
    """Bytes of q, k, v, out and lse; in a backward pass, of these again and of their gradients."""
    return grid.tokens * ((4 + 8 * training) * head_dim * itemsize + 4 * (1 + training))


def first_order_flops(grid: LatentGrid, head_dim: int, options: FirstOrderOptions) -> float:
    """Of one head with these options."""
    boxes = options.parts_of(grid).tokens
    return float(grid.tokens * (2 * (boxes + 1) * head_dim**2 + (6 * boxes + 2) * head_dim))


def vmonarch_work(
    grid: LatentGrid, head_dim: int, options: VMonarchOptions | None = None, *, training: bool = False, **named: Any
) -> dict[str, float]:
    """FLOPs of `vmonarch_attention` with these options by stage: forward, and backward with `training`.

    Ragged cells count at their size.

    Raises:
        TypeError, ValueError: an option has an unsupported value, or `exact` names a frame that the grid lacks.
    """
    options = VMonarchOptions.of(options, named)
    T, S, P = grid.frames, grid.tokens, grid.tokens_per_frame
    d, t, coarse = head_dim, options.num_iterations, options.coarse
    cells = T * -(-grid.height // coarse) * -(-grid.width // coarse)
    exact = [] if options.pattern is None else options.pattern.key_frames(T)
    # Sums of keys and of values, and the same for gradients.
    sums = 1 + options.last_l_update
    # Pairs of an exact query and its exact key.
    pairs: float = sum(map(len, exact)) * P**2
    if options.row_share < 1 and options.pattern is not None:
        row = row_options(options)
        pairs -= len(options.pattern.rows) * (P * S - two_resolution_pairs(tiling_of(grid, row, query_frames=1), row))
    work = {"exact": 4 * pairs * d}
    for i in range(1, t):
        work |= {f"R{i}": 4 * P * cells * d, f"L{i}": 4 * S * T * d}
    work |= {f"R{t}": 2 * (1 + sums) * P * S * d, f"L{t}": 4 * S * T * d}
    if training:
        work |= {f"L{i} backward": 10 * S * T * d for i in range(1, t + 1)}
        work |= {f"R{i} backward": 10 * P * cells * d for i in range(1, t)}
        work |= {f"R{t} backward": (6 + 4 * sums) * P * S * d, "exact backward": 10 * pairs * d}
    return work


def two_resolution_pairs(n: Tiling, options: TwoResolutionOptions) -> float:
    """Pairs of a query with a key or a mean, each 4·d FLOPs; the products of means that choose tiles count half."""
    exact = exact_tiles(n, options.share)
    positions = n.rows * n.columns
    keys = exact * n.frames * positions / n.tiles + (n.tiles - exact) * options.rest
    return n.query_frames * positions * keys + n.of_queries.tiles * n.tiles / 2


def two_resolution_flops(
    grid: LatentGrid, head_dim: int, options: TwoResolutionOptions, *, training: bool = False
) -> float:
    """Of one head with these options."""
    return pair_flops(two_resolution_pairs(tiling_of(grid, options), options), head_dim, training=training)


def vmonarch_flops(grid: LatentGrid, head_dim: int, options: VMonarchOptions | None = None, **named: Any) -> float:
    """FLOPs of one head's forward pass with these options; see `vmonarch_work`."""
    return float(sum(vmonarch_work(grid, head_dim, options, **named).values()))
