"""The monoid that merges partial attentions (docs/attention.md, "Merging").

An element is a pair (value, lse): a normalised value and its log-weight. Merging is associative and commutative, and
(0, -inf) is the neutral element. Tiles of a kernel, split keys, exact and Monarch parts of one row, text and video
keys and the partial results of several devices all meet through this one operation.
"""

from __future__ import annotations

from typing import Any

import torch

from vmonarch.kernels.common.launch import use_triton
from vmonarch.kernels.common.trust import Case
from vmonarch.kernels.merge.reference import merge_partials_reference
from vmonarch.validation import check_implementation


def merge_partials(
    *partials: tuple[torch.Tensor, torch.Tensor], implementation: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial attention results over disjoint sets of keys into the result over their union.

    Args:
        partials: pairs (out [B, S, H, E], lse [B, H, S]); lse is the logarithm of the sum of exponentials that `out`
            was normalised by, -inf where no key was attended (`out` is ignored there).
        implementation: "torch"; "triton", the kernel (CUDA; two partial results of one dtype, float16, bfloat16 or
            float32, with lse in float32; E up to 256, with stride 1); or "auto", see
            `kernels.common.launch.use_triton`.

    Returns:
        (out [B, S, H, E] in the dtype of the first `out`, lse [B, H, S]).

    Raises:
        TypeError: a partial result is not a pair of tensors, or `out` and `lse` are not floating point.
        ValueError: no partial result is given, or shapes or devices do not fit together.
        NotImplementedError: implementation="triton", and the kernel cannot take this call; the message says why.
    """
    if not partials:
        raise ValueError("merge_partials needs at least one partial result (out, lse)")
    for number, partial in enumerate(partials):
        _check_partial(number, partial, partials[0])
    check_implementation(implementation)
    outs = [out for out, _ in partials]
    lses = [lse for _, lse in partials]
    reason = _why_not_kernels(partials)
    if use_triton("merge_partials", implementation, *outs, op="merge", unless=reason, others=lses):
        # Triton is imported when it is needed, not with the package.
        from vmonarch.kernels.merge.op import merge_pair

        return merge_pair(*partials[0], *partials[1])
    return merge_partials_reference(*partials)


def _why_not_kernels(partials: tuple[tuple[torch.Tensor, torch.Tensor], ...]) -> str | None:
    if len(partials) != 2:
        return f"there are {len(partials)} partial results (supported: 2)"
    (first, first_lse), (second, second_lse) = partials
    if first.dtype != second.dtype:
        return f"out is {first.dtype} and {second.dtype} (supported: one dtype)"
    dtypes = {first_lse.dtype, second_lse.dtype}
    return None if dtypes == {torch.float32} else f"lse is {', '.join(map(str, dtypes))} (supported: torch.float32)"


def _check_partial(number: int, partial: object, first: tuple[torch.Tensor, torch.Tensor]) -> None:
    if not isinstance(partial, (tuple, list)) or len(partial) != 2:
        raise TypeError(f"partial result {number} must be a pair (out, lse), got {type(partial).__name__}")
    for name, tensor in zip(("out", "lse"), partial, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} of partial result {number} must be a torch.Tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} of partial result {number} must be floating point, got {tensor.dtype}")
    out, lse = partial
    if out.ndim != 4:
        raise ValueError(f"out of partial result {number} must be [B, S, H, E], got shape {tuple(out.shape)}")
    expected = (out.shape[0], out.shape[2], out.shape[1])
    if lse.shape != expected:
        raise ValueError(f"lse of partial result {number} must be [B, H, S] = {expected}, got {tuple(lse.shape)}")
    if out.shape != first[0].shape:
        raise ValueError(
            f"out of partial result {number} must have the shape of the first, {tuple(first[0].shape)},"
            f" got {tuple(out.shape)}"
        )
    if out.device != first[0].device or lse.device != first[0].device:
        raise ValueError(f"partial result {number} must lie on the device of the first ({first[0].device})")


def tiny_case(gpu: bool) -> Case:
    """The case by which `trust` checks the kernels."""

    def call(*tensors: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
        out_1, lse_1, out_2, lse_2 = tensors
        return merge_partials((out_1, lse_1.float()), (out_2, lse_2.float()), **how)

    tokens, head_dim = (300, 128) if gpu else (4, 16)
    out, lse = (1, tokens, 2, head_dim), (1, 2, tokens)
    return Case({"out 1": out, "log-partition 1": lse, "out 2": out, "log-partition 2": lse}, call)
