"""Attention to the first order around mean queries, for heads that attend to nearly everything alike."""

from __future__ import annotations

from typing import Any

import torch

from vmonarch.autocast import without_autocast
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.checks import check_qkv
from vmonarch.kernels.first_order.reference import first_order_attention_reference
from vmonarch.options import FirstOrderOptions
from vmonarch.validation import check_flag, check_implementation, resolve_scale


@without_autocast
def first_order_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid: LatentGrid | tuple[int, int, int],
    options: FirstOrderOptions | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str = "auto",
    **named: Any,
) -> Any:
    """Attention and its log-partition, to the first order of their Taylor series around a mean query q̄:

        out(q) = v̄ + scale·(q - q̄)ᵀ Cov(k, v)        lse(q) = lse(q̄) + scale·(q - q̄)ᵀ k̄

    Means and covariance are under the weights softmax(scale·q̄ᵀk). In time and memory it is linear in the tokens. It is
    for heads whose queries, or those of a box, hardly change the weights, such as heads that attend to everything
    alike; the weights it gives to keys can be negative. `vmonarch calibrate` finds such heads.

    Args:
        query: [B, S, H, D], S = T·H·W tokens ordered by frame, row, column.
        key: [B, S, H, D].
        value: [B, S, H, E].
        grid: (T, H, W) of the tokens.
        options: which queries have a mean of their own; None for the defaults, or for `named`.
        scale: softmax scale; 1/√D if None.
        return_lse: also return the log-partition of every row, which is at most the exact one.
        implementation: "auto", "torch" or "triton", which are the same: matrix products of torch.
        **named: the `FirstOrderOptions` by name, in place of `options`.

    Returns:
        out [B, S, H, E] in the dtype of `query`; with `return_lse` also lse [B, H, S] in nats, in float32, or float64
        for float64 inputs.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
    """
    check_qkv(query, key, value, same_length=True)
    grid = LatentGrid.parse(grid)
    options = FirstOrderOptions.of(options, named)
    check_flag("return_lse", return_lse)
    check_implementation(implementation)
    if grid.tokens != query.shape[1]:
        raise ValueError(f"grid {tuple(grid)} has {grid.tokens} tokens, but query has {query.shape[1]}")
    scale = resolve_scale(scale, query.shape[-1])
    out, lse = first_order_attention_reference(query, key, value, grid, options.parts_of(grid), scale=scale)
    return (out, lse) if return_lse else out
