"""A tiny case of every op, by which `trust` checks them. Tensors are [B, S, H, D]."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from vmonarch.kernels.flash_bias.api import flash_bias_attention
from vmonarch.kernels.flash_entropy.api import flash_entropy_attention
from vmonarch.kernels.int8.api import int8_attention
from vmonarch.kernels.merge.api import merge_partials
from vmonarch.kernels.monarch.api import vmonarch_attention
from vmonarch.kernels.norm_rotary.api import norm_rotary
from vmonarch.kernels.residual.api import add_residual, attention_residual, renew_residual
from vmonarch.kernels.taylor.api import taylor_attention
from vmonarch.kernels.two_resolution.api import two_resolution_attention
from vmonarch.kernels.window.api import window_attention

Shapes = Mapping[str, tuple[int, ...]]


class Case(NamedTuple):
    """`call(*inputs, implementation=…)` gives the results; all inputs get gradients if there are any."""

    inputs: Shapes
    call: Callable[..., tuple[torch.Tensor, ...]]
    gradients: bool = True


def tiny_case(op: str, device: torch.device) -> Case:
    """The case of an op: on a GPU as large as kernels for Hopper want it, in the interpreter as small as can be."""
    return _CASES[op](device.type == "cuda")


def _qkv(queries: int, keys: int, head_dim: int) -> Shapes:
    return {"query": (1, queries, 2, head_dim), "key": (1, keys, 2, head_dim), "value": (1, keys, 2, head_dim)}


def _monarch(gpu: bool) -> Case:
    grid, head_dim = ((17, 2, 72), 128) if gpu else ((2, 1, 3), 16)

    def call(*qkv: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
        how |= {"grid": grid, "return_lse": True}
        # Exact rows in two resolutions write among other rows, sum keys, and add to gradients.
        ways = [vmonarch_attention(*qkv, row_share=share, **how) for share in (1.0, 0.3)]
        return (*ways[0], *ways[1])

    tokens = math.prod(grid)
    return Case(_qkv(tokens, tokens, head_dim), call)


def _flash_entropy(gpu: bool) -> Case:
    def call(*qkv: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
        # With a gradient through the entropy and, as other kernels have it, without.
        return (*flash_entropy_attention(*qkv, entropy_grad=True, **how), *flash_entropy_attention(*qkv, **how)[:2])

    return Case(_qkv(200, 300, 128) if gpu else _qkv(4, 20, 16), call)


def _flash_bias(gpu: bool) -> Case:
    queries, keys, head_dim = (200, 300, 128) if gpu else (4, 20, 16)
    factors = {"query_factor": (1, queries, 2, 8), "key_factor": (1, keys, 2, 8)}
    return Case({**_qkv(queries, keys, head_dim), **factors}, partial(flash_bias_attention, return_lse=True))


def _int8(gpu: bool) -> Case:
    inputs = _qkv(200, 300, 128) if gpu else _qkv(4, 20, 16)
    return Case(inputs, partial(int8_attention, return_lse=True), gradients=False)


def _taylor(gpu: bool) -> Case:
    def call(*qkv: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
        ways = [taylor_attention(*qkv, causal=causal, return_lse=True, **how) for causal in (False, True)]
        return (*ways[0], *ways[1])

    tokens, dims, width = (300, 16, 128) if gpu else (6, 2, 8)
    return Case({**_qkv(tokens, tokens, dims), "value": (1, tokens, 2, width)}, call)


def _window(gpu: bool) -> Case:
    grid, head_dim = ((3, 9, 12), 128) if gpu else ((2, 1, 4), 16)
    tokens, call = math.prod(grid), partial(window_attention, grid=grid, window=(2, 3, 3), return_lse=True)
    return Case(_qkv(tokens, tokens, head_dim), call)


def _two_resolution(gpu: bool) -> Case:
    # Tiles of several sizes; on a GPU also those that kernels for Hopper do not take.
    grid, tile, head_dim = ((5, 9, 12), (4, 4, 4), 64) if gpu else ((2, 1, 5), (1, 1, 3), 16)
    tiles = [tile, *([(2, 5, 5)] if gpu else [])]

    def call(*qkv: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
        how |= {"grid": grid, "return_lse": True}
        results = [two_resolution_attention(*qkv, share=0.3, tile=tile, **how) for tile in tiles]
        return tuple(tensor for found in results for tensor in found)

    tokens = math.prod(grid)
    return Case(_qkv(tokens, tokens, head_dim), call)


def _norm_rotary(gpu: bool) -> Case:
    tokens, heads, head_dim = (300, 12, 128) if gpu else (3, 2, 8)

    def call(x: torch.Tensor, weight: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
        angles = torch.arange(tokens)[:, None] / torch.arange(1, 1 + head_dim // 2)
        angles = angles.repeat_interleave(2, 1)[None, :, None]
        cosines, sines = angles.cos().to(x), angles.sin().to(x)
        return (norm_rotary(x, weight, cosines, sines, heads=heads, eps=1e-6, **how),)

    channels = heads * head_dim
    return Case({"x": (1, tokens, channels), "weight": (channels,)}, call)


def _residual(gpu: bool) -> Case:
    def call(exact: torch.Tensor, approximate: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
        residual = attention_residual(approximate, exact, **how)
        change = renew_residual(residual, exact, approximate, **how)
        return add_residual(approximate.clone(), residual, **how), change

    shape = (1, 300, 2, 128) if gpu else (1, 4, 2, 16)
    return Case({"exact": shape, "approximate": shape}, call, gradients=False)


def _merge(gpu: bool) -> Case:
    def call(*tensors: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
        out_1, lse_1, out_2, lse_2 = tensors
        return merge_partials((out_1, lse_1.float()), (out_2, lse_2.float()), **how)

    tokens, head_dim = (300, 128) if gpu else (4, 16)
    out, lse = (1, tokens, 2, head_dim), (1, 2, tokens)
    return Case({"out 1": out, "log-partition 1": lse, "out 2": out, "log-partition 2": lse}, call)


_CASES: dict[str, Callable[[bool], Case]] = {
    "monarch": _monarch,
    "flash_entropy": _flash_entropy,
    "flash_bias": _flash_bias,
    "int8": _int8,
    "taylor": _taylor,
    "window": _window,
    "two_resolution": _two_resolution,
    "norm_rotary": _norm_rotary,
    "residual": _residual,
    "merge": _merge,
}
OPS = tuple(_CASES)
