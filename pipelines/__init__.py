"""Wan pipelines that take a vmonarch attention processor, generation, and the embedded model.

The classes bear the names of the stock pipelines they extend. They are imported when first used: diffusers takes
seconds to load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vmonarch.lazy import lazy_names

__all__ = [
    "WanAnimatePipeline",
    "WanImageToVideoPipeline",
    "WanPipeline",
    "WanVACEPipeline",
    "WanVideoToVideoPipeline",
]

if TYPE_CHECKING:
    from vmonarch.pipelines import embedded as embedded
    from vmonarch.pipelines import generation as generation
    from vmonarch.pipelines.wan import WanAnimatePipeline as WanAnimatePipeline
    from vmonarch.pipelines.wan import WanImageToVideoPipeline as WanImageToVideoPipeline
    from vmonarch.pipelines.wan import WanPipeline as WanPipeline
    from vmonarch.pipelines.wan import WanVACEPipeline as WanVACEPipeline
    from vmonarch.pipelines.wan import WanVideoToVideoPipeline as WanVideoToVideoPipeline


__getattr__, __dir__ = lazy_names(
    __name__, names=dict.fromkeys(__all__, "vmonarch.pipelines.wan"), modules=("embedded", "generation")
)
