"""Monarch attention in plain torch: the specification of the fused kernels, written stage by stage like the papers.

Symbols (VMonarch, Eq. 3-6): L[j,l,k] weight that the query in block l at position j gives to key
block k; R[k,j,i] distribution over the keys i of block k for position j; aL, cL, cR, z, y as in the papers, with
z = αR / cR kept as one well-scaled tensor, the centroid query of position j for key block k.

Shapes: B batch, S tokens, H heads, D head dim, E value dim, m blocks, b positions per block, c pooled cells per block.
Block tensors are [B, H, m, b, D]; in L-steps they lie by position, [G, m, D] with G = B·H·b.
"""

from __future__ import annotations

import torch

from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.blocks import BlockLayout
from vmonarch.kernels.flash_entropy import reference as softmax
from vmonarch.kernels.flash_entropy.reference import attend, in_row_chunks, softmax_parts, to_groups
from vmonarch.kernels.two_resolution.reference import two_resolution_attention_reference
from vmonarch.kernels.two_resolution.tiling import tiling_of
from vmonarch.options import VMonarchOptions, row_options


def r_step(
    z: torch.Tensor, key: torch.Tensor, key_bias: torch.Tensor | None, value: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Update R inside every key block: plain attention with query z, key K and values K and V (Eq. 3, 4).

    The entropy comes free because the key is a value: cL = Σ R log R = z·aL - lse
    (docs/attention.md, "The entropy"). No gradient flows through it: it would dominate that of the output.

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
    return aL, cL.detach(), y


def l_logits(
    query: torch.Tensor, aL: torch.Tensor, cL: torch.Tensor, exact: torch.Tensor | None, lse_exact: torch.Tensor | None
) -> torch.Tensor:
    """Z[j,l,k] = q[l,j]·aL[k,j] - cL[k,j], -inf in exact blocks, with the exact part as one more column.

    Args:
        query: [G, l, D] of one position. aL: [G, m, D]. cL: [G, m].
        exact: [l, m] or [G, l, m] true in exact blocks, or None.
        lse_exact: [G, l] log-weight of the exact part, -inf where there is none; or None.

    Returns:
        [G, l, m], or [G, l, m + 1] with `lse_exact`.
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

    Arguments as in `l_logits`; query_valid: [G, l], false where a place holds no query, which then counts for nothing.

    Returns:
        (aR [G, m, D], cR [G, m]).
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

    Arguments as in `l_logits`; y: [G, m, E]; out_exact: [G, l, E].

    Returns:
        (o [G, l, E], lse [G, l]: the log-partition of the row; docs/attention.md, "The log-partition").
    """
    m = aL.shape[-2]
    p, row_sum, lse = softmax_parts(l_logits(query, aL, cL, exact, lse_exact))
    o = p[..., :m] @ y
    if out_exact is not None:
        o = o + p[..., m:] * out_exact
    return o / row_sum, lse


def centroids(
    query: torch.Tensor,
    aL: torch.Tensor,
    cL: torch.Tensor,
    exact: torch.Tensor | None,
    lse_exact: torch.Tensor | None,
    query_valid: torch.Tensor | None,
    options: VMonarchOptions,
) -> torch.Tensor:
    """The centroid queries z = αR / max(cR, min_mass) [G, m, D], by `l_step`, which sums over the rows of a position.

    Arguments as there; of so many positions at a time that their logits stay within the chunk budget.
    """
    step = max(1, softmax.MAX_CHUNK_SCORES // (query.shape[1] * aL.shape[1]))
    z = []
    for first in range(0, len(query), step):
        chunk = slice(first, first + step)
        lse, valid = (None if x is None else x[chunk] for x in (lse_exact, query_valid))
        aR, cR = l_step(query[chunk], aL[chunk], cL[chunk], exact, lse, valid)
        # The clamp (VMonarch, §4.1) keeps blocks that nobody looks at from being divided by nearly nothing.
        z.append(aR / cR.clamp(min=max(options.min_mass, torch.finfo(cR.dtype).tiny)).unsqueeze(-1))
    return torch.cat(z)


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


def exact_parts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grid: LatentGrid,
    options: VMonarchOptions,
    *,
    scale: float,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The exact blocks [T, T], and `exact_part` with its exact rows in two resolutions; None where nothing is exact.

    Returns:
        (exact, out [B, S, H, E], lse [B, H, S]).
    """
    pattern = options.pattern
    key_frames = () if pattern is None else pattern.key_frames(grid.frames)
    if pattern is None or not any(key_frames):
        return None, None, None
    exact = [[k in attended for k in range(grid.frames)] for attended in key_frames]
    rows = pattern.rows if options.row_share < 1 else ()
    fine = tuple(() if l in rows else frames for l, frames in enumerate(key_frames))
    out, lse = exact_part(to_groups(query) * scale, to_groups(key), to_groups(value), fine)
    lead = query.shape[0], query.shape[2]
    out, lse = out.unflatten(0, lead).transpose(1, 2), lse.unflatten(0, lead)
    two = row_options(options)
    tiling = tiling_of(grid, two, query_frames=1)
    for l in rows:
        of_frame = query.unflatten(1, (grid.frames, -1))[:, l]
        out_l, lse_l = two_resolution_attention_reference(of_frame, key, value, tiling, two, scale=scale)
        out, lse = _with_frame(out, out_l, l, 1), _with_frame(lse, lse_l, l, 2)
    return torch.tensor(exact, device=query.device), out, lse


def monarch_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: BlockLayout,
    options: VMonarchOptions,
    *,
    scale: float,
    key_mask: torch.Tensor | None = None,
    grid: LatentGrid | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Monarch attention over the blocks of `layout` (MonarchAttention, Fig. 7; VMonarch, Fig. 6).

    Args:
        query, key: [B, S, H, D]. value: [B, S, H, E].
        key_mask: [B, S], true where a key may be attended.
        grid: of the tokens, whose frames are the blocks; None where they are no video, which has no exact block.

    Returns:
        (out [B, S, H, E] in the dtype of `query`, lse [B, H, S]).
    """
    B, S, H, _ = query.shape
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    q = layout.to_blocks(query.to(compute_dtype) * scale)  # [B, H, m, b, D]
    k = layout.to_blocks(key.to(compute_dtype))
    v = layout.to_blocks(value.to(compute_dtype))

    key_bias = None
    if not layout.consecutive or key_mask is not None:
        mask = key.new_ones(1, S, dtype=torch.bool) if key_mask is None else key_mask
        present = layout.to_blocks(mask[..., None, None]).squeeze(-1)  # [B or 1, 1, m, b]
        key_bias = torch.zeros_like(present, dtype=compute_dtype).masked_fill(~present, -torch.inf)
    coarse_key, coarse_bias = layout.pool(k) if layout.cell is not None else (k, key_bias)

    exact = out_exact = lse_exact = None
    if grid is not None:
        exact, out_exact, lse_exact = exact_parts(query, key, value, grid, options, scale=scale)
    if out_exact is not None and lse_exact is not None:
        out_exact = position_major(layout.to_blocks(out_exact))
        lse_exact = position_major(layout.to_blocks(lse_exact.transpose(1, 2).unsqueeze(-1))).squeeze(-1)
    # Whether all L-steps know of the exact blocks, or only the last.
    known = (exact, lse_exact) if options.pattern is not None and options.pattern.aware else (None, None)

    q_positions = position_major(q)
    query_valid = None if layout.consecutive else layout.valid.T.repeat(B * H, 1)
    z = q  # L starts as the identity, so every centroid is the block's own query
    for _ in range(options.num_iterations - 1):
        aL, cL, _ = r_step(z, coarse_key, coarse_bias, None)
        aL, cL = position_major(aL), position_major(cL)
        z = centroids(q_positions, aL, cL, *known, query_valid, options)
        z = z.unflatten(0, (B, H, -1)).transpose(2, 3)

    if options.last_l_update:
        aL, cL, y = r_step(z, k, key_bias, v)
        assert y is not None
        aL, cL = position_major(aL), position_major(cL)
    else:
        _, y = in_row_chunks(attend, z.flatten(0, 2), k.flatten(0, 2), None, v.flatten(0, 2))
        y = y.unflatten(0, z.shape[:3])
    exact = None if exact is None else exact.expand(len(aL), -1, -1)
    by_row = (exact, lse_exact, out_exact)
    o, lse = in_row_chunks(last_l_step, q_positions, aL, cL, position_major(y), by_row=by_row)
    o = o.unflatten(0, (B, H, -1)).transpose(2, 3)  # [B, H, m, b, E]
    lse = lse.unflatten(0, (B, H, -1)).transpose(2, 3)  # [B, H, m, b]
    out = layout.to_tokens(o).transpose(1, 2).to(query.dtype).contiguous()
    return out, layout.to_tokens(lse)


def _with_frame(tokens: torch.Tensor, frame: torch.Tensor, l: int, dim: int) -> torch.Tensor:
    """`tokens` with those of frame l, along `dim`, in place of what is there."""
    size = frame.shape[dim]
    before, _, after = tokens.tensor_split((l * size, (l + 1) * size), dim)
    return torch.cat([before, frame.to(tokens.dtype), after], dim)


def position_major(blocks: torch.Tensor) -> torch.Tensor:
    """[B, H, m, b, …] -> [B·H·b, m, …]."""
    return blocks.transpose(2, 3).flatten(0, 2)
