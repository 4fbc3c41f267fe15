"""Attention in two resolutions: the best key tiles exactly, the mean of every other one, in one softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from vmonarch.autocast import without_autocast
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.checks import check_key_mask, check_qkv
from vmonarch.kernels.common.launch import use_triton
from vmonarch.kernels.common.trust import Case, qkv_shapes
from vmonarch.kernels.two_resolution.reference import two_resolution_attention_reference
from vmonarch.kernels.two_resolution.tiling import Tiling, tiling_of
from vmonarch.options import TwoResolutionOptions
from vmonarch.validation import check_flag, check_implementation, resolve_scale


@without_autocast
def two_resolution_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid: LatentGrid | tuple[int, int, int],
    options: TwoResolutionOptions | None = None,
    selection: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str = "auto",
    **named: Any,
) -> Any:
    """Attention to the best key tiles exactly, and to the mean key and value of every other tile.

    All of it is one softmax: the logit of a mean gains the log of the tokens that it stands for. The choice of tiles
    has no gradient; means have. Without the rest (`rest=False`) this is block-sparse attention.

    Args:
        query: [B, S, H, D], S = T·H·W tokens ordered by frame, row, column.
        key: [B, S, H, D].
        value: [B, S, H, E].
        grid: (T, H, W) of the tokens.
        options: tiles and how they are chosen; None for the defaults, or for `named`.
        selection: bool [B or 1, H or 1, n, m], true where tile of keys k is exact for tile of queries l, in place of
            the choice by scores; `tiling_of` says how many tiles there are, which are ordered like tokens.
        key_mask: boolean [B, S], true where a key may be attended. A row without any key gives 0 and lse = -inf.
        scale: softmax scale; 1/√D if None.
        return_lse: also return the log-partition of every row, with which `merge_partials` joins other parts.
        implementation: "torch"; "triton", the fused kernels (CUDA; float16, bfloat16 or float32; head dimensions up to
            256); or "auto", see `kernels.common.launch.use_triton`.
        **named: the `TwoResolutionOptions` by name, in place of `options`.

    Returns:
        out [B, S, H, E] in the dtype of `query`; with `return_lse` also lse [B, H, S] in nats, in float32, or float64
        for float64 inputs.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        NotImplementedError: implementation="triton", and the kernels cannot take this call; the message says why.

    Source: Li et al., Sol-Attn (2026, arXiv:2607.24027); Zhang et al., VSA (2025), §3.
    """
    check_qkv(query, key, value, same_length=True)
    grid = LatentGrid.parse(grid)
    options = TwoResolutionOptions.of(options, named)
    check_key_mask(key_mask, key)
    check_flag("return_lse", return_lse)
    check_implementation(implementation)
    if grid.tokens != query.shape[1]:
        raise ValueError(f"grid {tuple(grid)} has {grid.tokens} tokens, but query has {query.shape[1]}")
    tiling = tiling_of(grid, options)
    scale = resolve_scale(scale, query.shape[-1])
    if selection is not None:
        _check_selection(selection, query, tiling)
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]] = two_resolution_attention_reference
    if use_triton("two_resolution_attention", implementation, query, key, value, op="two_resolution"):
        # Triton is imported when it is needed, not with the package.
        from vmonarch.kernels.two_resolution.op import two_resolution_attention_triton

        attend = two_resolution_attention_triton
    out, lse = attend(query, key, value, tiling, options, selection=selection, scale=scale, key_mask=key_mask)
    return (out, lse) if return_lse else out


def _check_selection(selection: object, query: torch.Tensor, tiling: Tiling) -> None:
    if not isinstance(selection, torch.Tensor) or selection.dtype != torch.bool:
        got = selection.dtype if isinstance(selection, torch.Tensor) else type(selection).__name__
        raise TypeError(f"selection must be a boolean tensor [B or 1, H or 1, n, m], got {got}")
    n, m, (B, _, H, _) = tiling.of_queries.tiles, tiling.tiles, query.shape
    if (
        selection.ndim != 4
        or selection.shape[2:] != (n, m)
        or selection.shape[0] not in (1, B)
        or selection.shape[1] not in (1, H)
    ):
        raise ValueError(
            f"selection must be [{B} or 1, {H} or 1, {n}, {m}] for these {n} tiles of queries and {m} of keys, got"
            f" {tuple(selection.shape)}"
        )
    if selection.device != query.device:
        raise ValueError(f"selection must lie on the device of query ({query.device}), got {selection.device}")


def tiny_case(gpu: bool) -> Case:
    """The case by which `trust` checks the kernels."""
    # Tiles of several sizes; on a GPU also those that kernels for Hopper do not take.
    grid, tile, head_dim = ((5, 9, 12), (4, 4, 4), 64) if gpu else ((2, 1, 5), (1, 1, 3), 16)
    tiles = [tile, *([(2, 5, 5)] if gpu else [])]

    def call(*qkv: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
        how |= {"grid": grid, "return_lse": True}
        results = [two_resolution_attention(*qkv, share=0.3, tile=tile, **how) for tile in tiles]
        return tuple(tensor for found in results for tensor in found)

    tokens = math.prod(grid)
    return Case(qkv_shapes(tokens, tokens, head_dim), call)
