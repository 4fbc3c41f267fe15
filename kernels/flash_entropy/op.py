"""Flash-Entropy-Attention as a torch operator: opaque to torch.compile, differentiable, without views of its inputs.

Shapes: B batch, Sq queries, Sk keys, H heads, D head dim, Dv value dim.
"""

from __future__ import annotations

from typing import Any

import torch

from vmonarch.kernels.flash_entropy.backward import flash_backward
from vmonarch.kernels.flash_entropy.forward import flash_forward
from vmonarch.kernels.flash_entropy.segments import Segment


def _all_pairs(query: torch.Tensor, key: torch.Tensor) -> tuple[Segment, ...]:
    return (Segment(0, query.shape[1], ((0, key.shape[1]),)),)


@torch.library.custom_op(
    "vmonarch::flash_entropy_forward",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, float scale, bool entropy_grad) -> (Tensor, Tensor, Tensor)",
)
def flash_entropy_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, entropy_grad: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out [B, Sq, H, Dv], lse [B, H, Sq], entropy [B, H, Sq]); `entropy_grad` only matters to the backward pass."""
    out, lse, entropy = flash_forward(query, key, value, _all_pairs(query, key), scale=scale, entropy=True)
    assert entropy is not None
    return out, lse, entropy


@flash_entropy_forward.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, entropy_grad: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    B, Sq, H, _ = query.shape
    statistic = query.new_empty(B, H, Sq, dtype=torch.float32)
    return query.new_empty(B, Sq, H, value.shape[3]), statistic, torch.empty_like(statistic)


@torch.library.custom_op(
    "vmonarch::flash_entropy_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor? grad_lse, Tensor? grad_entropy, Tensor query, Tensor key, Tensor value,"
    " Tensor out, Tensor lse, Tensor entropy, float scale) -> (Tensor, Tensor, Tensor)",
)
def flash_entropy_backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), each in the shape and dtype of its input."""
    return flash_backward(
        grad_out,
        grad_lse,
        grad_entropy,
        query,
        key,
        value,
        out,
        lse,
        entropy,
        _all_pairs(query, key),
        scale=scale,
    )


@flash_entropy_backward.register_fake
def _(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, ctx.scale, ctx.entropy_grad = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None, grad_entropy: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    query, key, value, out, lse, entropy = ctx.saved_tensors
    if not ctx.entropy_grad:
        grad_entropy = None
    if grad_out is None:
        if grad_lse is None and grad_entropy is None:
            return None, None, None, None, None
        grad_out = torch.zeros_like(out)
    dq, dk, dv = flash_entropy_backward(
        grad_out, grad_lse, grad_entropy, query, key, value, out, lse, entropy, ctx.scale
    )
    return dq, dk, dv, None, None


flash_entropy_forward.register_autograd(_backward, setup_context=_setup_context)


def flash_entropy_attention_triton(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, entropy_grad: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Flash-Entropy-Attention by the kernels; arguments as in `flash_entropy_attention`, already checked."""
    if scale < 0:
        # The kernels take the maximum of raw scores, which only a scale that is not negative keeps in order.
        query, scale = -query, -scale
    tensors = (query, key, value)
    grad_needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if grad_needed or torch.compiler.is_compiling() or any(type(tensor) is not torch.Tensor for tensor in tensors):
        out, lse, entropy = flash_entropy_forward(query, key, value, scale, entropy_grad)
        return out, lse, entropy if entropy_grad else entropy.detach()
    # Without a gradient, the dispatcher would only cost time.
    out, lse, maybe_entropy = flash_forward(query, key, value, _all_pairs(query, key), scale=scale, entropy=True)
    assert maybe_entropy is not None
    return out, lse, maybe_entropy
