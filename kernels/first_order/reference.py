"""Attention to the first order around mean queries, in plain torch.

Shapes: B batch, S = T·Y·X tokens, H heads, D head dim, E value dim; b queries of a box.
"""

from __future__ import annotations

import torch

from vmonarch.grid import LatentGrid


def first_order_attention_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grid: LatentGrid, parts: LatentGrid, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, S, H, E] in the dtype of `query` [B, S, H, D]; lse [B, H, S] in float32, or float64 for such inputs."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (x.transpose(1, 2).to(dtype) for x in (query, key, value))  # [B, H, S, D]
    found = _in_boxes(q.unflatten(2, tuple(grid)), k, v, parts, scale).flatten(2, 4)
    out, lse = found.split((v.shape[-1], 1), -1)
    # Whoever keeps one of them keeps no memory of the other.
    return out.transpose(1, 2).to(query.dtype).contiguous(), lse.squeeze(-1).contiguous()


def _in_boxes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: tuple[int, ...], scale: float) -> torch.Tensor:
    """out and lse [B, H, T, Y, X, E + 1] of queries [B, H, T, Y, X, D], cut along what axes are left in `parts`."""
    if not parts:
        return _around_mean(q.flatten(2, 4), k, v, scale).unflatten(2, q.shape[2:5])
    axis = 5 - len(parts)
    boxes = [_in_boxes(box, k, v, parts[1:], scale) for box in q.tensor_split(parts[0], axis)]
    return torch.cat(boxes, axis)


def _around_mean(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """out and lse [B, H, b, E + 1] of queries [B, H, b, D] of one box."""
    mean = q.mean(2, keepdim=True)
    logits = scale * (mean @ k.mT)  # [B, H, 1, S]
    weights = logits.softmax(-1)
    mean_key, mean_value = weights @ k, weights @ v
    covariance = (weights.mT * (k - mean_key)).mT @ v  # [B, H, D, E]
    away = scale * (q - mean)
    lse = logits.logsumexp(-1, keepdim=True) + away @ mean_key.mT
    return torch.cat((mean_value + away @ covariance, lse), -1)
