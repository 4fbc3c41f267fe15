"""The last R-step in two resolutions, with kernels (`VMonarchOptions.r_share`, `reference.r_step_in_two_resolutions`).

Every block is a frame, and every frame of a sample is a sample of its own for attention in two resolutions.

Shapes: B batch, S tokens, H heads, D head dim, E value dim, m blocks, b positions per block; block tensors are
[B·H·m, b, D], row statistics [B·H·m, b].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from vmonarch.grid import LatentGrid
from vmonarch.kernels.monarch.call import MonarchCall
from vmonarch.kernels.monarch.r_step import RStep
from vmonarch.kernels.two_resolution import op
from vmonarch.kernels.two_resolution.kernels import Written
from vmonarch.kernels.two_resolution.selection import exact_tiles
from vmonarch.kernels.two_resolution.tiling import frame_tiling
from vmonarch.two_resolution_options import r_options


class _Sample(NamedTuple):
    """The frames of one sample: z, key and value [m, b, H, D or E], the exact tiles [m, H, n, m'] and the means."""

    z: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    exact: torch.Tensor
    pooled: op.Pooled


class LastRStep:
    """What the last R-step of a call needs where it is in two resolutions.

    Args:
        key: [B, S, H, D]. value: [B, S, H, E].
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, call: MonarchCall) -> None:
        places = call.places
        self.key, self.value, self.call = key, value, call
        self.options = r_options(call.options)
        self.tiling = frame_tiling(LatentGrid(places.frames, places.height, places.width), self.options)
        self.width = exact_tiles(self.tiling, self.options)

    def _frames(self, tensor: torch.Tensor, sample: int) -> torch.Tensor:
        """Tokens [B, S, H, D] or blocks [B·H·m, b, D] of a sample as [m, b, H, D]."""
        places = self.call.places
        if tensor.ndim == 4:
            return tensor[sample].unflatten(0, (places.blocks, places.positions))
        return tensor.unflatten(0, (-1, self.key.shape[2], places.blocks))[sample].permute(1, 2, 0, 3)

    def _samples(self, z: torch.Tensor) -> Iterator[_Sample]:
        for i in range(len(self.key)):
            z_i, key, value = (self._frames(x, i) for x in (z, self.key, self.value))
            pooled = op.pool(key, value, self.tiling, None)
            exact = op.choose(z_i, key, self.tiling, self.options, None, pooled)
            yield _Sample(z_i, key, value, exact, pooled)

    def forward(
        self,
        z: torch.Tensor,
        *,
        y: torch.Tensor,
        lse: torch.Tensor | None,
        aL: torch.Tensor | None = None,
        cL: torch.Tensor | None = None,
    ) -> None:
        """As `RStep.forward` of the last iteration; without aL and cL of the values alone."""
        places, groups = self.call.places, len(y) // len(self.key)
        b, head = places.positions, places.blocks * places.positions
        lse = y.new_empty(y.shape[:2], dtype=torch.float32) if lse is None else lse
        for i, sample in enumerate(self._samples(z)):
            own = slice(i * groups, (i + 1) * groups)
            sums = () if aL is None or cL is None else (aL[own], cL[own])
            written = Written(y[own], lse[own], (b, 1, head), (b, head), *sums)
            z_i, key, value, exact, pooled = sample
            op.attend(z_i, key, value, exact, self.width, None, self.tiling, pooled, self.call.scale, written)

    def backward(
        self,
        z: torch.Tensor,
        *,
        y: torch.Tensor,
        lse: torch.Tensor,
        dy: torch.Tensor,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        cR: torch.Tensor | None,
        daR: torch.Tensor,
        dcR: torch.Tensor,
        aL: torch.Tensor | None = None,
        daL: torch.Tensor | None = None,
        dcL: torch.Tensor | None = None,
    ) -> None:
        """Write dk and dv; add to dq where z is the query, else write daR and dcR: as `RStep.backward`."""
        scale = self.call.scale
        for i, sample in enumerate(self._samples(z)):
            z_i, key, value, exact, pooled = sample
            dy_i, y_i = (self._frames(x, i).contiguous() for x in (dy, y))
            daL_i, aL_i = (None if x is None else self._frames(x, i).contiguous() for x in (daL, aL))
            lse_i = self._frames(lse.unsqueeze(-1), i).squeeze(-1).mT.contiguous()
            dlse_i = of_z = None
            if dcL is not None:
                assert aL_i is not None and daL_i is not None
                # cL = scale·z·aL - lse.
                dcL_i = self._frames(dcL.unsqueeze(-1), i)
                dlse_i, of_z = -dcL_i.squeeze(-1).mT, scale * dcL_i * aL_i
                daL_i = (daL_i + scale * dcL_i * z_i).to(daL_i.dtype)
            dz_i, dk_i, dv_i = op.backward(
                dy_i, dlse_i, z_i, key, value, exact, self.width, None, y_i, lse_i, self.tiling, pooled, scale,
                aL=aL_i, daL=daL_i,
            )  # fmt: skip
            dz_i = dz_i if of_z is None else dz_i + of_z
            self._frames(dk, i).copy_(dk_i)
            self._frames(dv, i).copy_(dv_i)
            if z.ndim == 4:
                self._frames(dq, i).add_(dz_i)
            else:
                # daR may take the memory of dy, of which this sample's rows have been read.
                self._frames(daR, i).copy_(dz_i)
        if cR is not None:
            # z = αR / max(cR, min_mass)
            product = RStep(self.key, self.value, None, self.call).row_dots(daR, z)
            dcR.copy_(torch.where(cR >= self.call.min_mass, -product, 0.0))
