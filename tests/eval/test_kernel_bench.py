"""The kernel benchmark: it refuses wrong results, stops in time, loses nothing, and counts its FLOPs right.

Here it runs through Triton's interpreter, at tiny sizes; it tells nothing of speed there, and says so.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vmonarch import vmonarch_attention
from vmonarch.cli import main
from vmonarch.configs import InputError
from vmonarch.eval.bench import clock, gate, kernels, machine, stages
from vmonarch.files import write_json
from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.launch import interpreted

pytest.importorskip("triton")
in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1 when triton is imported")
# The interpreter computes masked elements too, and NumPy complains about theirs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TINY = ["--device", "cpu", "--shapes", "2x4x4:1", "--head-dims", "16", "--rounds", "1"]
RATES = {"matmul_flops_per_second": 786e12, "copy_bytes_per_second": 4.3e12, "how": "made up"}


def bench(tmp_path, *words, tiny=TINY):
    """(exit code, results or None) of `vmonarch bench kernels`."""
    output = tmp_path / "kernels.json"
    code = main(["bench", "kernels", *tiny, "--output", str(output), *words])
    return code, json.loads(output.read_text()) if output.exists() else None


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    """One run of forward and backward through the interpreter."""
    if not interpreted():
        pytest.skip("needs TRITON_INTERPRET=1 when triton is imported")
    return bench(tmp_path_factory.mktemp("bench"), "--methods", "cudnn", "vmonarch-lite")


def test_the_json_says_everything(tiny_run):
    code, results = tiny_run
    assert code == 0
    keys = "format date hardware versions command compute_capability settings rates formulae cases left_out complete"
    assert list(results) == [*keys.split(), "seconds"]
    assert results["format"] == kernels.FORMAT and results["complete"] and not results["left_out"]
    assert {"torch", "triton", "python", "driver", "numpy"} <= set(results["versions"])
    assert [(case["shape"], case["pass"]) for case in results["cases"]] == [
        ("2x4x4:1", "forward"),
        ("2x4x4:1", "forward+backward"),
    ]
    for case in results["cases"]:
        rows = {row["method"]: row for row in case["rows"]}
        assert rows["cudnn"]["status"] == "failed" and "ms" not in rows["cudnn"]
        row = rows["vmonarch-lite"]
        assert row["status"] == "ok" and row["check"]["ok"] and row["rounds"] == 1
        names = ["out"] if case["pass"] == "forward" else ["out", "dq", "dk", "dv"]
        assert list(row["check"]["errors"]) == names
        assert set(row["ms"]) == {"median", "min", "p20", "p80"} and row["flops"] > 0 and row["bytes"] > 0


def test_the_interpreter_claims_no_speed(tiny_run):
    results = tiny_run[1]
    assert results["hardware"].startswith("no speed") and results["rates"] is None
    speed = {"over_cudnn", "over_fa2", "over_torch", "tflops", "floor_ms", "over_floor"}
    assert not [row for case in results["cases"] for row in case["rows"] if speed & set(row)]
    assert "no speed: a test of the benchmark" in kernels.text_table(results)


def test_the_stages_are_those_of_the_operator_and_of_the_formula(tiny_run):
    for case in tiny_run[1]["cases"]:
        training = case["pass"] != "forward"
        for row in case["rows"][1:]:
            work = kernels.vmonarch_work(LatentGrid(2, 4, 4), 1, 16, itemsize=4, training=training, **row["options"])
            assert [stage["stage"] for stage in row["stages"]] == [stage.stage for stage in work]
            assert sum(stage["flops"] for stage in row["stages"]) == row["flops"]
            assert all(stage["ms"] > 0 for stage in row["stages"])


def test_watching_the_stages_leaves_the_operator_as_it_was():
    from vmonarch.kernels.monarch import fused

    before = dict(vars(fused))
    with pytest.raises(ZeroDivisionError), stages.watched_stages(lambda stage: None):
        assert fused.RStep is not before["RStep"]
        raise ZeroDivisionError
    assert vars(fused) == before


@in_interpreter
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_a_wrong_kernel_gets_no_speed_up(tmp_path, monkeypatch, capsys, pass_):
    from vmonarch.kernels.monarch import op

    right = op.monarch_attention_triton

    def wrong(*arguments):
        out, lse = right(*arguments)
        return out + 0.1, lse

    monkeypatch.setattr(op, "monarch_attention_triton", wrong)
    code, results = bench(tmp_path, "--methods", "vmonarch", "--passes", pass_)
    assert code == 1
    (row,) = results["cases"][0]["rows"]
    assert row["status"] == "wrong" and "out is off" in row["problem"]
    assert not {"ms", "over_cudnn", "tflops", "over_floor", "stages"} & set(row)
    captured = capsys.readouterr()
    assert "WRONG" in captured.out and "error: 1 results are wrong or missing: vmonarch at 2x4x4:1" in captured.err


def check_result(method, inputs, case):
    way = kernels.way(method, inputs, case)
    problem = gate.compare(way.found(way.run()), way.expected(), inputs.query.dtype)[1]
    return {"ok": not problem, "problem": problem}


@pytest.mark.parametrize("name", kernels.NAMES)
def test_small_errors_everywhere_and_larger_ones_anywhere_are_seen(monkeypatch, name):
    case = kernels.Case(kernels.Shape.parse("3x8x8:1"), 16, True)
    inputs = kernels.Inputs.random(case, torch.device("cpu"), torch.float32)
    method = kernels.Method("vmonarch", "torch")
    right = kernels.call
    bound = gate.bound(name, torch.float32)

    def check(everywhere=0.0, one_row=0.0):
        def changed(method, inputs, case, implementation=""):
            results = right(method, inputs, case, implementation)
            # The reference stays right.
            if implementation != "torch":
                result = results[kernels.NAMES.index(name)]
                norms = result.norm(dim=-1).flatten()
                row = torch.where(norms >= norms.square().mean().sqrt(), norms, torch.inf).argmin()
                result *= 1 + everywhere
                result[0, row] *= 1 + one_row
            return results

        monkeypatch.setattr(kernels, "call", changed)
        return check_result(method, inputs, case)

    assert check()["ok"] and check(everywhere=0.5 * bound)["ok"] and check(one_row=5 * bound)["ok"]
    found = check(everywhere=3 * bound)
    assert not found["ok"] and found["problem"].startswith(f"{name} is off by")
    found = check(one_row=12 * bound)
    assert not found["ok"] and found["problem"].startswith(f"a row of {name} is off by")
    found = check(one_row=torch.nan)
    assert not found["ok"] and found["problem"].startswith(f"{name} is off by nan")


@pytest.mark.parametrize("kind", ["flash", "cudnn"])
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_exact_attention_is_checked_as_well(monkeypatch, kind, training):
    case = kernels.Case(kernels.Shape.parse("2x3x3:2"), 16, training)
    inputs = kernels.Inputs.random(case, torch.device("cpu"), torch.float32)
    exact = torch.nn.functional.scaled_dot_product_attention

    def sdpa(backend, *qkv, factor=1.0):
        return factor * exact(*(x.transpose(1, 2) for x in qkv)).transpose(1, 2)

    monkeypatch.setattr(kernels, "sdpa", sdpa)
    assert check_result(kernels.Method("x", kind), inputs, case)["ok"]
    monkeypatch.setattr(kernels, "sdpa", lambda *qkv: sdpa(*qkv, factor=1.01))
    assert not check_result(kernels.Method("x", kind), inputs, case)["ok"]


def test_nan_is_an_error():
    expected = torch.ones(1, 4, 1, 2)
    found = expected.clone()
    found[0, 0, 0, 0] = torch.nan
    error = gate.relative_errors(found, expected)
    assert not error["relative"] <= 1 and not error["row"] <= 1


def totals(work):
    flops, moved = sum(stage.flops for stage in work), sum(stage.bytes for stage in work)
    return {"flops": flops, "bytes": moved, "tflops": 1.0}


def made_up_rows(status="ok"):
    case = kernels.Case(kernels.SHAPES[0], 128, False)
    rows = [
        {"method": "cudnn", "status": status, "ms": {"median": 40.0}},
        {"method": "vmonarch", "status": "ok", "ms": {"median": 4.0}},
        {"method": "vmonarch-t1", "status": "wrong"},
    ]
    for row in rows:
        method = next(method for method in kernels.METHODS if method.name == row["method"])
        row.update(totals(kernels.method_work(method, case, 2)))
    return kernels.finish(kernels.METHODS, case, rows, RATES)


def test_speed_ups_are_over_a_right_baseline_only():
    exact, ours, wrong = made_up_rows()
    assert ours["over_cudnn"] == 10 and exact["over_cudnn"] == 1 and ours["over_fa2"] is None
    floor = max(ours["flops"] / 786e12, ours["bytes"] / 4.3e12) * 1e3
    assert ours["floor_ms"] == pytest.approx(floor) and ours["over_floor"] == pytest.approx(4 / floor)
    assert "over_cudnn" not in wrong and "over_floor" not in wrong
    assert made_up_rows("wrong")[1]["over_cudnn"] is None


def products(grid, d, *, num_iterations=2, tiles=(1, 1), coarse=1):
    """Multiply-adds × 2 of the forward pass by stage kind, and of its scores alone, by counting."""
    frames, height, width = grid
    blocks = []
    for frame in range(frames):
        for i in range(tiles[0]):
            for j in range(tiles[1]):
                rows = range(i * height // tiles[0], (i + 1) * height // tiles[0])
                columns = range(j * width // tiles[1], (j + 1) * width // tiles[1])
                blocks.append([(frame, r, c, r - rows[0], c - columns[0]) for r in rows for c in columns])
    positions = {(r, c) for block in blocks for *_, r, c in block}
    positions = (1 + max(r for r, _ in positions)) * (1 + max(c for _, c in positions))
    flops, scores = 0, 0
    for i in range(num_iterations):
        last = i == num_iterations - 1
        for block in blocks:
            keys = {(r // coarse, c // coarse) if not last else (r, c) for *_, r, c in block}
            for _ in range(positions):
                for _ in keys:
                    scores += 2 * d
                    flops += 2 * d * (3 if last else 2)
        for block in blocks:
            for _ in block:
                for _ in blocks:
                    scores += 2 * d
                    flops += 4 * d
    for _ in range(height * width):
        for _ in range(frames * height * width):
            scores += 2 * d
            flops += 4 * d
    return flops, scores


OPTIONS = {
    "plain": {},
    "one iteration": {"num_iterations": 1},
    "three iterations": {"num_iterations": 3},
    "coarse": {"coarse": 2},
    "tiles and coarse": {"tiles": (2, 2), "coarse": 2},
}


@pytest.mark.parametrize("grid", [(2, 4, 4), (3, 5, 3)], ids=["even", "ragged"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_flops_are_those_that_one_counts(grid, options):
    d, heads = 8, 3
    work = kernels.vmonarch_work(LatentGrid(*grid), heads, d, itemsize=2, training=True, **options)
    forward = sum(stage.flops for stage in work if "backward" not in stage.stage)
    backward = sum(stage.flops for stage in work if "backward" in stage.stage)
    flops, scores = products(grid, d, **options)
    assert forward == heads * flops
    # Every product has two in its backward pass, which computes the scores once more.
    assert backward == heads * (2 * flops + scores)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_flops_are_those_of_plain_torch(options):
    grid = LatentGrid(2, 4, 4)
    query, key, value = (torch.randn(1, grid.tokens, 2, 8, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        out = vmonarch_attention(query, key, value, grid=grid, implementation="torch", **options)
    work = kernels.vmonarch_work(grid, 2, 8, itemsize=4, training=False, **options)
    assert counter.get_total_flops() == sum(stage.flops for stage in work)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * sum(stage.flops for stage in work)


def test_full_attention_counts_four_and_ten_products():
    for training, factor in ((False, 4), (True, 14)):
        work = kernels.full_attention_work(100, 3, 8, itemsize=2, training=training)
        assert work.flops == factor * 3 * 100 * 100 * 8


def test_methods_take_turns_and_none_is_always_first():
    calls = []
    runs = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    times, host = clock.measure(runs, {"a": 4, "b": 2, "c": 4}, kernels.Clock(torch.device("cpu")), float("inf"))
    assert calls == ["a", "b", "c", "b", "c", "a", "c", "a", "a", "c"]
    assert {name: len(found) for name, found in times.items()} == {"a": 4, "b": 2, "c": 4} and set(host) == set("abc")
    calls.clear()
    clock.measure(runs, dict.fromkeys(runs, 50), kernels.Clock(torch.device("cpu")), 0.0)
    assert len(calls) == 3 * clock.MIN_ROUNDS


def test_percentiles():
    summary = clock.summary([5.0, 1.0, 2.0, 4.0, 3.0, 6.0])
    assert summary == {"median": 3.5, "min": 1.0, "p20": 2.0, "p80": 5.0}


@pytest.fixture
def fast_cases(monkeypatch):
    """Cases that take 10 s each by a clock of their own; `seen` tells which ran."""
    now, seen = [0.0], []

    def ways(methods, case, *_):
        now[0] += 10
        seen.append(case.label)
        return {}

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(kernels, "ways", ways)
    monkeypatch.setattr(machine, "interpreted", lambda: True)
    return seen


def test_the_budget_stops_the_run_and_says_what_is_left_out(tmp_path, fast_cases, capsys):
    code, results = bench(tmp_path, "--shapes", "2x2x2", "3x2x2", "4x2x2", "--head-dims", "64", "--budget", "25")
    assert code == 0 and not results["complete"]
    assert fast_cases == ["2x2x2 d=64 forward", "3x2x2 d=64 forward", "4x2x2 d=64 forward"]
    assert [entry["case"] for entry in results["left_out"]] == [
        f"{frames}x2x2 d=64 forward+backward" for frames in (2, 3, 4)
    ]
    assert "budget of 25 s" in capsys.readouterr().out


def test_a_run_that_is_killed_loses_no_finished_case(tmp_path, monkeypatch, fast_cases):
    finished = kernels.ways

    def killed(*arguments):
        if len(fast_cases) == 2:
            raise KeyboardInterrupt
        return finished(*arguments)

    monkeypatch.setattr(kernels, "ways", killed)
    code, results = bench(tmp_path, "--shapes", "2x2x2", "3x2x2", "4x2x2")
    assert code == 130 and len(results["cases"]) == 2 and not results["complete"]
    assert os.listdir(tmp_path) == ["kernels.json"]


def test_everything_is_compiled_with_as_few_heads_as_do():
    tasks = kernels.compile_tasks(kernels.Selection(), "cuda:0")
    assert len(set(tasks)) == len(tasks)
    exact = [case for case, _, stages, _ in tasks if stages == "exact"]
    # With the heads of the measurement, for exact rows in one and in two resolutions once per grid and head dimension.
    assert {case.shape.heads for case in exact} == {12, 40} and len(exact) == 2 * len(set(exact)) == 2 * 15
    others = [task for task in tasks if task[2] != "exact"]
    assert {case.shape.heads for case, *_ in others} == {2}
    # Two passes in one and three parts: five methods on seven shapes of two head dimensions and one of one, two on the
    # seven of one head dimension.
    assert len(others) == 4 * (5 * 15 + 2 * 7)
    assert [kernels.compiling_heads(n) for n in (1, 2, 12, 16, 40, 48)] == [1, 2, 2, 16, 2, 16]


def test_a_breakdown_that_fails_leaves_the_times(monkeypatch):
    monkeypatch.setattr(stages, "watched_stages", lambda watch: 1 / 0)
    assert kernels._stages(lambda: None, [], kernels.Clock(torch.device("cpu"))) == {
        "stages_problem": "ZeroDivisionError: division by zero"
    }


@in_interpreter
def test_the_kernels_of_a_case_are_compiled_in_parts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))
    ran = []
    watched = stages.watched_stages

    def noting(watch):
        def note(stage):
            function = stage.function
            return watch(
                dataclasses.replace(stage, function=lambda *a, **k: (ran.append(stage.stage), function(*a, **k))[1])
            )

        return watched(note)

    monkeypatch.setattr(stages, "watched_stages", noting)
    case = kernels.Case(kernels.Shape.parse("2x4x4:1"), 16, True)
    coarse = tuple(method for method in kernels.METHODS if method.name == "vmonarch-coarse2")
    config = kernels.Selection((case.shape,), coarse, (16,), ("backward",))
    tasks = kernels.compile_tasks(config, "cpu")
    assert [stages for _, _, stages, _ in tasks] == ["exact", *kernels._PARTS[True]]
    for task in tasks:
        kernels._compile_task(task)
    work = kernels.vmonarch_work(LatentGrid(2, 4, 4), 1, 16, itemsize=4, training=True, coarse=2)
    assert set(ran) == {stage.stage for stage in work}
    assert [ran.count(stage) for stage in ("R1", "L2", "R2 backward", "L1 backward", "exact backward")] == [1] * 5


def test_the_json_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "kernels.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1} and os.listdir(tmp_path) == ["kernels.json"]


def test_all_cases_in_order_of_priority():
    config = kernels.Selection()
    names = [case.label for case in config.cases()]
    assert names[0] == "43x28x52 d=128 forward" and len(names) == len(set(names)) == 2 * (7 + 8)
    assert [name for name in names if name.startswith(kernels.FIGURE_8)] == [
        "32x32x64 d=64 forward",
        "32x32x64 d=64 forward+backward",
    ]
    torch_form = next(method for method in kernels.METHODS if method.kind == "torch")
    assert [c.label for c in config.cases() if torch_form.measured_on(c.shape, c.head_dim)] == [
        "32x32x64 d=64 forward",
        "32x32x64 d=64 forward+backward",
    ]


def test_shapes_are_read_as_they_are_written():
    for text in ("43x28x52", "24x44x80:40", "2x4x4:1"):
        assert kernels.Shape.parse(text).name == text
    for text in ("43x28", "43x28x52:", "0x2x2", "2×2×2", ""):
        with pytest.raises(InputError, match="frames x height x width"):
            kernels.Shape.parse(text)


def test_the_machine_needs_nothing_but_torch_triton_and_numpy(tmp_path):
    banned = ("diffusers", "omegaconf", "transformers", "yaml", "accelerate", "matplotlib", "PIL", "imageio_ffmpeg")
    code = f"""
import sys
for name in {banned}:
    sys.modules[name] = None
sys.argv = ["vmonarch.cli", "bench", "kernels", *{TINY}, "--passes", "forward", "--methods", "vmonarch",
            "--output", {str(tmp_path / "kernels.json")!r}]
import runpy
runpy.run_module("vmonarch.cli", run_name="__main__", alter_sys=True)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert json.loads((tmp_path / "kernels.json").read_text())["complete"]
