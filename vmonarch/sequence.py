"""Sequences of a video and other tokens, [before | T·H·W video | after].

Shapes: B batch, S tokens in all, H heads, D head dim, E value dim, R rank of a bias.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch

from vmonarch.call import Call
from vmonarch.grid import LatentGrid
from vmonarch.kernels.flash_bias.api import flash_bias_attention


class TokenSequence(NamedTuple):
    """Where the video lies in a sequence.

    Args:
        grid: of the video's tokens.
        before, after: how many other tokens there are on either side.
    """

    grid: LatentGrid
    before: int = 0
    after: int = 0

    @classmethod
    def of(cls, grid: LatentGrid, before: int | None, tokens: int) -> TokenSequence:
        """The sequence of so many tokens; before=None if all of the others are before the video.

        Raises:
            ValueError: there are fewer tokens than that.
        """
        others = tokens - grid.tokens
        if others < (before or 0):
            also = f" and {before} tokens before it" if before else ""
            raise ValueError(
                f"grid {tuple(grid)} has {grid.tokens} tokens{also}, but self-attention was given {tokens}"
            )
        before = others if before is None else before
        return cls(grid, before, others - before)

    @classmethod
    def in_call(cls, call: Call) -> Self:
        """Where the video of a call lies in its sequence."""
        assert call.before is not None
        return cls(call.grid, call.before, call.after)

    def video(self, x: torch.Tensor) -> torch.Tensor:
        """The video's part of [B, S, …]: a view."""
        return x[:, self.before : x.shape[1] - self.after]

    def beside(self, x: torch.Tensor) -> torch.Tensor:
        """The other tokens of [B, S, …]; a view where all are on one side."""
        head, tail = x[:, : self.before], x[:, x.shape[1] - self.after :]
        # In this order: torch.compile may not know how many are after.
        return tail if not self.before else head if not self.after else torch.cat([head, tail], 1)

    def joined(self, video: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        """[B, S, …] of its two parts."""
        return torch.cat([beside[:, : self.before], video, beside[:, self.before :]], 1)

    def padded(self, factor: torch.Tensor) -> torch.Tensor:
        """A factor [B or 1, N, H or 1, R] of a bias as [B or 1, S, H or 1, R]: other tokens have none."""
        return torch.nn.functional.pad(factor, (0, 0, 0, 0, self.before, self.after))


# Added to a logit, it leaves a weight of nothing beside any other; float16 holds it.
_NEVER = -3e4


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor,
    *,
    implementation: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention to some of the keys, and its log-partition: (out [B, Sq, H, E], lse [B, H, Sq]).

    The mask is a bias of rank 1, which the kernels for Hopper take; they take no mask.

    Args:
        key_mask: boolean [B, Sk], true where a key may be attended. Of a sample without any, lse is far below all
            others.
    """
    ones = query.new_ones(1, 1, 1, 1).expand(1, query.shape[1], 1, 1)
    penalty = torch.zeros_like(key_mask, dtype=query.dtype).masked_fill(~key_mask, _NEVER)[:, :, None, None]
    out, lse = flash_bias_attention(query, key, value, ones, penalty, return_lse=True, implementation=implementation)
    return out, lse
