"""The first element of the attention stack beyond the Wan family: a model's own processor, whose softmax is the stack.

The processors of diffusers project, normalise, rotate, gate and join streams, each model in its own way, and call one
function for the softmax: `dispatch_attention_fn`, or `F.scaled_dot_product_attention`. Borrowing a processor replaces
that name in the module of its `__call__` by a function that calls our stack while a borrowed processor runs in this
thread, and the original function otherwise. The replacement stays, and changes nothing for others.

Known: diffusers 0.42. If a processor computes its softmax in another way, borrowing it is an error.

Shapes: B batch, S tokens, H heads, D head dim, X other tokens.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from vmonarch.attend import Attend, Exact
from vmonarch.call import Call, current_call, running
from vmonarch.context_parallel import context_parallel_config, split_sequence
from vmonarch.families import Family
from vmonarch.kernels.common.launch import carry_tangents, learns
from vmonarch.own import Bound, run_stack

if TYPE_CHECKING:
    from vmonarch.base import VideoAttentionProcessor


def _softmax(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attention_kwargs: dict[str, Any] | None = None,
    *,
    backend: Any = None,
    parallel_config: Any = None,
) -> torch.Tensor:
    """Replaces `dispatch_attention_fn` while a borrowed processor runs: [B, S, H, D] -> [B, S, H, D]."""
    ours, last_mask = running.by["borrowed"]
    if dropout_p or attention_kwargs or scale not in (None, query.shape[-1] ** -0.5):
        raise NotImplementedError(f"{type(ours.spec).__name__} supports no dropout or scale in this model")
    if is_causal:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        # This is text, attending to itself.
        return dispatch_attention_fn(query, key, value, is_causal=True, enable_gqa=enable_gqa, backend=backend)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
    # Text that has keys but no queries comes first.
    keys_alone = key.shape[1] - query.shape[1]
    if keys_alone:
        query = functional.pad(query, (0, 0, 0, 0, keys_alone, 0))
    keys = key.shape[1]
    key_mask = None
    if last_mask is not None:
        # The mask of the last keys, which the processor did not see.
        key_mask = functional.pad(last_mask.bool(), (keys - last_mask.shape[1], 0), value=True)
    elif attn_mask is not None:
        if attn_mask.dtype != torch.bool or attn_mask.shape[1:] != (1, 1, keys):
            raise NotImplementedError(
                f"{type(ours.spec).__name__} supports a mask of keys, boolean [B, 1, 1, S], in this model's"
                f" self-attention, got {attn_mask.dtype} {tuple(attn_mask.shape)}"
            )
        key_mask = attn_mask[:, 0, 0]
    call = current_call()._replace(backend=backend, key_mask=key_mask)
    # Autocast, and norms in float32, leave queries and keys in another dtype than values.
    return ours.attend_joint(query.to(value.dtype), key.to(value.dtype), value, call)[:, keys_alone:]


def _routed(original: Any) -> Any:
    """A module's `dispatch_attention_fn`, or our softmax while a borrowed processor runs."""

    @functools.wraps(original)
    def routed(*args: Any, **kwargs: Any) -> Any:
        return (original if running.by["borrowed"] is None else _softmax)(*args, **kwargs)

    vars(routed)["_takes_ours"] = True
    return routed


def _scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """torch's function, or our softmax while a borrowed processor runs: [B, H, S, D] -> [B, H, S, D]."""
    if running.by["borrowed"] is None:
        return functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return _softmax(query, key, value, *args, **kwargs).transpose(1, 2)


# Those modules' `torch.nn.functional`: torch.compile looks names up in modules alone.
_FUNCTIONAL = types.ModuleType("vmonarch.functional")
vars(_FUNCTIONAL).update(vars(functional), scaled_dot_product_attention=_scaled_dot_product_attention)


def _route(cls: Any) -> None:
    """Route the softmax in the module of a class of processors.

    Raises:
        RuntimeError: the class does not call exactly one of the functions above; this version of diffusers is unknown.
    """
    call = cls.__call__
    names = set(call.__code__.co_names) if isinstance(call, types.FunctionType) else set()
    dispatches, computes = "dispatch_attention_fn" in names, {"F", "scaled_dot_product_attention"} <= names
    if dispatches == computes:
        import diffusers

        raise RuntimeError(
            f"{cls.__name__} of diffusers {diffusers.__version__} computes its softmax in a way that vmonarch does not"
            " know; it knows that of diffusers 0.42"
        )
    found = call.__globals__
    if computes:
        found["F"] = _FUNCTIONAL
    elif not hasattr(found["dispatch_attention_fn"], "_takes_ours"):
        found["dispatch_attention_fn"] = _routed(found["dispatch_attention_fn"])


class Borrowed(Bound):
    """A model's own processor, with the stack as its softmax.

    Args:
        family: that of the model.
        videos: number of videos of the grid's size in the sequence, one after the other.
        kept: whether the layer is one of `dense_layers`, which are ours only where ranks share tokens.
    """

    family: Family
    videos: int
    kept: bool

    def __repr__(self) -> str:
        own = f"{type(self).__name__}\n  {type(self).__bases__[1].__name__}()"
        return own if self.kept else super().__repr__()

    def run(self, processor: Any, attn: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `processor`, the method of the model's own class, with our softmax."""
        exact = self.kept or ((call := running.now["call"]) is not None and call.dense)
        if exact and context_parallel_config(self._parallel_config) is None:
            return processor(attn, *args, **kwargs)
        sparse, unseen = self.family.sparse, self.family.unseen_mask
        if sparse is not None and kwargs.get(sparse) is not None:
            self._check_sparse(sparse, kwargs[sparse], exact)
            kwargs[sparse] = None
        last_mask = None if unseen is None else kwargs.get(unseen)
        if unseen is not None and last_mask is not None:
            # Whatever the processor computes from it is free, and unused.
            kwargs[unseen] = last_mask.to("meta")
        running.by["borrowed"] = self, last_mask
        try:
            return processor(attn, *args, **kwargs)
        finally:
            # Otherwise this would keep the transformer alive.
            running.by["borrowed"] = None

    def _check_sparse(self, name: str, options: Any, exact: bool) -> None:
        if exact:
            raise NotImplementedError(
                f"dense_steps and dense_layers keep the model's sparse attention ({name}), which context parallelism"
                " does not support: use dense_steps=0 and dense_layers=0"
            )
        if options["to_fractal"] and self.spec.needs_raster:
            raise ValueError(
                f"{name} puts the tokens of a frame in another order: VMonarchProcessor serves it with coarse=1,"
                " row_share=1 and neither bias nor plan, and no other does"
            )

    def attend_joint(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> torch.Tensor:
        """Run the stack on the model's queries, keys and values: [B, S, H, D] -> [B, S, H, D].

        Raises:
            ValueError: the sequence has fewer tokens than the video.
            NotImplementedError: gradients are needed where those of the ranks would be wrong.
        """
        call = call._replace(grid=call.grid._replace(frames=self.videos * call.grid.frames))
        if (config := context_parallel_config(self._parallel_config)) is not None:
            return self._attend_on_a_rank(query, key, value, call, config)
        return run_stack(self.attend, query, key, value, call.placed(query.shape[1]))

    @torch.compiler.disable(reason="attention under context parallelism exchanges tokens between processes")
    def _attend_on_a_rank(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, config: Any
    ) -> torch.Tensor:
        spread = self.family.spread
        assert spread is not None
        if not spread.differentiable and (learns(query, key, value) or carry_tangents(query, key, value)):
            raise NotImplementedError(
                "gradients are not supported under context parallelism with this model: call it under torch.no_grad()"
            )
        split, call = split_sequence(config, spread.others_whole, call, query.shape[1])
        # In dense steps the model's own attention would count text once for every rank.
        attend = Exact(self.spec.implementation) if call.dense else self.attend
        return run_stack(attend, query, key, value, call._replace(split=split))

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (type(self).__bases__[1], vars(self))


@functools.cache
def borrowed_class(cls: Any) -> Any:
    """The subclass of a class of processors whose softmax is ours."""

    # Modules read from the signature which arguments a processor takes.
    @functools.wraps(cls.__call__)
    def call(self: Any, attn: Any, *args: Any, **kwargs: Any) -> Any:
        return self.run(functools.partial(cls.__call__, self), attn, *args, **kwargs)

    return type(f"VMonarch{cls.__name__}", (Borrowed, cls), {"__call__": call, "__module__": __name__})


def _made(cls: Any, state: dict[str, Any]) -> Any:
    _route(cls)
    processor = object.__new__(borrowed_class(cls))
    vars(processor).update(state)
    return processor


def borrow(
    spec: VideoAttentionProcessor, attend: Attend, original: Any, family: Family, *, videos: int = 1, kept: bool = False
) -> Any:
    """A processor that does what `original` does, with a stack as its softmax.

    Args:
        videos, kept: as in `Borrowed`.

    Raises:
        RuntimeError: the class of `original`, or its version of diffusers, is not known.
    """
    ours = {"spec": spec, "attend": attend, "original": original, "family": family, "videos": videos, "kept": kept}
    return _made(type(original), vars(original) | ours)
