"""Monarch attention as a torch operator: opaque to torch.compile, differentiable, without views of its inputs.

An operator takes numbers, not objects: `MonarchOptions` travels as a list of integers and two floats.
Shapes: B batch, S tokens, H heads, D head dim, E value dim, m blocks, b positions per block, t iterations.
"""

from __future__ import annotations

from typing import Any

import torch

from vmonarch.exact import ExactBlocks
from vmonarch.kernels.monarch.fused import MonarchOptions, backward, forward, saved_shapes
from vmonarch.kernels.monarch.places import Places

_PLACES = len(Places._fields)


def _encode(options: MonarchOptions) -> list[int]:
    numbers = [*options.places, options.tiled, options.coarse, options.num_iterations, options.entropy_grad]
    if options.exact is not None:
        band = -1 if options.exact.band is None else options.exact.band
        rows, columns = options.exact.rows, options.exact.columns
        numbers += [options.exact.aware, band, len(rows), *rows, *columns]
    return [int(number) for number in numbers]


def _decode(numbers: list[int], scale: float, min_mass: float) -> MonarchOptions:
    tiled, coarse, num_iterations, entropy_grad, *pattern = numbers[_PLACES:]
    exact = None
    if pattern:
        aware, band, rows, *frames = pattern
        exact = ExactBlocks(tuple(frames[:rows]), tuple(frames[rows:]), None if band < 0 else band, bool(aware))
    places = Places(*numbers[:_PLACES])
    return MonarchOptions(places, bool(tiled), coarse, num_iterations, scale, min_mass, bool(entropy_grad), exact)


@torch.library.custom_op(
    "vmonarch::monarch_forward",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? key_mask, int[] numbers, float scale, float min_mass,"
    " bool save) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def monarch_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    numbers: list[int],
    scale: float,
    min_mass: float,
    save: bool,
) -> tuple[torch.Tensor, ...]:
    """(out [B, S, H, E], lse [B, H, S]) and what the backward pass needs, empty unless `save`; see `fused.forward`."""
    return forward(query, key, value, key_mask, _decode(numbers, scale, min_mass), save)


@monarch_forward.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    numbers: list[int],
    scale: float,
    min_mass: float,
    save: bool,
) -> tuple[torch.Tensor, ...]:
    B, S, H, _ = query.shape
    out, lse = query.new_empty(B, S, H, value.shape[3]), query.new_empty(B, H, S, dtype=torch.float32)
    shapes = saved_shapes(query, value, _decode(numbers, scale, min_mass), save)
    return out, lse, *(query.new_empty(shape, dtype=dtype) for shape, dtype in shapes)


@torch.library.custom_op(
    "vmonarch::monarch_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor out,"
    " Tensor lse, Tensor blocks, Tensor y, Tensor stats, Tensor row_stats, Tensor out_exact, Tensor lse_exact,"
    " int[] numbers, float scale, float min_mass) -> (Tensor, Tensor, Tensor)",
)
def monarch_backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    blocks: torch.Tensor,
    y: torch.Tensor,
    stats: torch.Tensor,
    row_stats: torch.Tensor,
    out_exact: torch.Tensor,
    lse_exact: torch.Tensor,
    numbers: list[int],
    scale: float,
    min_mass: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), each in the shape and dtype of its input."""
    saved = (blocks, y, stats, row_stats, out_exact, lse_exact)
    options = _decode(numbers, scale, min_mass)
    return backward(grad_out, grad_lse, query, key, value, key_mask, out, lse, saved, options)


@monarch_backward.register_fake
def _(
    grad_out: torch.Tensor, grad_lse: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    *others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, key_mask, ctx.numbers, ctx.scale, ctx.min_mass, _ = inputs
    ctx.save_for_backward(query, key, value, key_mask, *output)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    query, key, value, key_mask, out, lse, *saved = ctx.saved_tensors
    none = (None,) * 5
    if grad_out is None:
        if grad_lse is None:
            return None, None, None, *none
        grad_out = torch.zeros_like(out)
    dq, dk, dv = monarch_backward(
        grad_out, grad_lse, query, key, value, key_mask, out, lse, *saved, ctx.numbers, ctx.scale, ctx.min_mass
    )
    return dq, dk, dv, *none


monarch_forward.register_autograd(_backward, setup_context=_setup_context)


def monarch_attention_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    options: MonarchOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, S, H, E], lse [B, H, S]) by the kernels, arguments already checked."""
    if options.scale < 0:
        # The kernels take the maximum of raw scores, which only a scale that is not negative keeps in order.
        query, options = -query, options.with_scale(-options.scale)
    tensors = (query, key, value)
    grad_needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if grad_needed or torch.compiler.is_compiling() or any(type(tensor) is not torch.Tensor for tensor in tensors):
        out, lse, *_ = monarch_forward(
            query, key, value, key_mask, _encode(options), options.scale, options.min_mass, grad_needed
        )
        return out, lse
    # Without a gradient, the dispatcher would only cost time.
    out, lse, *_ = forward(query, key, value, key_mask, options, save=False)
    return out, lse
