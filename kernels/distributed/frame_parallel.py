"""VMonarch attention over several processes, each of which holds whole latent frames.

The R-steps need the keys of one frame, so they stay where the frames are. The L-steps need all frames at one position:
their inputs are redistributed from frames to positions and their results back. On its b_r positions a rank has the
tokens of a grid (T, 1, b_r), so the L-steps are those of one process.

What a rank sends, in units of what it sends when it redistributes one tensor like its query, (P - 1)/P of the elements
for P ranks: q once, aL in all t iterations, z in all but the first, y and o in the last, that is 2 + 2·t; and cL and
the log-partitions, one number for every D. Ulysses (attention by heads) moves q, k, v and o: 4 units. So this moves as
much as Ulysses for t = 1 and 1.5 times as much for t = 2, not less. What it offers is that the number of heads is free,
that frames and positions need not divide, that keys and values never move outside exact blocks, and that q and what
exact blocks need travel during the first R-step; the other exchanges are waited for. `traffic.py`
counts.

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

import torch

from vmonarch.kernels.distributed.exact import ExactPart, take_frames, with_frames
from vmonarch.kernels.distributed.exchange import Link, Moved
from vmonarch.kernels.distributed.stages import Call, Stages
from vmonarch.kernels.merge.api import merge_partials


def run(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, link: Link, stages: Stages
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, S, H, E], lse [B, H, S]) of the rows of this rank, arguments already checked."""
    b = call.grid.tokens_per_frame
    q, k, v = (x.unflatten(1, (-1, b)) for x in (query, key, value))
    exact = None
    queries = link.redistribute([Moved(q, 2, 1)], call.positions, call.frames)
    if call.key_frames is not None:
        exact = ExactPart(link, stages, q, k, v, call)
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
            moved.append(Moved(weights if part is None else with_frames(weights, rows, part[1], 2), 3, 2))
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
        monarch = (take_frames(o, rows, 1).flatten(1, 2), take_frames(lse, rows, 2).flatten(2, 3))
        out, weight = merge_partials(monarch, (out_exact.flatten(1, 2), lse_exact.flatten(2, 3)))
        out_exact, lse_exact = out.unflatten(1, (-1, b)), weight.unflatten(2, (-1, b))
    return with_frames(o, rows, out_exact, 1), with_frames(lse, rows, lse_exact, 2)
