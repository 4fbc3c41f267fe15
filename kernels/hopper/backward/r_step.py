"""The backward pass of an R-step by these kernels; see the package."""

from __future__ import annotations

import torch
import triton

from vmonarch.kernels.hopper.attend import HALF
from vmonarch.kernels.hopper.backward.common import TILE
from vmonarch.kernels.hopper.backward.keys import launch_keys
from vmonarch.kernels.hopper.backward.rows import launch_rows
from vmonarch.kernels.hopper.backward.statistics import fold
from vmonarch.kernels.monarch.places import Places


def r_backward(
    key: torch.Tensor,
    value: torch.Tensor,
    places: Places,
    heads: int,
    scale: float,
    z: torch.Tensor,
    *,
    keys_per_key: int,
    lse: torch.Tensor,
    daL: torch.Tensor | None,
    dy: torch.Tensor | None,
    delta: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cR: torch.Tensor | None,
    daR: torch.Tensor | None,
    dcR: torch.Tensor | None,
    min_mass: float,
) -> None:
    """What `RStep.backward` does; arguments are not checked.

    Args:
        key, dk: [B, S, H, D]; or pooled, [B·H·m, c, D], one key for `keys_per_key`: then dk is written.
    """
    positions = places.positions
    pooled = key.ndim == 3
    folded = fold(lse, delta, positions, scale, keys_per_key=keys_per_key)
    groups, keys = lse.numel() // positions, key.shape[1] if pooled else positions
    launch_keys(
        z, key, value, daL, dy, folded, dk, None if dy is None else dv,
        tiles=(triton.cdiv(keys, TILE), groups), heads=heads, scale=scale, places=places,
        add=(dy is None and not pooled, False), half_tiles=0 < keys % TILE <= HALF,
    )  # fmt: skip
    launch_rows(
        z, key, value, daL, dy, folded, dq, tiles=(triton.cdiv(positions, TILE), groups), heads=heads, scale=scale,
        places=places, cR=cR, daR=daR, dcR=dcR, min_mass=min_mass,
        ragged=not pooled and positions * places.blocks != places.tokens, half_tiles=0 < positions % TILE <= HALF,
    )  # fmt: skip
