"""Where the kernels find the token at position j of block l: by arithmetic, never by index tensors or copies.

The same cut of a sequence into m blocks of b positions as `kernels/common/blocks.py`, for jit code.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from vmonarch.grid import LatentGrid


class Places(NamedTuple):
    """Run-time numbers of a block layout; a Triton kernel takes the tuple as one argument.

    Attributes:
        tokens: S.
        blocks: m; of a video, its frames.
        positions: b.
        cells: c pooled cells per block, 0 without pooling.
        offset: block l starts at token l·b - offset.
        height, width: of a frame; 1, S for a plain sequence.
        cells_w: pooled cells per row of a frame.
    """

    tokens: int
    blocks: int
    positions: int
    cells: int
    offset: int
    height: int
    width: int
    cells_w: int


def grid_places(grid: LatentGrid, *, coarse: int) -> Places:
    """Blocks of one frame."""
    cells_w = -(-grid.width // coarse)
    return Places(
        tokens=grid.tokens,
        blocks=grid.frames,
        positions=grid.tokens_per_frame,
        cells=cells_w * -(-grid.height // coarse) if coarse > 1 else 0,
        offset=0,
        height=grid.height,
        width=grid.width,
        cells_w=cells_w,
    )


def sequence_places(tokens: int, block_size: int, padding: str) -> Places:
    """Blocks of `block_size` consecutive tokens; the empty places at the end ("post") or at the start ("pre")."""
    blocks = -(-tokens // block_size)
    return Places(
        tokens=tokens,
        blocks=blocks,
        positions=block_size,
        cells=0,
        offset=blocks * block_size - tokens if padding == "pre" else 0,
        height=1,
        width=tokens,
        cells_w=0,
    )


@triton.jit
def plain_places(places):
    """The inverse of `unspecialised`."""
    return Places(
        places.tokens >> 4, places.blocks >> 4, places.positions >> 4, places.cells >> 4, places.offset >> 4,
        places.height >> 4, places.width >> 4, places.cells_w >> 4,
    )  # fmt: skip


@triton.jit
def token_at(places, block, position):
    """Token at `position` of `block` (they broadcast) and whether there is one: ([…] int, […] bool)."""
    token = block * places.positions - places.offset + position
    return token, (position < places.positions) & (token >= 0) & (token < places.tokens)


@triton.jit
def token_in_cell(places, block, cell, step_h, step_w, COARSE: tl.constexpr):
    """Token at offset (step_h, step_w) inside pooled `cell` of a frame, and whether there is one."""
    row = cell // places.cells_w * COARSE + step_h
    column = cell % places.cells_w * COARSE + step_w
    return (block * places.height + row) * places.width + column, (row < places.height) & (column < places.width)
