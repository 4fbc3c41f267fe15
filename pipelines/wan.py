"""The Wan pipelines of diffusers with `set_attn_processor`.

Each class bears the name of its stock class: what it saves names that class, and loads where vmonarch is not installed.
"""

from __future__ import annotations

from typing import Any

import diffusers

from vmonarch.installation import apply, is_applied, restore
from vmonarch.video_processor import WAN_ATTENTION, VideoAttentionProcessor

_COMPONENTS = ("transformer", "transformer_2")


class SetsAttentionProcessor:
    """Mixin for pipelines: one attention processor for the self-attention of all their transformers."""

    @property
    def attn_processors(self) -> dict[str, Any]:
        """The processor of every attention module, as "transformer.blocks.0.attn1.processor": processor."""
        return {
            f"{component}.{name}": processor
            for component in _COMPONENTS
            if getattr(self, component, None) is not None
            for name, processor in getattr(self, component).attn_processors.items()
        }

    def set_attn_processor(self, processor: VideoAttentionProcessor | None) -> None:
        """Compute self-attention with `processor`, as `vmonarch.apply` does.

        Args:
            processor: a `VMonarchProcessor`; None, or an instance of the stock processor, restores the original ones
                (and does nothing when nothing was set).

        Raises:
            TypeError, ValueError, NotImplementedError: as `vmonarch.apply`.
        """
        if processor is None or type(processor) in {attention._default_processor_cls for attention in WAN_ATTENTION}:
            if is_applied(self):
                restore(self)
        else:
            apply(self, processor)


class WanPipeline(SetsAttentionProcessor, diffusers.WanPipeline):
    """Text to video: Wan2.1, Wan2.2 with two transformers, and the 5B with per-token timesteps."""


class WanImageToVideoPipeline(SetsAttentionProcessor, diffusers.WanImageToVideoPipeline):
    """Image to video: Wan2.1 with an image encoder, Wan2.2 with two transformers, and the 5B."""


class WanVACEPipeline(SetsAttentionProcessor, diffusers.WanVACEPipeline):
    """Video creation and editing with control videos, masks and reference images."""


class WanVideoToVideoPipeline(SetsAttentionProcessor, diffusers.WanVideoToVideoPipeline):
    """Video to video, from inside the noise schedule."""


class WanAnimatePipeline(SetsAttentionProcessor, diffusers.WanAnimatePipeline):
    """Character animation and replacement, in segments."""
