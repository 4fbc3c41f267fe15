"""The runner of the benchmarks, by its commands: wrong results have no speed, and what is measured is not lost."""

import dataclasses
import time

import pytest
import torch

from vmonarch.cli import main
from vmonarch.eval.bench import kernels, machine, runner
from vmonarch.eval.bench.rows import tables
from vmonarch.eval.bench.runner import Bench, Case, Run, Way
from vmonarch.kernels.common.launch import interpreted

CPU = torch.device("cpu")
in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1 when triton is imported")
# The interpreter computes masked elements too, and NumPy complains about theirs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TINY = ["--shapes", "2x3x3:1", "--head-dims", "16", "--rounds", "1"]
RATES = {"matmul_flops_per_second": 786e12, "copy_bytes_per_second": 4.3e12}


def bench_of(**ways):
    """A benchmark of one case; ways are what they give, or an error that they raise."""

    def way(value):
        def run():
            if isinstance(value, Exception):
                raise value
            return (torch.full((4, 2), float(value)),)

        expected = lambda: {"out": torch.ones(4, 2)}
        return Way(run, lambda results: {"out": results[0]}, expected, flops=2e9, bytes=4e6)

    made = {name: lambda value=value: way(value) for name, value in ways.items()}
    return Bench("x", tuple(ways), ("ours",), [Case(label="a case")], lambda *_: made, base="peer")


def measured(bench, seconds=100.0, rounds=5):
    (case,) = bench.cases
    ways = bench.ways(case, CPU, torch.float32)
    return {row["method"]: row for row in Run(bench, runner.Clock(CPU), rounds, seconds, RATES).rows(ways)}


@in_interpreter
def test_a_wrong_kernel_gets_no_speed_up(run_command, monkeypatch, capsys):
    from vmonarch.kernels.monarch import op

    right = op.monarch_attention_triton

    def wrong(*arguments):
        out, lse = right(*arguments)
        return out + 0.1, lse

    monkeypatch.setattr(op, "monarch_attention_triton", wrong)
    code, results = run_command("kernels", *TINY, "--methods", "vmonarch", "--passes", "forward")
    (row,) = results["cases"][0]["rows"]
    assert code == 1 and row["status"] == "wrong" and "out is off" in row["problem"] and "ms" not in row
    printed, error = capsys.readouterr()
    assert "wrong" in printed and "error: 1 results are wrong or missing: vmonarch at 2x3x3:1" in error


def test_small_errors_everywhere_and_larger_ones_anywhere_are_seen():
    generator = torch.Generator().manual_seed(0)
    for name in runner.NAMES:
        right = torch.randn(50, 8, generator=generator)
        row = right.norm(dim=-1).argmax()

        def problem(everywhere=0.0, one_row=0.0, right=right, name=name, row=row):
            found = right * (1 + everywhere)
            found[row] *= 1 + one_row
            return runner.compare({name: found}, {name: right}, torch.float32)[1]

        bound = runner.BOUNDS[torch.float32]["out" if name == "out" else "gradient"]
        assert not problem() and not problem(everywhere=0.5 * bound) and not problem(one_row=2 * bound)
        assert problem(everywhere=3 * bound).startswith(f"{name} is off by")
        assert "is off by" in problem(one_row=30 * bound) and "off by nan" in problem(one_row=torch.nan)
    # Where bounds are given, other errors are only told.
    given = {"a": torch.ones(2, 2), "b": torch.zeros(2, 2)}, {"a": torch.ones(2, 2), "b": torch.ones(2, 2)}
    errors, problem = runner.compare(*given, torch.float32, {"a": 1e-3})
    assert not problem and errors["b"]["relative"] == 1
    assert "b is off by 1 (at most 0.5)" in runner.compare(*given, torch.float32, {"b": 0.5})[1]


def test_rows_that_are_not_right_have_no_speed_nor_are_others_compared_with_them():
    full = torch.OutOfMemoryError("no room")
    rows = measured(bench_of(ours=1, peer=1, wrong=2, none=torch.nan, full=full, gone=ImportError()))
    assert {name: row["status"] for name, row in rows.items()} == {
        "ours": "ok", "peer": "ok", "wrong": "wrong", "none": "wrong", "full": "out of memory", "gone": "missing",
    }  # fmt: skip
    assert [name for name, row in rows.items() if "ms" in row] == ["ours", "peer"] and "no room" in rows["full"][
        "problem"
    ]
    assert rows["ours"]["flop_floor_ms"] == pytest.approx(2e12 / 786e12)
    assert rows["ours"]["byte_floor_ms"] == pytest.approx(4e9 / 4.3e12)
    rows["ours"]["ms"] = dict.fromkeys(("median", "p20", "p80"), 2.0)
    rows["peer"]["ms"] = dict.fromkeys(("median", "p20", "p80"), 9.0)
    run = {
        "cases": [{"case": "a case", "rows": list(rows.values())}],
        "hardware": "a chip", "date": "2026-01-02T03:04", "command": "vmonarch bench x", "rates": RATES,
        "versions": {"torch_build": "2", "triton": "3"}, "settings": {"dtype": "bfloat16", "rounds": 5, "timing": "t"},
        "left_out": [{"case": "b", "why": "time"}],
    }  # fmt: skip
    times, details = tables(run, "peer")["tables"]
    assert times["header"] == ["milliseconds", *rows]
    assert times["rows"] == [["a case", "2.00 (4.50×)", "9.00", "wrong", "wrong", "out of memory", "missing"]]
    assert details["rows"][0][:8] == ["a case", "ours", "2.00", "2.00–2.00", "4.50×", "1", "2", "786.00"]
    caption = tables(run, "peer")["caption"]
    assert "a chip, 2026-01-02" in caption and "Left out: b (time)" in caption and "`vmonarch bench x`" in caption
    rows["peer"] = {"method": "peer", "status": "wrong"}
    assert (
        tables({**run, "cases": [{"case": "a", "rows": list(rows.values())}]}, "peer")["tables"][0]["rows"][0][1]
        == "2.00"
    )


def test_the_budget_ends_rounds_rows_and_cases(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    bench = bench_of(ours=1, peer=1)
    rows = measured(bench, seconds=-1.0)
    assert {row["status"] for row in rows.values()} == {"left out"}
    assert runner.left_out([{"case": "c", "rows": list(rows.values())}])[0]["why"] == "the budget of -1 s was used up"
    # A call takes a second: two rounds fit.
    monkeypatch.setattr(machine.Clock, "time", lambda self, run: 1e3)
    monkeypatch.setattr(machine.Clock, "flush", lambda self, times=1: now.__setitem__(0, now[0] + 0.7))
    rows = measured(dataclasses.replace(bench, way_seconds=60.0), seconds=3.0)
    assert [row["rounds"] for row in rows.values()] == [2, 2]
    assert runner.left_out([{"case": "c", "rows": list(rows.values())}])[0]["why"] == "3 rounds did not fit the budget"
    rows = measured(bench, seconds=1.5)
    assert rows["ours"]["problem"] == "a round of 2 s did not fit the budget of 1.5 s" and "ms" not in rows["ours"]


@pytest.fixture
def fast_cases(monkeypatch):
    """Cases that take 10 s each by a clock of their own; `seen` tells which ran."""
    now, seen = [0.0], []

    def ways(case, *_):
        now[0] += 10
        seen.append(case.label)
        return {}

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(kernels, "ways", ways)
    monkeypatch.setattr(machine, "interpreted", lambda: True)
    return seen


def test_a_run_that_stops_loses_no_finished_case_and_says_what_is_left_out(run_command, fast_cases, monkeypatch):
    shapes = ["--shapes", "2x2x2", "3x2x2", "4x2x2", "--head-dims", "64"]
    code, results = run_command("kernels", *shapes, "--methods", "vmonarch", "--budget", "25")
    assert code == 0 and not results["complete"]
    assert fast_cases == ["2x2x2 d=64 forward", "3x2x2 d=64 forward", "4x2x2 d=64 forward"]
    late = [f"{frames}x2x2 d=64 forward+backward" for frames in (2, 3, 4)]
    assert [entry["case"] for entry in results["left_out"]] == late and "budget of 25 s" in results["caption"]
    finished = kernels.ways

    def killed(*arguments):
        if len(fast_cases) == 5:
            raise KeyboardInterrupt
        return finished(*arguments)

    monkeypatch.setattr(kernels, "ways", killed)
    code, results = run_command("kernels", *shapes)
    assert code == 130 and len(results["cases"]) == 2 and not results["complete"]


@pytest.mark.parametrize("command", [["bench", "kernels"], ["tune"]], ids=lambda words: words[0])
def test_speed_is_measured_on_a_gpu_without_the_interpreter(command, tmp_path, monkeypatch, capsys):
    def problem(*words):
        assert main([*command, *words]) == 2
        return capsys.readouterr().err

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "--device must be auto or cpu, as this torch sees no CUDA device; got cuda" in problem()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "--device cpu needs TRITON_INTERPRET=1" in problem("--device", "cpu", "--output", "x.json")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert "TRITON_INTERPRET=1: unset it" in problem()
    assert "--device must be cuda:0 to cuda:0; got cuda:1" in problem("--device", "cuda:1")
    assert list(tmp_path.iterdir()) == []
