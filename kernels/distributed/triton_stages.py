"""The stages of frame-parallel attention by the kernels, each differentiable on its own.

Between two stages tensors may travel to other ranks, so that gradients are what the stages hand each other, and not
the sums that the backward pass of `monarch/fused.py` shares. Shapes as in `frame_parallel.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from vmonarch.kernels.distributed.stages import Call, Frames
from vmonarch.kernels.flash_entropy.backward import flash_backward
from vmonarch.kernels.flash_entropy.forward import flash_forward
from vmonarch.kernels.flash_entropy.segments import Segment
from vmonarch.kernels.monarch.call import MonarchCall
from vmonarch.kernels.monarch.l_step import LStep
from vmonarch.kernels.monarch.places import grid_places
from vmonarch.kernels.monarch.r_step import RStep


class _RStep(torch.autograd.Function):
    """(aL, cL, y or None) of z, the query [B, S, H, D] or blocks, key and value."""

    @staticmethod
    def forward(
        ctx: Any, call: MonarchCall, last: bool, z: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        B, _, H, D = key.shape
        lead = (B, H, call.places.blocks, call.places.positions)
        aL = key.new_empty(*lead, D)
        y = key.new_empty(*lead, value.shape[3]) if last else None
        cL, lse = (key.new_empty(lead, dtype=torch.float32) for _ in range(2))
        step = RStep(key, value, None, call)
        rows = _rows(z) if z.ndim == 5 else z
        pooled = None if last else step.pooled()
        step.forward(rows, pooled, aL=_rows(aL), cL=_rows(cL), y=None if y is None else _rows(y), lse=_rows(lse))
        ctx.call, ctx.last, ctx.z_shape = call, last, z.shape
        ctx.save_for_backward(rows, key, value, aL, cL, lse, y)
        if not call.entropy_grad:
            ctx.mark_non_differentiable(cL)
        return aL, cL, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, daL: torch.Tensor, dcL: torch.Tensor, dy: torch.Tensor | None):
        rows, key, value, aL, cL, lse, y = ctx.saved_tensors
        last, step = ctx.last, RStep(key, value, None, ctx.call)
        # δ = daL·aL + dy·y, what is taken off the gradient of every R.
        delta = _dots(daL, aL)
        if dy is not None:
            delta += _dots(dy, y)
        dk = torch.empty_like(key, memory_format=torch.contiguous_format) if last else _zeros(key)
        dv = torch.empty_like(value, memory_format=torch.contiguous_format) if last else None
        arguments: dict[str, Any]
        if rows.ndim == 4:
            dz = _zeros(rows)
            arguments = dict(dq=dz)
        else:
            # The kernel takes z for αR / cR, and its daR is dz. It does not touch this dq.
            dz, ones = torch.empty_like(rows), torch.ones_like(_rows(cL))
            arguments = dict(dq=dk, cR=ones, daR=dz, dcR=torch.empty_like(ones))
        step.backward(
            rows,
            None if last else step.pooled(),
            lse=_rows(lse),
            cL=_rows(cL),
            daL=_rows(daL),
            dy=None if dy is None else _rows(dy),
            dcL=_rows(dcL) if ctx.call.entropy_grad else None,
            delta=_rows(delta),
            dk=dk,
            # Written in the last iteration only.
            dv=value if dv is None else dv,
            **arguments,
        )
        return None, None, dz.view(ctx.z_shape), dk, dv


class _Centroids(torch.autograd.Function):
    """z of the query [B, S, H, D], blocks aL and cL, and the log-weights of the exact part [B, H, S] or None."""

    @staticmethod
    def forward(
        ctx: Any,
        call: MonarchCall,
        query: torch.Tensor,
        aL: torch.Tensor,
        cL: torch.Tensor,
        lse_exact: torch.Tensor | None,
    ) -> torch.Tensor:
        B, S, H, _ = query.shape
        z, cR = torch.empty_like(aL), torch.empty_like(cL)
        lse = query.new_empty(B, H, S, dtype=torch.float32)
        LStep(query, call).centroids(_rows(aL), _rows(cL), z=_rows(z), lse=lse, cR=_rows(cR), lse_exact=lse_exact)
        ctx.call = call
        ctx.save_for_backward(query, aL, cL, lse_exact, z, cR, lse)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: torch.Tensor):
        query, aL, cL, lse_exact, z, cR, lse = ctx.saved_tensors
        # z = αR / max(cR, min_mass)
        dcR = torch.where(cR >= ctx.call.min_mass, -_dots(dz, z), 0.0)
        dq, daL, dcL = _zeros(query), torch.empty_like(aL), torch.empty_like(cL)
        exact = {} if lse_exact is None else dict(lse_exact=lse_exact, dlse_exact=torch.zeros_like(lse))
        LStep(query, ctx.call).backward(
            _rows(aL),
            _rows(cL),
            lse,
            dq=dq,
            daL=_rows(daL),
            dcL=_rows(dcL),
            delta_r=_rows(torch.empty_like(cL)),
            daR=_rows(dz.to(aL.dtype)),
            dcR=_rows(dcR),
            cR=_rows(cR),
            **exact,
        )
        return None, dq, daL, dcL, exact.get("dlse_exact")


class _Output(torch.autograd.Function):
    """(o [B, S, H, E], lse [B, H, S]) of the Monarch part without the exact blocks."""

    @staticmethod
    def forward(
        ctx: Any, call: MonarchCall, query: torch.Tensor, aL: torch.Tensor, cL: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        B, S, H, _ = query.shape
        out = query.new_empty(B, S, H, y.shape[4])
        lse = query.new_empty(B, H, S, dtype=torch.float32)
        lse_exact, out_exact = _no_exact_part(call, out, lse)
        step = LStep(query, call)
        step.output(_rows(aL), _rows(cL), _rows(y), out=out, lse=lse, lse_exact=lse_exact, out_exact=out_exact)
        ctx.call = call
        ctx.save_for_backward(query, aL, cL, y, out, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor):
        query, aL, cL, y, out, lse = ctx.saved_tensors
        lse_exact, out_exact = _no_exact_part(ctx.call, out, lse)
        exact = {}
        if lse_exact is not None:
            unused = torch.empty_like(lse), out.new_empty(out.shape[3])
            exact = dict(lse_exact=lse_exact, out_exact=out_exact, dlse_exact=unused[0], do_exact=unused[1])
        dq, daL, dcL, dy = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, aL, cL, y))
        LStep(query, ctx.call).backward(
            _rows(aL),
            _rows(cL),
            lse,
            dq=dq,
            daL=_rows(daL),
            dcL=_rows(dcL),
            delta_r=_rows(torch.empty_like(cL)),
            y=_rows(y),
            out=out,
            do=grad_out.contiguous(),
            dlse=grad_lse.contiguous(),
            dy=_rows(dy),
            **exact,
        )
        return None, dq, daL, dcL, dy


def _no_exact_part(
    call: MonarchCall, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(lse_exact, out_exact) that leave the exact blocks out and put nothing in their place.

    With weights of 0 the kernels read no row of out_exact; all its rows have one place in memory, so that what the
    backward pass writes in the same strides needs only one row, too.
    """
    if call.exact is None or call.exact.whole_rows:
        return None, None
    return torch.full_like(lse, -torch.inf), out.new_zeros(out.shape[3]).expand(out.shape)


class _Exact(torch.autograd.Function):
    """(out [B, Sq, H, E], lse [B, H, Sq]) of the segments."""

    @staticmethod
    def forward(
        ctx: Any,
        segments: tuple[Segment, ...],
        scale: float,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, _ = flash_forward(query, key, value, segments, scale=scale, entropy=False)
        ctx.segments, ctx.scale = segments, scale
        ctx.save_for_backward(query, key, value, out, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor):
        query, key, value, out, lse = ctx.saved_tensors
        gradients = flash_backward(
            grad_out, grad_lse, None, query, key, value, out, lse, None, ctx.segments, scale=ctx.scale
        )
        return None, None, *gradients


class TritonStages:
    """The methods of `TorchStages` by the kernels; arguments already checked, the scale not negative."""

    statistics_dtype = torch.float32

    def __init__(self, key: torch.Tensor, value: torch.Tensor, call: Call) -> None:
        self.key, self.value, self.call = key, value, call
        self.dtype = key.dtype
        numbers = call.options, call.scale, call.entropy_grad
        cut = call.options.cut(1)
        self.own = MonarchCall(grid_places(call.own_grid, **cut), *numbers)
        if call.positions[call.rank] > 0:
            self.by_position = MonarchCall(grid_places(call.position_grid, **cut | {"coarse": 1}), *numbers)

    def first_centroids(self, query: torch.Tensor) -> torch.Tensor:
        return query

    def r_step(self, z: torch.Tensor, last: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return _RStep.apply(self.own, last, z, self.key, self.value)

    def centroids(
        self, query: torch.Tensor, aL: torch.Tensor, cL: torch.Tensor, lse_exact: torch.Tensor | None
    ) -> torch.Tensor:
        weights = None if lse_exact is None else lse_exact.flatten(2, 3)
        return _Centroids.apply(self.by_position, query.flatten(1, 2), aL, cL, weights)

    def output(
        self, query: torch.Tensor, aL: torch.Tensor, cL: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        T, b = query.shape[1:3]
        out, lse = _Output.apply(self.by_position, query.flatten(1, 2), aL, cL, y)
        return out.unflatten(1, (T, b)), lse.unflatten(2, (T, b))

    def exact(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_frames: tuple[Frames, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n, b = query.shape[1:3]
        segments = tuple(
            Segment(l * b, (l + 1) * b, tuple((k * b, (k + 1) * b) for k in frames))
            for l, frames in enumerate(key_frames)
        )
        out, lse = _Exact.apply(segments, self.call.scale, *(x.flatten(1, 2) for x in (query, key, value)))
        return out.unflatten(1, (n, b)), lse.unflatten(2, (n, b))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[B, H, m, b, …] -> [B·H·m, b, …], contiguous."""
    return x.flatten(0, 2).contiguous()


def _dots(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Σ x·y over the last axis, in float32."""
    return (x.to(torch.float32) * y.to(torch.float32)).sum(-1)


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x, memory_format=torch.contiguous_format)
