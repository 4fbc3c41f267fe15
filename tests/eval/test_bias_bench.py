"""The benchmark of FlashBias measures what it says, in the interpreter with no claim of speed."""

import json

import pytest
import torch

from vmonarch.eval import bias_bench
from vmonarch.eval.bias_bench import Case, Inputs, call, error_of, standard_cases
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
    result = call(method, inputs)()
    out = result[0] if case.training else result
    assert error_of(method, inputs, out) < 1e-5
    other = "no-bias" if method != "no-bias" else "sdpa"
    assert error_of(other, inputs, out) > 0.05
    if case.training:
        assert len(result) == {"flash-bias": 6, "no-bias": 4, "sdpa": 5}[method]


def test_flash_bias_and_the_matrix_have_the_same_gradients():
    inputs = Inputs(SMALL[1], CPU, torch.float32)
    ours, theirs = (call(method, inputs)() for method in ("flash-bias", "sdpa"))
    for x, y in zip(ours[:4], theirs[:4], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


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


def test_the_command_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bias_bench, "standard_cases", lambda: SMALL)
    output = tmp_path / "bias.json"
    words = ["--device", "cpu", "--output", str(output), "--rounds", "2", "--methods", "flash-bias", "no-bias", "sdpa"]
    assert bias_bench.main(words) == 0
    results = json.loads(output.read_text())
    assert results["hardware"] == "interpreter" and results["rates"] is None and not results["left_out"]
    assert [case["name"] for case in results["cases"]] == ["plain", "causal-training"]
    for case in results["cases"]:
        assert [row["status"] for row in case["rows"]] == ["ok"] * 3
        assert all(row["ms"]["median"] > 0 and "tflops" not in row for row in case["rows"])
    assert str(tmp_path) not in results["command"] and "plain R=3 forward" in capsys.readouterr().out


def test_a_wrong_result_has_no_speed(tmp_path, monkeypatch):
    monkeypatch.setattr(bias_bench, "standard_cases", lambda: SMALL[:1])
    real = bias_bench.attention
    monkeypatch.setattr(
        bias_bench,
        "attention",
        lambda method, inputs: lambda: real(method, inputs)() * (1.1 if method == "sdpa" else 1.0),
    )
    output = tmp_path / "bias.json"
    words = ["--device", "cpu", "--output", str(output), "--rounds", "1", "--methods", "flash-bias", "sdpa"]
    assert bias_bench.main(words) == 1
    good, wrong = json.loads(output.read_text())["cases"][0]["rows"]
    assert good["status"] == "ok" and wrong["status"] == "wrong" and "ms" not in wrong
