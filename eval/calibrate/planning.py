"""From a diagnosis to a plan: the cheapest attention for every head that an error budget or a budget of work allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vmonarch.configs import InputError
from vmonarch.eval.calibrate import MEASURES
from vmonarch.eval.calibrate.diagnosis import FORMAT
from vmonarch.flops import full_flops, vmonarch_flops
from vmonarch.grid import LatentGrid
from vmonarch.plan import FULL, AttentionPlan

# What the error of layers weighs beside what errors change in the output.
_LAYER_WEIGHT = 0.4
# The integer program decides at least these heads.
_CHOICE = 64
# No head's errors count for less than this part of the mean share: shares are noisy and can be negative.
_LEAST_SHARE = 0.02


def measures_of(diagnosis: Mapping[str, Any]) -> tuple[str, ...]:
    """Those of MEASURES that a diagnosis has: without gradients there is no "output_error".

    Raises:
        InputError: it is no diagnosis.
    """
    if diagnosis.get("format") != FORMAT:
        raise InputError("diagnosis", f"must have the format {FORMAT!r}, got {diagnosis.get('format')!r}")
    parts = diagnosis["transformers"].values()
    have = [set(values) for part in parts for values in part["candidates"].values()]
    return tuple(name for name in MEASURES if all(name in names for names in have))


@dataclass(frozen=True)
class _Choices:
    """What every head of all transformers could compute.

    Args:
        names: of the methods, exact attention last.
        costs: [methods], relative to full attention.
        values: [heads, methods], of the measure; 0 for exact attention.
        shares: [heads], of a head in the work of a whole sampling: transformers run for different numbers of steps.
        places: (transformer, layers, heads of a layer) in the order of the heads.
    """

    names: tuple[str, ...]
    costs: torch.Tensor
    values: torch.Tensor
    shares: torch.Tensor
    places: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class InPlace:
    """A plan that was measured in place (`refining.measure_plan`).

    Args:
        error: ‖v' - v‖²/‖v‖² of the model's output.
        shares: by transformer, [layers, heads]: of the heads' errors in it.
    """

    plan: AttentionPlan
    error: float
    shares: Mapping[str, torch.Tensor]


def over_steps(values: Any, measure: str) -> torch.Tensor:
    """[layers, heads], float64, of a measure [steps, layers, heads]: its mean; of "error" the root mean square."""
    steps = torch.tensor(values, dtype=torch.float64)
    return steps.square().mean(0).sqrt() if measure == "error" else steps.mean(0)


def _choices(diagnosis: Mapping[str, Any], measure: str, argument: str = "measure", *, cost: str = "flops") -> _Choices:
    known = measures_of(diagnosis)
    if measure not in known:
        raise InputError(argument, f"must be one of {', '.join(known)}, got {measure!r}")
    names = tuple(diagnosis["candidates"])
    values, shares, places = [], [], []
    total = sum(len(part["steps"]) for part in diagnosis["transformers"].values())
    for component, part in diagnosis["transformers"].items():
        found = [over_steps(part["candidates"][name][measure], measure).flatten() for name in names]
        values.append(torch.stack([*found, torch.zeros_like(found[0])], 1))
        heads = part["layers"] * part["heads"]
        shares.append(torch.full((heads,), len(part["steps"]) / total / heads, dtype=torch.float64))
        places.append((component, part["layers"], part["heads"]))
    return _Choices((*names, FULL), _costs(diagnosis, cost), torch.cat(values), torch.cat(shares), tuple(places))


def _costs(diagnosis: Mapping[str, Any], cost: str) -> torch.Tensor:
    """The costs of all candidates and of exact attention, relative to exact attention: [methods]."""
    candidates = diagnosis["candidates"].values()
    if cost == "flops":
        costs = [entry["flops"] for entry in candidates]
    elif diagnosis.get("full_ms") is None:
        raise InputError("time", "was not measured: the diagnosis was made without a GPU; use flops")
    else:
        costs = [entry["ms"] / diagnosis["full_ms"] for entry in candidates]
    return torch.tensor([*costs, 1.0], dtype=torch.float64)


def plan_within_error(diagnosis: Mapping[str, Any], budget: float, measure: str = "error") -> AttentionPlan:
    """For every head the cheapest method whose measure, over the recorded steps, is at most `budget`.

    Raises:
        InputError: no diagnosis, an unknown measure, or a budget that is negative or not finite.
    """
    choices = _choices(diagnosis, measure)
    if not math.isfinite(budget) or budget < 0:
        raise InputError("budget", f"must be finite and at least 0, got {budget}")
    cost = choices.costs.expand_as(choices.values).masked_fill(choices.values > budget, math.inf)
    return _plan(diagnosis, choices, cost.argmin(1), measure, {"budget": budget})


def plan_within_work(
    diagnosis: Mapping[str, Any],
    work: float,
    measure: str | None = None,
    limit: tuple[str, float] | None = None,
    *,
    cost: str = "flops",
    found: Sequence[InPlace] = (),
) -> AttentionPlan:
    """The least sum of the measure over all heads (of relative errors: of their squares) for so much work.

    An integer program (HiGHS): every head has one method, and the costs, with a limit another measure too, stay within
    what they may be. In large models the linear program decides all but some heads (`_least`).

    Args:
        work: of all heads, relative to VMonarch with its defaults (`vmonarch_flops`).
        measure: None for "output_error" and, `_LAYER_WEIGHT` times as much, "layer_error", both relative to VMonarch
            with its defaults: what is measured to first order does not see how errors add up. Where the diagnosis has
            not got the first, the second alone; without the defaults as a candidate, the first alone.
        limit: another measure, and what its sum may be at most, relative to VMonarch with its defaults, which must be a
            candidate.
        cost: what work is, "flops" or "time". The time is measured head by head, and VMonarch with its defaults must be
            a candidate.
        found: plans of this diagnosis that were measured in place: their heads' shares correct the measure.

    Raises:
        InputError: no diagnosis, an unknown measure, less work than the cheapest methods need, a limit that cannot be
            kept with so much work, or a time that was not measured.
    """
    sensitive = "output_error" in measures_of(diagnosis)
    joined = measure is None and sensitive and any(not entry["options"] for entry in diagnosis["candidates"].values())
    measure = measure or ("output_error" if sensitive else "layer_error")
    choices = _choices(diagnosis, measure, cost=cost)
    unit = _default_cost(diagnosis, cost)
    check_work(work, choices.costs.min().item(), unit, cost)
    values = _summable(choices, measure)
    asked: dict[str, Any] = {cost: work}
    if joined:
        asked["weights"] = {"layer_error": _LAYER_WEIGHT}
        layer = _summable(_choices(diagnosis, "layer_error"), "layer_error")
        values = _relative(values, diagnosis, "measure") + _LAYER_WEIGHT * _relative(layer, diagnosis, "measure")
    values = _corrected(choices, values, found)
    limits = [(choices.costs * choices.shares[:, None], work * unit)]
    if limit is not None:
        name, share = limit
        limits.append((_relative(_summable(_choices(diagnosis, name, "limit"), name), diagnosis, "limit"), share))
        asked["limit"] = {name: share}
    chosen = _least(values, limits)
    if chosen is None:
        raise InputError("limit", f"{name}={share:g} cannot be kept with {cost}={work:g}; give more work")
    return _plan(diagnosis, choices, chosen, measure, asked)


def _least(values: torch.Tensor, limits: Sequence[tuple[torch.Tensor, float]]) -> torch.Tensor | None:
    """The method of every head with which the values [heads, methods] add up to least: [heads]; None if there is none.

    The linear program leaves no more heads between two methods than there are limits. Those are decided by an integer
    program, with some others, so that it has a choice; in small models it has all heads.

    Args:
        limits: other values [heads, methods], and what they may add up to.
    """
    weights = torch.stack([other / most for other, most in limits])
    # Of several plans that lose as little, the cheapest is taken.
    aim = values / values.abs().max().clamp(min=1e-300) + 1e-9 * weights[0] / weights[0].max()
    room = torch.ones(len(limits), dtype=torch.float64)
    relaxed = _solve(aim, weights, room, integral=False)
    if relaxed is None:
        return None
    free = relaxed.max(1).values < 1 - 1e-6
    free[:_CHOICE] = True
    chosen, heads = relaxed.argmax(1), torch.arange(len(values))
    spent = weights[:, heads, chosen][:, ~free].sum(1)
    decided = _solve(aim[free], weights[:, free], room - spent, integral=True)
    if decided is None:
        whole = _solve(aim, weights, room, integral=True)
        return None if whole is None else whole.argmax(1)
    chosen[free] = decided.argmax(1)
    return chosen


def _solve(aim: torch.Tensor, weights: torch.Tensor, room: torch.Tensor, *, integral: bool) -> torch.Tensor | None:
    """Shares [heads, methods] that add up to 1 for every head, with the least sum of aims; None if there are none.

    Args:
        weights: [limits, heads, methods], of which `room` [limits] is there.
        integral: whether every head has one method.
    """
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    heads, methods = aim.shape
    one_each = sparse.kron(sparse.eye_array(heads), np.ones((1, methods)), format="csr")
    found = milp(
        aim.numpy().ravel(),
        integrality=np.full(aim.numel(), int(integral)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(weights.reshape(len(room), -1).numpy(), ub=room.numpy()),
        ],
        options={"mip_rel_gap": 1e-3},
    )
    return None if found.x is None else torch.from_numpy(found.x).view(heads, methods)


def _corrected(choices: _Choices, values: torch.Tensor, found: Sequence[InPlace]) -> torch.Tensor:
    """Values [heads, methods] in units of the error in place.

    What a head had in a plan has the mean of the shares that were measured. Its other methods keep their proportions,
    times the geometric mean of what its shares were of its values; where it was exact in all plans, of what those of
    all heads were in the first.
    """
    if not found:
        return values
    heads = torch.arange(len(values))
    chosen = torch.stack([_chosen(choices, measured.plan) for measured in found])
    shares = torch.stack([
        torch.cat([measured.shares[name].flatten() for name, _, _ in choices.places]) for measured in found
    ])  # fmt: skip
    # Their sums, to first order, and above 0.
    errors = torch.tensor([measured.error for measured in found], dtype=torch.float64)
    had = values[heads, chosen]
    least = _LEAST_SHARE * errors.mean() / len(heads)
    ratio = (shares.clamp(min=least) / had).log().masked_fill(had == 0, 0.0)
    common = (errors[0] / had[0].sum()).log()
    times = (had != 0).sum(0)
    scale = torch.where(times == 0, common, ratio.sum(0) / times.clamp(min=1)).exp()
    corrected = values * scale[:, None]
    for head in heads.tolist():
        for method in chosen[:, head].unique().tolist():
            corrected[head, method] = shares[chosen[:, head] == method, head].mean()
    return corrected


def _chosen(choices: _Choices, plan: AttentionPlan) -> torch.Tensor:
    """The method of every head in a plan: [heads]."""
    rows = [row for component, _, _ in choices.places for row in plan.layers[component]]
    return torch.tensor([choices.names.index(name) for row in rows for name in row])


def _default_cost(diagnosis: Mapping[str, Any], cost: str) -> float:
    """The cost of VMonarch with its defaults, relative to full attention."""
    if cost == "flops":
        return default_flops(LatentGrid(*diagnosis["grid"]))
    return _costs(diagnosis, cost)[_default(diagnosis, cost)].item()


def default_flops(grid: LatentGrid) -> float:
    """FLOPs of VMonarch with its defaults, relative to full attention."""
    return vmonarch_flops(grid, 1) / full_flops(grid, 1)


def check_work(work: float, cheapest: float, unit: float, cost: str = "flops") -> None:
    """Check that heads can do with so much work.

    Args:
        work, cost: see `plan_within_work`.
        cheapest, unit: of the cheapest candidate and of VMonarch with its defaults, relative to full attention.

    Raises:
        InputError: they cannot.
    """
    least = cheapest / unit
    if not math.isfinite(work) or work < least:
        raise InputError(cost, f"must be at least {least:.3g}, which the cheapest candidate needs, got {work}")


def _summable(choices: _Choices, measure: str) -> torch.Tensor:
    """Values whose sum over heads means something."""
    return choices.values.square() if measure == "error" else choices.values


def _default(diagnosis: Mapping[str, Any], argument: str) -> int:
    """Which candidate is VMonarch with its defaults."""
    found = [i for i, entry in enumerate(diagnosis["candidates"].values()) if not entry["options"]]
    if not found:
        raise InputError(argument, "is relative to VMonarch with its defaults, which is not among the candidates")
    return found[0]


def _relative(values: torch.Tensor, diagnosis: Mapping[str, Any], argument: str) -> torch.Tensor:
    """Values of heads and candidates, relative to their sum for VMonarch with its defaults."""
    return values / values[:, _default(diagnosis, argument)].sum()


def _plan(
    diagnosis: Mapping[str, Any], choices: _Choices, chosen: torch.Tensor, measure: str, asked: dict[str, Any]
) -> AttentionPlan:
    used = sorted(set(chosen.tolist()))
    methods = {
        choices.names[i]: None if choices.names[i] == FULL else diagnosis["candidates"][choices.names[i]]["options"]
        for i in used
    }
    layers, start = {}, 0
    for component, count, heads in choices.places:
        rows = chosen[start : start + count * heads].view(count, heads).tolist()
        layers[component] = [[choices.names[i] for i in row] for row in rows]
        start += count * heads
    grid = LatentGrid(*diagnosis["grid"])
    costs = ("flops", "time") if diagnosis.get("full_ms") is not None else ("flops",)
    works = {cost: (_costs(diagnosis, cost)[chosen] * choices.shares).sum().item() for cost in costs}
    every = torch.arange(len(chosen))
    predicted = {f"{cost}_of_full": work for cost, work in works.items()}
    predicted["flops_of_vmonarch"] = works["flops"] / default_flops(grid)
    for name in measures_of(diagnosis):
        values = choices.values if name == measure else _choices(diagnosis, name).values
        predicted[f"mean_{name}"] = values[every, chosen].mean().item()
    about = {
        "measure": measure,
        **asked,
        "grid": list(grid),
        "heads": {choices.names[i]: int((chosen == i).sum()) for i in used},
        "predicted": {name: float(f"{value:.6g}") for name, value in predicted.items()},
    }
    return AttentionPlan(methods, layers, about)
