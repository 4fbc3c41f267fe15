"""Tuning writes tables that the kernels then use, and takes no candidate that is wrong.

Here it runs through Triton's interpreter, at tiny sizes, where every candidate computes the same and no time counts.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from vmonarch.cli import main
from vmonarch.eval.bench.tune import SWEEPS, run_tune, table_path, write_table
from vmonarch.kernels.common import launch
from vmonarch.kernels.common.launch import interpreted, launch_options

pytest.importorskip("triton")
in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1 when triton is imported")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")
SMALL = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """A copy of the tables that a test may change, in place of the package's."""
    folder = tmp_path / "common" / "tables"
    shutil.copytree(Path(launch.__file__).parent / "tables", folder)
    monkeypatch.setattr(launch, "__file__", str(folder.parent / "launch.py"))
    monkeypatch.setattr(launch.resources, "files", lambda _: folder.parent)
    launch._tables.cache_clear()
    launch._tabled_options.cache_clear()
    yield folder
    monkeypatch.undo()
    launch._tables.cache_clear()
    launch._tabled_options.cache_clear()


@pytest.fixture
def few(monkeypatch):
    """few(kernel, *grids): other candidates, of one tiny shape."""

    def set_grids(kernel, *grids):
        monkeypatch.setitem(SWEEPS, kernel, dataclasses.replace(SWEEPS[kernel], grids=grids, shapes=("2x4x4:1",)))

    for name in SWEEPS:
        set_grids(name, {"ROWS_PER_WARP": (4,)} if name[0] == "l" else {"BLOCK_N": (32,)})
    return set_grids


@pytest.fixture
def timed(monkeypatch):
    """Times by the name of the way: `timed[...] = ms`, else 1 ms."""
    milliseconds = {}

    def measure(runs, rounds, *_):
        return {name: [milliseconds.get(name, 1.0)] for name in runs}

    monkeypatch.setattr("vmonarch.eval.bench.runner.measure", measure)
    return milliseconds


def run(path, *kernels, **options):
    return run_tune(output=path, kernels=kernels, head_dims=(16,), device="cpu", **options)


def rows_of(results, kernel):
    (case,) = [case for case in results["cases"] if case["case"] == f"{kernel} d=16"]
    return {row["method"]: row for row in case["rows"]}


@in_interpreter
def test_candidates_that_are_wrong_or_fail_or_bring_little_are_not_taken(tables, few, timed, monkeypatch):
    from vmonarch.kernels.monarch import op

    right = op.RStep.forward

    def wrong(self, *arguments, aL, **others):
        right(self, *arguments, aL=aL, **others)
        if launch_options("r_step", CPU, torch.float32, 16)["BLOCK_N"] == 32:
            aL[0, 0] += 0.1

    monkeypatch.setattr(op.RStep, "forward", wrong)
    few("r_step", {"BLOCK_N": (0, 32, 64, 128)})
    timed.update({"BLOCK_N=32": 0.1, "BLOCK_N=0": 0.1, "BLOCK_N=64": 0.5, "BLOCK_N=128": 0.6})
    path = tables / "interpreter.json"
    results = run(path, "r_step")
    rows = rows_of(results, "r_step")
    assert rows["BLOCK_N=32"]["status"] == "wrong" and " is off by" in rows["BLOCK_N=32"]["problem"]
    assert rows["BLOCK_N=0"]["status"] == "failed" and "ms" not in rows["BLOCK_N=0"]
    assert results["tables"][0]["rows"] == [["r_step", "16", "1.000", "0.500", "2.00x", "BLOCK_N=64"]]
    monkeypatch.setattr(op.RStep, "forward", right)
    timed.clear()
    timed["BLOCK_N=128"] = 0.998
    assert run(path, "r_step")["tables"][0]["rows"][0][2:] == ["1.000", "1.000", "1.00x", "as before"]


def test_a_table_for_a_new_chip_serves_all_of_it(tables, monkeypatch):
    chip = "NVIDIA Imaginary X1"
    path = table_path(chip)
    assert path == tables / "nvidia-imaginary-x1.json" and table_path("interpreter") == tables / "interpreter.json"
    device = torch.device("cuda", 0)
    monkeypatch.setattr(launch, "_chip_name", lambda index: chip)
    of = lambda dtype: {d: launch_options("r_step", device, dtype, d) for d in (32, 64, 128, 256)}
    before = of(torch.bfloat16)
    write_table(path, chip, "r_step", 128, dict(SMALL, BLOCK_N=64), 2)
    assert of(torch.bfloat16) == {**before, 128: dict(SMALL, BLOCK_N=64)}
    assert of(torch.float32)[128] == of(torch.float32)[64] != dict(SMALL, BLOCK_N=64)
    assert table_path(chip) == path


def test_a_sweep_for_every_kernel_of_the_tables(tables):
    default = json.loads((tables / "default.json").read_text())
    by_hand = ("taylor", "window", "two_resolution", "hopper_two_resolution")
    tabled = {entry["kernel"] for entry in default["entries"]}
    assert {*SWEEPS} == {kernel for kernel in tabled if not kernel.startswith(by_hand)}
    for name, sweep in SWEEPS.items():
        known = {key for e in default["entries"] if e["kernel"] == name for key in e["options"]}
        # Options that the launchers take but no table has to name.
        known |= {"TMA", "MAX_WARPS", "maxnreg"} if name.startswith("l_") else set()
        assert all(set(candidate) <= known for candidate in sweep.candidates().values()), name


@in_interpreter
def test_the_command_ends_with_the_budget_and_prints_times(tables, few, capsys):
    path = tables.parent / "new.json"
    words = ["tune", "--device", "cpu", "--head-dims", "16", "--kernels"]
    assert main([*words, "l_output", "--output", str(path), "--budget", "1e-6"]) == 0
    assert not path.exists() and "left out: l_output d=16 (the budget of 1e-06 s" in capsys.readouterr().err
    assert main([*words, "l_output", "--output", str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    heading, _, row = ([cell.strip() for cell in line.split("|")[1:-1]] for line in out[:3])
    assert heading[:4] == ["kernel", "d", "before ms", "after ms"] and row[:2] == ["l_output", "16"]
    assert out[-1] == str(path) and json.loads(path.read_text())["chip"] == "interpreter"
