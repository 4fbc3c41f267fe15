"""Flash-Entropy-Attention as a torch operator.

Shapes: B batch, Sq queries, Sk keys, H heads, D head dim, Dv value dim.
"""

from __future__ import annotations

from typing import Any

import torch

from vmonarch.kernels.common.launch import positively_scaled
from vmonarch.kernels.common.operators import new_results, operator
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


def _fake(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out, lse = new_results(*inputs)
    return out, lse, torch.empty_like(lse)


@replayed
def _backward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), each in the shape and dtype of its input."""
    grad_out, grad_lse, grad_entropy, query, key, value, out, lse, entropy, scale, entropy_grad = inputs
    segments = all_pairs(query.shape[1], key.shape[1])
    grad_entropy = grad_entropy if entropy_grad else None
    return flash_backward(grad_out, grad_lse, grad_entropy, query, key, value, out, lse, entropy, segments, scale=scale)


_operator = operator(
    "vmonarch::flash_entropy",
    _forward,
    _backward,
    "Tensor query, Tensor key, Tensor value, float scale, bool entropy_grad",
    fake=_fake,
    results=3,
    smooth=3,
    gradients=3,
)


def flash_entropy_attention_triton(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, entropy_grad: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Flash-Entropy-Attention by the kernels; arguments as in `flash_entropy_attention`, already checked."""
    query, scale = positively_scaled(query, scale)
    out, lse, entropy = _operator(query, key, value, scale, entropy_grad)
    return out, lse, entropy if entropy_grad else entropy.detach()
