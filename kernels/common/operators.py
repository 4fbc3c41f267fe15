"""How an operator of torch gets its gradient."""

from __future__ import annotations

from typing import Any

import torch


def differentiable(forward: Any, backward: Any, *, tensors: int, gradients: int, results: int = 2) -> None:
    """Make one operator the gradient of another.

    Args:
        forward: takes tensors, which may be None, and then numbers.
        backward: takes the gradients of the first results of `forward`, its tensors, all its results and its numbers;
            gives the gradients of its first tensors, in their shapes and dtypes. The gradients that it takes may be
            None, but for that of the first result.
        tensors: how many of the inputs of `forward` are tensors.
        gradients: how many of these have gradients.
        results: how many results have gradients.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:tensors], *output)
        ctx.numbers = inputs[tensors:]
        ctx.set_materialize_grads(False)

    def gradient(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved, first, others = ctx.saved_tensors, grads[0], grads[1:results]
        found: tuple[torch.Tensor | None, ...] = (None,) * gradients
        if any(grad is not None for grad in grads[:results]):
            first = torch.zeros_like(saved[tensors]) if first is None else first
            found = backward(first, *others, *saved, *ctx.numbers)
        return *found, *(None,) * (tensors + len(ctx.numbers) - gradients)

    @backward.register_fake
    def _(*inputs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in inputs[results : results + gradients])

    forward.register_autograd(gradient, setup_context=setup_context)
