"""Residual sharing (`refresh`): when attention is exact, whose residual is added, and how long it lives."""

from __future__ import annotations

import collections
import copy
import gc
import itertools
import pickle
import warnings
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from op_checks import in_interpreter

import vmonarch
from vmonarch import LatentGrid, Refresh, VMonarchOptions, VMonarchProcessor, attend, residuals
from vmonarch.eval.bench.e2e import transformers_by_step
from vmonarch.flops import full_flops, vmonarch_flops
from vmonarch.kernels.residual.api import add_residual, residual_bytes
from vmonarch.refresh import Schedule, spaced_steps
from vmonarch.residuals import Branch


@pytest.mark.parametrize(
    "count, steps, expected",
    [(8, 50, (0, 1, 3, 7, 12, 20, 28, 38)), (6, 20, (0, 1, 2, 5, 9, 14)), (4, 4, (0, 1, 2, 3)), (0, 4, ())],
    ids=str,
)
def test_refreshes_are_spaced_at_growing_intervals(count, steps, expected):
    assert spaced_steps(count, steps) == expected


@pytest.mark.parametrize("kind", ["t2v", "t2v-2.2", "t2v-5b", "i2v-2.1", "vace", "v2v", "animate", "chronoedit"])
def test_the_last_residual_of_the_branch_is_added(tiny, kind, used, renewed):
    # The second transformer of 2.2 begins with step 2, where it has no residual.
    pipe = tiny.applied(kind, refresh=[0] if kind == "t2v-2.2" else [0, 2])
    expected, last = tiny.generate(pipe, steps=5), []
    # Video to video runs three of five steps. In each, every branch calls every layer in the same order.
    of_a_step = len(used) // (3 if kind == "v2v" else 5)
    for number, residual in enumerate(residual for _, residual in used):
        step, place = divmod(number, of_a_step)
        exact = step in (0, 2)
        if exact and place == 0:
            last, renewed[:of_a_step] = renewed[:of_a_step], []
        assert residual is None if exact else residual is last[place]
    assert torch.equal(tiny.generate(pipe, steps=5), expected)


NAN = float("nan")


def simulate(refresh, steps, rate=0.0099, growth=0.0099, times=None, skipped=()):
    """(exact steps, computed ones, whether `at_most` held some back) of a run in which errors grow with time.

    Those of residual sharing by `rate` in each unit of time after an exact step, those of prediction by `growth` after
    a computed one; caches skip some steps.
    """
    rate_in = rate if callable(rate) else lambda step: rate
    times = times or [float(step) for step in range(steps)]
    schedule, exact, computed = Schedule(refresh, steps, times), [], []
    for step in range(steps):
        schedule.enter(step)
        if step in schedule.forward:
            computed.append(step)
            if len(computed) > 2:
                schedule.measured_forward(torch.tensor(growth * (times[step] - times[computed[-2]])))
        if schedule.due == step and step not in skipped:
            schedule.computed = True
            if exact:
                schedule.measured(torch.tensor(rate_in(step) * (times[step] - times[exact[-1]])))
            exact.append(step)
    return tuple(schedule.exact), tuple(computed), schedule.held


@pytest.mark.parametrize(
    "options, steps, expected",
    [
        # Six at the start; then intervals of twice the last one, up to five steps, in which the error comes to 0.05.
        ({}, 50, ((*range(6), 7, 11, 16, 21, 26, 31, 36, 41, 46), False)),
        # Half the steps, each with twice the noise: half the interval, rounded down.
        ({"times": [2.0 * step for step in range(25)]}, 25, ((*range(3), *range(4, 23, 2)), False)),
        # Where the noise changes faster, exact steps come closer together.
        ({"times": [step + max(0, step - 20) for step in range(50)]}, 50,
            ((*range(6), 7, 11, 16, *range(20, 49, 2)), False)),
        ({"rate": 0.0}, 50, ((*range(6), 7, 11, 19, 35), False)),
        ({"rate": NAN}, 8, ((0, 1, 2, 4), True)),
        ({"rate": 1.0}, 4, ((0, 1), True)),
        ({"skipped": (7, 8)}, 20, ((0, 1, 2, 4, 9, 14), False)),
    ],
    ids=["", "fewer-steps", "faster-noise", "nothing-changes", "nan", "at-most", "cache"],
)  # fmt: skip
def test_the_next_exact_step_comes_before_the_error_exceeds_the_tolerance(options, steps, expected):
    exact, _, held = simulate(Refresh(tolerance=0.05), steps, **options)
    assert (exact, held) == expected


def test_at_most_so_many_steps_are_exact_however_large_the_error():
    for at_most, count in ((0.28, 14), (3, 3)):
        exact, _, held = simulate(Refresh(tolerance=1e-3, at_most=at_most), 50)
        assert exact == spaced_steps(count, 50) and held
    # The third of five steps comes at 8 in place of 3, with too large an error; the others need no more.
    early = lambda step: 0.1 if step < 10 else 1e-4
    assert simulate(Refresh(tolerance=0.05, at_most=5), 50, rate=early)[2]


@pytest.fixture
def errors_by_hand(monkeypatch):
    """The errors of layers, [samples] each, by their definition and in float64, as they are measured."""
    errors, right = [], residuals.renew_residual

    def renew(residual, exact, approximate, **options):
        shared = add_residual(approximate.double(), residual)
        of = lambda x: x.square().sum((1, 2, 3))
        errors.append((of(exact.double() - shared) / of(exact.double())).sqrt())
        return right(residual, exact, approximate, **options)

    monkeypatch.setattr(residuals, "renew_residual", renew)
    return errors


@pytest.mark.parametrize(
    "kind, options", [("t2v", {}), ("i2v-2.1", {}), ("t2v", {"num_videos_per_prompt": 2, "seed": 3}), ("t2v-2.2", {})],
    ids=["text", "image", "batch", "two-transformers"],
)  # fmt: skip
def test_a_tolerance_chooses_the_exact_steps(tiny, errors_by_hand, kind, options):
    pipe, steps = tiny.pipeline(kind), 10
    vmonarch.apply(pipe, VMonarchProcessor(refresh=Refresh(tolerance=0.2)))
    found = tiny.generate(pipe, steps=steps, **options)
    ran = vmonarch.report(pipe)
    assert 3 <= len(ran.exact) <= 5
    # Each layer of each of two branches; of a batch the worst sample counts.
    measured = [error for error in ran.exact.values() if error is not None]
    layers = len(errors_by_hand) // len(measured)
    by_hand = [torch.stack(errors_by_hand[i : i + layers]) for i in range(0, len(errors_by_hand), layers)]
    worst = [torch.stack([branch.mean(0).max() for branch in step.chunk(2)]).mean() for step in by_hand]
    assert layers == 2 * 2 and measured == pytest.approx([error.item() for error in worst], rel=1e-4)
    if kind == "t2v-2.2":
        # The second transformer begins anew: its first step has nothing to measure.
        boundary = transformers_by_step(pipe, steps).index("transformer_2")
        assert ran.exact[boundary] is None and ran.exact[0] is None and boundary + 1 in ran.exact
    vmonarch.apply(pipe, VMonarchProcessor(refresh=list(ran.exact)))
    assert torch.equal(tiny.generate(pipe, steps=steps, **options), found)


def test_exact_steps_after_the_first_are_in_eight_bits(tiny, monkeypatch):
    pipe, asked, found = tiny.pipeline("t2v"), [], []

    def spy(self, query, key, value, call):
        asked.append((call.branch.schedule.step, call.precision))
        return right(self, query, key, value, call)

    right = attend.Exact.__call__
    monkeypatch.setattr(attend.Exact, "__call__", spy)
    for precision in (None, "int8"):
        asked.clear()
        vmonarch.apply(pipe, VMonarchProcessor(refresh=Refresh([0, 1, 2, 5], precision=precision)))
        found.append(tiny.generate(pipe, steps=10))
        # Of ten steps, 12 % are the first two; two layers have two branches.
        assert asked == [(step, precision if step > 1 else None) for step in (0, 1, 2, 5) for _ in range(4)]
    assert 0 < (found[1] - found[0]).norm() < 0.05 * found[0].norm()
    assert "4 of 10 steps exact (0–2, 5); 2 of them in eight bits (2, 5); attention" in str(vmonarch.report(pipe))
    vmonarch.apply(pipe, VMonarchProcessor(refresh=Refresh([0, 1, 9], precision="int8"), dense_steps=[9]))
    tiny.generate(pipe, steps=10)
    assert "3 of 10 steps exact (0–1, 9); 0 of them in eight bits (none); " in str(vmonarch.report(pipe))


def test_the_report_says_what_ran(tiny):
    pipe = tiny.pipeline("t2v")
    with pytest.raises(ValueError, match="no processor is applied"):
        vmonarch.report(pipe)
    vmonarch.apply(pipe, VMonarchProcessor(refresh=[0, 1], dense_steps=[1], dense_layers=[0], coarse=2))
    assert vmonarch.report(pipe).work is vmonarch.report(pipe).grid is None
    tiny.generate(pipe, steps=4)
    ran = vmonarch.report(pipe)
    # The dense step leaves its residual to the next.
    assert (ran.steps, ran.exact) == (4, {0: None, 1: None, 2: None})
    # One layer, in two branches.
    assert ran.residual_bytes == 2 * residual_bytes(1, 18, 2, 12)
    # In one of two layers three steps are exact; the last of them and the fourth compute what is approximate, too.
    grid = LatentGrid(*ran.grid)
    share = vmonarch_flops(grid, 128, VMonarchOptions(coarse=2)) / full_flops(grid, 128)
    assert ran.work == pytest.approx((1 + (3 + 2 * share) / 4) / 2)
    assert str(ran).splitlines()[1].startswith("3 of 4 steps exact (0–2); attention work")
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=2))
    tiny.generate(pipe, steps=4)
    assert "2 of 4 steps exact (0–1)" in str(vmonarch.report(pipe))
    vmonarch.apply(pipe, VMonarchProcessor(refresh=Refresh(tolerance=1e-3, at_most=2)))
    with pytest.warns(UserWarning, match="may have grown beyond tolerance=0.001, because at_most=2 allows no more"):
        tiny.generate(pipe, steps=4)
    assert len(vmonarch.report(pipe).exact) == 2


def test_steps_are_predicted_while_the_error_of_that_is_small():
    # Six at the start; intervals of twice the last one, up to five steps: the error comes to 0.05. And the last one.
    expected = (*range(6), 7, 11, 16, 21, 26, 31, 36, 41, 46, 49)
    assert simulate(Refresh(1.0, cache=0.05), 50) == (expected, expected, False)
    assert simulate(Refresh(1.0, cache=0.05), 50, growth=NAN)[1] == tuple(range(50))
    # One of chosen steps that is predicted leaves it to the next that is computed.
    chosen = simulate(Refresh([0, 8, 9, 17], cache=0.05), 20)
    assert chosen == ((0, 8, 13, 18), (0, 1, 2, 4, 8, 13, 18, 19), False)
    # One that a tolerance makes exact is computed; the interval to it is the last one then.
    exact, computed, _ = simulate(Refresh(tolerance=0.05, cache=0.05, at_most=1.0), 50, rate=0.02)
    assert exact == (*range(6), *range(7, 48, 2)) and computed == (*exact, 49)


CACHED, BOTH = Refresh(1.0, cache=0.9), Refresh(tolerance=0.9, cache=0.9)


@pytest.mark.parametrize(
    "kind, refresh, options",
    [("t2v", BOTH, {}), ("i2v-2.1", CACHED, {}), ("v2v", CACHED, {}), ("t2v", CACHED, {"num_videos_per_prompt": 2}),
     ("t2v-2.2", BOTH, {})],
    ids=["text", "image", "inside", "batch", "two-transformers"],
)  # fmt: skip
def test_predicted_steps_are_on_the_line_through_the_last_two(tiny, monkeypatch, kind, refresh, options):
    """The oracle: the forward of the class, which extrapolates in the steps that the report names."""
    pipe, steps = tiny.pipeline(kind), 16
    vmonarch.apply(pipe, VMonarchProcessor(refresh=refresh))
    found = tiny.generate(pipe, steps=steps, **options)
    ran, forward = vmonarch.report(pipe), type(pipe.transformer).forward
    assert 3 <= len(ran.predicted) <= 12 and max(ran.forward.values()) > 0.01
    assert f"; {len(ran.predicted)} predicted (" in str(ran) and "; error of prediction 0." in str(ran)
    assert refresh is BOTH or ran.work == pytest.approx(1 - len(ran.predicted) / ran.steps)
    kept, errors = {}, {}
    calls = {
        id(t): itertools.count() for t in (pipe.transformer, getattr(pipe, "transformer_2", None)) if t is not None
    }
    start = {id(pipe.transformer): 0}
    if kind == "t2v-2.2":
        start[id(pipe.transformer_2)] = transformers_by_step(pipe, steps).index("transformer_2")

    def by_hand(self, *args, **kwargs):
        step, branch = divmod(next(calls[id(self)]), 2)
        step += start[id(self)]
        level = pipe.scheduler.timesteps[-ran.steps :][step].item()
        past = kept.setdefault((id(self), branch), [])
        line = lambda: torch.lerp(past[-2][1], past[-1][1], (level - past[-2][0]) / (past[-1][0] - past[-2][0]))
        if step in ran.predicted:
            return (line(),)
        (output,) = forward(self, *args, **kwargs)
        if len(past) > 1:
            change = (output - line()).flatten(1).norm(dim=1) / output.flatten(1).norm(dim=1)
            errors.setdefault(step, []).append(change.max().item())
        past.append((level, output))
        return (output,)

    vmonarch.apply(pipe, VMonarchProcessor(refresh=replace(refresh, cache=None)))
    if refresh.tolerance is not None:
        vmonarch.apply(pipe, VMonarchProcessor(refresh=list(ran.exact)))
    monkeypatch.setattr(type(pipe.transformer), "forward", by_hand)
    torch.testing.assert_close(tiny.generate(pipe, steps=steps, **options), found, rtol=1e-4, atol=1e-5)
    means = {step: sum(of) / len(of) for step, of in errors.items()}
    assert means == pytest.approx(ran.forward, rel=1e-3)


def test_with_a_cache_a_transformer_is_copied_and_restored(tiny):
    pipe = tiny.applied("t2v", refresh=Refresh(1.0, cache=0.9))
    with warnings.catch_warnings():
        # Predicted steps make the smallest video faster.
        warnings.filterwarnings("error", "videos of")
        expected = tiny.quickly(pipe, 8)
    assert vmonarch.report(pipe).predicted
    twin, others = copy.deepcopy(pipe.transformer), pipe.transformer
    pipe.transformer = twin
    with torch.no_grad():
        twin.proj_out.weight.zero_()
    assert not torch.equal(tiny.quickly(pipe, 8), expected), "the copy computes by its own weights"
    pipe.transformer = others
    assert torch.equal(tiny.quickly(pipe, 8), expected)
    # A hook that came later keeps the forward, also where another is applied above it.
    later = pipe.transformer.forward
    pipe.transformer.forward = lambda *args, **kwargs: later(*args, **kwargs)
    vmonarch.apply(pipe, VMonarchProcessor(refresh=Refresh(1.0, cache=0.9)))
    assert torch.equal(tiny.quickly(pipe, 8), expected)
    vmonarch.restore(pipe)
    hooked = tiny.quickly(pipe, 8)
    del pipe.transformer.forward
    assert torch.equal(tiny.quickly(pipe, 8), hooked)


@pytest.mark.parametrize("order", ["hook first", "hook last", "wrapper last"])
def test_what_changes_the_output_of_a_transformer_does_so_once(tiny, order):
    scaled = lambda output: (0.9 * output[0],)
    pipe = tiny.pipeline("t2v")
    hook = lambda: pipe.transformer.register_forward_hook(lambda model, inputs, output: scaled(output))
    if order == "hook first":
        hook()
    vmonarch.apply(pipe, VMonarchProcessor(refresh=CACHED))
    if order == "hook last":
        hook()
    elif order == "wrapper last":
        inner = pipe.transformer.forward
        pipe.transformer.forward = lambda *args, **kwargs: scaled(inner(*args, **kwargs))
    found = tiny.quickly(pipe, 12)
    predicted = vmonarch.report(pipe).predicted
    assert len(predicted) > 2
    # As if the model itself had this output.
    other = tiny.pipeline("t2v")
    with torch.no_grad():
        other.transformer.proj_out.weight.mul_(0.9)
        other.transformer.proj_out.bias.mul_(0.9)
    vmonarch.apply(other, VMonarchProcessor(refresh=CACHED))
    expected = tiny.quickly(other, 12)
    if order != "wrapper last":
        assert vmonarch.report(other).predicted == predicted
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    else:
        assert (found - expected).norm() < 0.05 * expected.norm()


def test_a_report_is_of_its_own_pipeline(tiny):
    pipe = tiny.pipeline("t2v")
    other = tiny.another(pipe, own_scheduler=True)
    vmonarch.apply(pipe, VMonarchProcessor(refresh=Refresh(tolerance=0.2)))
    for each, steps in ((pipe, 6), (other, 12)):
        tiny.quickly(each, steps, **({"strength": 1.0} if each is other else {}))
    mine, others = vmonarch.report(pipe), vmonarch.report(other)
    assert (mine.steps, others.steps) == (6, 12) and max(mine.exact) < 6 <= max(others.exact)
    assert vmonarch.report(pipe.transformer).steps == 12, "the latest"
    runs = pipe.transformer._vmonarch_record.sharing.runs
    del other, each
    gc.collect()
    tiny.quickly(pipe, 6)
    assert len(pipe.transformer._vmonarch_record.sharing.runs) == 1 < len(runs)


def test_a_report_amid_a_step_changes_no_decision():
    found = []
    for read in (False, True):
        schedule = Schedule(Refresh(tolerance=0.1), 20, [float(step) for step in range(20)])
        for step in range(20):
            schedule.enter(step)
            schedule.computed = True
            for error in (0.08, 0.01):
                schedule.measured(torch.tensor(error))
                if read:
                    schedule.read()
        found.append(schedule.exact)
    assert found[0] == found[1] and list(found[0])[:4] == [0, 1, 2, 4]


@pytest.mark.parametrize("kind, at_most", [("t2v", 1), ("t2v", 3), ("t2v-2.2", 4)])
def test_no_more_steps_are_exact_than_at_most_allows(tiny, used, kind, at_most):
    pipe = tiny.applied(kind, refresh=Refresh(tolerance=1e-6, at_most=at_most))
    with pytest.warns(UserWarning, match=f"because at_most={at_most} allows no more"):
        tiny.quickly(pipe, 30)
    ran = vmonarch.report(pipe)
    assert [step for step, exact in enumerate(exact_calls(used)) if exact] == list(ran.exact)
    # A residual of one branch at a time, also where the last exact step needs none.
    assert ran.residual_bytes == 2 * residual_bytes(1, 18, 2, 12)


def test_model_offload_before_apply_leaves_the_step_cache(tiny):
    pipe = tiny.pipeline("t2v")
    pipe.enable_model_cpu_offload(device="cpu")
    vmonarch.apply(pipe, VMonarchProcessor(refresh=CACHED))
    first, second = tiny.generate(pipe, steps=12), tiny.generate(pipe, steps=12)
    assert len(vmonarch.report(pipe).predicted) >= 2 and torch.equal(first, second)


def test_a_branch_that_sat_out_is_computed(tiny):
    """The negative prompt is not predicted along outputs of steps before those that measured."""
    pipe, calls = tiny.applied("t2v", refresh=Refresh(1.0, cache=9.0)), []
    pipe.transformer.blocks[0].register_forward_pre_hook(lambda *_: calls.append(step[0]))
    step = [0]

    def callback(pipe, number, timestep, tensors):
        step[0] = number + 1
        # Steps 3 and 4 go without guidance.
        pipe._guidance_scale = 1.0 if step[0] in (3, 4) else 5.0
        return {}

    tiny.generate(pipe, steps=12, callback_on_step_end=callback)
    computed = collections.Counter(calls)
    # The one that comes back in step 5 is computed beside one that is predicted. Both are then, until both go on.
    assert [computed[step] for step in range(12)] == [2, 2, 2, 0, 1, 1, 2, 2, 0, 2, 0, 2]


def exact_calls(used):
    """Of each call of the first layer since the last time, whether it was exact."""
    found = [residual is None for (layer, *_), residual in used if layer == 0]
    used.clear()
    return found


def tensors_of(transformer):
    """Weak references to the residuals that there are."""
    branches = transformer._vmonarch_record.sharing._branches
    return [weakref.ref(kept.residual.values) for branch in branches for kept in branch.residuals.values()]


def test_the_second_transformer_takes_the_place_of_the_first(tiny):
    pipe = tiny.applied("t2v-2.2", refresh=1)
    holders = []

    def callback(pipe, step, timestep, tensors):
        branches = pipe.transformer._vmonarch_record.sharing._branches
        assert all(len(branch.devices) == 2 for branch in branches)
        names = {id(pipe.transformer): 1, id(pipe.transformer_2): 2}
        holders.append([names[id(branch.schedule.transformer())] for branch in branches if branch.residuals])
        return {}

    tiny.generate(pipe, steps=5, callback_on_step_end=callback)
    assert holders == [[1, 1], [1, 1], [2, 2], [2, 2], []]


def test_offloaded_they_come_back_one_layer_ahead(tiny, monkeypatch):
    pipe = tiny.pipeline("t2v")
    pipe.transformer = tiny.transformer(num_layers=3)
    vmonarch.apply(pipe, VMonarchProcessor(refresh=Refresh([0, 2])))
    expected = tiny.quickly(pipe, 5)
    places, log = [], []
    waited = lambda residual: SimpleNamespace(wait=lambda: log.append("wait") or residual)
    monkeypatch.setattr(residuals, "_to_host", lambda residual, place: places.append(place) or residual)
    monkeypatch.setattr(residuals, "_to_gpu", lambda residual, gpu: log.append("fetch") or waited(residual))
    monkeypatch.setattr(residuals.Branch, "_offloads", lambda *_: True)
    adding = lambda *inputs, **options: log.append("add") or add_residual(*inputs, **options)
    monkeypatch.setattr(attend, "add_residual", adding)
    vmonarch.apply(pipe, VMonarchProcessor(refresh=Refresh([0, 2])))
    assert torch.equal(tiny.quickly(pipe, 5), expected)
    # Three layers, whose memory on the host is written to again; three steps that use residuals.
    assert [place is None for place in places] == [True] * 3 + [False] * 3
    assert log == ["fetch", *["wait", "fetch", "add"] * 2, "wait", "add"] * 3


def test_memory_is_asked_of_every_device_for_its_own_layers(monkeypatch):
    of_a_layer = residual_bytes(1, 18, 2, 12)
    free = {torch.device("cuda:0"): 3 * of_a_layer, torch.device("cuda:1"): 2 * of_a_layer}
    monkeypatch.setattr(residuals, "_free_bytes", free.get)
    at = lambda device: SimpleNamespace(shape=(1, 18, 2, 12), device=torch.device(device))
    kept = SimpleNamespace(residual=SimpleNamespace(values=at("cuda:0")))
    devices = [torch.device(name) for name in ("cuda:0", "cuda:0", "cuda:1", "cpu")]
    branch = Branch(schedule=Schedule(Refresh(1), 2), devices=devices)
    # The layer on the CPU is offloaded: it will come to one of them.
    branch._check_memory(at("cuda:0"))
    branch.residuals["layer"] = kept
    branch._check_memory(at("cuda:1"))
    free[torch.device("cuda:1")] -= 1
    with pytest.raises(torch.OutOfMemoryError, match="residuals of 2 layers.*free on cuda:1"):
        branch._check_memory(at("cuda:1"))


@pytest.mark.parametrize("end", ["next run", "restore", "apply"])
def test_a_run_that_ends_early_leaves_none_behind(tiny, end):
    pipe, kept = tiny.applied("t2v", refresh=1), []

    def press(pipe, step, timestep, tensors):
        kept.extend(tensors_of(pipe.transformer))
        raise KeyboardInterrupt

    # The error is at hand, as in a notebook, and with it the frames that it has left.
    with pytest.raises(KeyboardInterrupt):
        tiny.generate(pipe, steps=3, callback_on_step_end=press)
    # Two layers, two branches.
    assert len(kept) == 4
    if end == "restore":
        vmonarch.restore(pipe)
    elif end == "apply":
        vmonarch.apply(pipe, VMonarchProcessor())
    else:
        tiny.quickly(pipe, 2, callback_on_step_end=tiny.stop_after(0))
    assert [reference() for reference in kept] == [None] * 4


def test_runs_that_interleave_keep_their_own(tiny, used):
    pipe = tiny.applied("t2v", refresh=1)
    other = tiny.another(pipe, own_scheduler=True)
    expected, expected_of_other = tiny.quickly(pipe, 3), tiny.quickly(other, 5)
    exact_calls(used)
    outside, within = [], []

    def callback(outer, step, timestep, tensors):
        outside.extend(exact_calls(used))
        assert torch.equal(tiny.quickly(other, 5), expected_of_other)
        within.append(exact_calls(used))
        return {}

    assert torch.equal(tiny.quickly(pipe, 3, callback_on_step_end=callback), expected)
    assert within == [[True, False, False]] * 3 and outside == [True, False, False]


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))], ids=["copy", "pickle"])
def test_a_copy_holds_nothing(tiny, twin):
    pipe = tiny.applied("t2v", refresh=1)
    expected, twins = tiny.generate(pipe, steps=3), []

    def callback(pipe, step, timestep, tensors):
        if step == 1:
            twins.append(twin(pipe))
        return {}

    tiny.generate(pipe, steps=3, callback_on_step_end=callback)
    (copied,) = twins
    assert tensors_of(copied.transformer) == []
    assert torch.equal(tiny.generate(copied, steps=3), expected)


@pytest.mark.parametrize(
    "name, change, exact",
    [
        ("prompt_embeds", lambda x: x + 1, True),
        ("prompt_embeds", lambda x: x.clone(), False),
        ("latents", lambda x: x[..., :-2].contiguous(), True),
        ("latents", lambda x: x.roll(1), False),
    ],
    ids=["prompt", "an equal prompt", "size", "values"],
)
def test_what_a_callback_changes(tiny, used, name, change, exact):
    pipe = tiny.applied("t2v", refresh=1)
    # It remembers nothing of the latents' old size.
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    callback = lambda pipe, step, timestep, tensors: {name: change(tensors[name])} if step == 1 else {}
    tiny.quickly(pipe, 4, callback_on_step_end=callback, callback_on_step_end_tensor_inputs=[name])
    assert exact_calls(used) == [True, False, exact, False]


def test_in_inference_mode(tiny, used):
    pipe = tiny.applied("t2v", refresh=1)
    expected = tiny.quickly(pipe, 3)
    with torch.inference_mode():
        assert torch.equal(tiny.quickly(pipe, 3), expected)
    assert exact_calls(used) == [True, False, False] * 2


def test_parts_of_a_transformer_have_none_after_its_call(tiny):
    pipe = tiny.applied("t2v", refresh=1)
    attn, inputs = pipe.transformer.blocks[0].attn1, []
    attn.register_forward_hook(lambda module, args, output: inputs.append(args))
    tiny.quickly(pipe, 3, callback_on_step_end=tiny.stop_after(1))
    with pytest.raises(RuntimeError, match="call the transformer itself"), torch.no_grad():
        attn(*inputs[0])


@pytest.mark.gpu
def test_gpu_offloaded_residuals(tiny):
    """The same bits as without, and on the GPU no more than two layers' residuals at a time."""
    pipe = tiny.pipeline("t2v")
    pipe.transformer = tiny.transformer(num_layers=12, num_attention_heads=8, attention_head_dim=64)
    pipe.to("cuda", torch.bfloat16)
    size = {"height": 256, "width": 256, "num_frames": 17}
    options = lambda: {"steps": 5, "generator": torch.Generator("cuda").manual_seed(0), **size}
    outputs, peaks = [], []
    for offload in (False, True):
        vmonarch.apply(pipe, VMonarchProcessor(refresh=Refresh([0, 2], offload=offload)))
        tiny.generate(pipe, **options())
        torch.cuda.reset_peak_memory_stats()
        outputs.append(tiny.generate(pipe, **options()))
        peaks.append(torch.cuda.max_memory_allocated())
    assert torch.equal(*outputs)
    # 5 × 16 × 16 tokens, two branches.
    of_a_layer = residual_bytes(1, 1280, 8, 64)
    assert peaks[0] - peaks[1] > 16 * of_a_layer


@pytest.mark.parametrize(
    "device, dtype",
    [
        pytest.param("cpu", torch.float32, marks=in_interpreter),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
    ids=["interpreter", "gpu"],
)
def test_a_step_that_is_exact_in_all_layers_is_stock_to_the_last_bit(tiny, device, dtype):
    pipe = tiny.pipeline("t2v").to(device, dtype)
    latents = {}

    def generate(name, **options):
        keep = lambda pipe, step, timestep, tensors: latents.setdefault(name, []).append(tensors["latents"]) or {}
        return tiny.generate(pipe, steps=4, callback_on_step_end=keep, **options)

    stock = generate("stock")
    vmonarch.apply(pipe, VMonarchProcessor(refresh=1.0, implementation="triton"))
    assert torch.equal(generate("exact"), stock)
    vmonarch.apply(pipe, VMonarchProcessor(refresh=Refresh(tolerance=0.3), implementation="triton"))
    generate("some")
    equal = [torch.equal(mine, theirs) for mine, theirs in zip(latents["some"], latents["stock"], strict=True)]
    assert equal == [True, True, False, False]


@pytest.mark.gpu
def test_gpu_residuals_compiled_or_not(tiny):
    """In bfloat16 with the kernels: compiled nearly as without; and the memory is given back."""
    pipe = tiny.pipeline("t2v").to("cuda", torch.bfloat16)
    options = lambda: {"steps": 5, "generator": torch.Generator("cuda").manual_seed(0)}
    vmonarch.apply(pipe, VMonarchProcessor(refresh=[0, 2]))
    expected = tiny.generate(pipe, **options())
    before = torch.cuda.memory_allocated()
    assert torch.equal(tiny.generate(pipe, **options()), expected)
    assert torch.cuda.memory_allocated() <= before + expected.nbytes
    pipe.transformer.compile_repeated_blocks(fullgraph=True)
    for _ in range(2):
        error = tiny.generate(pipe, **options()).float() - expected.float()
        assert error.norm() < 0.02 * expected.float().norm()
