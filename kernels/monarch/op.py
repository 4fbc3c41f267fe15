"""Monarch attention in Triton, forward and backward: the order of the stages, and their registration with torch.

The stages are those of `reference.monarch_attention_reference`: exact part, R-steps, L-steps, last L-step. Shapes:
B batch, S tokens, H heads, D head dim, E value dim, m blocks, b positions per block, t = `num_iterations`, u updates of
L, which are t or, without the last, t - 1; in `_exact_rows`, n tiles of queries of a frame and m tiles of all keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.blocks import Places
from vmonarch.kernels.common.launch import learns, needs_operator, positively_scaled, unit_stride
from vmonarch.kernels.common.operators import new_results, operator
from vmonarch.kernels.common.replay import replayed
from vmonarch.kernels.flash_entropy.backward import flash_backward
from vmonarch.kernels.flash_entropy.forward import flash_forward
from vmonarch.kernels.monarch.call import MonarchCall
from vmonarch.kernels.monarch.l_step import LStep
from vmonarch.kernels.monarch.r_step import RStep
from vmonarch.kernels.two_resolution import op as two_resolution
from vmonarch.kernels.two_resolution.tiling import Tiling, exact_tiles, tiling_of
from vmonarch.options import ExactBlocks, VMonarchOptions, row_options


@dataclass
class _Buffers:
    """Intermediates by iteration. In training each has its own memory; in inference it is used again, or is None."""

    aL: list[Any]
    z: list[Any]
    cL: list[Any]
    lse_r: list[Any]
    cR: list[Any]
    lse_l: list[Any]


def _slices(call: MonarchCall, blocks: torch.Tensor, stats: torch.Tensor, row_stats: torch.Tensor) -> _Buffers:
    """Name the parts of the saved tensors: [u + t - 1, B·H·m, b, D], [u + 2t - 1, B·H·m, b] and [t - 1, B, H, S]."""
    t, u = call.options.num_iterations, call.l_updates
    return _Buffers(
        aL=list(blocks[:u]),
        z=list(blocks[u:]),
        cL=list(stats[:u]),
        lse_r=list(stats[u : u + t]),
        cR=list(stats[u + t :]),
        lse_l=list(row_stats),
    )


def saved_shapes(
    query: torch.Tensor, value: torch.Tensor, call: MonarchCall, save: bool
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of (blocks, y, stats, row_stats, out_exact, lse_exact), which `forward` saves."""
    (B, S, H, D), E, dtype = query.shape, value.shape[3], query.dtype
    t, u = call.options.num_iterations, call.l_updates
    none: tuple[int, ...] = (0,)
    block = (B * H * call.places.blocks, call.places.positions)
    exact = call.exact
    shapes = [
        ((u + t - 1, *block, D), dtype),
        ((*block, E), dtype),
        ((u + 2 * t - 1, *block), torch.float32),
        ((t - 1, B, H, S), torch.float32),
        (none if exact is None or exact.whole_rows else (B, S, H, E), dtype),
        (none if exact is None else (B, H, S), torch.float32),
    ]
    return shapes if save else [(none, dtype) for _, dtype in shapes]


def _exact_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: MonarchCall
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, int, Tiling, two_resolution.Pooled]]:
    """The frames of exact rows in two resolutions (`reference.exact_parts`), and what kernels need to attend from them.

    Returns:
        of every frame its tokens, their queries, their exact tiles [B, H, n, m] and how many of a row, the tiling, and
        the means of its tiles.
    """
    assert call.exact is not None
    grid = LatentGrid(call.places.blocks, call.places.height, call.places.width)
    tiling, share = tiling_of(grid, row_options(call.options), query_frames=1), call.options.row_share
    pooled = two_resolution.pool(key, value, tiling, None)
    for frame in call.exact.rows:
        tokens = slice(frame * grid.tokens_per_frame, (frame + 1) * grid.tokens_per_frame)
        # The frames of several samples have to follow each other for the copy engine.
        own = query[:, tokens].contiguous()
        chosen = two_resolution.choose(own, key, tiling, share, None, pooled)
        yield tokens, own, chosen, exact_tiles(tiling, share), tiling, pooled


@replayed
def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    call: MonarchCall,
    save: bool,
) -> tuple[torch.Tensor, ...]:
    """Monarch attention.

    Args:
        query, key: [B, S, H, D]. value: [B, S, H, E]. key_mask: [B, S] or None.
        save: keep what `backward` needs.

    Returns:
        (out [B, S, H, E], lse [B, H, S]) and, with `save`, what `backward` needs: (blocks, y, stats, row_stats,
        out_exact, lse_exact).
    """
    B, S, H, D = query.shape
    E = value.shape[3]
    places, t = call.places, call.options.num_iterations
    groups, b = B * H * places.blocks, places.positions
    out, lse = new_results(query, key, value)
    saved = []
    if save:
        saved = [query.new_empty(shape, dtype=dtype) for shape, dtype in saved_shapes(query, value, call, save)]
    exact = call.exact
    out_exact = lse_exact = None
    if exact is not None:
        # Rows that are exact throughout lie in `out` already; others are merged there, unless training needs them.
        out_exact = saved[4] if save and not exact.whole_rows else out
        if exact.segments:
            _, lse_exact, _ = flash_forward(
                query, key, value, exact.segments, scale=call.scale, entropy=False, out=out_exact
            )
        else:
            lse_exact = torch.full_like(lse, -torch.inf)
        if exact.rows:
            for tokens, own, chosen, width, tiling, means in _exact_rows(query, key, value, call):
                two_resolution.attend(
                    own, key, value, chosen, width, None, tiling, means, call.scale,
                    out_exact[:, tokens], lse_exact[:, :, tokens],
                )  # fmt: skip

    if save:
        blocks, y, stats, row_stats = saved[:4]
        buffers = _slices(call, blocks, stats, row_stats)
    else:
        blocks = query.new_empty(min(t, 2), groups, b, D)
        stats = query.new_empty(1, groups, b, dtype=torch.float32)
        # In an R-step that sums the keys, a row tile of the last z is read by the program that writes the same rows of
        # y, and by no other.
        y = blocks[1] if t > 1 and D == E and call.options.last_l_update else query.new_empty(groups, b, E)
        none = [None] * t
        buffers = _Buffers([blocks[0]] * t, [blocks[-1]] * t, [stats[0]] * t, none, none, [lse] * t)

    r, l = RStep(key, value, key_mask, call), LStep(query, call)
    pooled = r.pooled()
    known = lse_exact if exact is not None and exact.aware else None
    z = query
    for i in range(t - 1):
        aL, cL = buffers.aL[i], buffers.cL[i]
        r.forward(z, pooled, aL=aL, cL=cL, lse=buffers.lse_r[i])
        z = buffers.z[i]
        l.centroids(aL, cL, z=z, lse=buffers.lse_l[i], cR=buffers.cR[i], lse_exact=known)
    aL, cL = buffers.aL[-1], buffers.cL[-1]
    sums = dict(aL=aL, cL=cL) if call.options.last_l_update else {}
    r.forward(z, None, y=y, lse=buffers.lse_r[-1], **sums)
    l.output(aL, cL, y, out=out, lse=lse, lse_exact=lse_exact, out_exact=out_exact)
    if save and lse_exact is not None:
        saved[5] = lse_exact
    return out, lse, *saved


@replayed
def _backward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value; R and L are recomputed from z, aL and the log-partitions."""
    grad_out, grad_lse, query, key, value, key_mask, out, lse, *saved, numbers, reals, _save = inputs
    blocks, y, stats, row_stats, out_exact, lse_exact = saved
    call = _decode(numbers, reals)
    t = call.options.num_iterations
    buffers = _slices(call, blocks, stats, row_stats)
    exact = call.exact
    grad_out = unit_stride(grad_out)
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()

    dq = query.new_empty(query.shape)
    dk = key.new_empty(key.shape)
    dv = value.new_empty(value.shape)
    daL = torch.empty_like(blocks[0])
    dy = torch.empty_like(y)
    # A row tile of dy is read last by the program that writes the same rows of daR.
    daR = dy if dy.shape == daL.shape else torch.empty_like(daL)
    delta_r, dcR = (torch.empty_like(stats[0]) for _ in range(2))
    dlse_exact = do_exact = None
    if exact is None:
        out_exact = lse_exact = None
    else:
        out_exact = out if exact.whole_rows else out_exact
        dlse_exact, do_exact = torch.empty_like(lse), None if exact.whole_rows else torch.empty_like(out)
    aware: dict[str, Any] = {}
    if exact is not None and exact.aware:
        aware = dict(lse_exact=lse_exact, dlse_exact=dlse_exact)

    r, l = RStep(key, value, key_mask, call), LStep(query, call)
    pooled = r.pooled()
    l.backward(
        buffers.aL[-1], buffers.cL[-1], lse, dq=dq, daL=daL, delta_r=delta_r, y=y, out=out, do=grad_out, dlse=grad_lse,
        dy=dy, lse_exact=lse_exact, dlse_exact=dlse_exact, out_exact=out_exact, do_exact=do_exact,
    )  # fmt: skip
    for i in reversed(range(t)):
        last, values_alone = i == t - 1, i == call.l_updates
        r.backward(
            buffers.z[i - 1] if i > 0 else query,
            None if last else pooled,
            lse=buffers.lse_r[i],
            daL=None if values_alone else daL,
            dy=dy if last else None,
            delta=r.row_dots(dy, y) if values_alone else delta_r,
            dq=dq,
            dk=dk,
            dv=dv,
            cR=buffers.cR[i - 1] if i > 0 else None,
            daR=daR,
            dcR=dcR,
        )
        if i == 0:
            break
        # The L that this iteration has not updated mixes the values, too.
        first = daL if values_alone else None
        if first is not None:
            daL = torch.empty_like(daL)
        l.backward(
            buffers.aL[i - 1], buffers.cL[i - 1], buffers.lse_l[i - 1], dq=dq, daL=daL, delta_r=delta_r,
            daR=daR, dcR=dcR, cR=buffers.cR[i - 1], **aware,
        )  # fmt: skip
        if first is not None:
            # After the output's `l.backward`, `delta_r` already contains the values' part.
            delta_r += r.row_dots(first, buffers.aL[i - 1])
            daL += first
    # The exact part needs room of its own, where its keys are split.
    del daL, dy, daR, pooled
    if exact is not None and out_exact is not None and lse_exact is not None and dlse_exact is not None:
        do = grad_out if do_exact is None else do_exact
        if exact.rows:
            for tokens, own, chosen, width, tiling, means in _exact_rows(query, key, value, call):
                do_row, out_row = (x[:, tokens].contiguous() for x in (do, out_exact))
                dlse_row, lse_row = (x[:, :, tokens].contiguous() for x in (dlse_exact, lse_exact))
                dq_row, _, _ = two_resolution.backward(
                    do_row, dlse_row, own, key, value, chosen, width, None, out_row, lse_row,
                    tiling, means, call.scale, added=(dk, dv),
                )  # fmt: skip
                dq[:, tokens] += dq_row
        if exact.segments:
            flash_backward(
                do, dlse_exact, None, query, key, value, out_exact, lse_exact, None, exact.segments,
                scale=call.scale, dq=dq, dk=dk, dv=dv,
            )  # fmt: skip
    return dq, dk, dv


_PLACES = len(Places._fields)
# Options that are one number; places and the pattern of exact blocks hold the others.
_TYPES = {field.name: field.type for field in dataclasses.fields(VMonarchOptions)}
_INTEGERS = {name: {"int": int, "bool": bool}[of] for name, of in _TYPES.items() if of in ("int", "bool")}
_REALS = [name for name, of in _TYPES.items() if of == "float"]


def _encode(call: MonarchCall) -> tuple[list[int], list[float]]:
    numbers = [*call.places, *(getattr(call.options, name) for name in _INTEGERS)]
    pattern = call.options.pattern
    if pattern is not None:
        band = -1 if pattern.band is None else pattern.band
        numbers += [pattern.aware, band, len(pattern.rows), *pattern.rows, *pattern.columns]
    reals = [call.scale, *(getattr(call.options, name) for name in _REALS)]
    return [int(number) for number in numbers], [float(number) for number in reals]


def _decode(numbers: list[int], reals: list[float]) -> MonarchCall:
    places = Places(*numbers[:_PLACES])
    integers, frames = numbers[_PLACES : _PLACES + len(_INTEGERS)], numbers[_PLACES + len(_INTEGERS) :]
    scale, *reals = reals
    exact = None
    if frames:
        aware, band, rows, *frames = frames
        exact = ExactBlocks(tuple(frames[:rows]), tuple(frames[rows:]), None if band < 0 else band, bool(aware))
    options: dict[str, Any] = dict(zip(_REALS, reals, strict=True))
    options |= {name: of(number) for (name, of), number in zip(_INTEGERS.items(), integers, strict=True)}
    return MonarchCall(places, VMonarchOptions(exact=exact, **options), scale)


@replayed
def _forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    """(out [B, S, H, E], lse [B, H, S]) and what the backward pass needs, empty unless `save`; see `forward`."""
    *tensors, numbers, reals, save = inputs
    call = _decode(numbers, reals)
    found = forward(*tensors, call, save)
    nothing = () if save else saved_shapes(tensors[0], tensors[2], call, save)
    return *found, *(tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in nothing)


def _fake(
    query: torch.Tensor, key: Any, value: torch.Tensor, key_mask: Any, numbers: Any, reals: Any, save: bool
) -> Any:
    shapes = saved_shapes(query, value, _decode(numbers, reals), save)
    return *new_results(query, key, value), *(query.new_empty(shape, dtype=dtype) for shape, dtype in shapes)


_operator = operator(
    "vmonarch::monarch",
    _forward,
    _backward,
    "Tensor query, Tensor key, Tensor value, Tensor? key_mask, int[] numbers, float[] reals, bool save",
    fake=_fake,
    results=8,
    gradients=3,
)


def monarch_attention_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    call: MonarchCall,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, S, H, E], lse [B, H, S]) by the kernels, arguments already checked."""
    if call.scale < 0:
        query, scale = positively_scaled(query, call.scale)
        call = dataclasses.replace(call, scale=scale)
    tensors = (query, key, value)
    if needs_operator(*tensors):
        out, lse, *_ = _operator(*tensors, key_mask, *_encode(call), learns(*tensors))
    else:
        out, lse = forward(*tensors, key_mask, call, False)
    return out, lse
