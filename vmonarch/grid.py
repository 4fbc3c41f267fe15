"""The latent grid: how many frames, rows and columns of tokens a video has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vmonarch.validation import check_positive_integer


class LatentGrid(NamedTuple):
    """Number of tokens along time, height and width, after patchification.

    Token `n` of a sequence lies at frame `n // (height * width)`, row `n // width % height` and column `n % width`,
    the order in which Wan transformers flatten their latents.

    Args:
        frames: latent frames T.
        height: latent rows H.
        width: latent columns W.
    """

    frames: int
    height: int
    width: int

    @property
    def tokens_per_frame(self) -> int:
        """P = H·W, the tokens of one latent frame."""
        return self.height * self.width

    @property
    def tokens(self) -> int:
        """S = T·H·W, the length of the whole sequence."""
        return self.frames * self.height * self.width

    @classmethod
    def parse(cls, grid: object, *, argument: str = "grid") -> LatentGrid:
        """Turn a `LatentGrid` or a sequence of three positive integers into a `LatentGrid`.

        Raises:
            TypeError: `grid` is neither, or one of its entries is not an integer.
            ValueError: `grid` has another number of entries, or one below 1.
        """
        if isinstance(grid, (str, bytes)) or not isinstance(grid, Sequence):
            raise TypeError(
                f"{argument} must be a LatentGrid or three integers (frames, height, width), got {type(grid).__name__}"
            )
        if len(grid) != 3:
            raise ValueError(f"{argument} must have three entries (frames, height, width), got {len(grid)}: {grid!r}")
        for name, size in zip(cls._fields, grid, strict=True):
            check_positive_integer(f"{argument}.{name}", size)
        return cls(*map(int, grid))
