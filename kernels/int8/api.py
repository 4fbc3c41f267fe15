"""Exact attention in eight bits: int8 scores, and on Hopper fp8 weights and values."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from vmonarch.autocast import without_autocast
from vmonarch.kernels.common.checks import check_key_mask, check_qkv
from vmonarch.kernels.common.launch import carry_tangents, learns, use_triton
from vmonarch.kernels.common.trust import Case, qkv_shapes
from vmonarch.kernels.int8.reference import int8_attention_reference
from vmonarch.validation import check_flag, check_implementation, resolve_scale


@without_autocast
def int8_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None = None,
    key_mask: torch.Tensor | None = None,
    return_lse: bool = False,
    implementation: str = "auto",
) -> Any:
    """Softmax attention to all keys with products of eight bits, for inference.

    Scores are of int8: queries with a scale for each token, keys with one for each 256, less their mean, which no
    softmax sees. On Hopper, weights and values are of fp8 (e4m3), and the weights are approximate; elsewhere these
    keep their dtype. Results are the same, bit for bit, each time.

    Args:
        query: [B, Sq, H, D].
        key: [B, Sk, H, D].
        value: [B, Sk, H, E].
        scale: softmax scale; 1/√D if None.
        key_mask: bool [B, Sk], True where a key counts. A query without any key gets 0 and the log-partition -inf.
        return_lse: also return the log-partition.
        implementation: "torch"; "triton", the fused kernels (CUDA; float16, bfloat16 or float32; head dimensions up to
            256); or "auto", plain torch on a CPU and the kernels elsewhere.

    Returns:
        out [B, Sq, H, E] in the dtype of `query`; with `return_lse` also lse [B, H, Sq] in nats and in float32, or
        float64 for float64 inputs.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        NotImplementedError: derivatives are wanted; or the kernels cannot take the tensors, which are not on a CPU or
            have implementation="triton". The message says why.

    Source: Zhang et al., SageAttention2 (2024), for int8 scores of keys less their mean.
    """
    check_qkv(query, key, value)
    check_key_mask(key_mask, key)
    check_flag("return_lse", return_lse)
    check_implementation(implementation)
    scale = resolve_scale(scale, query.shape[-1])
    if learns(query, key, value) or carry_tangents(query, key, value):
        raise NotImplementedError(
            "int8_attention has no derivatives (supported: torch.no_grad() outside of forward-mode AD, or 16 bits)"
        )
    attend = int8_attention_reference
    if implementation == "auto" and query.device.type not in ("cpu", "meta"):
        # Plain torch would take many times as long as attention in 16 bits.
        implementation = "triton"
    if use_triton('int8_attention (refresh.precision="int8")', implementation, query, key, value, op="int8"):
        # Triton is imported when it is needed, not with the package.
        from vmonarch.kernels.int8.op import int8_attention_triton

        attend = int8_attention_triton
    out, lse = attend(query, key, value, scale=scale, key_mask=key_mask)
    return (out, lse) if return_lse else out


def tiny_case(gpu: bool) -> Case:
    """The case by which `trust` checks the kernels."""
    inputs = qkv_shapes(200, 300, 128) if gpu else qkv_shapes(4, 20, 16)
    return Case(inputs, partial(int8_attention, return_lse=True), gradients=False)
