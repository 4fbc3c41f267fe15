"""How many bytes a rank sends: attention by frames, and by heads (Ulysses) to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vmonarch.exact import ExactBlocks, resolve_exact
from vmonarch.grid import LatentGrid
from vmonarch.kernels.distributed.exact import exact_routes
from vmonarch.kernels.distributed.exchange import split_evenly
from vmonarch.validation import check_positive_integer


def frame_parallel_bytes(
    grid: LatentGrid | tuple[int, int, int],
    *,
    frames: Sequence[int],
    rank: int,
    batch: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    value_dim: int | None = None,
    num_iterations: int = 2,
    exact: str | ExactBlocks | None = "first_frame",
    implementation: str = "triton",
) -> int:
    """Bytes that a rank sends to others in a forward pass of `frame_parallel_vmonarch_attention`.

    Without what aligns the pieces in a message, up to 7 bytes for each. The backward pass sends back what the forward
    pass brought, without cL unless entropy_grad.

    Args:
        frames: how many each rank has.
        batch, heads, head_dim, value_dim: B, H, D and E (D if None) of the tensors.
        implementation: "triton", or "torch", where intermediates are at least float32.

    Raises:
        TypeError, ValueError: `grid` or `exact` is not as `vmonarch_attention` describes, `frames` do not make up the
            grid or `rank` is none of theirs; the message names it.
    """
    grid = LatentGrid.parse(grid)
    _check_frames(grid, frames, rank)
    check_positive_integer("num_iterations", num_iterations)
    if implementation not in ("triton", "torch"):
        raise ValueError(f"implementation must be triton or torch, got {implementation!r}")
    E = head_dim if value_dim is None else value_dim
    positions = split_evenly(grid.tokens_per_frame, len(frames))
    at_least_float32 = torch.promote_types(dtype, torch.float32)
    inner = (dtype if implementation == "triton" else at_least_float32).itemsize
    statistic = at_least_float32.itemsize
    # For every head: places whose row goes to other ranks, from frames to positions and the other way.
    to_positions = frames[rank] * (grid.tokens_per_frame - positions[rank])
    to_frames = positions[rank] * (grid.frames - frames[rank])
    t, D = num_iterations, head_dim
    total = to_positions * (D * dtype.itemsize + t * (D * inner + statistic) + E * inner)
    total += to_frames * ((t - 1) * D * inner + E * inner + statistic)
    pattern = resolve_exact(exact)
    if pattern is not None:
        key_frames = pattern.key_frames(grid.frames)
        routes = exact_routes(key_frames, tuple(frames))
        asked = sum(map(len, routes.queries[rank]))
        answered = sum(len(row[rank]) for row in routes.queries)
        lent = sum(len(row[rank]) for row in routes.keys)
        total += grid.tokens_per_frame * (
            (asked * D + lent * (D + E)) * dtype.itemsize + answered * (E * inner + statistic)
        )
        if pattern.aware and t > 1 and any(key_frames):
            total += to_positions * statistic
    return batch * heads * total


def ulysses_bytes(
    *,
    tokens: Sequence[int],
    rank: int,
    batch: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    value_dim: int | None = None,
) -> int:
    """Bytes that a rank sends to others in a forward pass of attention by heads (Ulysses): of q, k, v and o.

    Args:
        tokens: how many each rank has. Heads are split evenly, the first ranks having one more where need be.
        batch, heads, head_dim, dtype, value_dim: as in `frame_parallel_bytes`.

    Raises:
        TypeError, ValueError: a rank has no tokens, there are fewer heads than ranks, or `rank` is none of theirs.
    """
    _check_rank(tokens, rank, "tokens")
    if heads < len(tokens):
        raise ValueError(f"heads must be at least the number of ranks, {len(tokens)}, got {heads}")
    E = head_dim if value_dim is None else value_dim
    own = split_evenly(heads, len(tokens))[rank]
    sent = tokens[rank] * (heads - own) * (2 * head_dim + E) + (sum(tokens) - tokens[rank]) * own * E
    return batch * sent * dtype.itemsize


def _check_frames(grid: LatentGrid, frames: Sequence[int], rank: int) -> None:
    _check_rank(frames, rank, "frames")
    if sum(frames) != grid.frames:
        raise ValueError(f"frames must sum to the {grid.frames} frames of the grid, got {tuple(frames)}")


def _check_rank(sizes: Sequence[int], rank: int, name: str) -> None:
    for r, number in enumerate(sizes):
        check_positive_integer(f"{name}[{r}]", number)
    if rank not in range(len(sizes)):
        raise ValueError(f"rank must be one of the {len(sizes)} ranks, from 0, got {rank}")
