"""The same seeds through full attention and other methods: the library behind `vmonarch compare`.

    from vmonarch.eval.compare import CompareConfig, compare

    comparison = compare(CompareConfig(prompts=("a red circle moving right",), methods=("vmonarch", "vmonarch-t1")))
    print(comparison.table())

PSNR and SSIM are measured on the float frames, before any mp4 encoding. Before anything is timed, every method runs one
step of the same shape, so that none is charged for compilation or for what the first call of a process initialises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vmonarch.configs import InputError
from vmonarch.configs.methods import AttentionMethod, resolve_method
from vmonarch.eval.render.table import aligned, shown_number
from vmonarch.files import AtomicFiles, file_name, short_hash
from vmonarch.pipelines import recipes
from vmonarch.pipelines.config import SamplingConfig
from vmonarch.pipelines.loading import LoadedModel, complete_and_load
from vmonarch.pipelines.model_folder import PROXY_RECORD
from vmonarch.pipelines.outputs import GenerationError, keep_elsewhere, prepare_output_dir, reserve_number
from vmonarch.pipelines.records import facts, frames_sha256
from vmonarch.pipelines.sampling import Batch, decode, denoise, sample

if TYPE_CHECKING:
    import torch

Methods = TypeVar("Methods", bound="MethodsConfig")
Given = TypeVar("Given")
Found = TypeVar("Found")

# Videos that are measured and written at once, at most.
THREADS = 8
COMPARISON_FORMAT = "vmonarch-compare-1"
# Key of a result, heading, decimals: the columns of the table.
_COLUMNS = (
    ("seconds", "s/video", 2),
    ("transformer_seconds_per_step", "transformer s/step", 3),
    ("psnr", "PSNR dB", 2),
    ("ssim", "SSIM", 4),
    ("first_frame_psnr", "first PSNR dB", 2),
    ("first_frame_ssim", "first SSIM", 4),
    ("prompt_score", "prompt score", 2),
)


@dataclass(frozen=True)
class MethodsConfig(SamplingConfig):
    """`SamplingConfig`, plus the methods that sample.

    Args:
        methods: as `GenerateConfig.attention` takes them; the reference is added in front when it is missing.
        reference: the method that the others are measured against.
    """

    methods: tuple[Any, ...] = ("full", "vmonarch")
    reference: Any = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.methods, (str, bytes)) or not isinstance(self.methods, Sequence):
            raise InputError("methods", f"must be a list of methods, got {self.methods!r}")
        reference = _method(self.reference, "reference")
        methods = [_method(spec, "methods") for spec in self.methods]
        labels = [method.label for method in methods]
        repeated = sorted({label for label in labels if labels.count(label) > 1})
        if repeated:
            raise InputError("methods", f"must differ; repeated: {', '.join(repeated)}")
        others = [method for method in methods if method.label != reference.label]
        object.__setattr__(self, "reference", reference)
        object.__setattr__(self, "methods", (reference, *others))

    @property
    def attention_methods(self) -> Mapping[str, Sequence[AttentionMethod]]:
        """As in `SamplingConfig`."""
        return {"reference": self.methods[:1], "methods": self.methods[1:]}

    @property
    def labels(self) -> list[str]:
        """What the methods are called, the reference first."""
        return [method.label for method in self.methods]


@dataclass(frozen=True)
class CompareConfig(MethodsConfig):
    """`MethodsConfig`, plus what to write.

    Args:
        save_videos: also write every method's video by itself.
        strip_frames: columns of the PNG strips.
    """

    output_dir: str = "outputs/compare"
    save_videos: bool = False
    strip_frames: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.strip_frames, bool) or not isinstance(self.strip_frames, int) or self.strip_frames < 1:
            raise InputError("strip_frames", f"must be an integer of at least 1, got {self.strip_frames!r}")


def _method(spec: Any, argument: str) -> AttentionMethod:
    return spec if isinstance(spec, AttentionMethod) else resolve_method(spec, argument=argument, recipes=True)


@dataclass(frozen=True)
class MethodResult:
    """One video through one method.

    Args:
        seconds: for text, denoising and decoding of this video; a batch's time is shared out evenly.
        transformer_seconds_per_step: in the transformers' forward calls, guidance included, per denoising step.
        psnr, ssim, first_frame_psnr, first_frame_ssim: against the reference, of all frames and of the first; None for
            the reference itself.
        prompt_score: share of colour, shape and direction that the pixels show as the prompt asks; None where the
            prompt's words or the model are not the embedded model's.
        frames_sha256: of the float frames.
    """

    method: str
    seconds: float
    transformer_seconds_per_step: float
    psnr: float | None
    ssim: float | None
    first_frame_psnr: float | None
    first_frame_ssim: float | None
    prompt_score: float | None
    frames_sha256: str


@dataclass(frozen=True)
class Comparison:
    """What `compare` made: its folder and its record, which is also `comparison.json` in that folder."""

    folder: Path
    record: dict[str, Any]

    def table(self) -> str:
        """Markdown table of the means, one row a method."""
        return format_table(self.record["methods"], self.record["means"], self.record["reference"])


def format_table(methods: Sequence[str], means: dict[str, dict[str, Any]], reference: str) -> str:
    """Markdown table with one row for each of `methods`; columns that hold nothing are left out."""
    columns = [column for column in _COLUMNS if any(means[method][column[0]] is not None for method in methods)]
    rows = []
    for method in methods:
        cells = [shown_number(means[method][key], decimals) for key, _, decimals in columns]
        rows.append([method + (" (reference)" if method == reference else ""), *cells])
    return aligned(["method", *(heading for _, heading, _ in columns)], rows)


def prompt_scorer(model: LoadedModel) -> Callable[[torch.Tensor, str], float | None]:
    """A function of frames [F, 3, H, W] and prompt to the prompt score (`vmonarch.eval.prompt_score.PromptMatch`).

    It answers None for models other than the embedded one and its proxies (`eval/studies/proxy.py`), and for prompts in
    other words than those models'.
    """
    if model.folder.name != "embedded" and not (model.folder.path / PROXY_RECORD).is_file():
        return lambda frames, prompt: None
    from vmonarch.eval.prompt_score import parse_prompt, score_video

    def score(frames: torch.Tensor, prompt: str) -> float | None:
        if len(frames) < 2 or not parse_prompt(prompt):
            return None
        return score_video(frames.permute(0, 2, 3, 1), prompt).score

    return score


def load_for(config: Methods, model: LoadedModel | None) -> tuple[Methods, LoadedModel]:
    """The completed config and its pipeline; methods that the pipeline cannot carry show before minutes are spent.

    Args:
        model: a pipeline loaded before with the same model settings, or None.

    Raises:
        InputError, ModelError: as `vmonarch.pipelines.generation.generate`.
    """
    config, model = complete_and_load(config, model)
    for method in config.methods:
        recipes.apply(model.pipe, method, steps=config.steps)
    return config, model


def warm_up(model: LoadedModel, config: MethodsConfig, batch: Sequence[tuple[str, int]], *, progress: bool) -> None:
    """One step of every method, and one decoding, at the full shape of a batch of prompts and seeds.

    All steps of a method that compiles: each kind of step compiles something, and the last kind may come late.
    """
    prompts, seeds = [prompt for prompt, _ in batch], [seed for _, seed in batch]
    latents = None
    for method in config.methods:
        title = f"warm-up, {method.label}" if progress else None
        steps = config.steps if method.stack.compile else 1
        if steps == 1:
            # The only step may be a dense one, which would warm up nothing of the method.
            method = method.without_dense()
        recipes.apply(model.pipe, method, steps=config.steps)
        latents = denoise(model, config, prompts, seeds, steps=steps, progress=title).latents
    assert latents is not None
    decode(model.pipe, latents[:1])


def sample_methods(
    model: LoadedModel, config: MethodsConfig, batch: Sequence[tuple[str, int]], *, title: str | None
) -> dict[str, Batch]:
    """A batch of prompts and seeds through every method, by the methods' labels.

    Args:
        title: of the progress bar; None for none.
    """
    prompts, seeds = [prompt for prompt, _ in batch], [seed for _, seed in batch]
    samples: dict[str, Batch] = {}
    for method in config.methods:
        recipes.apply(model.pipe, method, steps=config.steps)
        shown = None if title is None else f"{title}, {method.label}"
        samples[method.label] = sample(model, config, prompts, seeds, progress=shown)
    return samples


def in_threads(function: Callable[[Given], Found], items: Iterable[Given]) -> list[Found]:
    """`function` of every item, in their order, several at a time.

    Raises:
        whatever the function raises for the first of the items that fail.
    """
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, items))


def measure(
    config: MethodsConfig,
    prompt: str,
    seed: int,
    frames: Mapping[str, torch.Tensor],
    samples: Mapping[str, Batch],
    score: Callable[[torch.Tensor, str], float | None],
    device: torch.device,
) -> list[MethodResult]:
    """Measure one video of every method against the reference's.

    Args:
        frames: the video of each method, [F, 3, H, W], out of its batch in `samples`.
        score: see `prompt_scorer`.
        device: where PSNR and SSIM are computed.

    Raises:
        GenerationError: a video is constant or holds NaN; its raw frames are kept, at the path in the message.
    """
    from safetensors.torch import save_file

    from vmonarch.eval.similarity import Similarity, similarity
    from vmonarch.pipelines.video_io import VideoError, check_frames

    reference = frames[config.reference.label].to(device)

    def measured(label: str) -> MethodResult:
        assert config.steps is not None
        video = frames[label]
        try:
            check_frames(video)
        except VideoError as error:
            kept = keep_elsewhere(
                "frames.raw.safetensors", lambda path: save_file({"frames": video.contiguous()}, path)
            )
            raise GenerationError(f"method {label}, prompt {prompt[:40]!r}, seed {seed}: {error}; {kept}") from error
        close: dict[str, float | None] = dict.fromkeys(Similarity.__dataclass_fields__)
        if label != config.reference.label:
            close |= vars(similarity(video.to(device), reference))
        result = samples[label]
        batch = len(result.frames)
        return MethodResult(
            method=label,
            seconds=result.seconds["total"] / batch,
            transformer_seconds_per_step=result.seconds["transformer"] / batch / config.steps,
            **close,
            prompt_score=score(video, prompt),
            frames_sha256=frames_sha256(video),
        )

    return in_threads(measured, frames)


def compare(config: CompareConfig, *, progress: bool = False, model: LoadedModel | None = None) -> Comparison:
    """Sample every prompt and seed with every method, measure them and write table, videos, strips and JSON.

    In a new folder of `config.output_dir`: `comparison.json`, `table.md`, and for each prompt and seed
    `0001-side-by-side.mp4` and `0001-strips.png`. The JSON grows video by video and is marked complete at the end.

    Args:
        progress: show progress bars.
        model: a pipeline loaded before with the same model settings, to save loading it again.

    Raises:
        InputError, ModelError: as `vmonarch.pipelines.generation.generate`.
        GenerationError: a video came out constant or with NaN (its raw frames are kept, at the path in the message),
            is missing, or could not be written.
    """
    config, model = load_for(config, model)
    output = prepare_output_dir(config.output_dir)
    with reserve_number(output, 1 if config.overwrite else None) as number:
        target = output / f"{number}-{short_hash(config.to_dict())}"
        target.mkdir(exist_ok=config.overwrite)
        try:
            with recipes.room_for_versions(config.methods):
                return _Run(config, model, target, progress).run()
        finally:
            if not any(target.iterdir()):
                target.rmdir()


class _Run:
    """One comparison while it runs."""

    def __init__(self, config: CompareConfig, model: LoadedModel, target: Path, progress: bool) -> None:
        self.config, self.model, self.target, self.progress = config, model, target, progress
        self.videos: list[dict[str, Any]] = []
        self.score = prompt_scorer(model)
        self.facts = facts(config, model)

    def run(self) -> Comparison:
        batches = self.config.batches()
        warm_up(self.model, self.config, batches[0], progress=self.progress)
        for batch in batches:
            title = f"video {len(self.videos) + 1} of {sum(map(len, batches))}" if self.progress else None
            samples = sample_methods(self.model, self.config, batch, title=title)
            for index, (prompt, seed) in enumerate(batch):
                self._finish_video(prompt, seed, index, len(batch), samples)
        with self._keeping_numbers():
            record = self._write_record(complete=True)
        return Comparison(self.target, record)

    def _finish_video(self, prompt: str, seed: int, index: int, batch: int, samples: dict[str, Batch]) -> None:
        """Measure and write the `index`-th video of a batch."""
        frames = {label: result.frames[index] for label, result in samples.items()}
        results = measure(self.config, prompt, seed, frames, samples, self.score, self.model.device)
        number = f"{len(self.videos) + 1:04d}"
        entry: dict[str, Any] = {
            "prompt": prompt,
            "seed": seed,
            "files": {},
            "results": [json_values(dataclasses.asdict(result)) for result in results],
            "stage_seconds_of_batch": {label: result.seconds for label, result in samples.items()},
            "batch_size": batch,
        }
        self.videos.append(entry)
        with self._keeping_numbers():
            entry["files"] = self._write_pictures(number, prompt, seed, frames, results)
            self._write_record(complete=False)

    @contextlib.contextmanager
    def _keeping_numbers(self) -> Iterator[None]:
        """Keep what was measured elsewhere if the block cannot write."""
        try:
            yield
        except OSError as error:
            text = json_text(self._record(complete=False))
            kept = keep_elsewhere("comparison.json", lambda path: path.write_text(text, encoding="utf-8"))
            raise GenerationError(f"{self.target} cannot be written to: {error}; {kept}") from error

    def _write_pictures(
        self, number: str, prompt: str, seed: int, frames: dict[str, torch.Tensor], results: Sequence[MethodResult]
    ) -> dict[str, Any]:
        """Side-by-side video, strips and, if asked for, every method's video; returns their names."""
        from vmonarch.pipelines.video_io import VideoError, encode_video, side_by_side, strips, to_uint8
        from vmonarch.pipelines.video_io import verify_video as verify

        assert self.config.fps is not None
        pictures = {label: to_uint8(video) for label, video in frames.items()}
        notes = {result.method: _note(result) for result in results}
        files: dict[str, Any] = {"side_by_side": f"{number}-side-by-side.mp4", "strips": f"{number}-strips.png"}
        videos = {files["side_by_side"]: side_by_side(pictures, notes=notes)}
        if self.config.save_videos:
            files["videos"] = {label: f"{number}-{file_name(label)}.mp4" for label in pictures}
            videos |= {files["videos"][label]: video for label, video in pictures.items()}
        try:
            with AtomicFiles(overwrite=self.config.overwrite) as staged:
                for name, video in videos.items():
                    path = staged.stage(self.target / name)
                    encode_video(path, video, self.config.fps)
                    verify(path, video)
                picture = strips(pictures, notes=notes, title=f"{prompt} · seed {seed}", count=self.config.strip_frames)
                picture.save(staged.stage(self.target / files["strips"]))
        except VideoError as error:
            raise GenerationError(str(error)) from error
        return files

    def _record(self, *, complete: bool) -> dict[str, Any]:
        from vmonarch.pipelines.environment import peak_memory_bytes

        model = self.model
        labels = self.config.labels
        return {
            "format": COMPARISON_FORMAT,
            "complete": complete,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "reference": self.config.reference.label,
            "methods": labels,
            "metrics": "PSNR (dB, pooled MSE) and SSIM (11×11 Gaussian, sigma 1.5) on float frames before mp4 encoding",
            "timing": "per video, after one warm-up step of every method; transformer time includes guidance",
            "means": means(self.videos, labels),
            "videos": self.videos,
            "config": self.config.to_dict(),
            **self.facts,
            "seconds_to_load": model.seconds,
            "peak_memory_bytes": peak_memory_bytes(model.device),
        }

    def _write_record(self, *, complete: bool) -> dict[str, Any]:

        record = self._record(complete=complete)
        # The record is this run's own: it replaces what it wrote itself a video ago.
        with AtomicFiles(overwrite=True) as files:
            files.stage(self.target / "comparison.json").write_text(json_text(record), encoding="utf-8")
            if complete:
                table = format_table(record["methods"], record["means"], record["reference"])
                files.stage(self.target / "table.md").write_text(table + "\n", encoding="utf-8")
        return record


def means(videos: Sequence[dict[str, Any]], labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Mean of every measure over the videos, for each method.

    Raises:
        GenerationError: a video lacks a method, or only some of a method's videos have a measure.
    """
    table: dict[str, dict[str, Any]] = {}
    for label in labels:
        rows = [result for video in videos for result in video["results"] if result["method"] == label]
        if len(rows) != len(videos):
            raise GenerationError(f"method {label} has {len(rows)} results for {len(videos)} videos")
        table[label] = {"videos": len(rows)}
        for key, _, _ in _COLUMNS:
            values = [float(row[key]) for row in rows if row[key] is not None]
            # Prompts in words of their own have no score; everything else is measured for all videos or for none.
            if key != "prompt_score" and len(values) not in (0, len(rows)):
                raise GenerationError(f"method {label} has {key} for {len(values)} of {len(rows)} videos")
            table[label][key] = sum(values) / len(values) if values else None
        table[label]["prompts_scored"] = sum(row["prompt_score"] is not None for row in rows)
        table[label] = json_values(table[label])
    return table


def json_text(record: dict[str, Any]) -> str:
    """A record as files hold it.

    Raises:
        ValueError: a number is not finite.
    """
    return json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def json_values(values: dict[str, Any]) -> dict[str, Any]:
    """`values`, with what JSON lacks as text: "inf", the PSNR of identical videos, and "-inf", a gap to it."""
    return {key: str(value) if value in (math.inf, -math.inf) else value for key, value in values.items()}


def _note(result: MethodResult) -> str:
    spent = f"{result.seconds:.1f} s"
    if result.psnr is None:
        return f"reference · {spent}"
    return f"PSNR {result.psnr:.1f} dB · SSIM {result.ssim:.3f} · {spent}"
