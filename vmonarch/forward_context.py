"""What processors know of the forward call that they are in: its grid, its step, its guidance branch.

Shapes: B batch, S = T·H·W tokens, H heads, D head dim; the latent grid is T frames × H rows × W columns of tokens.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch

from vmonarch.dense import DenseSet
from vmonarch.grid import LatentGrid
from vmonarch.residuals import PipelineBranch, ResidualSharing
from vmonarch.steps import DenoisingStep, denoising_step


class ForwardCall(NamedTuple):
    """What the processors need to know about the transformer's current forward call.

    Args:
        before: how many other tokens come before the video's where attention is joint; None for all that there are.
        shared: what its layers have made for each other, by what it is; None where there is nothing to share it by.
    """

    grid: LatentGrid
    exact: bool
    shared: dict[Any, Any] | None = None
    before: int | None = 0


class _Own(threading.local):
    """What belongs to the running thread: "call", the forward call that it is in, and the "transformer" called last."""

    # In a dictionary, because torch.compile passes over what is written to attributes of this.
    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}


class ForwardContext:
    """Filled in by a transformer's forward pre-hook, read by its processors; one for each transformer.

    A copy, pickled or not, knows of no call.

    Args:
        dense_steps: the steps computed with exact attention.
        component: name of the transformer in its pipeline.
        sharing: the residuals of the pipeline, if they are shared between steps.
    """

    def __init__(
        self,
        dense_steps: DenseSet,
        component: str = "transformer",
        sharing: ResidualSharing | None = None,
    ) -> None:
        self.component = component
        self.dense_steps = dense_steps
        self.sharing = sharing
        # The latest call, in any thread.
        self.call: ForwardCall | None = None
        self._own = _Own()
        # By number of tokens, and of any number at 0, the call that there has been; None if several have differed.
        self._seen: dict[int, ForwardCall | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardContext, (self.dense_steps, self.component, self.sharing)

    def begin(
        self,
        transformer: torch.nn.Module,
        grid: LatentGrid,
        before: int | None,
        arguments: Mapping[str, Any],
        by_step: Collection[str],
    ) -> None:
        """Record a forward call on a video of this grid; `before` as in `ForwardCall`.

        Args:
            arguments: of the call, by name; `by_step` names those that change from step to step.

        Raises:
            RuntimeError: `dense_steps` or `refresh` are asked for, and the step is not known.
        """
        exact = False
        if self.dense_steps.some:
            step = denoising_step(transformer, "dense_steps", "use dense_steps=0")
            exact = self.dense_steps.contains(step.step, step.steps)
        if self.sharing is not None:
            self._own.latest["branch"] = self.sharing.begin(transformer, arguments, by_step)
        compiling = torch.compiler.is_compiling()
        self.call = ForwardCall(grid, exact, before=before)
        self._own.latest["call"] = self.call if compiling else self.call._replace(shared={})
        if not compiling:
            self._own.latest["transformer"] = weakref.ref(transformer)
            self._note(0, self.call)
            self._note(grid.tokens, self.call)

    def _note(self, tokens: int, call: ForwardCall) -> None:
        if self._seen.setdefault(tokens, call) != call:
            self._seen[tokens] = None

    def begin_unknown(self) -> None:
        """A forward call begins whose grid is not known."""
        self.call = self._own.latest["call"] = None

    def end(self) -> None:
        """The thread's forward call is over."""
        self._own.latest.pop("call", None)
        if self.sharing is not None:
            self.sharing.end(self._own.latest.pop("branch", None))

    def forget(self) -> None:
        """The processors are taken off: nothing of their calls is kept."""
        self.call = None
        if self.sharing is not None:
            self.sharing.forget()

    def branch(self) -> PipelineBranch | None:
        """The branch whose residuals the running thread's forward call uses; None outside of one."""
        return self._own.latest.get("branch")

    def current(self, tokens: int) -> ForwardCall | None:
        """The call that the running thread is in; None when only the rotary embedding can tell.

        Args:
            tokens: that self-attention was given; 0 if that does not matter.

        Raises:
            RuntimeError: a block is called outside of a forward call in a run with `dense_steps`.
        """
        latest = self._own.latest
        if "call" in latest:
            call: ForwardCall | None = latest["call"]
            if tokens and call is not None and not torch.compiler.is_compiling():
                self._note(tokens, call._replace(shared=None))
            return call
        # Backward computes a block again that is wrapped in a checkpoint of another's. The transformer may have seen
        # other videos since.
        if self.dense_steps.some:
            raise RuntimeError(
                "dense_steps needs forward calls of the transformer itself, and its enable_gradient_checkpointing() in"
                " place of other checkpointing; or use dense_steps=0"
            )
        # torch.compile, which notes nothing of joint sequences, is to guard on this alone.
        of_all = self._seen.get(0)
        return of_all if torch.compiler.is_compiling() else self._seen.get(tokens, of_all)

    def step(self, needed_by: str, instead: str) -> DenoisingStep:
        """See `denoising_step`, of the running thread's forward call."""
        return denoising_step(self._own.latest["transformer"](), needed_by, instead)

    def shared(self) -> dict[Any, Any] | None:
        """Where the layers of the running thread's forward call keep what they share; None outside of one."""
        call = self._own.latest.get("call")
        return None if call is None else call.shared


class CarryingCheckpoint:
    """A transformer's checkpointing function, which computes a block again in the call that it was computed in.

    Backward may come after other forward calls, and on a GPU it runs in another thread.

    Args:
        checkpoint: the function whose place it takes.
        context: of the transformer.
    """

    def __init__(self, checkpoint: Callable[..., Any], context: ForwardContext) -> None:
        self.checkpoint, self.context = checkpoint, context

    def __call__(self, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        latest = self.context._own.latest
        # In one graph, the whole transformer has its backward pass in it.
        if not torch.compiler.is_compiling() and "call" in latest:
            call = latest["call"]
            block = functools.partial(self._compute, block, None if call is None else call._replace(shared=None))
        return self.checkpoint(block, *args, **kwargs)

    def _compute(self, block: Callable[..., Any], call: ForwardCall | None, *args: Any, **kwargs: Any) -> Any:
        """What a block returns in a call; backward is in none."""
        latest = self.context._own.latest
        outside, before = "call" not in latest, latest.get("call")
        latest["call"] = call
        try:
            return block(*args, **kwargs)
        finally:
            latest["call"] = before
            if outside:
                del latest["call"]


def carry_call(transformer: torch.nn.Module, context: ForwardContext | None) -> None:
    """Have the checkpointing functions of a transformer's modules carry its calls; None for them to be as before."""
    module: Any
    for module in transformer.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        if function is None or getattr(function, "context", None) is context:
            continue
        own = function.checkpoint if isinstance(function, CarryingCheckpoint) else function
        module._gradient_checkpointing_func = own if context is None else CarryingCheckpoint(own, context)


def infer_grid(cosines: torch.Tensor) -> LatentGrid:
    """Read the latent grid off a rotary embedding.

    A Wan transformer gives the first channels of a head to time, then as many to height as to width. Position 1 differs
    from position 0 by a whole radian in the first channel of each part, so that even bfloat16 tells them apart.

    Args:
        cosines: [1, S, 1, D], the cosines of every token.

    Raises:
        ValueError: this is not the rotary embedding of a whole, ordered T×H×W grid of tokens.
    """
    advice = "pass grid=(frames, height, width) or use vmonarch.apply, which needs no inference"
    if cosines.ndim != 4 or cosines.shape[0] != 1 or cosines.shape[2] != 1:
        raise ValueError(f"rotary_emb must be [1, S, 1, D] to tell the grid, got {tuple(cosines.shape)}; {advice}")
    tokens, head_dim = cosines.shape[1], cosines.shape[3]
    space = 2 * (head_dim // 6)
    if space == 0:
        raise ValueError(f"rotary_emb has too few channels ({head_dim}) to tell the grid; {advice}")
    time, height, width = cosines.detach()[0, :, 0].split((head_dim - 2 * space, space, space), dim=1)

    def first_change(part: torch.Tensor) -> int:
        changed = (part != part[0]).any(dim=1)
        # argmax of an all-equal vector is 0, which can be no change: token 0 equals itself.
        return int(changed.int().argmax()) or part.shape[0]

    per_frame = first_change(time)
    columns = first_change(height[:per_frame])
    grid = LatentGrid(tokens // per_frame, per_frame // columns, columns)
    whole = grid.tokens == tokens and bool((cosines[0, 0] == 1).all())
    if whole:
        time, height, width = (part.unflatten(0, grid) for part in (time, height, width))
        same = (time == time[:, :1, :1]).all() & (height == height[:1, :, :1]).all() & (width == width[:1, :1]).all()
        # Position 0 may not come back: two videos in one sequence are no grid.
        for axis in (time[1:, 0, 0], height[0, 1:, 0], width[0, 0, 1:]):
            same = same & (axis != 1).any(dim=1).all()
        whole = bool(same)
    if not whole:
        raise ValueError(f"rotary_emb is not that of a whole grid of {tokens} tokens in order; {advice}")
    return grid
