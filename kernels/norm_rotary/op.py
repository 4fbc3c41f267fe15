"""RMS norm over all heads and rotation of channel pairs in Triton, one token at a time; a pass over memory each way.

    r = 1/√(mean_c x_c² + ε),  y = x·r·w, rounded;  (out₂ᵢ, out₂ᵢ₊₁) = (y₂ᵢ·cos − y₂ᵢ₊₁·sin, y₂ᵢ·sin + y₂ᵢ₊₁·cos)

Backward recomputes r: with g the gradient rotated back and h = g·w,

    dx = r·(h − x·r²·mean_c(h·x)),  dw = Σ_tokens g·x·r

Every program sums dw over its own tokens; the parts are added afterwards, always in the same order.

Shapes: B batch, S tokens, H heads, D head dim, C = H·D channels; P pairs of channels, a power of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vmonarch.kernels.common.launch import learns, unit_stride
from vmonarch.kernels.common.operators import operator
from vmonarch.kernels.common.replay import launcher, replayed
from vmonarch.kernels.common.tiles import broadcast, strided


@triton.jit
def _load_pairs(ptr, C: tl.constexpr, P: tl.constexpr):
    """Even and odd channels [P] of a row, in float32."""
    channels = tl.arange(0, 2 * P)
    x = tl.load(ptr + channels, mask=channels < C, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(x, [P, 2]))


@triton.jit
def _store_pairs(ptr, even, odd, C: tl.constexpr, P: tl.constexpr):
    """The inverse of `_load_pairs`, in the dtype of `ptr`."""
    channels = tl.arange(0, 2 * P)
    x = tl.reshape(tl.join(even, odd), [2 * P])
    tl.store(ptr + channels, x.to(ptr.dtype.element_ty), mask=channels < C)


@triton.jit
def _angles(cosines, sines, s, pairs, C: tl.constexpr, D: tl.constexpr):
    """Cosines and sines [P] of token s: those of even and of odd channels, of which every pair has one each."""
    channels = 2 * pairs % D
    real = 2 * pairs < C
    cos = tl.load(cosines.ptr + s * cosines.stride_s + channels, mask=real, other=0.0).to(tl.float32)
    sin = tl.load(sines.ptr + s * sines.stride_s + channels + 1, mask=real, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit(do_not_specialize=["S"])
def norm_rotary_kernel(
    x, weight_ptr, cosines, sines, out_ptr, S, eps, C: tl.constexpr, D: tl.constexpr, P: tl.constexpr
):
    """out [B, S, C] of x [B, S, C]; one program for each token."""
    token = tl.program_id(0).to(tl.int64)
    b, s = token // S, token % S
    pairs = tl.arange(0, P)
    even, odd = _load_pairs(x.ptr + b * x.stride_b + s * x.stride_s, C, P)
    weight_even, weight_odd = _load_pairs(weight_ptr, C, P)
    cos, sin = _angles(cosines, sines, s, pairs, C, D)
    r = tl.rsqrt(tl.sum(even * even + odd * odd, 0) / C + eps)
    # Rounded as in the model, which normalises and rotates in two steps.
    dtype = out_ptr.dtype.element_ty
    even = (even * r * weight_even).to(dtype).to(tl.float32)
    odd = (odd * r * weight_odd).to(dtype).to(tl.float32)
    _store_pairs(out_ptr + token * C, even * cos - odd * sin, even * sin + odd * cos, C, P)


@triton.jit(do_not_specialize=["S", "tokens"])
def norm_rotary_backward_kernel(
    grad, x, weight_ptr, cosines, sines, dx_ptr, dw_ptr, S, tokens, eps,
    C: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """dx [B, S, C], and a program's part of dw [programs, C]; a program takes every n-th token."""
    pairs = tl.arange(0, P)
    weight_even, weight_odd = _load_pairs(weight_ptr, C, P)
    sum_even = tl.zeros([P], tl.float32)
    sum_odd = tl.zeros([P], tl.float32)
    first = tl.program_id(0).to(tl.int64)
    for turn in range(tl.cdiv(tokens - tl.program_id(0), tl.num_programs(0))):
        token = first + turn * tl.num_programs(0)
        b, s = token // S, token % S
        even, odd = _load_pairs(x.ptr + b * x.stride_b + s * x.stride_s, C, P)
        grad_even, grad_odd = _load_pairs(grad.ptr + b * grad.stride_b + s * grad.stride_s, C, P)
        cos, sin = _angles(cosines, sines, s, pairs, C, D)
        r = tl.rsqrt(tl.sum(even * even + odd * odd, 0) / C + eps)
        g_even = grad_even * cos + grad_odd * sin
        g_odd = grad_odd * cos - grad_even * sin
        h_even, h_odd = g_even * weight_even, g_odd * weight_odd
        # Σ_c h·x·r² / C
        share = tl.sum(h_even * even + h_odd * odd, 0) / C * r * r
        _store_pairs(dx_ptr + token * C, r * (h_even - even * share), r * (h_odd - odd * share), C, P)
        sum_even += g_even * even * r
        sum_odd += g_odd * odd * r
    _store_pairs(dw_ptr + first * C, sum_even, sum_odd, C, P)


# Programs of the backward kernel, whose parts of dw are added afterwards: enough to fill every chip several times.
PROGRAMS = 1024


def _constants(x: torch.Tensor, cosines: torch.Tensor) -> dict[str, int]:
    C = x.shape[2]
    P = max(triton.next_power_of_2(C) // 2, 8)
    # 16 channels for each thread: loads of 16 bytes, and several of them on the way.
    return {"C": C, "D": cosines.shape[-1], "P": P, "num_warps": min(max(P // 256, 1), 16)}


def _new_result(x: torch.Tensor, weight: Any, cosines: Any, sines: Any, heads: int, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1], heads, x.shape[2] // heads)


@replayed
def _forward(
    x: torch.Tensor, weight: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int, eps: float
) -> torch.Tensor:
    """out [B, S, H, D]."""
    B, S, _ = x.shape
    x, cosines, sines = unit_stride(x), unit_stride(cosines), unit_stride(sines)
    out = _new_result(x, weight, cosines, sines, heads)
    launcher(norm_rotary_kernel, (B * S,))(
        strided(x), weight.contiguous(), broadcast(cosines), broadcast(sines), out, S, eps, **_constants(x, cosines)
    )  # fmt: skip
    return out


@replayed
def _backward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx [B, S, C], dw [C]), in the dtypes of x and weight."""
    grad, x, weight, cosines, sines, _heads, eps = inputs
    B, S, C = x.shape
    grad, x, cosines, sines = unit_stride(grad.flatten(2)), unit_stride(x), unit_stride(cosines), unit_stride(sines)
    dx = x.new_empty(B, S, C)
    programs = min(B * S, PROGRAMS)
    parts = x.new_empty(programs, C, dtype=torch.float32)
    launcher(norm_rotary_backward_kernel, (programs,))(
        strided(grad), strided(x), weight.contiguous(), broadcast(cosines), broadcast(sines), dx, parts, S, B * S, eps,
        **_constants(x, cosines),
    )  # fmt: skip
    return dx, parts.sum(0).to(weight.dtype)


_operator = operator(
    "vmonarch::norm_rotary",
    _forward,
    _backward,
    "Tensor x, Tensor weight, Tensor cosines, Tensor sines, int heads, float eps",
    fake=_new_result,
    results=1,
    smooth=1,
    gradients=2,
    kept=slice(0, 0),
)


def norm_rotary_triton(
    x: torch.Tensor, weight: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int, eps: float
) -> torch.Tensor:
    """out [B, S, H, D] by the kernels, arguments already checked."""
    # A parameter is no plain tensor.
    return _operator(x, weight if learns(weight) else weight.detach(), cosines, sines, heads, eps)
