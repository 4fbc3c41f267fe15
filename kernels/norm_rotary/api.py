"""RMS norm of all heads together and rotary embedding of queries or keys, in one pass."""

from __future__ import annotations

from typing import Any

import torch

from vmonarch.autocast import without_autocast
from vmonarch.kernels.common.launch import KERNEL_DTYPES, TRITON_INSTALLED, interpreted, use_triton
from vmonarch.kernels.common.trust import Case
from vmonarch.kernels.norm_rotary.reference import norm_rotary_reference
from vmonarch.validation import check_implementation, check_positive_integer

# Channels that one program holds in its registers.
MAX_CHANNELS = 16384


@without_autocast
def norm_rotary(
    x: torch.Tensor,
    weight: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    *,
    heads: int,
    eps: float,
    implementation: str = "auto",
) -> torch.Tensor:
    """Queries or keys of a Wan transformer from their projection: RMS norm over all heads, then rotary embedding.

    Each of the two is computed in float32 (or float64 for float64 inputs) and rounded to the dtype of x, as diffusers
    does.

    Args:
        x: [B, S, C], C = heads·D, D even; any strides.
        weight: [C], of the norm.
        cosines, sines: [1, S, 1, D], those of a pair of channels beside each other, as diffusers has them. They get no
            gradient.
        eps: added to the mean square.
        implementation: "torch"; "triton", the kernels (CUDA; float16, bfloat16 or float32; up to 16,384 channels); or
            "auto", the kernels where they can be used.

    Returns:
        [B, S, H, D], contiguous, in the dtype of x.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        NotImplementedError: implementation="triton", and the kernels cannot take this call; the message says why.
    """
    check_implementation(implementation)
    check_positive_integer("heads", heads)
    if x.ndim != 3 or x.shape[2] % (2 * heads) or not x.numel():
        raise ValueError(f"x must be [B, S, C], C a multiple of 2·heads = {2 * heads}, and not empty, got {[*x.shape]}")
    if weight.shape != x.shape[2:]:
        raise ValueError(f"weight must be [C] = [{x.shape[2]}], got {tuple(weight.shape)}")
    angles = (1, x.shape[1], 1, x.shape[2] // heads)
    for name, tensor in (("cosines", cosines), ("sines", sines)):
        if tensor.shape != angles:
            raise ValueError(f"{name} must be [1, S, 1, D] = {list(angles)}, got {tuple(tensor.shape)}")
        if tensor.requires_grad:
            raise ValueError(f"{name} must not require a gradient: it gets none")
    tensors = (x, weight, cosines, sines)
    if use_triton("norm_rotary", implementation, *tensors, op="norm_rotary", why_not=why_not_triton):
        # Triton is imported when it is needed, not with the package.
        from vmonarch.kernels.norm_rotary.op import norm_rotary_triton

        return norm_rotary_triton(x, weight, cosines, sines, heads, eps)
    return norm_rotary_reference(x, weight, cosines, sines, heads=heads, eps=eps)


def why_not_triton(x: torch.Tensor, *others: torch.Tensor) -> str | None:
    """Why the kernels cannot take these tensors, or None if they can."""
    if not TRITON_INSTALLED:
        return "the package triton (on Windows triton-windows) is not installed"
    if x.device.type != "cuda" and not (x.device.type == "cpu" and interpreted()):
        return f"the tensors are on {x.device.type} (supported: CUDA; the CPU only through TRITON_INTERPRET=1)"
    for tensor in (x, *others):
        if tensor.device != x.device:
            return f"the tensors are on {x.device} and {tensor.device} (supported: one device)"
        if tensor.dtype not in KERNEL_DTYPES:
            supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in KERNEL_DTYPES)
            return f"a dtype is {str(tensor.dtype).removeprefix('torch.')} (supported: {supported})"
    if x.shape[2] > MAX_CHANNELS:
        return f"there are {x.shape[2]} channels (supported: up to {MAX_CHANNELS})"
    return None


def tiny_case(gpu: bool) -> Case:
    """The case by which `trust` checks the kernels."""
    tokens, heads, head_dim = (300, 12, 128) if gpu else (3, 2, 8)

    def call(x: torch.Tensor, weight: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
        angles = torch.arange(tokens)[:, None] / torch.arange(1, 1 + head_dim // 2)
        angles = angles.repeat_interleave(2, 1)[None, :, None]
        cosines, sines = angles.cos().to(x), angles.sin().to(x)
        return (norm_rotary(x, weight, cosines, sines, heads=heads, eps=1e-6, **how),)

    channels = heads * head_dim
    return Case({"x": (1, tokens, channels), "weight": (channels,)}, call)
