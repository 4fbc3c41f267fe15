"""The benchmark of several processes: what it measures and writes on two of them, and what it refuses."""

import functools
import json

import parallel_bench_rank
import pytest
import torch
import torch.distributed as dist

from vmonarch.cli import main
from vmonarch.eval.bench import parallel
from vmonarch.eval.bench.e2e import Setting
from vmonarch.eval.wan_models import WanModel, read_model
from vmonarch.exchange import ulysses_bytes
from vmonarch.grid import LatentGrid

# Heads that two ranks divide evenly, and not; fewer heads than ranks.
CASES = (
    parallel.Case(LatentGrid(5, 2, 3), 4, 16),
    parallel.Case(LatentGrid(5, 2, 3), 3, 16, training=True),
    parallel.Case(LatentGrid(3, 2, 2), 1, 16),
)


@pytest.fixture(scope="module")
def results(tiny_yaml, made_once, forkserver):
    models = tuple(parallel.Model(Setting("tiny", tiny_yaml, 5, 32, 64), mode) for mode in ("eager", "compiled"))
    # The last one ends all processes.
    cases = (*CASES, parallel.Case(LatentGrid(2, 1, 1), 2, head_dim=0))

    def measure(folder):
        job = parallel.Job(folder, "cpu", cases, models, rounds=1, seconds=100.0, compile_backend="eager")
        said = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")
            start = functools.partial(torch.multiprocessing.start_processes, start_method=forkserver.get_start_method())
            patch.setattr(torch.multiprocessing, "spawn", start)
            patch.setattr(parallel, "run_rank", parallel_bench_rank.rank)
            found = parallel.run_job(job, (1, 2), folder / "parallel.json", "the command", said.append)
        assert [text.split(" processes, ")[0] for text in said if " s for them" in text] == ["1", "2"]
        assert ["Traceback" in text for text in said] == [False, True] * 2, "what went wrong is shown whole"
        assert json.loads((folder / "parallel.json").read_text()) == json.loads(json.dumps(found))

    return json.loads((made_once("parallel-bench", measure) / "parallel.json").read_text())


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def row(results, case, way, ranks):
    (found,) = [r for r in results["rows"] if (r["case"], r["way"], r["ranks"]) == (case, way, ranks)]
    return found


def test_every_way_is_right_and_timed(results):
    labels = [*(case.label for case in CASES), "tiny", "tiny compiled"]
    assert len(results["rows"]) == 2 * 2 * len(labels)
    for label in labels:
        for way in parallel.WAYS:
            for ranks in (1, 2):
                found = row(results, label, way, ranks)
                if label == CASES[2].label and ranks == 2:
                    assert found["status"] == "left out" and "1 heads cannot be divided by 2" in found["problem"]
                    continue
                assert found["status"] == "ok" and found["ms"]["median"] > 0, found
                names = ["out", "dq", "dk", "dv"] if found.get("training") else ["out"]
                assert list(found["errors"]) == names
                base = row(results, label, way, 1)["ms"]["median"]
                assert found["efficiency"] == pytest.approx(base / (ranks * found["ms"]["median"]))


def test_only_what_is_to_be_compiled_is_compiled(results):
    assert [row(results, "tiny", way, ranks)["graphs"] for way in parallel.WAYS for ranks in (1, 2)] == [0] * 4
    compiled = {way: row(results, "tiny compiled", way, 2)["graphs"] for way in parallel.WAYS}
    # VMonarch's blocks are in two parts, around self-attention.
    assert compiled["heads"] > compiled["full"] > 0


def test_bytes_are_those_of_the_formulae(results):
    sizes = {"batch": 1, "heads": 4, "head_dim": 16, "dtype": torch.float32}
    by_heads = ulysses_bytes(tokens=(15, 15), rank=0, **sizes)
    found = {way: row(results, CASES[0].label, way, 2)["bytes"] for way in parallel.WAYS}
    assert found == {"full": by_heads, "heads": by_heads}
    assert all(row(results, CASES[0].label, way, 1)["bytes"] == 0 for way in parallel.WAYS)
    # Two layers; eight tokens for each rank.
    sizes |= {"heads": 2}
    assert row(results, "tiny", "heads", 2)["bytes"] == 2 * ulysses_bytes(tokens=(8, 8), rank=0, **sizes)


def test_the_table_tells_all_of_it(results):
    table = parallel.parallel_table(results)
    assert "| 1 GPU | 2 GPUs | MB sent, 2 GPUs |" in table and "the command" in table and "no speed" in table
    assert len([line for line in table.splitlines() if line.startswith("| ")]) == 2 + 2 * (len(CASES) + 2)
    assert "| left out |" in table
    measured = [line.split(" | ") for line in table.splitlines() if "| VMonarch |" in line and "left out" not in line]
    assert all("%" not in cells[2] and "%" in cells[3] for cells in measured)


def test_errors_of_any_rank_count(monkeypatch):
    others = {"out": 0.5}
    monkeypatch.setattr(parallel, "_everywhere", lambda mine: [mine, others])
    found = {}
    parallel.judge(found, {"out": 1e-6}, {"out": 1e-4})
    assert found["status"] == "wrong" and "out is off by 0.5" in found["problem"]
    parallel.judge(found, {"out": float("nan")}, {"out": 1.0})
    assert found["status"] == "wrong"


def test_efficiency_needs_the_same_way_alone():
    rows = [
        {"case": "a", "way": "heads", "ranks": 1, "ms": {"median": 8.0}},
        {"case": "a", "way": "heads", "ranks": 4, "ms": {"median": 2.5}},
        {"case": "a", "way": "full", "ranks": 4, "ms": {"median": 2.5}},
        {"case": "b", "way": "heads", "ranks": 4, "status": "left out"},
    ]
    parallel.add_efficiency(rows)
    assert [r.get("efficiency") for r in rows] == [1.0, 0.8, None, None]


def test_processes_that_fail_are_told_and_what_was_measured_stands(results):
    assert [entry["ranks"] for entry in results["failed"]] == [1, 2]
    for entry in results["failed"]:
        assert entry["status"] == "failed" and "no empty dimension" in entry["problem"]
    table = parallel.parallel_table(results | {"rows": []})
    assert "- 1 processes failed: " in table and "- 2 processes failed: " in table


def test_a_transformer_that_cannot_be_compiled_says_so(tiny_yaml, tmp_path, alone):
    job = parallel.Job(tmp_path, "cpu", (), (), rounds=1, seconds=100.0, compile_backend="none-such")
    case = parallel.Model(Setting("tiny", tiny_yaml, 5, 32, 64), "compiled")
    rows = parallel.run_model(case, read_model(tiny_yaml), job, parallel.SharedClock(torch.device("cpu")))
    assert [row["way"] for row in rows] == list(parallel.WAYS)
    assert all(row["status"] == "failed" and "InvalidBackend" in row["problem"] and "ms" not in row for row in rows)


def test_without_what_one_process_computed_nothing_is_built(tiny_yaml, tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(WanModel, "build_transformer", lambda *arguments: pytest.fail("a transformer was built"))
    job = parallel.Job(tmp_path, "cpu", (), (), rounds=1, seconds=100.0)
    case = parallel.Model(Setting("tiny", tiny_yaml, 5, 32, 64))
    rows = parallel.run_model(case, read_model(tiny_yaml), job, parallel.SharedClock(torch.device("cpu")))
    assert [row["way"] for row in rows] == list(parallel.WAYS)
    assert all(row["status"] == "left out" and "did not come to it" in row["problem"] for row in rows)


def test_more_processes_than_gpus_are_refused(capsys, monkeypatch):
    monkeypatch.setattr(parallel, "check_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(["bench", "parallel", "--ranks", "1", "4"]) == 2
    assert "--ranks must be at most 2, a GPU for each; got 4" in capsys.readouterr().err


def test_every_number_of_processes_gets_its_share_of_the_time(monkeypatch, tmp_path):
    given = []

    def spawn(_, args, nprocs):
        given.append((nprocs, args[1].seconds))

    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    job = parallel.Job(tmp_path, "cpu", CASES, (), rounds=1, seconds=90.0)
    parallel.run_job(job, (1, 2, 4), tmp_path / "parallel.json", "", lambda text: None)
    # Who needs less leaves more to the others.
    assert given == [(1, pytest.approx(30, abs=1)), (2, pytest.approx(45, abs=1)), (4, pytest.approx(90, abs=1))]
