"""Everything about a call of Monarch attention but its tensors, and its exact part as the kernels take it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from vmonarch.kernels.common.blocks import Places
from vmonarch.kernels.common.constants import kept
from vmonarch.kernels.flash_entropy.segments import Segment
from vmonarch.options import ExactBlocks, VMonarchOptions


@dataclass(frozen=True)
class _ExactPart:
    """The exact part of a call.

    Args:
        segments: the pattern for the flash kernels.
        whole_rows: whether every frame is answered exactly throughout or not at all.
        rows: frames that attend to all keys in two resolutions, which are in no segment.
        aware: whether all L-steps know of it, or only the last.
    """

    segments: tuple[Segment, ...]
    whole_rows: bool
    rows: tuple[int, ...]
    aware: bool


@dataclass(frozen=True)
class MonarchCall:
    """Everything about a call but its tensors."""

    places: Places
    options: VMonarchOptions
    scale: float

    @property
    def l_updates(self) -> int:
        """Number of R-steps that sum the keys, from which an L follows: all, or all but the last."""
        return self.options.num_iterations - (not self.options.last_l_update)

    @property
    def min_mass(self) -> float:
        """The least that cR counts for where it divides, above 0."""
        return max(self.options.min_mass, torch.finfo(torch.float32).tiny)

    @property
    def exact(self) -> _ExactPart | None:
        """The exact part; None if there is none."""
        return _exact_part(self.options.pattern, self.places, self.options.row_share < 1)


@functools.lru_cache(maxsize=64)
def _exact_part(pattern: ExactBlocks | None, places: Places, coarse_rows: bool = False) -> _ExactPart | None:
    if pattern is None:
        return None
    key_frames = pattern.key_frames(places.blocks)
    if not any(key_frames):
        return None
    size = places.height * places.width
    rows = pattern.rows if coarse_rows else ()
    segments = tuple(
        Segment(l * size, (l + 1) * size, tuple((k * size, (k + 1) * size) for k in attended))
        for l, attended in enumerate(key_frames)
        if attended and l not in rows
    )
    return _ExactPart(
        segments,
        all(len(attended) in (0, places.blocks) for attended in key_frames),
        rows,
        pattern.aware,
    )


@kept
def exact_table_of(pattern: ExactBlocks | None, places: Places, device: torch.device) -> torch.Tensor | None:
    """int32 [T, ⌈m/32⌉] on the device, a bit per block, 1 in exact ones; kept, so that repeated calls copy nothing."""
    if pattern is None or _exact_part(pattern, places) is None:
        return None
    table = torch.zeros(places.blocks, -(-places.blocks // 32) * 32, dtype=torch.int64)
    for l, attended in enumerate(pattern.key_frames(places.blocks)):
        table[l, list(attended)] = 1
    words = (table.unflatten(1, (-1, 32)) << torch.arange(32)).sum(-1)
    # Bit 31 is the sign.
    return torch.where(words >= 2**31, words - 2**32, words).to(device, torch.int32)
