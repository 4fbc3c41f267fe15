"""Borrowed processors: all that a model's own attention processor does, with its softmax replaced by ours.

The processors of diffusers project, normalise, rotate, gate and join streams, each model in its own way, and call one
function for the softmax: `dispatch_attention_fn`, or `F.scaled_dot_product_attention`. A borrowed processor is an
instance of a subclass of the processor's class, in which that name stands for attention of ours.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from typing import Any

import diffusers
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch.nn import functional

from vmonarch.context_parallel import context_parallel_config
from vmonarch.families import Family
from vmonarch.video_processor import VideoAttentionProcessor


class _Running(threading.local):
    """What is at work in the running thread: "processor", of ours, and "key_mask", of its module's last keys."""

    # In a dictionary, because torch.compile passes over what is written to attributes of this.
    def __init__(self) -> None:
        self.now: dict[str, Any] = {}


_running = _Running()


def _dispatch(
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
    """In place of `dispatch_attention_fn`: [B, S, H, D] -> [B, S, H, D]."""
    processor: VideoAttentionProcessor = _running.now["processor"]
    name = type(processor).__name__
    if dropout_p or attention_kwargs or scale not in (None, query.shape[-1] ** -0.5):
        raise NotImplementedError(f"{name} supports no dropout or scale in this model")
    if is_causal:
        # Of text to itself.
        return dispatch_attention_fn(query, key, value, is_causal=True, enable_gqa=enable_gqa, backend=backend)
    if processor._attention_backend is not backend:
        processor._attention_backend = backend
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
    # Text that has keys alone comes first.
    keys_alone = key.shape[1] - query.shape[1]
    if keys_alone:
        query = functional.pad(query, (0, 0, 0, 0, keys_alone, 0))
    out = processor.attend_joint(query, key, value, _key_mask(name, attn_mask, key.shape[1]))
    return out[:, keys_alone:]


def _scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """In place of torch's: [B, H, S, D] -> [B, H, S, D]."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return _dispatch(query, key, value, attn_mask, **options).transpose(1, 2)


def _key_mask(name: str, attn_mask: torch.Tensor | None, keys: int) -> torch.Tensor | None:
    """Which keys may be attended, boolean [B, S]; None for all."""
    last = _running.now["key_mask"]
    if last is not None:
        return functional.pad(last.bool(), (keys - last.shape[1], 0), value=True)
    if attn_mask is None:
        return None
    if attn_mask.dtype != torch.bool or attn_mask.shape[1:] != (1, 1, keys):
        raise NotImplementedError(
            f"{name} supports a mask of keys, boolean [B, 1, 1, S], in this model's self-attention, got"
            f" {attn_mask.dtype} {tuple(attn_mask.shape)}"
        )
    return attn_mask[:, 0, 0]


_FUNCTIONAL = types.ModuleType("vmonarch.functional")
vars(_FUNCTIONAL).update(vars(functional), scaled_dot_product_attention=_scaled_dot_product_attention)
# What stands for the softmax in processors -> what they look up first to reach it -> what is there in a borrowed one.
_SEAMS: dict[str, dict[str, Any]] = {
    "dispatch_attention_fn": {"dispatch_attention_fn": _dispatch},
    "scaled_dot_product_attention": {"F": _FUNCTIONAL},
}


def _with_our_softmax(cls: Any) -> Any:
    """The `__call__` of a class of processors, in which the softmax is ours.

    Raises:
        RuntimeError: it does not call one of the functions above, so that this version of diffusers is unknown.
    """
    call = cls.__call__
    known = set(call.__code__.co_names) if isinstance(call, types.FunctionType) else set()
    seams = [names for seam, names in _SEAMS.items() if {seam, *names} <= known]
    if len(seams) != 1:
        raise RuntimeError(
            f"{cls.__name__} of diffusers {diffusers.__version__} computes its softmax in a way that vmonarch does not"
            " know; it knows that of diffusers 0.42"
        )
    # A module of its own, because torch.compile looks names up in the module of that name.
    module = types.ModuleType(f"{__name__}.{cls.__module__}.{cls.__qualname__}")
    vars(module).update(call.__globals__ | seams[0], __name__=module.__name__)
    sys.modules[module.__name__] = module
    twin = types.FunctionType(call.__code__, vars(module), call.__name__, call.__defaults__, call.__closure__)
    twin.__kwdefaults__ = call.__kwdefaults__
    return twin


@functools.cache
def borrowed(cls: Any) -> Any:
    """The subclass of a class of processors whose softmax is ours.

    Raises:
        RuntimeError: the class is not as it is known.
    """
    attend = _with_our_softmax(cls)

    class Borrowed(cls):
        ours: VideoAttentionProcessor
        family: Family

        @property
        def refresh(self) -> Any:
            return self.ours.refresh

        # diffusers sets it on every processor that has it, as those of some models do not.
        @property
        def _parallel_config(self) -> Any:
            return self.ours._parallel_config

        @_parallel_config.setter
        def _parallel_config(self, config: Any) -> None:
            self.ours._parallel_config = config

        # Modules tell by the signature which arguments a processor takes.
        @functools.wraps(cls.__call__)
        def __call__(self, attn: Any, *args: Any, **kwargs: Any) -> Any:
            exact = self.ours.exact_now()
            if exact and context_parallel_config(self._parallel_config) is None:
                return super().__call__(attn, *args, **kwargs)
            sparse = self.family.sparse
            if sparse is not None and kwargs.get(sparse) is not None:
                if exact:
                    raise NotImplementedError(
                        f"dense_steps and dense_layers keep the model's sparse attention ({sparse}), which context"
                        " parallelism does not support: use dense_steps=0 and dense_layers=0"
                    )
                if kwargs[sparse]["to_fractal"] and self.ours.needs_raster:
                    raise ValueError(
                        f"{sparse} puts the tokens of a frame in another order: VMonarchProcessor serves it with"
                        " coarse=1, tiles=(1, 1), row_share=1, r_share=1 and neither bias nor plan, and no other does"
                    )
                kwargs[sparse] = None
            unseen = self.family.unseen_mask
            key_mask = None if unseen is None else kwargs.get(unseen)
            if unseen is not None and key_mask is not None:
                # What the processor makes of it costs nothing, and is not looked at.
                kwargs[unseen] = key_mask.to("meta")
            _running.now["processor"], _running.now["key_mask"] = self.ours, key_mask
            try:
                return attend(self, attn, *args, **kwargs)
            finally:
                # What it holds, residuals above all, lives no longer than its transformer.
                _running.now["processor"] = _running.now["key_mask"] = None

        def __reduce__(self) -> tuple[Any, ...]:
            return _made, (cls, vars(self))

    Borrowed.__name__ = Borrowed.__qualname__ = f"VMonarch{cls.__name__}"
    return Borrowed


def _made(cls: Any, state: dict[str, Any]) -> Any:
    processor = object.__new__(borrowed(cls))
    processor.__dict__.update(state)
    return processor


def borrow(family: Family, original: Any, ours: VideoAttentionProcessor) -> Any:
    """A processor that does what `original` does, with its softmax by `ours`, which is bound to the same module.

    Raises:
        RuntimeError: `original` is of a class, or a version of diffusers, that is not known.
    """
    return _made(type(original), vars(original) | {"ours": ours, "family": family})


def ours_of(module: Any) -> VideoAttentionProcessor | None:
    """The processor of ours that a module has, borrowed or not."""
    processor = getattr(module, "processor", None)
    processor = getattr(processor, "ours", processor)
    return processor if isinstance(processor, VideoAttentionProcessor) else None
