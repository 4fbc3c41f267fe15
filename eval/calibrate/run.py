"""Diagnose a model's attention and plan what every head computes: the library behind `vmonarch calibrate`."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vmonarch.configs import InputError, check_choice, read_document
from vmonarch.eval.calibrate import planning
from vmonarch.eval.calibrate.diagnosis import FORMAT, Recorder, Rerun, document, head_times, recorded
from vmonarch.eval.calibrate.refining import refine
from vmonarch.eval.calibrate.settings import CalibrateConfig
from vmonarch.files import AtomicFiles, short_hash
from vmonarch.pipelines.loading import LoadedModel, complete_and_load
from vmonarch.pipelines.outputs import GenerationError, facts, keep_elsewhere, next_number, prepare_output_dir
from vmonarch.pipelines.sampling import sample
from vmonarch.plan import AttentionPlan


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` made: its folder, the diagnosis (`diagnosis.json`) and the plan (`plan.json`)."""

    folder: Path
    diagnosis: dict[str, Any]
    plan: AttentionPlan


def calibrate(config: CalibrateConfig, *, progress: bool = False, model: LoadedModel | None = None) -> Calibration:
    """Sample every prompt and seed with full attention, measure what the candidates lose in its calls, and plan.

    In a new folder of `config.output_dir`: `diagnosis.json`, `plan.json` (for `VMonarchProcessor(plan=…)` and
    `vmonarch compare --methods full vmonarch:plan=…`) and `report.html`.

    Args:
        progress: show progress bars.
        model: a pipeline loaded before with the same model settings, to save loading it again.

    Raises:
        InputError, ModelError: as `vmonarch.pipelines.generation.generate`; or a budget does not fit.
        GenerationError: a file could not be written.
    """
    from vmonarch import restore
    from vmonarch.eval.calibrate.report import report

    config, model = complete_and_load(config, model)
    if config.time is not None and model.device.type != "cuda":
        raise InputError("time", f"must be measured on a GPU, but the model is on {model.device}; use flops")
    output = prepare_output_dir(config.output_dir)
    assert config.steps is not None
    calls: list[Rerun] = []
    recorder = Recorder(config.options)
    batches = config.batches()
    try:
        for number, batch in enumerate(batches):
            title = f"batch {number + 1} of {len(batches)}" if progress else None
            with recorded(model.pipe, config.every or max(1, config.steps // 10)) as seen:
                sample(model, config, *zip(*batch, strict=True), decode=False, progress=title)
            recorder.diagnose(model.pipe, seen, sensitivity=config.sensitivity)
            calls += seen if config.refine else []
    finally:
        restore(model.pipe)
    assert recorder.grid is not None
    times = head_times(recorder.inputs, recorder.grid, recorder.candidates)
    about = {"created": datetime.now(UTC).isoformat(timespec="seconds"), "config": config.to_dict()}
    diagnosis = {**document(recorder, times), "about": about | facts(config, model)}
    target = output / f"{next_number(output)}-{short_hash(config.to_dict())}"
    _save(target / "diagnosis.json", json.dumps(diagnosis, ensure_ascii=False, allow_nan=False) + "\n")
    # What was sampled is on disk by now: a plan that cannot be made costs no more than another --diagnosis.
    try:
        make = functools.partial(planning.plan, diagnosis, config)
        plan = refine(model.pipe, calls, make, config.refine) if config.refine else make()
    except InputError as error:
        kept = f"the diagnosis is {target / 'diagnosis.json'}, from which --diagnosis makes other plans"
        raise InputError(error.argument, f"{error.problem}; {kept}") from error
    # Refining may take longer than sampling: the plan is on disk before the report is made.
    _save(target / "plan.json", json.dumps(plan.to_dict(), indent=1, ensure_ascii=False) + "\n")
    warn_if_full(plan)
    _save(target / "report.html", report(diagnosis, plan))
    return Calibration(target, diagnosis, plan)


def warn_if_full(plan: AttentionPlan) -> None:
    """Warn of a plan that makes nothing faster, because all heads have full attention."""
    if all(options is None for options in plan.methods.values()):
        warnings.warn(
            "the plan is nothing but full attention, so it makes nothing faster: it may cost too much, or the videos"
            " are so small that all candidates cost more",
            stacklevel=3,
        )


def _save(path: Path, text: str) -> None:
    """Write a file of a calibration, or keep it where there is room for it.

    Raises:
        GenerationError: its folder cannot be written to; the message says where the text is kept.
    """
    try:
        path.parent.mkdir(exist_ok=True)
        with AtomicFiles() as files:
            files.stage(path).write_text(text, encoding="utf-8")
    except OSError as error:
        kept = keep_elsewhere(path.name, lambda elsewhere: elsewhere.write_text(text, encoding="utf-8"))
        raise GenerationError(f"{path.parent} cannot be written to: {error}; {kept}") from error


def read_diagnosis(path: str | Path, candidates: Sequence[str] | None = None) -> dict[str, Any]:
    """What a `diagnosis.json` holds.

    Args:
        candidates: names of those that are kept; None for all.

    Raises:
        InputError: it cannot be read, or is none, or lacks one of these candidates.
    """
    diagnosis = read_document("diagnosis", Path(path).expanduser(), FORMAT, "diagnosis of `vmonarch calibrate`")
    if candidates is None:
        return diagnosis
    for name in candidates:
        check_choice("candidates", name, diagnosis["candidates"])
    kept = lambda found: {"candidates": {name: found["candidates"][name] for name in candidates}}
    parts = {name: part | kept(part) for name, part in diagnosis["transformers"].items()}
    return diagnosis | kept(diagnosis) | {"transformers": parts}
