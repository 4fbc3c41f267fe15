"""The stages of frame-parallel attention, what a call of it is, and the stages in plain torch.

Shapes as in `frame_parallel.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from vmonarch.grid import LatentGrid
from vmonarch.kernels.distributed.exchange import places_of
from vmonarch.kernels.flash_entropy.reference import to_groups
from vmonarch.kernels.monarch import reference
from vmonarch.kernels.monarch.blocks import grid_layout
from vmonarch.options import VMonarchOptions

if TYPE_CHECKING:
    from vmonarch.kernels.distributed.triton_stages import TritonStages

Frames = tuple[int, ...]
Stages: TypeAlias = "TorchStages | TritonStages"


@dataclass(frozen=True)
class Call:
    """Everything about a call but its tensors.

    Args:
        frames, positions: how many each rank has.
        key_frames: E(l) of every frame of the video; None without exact blocks.
    """

    grid: LatentGrid
    frames: tuple[int, ...]
    positions: tuple[int, ...]
    rank: int
    options: VMonarchOptions
    key_frames: tuple[Frames, ...] | None
    scale: float
    entropy_grad: bool

    @property
    def own_grid(self) -> LatentGrid:
        """The frames of this rank."""
        return LatentGrid(self.frames[self.rank], *self.grid[1:])

    @property
    def position_grid(self) -> LatentGrid:
        """The positions of this rank, in all frames."""
        return LatentGrid(self.grid.frames, 1, self.positions[self.rank])

    @property
    def own_frames(self) -> range:
        return places_of(self.frames, self.rank)

    @property
    def whole_rows(self) -> bool:
        """Whether every frame is answered exactly throughout or not at all."""
        return self.key_frames is not None and all(len(E) in (0, self.grid.frames) for E in self.key_frames)

    @property
    def aware(self) -> bool:
        """Whether all L-steps know of the exact blocks."""
        pattern = self.options.pattern
        return self.key_frames is not None and pattern is not None and pattern.aware


class TorchStages:
    """What a rank computes of a call, by `monarch/reference.py` in at least float32; layouts as in `frame_parallel.py`.

    Attributes:
        dtype: of blocks and of partial outputs. statistics_dtype: of cL and of log-partitions.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, call: Call) -> None:
        self.call = call
        self.dtype = self.statistics_dtype = torch.promote_types(key.dtype, torch.float32)
        cut = call.options.cut(1) | {"device": key.device}
        self.layout = grid_layout(call.own_grid, **cut)
        self.key, self.value = (self.layout.to_blocks(x.to(self.dtype)) for x in (key, value))
        self.coarse_key: tuple[torch.Tensor, torch.Tensor | None] = self.key, None
        if self.layout.cell is not None:
            self.coarse_key = self.layout.pool(self.key)
        self.exact_table = None
        if call.key_frames is not None and call.positions[call.rank] > 0:
            frame = grid_layout(call.position_grid, **cut | {"coarse": 1}).frame
            assert frame is not None
            self.exact_table = reference.exact_blocks(call.key_frames, frame)

    def first_centroids(self, query: torch.Tensor) -> torch.Tensor:
        """The z of the first iteration, in whatever form `r_step` takes, of the tokens [B, S, H, D]."""
        return self.layout.to_blocks(query.to(self.dtype) * self.call.scale)

    def r_step(self, z: torch.Tensor, last: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(aL, cL, y, None unless last) by frames, of what `first_centroids` returned or of z by frames."""
        key, bias = (self.key, None) if last else self.coarse_key
        return reference.r_step(z, key, bias, self.value if last else None, self.call.entropy_grad)

    def _by_position(self, query: torch.Tensor) -> torch.Tensor:
        """Tokens [B, T, b_r, H, D] -> [B·H, b_r, T, D], with the scale in them."""
        return (query.to(self.dtype) * self.call.scale).permute(0, 3, 2, 1, 4).flatten(0, 1)

    def centroids(
        self, query: torch.Tensor, aL: torch.Tensor, cL: torch.Tensor, lse_exact: torch.Tensor | None
    ) -> torch.Tensor:
        """The next z by positions, of tokens, blocks and log-weights [B, H, T, b_r] by positions."""
        z = reference.centroids(
            self._by_position(query),
            reference.position_major(aL),
            reference.position_major(cL),
            self.exact_table if self.call.aware else None,
            None if lse_exact is None else reference.position_major(lse_exact),
            None,
            self.call.options,
        )
        return z.unflatten(0, aL.shape[:2]).transpose(2, 3)

    def output(
        self, query: torch.Tensor, aL: torch.Tensor, cL: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(o, tokens by positions, lse [B, H, T, b_r]) of the Monarch part alone."""
        o, lse = reference.output(
            self._by_position(query),
            reference.position_major(aL),
            reference.position_major(cL),
            reference.position_major(y),
            None if self.call.whole_rows else self.exact_table,
            None,
            None,
        )
        heads = aL.shape[:2]
        return o.unflatten(0, heads).permute(0, 3, 2, 1, 4), lse.unflatten(0, heads).transpose(2, 3)

    def exact(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_frames: tuple[Frames, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [B, n, b, H, E], lse [B, H, n, b]) of n frames of queries; E(l) as indices of the frames of `key`."""
        B, n, b, H, _ = query.shape
        q, k, v = (to_groups(x.flatten(1, 2)) for x in (query, key, value))
        out, lse = reference.exact_part(q * self.call.scale, k, v, key_frames)
        return out.unflatten(0, (B, H)).transpose(1, 2).unflatten(1, (n, b)), lse.view(B, H, n, b)
