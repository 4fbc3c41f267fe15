"""Tuning writes tables that the kernels then use, and takes no candidate that is wrong.

Here it runs through Triton's interpreter, at tiny sizes, where every candidate computes the same and no time counts.
"""

import dataclasses
import json
import math
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from vmonarch.cli import main
from vmonarch.eval.bench import tune
from vmonarch.eval.bench.machine import count_done
from vmonarch.eval.bench.tune import IN_USE, SWEEPS, UNTUNED, run_tune, table_path, write_table
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
        monkeypatch.setitem(SWEEPS, kernel, dataclasses.replace(SWEEPS[kernel], grids=grids))

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
    given = {"head_dims": ("16",), "dtype": "float32", "shapes": ("2x4x4:1",), "device": "cpu", **options}
    return run_tune(output=path, kernels=kernels, **given)


def rows_of(results, kernel):
    (case,) = [case for case in results["cases"] if case["case"] == f"{kernel} d=16"]
    return {row["method"]: row for row in case["rows"]}


@in_interpreter
def test_every_kernel_is_found_in_its_operator_and_its_winner_is_used(tables, few, timed):
    timed.update({"BLOCK_N=32": 0.5, "ROWS_PER_WARP=4": 0.5})
    path = tables / "interpreter.json"
    before = json.loads(path.read_text())
    kernels = ["r_step_last", "flash_forward", "r_backward_z", "l_centroids", "l_backward_rows", "flash_bias_keys"]
    used = {name: launch_options(name, CPU, torch.float32, 16) for name in kernels}
    absent = ["l_rows", "l_backward_columns", "hopper_flash"]
    results = run(path, *kernels, *absent)
    (table,) = results["tables"]
    assert [row[0] for row in table["rows"]] == kernels
    # There are so few blocks that they fit one tile.
    for name in absent[:2]:
        problems = {row["problem"] for row in rows_of(results, name).values()}
        assert problems == {"NotImplementedError: it is not launched at these shapes"}
    for name in kernels:
        option, value = ("ROWS_PER_WARP", 4) if name[0] == "l" else ("BLOCK_N", 32)
        assert {row["status"] for row in rows_of(results, name).values()} == {"ok"}
        assert launch_options(name, CPU, torch.float32, 16) == {**used[name], option: value}
        # What was not tuned stays as it was: other item sizes, and wider heads.
        for dtype, head_dim in ((torch.float16, 16), (torch.float32, 128)):
            assert launch_options(name, CPU, dtype, head_dim).get(option) == used[name].get(option)
    after = json.loads(path.read_text())
    assert after["chip"] == "interpreter" and {"date", "torch", "triton"} == set(after["tuned"])
    assert [entry for entry in after["entries"] if entry in before["entries"]] == before["entries"]


@in_interpreter
def test_candidates_that_are_wrong_or_fail_or_bring_little_are_not_taken(tables, few, timed, monkeypatch):
    from vmonarch.kernels.monarch import fused

    right = fused.RStep.forward

    def wrong(self, *arguments, aL, **others):
        right(self, *arguments, aL=aL, **others)
        if launch_options("r_step", CPU, torch.float32, 16)["BLOCK_N"] == 32:
            aL[0, 0] += 0.1

    monkeypatch.setattr(fused.RStep, "forward", wrong)
    few("r_step", {"BLOCK_N": (0, 32, 64, 128)})
    timed.update({"BLOCK_N=32": 0.1, "BLOCK_N=0": 0.1, "BLOCK_N=64": 0.5, "BLOCK_N=128": 0.6})
    path = tables / "interpreter.json"
    results = run(path, "r_step")
    rows = rows_of(results, "r_step")
    assert rows["BLOCK_N=32"]["status"] == "wrong" and " is off by" in rows["BLOCK_N=32"]["problem"]
    assert rows["BLOCK_N=0"]["status"] == "failed" and "ms" not in rows["BLOCK_N=0"]
    assert results["tables"][0]["rows"] == [["r_step", "16", "1.000", "0.500", "2.00x", "BLOCK_N=64"]]
    monkeypatch.setattr(fused.RStep, "forward", right)
    timed.clear()
    timed["BLOCK_N=128"] = 0.998
    assert run(path, "r_step")["tables"][0]["rows"][0][2:] == ["1.000", "1.000", "1.00x", "as before"]


def test_winners_are_in_force_for_the_kernels_after_them():
    seen = []
    winners = {("r_step", 16): {"BLOCK_N": 32}, ("r_step", 64): {"BLOCK_N": 64}}
    case = tune.Case(kernel="l_output", head_dim=16, dtype="float32", shapes=("2x4x4:1",), heads=12, in_use={})
    with pytest.MonkeyPatch.context() as patch:
        options = lambda *_: seen.append(launch_options("r_step", CPU, torch.float32, 16)["BLOCK_N"]) or ()
        patch.setattr(tune, "_operator", lambda *_: options)
        with pytest.raises(NotImplementedError, match="not launched"):
            tune.ways(winners, case, CPU, torch.float32)[IN_USE]().run()
    assert seen == [32]


def entry(kernel, itemsize, head_dim, block):
    return {"kernel": kernel, "itemsize": itemsize, "head_dim": head_dim, "options": {"BLOCK_N": block}}


def test_an_entry_replaces_its_own_alone_and_brings_the_other_head_dimensions_of_the_default(tables):
    def entries(name, *new):
        if new:
            (tables / name).write_text(json.dumps({"chip": "x", "entries": new}))
        return json.loads((tables / name).read_text())["entries"]

    entries(
        "default.json", entry("a", 2, 64, 1), entry("a", 2, 256, 2), entry("a", 4, 256, 3), entry("b", None, 256, 4)
    )
    kept = entries("x.json", entry("c", 2, 64, 9), entry("c", 2, 128, 8), entry("c", 4, 128, 7))
    for kernel, head_dim, block in (("a", 128, 5), ("b", 72, 6), ("c", 128, 0)):
        write_table(tables / "x.json", "x", kernel, head_dim, {"BLOCK_N": block}, 2)
    found = entries("x.json")
    assert found[:3] == [kept[0], entry("c", 2, 128, 0), kept[2]]
    options = {(e["kernel"], e["itemsize"], e["head_dim"]): e["options"]["BLOCK_N"] for e in found[3:]}
    # Head dimension 72 is padded to 128 in the kernel.
    assert options == {("a", 2, 64): 1, ("a", 2, 256): 2, ("a", 2, 128): 5, ("b", 2, 256): 4, ("b", 2, 128): 6}


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


def test_candidates_are_products_of_what_a_sweep_says():
    sweep = dataclasses.replace(SWEEPS["r_step"], grids=({"A": (1, 2), "TMA": (0, 1)}, {"A": (2, 3), "TMA": (1,)}))
    names = ["A=1 TMA=0", "A=1 TMA=1", "A=2 TMA=0", "A=2 TMA=1", "A=3 TMA=1"]
    assert list(sweep.candidates()) == [IN_USE, *names] and sweep.candidates()["A=3 TMA=1"] == {"A": 3, "TMA": 1}


def test_a_sweep_for_every_kernel_of_the_tables(tables):
    default = json.loads((tables / "default.json").read_text())
    assert {*SWEEPS, *UNTUNED} == {entry["kernel"] for entry in default["entries"]}
    for name, sweep in SWEEPS.items():
        known = {key for e in default["entries"] if e["kernel"] == name for key in e["options"]}
        # Options that the launchers take but no table has to name.
        known |= {"TMA", "MAX_WARPS", "maxnreg"} if name.startswith("l_") else set()
        assert all(set(candidate) <= known for candidate in sweep.candidates().values()), name


@in_interpreter
def test_the_command_ends_with_the_budget_and_prints_times(tables, few, capsys):
    path = tables.parent / "new.json"
    words = ["tune", "--device", "cpu", "--dtype", "float32", "--shapes", "2x4x4:1", "--head-dims", "16", "--kernels"]
    assert main([*words, "l_output", "--output", str(path), "--budget", "1e-6"]) == 0
    assert not path.exists() and "left out: l_output d=16 (the budget of 1e-06 s" in capsys.readouterr().err
    assert main([*words, "l_output", "--output", str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    heading, _, row = ([cell.strip() for cell in line.split("|")[1:-1]] for line in out[:3])
    assert heading[:4] == ["kernel", "d", "before ms", "after ms"] and row[:2] == ["l_output", "16"]
    assert out[-1] == str(path) and json.loads(path.read_text())["chip"] == "interpreter"


def test_tasks_that_fail_or_are_late_are_not_counted(capfd):
    assert count_done(math.sqrt, [4.0, -1.0, 9.0], 60) == 2 and "ValueError" in capfd.readouterr().err
    started = time.monotonic()
    # The process of the task dies: nobody waits for its answer.
    assert count_done(os._exit, [0], 60, stalled=2) == 0
    assert time.monotonic() - started < 20
