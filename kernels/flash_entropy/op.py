"""Flash-Entropy-Attention as a torch operator: opaque to torch.compile, differentiable, without views of its inputs.

Shapes: B batch, Sq queries, Sk keys, H heads, D head dim, Dv value dim.
"""

from __future__ import annotations

from typing import Any

import torch

from vmonarch.kernels.common.launch import needs_operator
from vmonarch.kernels.common.operators import differentiable
from vmonarch.kernels.common.replay import replayed
from vmonarch.kernels.flash_entropy.backward import flash_backward
from vmonarch.kernels.flash_entropy.forward import flash_forward
from vmonarch.kernels.flash_entropy.segments import all_pairs


@replayed
def _forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out [B, Sq, H, Dv], lse [B, H, Sq], entropy [B, H, Sq]); `entropy_grad` only matters to the backward pass."""
    query, key, value, scale, _entropy_grad = inputs
    segments = all_pairs(query.shape[1], key.shape[1])
    out, lse, entropy = flash_forward(query, key, value, segments, scale=scale, entropy=True)
    assert entropy is not None
    return out, lse, entropy


flash_entropy_forward = torch.library.custom_op(
    "vmonarch::flash_entropy_forward",
    _forward,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, float scale, bool entropy_grad) -> (Tensor, Tensor, Tensor)",
)


@flash_entropy_forward.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:
    B, Sq, H, _D = query.shape
    statistic = query.new_empty(B, H, Sq, dtype=torch.float32)
    return query.new_empty(B, Sq, H, value.shape[3]), statistic, torch.empty_like(statistic)


@torch.library.custom_op(
    "vmonarch::flash_entropy_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor? grad_lse, Tensor? grad_entropy, Tensor query, Tensor key, Tensor value,"
    " Tensor out, Tensor lse, Tensor entropy, float scale, bool entropy_grad) -> (Tensor, Tensor, Tensor)",
)
@replayed
def flash_entropy_backward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), each in the shape and dtype of its input."""
    grad_out, grad_lse, grad_entropy, query, key, value, out, lse, entropy, scale, entropy_grad = inputs
    segments = all_pairs(query.shape[1], key.shape[1])
    grad_entropy = grad_entropy if entropy_grad else None
    return flash_backward(grad_out, grad_lse, grad_entropy, query, key, value, out, lse, entropy, segments, scale=scale)


differentiable(flash_entropy_forward, flash_entropy_backward, tensors=3, gradients=3, results=3)


def flash_entropy_attention_triton(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, entropy_grad: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Flash-Entropy-Attention by the kernels; arguments as in `flash_entropy_attention`, already checked."""
    if scale < 0:
        # The kernels take the maximum of raw scores, which only a scale that is not negative keeps in order.
        query, scale = -query, -scale
    forward = flash_entropy_forward if needs_operator(query, key, value) else _forward
    out, lse, entropy = forward(query, key, value, scale, entropy_grad)
    return out, lse, entropy if entropy_grad else entropy.detach()
