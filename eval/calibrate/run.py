"""Diagnose a model's attention and plan what every head computes: the library behind `vmonarch calibrate`.

A diagnosis measures what a head loses while all others are exact. With a plan, all heads lose something, and later
layers see the outputs of earlier ones. So recorded calls are computed again with the plan, and with the gradient of
E = ‖v' - v‖²/‖v‖², where v' is the model's output with the plan and v with full attention. Let δ be the error of a
head's output o on its own inputs, and J = ∂v'/∂o. Then v' - v = Σ J δ to first order, and ½ ⟨∂E/∂o, δ⟩ is the head's
share ⟨v' - v, J δ⟩/‖v‖² of E. One backward pass gives all shares, which add up to E.

The shares correct the values that the next plan minimises (`planning.plan`). The best measured plan is kept.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from vmonarch import apply, restore
from vmonarch.attend import Attend
from vmonarch.base import Layer
from vmonarch.configs import InputError
from vmonarch.eval.calibrate import planning
from vmonarch.eval.calibrate.diagnosis import (
    Recorder,
    Rerun,
    Watched,
    differentiate,
    document,
    head_times,
    recorded,
)
from vmonarch.eval.calibrate.planning import InPlace
from vmonarch.eval.calibrate.settings import CalibrateConfig
from vmonarch.files import AtomicFiles, prepare_output_dir, short_hash
from vmonarch.grid import LatentGrid
from vmonarch.kernels.flash_entropy.api import flash_entropy_attention
from vmonarch.pipelines.loading import complete_and_load
from vmonarch.pipelines.outputs import facts, next_number
from vmonarch.pipelines.sampling import sample
from vmonarch.plan import AttentionPlan
from vmonarch.processors import VMonarchProcessor


@dataclass(frozen=True)
class Calibration:
    """The output of `calibrate`: its folder, the diagnosis (`diagnosis.json`) and the plan (`plan.json`)."""

    folder: Path
    diagnosis: dict[str, Any]
    plan: AttentionPlan


def calibrate(config: CalibrateConfig, *, progress: bool = False) -> Calibration:
    """Sample every prompt and seed with full attention, measure what the candidates lose in its calls, and plan.

    A new folder in `config.output_dir` gets `diagnosis.json` and `plan.json` (for `VMonarchProcessor(plan=…)` and
    `vmonarch compare --methods full vmonarch:plan=…`).

    Args:
        progress: show progress bars.

    Raises:
        InputError, ModelError: as `vmonarch.pipelines.generation.generate`; or no plan fits the budget.
        OSError: a file could not be written.
    """
    config, model = complete_and_load(config, None)
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
    # The diagnosis is on disk by now: if no plan can be made, a second try with --diagnosis samples nothing.
    try:
        make = functools.partial(planning.plan, diagnosis, config)
        plan = refine(model.pipe, calls, make, config.refine) if config.refine else make()
    except InputError as error:
        kept = f"the diagnosis is {target / 'diagnosis.json'}, from which --diagnosis makes other plans"
        raise InputError(error.argument, f"{error.problem}; {kept}") from error
    plan.save(target / "plan.json")
    return Calibration(target, diagnosis, plan)


class SharesProcessor(VMonarchProcessor):
    """VMonarch with a plan; adds the shares of heads to `shares`, float64 [layers, heads] by transformer."""

    def __init__(self, plan: AttentionPlan, shares: Mapping[str, torch.Tensor]) -> None:
        super().__init__(plan=plan)
        self._shares = shares

    def attention(self, layer: Layer) -> Attend | None:
        attend, shares = super().attention(layer), self._shares[layer.component][layer.block]

        def add(grid: LatentGrid, gradient: torch.Tensor, *tensors: torch.Tensor) -> None:
            q, k, v, approximate = tensors
            error = approximate.double() - flash_entropy_attention(q, k, v)[0].double()
            shares.add_((gradient * error).sum((0, 1, 3)).cpu() / 2)

        return None if attend is None else Watched(attend, add)


def measure_plan(pipe: Any, plan: AttentionPlan, calls: Sequence[Rerun]) -> InPlace:
    """The mean error of a plan in the output of recorded calls, and the shares of its heads.

    Raises:
        InputError: see `differentiate`.
    """
    shares = {
        name: torch.zeros(len(layers), len(layers[0]), dtype=torch.float64) for name, layers in plan.layers.items()
    }
    error = 0.0
    apply(pipe, SharesProcessor(plan, shares))
    try:
        for call in calls:
            # Exact heads change nothing.
            if any(plan.methods[name] is not None for row in plan.layers[call.component] for name in row):
                v = call.velocity.float()
                change = lambda found: (found.float() - v).square().sum() / v.square().sum()  # noqa: B023
                error += differentiate(call, change)
    finally:
        restore(pipe)
    return InPlace(plan, error / len(calls), {name: found / len(calls) for name, found in shares.items()})


def refine(
    pipe: Any, calls: Sequence[Rerun], make: Callable[[Sequence[InPlace]], AttentionPlan], rounds: int
) -> AttentionPlan:
    """The best of up to `rounds` plans, each made with the measurements of the ones before it.

    The plan's `about["in_place"]` lists the ‖v' - v‖²/‖v‖² of all of them.

    Args:
        make: makes a plan from those measured before it.

    Raises:
        InputError: see `differentiate`.
    """
    found: list[InPlace] = []
    for _ in range(rounds):
        plan = make(found)
        if any(plan.layers == earlier.plan.layers for earlier in found):
            break
        found.append(measure_plan(pipe, plan, calls))
        if found[-1].error == 0:
            break
    best = min(found, key=lambda measured: measured.error).plan
    errors = [float(f"{measured.error:.6g}") for measured in found]
    return AttentionPlan(best.methods, best.layers, {**best.about, "in_place": errors})
