"""What is known of a transformer's running forward call, and how it reaches the attention of its layers.

The transformer's forward pre-hook (`vmonarch.hooks`) makes a `Call`, which lies in the running thread until the
forward hook takes it away. A block that is computed again in backward gets the call that it was computed in.

Shapes: B batch, S tokens in all, [before | T·H·W video | after], N of the video, H heads, R rank of a bias.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from vmonarch.grid import LatentGrid

if TYPE_CHECKING:
    from vmonarch.context_parallel import Part, TokenSplit
    from vmonarch.residuals import Branch


class Call(NamedTuple):
    """What an element of the attention stack may know. The pre-hook makes it, elements pass on `call._replace(…)`.

    Args:
        grid: of the video's tokens.
        before, after: how many other tokens there are on either side of the video; before=None: all that there are.
        dense: whether the step is one of `dense_steps`. (Not which step: torch.compile would make a graph of each.)
        exact: whether `refresh` makes attention exact in all layers.
        branch: whose residuals the call uses.
        key_mask: boolean [B, S], true where a key may be attended; None for all.
        split: how the tokens are spread over ranks; None where all of them are here.
        heads: which of the module's heads these are; None for all.
        lse: whether the log-partition is wanted, too.
        backend: the exact attention that the user has chosen in diffusers; None for the default.
        precision: of exact attention: "int8", or None for that of the model.
    """

    grid: LatentGrid
    before: int | None = 0
    after: int = 0
    dense: bool = False
    exact: bool = False
    branch: Branch | None = None
    key_mask: torch.Tensor | None = None
    split: TokenSplit | None = None
    heads: Part | None = None
    lse: bool = False
    backend: Any = None
    precision: str | None = None

    @property
    def others(self) -> int:
        """How many tokens there are beside the video's, once the sequence is known."""
        assert self.before is not None
        return self.before + self.after

    def placed(self, tokens: int) -> Self:
        """It with `before` and `after`, in a sequence of so many tokens.

        Raises:
            ValueError: there are fewer tokens than that.
        """
        others, before = tokens - self.grid.tokens, self.before
        if others < (before or 0):
            also = f" and {before} tokens before it" if before else ""
            raise ValueError(
                f"grid {tuple(self.grid)} has {self.grid.tokens} tokens{also}, but self-attention was given {tokens}"
            )
        before = others if before is None else before
        return self._replace(before=before, after=others - before)

    def video(self, x: torch.Tensor) -> torch.Tensor:
        """The video's part of [B, S, …]: a view."""
        return x[:, self.before : x.shape[1] - self.after]

    def beside(self, x: torch.Tensor) -> torch.Tensor:
        """The other tokens of [B, S, …]; a view where all are on one side."""
        head, tail = x[:, : self.before], x[:, x.shape[1] - self.after :]
        # In this order: torch.compile may not know how many are after.
        return tail if not self.before else head if not self.after else torch.cat([head, tail], 1)

    def joined(self, video: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        """[B, S, …] of its two parts."""
        return torch.cat([beside[:, : self.before], video, beside[:, self.before :]], 1)

    def padded(self, factor: torch.Tensor) -> torch.Tensor:
        """A factor [B or 1, N, H or 1, R] of a bias as [B or 1, S, H or 1, R]: other tokens have none."""
        assert self.before is not None
        return torch.nn.functional.pad(factor, (0, 0, 0, 0, self.before, self.after))


class _Running(threading.local):
    """What the thread is in.

    now: "call", of a transformer. by: "borrowed", a processor of the model's with our softmax. These two are
    dictionaries, because torch.compile passes over what is written to attributes of a threading.local; each has one
    entry, because a graph that writes to one depends on all that is in it.
    """

    def __init__(self) -> None:
        self.now: dict[str, Any] = {"call": None}
        self.by: dict[str, Any] = {"borrowed": None}


running = _Running()


def current_call() -> Call:
    """The call that the running thread is in.

    Raises:
        RuntimeError: it is in none, or in one whose grid is not known.
    """
    call: Call | None = running.now["call"]
    if call is None:
        raise RuntimeError(
            "attention of vmonarch needs the grid of the transformer's forward call: call the transformer itself, not"
            " its forward or its blocks, checkpoint blocks by its enable_gradient_checkpointing(), and pass"
            " grid=(frames, height, width) to the processor where the transformer's arguments do not tell it"
        )
    return call


def _carrying(checkpoint: Callable[..., Any], block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In place of a transformer's checkpointing function: a block is computed again in the call that it belongs to.

    Backward may come after other forward calls, and on a GPU it runs in another thread.
    """
    # In one graph, the whole transformer has its backward pass in it.
    if not torch.compiler.is_compiling() and (call := running.now["call"]) is not None:
        block = functools.partial(_in_call, call, block)
    return checkpoint(block, *args, **kwargs)


def _in_call(call: Call, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before, running.now["call"] = running.now["call"], call
    try:
        return block(*args, **kwargs)
    finally:
        running.now["call"] = before


def carry_calls(transformer: torch.nn.Module, on: bool) -> None:
    """Have the checkpointing functions of a transformer's modules carry its calls, or be as before."""
    module: Any
    for module in transformer.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        carries = getattr(function, "func", None) is _carrying
        if function is not None and carries != on:
            module._gradient_checkpointing_func = functools.partial(_carrying, function) if on else function.args[0]
