"""Front doors of Monarch and VMonarch attention."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Literal, overload

import torch

from vmonarch.exact import ExactBlocks, resolve_exact
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.launch import use_triton
from vmonarch.kernels.flash_bias.factors import extended
from vmonarch.kernels.monarch.blocks import blocks_of_frames, exact_key_frames, grid_layout, sequence_layout
from vmonarch.kernels.monarch.reference import monarch_attention_reference
from vmonarch.precision import own_precision
from vmonarch.validation import (
    check_factors,
    check_flag,
    check_implementation,
    check_key_mask,
    check_positive_integer,
    check_qkv,
    resolve_scale,
)

PADDINGS = ("post", "pre")


def _check_min_mass(min_mass: object) -> None:
    if isinstance(min_mass, bool) or not isinstance(min_mass, numbers.Real):
        raise TypeError(f"min_mass must be a number, got {min_mass!r}")
    if not math.isfinite(min_mass) or min_mass < 0:
        raise ValueError(f"min_mass must be finite and at least 0, got {min_mass}")


def check_vmonarch_options(
    *,
    num_iterations: object = 2,
    frames_per_block: object = 1,
    tiles: object = (1, 1),
    coarse: object = 1,
    exact: object = "first_frame",
    min_mass: object = 0.1,
    entropy_grad: object = False,
    implementation: str = "auto",
) -> None:
    """Check everything about a `vmonarch_attention` call that does not depend on its tensors.

    Raises:
        TypeError, ValueError: an option is not as `vmonarch_attention` describes; the message names it.
    """
    check_positive_integer("num_iterations", num_iterations)
    check_positive_integer("frames_per_block", frames_per_block)
    if not isinstance(tiles, (tuple, list)) or len(tiles) != 2:
        raise TypeError(f"tiles must be a pair (vertical, horizontal) of positive integers, got {tiles!r}")
    check_positive_integer("tiles[0]", tiles[0])
    check_positive_integer("tiles[1]", tiles[1])
    check_positive_integer("coarse", coarse)
    if coarse != 1 and num_iterations == 1:
        raise ValueError("coarse pools the keys of all iterations but the last; with num_iterations=1 it must be 1")
    resolve_exact(exact)
    _check_min_mass(min_mass)
    check_flag("entropy_grad", entropy_grad)
    check_implementation(implementation)


def check_tiles(tiles: Sequence[int], grid: LatentGrid) -> None:
    """Raise ValueError unless every one of the `tiles` of a frame has tokens."""
    if tiles[0] > grid.height or tiles[1] > grid.width:
        raise ValueError(f"tiles {tuple(tiles)} must not exceed the rows and columns of a frame, {tuple(grid[1:])}")


@overload
def vmonarch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid: LatentGrid | tuple[int, int, int],
    num_iterations: int = ...,
    frames_per_block: int = ...,
    tiles: tuple[int, int] = ...,
    coarse: int = ...,
    exact: str | ExactBlocks | None = ...,
    min_mass: float = ...,
    bias: tuple[torch.Tensor, torch.Tensor] | None = ...,
    scale: float | None = ...,
    entropy_grad: bool = ...,
    return_lse: Literal[False] = ...,
    implementation: str = ...,
) -> torch.Tensor: ...
@overload
def vmonarch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid: LatentGrid | tuple[int, int, int],
    num_iterations: int = ...,
    frames_per_block: int = ...,
    tiles: tuple[int, int] = ...,
    coarse: int = ...,
    exact: str | ExactBlocks | None = ...,
    min_mass: float = ...,
    bias: tuple[torch.Tensor, torch.Tensor] | None = ...,
    scale: float | None = ...,
    entropy_grad: bool = ...,
    return_lse: Literal[True],
    implementation: str = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@own_precision
def vmonarch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid: LatentGrid | tuple[int, int, int],
    num_iterations: int = 2,
    frames_per_block: int = 1,
    tiles: tuple[int, int] = (1, 1),
    coarse: int = 1,
    exact: str | ExactBlocks | None = "first_frame",
    min_mass: float = 0.1,
    bias: tuple[torch.Tensor, torch.Tensor] | None = None,
    scale: float | None = None,
    entropy_grad: bool = False,
    return_lse: bool = False,
    implementation: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Video Monarch attention: m = T frames by b = H·W positions, in place of the N×N attention map.

    Any T, H and W will do, primes too. No tensor of size N×N is ever built.

    Args:
        query: [B, S, H, D], S = T·H·W tokens ordered by frame, row, column.
        key: [B, S, H, D].
        value: [B, S, H, Dv].
        grid: (T, H, W) of the tokens.
        num_iterations: steps of alternating maximisation (the paper's t, 2 by default).
        frames_per_block: latent frames per Monarch block (the paper's "F"; a short last block is masked).
        tiles: cut every frame into this many (vertical, horizontal) tiles, each a block of its own. Less work in the
            R-steps; sizes that do not divide are masked.
        coarse: average the keys over coarse × coarse cells in all R-steps but the last, which only prepare centroids.
        exact: None; "first_frame", the paper's recomputation (the L-steps do not know of it); or an `ExactBlocks`
            pattern. With frames_per_block > 1, exact key frames are rounded outward to whole blocks.
        min_mass: lower bound of cR where it divides (0.1 in the paper; 0 only keeps empty columns finite).
        bias: (φq [B or 1, S, H or 1, R], φk [B or 1, S, H or 1, R]), whose product φq·φk is added to every logit, in
            exact rows too; see `flash_bias_attention`. They make heads wider: D + R dimensions, or up to D + 6·R for
            float32 factors among 16-bit tensors.
        scale: softmax scale; 1/√D if None.
        entropy_grad: whether gradients flow through the entropy cL (stopped by default, as in the paper).
        return_lse: also return the log-partition of every row. For a Monarch row it equals
            lse_true - KL(Monarch row ‖ softmax row); for a row answered exactly it is lse_true.
        implementation: "torch"; "triton", the fused kernels (CUDA; float16, bfloat16 or float32; head dimensions up to
            256); or "auto", see `kernels.common.launch.use_triton`.

    Returns:
        out [B, S, H, Dv] in the dtype of `query`; with `return_lse` also lse [B, H, S] in nats, in float32, or float64
        for float64 inputs.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        NotImplementedError: implementation="triton", and the kernels cannot take these tensors; the message says why.

    Source: VMonarch, Eq. 3-8 and §4.1; docs/attention.md, "The mathematics".
    """
    check_qkv(query, key, value, same_length=True)
    grid = LatentGrid.parse(grid)
    check_vmonarch_options(
        num_iterations=num_iterations,
        frames_per_block=frames_per_block,
        tiles=tiles,
        coarse=coarse,
        exact=exact,
        min_mass=min_mass,
        entropy_grad=entropy_grad,
        implementation=implementation,
    )
    check_flag("return_lse", return_lse)
    if grid.tokens != query.shape[1]:
        raise ValueError(
            f"grid {tuple(grid)} has {grid.tokens} tokens, but query has {query.shape[1]};"
            " frames × height × width must equal the sequence length"
        )
    check_tiles(tiles, grid)

    T = grid.frames
    frames_per_block = min(frames_per_block, T)
    tiles = (tiles[0], tiles[1])
    pattern = resolve_exact(exact)
    scale = resolve_scale(scale, query.shape[-1])
    if bias is not None:
        query, key = _with_bias(query, key, bias, scale)
    if use_triton("vmonarch_attention", implementation, query, key, value, family="monarch"):
        from vmonarch.kernels.monarch.fused import MonarchOptions
        from vmonarch.kernels.monarch.op import monarch_attention_triton
        from vmonarch.kernels.monarch.places import grid_places

        places = grid_places(grid, frames_per_block=frames_per_block, tiles=tiles, coarse=coarse)
        options = MonarchOptions(
            places, tiles != (1, 1), coarse, num_iterations, scale, float(min_mass), entropy_grad, pattern
        )
        out, lse = monarch_attention_triton(query, key, value, None, options)
        return (out, lse) if return_lse else out

    layout = grid_layout(grid, frames_per_block=frames_per_block, tiles=tiles, coarse=coarse, device=query.device)
    key_frames = key_block_frames = None
    if pattern is not None and any(exact_frames := exact_key_frames(pattern, T, frames_per_block)):
        key_frames = exact_frames
        key_block_frames = tuple(
            block for block in blocks_of_frames(T, frames_per_block) for _ in range(tiles[0] * tiles[1])
        )
    out, lse = monarch_attention_reference(
        query,
        key,
        value,
        layout,
        num_iterations=num_iterations,
        scale=scale,
        min_mass=min_mass,
        entropy_grad=entropy_grad,
        key_frames=key_frames,
        key_block_frames=key_block_frames,
        aware=pattern is not None and pattern.aware,
    )
    return (out, lse) if return_lse else out


def _with_bias(query: torch.Tensor, key: torch.Tensor, bias: object, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key whose products have the bias in them (docs/attention.md, "A bias")."""
    if not isinstance(bias, (tuple, list)) or len(bias) != 2:
        raise TypeError(f"bias must be None or a pair (query_factor, key_factor), got {type(bias).__name__}")
    query_factor, key_factor = bias
    check_factors(query_factor, key_factor, query, key)
    if scale == 0:
        raise ValueError("scale must not be 0 with a bias: the bias is divided by it")
    return extended(query, key, query_factor, key_factor, scale)


@own_precision
def monarch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block_size: int,
    num_iterations: int = 2,
    padding: str = "post",
    key_mask: torch.Tensor | None = None,
    min_mass: float = 0.0,
    scale: float | None = None,
    entropy_grad: bool = False,
    return_lse: bool = False,
    implementation: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """MonarchAttention on a sequence of any length: m = ⌈S / block_size⌉ blocks of block_size positions.

    Args:
        query: [B, S, H, D].
        key: [B, S, H, D].
        value: [B, S, H, Dv].
        block_size: b, the tokens per block; √S costs least.
        num_iterations: steps of alternating maximisation.
        padding: where the empty places go if block_size does not divide S: "post" (end of the last block) or "pre"
            (start of the first). Their keys are masked as in the paper; unlike there, the queries that they lack add
            nothing to cR.
        key_mask: boolean [B, S], true where a key may be attended. A row without any key gives 0 and lse = -inf.
        min_mass: lower bound of cR where it divides; the paper has none (0 only keeps empty columns finite).
        scale: softmax scale; 1/√D if None.
        entropy_grad: whether gradients flow through the entropy cL.
        return_lse: also return the log-partition of every row, lse_true - KL(Monarch row ‖ softmax row).
        implementation: "torch"; "triton", the fused kernels (CUDA; float16, bfloat16 or float32; head dimensions up to
            256); or "auto", see `kernels.common.launch.use_triton`.

    Returns:
        out [B, S, H, Dv] in the dtype of `query`; with `return_lse` also lse [B, H, S] in nats.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        NotImplementedError: implementation="triton", and the kernels cannot take these tensors; the message says why.

    Source: MonarchAttention, Fig. 7 and D.3.
    """
    check_qkv(query, key, value, same_length=True)
    check_positive_integer("block_size", block_size)
    check_positive_integer("num_iterations", num_iterations)
    if padding not in PADDINGS:
        raise ValueError(f"padding must be one of {', '.join(PADDINGS)}, got {padding!r}")
    _check_min_mass(min_mass)
    check_flag("entropy_grad", entropy_grad)
    check_flag("return_lse", return_lse)
    check_implementation(implementation)
    B, S = query.shape[:2]
    check_key_mask(key_mask, key)
    block_size = min(block_size, S)
    scale = resolve_scale(scale, query.shape[-1])
    if use_triton("monarch_attention", implementation, query, key, value, family="monarch"):
        from vmonarch.kernels.monarch.fused import MonarchOptions
        from vmonarch.kernels.monarch.op import monarch_attention_triton
        from vmonarch.kernels.monarch.places import sequence_places

        places = sequence_places(S, block_size, padding)
        options = MonarchOptions(places, False, 1, num_iterations, scale, float(min_mass), entropy_grad, None)
        out, lse = monarch_attention_triton(query, key, value, key_mask, options)
        return (out, lse) if return_lse else out

    out, lse = monarch_attention_reference(
        query,
        key,
        value,
        sequence_layout(S, block_size, padding, query.device),
        num_iterations=num_iterations,
        scale=scale,
        min_mass=min_mass,
        entropy_grad=entropy_grad,
        key_mask=key_mask,
    )
    return (out, lse) if return_lse else out
