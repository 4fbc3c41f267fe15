"""RMS norm over all heads and rotary embedding in plain torch, as diffusers defines them for Wan."""

from __future__ import annotations

import torch


def norm_rotary_reference(
    x: torch.Tensor, weight: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, *, heads: int, eps: float
) -> torch.Tensor:
    """Arguments and result as in `norm_rotary`; each of the two in float32 (or float64) and rounded."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = torch.nn.functional.rms_norm(x.to(wide), (x.shape[-1],), weight.to(wide), eps).to(x.dtype).to(wide)
    even, odd = y.unflatten(2, (heads, -1)).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cosines[..., 0::2].to(wide), sines[..., 1::2].to(wide)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)
