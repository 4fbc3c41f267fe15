"""What attention may know of the transformer's running forward call, and how it gets there.

The transformer's forward pre-hook (`vmonarch.hooks`) puts a `Call` into thread-local storage, and the forward hook
removes it. When checkpointing computes a block again in backward, the block gets the call of its first computation.

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
    """What an element of the attention stack may know. The pre-hook makes it; elements pass on `call._replace(…)`.

    Args:
        grid: of the video's tokens.
        before, after: numbers of other tokens on either side of the video; before=None: all others come before.
        dense: whether the step is one of `dense_steps`. (With its number, torch.compile would make a graph per step.)
        exact: whether `refresh` makes attention exact in all layers.
        branch: the guidance branch, which holds the residuals that the call uses.
        key_mask: boolean [B, S], true where a key may be attended; None for all.
        split: how the tokens are spread over ranks; None where all of them are here.
        heads: which of the module's heads these are; None for all.
        lse: whether the log-partition is wanted as well.
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
        """Number of tokens beside the video's, once the sequence is known."""
        assert self.before is not None
        return self.before + self.after

    def placed(self, tokens: int) -> Self:
        """This call in a sequence of so many tokens, with `before` and `after` filled in.

        Raises:
            ValueError: the sequence is too short.
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
        # `before` is tested first: torch.compile may not know how many tokens come after.
        return tail if not self.before else head if not self.after else torch.cat([head, tail], 1)

    def joined(self, video: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        """[B, S, …], joined from its two parts."""
        return torch.cat([beside[:, : self.before], video, beside[:, self.before :]], 1)

    def padded(self, factor: torch.Tensor) -> torch.Tensor:
        """A factor [B or 1, N, H or 1, R] of a bias as [B or 1, S, H or 1, R]: other tokens have none."""
        assert self.before is not None
        return torch.nn.functional.pad(factor, (0, 0, 0, 0, self.before, self.after))


class _Running(threading.local):
    """What the thread is in.

    now: "call", that of a transformer. by: "borrowed", a processor of the model with our softmax. Both are
    dictionaries, because torch.compile ignores writes to attributes of a threading.local. Each has one entry, because a
    graph that writes to a dictionary depends on everything in it.
    """

    def __init__(self) -> None:
        self.now: dict[str, Any] = {"call": None}
        self.by: dict[str, Any] = {"borrowed": None}


running = _Running()


def current_call() -> Call:
    """The call that the running thread is in.

    Raises:
        RuntimeError: it is in no call, or the call's grid is not known.
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
    """Replaces a transformer's checkpointing function, so that a block is computed again within its own call.

    Backward may come after other forward calls, and on a GPU it runs in another thread.
    """
    # One graph of the whole transformer contains the backward pass.
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
    """Make the checkpointing functions of a transformer's modules carry its calls, or put the original ones back."""
    module: Any
    for module in transformer.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        carries = getattr(function, "func", None) is _carrying
        if function is not None and carries != on:
            module._gradient_checkpointing_func = functools.partial(_carrying, function) if on else function.args[0]
