"""Exact rows in two resolutions, with kernels (`VMonarchOptions.row_share`, `reference.exact_row`).

Shapes: B batch, S tokens, H heads, D head dim, E value dim; n tiles of queries of a frame, m tiles of all keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vmonarch.grid import LatentGrid
from vmonarch.kernels.monarch.call import MonarchCall
from vmonarch.kernels.two_resolution import op
from vmonarch.kernels.two_resolution.selection import exact_tiles
from vmonarch.kernels.two_resolution.tiling import tiling_of
from vmonarch.options import row_options


class Rows:
    """The frames of exact rows, and what kernels need to attend from them.

    Args:
        query, key: [B, S, H, D]. value: [B, S, H, E].
    """

    def __init__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: MonarchCall) -> None:
        assert call.exact is not None
        grid = LatentGrid(call.places.blocks, call.places.height, call.places.width)
        self.query, self.key, self.value, self.scale = query, key, value, call.scale
        self.frames, self.positions = call.exact.rows, grid.tokens_per_frame
        self.options = row_options(call.options)
        self.tiling = tiling_of(grid, self.options, query_frames=1)
        self.width = exact_tiles(self.tiling, self.options)

    def _selected(self, pooled: op.Pooled) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Of every frame its tokens, their queries, and their exact tiles [B, H, n, m]."""
        for frame in self.frames:
            tokens = slice(frame * self.positions, (frame + 1) * self.positions)
            # The frames of several samples have to follow each other for the copy engine.
            query = self.query[:, tokens].contiguous()
            yield tokens, query, op.choose(query, self.key, self.tiling, self.options, None, pooled)

    def forward(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Write out [B, S, H, E] and lse [B, H, S] of the rows, contiguous."""
        pooled = op.pool(self.key, self.value, self.tiling, None)
        for tokens, query, exact in self._selected(pooled):
            op.attend(
                query, self.key, self.value, exact, self.width, None, self.tiling, pooled, self.scale,
                out[:, tokens], lse[:, :, tokens],
            )  # fmt: skip

    def backward(
        self, do: torch.Tensor, dlse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
        *, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor,
    ) -> None:  # fmt: skip
        """Add what the rows give to the gradients dq, dk and dv."""
        pooled = op.pool(self.key, self.value, self.tiling, None)
        for tokens, query, exact in self._selected(pooled):
            do_row, out_row = (x[:, tokens].contiguous() for x in (do, out))
            dlse_row, lse_row = (x[:, :, tokens].contiguous() for x in (dlse, lse))
            dq_row, _, _ = op.backward(
                do_row, dlse_row, query, self.key, self.value, exact, self.width, None, out_row, lse_row,
                self.tiling, pooled, self.scale, added=(dk, dv),
            )  # fmt: skip
            dq[:, tokens] += dq_row
