"""Residuals of attention in Triton, one pass over memory to make one and one to add it.

    x = exact − approximate,  scale = max_E |x| / 127,  values = round(x / scale);  out ← out + values·scale

In place of an older residual, the kernel also sums (x − values·scale)² with the older one's, and exact².

A program takes some tokens of one head (`tokens_of_a_head`). Products and sums are not fused, so that the kernels give
the bits of the reference.

Shapes: B batch, S tokens, H heads, E value dim. Tensors are [B, S, H, E], `exact`, `approximate` and `out` with any
strides but the last, those of a residual contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vmonarch.kernels.common.replay import replayed
from vmonarch.kernels.common.tiles import (
    head_of,
    launch_on_tokens,
    load_rows,
    nearest_int8,
    store_rows,
    strided,
    tokens_of_a_head,
)
from vmonarch.kernels.residual.reference import Residual


@triton.jit(do_not_specialize=["S", "H"])
def attention_residual_kernel(
    exact, approximate, values_ptr, scale_ptr, change_ptr, size_ptr, S, H,
    E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """values [B, S, H, E] and scale [B, S, H].

    With change [B, S, H], they hold an older residual at first; change is Σ_E (x − old)², size Σ_E exact².
    """
    b, h, token, exists = tokens_of_a_head(S, H, ROWS)
    e = load_rows(head_of(exact, b, h), exact.stride_s, token, exists, E, BLOCK_E, True).to(tl.float32)
    a = load_rows(head_of(approximate, b, h), approximate.stride_s, token, exists, E, BLOCK_E, True).to(tl.float32)
    x = e - a
    row = (b * S + token) * H + h
    if change_ptr is not None:
        old = load_rows(values_ptr, E, row, exists, E, BLOCK_E, True).to(tl.float32)
        old *= tl.load(scale_ptr + row, mask=exists, other=0.0)[:, None]
        tl.store(change_ptr + row, tl.sum((x - old) * (x - old), 1), mask=exists)
        tl.store(size_ptr + row, tl.sum(e * e, 1), mask=exists)
    # Magnitudes keep their order as integers, and infinity and NaN are above all numbers.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.where(largest < float("inf"), largest, float("nan")), 127.0)
    tl.store(scale_ptr + row, scale, mask=exists)
    counts = scale >= 1.1754943508222875e-38
    x = tl.where(counts[:, None], x * tl.div_rn(1.0, tl.where(counts, scale, 1.0))[:, None], 0.0)
    store_rows(values_ptr, E, row, exists, nearest_int8(x), E, BLOCK_E)


@triton.jit(do_not_specialize=["S", "H"])
def add_residual_kernel(
    output, values_ptr, scale_ptr, S, H, E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr
):
    """Add a residual to out [B, S, H, E]."""
    b, h, token, exists = tokens_of_a_head(S, H, ROWS)
    row = (b * S + token) * H + h
    out_ptr = head_of(output, b, h)
    out = load_rows(out_ptr, output.stride_s, token, exists, E, BLOCK_E, True)
    x = load_rows(values_ptr, E, row, exists, E, BLOCK_E, True).to(tl.float32)
    x *= tl.load(scale_ptr + row, mask=exists, other=0.0)[:, None]
    store_rows(out_ptr, output.stride_s, token, exists, out.to(tl.float32) + x, E, BLOCK_E)


def attention_residual_triton(exact: torch.Tensor, approximate: torch.Tensor) -> Residual:
    """The residual by the kernel; arguments as in `attention_residual`, already checked."""
    values = exact.new_empty(exact.shape, dtype=torch.int8)
    scale = exact.new_empty(exact.shape[:3], dtype=torch.float32)
    tensors = strided(exact), strided(approximate), values, scale
    launch_on_tokens(attention_residual_kernel, values, *tensors, None, None, enable_fp_fusion=False)
    return Residual(values, scale)


def renew_residual_triton(residual: Residual, exact: torch.Tensor, approximate: torch.Tensor) -> torch.Tensor:
    """Write a residual over an older one by the kernel; arguments and result as in `renew_residual`."""
    change, size = (exact.new_empty(exact.shape[:3], dtype=torch.float32) for _ in range(2))
    tensors = strided(exact), strided(approximate), *residual, change, size
    launch_on_tokens(attention_residual_kernel, residual.values, *tensors, enable_fp_fusion=False)
    return torch.stack([change.sum((1, 2)), size.sum((1, 2))])


@replayed
def add_residual_triton(out: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`out` with the parts of a residual added by the kernel; arguments as in `add_residual`, already checked."""
    parts = values.contiguous(), scale.contiguous()
    launch_on_tokens(add_residual_kernel, out, strided(out), *parts, enable_fp_fusion=False)
    return out
