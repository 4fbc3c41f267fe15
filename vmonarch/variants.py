"""Attention variants for the ablation tables: the paper's other choices, and controls at equal work.

For tables of quality, not of speed: sums are at least in float32; kernels where there are any, the rest is plain torch.
Their work is what `eval.attention_flops` counts.

Shapes: B batch, S = T·P tokens, P = H·W positions of a frame, H heads, D head dim, E value dim, G = B·H groups, m
blocks, b positions per block. query, key, value and results are [B, S, H, D].
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from vmonarch.context_parallel import Share
from vmonarch.exact import ExactBlocks
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.checks import check_qkv
from vmonarch.kernels.flash_entropy.api import flash_entropy_attention
from vmonarch.kernels.monarch.api import vmonarch_attention
from vmonarch.kernels.monarch.blocks import BlockLayout, grid_layout
from vmonarch.kernels.monarch.reference import l_step, last_l_step, r_step
from vmonarch.options import VMonarchOptions
from vmonarch.validation import check_flag, check_positive_integer, resolve_scale
from vmonarch.video_processor import VideoAttentionProcessor

# Which frames a term is held at its initial value for; the paper's superscripts 0, 1 and * (Table 5).
FIXED = ("none", "first", "all")
# Axes of the grid, as the paper names them, and the order of tokens in which each comes first.
AXES = {"T": (0, 1, 2), "H": (1, 2, 0), "W": (2, 1, 0)}
# Numbers of keys that block-sparse attention gathers at a time, about.
_GATHERED = 2**26


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grid: object) -> LatentGrid:
    check_qkv(query, key, value, same_length=True)
    parsed = LatentGrid.parse(grid)
    if parsed.tokens != query.shape[1]:
        raise ValueError(f"grid {tuple(parsed)} has {parsed.tokens} tokens, but query has {query.shape[1]}")
    return parsed


def _exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax attention of any number of queries over any number of keys."""
    return flash_entropy_attention(query, key, value, scale=scale)[0]


def _recompute_first_frame(
    out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grid: LatentGrid, scale: float
) -> torch.Tensor:
    """`out` with the rows of the first frame answered exactly (VMonarch, Eq. 8)."""
    P = grid.tokens_per_frame
    return torch.cat([_exact(query[:, :P], key, value, scale), out[:, P:]], 1)


# --------------------------------------------------------------------------------------------------------------------
# The paper's variants


def check_controlled_options(*, fix_cr: object, fix_cl: object, recompute: object, **iteration: Any) -> None:
    """Check what does not depend on tensors; `iteration` holds what VMonarch attention has too.

    Raises:
        TypeError, ValueError: an option is not as `controlled_attention` describes; the message names it.
    """
    VMonarchOptions(**iteration)
    for name, fixed in (("fix_cr", fix_cr), ("fix_cl", fix_cl)):
        if fixed not in FIXED:
            raise ValueError(f"{name} must be one of {', '.join(FIXED)}, got {fixed!r}")
    check_flag("recompute", recompute)


def _hold(term: torch.Tensor, value: float, fixed: str) -> torch.Tensor:
    """`term` [B, H, m, b] with the frames that `fixed` names, along m, at `value`."""
    if fixed == "none":
        return term
    held = torch.full_like(term, value)
    return held if fixed == "all" else torch.cat([held[:, :, :1], term[:, :, 1:]], 2)


def controlled_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid: LatentGrid | tuple[int, int, int],
    num_iterations: int = 2,
    fix_cr: str = "none",
    fix_cl: str = "none",
    recompute: bool = False,
    min_mass: float = 0.1,
    scale: float | None = None,
) -> torch.Tensor:
    """VMonarch attention with cR or cL held at its initial value, for the first key frame or for all.

    cR starts at 1 (L is the identity). The "initial expected value log(M)" of cL is read as -log P: a row of R that has
    learnt nothing is uniform over the P keys of its frame, and cL = Σ R log R of such a row is -log P; the paper gives
    its size without the sign. With that sign a held first frame gains weight, as in the paper's table, where the
    variant with one iteration then has a better first frame.

    Args:
        num_iterations, min_mass, scale: as in `vmonarch_attention`.
        fix_cr: "none", "first" (frame) or "all"; after every L-step, so that with one iteration it changes nothing.
        fix_cl: the same of cL after every R-step.
        recompute: answer the rows of the first frame exactly.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.

    Source: VMonarch, App. J and Table 5.
    """
    check_controlled_options(
        fix_cr=fix_cr, fix_cl=fix_cl, recompute=recompute, num_iterations=num_iterations, min_mass=min_mass
    )
    grid = _check(query, key, value, grid)
    scale = resolve_scale(scale, query.shape[-1])
    layout = grid_layout(grid, frames_per_block=1, tiles=(1, 1), coarse=1, device=query.device)
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (layout.to_blocks(x.to(dtype)) for x in (query, key, value))  # [B, H, m, b, D]
    q = q * scale
    lead = q.shape[:2]
    by_position = lambda blocks: blocks.transpose(2, 3).flatten(0, 1)  # [B, H, m, b, …] -> [G, b, m, …]
    by_block = lambda positions: positions.unflatten(0, lead).transpose(2, 3)
    q_positions = by_position(q)
    z = q
    for _ in range(num_iterations - 1):
        aL, cL, _ = r_step(z, k, None, None, False)
        cL = _hold(cL, -math.log(layout.positions), fix_cl)
        aR, cR = (by_block(x) for x in l_step(q_positions, by_position(aL), by_position(cL), None, None, None))
        z = aR / _hold(cR, 1.0, fix_cr).clamp(min=max(min_mass, torch.finfo(dtype).tiny)).unsqueeze(-1)
    aL, cL, y = r_step(z, k, None, v, False)
    assert y is not None
    cL = _hold(cL, -math.log(layout.positions), fix_cl)
    o, _ = last_l_step(q_positions, by_position(aL), by_position(cL), by_position(y), None, None, None)
    out = layout.to_tokens(by_block(o)).transpose(1, 2).to(query.dtype).contiguous()
    return _recompute_first_frame(out, query, key, value, grid, scale) if recompute else out


def sink_average_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid: LatentGrid | tuple[int, int, int],
    num_iterations: int = 2,
    min_mass: float = 0.1,
    scale: float | None = None,
) -> torch.Tensor:
    """The mean of exact attention to the first frame's keys and of VMonarch attention without any exact row (‡).

    Args:
        num_iterations, min_mass, scale: as in `vmonarch_attention`.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.

    Source: VMonarch, §4.4 and Table 3.
    """
    grid = _check(query, key, value, grid)
    scale = resolve_scale(scale, query.shape[-1])
    P = grid.tokens_per_frame
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (x.to(dtype) for x in (query, key, value))
    rest = vmonarch_attention(
        q,
        k,
        v,
        grid=grid,
        num_iterations=num_iterations,
        exact=None,
        min_mass=min_mass,
        scale=scale,
    )
    return ((_exact(q, k[:, :P], v[:, :P], scale) + rest) / 2).to(query.dtype)


def check_factorised_options(*, axis: object, blocks: object, recompute: object, **iteration: Any) -> None:
    """Check what does not depend on tensors; `iteration` holds what VMonarch attention has too.

    Raises:
        TypeError, ValueError: an option is not as `factorised_attention` describes; the message names it.
    """
    if axis not in AXES:
        raise ValueError(f"axis must be one of {', '.join(AXES)}, got {axis!r}")
    check_positive_integer("blocks", blocks)
    VMonarchOptions(**iteration)
    check_flag("recompute", recompute)


def check_factorised_grid(grid: LatentGrid, axis: str, blocks: int) -> None:
    """Raise ValueError unless the axis is as long as it is to have blocks."""
    length = grid[AXES[axis][0]]
    if blocks > length:
        raise ValueError(f"blocks must not exceed the axis {axis}, which is {length} long, got {blocks}")


def factorised_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid: LatentGrid | tuple[int, int, int],
    axis: str,
    blocks: int = 4,
    num_iterations: int = 2,
    recompute: bool = True,
    min_mass: float = 0.1,
    scale: float | None = None,
) -> torch.Tensor:
    """Monarch attention with `blocks` blocks along one axis: the paper's (4, HWT/4), (4, WHT/4) and (4, THW/4).

    Tokens are put in the order in which that axis comes first, cut there into blocks whose lengths along it differ by
    at most one (places that are left over are masked), and put back afterwards.

    Args:
        axis: "T", "H" or "W".
        blocks: m.
        num_iterations, min_mass, scale: as in `vmonarch_attention`.
        recompute: answer the rows of the first frame exactly, as the default method does.

    Raises:
        TypeError, ValueError: an argument is not as described, or more blocks than the axis is long; the message
            names it.

    Source: VMonarch, App. K and Fig. 12.
    """
    check_factorised_options(
        axis=axis, blocks=blocks, recompute=recompute, num_iterations=num_iterations, min_mass=min_mass
    )
    grid = _check(query, key, value, grid)
    check_factorised_grid(grid, axis, blocks)
    order = AXES[axis]
    length = grid[order[0]]
    scale = resolve_scale(scale, query.shape[-1])
    # One frame of `length` rows, cut into tiles: the layout of tiles masks what does not divide.
    tokens = torch.arange(grid.tokens, device=query.device).view(grid).permute(order).flatten()
    out = vmonarch_attention(
        *(x.index_select(1, tokens) for x in (query, key, value)),
        grid=(1, length, grid.tokens // length),
        tiles=(blocks, 1),
        exact=None,
        num_iterations=num_iterations,
        min_mass=min_mass,
        scale=scale,
    )
    out = out.index_select(1, torch.argsort(tokens))
    return _recompute_first_frame(out, query, key, value, grid, scale) if recompute else out


# --------------------------------------------------------------------------------------------------------------------
# Controls at equal work


def local_key_frames(pattern: ExactBlocks, frames: int) -> tuple[tuple[int, ...], ...]:
    """The key frames of every query frame.

    Raises:
        ValueError: a query frame has none, or the pattern names a frame that is not there.
    """
    key_frames = pattern.key_frames(frames)
    empty = [l for l, attended in enumerate(key_frames) if not attended]
    if empty:
        raise ValueError(f"exact must leave every frame some keys; frame {empty[0]} has none with {pattern}")
    return key_frames


def local_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid: LatentGrid | tuple[int, int, int],
    exact: ExactBlocks,
    scale: float | None = None,
) -> torch.Tensor:
    """The exact blocks of a pattern and nothing else: softmax over those keys, all others dropped.

    Args:
        exact: rows, columns and band of frames; `aware` means nothing here.

    Raises:
        TypeError, ValueError: an argument is not as described, or a query frame has no key; the message names it.
    """
    grid = _check(query, key, value, grid)
    scale = resolve_scale(scale, query.shape[-1])
    frames = lambda x: x.unflatten(1, (grid.frames, -1))
    parts = []
    for l, attended in enumerate(local_key_frames(exact, grid.frames)):
        keys, values = (frames(x)[:, list(attended)].flatten(1, 2) for x in (key, value))
        parts.append(_exact(frames(query)[:, l], keys, values, scale))
    return torch.cat(parts, 1)


def check_topk_options(*, sparsity: object, cube: object) -> None:
    """Check what does not depend on tensors.

    Raises:
        TypeError, ValueError: an option is not as `block_topk_attention` describes; the message names it.
    """
    if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)):
        raise TypeError(f"sparsity must be a number, got {sparsity!r}")
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must be at least 0 and below 1, got {sparsity}")
    LatentGrid.parse(cube, argument="cube")


def _cubes(grid: LatentGrid, cube: tuple[int, int, int], device: torch.device) -> BlockLayout:
    """Blocks of at most `cube` tokens; rows and columns are cut evenly, the last cube along time may be short."""
    tiles = (-(-grid.height // cube[1]), -(-grid.width // cube[2]))
    return grid_layout(grid, frames_per_block=min(cube[0], grid.frames), tiles=tiles, coarse=1, device=device)


def _in_cubes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grid: object,
    cube: tuple[int, int, int],
) -> tuple[BlockLayout, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Layout, query, key and value [G, m, b, D], and which of their places [m, b] are tokens."""
    parsed = _check(query, key, value, grid)
    layout = _cubes(parsed, cube, query.device)
    q, k, v = (layout.to_blocks(x).flatten(0, 1) for x in (query, key, value))
    valid = layout.valid
    if valid is None:
        valid = torch.ones(layout.blocks, layout.positions, dtype=torch.bool, device=query.device)
    return layout, q, k, v, valid


def _out_of_cubes(layout: BlockLayout, out: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """[G, m, b, E] -> [B, S, H, E], contiguous, in the dtype of the query."""
    blocks = out.unflatten(0, (query.shape[0], query.shape[2]))  # [B, H, m, b, E]
    return layout.to_tokens(blocks).transpose(1, 2).to(query.dtype).contiguous()


def _means(x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Mean tokens [G, m, D] of the blocks [G, m, b, D], at least in float32."""
    return x.sum(2, dtype=torch.promote_types(x.dtype, torch.float32)) / valid.sum(1)[:, None]


def _picked(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """x[g, places[g]] of x [G, N, …] and places [G, l, n]: [G, l, n, …]."""
    first = x.shape[1] * torch.arange(x.shape[0], device=x.device)[:, None, None]
    # With one index whole rows are copied.
    return x.flatten(0, 1)[first + places]


def kept_blocks(blocks: int, sparsity: float) -> int:
    """How many of `blocks` key blocks a query block keeps: the share 1 - sparsity, rounded up."""
    return max(1, math.ceil((1 - sparsity) * blocks - 1e-9))


def block_topk_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid: LatentGrid | tuple[int, int, int],
    sparsity: float = 0.9,
    cube: tuple[int, int, int] = (4, 4, 4),
    scale: float | None = None,
) -> torch.Tensor:
    """Block-sparse attention: every cube of queries attends exactly to the key cubes of the highest mean score.

    Scores are products of mean query and mean key of the cubes, per head, as in VSA without its trained coarse branch.

    Args:
        sparsity: share of key cubes that is dropped; `kept_blocks` says how many stay.
        cube: the most (frames, rows, columns) of tokens that a block may have.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.

    Source: Zhang et al., VSA: Faster Video Diffusion with Trainable Sparse Attention (2025), §3.
    """
    check_topk_options(sparsity=sparsity, cube=cube)
    layout, q, k, v, valid = _in_cubes(query, key, value, grid, cube)
    m = layout.blocks
    scores = _means(q, valid) @ _means(k, valid).mT  # [G, m, m]
    chosen = scores.topk(kept_blocks(m, sparsity), -1).indices  # [G, m, n]
    rows = []
    step = max(1, _GATHERED // (chosen.shape[2] * k[:, 0].numel()))
    for l in range(0, m, step):
        picked = chosen[:, l : l + step]  # [G, l, n]
        keys, values = (_picked(x, picked).flatten(2, 3) for x in (k, v))  # [G, l, n·b, D]
        present = valid[picked].flatten(2).unsqueeze(2)  # [G, l, 1, n·b]
        rows.append(F.scaled_dot_product_attention(q[:, l : l + step], keys, values, attn_mask=present, scale=scale))
    return _out_of_cubes(layout, torch.cat(rows, 1), query)


def check_two_resolution_options(*, share: object, beta: object, tile: object) -> None:
    """Check what does not depend on tensors.

    Raises:
        TypeError, ValueError: an option is not as `two_resolution_attention` describes; the message names it.
    """
    if (share is None) == (beta is None):
        raise ValueError(f"share must be null where beta is given, and only there, got share={share} and beta={beta}")
    for name, option in (("share", share), ("beta", beta)):
        if option is not None and (isinstance(option, bool) or not isinstance(option, (int, float))):
            raise TypeError(f"{name} must be a number or null, got {option!r}")
    if isinstance(share, (int, float)) and not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    if isinstance(beta, (int, float)) and not math.isfinite(beta):
        raise ValueError(f"beta must be finite, got {beta}")
    if not isinstance(tile, (tuple, list)) or len(tile) != 2:
        raise TypeError(f"tile must be a pair (rows, columns) of positive integers, got {tile!r}")
    check_positive_integer("tile[0]", tile[0])
    check_positive_integer("tile[1]", tile[1])


def two_resolution_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid: LatentGrid | tuple[int, int, int],
    share: float | None = 0.1,
    beta: float | None = None,
    tile: tuple[int, int] = (4, 4),
    scale: float | None = None,
) -> torch.Tensor:
    """Block-sparse attention in which every key tile that is dropped leaves its mean key and value.

    Every tile of queries attends, in one softmax, exactly to the keys of its key tiles of the highest score and to the
    mean key and value of each other tile, whose logit gains the log of its tokens. Scores are products of mean query
    and mean key of the tiles, per head.

    With `share` the work is the same for all data: exact products for the chosen tiles, one product per query for each
    other tile, and the scores. With `beta` it depends on the data, so `eval.attention_flops` does not tell it.

    What differs from Sol-Attn: its blocks are 64 consecutive tokens, and it always keeps a query block's own block and
    the two beside it exact. Here only the score decides; a query tile whose scores all lie within the threshold has no
    exact key.

    Args:
        share: of all key tiles, those that are exact, rounded up; None where `beta` is given.
        beta: a key tile is exact where its score exceeds μ + beta·σ, mean and standard deviation of the scores of that
            query tile over all key tiles (Sol-Attn's form); None where `share` is given.
        tile: at most this many (rows, columns) of a frame's tokens in a tile.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.

    Source: Li et al., Sol-Attn: Accelerating Video Generation Inference via On-the-Fly Attention Sparsification (2026,
    arXiv:2607.24027).
    """
    check_two_resolution_options(share=share, beta=beta, tile=tile)
    layout, q, k, v, valid = _in_cubes(query, key, value, grid, (1, *tile))
    m, b = layout.blocks, layout.positions
    k_mean, v_mean = _means(k, valid), _means(v, valid)  # [G, m, D]
    scores = _means(q, valid) @ k_mean.mT  # [G, m, m]
    ranking = scores.argsort(-1, descending=True)
    # The first `exact` [G, m, 1] tiles of a ranking are exact: at least `fewest` of them, at most `most`.
    if beta is None:
        assert share is not None
        fewest = most = kept_blocks(m, 1 - share)
        exact = torch.full_like(ranking[..., :1], most)
    else:
        std, mean = torch.std_mean(scores, -1, correction=0, keepdim=True)
        exact = (scores > mean + beta * std).sum(-1, keepdim=True)
        fewest, most = int(exact.min()), int(exact.max())
    # Keys in both resolutions, one after the other, and the logs of the tokens that each stands for.
    keys, values = (torch.cat([x.flatten(1, 2), mean.to(x.dtype)], 1) for x, mean in ((k, k_mean), (v, v_mean)))
    log_count = torch.cat([valid.flatten(), valid.sum(1)]).to(q.dtype).log()  # [m·b + m]
    rank = torch.arange(m, device=query.device)
    place = torch.arange(b, device=query.device)
    rows = []
    step = max(1, _GATHERED // (q.shape[0] * (most * b + m - fewest) * q.shape[-1]))
    for l in range(0, m, step):
        tiles = ranking[:, l : l + step]  # [G, l, m]
        fine = (tiles[..., :most, None] * b + place).flatten(2)  # [G, l, most·b]
        chosen = torch.cat([fine, m * b + tiles[..., fewest:]], -1)  # [G, l, n]
        is_exact = rank < exact[:, l : l + step]  # [G, l, m]
        attended = torch.cat([is_exact[..., :most].repeat_interleave(b, -1), ~is_exact[..., fewest:]], -1)
        bias = log_count[chosen].masked_fill(~attended, -torch.inf).unsqueeze(2)  # [G, l, 1, n]
        rows.append(
            F.scaled_dot_product_attention(
                q[:, l : l + step], _picked(keys, chosen), _picked(values, chosen), attn_mask=bias, scale=scale
            )
        )
    return _out_of_cubes(layout, torch.cat(rows, 1), query)


def no_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, grid: LatentGrid | tuple[int, int, int]
) -> torch.Tensor:
    """Zeros. With `refresh` the residual is all of exact attention: its output is reused from step to step."""
    _check(query, key, value, grid)
    return query.new_zeros(*query.shape[:3], value.shape[3])


# --------------------------------------------------------------------------------------------------------------------
# On a model

VARIANTS = {
    "controlled": controlled_attention,
    "sink_average": sink_average_attention,
    "factorised": factorised_attention,
    "local": local_attention,
    "block_topk": block_topk_attention,
    "two_resolution": two_resolution_attention,
    "none": no_attention,
}


class VariantProcessor(VideoAttentionProcessor):
    """One of `VARIANTS` for every Wan-family transformer in diffusers.

    Args:
        variant: its name.
        options: keyword arguments of that function, without grid and scale.
        dense_steps, dense_layers, refresh, grid: as in `VMonarchProcessor`.

    Raises:
        TypeError, ValueError: an option has an unsupported value.
    """

    _OPTIONS = ("variant", "options", "dense_steps", "dense_layers", "refresh", "grid")

    def __init__(
        self,
        variant: str,
        options: dict[str, Any],
        *,
        dense_steps: object = 0,
        dense_layers: object = 0,
        refresh: object = None,
        grid: object = None,
    ) -> None:
        super().__init__(dense_steps=dense_steps, dense_layers=dense_layers, refresh=refresh, grid=grid)
        if variant not in VARIANTS:
            raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}")
        self.variant = variant
        self.options = dict(options)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        grid: LatentGrid,
        heads: Share | None = None,
    ) -> torch.Tensor:
        return VARIANTS[self.variant](query, key, value, grid=grid, **self.options)  # type: ignore[operator]
