"""Query, key and value of a Wan self-attention module: projected, normalised and rotated.

Shapes: B batch, S tokens, H heads, D head dim, C = H·D channels.
"""

from __future__ import annotations

from typing import Any

import torch

from vmonarch.kernels.common.launch import auto_takes_kernels
from vmonarch.kernels.norm_rotary.api import norm_rotary, why_not_triton


def rotate(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate channel pairs of states [B, S, H, D]; computed in the wider dtype, returned in that of `states`."""
    even, odd = states[..., 0::2], states[..., 1::2]
    cosines, sines = cosines[..., 0::2], sines[..., 1::2]
    rotated = torch.empty_like(states)
    rotated[..., 0::2] = even * cosines - odd * sines
    rotated[..., 1::2] = even * sines + odd * cosines
    return rotated


def _is_plain(norm: Any, channels: int) -> bool:
    """Whether a module is nothing but the RMS norm of all channels, so that its weight tells all that it does.

    Offloading and casting put hooks or another forward on it, adapters take its place.
    """
    return (
        type(norm) is torch.nn.RMSNorm
        and norm.weight is not None
        and tuple(norm.normalized_shape) == (channels,)
        and "forward" not in vars(norm)
        and not (norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks)
    )


def _norm_and_rotate(
    norm: Any, x: torch.Tensor, heads: int, rotary_emb: tuple[torch.Tensor, torch.Tensor], implementation: str
) -> torch.Tensor:
    """Queries or keys [B, S, H, D] of their projection [B, S, C]: in one pass where the kernel can do all of it."""
    if implementation == "triton" or (implementation == "auto" and auto_takes_kernels(x.device)):
        angles = (1, x.shape[1], 1, x.shape[2] // heads)
        fits = all(part.shape == angles and not part.requires_grad for part in rotary_emb)
        # Ranks of xfuser may have no token at all.
        if x.numel() and fits and _is_plain(norm, x.shape[2]) and why_not_triton(x, norm.weight, *rotary_emb) is None:
            eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
            return norm_rotary(x, norm.weight, *rotary_emb, heads=heads, eps=eps, implementation=implementation)
    return rotate(norm(x).unflatten(2, (heads, -1)), *rotary_emb)


def project(
    attn: Any,
    hidden_states: torch.Tensor,
    rotary_emb: tuple[torch.Tensor, torch.Tensor] | None,
    implementation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value [B, S, H, D] of a self-attention module, normalised and rotated."""
    if attn.fused_projections:
        query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
    else:
        query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
    value = value.unflatten(2, (attn.heads, -1))
    if rotary_emb is None:
        query, key = (x.unflatten(2, (attn.heads, -1)) for x in (attn.norm_q(query), attn.norm_k(key)))
    else:
        query = _norm_and_rotate(attn.norm_q, query, attn.heads, rotary_emb, implementation)
        key = _norm_and_rotate(attn.norm_k, key, attn.heads, rotary_emb, implementation)
    # Autocast computes the norms in float32.
    return query.to(value.dtype), key.to(value.dtype), value
