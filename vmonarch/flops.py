"""Floating-point operations of attention, forward, for one head; a multiply-add counts 2.

    full attention    4·S²·d
    R-steps           4·b·c·d each, c keys or pooled cells; the last, which also multiplies values, 6·b·S·d
    L-steps           4·S·m·d each
    exact blocks      4·d for every pair of tokens in them

S tokens, m blocks of at most b positions, d head dim. Source: docs/attention.md, "FLOPs".
"""

from __future__ import annotations

from typing import Any

from vmonarch.grid import LatentGrid
from vmonarch.kernels.monarch.blocks import exact_key_frames
from vmonarch.options import VMonarchOptions


def full_flops(grid: LatentGrid, head_dim: int) -> float:
    """Of exact attention between all tokens."""
    return 4.0 * grid.tokens**2 * head_dim


def block_sizes(grid: LatentGrid, tiles: tuple[int, int], coarse: int) -> tuple[int, int, int]:
    """(blocks, positions of the largest one, pooled cells of all) when every frame is cut into tiles.

    Tiles that do not divide a frame differ by one row or column; cells at their ends are smaller.
    """

    def parts(size: int, count: int) -> list[int]:
        return [(i + 1) * size // count - i * size // count for i in range(count)]

    T, H, W = grid
    sizes = [(h, w) for h in parts(H, tiles[0]) for w in parts(W, tiles[1])]
    cells = T * sum(-(-h // coarse) * -(-w // coarse) for h, w in sizes)
    return T * len(sizes), max(h for h, _ in sizes) * max(w for _, w in sizes), cells


def vmonarch_flops(
    grid: LatentGrid,
    head_dim: int,
    options: VMonarchOptions | None = None,
    **named: Any,
) -> float:
    """Of `vmonarch_attention` with these options, ragged tiles, cells and last blocks counted at their size.

    Raises:
        TypeError, ValueError: an option has an unsupported value, or `exact` names a frame that the grid has not.
    """
    T, H, W = grid
    options = VMonarchOptions.of(options, named)
    frames_per_block, num_iterations = min(options.frames_per_block, T), options.num_iterations

    blocks, positions, cells = block_sizes(grid, options.tiles, options.coarse)
    m, b = blocks // T * -(-T // frames_per_block), positions * frames_per_block
    flops = (num_iterations - 1) * 4 * b * cells + 6 * b * grid.tokens + num_iterations * 4 * grid.tokens * m
    if options.pattern is not None:
        pairs = sum(len(keys) for keys in exact_key_frames(options.pattern, T, frames_per_block))
        flops += 4 * pairs * (H * W) ** 2
    return float(flops * head_dim)
