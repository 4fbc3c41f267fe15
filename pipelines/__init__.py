"""Generation and the embedded model, imported when first used: diffusers takes seconds to load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vmonarch.lazy import lazy_names

if TYPE_CHECKING:
    from vmonarch.pipelines import embedded as embedded
    from vmonarch.pipelines import generation as generation

_WAN = ("WanAnimatePipeline", "WanImageToVideoPipeline", "WanPipeline", "WanVACEPipeline", "WanVideoToVideoPipeline")

__getattr__, __dir__ = lazy_names(
    __name__, modules=("embedded", "generation"), gone=dict.fromkeys(_WAN, "import it from diffusers")
)
