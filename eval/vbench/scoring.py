"""Lists of videos with their prompts, VBench's standard prompts, and the scores that the official package gives."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vmonarch.eval.vbench.installation as installation
from vmonarch.configs import InputError, file_sha256
from vmonarch.eval.settings import check_names
from vmonarch.eval.vbench.installation import VBenchError, manifest
from vmonarch.files import write_json
from vmonarch.pipelines.environment import choose_device

PAPER_DIMENSIONS = (
    *("aesthetic_quality", "background_consistency", "dynamic_degree", "imaging_quality"),
    "subject_consistency",
)
# The fewest frames that each can judge. With fewer, dynamic_degree requires round(4 · frames / 16) = 0 moving pairs and
# calls every video dynamic; motion_smoothness drops every second frame and predicts it from its neighbours.
FEWEST_FRAMES = {
    **{"aesthetic_quality": 1, "background_consistency": 2, "dynamic_degree": 3, "imaging_quality": 1},
    **{"subject_consistency": 2, "overall_consistency": 1, "temporal_flickering": 2, "motion_smoothness": 3},
}
DIMENSIONS = tuple(FEWEST_FRAMES)
# Ranges of the package's scores of single videos, where they are not 0 to 1. We divide them by the upper end, as the
# package itself does with the score of all videos.
_RANGES = {"imaging_quality": (0.0, 100.0), "overall_consistency": (-1.0, 1.0)}
# Seeds of neighbouring prompts lie this far apart.
_MOST_VIDEOS_PER_PROMPT = 25


@dataclass(frozen=True)
class PromptedVideo:
    """An mp4 file and the prompt that it was made from.

    Args:
        dimensions: the dimensions that judge it; empty for all.
    """

    path: Path
    prompt: str
    dimensions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str) or not self.prompt.strip() or self.path.suffix != ".mp4":
            raise InputError("videos", f"must be mp4 files with prompts, got {self.path} with {self.prompt!r}")
        if self.dimensions:
            check_names("videos", self.dimensions, DIMENSIONS)


def read_videos(path: Path) -> list[PromptedVideo]:
    """Videos from a JSON Lines file of `{"file": …, "prompt": …}`, with "dimensions" where not all judge them.

    Files are relative to the list.

    Raises:
        InputError: the list cannot be read or has another form, or an entry lacks file or prompt or has another type.
    """
    try:
        entries = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        return [
            PromptedVideo(path.parent / entry["file"], entry["prompt"], tuple(entry.get("dimensions", ())))
            for entry in entries
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        form = 'a line of {"file": text, "prompt": text} for every video'
        raise InputError("list", f"must be {form}; {path} has another: {error!r}") from error


def suite(
    dimensions: Sequence[str], videos_per_prompt: int, seed: int, environment: Path, own: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """The videos to generate: prompt, index, a seed that no other video has, and the dimensions that judge it.

    A video's seed depends on its prompt's place, its index and `seed` alone.

    Args:
        own: prompts that all dimensions judge; None for VBench's standard ones, as the package in `environment` has
            them.

    Raises:
        InputError: a number of videos outside 1 to 25, or no environment.
    """
    if not 1 <= videos_per_prompt <= _MOST_VIDEOS_PER_PROMPT:
        raise InputError("videos_per_prompt", f"must be 1 to {_MOST_VIDEOS_PER_PROMPT}, got {videos_per_prompt}")
    prompts: dict[str, list[str]] = dict.fromkeys(own or (), list(dimensions))
    if own is None:
        manifest(environment)
        (full_info,) = environment.glob("lib/python3*/site-packages/vbench/VBench_full_info.json")
        for entry in json.loads(full_info.read_text(encoding="utf-8")):
            judged = prompts.setdefault(entry["prompt_en"], [])
            judged.extend(name for name in dimensions if name in entry["dimension"])
    return [
        {"prompt": prompt, "index": index, "seed": seed + place * _MOST_VIDEOS_PER_PROMPT + index, "dimensions": names}
        for place, (prompt, names) in enumerate(prompts.items())
        for index in range(videos_per_prompt)
        if names
    ]


@dataclass(frozen=True)
class VBenchScore:
    """VBench's scores of a set of videos in one dimension; 1 is the best.

    Args:
        score: of the set. The package weights all videos equally, but in the two consistencies all frames.
        videos: those that the dimension judges, in the given order; per_video: the score of each.
    """

    score: float
    videos: tuple[PromptedVideo, ...]
    per_video: tuple[float, ...]


def score_videos(
    videos: Sequence[PromptedVideo],
    dimensions: Sequence[str],
    *,
    work_dir: Path,
    timeout: float,
    device: str = "auto",
    environment: Path | None = None,
    weights: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, VBenchScore]:
    """VBench's scores of videos in each dimension.

    A dimension is not computed again if `work_dir` has its score for the same videos, prompts, packages and kind of
    device.

    Args:
        videos: mp4 files; several may have the same prompt.
        dimensions: names from DIMENSIONS.
        work_dir: folder of the JSON files with scores; made if need be.
        timeout: seconds that a dimension may take.
        device: auto, cpu, cuda or cuda:N.
        environment: folder of the environment that `install` made; default: `default_folder()`.
        weights: folder of the files that the package loads; default: `default_weights()`.
        report: called with a line for each dimension.

    Raises:
        InputError: no videos or dimensions, unknown ones, a video that is too short for a dimension or cannot be
            decoded, no environment, a time-out that cannot be used.
        FileNotFoundError: a video does not exist.
        VBenchError: weights are missing, the package failed or took too long, or gave a video no score or an impossible
            one. Scores of earlier dimensions stay in `work_dir`.
    """
    check_names("dimensions", dimensions, DIMENSIONS)
    if not 0 < timeout < math.inf:
        raise InputError("timeout", f"must be above 0 seconds and finite, got {timeout}")
    device, weights = str(choose_device(device)), (weights or installation.default_weights()).absolute()
    environment = environment or installation.default_folder()
    made_of = manifest(environment)
    installation.check_weights(dimensions, weights)
    records, scores = {}, {}
    for name in dimensions:
        judged = tuple(video for video in videos if not video.dimensions or name in video.dimensions)
        if not judged:
            raise InputError("videos", f"must be one or more for {name}, got none")
        hashed = [{"sha256": file_sha256(video.path), "prompt": video.prompt} for video in judged]
        identity = {"dimension": name, "device": device.partition(":")[0], **made_of, "videos": hashed}
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        records[name] = path, *_ = work_dir / f"{name}-{key}.json", judged, identity
        if not path.exists():
            _check_lengths(judged, name, timeout)
    work_dir.mkdir(parents=True, exist_ok=True)
    for name, (path, judged, identity) in records.items():
        if not path.exists():
            score, per_video = _compute(judged, name, timeout, device, environment, weights)
            write_json(path, {**identity, "score": score, "per_video": per_video})
        record = json.loads(path.read_text(encoding="utf-8"))
        scores[name] = VBenchScore(record["score"], judged, tuple(record["per_video"]))
        report(f"{name:<24} {scores[name].score:.4f}  {len(judged)} videos")
    return scores


def _check_lengths(videos: Sequence[PromptedVideo], dimension: str, timeout: float) -> None:
    """Check that every video decodes and has enough frames for a dimension; the package skips what it cannot read."""
    from vmonarch.finetune.data.decode import BadVideo, read_stream

    for path in dict.fromkeys(video.path for video in videos):
        try:
            stream = read_stream(path, timeout)
        except BadVideo as error:
            raise InputError("videos", f"must be ones that can be decoded: {path} {error}") from error
        frames = stream.frames
        # It samples 8 frames a second.
        seen = -(-frames // max(1, round(stream.rate / 8))) if dimension == "dynamic_degree" else frames
        if seen < FEWEST_FRAMES[dimension]:
            fewest = f"which sees {seen} of its frames and needs {FEWEST_FRAMES[dimension]}"
            raise InputError("videos", f"must be longer: {path} is too short for {dimension}, {fewest}")


def _compute(
    videos: Sequence[PromptedVideo], dimension: str, timeout: float, device: str, environment: Path, weights: Path
) -> tuple[float, list[float]]:
    """Run the package on links to the videos; returns the score of all and of each."""
    # The package takes a prompt from a file's name unless it is given one; these names say nothing.
    named = {f"{place:06d}.mp4": video for place, video in enumerate(videos)}
    with tempfile.TemporaryDirectory(prefix="vmonarch-vbench-") as temporary:
        folder, hub = Path(temporary) / "videos", Path(temporary) / "hub" / "checkpoints"
        for made in (folder, hub):
            made.mkdir(parents=True)
        # DINO's code ignores the path that VBench hands it, and would download its weights.
        (hub / "dino_vitbase16_pretrain.pth").symlink_to(weights / "dino_model" / "dino_vitbase16_pretrain.pth")
        for name, video in named.items():
            (folder / name).symlink_to(video.path.absolute())
        prompts = {name: video.prompt for name, video in named.items()}
        job = {"videos": str(folder), "prompts": prompts, "dimension": dimension, "device": device, "output": temporary}
        write_json(Path(temporary) / "job.json", job)
        command = [environment / "bin" / "python", "-I", Path(__file__).with_name("worker.py"), f"{temporary}/job.json"]
        variables = {"VBENCH_CACHE_DIR": str(weights), "TORCH_HOME": temporary, "HF_HUB_OFFLINE": "1"}
        try:
            installation.run([str(word) for word in command], timeout=timeout, variables=variables)
            results = json.loads((Path(temporary) / "scores_eval_results.json").read_text(encoding="utf-8"))
            score, listed = results[dimension]
            found = {Path(entry["video_path"]).name: entry["video_results"] for entry in listed}
            if sorted(found) != list(named) or len(listed) != len(named):
                raise VBenchError(f"gave {len(listed)} scores, not one for each of {len(named)} videos")
            low, high = _RANGES.get(dimension, (0.0, 1.0))
            for name, video in named.items():
                if not low <= found[name] <= high:
                    possible = f"which is not in [{low:g}, {high:g}]"
                    raise VBenchError(f"gave {video.path} the score {found[name]}, {possible}")
            per_video = [float(found[name]) / high for name in named]
            # It must be some weighted mean of the videos' scores, but for their rounding as decimal numbers.
            if not min(per_video) - 1e-6 <= score <= max(per_video) + 1e-6:
                raise VBenchError(f"gave the score {score}, which is no mean of those of the videos")
            return float(score), per_video
        except VBenchError as error:
            raise VBenchError(f"VBench's {dimension} {error}") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise VBenchError(f"VBench's {dimension} gave results of an unknown form: {error}") from error
