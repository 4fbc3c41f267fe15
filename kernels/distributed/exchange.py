"""Exchanges of tensors among the ranks of a process group, differentiable, and in one order on all ranks.

A piece is what one rank sends to another of one tensor. All pieces for one rank travel together, so that an exchange
is one `all_to_all_single`, which gloo and NCCL both have, for pieces of any sizes. The backward pass is the inverse
exchange: gradients of received pieces go back to where the pieces came from.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from vmonarch.kernels.common.launch import carry_tangents

Shape = tuple[int, ...]

# Bytes of a word. Every piece starts at a multiple, whatever the dtype of the piece before.
ALIGNMENT = 16


def _aligned_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _words(x: torch.Tensor) -> torch.Tensor | None:
    """A view of the same bytes as numbers of a word each; None if they do not lie so."""
    n = ALIGNMENT // x.dtype.itemsize
    whole = x.dim() > 0 and x.stride(-1) == 1 and x.shape[-1] % n == 0 and x.data_ptr() % ALIGNMENT == 0
    if whole and not any(step % n for step in (x.storage_offset(), *x.stride()[:-1])):
        return x.view(torch.complex128)
    return None


@torch.no_grad()
def _copy(to: torch.Tensor, x: torch.Tensor) -> None:
    """`to.copy_(x)` of one dtype, by whole words where both lie so: torch copies rows with gaps number by number."""
    to_words, words = _words(to), _words(x)
    if to_words is None or words is None:
        to.copy_(x)
    else:
        to_words.copy_(words)


class _Join(torch.autograd.Function):
    """`torch.cat`, which is slow where its parts have gaps, by words."""

    @staticmethod
    def forward(ctx: Any, dim: int, *parts: torch.Tensor) -> torch.Tensor:
        ctx.dim, ctx.sizes = dim, [part.shape[dim] for part in parts]
        shape = list(parts[0].shape)
        shape[dim] = sum(ctx.sizes)
        whole = parts[0].new_empty(shape)
        for part, place in zip(parts, whole.split(ctx.sizes, dim), strict=True):
            _copy(place, part)
        return whole

    @staticmethod
    def backward(ctx: Any, d_whole: torch.Tensor):
        return None, *d_whole.split(ctx.sizes, ctx.dim)


def _resized(x: torch.Tensor, dim: int, size: int) -> Shape:
    """The shape of x with another size along one dimension."""
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """Sizes that differ by at most one, the larger ones first."""
    few, more = divmod(total, parts)
    return tuple(few + (n < more) for n in range(parts))


def places_of(sizes: Sequence[int], rank: int) -> range:
    """The part of a sequence that a rank has, where the ranks have these numbers of places, one after the other."""
    start = sum(sizes[:rank])
    return range(start, start + sizes[rank])


def _common(places: range, others: range) -> range:
    """What both have; where they have nothing, an empty range that lies in or beside `places`."""
    start = min(max(places.start, others.start), places.stop)
    return range(start, max(start, min(places.stop, others.stop)))


def places_leaving(before: Sequence[int], after: Sequence[int], rank: int) -> int:
    """How many places of a sequence a rank sends to others in `Link.regroup`."""
    return before[rank] - len(_common(places_of(before, rank), places_of(after, rank)))


@dataclass(frozen=True)
class Peers:
    """The other ranks of a group, as an exchange sees them from this rank.

    Args:
        device: of all tensors.
    """

    group: dist.ProcessGroup
    device: torch.device
    rank: int
    size: int

    def lists(self, flat: Sequence[Any], kinds: int) -> list[list[Any]]:
        """A flat list of pieces of `kinds` tensors, by rank; an empty list for this rank."""
        by_peer = [list(flat[n * kinds : (n + 1) * kinds]) for n in range(self.size - 1)]
        return [*by_peer[: self.rank], [], *by_peer[self.rank :]]


class _Message:
    """Pieces under way, sent when the object is made.

    Args:
        sent: by rank, the pieces for it.
        shapes: by rank, the shapes of the pieces that come from it, of the dtypes `dtypes`.
    """

    def __init__(
        self,
        peers: Peers,
        sent: Sequence[Sequence[torch.Tensor]],
        shapes: Sequence[Sequence[Shape]],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        self.shapes, self.dtypes = shapes, dtypes
        sizes = [
            sum(_aligned_bytes(shape, dtype) for shape, dtype in zip(pieces, dtypes, strict=False)) for pieces in shapes
        ]
        sizes_sent = [sum(_aligned_bytes(piece.shape, piece.dtype) for piece in pieces) for pieces in sent]
        buffer, received = (
            torch.empty(sum(bytes_), dtype=torch.uint8, device=peers.device) for bytes_ in (sizes_sent, sizes)
        )
        start = 0
        for piece in (piece for pieces in sent for piece in pieces):
            _copy(_part(buffer, start, piece.shape, piece.dtype), piece)
            start += _aligned_bytes(piece.shape, piece.dtype)
        work = dist.all_to_all_single(received, buffer, sizes, sizes_sent, group=peers.group, async_op=True)
        self.under_way: tuple[Any, torch.Tensor, torch.Tensor] | None = work, received, buffer

    def wait(self) -> list[torch.Tensor]:
        """The received pieces, by rank and then by tensor, views of one buffer; once."""
        assert self.under_way is not None
        work, received, _ = self.under_way
        self.under_way = None
        if work is not None:
            work.wait()
        pieces, start = [], 0
        for shapes in self.shapes:
            for shape, dtype in zip(shapes, self.dtypes, strict=False):
                pieces.append(_part(received, start, shape, dtype))
                start += _aligned_bytes(shape, dtype)
        return pieces


def _part(buffer: torch.Tensor, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)


class _Exchange(torch.autograd.Function):
    """The end of an exchange: (token, received pieces …) of (token, sent pieces …)."""

    @staticmethod
    def forward(
        ctx: Any, message: _Message, peers: Peers, differentiable: Sequence[bool], token: torch.Tensor, *sent
    ) -> tuple[torch.Tensor, ...]:
        received = message.wait()
        ctx.set_materialize_grads(False)
        ctx.peers, ctx.differentiable, ctx.dtypes = peers, differentiable, message.dtypes
        ctx.shapes_sent = peers.lists([tuple(piece.shape) for piece in sent], len(differentiable))
        ctx.shapes_received = peers.lists([tuple(piece.shape) for piece in received], len(differentiable))
        flags = [*differentiable] * (peers.size - 1)
        ctx.mark_non_differentiable(*(piece for piece, flag in zip(received, flags, strict=True) if not flag))
        return token.clone(), *received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_token: torch.Tensor | None, *grads: torch.Tensor | None):
        peers, kinds = ctx.peers, [n for n, flag in enumerate(ctx.differentiable) if flag]
        sent = [
            [
                torch.zeros(shapes[n], dtype=ctx.dtypes[n], device=peers.device) if pieces[n] is None else pieces[n]
                for n in kinds
                if shapes
            ]
            for pieces, shapes in zip(peers.lists(grads, len(ctx.differentiable)), ctx.shapes_received, strict=True)
        ]
        shapes = [[pieces[n] for n in kinds if pieces] for pieces in ctx.shapes_sent]
        received = iter(_Message(peers, sent, shapes, [ctx.dtypes[n] for n in kinds]).wait())
        d_sent = [next(received) if flag else None for _ in range(peers.size - 1) for flag in ctx.differentiable]
        return None, None, None, torch.zeros(0, device=peers.device), *d_sent


class _Close(torch.autograd.Function):
    """The results themselves, which then depend on the last token."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, *results: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.device = token.device
        return tuple(result.view_as(result) for result in results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None):
        return torch.zeros(0, device=ctx.device), *grads


@dataclass
class Transfer:
    """An exchange under way."""

    link: Link
    message: _Message
    sent: Sequence[Sequence[torch.Tensor]]
    differentiable: tuple[bool, ...]

    def finish(self) -> list[list[torch.Tensor]]:
        """By rank, the pieces that came from it; none from this rank."""
        link, peers = self.link, self.link.peers
        flat = [piece for pieces in self.sent for piece in pieces]
        # A graph that held the link would hold the last token, and so itself.
        link.token, *received = _Exchange.apply(self.message, peers, self.differentiable, link.token, *flat)
        return peers.lists(received, len(self.differentiable))


@dataclass(frozen=True)
class Moved:
    """A tensor that is to be whole along `cat_dim`, for which it is split among the ranks along `split_dim`."""

    tensor: torch.Tensor
    split_dim: int
    cat_dim: int
    differentiable: bool = True


@dataclass
class Redistribution:
    """A redistribution under way; the rank's own part does not travel."""

    transfer: Transfer
    own: list[torch.Tensor]
    cat_dims: list[int]

    def finish(self) -> list[torch.Tensor]:
        received = self.transfer.finish()
        received[self.transfer.link.peers.rank] = self.own
        return [_Join.apply(cat_dim, *(pieces[n] for pieces in received)) for n, cat_dim in enumerate(self.cat_dims)]


class Link:
    """What one call exchanges with the other ranks of its group, in the same order on all of them.

    Every exchange passes a token on to the next. It has no elements, but it makes every exchange depend on the one
    before, and `close` makes the results depend on the last. So the backward pass, too, runs all exchanges, and in the
    reverse order, on every rank, whatever each of them computes in between.

    Args:
        requires_grad: whether any tensor that is sent requires gradients; the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, requires_grad: bool) -> None:
        self.peers = Peers(group, device, dist.get_rank(group), dist.get_world_size(group))
        self.token = torch.zeros(0, device=device, requires_grad=requires_grad and torch.is_grad_enabled())

    def start(
        self,
        sent: Sequence[Sequence[torch.Tensor]],
        shapes: Sequence[Sequence[Shape]],
        dtypes: Sequence[torch.dtype],
        differentiable: tuple[bool, ...],
    ) -> Transfer:
        """Begin to send, by rank, pieces of as many tensors as there are `dtypes`; those for this rank are left out.

        Args:
            shapes: by rank, the shapes of the pieces that will come from it.
            differentiable: for every tensor, whether gradients flow back; the same on all ranks.

        Raises:
            NotImplementedError: forward-mode AD goes through a tensor; tangents do not travel.
        """
        if carry_tangents(*(piece for pieces in sent for piece in pieces)):
            raise NotImplementedError("forward-mode AD is not supported across ranks (supported: backward)")
        sent = [[] if r == self.peers.rank else pieces for r, pieces in enumerate(sent)]
        shapes = [[] if r == self.peers.rank else pieces for r, pieces in enumerate(shapes)]
        return Transfer(self, _Message(self.peers, sent, shapes, dtypes), sent, differentiable)

    def redistribute(self, moved: Sequence[Moved], split: Sequence[int], cat: Sequence[int]) -> Redistribution:
        """Begin to split tensors among the ranks along one dimension, to be joined along another.

        Args:
            split: by rank, the size along `split_dim` that it gets.
            cat: by rank, the size along `cat_dim` that it has.
        """
        parts = [m.tensor.split(list(split), m.split_dim) for m in moved]
        own = [part[self.peers.rank] for part in parts]
        transfer = self.start(
            list(zip(*parts, strict=True)),
            [[_resized(x, m.cat_dim, size) for x, m in zip(own, moved, strict=True)] for size in cat],
            [m.tensor.dtype for m in moved],
            tuple(m.differentiable for m in moved),
        )
        return Redistribution(transfer, own, [m.cat_dim for m in moved])

    def regroup(
        self, tensors: Sequence[torch.Tensor], before: Sequence[int], after: Sequence[int], dim: int
    ) -> list[torch.Tensor]:
        """Move the borders between the ranks' parts of a sequence along `dim`; only what crosses one travels.

        Args:
            before, after: by rank, the size along `dim` that it has and the one that it gets.
        """
        if tuple(before) == tuple(after):
            return list(tensors)
        rank = self.peers.rank
        own, wanted = places_of(before, rank), places_of(after, rank)
        parts: list[list[torch.Tensor]] = []
        shapes: list[list[Shape]] = []
        for r in range(self.peers.size):
            leaving, coming = _common(own, places_of(after, r)), _common(wanted, places_of(before, r))
            parts.append([x.narrow(dim, leaving.start - own.start, len(leaving)) for x in tensors])
            shapes.append([_resized(x, dim, len(coming)) for x in tensors])
        received = self.start(parts, shapes, [x.dtype for x in tensors], (True,) * len(tensors)).finish()
        received[rank] = parts[rank]
        return [_Join.apply(dim, *pieces) for pieces in zip(*received, strict=True)]

    def close(self, *results: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The results of the call, whose backward pass runs all exchanges, whether they need what came or not."""
        return _Close.apply(self.token, *results)


# What the ranks of a group have agreed on, with the answers of all ranks; kept while the group exists.
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, list[Any]]] = weakref.WeakKeyDictionary()


def agree(
    group: dist.ProcessGroup, device: torch.device, arguments: Mapping[str, Hashable], name: str, own: Hashable
) -> list[Any]:
    """Check that all ranks call with the same arguments; the first call with them, a collective, asks the others.

    Args:
        device: of this rank's tensors.
        name, own: what may differ from rank to rank, but not from call to call with the same arguments: the other
            ranks would not hear of it.

    Returns:
        `own` of every rank.

    Raises:
        ValueError: a rank has other arguments, or has refused its own, and the message names the rank and what differs;
            or `own` is not that of the call before.
    """
    known = _agreed.setdefault(group, {})
    call = tuple(arguments.items())
    if call not in known:
        answers = _ask(group, device, (dict(arguments), own))
        for rank, (theirs, _) in enumerate(answers):
            if theirs != answers[0][0]:
                different = [name for name in arguments if theirs.get(name) != answers[0][0].get(name)]
                what = "; ".join(
                    f"{name} is {theirs.get(name)!r}, not {answers[0][0].get(name)!r}" for name in different
                )
                raise ValueError(f"rank {rank} of the group calls with other arguments than rank 0: {what}")
        known[call] = [theirs for _, theirs in answers]
    before = known[call][dist.get_rank(group)]
    if own != before:
        raise ValueError(
            f"{name} must be as in the calls before with the same arguments, {before}, got {own}; use another process"
            " group for another division"
        )
    return known[call]


def refuse(group: dist.ProcessGroup, device: torch.device, error: Exception) -> None:
    """Tell the ranks that wait for this one in their first call that it will not take part."""
    if not _agreed.get(group):
        _ask(group, device, error, raise_theirs=False)


def _ask(group: dist.ProcessGroup, device: torch.device, answer: Any, raise_theirs: bool = True) -> list[Any]:
    answers: list[Any] = [None] * dist.get_world_size(group)
    if isinstance(answer, Exception):
        answer = f"{type(answer).__name__}: {answer}"
    # NCCL sends from the current device, which need not be the one that the tensors are on; what is sent has nothing to
    # do with a transform of torch.func around the call.
    with torch.cuda.device(device if device.type == "cuda" else -1), torch._C._DisableFuncTorch():
        dist.all_gather_object(answers, answer, group=group)
    refused = [
        f"rank {rank} of the group refuses its arguments: {a}" for rank, a in enumerate(answers) if type(a) is str
    ]
    if refused and raise_theirs:
        raise ValueError("; ".join(refused))
    return answers
