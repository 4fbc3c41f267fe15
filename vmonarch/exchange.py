"""The exchange of attention by heads: every rank splits tensors among all, along one dimension, and joins what it gets.

All pieces for one rank travel together, so that an exchange is one `all_to_all_single`, which gloo and NCCL both have,
for pieces of any sizes. The backward pass is the inverse exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from vmonarch.kernels.common.launch import carry_tangents

Shape = tuple[int, ...]

# Bytes of a word. Every piece starts at a multiple, whatever the dtype of the piece before.
ALIGNMENT = 16


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """Sizes that differ by at most one, the larger ones first."""
    few, more = divmod(total, parts)
    return tuple(few + (n < more) for n in range(parts))


def places_of(sizes: Sequence[int], rank: int) -> range:
    """The part of a sequence that a rank has, where the ranks have these numbers of places, one after the other."""
    start = sum(sizes[:rank])
    return range(start, start + sizes[rank])


def _aligned_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _words(x: torch.Tensor) -> torch.Tensor | None:
    """A view of the same bytes as numbers of a word each; None if they do not lie so."""
    n = ALIGNMENT // x.dtype.itemsize
    whole = x.dim() > 0 and x.stride(-1) == 1 and x.shape[-1] % n == 0 and x.data_ptr() % ALIGNMENT == 0
    if whole and not any(step % n for step in (x.storage_offset(), *x.stride()[:-1])):
        return x.view(torch.complex128)
    return None


def _copy(to: torch.Tensor, x: torch.Tensor) -> None:
    """`to.copy_(x)` of one dtype, by whole words where both lie so: torch copies rows with gaps number by number."""
    to_words, words = _words(to), _words(x)
    if to_words is None or words is None:
        to.copy_(x)
    else:
        to_words.copy_(words)


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """`torch.cat`, which is slow where its parts have gaps, by words."""
    sizes = [part.shape[dim] for part in parts]
    whole = parts[0].new_empty(_resized(parts[0], dim, sum(sizes)))
    for part, place in zip(parts, whole.split(sizes, dim), strict=True):
        _copy(place, part)
    return whole


def _resized(x: torch.Tensor, dim: int, size: int) -> Shape:
    """The shape of x with another size along one dimension."""
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


def _part(buffer: torch.Tensor, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)


def _exchanged(
    group: dist.ProcessGroup,
    tensors: Sequence[torch.Tensor],
    split_dim: int,
    split: Sequence[int],
    cat_dim: int,
    cat: Sequence[int],
) -> tuple[torch.Tensor, ...]:
    """What `exchange` computes; this rank's own part does not travel."""
    rank, device = dist.get_rank(group), tensors[0].device
    pieces = list(zip(*(x.split(list(split), split_dim) for x in tensors), strict=True))
    sent = [[] if r == rank else list(of) for r, of in enumerate(pieces)]
    shapes = [[] if r == rank else [_resized(x, cat_dim, n) for x in pieces[rank]] for r, n in enumerate(cat)]
    dtypes = [x.dtype for x in tensors]
    sizes_sent = [sum(_aligned_bytes(x.shape, x.dtype) for x in of) for of in sent]
    sizes = [sum(map(_aligned_bytes, of, dtypes)) for of in shapes]
    buffer, received = (torch.empty(sum(bytes_), dtype=torch.uint8, device=device) for bytes_ in (sizes_sent, sizes))
    start = 0
    for x in (x for of in sent for x in of):
        _copy(_part(buffer, start, x.shape, x.dtype), x)
        start += _aligned_bytes(x.shape, x.dtype)
    dist.all_to_all_single(received, buffer, sizes, sizes_sent, group=group)
    start, parts = 0, []
    for r, of in enumerate(shapes):
        found = list(pieces[rank]) if r == rank else []
        for shape, dtype in zip(of, dtypes, strict=False):
            found.append(_part(received, start, shape, dtype))
            start += _aligned_bytes(shape, dtype)
        parts.append(found)
    return tuple(_joined(of, cat_dim) for of in zip(*parts, strict=True))


class _Exchange(torch.autograd.Function):
    """`_exchanged`, one node for all tensors: every rank runs its backward pass whichever results are needed."""

    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup,
        split_dim: int,
        split: Sequence[int],
        cat_dim: int,
        cat: Sequence[int],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.inverse = group, cat_dim, cat, split_dim, split
        return _exchanged(group, tensors, split_dim, split, cat_dim, cat)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor):
        group, *dimensions = ctx.inverse
        return *(None,) * 5, *_exchanged(group, grads, *dimensions)


def exchange(
    group: dist.ProcessGroup,
    tensors: Sequence[torch.Tensor],
    *,
    split_dim: int,
    split: Sequence[int],
    cat_dim: int,
    cat: Sequence[int],
) -> tuple[torch.Tensor, ...]:
    """Split tensors among the ranks along one dimension, and join what comes along another; differentiable.

    All ranks must call it in the same order, and where gradients are needed run the backward pass.

    Args:
        split: by rank, the size along `split_dim` that it gets.
        cat: by rank, the size along `cat_dim` that it has.

    Raises:
        NotImplementedError: forward-mode AD goes through a tensor; tangents do not travel.
    """
    if carry_tangents(*tensors):
        raise NotImplementedError("forward-mode AD is not supported across ranks (supported: backward)")
    found: tuple[torch.Tensor, ...] = _Exchange.apply(group, split_dim, split, cat_dim, cat, *tensors)
    return found


def ulysses_bytes(
    *,
    tokens: Sequence[int],
    rank: int,
    batch: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> int:
    """Bytes that a rank sends to others in a forward pass of attention by heads: of q, k, v and o, without alignment.

    Args:
        tokens: how many each rank has. Heads are split evenly, the first ranks having one more where need be.

    Raises:
        ValueError: there are fewer heads than ranks.
    """
    if heads < len(tokens):
        raise ValueError(f"heads must be at least the number of ranks, {len(tokens)}, got {heads}")
    own = split_evenly(heads, len(tokens))[rank]
    sent = 3 * tokens[rank] * (heads - own) + (sum(tokens) - tokens[rank]) * own
    return batch * sent * head_dim * dtype.itemsize
