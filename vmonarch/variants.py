"""Attention variants for the ablation tables: the paper's other choices, and controls at equal work.

For tables of quality, not of speed: sums are at least in float32; kernels where there are any, the rest is plain torch.
Their work is what `eval.attention_flops` counts.

Shapes: B batch, S = T·P tokens, P = H·W positions of a frame, H heads, D head dim, E value dim, G = B·H groups, m
blocks, b positions per block. query, key, value and results are [B, S, H, D].
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from vmonarch.context_parallel import Share
from vmonarch.exact import ExactBlocks
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.checks import check_qkv
from vmonarch.kernels.flash_entropy.api import flash_entropy_attention
from vmonarch.kernels.monarch.api import vmonarch_attention
from vmonarch.kernels.monarch.blocks import grid_layout
from vmonarch.kernels.monarch.reference import l_step, last_l_step, r_step
from vmonarch.options import VMonarchOptions
from vmonarch.validation import check_flag, check_positive_integer, resolve_scale
from vmonarch.video_processor import VideoAttentionProcessor

# Which frames a term is held at its initial value for; the paper's superscripts 0, 1 and * (Table 5).
FIXED = ("none", "first", "all")
# Axes of the grid, as the paper names them, and the order of tokens in which each comes first.
AXES = {"T": (0, 1, 2), "H": (1, 2, 0), "W": (2, 1, 0)}


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


def no_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, grid: LatentGrid | tuple[int, int, int]
) -> torch.Tensor:
    """Zeros. With `refresh` the residual is all of exact attention: its output is reused from step to step."""
    _check(query, key, value, grid)
    return query.new_zeros(*query.shape[:3], value.shape[3])


# --------------------------------------------------------------------------------------------------------------------
# On a model

VARIANTS: dict[str, Callable[..., torch.Tensor]] = {
    "controlled": controlled_attention,
    "sink_average": sink_average_attention,
    "factorised": factorised_attention,
    "local": local_attention,
    "none": no_attention,
}


class VariantProcessor(VideoAttentionProcessor):
    """One of `VARIANTS` for the video transformers of diffusers.

    Args:
        control: its name.
        dense_steps, dense_layers, refresh, grid: as in `VMonarchProcessor`.
        **options: keyword arguments of that function, without grid and scale.

    Raises:
        TypeError, ValueError: an option has an unsupported value.
    """

    _OPTIONS = ("control", "options", "dense_steps", "dense_layers", "refresh", "grid")

    def __init__(
        self,
        control: str,
        *,
        dense_steps: object = 0,
        dense_layers: object = 0,
        refresh: object = None,
        grid: object = None,
        **options: Any,
    ) -> None:
        super().__init__(dense_steps=dense_steps, dense_layers=dense_layers, refresh=refresh, grid=grid)
        if control not in VARIANTS:
            raise ValueError(f"control must be one of {', '.join(VARIANTS)}, got {control!r}")
        self.control = control
        known = inspect.signature(VARIANTS[control]).parameters
        defaults = {name: entry.default for name, entry in known.items() if entry.kind is entry.KEYWORD_ONLY}
        self.options = {name: value for name, value in defaults.items() if name not in ("grid", "scale")}
        for name in options:
            if name not in self.options:
                raise TypeError(f"{name} is no known key; known: {', '.join(self.options)}")
        self.options |= options
        if control == "local":
            self.options["exact"] = _local_pattern(self.options["exact"])
        elif control != "none":
            checks: dict[str, Callable[..., Any]] = {
                "controlled": check_controlled_options,
                "sink_average": VMonarchOptions,
                "factorised": check_factorised_options,
            }
            checks[control](**self.options)

    def check_grid(self, grid: LatentGrid) -> None:
        if self.control == "factorised":
            check_factorised_grid(grid, self.options["axis"], self.options["blocks"])
        if self.control == "local":
            local_key_frames(self.options["exact"], grid.frames)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        grid: LatentGrid,
        heads: Share | None = None,
    ) -> torch.Tensor:
        return VARIANTS[self.control](query, key, value, grid=grid, **self.options)


def _local_pattern(exact: Any) -> ExactBlocks:
    if not isinstance(exact, (ExactBlocks, Mapping)):
        raise TypeError(f"exact must be a mapping with rows, columns or band, got {exact!r}")
    pattern = ExactBlocks.of(exact) if isinstance(exact, Mapping) else exact
    if pattern.band is None and not pattern.columns:
        raise ValueError(f"exact must have a band or columns, or frames have no keys; got {exact}")
    return pattern
