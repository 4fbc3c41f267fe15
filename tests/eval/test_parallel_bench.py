"""The benchmark of several processes: what it measures and writes on two of them, and what it refuses."""

import functools
import json

import parallel_bench_rank
import pytest
import torch

from vmonarch.eval.bench import machine, parallel
from vmonarch.eval.bench.parallel import ulysses_bytes

CPU = torch.device("cpu")
ROWS = [f"{method}, {mode}" for method in ("full", "vmonarch") for mode in ("eager", "compiled")]


def job(tiny_yaml, ranks=(1, 2, 3), **options):
    alone = {"guidance": False, "transformer_only": True, "compile_backend": "eager"}
    return (ranks, {"settings": ["5x32x64"], "model": tiny_yaml, **alone, **options})


@pytest.fixture(scope="module")
def results(tiny_yaml, made_once, forkserver):
    """What a run with 1, 2 and 3 processes wrote, the last of which fail."""

    def measure(folder):
        said = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")
            start = functools.partial(torch.multiprocessing.start_processes, start_method=forkserver.get_start_method())
            patch.setattr(torch.multiprocessing, "spawn", start)
            patch.setattr(parallel, "run_rank", parallel_bench_rank.rank)
            told = {"rounds": 1, "budget": 300.0, "command": "the command", "say": said.append}
            found = parallel.measure(job(tiny_yaml), device="cpu", output=folder / "parallel.json", **told)
        assert [text.split(" processes, ")[0] for text in said if " s for them" in text] == ["1", "2", "3"]
        assert ["Traceback" in text for text in said] == [False] * 3 + [True], "what went wrong is shown whole"
        assert json.loads((folder / "parallel.json").read_text()) == json.loads(json.dumps(found))

    return json.loads((made_once("parallel-bench", measure) / "parallel.json").read_text())


@pytest.mark.deep
def test_every_row_is_right_and_timed_and_bytes_are_those_of_the_formulae(results):
    times = {}
    for case in results["cases"]:
        for row in case["rows"]:
            assert row["status"] == "ok", row
            alone = row["mode"] == "eager" and case["ranks"] == 1
            assert list(row["errors"]) == ([] if alone else ["step 0"]), "compared with one process"
            times[row["method"], row["mode"], case["ranks"]] = row["step_s"]["median"]
            base = times[row["method"], row["mode"], 1]
            assert row["efficiency"] == pytest.approx(base / (case["ranks"] * row["step_s"]["median"]))
    assert len(times) == 2 * len(ROWS)
    (wrong,), (table,) = results["wrong"], results["tables"]
    assert wrong.startswith("3 processes: ") and " Failed: 3 processes: " in results["caption"]
    sizes = {"batch": 1, "heads": 2, "head_dim": 16, "dtype": torch.float32}
    # Two layers; eight tokens for each rank.
    expected = [0, 2 * ulysses_bytes(tokens=(8, 8), rank=0, **sizes)]
    assert [case["sent_bytes"] for case in results["cases"]] == expected
    assert [line[1] for line in table["rows"]] == ROWS
    assert all("%" not in line[2] and "%" in line[3] and line[4] == "–" for line in table["rows"])


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
    assert found["tables"][0]["rows"] == [["a", "full, eager", *["left out"] * 3, "–"]]
