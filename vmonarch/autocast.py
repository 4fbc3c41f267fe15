"""Ops choose the precision of their sums and products themselves: autocast has no say in them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

Arguments = ParamSpec("Arguments")
Results = TypeVar("Results")


def without_autocast(op: Callable[Arguments, Results]) -> Callable[Arguments, Results]:
    """Turn autocast off in an op, forward and backward: it would round float32 numbers to 16 bit in every product.

    torch runs a backward pass under the autocast of whoever calls it, which may be another than that of the forward
    pass. Where autocast is on, the nodes of the op's graph therefore turn it off for themselves. A second derivative
    would have nodes that do not, and is refused. torch.compile makes backward passes of plain torch under the autocast
    around the compiled call, unless `torch._functorch.config.backward_pass_autocast` is "off".

    Args:
        op: all tensors that it differentiates by are among its arguments, alone or in tuples.
    """

    @functools.wraps(op)
    def unaffected(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Results:
        given = (x if isinstance(x, (tuple, list)) else (x,) for x in (*args, *kwargs.values()))
        device = next((x.device.type for several in given for x in several if isinstance(x, torch.Tensor)), None)
        # Autocast does not know the meta device.
        if device in (None, "meta") or not torch.is_autocast_enabled(device):
            return op(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            results = op(*args, **kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            _keep_out_of_backward(device, results, (args, kwargs))
        return results

    return unaffected


def _keep_out_of_backward(device: str, results: Any, arguments: Any) -> None:
    """Let all nodes between arguments and results turn autocast off.

    The engine gives every node the state of the caller's thread anew; hooks before a node run in it, too. A backward
    pass of its own for the op would let checkpoints compute their block again for it.
    """
    nodes = lambda tree: [
        get_gradient_edge(x).node for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor) and x.requires_grad
    ]

    def turn_off(_: Any) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError("cannot differentiate twice an op that was called under autocast: call it without")
        torch.set_autocast_enabled(device, False)

    seen, waiting = set(nodes(arguments)), nodes(results)
    while waiting:
        node = waiting.pop()
        # Those without a next one are leaves, whose gradients others add to as well.
        if node not in seen and node.next_functions:
            node.register_prehook(turn_off)
            waiting += [following for following, _ in node.next_functions if following is not None]
        seen.add(node)
