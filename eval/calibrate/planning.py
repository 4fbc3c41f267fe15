"""From a diagnosis to a plan: the method of every head that minimises the total loss within a budget of work."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vmonarch.configs import InputError
from vmonarch.eval.calibrate import MEASURES
from vmonarch.flops import full_flops, vmonarch_flops
from vmonarch.grid import LatentGrid
from vmonarch.plan import FULL, AttentionPlan

if TYPE_CHECKING:
    from vmonarch.eval.calibrate.settings import Budget

# Weight of "layer_error" relative to "output_error".
_LAYER_WEIGHT = 0.4
# A head's share counts as at least this part of the mean share: shares are noisy and can be negative.
_LEAST_SHARE = 0.02
# Time limit of the integer program.
_SECONDS = 120


@dataclass(frozen=True)
class InPlace:
    """A plan that was measured in place (`run.measure_plan`).

    Args:
        error: ‖v' - v‖²/‖v‖² of the model's output.
        shares: the share of each head in it, [layers, heads] by transformer.
    """

    plan: AttentionPlan
    error: float
    shares: Mapping[str, torch.Tensor]


def default_flops(grid: LatentGrid) -> float:
    """FLOPs of VMonarch with its defaults, relative to full attention."""
    return vmonarch_flops(grid, 1) / full_flops(grid, 1)


class _Choices:
    """The methods that the heads of all transformers can choose from.

    Attributes:
        names: of the methods, exact attention last.
        values: [heads, methods] by measure: the mean over the recorded steps, for "error" the root mean square; 0 for
            exact attention.
        costs: [methods] by "flops" and, if it was measured, "time", relative to exact attention.
        shares: [heads, 1], a head's share of the work of a run; transformers run for different numbers of steps.
        default: index of VMonarch with its defaults; None if it is no candidate.
    """

    def __init__(self, diagnosis: Mapping[str, Any]) -> None:
        self.candidates, self.parts = diagnosis["candidates"], diagnosis["transformers"]
        self.grid = LatentGrid(*diagnosis["grid"])
        full = {"flops": ("flops", 1.0), "time": ("ms", diagnosis.get("full_ms"))}
        self.costs = {
            cost: torch.tensor([*(entry[key] / of for entry in self.candidates.values()), 1.0], dtype=torch.float64)
            for cost, (key, of) in full.items()
            if of is not None
        }
        self.names = (*self.candidates, FULL)
        plain = [name for name, entry in self.candidates.items() if not entry["options"]]
        self.default = self.names.index(plain[0]) if plain else None
        self.values = {}
        have = [values for part in self.parts.values() for values in part["candidates"].values()]
        # Without gradients there is no "output_error".
        for measure in (name for name in MEASURES if all(name in values for values in have)):
            found = []
            for part in self.parts.values():
                measured = [part["candidates"][name][measure] for name in self.candidates]
                steps = torch.tensor(measured, dtype=torch.float64)  # [methods, steps, layers, heads]
                mean = steps.square().mean(1).sqrt() if measure == "error" else steps.mean(1)
                found.append(mean.flatten(1).mT)
            self.values[measure] = torch.nn.functional.pad(torch.cat(found), (0, 1))
        total = sum(len(part["steps"]) for part in self.parts.values())
        ones = [torch.ones(part["layers"] * part["heads"], 1).double() for part in self.parts.values()]
        parts = zip(ones, self.parts.values(), strict=True)
        self.shares = torch.cat([one / len(one) * len(part["steps"]) / total for one, part in parts])

    def of(self, measure: str) -> torch.Tensor:
        """Values of a measure, [heads, methods], that can be summed over heads: those of "error" are squared."""
        if measure not in self.values:
            raise InputError("measure", f"must be one of {', '.join(self.values)}, got {measure!r}")
        return self.values[measure].square() if measure == "error" else self.values[measure]

    def plan(self, chosen: torch.Tensor, measure: str, asked: dict[str, Any]) -> AttentionPlan:
        """The plan that gives the heads the methods `chosen` [heads], with its predicted loss and cost."""
        used = sorted(set(chosen.tolist()))
        options = [*(entry["options"] for entry in self.candidates.values()), None]
        layers, left = {}, [self.names[i] for i in chosen.tolist()]
        for component, part in self.parts.items():
            layers[component] = [[left.pop(0) for _ in range(part["heads"])] for _ in range(part["layers"])]
        of_full = lambda costs: (costs[chosen] * self.shares[:, 0]).sum().item()
        predicted = {f"{cost}_of_full": of_full(costs) for cost, costs in self.costs.items()}
        predicted["flops_of_vmonarch"] = predicted["flops_of_full"] / default_flops(self.grid)
        for name, values in self.values.items():
            predicted[f"mean_{name}"] = values[torch.arange(len(chosen)), chosen].mean().item()
        about = {
            "measure": measure,
            **asked,
            "grid": list(self.grid),
            "heads": {self.names[i]: int((chosen == i).sum()) for i in used},
            "predicted": {name: float(f"{value:.6g}") for name, value in predicted.items()},
        }
        return AttentionPlan({self.names[i]: options[i] for i in used}, layers, about)


def plan(diagnosis: Mapping[str, Any], budget: Budget, found: Sequence[InPlace] = ()) -> AttentionPlan:
    """The plan that a diagnosis and a budget lead to.

    An integer program (HiGHS) minimises the sum of the measure over all heads (for relative errors, of their squares).
    Every head has one method, and the costs stay within the budget, which is relative to VMonarch with its defaults.

    Without a measure, it minimises "output_error" plus `_LAYER_WEIGHT` times "layer_error", both relative to VMonarch
    with its defaults, because first-order measurements do not see how errors add up. If the diagnosis lacks
    "output_error", it minimises "layer_error" alone; if the defaults are no candidate, "output_error" alone.

    Args:
        found: plans of this diagnosis that were measured in place; their heads' shares correct the measure.

    Raises:
        InputError: the diagnosis lacks the measure or the time; the budget is below the cheapest methods; a time is
            given and VMonarch with its defaults is no candidate; or no plan was found in two minutes.
    """
    choices = _Choices(diagnosis)
    cost, work = ("flops", budget.flops) if budget.time is None else ("time", budget.time)
    work = 1.0 if work is None else work
    sensitive = "output_error" in choices.values
    measure = budget.measure or ("output_error" if sensitive else "layer_error")
    if cost not in choices.costs:
        raise InputError("time", "was not measured: the diagnosis was made without a GPU; use flops")
    values, costs = choices.of(measure), choices.costs[cost]
    if cost == "time" and choices.default is None:
        raise InputError(cost, "is relative to VMonarch with its defaults, which is not among the candidates")
    unit = default_flops(choices.grid) if cost == "flops" else costs[choices.default].item()
    if work < (least := costs.min().item() / unit):
        raise InputError(cost, f"must be at least {least:.3g}, which the cheapest candidate needs, got {work}")
    asked: dict[str, Any] = {cost: work}
    if budget.measure is None and sensitive and choices.default is not None:
        asked["weights"] = {"layer_error": _LAYER_WEIGHT}
        relative = [choices.of(name) / choices.of(name)[:, choices.default].sum() for name in (measure, "layer_error")]
        values = relative[0] + _LAYER_WEIGHT * relative[1]
    if found:
        values = _corrected(choices, values, found)
    made = choices.plan(_least(values, costs * choices.shares / (work * unit), cost), measure, asked)
    if all(options is None for options in made.methods.values()):
        warnings.warn(
            "the plan is nothing but full attention, so it makes nothing faster: it may cost too much, or the videos"
            " are so small that all candidates cost more",
            stacklevel=2,
        )
    return made


def _least(values: torch.Tensor, costs: torch.Tensor, argument: str) -> torch.Tensor:
    """The method of every head, [heads], that minimises the sum of the values [heads, methods].

    The sum is within a thousandth of the least, or the best that two minutes find; 1,600 heads take half a minute.

    Args:
        costs: [heads, methods]; those of a plan add up to at most 1.
        argument: the setting that limits the costs.

    Raises:
        InputError: no plan was found, because time ran out or because there is none.
    """
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    heads, methods = values.shape
    # Of several plans that lose equally little, the cheapest is taken.
    aim = values / values.abs().max().clamp(min=1e-300) + 1e-9 * costs / costs.max()
    one_each = sparse.kron(sparse.eye_array(heads), np.ones((1, methods)), format="csr")
    found = milp(
        aim.numpy().ravel(),
        integrality=np.ones(aim.numel()),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(costs.numpy().reshape(1, -1), ub=1.0)],
        options={"mip_rel_gap": 1e-3, "time_limit": _SECONDS},
    )
    if found.x is None:
        # scipy's status 1: a limit was reached.
        why = f"time ran out after {_SECONDS} s" if found.status == 1 else found.message
        raise InputError(argument, f"has no plan that was found: {why}; give more work or fewer candidates")
    return torch.from_numpy(found.x).view(heads, methods).argmax(1)


def _corrected(choices: _Choices, values: torch.Tensor, found: Sequence[InPlace]) -> torch.Tensor:
    """Values [heads, methods] in units of the error in place.

    A method that a head had in a plan gets the mean of its measured shares. The head's other methods are scaled by the
    geometric mean of its ratios of share to value. If the head was exact in all plans, they are scaled by the ratio of
    the first plan's error to the sum of the values in it.
    """
    heads = torch.arange(len(values))
    chosen = torch.tensor([
        [choices.names.index(name) for component in choices.parts for row in measured.plan.layers[component]
         for name in row] for measured in found
    ])  # fmt: skip
    shares = torch.stack([torch.cat([measured.shares[name].flatten() for name in choices.parts]) for measured in found])
    # To first order the sums of the shares, but always above 0.
    errors = torch.tensor([measured.error for measured in found], dtype=torch.float64)
    had = values[heads, chosen]
    least = _LEAST_SHARE * errors.mean() / len(heads)
    ratio = (shares.clamp(min=least) / had).log().masked_fill(had == 0, 0.0)
    common = (errors[0] / had[0].sum()).log()
    times = (had != 0).sum(0)
    corrected = values * torch.where(times == 0, common, ratio.sum(0) / times.clamp(min=1)).exp()[:, None]
    for head in heads.tolist():
        for method in chosen[:, head].unique().tolist():
            corrected[head, method] = shares[chosen[:, head] == method, head].mean()
    return corrected
