"""Videos that show how far a run is: sampled from prompts with the weights as they are."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from vmonarch.files import AtomicFiles
from vmonarch.finetune.config import FinetuneConfig
from vmonarch.finetune.models import Experts
from vmonarch.pipelines.config import SamplingConfig, complete
from vmonarch.pipelines.loading import LoadedModel, read_pipeline
from vmonarch.pipelines.model_folder import ModelFolder
from vmonarch.pipelines.sampling import sample
from vmonarch.pipelines.video_io import contact_sheet, encode_video, to_uint8


def write_videos(folder: ModelFolder, experts: Experts, config: FinetuneConfig, output: Path, step: int) -> list[Path]:
    """One mp4 for each validation prompt, with a contact sheet (PNG) and a JSON beside it; seed 0.

    Videos of this step that a run has left which ended before its next checkpoint are replaced.
    """
    wanted = SamplingConfig(prompts=config.validation.prompts, model=config.model, revision=config.revision)
    settings = complete(wanted, folder)
    if config.validation.steps is not None:
        settings = dataclasses.replace(settings, steps=config.validation.steps)
    model = _pipeline(folder, experts, settings)
    output.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, prompt in enumerate(settings.prompts):
        frames = to_uint8(sample(model, settings, [prompt], [0]).frames[0])
        path = output / f"step-{step:08d}-{number:02d}.mp4"
        with AtomicFiles(overwrite=True) as files:
            encode_video(files.stage(path), frames, settings.fps or 16.0)
            contact_sheet(frames, title=prompt).save(files.stage(path.with_suffix(".png")))
            record = {"step": step, "prompt": prompt, "seed": 0, "settings": settings.to_dict()}
            files.stage(path.with_suffix(".json")).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        paths.append(path)
    return paths


def _pipeline(folder: ModelFolder, experts: Experts, settings: SamplingConfig) -> LoadedModel:
    """The stock pipeline around the transformers in training; the other parts are read for it and then dropped."""
    import diffusers
    import torch

    parts: dict[str, Any] = dict(experts.parts.items())
    device = next(experts.parameters()).device
    pipe = read_pipeline(getattr(diffusers, folder.pipeline), folder, torch.float32, **parts)
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module) and name not in parts:
            component.to(device)
    return LoadedModel(pipe, folder, device, torch.float32, 0.0, settings)
