"""Where the kernels find the token at position j of block l: by arithmetic, never by index tensors or copies.

The same cut of a sequence as `block_layout` has, for jit code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vmonarch.kernels.common.blocks import Places


@triton.jit
def plain_places(places):
    """The inverse of `unspecialised`."""
    return Places(*[number >> 4 for number in places])


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
