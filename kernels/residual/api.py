"""The residual of an approximation of attention, which one denoising step keeps for later ones."""

from __future__ import annotations

from typing import Any

import torch

from vmonarch.kernels.common.checks import check_tensor
from vmonarch.kernels.common.launch import carry_tangents, learns, use_triton
from vmonarch.kernels.common.trust import Case
from vmonarch.kernels.residual.reference import (
    Residual,
    add_residual_reference,
    attention_residual_reference,
    renew_residual_reference,
)
from vmonarch.validation import check_implementation


def attention_residual(exact: torch.Tensor, approximate: torch.Tensor, *, implementation: str = "auto") -> Residual:
    """The residual of an approximation of attention, compressed for `add_residual` in later denoising steps.

    The difference exact − approximate is taken in float32 (or float64 for float64 inputs), and kept as int8 with a
    scale for each token and head: a number is off by at most half of it, 1/254 of the largest of these. For
    inference: there is no gradient.

    Args:
        exact: [B, S, H, E], output of exact attention; any strides.
        approximate: output of approximate attention, of the same shape, dtype and device; any strides.
        implementation: "torch"; "triton", the kernel (CUDA; float16, bfloat16 or float32; E up to 256, with stride 1);
            or "auto", see `kernels.common.launch.use_triton`.

    Returns:
        The residual. NaN or infinity in the difference makes the scale of its token and head NaN.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        RuntimeError: an input requires a gradient, and gradients are enabled; or forward-mode AD goes through it.
        NotImplementedError: implementation="triton", and the kernel cannot take this call; the message says why.

    Source: DiTFastAttn (Yuan et al., 2024), window attention with residual sharing.
    """
    _check_pair(exact, approximate, implementation)
    if use_triton("attention_residual", implementation, exact, approximate, op="residual"):
        # Triton is imported when it is needed, not with the package.
        from vmonarch.kernels.residual.kernels import attention_residual_triton

        return attention_residual_triton(exact, approximate)
    return attention_residual_reference(exact, approximate)


def renew_residual(
    residual: Residual, exact: torch.Tensor, approximate: torch.Tensor, *, implementation: str = "auto"
) -> torch.Tensor:
    """Write the residual of this step over that of an earlier one, and measure how wrong the earlier one was here.

    For inference: there is no gradient.

    Args:
        residual: from `attention_residual`, contiguous; it is overwritten.
        exact, approximate, implementation: as in `attention_residual`.

    Returns:
        float32 [2, B]: ‖exact − (approximate + earlier residual)‖² and ‖exact‖² of every sample, over [S, H, E].

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        RuntimeError: an input requires a gradient, and gradients are enabled; or forward-mode AD goes through it.
        NotImplementedError: implementation="triton", and the kernel cannot take this call; the message says why.
    """
    _check_pair(exact, approximate, implementation)
    _check_residual(residual, "exact", exact)
    if not all(part.is_contiguous() for part in residual):
        raise ValueError("residual must be contiguous: it is overwritten")
    if use_triton("renew_residual", implementation, exact, approximate, op="residual"):
        from vmonarch.kernels.residual.kernels import renew_residual_triton

        return renew_residual_triton(residual, exact, approximate)
    return renew_residual_reference(residual, exact, approximate)


def add_residual(out: torch.Tensor, residual: Residual, *, implementation: str = "auto") -> torch.Tensor:
    """Add to the output of approximate attention, in place, what it left out in an earlier denoising step.

    The sum is taken in float32 (or float64 for a float64 output) and rounded once. For inference: there is no gradient.

    Args:
        out: [B, S, H, E]; any strides, but no two numbers in the same place.
        residual: from `attention_residual`, of the same shape.
        implementation: as in `attention_residual`.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        RuntimeError: `out` requires a gradient, and gradients are enabled; or forward-mode AD goes through it.
        NotImplementedError: implementation="triton", and the kernel cannot take this call; the message says why.
    """
    check_tensor("out", out)
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        raise ValueError(f"out must have a place for every number, got strides {out.stride()} for {tuple(out.shape)}")
    _check_residual(residual, "out", out)
    _check_inference(out=out)
    check_implementation(implementation)
    if use_triton("add_residual", implementation, out, op="residual"):
        from vmonarch.kernels.residual.kernels import add_residual_triton

        return add_residual_triton(out, *residual)
    return add_residual_reference(out, residual)


def residual_bytes(B: int, S: int, H: int, E: int) -> int:
    """Memory of a `Residual` of outputs [B, S, H, E]."""
    return B * S * H * (E + 4)


def _check_pair(exact: torch.Tensor, approximate: torch.Tensor, implementation: object) -> None:
    check_tensor("exact", exact)
    check_tensor("approximate", approximate)
    _check_like("approximate", approximate, "exact", exact, exact.dtype)
    _check_inference(exact=exact, approximate=approximate)
    check_implementation(implementation)


def _check_residual(residual: object, model: str, like: torch.Tensor) -> None:
    if not isinstance(residual, Residual):
        raise TypeError(f"residual must be a Residual, got {type(residual).__name__}")
    values, scale = residual
    _check_like("residual.values", values, model, like, torch.int8)
    _check_like("residual.scale", scale, f"{model}[..., 0]", like[..., 0], torch.float32)


def _check_like(name: str, x: torch.Tensor, model: str, like: torch.Tensor, dtype: torch.dtype) -> None:
    if x.shape != like.shape:
        raise ValueError(f"{name} must have the shape of {model} {tuple(like.shape)}, got {tuple(x.shape)}")
    if x.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {x.dtype}")
    if x.device != like.device:
        raise ValueError(f"{name} must lie on the device of {model} ({like.device}), got {x.device}")


def _check_inference(**tensors: torch.Tensor) -> None:
    for name, x in tensors.items():
        if learns(x) or carry_tangents(x):
            raise RuntimeError(
                f"{name} must not require a gradient or carry a tangent: residual sharing is for inference"
            )


def tiny_case(gpu: bool) -> Case:
    """The case by which `trust` checks the kernels."""

    def call(exact: torch.Tensor, approximate: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
        residual = attention_residual(approximate, exact, **how)
        change = renew_residual(residual, exact, approximate, **how)
        return add_residual(approximate.clone(), residual, **how), change

    shape = (1, 300, 2, 128) if gpu else (1, 4, 2, 16)
    return Case({"exact": shape, "approximate": shape}, call, gradients=False)
