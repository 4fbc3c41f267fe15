"""How a sequence of tokens is cut into m blocks of b positions: those of a Monarch matrix, or tiles of a video.

A layout never asks the user to pad: places of a block that hold no token are masked, whatever the sizes are.
Shapes: B batch, S tokens, H heads, D head dim, m blocks, b positions per block, c pooled cells per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from vmonarch.grid import LatentGrid


class Places(NamedTuple):
    """Run-time numbers of a cut into blocks; a Triton kernel takes the tuple as one argument.

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
    """Blocks of `block_size` consecutive tokens; the empty places at the end ("post") or at the start ("pre").

    Source: MonarchAttention, D.3.
    """
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


def block_layout(places: Places, coarse: int, device: torch.device) -> BlockLayout:
    """The tokens of every block, and its cells of coarse × coarse positions (docs/attention.md, "Blocks")."""
    index = torch.arange(places.blocks * places.positions, device=device).view(places.blocks, -1) - places.offset
    valid = (index >= 0) & (index < places.tokens)
    place = torch.arange(places.tokens, device=device) + places.offset
    cell = None
    if places.cells:
        cell_h, cell_w = (torch.arange(size, device=device) // coarse for size in (places.height, places.width))
        cell = (cell_h[:, None] * places.cells_w + cell_w).flatten()
    return BlockLayout(
        places.blocks,
        places.positions,
        index.where(valid, 0),
        valid,
        place,
        consecutive=places.blocks * places.positions == places.tokens,
        cell=cell,
        cells=places.cells,
    )
