"""Functions of tensors as torch operators: opaque to torch.compile, differentiable, without views of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vmonarch.kernels.common.launch import needs_operator


def new_results(query: torch.Tensor, key: Any, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for out [B, S, H, E] in the dtype of query [B, S, H, D], and for lse [B, H, S] in float32."""
    B, Sq, H, _D = query.shape
    return query.new_empty(B, Sq, H, value.shape[3]), query.new_empty(B, H, Sq, dtype=torch.float32)


def operator(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., tuple[torch.Tensor, ...]] | None,
    inputs: str,
    *,
    fake: Callable[..., Any] = new_results,
    results: int = 2,
    smooth: int = 2,
    gradients: int = 0,
    kept: slice = slice(None),
) -> Callable[..., Any]:
    """`forward`, called where torch needs no operator, which only costs time, else as the operator NAME_forward.

    Args:
        forward: takes tensors, which may be None, and then numbers; gives a tensor or a tuple of them.
        backward: becomes NAME_backward; None for an operator without gradients. It takes the gradients of the smooth
            results, the tensors, the kept results and the numbers; gives the gradients of the first tensors, in their
            shapes and dtypes, and an empty one of what is None. The gradients that it takes may be None, but for that
            of the first result.
        inputs: what `forward` takes, in the words of torch's schemas.
        fake: what `forward` allocates for its results, of the same arguments.
        results: how many there are.
        smooth: how many of them, the first ones, have gradients.
        gradients: how many of the tensors, the first ones, have gradients.
        kept: which results `backward` takes.
    """
    schema = f"({inputs}) -> ({', '.join(['Tensor'] * results)})"
    of_forward = torch.library.custom_op(f"{name}_forward", forward, mutates_args=(), schema=schema)
    of_forward.register_fake(fake)
    names = inputs.split(", ")
    count = sum(name.startswith("Tensor") for name in names)
    if backward is not None:
        given = ["Tensor grad_0", *(f"Tensor? grad_{n}" for n in range(1, smooth)), *names[:count]]
        given += [*(f"Tensor result_{n}" for n in range(results)[kept]), *names[count:]]
        schema = f"({', '.join(given)}) -> ({', '.join(['Tensor'] * gradients)})"
        of_backward = torch.library.custom_op(f"{name}_backward", backward, mutates_args=(), schema=schema)
        _differentiate(of_forward, of_backward, count, gradients, smooth, kept)

    def call(*inputs: Any) -> Any:
        as_operator = needs_operator(*(x for x in inputs[:count] if x is not None))
        return (of_forward if as_operator else forward)(*inputs)

    return call


def _differentiate(forward: Any, backward: Any, tensors: int, gradients: int, smooth: int, kept: slice) -> None:
    """Make one operator the gradient of another; arguments as in `operator`."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        found = output if isinstance(output, tuple) else (output,)
        ctx.save_for_backward(*inputs[:tensors], *found[kept])
        ctx.numbers, ctx.shape = inputs[tensors:], found[0].shape
        ctx.set_materialize_grads(False)

    def gradient(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved, first, others = ctx.saved_tensors, grads[0], grads[1:smooth]
        found: tuple[torch.Tensor | None, ...] = (None,) * gradients
        if any(grad is not None for grad in grads[:smooth]):
            first = saved[0].new_zeros(ctx.shape) if first is None else first
            given = zip(saved, backward(first, *others, *saved, *ctx.numbers), strict=False)
            found = tuple(None if x is None else dx for x, dx in given)
        return *found, *(None,) * (tensors + len(ctx.numbers) - gradients)

    @backward.register_fake
    def _(*inputs: Any) -> tuple[torch.Tensor, ...]:
        first, of = inputs[0], inputs[smooth : smooth + gradients]
        return tuple(first.new_empty(0) if x is None else x.new_empty(x.shape) for x in of)

    forward.register_autograd(gradient, setup_context=setup_context)
