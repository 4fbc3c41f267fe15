"""How a sequence of tokens is cut into m blocks of b positions: those of a Monarch matrix, or tiles of a video.

A layout never asks the user to pad: places of a block that hold no token are masked, whatever the sizes are.
Shapes: B batch, S tokens, H heads, D head dim, m blocks, b positions per block, c pooled cells per block.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from vmonarch.grid import LatentGrid


@dataclass(frozen=True)
class BlockLayout:
    """The tokens of every block.

    Args:
        blocks: m.
        positions: b.
        index: [m, b] the token at each place, 0 where there is none.
        valid: [m, b] where a place holds a token.
        place: [S] the place l·b + j of each token.
        consecutive: whether block l holds tokens l·b … l·b + b - 1, for every l.
        cell: [b] the coarse cell of each position; None without pooling.
        cells: c.
    """

    blocks: int
    positions: int
    index: torch.Tensor
    valid: torch.Tensor
    place: torch.Tensor
    consecutive: bool = False
    cell: torch.Tensor | None = None
    cells: int = 0

    def to_blocks(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, S, H, D] -> [B, H, m, b, D]; a view where blocks are consecutive tokens. Empty places hold zeros."""
        tokens = tokens if self.consecutive else tokens.index_select(1, self.index.flatten())
        blocks = tokens.unflatten(1, (self.blocks, self.positions)).permute(0, 3, 1, 2, 4)
        return blocks if self.consecutive else blocks.masked_fill(~self.valid.unsqueeze(-1), 0.0)

    def to_tokens(self, blocks: torch.Tensor) -> torch.Tensor:
        """[B, H, m, b, …] -> [B, H, S, …], dropping the empty places."""
        tokens = blocks.flatten(2, 3)
        return tokens if self.consecutive else tokens.index_select(2, self.place)

    def pool(self, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Average the keys of every coarse cell.

        Args:
            key: [B, H, m, b, D].

        Returns:
            (mean key [B, H, m, c, D], log of the number of keys [c]).
        """
        assert self.cell is not None
        B, H, m, b, D = key.shape
        count = key.new_zeros(self.cells).index_add(0, self.cell, key.new_ones(b))
        total = key.new_zeros(B, H, m, self.cells, D).index_add(3, self.cell, key)
        return total / count.unsqueeze(-1), torch.log(count)


def sequence_layout(tokens: int, block_size: int, padding: str, device: torch.device) -> BlockLayout:
    """Blocks of `block_size` consecutive tokens (MonarchAttention, D.3).

    Args:
        padding: "post" leaves the empty places at the end of the last block, "pre" at the start of the first.
    """
    blocks = -(-tokens // block_size)
    missing = blocks * block_size - tokens
    offset = missing if padding == "pre" else 0
    index = torch.arange(blocks * block_size, device=device).view(blocks, block_size) - offset
    valid = (index >= 0) & (index < tokens)
    place = torch.arange(tokens, device=device) + offset
    return BlockLayout(blocks, block_size, index.where(valid, 0), valid, place, consecutive=missing == 0)


def grid_layout(grid: LatentGrid, *, coarse: int, device: torch.device) -> BlockLayout:
    """Blocks of one frame, with cells of coarse × coarse positions (docs/attention.md, "Blocks")."""
    layout = sequence_layout(grid.tokens, grid.tokens_per_frame, "post", device)
    if coarse == 1:
        return layout
    cell_h, cell_w = (torch.arange(size, device=device) // coarse for size in grid[1:])
    cells_w = -(-grid.width // coarse)
    cell = (cell_h[:, None] * cells_w + cell_w).flatten()
    return dataclasses.replace(layout, cell=cell, cells=-(-grid.height // coarse) * cells_w)
