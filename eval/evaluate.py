"""Methods × prompts × seeds against full attention, with statistics and a report: the library behind `vmonarch eval`.

    from vmonarch.eval.evaluate import EvalConfig, evaluate

    evaluation = evaluate(EvalConfig(prompt_set="embedded", seeds=(0, 1), methods=("vmonarch", "vmonarch-t1")))
    print(evaluation.table(), evaluation.folder / "report.html")

An item is one prompt with one seed. Its folder has the video of every method and `item.json` with their numbers, and
appears complete or not at all: a call that was stopped goes on with the items that are missing, several processes
(RANK and WORLD_SIZE, as `accelerate launch` sets them) share the items out, and calls that run at the same time leave
each other's alone. Whichever call finds all of them there writes `evaluation.json`, `table.md` and `report.html`.
Everything but times and dates is the same however often it was stopped and whatever the number of processes: batches
are cut before they are shared out.

PSNR, SSIM and LPIPS are measured on the float frames before any mp4 encoding, and (`mp4_…`) on what is read back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock, Timeout

from vmonarch.configs import InputError, file_sha256
from vmonarch.eval import summary
from vmonarch.eval.methods import load_for, prompt_scorer, sample_methods, warm_up
from vmonarch.eval.render.table import aligned
from vmonarch.eval.settings import EvalConfig
from vmonarch.files import AtomicFiles, file_name, short_hash
from vmonarch.pipelines import recipes
from vmonarch.pipelines.config import complete
from vmonarch.pipelines.environment import choose_device, choose_dtype
from vmonarch.pipelines.loading import LoadedModel
from vmonarch.pipelines.model_folder import ModelFolder, find_model
from vmonarch.pipelines.outputs import GenerationError, frames_sha256, keep_elsewhere, lora_sha256, prepare_output_dir
from vmonarch.pipelines.processes import Shard
from vmonarch.pipelines.sampling import Batch, denoise

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    # Writes more of an item, with its files: pictures by method, and the methods' rows.
    Also = Callable[[AtomicFiles, "Item", Mapping[str, NDArray[np.uint8]], Mapping[str, Mapping[str, Any]]], None]

Given = TypeVar("Given")
Found = TypeVar("Found")

EVALUATION_FORMAT = "vmonarch-eval-1"
# Settings that change no number of an item.
_FREE = (
    *("output_dir", "overwrite", "device", "offload", "prompt_set", "num_prompts", "baseline"),
    *("vbench", "vbench_timeout", "report_items", "report_megabytes"),
)
# These say nothing of an evaluation on another machine.
_LOCAL = ("output_dir", "overwrite", "device")
# Videos that are measured and written at once, at most.
_THREADS = 8


@dataclass(frozen=True)
class Item:
    """One prompt with one seed; `name` is that of its folder."""

    number: int
    prompt: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.number:04d}-{short_hash(self.prompt, self.seed)}"


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` made: its folder, and its record, which is also `evaluation.json` in that folder.

    Args:
        record: None as long as items are missing.
        missing: how many.
    """

    folder: Path
    record: dict[str, Any] | None
    missing: int

    def table(self) -> str:
        """Markdown table of the means with their intervals, one row a method; without those of decoded frames."""
        assert self.record is not None
        measures = [key for key in summary.MEASURES if not key.startswith("mp4_")]
        return aligned(*summary.summary_rows(self.record, measures))


def evaluate(
    config: EvalConfig,
    *,
    progress: bool = False,
    model: LoadedModel | None = None,
    shard: Shard | None = None,
    command: str = "",
) -> Evaluation:
    """Sample and measure the items that `config.output_dir` lacks; once all are there, write JSON, table and report.

    Args:
        progress: show progress bars.
        model: a pipeline loaded before with the same model settings, to save loading it again.
        shard: which share of the items is this process's; by default what the environment says.
        command: how it was called, for the report.

    Raises:
        InputError, ModelError: as `vmonarch.pipelines.generation.generate`; LPIPS or VBench cannot be measured; the
            folder holds an evaluation with other settings.
        GenerationError: a video came out constant or with NaN (its raw frames are kept, at the path in the message), is
            missing, damaged, or could not be written.
    """
    if config.overwrite:
        raise InputError("overwrite", "cannot be used: an evaluation goes on where it stopped; give another folder")
    check_measures(config)
    shard = shard or Shard.of_environment()
    if shard.size > 1 and config.device == "auto" and choose_device("auto").type == "cuda":
        config = dataclasses.replace(config, device=f"cuda:{shard.local_rank}")
    folder = model.folder if model else find_model(config.model, config.revision)
    config = complete(config, folder)
    output = prepare_output_dir(config.output_dir)
    _check_settings(output, _settings(config, folder))
    return run_items(config, folder, output, progress=progress, model=model, shard=shard, command=command)


def check_measures(config: EvalConfig) -> None:
    """Raise InputError if LPIPS or VBench is asked for and cannot be measured: before anything is sampled."""
    from vmonarch.eval.similarity import alexnet_weights

    if config.lpips:
        alexnet_weights()
    if config.vbench:
        from vmonarch.eval.vbench import installation, scoring

        scoring.check_dimensions(config.vbench, "vbench")
        try:
            installation.manifest(installation.default_folder())
        except InputError as error:
            raise InputError("vbench", f"cannot be scored: its {error}") from error


def run_items(
    config: EvalConfig,
    folder: ModelFolder,
    output: Path,
    *,
    progress: bool = False,
    model: LoadedModel | None = None,
    shard: Shard | None = None,
    command: str = "",
    also: Also | None = None,
) -> Evaluation:
    """Make the items that are missing in `output`, and the report if none is left.

    Args:
        config: completed.
        folder: of the model.
        also: writes more of every item.

    Raises:
        InputError, ModelError, GenerationError: see `evaluate`.
    """
    shard = shard or Shard()
    jobs = [Item(number, *job) for number, job in enumerate((job for b in config.batches() for job in b), start=1)]
    batches = [jobs[i : i + config.batch_size] for i in range(0, len(jobs), config.batch_size)]
    left = [n for n, batch in enumerate(batches) if not all(is_done(output, item) for item in batch)]
    own = [batches[n] for n in left if n % shard.size == shard.rank]
    if own:
        config, model = load_for(config, model)
        # What is counted is the same for all processes, so the first that has anything to do counts.
        counts = shard.rank == min(n % shard.size for n in left)
        with recipes.room_for_versions(config.methods):
            _Run(config, model, output, progress, counts, also).run(own, len(jobs))
    missing = sum(not is_done(output, item) for item in jobs)
    if missing:
        return Evaluation(output, None, missing)
    return _finish(config, folder, output, jobs, command)


def is_done(output: Path, item: Item) -> bool:
    """Whether the item's folder is complete: its JSON is what is written last."""
    return (output / "items" / item.name / "item.json").is_file()


def _settings(config: EvalConfig, folder: ModelFolder) -> dict[str, Any]:
    """All that an item's numbers depend on, but versions and machine."""
    # Older evaluations do not have the settings that may be empty.
    values = {key: value for key, value in config.to_dict().items() if key not in _FREE and value != []}
    dtype = choose_dtype(config.dtype, choose_device(config.device))
    if hashes := lora_sha256(config):
        values["lora_sha256"] = hashes
    return values | {"dtype": str(dtype).removeprefix("torch."), "model_files": folder.fingerprint()}


def _check_settings(output: Path, settings: dict[str, Any]) -> None:
    """Write `settings.json` into a new folder; in one that has it, the settings must be the same.

    Raises:
        InputError: they differ, and in what; or something else is in the folder.
    """
    path = output / "settings.json"
    others = [entry.name for entry in output.iterdir() if not entry.name.startswith(".")]
    # Another call may have begun meanwhile, and these be its files.
    if others and not path.exists():
        raise InputError("output_dir", f"must be empty or hold an evaluation; {str(output)!r} holds something else")
    with contextlib.suppress(FileExistsError), AtomicFiles() as files:
        files.stage(path).write_text(summary.json_text(settings), encoding="utf-8")
    # JSON has no tuples.
    if changed := list(_changes(_read(path), json.loads(json.dumps(settings)))):
        raise InputError("output_dir", f"{str(output)!r} holds an evaluation with other settings: {'; '.join(changed)}")


def _read(path: Path) -> Any:
    """What a JSON file in the evaluation's folder holds.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError("output_dir", f"holds {path}, which cannot be read: {error}; give another folder") from error


def _changes(before: Any, now: Any, place: str = "") -> Iterator[str]:
    """What differs between two JSON values, in words, each with its place such as `methods[1].num_iterations`."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            hashes = before.get(f"{key}_sha256"), now.get(f"{key}_sha256")
            # The same file, wherever it lies.
            if hashes[0] is None or hashes[0] != hashes[1]:
                yield from _changes(before.get(key), now.get(key), f"{place}.{key}".lstrip("."))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for i, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from _changes(old, new, f"{place}[{i}]")
    elif before != now:
        texts = [json.dumps(value, ensure_ascii=False) for value in (before, now)]
        was, is_now = (text if len(text) <= 160 else text[:159] + "…" for text in texts)
        yield f"{place} was {was}, is {is_now}"


def in_threads(function: Callable[[Given], Found], items: Iterable[Given]) -> list[Found]:
    """`function` of every item, in their order, several at a time.

    Raises:
        whatever the function raises for the first of the items that fail.
    """
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, items))


class _Run:
    """The sampling of items by one process.

    Args:
        counts: whether this process counts the methods' FLOPs, which it does before its first item.
        also: writes more of every item.
    """

    def __init__(
        self, config: EvalConfig, model: LoadedModel, output: Path, progress: bool, counts: bool, also: Also | None
    ) -> None:
        from vmonarch.pipelines.environment import environment

        self.counts, self.also = counts, also
        self.config, self.model, self.output, self.progress = config, model, output, progress
        self.score = prompt_scorer(model, config.prompt_set)
        self.environment = environment(model.device)

    def run(self, batches: Sequence[Sequence[Item]], total: int) -> None:
        (self.output / "items").mkdir(exist_ok=True)
        self._warm_up(batches[0])
        for batch in batches:
            claim = FileLock(self.output / "items" / f".{batch[0].name}.lock", timeout=0)
            try:
                # Given back by the system, however the process ends.
                with claim:
                    if not all(is_done(self.output, item) for item in batch):
                        self._make(batch, total)
            except Timeout:
                # Another call makes it.
                continue

    def _warm_up(self, batch: Sequence[Item]) -> None:
        """Warm up and, if that is for this process to do, count FLOPs on what the transformer was called with."""
        from vmonarch.eval.attention_flops import recorded_call, relative_flops, transformers_by_step

        pairs = [(item.prompt, item.seed) for item in batch]
        # This step is recorded by itself, because what is compiled cannot be recorded.
        recipes.apply(self.model.pipe, "full", steps=self.config.steps)
        with recorded_call(self.model.pipe) as call:
            denoise(self.model, self.config, *zip(*pairs, strict=True), steps=1)
        warm_up(self.model, self.config, pairs, progress=self.progress)
        path = self.output / "flops.json"
        if self.counts and not path.exists():
            assert self.config.steps is not None
            steps = transformers_by_step(self.model.pipe, self.config.steps)
            shares = relative_flops(call, self.config.methods, steps)
            with AtomicFiles(overwrite=True) as files:
                files.stage(path).write_text(summary.json_text(shares), encoding="utf-8")

    def _make(self, batch: Sequence[Item], total: int) -> None:
        """Sample, measure and write what is missing of a batch."""
        title = f"item {batch[0].number} of {total}" if self.progress else None
        samples = sample_methods(self.model, self.config, [(item.prompt, item.seed) for item in batch], title=title)
        for index, item in enumerate(batch):
            if is_done(self.output, item):
                continue
            frames = {label: result.frames[index] for label, result in samples.items()}
            rows = in_threads(partial(self._measured, item, frames, samples), frames)
            try:
                self._write(item, frames, rows)
            except OSError as error:
                text = summary.json_text({"prompt": item.prompt, "seed": item.seed, "results": rows})
                kept = keep_elsewhere("item.json", partial(Path.write_text, data=text, encoding="utf-8"))
                raise GenerationError(f"{self.output} cannot be written to: {error}; {kept}") from error

    def _measured(
        self, item: Item, frames: Mapping[str, torch.Tensor], samples: Mapping[str, Batch], label: str
    ) -> dict[str, Any]:
        """Row of a method: what is known of its video without encoding it.

        Raises:
            GenerationError: the video is constant or holds NaN; its raw frames are kept, at the path in the message.
        """
        from safetensors.torch import save_file

        from vmonarch.pipelines.video_io import VideoError, check_frames

        assert self.config.steps is not None
        video, result = frames[label], samples[label]
        try:
            check_frames(video)
        except VideoError as error:
            save = lambda path: save_file({"frames": video.contiguous()}, path)
            kept = keep_elsewhere("frames.raw.safetensors", save)
            what = f"method {label}, prompt {item.prompt[:40]!r}, seed {item.seed}"
            raise GenerationError(f"{what}: {error}; {kept}") from error
        row = {
            "method": label,
            **dict.fromkeys(summary.MEASURES),
            # A batch's time is shared out evenly.
            "seconds": result.seconds["total"] / len(result.frames),
            "transformer_seconds_per_step": result.seconds["transformer"] / len(result.frames) / self.config.steps,
            "prompt_score": self.score(video, item.prompt),
            "frames_sha256": frames_sha256(video),
        }
        return summary.json_values(row | self._closeness(label, frames))

    def _closeness(self, label: str, frames: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """PSNR, SSIM and, if asked for, LPIPS of a method's frames; nothing of the reference's."""
        from vmonarch.eval import similarity

        if label == self.config.reference.label:
            return {}
        pair = [frames[name].to(self.model.device) for name in (label, self.config.reference.label)]
        return vars(similarity.similarity(*pair)) | (vars(similarity.lpips(*pair)) if self.config.lpips else {})

    def _write(self, item: Item, frames: Mapping[str, torch.Tensor], rows: Sequence[dict[str, Any]]) -> None:
        """Write an item's videos, measure what is read back from them, and commit it with its JSON."""
        from vmonarch.eval.similarity import frames_of_file
        from vmonarch.pipelines.video_io import VideoError, encode_video, to_uint8, verify_video

        folder = self.output / "items" / item.name
        folder.mkdir(parents=True, exist_ok=True)
        pictures = {label: to_uint8(video) for label, video in frames.items()}

        def encode(label: str) -> torch.Tensor:
            """Write a method's video; the frames that are read back from it."""
            assert self.config.fps is not None
            encode_video(paths[label], pictures[label], self.config.fps)
            return frames_of_file(verify_video(paths[label], pictures[label]))

        def finished(row: dict[str, Any]) -> dict[str, Any]:
            label = row["method"]
            coded = {f"mp4_{key}": value for key, value in self._closeness(label, decoded).items()}
            video = {"video": f"{file_name(label)}.mp4", "video_sha256": file_sha256(paths[label])}
            return summary.json_values(row | coded | video)

        # An item without its JSON was left by a process that was killed: its videos are replaced.
        with AtomicFiles(overwrite=True) as files:
            paths = {label: files.stage(folder / f"{file_name(label)}.mp4") for label in frames}
            try:
                decoded = dict(zip(frames, in_threads(encode, frames), strict=True))
                if self.also is not None:
                    self.also(files, item, pictures, {row["method"]: row for row in rows})
            except VideoError as error:
                raise GenerationError(f"item {item.name}: {error}") from error
            record = {
                "format": EVALUATION_FORMAT,
                "prompt": item.prompt,
                "seed": item.seed,
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "results": in_threads(finished, rows),
                "environment": self.environment,
            }
            files.stage(folder / "item.json").write_text(summary.json_text(record), encoding="utf-8")
        for left in folder.glob(".*.partial*"):
            left.unlink(missing_ok=True)


def read_items(output: Path, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The records of all items, each with its number and folder, their videos checked.

    Raises:
        GenerationError: a record cannot be read, or a video is missing or no longer the one that was measured.
    """
    records = []
    for item in items:
        folder = output / "items" / item.name
        try:
            record = json.loads((folder / "item.json").read_text(encoding="utf-8"))
            for row in record["results"]:
                path = folder / row["video"]
                if file_sha256(path) != row["video_sha256"]:
                    raise ValueError(f"{path} is not the video that was measured")
        except (OSError, ValueError, KeyError, TypeError) as error:
            again = f"remove {folder} and run the command again to make it anew"
            raise GenerationError(f"{folder / 'item.json'} cannot be used: {error}; {again}") from error
        records.append({"number": item.number, "folder": f"items/{item.name}", **record})
    return records


def _finish(config: EvalConfig, folder: ModelFolder, output: Path, items: Sequence[Item], command: str) -> Evaluation:
    """Put all items together, and write `evaluation.json`, `table.md` and `report.html`."""
    from vmonarch.eval.report import report

    records = read_items(output, items)
    environments: list[dict[str, Any]] = []
    for item in records:
        about = item.pop("environment")
        known = next((entry for entry in environments if entry["environment"] == about), None)
        if known is None:
            known = {"environment": about, "items": []}
            environments.append(known)
        known["items"].append(item["number"])
    labels, baseline = config.labels, config.chosen_baseline
    vbench = _vbench_scores(config, output, records)
    statistics = summary.statistics(records, labels)
    record: dict[str, Any] = {
        "format": EVALUATION_FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "reference": config.reference.label,
        "baseline": baseline,
        "methods": labels,
        "measures": {key: dataclasses.asdict(measure) for key, measure in summary.MEASURES.items()},
        "intervals": summary.INTERVALS,
        "attention_flops": _read(output / "flops.json"),
        "statistics": statistics,
        "differences": summary.differences(records, labels, baseline),
        "vbench": vbench,
        "paper_score": {label: summary.paper_score(statistics[label], vbench.get(label, {})) for label in labels},
        "items": records,
        "config": {key: value for key, value in config.to_dict().items() if key not in _LOCAL},
        "model_files": folder.fingerprint(),
        "environments": environments,
    }
    record |= summary.document_table(record)
    text = summary.json_text(record)
    # As it is read back: JSON has no tuples.
    record = json.loads(text)
    page, evaluation = report(record, output), Evaluation(output, record, 0)
    with AtomicFiles(overwrite=True) as files:
        written = {"evaluation.json": text, "table.md": evaluation.table() + "\n", "report.html": page}
        for name, contents in written.items():
            files.stage(output / name).write_text(contents, encoding="utf-8")
    for lock in (output / "items").glob(".*.lock"):
        lock.unlink(missing_ok=True)
    return evaluation


def _vbench_scores(
    config: EvalConfig, output: Path, records: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """VBench's score of every method in every dimension that was asked for."""
    if not config.vbench:
        return {}
    from vmonarch.eval import vbench

    scores: dict[str, dict[str, float]] = {}
    for label in config.labels:
        files = [(record, row) for record in records for row in record["results"] if row["method"] == label]
        videos = [vbench.PromptedVideo(output / item["folder"] / row["video"], item["prompt"]) for item, row in files]
        found = vbench.score_videos(videos, config.vbench, work_dir=output / "vbench", timeout=config.vbench_timeout)
        scores[label] = {dimension: float(found[dimension].score) for dimension in config.vbench}
    return scores
