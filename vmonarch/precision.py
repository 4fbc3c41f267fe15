"""Ops choose the precision of their sums and products themselves: autocast has no say in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

Arguments = ParamSpec("Arguments")
Results = TypeVar("Results")


def own_precision(op: Callable[Arguments, Results]) -> Callable[Arguments, Results]:
    """Turn autocast off in an op, forward and backward: it would round float32 numbers to 16 bit in every product.

    torch runs a backward pass under the autocast of whoever calls it, which may be another than that of the forward
    pass. Where autocast is on, the op therefore gets a graph of its own, whose backward pass turns it off again; that
    cannot be differentiated twice. torch.compile makes backward passes of plain torch under the autocast around the
    compiled call, unless `torch._functorch.config.backward_pass_autocast` is "off".

    Args:
        op: all tensors that it differentiates by are among its arguments, alone or in tuples.
    """

    @functools.wraps(op)
    def unaffected(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Results:
        device = _device_type((*args, *kwargs.values()))
        # Autocast does not know the meta device.
        if device in (None, "meta") or not torch.is_autocast_enabled(device):
            return op(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return op(*args, **kwargs)
            return _with_own_graph(op, device, args, kwargs)

    return unaffected


def _device_type(arguments: Iterable[object]) -> str | None:
    """Where the first tensor lies."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument.device.type
        if isinstance(argument, (tuple, list)) and (device := _device_type(argument)):
            return device
    return None


def _with_own_graph(op: Callable[..., Any], device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    learns = lambda x: isinstance(x, torch.Tensor) and x.requires_grad
    arguments, structure = pytree.tree_flatten((args, kwargs))
    start = torch.empty(0, requires_grad=True)
    inside = [_Entrance.apply(start, x.detach()) if learns(x) else x for x in arguments]
    args, kwargs = pytree.tree_unflatten(inside, structure)
    results, structure = pytree.tree_flatten(op(*args, **kwargs))
    outputs = [x for x in results if learns(x)]
    if outputs:
        inputs = [x for x in inside if learns(x)]
        outside = iter(_OwnGraph.apply(device, outputs, inputs, *filter(learns, arguments)))
        results = [next(outside) if learns(x) else x for x in results]
    return pytree.tree_unflatten(results, structure)


class _Entrance(torch.autograd.Function):
    """Where an own graph ends in an input; a leaf would keep the input's memory, which is the checkpoint's to free."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        raise AssertionError("gradients of an own graph are taken here, and go no further")


class _OwnGraph(torch.autograd.Function):
    """The results of an op whose backward pass is run without autocast. It keeps the op's graph and no tensors."""

    @staticmethod
    def forward(
        ctx: Any, device: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *_: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.device = device
        ctx.outputs, ctx.inputs = ([get_gradient_edge(x) for x in tensors] for tensors in (outputs, inputs))
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        given = [(x, gradient) for x, gradient in zip(ctx.outputs, gradients, strict=True) if gradient is not None]
        found: tuple[torch.Tensor | None, ...] = (None,) * len(ctx.inputs)
        if given:
            # Whether the memory of the op is freed is the choice of the caller.
            keep = torch._C._autograd._get_current_graph_task_keep_graph()
            with torch.autocast(ctx.device, enabled=False):
                outputs, given_gradients = zip(*given, strict=True)
                found = torch.autograd.grad(outputs, ctx.inputs, given_gradients, retain_graph=keep, allow_unused=True)
        return None, None, None, *found
