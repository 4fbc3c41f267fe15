"""Monarch and VMonarch attention."""

from __future__ import annotations

import math
from typing import Any

import torch

from vmonarch.autocast import without_autocast
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.blocks import block_layout, grid_places, sequence_places
from vmonarch.kernels.common.checks import check_factors, check_key_mask, check_qkv
from vmonarch.kernels.common.launch import use_triton
from vmonarch.kernels.common.trust import Case, qkv_shapes
from vmonarch.kernels.flash_bias.factors import extended
from vmonarch.kernels.monarch.reference import monarch_attention_reference
from vmonarch.options import VMonarchOptions, takes_options
from vmonarch.validation import check_flag, check_implementation, check_positive_integer, resolve_scale

PADDINGS = ("post", "pre")


@takes_options
@without_autocast
def vmonarch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid: LatentGrid | tuple[int, int, int],
    options: VMonarchOptions | None = None,
    bias: tuple[torch.Tensor, torch.Tensor] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str = "auto",
    **named: Any,
) -> Any:
    """Video Monarch attention: m = T frames by b = H·W positions, in place of the N×N attention map.

    Any T, H and W will do, primes too. No tensor of size N×N is ever built.

    Args:
        query: [B, S, H, D], S = T·H·W tokens ordered by frame, row, column.
        key: [B, S, H, D].
        value: [B, S, H, Dv].
        grid: (T, H, W) of the tokens.
        options: what is computed; None for the defaults, or for `named`.
        bias: (φq [B or 1, S, H or 1, R], φk [B or 1, S, H or 1, R]), whose product φq·φk is added to every logit, in
            exact rows too; see `flash_bias_attention`. They make heads wider: D + R dimensions, or up to D + 6·R for
            float32 factors among 16-bit tensors.
        scale: softmax scale; 1/√D if None.
        return_lse: also return the log-partition of every row. For a Monarch row it equals
            lse_true - KL(Monarch row ‖ softmax row); for a row answered exactly it is lse_true.
        implementation: "torch"; "triton", the fused kernels (CUDA; float16, bfloat16 or float32; head dimensions up to
            256); or "auto", see `kernels.common.launch.use_triton`.
        **named: the `VMonarchOptions` by name, in place of `options`.

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
    options = VMonarchOptions.of(options, named)
    check_implementation(implementation)
    check_flag("return_lse", return_lse)
    if grid.tokens != query.shape[1]:
        raise ValueError(
            f"grid {tuple(grid)} has {grid.tokens} tokens, but query has {query.shape[1]};"
            " frames × height × width must equal the sequence length"
        )
    scale = resolve_scale(scale, query.shape[-1])
    if bias is not None:
        query, key = _with_bias(query, key, bias, scale)
    places = grid_places(grid, coarse=options.coarse)
    if use_triton("vmonarch_attention", implementation, query, key, value, op="monarch"):
        from vmonarch.kernels.monarch.call import MonarchCall
        from vmonarch.kernels.monarch.op import monarch_attention_triton

        call = MonarchCall(places, options, scale)
        out, lse = monarch_attention_triton(query, key, value, None, call)
    else:
        layout = block_layout(places, options.coarse, query.device)
        out, lse = monarch_attention_reference(query, key, value, layout, options, scale=scale, grid=grid)
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


@without_autocast
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
    return_lse: bool = False,
    implementation: str = "auto",
) -> Any:
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
    if padding not in PADDINGS:
        raise ValueError(f"padding must be one of {', '.join(PADDINGS)}, got {padding!r}")
    options = VMonarchOptions(num_iterations=num_iterations, exact=None, min_mass=min_mass)
    check_flag("return_lse", return_lse)
    check_implementation(implementation)
    S = query.shape[1]
    check_key_mask(key_mask, key)
    block_size = min(block_size, S)
    scale = resolve_scale(scale, query.shape[-1])
    places = sequence_places(S, block_size, padding)
    if use_triton("monarch_attention", implementation, query, key, value, op="monarch"):
        from vmonarch.kernels.monarch.call import MonarchCall
        from vmonarch.kernels.monarch.op import monarch_attention_triton

        call = MonarchCall(places, options, scale)
        out, lse = monarch_attention_triton(query, key, value, key_mask, call)
    else:
        layout = block_layout(places, options.coarse, query.device)
        out, lse = monarch_attention_reference(query, key, value, layout, options, scale=scale, key_mask=key_mask)
    return (out, lse) if return_lse else out


def tiny_case(gpu: bool) -> Case:
    """The case by which `trust` checks the kernels."""
    grid, head_dim = ((17, 2, 72), 128) if gpu else ((2, 1, 3), 16)

    def call(*qkv: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
        how |= {"grid": grid, "return_lse": True}
        # Exact rows in two resolutions write among other rows, sum keys, and add to gradients.
        ways = [vmonarch_attention(*qkv, row_share=share, **how) for share in (1.0, 0.3)]
        return (*ways[0], *ways[1])

    tokens = math.prod(grid)
    return Case(qkv_shapes(tokens, tokens, head_dim), call)
