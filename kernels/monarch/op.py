"""Monarch attention as a torch operator: opaque to torch.compile, differentiable, without views of its inputs.

An operator takes numbers, not objects: a `MonarchCall` travels as a list of integers and one of floats.
Shapes: B batch, S tokens, H heads, D head dim, E value dim, m blocks, b positions per block, t iterations.
"""

from __future__ import annotations

from typing import Any

import torch

from vmonarch.exact import ExactBlocks
from vmonarch.kernels.monarch.fused import MonarchCall, backward, forward, saved_shapes
from vmonarch.kernels.monarch.places import Places
from vmonarch.options import OPTION_FIELDS, VMonarchOptions

_PLACES = len(Places._fields)
# Options that are one number; places and the pattern of exact blocks hold the others.
_INTEGERS = [field.name for field in OPTION_FIELDS if field.type == "int" and field.name != "frames_per_block"]
_REALS = [field.name for field in OPTION_FIELDS if field.type == "float"]


def _encode(call: MonarchCall) -> tuple[list[int], list[float]]:
    numbers = [*call.places, call.entropy_grad, *(getattr(call.options, name) for name in _INTEGERS)]
    pattern = call.options.pattern
    if pattern is not None:
        band = -1 if pattern.band is None else pattern.band
        numbers += [pattern.aware, band, len(pattern.rows), *pattern.rows, *pattern.columns]
    reals = [call.scale, *(getattr(call.options, name) for name in _REALS)]
    return [int(number) for number in numbers], [float(number) for number in reals]


def _decode(numbers: list[int], reals: list[float]) -> MonarchCall:
    places = Places(*numbers[:_PLACES])
    entropy_grad, *numbers = numbers[_PLACES:]
    integers, frames = numbers[: len(_INTEGERS)], numbers[len(_INTEGERS) :]
    scale, *reals = reals
    exact = None
    if frames:
        aware, band, rows, *frames = frames
        exact = ExactBlocks(tuple(frames[:rows]), tuple(frames[rows:]), None if band < 0 else band, bool(aware))
    options: dict[str, Any] = dict(zip([*_INTEGERS, *_REALS], [*integers, *reals], strict=True))
    tiles = (places.tiles_h, places.tiles_w)
    options |= {"frames_per_block": places.block_frames, "tiles": tiles, "exact": exact}
    return MonarchCall(places, VMonarchOptions(**options), scale, bool(entropy_grad))


@torch.library.custom_op(
    "vmonarch::monarch_forward",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? key_mask, int[] numbers, float[] reals, bool save)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def monarch_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    numbers: list[int],
    reals: list[float],
    save: bool,
) -> tuple[torch.Tensor, ...]:
    """(out [B, S, H, E], lse [B, H, S]) and what the backward pass needs, empty unless `save`; see `fused.forward`."""
    return forward(query, key, value, key_mask, _decode(numbers, reals), save)


@monarch_forward.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    numbers: list[int],
    reals: list[float],
    save: bool,
) -> tuple[torch.Tensor, ...]:
    B, S, H, _ = query.shape
    out, lse = query.new_empty(B, S, H, value.shape[3]), query.new_empty(B, H, S, dtype=torch.float32)
    shapes = saved_shapes(query, value, _decode(numbers, reals), save)
    return out, lse, *(query.new_empty(shape, dtype=dtype) for shape, dtype in shapes)


@torch.library.custom_op(
    "vmonarch::monarch_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor out,"
    " Tensor lse, Tensor blocks, Tensor y, Tensor stats, Tensor row_stats, Tensor out_exact, Tensor lse_exact,"
    " int[] numbers, float[] reals) -> (Tensor, Tensor, Tensor)",
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
    reals: list[float],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), each in the shape and dtype of its input."""
    saved = (blocks, y, stats, row_stats, out_exact, lse_exact)
    return backward(grad_out, grad_lse, query, key, value, key_mask, out, lse, saved, _decode(numbers, reals))


@monarch_backward.register_fake
def _(
    grad_out: torch.Tensor, grad_lse: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    *others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, key_mask, ctx.numbers, ctx.reals, _ = inputs
    ctx.save_for_backward(query, key, value, key_mask, *output)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    query, key, value, key_mask, out, lse, *saved = ctx.saved_tensors
    none = (None,) * 4
    if grad_out is None:
        if grad_lse is None:
            return None, None, None, *none
        grad_out = torch.zeros_like(out)
    dq, dk, dv = monarch_backward(
        grad_out, grad_lse, query, key, value, key_mask, out, lse, *saved, ctx.numbers, ctx.reals
    )
    return dq, dk, dv, *none


monarch_forward.register_autograd(_backward, setup_context=_setup_context)


def monarch_attention_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    call: MonarchCall,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, S, H, E], lse [B, H, S]) by the kernels, arguments already checked."""
    if call.scale < 0:
        # The kernels take the maximum of raw scores, which only a scale that is not negative keeps in order.
        query, call = -query, call.with_scale(-call.scale)
    tensors = (query, key, value)
    grad_needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if grad_needed or torch.compiler.is_compiling() or any(type(tensor) is not torch.Tensor for tensor in tensors):
        out, lse, *_ = monarch_forward(query, key, value, key_mask, *_encode(call), grad_needed)
        return out, lse
    # Without a gradient, the dispatcher would only cost time.
    out, lse, *_ = forward(query, key, value, key_mask, call, save=False)
    return out, lse
