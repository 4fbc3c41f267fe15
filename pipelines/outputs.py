"""Outputs of generation on disk: nothing is overwritten or lost, and a record makes its video again."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmonarch.configs import InputError, file_sha256, read_document
from vmonarch.pipelines.environment import environment
from vmonarch.pipelines.lora import LORA, find_lora
from vmonarch.pipelines.video_io import open_image

if TYPE_CHECKING:
    import torch

    from vmonarch.pipelines.config import SamplingConfig
    from vmonarch.pipelines.loading import LoadedModel
    from vmonarch.pipelines.model_folder import ModelFolder

RECORD_FORMAT = "vmonarch-generate-2"


@dataclass(frozen=True)
class GeneratedVideo:
    """A video on disk.

    Args:
        video, contact_sheet, record_path: its mp4, PNG (None if not asked for) and JSON.
        record: contents of the JSON.
    """

    video: Path
    contact_sheet: Path | None
    record_path: Path
    record: dict[str, Any]


class GenerationError(RuntimeError):
    """Generation ran, but some of what it should have made could not be made or written; `videos` are those on disk."""

    def __init__(self, message: str, videos: Sequence[GeneratedVideo] = ()) -> None:
        super().__init__(message)
        self.videos = tuple(videos)


def load_record(path: str) -> dict[str, Any]:
    """The JSON beside a generated video; `config` in it are the settings, and `model` what it was made with.

    Raises:
        InputError: no such file, no JSON, or no record of ours.
    """
    record = read_document("from_json", path, RECORD_FORMAT, "record of a generated video")
    if not all(isinstance(record.get(part), dict) for part in ("config", "model")):
        raise InputError("from_json", f"{path!r} is an incomplete record")
    return record


def check_sources(recorded: Mapping[str, Any], config: SamplingConfig, folder: ModelFolder) -> None:
    """Check that what a completed config takes from a record is unchanged: model, picture and LoRA files.

    Raises:
        InputError: something has changed.
    """
    settings, now = config.to_dict(), source_hashes(config, folder)
    for what, names, hashes in (
        ("a model", ("model",), ("configs_sha256", "weights_sha256")),
        ("an image", ("image",), ("image_sha256",)),
        ("a LoRA file", tuple(LORA), ("lora_sha256",)),
    ):
        same = all(settings[name] == recorded["config"].get(name) for name in names)
        if same and any(recorded["model"].get(key, now[key]) != now[key] for key in hashes):
            raise InputError("from_json", f"names {what} that has changed since: {settings[names[0]]}")


def source_hashes(config: SamplingConfig, folder: ModelFolder) -> dict[str, Any]:
    """Hashes of the files that a completed config names: model, picture and LoRA layers."""
    return {
        "image_sha256": file_sha256(config.image) if config.image else None,
        "lora_sha256": [file_sha256(find_lora(name, word).file) for name in LORA for word in getattr(config, name)],
        **folder.fingerprint(),
    }


def frames_sha256(frames: torch.Tensor) -> str:
    """Hash of the exact bits of float32 frames [F, 3, H, W]."""
    return hashlib.sha256(frames.contiguous().numpy().tobytes()).hexdigest()


def facts(config: SamplingConfig, model: LoadedModel) -> dict[str, Any]:
    """A record's facts about model and machine, the same for all videos of a run."""
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
            "image_changes": open_image(config.image, config.height, config.width)[1] if config.image else None,
            **source_hashes(config, model.folder),
        },
        "environment": environment(model.device),
    }


def changes(before: Any, now: Any, free: Collection[str] = (), place: str = "") -> Iterator[str]:
    """Differences between the settings of two runs, in words, each with its place, such as `methods[1].num_iterations`.

    Args:
        before: JSON values. free: places that may differ.
    """
    if place in free:
        return
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            hashes = before.get(f"{key}_sha256"), now.get(f"{key}_sha256")
            # The same file, wherever it lies.
            if hashes[0] is None or hashes[0] != hashes[1]:
                yield from changes(before.get(key), now.get(key), free, f"{place}.{key}".lstrip("."))
    # JSON has no tuples.
    elif isinstance(before, list) and isinstance(now, (list, tuple)):
        for i, (old, new) in enumerate(itertools.zip_longest(before, now)):
            yield from changes(old, new, free, f"{place}[{i}]")
    elif before != now:
        texts = [json.dumps(value, ensure_ascii=False) for value in (before, now)]
        was, is_now = (text if len(text) <= 160 else text[:159] + "…" for text in texts)
        yield f"{place} was {was}, is {is_now}"


def next_number(folder: Path) -> str:
    """The four-digit output number after the last one in `folder`."""
    taken = [int(found.group(1)) for path in folder.iterdir() if (found := re.match(r"\.?(\d{4,})[-.]", path.name))]
    return f"{max(taken, default=0) + 1:04d}"
