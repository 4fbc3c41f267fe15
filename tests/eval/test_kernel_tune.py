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
from vmonarch.eval.bench import tune as kernel_tune
from vmonarch.eval.bench.stages import StageCall
from vmonarch.eval.bench.tune import SWEEPS, TuneConfig, Tuned, run_tune
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
    """Two candidates per kernel; `few(kernel=grid)` sets others."""

    def set_grids(**grids):
        for kernel, grid in grids.items():
            monkeypatch.setitem(SWEEPS, kernel, dataclasses.replace(SWEEPS[kernel], grids=(grid,)))

    small = {name: {"BLOCK_N": (16, 32)} if name[0] != "l" else {"ROWS_PER_WARP": (2, 4)} for name in SWEEPS}
    set_grids(**small)
    return set_grids


@pytest.fixture
def timed(monkeypatch):
    """Times that depend on the options alone: `timed[...] = ms` for a value of BLOCK_N or ROWS_PER_WARP, else 1 ms."""
    milliseconds = {}

    def times(kernel, candidates, groups, base, clock, rounds):
        return [[milliseconds.get(c.get("BLOCK_N", c.get("ROWS_PER_WARP")), 1.0)] * len(groups) for c in candidates]

    monkeypatch.setattr(kernel_tune, "_times", times)
    return milliseconds


def tune(path, *kernels, **options):
    from vmonarch.eval.bench.kernels import Shape

    shapes = (Shape.parse("2x4x4:1"),)
    config = dict(output=path, kernels=kernels, head_dims=(16,), dtype="float32", shapes=shapes, device="cpu")
    return run_tune(TuneConfig(**{**config, "progress": False, **options}))


@in_interpreter
def test_every_kernel_is_found_in_its_stage_and_its_winner_is_used(tables, few, timed):
    timed.update({32: 0.5, 4: 0.5})
    path = tables / "interpreter.json"
    before = json.loads(path.read_text())
    absent = ["l_rows", *(name for name in SWEEPS if SWEEPS[name].hopper)]
    kernels = [name for name in SWEEPS if name not in absent]
    listed = sorted(os.listdir(tables))
    result = tune(path, *kernels, *absent)
    assert [tuned.kernel for tuned in result["tuned"]] == kernels
    why = "not launched at these shapes"
    assert result["left_out"] == [{"kernel": name, "head_dim": 16, "why": why} for name in absent]
    for tuned in result["tuned"]:
        option, value = ("ROWS_PER_WARP", 4) if tuned.kernel[0] == "l" else ("BLOCK_N", 32)
        assert tuned.speedup == pytest.approx(2) and tuned.rejected == []
        assert launch_options(tuned.kernel, CPU, torch.float32, 16) == {**tuned.before, option: value}
        # What was not tuned stays as it was: other item sizes, and wider heads.
        assert launch_options(tuned.kernel, CPU, torch.float16, 16) == tuned.before
        assert launch_options(tuned.kernel, CPU, torch.float32, 128) == tuned.before
    after = json.loads(path.read_text())
    assert after["chip"] == "interpreter" and {"date", "torch", "triton"} == set(after["tuned"])
    assert [entry for entry in after["entries"] if entry in before["entries"]] == before["entries"]
    assert sorted(os.listdir(tables)) == listed


@in_interpreter
def test_options_in_use_stay_unless_something_is_better(tables, few, timed):
    timed.update({16: 1.0, 32: 0.995})
    result = tune(tables / "interpreter.json", "r_step")
    (tuned,) = result["tuned"]
    assert tuned.after == tuned.before == SMALL and tuned.speedup == 1


@in_interpreter
def test_a_candidate_with_wrong_results_is_rejected(tables, few, timed, monkeypatch):
    from vmonarch.kernels.monarch import fused

    right = fused.RStep.forward

    def wrong(self, *arguments, aL, **others):
        right(self, *arguments, aL=aL, **others)
        if launch_options("r_step", CPU, torch.float32, 16)["BLOCK_N"] == 32:
            aL[0, 0] += 0.1

    monkeypatch.setattr(fused.RStep, "forward", wrong)
    few(r_step={"BLOCK_N": (16, 32, 64)})
    timed.update({32: 0.1, 64: 0.5})
    result = tune(tables / "interpreter.json", "r_step")
    (tuned,) = result["tuned"]
    assert tuned.after["BLOCK_N"] == 64
    (rejected,) = tuned.rejected
    assert rejected["options"] == {"BLOCK_N": 32} and rejected["problem"].startswith("wrong: results differ by")
    assert "rejected: r_step d=16 BLOCK_N=32: wrong" in kernel_tune.text_table(result)


@in_interpreter
def test_a_candidate_that_fails_is_rejected(tables, few, timed):
    few(r_step={"BLOCK_N": (16, 0, 32)})
    timed.update({32: 0.5})
    (tuned,) = tune(tables / "interpreter.json", "r_step")["tuned"]
    assert tuned.after["BLOCK_N"] == 32 and [entry["options"]["BLOCK_N"] for entry in tuned.rejected] == [0]


@in_interpreter
def test_what_compiling_found_counts(tables, few, timed):
    few(r_step={"BLOCK_N": (16, 32, 64, 128, 48)})
    compiled = [(None, 0), ("OutOfResources: shared memory", 0), (None, 500), None, (None, 100)]
    timed.update({32: 0.1, 64: 0.1, 128: 0.1, 48: 2.0})
    config = TuneConfig(
        shapes=(kernel_tune.Shape.parse("2x4x4:1"),), dtype="float32", device="cpu", kernels=("r_step",)
    )
    clock = kernel_tune.Clock(CPU)
    tuned = kernel_tune.tune_kernel("r_step", 16, config, clock, {}, compiled, float("inf"))
    assert tuned.after["BLOCK_N"] == 16
    problems = {entry["options"]["BLOCK_N"]: entry["problem"] for entry in tuned.rejected}
    assert problems[32] == "OutOfResources: shared memory" and "spills 500" in problems[64]
    assert problems[128] == "not compiled in time"
    # As much as the options in use spill is allowed.
    compiled[0] = (None, 600)
    tuned = kernel_tune.tune_kernel("r_step", 16, config, clock, {}, compiled, float("inf"))
    assert tuned.after["BLOCK_N"] == 64


def test_a_replay_starts_from_the_same_state_every_time():
    total, other = torch.ones(3), torch.ones(2)

    def add(x, *, into):
        into += x * launch_options("r_step", CPU, torch.float32, 16)["num_stages"]
        return into.sum()

    replay = kernel_tune.Replay(StageCall("R1", add, (other.sum(),), {"into": total}), {"r_step": {"num_stages": 1}})
    for _ in range(3):
        assert replay.difference({"r_step": {"num_stages": 1}}) == 0
    assert replay.difference({"r_step": {"num_stages": 2}}) > 0.5


@pytest.mark.parametrize(
    ("found", "expected", "off"),
    [
        ([1.0, torch.inf, torch.nan], [1.0, torch.inf, torch.nan], 0.0),
        ([1.0, 2.0], [1.0, 2.2], 0.2 / (1 + 2.2**2) ** 0.5),
        ([1.0, torch.nan], [1.0, 2.0], torch.inf),
        ([1.0, torch.inf], [1.0, -torch.inf], torch.inf),
        ([1.0, 2.0], [1.0, torch.inf], torch.inf),
    ],
    ids=["same", "near", "nan", "sign of infinity", "infinity"],
)
def test_differences(found, expected, off):
    assert kernel_tune.difference(torch.tensor(found), torch.tensor(expected)) == pytest.approx(off, rel=1e-5)


def entry(kernel, itemsize, head_dim, block):
    return {"kernel": kernel, "itemsize": itemsize, "head_dim": head_dim, "options": {"BLOCK_N": block}}


def tuned(kernel, head_dim, block):
    return Tuned(kernel, head_dim, {}, {"BLOCK_N": block}, 2.0, 1.0, 2.0, 1, [])


def test_a_new_kernel_brings_the_other_head_dimensions_of_the_default():
    defaults = [entry("a", 2, 64, 1), entry("a", 2, 256, 2), entry("a", 4, 256, 3), entry("b", None, 256, 4)]
    merged = kernel_tune.merged_entries([entry("c", 2, 64, 9)], defaults, [tuned("a", 128, 5), tuned("b", 72, 6)], 2)
    assert merged[0] == entry("c", 2, 64, 9)
    options = {(e["kernel"], e["itemsize"], e["head_dim"]): e["options"]["BLOCK_N"] for e in merged[1:]}
    # Head dimension 72 is padded to 128 in the kernel.
    assert options == {("a", 2, 64): 1, ("a", 2, 256): 2, ("a", 2, 128): 5, ("b", 2, 256): 4, ("b", 2, 128): 6}


def test_a_tuned_entry_replaces_its_own_alone():
    entries = [entry("a", 2, 64, 1), entry("a", 2, 128, 2), entry("a", 4, 128, 3)]
    merged = kernel_tune.merged_entries(entries, [entry("a", 2, 256, 9)], [tuned("a", 128, 7)], 2)
    assert merged == [entry("a", 2, 64, 1), entry("a", 2, 128, 7), entry("a", 4, 128, 3)]


def test_a_table_for_a_new_chip_serves_all_of_it(tables, monkeypatch):
    path = kernel_tune.table_path("NVIDIA Imaginary X1")
    assert path == tables / "nvidia-imaginary-x1.json"
    options = dict(SMALL, BLOCK_N=64)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(launch, "_chip_name", lambda index: "NVIDIA Imaginary X1")
    before = {d: launch_options("r_step", device, torch.bfloat16, d) for d in (32, 64, 128, 256)}
    kernel_tune.write_table(
        path, "NVIDIA Imaginary X1", [dataclasses.replace(tuned("r_step", 128, 0), after=options)], 2
    )
    after = {d: launch_options("r_step", device, torch.bfloat16, d) for d in (32, 64, 128, 256)}
    assert after == {**before, 128: options}
    other = launch_options("r_step", device, torch.float32, 128)
    assert other == launch_options("r_step", device, torch.float32, 64) and other != options
    assert kernel_tune.table_path("NVIDIA Imaginary X1") == path
    assert kernel_tune.table_path("interpreter") == tables / "interpreter.json"


def test_a_switch_that_is_off_changes_nothing():
    assert kernel_tune._adds_nothing({"BLOCK_M": 16, "TMA": 0}, SMALL)
    assert not kernel_tune._adds_nothing({"TMA": 1}, SMALL) and not kernel_tune._adds_nothing({"BLOCK_M": 32}, SMALL)


def test_candidates_are_products_of_what_a_sweep_says():
    sweep = dataclasses.replace(SWEEPS["r_step"], grids=({"A": (1, 2), "TMA": (0, 1)}, {"A": (2, 3), "TMA": (1,)}))
    pairs = [(1, 0), (1, 1), (2, 0), (2, 1), (3, 1)]
    assert sweep.candidates() == [{"A": a, "TMA": tma} for a, tma in pairs]


def test_a_sweep_for_every_kernel_of_the_tables(tables):
    default = json.loads((tables / "default.json").read_text())
    assert {*SWEEPS, *kernel_tune.UNTUNED} == {entry["kernel"] for entry in default["entries"]}
    for name, sweep in SWEEPS.items():
        known = {key for e in default["entries"] if e["kernel"] == name for key in e["options"]}
        # Options that the launchers take but no table has to name.
        known |= {"TMA", "MAX_WARPS", "maxnreg"} if name.startswith("l_") else set()
        assert all(set(candidate) <= known for candidate in sweep.candidates()), name


@pytest.mark.parametrize("hopper", [False, True], ids=["other", "hopper"])
def test_everything_is_compiled_once(monkeypatch, hopper):
    monkeypatch.setattr(launch, "on_hopper", lambda device: hopper)
    config = TuneConfig()
    tasks = kernel_tune.compile_tasks(config, "cuda:0")
    for kernel in SWEEPS:
        for head_dim in (128, 64):
            of_kernel = [task for task in tasks if (task.kernel, task.head_dim) == (kernel, head_dim)]
            found = [dict(candidate) for task in of_kernel for candidate in task.candidates]
            assert found == ([] if SWEEPS[kernel].hopper and not hopper else SWEEPS[kernel].candidates())
    defaults = [task for task in tasks if not task.kernel]
    assert tasks[: len(defaults)] == defaults and len(set(defaults)) == len(defaults)
    used = {workload for sweep in SWEEPS.values() for workload in sweep.workloads}
    assert {(task.workloads[0], task.head_dim) for task in defaults} == {(w, d) for w in used for d in (128, 64)}


@in_interpreter
def test_the_compiling_process_tells_what_became_of_each_candidate(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    workload = kernel_tune.Workload("2x4x4:1", training=True)
    for kernel in ("r_backward_z", "l_backward_rows", "flash_backward_q", "r_step"):
        option = "ROWS_PER_WARP" if kernel[0] == "l" else "BLOCK_N"
        # There are no tiles of nothing.
        candidates = (((option, 16),), ((option, 0),))
        good, bad = kernel_tune._compile(kernel_tune._Task(kernel, (workload,), 16, "float32", "cpu", candidates))
        assert good == (None, 0) and bad[0] is not None, kernel
    assert kernel_tune._compile(kernel_tune._Task("", (workload,), 16, "float32", "cpu")) == []


@in_interpreter
def test_the_budget_leaves_kernels_out(tables, few, timed):
    result = tune(tables / "interpreter.json", "r_step", "l_output", budget=1e-6)
    assert [item["kernel"] for item in result["left_out"]] == ["r_step", "l_output"] and result["tuned"] == []
    assert "left out: r_step d=16 (the budget of 1e-06 s was used up)" in kernel_tune.text_table(result)


@in_interpreter
def test_the_command_prints_times_before_and_after(tables, few, capsys):
    path = tables.parent / "new.json"
    words = ["--device", "cpu", "--dtype", "float32", "--shapes", "2x4x4:1", "--head-dims", "16"]
    assert main(["tune", *words, "--kernels", "l_output", "--output", str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    heading, _, row = ([cell.strip() for cell in line.split("|")[1:-1]] for line in out[:3])
    assert heading[:4] == ["kernel", "d", "before ms", "after ms"] and row[:2] == ["l_output", "16"]
    assert out[-1] == str(path) and json.loads(path.read_text())["chip"] == "interpreter"


def test_tasks_that_fail_or_are_late_give_none():
    assert kernel_tune.map_in_processes(math.sqrt, [4.0, -1.0, 9.0], 60, processes=1) == [2.0, None, 3.0]
    started = time.monotonic()
    # The process of the task dies: nobody waits for its answer.
    assert kernel_tune.map_in_processes(os._exit, [0], 60, processes=1, stalled=2) == [None]
    assert time.monotonic() - started < 20
