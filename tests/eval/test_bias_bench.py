"""The benchmark of FlashBias measures what it says, in the interpreter with no claim of speed."""

from dataclasses import replace

import pytest
import torch

from vmonarch.eval.bench import bias
from vmonarch.eval.bench.bias import Case, Inputs, standard_cases, way, ways
from vmonarch.eval.bench.gate import relative_errors
from vmonarch.kernels.common.launch import interpreted

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1 when triton is imported"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SMALL = [
    Case("plain", 1, 40, 2, 16, 3),
    Case("causal-training", 2, 33, 2, 16, 2, causal=True, shared=True, training=True),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("method", ["flash-bias", "no-bias", "sdpa"])
def test_every_method_computes_its_attention(method, case):
    inputs = Inputs(case, CPU, torch.float32)
    chosen = way(method, inputs)
    results = chosen.run()
    found, expected, other = (
        x for x in (chosen.found(results), chosen.expected(), inputs.expected(method == "no-bias"))
    )
    names = ["out", "dq", "dk", "dv", *(["dφq", "dφk"] if method == "flash-bias" else [])] if case.training else ["out"]
    assert list(found) == names
    for name, x in found.items():
        assert relative_errors(x, expected[name])["relative"] < 1e-5
        assert relative_errors(x, other[name])["relative"] > 0.02
    if case.training:
        assert len(results) == {"flash-bias": 6, "no-bias": 4, "sdpa": 5}[method]


def test_inputs_are_what_must_exist_before_the_call():
    case = SMALL[0]
    qkv = 3 * case.tokens * case.heads * case.head_dim
    factors, matrix = 2 * case.tokens * case.heads * case.rank, case.heads * case.tokens**2
    made = {name: make() for name, make in ways(case, CPU, torch.float32).items()}
    assert {name: x.input_bytes // 4 for name, x in made.items()} == {
        "flash-bias": qkv + factors,
        "no-bias": qkv,
        "sdpa": qkv + matrix,
    }


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_reads_the_matrix(monkeypatch):
    # What torch.compile makes of it, and gradients, can only be seen on a GPU.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    case = Case("flex", 1, 24, 2, 16, 3, causal=True, flex=True)
    assert "flex" in ways(case, CPU, torch.float32)
    inputs = Inputs(case, CPU, torch.float32)
    chosen = way("flex", inputs)
    for name, x in chosen.found(chosen.run()).items():
        torch.testing.assert_close(x, inputs.expected(True)[name], rtol=1e-4, atol=1e-5)


def test_the_cases_are_those_of_the_paper_and_of_the_issue():
    cases = standard_cases()
    assert len({case.label for case in cases}) == len(cases)
    assert {"gpt2-alibi", "swin-window", "pde-distance"} <= {case.name for case in cases}
    measured = {(case.tokens, case.head_dim, case.rank, case.training) for case in cases}
    for tokens in (4096, 8192, 16384, 32768):
        for dim in (64, 128):
            for rank in (2, 9, 32, 64):
                assert {(tokens, dim, rank, True), (tokens, dim, rank, False)} <= measured


def test_a_multiply_add_counts_two():
    plain = Case("x", 1, 100, 2, 16, 0)
    assert plain.flops == 2 * 4 * 100**2 * 16
    assert Case("x", 1, 100, 2, 16, 8).flops == plain.flops + 2 * 2 * 100**2 * 8
    assert Case("x", 1, 100, 2, 16, 0, causal=True).flops == plain.flops / 2
    assert Case("x", 1, 100, 2, 16, 0, training=True).flops == plain.flops * 3.5


def test_the_command_writes_what_it_measured(run_command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bias, "standard_cases", lambda: SMALL)
    code, results = run_command("bias", "--rounds", "2", "--methods", "flash-bias", "no-bias", "sdpa")
    assert code == 0
    assert results["hardware"].startswith("no speed") and results["rates"] is None and not results["left_out"]
    assert [case["name"] for case in results["cases"]] == ["plain", "causal-training"]
    for case in results["cases"]:
        assert [row["status"] for row in case["rows"]] == ["ok"] * 3
        assert all(row["ms"]["median"] > 0 and "tflops" not in row for row in case["rows"])
    assert str(tmp_path) not in results["command"] and "plain R=3 forward" in capsys.readouterr().err


def test_a_wrong_result_has_no_speed(run_command, monkeypatch):
    monkeypatch.setattr(bias, "standard_cases", lambda: SMALL[:1])
    real = bias.way

    def spoilt(method, inputs):
        chosen = real(method, inputs)
        return replace(chosen, run=lambda: (chosen.run()[0] * 1.1,)) if method == "sdpa" else chosen

    monkeypatch.setattr(bias, "way", spoilt)
    code, results = run_command("bias", "--rounds", "1", "--methods", "flash-bias", "sdpa")
    good, wrong = results["cases"][0]["rows"]
    assert code == 1
    assert good["status"] == "ok" and wrong["status"] == "wrong" and "ms" not in wrong


@pytest.mark.parametrize(
    ("method", "error", "status", "code"),
    [("sdpa", torch.OutOfMemoryError("no room"), "out of memory", 0), ("flash-bias", ValueError("no"), "failed", 1)],
    ids=["peer-without-memory", "ours-fails"],
)
def test_what_cannot_be_computed_says_why(run_command, monkeypatch, method, error, status, code):
    monkeypatch.setattr(bias, "standard_cases", lambda: SMALL[:1])
    real = bias.way

    def broken(name, inputs):
        if name == method:
            raise error
        return real(name, inputs)

    monkeypatch.setattr(bias, "way", broken)
    found, results = run_command("bias", "--rounds", "1", "--methods", "flash-bias", "sdpa")
    rows = {row["method"]: row for row in results["cases"][0]["rows"]}
    assert found == code
    assert rows[method]["status"] == status and str(error) in rows[method]["problem"] and "ms" not in rows[method]


def test_what_the_budget_leaves_out_is_named(run_command, monkeypatch):
    monkeypatch.setattr(bias, "standard_cases", lambda: SMALL)
    code, results = run_command("bias", "--budget", "1e-9", "--cases", "plain")
    assert code == 0 and not results["cases"]
    assert [entry["case"] for entry in results["left_out"]] == ["plain R=3 forward"]
