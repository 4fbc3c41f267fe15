"""Wan pipelines that take a vmonarch attention processor, generation, and the embedded model.

The classes bear the names of the stock pipelines they extend. They are imported when first used: diffusers takes
seconds to load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = [
    "WanAnimatePipeline",
    "WanImageToVideoPipeline",
    "WanPipeline",
    "WanVACEPipeline",
    "WanVideoToVideoPipeline",
]

if TYPE_CHECKING:
    from vmonarch.pipelines.wan import WanAnimatePipeline as WanAnimatePipeline
    from vmonarch.pipelines.wan import WanImageToVideoPipeline as WanImageToVideoPipeline
    from vmonarch.pipelines.wan import WanPipeline as WanPipeline
    from vmonarch.pipelines.wan import WanVACEPipeline as WanVACEPipeline
    from vmonarch.pipelines.wan import WanVideoToVideoPipeline as WanVideoToVideoPipeline


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'vmonarch.pipelines' has no attribute {name!r}; it offers {', '.join(__all__)}")
    from vmonarch.pipelines import wan

    return getattr(wan, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
