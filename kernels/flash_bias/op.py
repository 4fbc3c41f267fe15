"""FlashBias as a torch operator: opaque to torch.compile, differentiable, without views of its inputs.

Shapes: B batch, Sq queries, Sk keys, H heads, D head dim, E value dim, R bias rank. Factors are [B or 1, S, H or 1, R].
"""

from __future__ import annotations

from typing import Any

import torch

from vmonarch.kernels.common.launch import needs_operator, unit_stride
from vmonarch.kernels.common.operators import differentiable
from vmonarch.kernels.flash_bias import launch as kernels
from vmonarch.kernels.flash_bias.factors import gradients_of_cut, in_dtype

_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor query_factor, Tensor key_factor, Tensor? key_mask"
_NUMBERS = "float scale, bool causal"


def _launch(*inputs: Any) -> kernels.Launch:
    query, key, value, query_factor, key_factor, *others = inputs
    factors = map(unit_stride, in_dtype(query_factor, key_factor, query.dtype))
    # Of expanded dimensions, what is there.
    factors = (f[: 1 if f.stride(0) == 0 else None, :, : 1 if f.stride(2) == 0 else None] for f in factors)
    return kernels.Launch(query, key, value, *factors, *others)


@torch.library.custom_op(
    "vmonarch::flash_bias_forward", mutates_args=(), schema=f"({_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor)"
)
def flash_bias_forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, Sq, H, E], lse [B, H, Sq])."""
    return kernels.flash_bias_forward(_launch(*inputs))


@flash_bias_forward.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    B, Sq, H, _D = query.shape
    return query.new_empty(B, Sq, H, value.shape[3]), query.new_empty(B, H, Sq, dtype=torch.float32)


@torch.library.custom_op(
    "vmonarch::flash_bias_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor? grad_lse, {_TENSORS}, Tensor out, Tensor lse, {_NUMBERS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def flash_bias_backward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv, dφq, dφk), each in the shape and dtype of its input."""
    grad_out, grad_lse, *tensors, out, lse, scale, causal = inputs
    query, _, _, *factors, _ = tensors
    rank = factors[0].shape[3]
    # Sums of gradients are taken in float32.
    whole = (query.shape[0], query.shape[2], query.dtype)
    dtypes = [f.dtype if (f.shape[0], f.shape[2], f.dtype) == whole else torch.float32 for f in factors]
    launch = _launch(*tensors, scale, causal)
    *gradients, dfq, dfk = kernels.flash_bias_backward(launch, grad_out, grad_lse, out, lse, (dtypes[0], dtypes[1]))
    if factors[0].dtype == query.dtype:
        dfq, dfk = dfq[..., :rank], dfk[..., :rank]
    else:
        dfq, dfk = gradients_of_cut(dfq, dfk, rank, query.dtype)
    # A factor that batch entries or heads share has the sum of their gradients.
    return *gradients, *(
        d.sum_to_size(f.shape).to(f.dtype).contiguous() for d, f in zip((dfq, dfk), factors, strict=True)
    )


differentiable(flash_bias_forward, flash_bias_backward, tensors=6, gradients=5)


def flash_bias_attention_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_factor: torch.Tensor,
    key_factor: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    key_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by the kernels; arguments as in `flash_bias_attention`, already checked."""
    if scale <= 0:
        # The kernels divide the bias by the scale and take the maximum of what is left.
        query, scale = (-query, -scale) if scale < 0 else (query * 0, 1.0)
    tensors = (query, key, value, query_factor, key_factor)
    if needs_operator(*tensors):
        return flash_bias_forward(*tensors, key_mask, scale, causal)
    return kernels.flash_bias_forward(_launch(*tensors, key_mask, scale, causal))
