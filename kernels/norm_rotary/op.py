"""RMS norm and rotary embedding as a torch operator, differentiable in x and weight.

Shapes: B batch, S tokens, H heads, D head dim, C = H·D channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from vmonarch.kernels.common.launch import learns, unit_stride
from vmonarch.kernels.common.operators import operator
from vmonarch.kernels.common.replay import launcher, replayed
from vmonarch.kernels.norm_rotary.kernels import norm_rotary_backward_kernel, norm_rotary_kernel

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
        x, weight.contiguous(), cosines, sines, out, x.stride(0), x.stride(1), cosines.stride(1), sines.stride(1),
        S, eps, **_constants(x, cosines),
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
        grad, x, weight.contiguous(), cosines, sines, dx, parts, grad.stride(0), grad.stride(1), x.stride(0),
        x.stride(1), cosines.stride(1), sines.stride(1), S, B * S, eps, **_constants(x, cosines),
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
