"""The JSON beside a video, from which it can be made again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmonarch.configs import InputError, file_sha256
from vmonarch.pipelines.lora import LORA, find_lora, lora_sha256

if TYPE_CHECKING:
    import torch

    from vmonarch.pipelines.config import SamplingConfig
    from vmonarch.pipelines.loading import LoadedModel
    from vmonarch.pipelines.model_folder import ModelFolder

RECORD_FORMAT = "vmonarch-generate-1"


@dataclass(frozen=True)
class Recorded:
    """A record read back: the settings of its video, and the hashes of what it was made with."""

    values: dict[str, Any]
    model: dict[str, Any]


def load_record(path: str) -> Recorded:
    """Read the JSON beside a generated video.

    Raises:
        InputError: no such file, no JSON, or no record of ours.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = f"there is no file {path!r}" if isinstance(error, FileNotFoundError) else f"{path!r}: {error}"
        raise InputError("from_json", f"must be the JSON beside a generated video; {reason}") from error
    if not isinstance(record, dict) or record.get("format") != RECORD_FORMAT:
        raise InputError("from_json", f"{path!r} is no record of a generated video (format {RECORD_FORMAT})")
    try:
        # What was replaced when it was made is not to be replaced again.
        values = {key: value for key, value in record["config"].items() if key != "overwrite"}
        return Recorded(values, dict(record["model"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError("from_json", f"{path!r} is an incomplete record: {error}") from error


def check_same_model(recorded: Recorded, model: ModelFolder) -> None:
    """Check that the model is still the recorded one.

    Raises:
        InputError: its config files or weights have changed.
    """
    now = model.fingerprint()
    for key in ("configs_sha256", "weights_sha256", "weights_sizes_sha256"):
        if recorded.model.get(key) != now[key]:
            what = "config files" if key.startswith("configs") else "weights"
            raise InputError("from_json", f"names a model whose {what} have changed since: {model.path}")
    image = recorded.values.get("image")
    if image is not None and file_sha256(image) != recorded.model.get("image_sha256"):
        raise InputError("from_json", f"names an image that has changed since: {image}")
    words = [(name, word) for name in LORA for word in recorded.values.get(name, ())]
    for (name, word), before in zip(words, recorded.model.get("lora_sha256", ()), strict=True):
        if file_sha256(find_lora(name, word).file) != before:
            raise InputError("from_json", f"names a LoRA file that has changed since: {word}")


def frames_sha256(frames: torch.Tensor) -> str:
    """Hash of the exact bits of float32 frames [F, 3, H, W]."""
    return hashlib.sha256(frames.contiguous().numpy().tobytes()).hexdigest()


def facts(config: SamplingConfig, model: LoadedModel) -> dict[str, Any]:
    """What a record says about model and machine: the same for all videos of a run."""
    from vmonarch.pipelines.environment import environment
    from vmonarch.pipelines.video_io import open_image

    assert config.height is not None and config.width is not None
    return {
        "model": {
            "name": model.folder.name,
            # The embedded model is part of the package: where that lies says nothing about the video.
            "path": None if model.folder.name == "embedded" else str(model.folder.path),
            "revision": model.folder.revision,
            "pipeline": type(model.pipe).__name__,
            "dtype": str(model.dtype).removeprefix("torch."),
            "vae_dtype": str(model.pipe.vae.dtype).removeprefix("torch."),
            "scheduler": type(model.pipe.scheduler).__name__,
            "image_sha256": file_sha256(config.image) if config.image else None,
            "image_changes": open_image(config.image, config.height, config.width)[1] if config.image else None,
            "lora_sha256": lora_sha256(config),
            **model.folder.fingerprint(),
        },
        "environment": environment(model.device),
    }
