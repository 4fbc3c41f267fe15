"""FlashBias as a torch operator: opaque to torch.compile, differentiable, without views of its inputs.

Shapes: B batch, Sq queries, Sk keys, H heads, D head dim, E value dim, R bias rank. Factors are [B or 1, S, H or 1, R].
"""

from __future__ import annotations

from typing import Any

import torch

from vmonarch.kernels.common.launch import needs_operator, unit_stride
from vmonarch.kernels.common.operators import differentiable, new_results
from vmonarch.kernels.flash_bias import launch
from vmonarch.kernels.flash_bias.factors import gradients_of_cut
from vmonarch.kernels.flash_entropy.backward import flash_backward
from vmonarch.kernels.flash_entropy.segments import all_pairs

_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor query_factor, Tensor key_factor, Tensor? key_mask"
_NUMBERS = "float scale, bool causal"


@torch.library.custom_op(
    "vmonarch::flash_bias_forward", mutates_args=(), schema=f"({_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor)"
)
def flash_bias_forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, Sq, H, E], lse [B, H, Sq])."""
    return launch.flash_bias_forward(*inputs)


@torch.library.custom_op(
    "vmonarch::flash_bias_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor? grad_lse, {_TENSORS}, Tensor out, Tensor lse, {_NUMBERS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def flash_bias_backward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv, dφq, dφk), each in the shape and dtype of its input."""
    grad_out, grad_lse, query, key, value, *factors, key_mask, out, lse, scale, causal = inputs
    B, Sq, H, _ = query.shape
    rank = factors[0].shape[3]
    grad_out = unit_stride(grad_out)
    if grad_lse is not None and key_mask is not None:
        # A query without any key has no gradient, whatever its lse's is.
        grad_lse = grad_lse.masked_fill(lse == -torch.inf, 0.0)
    bias = launch.bias_for_kernels(query, key, value, factors[0], factors[1], key_mask, causal, grad_out)
    # Sums of gradients are taken in float32.
    whole = (B, H, query.dtype)
    dtypes = [f.dtype if (f.shape[0], f.shape[2], f.dtype) == whole else torch.float32 for f in factors]
    dfq, dfk = (query.new_empty(B, f.shape[1], H, bias.rank, dtype=d) for f, d in zip(factors, dtypes, strict=True))
    gradients = flash_backward(
        grad_out, grad_lse, None, query, key, value, out, lse, None, all_pairs(Sq, key.shape[1]),
        scale=scale, splits=1, bias=bias, dfq=dfq, dfk=dfk,
    )  # fmt: skip
    if factors[0].dtype == query.dtype:
        dfq, dfk = dfq[..., :rank], dfk[..., :rank]
    else:
        dfq, dfk = gradients_of_cut(dfq, dfk, rank, query.dtype)
    # A factor that batch entries or heads share has the sum of their gradients.
    return *gradients, *(
        d.sum_to_size(f.shape).to(f.dtype).contiguous() for d, f in zip((dfq, dfk), factors, strict=True)
    )


flash_bias_forward.register_fake(new_results)
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
    return launch.flash_bias_forward(*tensors, key_mask, scale, causal)
