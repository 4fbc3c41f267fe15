"""Monarch attention in plain torch: the specification of the fused kernels, written stage by stage like the papers.

Symbols (VMonarch, Eq. 3-6): L[j,l,k] weight that the query in block l at position j gives to key
block k; R[k,j,i] distribution over the keys i of block k for position j; aL, cL, cR, z, y as in the papers, with
z = αR / cR kept as one well-scaled tensor, the centroid query of position j for key block k.

Shapes: B batch, S tokens, H heads, D head dim, E value dim, m blocks, b positions per block, c pooled cells per block.
Block tensors are [B, H, m, b, D].
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vmonarch.grid import LatentGrid
from vmonarch.kernels.flash_entropy import reference as softmax
from vmonarch.kernels.flash_entropy.reference import attend, in_row_chunks, softmax_parts, to_groups
from vmonarch.kernels.monarch.blocks import BlockLayout
from vmonarch.kernels.two_resolution.reference import chosen_tiles, two_resolution_attention_reference
from vmonarch.kernels.two_resolution.tiling import frame_tiling, tiling_of
from vmonarch.options import VMonarchOptions
from vmonarch.two_resolution_options import r_options, row_options

# The exact blocks [b, l, m] of a chunk of positions and of query blocks.
ExactTable = Callable[[slice, slice], torch.Tensor]


def r_step(
    z: torch.Tensor, key: torch.Tensor, key_bias: torch.Tensor | None, value: torch.Tensor | None, entropy_grad: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Update R inside every key block: plain attention with query z, key K and values K and V (Eq. 3, 4).

    The entropy comes free because the key is a value: cL = Σ R log R = z·aL - lse
    (docs/attention.md, "The entropy").

    Args:
        z: [B, H, m, b, D] centroid queries.
        key: [B, H, m, i, D], i = b keys or c pooled keys.
        key_bias: broadcastable to [B, H, m, i]; -inf masks a key, log n counts a pooled key n times.
        value: [B, H, m, b, E] in the last iteration, else None.

    Returns:
        (aL [B, H, m, b, D], cL [B, H, m, b] = +inf where a block has no key, y [B, H, m, b, E] or None).
    """
    lead = z.shape[:3]
    bias = None if key_bias is None else key_bias.expand(*lead, key.shape[3]).flatten(0, 2)
    keys = key.flatten(0, 2)
    values = (keys,) if value is None else (keys, value.flatten(0, 2))
    lse, *outs = in_row_chunks(attend, z.flatten(0, 2), keys, bias, *values)
    aL = outs[0].unflatten(0, lead)
    cL = (z * aL).sum(-1) - lse.unflatten(0, lead)
    y = None if value is None else outs[1].unflatten(0, lead)
    return aL, cL if entropy_grad else cL.detach(), y


def r_step_in_two_resolutions(
    z: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grid: LatentGrid,
    options: VMonarchOptions,
    entropy_grad: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """`r_step` of the last iteration in two resolutions; every block is a frame of `grid`.

    Without `last_l_update` there is no aL and no cL.
    """
    (B, _, m, _, D), two = z.shape, r_options(options)
    tiling = frame_tiling(grid, two)
    # [B, H, m, b, …] -> [B·m, b, H, …]: a frame is a sample.
    queries, keys, values = (x.permute(0, 2, 3, 1, 4).flatten(0, 1) for x in (z, key, value))
    chosen = chosen_tiles(queries, keys, tiling, two, scale=1.0)
    summed = torch.cat([keys, values], -1) if options.last_l_update else values
    out, lse = two_resolution_attention_reference(queries, keys, summed, tiling, chosen, rest=True, scale=1.0)
    out = out.unflatten(0, (B, m)).permute(0, 3, 1, 2, 4)
    if not options.last_l_update:
        return None, None, out
    lse = lse.unflatten(0, (B, m)).transpose(1, 2)
    aL, y = out[..., :D], out[..., D:]
    cL = (z * aL).sum(-1) - lse
    return aL, cL if entropy_grad else cL.detach(), y


def values_of(z: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """y [B, H, m, b, E] of `r_step` alone, with every key."""
    _, y = in_row_chunks(attend, z.flatten(0, 2), key.flatten(0, 2), None, value.flatten(0, 2))
    return y.unflatten(0, z.shape[:3])


def l_logits(
    query: torch.Tensor, aL: torch.Tensor, cL: torch.Tensor, exact: torch.Tensor | None, lse_exact: torch.Tensor | None
) -> torch.Tensor:
    """Z[j,l,k] = q[l,j]·aL[k,j] - cL[k,j], -inf in exact blocks, with the exact part as one more column.

    Args:
        query: [G, b, l, D], position-major. aL: [G, b, m, D]. cL: [G, b, m].
        exact: [b, l, m] true in exact blocks, or None.
        lse_exact: [G, b, l] log-weight of the exact part, -inf where there is none; or None.

    Returns:
        [G, b, l, m], or [G, b, l, m + 1] with `lse_exact`.
    """
    Z = query @ aL.transpose(-1, -2) - cL.unsqueeze(-2)
    if exact is not None:
        Z = Z.masked_fill(exact, -torch.inf)
    if lse_exact is not None:
        Z = torch.cat([Z, lse_exact.unsqueeze(-1)], dim=-1)
    return Z


def l_step(
    query: torch.Tensor,
    aL: torch.Tensor,
    cL: torch.Tensor,
    exact: torch.Tensor | None,
    lse_exact: torch.Tensor | None,
    query_valid: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Update L at every position and sum it over the queries: αR = Σ_l L q, cR = Σ_l L (Eq. 3, 4).

    Arguments as in `l_logits`; query_valid: [b, l], false where a place holds no query, which then counts for nothing.

    Returns:
        (aR [G, b, m, D], cR [G, b, m]).
    """
    m = aL.shape[-2]
    p, row_sum, _ = softmax_parts(l_logits(query, aL, cL, exact, lse_exact))
    L = p[..., :m] / row_sum
    if query_valid is not None:
        L = L * query_valid.unsqueeze(-1)
    return L.transpose(-1, -2) @ query, L.sum(-2)


def last_l_step(
    query: torch.Tensor,
    aL: torch.Tensor,
    cL: torch.Tensor,
    y: torch.Tensor,
    exact: torch.Tensor | None,
    lse_exact: torch.Tensor | None,
    out_exact: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Update L a last time and apply it: o[l,j] = Σ_k L[j,l,k] y[k,j], merged with the exact part (Eq. 6).

    Arguments as in `l_logits`; y: [G, b, m, E]; out_exact: [G, b, l, E].

    Returns:
        (o [G, b, l, E], lse [G, b, l]: the log-partition of the row; docs/attention.md, "The log-partition").
    """
    m = aL.shape[-2]
    p, row_sum, lse = softmax_parts(l_logits(query, aL, cL, exact, lse_exact))
    o = p[..., :m] @ y
    if out_exact is not None:
        o = o + p[..., m:] * out_exact
    return o / row_sum, lse


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _slice_or_none(tensor: torch.Tensor | None, *index: slice) -> torch.Tensor | None:
    return None if tensor is None else tensor[index]


def _in_chunks(groups: int, positions: int, rows: int, blocks: int) -> tuple[list[slice], list[slice]]:
    """Slices of positions and of query rows whose logits stay within the chunk budget."""
    budget = max(1, softmax.MAX_CHUNK_SCORES // groups)
    rows_per_chunk = min(rows, max(1, budget // blocks))
    positions_per_chunk = max(1, budget // (rows_per_chunk * blocks))
    return _chunks(positions, positions_per_chunk), _chunks(rows, rows_per_chunk)


def exact_blocks(key_frames: tuple[tuple[int, ...], ...], frame: torch.Tensor) -> ExactTable:
    """The exact blocks of a chunk of positions and query blocks, as a function.

    Args:
        key_frames: E(l) for every frame l, whole key blocks.
        frame: [m, b] the frame of every place.
    """
    T = len(key_frames)
    pairs = torch.tensor([[k in attended for k in range(T)] for attended in key_frames], device=frame.device)  # [T, T]
    of_blocks = pairs[:, frame[:, 0]]  # [T, m]
    return lambda j, l: of_blocks[frame.T[j, l]]


def centroids(
    query: torch.Tensor,
    aL: torch.Tensor,
    cL: torch.Tensor,
    exact: ExactTable | None,
    lse_exact: torch.Tensor | None,
    query_valid: torch.Tensor | None,
    options: VMonarchOptions,
) -> torch.Tensor:
    """The centroid queries z = αR / max(cR, min_mass) of all positions [G, b, m, D], by `l_step`, a chunk at a time."""
    position_chunks, row_chunks = _in_chunks(query.shape[0], query.shape[1], query.shape[2], aL.shape[2])
    z = []
    for j in position_chunks:
        sums = [
            l_step(
                query[:, j, l],
                aL[:, j],
                cL[:, j],
                None if exact is None else exact(j, l),
                _slice_or_none(lse_exact, slice(None), j, l),
                _slice_or_none(query_valid, j, l),
            )
            for l in row_chunks
        ]
        aR, cR = (sum(parts[1:], parts[0]) for parts in zip(*sums, strict=True))
        # The clamp (VMonarch, §4.1) keeps blocks that nobody looks at from being divided by nearly nothing.
        z.append(aR / cR.clamp(min=max(options.min_mass, torch.finfo(cR.dtype).tiny)).unsqueeze(-1))
    return torch.cat(z, 1)


def output(
    query: torch.Tensor,
    aL: torch.Tensor,
    cL: torch.Tensor,
    y: torch.Tensor,
    exact: ExactTable | None,
    lse_exact: torch.Tensor | None,
    out_exact: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [G, b, l, E], lse [G, b, l]) of all positions, by `last_l_step`, a chunk at a time."""
    position_chunks, row_chunks = _in_chunks(query.shape[0], query.shape[1], query.shape[2], aL.shape[2])
    outs, lses = [], []
    for j in position_chunks:
        parts = [
            last_l_step(
                query[:, j, l],
                aL[:, j],
                cL[:, j],
                y[:, j],
                None if exact is None else exact(j, l),
                _slice_or_none(lse_exact, slice(None), j, l),
                _slice_or_none(out_exact, slice(None), j, l),
            )
            for l in row_chunks
        ]
        outs.append(torch.cat([o for o, _ in parts], 2))
        lses.append(torch.cat([lse for _, lse in parts], 2))
    return torch.cat(outs, 1), torch.cat(lses, 1)


def exact_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_frames: tuple[tuple[int, ...], ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of every query frame l over the keys of E(l) (docs/attention.md, "Exact parts").

    Args:
        query: [G, S, D], multiplied by the softmax scale; S = T·P tokens by frame. key: [G, N, D] and value:
            [G, N, E], frames of P tokens too.
        key_frames: E(l) for each of the T query frames, as indices of key frames.

    Returns:
        (out [G, S, E], zero and lse [G, S], -inf where E(l) is empty).
    """
    positions = query.shape[1] // len(key_frames)
    q, k, v = (tensor.unflatten(1, (-1, positions)) for tensor in (query, key, value))
    out, lse = [], []
    for l, frames in enumerate(key_frames):
        if not frames:
            out.append(v.new_zeros(v.shape[0], *v.shape[2:]))
            lse.append(q.new_full(q[:, l].shape[:-1], -torch.inf))
            continue
        all_frames = frames == tuple(range(k.shape[1]))
        keys, values = (t if all_frames else t[:, list(frames)] for t in (k, v))
        lse_l, out_l = in_row_chunks(attend, q[:, l], keys.flatten(1, 2), None, values.flatten(1, 2))
        out.append(out_l)
        lse.append(lse_l)
    return torch.stack(out, 1).flatten(1, 2), torch.stack(lse, 1).flatten(1, 2)


def exact_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grid: LatentGrid,
    options: VMonarchOptions,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """An exact row in two resolutions: the queries [B, b, H, D] of one frame, and all keys and values [B, S, H, …].

    Returns:
        (out [B, b, H, E], lse [B, H, b]).
    """
    row = row_options(options)
    tiling = tiling_of(grid, row, query_frames=1)
    chosen = chosen_tiles(query, key, tiling, row, scale=scale)
    return two_resolution_attention_reference(query, key, value, tiling, chosen, rest=True, scale=scale)


def monarch_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: BlockLayout,
    options: VMonarchOptions,
    *,
    scale: float,
    entropy_grad: bool,
    key_mask: torch.Tensor | None = None,
    key_frames: tuple[tuple[int, ...], ...] | None = None,
    grid: LatentGrid | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Monarch attention over the blocks of `layout` (MonarchAttention, Fig. 7; VMonarch, Fig. 6).

    Args:
        query, key: [B, S, H, D]. value: [B, S, H, E].
        key_mask: [B, S], true where a key may be attended.
        key_frames: E(l) for every frame l, rounded outward to whole key blocks; None for no exact block.
        grid: of the tokens; None where they are no video.

    Returns:
        (out [B, S, H, E] in the dtype of `query`, lse [B, H, S]).
    """
    B, S, H, _ = query.shape
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    q = layout.to_blocks(query.to(compute_dtype) * scale)  # [B, H, m, b, D]
    k = layout.to_blocks(key.to(compute_dtype))
    v = layout.to_blocks(value.to(compute_dtype))

    key_bias = None
    if layout.valid is not None or key_mask is not None:
        mask = key.new_ones(1, S, dtype=torch.bool) if key_mask is None else key_mask
        present = layout.to_blocks(mask[..., None, None]).squeeze(-1)  # [B or 1, 1, m, b]
        key_bias = torch.zeros_like(present, dtype=compute_dtype).masked_fill(~present, -torch.inf)
    coarse_key, coarse_bias = layout.pool(k) if layout.cell is not None else (k, key_bias)

    exact_table = out_exact = lse_exact = None
    if key_frames is not None and any(key_frames):
        assert layout.frame is not None
        exact_table = exact_blocks(key_frames, layout.frame)
        rows = options.pattern.rows if options.pattern is not None and options.row_share < 1 else ()
        fine = tuple(() if l in rows else frames for l, frames in enumerate(key_frames))
        out_exact, lse_exact = exact_part(to_groups(query) * scale, to_groups(key), to_groups(value), fine)
        out_exact, lse_exact = out_exact.unflatten(0, (B, H)).transpose(1, 2), lse_exact.unflatten(0, (B, H))
        for l in rows:
            assert grid is not None
            of_frame = query.unflatten(1, (grid.frames, -1))[:, l]
            out_l, lse_l = exact_row(of_frame, key, value, grid, options, scale=scale)
            out_exact, lse_exact = _with_frame(out_exact, out_l, l, 1), _with_frame(lse_exact, lse_l, l, 2)
        out_exact = position_major(layout.to_blocks(out_exact))
        lse_exact = position_major(layout.to_blocks(lse_exact.transpose(1, 2).unsqueeze(-1))).squeeze(-1)

    q_positions = position_major(q)  # [B·H, b, m, D]
    query_valid = None if layout.valid is None else layout.valid.T

    # Whether all L-steps know of the exact blocks, or only the last.
    aware = options.pattern is not None and options.pattern.aware
    z = q  # L starts as the identity, so every centroid is the block's own query
    for _ in range(options.num_iterations - 1):
        aL, cL, _ = r_step(z, coarse_key, coarse_bias, None, entropy_grad)
        aL, cL = position_major(aL), position_major(cL)
        z = centroids(
            q_positions,
            aL,
            cL,
            exact_table if aware else None,
            lse_exact if aware else None,
            query_valid,
            options,
        )
        z = z.unflatten(0, (B, H)).transpose(2, 3)

    last: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
    if options.r_share < 1:
        assert grid is not None
        last = r_step_in_two_resolutions(z, k, v, grid, options, entropy_grad)
    elif options.last_l_update:
        last = r_step(z, k, key_bias, v, entropy_grad)
    else:
        last = None, None, values_of(z, k, v)
    new_aL, new_cL, y = last
    assert y is not None
    if new_aL is not None and new_cL is not None:
        aL, cL = position_major(new_aL), position_major(new_cL)
    o, lse = output(q_positions, aL, cL, position_major(y), exact_table, lse_exact, out_exact)
    o = o.unflatten(0, (B, H)).transpose(2, 3)  # [B, H, m, b, E]
    lse = lse.unflatten(0, (B, H)).transpose(2, 3)  # [B, H, m, b]
    out = layout.to_tokens(o).transpose(1, 2).to(query.dtype).contiguous()
    return out, layout.to_tokens(lse)


def _with_frame(tokens: torch.Tensor, frame: torch.Tensor, l: int, dim: int) -> torch.Tensor:
    """`tokens` with those of frame l, along `dim`, in place of what is there."""
    size = frame.shape[dim]
    before, _, after = tokens.tensor_split((l * size, (l + 1) * size), dim)
    return torch.cat([before, frame.to(tokens.dtype), after], dim)


def position_major(blocks: torch.Tensor) -> torch.Tensor:
    """[B, H, m, b, …] -> [B·H, b, m, …]."""
    return blocks.transpose(2, 3).flatten(0, 1)
