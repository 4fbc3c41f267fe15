"""diffusers pipelines with an attention processor that can be set and taken off: `set_attn_processor`."""

from vmonarch.pipelines.wan import (
    WanAnimatePipeline,
    WanImageToVideoPipeline,
    WanPipeline,
    WanVACEPipeline,
    WanVideoToVideoPipeline,
)

__all__ = [
    "WanAnimatePipeline",
    "WanImageToVideoPipeline",
    "WanPipeline",
    "WanVACEPipeline",
    "WanVideoToVideoPipeline",
]
