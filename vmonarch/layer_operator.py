"""The attention of a layer as one operator for all layers, for torch.compile.

Layers of a plan, whose heads compute different methods, differ in their code, and torch.compile would make a graph for
each of them, of which it allows eight. Where residuals are shared, the steps differ. Here a layer is a number in a
tensor, which the operator looks up when it runs: one graph serves all. The price is in training: backward computes the
attention once more.

Shapes: B batch, S tokens, H heads, D head dim, E value dim.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from vmonarch.grid import LatentGrid
from vmonarch.sequence import TokenSequence

_ABOVE_AUTOGRAD = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def number_of(layer: Any) -> torch.Tensor:
    """A new number for the processor of a layer, int64 [1] on the CPU; it is found by it as long as it lives."""
    number = next(_numbers)
    _layers[number] = layer
    # torch.compile saves it for backward.
    with torch.inference_mode(False):
        return torch.tensor([number])


# A recorded CUDA graph would repeat the layer that it was recorded for: inductor leaves such operators out of graphs.
_UNRECORDED = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("vmonarch::layer_attention", mutates_args=(), tags=_UNRECORDED)
def layer_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    number: torch.Tensor,
    key_mask: torch.Tensor | None,
    sequence: list[int],
) -> torch.Tensor:
    """What the layer of this number makes of [B, S, H, D] and a mask [B, S]: [B, S, H, E].

    Args:
        sequence: T, H, W of the grid, and the `TokenSequence`'s before and after.
    """
    return _attend_layer(number, query, key, value, key_mask, sequence).contiguous()


def _attend_layer(
    number: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    sequence: list[int],
) -> torch.Tensor:
    tokens = TokenSequence(LatentGrid(*sequence[:3]), *sequence[3:])
    out: torch.Tensor = _layers[int(number)].attend_layer(query, key, value, tokens, key_mask=key_mask)
    return out


@layer_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


@torch.library.custom_op("vmonarch::layer_attention_backward", mutates_args=(), tags=_UNRECORDED)
def layer_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    number: torch.Tensor,
    key_mask: torch.Tensor | None,
    sequence: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), each in the shape and dtype of its input."""
    query, key, value = (tensor.detach().requires_grad_() for tensor in (query, key, value))
    # Operators run below autograd; its graph is wanted here, also of what the backward pass computes again.
    with torch._C._ForceDispatchKeyGuard(*_ABOVE_AUTOGRAD), torch.enable_grad():
        out = _attend_layer(number, query, key, value, key_mask, sequence)
        found = torch.autograd.grad(out, (query, key, value), gradient)
    dq, dk, dv = (tensor.contiguous() for tensor in found)
    return dq, dk, dv


@layer_attention_backward.register_fake
def _(gradient: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:3])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.sequence = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *layer_attention_backward(gradient, *ctx.saved_tensors, ctx.sequence), None, None, None


layer_attention.register_autograd(_backward, setup_context=_setup_context)
