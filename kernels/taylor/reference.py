"""Linear attention in plain torch: the specification of the kernels (Based, Eq. 2-4).

Shapes: B batch, Sq queries, Sk keys, H heads, d' dims of query and key, E value dim, F features; G = B·H groups;
T frames of P tokens, one frame of all tokens where no frames are told apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from vmonarch.kernels.flash_entropy.reference import to_groups

# Tokens whose features exist at a time.
CHUNK = 256
# A row whose tokens weigh less than this together gets 0: with features that may vanish, all of them may.
LEAST_WEIGHT = 1e-12


def taylor(x: torch.Tensor) -> torch.Tensor:
    """[1, x, (x⊗x)/√2], so that φ(q)·φ(k) = 1 + s + s²/2 with s = q·k (Based, Eq. 4)."""
    square = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2) * math.sqrt(0.5)
    return torch.cat([torch.ones_like(x[..., :1]), x, square], -1)


# φ: of queries or keys […, S, d'], times the root of the scale, features […, S, F]. Weights are φ(q)·φ(k) in place of
# exp(q·k) (Based, §4.1 and Fig. 3).
FEATURE_MAPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "taylor": taylor,
    "relu": torch.relu,
    "elu": lambda x: torch.nn.functional.elu(x) + 1,
}


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
    feature_map: str,
    scale: float,
    causal: bool,
    frame_weights: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, Sq, H, E], lse [B, H, Sq]); arguments as in `taylor_attention`."""
    B, _, H, _ = query.shape
    T = 1 if frame_weights is None else frame_weights.shape[1]
    q, k, v = (to_groups(x).unflatten(1, (T, -1)) for x in (query, key, value))  # [G, T, P, ·]
    chunk = max(1, CHUNK // T)

    def features(x: torch.Tensor, start: int) -> torch.Tensor:
        """φ of the tokens of every frame from `start` on, a chunk of them: [G, T, ≤ chunk, F]."""
        return FEATURE_MAPS[feature_map](x[:, :, start : start + chunk] * math.sqrt(scale))

    F, E = features(k, k.shape[2]).shape[3], v.shape[3]
    kv, k_sum = v.new_zeros(B * H, T, F, E), v.new_zeros(B * H, T, F)
    outs, weights = [], []

    def read(numerator: torch.Tensor, weight: torch.Tensor) -> None:
        outs.append(normalised(numerator, weight))
        weights.append(weight.squeeze(-1))

    for start in range(0, k.shape[2], chunk):
        k_chunk, v_chunk = features(k, start), v[:, :, start : start + chunk]
        if causal:
            # Queries meet the keys before their chunk through the sums, those of their chunk one by one.
            q_chunk = features(q, start)
            pairs = (q_chunk @ k_chunk.mT).tril()
            read(q_chunk @ kv + pairs @ v_chunk, q_chunk @ k_sum.unsqueeze(-1) + pairs.sum(-1, keepdim=True))
        kv = kv + k_chunk.mT @ v_chunk
        k_sum = k_sum + k_chunk.sum(2)
    if frame_weights is not None:
        # A query frame reads Σ M[t, t'] of the sums of every frame t': nothing of size S×S.
        mix = frame_weights.to(v).repeat(B, 1, 1)  # [G, T, T]
        kv, k_sum = (mix @ kv.flatten(2)).unflatten(2, (F, E)), mix @ k_sum
    if not causal:
        for start in range(0, q.shape[2], chunk):
            q_chunk = features(q, start)
            read(q_chunk @ kv, q_chunk @ k_sum.unsqueeze(-1))
    out = torch.cat(outs, 2).flatten(1, 2).unflatten(0, (B, H)).transpose(1, 2).to(query.dtype)
    return out, log_partition(torch.cat(weights, 2).flatten(1, 2)).unflatten(0, (B, H))
