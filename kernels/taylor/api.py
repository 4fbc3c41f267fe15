"""Front door of the linear attention of Based."""

from __future__ import annotations

from typing import Any

import torch

from vmonarch.autocast import without_autocast
from vmonarch.kernels.common.checks import check_qkv
from vmonarch.kernels.common.launch import use_triton
from vmonarch.kernels.common.trust import Case, qkv_shapes
from vmonarch.kernels.taylor.reference import FEATURE_MAPS, taylor_attention_reference
from vmonarch.validation import check_flag, check_implementation, resolve_scale

# Dims whose pairs the kernels hold; see `op.py`.
MAX_TAYLOR_DIM = 32


@without_autocast
def taylor_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    feature_map: str = "taylor",
    frame_weights: torch.Tensor | None = None,
    return_lse: bool = False,
    scale: float | None = None,
    implementation: str = "auto",
) -> Any:
    """Linear attention: Σ_j w_ij v_j / Σ_j w_ij with w_ij = φ(q_i)·φ(k_j), in time and memory linear in the tokens.

    With the Taylor map, w = 1 + s + s²/2, s = scale·q·k, which is above 0 for any s. No weight and no feature vector
    of a whole sequence is ever stored.

    Args:
        query: [B, Sq, H, d']; Based projects heads to d' = 16.
        key: [B, Sk, H, d'].
        value: [B, Sk, H, E].
        causal: token i attends to tokens up to i; Sq = Sk. Else every query attends to all keys.
        feature_map: "taylor", "relu" or "elu" (ELU + 1), maps of the paper's study.
        frame_weights: [H, T, T], float, at least 0 (not checked: that would wait for the device). The tokens are T
            equal frames in order, and the weight of a pair is multiplied by frame_weights[head, frame of the query,
            frame of the key]: a decay over time, or zeros for the frames to come. Every frame has its own sums, and
            each query frame reads a mixture of them. Not with `causal`; Sq = Sk, a multiple of T.
        return_lse: also return log Σ_j w_ij, with which `merge_partials` joins other parts.
        scale: of q·k; 1/√d' if None.
        implementation: "torch"; "triton", the fused kernels (CUDA; float16, bfloat16 or float32; the Taylor map, d' up
            to 32; in float16, products of two dims of √scale·q or of √scale·k up to 65,504, and NaN beyond); or "auto",
            see `kernels.common.launch.use_triton`.

    Returns:
        out [B, Sq, H, E] in the dtype of `query`; with `return_lse` then lse [B, H, Sq] in nats, in float32, or float64
        for float64 inputs. Where no key weighs anything (possible with "relu" and `frame_weights`), out is 0 and lse
        is -inf.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        NotImplementedError: implementation="triton", and the kernels cannot take this call; the message says why.

    Source: Based, Eq. 2-4 and Listing 1.
    """
    check_qkv(query, key, value, same_length=causal is True)
    check_flag("causal", causal)
    check_flag("return_lse", return_lse)
    check_implementation(implementation)
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f"feature_map must be one of {', '.join(FEATURE_MAPS)}, got {feature_map!r}")
    scale = resolve_scale(scale, query.shape[-1])
    if scale <= 0:
        raise ValueError(f"scale must be above 0, got {scale}: its root multiplies query and key")
    _check_frame_weights(frame_weights, query, key, causal=causal)
    reason = None
    if feature_map != "taylor":
        reason = f"feature_map is {feature_map!r} (supported: taylor)"
    elif key.shape[3] > MAX_TAYLOR_DIM:
        reason = f"key has {key.shape[3]} dimensions (supported: up to {MAX_TAYLOR_DIM})"
    others = (frame_weights,)
    options: dict[str, Any] = {"scale": scale, "causal": causal, "frame_weights": frame_weights}
    if use_triton("taylor_attention", implementation, query, key, value, op="taylor", unless=reason, others=others):
        # Triton is imported when it is needed, not with the package.
        from vmonarch.kernels.taylor.op import taylor_attention_triton

        out, lse = taylor_attention_triton(query, key, value, return_lse=return_lse, **options)
    else:
        out, lse = taylor_attention_reference(query, key, value, feature_map=feature_map, **options)
    return (out, lse) if return_lse else out


def _check_frame_weights(frame_weights: object, query: torch.Tensor, key: torch.Tensor, *, causal: bool) -> None:
    if frame_weights is None:
        return
    H, tokens = query.shape[2], query.shape[1]
    if not isinstance(frame_weights, torch.Tensor) or not frame_weights.is_floating_point():
        got = frame_weights.dtype if isinstance(frame_weights, torch.Tensor) else type(frame_weights).__name__
        raise TypeError(f"frame_weights must be None or a floating-point tensor [H, T, T], got {got}")
    shape = tuple(frame_weights.shape)
    if len(shape) != 3 or shape[0] != H or shape[1] != shape[2] or shape[1] == 0:
        raise ValueError(f"frame_weights must be [{H}, T, T], T frames of tokens, got {shape}")
    if frame_weights.device != query.device:
        raise ValueError(f"frame_weights must lie on the device of query ({query.device}), got {frame_weights.device}")
    if causal:
        raise ValueError("causal must be False with frame_weights; zeros in frame_weights hide the frames to come")
    if key.shape[1] != tokens:
        raise ValueError(f"key must have as many tokens as query ({tokens}) with frame_weights, got {key.shape[1]}")
    if tokens % shape[1]:
        raise ValueError(f"frame_weights has {shape[1]} frames, which do not divide the {tokens} tokens of query")


def tiny_case(gpu: bool) -> Case:
    """The case by which `trust` checks the kernels."""

    def call(*qkv: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
        ways = [taylor_attention(*qkv, causal=causal, return_lse=True, **how) for causal in (False, True)]
        return (*ways[0], *ways[1])

    tokens, dims, width = (300, 16, 128) if gpu else (6, 2, 8)
    return Case({**qkv_shapes(tokens, tokens, dims), "value": (1, tokens, 2, width)}, call)
