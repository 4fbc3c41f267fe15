"""The model shipped inside the package: a tiny Wan text-to-video model of coloured shapes that move.

Any diffusers can load it: `diffusers.WanPipeline.from_pretrained(embedded_model_path())`. It is trained from scratch by
`python -m vmonarch.finetune.embedded`; data, training and scores are in `vmonarch/finetune/embedded/README.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class GenerationSettings:
    """What the embedded model was trained and scored with.

    `height` and `width` are pixels, `num_frames` is 1 + 4n, `fps` is for playback; the shipped scheduler already has
    `flow_shift`.
    """

    height: int = 96
    width: int = 160
    num_frames: int = 61
    num_inference_steps: int = 20
    guidance_scale: float = 4.0
    flow_shift: float = 3.0
    fps: int = 15


EMBEDDED_SETTINGS = GenerationSettings()
"""The recommended settings; all but `flow_shift` and `fps` are arguments of the pipeline's call."""


def embedded_model_path() -> Path:
    """Folder of the embedded model, for `from_pretrained`; it works from a checkout and from an installed wheel.

    Raises:
        FileNotFoundError: the weights are missing from the installation.
    """
    folder = Path(__file__).resolve().parent
    if not (folder / "model_index.json").is_file():
        raise FileNotFoundError(
            f"the embedded model's weights are missing from {folder}; reinstall vmonarch, or train them with "
            "`python -m vmonarch.finetune.embedded`"
        )
    return folder


def embedded_adapter_path() -> Path:
    """File of the adapter with which the embedded model runs Based (`vmonarch.load_adapter`).

    It lies beside the model's folder, which thereby stays a plain diffusers pipeline of known contents.

    Raises:
        FileNotFoundError: it is missing from the installation.
    """
    file = Path(__file__).resolve().parent.parent / "embedded_adapters" / "based.safetensors"
    if not file.is_file():
        raise FileNotFoundError(
            f"the embedded model's adapter {file} is missing; reinstall vmonarch, or train it with"
            " `vmonarch finetune --config embedded-based`"
        )
    return file


__all__ = ["EMBEDDED_SETTINGS", "GenerationSettings", "embedded_adapter_path", "embedded_model_path"]
