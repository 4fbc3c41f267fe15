"""Generation, the embedded model, and the names of diffusers' Wan pipelines.

All are imported when first used: diffusers takes seconds to load.
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
    from diffusers import WanAnimatePipeline as WanAnimatePipeline
    from diffusers import WanImageToVideoPipeline as WanImageToVideoPipeline
    from diffusers import WanPipeline as WanPipeline
    from diffusers import WanVACEPipeline as WanVACEPipeline
    from diffusers import WanVideoToVideoPipeline as WanVideoToVideoPipeline

    from vmonarch.pipelines import embedded as embedded
    from vmonarch.pipelines import generation as generation


__getattr__, __dir__ = lazy_names(
    __name__, names=dict.fromkeys(__all__, "diffusers"), modules=("embedded", "generation")
)
