"""Exact attention in sliding windows of a sequence and in neighbourhoods of a video."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from vmonarch.autocast import without_autocast
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.checks import check_qkv
from vmonarch.kernels.common.launch import use_triton
from vmonarch.kernels.common.trust import Case, qkv_shapes
from vmonarch.kernels.window.reference import Window, window_attention_reference
from vmonarch.validation import check_flag, check_implementation, check_positive_integer, resolve_scale


@without_autocast
def window_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    window: int | Sequence[int],
    causal: bool = False,
    grid: LatentGrid | tuple[int, int, int] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str = "auto",
) -> Any:
    """Exact softmax attention of every query to the keys in a window around it.

    Args:
        query: [B, Sq, H, D]. Queries are the last Sq of the tokens, so that a single one is a step of decoding, for
            which the window's keys will do as `key`.
        key: [B, Sk, H, D], Sk >= Sq.
        value: [B, Sk, H, E].
        window: w tokens of a sequence: the query and those before it if causal, else the query in their middle. Or,
            with `grid`, (frames, rows, columns) of a neighbourhood, the query in the middle; if causal, frames end with
            the query's. Windows are cut off at the borders. Even sizes reach one further ahead than back.
        grid: (T, H, W) of the tokens of a video; None for a sequence.
        scale: softmax scale; 1/√D if None.
        return_lse: also return the log-partition of every row, with which `merge_partials` joins other parts.
        implementation: "torch"; "triton", the fused kernels (CUDA; float16, bfloat16 or float32; head dimensions up to
            256; of a video all queries); or "auto", see `kernels.common.launch.use_triton`.

    Returns:
        out [B, Sq, H, E] in the dtype of `query`; with `return_lse` also lse [B, H, Sq] in nats, in float32, or
        float64 for float64 inputs.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        NotImplementedError: implementation="triton", and the kernels cannot take this call; the message says why.

    Source: Based, §4.2 (TCWINDOW); the neighbourhood in three dimensions is ours.
    """
    check_qkv(query, key, value)
    check_flag("causal", causal)
    check_flag("return_lse", return_lse)
    check_implementation(implementation)
    Sq, Sk = query.shape[1], key.shape[1]
    if Sq > Sk:
        raise ValueError(f"key must have at least as many tokens as query ({Sq}), got {Sk}")
    if grid is None:
        check_positive_integer("window", window)
        grid, sizes, axis = LatentGrid(1, 1, Sk), (1, 1, int(window)), 2  # type: ignore[arg-type]
    else:
        grid, sizes, axis = LatentGrid.parse(grid), check_window(window), 0
        if grid.tokens != Sk:
            raise ValueError(f"grid {tuple(grid)} has {grid.tokens} tokens, but key has {Sk}")
    scale = resolve_scale(scale, query.shape[-1])
    attend = window_attention_reference
    last_of_a_video = "queries are the last tokens of a video (supported: all of them, or a sequence)"
    reason = last_of_a_video if axis == 0 and Sq != Sk else None
    if use_triton("window_attention", implementation, query, key, value, op="window", unless=reason):
        # Triton is imported when it is needed, not with the package.
        from vmonarch.kernels.window.op import window_attention_triton

        attend = window_attention_triton
    out, lse = attend(query, key, value, grid=grid, window=sizes, causal_axis=axis if causal else None, scale=scale)
    return (out, lse) if return_lse else out


def check_window(window: object) -> Window:
    """The extents of a neighbourhood.

    Raises:
        TypeError, ValueError: `window` is not three integers of at least 1.
    """
    if isinstance(window, (str, bytes)) or not isinstance(window, Sequence):
        raise TypeError(f"window must be three integers (frames, rows, columns) with a grid, got {window!r}")
    if len(window) != 3:
        raise ValueError(f"window must have three entries (frames, rows, columns) with a grid, got {len(window)}")
    for axis, size in enumerate(window):
        check_positive_integer(f"window[{axis}]", size)
    return int(window[0]), int(window[1]), int(window[2])


def tiny_case(gpu: bool) -> Case:
    """The case by which `trust` checks the kernels."""
    grid, head_dim = ((3, 9, 12), 128) if gpu else ((2, 1, 4), 16)
    tokens, call = math.prod(grid), partial(window_attention, grid=grid, window=(2, 3, 3), return_lse=True)
    return Case(qkv_shapes(tokens, tokens, head_dim), call)
