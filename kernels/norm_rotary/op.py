"""RMS norm and rotary embedding as a torch operator: opaque to torch.compile, differentiable in x and weight.

Shapes: B batch, S tokens, H heads, D head dim, C = H·D channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from vmonarch.kernels.common.launch import learns, needs_operator, unit_stride
from vmonarch.kernels.common.replay import launcher, replayed
from vmonarch.kernels.norm_rotary.kernels import norm_rotary_backward_kernel, norm_rotary_kernel

# Programs of the backward kernel, whose parts of dw are added afterwards: enough to fill every chip several times.
PROGRAMS = 1024


def _constants(x: torch.Tensor, cosines: torch.Tensor) -> dict[str, int]:
    C = x.shape[2]
    P = max(triton.next_power_of_2(C) // 2, 8)
    # 16 channels for each thread: loads of 16 bytes, and several of them on the way.
    return {"C": C, "D": cosines.shape[-1], "P": P, "num_warps": min(max(P // 256, 1), 16)}


@replayed
def _forward(
    x: torch.Tensor, weight: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int, eps: float
) -> torch.Tensor:
    """out [B, S, H, D]."""
    B, S, C = x.shape
    x, cosines, sines = unit_stride(x), unit_stride(cosines), unit_stride(sines)
    out = x.new_empty(B, S, heads, C // heads)
    launcher(norm_rotary_kernel, (B * S,))(
        x, weight.contiguous(), cosines, sines, out, x.stride(0), x.stride(1), cosines.stride(1), sines.stride(1),
        S, eps, **_constants(x, cosines),
    )  # fmt: skip
    return out


norm_rotary_forward = torch.library.custom_op(
    "vmonarch::norm_rotary_forward",
    _forward,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor cosines, Tensor sines, int heads, float eps) -> Tensor",
)


@norm_rotary_forward.register_fake
def _(x: torch.Tensor, weight: Any, cosines: Any, sines: Any, heads: int, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1], heads, x.shape[2] // heads)


@torch.library.custom_op(
    "vmonarch::norm_rotary_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor weight, Tensor cosines, Tensor sines, float eps, bool with_weight)"
    " -> (Tensor, Tensor)",
)
@replayed
def norm_rotary_backward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx [B, S, C], dw [C], or an empty dw without `with_weight`), in the dtypes of x and weight."""
    grad, x, weight, cosines, sines, eps, with_weight = inputs
    B, S, C = x.shape
    grad, x, cosines, sines = unit_stride(grad.flatten(2)), unit_stride(x), unit_stride(cosines), unit_stride(sines)
    dx = x.new_empty(B, S, C)
    programs = min(B * S, PROGRAMS)
    parts = x.new_empty(programs if with_weight else 0, C, dtype=torch.float32)
    launcher(norm_rotary_backward_kernel, (programs,))(
        grad, x, weight.contiguous(), cosines, sines, dx, parts, grad.stride(0), grad.stride(1), x.stride(0),
        x.stride(1), cosines.stride(1), sines.stride(1), S, B * S, eps, WITH_WEIGHT=with_weight,
        **_constants(x, cosines),
    )  # fmt: skip
    return dx, parts.sum(0).to(weight.dtype) if with_weight else weight.new_empty(0)


@norm_rotary_backward.register_fake
def _(grad: Any, x: torch.Tensor, weight: torch.Tensor, cosines: Any, sines: Any, eps: float, with_weight: bool) -> Any:
    return x.new_empty(x.shape), weight.new_empty(weight.shape[0] if with_weight else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, cosines, sines, _, ctx.eps = inputs
    ctx.save_for_backward(x, weight, cosines, sines)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, cosines, sines = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    dx, dw = norm_rotary_backward(grad, x, weight, cosines, sines, ctx.eps, needs_weight)
    return dx if needs_x else None, dw if needs_weight else None, None, None, None, None


norm_rotary_forward.register_autograd(_backward, setup_context=_setup_context)


def norm_rotary_triton(
    x: torch.Tensor, weight: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int, eps: float
) -> torch.Tensor:
    """out [B, S, H, D] by the kernels, arguments already checked."""
    # A parameter is no plain tensor.
    plain = (x, weight.detach(), cosines, sines)
    if learns(weight) or needs_operator(*plain):
        return norm_rotary_forward(x, weight, cosines, sines, heads, eps)
    return _forward(*plain, heads, eps)
