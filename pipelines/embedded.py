"""The model of the package vmonarch-embedded: a tiny Wan text-to-video model of coloured shapes that move.

Any diffusers can load it: `diffusers.WanPipeline.from_pretrained(embedded_model_path())`. Data, training and scores are
in `docs/embedded-model.md`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

EMBEDDED_SETTINGS = SimpleNamespace(
    height=96, width=160, num_frames=61, num_inference_steps=20, guidance_scale=4.0, flow_shift=3.0, fps=15
)
"""Settings of its training and scores: arguments of the pipeline's call, the scheduler's `flow_shift`, `fps`."""


def embedded_model_path() -> Path:
    """Folder of the embedded model, for `from_pretrained`.

    Raises:
        FileNotFoundError: this is no checkout, and vmonarch-embedded is not installed.
    """
    return _folder() / "model"


def embedded_adapter_path() -> Path:
    """File of the adapter with which the embedded model runs Based (`vmonarch.load_adapter`).

    It lies beside the model's folder, which thereby stays a plain diffusers pipeline of known contents.

    Raises:
        FileNotFoundError: see `embedded_model_path`.
    """
    return _folder() / "based.safetensors"


def _folder() -> Path:
    """The files of vmonarch-embedded, of this checkout or else as they are installed."""
    name = "vmonarch_embedded"
    here = Path(__file__).resolve().parent / "embedded_wheel" / name
    if here.is_dir():
        return here
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        problem = "the model 'embedded' is the package vmonarch-embedded, which is not installed"
        raise FileNotFoundError(f"{problem}: pip install ./pipelines/embedded_wheel in a checkout of vmonarch")
    return Path(next(iter(found.submodule_search_locations)))
