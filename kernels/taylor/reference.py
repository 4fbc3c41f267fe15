"""Linear attention in plain torch: the specification of the kernels (Based, Eq. 2-4).

Shapes: B batch, Sq queries, Sk keys, H heads, d' dims of query and key, E value dim, F features; G = B·H groups;
T frames of P tokens, one frame of all tokens where no frames are told apart.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vmonarch.kernels.flash_entropy.reference import to_groups
from vmonarch.kernels.taylor.feature_maps import FeatureMap

# Tokens whose features exist at a time.
CHUNK = 256
# A row whose tokens weigh less than this together gets 0: with features that may vanish, all of them may.
LEAST_WEIGHT = 1e-12


class LinearState(NamedTuple):
    """Everything that linear attention keeps of the tokens so far (Based, Eq. 3), in float32 or float64.

    Attributes:
        kv: Σ φ(k)⊗v, [B, H, F, E].
        k: Σ φ(k), [B, H, F].
        tokens: how many there were.
    """

    kv: torch.Tensor
    k: torch.Tensor
    tokens: int


def normalised(numerator: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """numerator / weight […, 1], 0 where that is about 0."""
    # Written so that NaN counts as some and stays visible, here and below.
    some = ~(weight.abs() <= LEAST_WEIGHT)
    return torch.where(some, numerator / torch.where(some, weight, 1.0), 0.0)


def log_partition(weight: torch.Tensor) -> torch.Tensor:
    """log(weight), -inf where that is about 0; the gradient there is 0, not NaN."""
    some = ~(weight <= LEAST_WEIGHT)
    return torch.where(some, torch.log(torch.where(some, weight, 1.0)), -torch.inf)


def taylor_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    feature_map: FeatureMap,
    scale: float,
    causal: bool,
    state: LinearState | None,
    max_tokens: int,
    frame_weights: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, LinearState]:
    """(out [B, Sq, H, E], lse [B, H, Sq], the state after all keys); arguments as in `taylor_attention`."""
    B, _, H, _ = query.shape
    T = 1 if frame_weights is None else frame_weights.shape[1]
    q, k, v = (to_groups(x).unflatten(1, (T, -1)) for x in (query, key, value))  # [G, T, P, ·]
    F, E = feature_map.features(k.shape[3]), v.shape[3]
    before = 0 if state is None else state.tokens
    if state is None:
        kv, k_sum = v.new_zeros(B * H, T, F, E), v.new_zeros(B * H, T, F)
    else:
        kv, k_sum = state.kv.to(v).flatten(0, 1).unsqueeze(1), state.k.to(v).flatten(0, 1).unsqueeze(1)
    chunk = max(1, CHUNK // T)

    def features(x: torch.Tensor, start: int) -> torch.Tensor:
        """φ of the tokens of every frame from `start` on, a chunk of them: [G, T, ≤ chunk, F]."""
        places = torch.arange(T * x.shape[2], device=x.device).unflatten(0, (T, -1))
        span = slice(start, start + chunk)
        return feature_map.map(x[:, :, span], scale, before + places[:, span], max_tokens)

    outs, weights = [], []

    def read(numerator: torch.Tensor, weight: torch.Tensor) -> None:
        outs.append(normalised(numerator, weight))
        weights.append(weight.squeeze(-1))

    for start in range(0, k.shape[2], chunk):
        k_chunk, v_chunk = features(k, start), v[:, :, start : start + chunk]
        if causal:
            # Queries meet the keys before their chunk through the state, those of their chunk one by one.
            q_chunk = features(q, start)
            pairs = (q_chunk @ k_chunk.mT).tril()
            read(q_chunk @ kv + pairs @ v_chunk, q_chunk @ k_sum.unsqueeze(-1) + pairs.sum(-1, keepdim=True))
        kv = kv + k_chunk.mT @ v_chunk
        k_sum = k_sum + k_chunk.sum(2)
    after = LinearState(kv.sum(1).unflatten(0, (B, H)), k_sum.sum(1).unflatten(0, (B, H)), before + key.shape[1])
    if frame_weights is not None:
        # A query frame reads Σ M[t, t'] of the sums of every frame t': nothing of size S×S.
        mix = frame_weights.to(v).repeat(B, 1, 1)  # [G, T, T]
        kv, k_sum = (mix @ kv.flatten(2)).unflatten(2, (F, E)), mix @ k_sum
    if not causal:
        for start in range(0, q.shape[2], chunk):
            q_chunk = features(q, start)
            read(q_chunk @ kv, q_chunk @ k_sum.unsqueeze(-1))
    out = torch.cat(outs, 2).flatten(1, 2).unflatten(0, (B, H)).transpose(1, 2).to(query.dtype)
    lse = log_partition(torch.cat(weights, 2).flatten(1, 2)).unflatten(0, (B, H))
    return out, lse, after
