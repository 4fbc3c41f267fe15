"""The benchmarks but those of whole models: wrong results have no speed, and what is measured is not lost."""

import contextlib
import dataclasses
import functools
import json
import math
import sys
import time
import types

import parallel_bench_rank
import pytest
import torch

from vmonarch.cli import main
from vmonarch.eval.bench import e2e, kernels, machine, parallel, runner
from vmonarch.eval.bench.rows import tables
from vmonarch.eval.bench.runner import Bench, Case, Run, Way
from vmonarch.flops import vmonarch_work
from vmonarch.grid import LatentGrid
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
    rows["ours"] |= {"ms": dict.fromkeys(("median", "p20", "p80"), 2.0), "host_ms": 0.25}
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
    assert details["rows"][0][:9] == ["a case", "ours", "2.00", "2.00–2.00", "0.25", "4.50×", "1", "2", "786.00"]
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


def test_a_run_that_stops_loses_no_finished_case_and_says_what_is_left_out(run_command, monkeypatch):
    seen = []

    def ways(case, *_):
        if len(seen) == 5:
            raise KeyboardInterrupt
        seen.append(case.label)
        return {}

    # Every case takes 10 s.
    monkeypatch.setattr(time, "monotonic", lambda: 10.0 * len(seen))
    monkeypatch.setattr(kernels, "ways", ways)
    monkeypatch.setattr(machine, "interpreted", lambda: True)
    shapes = ["--shapes", "2x2x2", "3x2x2", "4x2x2", "--head-dims", "64"]
    code, results = run_command("kernels", *shapes, "--methods", "vmonarch", "--budget", "25")
    assert code == 0 and not results["complete"]
    assert seen == ["2x2x2 d=64 forward", "3x2x2 d=64 forward", "4x2x2 d=64 forward"]
    late = [f"{frames}x2x2 d=64 forward+backward" for frames in (2, 3, 4)]
    assert [entry["case"] for entry in results["left_out"]] == late and "budget of 25 s" in results["caption"]
    code, results = run_command("kernels", *shapes)
    assert code == 130 and len(results["cases"]) == 2 and not results["complete"]


@pytest.mark.parametrize("command", [["bench", "kernels"], ["tune"]], ids=lambda words: words[0])
def test_speed_is_measured_on_a_gpu_without_the_interpreter(command, tmp_path, monkeypatch, capsys):
    def problem(*words):
        assert main([*command, *words]) == 2
        return capsys.readouterr().err

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "--device must be a CUDA GPU, as times are of one; this torch sees none" in problem()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "--device cpu needs TRITON_INTERPRET=1" in problem("--device", "cpu", "--output", "x.json")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert "TRITON_INTERPRET=1: unset it" in problem()
    assert "--device must be cuda:0 to cuda:0; got cuda:1" in problem("--device", "cuda:1")
    assert list(tmp_path.iterdir()) == []


# Attention: every way computes what it says. Kernels run through Triton's interpreter, at tiny sizes.

SLOW = ("vmonarch-t3", "vmonarch-coarse2", "vmonarch-coarse2-rows", "vmonarch-torch")


@in_interpreter
@pytest.mark.parametrize("training", [False, True], ids=["forward", "backward"])
def test_every_way_passes_the_gate_and_spoilt_results_do_not(training, monkeypatch):
    # Without a GPU torch has neither cuDNN nor flash attention of these shapes.
    sdpa = kernels.sdpa
    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    monkeypatch.setattr(kernels, "sdpa", lambda _, *qkv: sdpa("cudnn", *qkv))
    made = kernels.ways(kernels.shape_case("2x3x3:2", 16, training), CPU, torch.float32)
    assert len(made) >= 2
    for method in made.keys() - {*SLOW, "int8"}:
        way = made[method]()
        results = way.run()
        found, expected = way.found(results), way.expected()
        errors, problem = runner.compare(found, expected, torch.float32, way.bounds)
        assert not problem and max(error["relative"] for error in errors.values()) < 1e-5, method
        assert len(found) >= 3 or not training
        way.more(machine.Clock(CPU), row := {})
        assert 0 < row["host_ms"] < 1e5
        for part in found:
            spoilt = {key: x * 1.01 if key == part else x for key, x in found.items()}
            assert f"{part} is off by" in runner.compare(spoilt, expected, torch.float32, way.bounds)[1]


def peers_attention(q, k, v, exact, tail, sizes=None, gate=0.0):
    """What packages of peers compute of [B, H, S, D], in plain torch; `exact` tells which blocks, of their scores."""
    mean = lambda x: x.unflatten(2, (-1, 64)).mean(3)
    scores = mean(q) @ mean(k).mT / 128**0.5
    chosen = exact(scores).repeat_interleave(64, 2)
    logits = torch.cat([q @ k.mT, q @ mean(k).mT + 128**0.5 * math.log(64)], -1) / 128**0.5
    allowed = torch.cat([chosen.repeat_interleave(64, 3), ~chosen & tail], -1)
    fine = logits.masked_fill(~allowed, -torch.inf).softmax(-1) @ torch.cat([v, mean(v)], 2)
    return fine + gate * (scores.softmax(-1) @ mean(v)).repeat_interleave(64, 2)


@pytest.mark.parametrize("spoilt", [False, True], ids=["right", "another rule"])
def test_kernels_of_peers_are_compared_with_our_controls_of_their_rules(spoilt, monkeypatch):
    best = lambda scores, count: scores >= scores.topk(count, -1).values[..., -1:]

    def sol_attn(q, k, v, tau=None, topk_ratio=0.0, tail=True, coarse_gate=None):
        def exact(scores):
            near = torch.ones(scores.shape[-2:]).tril(1).triu(-1).bool()
            if tau is None:
                return near | best(scores, round(topk_ratio * scores.shape[-1]) + spoilt)
            means = k.transpose(1, 2).unflatten(2, (-1, 64)).mean(3)
            queries = q.transpose(1, 2).unflatten(2, (-1, 64)).mean(3)
            squares = queries.square() @ means.var(2, correction=0).unsqueeze(-1) / 128
            return near | (scores - scores.mean(-1, keepdim=True) > (tau - spoilt) * squares.sqrt())

        gate = 0.0 if coarse_gate is None else coarse_gate.transpose(1, 2)
        return peers_attention(*(x.transpose(1, 2) for x in (q, k, v)), exact, tail, gate=gate).transpose(1, 2)

    def video_sparse_attn(q, k, v, sizes, q_sizes, count, tile):
        assert sizes is q_sizes and q.is_contiguous() and q.shape[2] == 64 * len(sizes) and tile == 4
        sums.append(int(sizes.sum()))
        return peers_attention(q, k, v, lambda scores: best(scores, count + spoilt), False, gate=1.0)

    class SparseLinearAttention(torch.nn.Module):
        def __init__(self, head_dim, topk, use_bf16):
            super().__init__()
            self.share = topk

        def forward(self, q, k, v):
            return peers_attention(q, k, v, lambda x: best(x, int(self.share * x.shape[-1]) + spoilt), False)

    case, sums = kernels.shape_case("16x8x8:1", 128, False), []
    packages = {kernels.Sol: "comfy_kitchen", kernels.VSA: "fastvideo_kernel", kernels.SLA: "sparse_linear_attention"}
    made = kernels.ways(case, CPU, torch.float32)
    for method, rule in kernels.PEERS.items():
        package = packages[type(rule)]
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError):
            made[method]()
        calls = {"sol_attn": sol_attn, "video_sparse_attn": video_sparse_attn}
        stand_in = types.SimpleNamespace(**calls, SparseLinearAttention=SparseLinearAttention)
        monkeypatch.setitem(sys.modules, package, stand_in)
        way = made[method]()
        errors, problem = runner.compare(way.found(way.run()), way.expected(), torch.float32, way.bounds)
        assert ("out is off" in problem) if spoilt else errors["out"]["relative"] < 1e-5, (method, errors)
    # The last block is not full: the error of full attention is told.
    way = kernels.ways(kernels.shape_case("3x5x7:1", 128, False), CPU, torch.float32)["vsa-fastvideo"]()
    assert way.run()[0].shape == (1, 105, 1, 128) and sums[-1] == 105 and way.bounds == {}


def test_a_backward_pass_has_every_product_twice_and_the_scores_once_more():
    grid, d = LatentGrid(3, 5, 3), 8
    work = vmonarch_work(grid, d, training=True, coarse=2)
    # Six cells of a frame, two of them whole; in the last iteration every token is one.
    pairs = {"exact": 15 * 45, "R1": 15 * 3 * 6, "L1": 45 * 3, "R2": 15 * 45, "L2": 45 * 3}
    assert work.keys() == {*pairs, *(f"{stage} backward" for stage in pairs)}
    for stage, scores in pairs.items():
        # The last R-step multiplies keys and values.
        assert work[stage] == 2 * d * scores * (3 if stage == "R2" else 2)
        assert work[f"{stage} backward"] == 2 * work[stage] + 2 * d * scores


# Several processes

METHODS = ("full", "vmonarch", "near-lossless")
ROWS = [f"{method}, {mode}" for method in METHODS for mode in ("eager", "compiled")]


def job(tiny_yaml, ranks=(1, 2, 3), **options):
    alone = {"guidance": False, "transformer_only": True, "compile_backend": "eager"}
    return ranks, functools.partial(e2e.bench, ["5x32x64"], tiny_yaml, METHODS, **alone, **options)


@pytest.fixture(scope="module")
def measure(forkserver):
    """`parallel.measure` on CPUs: (job, output, what it says)."""
    start = functools.partial(torch.multiprocessing.start_processes, start_method=forkserver.get_start_method())

    def measure(job, output, say=str):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")
            patch.setattr(torch.multiprocessing, "spawn", start)
            patch.setattr(parallel, "run_rank", parallel_bench_rank.rank)
            told = {"rounds": 1, "budget": 300.0, "command": "the command", "say": say}
            return parallel.measure(job, device="cpu", output=output, **told)

    return measure


@pytest.fixture(scope="module")
def results(tiny_yaml, made_once, measure):
    """What a run with 1, 2 and 3 processes wrote, the last of which fail."""

    def make(folder):
        said = []
        with pytest.raises(RuntimeError, match="(?s)3 processes: .*Traceback.*three are too many"):
            measure(job(tiny_yaml), folder / "parallel.json", said.append)
        assert [text.split(" processes, ")[0] for text in said if " s for them" in text] == ["1", "2", "3"]

    return json.loads((made_once("parallel-bench", make) / "parallel.json").read_text())


@pytest.mark.deep
def test_every_row_is_right_and_timed_and_a_number_of_processes_that_fails_loses_no_other(results):
    times = {}
    for case in results["cases"]:
        for row in case["rows"]:
            assert row["status"] == "ok", row
            alone = row["mode"] == "eager" and case["ranks"] == 1
            steps = 50 if row["method"] == "near-lossless" else 1
            assert len(row["errors"]) == (0 if alone else steps), "compared with one process"
            times[row["method"], row["mode"], case["ranks"]] = row["step_s"]["median"]
            base = times[row["method"], row["mode"], 1]
            assert row["efficiency"] == pytest.approx(base / (case["ranks"] * row["step_s"]["median"]))
    assert len(times) == 2 * len(ROWS)
    (table,) = results["tables"]
    assert [case["ranks"] for case in results["cases"]] == [1, 2] and not results["wrong"]
    assert [line[1] for line in table["rows"]] == ROWS
    assert all("%" not in line[2] and "%" in line[3] for line in table["rows"])


def test_processes_that_share_a_clip_and_its_weights_take_the_steps_of_one(tiny_yaml, measure, tmp_path):
    make = functools.partial(parallel.training, ["5x32x64"], tiny_yaml, ("full", "vmonarch"))
    found = measure(((1, 2), make), tmp_path / "parallel.json")
    alone, shared = (case["rows"] for case in found["cases"])
    assert [row["method"] for row in alone] == ["full", "vmonarch"] and not found["wrong"]
    for one, two in zip(alone, shared, strict=True):
        for value in ("loss", "gradient_norm"):
            assert two[value] == pytest.approx(one[value], rel=1e-5)
        assert two["efficiency"] == pytest.approx(one["step_s"]["median"] / (2 * two["step_s"]["median"]))
    assert [line[1] for line in found["tables"][0]["rows"]] == ["full, training", "vmonarch, training"]


def test_every_number_of_processes_gets_its_share_of_the_time_and_what_is_left_out_is_named(
    tiny_yaml, monkeypatch, tmp_path
):
    late = {"method": "full", "mode": "eager", "status": "left out", "problem": "the budget was used up"}
    run = {**machine.provenance(CPU, ""), "settings": {"dtype": "", "rounds": 1, "timing": ""}, "left_out": []}
    given = []

    def spawn(_, inputs, nprocs):
        ranks, _, folder, told = inputs
        given.append(told["budget"])
        (folder / f"{ranks}.json").write_text(json.dumps({**run, "cases": [{"case": "a", "rows": [late]}]}))

    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    told = {"device": "cpu", "rounds": 1, "budget": 90.0, "command": "", "say": str}
    found = parallel.measure(job(tiny_yaml, (1, 2, 4)), output=tmp_path / "x.json", **told)
    # Who needs less leaves more to the others.
    assert given == [pytest.approx(30, abs=1), pytest.approx(45, abs=1), pytest.approx(90, abs=1)]
    assert found["left_out"] == [{"case": "a", "why": "the budget was used up"}] * 3
    assert found["tables"][0]["rows"] == [["a", "full, eager", *["left out"] * 3]]
