"""Context parallelism of diffusers (`enable_parallelism`): tokens spread over processes, which share attention.

Outside attention every process (rank) of a group holds some tokens of all heads. Inside it holds all tokens of some
heads (Ulysses attention): one all-to-all leads there, another one back.

In joint attention, a rank may hold all tokens that are not the video's (`VideoSplit`).

Shapes: B batch, S tokens of the sequence, s tokens of this rank, H heads, h heads of this rank, D head dim.

Source: DeepSpeed Ulysses, §3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from diffusers.models._modeling_parallel import gather_size_by_comm

from vmonarch.exchange import exchange, places_of, split_evenly
from vmonarch.grid import LatentGrid
from vmonarch.sequence import TokenSequence


class Part(NamedTuple):
    """A rank's part of `total` heads or channels: `start` to `stop` - 1."""

    start: int
    stop: int
    total: int

    def of(self, x: torch.Tensor, dim: int, argument: str = "x") -> torch.Tensor:
        """The part of a tensor with all heads along `dim`.

        Raises:
            ValueError: it has another number of heads.
        """
        if x.shape[dim] != self.total:
            raise ValueError(f"{argument} has {x.shape[dim]} heads, but attention has {self.total}")
        return x.narrow(dim, self.start, self.stop - self.start)


@dataclass(frozen=True)
class TokenSplit:
    """How the tokens of the current call are spread over the ranks of a group.

    Args:
        group: the process group.
        rank: this process in it.
        tokens: tokens of every rank, in the order of the sequence.
    """

    group: Any
    rank: int
    tokens: tuple[int, ...]

    @property
    def all_tokens(self) -> int:
        """S."""
        return sum(self.tokens)

    def share(self, total: int) -> Part:
        """This rank's part of `total` heads or channels; the first ranks have one more where they do not divide."""
        own = places_of(split_evenly(total, len(self.tokens)), self.rank)
        return Part(own.start, own.stop, total)

    def gather_tokens(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All tokens of this rank's heads: tensors [B, s, H, …] -> [B, S, h, …]; differentiable."""
        heads = split_evenly(tensors[0].shape[2], len(self.tokens))
        return exchange(self.group, tensors, split_dim=2, split=heads, cat_dim=1, cat=self.tokens)

    def gather_heads(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """The inverse of `gather_tokens` for one tensor: [B, S, h, …] -> [B, s, heads, …]."""
        sizes = split_evenly(heads, len(self.tokens))
        return exchange(self.group, [x], split_dim=1, split=self.tokens, cat_dim=2, cat=sizes)[0]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather what each rank holds for its own tokens on all ranks: [B, s, …] -> [B, S, …]; no gradient."""
        ranks = len(self.tokens)
        copies = x.detach().unsqueeze(0).expand(ranks, *x.shape)
        (gathered,) = exchange(self.group, [copies], split_dim=0, split=(1,) * ranks, cat_dim=2, cat=self.tokens)
        return gathered.squeeze(0)

    def whole_mask(self, key_mask: torch.Tensor) -> torch.Tensor:
        """Which keys of the sequence may be attended, of a mask of this rank's: boolean [B, s] -> [B, S]."""
        return self.gather(key_mask)


@dataclass(frozen=True)
class VideoSplit(TokenSplit):
    """A split of the video's tokens in a sequence whose other tokens every rank holds, on the same sides of its part.

    Args:
        tokens: of the video, of every rank.
        sequence: the whole of it.
    """

    sequence: TokenSequence

    def gather_tokens(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        share, sequence = self.share(tensors[0].shape[2]), self.sequence
        videos = super().gather_tokens(*map(sequence.video, tensors))
        return tuple(
            sequence.joined(video, share.of(sequence.beside(x), 2)) for video, x in zip(videos, tensors, strict=True)
        )

    def gather_heads(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        sequence = self.sequence
        others = sequence.beside(x)
        # Every rank gets all of the others, and their gradients are summed.
        parts = [sequence.joined(video, others) for video in sequence.video(x).split(list(self.tokens), 1)]
        split = TokenSplit(self.group, self.rank, tuple(part.shape[1] for part in parts))
        return split.gather_heads(torch.cat(parts, 1), heads)

    def whole_mask(self, key_mask: torch.Tensor) -> torch.Tensor:
        video = key_mask.new_ones(len(key_mask), self.all_tokens)
        return self.sequence.joined(video, self.sequence.beside(key_mask))


def context_parallel_config(parallel_config: Any) -> Any:
    """diffusers' `ContextParallelConfig` in the `ParallelConfig` of a model or processor; None without one."""
    return getattr(parallel_config, "context_parallel_config", None)


def check_ring(degree: int, instead: str) -> None:
    """Raise NotImplementedError for ring attention, where `degree` > 1 ranks share the keys; `instead`: what to use."""
    if degree > 1:
        raise NotImplementedError(
            f"ring_degree={degree} is not supported: in ring attention a rank sees a part of the keys at a"
            f" time, these processors need all of them; use {instead}"
        )


def check_heads(ranks: int, heads: int) -> None:
    """Raise ValueError unless each of the ranks gets a head."""
    if ranks > heads:
        raise ValueError(
            f"ulysses_degree={ranks}, but every rank needs a head of self-attention, which has {heads}: use at most"
            f" {heads} ranks"
        )


def split_tokens(config: Any, tokens: int) -> TokenSplit:
    """The split under a `ContextParallelConfig` where this rank has this number of tokens.

    With `ulysses_anything` ranks may have different numbers of tokens, which they then tell each other.
    """
    group = config._ulysses_mesh.get_group()
    ranks = dist.get_world_size(group)
    sizes = gather_size_by_comm(tokens, group) if config.ulysses_anything else [tokens] * ranks
    return TokenSplit(group, dist.get_rank(group), tuple(sizes))


def split_sequence(
    config: Any, others_whole: bool, grid: LatentGrid, before: int | None, tokens: int
) -> tuple[TokenSplit, TokenSequence]:
    """The split of a joint sequence where this rank has this number of tokens, and the whole sequence.

    Args:
        others_whole: as in `Spread`.
        before: as in `TokenSequence.of`.

    Raises:
        ValueError: the ranks have fewer tokens than the video.
    """
    if not others_whole:
        split = split_tokens(config, tokens)
        return split, TokenSequence.of(grid, before, split.all_tokens)
    others = tokens - len(own_tokens(config, grid.tokens))
    sequence = TokenSequence.of(grid, before, grid.tokens + others)
    group = config._ulysses_mesh.get_group()
    sizes = split_evenly(grid.tokens, dist.get_world_size(group))
    return VideoSplit(group, dist.get_rank(group), sizes, sequence), sequence


def own_tokens(config: Any, tokens: int) -> range:
    """This rank's part of this number of tokens that diffusers has split under a `ContextParallelConfig`."""
    group = config._ulysses_mesh.get_group()
    return places_of(split_evenly(tokens, dist.get_world_size(group)), dist.get_rank(group))
