"""Diagnose a model's attention and plan what every head computes: the library behind `vmonarch calibrate`."""

from __future__ import annotations

import functools
import json
import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vmonarch.configs import InputError, read_document
from vmonarch.eval.calibrate import planning
from vmonarch.eval.calibrate.diagnosis import FORMAT, Recorder, Rerun, document, head_times, recorded
from vmonarch.eval.calibrate.refining import refine
from vmonarch.eval.calibrate.settings import CalibrateConfig
from vmonarch.files import AtomicFiles, short_hash
from vmonarch.pipelines.loading import LoadedModel, complete_and_load
from vmonarch.pipelines.outputs import facts, next_number, prepare_output_dir
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
    `vmonarch compare --methods full vmonarch:plan=…`).

    Args:
        progress: show progress bars.
        model: a pipeline loaded before with the same model settings, to save loading it again.

    Raises:
        InputError, ModelError: as `vmonarch.pipelines.generation.generate`; or a budget does not fit.
        OSError: a file could not be written.
    """
    from vmonarch import restore

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
    target.mkdir()
    with AtomicFiles() as files:
        text = json.dumps(diagnosis, ensure_ascii=False, allow_nan=False) + "\n"
        files.stage(target / "diagnosis.json").write_text(text, encoding="utf-8")
    # What was sampled is on disk by now: a plan that cannot be made costs no more than another --diagnosis.
    try:
        make = functools.partial(planning.plan, diagnosis, config)
        plan = refine(model.pipe, calls, make, config.refine) if config.refine else make()
    except InputError as error:
        kept = f"the diagnosis is {target / 'diagnosis.json'}, from which --diagnosis makes other plans"
        raise InputError(error.argument, f"{error.problem}; {kept}") from error
    plan.save(target / "plan.json")
    warn_if_full(plan)
    return Calibration(target, diagnosis, plan)


def warn_if_full(plan: AttentionPlan) -> None:
    """Warn of a plan that makes nothing faster, because all heads have full attention."""
    if all(options is None for options in plan.methods.values()):
        warnings.warn(
            "the plan is nothing but full attention, so it makes nothing faster: it may cost too much, or the videos"
            " are so small that all candidates cost more",
            stacklevel=3,
        )


def read_diagnosis(path: str | Path) -> dict[str, Any]:
    """What a `diagnosis.json` holds.

    Raises:
        InputError: it cannot be read, or is none.
    """
    return read_document("diagnosis", Path(path).expanduser(), FORMAT, "diagnosis of `vmonarch calibrate`")
