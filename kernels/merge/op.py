"""Merging two partial attentions in Triton, one pass over memory each way.

    lse = log(e^lse₁ + e^lse₂),  sᵢ = e^(lseᵢ − lse),  out = s₁·out₁ + s₂·out₂
    doutᵢ = sᵢ·dout,  dlseᵢ = sᵢ·(⟨dout, outᵢ⟩ − ⟨dout, out⟩ + dlse)

A program takes some tokens of one head (`tokens_of_a_head`).

Shapes: B batch, S tokens, H heads, E value dim. Outputs are [B, S, H, E], log-partitions [B, H, S], with any strides
but the last of an output; what the kernels write is contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vmonarch.kernels.common.launch import unit_stride
from vmonarch.kernels.common.operators import operator
from vmonarch.kernels.common.replay import replayed
from vmonarch.kernels.common.tiles import head_of, launch_on_tokens, load_rows, store_rows, strided, tokens_of_a_head


@triton.jit
def _share(lse, whole):
    """e^(lse − whole), 0 where no key was attended at all."""
    return tl.where(whole == float("-inf"), 0.0, tl.exp(lse - whole))


@triton.jit(do_not_specialize=["S", "H", "stride_1lb", "stride_1lh", "stride_2lb", "stride_2lh"])
def merge_kernel(
    output_1, lse_ptr_1, output_2, lse_ptr_2, out_ptr, lse_ptr, stride_1lb, stride_1lh, stride_1ls,
    stride_2lb, stride_2lh, stride_2ls, S, H, E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out [B, S, H, E] and lse [B, H, S]."""
    b, h, token, exists = tokens_of_a_head(S, H, ROWS)
    lse_1 = tl.load(lse_ptr_1 + b * stride_1lb + h * stride_1lh + token * stride_1ls, mask=exists, other=0.0)
    lse_2 = tl.load(lse_ptr_2 + b * stride_2lb + h * stride_2lh + token * stride_2ls, mask=exists, other=0.0)
    # A finite shift keeps (-inf) - (-inf) out of the exponent where both parts are empty.
    largest = tl.maximum(lse_1, lse_2)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    weight_1, weight_2 = tl.exp(lse_1 - shift), tl.exp(lse_2 - shift)
    total = weight_1 + weight_2
    safe_total = tl.where(total == 0.0, 1.0, total)
    share_1, share_2 = (weight_1 / safe_total)[:, None], (weight_2 / safe_total)[:, None]
    out_1 = load_rows(head_of(output_1, b, h), output_1.stride_s, token, exists, E, BLOCK_E, True)
    out_2 = load_rows(head_of(output_2, b, h), output_2.stride_s, token, exists, E, BLOCK_E, True)
    # An empty part counts for nothing whatever its output holds; a NaN weight must stay visible.
    out = tl.where(share_1 == 0.0, 0.0, out_1.to(tl.float32) * share_1)
    out += tl.where(share_2 == 0.0, 0.0, out_2.to(tl.float32) * share_2)
    store_rows(out_ptr, E, (b * S + token) * H + h, exists, out, E, BLOCK_E)
    lse = tl.where(total == 0.0, float("-inf"), shift + tl.log(safe_total))
    tl.store(lse_ptr + (b * H + h) * S + token, lse, mask=exists)


@triton.jit(do_not_specialize=["S", "H", "stride_1lb", "stride_1lh", "stride_2lb", "stride_2lh"])
def merge_backward_kernel(
    grad_output, dlse_ptr, output_1, lse_ptr_1, output_2, lse_ptr_2, lse_ptr, dout_ptr_1, dlse_ptr_1, dout_ptr_2,
    dlse_ptr_2, stride_1lb, stride_1lh, stride_1ls, stride_2lb, stride_2lh, stride_2ls, S, H,
    E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of both outputs and log-partitions; `dlse_ptr` is None where that of lse is zero."""
    b, h, token, exists = tokens_of_a_head(S, H, ROWS)
    row, statistic = (b * S + token) * H + h, (b * H + h) * S + token
    whole = tl.load(lse_ptr + statistic, mask=exists, other=0.0)
    lse_1 = tl.load(lse_ptr_1 + b * stride_1lb + h * stride_1lh + token * stride_1ls, mask=exists, other=0.0)
    lse_2 = tl.load(lse_ptr_2 + b * stride_2lb + h * stride_2lh + token * stride_2ls, mask=exists, other=0.0)
    share_1, share_2 = _share(lse_1, whole), _share(lse_2, whole)
    dout = load_rows(head_of(grad_output, b, h), grad_output.stride_s, token, exists, E, BLOCK_E, True)
    dout = dout.to(tl.float32)
    store_rows(dout_ptr_1, E, row, exists, dout * share_1[:, None], E, BLOCK_E)
    store_rows(dout_ptr_2, E, row, exists, dout * share_2[:, None], E, BLOCK_E)
    out_1 = load_rows(head_of(output_1, b, h), output_1.stride_s, token, exists, E, BLOCK_E, True)
    out_2 = load_rows(head_of(output_2, b, h), output_2.stride_s, token, exists, E, BLOCK_E, True)
    along_1 = tl.where(share_1 == 0.0, 0.0, tl.sum(dout * out_1.to(tl.float32), 1))
    along_2 = tl.where(share_2 == 0.0, 0.0, tl.sum(dout * out_2.to(tl.float32), 1))
    common = -(share_1 * along_1 + share_2 * along_2)
    if dlse_ptr is not None:
        common += tl.load(dlse_ptr + statistic, mask=exists, other=0.0)
    # Where a part is empty, its share is 0, and so is its gradient.
    tl.store(dlse_ptr_1 + statistic, share_1 * (along_1 + common), mask=exists)
    tl.store(dlse_ptr_2 + statistic, share_2 * (along_2 + common), mask=exists)


Pair = tuple[torch.Tensor, torch.Tensor]


def _new_pair(out_1: torch.Tensor, lse_1: torch.Tensor, *_: Any) -> Pair:
    return out_1.new_empty(out_1.shape), lse_1.new_empty(lse_1.shape)


@replayed
def _forward(out_1: torch.Tensor, lse_1: torch.Tensor, out_2: torch.Tensor, lse_2: torch.Tensor) -> Pair:
    """(out [B, S, H, E], lse [B, H, S])."""
    out, lse = _new_pair(out_1, lse_1)
    parts = strided(out_1), lse_1, strided(out_2), lse_2
    launch_on_tokens(merge_kernel, out, *parts, out, lse, *lse_1.stride(), *lse_2.stride())
    return out, lse


@replayed
def _backward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    """(dout₁, dlse₁, dout₂, dlse₂)."""
    grad_out, grad_lse, *parts, lse = inputs
    grad_out = unit_stride(grad_out)
    found = [x.new_empty(x.shape) for x in parts]
    out_1, lse_1, out_2, lse_2 = parts
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    launch_on_tokens(
        merge_backward_kernel, found[0], strided(grad_out), grad_lse, strided(out_1), lse_1, strided(out_2), lse_2,
        lse, *found, *lse_1.stride(), *lse_2.stride(),
    )  # fmt: skip
    return tuple(found)


# (out₁, lse₁, out₂, lse₂) of `merge_partials`, already checked, to (out, lse).
merge_pair = operator(
    "vmonarch::merge",
    _forward,
    _backward,
    "Tensor out_1, Tensor lse_1, Tensor out_2, Tensor lse_2",
    fake=_new_pair,
    gradients=4,
    kept=slice(1, 2),
)
