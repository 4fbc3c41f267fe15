"""Attention in two resolutions in plain torch: the specification of the kernels.

Shapes: B batch, S tokens, H heads, D head dim, E value dim, G = B·H groups; m tiles of keys of b places, n
tiles of queries of a places.
"""

from __future__ import annotations

import torch

from vmonarch.kernels.common.blocks import BlockLayout
from vmonarch.kernels.flash_entropy.reference import recomputed, softmax_parts, to_groups
from vmonarch.kernels.two_resolution.tiling import Tiling, exact_tiles, tile_layout
from vmonarch.options import TwoResolutionOptions

# Keys and values that one chunk of query tiles may gather, in elements.
MAX_CHUNK_ELEMENTS = 2**26


def tile_means(
    tokens: torch.Tensor, layout: BlockLayout, key_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of the tokens of every tile, in at least float32.

    Args:
        tokens: [B, S, H, D].
        key_mask: [B, S], true where a token counts; None for all of them.

    Returns:
        (means [B, H, m, D], zero where no token counts; number of tokens that count [B or 1, m]).
    """
    (B, S, H, D), m = tokens.shape, layout.blocks
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    tile = layout.place // layout.positions  # [S]
    counts = tokens.new_ones(1, S, dtype=dtype) if key_mask is None else key_mask.to(dtype)
    number = counts.new_zeros(counts.shape[0], m).index_add(1, tile, counts)
    sums = tokens.new_zeros(B, m, H, D, dtype=dtype).index_add(1, tile, tokens * counts[..., None, None])
    return (sums / number.clamp(min=1)[..., None, None]).transpose(1, 2), number


def best_of(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Whether each score [..., m] is among the `count` largest of its row."""
    best = scores.topk(count, -1, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)


def chosen_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    tiling: Tiling,
    share: float,
    *,
    scale: float,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The exact tiles by the products of mean queries and keys, in the order of logits; `scale` says which that is.

    Returns:
        bool [B, H, n, m], true where tile of keys k is exact for tile of queries l.
    """
    q_mean, _ = tile_means(query, tile_layout(tiling.of_queries, query.device))
    k_mean, _ = tile_means(key, tile_layout(tiling, key.device), key_mask)
    scores = (-q_mean if scale < 0 else q_mean) @ k_mean.mT
    return best_of(scores.detach(), exact_tiles(tiling, share))


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query tiles [G, l, a, D], scaled, attend to the keys `chosen` [G, l, i] of [G, N, D], whose logits gain `bias`.

    Returns:
        (out [G, l, a, E], lse [G, l, a]).
    """
    scores = query @ _picked(key, chosen).mT + bias.unsqueeze(2)
    p, row_sum, lse = softmax_parts(scores)
    return p @ _picked(value, chosen) / row_sum, lse


def _picked(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """x[g, places[g]] of x [G, N, …] and places [G, l, i]: [G, l, i, …]."""
    first = x.shape[1] * torch.arange(x.shape[0], device=x.device)[:, None, None]
    # With one index whole rows are copied.
    return x.flatten(0, 1)[first + places]


def two_resolution_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiling: Tiling,
    options: TwoResolutionOptions,
    *,
    selection: torch.Tensor | None = None,
    scale: float,
    key_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, S, H, E] in the dtype of `query`, lse [B, H, S]); arguments as in `two_resolution_attention`.

    With fewer `query_frames` in `tiling`, S are the tokens of so many frames.
    """
    B, N, H, _ = key.shape
    rest, exact = options.rest, selection
    if exact is None:
        exact = chosen_tiles(query, key, tiling, options.share, scale=scale, key_mask=key_mask)
    m = tiling.tiles
    of_keys, of_queries = (tile_layout(cut, query.device) for cut in (tiling, tiling.of_queries))
    n, b = of_queries.blocks, of_keys.positions
    q = to_groups(query) * scale
    # What a tile may attend to: tokens, then means; and what its logit gains, the log of the tokens that it stands for.
    k, v = to_groups(key), to_groups(value)
    present = query.new_ones(1, N, dtype=torch.bool) if key_mask is None else key_mask
    gain = torch.where(present, 0.0, -torch.inf).to(q.dtype)  # [B or 1, N]
    if rest:
        (k_mean, number), (v_mean, _) = (tile_means(x, of_keys, key_mask) for x in (key, value))
        k, v = (torch.cat([x, mean.flatten(0, 1)], 1) for x, mean in ((k, k_mean), (v, v_mean)))
        gain = torch.cat([gain, number.to(q.dtype).log()], 1)
    gain = gain.expand(B, -1).repeat_interleave(H, 0)  # [G, N + m]

    exact = exact.expand(B, H, n, m).flatten(0, 1)
    # Exact tiles come first in a ranking: `fewest` of them at least, `most` at most.
    number_exact = exact.sum(-1, keepdim=True)  # [G, n, 1]
    fewest = most = exact_tiles(tiling, options.share)
    if selection is not None:
        # A softmax needs a column, which nobody attends to where no tile is exact.
        fewest, most = int(number_exact.min()), max(1, int(number_exact.max()))
    ranking = exact.to(torch.uint8).argsort(stable=True, dim=-1, descending=True)
    rank = torch.arange(m, device=query.device)

    outs, lses = [], []
    q_tiles = q[:, of_queries.index.flatten()].unflatten(1, (n, -1))
    reach = most * b + (m - fewest) * rest
    step = max(1, MAX_CHUNK_ELEMENTS // max(1, q.shape[0] * reach * (k.shape[2] + v.shape[2])))
    for l in range(0, n, step):
        tiles = ranking[:, l : l + step]  # [G, l, m]
        is_exact = rank < (most if fewest == most else number_exact[:, l : l + step])  # [G or 1, l or 1, m]
        is_exact = is_exact.expand(tiles.shape)
        fine = of_keys.index[tiles[..., :most]]  # [G, l, most, b]
        allowed = [(of_keys.valid[tiles[..., :most]] & is_exact[..., :most, None]).flatten(2)]
        chosen = [fine.flatten(2)]
        if rest:
            chosen.append(N + tiles[..., fewest:])
            allowed.append(~is_exact[..., fewest:])
        index = torch.cat(chosen, -1)  # [G, l, i]
        bias = torch.where(torch.cat(allowed, -1), _picked(gain, index), -torch.inf)
        out, lse = recomputed(_attend, q_tiles[:, l : l + step], k, v, index, bias)
        outs.append(out)
        lses.append(lse)
    out, lse = (torch.cat(parts, 1).flatten(1, 2)[:, of_queries.place] for parts in (outs, lses))
    return out.unflatten(0, (B, H)).transpose(1, 2).to(query.dtype).contiguous(), lse.unflatten(0, (B, H))
