"""An op as a layer, for `kernels.kernelize`."""

from __future__ import annotations

from typing import Any

import torch

from vmonarch.kernels.monarch.api import vmonarch_attention


class VMonarchAttention(torch.nn.Module):
    """`vmonarch_attention` as any layer's `forward`: [B, S, H, D] -> [B, S, H, D], S = T·H·W of the grid (T, H, W)."""

    has_backward = True
    can_torch_compile = True

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grid: Any, **options: Any) -> Any:
        return vmonarch_attention(query, key, value, grid=grid, **options)
