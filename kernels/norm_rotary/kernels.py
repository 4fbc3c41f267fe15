"""RMS norm over all heads and rotation of channel pairs in Triton, one token at a time; a pass over memory each way.

    r = 1/√(mean_c x_c² + ε),  y = x·r·w, rounded;  (out₂ᵢ, out₂ᵢ₊₁) = (y₂ᵢ·cos − y₂ᵢ₊₁·sin, y₂ᵢ·sin + y₂ᵢ₊₁·cos)

Backward recomputes r: with g the gradient rotated back and h = g·w,

    dx = r·(h − x·r²·mean_c(h·x)),  dw = Σ_tokens g·x·r

Every program sums dw over its own tokens; the parts are added afterwards, always in the same order.

Shapes: B batch, S tokens, H heads, D head dim, C = H·D channels; P pairs of channels, a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def _angles(cos_ptr, sin_ptr, stride_cos, stride_sin, s, pairs, C: tl.constexpr, D: tl.constexpr):
    """Cosines and sines [P] of token s: those of even and of odd channels, of which every pair has one each."""
    channels = 2 * pairs % D
    real = 2 * pairs < C
    cos = tl.load(cos_ptr + s * stride_cos + channels, mask=real, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + s * stride_sin + channels + 1, mask=real, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit(do_not_specialize=["S"])
def norm_rotary_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, stride_b, stride_s, stride_cos, stride_sin, S, eps,
    C: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """out [B, S, C] of x [B, S, C]; one program for each token."""
    token = tl.program_id(0).to(tl.int64)
    b, s = token // S, token % S
    pairs = tl.arange(0, P)
    even, odd = _load_pairs(x_ptr + b * stride_b + s * stride_s, C, P)
    weight_even, weight_odd = _load_pairs(weight_ptr, C, P)
    cos, sin = _angles(cos_ptr, sin_ptr, stride_cos, stride_sin, s, pairs, C, D)
    r = tl.rsqrt(tl.sum(even * even + odd * odd, 0) / C + eps)
    # As the model does, which normalises and rotates in two steps.
    dtype = out_ptr.dtype.element_ty
    even = (even * r * weight_even).to(dtype).to(tl.float32)
    odd = (odd * r * weight_odd).to(dtype).to(tl.float32)
    _store_pairs(out_ptr + token * C, even * cos - odd * sin, even * sin + odd * cos, C, P)


@triton.jit(do_not_specialize=["S", "tokens"])
def norm_rotary_backward_kernel(
    grad_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, dx_ptr, dw_ptr, grad_b, grad_s, stride_b, stride_s, stride_cos,
    stride_sin, S, tokens, eps, C: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
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
        even, odd = _load_pairs(x_ptr + b * stride_b + s * stride_s, C, P)
        grad_even, grad_odd = _load_pairs(grad_ptr + b * grad_b + s * grad_s, C, P)
        cos, sin = _angles(cos_ptr, sin_ptr, stride_cos, stride_sin, s, pairs, C, D)
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
