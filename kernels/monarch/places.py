"""Where the kernels find the token at position j of block l: by arithmetic, never by index tensors or copies.

The same cut of a sequence into m blocks of b positions as `blocks.py`, for jit code.
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
        blocks: m.
        positions: b.
        cells: c pooled cells per block, 0 without pooling.
        offset: linear layouts: block l starts at token l·b - offset.
        frames, height, width: the latent grid; 1, 1, S for a plain sequence.
        block_frames: frames per block.
        tiles_h, tiles_w: tiles per frame.
        tile_height, tile_width: rows and columns of the largest tile.
        cells_w: pooled cells per row of a tile.
        cells_hw: pooled cells per frame of a tile.
    """

    tokens: int
    blocks: int
    positions: int
    cells: int
    offset: int
    frames: int
    height: int
    width: int
    block_frames: int
    tiles_h: int
    tiles_w: int
    tile_height: int
    tile_width: int
    cells_w: int
    cells_hw: int

    def unspecialised(self) -> Places:
        """The numbers as kernels take them; `plain_places` is the inverse.

        Triton compiles a kernel anew for integers that are 1 or multiples of 16, which sizes of videos are now and
        then. No number of this form is, so that one compiled kernel serves all sizes.
        """
        return Places(*(16 * number + 8 for number in self))


def grid_places(grid: LatentGrid, *, frames_per_block: int, tiles: tuple[int, int], coarse: int) -> Places:
    """Blocks of `frames_per_block` frames × one spatial tile."""
    frames, height, width = grid
    tile_height, tile_width = -(-height // tiles[0]), -(-width // tiles[1])
    cells_w = -(-tile_width // coarse)
    cells_hw = cells_w * -(-tile_height // coarse)
    return Places(
        tokens=grid.tokens,
        blocks=-(-frames // frames_per_block) * tiles[0] * tiles[1],
        positions=frames_per_block * tile_height * tile_width,
        cells=frames_per_block * cells_hw if coarse > 1 else 0,
        offset=0,
        frames=frames,
        height=height,
        width=width,
        block_frames=frames_per_block,
        tiles_h=tiles[0],
        tiles_w=tiles[1],
        tile_height=tile_height,
        tile_width=tile_width,
        cells_w=cells_w,
        cells_hw=cells_hw,
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
        frames=1,
        height=1,
        width=tokens,
        block_frames=1,
        tiles_h=1,
        tiles_w=1,
        tile_height=1,
        tile_width=block_size,
        cells_w=0,
        cells_hw=0,
    )


@triton.jit
def plain_places(places):
    """The numbers that `Places.unspecialised` was made of."""
    return Places(
        places.tokens >> 4, places.blocks >> 4, places.positions >> 4, places.cells >> 4, places.offset >> 4,
        places.frames >> 4, places.height >> 4, places.width >> 4, places.block_frames >> 4, places.tiles_h >> 4,
        places.tiles_w >> 4, places.tile_height >> 4, places.tile_width >> 4, places.cells_w >> 4,
        places.cells_hw >> 4,
    )  # fmt: skip


@triton.jit
def token_at(places, block, position, TILED: tl.constexpr):
    """Token at `position` of `block` (they broadcast) and whether there is one: ([…] int, […] bool)."""
    if TILED:
        return _token_in_tile(
            places, block, position // (places.tile_height * places.tile_width),
            position // places.tile_width % places.tile_height, position % places.tile_width,
        )  # fmt: skip
    else:
        token = block * places.positions - places.offset + position
        return token, (position < places.positions) & (token >= 0) & (token < places.tokens)


@triton.jit
def _tile_of(places, block):
    """First frame, row and column of the tile that is `block`, and how many it has of each."""
    tile_w = block % places.tiles_w
    tile_h = block // places.tiles_w % places.tiles_h
    frame = block // (places.tiles_w * places.tiles_h) * places.block_frames
    row = tile_h * places.height // places.tiles_h
    column = tile_w * places.width // places.tiles_w
    frames = tl.minimum(places.block_frames, places.frames - frame)
    rows = (tile_h + 1) * places.height // places.tiles_h - row
    columns = (tile_w + 1) * places.width // places.tiles_w - column
    return frame, row, column, frames, rows, columns


@triton.jit
def _token_in_tile(places, block, frame, row, column):
    """Token at (frame, row, column) of the tile that is `block`, and whether the tile has that place."""
    first_frame, first_row, first_column, frames, rows, columns = _tile_of(places, block)
    valid = (frame < frames) & (row < rows) & (column < columns)
    token = ((first_frame + frame) * places.height + first_row + row) * places.width + first_column + column
    return token, valid


@triton.jit
def tokens_before(places, block, position):
    """Number of tokens at the positions before `position` of a tile, and in all of it."""
    _, _, _, frames, rows, columns = _tile_of(places, block)
    frame = position // (places.tile_height * places.tile_width)
    row = position // places.tile_width % places.tile_height
    column = position % places.tile_width
    in_row = tl.where(row < rows, tl.minimum(column, columns), 0)
    in_frame = tl.where(frame < frames, tl.minimum(row, rows) * columns + in_row, 0)
    return tl.minimum(frame, frames) * rows * columns + in_frame, frames * rows * columns


@triton.jit
def token_in_cell(places, block, cell, step_h, step_w, COARSE: tl.constexpr):
    """Token at offset (step_h, step_w) inside pooled `cell` of `block`, and whether there is one."""
    row = cell % places.cells_hw // places.cells_w * COARSE + step_h
    column = cell % places.cells_w * COARSE + step_w
    token, valid = _token_in_tile(places, block, cell // places.cells_hw, row, column)
    return token, valid & (row < places.tile_height) & (column < places.tile_width)
