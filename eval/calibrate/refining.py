"""A plan measured in place: how far the model's output is from full attention's, and which heads' errors make it so.

A diagnosis tells what a head loses where all others are exact. With a plan, all heads lose something, and later layers
see what the earlier ones made. So recorded calls are computed again with the plan, and with the gradient of
E = ‖v' - v‖²/‖v‖², where v' is the model's output with the plan and v that with full attention. If δ is what a head's
output is off, on its own inputs, and J the Jacobian from there to the output, then v' - v = Σ J δ to first order, and
½ ⟨∂E/∂o, δ⟩ is the head's share ⟨v' - v, J δ⟩/‖v‖² of E: all shares, which add up to E, from one backward pass.

The shares correct what the next plan goes by (`planning.plan`), and the best plan that was measured stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vmonarch import apply, restore
from vmonarch.attend import Attend
from vmonarch.base import Layer
from vmonarch.eval.calibrate.diagnosis import Rerun, Watched, differentiate
from vmonarch.eval.calibrate.planning import InPlace
from vmonarch.grid import LatentGrid
from vmonarch.kernels.flash_entropy.api import flash_entropy_attention
from vmonarch.plan import AttentionPlan
from vmonarch.processors import VMonarchProcessor


class SharesProcessor(VMonarchProcessor):
    """VMonarch with a plan that adds up the shares of heads (float64): by transformer, [layers, heads]."""

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
    """What a plan changes in the output of recorded calls, on average, and the shares of its heads.

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
            # Where all heads are exact, nothing changes.
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
    """The best of up to `rounds` plans, each of which goes by what the ones before it showed in place.

    `about["in_place"]` of the plan has the ‖v' - v‖²/‖v‖² of all of them.

    Args:
        make: a plan from those before it.

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
