"""Diagnose a model's attention and plan what every head computes: the library behind `vmonarch calibrate`."""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmonarch.configs import InputError, read_document, suggest
from vmonarch.configs.methods import AttentionMethod, resolve_method
from vmonarch.files import AtomicFiles, short_hash
from vmonarch.options import Options, VMonarchOptions
from vmonarch.pipelines.config import SamplingConfig
from vmonarch.pipelines.loading import LoadedModel, complete_and_load
from vmonarch.pipelines.outputs import GenerationError, keep_elsewhere, prepare_output_dir, reserve_number
from vmonarch.pipelines.records import facts
from vmonarch.pipelines.sampling import denoise
from vmonarch.plan import AttentionPlan

if TYPE_CHECKING:
    from vmonarch.eval.calibrate.planning import InPlace
    from vmonarch.grid import LatentGrid

CANDIDATES = (
    "vmonarch-plain:num_iterations=1",
    "vmonarch-plain:coarse=2,last_l_update=false",
    "vmonarch-plain",
    "vmonarch-lite",
    "vmonarch-t1",
    "vmonarch:coarse=2,row_share=0.25",
    "vmonarch:coarse=2",
    "vmonarch",
    "vmonarch-t3",
    "vmonarch-own",
    "vmonarch-band1",
    "vmonarch-first-own",
    "vmonarch-first-band1",
    "vmonarch:exact={rows: [0], band: 2}",
    "vmonarch:exact={rows: [0], band: 3}",
    "two-resolution",
    "two-resolution:share=0.2",
    "two-resolution:share=0.4",
    "first-order",
    "first-order:parts=[1,2,2]",
    "first-order:parts=[1,4,4]",
)
# Of methods that a head can get.
_PROCESSORS = ("vmonarch", "two_resolution", "first_order")


@dataclass(frozen=True)
class Budget:
    """What a plan may cost, one of the two.

    Args:
        error: of a head, of `measure`.
        flops: of all heads, relative to VMonarch with its defaults.
        time: the same of the measured time.
        measure: one of `planning.MEASURES`; None for "error" with `error`, and what `plan_within_work`
            takes without.
        limit: "measure=share", with `flops` or `time`: see `plan_within_work`.
    """

    error: float | None = None
    flops: float | None = None
    time: float | None = None
    measure: str | None = None
    limit: str | None = None

    def __post_init__(self) -> None:
        from vmonarch.eval.calibrate.planning import MEASURES

        given = {"budget": self.error, "flops": self.flops, "time": self.time}
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise InputError(named[0], f"and {named[1]} exclude each other: give one")
        for name, value in given.items():
            if value is not None and (not math.isfinite(value) or value < 0):
                raise InputError(name, f"must be finite and at least 0, got {value}")
        if self.limit is not None and self.error is not None:
            raise InputError("limit", "is for flops and time; with budget, every head keeps to that")
        for name, measure in self.measures.items():
            if measure not in MEASURES:
                raise InputError(name, f"must be of {', '.join(MEASURES)}, got {measure!r}{suggest(measure, MEASURES)}")

    @property
    def measures(self) -> dict[str, str]:
        """The measures that are named, by the argument that names them."""
        limit = self._limit()
        named = {"measure": self.measure, "limit": limit and limit[0]}
        return {name: measure for name, measure in named.items() if measure is not None}

    def _limit(self) -> tuple[str, float] | None:
        if self.limit is None:
            return None
        name, _, share = str(self.limit).partition("=")
        try:
            value = float(share)
        except ValueError:
            value = math.nan
        if not name or not value > 0 or math.isinf(value):
            raise InputError(
                "limit", f"must be measure=share with a positive share, such as kl=0.5, got {self.limit!r}"
            )
        return name, value

    def plan(self, diagnosis: Mapping[str, Any], found: Sequence[InPlace] = ()) -> AttentionPlan:
        """The plan for a diagnosis; without a budget, for as much work as VMonarch's.

        Args:
            found: see `plan_within_work`.
        """
        from vmonarch.eval.calibrate.planning import plan_within_error, plan_within_work

        if self.error is not None:
            return plan_within_error(diagnosis, self.error, self.measure or "error")
        work, cost = (1.0 if self.flops is None else self.flops, "flops") if self.time is None else (self.time, "time")
        return plan_within_work(diagnosis, work, self.measure, self._limit(), cost=cost, found=found)


@dataclass(frozen=True)
class CalibrateConfig(SamplingConfig):
    """`SamplingConfig`, plus what to record and to plan.

    Args:
        candidates: methods of kind vmonarch, two_resolution or first_order, as `vmonarch compare` takes them, without a
            bias, a plan, or dense steps and layers.
        every: record every so many steps; None for about ten of them.
        maps: "layer:head" of attention maps to keep; none for the first, the middle and the last layer's first head.
        budget, flops, time, measure, limit: see `Budget`.
        sensitivity: also measure what a head's errors change in the model's output: recorded calls are computed again,
            once with gradients and once for each of up to eight layers.
        refine: how many plans are measured in place, each made from what the ones before it showed; the best is kept.
            0 keeps the first, unmeasured.
    """

    output_dir: str = "outputs/calibrate"
    candidates: tuple[Any, ...] = CANDIDATES
    every: int | None = None
    maps: tuple[str, ...] = ()
    budget: float | None = None
    flops: float | None = None
    time: float | None = None
    measure: str | None = None
    limit: str | None = None
    sensitivity: bool = True
    refine: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.candidates, (str, bytes)) or not self.candidates:
            raise InputError("candidates", f"must be a list of methods, got {self.candidates!r}")
        methods = [_candidate(spec) for spec in self.candidates]
        labels = [method.label for method in methods]
        if repeated := sorted({label for label in labels if labels.count(label) > 1}):
            raise InputError("candidates", f"must differ; repeated: {', '.join(repeated)}")
        if self.every is not None and (isinstance(self.every, bool) or self.every < 1):
            raise InputError("every", f"must be at least 1, got {self.every!r}")
        object.__setattr__(self, "candidates", tuple(methods))
        for name, measure in self.allowed.measures.items():
            if measure == "output_error" and not self.sensitivity:
                raise InputError(name, "cannot be output_error without sensitivity, which measures it")
        if isinstance(self.refine, bool) or not isinstance(self.refine, int) or self.refine < 0:
            raise InputError("refine", f"must be a number of plans, at least 0, got {self.refine!r}")
        without = {
            "no-sensitivity": not self.sensitivity,
            "budget": self.budget is not None,
            "limit": self.limit is not None,
        }
        if self.refine and (given := [name for name, is_given in without.items() if is_given]):
            raise InputError("refine", f"measures plans for flops or time, with gradients; leave out {given[0]}")
        for name in ("limit", "time"):
            if getattr(self, name) is not None and VMonarchOptions() not in map(_options, methods):
                raise InputError(name, "is relative to VMonarch with its defaults, which is not among the candidates")
        object.__setattr__(self, "maps", tuple(self.maps))
        parse_maps(self.maps)

    @property
    def attention_methods(self) -> Mapping[str, Sequence[AttentionMethod]]:
        """As in `SamplingConfig`."""
        return {"candidates": self.candidates}

    def check_grid(self, grid: LatentGrid) -> None:
        """Check that heads of videos of this grid can do with so much work.

        Raises:
            InputError: they cannot.
        """
        from vmonarch.eval.calibrate.planning import check_work, default_flops
        from vmonarch.plan import method_flops

        if self.flops is not None:
            cheapest = min(method_flops(_options(method), grid, 1) for method in self.candidates)
            check_work(self.flops, cheapest / method_flops(None, grid, 1), default_flops(grid))

    @property
    def allowed(self) -> Budget:
        """What the plan may cost; where plans are measured in place, the first goes by the error of layers."""
        measure = self.measure or ("layer_error" if self.refine else None)
        return Budget(self.budget, self.flops, self.time, measure, self.limit)


def _candidate(spec: Any) -> AttentionMethod:
    method = spec if isinstance(spec, AttentionMethod) else resolve_method(spec, argument="candidates")
    if method.processor_name not in _PROCESSORS:
        known, got = " or ".join(_PROCESSORS), f"{method.label!r} of {method.processor_name}"
        raise InputError("candidates", f"must be of the processors {known}, got {got}")
    if not method.countable:
        raise InputError("candidates", f"must have work that is known beforehand, but {method.label!r} sets beta")
    for name in ("bias", "plan", "dense_steps", "dense_layers", "refresh"):
        if method.options.get(name) not in (None, 0, []):
            raise InputError("candidates", f"must leave {name} alone, but {method.label!r} sets it")
    return method


def _options(method: AttentionMethod) -> Options:
    options: Options = method.processor().options  # type: ignore[attr-defined]
    return options


def parse_maps(maps: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """(layer, head) of every "layer:head".

    Raises:
        InputError: an entry is not of this form.
    """
    found = []
    for entry in maps:
        layer, colon, head = str(entry).partition(":")
        if not colon or not layer.isdecimal() or not head.isdecimal():
            raise InputError("maps", f"must be layer:head, such as 3:0, got {entry!r}")
        found.append((int(layer), int(head)))
    return tuple(found)


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` made: its folder, the diagnosis (`diagnosis.json`) and the plan (`plan.json`)."""

    folder: Path
    diagnosis: dict[str, Any]
    plan: AttentionPlan


def calibrate(config: CalibrateConfig, *, progress: bool = False, model: LoadedModel | None = None) -> Calibration:
    """Sample every prompt and seed with full attention, record what the candidates lose, and plan.

    In a new folder of `config.output_dir`: `diagnosis.json`, `plan.json` (for `VMonarchProcessor(plan=…)` and
    `vmonarch compare --methods full vmonarch:plan=…`) and `report.html`.

    Args:
        progress: show progress bars.
        model: a pipeline loaded before with the same model settings, to save loading it again.

    Raises:
        InputError, ModelError: as `vmonarch.pipelines.generation.generate`; or a map or a budget does not fit.
        GenerationError: a file could not be written.
    """
    from vmonarch import apply, restore
    from vmonarch.eval.calibrate.diagnosis import Call, DiagnosisProcessor, Recorder, document, watched
    from vmonarch.eval.calibrate.refining import refine
    from vmonarch.eval.calibrate.report import report
    from vmonarch.eval.calibrate.timing import head_times

    config, model = complete_and_load(config, model)
    if config.time is not None and model.device.type != "cuda":
        raise InputError("time", f"must be measured on a GPU, but the model is on {model.device}; use flops")
    output = prepare_output_dir(config.output_dir)
    assert config.steps is not None
    layers, heads = _size(model)
    maps = parse_maps(config.maps) or tuple(dict.fromkeys((layer, 0) for layer in (0, layers // 2, layers - 1)))
    for layer, head in maps:
        if layer >= layers or head >= heads:
            raise InputError("maps", f"must lie in {layers} layers of {heads} heads, got {layer}:{head}")
    candidates = {method.label: _options(method) for method in config.candidates}
    calls: list[Call] = []
    every = config.every or max(1, config.steps // 10)
    recorder = Recorder(candidates, every, maps, calls=calls if config.refine else None)
    batches = config.batches()
    apply(model.pipe, DiagnosisProcessor(recorder))
    try:
        with watched(recorder, model.pipe) if config.sensitivity else nullcontext():
            for number, batch in enumerate(batches):
                title = f"batch {number + 1} of {len(batches)}" if progress else None
                denoise(model, config, [prompt for prompt, _ in batch], [seed for _, seed in batch], progress=title)
    finally:
        restore(model.pipe)
    about = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": config.to_dict(),
        **facts(config, model),
    }
    assert recorder.grid is not None
    times = head_times(recorder.inputs, recorder.grid, recorder.candidates)
    diagnosis = {**document(recorder, times), "about": about}
    with reserve_number(output, 1 if config.overwrite else None) as number_text:
        target = output / f"{number_text}-{short_hash(config.to_dict())}"
        save = functools.partial(_save, overwrite=config.overwrite)
        save(target / "diagnosis.json", json.dumps(diagnosis, ensure_ascii=False, allow_nan=False) + "\n")
        # What was sampled is on disk by now: a plan that cannot be made costs no more than another --diagnosis.
        try:
            make = functools.partial(config.allowed.plan, diagnosis)
            plan = refine(model.pipe, calls, make, config.refine) if config.refine else make()
        except InputError as error:
            kept = f"the diagnosis is {target / 'diagnosis.json'}, from which --diagnosis makes other plans"
            raise InputError(error.argument, f"{error.problem}; {kept}") from error
        # Refining may take longer than sampling: the plan is on disk before the report is made.
        save(target / "plan.json", json.dumps(plan.to_dict(), indent=1, ensure_ascii=False) + "\n")
        warn_if_full(plan)
        save(target / "report.html", report(diagnosis, plan, recorder.pictures))
    return Calibration(target, diagnosis, plan)


def warn_if_full(plan: AttentionPlan) -> None:
    """Warn of a plan that makes nothing faster, because all heads have full attention."""
    if all(options is None for options in plan.methods.values()):
        warnings.warn(
            "the plan is nothing but full attention, so it makes nothing faster: no candidate kept to the budget, or"
            " the videos are so small that all of them cost more",
            stacklevel=3,
        )


def _size(model: LoadedModel) -> tuple[int, int]:
    """Layers and heads of the pipeline's transformers."""
    from vmonarch.families import heads_of
    from vmonarch.installation import find_transformers, self_attention_modules

    modules = self_attention_modules(next(iter(find_transformers(model.pipe).values())))
    return len(modules), heads_of(modules[0][1])


def _save(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a file of a calibration, or keep it where there is room for it.

    Raises:
        GenerationError: its folder cannot be written to; the message says where the text is kept.
    """
    try:
        path.parent.mkdir(exist_ok=True)
        _write(path, text, overwrite=overwrite)
    except OSError as error:
        kept = keep_elsewhere(path.name, lambda elsewhere: elsewhere.write_text(text, encoding="utf-8"))
        raise GenerationError(f"{path.parent} cannot be written to: {error}; {kept}") from error


def _write(path: Path, text: str, *, overwrite: bool) -> None:
    with AtomicFiles(overwrite=overwrite) as files:
        files.stage(path).write_text(text, encoding="utf-8")


def read_diagnosis(path: str | Path, candidates: Sequence[str] | None = None) -> dict[str, Any]:
    """What a `diagnosis.json` holds.

    Args:
        candidates: names of those that are kept; None for all.

    Raises:
        InputError: it cannot be read, or is none, or lacks one of these candidates.
    """
    from vmonarch.eval.calibrate.diagnosis import FORMAT

    diagnosis = read_document("diagnosis", Path(path).expanduser(), FORMAT, "diagnosis of `vmonarch calibrate`")
    if candidates is None:
        return diagnosis
    known = list(diagnosis["candidates"])
    for name in candidates:
        if name not in known:
            raise InputError("candidates", f"must be of {', '.join(known)}, got {name!r}{suggest(name, known)}")
    parts = {
        transformer: part | {"candidates": {name: part["candidates"][name] for name in candidates}}
        for transformer, part in diagnosis["transformers"].items()
    }
    kept = {name: diagnosis["candidates"][name] for name in candidates}
    return diagnosis | {"candidates": kept, "transformers": parts}
