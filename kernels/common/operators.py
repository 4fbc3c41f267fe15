"""What operators of attention have in common: the form of their results, and how they get their gradients."""

from __future__ import annotations

from typing import Any

import torch


def new_results(query: torch.Tensor, key: Any, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for out [B, Sq, H, E] in the dtype of query [B, Sq, H, D], and for lse [B, H, Sq] in float32."""
    B, Sq, H, _D = query.shape
    return query.new_empty(B, Sq, H, value.shape[3]), query.new_empty(B, H, Sq, dtype=torch.float32)


def differentiable(
    forward: Any, backward: Any, *, tensors: int, gradients: int, results: int = 2, kept: slice = slice(None)
) -> None:
    """Make one operator the gradient of another.

    Args:
        forward: takes tensors, which may be None, and then numbers.
        backward: takes the gradients of the first results of `forward`, its tensors, results and numbers; gives the
            gradients of its first tensors, in their shapes and dtypes, and an empty one of what is None. The gradients
            that it takes may be None, but for that of the first result.
        tensors: how many of the inputs of `forward` are tensors.
        gradients: how many of these have gradients.
        results: how many results have gradients.
        kept: which results `backward` takes.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        found = output if isinstance(output, tuple) else (output,)
        ctx.save_for_backward(*inputs[:tensors], *found[kept])
        ctx.numbers, ctx.shape = inputs[tensors:], found[0].shape
        ctx.set_materialize_grads(False)

    def gradient(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved, first, others = ctx.saved_tensors, grads[0], grads[1:results]
        found: tuple[torch.Tensor | None, ...] = (None,) * gradients
        if any(grad is not None for grad in grads[:results]):
            first = saved[0].new_zeros(ctx.shape) if first is None else first
            given = zip(saved, backward(first, *others, *saved, *ctx.numbers), strict=False)
            found = tuple(None if x is None else dx for x, dx in given)
        return *found, *(None,) * (tensors + len(ctx.numbers) - gradients)

    @backward.register_fake
    def _(*inputs: Any) -> tuple[torch.Tensor, ...]:
        first, of = inputs[0], inputs[results : results + gradients]
        return tuple(first.new_empty(0) if x is None else x.new_empty(x.shape) for x in of)

    forward.register_autograd(gradient, setup_context=setup_context)
