"""Monarch attention as a torch operator.

An operator takes numbers, not objects: a `MonarchCall` travels as a list of integers and one of floats.
Shapes: B batch, S tokens, H heads, D head dim, E value dim, m blocks, b positions per block, t iterations.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from vmonarch.kernels.common.launch import learns, needs_operator
from vmonarch.kernels.common.operators import new_results, operator
from vmonarch.kernels.common.replay import replayed
from vmonarch.kernels.monarch.call import MonarchCall
from vmonarch.kernels.monarch.fused import backward, forward, saved_shapes
from vmonarch.kernels.monarch.places import Places
from vmonarch.options import ExactBlocks, VMonarchOptions

_PLACES = len(Places._fields)
# Options that are one number; places and the pattern of exact blocks hold the others.
_TYPES = {field.name: field.type for field in dataclasses.fields(VMonarchOptions)}
_INTEGERS = {name: {"int": int, "bool": bool}[of] for name, of in _TYPES.items() if of in ("int", "bool")}
_REALS = [name for name, of in _TYPES.items() if of == "float"]


def _encode(call: MonarchCall) -> tuple[list[int], list[float]]:
    numbers = [*call.places, *(getattr(call.options, name) for name in _INTEGERS)]
    pattern = call.options.pattern
    if pattern is not None:
        band = -1 if pattern.band is None else pattern.band
        numbers += [pattern.aware, band, len(pattern.rows), *pattern.rows, *pattern.columns]
    reals = [call.scale, *(getattr(call.options, name) for name in _REALS)]
    return [int(number) for number in numbers], [float(number) for number in reals]


def _decode(numbers: list[int], reals: list[float]) -> MonarchCall:
    places = Places(*numbers[:_PLACES])
    integers, frames = numbers[_PLACES : _PLACES + len(_INTEGERS)], numbers[_PLACES + len(_INTEGERS) :]
    scale, *reals = reals
    exact = None
    if frames:
        aware, band, rows, *frames = frames
        exact = ExactBlocks(tuple(frames[:rows]), tuple(frames[rows:]), None if band < 0 else band, bool(aware))
    options: dict[str, Any] = dict(zip(_REALS, reals, strict=True))
    options |= {name: of(number) for (name, of), number in zip(_INTEGERS.items(), integers, strict=True)}
    return MonarchCall(places, VMonarchOptions(exact=exact, **options), scale)


@replayed
def _forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    """(out [B, S, H, E], lse [B, H, S]) and what the backward pass needs, empty unless `save`; see `fused.forward`."""
    *tensors, numbers, reals, save = inputs
    call = _decode(numbers, reals)
    found = forward(*tensors, call, save)
    nothing = () if save else saved_shapes(tensors[0], tensors[2], call, save)
    return *found, *(tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in nothing)


def _fake(
    query: torch.Tensor, key: Any, value: torch.Tensor, key_mask: Any, numbers: Any, reals: Any, save: bool
) -> Any:
    shapes = saved_shapes(query, value, _decode(numbers, reals), save)
    return *new_results(query, key, value), *(query.new_empty(shape, dtype=dtype) for shape, dtype in shapes)


@replayed
def _backward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), each in the shape and dtype of its input."""
    *tensors, numbers, reals, _ = inputs
    arguments: dict[str, Any] = dict(saved=tuple(tensors[8:]), call=_decode(numbers, reals))
    return backward(*tensors[:8], **arguments)


_operator = operator(
    "vmonarch::monarch",
    _forward,
    _backward,
    "Tensor query, Tensor key, Tensor value, Tensor? key_mask, int[] numbers, float[] reals, bool save",
    fake=_fake,
    results=8,
    gradients=3,
)


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
        query, call = -query, dataclasses.replace(call, scale=-call.scale)
    tensors = (query, key, value)
    if needs_operator(*tensors):
        out, lse, *_ = _operator(*tensors, key_mask, *_encode(call), learns(*tensors))
    else:
        out, lse = forward(*tensors, key_mask, call, False)
    return out, lse
