"""`set_attn_processor`, diffusers' own way to choose attention, for our processors.

diffusers' pipelines lack this method. On a model it gives one object to all attention modules, even to cross-attention,
and the object learns neither its layer nor the video's grid nor the step, which our processors need. So pipelines get
the method, and on models it hands our processors to `vmonarch.apply`. Nothing else changes classes of diffusers.

Importing this module does it. `import vmonarch` must not import diffusers, which takes seconds, so `vmonarch` imports
this module with the first of its names that is about models.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from diffusers import DiffusionPipeline, ModularPipeline
from diffusers.models.attention import AttentionMixin

from vmonarch.base import VideoAttentionProcessor
from vmonarch.families import transformers_in
from vmonarch.hooks import record_of
from vmonarch.installation import KEEP, apply, is_applied, restore
from vmonarch.own import Bound
from vmonarch.parallelism import check_restorable

_set_on_model: Any = AttentionMixin.set_attn_processor
_OURS = (VideoAttentionProcessor, Bound)


@functools.wraps(_set_on_model)
def _set_ours_on_model(self: Any, processor: Any) -> None:
    if processor is None:
        return restore(self)
    if isinstance(processor, type) or not (callable(processor) or isinstance(processor, Mapping)):
        raise TypeError(
            "processor must be a VMonarchProcessor(...) or another attention processor (presets are for"
            f" vmonarch.apply), got {processor!r}"
        )
    several, record = isinstance(processor, Mapping), record_of(self)
    given = list(processor.values()) if several else [processor]
    bound = [] if record is None else record.bound
    ours = [known for known in given if isinstance(known, _OURS)]
    if type(processor).__name__.startswith("Fused") or (
        several and processor is getattr(self, "original_attn_processors", None)
    ):
        # diffusers is fusing or unfusing projections, so the applied processor stays.
        spec = record.processor if record is not None and is_applied(self) else None
        stock = lambda known: known.original if isinstance(known, Bound) else known
        _set_on_model(self, {name: stock(known) for name, known in processor.items()} if several else processor)
        if spec is not None:
            apply(self, spec)
    elif ours and not several:
        apply(self, processor.spec if isinstance(processor, Bound) else processor)
    elif any(known not in bound for known in ours):
        raise ValueError(
            "processor must not be a dictionary with processors of vmonarch: pass one of them, which serves all"
            " layers but its dense_layers, or a plan, which gives every layer options of its own"
        )
    else:
        if record is not None and any(known not in given for known in bound):
            check_restorable(self)
            if record.processor.LEARNS:
                name = type(processor).__name__
                raise ValueError(f"set_attn_processor({name}) would lose what a BasedProcessor has learnt: {KEEP}")
        _set_on_model(self, processor)


def set_attn_processor(self: Any, processor: Any) -> None:
    """Compute the attention of the pipeline's transformers with `processor`.

    Args:
        processor: one of vmonarch's, for `vmonarch.apply`; None to undo that, for `vmonarch.restore`; any other
            processor, or a dictionary of them, for `set_attn_processor` of every transformer.

    Raises:
        TypeError: `processor` is no processor.
        AttributeError: it is not one of ours, and a transformer has no `set_attn_processor`.
        TypeError, ValueError, NotImplementedError, RuntimeError: as `vmonarch.apply`.
    """
    if isinstance(processor, _OURS):
        apply(self, processor.spec if isinstance(processor, Bound) else processor)
    elif processor is None:
        restore(self)
    else:
        for transformer in transformers_in(self).values():
            # diffusers' method empties a dictionary.
            transformer.set_attn_processor(dict(processor) if isinstance(processor, Mapping) else processor)


AttentionMixin.set_attn_processor = _set_ours_on_model
DiffusionPipeline.set_attn_processor = ModularPipeline.set_attn_processor = set_attn_processor
