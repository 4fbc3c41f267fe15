"""FlashBias: softmax attention with a bias that is the product of two thin factors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vmonarch.autocast import without_autocast
from vmonarch.kernels.common.checks import check_factors, check_key_mask, check_qkv
from vmonarch.kernels.common.launch import use_triton
from vmonarch.kernels.common.trust import Case, qkv_shapes
from vmonarch.kernels.flash_bias.factors import why_too_wide
from vmonarch.kernels.flash_bias.reference import flash_bias_attention_reference
from vmonarch.validation import check_flag, check_implementation, resolve_scale


@without_autocast
def flash_bias_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_factor: torch.Tensor,
    key_factor: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_mask: torch.Tensor | None = None,
    return_lse: bool = False,
    implementation: str = "auto",
) -> Any:
    """Exact softmax attention with a bias of low rank: softmax(q·kᵀ·scale + φq·φkᵀ)·v.

    The bias [Sq, Sk] is never stored, in no implementation; all five tensors have gradients.

    Args:
        query: [B, Sq, H, D].
        key: [B, Sk, H, D].
        value: [B, Sk, H, E].
        query_factor: φq, [B or 1, Sq, H or 1, R], in nats: what is added to a logit is φq·φk, not scaled.
        key_factor: φk, [B or 1, Sk, H or 1, R]. Both factors are of the dtype of `query` or both of float32. In
            16 bit, large terms that cancel lose what is left of them (positions, squared distances): give those in
            float32. The kernels then work with three times the rank for float16, six times for bfloat16.
        scale: softmax scale of q·k; 1/√D if None.
        causal: query i attends to the keys up to i + Sk - Sq, so that the last one attends to all.
        key_mask: bool [B, Sk], True where a key counts. A query without any key gets 0 and the log-partition -inf.
        return_lse: also return the log-partition.
        implementation: "torch"; "triton", the fused kernels (CUDA; float16, bfloat16 or float32; head dimensions up to
            256, rank up to 256); or "auto", see `kernels.common.launch.use_triton`.

    Returns:
        out [B, Sq, H, E] in the dtype of `query`; with `return_lse` also lse [B, H, Sq] in nats, in float32, or
        float64 for float64 inputs.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        NotImplementedError: implementation="triton", and the kernels cannot take the tensors; the message says why.

    Source: FlashBias, Eq. 3.
    """
    check_qkv(query, key, value)
    check_factors(query_factor, key_factor, query, key)
    check_flag("causal", causal)
    check_flag("return_lse", return_lse)
    check_implementation(implementation)
    if causal and query.shape[1] > key.shape[1]:
        raise ValueError(
            f"causal needs at least as many keys as queries, got {key.shape[1]} keys and {query.shape[1]} queries"
        )
    check_key_mask(key_mask, key)
    scale = resolve_scale(scale, query.shape[-1])
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]] = flash_bias_attention_reference
    if use_triton(
        "flash_bias_attention",
        implementation,
        query,
        key,
        value,
        op="flash_bias",
        unless=why_too_wide(query_factor, query.dtype),
        others=(query_factor, key_factor),
    ):
        # Triton is imported when it is needed, not with the package.
        from vmonarch.kernels.flash_bias.op import flash_bias_attention_triton

        attend = flash_bias_attention_triton
    out, lse = attend(query, key, value, query_factor, key_factor, scale=scale, causal=causal, key_mask=key_mask)
    return (out, lse) if return_lse else out


def tiny_case(gpu: bool) -> Case:
    """The case by which `trust` checks the kernels."""
    queries, keys, head_dim = (200, 300, 128) if gpu else (4, 20, 16)
    factors = {"query_factor": (1, queries, 2, 8), "key_factor": (1, keys, 2, 8)}
    return Case({**qkv_shapes(queries, keys, head_dim), **factors}, partial(flash_bias_attention, return_lse=True))
