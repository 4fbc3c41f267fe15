"""The model shipped inside the package: a tiny Wan text-to-video model of coloured shapes that move.

Any diffusers can load it: `diffusers.WanPipeline.from_pretrained(embedded_model_path())`. Data, training and scores are
in `docs/embedded-model.md`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

EMBEDDED_SETTINGS = SimpleNamespace(
    height=96, width=160, num_frames=61, num_inference_steps=20, guidance_scale=4.0, flow_shift=3.0, fps=15
)
"""What the model was trained and scored with: arguments of the pipeline's call, the scheduler's `flow_shift`, `fps`."""


def embedded_model_path() -> Path:
    """Folder of the embedded model, for `from_pretrained`; it works from a checkout and from an installed wheel."""
    return Path(__file__).resolve().parent


def embedded_adapter_path() -> Path:
    """File of the adapter with which the embedded model runs Based (`vmonarch.load_adapter`).

    It lies beside the model's folder, which thereby stays a plain diffusers pipeline of known contents.
    """
    return Path(__file__).resolve().parent.parent / "embedded_adapters" / "based.safetensors"
