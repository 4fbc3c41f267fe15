"""The benchmarks of single operators: every way computes what it says, and a wrong one is noticed.

Kernels run through Triton's interpreter, at tiny sizes; times tell nothing of speed there.
"""

import functools
import itertools
import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vmonarch.eval.bench import attention, based, bias, kernels
from vmonarch.eval.bench.attention import case_of, exact, sdpa
from vmonarch.eval.bench.machine import Clock
from vmonarch.eval.bench.runner import compare
from vmonarch.flops import attention_work, vmonarch_work
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.launch import interpreted
from vmonarch.kernels.window.neighbours import neighbours

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1 when triton is imported"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]
WINDOW = {"window": (1, 3, 2), "grid": (2, 4, 5)}
TINY = {"batch": 1, "tokens": 40, "heads": 2, "head_dim": 16, "rank": 3, "causal": False}
CASES = {
    "kernels": (kernels, kernels.shape_case("2x3x3:2", 16, False)),
    "kernels-training": (kernels, kernels.shape_case("2x3x3:2", 16, True)),
    "bias": (bias, case_of("plain", **TINY)),
    "bias-causal": (bias, case_of("causal", **TINY | {"causal": True})),
    "bias-training": (bias, case_of("causal", True, **TINY | {"batch": 2, "rank": 2, "causal": True})),
    "prefill": (based, based.based_case("prefill", 2, 33, 2, 16, dims=4)),
    "prefill-training": (based, based.based_case("prefill", 1, 33, 2, 16, True, dims=4)),
    "video-training": (based, based.based_case("video", 1, 40, 2, 16, True, dims=4)),
    "window": (based, based.based_case("window", 1, 40, 2, 16, window=5)),
    "neighbourhood": (based, based.based_case("window", 1, 40, 2, 16, **WINDOW)),
    "neighbourhood-training": (based, based.based_case("window", 1, 40, 2, 16, True, **WINDOW)),
}
SLOW = ("vmonarch-t3", "vmonarch-coarse2", "vmonarch-coarse2-rows", "vmonarch-torch")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Without a GPU torch has neither cuDNN nor flash attention of these shapes; its compiler is not what is tested."""
    for module in (kernels, based):
        monkeypatch.setattr(module, "sdpa", lambda _, *qkv, **options: sdpa("sdpa", *qkv, **options))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.mark.parametrize("name", CASES)
def test_every_way_passes_the_gate_and_spoilt_results_do_not(name):
    module, case = CASES[name]
    made = module.ways(case, CPU, torch.float32)
    assert len(made) >= 2
    # Eight bits err more; their own tests say how much.
    for method in made.keys() - {*SLOW, "int8"}:
        # FlexAttention has gradients when it is compiled alone.
        if method == "flex" and case.training:
            continue
        way = made[method]()
        results = way.run()
        found, expected = way.found(results), way.expected()
        errors, problem = compare(found, expected, torch.float32, way.bounds)
        assert not problem and max(error["relative"] for error in errors.values()) < 1e-5, method
        assert len(found) >= 3 or not case.training
        if name == "kernels":
            way.more(Clock(CPU), row := {})
            assert 0 < row["host_ms"] < 1e5
        for part in found:
            spoilt = {key: x * 1.01 if key == part else x for key, x in found.items()}
            assert f"{part} is off by" in compare(spoilt, expected, torch.float32, way.bounds)[1]


def test_gradients_of_heads_that_share_a_factor_are_those_of_all_heads():
    q, k, v = attention.randn(0, CPU, torch.float32, *[(1, 6, 3, 4)] * 3, learn=True)
    shared, grad = attention.randn(1, CPU, torch.float32, (1, 6, 1, 4), (1, 6, 3, 4), learn=True)
    attend = lambda q, k, v, shared: exact(q + shared, k, v)
    way = attention.attention_way(attend, attend, [q, k, v, shared], grad.detach(), names=("out", *"qkvs"))
    assert not compare(way.found(way.run()), way.expected(), torch.float32)[1]


@pytest.mark.parametrize("name", ["window", "neighbourhood"])
def test_windows_of_flex_attention_are_those_of_the_kernel(name):
    case = CASES[name][1]
    grid = LatentGrid(*case.grid) if case.grid else LatentGrid(1, 1, case.tokens)
    window = case.window if case.grid else (1, 1, case.window)
    index, present = neighbours(grid, case.tokens, window, None if case.grid else 2, CPU)
    expected = torch.zeros(case.tokens, case.tokens, dtype=torch.bool)
    for row, (keys, there) in enumerate(zip(index, present, strict=True)):
        expected[row, keys[there]] = True
    numbers = torch.arange(case.tokens)
    assert torch.equal(based.near(case, numbers[:, None], numbers[None, :]), expected)
    assert based.pairs_seen(case) == expected.sum()


def products(grid, d, *, num_iterations=2, coarse=1):
    """Multiply-adds × 2 of the forward pass, and of its scores alone, by counting."""
    frames, height, width = grid
    places = list(itertools.product(range(height), range(width)))
    scores = 2 * d * len(places) ** 2 * frames
    flops = 2 * scores
    for i in range(num_iterations):
        last = i == num_iterations - 1
        keys = len({(r, c) if last else (r // coarse, c // coarse) for r, c in places})
        scores += frames * 2 * d * len(places) * (keys + frames)
        flops += frames * 2 * d * len(places) * (keys * (3 if last else 2) + 2 * frames)
    return flops, scores


OPTIONS = {"plain": {}, "three iterations": {"num_iterations": 3}, "coarse": {"coarse": 2}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("grid", [(2, 4, 4), (3, 5, 3)], ids=["even", "ragged"])
def test_the_flops_are_those_that_one_counts_and_those_of_plain_torch(grid, options):
    work = vmonarch_work(LatentGrid(*grid), 3, 8, itemsize=2, training=True, **options)
    forward, backward = (sum(s.flops for s in work if ("backward" in s.stage) == b) for b in (False, True))
    flops, scores = products(grid, 8, **options)
    # Every product has two in its backward pass, which computes the scores once more.
    assert (forward, backward) == (3 * flops, 3 * (2 * flops + scores))
    if LatentGrid(*grid).tokens == 32:
        tensors = attention.randn(0, CPU, torch.float32, *[(1, 32, 3, 8)] * 3)
        with FlopCounterMode(display=False) as counter:
            kernels.vmonarch_attention(*tensors, grid=grid, implementation="torch", **options)
        assert counter.get_total_flops() == forward


TABLES = {"kernels-h200": (kernels, 30), "flash-bias-h200": (bias, 70), "based-h200": (based, 54)}


def test_a_multiply_add_counts_two():
    of = functools.partial(attention_work, LatentGrid(1, 10, 10), 3, 8, itemsize=2)
    assert [of(training=training).flops for training in (False, True)] == [f * 3 * 100**2 * 8 for f in (4, 14)]
    case = based.based_case("video", 1, 100, 3, 64)
    F = 1 + 16 + 16**2
    assert tuple(based.linear_work(case, 2).values()) == (3 * 4 * 100 * F * 65, 3 * 100 * (2 * 16 + 2 * 64) * 2)
    assert tuple(based.softmax_work(case, 100**2, 2).values()) == (3 * 4 * 100**2 * 64, 3 * 100 * 4 * 64 * 2)
    training = based.based_case("video", 1, 100, 3, 64, True)
    assert based.linear_work(training, 2)["flops"] == 3 * based.linear_work(case, 2)["flops"]
    assert based.softmax_work(training, 1, 2)["flops"] == 3.5 * based.softmax_work(case, 1, 2)["flops"]
    biased = case_of("x", **TINY)
    plain = bias.flops(biased, 0)
    assert plain == 2 * 4 * 40**2 * 16 and bias.flops(biased, 8) == plain + 2 * 2 * 40**2 * 8
    assert bias.flops(case_of("x", **TINY | {"causal": True}), 0) == plain / 2


@pytest.mark.parametrize("name", TABLES)
def test_the_cases_are_those_of_the_tables(name):
    """By label, those of the committed results, which keep what was measured of cases and ways that are gone."""
    module, count = TABLES[name]
    bench = module.bench()
    labels = {case.label for case in bench.cases}
    assert len(labels) == len(bench.cases) == count
    path = Path(__file__).parents[2] / "docs" / "benchmarks" / f"{name}.json"
    cases = {case["case"]: case["rows"] for case in json.loads(path.read_text())["cases"]}
    assert {label for label in cases if not label.startswith("decode")} <= labels
    # FlashAttention-3 is in no committed table yet.
    assert set(bench.methods) - {"fa3", "int8"} <= {row["method"] for rows in cases.values() for row in rows}
