"""A plan measured in place: heads' shares in the change of the output, and the plans that go by them."""

import pytest
import torch
from made_up_diagnosis import made_up

import vmonarch
from vmonarch import AttentionPlan, LatentGrid, VMonarchProcessor
from vmonarch.eval.calibrate.diagnosis import Call, DiagnosisProcessor, Recorder, watched
from vmonarch.eval.calibrate.planning import InPlace, default_flops, plan_within_work
from vmonarch.eval.calibrate.refining import measure_plan, refine
from vmonarch.kernels.flash_entropy.api import flash_entropy_attention
from vmonarch.options import VMonarchOptions

PLAN = AttentionPlan(
    {"t1": {"num_iterations": 1, "exact": None}, "first": {"kind": "first_order"}, "full": None},
    {"transformer": [["t1", "first"], ["full", "t1"]]},
    {},
)


def recorded(tiny):
    """A pipeline with stock attention, and two calls that it made."""
    pipe = tiny.pipeline()
    recorder = Recorder({"t1": VMonarchOptions(num_iterations=1)}, calls=[])
    vmonarch.apply(pipe, DiagnosisProcessor(recorder))
    pipe.set_progress_bar_config(disable=True)
    with watched(recorder, pipe):
        pipe(
            prompt=tiny.PROMPT, height=tiny.HEIGHT, width=tiny.WIDTH, num_frames=tiny.FRAMES, num_inference_steps=2,
            guidance_scale=1.0, output_type="latent", generator=torch.Generator().manual_seed(0),
            max_sequence_length=16,
        )  # fmt: skip
    vmonarch.restore(pipe)
    return pipe, recorder.calls


class Moved(VMonarchProcessor):
    """A plan with the output of one head moved on, by `step` of its distance to full attention."""

    def __init__(self, plan, place, step):
        super().__init__(plan=plan)
        self.place, self.step = place, step

    def _attend_heads(self, query, key, value, grid, heads, return_lse):
        out = super()._attend_heads(query, key, value, grid, heads, return_lse)
        if self._layer == self.place[0]:
            head = slice(self.place[1], self.place[1] + 1)
            exact = flash_entropy_attention(query, key, value)[0]
            out[:, :, head] += self.step * (out - exact)[:, :, head]
        return out


def change_by(pipe, calls, processor):
    """‖v' - v‖²/‖v‖², the mean over calls."""
    vmonarch.apply(pipe, processor)
    with torch.no_grad():
        found = [call.module(*call.args, **call.kwargs)[0].double() for call in calls]
    vmonarch.restore(pipe)
    kept = [call.velocity.double() for call in calls]
    pairs = zip(found, kept, strict=True)
    return sum(((a - b).square().sum() / b.square().sum()).item() for a, b in pairs) / len(calls)


def test_the_share_of_a_head_is_half_of_how_the_change_grows_with_its_error(tiny):
    """By finite differences: E grows by 2·share·ε where the head's error grows by ε."""
    pipe, calls = recorded(tiny)
    assert len(calls) == 2 and all(isinstance(call, Call) for call in calls)
    found = measure_plan(pipe, PLAN, calls)
    assert found.plan is PLAN
    assert found.error == pytest.approx(change_by(pipe, calls, VMonarchProcessor(plan=PLAN)), rel=1e-4)
    shares = found.shares["transformer"]
    assert abs(shares[1, 0]) < 1e-6 * found.error, "an exact head"
    for place in ((0, 0), (0, 1), (1, 1)):
        up, down = (change_by(pipe, calls, Moved(PLAN, place, step)) for step in (0.05, -0.05))
        assert shares[place].item() == pytest.approx((up - down) / 0.2, rel=0.02), place
    assert shares.sum().item() == pytest.approx(found.error, rel=0.2)
    model = pipe.transformer
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not model.is_gradient_checkpointing and not model._forward_hooks


def made_up_in_place():
    """A diagnosis, and what every head and method loses in place: other heads lose more than the diagnosis says."""
    found = made_up(steps=1, layers=4, heads=6)
    candidates = found["transformers"]["transformer"]["candidates"]
    wrong = torch.exp(2 * torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    truth = {name: 0.01 * wrong * torch.tensor(values["layer_error"])[0] for name, values in candidates.items()}
    return found, truth | {"full": torch.zeros(4, 6)}


def in_place(plan, truth):
    shares = torch.zeros(4, 6, dtype=torch.float64)
    for layer, names in enumerate(plan.layers["transformer"]):
        for head, name in enumerate(names):
            shares[layer, head] = truth[name][layer, head]
    return InPlace(plan, shares.sum().item(), {"transformer": shares})


def test_shares_in_place_correct_what_a_plan_goes_by(monkeypatch):
    found, truth = made_up_in_place()
    work = 0.3 / default_flops(LatentGrid(8, 3, 4)) + 1e-9
    # The same with what is true in place of what the diagnosis says.
    part = found["transformers"]["transformer"]
    told = {name: {"layer_error": [truth[name].tolist()]} for name in part["candidates"]}
    known = found | {"transformers": {"transformer": part | {"candidates": told}}}
    best = in_place(plan_within_work(known, work), truth).error
    seen = []
    monkeypatch.setattr(
        "vmonarch.eval.calibrate.refining.measure_plan",
        lambda pipe, plan, calls: seen.append(in_place(plan, truth)) or seen[-1],
    )
    refined = refine(None, [], lambda seen: plan_within_work(found, work, found=seen), 8)
    errors = [measured.error for measured in seen]
    assert refined.about["in_place"] == pytest.approx(errors, rel=1e-5)
    assert in_place(refined, truth).error == min(errors)
    assert best <= min(errors) < 1.05 * best < 0.8 * errors[0]
    assert all(measured.plan.about["predicted"]["flops_of_full"] <= 0.3 + 1e-6 for measured in seen)
    plans = [measured.plan.layers for measured in seen]
    assert all(plans.count(plan) == 1 for plan in plans), "no plan is measured twice"


def test_a_head_whose_errors_cancel_others_keeps_its_measured_share():
    """Below zero a share cannot scale what its head's other methods lose; they are taken to lose little."""
    found, truth = made_up_in_place()
    first = plan_within_work(found, 1.2)
    measured = in_place(first, truth)
    layer, head = next(
        (i, j) for i, row in enumerate(first.layers["transformer"]) for j, name in enumerate(row) if name == "default"
    )
    measured.shares["transformer"][layer, head] = -0.1
    again = plan_within_work(found, 1.2, found=[measured])
    assert again.layers["transformer"][layer][head] == "default"
    measured.shares["transformer"][layer, head] = 10 * truth["default"].sum()
    again = plan_within_work(found, 1.2, found=[measured])
    assert again.layers["transformer"][layer][head] == "full"
    # Of two plans that gave it the same method, the mean counts, whichever was measured last.
    low = in_place(first, truth)
    low.shares["transformer"][layer, head] = -0.1
    for found_in_place in ([low, measured], [measured, low]):
        again = plan_within_work(found, 1.2, found=found_in_place)
        assert again.layers["transformer"][layer][head] == "full"


def test_the_best_plan_in_place_is_kept_and_not_the_last(monkeypatch):
    plans = [AttentionPlan({"a": {"num_iterations": n}}, {"transformer": [["a"] * n]}) for n in (1, 2, 3)]
    monkeypatch.setattr(
        "vmonarch.eval.calibrate.refining.measure_plan",
        lambda pipe, plan, calls: InPlace(plan, {1: 0.2, 2: 0.1, 3: 0.3}[plan.methods["a"].num_iterations], {}),
    )
    refined = refine(None, [], lambda seen: plans[len(seen)], 3)
    assert refined == plans[1] and refined.about["in_place"] == [0.2, 0.1, 0.3]
