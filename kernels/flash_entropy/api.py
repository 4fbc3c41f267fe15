"""Flash-Entropy-Attention: softmax attention that also yields the entropy of every row."""

from __future__ import annotations

from typing import Any

import torch

from vmonarch.autocast import without_autocast
from vmonarch.kernels.common.checks import check_qkv
from vmonarch.kernels.common.launch import use_triton
from vmonarch.kernels.common.trust import Case, qkv_shapes
from vmonarch.kernels.flash_entropy.reference import flash_entropy_attention_reference
from vmonarch.validation import check_flag, check_implementation, resolve_scale


@without_autocast
def flash_entropy_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None = None,
    entropy_grad: bool = False,
    implementation: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exact softmax attention that also returns the log-partition and the Shannon entropy of every row.

    Args:
        query: [B, Sq, H, D].
        key: [B, Sk, H, D].
        value: [B, Sk, H, Dv].
        scale: softmax scale; 1/√D if None.
        entropy_grad: whether gradients flow through the entropy. The paper stops them, because they dominate the
            gradient of the output and make training unstable. They are not computed by kernels for Hopper.
        implementation: "torch"; "triton", the fused kernels (CUDA; float16, bfloat16 or float32; head dimensions up to
            256); or "auto", see `kernels.common.launch.use_triton`.

    Returns:
        (out [B, Sq, H, Dv] in the dtype of `query`, lse [B, H, Sq] and entropy [B, H, Sq], both in nats and in
        float32, or float64 for float64 inputs).

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        NotImplementedError: implementation="triton", and the kernels cannot take the tensors; the message says why.

    Source: VMonarch, Algorithms 1 and 2.
    """
    check_qkv(query, key, value)
    check_flag("entropy_grad", entropy_grad)
    check_implementation(implementation)
    scale = resolve_scale(scale, query.shape[-1])
    if use_triton("flash_entropy_attention", implementation, query, key, value, op="flash_entropy"):
        # Triton is imported when it is needed, not with the package.
        from vmonarch.kernels.flash_entropy.op import flash_entropy_attention_triton

        return flash_entropy_attention_triton(query, key, value, scale=scale, entropy_grad=entropy_grad)
    return flash_entropy_attention_reference(query, key, value, scale=scale, entropy_grad=entropy_grad)


def tiny_case(gpu: bool) -> Case:
    """The case by which `trust` checks the kernels."""

    def call(*qkv: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
        # With a gradient through the entropy, and without one, as other kernels have it.
        return (*flash_entropy_attention(*qkv, entropy_grad=True, **how), *flash_entropy_attention(*qkv, **how)[:2])

    return Case(qkv_shapes(200, 300, 128) if gpu else qkv_shapes(4, 20, 16), call)
