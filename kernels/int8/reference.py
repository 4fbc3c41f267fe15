"""Exact attention with int8 scores in plain torch: the specification of the portable kernels.

Shapes: B batch, Sq queries, Sk keys, H heads, D head dim, E value dim; G = B·H groups.
"""

from __future__ import annotations

import torch

from vmonarch.kernels.common.launch import block_dim
from vmonarch.kernels.flash_entropy.reference import SCALE_BLOCK, attend, in_row_chunks, to_groups

# Channels that are rotated together, at most.
ROTATED = 64
# Replaces the largest number of a row or block of zeros.
_TINY = 1e-20


def attended_first(
    key: torch.Tensor, value: torch.Tensor, key_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys and values [B, Sk, H, ·] with those that count first, and how many these are: int32 [B], None for all."""
    if key_mask is None:
        return key, value, None
    order = key_mask.argsort(dim=1, descending=True, stable=True)[:, :, None, None]
    key, value = (x.gather(1, order.expand(x.shape)) for x in (key, value))
    return key, value, key_mask.sum(1, dtype=torch.int32)


def hadamard(D: int) -> torch.Tensor:
    """Orthogonal [D, D] of ±1/√D, D a power of two: it spreads what is large in a few channels evenly over all.

    Scores do not change where queries and keys are rotated alike, but what int8 takes from them does.

    Source: Ashkboos et al., QuaRot (2024); Shah et al., FlashAttention-3 (2024), "incoherent processing".
    """
    turn = torch.ones(1, 1)
    while len(turn) < D:
        turn = torch.cat([torch.cat([turn, turn], 1), torch.cat([turn, -turn], 1)])
    return turn / D**0.5


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [G, N, D] turned by `hadamard`, with zeros up to a power of two of channels; more than 64 in parts."""
    D = block_dim(x.shape[-1])
    x = torch.nn.functional.pad(x, (0, D - x.shape[-1]))
    turn = hadamard(min(D, ROTATED)).to(x)
    return (x.unflatten(-1, (-1, len(turn))) @ turn).flatten(-2)


def rounded(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """The nearest of the 255 numbers n·largest/127."""
    scale = largest.clamp_min(_TINY) / 127
    return torch.round(x / scale) * scale


def int8_attention_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, key_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, Sq, H, E], lse [B, H, Sq]); arguments as in `int8_attention`.

    Queries are rounded with a scale for each token, keys, less their mean over tokens, with one for each block of 256,
    both after a rotation.
    """
    B, Sq, H, _ = query.shape
    Sk = key.shape[1]
    key, value, counts = attended_first(key, value, key_mask)
    q, k, v = (to_groups(x) for x in (query, key, value))
    keys = torch.full((B * H, 1), Sk, device=q.device) if counts is None else counts.repeat_interleave(H)[:, None]
    there = (torch.arange(Sk, device=q.device) < keys)[..., None]
    mean = torch.where(there, k, 0).sum(1, keepdim=True) / keys[..., None].clamp_min(1)
    k = torch.where(there, k - mean, 0)
    of_mean = (q @ mean.transpose(1, 2)).squeeze(2) * scale
    q, k = (rotated(x) for x in (q, k))
    q = rounded(q, q.abs().amax(2, keepdim=True)) * scale
    blocks = k.abs().amax(2).split(SCALE_BLOCK, 1)
    largest = torch.cat([block.amax(1, keepdim=True).expand(block.shape) for block in blocks], 1)
    bias = torch.where(there.squeeze(2), 0.0, -torch.inf).to(q)
    lse, out = in_row_chunks(attend, q, rounded(k, largest[..., None]), bias, v)
    out = out.unflatten(0, (B, H)).transpose(1, 2).to(query.dtype)
    return out, (lse + of_mean).unflatten(0, (B, H))
