"""Methods × prompts × seeds against full attention, with statistics and a report: the library behind `vmonarch eval`.

    from vmonarch.eval.evaluate import EvalConfig, evaluate

    evaluation = evaluate(EvalConfig(prompt_set="embedded", seeds=(0, 1), methods=("vmonarch", "vmonarch-t1")))
    print(evaluation.table(), evaluation.folder / "report.html")

An item is one prompt with one seed. Its folder has the video of every method and `item.json`, which has their numbers
and is written last. So a call that was stopped continues with the missing items, and several processes (RANK and
WORLD_SIZE, as `accelerate launch` sets them) can share the items. The call that finds all items complete writes
`evaluation.json` and `report.html`.
Everything but times and dates is independent of how often a run was stopped and of the number of processes, because
batches are cut before they are shared.

PSNR, SSIM, LPIPS and VMAF are measured on the float frames, before any mp4 encoding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmonarch.configs import InputError, file_sha256
from vmonarch.eval import summary
from vmonarch.eval.render.tables import aligned
from vmonarch.eval.settings import REFERENCE, CompareConfig, EvalConfig, check_names
from vmonarch.files import AtomicFiles, file_name, prepare_output_dir, short_hash
from vmonarch.pipelines import recipes
from vmonarch.pipelines.config import complete
from vmonarch.pipelines.environment import choose_device, choose_dtype, environment
from vmonarch.pipelines.loading import LoadedModel, complete_and_load
from vmonarch.pipelines.model_folder import ModelFolder, find_model
from vmonarch.pipelines.outputs import (
    GenerationError,
    changes,
    frames_sha256,
    next_number,
    source_hashes,
)
from vmonarch.pipelines.processes import Shard
from vmonarch.pipelines.sampling import Batch, sample

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

EVALUATION_FORMAT = "vmonarch-eval-3"
# How much pictures amplify differences, and how they name the kinds of steps.
GAIN = 4
KINDS = {"e": "exact", "a": "approximate", "p": "predicted"}
# Settings that do not affect the numbers of an item.
_FREE = (
    *("output_dir", "device", "offload", "prompt_set", "num_prompts", "baseline"),
    *("vbench", "vbench_timeout", "report_items", "report_megabytes"),
)


@dataclass(frozen=True)
class Item:
    """One prompt with one seed; `name` names its folder."""

    number: int
    prompt: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.number:04d}-{short_hash(self.prompt, self.seed)}"

    def is_done(self, output: Path) -> bool:
        """Whether its folder is complete: its JSON is written last."""
        return (output / "items" / self.name / "item.json").is_file()


@dataclass(frozen=True)
class Evaluation:
    """The output of `evaluate`: its folder, and its record, which is also `evaluation.json` in that folder.

    Args:
        record: None as long as items are missing.
        missing: how many items are missing.
    """

    folder: Path
    record: dict[str, Any] | None
    missing: int

    def table(self) -> str:
        """Markdown table of the means with their intervals, one row per method."""
        assert self.record is not None
        return aligned(*summary.summary_rows(self.record))


def evaluate(
    config: EvalConfig,
    *,
    progress: bool = False,
    model: LoadedModel | None = None,
    command: str = "",
) -> Evaluation:
    """Sample and measure the items that `config.output_dir` lacks; once all are there, write JSON and report.

    With a `CompareConfig`, every call makes a new folder in it, which also gets `0001-side-by-side.mp4` and
    `0001-strips.png` for each prompt and seed.

    Args:
        progress: show progress bars.
        model: a pipeline that was loaded with the same model settings, to save loading it again.
        command: the command line, for the report.

    Raises:
        InputError, ModelError: as `vmonarch.pipelines.generation.generate`; LPIPS, VMAF or VBench cannot be measured;
            the folder holds an evaluation with other settings.
        GenerationError: a video came out constant or with NaN, is missing or damaged.
        OSError: an item could not be written.
    """
    folder = model.folder if model else find_model(config.model, config.revision)
    compares = isinstance(config, CompareConfig)
    shard = Shard() if compares else Shard.of_environment()
    if shard.size > 1 and config.device == "auto" and choose_device("auto").type == "cuda":
        config = dataclasses.replace(config, device=f"cuda:{shard.local_rank}")
    config = complete(config, folder)
    check_measures(config)
    output = prepare_output_dir(config.output_dir)
    if compares:
        output /= f"{next_number(output)}-{short_hash(config.to_dict())}"
        output.mkdir()
    else:
        _check_settings(output, config, folder)
    try:
        numbers = iter(range(1, 1 + len(config.prompts) * len(config.seeds)))
        batches = [[Item(next(numbers), *job) for job in batch] for batch in config.batches()]
        items = [item for batch in batches for item in batch]
        own = [batch for batch in batches[shard.rank :: shard.size] if not all(item.is_done(output) for item in batch)]
        if own:
            from vmonarch.installation import find_transformers, own_processors

            config, model = complete_and_load(config, model)
            # Methods that the pipeline does not support fail here, before minutes are spent.
            for method in config.methods:
                recipes.apply(model.pipe, method)
                bound = (one for part in find_transformers(model.pipe).values() for one in own_processors(part))
                if method.options.get("adapter") is None and any(ours.spec.LEARNS for _, ours, _ in bound):
                    warnings.warn(f"{method.label} has learnt nothing: finetune it, give adapter=FILE", stacklevel=2)
            _Run(config, model, output, progress, environment(model.device)).run(own, len(items))
        missing = sum(not item.is_done(output) for item in items)
        return Evaluation(output, None, missing) if missing else _finish(config, folder, output, items, command)
    finally:
        if compares and not any(output.glob("items/*/item.json")):
            shutil.rmtree(output)


def check_measures(config: EvalConfig) -> None:
    """Raise InputError, before anything is sampled, if a requested LPIPS, VMAF or VBench cannot be measured."""
    from vmonarch.eval import similarity

    assert config.height is not None and config.width is not None
    needed: dict[str, Callable[[], Any]] = {"lpips": similarity.lpips_weights, "vmaf": similarity.vmaf_program}
    for name, least in (("lpips", similarity.LPIPS_LEAST), ("vmaf", similarity.VMAF_LEAST)):
        if getattr(config, name):
            needed[name]()
            if min(config.height, config.width) < least:
                problem = f"needs frames of at least {least}×{least} pixels, got {config.width}×{config.height}"
                raise InputError(name, problem)
    if config.vbench:
        from vmonarch.eval.vbench import installation, scoring

        check_names("vbench", config.vbench, scoring.DIMENSIONS)
        try:
            installation.manifest(installation.default_folder())
        except InputError as error:
            raise InputError("vbench", f"cannot be scored: its {error}") from error


def _check_settings(output: Path, config: EvalConfig, folder: ModelFolder) -> None:
    """Write `settings.json` into a new folder, or check that the one there is the same: all settings that an item's
    numbers depend on, but not versions and machine.

    Raises:
        InputError: the settings differ, and how; or something else is in the folder.
    """
    settings = {key: value for key, value in config.to_dict().items() if key not in _FREE}
    dtype = choose_dtype(config.dtype, choose_device(config.device))
    settings |= {"format": EVALUATION_FORMAT, "dtype": str(dtype).removeprefix("torch.")}
    settings |= source_hashes(config, folder)
    path = output / "settings.json"
    others = [entry.name for entry in output.iterdir() if not entry.name.startswith(".")]
    # If there are settings by now, another call has begun meanwhile and these are its files.
    if others and not path.exists():
        raise InputError("output_dir", f"must be empty or hold an evaluation; {str(output)!r} holds something else")
    with contextlib.suppress(FileExistsError), AtomicFiles() as files:
        files.stage(path).write_text(summary.json_text(settings), encoding="utf-8")
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError("output_dir", f"holds {path}, which cannot be read: {error}; give another folder") from error
    if changed := list(changes(before, settings)):
        raise InputError("output_dir", f"{str(output)!r} holds an evaluation with other settings: {'; '.join(changed)}")


@dataclass(frozen=True)
class _Run:
    """The sampling of items by one process."""

    config: EvalConfig
    model: LoadedModel
    output: Path
    progress: bool
    environment: dict[str, Any]

    def run(self, batches: Sequence[Sequence[Item]], total: int) -> None:
        """Make batches of items."""
        (self.output / "items").mkdir(exist_ok=True)
        self._warm_up([item.prompt for item in batches[0]], [item.seed for item in batches[0]])
        for batch in batches:
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                self._make(batch, total, pool)

    def _warm_up(self, prompts: Sequence[str], seeds: Sequence[int]) -> None:
        """Run one step of every method, and one decoding, at the full shape of a batch.

        So later times include neither compilation nor what the first call of a process initialises. A method that
        compiles runs all its steps, because each kind of step compiles something and the last kind may come late.
        """
        for method in self.config.methods:
            title = f"warm-up, {method.label}" if self.progress else None
            steps = self.config.steps if method.additions.compile else 1
            # A single step could be a dense one, which would warm up nothing of the method.
            warmed = method.without_dense() if steps == 1 else method
            recipes.apply(self.model.pipe, warmed)
            last = method is self.config.methods[-1]
            sample(self.model, self.config, prompts, seeds, steps=steps, decode=last, progress=title)

    def _make(self, batch: Sequence[Item], total: int, pool: Executor) -> None:
        """Sample a batch; measure and write its missing items."""
        prompts, seeds, samples = [item.prompt for item in batch], [item.seed for item in batch], {}
        for method in self.config.methods:
            recipes.apply(self.model.pipe, method)
            title = f"item {batch[0].number} of {total}, {method.label}" if self.progress else None
            samples[method.label] = sample(self.model, self.config, prompts, seeds, progress=title)
        for index, item in enumerate(batch):
            if not item.is_done(self.output):
                frames = {label: result.frames[index] for label, result in samples.items()}
                rows = list(pool.map(partial(self._measured, item, frames, samples), frames))
                self._write(item, frames, rows, pool)

    def _measured(
        self, item: Item, frames: Mapping[str, torch.Tensor], samples: Mapping[str, Batch], label: str
    ) -> dict[str, Any]:
        """A method's row: all measurements of its video that need no encoding.

        Raises:
            GenerationError: the video is constant or holds NaN.
        """
        from vmonarch.eval import prompt_score, similarity
        from vmonarch.pipelines.video_io import VideoError, check_frames

        assert self.config.steps is not None
        video, result = frames[label], samples[label]
        try:
            check_frames(video)
        except VideoError as error:
            what = f"method {label}, prompt {item.prompt[:40]!r}, seed {item.seed}"
            raise GenerationError(f"{what}: {error}") from error
        row = {
            "method": label,
            **dict.fromkeys((*summary.MEASURES, "exact_steps", "errors", "predicted_steps")),
            # Without a report, the method is the model's own attention.
            "attention_work": 1.0 if result.report is None else result.report.work,
            # A batch's time is divided evenly among its videos.
            "seconds": result.seconds["total"] / len(result.frames),
            "transformer_seconds_per_step": result.seconds["transformer"] / len(result.frames) / self.config.steps,
            "prompt_score": prompt_score.prompt_score(video, item.prompt),
            "permanence": prompt_score.permanence(video, item.prompt),
            "frames_sha256": frames_sha256(video),
        }
        if result.report is not None:
            exact, errors = result.report.exact, result.report.exact.values()
            row |= {"exact_steps": [*exact], "errors": [*errors], "predicted_steps": [*result.report.predicted]}
        if label != REFERENCE:
            pair = [frames[name].to(self.model.device) for name in (label, REFERENCE)]
            row |= similarity.similarity(*pair)
            for name in ("lpips", "vmaf"):
                row |= getattr(similarity, name)(*pair) if getattr(self.config, name) else {}
        return summary.json_values(row)

    def _write(
        self, item: Item, frames: Mapping[str, torch.Tensor], rows: Sequence[dict[str, Any]], pool: Executor
    ) -> None:
        """Write an item's videos, then the JSON that completes it."""
        from vmonarch.pipelines.video_io import VideoError, encode_video, to_uint8

        folder = self.output / "items" / item.name
        folder.mkdir(parents=True, exist_ok=True)
        pictures = {label: to_uint8(video) for label, video in frames.items()}

        def encode(row: dict[str, Any]) -> dict[str, Any]:
            """Write a method's video; return its row with the file's name and hash."""
            assert self.config.fps is not None
            path = paths[row["method"]]
            encode_video(path, pictures[row["method"]], self.config.fps)
            return row | {"video": f"{file_name(row['method'])}.mp4", "video_sha256": file_sha256(path)}

        # An item without its JSON was left by a process that was killed: its videos are replaced.
        with AtomicFiles(overwrite=True) as files:
            paths = {label: files.stage(folder / f"{file_name(label)}.mp4") for label in frames}
            try:
                results = list(pool.map(encode, rows))
                if isinstance(self.config, CompareConfig):
                    write_pictures(self.config, self.output, files, item, pictures, rows)
            except VideoError as error:
                raise GenerationError(f"item {item.name}: {error}") from error
            record = {
                "format": EVALUATION_FORMAT,
                "prompt": item.prompt,
                "seed": item.seed,
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "results": results,
                "environment": self.environment,
            }
            files.stage(folder / "item.json").write_text(summary.json_text(record), encoding="utf-8")
        for left in folder.glob(".*.partial*"):
            left.unlink(missing_ok=True)


def write_pictures(
    config: CompareConfig,
    target: Path,
    files: AtomicFiles,
    item: Item,
    pictures: Mapping[str, NDArray[np.uint8]],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Write the methods' videos of an item, [F, H, W, 3] by label, side by side, as mp4 and as strips.

    Below a method's video are its steps and its difference from the reference.
    """
    from vmonarch.pipelines.video_io import difference, encode_video, side_by_side, strips, with_steps

    assert config.fps is not None and config.steps is not None
    notes: dict[str, str] = {}
    shown: dict[str, NDArray[np.uint8] | None] = {}
    gaps: dict[str, NDArray[np.uint8] | None] = {" ": None}
    for row in rows:
        label = row["method"]
        close = "reference" if row["psnr"] is None else f"PSNR {float(row['psnr']):.1f} dB · SSIM {row['ssim']:.3f}"
        notes[label] = f"{close} · {row['seconds']:.1f} s"
        exact, predicted = (row[key] or () for key in ("exact_steps", "predicted_steps"))
        # Methods that are exact throughout do not count their steps.
        exact = range(config.steps) if row["attention_work"] == 1 else exact
        steps = "".join("e" if n in exact else "p" if n in predicted else "a" for n in range(config.steps))
        shown[label] = with_steps(pictures[label], steps)
        if label != REFERENCE:
            gap = difference(pictures[label], pictures[REFERENCE], GAIN)
            gaps[name := f"{label}: {GAIN} times the difference"] = with_steps(gap, "")
            notes[name] = "steps: " + ", ".join(f"{steps.count(k)} {what}" for k, what in KINDS.items() if k in steps)
    video = side_by_side(shown | gaps, notes=notes, columns=len(pictures))
    encode_video(files.stage(target / f"{item.number:04d}-side-by-side.mp4"), video, config.fps)
    picture = strips(pictures, notes=notes, title=f"{item.prompt} · seed {item.seed}")
    picture.save(files.stage(target / f"{item.number:04d}-strips.png"))


def _finish(config: EvalConfig, folder: ModelFolder, output: Path, items: Sequence[Item], command: str) -> Evaluation:
    """Collect all items, and write `evaluation.json` and `report.html`.

    Raises:
        GenerationError: an item's record cannot be read, or a video is missing or no longer the one that was measured.
    """
    from vmonarch.eval.report import report
    from vmonarch.eval.vbench import PromptedVideo, score_videos

    records: list[dict[str, Any]] = []
    environments: list[dict[str, Any]] = []
    for item in items:
        place = output / "items" / item.name
        try:
            found = json.loads((place / "item.json").read_text(encoding="utf-8"))
            if found["format"] != EVALUATION_FORMAT:
                raise ValueError(f"its format is {found['format']}, this version reads {EVALUATION_FORMAT}")
            for row in found["results"]:
                if file_sha256(place / row["video"]) != row["video_sha256"]:
                    raise ValueError(f"{place / row['video']} is not the video that was measured")
            about = found.pop("environment")
        except (OSError, ValueError, KeyError, TypeError) as error:
            again = f"remove {place} and run the command again to make it anew"
            raise GenerationError(f"{place / 'item.json'} cannot be used: {error}; {again}") from error
        records.append({"number": item.number, "folder": f"items/{item.name}", **found})
        known = next((entry for entry in environments if entry["environment"] == about), None)
        if known is None:
            environments.append(known := {"environment": about, "items": []})
        known["items"].append(item.number)
    labels = config.labels
    baseline = config.baseline or ("vmonarch" if "vmonarch" in labels else labels[min(1, len(labels) - 1)])
    vbench: dict[str, dict[str, float]] = {}
    for label in labels if config.vbench else ():
        files = [(record, row) for record in records for row in record["results"] if row["method"] == label]
        videos = [PromptedVideo(output / item["folder"] / row["video"], item["prompt"]) for item, row in files]
        scores = score_videos(videos, config.vbench, work_dir=output / "vbench", timeout=config.vbench_timeout)
        vbench[label] = {dimension: float(scores[dimension].score) for dimension in config.vbench}
    work: dict[str, list[Any]] = {label: summary.values_of(records, label, "attention_work") for label in labels}
    record: dict[str, Any] = {
        "format": EVALUATION_FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "reference": REFERENCE,
        "baseline": baseline,
        "methods": labels,
        "measures": {key: dataclasses.asdict(measure) for key, measure in summary.MEASURES.items()},
        "intervals": summary.INTERVALS,
        "attention_flops": {label: None if None in of else statistics.fmean(of) for label, of in work.items()},
        "statistics": summary.statistics(records, labels),
        "differences": summary.differences(records, labels, baseline),
        "vbench": vbench,
        "items": records,
        # Folder and device mean nothing on another machine.
        "config": {key: value for key, value in config.to_dict().items() if key not in ("output_dir", "device")},
        "model_files": folder.fingerprint(),
        "environments": environments,
    }
    text = summary.json_text(record | summary.document_table(record))
    # The form in which it is read back: JSON has no tuples.
    record = json.loads(text)
    page = report(record, output)
    with AtomicFiles(overwrite=True) as made:
        for name, contents in {"evaluation.json": text, "report.html": page}.items():
            made.stage(output / name).write_text(contents, encoding="utf-8")
    return Evaluation(output, record, 0)
