"""VMonarch attention over several processes, each of which holds whole latent frames.

The R-steps need the keys of one frame, so they stay where the frames are. The L-steps need all frames at one position:
their inputs are redistributed from frames to positions and their results back. On its b_r positions a rank has the
tokens of a grid (T, 1, b_r), so the L-steps are those of one process.

What a rank sends, in units of what it sends when it redistributes one tensor like its query, (P - 1)/P of the elements
for P ranks: q once, aL in all t iterations, z in all but the first, y and o in the last, that is 2 + 2·t; and cL and
the log-partitions, one number for every D. Ulysses (attention by heads) moves q, k, v and o: 4 units. So this moves as
much as Ulysses for t = 1 and 1.5 times as much for t = 2, not less. What it offers is that the number of heads is free,
that frames and positions need not divide, that keys and values never move outside exact blocks, and that q and what
exact blocks need travel during the first R-step; the other exchanges are waited for. `frame_parallel_bytes` and
`ulysses_bytes` count.

(Another form moves 2·P units for every t, fewer for P = 2 and t > 1: gather q on all ranks, keep aL, z and y at home,
exchange the log-partitions of the parts of each row of L, and merge partial outputs. Every rank then needs room for
all queries. It is not what is done here.)

Exact blocks are partial attentions, which merge. For each pair of ranks either the query frames travel to the keys, and
their (out, lse) back, or the key frames to the queries, whichever are fewer.

Shapes: B batch, S tokens of this rank, H heads, D head dim, E value dim, T frames of the video, T_r frames of this
rank, b positions of a frame, b_r those of this rank. By frames: blocks [B, H, T_r, b, D], tokens [B, T_r, b, H, D]. By
positions: blocks [B, H, T, b_r, D], tokens [B, T, b_r, H, D].
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vmonarch.exact import ExactBlocks, resolve_exact
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.checks import check_qkv
from vmonarch.kernels.common.launch import use_triton
from vmonarch.kernels.monarch.exchange import Link, Moved, Transfer, agree, places_of, refuse, split_evenly
from vmonarch.kernels.monarch.stages import Call, Frames, Stages, TorchStages
from vmonarch.merge import merge_partials
from vmonarch.options import VMonarchOptions, takes_options
from vmonarch.precision import own_precision
from vmonarch.validation import check_flag, check_implementation, check_positive_integer, resolve_scale


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


def _frames(x: torch.Tensor, frames: Sequence[int], dim: int) -> torch.Tensor:
    """Some frames, sorted, of a tensor with frames along `dim`; a view where they follow each other."""
    if not frames or frames[-1] - frames[0] == len(frames) - 1:
        return x.narrow(dim, frames[0] if frames else 0, len(frames))
    return torch.stack([x.select(dim, l) for l in frames], dim)


def _with_frames(x: torch.Tensor, frames: Sequence[int], new: torch.Tensor, dim: int) -> torch.Tensor:
    """`x` with some of its frames replaced by those of `new`; without any index on the device."""
    if len(frames) == x.shape[dim]:
        return new
    numbers = {l: n for n, l in enumerate(frames)}
    all_frames = [new.select(dim, numbers[l]) if l in numbers else x.select(dim, l) for l in range(x.shape[dim])]
    return torch.stack(all_frames, dim)


class _ExactPart:
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
            numbers = [(self.answered[r], self.borrowed[r], self.borrowed[r]) for r in ranks]
            self.transfer = link.start(
                [
                    [
                        _frames(x, [l - first for l in of], 1)
                        for x, of in zip(tokens, (self.asked[r], lent[r], lent[r]), strict=True)
                    ]
                    if r != me
                    else []
                    for r in ranks
                ],
                [
                    [(x.shape[0], len(n), *x.shape[2:]) for x, n in zip(tokens, numbers[r], strict=True)]
                    if r != me
                    else []
                    for r in ranks
                ],
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
        others = [r != self.call.rank for r in range(self.link.peers.size)]
        pieces = zip(others, out.split(numbers, 1), lse.split(numbers, 2), strict=True)
        return self.link.start(
            [[o, w] if other else [] for other, o, w in pieces],
            [
                [(B, len(asked), b, H, E), (B, H, len(asked), b)] if other else []
                for other, asked in zip(others, self.asked, strict=True)
            ],
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
        queries = _frames(self.query, [l - own.start for l in frames], 1)
        return frames, self.stages.exact(queries, key, value, tuple(key_frames[l] for l in frames))


def _run(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, link: Link, stages: Stages
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, S, H, E], lse [B, H, S]) of the rows of this rank, arguments already checked."""
    b = call.grid.tokens_per_frame
    q, k, v = (x.unflatten(1, (-1, b)) for x in (query, key, value))
    exact = None
    queries = link.redistribute([Moved(q, 2, 1)], call.positions, call.frames)
    if call.key_frames is not None:
        exact = _ExactPart(link, stages, q, k, v, call)
    aL, cL, y = stages.r_step(stages.first_centroids(query), call.options.num_iterations == 1)
    part = None if exact is None else exact.finish()
    rows = [] if exact is None else [l - call.own_frames.start for l in exact.frames]
    (q_positions,) = queries.finish()
    here = call.positions[call.rank] > 0
    lse_exact = None
    for i in range(1, call.options.num_iterations):
        moved = [Moved(aL, 3, 2), Moved(cL, 3, 2, call.entropy_grad)]
        if call.aware and i == 1:
            weights = torch.full_like(cL, -torch.inf)
            moved.append(Moved(weights if part is None else _with_frames(weights, rows, part[1], 2), 3, 2))
        aL, cL, *rest = link.redistribute(moved, call.positions, call.frames).finish()
        if rest:
            (lse_exact,) = rest
        z = stages.centroids(q_positions, aL, cL, lse_exact) if here else torch.empty_like(aL)
        (z,) = link.redistribute([Moved(z, 2, 3)], call.frames, call.positions).finish()
        aL, cL, y = stages.r_step(z, i == call.options.num_iterations - 1)
    assert y is not None
    moved = [Moved(aL, 3, 2), Moved(cL, 3, 2, call.entropy_grad), Moved(y, 3, 2)]
    aL, cL, y = link.redistribute(moved, call.positions, call.frames).finish()
    if here:
        o, lse = stages.output(q_positions, aL, cL, y)
    else:
        o, lse = y.new_empty(*q_positions.shape[:4], y.shape[4]), torch.empty_like(cL)
    moved = [Moved(o, 1, 2), Moved(lse, 2, 3)]
    o, lse = link.redistribute(moved, call.frames, call.positions).finish()
    if part is not None:
        o, lse = _with_exact(o, lse, part[0], part[1], rows, call.whole_rows)
    out, lse = link.close(o.flatten(1, 2).to(query.dtype), lse.flatten(2, 3))
    return out, lse


def _with_exact(
    o: torch.Tensor, lse: torch.Tensor, out_exact: torch.Tensor, lse_exact: torch.Tensor, rows: list[int], whole: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the exact part of some frames with their Monarch part, or put it in its place if `whole`.

    Args:
        o: [B, T_r, b, H, E]. lse: [B, H, T_r, b]. out_exact, lse_exact: the same of the frames `rows`.
    """
    if not whole:
        b = o.shape[2]
        monarch = (_frames(o, rows, 1).flatten(1, 2), _frames(lse, rows, 2).flatten(2, 3))
        out, weight = merge_partials(monarch, (out_exact.flatten(1, 2), lse_exact.flatten(2, 3)))
        out_exact, lse_exact = out.unflatten(1, (-1, b)), weight.unflatten(2, (-1, b))
    return _with_frames(o, rows, out_exact, 1), _with_frames(lse, rows, lse_exact, 2)


@torch.compiler.disable
@takes_options
@own_precision
def frame_parallel_vmonarch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid: LatentGrid | tuple[int, int, int],
    group: dist.ProcessGroup | None = None,
    options: VMonarchOptions | None = None,
    scale: float | None = None,
    entropy_grad: bool = False,
    return_lse: bool = False,
    implementation: str = "auto",
    **named: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`vmonarch_attention` of a video whose latent frames are distributed over the ranks of a process group.

    Rank r has T_r ≥ 1 frames, those after the frames of rank r - 1; ranks may have different numbers, which stay the
    same for calls with the same arguments. The result is that of `vmonarch_attention` with frames_per_block=1 on the
    whole video, up to rounding. So are the gradients, for which all ranks must run the backward pass. Plain torch
    exchanges intermediates of 16-bit tensors in float32; the kernels in the dtype of the tensors.

    All ranks must make the same calls in the same order, with the same arguments. The first call with new arguments
    compares them on all ranks, which waits for the device; later ones do not, so that a rank that then departs from
    the others makes them wait until the timeout of the group. It is not traced by torch.compile, which breaks the
    graph here.

    Args:
        query: [B, T_r·H·W, H, D], the tokens of this rank's frames.
        key: [B, T_r·H·W, H, D].
        value: [B, T_r·H·W, H, Dv].
        grid: (T, H, W) of the whole video.
        group: the ranks, in the order of their frames; the default group if None.
        options: what is computed; None for the defaults, or for `named`. frames_per_block and tiles must be left at
            theirs. Exact frames are counted in the whole video.
        scale, entropy_grad, return_lse, implementation: as in `vmonarch_attention`.
        **named: the `VMonarchOptions` by name, in place of `options`.

    Returns:
        out [B, T_r·H·W, H, Dv] in the dtype of `query`; with `return_lse` also lse [B, H, T_r·H·W].

    Raises:
        TypeError, ValueError: an argument is not as described; or a rank calls with other arguments than the first, or
            has refused its own, and the message names the rank; or it has other frames than in a call before.
        NotImplementedError: implementation="triton", and the kernels cannot take these tensors; the message says why.
        RuntimeError: torch.distributed is not initialised, or this process is not in the group.

    Source: docs/attention.md, "Frames on several devices".
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("frame_parallel_vmonarch_attention needs torch.distributed.init_process_group first")
    group = dist.group.WORLD if group is None else group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise RuntimeError("this process is not a member of the group that it calls with")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup or None, got {type(group).__name__}")
    rank = dist.get_rank(group)
    try:
        check_qkv(query, key, value, same_length=True)
        grid = LatentGrid.parse(grid)
        options = VMonarchOptions.of(options, named)
        for name in ("frames_per_block", "tiles"):
            if name in options.changed():
                raise ValueError(f"{name} must be left alone: blocks that ranks share are whole frames")
        check_flag("entropy_grad", entropy_grad)
        check_implementation(implementation)
        check_flag("return_lse", return_lse)
        own_frames = _own_frames(query, grid)
        scale = resolve_scale(scale, query.shape[-1])
        key_frames = None if options.pattern is None else options.pattern.key_frames(grid.frames)
        op = "frame_parallel_vmonarch_attention"
        triton = use_triton(op, implementation, query, key, value, family="monarch")
    except Exception as error:
        refuse(group, query.device if isinstance(query, torch.Tensor) else torch.device("cpu"), error)
        raise
    requires_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    B, _, heads, head_dim = query.shape
    frames = agree(
        group,
        query.device,
        {
            "grid": tuple(grid),
            "the batch size": B,
            "the number of heads": heads,
            "the head dimension": head_dim,
            "the head dimension of value": value.shape[3],
            "the dtype": str(query.dtype),
            "the device": query.device.type,
            **vars(options),
            "exact": options.pattern,
            "scale": scale,
            "entropy_grad": entropy_grad,
            "the implementation": "triton" if triton else "torch",
            "whether gradients are required": requires_grad,
        },
        "the frames of a rank",
        own_frames,
    )
    if sum(frames) != grid.frames:
        raise ValueError(f"the ranks must have the {grid.frames} frames of grid {tuple(grid)}; they have {frames}")
    call = Call(
        grid=grid,
        frames=tuple(frames),
        positions=split_evenly(grid.tokens_per_frame, len(frames)),
        rank=rank,
        options=options,
        key_frames=key_frames if key_frames is not None and any(key_frames) else None,
        scale=scale,
        entropy_grad=entropy_grad,
    )
    link = Link(group, query.device, requires_grad)
    if triton:
        from vmonarch.kernels.monarch.fused_stages import TritonStages

        if scale < 0:
            # The kernels take the maximum of raw scores, which only a scale that is not negative keeps in order.
            query, call = -query, dataclasses.replace(call, scale=-scale)
        stages: Stages = TritonStages(key, value, call)
    else:
        stages = TorchStages(key, value, call)
    # Triton launches on the current device, wherever the tensors are.
    with torch.cuda.device_of(query):
        out, lse = _run(query, key, value, call, link, stages)
    return (out, lse) if return_lse else out


def _own_frames(query: torch.Tensor, grid: LatentGrid) -> int:
    tokens = grid.tokens_per_frame
    if query.shape[1] % tokens:
        raise ValueError(
            f"query has {query.shape[1]} tokens, which are no whole frames of {tokens} (grid {tuple(grid)});"
            " every rank must have whole frames"
        )
    return query.shape[1] // tokens


def frame_parallel_bytes(
    grid: LatentGrid | tuple[int, int, int],
    *,
    frames: Sequence[int],
    rank: int,
    batch: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    value_dim: int | None = None,
    num_iterations: int = 2,
    exact: str | ExactBlocks | None = "first_frame",
    implementation: str = "triton",
) -> int:
    """Bytes that a rank sends to others in a forward pass of `frame_parallel_vmonarch_attention`.

    Without what aligns the pieces in a message, up to 7 bytes for each. The backward pass sends back what the forward
    pass brought, without cL unless entropy_grad.

    Args:
        frames: how many each rank has.
        batch, heads, head_dim, value_dim: B, H, D and E (D if None) of the tensors.
        implementation: "triton", or "torch", where intermediates are at least float32.

    Raises:
        TypeError, ValueError: `grid` or `exact` is not as `vmonarch_attention` describes, `frames` do not make up the
            grid or `rank` is none of theirs; the message names it.
    """
    grid = LatentGrid.parse(grid)
    _check_frames(grid, frames, rank)
    check_positive_integer("num_iterations", num_iterations)
    if implementation not in ("triton", "torch"):
        raise ValueError(f"implementation must be triton or torch, got {implementation!r}")
    E = head_dim if value_dim is None else value_dim
    positions = split_evenly(grid.tokens_per_frame, len(frames))
    at_least_float32 = torch.promote_types(dtype, torch.float32)
    inner = (dtype if implementation == "triton" else at_least_float32).itemsize
    statistic = at_least_float32.itemsize
    # For every head: places whose row goes to other ranks, from frames to positions and the other way.
    to_positions = frames[rank] * (grid.tokens_per_frame - positions[rank])
    to_frames = positions[rank] * (grid.frames - frames[rank])
    t, D = num_iterations, head_dim
    total = to_positions * (D * dtype.itemsize + t * (D * inner + statistic) + E * inner)
    total += to_frames * ((t - 1) * D * inner + E * inner + statistic)
    pattern = resolve_exact(exact)
    if pattern is not None:
        key_frames = pattern.key_frames(grid.frames)
        routes = exact_routes(key_frames, tuple(frames))
        asked = sum(map(len, routes.queries[rank]))
        answered = sum(len(row[rank]) for row in routes.queries)
        lent = sum(len(row[rank]) for row in routes.keys)
        total += grid.tokens_per_frame * (
            (asked * D + lent * (D + E)) * dtype.itemsize + answered * (E * inner + statistic)
        )
        if pattern.aware and t > 1 and any(key_frames):
            total += to_positions * statistic
    return batch * heads * total


def ulysses_bytes(
    *,
    tokens: Sequence[int],
    rank: int,
    batch: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    value_dim: int | None = None,
) -> int:
    """Bytes that a rank sends to others in a forward pass of attention by heads (Ulysses): of q, k, v and o.

    Args:
        tokens: how many each rank has. Heads are split evenly, the first ranks having one more where need be.
        batch, heads, head_dim, dtype, value_dim: as in `frame_parallel_bytes`.

    Raises:
        TypeError, ValueError: a rank has no tokens, there are fewer heads than ranks, or `rank` is none of theirs.
    """
    _check_rank(tokens, rank, "tokens")
    if heads < len(tokens):
        raise ValueError(f"heads must be at least the number of ranks, {len(tokens)}, got {heads}")
    E = head_dim if value_dim is None else value_dim
    own = split_evenly(heads, len(tokens))[rank]
    sent = tokens[rank] * (heads - own) * (2 * head_dim + E) + (sum(tokens) - tokens[rank]) * own * E
    return batch * sent * dtype.itemsize


def _check_frames(grid: LatentGrid, frames: Sequence[int], rank: int) -> None:
    _check_rank(frames, rank, "frames")
    if sum(frames) != grid.frames:
        raise ValueError(f"frames must sum to the {grid.frames} frames of the grid, got {tuple(frames)}")


def _check_rank(sizes: Sequence[int], rank: int, name: str) -> None:
    for r, number in enumerate(sizes):
        check_positive_integer(f"{name}[{r}]", number)
    if rank not in range(len(sizes)):
        raise ValueError(f"rank must be one of the {len(sizes)} ranks, from 0, got {rank}")
