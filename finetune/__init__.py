"""Training: finetuning of video diffusion transformers and the embedded model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vmonarch.lazy import lazy_names

if TYPE_CHECKING:
    from vmonarch.finetune import config as config
    from vmonarch.finetune import export as export
    from vmonarch.finetune import trainer as trainer

__getattr__, __dir__ = lazy_names(__name__, modules=("config", "export", "trainer"))
