"""Sequences of a video and other tokens, [before | T·H·W video | after], in one softmax.

The video's queries attend to its keys by a method of ours and to all other keys exactly; other queries are exact.

Shapes: B batch, S tokens in all, N = T·H·W of the video, X = S − N others, H heads, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from vmonarch.grid import LatentGrid
from vmonarch.kernels.flash_bias.api import flash_bias_attention
from vmonarch.kernels.flash_entropy.api import flash_entropy_attention
from vmonarch.kernels.merge.api import merge_partials


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

    @property
    def others(self) -> int:
        """X, the number of tokens that are not the video's."""
        return self.before + self.after

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


def joint_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequence: TokenSequence,
    key_mask: torch.Tensor | None,
    *,
    video: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    exact: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    implementation: str = "auto",
) -> torch.Tensor:
    """Attention of a whole sequence: [B, S, H, D], [B, S, H, D], [B, S, H, E] -> [B, S, H, E].

    The softmax over video and other keys is the mean of the softmaxes over each, weighted by their partition functions.
    Where `video` is VMonarch attention, its partition function is a lower bound, e^{-KL} of the true one, and the other
    keys weigh e^{KL} as much as they should.

    Args:
        key_mask: boolean [B, S], true where a key may be attended; every key of the video. None for all.
        video: (out [B, N, H, E], lse [B, H, N]) of the video's queries and keys.
        exact: exact attention of queries [B, X, H, D] to all keys.
        implementation: as in `flash_entropy_attention`.
    """
    # Of a number of tokens that is known on the device alone, torch.compile cannot tell.
    torch._check(sequence.others > 0)
    q, k, v = sequence.video(query), sequence.beside(key), sequence.beside(value)
    ours = video(q, sequence.video(key), sequence.video(value))
    if key_mask is None:
        out, lse, _ = flash_entropy_attention(q, k, v, implementation=implementation)
    else:
        out, lse = masked_attention(q, k, v, sequence.beside(key_mask), implementation=implementation)
    merged, _ = merge_partials(ours, (out, lse), implementation=implementation)
    return sequence.joined(merged, exact(sequence.beside(query), key, value))


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
