"""The benchmark of linear and window attention measures what it says, in the interpreter with no claim of speed."""

from dataclasses import replace

import pytest
import torch

from vmonarch.eval.bench import based
from vmonarch.eval.bench.based import compiled
from vmonarch.eval.bench.gate import relative_errors
from vmonarch.eval.bench.runner import Bench, compile_task, compile_tasks, sdpa
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.launch import interpreted
from vmonarch.kernels.window.neighbours import neighbours

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1 when triton is imported"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SMALL = {
    "prefill": based.Case("prefill", 2, 33, 2, 16, dims=4),
    "prefill-training": based.Case("prefill", 1, 33, 2, 16, training=True, dims=4),
    "video-training": based.Case("video", 1, 40, 2, 16, training=True, dims=4),
    "sequence": based.Case("window", 1, 40, 2, 16, window=5),
    "neighbourhood-training": based.Case("window", 1, 2 * 4 * 5, 2, 16, True, (1, 3, 2), (2, 4, 5)),
    "decode": based.Case("decode", 2, 80, 2, 16, dims=4),
}


@pytest.fixture
def any_backend(monkeypatch):
    """Without a GPU torch has neither cuDNN nor flash attention of these shapes."""
    monkeypatch.setattr(based, "sdpa", lambda _, *qkv, **options: sdpa("sdpa", *qkv, **options))


def names_of(case):
    return [name for name in based.ways(case, CPU, torch.float32) if name != "flex"]


@pytest.mark.parametrize("name", SMALL)
def test_every_method_computes_its_attention(name, any_backend):
    case = SMALL[name]
    inputs = based.Inputs(case, CPU, torch.float32)
    for method in names_of(case):
        chosen = based.way(method, inputs)
        found, expected = chosen.found(chosen.run()), chosen.expected()
        gradients = ["dq", "dk", "dv"] if case.training else []
        steps = ["state", "sums"] if case.kind == "decode" and method.startswith("taylor") else []
        assert list(found) == ["out", *gradients, *steps]
        for key, x in found.items():
            assert relative_errors(x, expected[key])["relative"] < 1e-5, (method, key)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["sequence", "neighbourhood-training"])
def test_flex_has_the_same_window(name, monkeypatch):
    # What torch.compile makes of it, and gradients, can only be seen on a GPU.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    inputs = based.Inputs(replace(SMALL[name], training=False), CPU, torch.float32)
    chosen = based.way("flex", inputs)
    torch.testing.assert_close(chosen.found(chosen.run())["out"], chosen.expected()["out"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sequence", "neighbourhood-training"])
def test_the_reference_sees_the_keys_of_the_window(name):
    case = SMALL[name]
    grid = LatentGrid(*case.grid) if case.grid else LatentGrid(1, 1, case.tokens)
    window = case.window if case.grid else (1, 1, case.window)
    index, present = neighbours(grid, case.tokens, window, None if case.grid else 2, CPU)
    expected = torch.zeros(case.tokens, case.tokens, dtype=torch.bool)
    for row, (keys, there) in enumerate(zip(index, present, strict=True)):
        expected[row, keys[there]] = True
    numbers = torch.arange(case.tokens)
    assert torch.equal(based.near(case.reach)(numbers[:, None], numbers[None, :]), expected)
    assert case.pairs(case.reach) == expected.sum()


def test_the_reference_is_the_same_in_chunks(monkeypatch):
    from vmonarch.kernels.flash_entropy import reference

    case = SMALL["neighbourhood-training"]
    inputs = based.Inputs(case, CPU, torch.float32)
    whole = inputs.expected("whole", lambda *x: based.dense(*x, case.reach), [*inputs.wide, inputs.value])
    monkeypatch.setattr(reference, "MAX_CHUNK_SCORES", 7 * case.tokens)
    parts = inputs.expected("parts", lambda *x: based.dense(*x, case.reach), [*inputs.wide, inputs.value])
    for name, x in whole.items():
        torch.testing.assert_close(parts[name], x)


def test_the_cases_are_those_of_the_paper_and_of_the_issue():
    cases = based.standard_cases()
    assert len({case.label for case in cases}) == len(cases)
    prefill = {(case.batch, case.tokens, case.training) for case in cases if case.kind == "prefill"}
    for training in (False, True):
        assert {(1, 2**n * 1024, training) for n in range(7)} | {(4, 4096, training), (8, 1024, training)} <= prefill
    video = {(case.tokens, case.heads, case.head_dim) for case in cases if case.kind == "video"}
    assert video == {(s, *h) for s in (23296, 34944, 62608, 117936) for h in ((16, 64), (12, 128))}
    assert {case.batch for case in cases if case.kind == "decode"} == {1, 8, 32, 128, 256}
    windows = {(case.window, case.tokens) for case in cases if case.kind == "window"}
    assert windows == {
        *((w, s) for w in (64, 128) for s in (16384, 65536)),
        *((w, s) for w in ((3, 9, 9), (5, 15, 15)) for s in (23296, 62608)),
    }
    measured = based.ways(based.Case("decode", 1, based.CACHES[0], 16, 64), CPU, torch.float32)
    assert set(measured) >= {f"sdpa-{n}" for n in based.CACHES}


def test_what_shares_its_code_is_compiled_once(monkeypatch):
    cases = based.standard_cases()
    bench = Bench(based.METHODS, based.OURS, cases, based.ways, compiled, {})
    tasks = compile_tasks(bench, cases, based.METHODS, "cpu")
    ours = [(case.kind, case.head_dim, case.training) for _, case, method, _ in tasks if method == "taylor"]
    assert sorted(ours) == sorted(
        [
            ("decode", 64, False),
            *((k, e, t) for k, e in (("prefill", 64), ("video", 64), ("video", 128)) for t in (0, 1)),
        ]
    )
    assert sum(method == "flex" for *_, method, _ in tasks) == sum(case.kind == "window" for case in cases)
    assert {method for *_, method, _ in tasks} == {"taylor", "window", "flex"}
    # The slowest begin first.
    assert [case.training for _, case, _, _ in tasks] == sorted(
        (case.training for _, case, _, _ in tasks), reverse=True
    )
    # Which the task sets for its own process.
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    assert compile_task((based.ways, SMALL["decode"], "window", "cpu"))


def test_a_multiply_add_counts_two():
    case = based.Case("video", 1, 100, 3, 64)
    F = 1 + 16 + 16**2
    assert case.linear_work(2) == (3 * 2 * (100 * F * 65 + 100 * F * 65), 3 * 100 * (2 * 16 + 2 * 64) * 2)
    assert case.softmax_work(100**2, 2) == (3 * 2 * 2 * 100**2 * 64, 3 * 100 * 4 * 64 * 2)
    training = replace(case, training=True)
    assert training.linear_work(2)[0] == 3 * case.linear_work(2)[0]
    assert training.softmax_work(100**2, 2)[0] == 3.5 * case.softmax_work(100**2, 2)[0]
    assert based.Case("prefill", 1, 100, 3, 64).pairs([(100, 100, 0)]) == 100 * 101 / 2
    token = based.Case("decode", 5, 4096, 3, 64)
    assert token.linear_work(2) == (15 * 2 * 2 * F * 65, 15 * 2 * F * 65 * 4)
    assert token.softmax_work(1024, 2) == (15 * 2 * 2 * 1024 * 64, 15 * 2 * 1024 * 64 * 2)


def test_the_command_writes_what_it_measured(run_command, tmp_path, monkeypatch, any_backend, capsys):
    monkeypatch.setattr(based, "standard_cases", lambda: [SMALL["video-training"], SMALL["decode"]])
    code, results = run_command("based", "--rounds", "1")
    assert code == 0
    assert [case["kind"] for case in results["cases"]] == ["video", "decode"] and results["formulae"]["bytes"]
    for case in results["cases"]:
        assert all(row["status"] == "ok" and row["ms"]["median"] > 0 and row["flops"] > 0 for row in case["rows"])
    assert str(tmp_path) not in results["command"] and "decode batch 2" in capsys.readouterr().err


@pytest.mark.parametrize("spoilt", ["out", "dk"])
def test_a_wrong_result_has_no_speed(spoilt, run_command, monkeypatch, any_backend):
    monkeypatch.setattr(based, "standard_cases", lambda: [SMALL["prefill-training"]])
    real = based.taylor_attention

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    def wrong(q, k, v, *, implementation, **options):
        if implementation == "torch":
            return real(q, k, v, implementation=implementation, **options)
        k = Doubled.apply(k) if spoilt == "dk" else k
        out = real(q, k, v, implementation=implementation, **options)
        return out * 1.01 if spoilt == "out" else out

    monkeypatch.setattr(based, "taylor_attention", wrong)
    code, results = run_command("based", "--rounds", "1", "--methods", "taylor", "cudnn")
    ours, exact = results["cases"][0]["rows"]
    assert code == 1 and ours["status"] == "wrong" and f"{spoilt} is off by" in ours["problem"] and "ms" not in ours
    assert exact["status"] == "ok"
