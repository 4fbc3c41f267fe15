"""Context parallelism of diffusers (`enable_parallelism`): tokens spread over processes, which share attention.

Outside attention every process (rank) of a group holds some tokens of all heads; inside, all tokens of some heads
(Ulysses attention). One all-to-all leads there, another one back (`Exchange`). All pieces for one rank travel together,
so an exchange is one `all_to_all_single`, which gloo and NCCL both support for pieces of any sizes.

In joint attention, every rank may hold all tokens that are not the video's (`VideoSplit`).

Shapes: B batch, S tokens of the sequence, s tokens of this rank, H heads, h heads of this rank, D head dim.

Source: DeepSpeed Ulysses, §3.1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from vmonarch.call import Call

# Bytes in a word.
ALIGNMENT = 16


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """Sizes that differ by at most one, the larger ones first."""
    few, more = divmod(total, parts)
    return tuple(few + (n < more) for n in range(parts))


def places_of(sizes: Sequence[int], rank: int) -> range:
    """The range of a rank in a sequence of which the ranks hold consecutive parts of these sizes."""
    start = sum(sizes[:rank])
    return range(start, start + sizes[rank])


def in_words(x: torch.Tensor) -> bool:
    """Whether a tensor can be viewed as words of `ALIGNMENT` bytes, which torch copies faster."""
    n = ALIGNMENT // x.dtype.itemsize
    whole = x.dim() > 0 and x.stride(-1) == 1 and x.shape[-1] % n == 0 and x.data_ptr() % ALIGNMENT == 0
    return whole and not any(step % n for step in (x.storage_offset(), *x.stride()[:-1]))


def _copy(to: torch.Tensor, x: torch.Tensor) -> None:
    """`to.copy_(x)` of one dtype, in whole words where possible: torch copies rows with gaps number by number."""
    if in_words(to) and in_words(x):
        to, x = to.view(torch.complex128), x.view(torch.complex128)
    to.copy_(x)


def _packed(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor and its place in a buffer, one after the other: (place, tensor)."""
    for place, x in zip(buffer.split([x.numel() for x in tensors]), tensors, strict=True):
        yield place.view(x.shape), x


class Exchange(torch.autograd.Function):
    """Split tensors of one dtype among the ranks along one dimension, and join what arrives along another.

    All ranks must apply it in the same order, and, where gradients are needed, run the backward pass. It is one node
    for all tensors, so every rank runs it whichever results are needed.

    Args:
        split: by rank, the size along `split_dim` that the rank gets.
        cat: by rank, the size along `cat_dim` that the rank has.
    """

    @staticmethod
    def forward(
        group: dist.ProcessGroup,
        split_dim: int,
        split: Sequence[int],
        cat_dim: int,
        cat: Sequence[int],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        # This rank's own part does not travel.
        rank = dist.get_rank(group)
        pieces = list(zip(*(x.split(list(split), split_dim) for x in tensors), strict=True))
        # torch.cat is slow for parts with gaps.
        whole = [x.new_empty((*x.shape[:cat_dim], sum(cat), *x.shape[cat_dim + 1 :])) for x in pieces[rank]]
        places = list(zip(*(x.split(list(cat), cat_dim) for x in whole), strict=True))
        for place, x in zip(places[rank], pieces[rank], strict=True):
            _copy(place, x)
        pieces[rank] = places[rank] = ()
        sizes_sent, sizes = ([sum(x.numel() for x in of) for of in by_rank] for by_rank in (pieces, places))
        sent, received = (whole[0].new_empty(sum(of)) for of in (sizes_sent, sizes))
        for place, x in _packed(sent, [*itertools.chain(*pieces)]):
            _copy(place, x)
        dist.all_to_all_single(received, sent, sizes, sizes_sent, group=group)
        for x, place in _packed(received, [*itertools.chain(*places)]):
            _copy(place, x)
        return tuple(whole)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        group, split_dim, split, cat_dim, cat, *_ = inputs
        ctx.inverse = group, cat_dim, cat, split_dim, split

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor):
        return *(None,) * 5, *Exchange.forward(*ctx.inverse, *grads)


def balanced_heads(costs: Sequence[float], ranks: int, most: int) -> tuple[tuple[int, ...], ...]:
    """The heads of each rank, at most `most`: the costliest first, each to the rank with the least work so far.

    Source: Graham, Bounds on Multiprocessing Timing Anomalies (1969), Theorem 2.
    """
    heads: list[list[int]] = [[] for _ in range(ranks)]
    for head in sorted(range(len(costs)), key=lambda head: -costs[head]):
        free = (own for own in heads if len(own) < most)
        min(free, key=lambda own: sum(costs[h] for h in own)).append(head)
    return tuple(tuple(sorted(own)) for own in heads)


class Part(NamedTuple):
    """The heads of a rank, out of `total`."""

    own: Sequence[int]
    total: int

    def of(self, x: torch.Tensor, dim: int, argument: str = "x") -> torch.Tensor:
        """The rank's part of a tensor with all heads along `dim`; the heads must be consecutive.

        Raises:
            ValueError: the tensor has another number of heads.
        """
        if x.shape[dim] != self.total:
            raise ValueError(f"{argument} has {x.shape[dim]} heads, but attention has {self.total}")
        return x.narrow(dim, self.own[0], len(self.own))


@dataclass(frozen=True)
class TokenSplit:
    """How the tokens of the current call are spread over the ranks of a group.

    Args:
        group: the process group.
        rank: this process in it.
        tokens: number of tokens of every rank, in the order of the sequence.
    """

    group: Any
    rank: int
    tokens: tuple[int, ...]

    @property
    def all_tokens(self) -> int:
        """S."""
        return sum(self.tokens)

    def gather_tokens(self, heads: Sequence[int], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All tokens of this rank's heads: [B, s, H, …] -> [B, S, h, …]; differentiable. `heads`: numbers by rank."""
        return Exchange.apply(self.group, 2, heads, 1, self.tokens, *tensors)

    def gather_heads(self, heads: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        """The inverse of `gather_tokens` for one tensor: [B, S, h, …] -> [B, s, H, …]."""
        return Exchange.apply(self.group, 1, self.tokens, 2, heads, x)[0]

    def whole_mask(self, key_mask: torch.Tensor) -> torch.Tensor:
        """Which keys of the sequence may be attended: boolean [B, S]; no model with such a split has a mask."""
        raise NotImplementedError("a mask of keys is not supported under context parallelism with this model")


@dataclass(frozen=True)
class VideoSplit(TokenSplit):
    """A split of the video's tokens in a sequence whose other tokens every rank holds, around its part of the video.

    Args:
        tokens: number of the video's tokens on every rank.
        sequence: the video's place in the whole sequence.
    """

    sequence: Call

    def gather_tokens(self, heads: Sequence[int], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sequence, own = self.sequence, places_of(heads, self.rank)
        videos = super().gather_tokens(heads, *map(sequence.video, tensors))
        others = (sequence.beside(x)[:, :, own.start : own.stop] for x in tensors)
        return tuple(sequence.joined(video, other) for video, other in zip(videos, others, strict=True))

    def gather_heads(self, heads: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        sequence = self.sequence
        others = sequence.beside(x)
        # Every rank gets all other tokens, and their gradients are summed.
        parts = [sequence.joined(video, others) for video in sequence.video(x).split(list(self.tokens), 1)]
        split = TokenSplit(self.group, self.rank, tuple(part.shape[1] for part in parts))
        return split.gather_heads(heads, torch.cat(parts, 1))

    def whole_mask(self, key_mask: torch.Tensor) -> torch.Tensor:
        # The video's keys may be attended.
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
    """The split under a `ContextParallelConfig` where this rank has `tokens` tokens.

    With `ulysses_anything`, ranks may have different numbers of tokens; they exchange the numbers.
    """
    from diffusers.models._modeling_parallel import gather_size_by_comm

    group = config._ulysses_mesh.get_group()
    ranks = dist.get_world_size(group)
    sizes = gather_size_by_comm(tokens, group) if config.ulysses_anything else [tokens] * ranks
    return TokenSplit(group, dist.get_rank(group), tuple(sizes))


def split_sequence(config: Any, others_whole: bool, call: Call, tokens: int) -> tuple[TokenSplit, Call]:
    """The split of a joint sequence of which this rank has `tokens` tokens, and the call in the whole sequence.

    Args:
        others_whole: as in `Spread`.

    Raises:
        ValueError: the ranks have fewer tokens than the video.
    """
    if not others_whole:
        split = split_tokens(config, tokens)
        return split, call.placed(split.all_tokens)
    video, group = call.grid.tokens, config._ulysses_mesh.get_group()
    call = call.placed(video + tokens - len(own_tokens(config, video)))
    sizes = split_evenly(video, dist.get_world_size(group))
    return VideoSplit(group, dist.get_rank(group), sizes, call), call


def own_tokens(config: Any, tokens: int) -> range:
    """This rank's part of `tokens` tokens that diffusers has split under a `ContextParallelConfig`."""
    group = config._ulysses_mesh.get_group()
    return places_of(split_evenly(tokens, dist.get_world_size(group)), dist.get_rank(group))
