"""Score videos by dimensions of VBench, in its own environment and process, with a cache on disk."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vmonarch.configs import InputError, file_sha256
from vmonarch.eval.vbench.dimensions import DIMENSIONS, check_dimensions
from vmonarch.eval.vbench.environment import VBenchEnvironment, VBenchError, load_environment, run
from vmonarch.eval.vbench.weights import check_weights, default_weights, weights_identity
from vmonarch.files import AtomicFiles
from vmonarch.pipelines.devices import choose_device

_WORKER = Path(__file__).with_name("worker.py")
# Rounding of scores that are written as decimal numbers and averaged in float64.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class PromptedVideo:
    """An mp4 file, the prompt that it was made of, and which of the prompt's videos it is."""

    path: Path
    prompt: str
    index: int = 0


@dataclass(frozen=True)
class VBenchScore:
    """What VBench says of a set of videos in one dimension, 1 the best.

    Args:
        score: of the set. The package weighs every video alike, and in the two consistencies every frame.
        per_video: of each video, in the order in which they were given.
        record: JSON file with the scores and what they were computed with.
    """

    score: float
    per_video: tuple[float, ...]
    record: Path


def score_videos(
    videos: Sequence[PromptedVideo],
    dimensions: Sequence[str],
    *,
    work_dir: Path,
    timeout: float,
    device: str = "auto",
    environment: VBenchEnvironment | None = None,
    weights: Path | None = None,
) -> dict[str, VBenchScore]:
    """VBench's scores of videos in each dimension.

    A dimension is not computed again if its score of the same videos, prompts, packages, weights and kind of device is
    in `work_dir`.

    Args:
        videos: mp4 files; several may have the same prompt.
        dimensions: names from DIMENSIONS.
        work_dir: folder of the JSON files with scores; made if need be.
        timeout: seconds that a dimension may take.
        device: auto, cpu, cuda or cuda:N.
        environment: in which the package is installed; default: that in `default_folder()`.
        weights: folder of the files that the package loads; default: `default_weights()`.

    Raises:
        InputError: no videos or dimensions, unknown ones, a file that is no mp4, an empty prompt, a video that is too
            short for a dimension, no environment, a device or a time-out that cannot be used.
        FileNotFoundError, VideoError: a video that does not exist or cannot be decoded.
        VBenchError: weights are missing, the package failed or took too long, or gave a video no or no possible score.
            Scores of the dimensions before stay in `work_dir`.
    """
    check_dimensions(dimensions)
    _check_videos(videos)
    if not 0 < timeout < math.inf:
        raise InputError("timeout", f"must be above 0 seconds and finite, got {timeout}")
    try:
        device = str(choose_device(device))
    except RuntimeError as error:
        raise InputError("device", f"must be auto, cpu, cuda or cuda:N, got {device!r}") from error
    environment = environment or load_environment()
    weights = (weights or default_weights()).absolute()
    check_weights(dimensions, weights)
    hashes = {path: file_sha256(path) for path in dict.fromkeys(video.path for video in videos)}
    listed = [{"sha256": hashes[video.path], "prompt": video.prompt} for video in videos]
    identities = {
        dimension: {
            "dimension": dimension,
            "device": device.partition(":")[0],
            "versions": dict(environment.versions),
            "weights": weights_identity(dimension, weights),
            "videos": listed,
        }
        for dimension in dimensions
    }
    work_dir.mkdir(parents=True, exist_ok=True)
    records = {dimension: _record_path(work_dir, identity) for dimension, identity in identities.items()}
    pending = [dimension for dimension in dimensions if not records[dimension].exists()]
    _check_lengths(hashes, pending)
    scores = {}
    for dimension, identity in identities.items():
        path = records[dimension]
        if not path.exists():
            score, per_video = _compute(videos, dimension, timeout, device, environment, weights)
            record = {**identity, "score": score, "per_video": per_video}
            # Overwritten only by a process that scored the same meanwhile.
            with AtomicFiles(overwrite=True) as files:
                files.stage(path).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        scores[dimension] = _read_record(path, identity)
    return scores


def _check_videos(videos: Sequence[PromptedVideo]) -> None:
    if not videos:
        raise InputError("videos", "must be one or more videos, got none")
    for video in videos:
        if video.path.suffix != ".mp4":
            raise InputError("videos", f"must be mp4 files, got {video.path}")
        if not video.path.is_file():
            raise FileNotFoundError(f"there is no video {video.path}")
        if not video.prompt.strip():
            raise InputError("videos", f"must have prompts, that of {video.path} is empty")


def _check_lengths(hashes: Mapping[Path, str], dimensions: Sequence[str]) -> None:
    """Decode every video, and count the frames that each dimension sees; the package skips what it cannot read."""
    for path, sha256 in hashes.items() if dimensions else ():
        frames, rate = _frames_and_rate(path, sha256)
        for name in dimensions:
            dimension = DIMENSIONS[name]
            step = 1 if dimension.frames_per_second is None else max(1, round(rate / dimension.frames_per_second))
            seen = -(-frames // step)
            if seen < dimension.frames:
                raise InputError(
                    "videos",
                    f"{path} is too short for {name}, which sees {seen} of its frames and needs {dimension.frames}",
                )


@functools.cache
def _frames_and_rate(path: Path, sha256: str) -> tuple[int, float]:
    """Frames of a video and its frames per second; `sha256` makes a file that changed another argument."""
    from vmonarch.pipelines.video_io import read_video

    frames, rate = read_video(path)
    return len(frames), rate


def _record_path(work_dir: Path, identity: dict[str, Any]) -> Path:
    text = json.dumps(identity, sort_keys=True)
    return work_dir / f"{identity['dimension']}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _read_record(path: Path, identity: dict[str, Any]) -> VBenchScore:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        score, per_video = record.pop("score"), tuple(record.pop("per_video"))
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise VBenchError(f"{path} cannot be read as scores; delete it to compute them again") from error
    if record != identity:
        raise VBenchError(f"{path} holds scores of something else; delete it to compute them again")
    return VBenchScore(score, per_video, path)


def _compute(
    videos: Sequence[PromptedVideo],
    dimension: str,
    timeout: float,
    device: str,
    environment: VBenchEnvironment,
    weights: Path,
) -> tuple[float, list[float]]:
    """Run the package on links to the videos; returns the score of all and of each."""
    with tempfile.TemporaryDirectory(prefix="vmonarch-vbench-") as temporary:
        folder, output = Path(temporary) / "videos", Path(temporary) / "output"
        folder.mkdir()
        # The package takes a prompt from a file's name unless it is given one; ours say nothing.
        named = {f"{place:06d}.mp4": video for place, video in enumerate(videos)}
        for name, video in named.items():
            (folder / name).symlink_to(video.path.absolute())
        prompts = {name: video.prompt for name, video in named.items()}
        asked = {"videos": str(folder), "prompts": prompts, "dimension": dimension, "device": device}
        job = Path(temporary) / "job.json"
        job.write_text(json.dumps({**asked, "output": str(output)}), encoding="utf-8")
        hub = Path(temporary) / "torch"
        _link_dino(hub, weights)
        try:
            run(
                [str(environment.python), "-I", str(_WORKER), str(job)],
                timeout=timeout,
                variables={"VBENCH_CACHE_DIR": str(weights), "TORCH_HOME": str(hub), "HF_HUB_OFFLINE": "1"},
            )
        except VBenchError as error:
            raise VBenchError(f"VBench's {dimension} {error}") from error
        results = output / "scores_eval_results.json"
        if not results.is_file():
            raise VBenchError(f"VBench's {dimension} ended without results")
        return _parse(json.loads(results.read_text(encoding="utf-8")), dimension, named)


def _link_dino(hub: Path, weights: Path) -> None:
    """Show DINO's weights to `torch.hub`: its code ignores the path that VBench hands it, and would download them."""
    checkpoints = hub / "hub" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "dino_vitbase16_pretrain.pth").symlink_to(weights / "dino_model" / "dino_vitbase16_pretrain.pth")


def _parse(results: dict[str, Any], dimension: str, named: Mapping[str, PromptedVideo]) -> tuple[float, list[float]]:
    """Check and order what the package wrote: `{dimension: [score, [{"video_path": …, "video_results": …}, …]]}`."""
    low, high = DIMENSIONS[dimension].per_video_range
    try:
        score, listed = results[dimension]
        found = {Path(entry["video_path"]).name: entry["video_results"] for entry in listed}
    except (KeyError, TypeError, ValueError) as error:
        raise VBenchError(f"VBench's {dimension} gave results of an unknown form: {str(results)[:200]}") from error
    if len(found) < len(listed) or set(found) - set(named):
        raise VBenchError(f"VBench's {dimension} gave scores of other videos than it was asked for")
    for name, video in named.items():
        if name not in found:
            raise VBenchError(f"VBench's {dimension} gave {video.path} no score")
        if not _within(found[name], low, high):
            raise VBenchError(
                f"VBench's {dimension} gave {video.path} the score {found[name]}, which is not in [{low:g}, {high:g}]"
            )
    per_video = [float(found[name]) / high for name in named]
    # A mean, whatever its weights.
    if not _within(score, min(per_video) - _ROUNDING, max(per_video) + _ROUNDING):
        raise VBenchError(f"VBench's {dimension} gave the score {score}, which is no mean of those of the videos")
    return float(score), per_video


def _within(value: Any, low: float, high: float) -> bool:
    return isinstance(value, (bool, int, float)) and low <= value <= high
