"""Linear attention in plain torch: the specification of the kernels (Based, Eq. 2-4).

Shapes: B batch, Sq queries, Sk keys, H heads, d' dims of query and key, E value dim, F features; G = B·H groups.
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
    some = weight.abs() > LEAST_WEIGHT
    return torch.where(some, numerator / torch.where(some, weight, 1.0), 0.0)


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
) -> tuple[torch.Tensor, LinearState]:
    """(out [B, Sq, H, E], the state after all keys); arguments as in `taylor_attention`."""
    B, Sq, H, _ = query.shape
    q, k, v = to_groups(query), to_groups(key), to_groups(value)
    Sk, F = k.shape[1], feature_map.features(k.shape[2])
    before = 0 if state is None else state.tokens
    if state is None:
        kv, k_sum = v.new_zeros(B * H, F, v.shape[2]), v.new_zeros(B * H, F)
    else:
        kv, k_sum = state.kv.to(v).flatten(0, 1), state.k.to(v).flatten(0, 1)

    def features(x: torch.Tensor, start: int) -> torch.Tensor:
        positions = before + start + torch.arange(x.shape[1], device=x.device)
        return feature_map.map(x, scale, positions, max_tokens)

    outs = []
    for start in range(0, Sk, CHUNK):
        k_chunk, v_chunk = features(k[:, start : start + CHUNK], start), v[:, start : start + CHUNK]
        if causal:
            # Queries meet the keys before their chunk through the state, those of their chunk one by one.
            q_chunk = features(q[:, start : start + CHUNK], start)
            weights = (q_chunk @ k_chunk.transpose(1, 2)).tril()
            numerator = q_chunk @ kv + weights @ v_chunk
            weight = q_chunk @ k_sum.unsqueeze(-1) + weights.sum(-1, keepdim=True)
            outs.append(normalised(numerator, weight))
        kv = kv + k_chunk.transpose(1, 2) @ v_chunk
        k_sum = k_sum + k_chunk.sum(1)
    if not causal:
        for start in range(0, Sq, CHUNK):
            q_chunk = features(q[:, start : start + CHUNK], start)
            outs.append(normalised(q_chunk @ kv, q_chunk @ k_sum.unsqueeze(-1)))
    out = torch.cat(outs, 1).unflatten(0, (B, H)).transpose(1, 2).to(query.dtype)
    return out, LinearState(kv.unflatten(0, (B, H)), k_sum.unflatten(0, (B, H)), before + Sk)
