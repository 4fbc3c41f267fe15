"""From prompts to videos on disk: the library behind `vmonarch generate`.

    from vmonarch.pipelines.generation import GenerateConfig, generate

    videos = generate(GenerateConfig(prompts=("a red circle moving right",), seeds=(0, 1), attention="vmonarch"))
    videos[0].video, videos[0].record_path, videos[0].record["seconds"]

Beside each mp4 lie a contact sheet (PNG) and a record (JSON), from which `load_record` and `generate` make the video
again. Precision: `dtype="auto"` is float32 on the CPU and bfloat16 on CUDA; the VAE always runs in float32, because its
decoder shows banding below that. Noise is drawn on the CPU, so a seed means the same noise on every device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from vmonarch.files import AtomicFiles, short_hash
from vmonarch.pipelines import outputs, recipes, video_io
from vmonarch.pipelines.config import GenerateConfig
from vmonarch.pipelines.loading import LoadedModel, complete_and_load
from vmonarch.pipelines.outputs import GeneratedVideo, GenerationError, load_record
from vmonarch.pipelines.processes import ALONE, Shard, check_sharing, shared_videos
from vmonarch.pipelines.sampling import sample

__all__ = ["GenerateConfig", "GeneratedVideo", "GenerationError", "generate", "load_record"]


def generate(
    config: GenerateConfig,
    *,
    recorded: Mapping[str, Any] | None = None,
    progress: bool = False,
    model: LoadedModel | None = None,
    shard: Shard = ALONE,
) -> list[GeneratedVideo]:
    """Generate every prompt with every seed and write mp4, contact sheet and record of each.

    Args:
        recorded: the record that `config` was made from; its model, image and LoRA files must be unchanged.
        progress: show progress bars.
        model: a pipeline loaded before with the same model settings (`load_model`), to save loading it again.
        shard: this process among several that make the same call and compute every video together, each on a GPU of its
            own; the first one writes. A pipeline given as `model` serves no more afterwards. By default it is alone.

    Returns:
        The videos, by prompt and then by seed; none in processes that do not write.

    Raises:
        InputError: an argument that cannot be used, found before anything is loaded where possible.
        ModelError: the model folder is missing something, damaged or unsupported.
        GenerationError: a video came out constant or with NaN, or could not be written. The other videos are on disk.
    """
    check_sharing(config, shard)
    config, model = complete_and_load(config, model, shard=shard, recorded=recorded)
    with shared_videos(model, config, shard):
        recipes.apply(model.pipe, config.attention)
        return _generate(config, model, shard, progress)


def _generate(config: GenerateConfig, model: LoadedModel, shard: Shard, progress: bool) -> list[GeneratedVideo]:
    """Sample, decode and write, with everything in place."""
    total = len(config.prompts) * len(config.seeds)
    facts = outputs.facts(config, model)
    facts["environment"]["processes"] = shard.size
    videos: list[GeneratedVideo] = []
    failures: list[GenerationError] = []
    for jobs in config.batches():
        title = f"video {len(videos) + len(failures) + 1} of {total}" if progress else None
        # Only the first process decodes and writes.
        result = sample(model, config, *zip(*jobs, strict=True), decode=shard.rank == 0, progress=title)
        if shard.rank > 0:
            continue
        # These hold for the whole batch, whose videos are sampled together.
        facts |= {
            "seconds": result.seconds,
            "transformer_calls": result.transformer_calls,
            "attention": None if result.report is None else {"text": str(result.report)} | result.report.to_dict(),
        }
        for (prompt, seed), frames in zip(jobs, result.frames, strict=True):
            record = {
                "format": outputs.RECORD_FORMAT,
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "prompt": prompt,
                "seed": seed,
                "config": replace(config, prompts=(prompt,), seeds=(seed,)).to_dict(),
                **facts,
                "frames_shape": list(frames.shape),
                "frames_sha256": outputs.frames_sha256(frames),
            }
            try:
                videos.append(_write(config, record, frames))
            except GenerationError as error:
                failures.append(error)
    if failures:
        made = f"; {len(videos)} of {total} videos were made" if total > 1 else ""
        raise GenerationError("; ".join(map(str, failures)) + made, videos) from failures[0].__cause__
    return videos


def _write(config: GenerateConfig, record: dict[str, Any], frames: torch.Tensor) -> GeneratedVideo:
    """Write one video with its sheet and record."""
    assert config.fps is not None
    output = Path(config.output_dir).expanduser()
    settings = {key: value for key, value in record["config"].items() if key != "output_dir"}
    try:
        stem = f"{outputs.next_number(output)}-{short_hash(settings)}"
        video, sheet, text = (output / f"{stem}.{suffix}" for suffix in ("mp4", "png", "json"))
        record |= {"video": video.name, "contact_sheet": sheet.name if config.contact_sheet else None}
        video_io.check_frames(frames)
        pictures = video_io.to_uint8(frames)
        with AtomicFiles() as files:
            video_io.encode_video(files.stage(video), pictures, config.fps)
            if config.contact_sheet:
                title = f"{record['prompt']} · seed {record['seed']} · {config.attention.label}"
                video_io.contact_sheet(pictures, title=title).save(files.stage(sheet))
            contents = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
            files.stage(text).write_text(contents, encoding="utf-8")
    except (OSError, video_io.VideoError) as error:
        what = f"prompt {record['prompt'][:40]!r}, seed {record['seed']}"
        raise GenerationError(f"{what}: {error}") from error
    return GeneratedVideo(video, sheet if config.contact_sheet else None, text, record)
