"""The benchmark of several processes: what it measures and writes on two of them, and what it refuses."""

import functools
import json

import parallel_bench_rank
import pytest
import torch

from vmonarch.cli import main
from vmonarch.eval.bench import parallel, runner
from vmonarch.eval.bench.clock import Clock
from vmonarch.eval.bench.e2e import Setting
from vmonarch.exchange import ulysses_bytes
from vmonarch.grid import LatentGrid

CPU = torch.device("cpu")
# Heads that two ranks divide evenly, and not; fewer heads than ranks.
CASES = (
    parallel.attention_case(LatentGrid(5, 2, 3), 4, 16),
    parallel.attention_case(LatentGrid(5, 2, 3), 3, 16, training=True),
    parallel.attention_case(LatentGrid(3, 2, 2), 1, 16),
)


def model_case(tiny_yaml, mode):
    return parallel.model_case(Setting("tiny", tiny_yaml, (5, 32, 64)), mode)


@pytest.fixture(scope="module")
def results(tiny_yaml, made_once, forkserver):
    """What a run with 1, 2 and 3 processes wrote, the last of which fail."""
    models = (model_case(tiny_yaml, mode) for mode in ("eager", "compiled"))

    def measure(folder):
        job = parallel.Job((*models, *CASES), (1, 2, 3), compile_backend="eager")
        said = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")
            start = functools.partial(torch.multiprocessing.start_processes, start_method=forkserver.get_start_method())
            patch.setattr(torch.multiprocessing, "spawn", start)
            patch.setattr(parallel, "run_rank", parallel_bench_rank.rank)
            told = {"rounds": 1, "budget": 300.0, "command": "the command", "say": said.append}
            found = parallel.measure(job, device="cpu", output=folder / "parallel.json", **told)
        assert [text.split(" processes, ")[0] for text in said if " s for them" in text] == ["1", "2", "3"]
        assert ["Traceback" in text for text in said] == [False] * 3 + [True], "what went wrong is shown whole"
        assert json.loads((folder / "parallel.json").read_text()) == json.loads(json.dumps(found))

    return json.loads((made_once("parallel-bench", measure) / "parallel.json").read_text())


def row(results, label, way, ranks):
    (case,) = [case for case in results["cases"] if (case["case"], case["ranks"]) == (label, ranks)]
    return next(found for found in case["rows"] if found["method"] == way)


def test_every_way_is_right_and_timed(results):
    for label in (*(case.label for case in CASES), "tiny", "tiny compiled"):
        for way in parallel.METHODS:
            for ranks in (1, 2):
                found = row(results, label, way, ranks)
                if label == CASES[2].label and ranks == 2:
                    assert found["status"] == "failed" and "ms" not in found
                    continue
                assert found["status"] == "ok" and found["ms"]["median"] > 0, found
                of_model = [] if label == "tiny" and ranks == 1 else ["step 0"]
                of_attention = ["out", "dq", "dk", "dv"] if "backward" in label else ["out"]
                assert list(found["errors"]) == (of_attention if "attention" in label else of_model)
                base = row(results, label, way, 1)["ms"]["median"]
                assert found["efficiency"] == pytest.approx(base / (ranks * found["ms"]["median"]))
    wrong = results["wrong"]
    assert len(wrong) == 3 and wrong[2].startswith("3 processes: ")
    assert f"full at {CASES[2].label}, 2 processes: " in wrong[0] and "heads must be at least" in wrong[0]


def test_bytes_are_those_of_the_formulae_and_the_table_tells_all_of_it(results):
    sizes = {"batch": 1, "heads": 4, "head_dim": 16, "dtype": torch.float32}
    most = max(ulysses_bytes(tokens=(18, 12), rank=rank, **sizes) for rank in (0, 1))
    sent = lambda label, ranks: {row(results, label, way, ranks)["sent_bytes"] for way in parallel.METHODS}
    assert sent(CASES[0].label, 2) == {most} and sent(CASES[0].label, 1) == {0}
    # Two layers; eight tokens for each rank.
    assert sent("tiny", 2) == {2 * ulysses_bytes(tokens=(8, 8), rank=0, **sizes | {"heads": 2})}
    (table,) = results["tables"]
    assert table["header"][2:] == ["1 GPU, ms", "2 GPUs, ms", "3 GPUs, ms", "MB sent, 3 GPUs"]
    assert len(table["rows"]) == 2 * 5 and table["rows"][0][1] == "full"
    assert all("%" not in cells[2] and ("%" in cells[3] or cells[3] == "failed") for cells in table["rows"])
    assert "`the command`" in results["caption"] and " Failed: 3 processes: " in results["caption"]


def test_a_transformer_that_cannot_be_compiled_says_so(tiny_yaml, tmp_path):
    told = {"device": "cpu", "rounds": 1, "budget": 100.0, "command": ""}
    parallel.run_rank(0, 1, parallel.Job((model_case(tiny_yaml, "compiled"),), (1,), told, tmp_path, "none-such"))
    (found,) = json.loads((tmp_path / "1.json").read_text())["cases"]
    assert all(row["status"] == "failed" and "InvalidBackend" in row["problem"] for row in found["rows"])


def test_errors_of_any_rank_count():
    class Other(Clock):
        def everywhere(self, value):
            return [value, value | {"status": "wrong", "problem": "out is off by 0.5", "call_s": 9.0}]

    found = {"status": "ok", "call_s": 1.0}
    runner._agree(found, Other(CPU))
    assert found == {"status": "wrong", "problem": "out is off by 0.5", "call_s": 9.0}


def test_there_are_no_more_processes_than_gpus(capsys, monkeypatch):
    monkeypatch.setattr(parallel, "check_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(["bench", "parallel", "--ranks", "1", "4"]) == 2
    assert "--ranks must be at most 2, a GPU for each; got 4" in capsys.readouterr().err


def test_every_number_of_processes_gets_its_share_of_the_time(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda _, args, nprocs: given.append(args[1].told["budget"]))
    told = {"device": "cpu", "rounds": 1, "budget": 90.0, "command": "", "output": tmp_path / "x.json", "say": str}
    # Who needs less leaves more to the others.
    with pytest.raises(RuntimeError, match="no process could begin"):
        parallel.measure(parallel.Job(CASES, (1, 2, 4)), **told)
    assert given == [pytest.approx(30, abs=1), pytest.approx(45, abs=1), pytest.approx(90, abs=1)]
