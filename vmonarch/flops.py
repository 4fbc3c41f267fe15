"""Work of attention: floating-point operations (a multiply-add counts 2) and bytes moved. All that counts asks here.

Forward, of one head; a backward pass has every product once, the recomputed scores too:

    full attention    4·S²·d, +10·S²·d backward; a bias of rank R adds 2·S²·R, +6·S²·R
    R-steps           4·P·c·d each, c keys or pooled cells; the last, which also multiplies values, 6·P·S·d
    L-steps           4·S·T·d each
    first order       S·(2·(n + 1)·d² + (6·n + 2)·d), n boxes of queries
    exact blocks      4·d for every pair of tokens in them; in rows in two resolutions, of tokens or means

S tokens, T frames of P positions, d head dim. Source: docs/attention.md, "FLOPs".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vmonarch.grid import LatentGrid
from vmonarch.kernels.two_resolution.selection import exact_tiles
from vmonarch.kernels.two_resolution.tiling import Tiling, tiling_of
from vmonarch.options import FirstOrderOptions, TwoResolutionOptions, VMonarchOptions, row_options


@dataclass(frozen=True)
class StageWork:
    """FLOPs and bytes of one stage, all heads."""

    stage: str
    flops: float
    bytes: float


def pair_flops(pairs: float, head_dim: int, *, rank: int = 0, training: bool = False) -> float:
    """Of softmax attention over so many pairs of a query and a key, with a bias of that rank."""
    forward = pairs * (4 * head_dim + 2 * rank)
    return forward + pairs * (10 * head_dim + 6 * rank) if training else forward


def full_flops(grid: LatentGrid, head_dim: int) -> float:
    """FLOPs of exact attention between all tokens."""
    return float(pair_flops(grid.tokens**2, head_dim))


def first_order_flops(grid: LatentGrid, head_dim: int, options: FirstOrderOptions) -> float:
    """Of one head with these options."""
    boxes = options.parts_of(grid).tokens
    return float(grid.tokens * (2 * (boxes + 1) * head_dim**2 + (6 * boxes + 2) * head_dim))


def attention_work(
    grid: LatentGrid,
    heads: int,
    head_dim: int,
    options: TwoResolutionOptions | None = None,
    *,
    itemsize: int,
    training: bool,
) -> StageWork:
    """Work of exact attention, or with options of `two_resolution_attention`.

    Bytes are those of q, k, v, out and lse, in the backward pass also of dq, dk, dv and do, and for means of k and v.
    """
    pairs = grid.tokens**2 if options is None else two_resolution_pairs(tiling_of(grid, options), options)
    vectors = 4 + 8 * training + 2 * (options is not None)
    numbers = grid.tokens * (vectors * head_dim * itemsize + 4 * (1 + training))
    return StageWork("attention", heads * pair_flops(pairs, head_dim, training=training), heads * numbers)


def vmonarch_work(
    grid: LatentGrid,
    heads: int,
    head_dim: int,
    options: VMonarchOptions | None = None,
    *,
    itemsize: int,
    training: bool = False,
    **named: Any,
) -> list[StageWork]:
    """Work of `vmonarch_attention` with these options by stage, forward and with `training` backward.

    Ragged cells count at their size. Bytes are those of every tensor that a stage reads or writes, once per stage.

    Raises:
        TypeError, ValueError: an option has an unsupported value, or `exact` names a frame that the grid has not.
    """
    options = VMonarchOptions.of(options, named)
    T, S, P = grid.frames, grid.tokens, grid.tokens_per_frame
    d, t, coarse = head_dim, options.num_iterations, options.coarse
    cells = T * -(-grid.height // coarse) * -(-grid.width // coarse)
    exact = [] if options.pattern is None else options.pattern.key_frames(T)
    # Sums of keys and of values; of the gradients as well.
    sums = 1 + options.last_l_update
    # Pairs of an exact query and its exact key, such queries, and such keys.
    pairs: float = sum(map(len, exact)) * P**2
    if options.row_share < 1 and options.pattern is not None:
        row = row_options(options)
        pairs -= len(options.pattern.rows) * (P * S - two_resolution_pairs(tiling_of(grid, row, query_frames=1), row))
    n, n_keys = sum(map(bool, exact)) * P, len(set().union(*exact)) * P

    def stage(name: str, flops: float, vectors: float, statistics: float) -> StageWork:
        return StageWork(name, heads * flops, heads * (vectors * d * itemsize + statistics * 4))

    pool = [stage("pool", 0, S + cells, 0)] if coarse > 1 else []
    stages = ([stage("exact", 4 * pairs * d, 2 * n + 2 * n_keys, n)] if exact else []) + pool
    for i in range(1, t):
        stages.append(stage(f"R{i}", 4 * P * cells * d, 2 * S + cells, S))
        stages.append(stage(f"L{i}", 4 * S * T * d, 3 * S, S + 2 * S * training))
    stages.append(stage(f"R{t}", 2 * (1 + sums) * P * S * d, (3 + sums) * S, S))
    stages.append(stage(f"L{t}", 4 * S * T * d, 4 * S + n, 2 * S))
    if not training:
        return stages
    # Gradients that a stage adds to are read and written.
    stages += pool
    # q, do, out, dq; aL, y, daL, dy
    stages.append(stage(f"L{t} backward", 10 * S * T * d, 8 * S + n, 5 * S))
    # z, dz; k, v, dk, dv; daL, dy
    dz = 2 * S if t == 1 else S
    stages.append(stage(f"R{t} backward", (6 + 4 * sums) * P * S * d, dz + (7 + sums) * S, 4 * S))
    for i in range(t - 1, 0, -1):
        # q, dq (added to); aL, daR, daL
        stages.append(stage(f"L{i} backward", 10 * S * T * d, 6 * S, 6 * S))
        # z, dz; k, dk (added to); daL
        dz, keys = 2 * S if i == 1 else S, cells * 2 + 2 * S if coarse > 1 else 3 * S
        stages.append(stage(f"R{i} backward", 10 * P * cells * d, dz + keys + 2 * S, 4 * S))
    # q, do, out and dq of the rows; k, v, dk, dv
    return stages + ([stage("exact backward", 10 * pairs * d, 5 * n + 6 * n_keys, 2 * n)] if exact else [])


def two_resolution_pairs(n: Tiling, options: TwoResolutionOptions) -> float:
    """Pairs of a query and a key or a mean, which cost 4·d; the products of means that choose tiles count as half one.

    Raises:
        ValueError: with `beta` the data say how many they are.
    """
    if options.share is None:
        raise ValueError(f"beta must be None where work is counted, which it leaves to the data; got {options.beta}")
    exact = exact_tiles(n, options)
    positions = n.rows * n.columns
    keys = exact * n.frames * positions / n.tiles + (n.tiles - exact) * n.cells * options.rest
    return n.query_frames * positions * keys + n.of_queries.tiles * n.tiles / 2


def two_resolution_flops(grid: LatentGrid, head_dim: int, options: TwoResolutionOptions) -> float:
    """Of one head with these options."""
    return pair_flops(two_resolution_pairs(tiling_of(grid, options), options), head_dim)


def vmonarch_flops(grid: LatentGrid, head_dim: int, options: VMonarchOptions | None = None, **named: Any) -> float:
    """Of the forward pass of one head with these options; see `vmonarch_work`."""
    return float(sum(stage.flops for stage in vmonarch_work(grid, 1, head_dim, options, itemsize=1, **named)))
