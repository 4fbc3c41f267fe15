"""From prompts to videos on disk: the library behind `vmonarch generate`.

    from vmonarch.pipelines.generation import GenerateConfig, generate

    videos = generate(GenerateConfig(prompts=("a red circle moving right",), seeds=(0, 1), attention="vmonarch"))
    videos[0].video, videos[0].record_path, videos[0].record["seconds"]

Beside each mp4 lie a contact sheet (PNG) and a record (JSON), from which `load_record` and `generate` make the same
video again, bit for bit on the same machine. Precision: `dtype="auto"` is float32 on the CPU and bfloat16 on CUDA; the
VAE always runs in float32, because its decoder shows banding below that. Noise is drawn on the CPU, so a seed means the
same noise on every device.

Legend: B videos of a batch, F frames, H and W pixels, C latent channels, T latent frames, h and w latent pixels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vmonarch.files import AtomicFiles, short_hash
from vmonarch.pipelines import recipes
from vmonarch.pipelines.config import GenerateConfig, SamplingConfig
from vmonarch.pipelines.devices import reset_peak_memory
from vmonarch.pipelines.loading import LoadedModel, complete_and_load, shorten
from vmonarch.pipelines.outputs import GeneratedVideo, GenerationError, reserve_number
from vmonarch.pipelines.processes import Shard, check_sharing, shared_videos
from vmonarch.pipelines.records import RECORD_FORMAT, Recorded, facts, frames_sha256, load_record
from vmonarch.pipelines.sampling import Batch, denoise, sample

if TYPE_CHECKING:
    import torch

__all__ = ["GenerateConfig", "GeneratedVideo", "GenerationError", "generate", "load_record"]


class _Jobs(NamedTuple):
    """The videos of a batch, and the indices of those that reach the disk."""

    prompts: Sequence[str]
    seeds: Sequence[int]
    written: Sequence[int]


def _batches(config: SamplingConfig, recorded: Recorded | None) -> list[_Jobs]:
    """The batches to sample: those of `config`, or the recorded one if `config` still asks for its video."""
    if recorded:
        index, prompts, seeds = recorded.index, recorded.prompts, recorded.seeds
        if (config.prompts, config.seeds) == ((prompts[index],), (seeds[index],)):
            return [_Jobs(prompts, seeds, [index])]
    return [
        _Jobs([prompt for prompt, _ in batch], [seed for _, seed in batch], range(len(batch)))
        for batch in config.batches()
    ]


def generate(
    config: GenerateConfig,
    *,
    recorded: Recorded | None = None,
    progress: bool = False,
    model: LoadedModel | None = None,
    shard: Shard | None = None,
    keep_frames: bool = False,
) -> list[GeneratedVideo]:
    """Generate every prompt with every seed and write mp4, contact sheet and record of each.

    Args:
        recorded: a record to reproduce, from which `config` was made; its model must be unchanged.
        progress: show progress bars.
        model: a pipeline loaded before with the same model settings (`load_model`), to save loading it again.
        shard: this process among several that make the same call and compute every video together, each on a GPU of its
            own; the first one writes. A pipeline given as `model` serves no more afterwards. None: this process alone.
        keep_frames: give back the videos' frames, too; they stay in memory until then.

    Returns:
        The videos, by prompt and then by seed; none in processes that do not write.

    Raises:
        InputError: an argument that cannot be used, found before anything is loaded where possible.
        ModelError: the model folder is missing something, damaged or unsupported.
        GenerationError: a video came out constant or with NaN, or could not be written. The others are on disk all
            the same, and of the broken one the raw tensors, at the path in the message.
    """
    shard = shard or Shard()
    check_sharing(config, shard)
    config, model = complete_and_load(config, model, shard=shard, recorded=recorded)
    with shared_videos(model, config, shard):
        recipes.apply(model.pipe, config.attention, steps=config.steps)
        return _generate(config, recorded, progress, model, shard, keep_frames)


def _generate(
    config: GenerateConfig,
    recorded: Recorded | None,
    progress: bool,
    model: LoadedModel,
    shard: Shard,
    keep_frames: bool,
) -> list[GeneratedVideo]:
    """`generate` with everything in place."""
    batches = _batches(config, recorded)
    if shard.rank > 0:
        # The first process decodes and writes.
        for jobs in batches:
            denoise(model, config, jobs.prompts, jobs.seeds)
        return []
    total = sum(len(jobs.written) for jobs in batches)
    about = facts(config, model)
    about["environment"]["processes"] = shard.size
    videos: list[GeneratedVideo] = []
    failures: list[GenerationError] = []
    for jobs in batches:
        reset_peak_memory(model.device)
        title = f"video {len(videos) + len(failures) + 1} of {total}" if progress else None
        result = sample(model, config, jobs.prompts, jobs.seeds, progress=title)
        for index in jobs.written:
            record = _record(config, model, about, jobs, index, result)
            number = len(videos) + len(failures) + 1 if config.overwrite else None
            try:
                video = _write(number, config, record, result.frames[index], result.latents[index])
            except GenerationError as error:
                failures.append(error)
                continue
            if recorded is not None:
                same = recorded.frames_sha256 == record["frames_sha256"]
                video = dataclasses.replace(video, reproduced=same)
            if keep_frames:
                video = dataclasses.replace(video, frames=result.frames[index])
            videos.append(video)
    if failures:
        made = f"; {len(videos)} of {total} videos were made" if total > 1 else ""
        raise GenerationError("; ".join(map(str, failures)) + made, videos) from failures[0].__cause__
    return videos


def _record(
    config: GenerateConfig,
    model: LoadedModel,
    about: dict[str, Any],
    jobs: _Jobs,
    index: int,
    result: Batch,
) -> dict[str, Any]:
    from vmonarch.pipelines.environment import peak_memory_bytes

    prompt, seed = jobs.prompts[index], jobs.seeds[index]
    values = dataclasses.replace(config, prompts=(prompt,), seeds=(seed,)).to_dict()
    return {
        "format": RECORD_FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "prompt": prompt,
        "seed": seed,
        "config": values,
        "batch": {"prompts": list(jobs.prompts), "seeds": list(jobs.seeds), "index": index},
        **about,
        # These belong to the whole batch: its videos are sampled together.
        "seconds": {"load": model.seconds} | result.seconds,
        "transformer_calls": result.transformer_calls,
        "peak_memory_bytes": peak_memory_bytes(model.device),
        "frames_shape": list(result.frames[index].shape),
        "frames_sha256": frames_sha256(result.frames[index]),
    }


def _write(
    number: int | None,
    config: GenerateConfig,
    record: dict[str, Any],
    frames: torch.Tensor,
    latents: torch.Tensor,
) -> GeneratedVideo:
    """Write one video with its sheet and record, checked before it gets its name."""
    from vmonarch.pipelines.video_io import (
        VideoError,
        check_frames,
        contact_sheet,
        encode_video,
        to_uint8,
        verify_video,
    )

    assert config.fps is not None
    output = Path(config.output_dir).expanduser()
    settings = {key: value for key, value in record["config"].items() if key not in ("output_dir", "overwrite")}
    with contextlib.ExitStack() as stack:
        stem = "video"
        try:
            digits = stack.enter_context(reserve_number(output, number))
            stem = f"{digits}-{short_hash(settings)}"
            paths = {suffix: output / f"{stem}.{suffix}" for suffix in ("mp4", "png", "json")}
            check_frames(frames)
            pictures = to_uint8(frames)
            with AtomicFiles(overwrite=config.overwrite) as files:
                video = files.stage(paths["mp4"])
                encode_video(video, pictures, config.fps)
                verify_video(video, pictures)
                record = record | {"video": paths["mp4"].name, "contact_sheet": None}
                if config.contact_sheet:
                    record["contact_sheet"] = paths["png"].name
                    title = f"{record['prompt']} · seed {record['seed']} · {config.attention.label}"
                    contact_sheet(pictures, title=title).save(files.stage(paths["png"]))
                text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
                files.stage(paths["json"]).write_text(text, encoding="utf-8")
        except (OSError, VideoError) as error:
            what = f"prompt {shorten(record['prompt'])!r}, seed {record['seed']}"
            raise GenerationError(f"{what}: {error}; {_keep_raw(output, stem, frames, latents)}") from error
    return GeneratedVideo(paths["mp4"], paths["png"] if config.contact_sheet else None, paths["json"], record)


def _keep_raw(output: Path, stem: str, frames: torch.Tensor, latents: torch.Tensor) -> str:
    """Save what could not become a video where there is room for it, and say where."""
    from safetensors.torch import save_file

    for choose_folder in (lambda: output, lambda: Path(tempfile.mkdtemp(prefix="vmonarch-"))):
        try:
            path = choose_folder() / f"{stem}.raw.safetensors"
            with AtomicFiles(overwrite=True) as files:
                save_file({"frames": frames.contiguous(), "latents": latents.contiguous()}, files.stage(path))
            return f"raw frames and latents are kept in {path}"
        except Exception:
            # safetensors reports a full disk by an exception of its own; whatever it is, the next folder may do.
            continue
    return "there was no room to keep the raw frames either"
