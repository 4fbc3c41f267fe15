"""Context parallelism of diffusers (`enable_parallelism`): tokens spread over processes, whose attention shares heads.

Outside attention every process (rank) of a group holds some tokens of all heads; inside, all tokens of some heads
(Ulysses attention). One all-to-all leads there, another one back.

Shapes: B batch, S tokens of the video, s tokens of this rank, H heads, h heads of this rank, D head dim.

Source: DeepSpeed Ulysses, §3.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from diffusers.models._modeling_parallel import gather_size_by_comm


class Share(NamedTuple):
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

    def share(self, total: int) -> Share:
        """This rank's part of so many heads or channels; the first ranks have one more where they do not divide."""
        sizes = self._sizes(total)
        start = sum(sizes[: self.rank])
        return Share(start, start + sizes[self.rank], total)

    def gather_tokens(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All tokens of this rank's heads: tensors [B, s, H, …] -> [B, S, h, …]; differentiable."""
        return _Exchange.apply(self.group, 2, self._sizes(tensors[0].shape[2]), 1, self.tokens, *tensors)

    def gather_heads(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """The inverse of `gather_tokens` for one tensor: [B, S, h, …] -> [B, s, heads, …]."""
        (gathered,) = _Exchange.apply(self.group, 1, self.tokens, 2, self._sizes(heads), x)
        return gathered

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The same for all ranks, of what each holds for its own tokens: [B, s, …] -> [B, S, …]; no gradient."""
        ranks = len(self.tokens)
        copies = x.detach().unsqueeze(0).expand(ranks, *x.shape)
        return _exchange(copies, self.group, 0, (1,) * ranks, 2, self.tokens).squeeze(0)

    def _sizes(self, total: int) -> tuple[int, ...]:
        few, more = divmod(total, len(self.tokens))
        return tuple(few + (rank < more) for rank in range(len(self.tokens)))


def context_parallel_config(parallel_config: Any) -> Any:
    """diffusers' `ContextParallelConfig` in the `ParallelConfig` of a model or processor; None without one."""
    return getattr(parallel_config, "context_parallel_config", None)


def check_context_parallel(config: Any, heads: int) -> None:
    """Check that self-attention with so many heads can be computed under a `ContextParallelConfig`.

    Raises:
        NotImplementedError: ring attention.
        ValueError: there are fewer heads than ranks.
    """
    check_ring(config.ring_degree, "ContextParallelConfig(ulysses_degree=…)")
    check_heads(config.ulysses_degree, heads)


def check_ring(degree: int, instead: str) -> None:
    """Raise NotImplementedError if so many ranks share the keys of ring attention; `instead` is what to use."""
    if degree > 1:
        raise NotImplementedError(
            f"ring_degree={degree} is not supported: in ring attention a rank sees a part of the keys at a"
            f" time, these processors need all of them; use {instead}"
        )


def check_heads(ranks: int, heads: int) -> None:
    """Raise ValueError unless each of so many ranks gets a head."""
    if ranks > heads:
        raise ValueError(
            f"ulysses_degree={ranks}, but every rank needs a head of self-attention, which has {heads}:"
            f" use at most {heads} ranks"
        )


def split_tokens(config: Any, tokens: int) -> TokenSplit:
    """The split under a `ContextParallelConfig` that gives this rank so many tokens.

    With `ulysses_anything` ranks may have different numbers of tokens, which they then tell each other.
    """
    group = config._ulysses_mesh.get_group()
    ranks = dist.get_world_size(group)
    sizes = gather_size_by_comm(tokens, group) if config.ulysses_anything else [tokens] * ranks
    return TokenSplit(group, dist.get_rank(group), tuple(sizes))


class _Exchange(torch.autograd.Function):
    """`_exchange` for several tensors; backward, the parts go back."""

    @staticmethod
    def forward(
        ctx: Any,
        group: Any,
        cut: int,
        cut_sizes: Sequence[int],
        join: int,
        join_sizes: Sequence[int],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.inverse = group, join, join_sizes, cut, cut_sizes
        return tuple(_exchange(x, group, cut, cut_sizes, join, join_sizes) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None,) * len(ctx.inverse) + _Exchange.apply(*ctx.inverse, *gradients)


def _exchange(
    x: torch.Tensor, group: Any, cut: int, cut_sizes: Sequence[int], join: int, join_sizes: Sequence[int]
) -> torch.Tensor:
    """All-to-all: rank r gets the r-th part of every rank's `x`, cut along one dimension, and joins what it got.

    Args:
        cut, cut_sizes: the dimension, and what of it each rank gets.
        join, join_sizes: the other dimension, and what of it each rank holds.
    """
    parts = x.split(list(cut_sizes), cut)
    shape = list(x.shape)
    shape[cut] = cut_sizes[dist.get_rank(group)]
    shapes = [(*shape[:join], size, *shape[join + 1 :]) for size in join_sizes]
    counts = [math.prod(shape) for shape in shapes]
    sent = torch.cat([part.reshape(-1) for part in parts])
    received = sent.new_empty(sum(counts))
    dist.all_to_all_single(received, sent, counts, [part.numel() for part in parts], group=group)
    return torch.cat([part.view(shape) for part, shape in zip(received.split(counts), shapes, strict=True)], join)
