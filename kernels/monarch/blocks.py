"""How a sequence of tokens is cut into the m blocks of b positions that a Monarch matrix needs.

A layout never asks the user to pad: places of a block that hold no token are masked, whatever the sizes are.
Shapes: B batch, S tokens, H heads, D head dim, m blocks, b positions per block, c pooled cells per block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vmonarch.exact_blocks import ExactBlocks
from vmonarch.grid import LatentGrid


@dataclass(frozen=True)
class BlockLayout:
    """The tokens of every block.

    Args:
        blocks: m.
        positions: b.
        index: [m, b] the token at each place, 0 where there is none; None if block l holds tokens l·b … l·b + b - 1.
        place: [S] the place l·b + j of each token; None with `index`.
        valid: [m, b] where a place holds a token; None if all do.
        frame: [m, b] the latent frame of the token at each place.
        cell: [b] the coarse cell of each position; None without pooling.
        cells: c.
    """

    blocks: int
    positions: int
    index: torch.Tensor | None = None
    place: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    frame: torch.Tensor | None = None
    cell: torch.Tensor | None = None
    cells: int = 0

    def to_blocks(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, S, H, D] -> [B, H, m, b, D]; a view where blocks are consecutive tokens. Empty places hold zeros."""
        if self.index is None:
            return tokens.unflatten(1, (self.blocks, self.positions)).permute(0, 3, 1, 2, 4)
        blocks = tokens.index_select(1, self.index.flatten())
        blocks = blocks.unflatten(1, (self.blocks, self.positions)).permute(0, 3, 1, 2, 4)
        if self.valid is not None:
            blocks = blocks.masked_fill(~self.valid.unsqueeze(-1), 0.0)
        return blocks

    def to_tokens(self, blocks: torch.Tensor) -> torch.Tensor:
        """[B, H, m, b, …] -> [B, H, S, …], dropping the empty places."""
        tokens = blocks.flatten(2, 3)
        return tokens if self.place is None else tokens.index_select(2, self.place)

    def pool(self, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Average the keys of every coarse cell.

        Args:
            key: [B, H, m, b, D], zeros at empty places.

        Returns:
            (mean key [B, H, m, c, D], log of the number of keys [m, c], -inf for an empty cell).
        """
        assert self.cell is not None
        B, H, m, b, D = key.shape
        present = key.new_ones(m, b) if self.valid is None else self.valid.to(key.dtype)
        count = key.new_zeros(m, self.cells).index_add(1, self.cell, present)
        total = key.new_zeros(B, H, m, self.cells, D).index_add(3, self.cell, key)
        return total / count.clamp(min=1).unsqueeze(-1), torch.log(count)


def sequence_layout(tokens: int, block_size: int, padding: str, device: torch.device) -> BlockLayout:
    """Blocks of `block_size` consecutive tokens (MonarchAttention, D.3).

    Args:
        padding: "post" leaves the empty places at the end of the last block, "pre" at the start of the first.
    """
    blocks = -(-tokens // block_size)
    missing = blocks * block_size - tokens
    if missing == 0:
        return BlockLayout(blocks, block_size)
    offset = missing if padding == "pre" else 0
    index = torch.arange(blocks * block_size, device=device).view(blocks, block_size) - offset
    valid = (index >= 0) & (index < tokens)
    place = torch.arange(tokens, device=device) + offset
    return BlockLayout(blocks, block_size, index=index.where(valid, 0), place=place, valid=valid)


@dataclass(frozen=True)
class _Axis:
    """One axis of the grid cut into parts of at most `size` places."""

    parts: int
    size: int
    part: torch.Tensor  # [length] the part of each coordinate
    offset: torch.Tensor  # [length] its offset inside that part
    coordinate: torch.Tensor  # [parts, size], 0 where a part is shorter
    valid: torch.Tensor  # [parts, size]


def _axis(starts: list[int], length: int, device: torch.device) -> _Axis:
    bounds = [*starts, length]
    sizes = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
    size = max(sizes)
    part = [p for p, n in enumerate(sizes) for _ in range(n)]
    offset = [o for n in sizes for o in range(n)]
    coordinate = [[start + o if o < n else 0 for o in range(size)] for start, n in zip(starts, sizes, strict=True)]
    valid = [[o < n for o in range(size)] for n in sizes]
    return _Axis(
        len(starts),
        size,
        torch.tensor(part, device=device),
        torch.tensor(offset, device=device),
        torch.tensor(coordinate, device=device),
        torch.tensor(valid, device=device),
    )


def grid_layout(
    grid: LatentGrid, *, frames_per_block: int, tiles: tuple[int, int], coarse: int, device: torch.device
) -> BlockLayout:
    """Blocks of `frames_per_block` frames × one spatial tile (docs/attention.md, "Blocks").

    The last block of frames may be short; the rows and columns of a frame are cut into tiles whose sizes differ by at
    most one. Position j is the same place inside the tile for every block.
    """
    T, H, W = grid
    whole_frames = tiles == (1, 1) and T % frames_per_block == 0
    if whole_frames and coarse == 1 and frames_per_block == 1:
        frame = torch.arange(T, device=device).unsqueeze(1).expand(T, grid.tokens_per_frame)
        return BlockLayout(T, grid.tokens_per_frame, frame=frame)
    t = _axis(list(range(0, T, frames_per_block)), T, device)
    h = _axis([p * H // tiles[0] for p in range(tiles[0])], H, device)
    w = _axis([p * W // tiles[1] for p in range(tiles[1])], W, device)
    blocks, positions = t.parts * h.parts * w.parts, t.size * h.size * w.size

    def over_places(time: torch.Tensor, height: torch.Tensor, width: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Lay the [parts, size] tables of the three axes along [parts × 3, size × 3]."""
        return (
            time[:, None, None, :, None, None],
            height[None, :, None, None, :, None],
            width[None, None, :, None, None, :],
        )

    def flat(table: torch.Tensor) -> torch.Tensor:
        shape = (t.parts, h.parts, w.parts, t.size, h.size, w.size)
        return table.expand(shape).reshape(blocks, positions)

    time, row, column = over_places(t.coordinate, h.coordinate, w.coordinate)
    valid_t, valid_h, valid_w = over_places(t.valid, h.valid, w.valid)
    valid = flat(valid_t & valid_h & valid_w)
    cell, cells = None, 0
    if coarse > 1:
        cells_h, cells_w = -(-h.size // coarse), -(-w.size // coarse)
        cells = t.size * cells_h * cells_w
        cell_h = torch.arange(h.size, device=device) // coarse
        cell_w = torch.arange(w.size, device=device) // coarse
        cell_t = torch.arange(t.size, device=device)
        cell = ((cell_t[:, None, None] * cells_h + cell_h[:, None]) * cells_w + cell_w).flatten()
    if whole_frames:
        return BlockLayout(blocks, positions, frame=flat(time), cell=cell, cells=cells)
    index = flat((time * H + row) * W + column)
    block = (t.part[:, None, None] * h.parts + h.part[:, None]) * w.parts + w.part
    position = (t.offset[:, None, None] * h.size + h.offset[:, None]) * w.size + w.offset
    return BlockLayout(
        blocks,
        positions,
        index=index.where(valid, 0),
        place=(block * positions + position).flatten(),
        valid=valid,
        frame=flat(time),
        cell=cell,
        cells=cells,
    )


def exact_key_frames(pattern: ExactBlocks, frames: int, block_frames: int) -> tuple[tuple[int, ...], ...]:
    """E(l) of every frame l (docs/attention.md, "Exact parts"), rounded outward to whole blocks of frames."""
    blocks = [range(t, min(t + block_frames, frames)) for t in range(0, frames, block_frames)]
    return tuple(
        tuple(k for block in blocks if not attended.isdisjoint(block) for k in block)
        for attended in map(frozenset, pattern.key_frames(frames))
    )
