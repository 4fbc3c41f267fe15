"""Exact rows in two resolutions: the queries of such a frame attend to the best tiles of all keys exactly, and to the
mean keys and values of the others (`VMonarchOptions.row_share`; `kernels/two_resolution`).

Shapes: B batch, S tokens, H heads, D head dim, E value dim, P tokens of a frame; n tiles of queries, m of keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vmonarch.grid import LatentGrid
from vmonarch.kernels.two_resolution import reference
from vmonarch.kernels.two_resolution.selection import select_tiles
from vmonarch.kernels.two_resolution.tiling import tiling_of
from vmonarch.options import VMonarchOptions
from vmonarch.two_resolution_options import TwoResolutionOptions


def row_options(options: VMonarchOptions) -> TwoResolutionOptions:
    """How exact rows attend."""
    return TwoResolutionOptions(share=options.row_share)


def rows_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grid: LatentGrid,
    options: TwoResolutionOptions,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, P, H, E], lse [B, H, P]) of the queries [B, P, H, D] of one frame, for all keys and values [B, S, …]."""
    tiling = tiling_of(grid, options, query_frames=1)
    means = reference.tile_means(query, tiling.of_queries), reference.tile_means(key, tiling)
    chosen = select_tiles(*means, tiling, options)
    return reference.two_resolution_attention_reference(query, key, value, tiling, chosen, rest=True, scale=scale)


class Rows:
    """The frames of exact rows, and what kernels need to attend from them.

    Args:
        query, key: [B, S, H, D]. value: [B, S, H, E].
        frames: of the rows.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        grid: LatentGrid,
        frames: tuple[int, ...],
        options: TwoResolutionOptions,
        scale: float,
    ) -> None:
        self.query, self.key, self.value, self.scale = query, key, value, scale
        self.frames, self.positions = frames, grid.tokens_per_frame
        self.tiling, self.options = tiling_of(grid, options, query_frames=1), options

    def _selected(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, int]]:
        """Of every frame its tokens, their queries, exact tiles [B, H, n, m], and how many a tile of queries has."""
        from vmonarch.kernels.two_resolution.op import tile_means

        k_mean = tile_means(self.key, self.tiling)
        for frame in self.frames:
            tokens = slice(frame * self.positions, (frame + 1) * self.positions)
            # The frames of several samples have to follow each other for the copy engine.
            query = self.query[:, tokens].contiguous()
            q_mean = tile_means(query, self.tiling.of_queries)
            exact, number = select_tiles(q_mean, k_mean, self.tiling, self.options)
            assert number is not None
            yield tokens, query, exact.contiguous(), number

    def forward(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Write out [B, S, H, E] and lse [B, H, S] of the rows."""
        from vmonarch.kernels.two_resolution import op

        for tokens, query, exact, number in self._selected():
            out[:, tokens], lse[:, :, tokens] = op.forward(
                query, self.key, self.value, exact, number, None, self.tiling, True, self.scale
            )

    def backward(
        self, do: torch.Tensor, dlse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *gradients: torch.Tensor
    ) -> None:
        """Add what the rows give to the gradients dq, dk and dv, which are the last arguments."""
        from vmonarch.kernels.two_resolution import op

        dq, dk, dv = gradients
        for tokens, query, exact, number in self._selected():
            results = (x[:, tokens].contiguous() for x in (do, out))
            statistics = (x[:, :, tokens].contiguous() for x in (dlse, lse))
            (do_row, out_row), (dlse_row, lse_row) = results, statistics
            dq_row, dk_row, dv_row = op.backward(
                do_row, dlse_row, query, self.key, self.value, exact, number, None, out_row, lse_row,
                self.tiling, True, self.scale,
            )  # fmt: skip
            dq[:, tokens] += dq_row
            dk += dk_row
            dv += dv_row
