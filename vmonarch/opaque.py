"""Part of the attention stack as one operator for all layers, for torch.compile.

The layers of a plan differ in their code, because their heads compute different methods. torch.compile would make a
graph for each of them, and allows eight. Where residuals are shared, the steps differ. Here a layer is a number in a
tensor, which the operator looks up when it runs, so one graph serves all. The price is paid in training: backward
computes the attention once more.

Shapes: B batch, S tokens, H heads, D head dim, E value dim.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from vmonarch.attend import Attend, Residual, Result
from vmonarch.call import Call, running
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.launch import carry_tangents, learns

_ABOVE_AUTOGRAD = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Opaque:
    """One operator where torch.compile compiles; elsewhere it only passes on. A copy has a number of its own.

    Attributes:
        number: by which the operator finds this element while it exists, int64 [1] on the CPU.
    """

    inner: Attend
    number: torch.Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        number = next(_numbers)
        # torch.compile saves the number for backward.
        with torch.inference_mode(False):
            object.__setattr__(self, "number", torch.tensor([number]))
        _layers[number] = self

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> Result:
        tangents = carry_tangents(query, key, value)
        if isinstance(self.inner, Residual) and (tangents or learns(query, key, value)):
            raise RuntimeError("refresh is for inference: residuals have no gradient; train with refresh=None")
        # The operator has no forward-mode derivative.
        if not torch.compiler.is_compiling() or tangents:
            return self.inner(query, key, value, call)
        # Its arguments hold what belongs to the tokens. It looks up the rest of the call when it runs; otherwise every
        # step would need a graph.
        tokens, backend = [*call.grid, call.before, call.after], getattr(call.backend, "value", call.backend)
        return attend(query, key, value, self.number, call.key_mask, tokens, backend), None

    def __reduce__(self) -> tuple[Any, ...]:
        return Opaque, (self.inner,)


# A recorded CUDA graph would repeat the layer that it was recorded for: inductor leaves such operators out of graphs.
_UNRECORDED = (torch.Tag.cudagraph_unsafe,)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    number: torch.Tensor,
    key_mask: torch.Tensor | None,
    tokens: list[int],
    backend: str | None,
) -> torch.Tensor:
    """What the layer of this number makes of [B, S, H, D] and a mask [B, S]: [B, S, H, E].

    Args:
        tokens: T, H, W of the grid, and the numbers of other tokens before and after the video.
        backend: as in `Call`.
    """
    grid = LatentGrid(*tokens[:3])
    # Backward may run outside of any call, and needs no more than the tokens.
    call: Call = running.now["call"] or Call(grid)
    call = call._replace(grid=grid, before=tokens[3], after=tokens[4], key_mask=key_mask, backend=backend)
    return _layers[int(number)].inner(query, key, value, call)[0].contiguous()


attend = torch.library.custom_op("vmonarch::attend", _attend, mutates_args=(), tags=_UNRECORDED)


@attend.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


@torch.library.custom_op(
    "vmonarch::attend_backward",
    mutates_args=(),
    tags=_UNRECORDED,
    schema="(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor number, Tensor? key_mask, int[] tokens,"
    " str? backend) -> (Tensor, Tensor, Tensor)",
)
def attend_backward(gradient: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), each in the shape and dtype of its input."""
    query, key, value = (tensor.detach().requires_grad_() for tensor in inputs[:3])
    # Operators run below autograd, but what backward computes again needs its graph.
    with torch._C._ForceDispatchKeyGuard(*_ABOVE_AUTOGRAD), torch.enable_grad():
        out = _attend(query, key, value, *inputs[3:])
        found = torch.autograd.grad(out, (query, key, value), gradient)
    dq, dk, dv = (tensor.contiguous() for tensor in found)
    return dq, dk, dv


@attend_backward.register_fake
def _(gradient: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:3])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.tokens, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *attend_backward(gradient, *ctx.saved_tensors, ctx.tokens, ctx.backend), None, None, None, None


attend.register_autograd(_backward, setup_context=_setup_context)
