"""The exact part of frame-parallel attention: who sends which frames to whom, and what is computed where.

Shapes as in `frame_parallel.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vmonarch.kernels.distributed.exchange import Link, Transfer, places_of
from vmonarch.kernels.distributed.stages import Call, Frames, Stages
from vmonarch.kernels.merge.api import merge_partials


@dataclass(frozen=True)
class ExactRoutes:
    """What the ranks send each other for exact blocks, frames numbered in the video.

    Args:
        queries: [r][s] the query frames of rank r that are answered at rank s, as far as the keys there go.
        keys: [r][s] the key frames of rank s that are lent to rank r. One of the two is empty.
    """

    queries: tuple[tuple[Frames, ...], ...]
    keys: tuple[tuple[Frames, ...], ...]


@functools.lru_cache(maxsize=64)
def exact_routes(key_frames: tuple[Frames, ...], frames: tuple[int, ...]) -> ExactRoutes:
    """Queries to keys or keys to queries, for every pair of ranks.

    Whichever are fewer frames: two tensors travel for each, q and out, or k and v. If both are as many, the work goes
    to the rank that has less by then.
    """
    ranks = range(len(frames))
    own = [places_of(frames, r) for r in ranks]
    work = [sum(k in own[r] for l in own[r] for k in key_frames[l]) for r in ranks]
    queries: list[list[Frames]] = [[()] * len(frames) for _ in ranks]
    keys: list[list[Frames]] = [[()] * len(frames) for _ in ranks]
    for r in ranks:
        for s in ranks:
            pairs = [(l, k) for l in own[r] for k in key_frames[l] if k in own[s]]
            if r == s or not pairs:
                continue
            asking, asked = (tuple(sorted(set(frame))) for frame in zip(*pairs, strict=True))
            if (len(asking), work[s]) < (len(asked), work[r]):
                queries[r][s] = asking
                work[s] += len(pairs)
            else:
                keys[r][s] = asked
                work[r] += len(pairs)
    return ExactRoutes(tuple(map(tuple, queries)), tuple(map(tuple, keys)))


def take_frames(x: torch.Tensor, frames: Sequence[int], dim: int) -> torch.Tensor:
    """Some frames, sorted, of a tensor with frames along `dim`; a view where they follow each other."""
    if not frames or frames[-1] - frames[0] == len(frames) - 1:
        return x.narrow(dim, frames[0] if frames else 0, len(frames))
    return torch.stack([x.select(dim, l) for l in frames], dim)


def with_frames(x: torch.Tensor, frames: Sequence[int], new: torch.Tensor, dim: int) -> torch.Tensor:
    """`x` with some of its frames replaced by those of `new`; without any index on the device."""
    if len(frames) == x.shape[dim]:
        return new
    numbers = {l: n for n, l in enumerate(frames)}
    all_frames = [new.select(dim, numbers[l]) if l in numbers else x.select(dim, l) for l in range(x.shape[dim])]
    return torch.stack(all_frames, dim)


class ExactPart:
    """The exact part of the rows of this rank; its first exchange begins when the object is made.

    Args:
        query, key, value: tokens by frames.
    """

    def __init__(
        self, link: Link, stages: Stages, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
    ) -> None:
        assert call.key_frames is not None
        self.link, self.stages, self.call = link, stages, call
        self.query, self.key, self.value = query, key, value
        self.key_frames = call.key_frames
        self.frames = [l for l in call.own_frames if self.key_frames[l]]
        routes = exact_routes(self.key_frames, call.frames)
        ranks, me = range(link.peers.size), call.rank
        self.asked = routes.queries[me]
        self.answered = [routes.queries[r][me] for r in ranks]
        self.borrowed = routes.keys[me]
        lent = [routes.keys[r][me] for r in ranks]
        self.queries_travel = any(map(any, routes.queries))
        self.transfer = None
        if self.queries_travel or any(map(any, routes.keys)):
            first = call.own_frames.start
            tokens = (query, key, value)
            sent = [(self.asked[r], lent[r], lent[r]) for r in ranks]
            coming = [(self.answered[r], self.borrowed[r], self.borrowed[r]) for r in ranks]
            self.transfer = link.start(
                [[take_frames(x, [l - first for l in of], 1) for x, of in zip(tokens, s, strict=True)] for s in sent],
                [[(x.shape[0], len(of), *x.shape[2:]) for x, of in zip(tokens, c, strict=True)] for c in coming],
                [query.dtype] * 3,
                (True, True, True),
            )

    def finish(self) -> tuple[torch.Tensor, ...] | None:
        """(out [B, n, b, H, E], lse [B, H, n, b]) of the n frames `self.frames`; None if there are none."""
        received: list[list[torch.Tensor]] = [[]] * self.link.peers.size
        if self.transfer is not None:
            received = self.transfer.finish()
        if not self.queries_travel:
            return self._at_home(received)[1] if self.frames else None
        answers = self._answer(received)
        frames, here = self._at_home(received)
        parts: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {l: [] for l in self.frames}
        for of, pieces in [(frames, here), *zip(self.asked, answers.finish(), strict=True)]:
            for n, l in enumerate(of):
                parts[l].append((pieces[0][:, n], pieces[1][:, :, n]))
        if not self.frames:
            return None
        merged = [merge_partials(*parts[l]) if len(parts[l]) > 1 else parts[l][0] for l in self.frames]
        return torch.stack([out for out, _ in merged], 1), torch.stack([lse for _, lse in merged], 2)

    def _answer(self, received: list[list[torch.Tensor]]) -> Transfer:
        """Begin to send back what the keys of this rank say to the query frames that came."""
        B, _, b, H, _ = self.query.shape
        E, stages = self.value.shape[4], self.stages
        own = self.call.own_frames
        frames = [l for asked in self.answered for l in asked]
        out = self.value.new_empty(B, 0, b, H, E, dtype=stages.dtype)
        lse = self.value.new_empty(B, H, 0, b, dtype=stages.statistics_dtype)
        if frames:
            queries = torch.cat([pieces[0] for pieces in received if pieces], 1)
            key_frames = tuple(tuple(k - own.start for k in self.key_frames[l] if k in own) for l in frames)
            out, lse = stages.exact(queries, self.key, self.value, key_frames)
        numbers = [len(asked) for asked in self.answered]
        return self.link.start(
            list(zip(out.split(numbers, 1), lse.split(numbers, 2), strict=True)),
            [[(B, len(asked), b, H, E), (B, H, len(asked), b)] for asked in self.asked],
            [stages.dtype, stages.statistics_dtype],
            (True, True),
        )

    def _at_home(self, received: list[list[torch.Tensor]]) -> tuple[list[int], tuple[torch.Tensor, ...]]:
        """Frames that attend to keys of this rank or lent to it, and (out, lse) of what these keys say to them."""
        own, key, value = self.call.own_frames, self.key, self.value
        here = [*own, *(k for frames in self.borrowed for k in frames)]
        if len(here) > len(own):
            key = torch.cat([key, *(pieces[1] for pieces in received if pieces)], 1)
            value = torch.cat([value, *(pieces[2] for pieces in received if pieces)], 1)
        place = {k: n for n, k in enumerate(here)}
        key_frames = {l: tuple(sorted(place[k] for k in self.key_frames[l] if k in place)) for l in self.frames}
        frames = [l for l in self.frames if key_frames[l]]
        if not frames:
            return frames, ()
        queries = take_frames(self.query, [l - own.start for l in frames], 1)
        return frames, self.stages.exact(queries, key, value, tuple(key_frames[l] for l in frames))
