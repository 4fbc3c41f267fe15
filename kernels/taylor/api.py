"""Front door of the linear attention of Based."""

from __future__ import annotations

from typing import Any

import torch

from vmonarch.autocast import without_autocast
from vmonarch.kernels.common.checks import check_qkv
from vmonarch.kernels.common.launch import learns, use_triton
from vmonarch.kernels.taylor.feature_maps import FEATURE_MAPS, FeatureMap
from vmonarch.kernels.taylor.reference import LinearState, taylor_attention_reference
from vmonarch.validation import check_flag, check_implementation, check_positive_integer, resolve_scale

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
    state: LinearState | None = None,
    return_lse: bool = False,
    return_state: bool = False,
    max_tokens: int | None = None,
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
        feature_map: "taylor"; or "relu", "elu" (ELU + 1), "square", "identity", "performer" (d' orthogonal random
            features), "cosformer", the other maps of the paper's study.
        frame_weights: [H, T, T], float, at least 0 (not checked: that would wait for the device). The tokens are T
            equal frames in order, and the weight of a pair is multiplied by frame_weights[head, frame of the query,
            frame of the key]: a decay over time, or zeros for the frames to come. Every frame has its own sums, and
            each query frame reads a mixture of them. Not with `causal` or states; Sq = Sk, a multiple of T.
        state: what earlier keys left (from `return_state`); all queries attend to those too. A token at a time this is
            recurrent decoding; longer pieces are prefill.
        return_lse: also return log Σ_j w_ij, with which `merge_partials` joins other parts. Not with "identity", whose
            weights may be negative.
        return_state: also return the state after these keys.
        max_tokens: tokens that a sequence has at most, which "cosformer" spreads its angles over; None for those so
            far and the longer of Sq and Sk.
        scale: of q·k; 1/√d' if None.
        implementation: "torch"; "triton", the fused kernels (CUDA; float16, bfloat16 or float32; the Taylor map, d' up
            to 32; no gradients through states; in float16, products of two dims of √scale·q or of √scale·k up to
            65,504, and NaN beyond); or "auto", see `kernels.common.launch.use_triton`.

    Returns:
        out [B, Sq, H, E] in the dtype of `query`; with `return_lse` then lse [B, H, Sq] in nats; with `return_state`
        then the state. These two are in float32, or float64 for float64 inputs. Where no key weighs anything (possible
        with "relu", "square", "cosformer" and `frame_weights`), out is 0 and lse is -inf.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        NotImplementedError: implementation="triton", and the kernels cannot take this call; the message says why.

    Source: Based, Eq. 2-4 and Listing 1.
    """
    check_qkv(query, key, value, same_length=causal is True)
    check_flag("causal", causal)
    check_flag("return_lse", return_lse)
    check_flag("return_state", return_state)
    check_implementation(implementation)
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f"feature_map must be one of {', '.join(FEATURE_MAPS)}, got {feature_map!r}")
    chosen = FEATURE_MAPS[feature_map]
    if return_lse and chosen.signed:
        raise ValueError(
            f"return_lse must be False with feature_map={feature_map!r}: its weights may be negative, and their sum has"
            " no logarithm"
        )
    scale = resolve_scale(scale, query.shape[-1])
    if scale <= 0:
        raise ValueError(f"scale must be above 0, got {scale}: its root multiplies query and key")
    _check_state(state, chosen, key, value)
    _check_frame_weights(frame_weights, query, key, causal=causal, states=state is not None or return_state)
    tokens = (0 if state is None else state.tokens) + max(query.shape[1], key.shape[1])
    if max_tokens is None:
        max_tokens = tokens
    check_positive_integer("max_tokens", max_tokens)
    if chosen.placed and tokens > max_tokens:
        raise ValueError(f"max_tokens={max_tokens}, but there are {tokens} tokens with those of the state")
    of_state = () if state is None else (state.kv, state.k)
    reason = _why_not(query, key, value, chosen, of_state, return_state)
    others = (frame_weights, *of_state)
    if use_triton("taylor_attention", implementation, query, key, value, op="taylor", unless=reason, others=others):
        # Triton is imported when it is needed, not with the package.
        from vmonarch.kernels.taylor.op import taylor_attention_triton

        out, lse, after = taylor_attention_triton(
            query,
            key,
            value,
            scale=scale,
            causal=causal,
            state=state,
            frame_weights=frame_weights,
            return_lse=return_lse,
            return_state=return_state,
        )
    else:
        out, lse, after = taylor_attention_reference(
            query,
            key,
            value,
            feature_map=chosen,
            scale=scale,
            causal=causal,
            state=state,
            max_tokens=max_tokens,
            frame_weights=frame_weights,
        )
    results = (out, *((lse,) if return_lse else ()), *((after,) if return_state else ()))
    return results if len(results) > 1 else out


def _why_not(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    feature_map: FeatureMap,
    of_state: tuple[torch.Tensor, ...],
    return_state: bool,
) -> str | None:
    """Why the kernels cannot take this call, or None if they can."""
    if feature_map.name != "taylor":
        return f"feature_map is {feature_map.name!r} (supported: taylor)"
    if key.shape[3] > MAX_TAYLOR_DIM:
        return f"key has {key.shape[3]} dimensions (supported: up to {MAX_TAYLOR_DIM})"
    if learns(query, key, value, *of_state) and (of_state or return_state):
        return "a state is taken or returned while gradients are recorded (supported: one or the other)"
    return None


def _check_state(state: object, feature_map: FeatureMap, key: torch.Tensor, value: torch.Tensor) -> None:
    if state is None:
        return
    if not isinstance(state, LinearState):
        raise TypeError(f"state must be None or what return_state=True gave, got {type(state).__name__}")
    B, _, H, dims = key.shape
    F, E = feature_map.features(dims), value.shape[3]
    for name, tensor, shape in (("kv", state.kv, (B, H, F, E)), ("k", state.k, (B, H, F))):
        if tensor.shape != shape:
            raise ValueError(
                f"state.{name} must be {shape} for these inputs and feature_map={feature_map.name!r}, got"
                f" {tuple(tensor.shape)}"
            )
        if tensor.device != key.device:
            raise ValueError(f"state.{name} must lie on the device of query ({key.device}), got {tensor.device}")


def _check_frame_weights(
    frame_weights: object, query: torch.Tensor, key: torch.Tensor, *, causal: bool, states: bool
) -> None:
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
    if states:
        raise ValueError("frame_weights cannot be combined with state or return_state: states do not tell frames apart")
    if key.shape[1] != tokens:
        raise ValueError(f"key must have as many tokens as query ({tokens}) with frame_weights, got {key.shape[1]}")
    if tokens % shape[1]:
        raise ValueError(f"frame_weights has {shape[1]} frames, which do not divide the {tokens} tokens of query")
