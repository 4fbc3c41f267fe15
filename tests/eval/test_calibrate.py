"""The diagnosis says of every head what dense matrices say, and plans spend work where it says that it is needed."""

from functools import partial

import pytest
import torch

import vmonarch
from vmonarch import AttentionPlan, ExactBlocks, LatentGrid, VMonarchProcessor, vmonarch_attention
from vmonarch.configs import InputError
from vmonarch.eval.calibrate import diagnosis
from vmonarch.eval.calibrate.diagnosis import (
    FORMAT,
    Recorder,
    document,
    measure,
    recorded,
    replaced_layers,
)
from vmonarch.eval.calibrate.planning import InPlace, default_flops, plan
from vmonarch.eval.calibrate.run import measure_plan, refine
from vmonarch.eval.calibrate.settings import Budget
from vmonarch.options import VMonarchOptions

GRID = LatentGrid(4, 3, 5)
CANDIDATES = {
    "t1": VMonarchOptions(num_iterations=1, exact=None),
    "own": VMonarchOptions(exact=ExactBlocks(band=0)),
    "first": VMonarchOptions(),
    "band": VMonarchOptions(exact=ExactBlocks(band=1)),
}
# Of a pipeline's layers.
RECORDED = {"t1": VMonarchOptions(num_iterations=1), "default": VMonarchOptions()}


def tensors(B=2, H=3, D=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, GRID.tokens, H, D, generator=generator, dtype=dtype) for _ in range(3))
    return 2 * q, k, v


def dense(q, k):
    """The softmax map [B, H, S, S]."""
    return torch.einsum("bqhd,bkhd->bhqk", q, k).mul(q.shape[-1] ** -0.5).softmax(-1)


def test_statistics_are_those_of_the_dense_maps():
    q, k, v = tensors()
    totals = measure(q, k, v, GRID, CANDIDATES)
    P = dense(q, k)
    exact = torch.einsum("bhqk,bkhd->bqhd", P, v)
    B, S, H, _ = q.shape
    assert totals["rows"] == B * S
    torch.testing.assert_close(totals["energy"], exact.square().sum((0, 1, 3)))
    for name, options in CANDIDATES.items():
        # With these values the output is the map [B, H, S, S] itself.
        columns = torch.eye(S, dtype=q.dtype).view(1, S, 1, S).expand(B, S, H, S)
        M = vmonarch_attention(q, k, columns, grid=GRID, options=options).permute(0, 2, 1, 3)
        difference = vmonarch_attention(q, k, v, grid=GRID, options=options) - exact
        torch.testing.assert_close(totals["squares", name], difference.square().sum((0, 1, 3)))
        kl = (M * (M.clamp(min=1e-30).log() - P.log())).sum((0, 2, 3))
        # Where exact and Monarch parts do not know of each other, weights of replaced rows are exact.
        torch.testing.assert_close(totals["kl", name], kl, atol=1e-3, rtol=1e-4)
    assert (totals["kl", "band"] < totals["kl", "own"]).all()


def record(tiny, steps):
    """(pipeline, what is recorded of it, its calls)."""
    pipe, recorder = tiny.pipeline("t2v"), Recorder(RECORDED)
    with recorded(pipe) as calls:
        tiny.quickly(pipe, steps)
    recorder.diagnose(pipe, calls)
    return pipe, recorder, calls


class Moved(VMonarchProcessor):
    """A plan or full attention, where some heads of one layer are moved by `share` of the way to a target."""

    def __init__(self, layer, heads, share, target, plan=None):
        super().__init__(plan=plan)
        self.layer, self.heads, self.share, self.target = layer, heads, share, target

    def attention(self, layer):
        attend = None if self.plan is None else super().attention(layer)
        return partial(self.moved, attend or diagnosis.full_attention) if layer.block == self.layer else attend

    def moved(self, attend, query, key, value, call):
        out = attend(query, key, value, call)[0]
        target = self.target(query, key, value, grid=call.grid)
        out[:, :, self.heads] += self.share * (target - out)[:, :, self.heads]
        return out, None


def velocities(pipe, calls, processor):
    """The model's outputs in calls that are computed again."""
    vmonarch.apply(pipe, processor)
    with torch.no_grad():
        found = [call.module(*call.args, **call.kwargs)[0].double() for call in calls]
    vmonarch.restore(pipe)
    return found


def test_the_output_error_is_what_the_error_of_a_head_changes_in_the_output(tiny):
    """⟨g, δ⟩ is how fast ⟨u, v⟩ grows when the head's output moves towards the candidate's: by finite differences.

    Heads of one layer share the square of what the defaults change when they take the place of all of them.
    """
    pipe, recorder, (call,) = record(tiny, steps=1)

    def output(layer, heads, share, options):
        (found,) = velocities(pipe, [call], Moved(layer, heads, share, partial(vmonarch_attention, options=options)))
        return found

    found = document(recorder, {})["transformers"]["transformer"]["candidates"]
    for layer in range(2):
        velocity = output(layer, [], 0.0, VMonarchOptions())
        noise = torch.randn(velocity.shape, generator=torch.Generator().manual_seed(0)).double()
        slopes = {
            (name, head): ((output(layer, [head], 0.05, options) - output(layer, [head], -0.05, options)) * noise)
            .sum().item() / 0.1
            for name, options in RECORDED.items()
            for head in range(2)
        }  # fmt: skip
        change = (output(layer, [0, 1], 1.0, VMonarchOptions()) - velocity).square().sum() / velocity.square().sum()
        scale = change.item() / (slopes["default", 0] ** 2 + slopes["default", 1] ** 2)
        for (name, head), slope in slopes.items():
            wanted = scale * slope**2
            assert found[name]["output_error"][0][layer][head] == pytest.approx(wanted, rel=0.05), (name, layer, head)
        assert scale != pytest.approx(1 / velocity.square().sum().item(), rel=0.01)


def test_layers_of_deep_models_are_scaled_by_their_neighbours():
    """First order is off by a factor that is a power of the layer: what some layers tell is enough for all."""
    layers = 40
    known = replaced_layers(layers)
    factor = [16.0 / (1 + layer) ** 1.5 for layer in range(layers)]
    slopes = [torch.tensor([1.0, 2.0], dtype=torch.float64) * (1 + layer % 3) for layer in range(layers)]
    rows = [
        {("output", "default"): slopes[layer], ("output", "half"): slopes[layer] / 2}
        | {"velocity": 5.0, "change": factor[layer] * slopes[layer].sum().item() if layer in known else 0.0}
        for layer in range(layers)
    ]
    found = diagnosis._output_errors([rows], ("default", "half"), "default")
    assert len(known) == 8 and known[:3] == (0, 1, 2) and known[-1] == layers - 1
    assert replaced_layers(8) == tuple(range(8)) and replaced_layers(9) == (0, 1, 2, 4, 8)
    assert len(replaced_layers(100)) == 8
    wanted = torch.stack(slopes) * torch.tensor(factor, dtype=torch.float64)[:, None] / 5
    torch.testing.assert_close(found["default"][0], wanted)
    torch.testing.assert_close(found["half"][0], wanted / 2)


# Plans


def plan_within_work(found, work, measure=None, *, cost="flops", in_place=()):
    return plan(found, Budget(**{cost: work}, measure=measure), in_place)


def made_up(steps=2, layers=3, heads=4):
    """A diagnosis whose errors fall with the work of a candidate, differently for every head."""
    names = {"cheap": 0.1, "default": 0.3, "dear": 0.6}
    options = {"cheap": {"num_iterations": 1, "exact": None}, "default": {}, "dear": {"exact": {"band": 1}}}
    scale = torch.rand(steps, layers, heads, generator=torch.Generator().manual_seed(0)) + 0.1
    values = {name: (scale * (1 - flops) ** 2).tolist() for name, flops in names.items()}
    part = {"steps": list(range(steps)), "layers": layers, "heads": heads}
    part["candidates"] = {n: dict.fromkeys(("error", "layer_error", "kl"), v) for n, v in values.items()}
    candidates = {name: {"options": options[name], "flops": flops} for name, flops in names.items()}
    return {"format": FORMAT, "grid": [8, 3, 4], "candidates": candidates, "transformers": {"transformer": part}}


def test_a_plan_for_a_time_spends_what_was_measured():
    """The dear candidate takes no longer than the default here, so a plan for the default's time has it everywhere."""
    found = made_up()
    with pytest.raises(InputError, match="time was not measured"):
        plan_within_work(found, 1.0, "kl", cost="time")
    found["full_ms"] = 2.0
    for name, ms in (("cheap", 0.2), ("default", 0.5), ("dear", 0.5)):
        found["candidates"][name]["ms"] = ms
    plan = plan_within_work(found, 1.0, "kl", cost="time")
    assert {name for heads in plan.layers["transformer"] for name in heads} == {"dear"}
    assert plan.about["time"] == 1.0 and plan.about["predicted"]["time_of_full"] == 0.25
    assert plan.about["predicted"]["flops_of_full"] == 0.6
    cheapest = plan_within_work(found, 0.4 + 1e-9, "kl", cost="time")
    assert {name for heads in cheapest.layers["transformer"] for name in heads} == {"cheap"}
    with pytest.raises(InputError, match=r"time must be at least 0\.4"):
        plan_within_work(found, 0.3, "kl", cost="time")
    found["candidates"]["default"]["options"] = {"coarse": 2}
    with pytest.raises(InputError, match="time is relative to VMonarch with its defaults"):
        plan_within_work(found, 1.0, "layer_error", cost="time")


def test_plans_weigh_the_error_of_layers_too():
    """What all heads change in the output is measured to first order, which does not see how errors add up."""
    found = made_up(layers=4, heads=8)
    for values in found["transformers"]["transformer"]["candidates"].values():
        values["output_error"] = (1000 * torch.tensor(values["layer_error"]).flip(-1)).tolist()
    part = found["transformers"]["transformer"]["candidates"]["default"]
    of_default = {name: torch.tensor(part[name]).mean().item() for name in ("output_error", "layer_error")}
    plans = {name: plan_within_work(found, 1.2, name).about for name in (None, "output_error", "layer_error")}
    lost = {
        name: [about["predicted"][f"mean_{of}"] / default for of, default in of_default.items()]
        for name, about in plans.items()
    }
    assert lost["output_error"][0] < lost[None][0] < lost["layer_error"][0]
    assert lost["layer_error"][1] < lost[None][1] < lost["output_error"][1]
    joined = {name: output + 0.4 * layer for name, (output, layer) in lost.items()}
    assert joined[None] == min(joined.values())
    assert plans[None]["weights"] == {"layer_error": 0.4} and "weights" not in plans["output_error"]
    # They are relative to the defaults, without which the change of the output stands alone.
    found["candidates"]["default"]["options"] = {"num_iterations": 3}
    assert plan_within_work(found, 1.2) == plan_within_work(found, 1.2, "output_error")


# Plans in place


PLAN = AttentionPlan(
    {"t1": {"num_iterations": 1, "exact": None}, "first": {"kind": "first_order"}, "full": None},
    {"transformer": [["t1", "first"], ["full", "t1"]]},
    {},
)


def change_by(pipe, calls, processor):
    """‖v' - v‖²/‖v‖², the mean over calls."""
    found = velocities(pipe, calls, processor)
    kept = [call.velocity.double() for call in calls]
    pairs = zip(found, kept, strict=True)
    return sum(((a - b).square().sum() / b.square().sum()).item() for a, b in pairs) / len(calls)


def test_the_share_of_a_head_is_half_of_how_the_change_grows_with_its_error(tiny):
    """By finite differences: E grows by 2·share·ε where the head's error grows by ε."""
    pipe, _, calls = record(tiny, steps=2)
    assert len(calls) == 2
    found = measure_plan(pipe, PLAN, calls)
    assert found.plan is PLAN
    assert found.error == pytest.approx(change_by(pipe, calls, VMonarchProcessor(plan=PLAN)), rel=1e-4)
    shares = found.shares["transformer"]
    assert abs(shares[1, 0]) < 1e-6 * found.error, "an exact head"
    exact = lambda *tensors, grid: diagnosis.flash_entropy_attention(*tensors)[0]
    for layer, head in ((0, 0), (0, 1), (1, 1)):
        up, down = (change_by(pipe, calls, Moved(layer, [head], step, exact, PLAN)) for step in (-0.05, 0.05))
        assert shares[layer, head].item() == pytest.approx((up - down) / 0.2, rel=0.02), (layer, head)
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
        "vmonarch.eval.calibrate.run.measure_plan",
        lambda pipe, plan, calls: seen.append(in_place(plan, truth)) or seen[-1],
    )
    refined = refine(None, [], lambda seen: plan_within_work(found, work, in_place=seen), 8)
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
    again = plan_within_work(found, 1.2, in_place=[measured])
    assert again.layers["transformer"][layer][head] == "default"
    measured.shares["transformer"][layer, head] = 10 * truth["default"].sum()
    again = plan_within_work(found, 1.2, in_place=[measured])
    assert again.layers["transformer"][layer][head] == "full"
    # Of two plans that gave it the same method, the mean counts, whichever was measured last.
    low = in_place(first, truth)
    low.shares["transformer"][layer, head] = -0.1
    for found_in_place in ([low, measured], [measured, low]):
        again = plan_within_work(found, 1.2, in_place=found_in_place)
        assert again.layers["transformer"][layer][head] == "full"


def test_the_best_plan_in_place_is_kept_and_not_the_last(monkeypatch):
    plans = [AttentionPlan({"a": {"num_iterations": n}}, {"transformer": [["a"] * n]}) for n in (1, 2, 3)]
    monkeypatch.setattr(
        "vmonarch.eval.calibrate.run.measure_plan",
        lambda pipe, plan, calls: InPlace(plan, {1: 0.2, 2: 0.1, 3: 0.3}[plan.methods["a"].num_iterations], {}),
    )
    refined = refine(None, [], lambda seen: plans[len(seen)], 3)
    assert refined == plans[1] and refined.about["in_place"] == [0.2, 0.1, 0.3]
