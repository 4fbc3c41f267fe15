"""Merging partial attentions in plain torch: the specification of the kernels.

Shapes: B batch, S tokens, H heads, E value dim.
"""

from __future__ import annotations

import torch

from vmonarch.autocast import without_autocast


@without_autocast
def merge_partials_reference(*partials: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and result as in `merge_partials`."""
    outs = [out for out, _ in partials]
    lses = torch.stack([lse for _, lse in partials])
    # A finite shift keeps (-inf) - (-inf) out of the exponent where every part is empty.
    lse_max = lses.amax(0)
    shift = torch.where(torch.isneginf(lse_max), torch.zeros_like(lse_max), lse_max).detach()
    weights = torch.exp(lses - shift)
    total = weights.sum(0)
    empty = total == 0
    safe_total = torch.where(empty, torch.ones_like(total), total)
    merged = torch.zeros_like(outs[0], dtype=torch.promote_types(outs[0].dtype, lses.dtype))
    for out, weight in zip(outs, weights, strict=True):
        share = (weight / safe_total).transpose(1, 2).unsqueeze(-1)
        # An empty part counts for nothing whatever its `out` holds; a NaN weight must stay visible.
        merged = merged + torch.where(share == 0, torch.zeros_like(merged), out * share)
    lse = torch.where(empty, torch.full_like(total, -torch.inf), shift + torch.log(safe_total))
    return merged.to(outs[0].dtype), lse
