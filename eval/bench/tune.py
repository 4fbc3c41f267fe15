"""Find the kernels' launch options for the chip at hand and write its table: `vmonarch tune`.

A kernel is timed inside its own stage alone, with the tensors that the real operator gave that stage at shapes which
stand for all. Candidates that do not compile, spill much, or give other results than the options in use are rejected.
They are compiled in many processes first, which leave them in Triton's cache on disk; nothing else runs while they are
timed, in turns.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from vmonarch.eval.bench.clock import Clock, measure, release_memory
from vmonarch.eval.bench.gate import failure, lost, reason
from vmonarch.eval.bench.kernels import Case, Inputs, Method, Shape, call, compiling_heads
from vmonarch.eval.bench.machine import check_device, map_in_processes
from vmonarch.eval.bench.stages import RETURNING, StageCall, call_stages
from vmonarch.eval.render.table import aligned
from vmonarch.files import AtomicFiles, check_output
from vmonarch.kernels.common import launch
from vmonarch.kernels.common.launch import block_dim, launch_options, launch_overrides
from vmonarch.pipelines.environment import device_name, package_versions

Options = dict[str, int]

TUNE_SECONDS = 480.0
COMPILE_SHARE = 0.6
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Relative difference (Frobenius norm) from the results of the options in use that other tile sizes may cause.
BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
# Registers of a thread that may live in memory, unless the options in use spill as many.
MAX_SPILLS = 128
# What is not better by this share is noise: the options in use stay.
LEAST_GAIN = 0.01
_CANDIDATES_PER_TASK = 6
# Where jit functions are; a module that is not there is passed over.
_KERNEL_MODULES = tuple(
    f"vmonarch.kernels.{name}"
    for name in (
        "flash_entropy.forward",
        "flash_entropy.backward",
        "flash_bias.forward",
        "flash_bias.backward",
        "monarch.r_step",
        "monarch.l_step",
        "hopper.flash",
        "hopper.r_step",
    )
)


@dataclass(frozen=True)
class Workload:
    """A shape with options of `vmonarch_attention`, and whether the stage is taken from forward and backward.

    Args:
        bias_rank: of FlashBias, which is run in place of VMonarch if it is not 0.
    """

    shape: str
    options: tuple[tuple[str, Any], ...] = ()
    training: bool = False
    bias_rank: int = 0

    @property
    def method(self) -> Method:
        if self.bias_rank:
            return Method("flash-bias", "flash_bias", {"rank": self.bias_rank})
        return Method("vmonarch", "vmonarch", dict(self.options))


@dataclass(frozen=True)
class Sweep:
    """How a kernel is tuned.

    Args:
        stages: which stage calls launch it: a pattern of their names (`R1`, `L2 backward`, `exact` …).
        argument: None, or a keyword argument that the call must have ("y"), or must not ("not y"); None counts as not.
        workloads: what it is timed on; a candidate's score is the geometric mean of its times over these.
        grids: candidates, as products of values by option; new constexpr options are added here. What a candidate does
            not name stays as it is in the table.
        hopper: whether it is one of the kernels that only Hopper has.
    """

    stages: str
    argument: str | None
    workloads: tuple[Workload, ...]
    grids: tuple[Mapping[str, tuple[int, ...]], ...]
    hopper: bool = False

    def switch(self) -> dict[str, Options]:
        """The override that lets the kernels for Hopper run, or keeps them from standing in for the portable ones."""
        return {"hopper": {"enabled": int(self.hopper)}}

    def candidates(self) -> list[Options]:
        """All of them, each once."""
        found: list[Options] = []
        for grid in self.grids:
            for values in itertools.product(*grid.values()):
                candidate = dict(zip(grid, values, strict=True))
                if candidate not in found:
                    found.append(candidate)
        return found

    def takes(self, stage: StageCall) -> bool:
        """Whether this call launches the kernel."""
        if re.fullmatch(self.stages, stage.stage) is None:
            return False
        if self.argument is None:
            return True
        # Of backward calls, those of the last iteration have it: they have most to do.
        name = self.argument.removeprefix("not ")
        return (stage.kwargs.get(name) is not None) is (name == self.argument)


# One shape where the tokens of a frame matter most, several where the number of frames does. Every further shape costs
# a compilation per candidate.
_FORWARD = (Workload("43x28x52"),)
_BACKWARD = (Workload("43x28x52", training=True),)
_FLASH_FORWARD = (Workload("16x28x52"), Workload("43x28x52"))
_L_FORWARD = tuple(Workload(f"{frames}x28x52") for frames in (16, 43, 81))
_L_BACKWARD = tuple(Workload(f"{frames}x28x52", training=True) for frames in (16, 43, 81))
_MANY_BLOCKS = (Workload("43x28x52", (("tiles", (2, 2)),)),)
_MANY_BLOCKS_BACKWARD = (Workload("43x28x52", (("tiles", (2, 2)),), training=True),)
_TILES = {"BLOCK_M": (64, 128), "BLOCK_N": (64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)}
_VALUES = (Workload("43x28x52", (("last_l_update", False),)),)
_COARSE = (Workload("43x28x52", (("coarse", 2),)),)
_HOPPER = {"BLOCK_N": (64, 128), "Q_STAGES": (1, 2, 3), "STAGES": (2, 3, 4, 5)}
# The results of an R-step leave through the place of z, which is given back a tile later.
_HOPPER_R = {**_HOPPER, "Q_STAGES": (2, 3)}
_BACKWARD_GRIDS = (
    {"BLOCK_M": (32, 64), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3)},
    {"BLOCK_M": (128,), "BLOCK_N": (32, 64), "num_warps": (8,), "num_stages": (1, 2, 3)},
)
_BIAS = tuple(Workload("8x32x32", bias_rank=rank) for rank in (9, 64))
_BIAS_BACKWARD = tuple(Workload("8x32x32", training=True, bias_rank=rank) for rank in (9, 64))
_L_GRID = {"MAX_TILE": (64, 128), "MAX_WARPS": (4, 8), "maxnreg": (128, 168, 255)}
# Those that write transposed tiles, which Hopper and Blackwell can do by descriptors.
_L_COLUMNS_GRID = {**_L_GRID, "TMA": (0, 1)}

# In order of priority: where the budget ends, the rest is left out. The winner of one is in force for those after it.
SWEEPS: dict[str, Sweep] = {
    "hopper_r_step_last": Sweep(r"R\d+", "y", _FORWARD, (_HOPPER_R,), hopper=True),
    "hopper_r_step": Sweep(r"R\d+", "not y", _FORWARD, (_HOPPER_R,), hopper=True),
    "hopper_r_step_pooled": Sweep(r"R\d+", "not y", _COARSE, (_HOPPER_R,), hopper=True),
    "hopper_r_step_values": Sweep(r"R\d+", "not aL", _VALUES, (_HOPPER_R,), hopper=True),
    "hopper_flash": Sweep("exact", None, _FLASH_FORWARD, (_HOPPER,), hopper=True),
    "r_step_last": Sweep(r"R\d+", "y", _FORWARD, (_TILES,)),
    "r_step": Sweep(r"R\d+", "not y", _FORWARD, (_TILES,)),
    "flash_forward": Sweep("exact", None, _FLASH_FORWARD, (_TILES,)),
    "r_backward_keys": Sweep(r"R\d+ backward", "dy", _BACKWARD, _BACKWARD_GRIDS),
    "r_backward_z": Sweep(r"R\d+ backward", "dy", _BACKWARD, _BACKWARD_GRIDS),
    "flash_backward_kv": Sweep("exact backward", None, _BACKWARD, _BACKWARD_GRIDS),
    "flash_backward_q": Sweep("exact backward", None, _BACKWARD, _BACKWARD_GRIDS),
    "l_output": Sweep(r"L\d+", "out", _L_FORWARD, (_L_GRID,)),
    "l_centroids": Sweep(r"L\d+", "z", _L_FORWARD, (_L_COLUMNS_GRID,)),
    "l_backward_rows": Sweep(r"L\d+ backward", "y", _L_BACKWARD, (_L_COLUMNS_GRID,)),
    "l_backward_columns": Sweep(r"L\d+ backward", "y", _MANY_BLOCKS_BACKWARD, (_L_COLUMNS_GRID,)),
    "l_rows": Sweep(r"L\d+", "z", _MANY_BLOCKS, (_L_GRID,)),
    "flash_bias_forward": Sweep("bias", None, _BIAS, (_TILES,)),
    "flash_bias_rows": Sweep("bias backward", None, _BIAS_BACKWARD, _BACKWARD_GRIDS),
    "flash_bias_keys": Sweep("bias backward", None, _BIAS_BACKWARD, _BACKWARD_GRIDS),
}

# Kernels without a sweep: set by hand.
UNTUNED = (
    "taylor", "window", "window_rows", "window_keys",
    "hopper_two_resolution", "hopper_two_resolution_r", "two_resolution", "two_resolution_rows",
    "two_resolution_cells", "two_resolution_keys",
)  # fmt: skip


@dataclass(frozen=True)
class TuneConfig:
    """What `run_tune` tunes.

    Args:
        output: the table to write or extend; None for the chip's own in `kernels/common/tables`.
        shapes: stand in for those of the workloads if given.
        budget: seconds after which no kernel is begun.
    """

    output: Path | None = None
    kernels: tuple[str, ...] = tuple(SWEEPS)
    head_dims: tuple[int, ...] = (128, 64)
    dtype: str = "bfloat16"
    shapes: tuple[Shape, ...] = ()
    budget: float = TUNE_SECONDS
    device: str = "cuda"
    progress: bool = True


@dataclass
class Tuned:
    """What was found for one kernel and head dimension; milliseconds are sums over the calls of all workloads."""

    kernel: str
    head_dim: int
    before: Options
    after: Options
    before_ms: float
    after_ms: float
    speedup: float
    tried: int
    rejected: list[dict[str, Any]]


def workloads_of(sweep: Sweep, shapes: Sequence[Shape]) -> list[Workload]:
    """Those of the sweep, at other shapes if any are given."""
    if not shapes:
        return list(sweep.workloads)
    templates = {(w.options, w.training, w.bias_rank): w for w in sweep.workloads}
    return [dataclasses.replace(w, shape=shape.name) for w in templates.values() for shape in shapes]


def capture(
    workload: Workload,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    few_heads: bool = False,
    needed: str = "",
) -> list[StageCall]:
    """Run the operator once, and return every stage call with its tensors.

    Args:
        few_heads: as many as compile to the same code in place of the shape's.
        needed: pattern of the stages to run, all if empty; without the others the values are arbitrary.
    """
    shape = Shape.parse(workload.shape)
    if few_heads:
        shape = dataclasses.replace(shape, heads=compiling_heads(shape.heads))
    case = Case(shape, head_dim, workload.training)
    inputs = Inputs.random(case, device, dtype)
    return call_stages(lambda: call(workload.method, inputs, case), needed)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for item in value for tensor in _tensors(item)]


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | ((a != a) & (b != b))


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative difference in the Frobenius norm; infinities and NaN must stand in the same places."""
    same = _same(found, expected)
    if bool(same.all()):
        return 0.0
    error = torch.where(same, 0.0, found.double() - expected.double())
    finite = torch.where(torch.isfinite(expected), expected.double(), 0.0)
    relative = torch.linalg.vector_norm(error) / torch.linalg.vector_norm(finite).clamp_min(1e-30)
    return relative.item() if bool(torch.isfinite(relative)) else math.inf


class Replay:
    """A stage call that can be repeated from the same state, and whose results can be compared."""

    @torch.no_grad()
    def __init__(self, stage: StageCall, overrides: Mapping[str, Options]) -> None:
        self._stage = stage
        tensors = _tensors([stage.args, stage.kwargs])
        before = [tensor.clone() for tensor in tensors]
        returned = self.run(overrides)
        # What the stage writes; all else stays as it is.
        changed = [not bool(_same(tensor, old).all()) for tensor, old in zip(tensors, before, strict=True)]
        self._outputs = [tensor for tensor, new in zip(tensors, changed, strict=True) if new]
        self._before = [old for old, new in zip(before, changed, strict=True) if new]
        self._expected = [tensor.clone() for tensor in (*self._outputs, *_tensors(returned))]

    @torch.no_grad()
    def run(self, overrides: Mapping[str, Options]) -> Any:
        with launch_overrides(overrides):
            return self._stage.function(*self._stage.args, **self._stage.kwargs)

    @torch.no_grad()
    def difference(self, overrides: Mapping[str, Options]) -> float:
        """Largest relative difference of any result from that of the options in use."""
        for tensor, old in zip(self._outputs, self._before, strict=True):
            tensor.copy_(old)
        returned = self.run(overrides)
        found = (*self._outputs, *_tensors(returned))
        return max((difference(x, y) for x, y in zip(found, self._expected, strict=True)), default=0.0)


def _spills() -> dict[int, int]:
    """Registers in memory by compiled kernel, of all that this process has loaded."""
    found: dict[int, int] = {}
    for name in _KERNEL_MODULES:
        for function in vars(importlib.import_module(name)).values():
            for caches in getattr(function, "device_caches", {}).values():
                for kernel in caches[0].values():
                    found[id(kernel)] = getattr(kernel, "n_spills", None) or 0
    return found


@functools.lru_cache(maxsize=2)
def _captured(
    kernel: str, workloads: tuple[Workload, ...], head_dim: int, dtype: torch.dtype, device: torch.device
) -> list[StageCall]:
    # Only how the exact part is split depends on the number of heads; with few, all else takes less memory.
    few = kernel != "flash_forward"
    return [
        stage
        for workload in workloads
        for stage in capture(workload, head_dim, dtype, device, few_heads=few, needed=RETURNING)
        if SWEEPS[kernel].takes(stage)
    ]


@dataclass(frozen=True)
class _Task:
    """What one process compiles: candidates of a kernel, or with kernel "" all kernels as the tables have them."""

    kernel: str
    workloads: tuple[Workload, ...]
    head_dim: int
    dtype: str
    device: str
    candidates: tuple[tuple[tuple[str, int], ...], ...] = ()


def _compile(task: _Task) -> list[tuple[str | None, int] | None]:
    """In a process of its own: run each candidate once; (problem or None, spilled registers), None where not tried."""
    device, dtype = torch.device(task.device), DTYPES[task.dtype]
    torch.cuda.set_device(device)
    if not task.kernel:
        for workload in task.workloads:
            capture(workload, task.head_dim, dtype, device, few_heads=True)
        return []
    stages = _captured(task.kernel, task.workloads, task.head_dim, dtype, device)
    results: list[tuple[str | None, int] | None] = []
    for candidate in task.candidates:
        known = set(_spills())
        try:
            with launch_overrides({**SWEEPS[task.kernel].switch(), task.kernel: dict(candidate)}):
                for stage in stages:
                    stage.function(*stage.args, **stage.kwargs)
            torch.cuda.synchronize(device)
        except Exception as error:
            results.append((reason(error), 0))
            if lost(error):
                break
            continue
        spills = [count for kernel_id, count in _spills().items() if kernel_id not in known]
        results.append((None, max(spills, default=0)))
    return results + [None] * (len(task.candidates) - len(results))


Compiled = dict[tuple[str, int], list[tuple[str | None, int] | None]]


def compile_tasks(config: TuneConfig, device: str) -> list[_Task]:
    """What to compile: the options in use at every workload first, then the candidates a few at a time."""
    works = {name: tuple(workloads_of(SWEEPS[name], config.shapes)) for name in config.kernels}
    single = dict.fromkeys(workload for group in works.values() for workload in group)
    # The slow ones, with a backward pass, first.
    ordered = sorted(single, key=lambda workload: not workload.training)
    tasks = [_Task("", (workload,), dim, config.dtype, device) for dim in config.head_dims for workload in ordered]
    for kernel in config.kernels:
        if SWEEPS[kernel].hopper and not launch.on_hopper(torch.device(device)):
            continue
        for head_dim in config.head_dims:
            candidates = [tuple(candidate.items()) for candidate in SWEEPS[kernel].candidates()]
            for first in range(0, len(candidates), _CANDIDATES_PER_TASK):
                chunk = tuple(candidates[first : first + _CANDIDATES_PER_TASK])
                tasks.append(_Task(kernel, works[kernel], head_dim, config.dtype, device, chunk))
    return tasks


def compile_candidates(config: TuneConfig, device: torch.device, seconds: float) -> Compiled:
    """Compile all candidates in several processes: what became of each, by kernel and head dimension."""
    tasks = compile_tasks(config, str(device))
    compiled: Compiled = {}
    for task, answer in zip(tasks, map_in_processes(_compile, tasks, seconds), strict=True):
        if task.kernel:
            compiled.setdefault((task.kernel, task.head_dim), []).extend(answer or [None] * len(task.candidates))
    return compiled


def _adds_nothing(candidate: Options, default: Options) -> bool:
    """Whether these are the options in use; a switch that is off may be left out."""
    return {key: n for key, n in {**default, **candidate}.items() if n} == {key: n for key, n in default.items() if n}


def tune_kernel(
    kernel: str,
    head_dim: int,
    config: TuneConfig,
    clock: Clock,
    winners: Mapping[str, Options],
    compiled: Sequence[tuple[str | None, int] | None] | None,
    deadline: float,
) -> Tuned | None:
    """Time the candidates of one kernel at one head dimension; None if no stage of the workloads launches it.

    Args:
        winners: options found for other kernels, in force meanwhile.
        compiled: what became of every candidate when it was compiled; None to find out here.
    """
    sweep, device, dtype = SWEEPS[kernel], clock.device, DTYPES[config.dtype]
    if sweep.hopper and not launch.on_hopper(device):
        return None
    default = launch_options(kernel, device, dtype, head_dim)
    base = {**winners, **sweep.switch(), kernel: default}
    groups = []
    for workload in workloads_of(sweep, config.shapes):
        with launch_overrides(base):
            stages = [stage for stage in capture(workload, head_dim, dtype, device) if sweep.takes(stage)]
        groups.append([Replay(stage, base) for stage in stages])
    groups = [group for group in groups if group]
    if not groups or (kernel == "l_rows" and not _launches_rows(config, device, dtype, head_dim)):
        return None

    rejected: list[dict[str, Any]] = []
    runs: list[Options] = []
    candidates = sweep.candidates()
    known = [(None, 0)] * len(candidates) if compiled is None else compiled
    # The options in use may be among the candidates; as much as they spill is allowed.
    in_use = [result for candidate, result in zip(candidates, known, strict=True) if _adds_nothing(candidate, default)]
    allowed = max([MAX_SPILLS, *(result[1] for result in in_use if result is not None)])
    for candidate, result in zip(candidates, known, strict=True):
        problem: str | None = None
        if _adds_nothing(candidate, default):
            continue
        if result is None:
            problem = "not compiled in time"
        elif result[0] is not None:
            problem = result[0]
        elif result[1] > allowed:
            problem = f"spills {result[1]} registers (at most {allowed})"
        elif time.monotonic() >= deadline:
            problem = "not tried: the budget was used up"
        else:
            try:
                overrides = {**base, kernel: {**default, **candidate}}
                off = max(replay.difference(overrides) for group in groups for replay in group)
                clock.wait()
                if not off <= BOUNDS[dtype]:
                    problem = f"wrong: results differ by {off:.2g} (at most {BOUNDS[dtype]:.2g})"
            except Exception as error:
                problem = failure(error)["problem"]
        if problem is None:
            runs.append({**default, **candidate})
        else:
            rejected.append({"options": candidate, "problem": problem})

    real = device.type == "cuda"
    first = _times(kernel, [default, *runs], groups, base, clock, 5 if real else 1)
    best = sorted(range(1, len(runs) + 1), key=lambda i: _score(first[i], first[0]))[:4]
    finalists = [default, *(runs[i - 1] for i in best)]
    final = _times(kernel, finalists, groups, base, clock, 15 if real else 1)
    winner = min(range(len(finalists)), key=lambda i: _score(final[i], final[0]))
    if _score(final[winner], final[0]) > 1 - LEAST_GAIN:
        winner = 0
    return Tuned(
        kernel,
        head_dim,
        default,
        finalists[winner],
        sum(final[0]),
        sum(final[winner]),
        1 / _score(final[winner], final[0]),
        len(candidates),
        rejected,
    )


def _launches_rows(config: TuneConfig, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the workloads have more blocks than one tile holds, without which `l_rows` is not launched."""
    most = launch_options("l_centroids", device, dtype, head_dim).get("MAX_TILE", 128)
    blocks = []
    for work in workloads_of(SWEEPS["l_rows"], config.shapes):
        tiles = dict(work.options).get("tiles", (1, 1))
        blocks.append(Shape.parse(work.shape).grid.frames * tiles[0] * tiles[1])
    return min(blocks) > most


def _times(
    kernel: str,
    candidates: Sequence[Options],
    groups: Sequence[Sequence[Replay]],
    base: Mapping[str, Options],
    clock: Clock,
    rounds: int,
) -> list[list[float]]:
    """Median milliseconds of every candidate on every workload, measured in turns."""
    times: list[list[float]] = [[] for _ in candidates]
    for group in groups:

        def run(options: Options, group: Sequence[Replay] = group) -> None:
            for replay in group:
                replay.run({**base, kernel: options})

        runs: dict[str, Callable[[], Any]] = {
            str(i): functools.partial(run, options) for i, options in enumerate(candidates)
        }
        measured, _ = measure(runs, dict.fromkeys(runs, rounds), clock, math.inf)
        for i in range(len(candidates)):
            times[i].append(statistics.median(measured[str(i)]))
    return times


def _score(times: Sequence[float], default: Sequence[float]) -> float:
    """Geometric mean of the times as shares of the default's; below 1 is faster."""
    return math.exp(statistics.fmean(math.log(t / d) for t, d in zip(times, default, strict=True)))


def table_path(chip: str) -> Path:
    """The file of a chip's table: the one that has its name, else a new one."""
    folder = Path(launch.__file__).parent / "tables"
    for path in sorted(folder.glob("*.json")):
        if json.loads(path.read_text()).get("chip") == chip:
            return path
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', chip.lower()).strip('-')}.json"


def merged_entries(
    entries: Sequence[dict[str, Any]], defaults: Sequence[dict[str, Any]], found: Sequence[Tuned], itemsize: int
) -> list[dict[str, Any]]:
    """`entries` with what was found in place of the same kernel, item size and head dimension.

    Where a chip has any entry of a kernel and item size, the default table is not asked: so its entries of other head
    dimensions, narrower and wider, come along.
    """
    merged = [dict(entry) for entry in entries]
    for kernel in dict.fromkeys(tuned.kernel for tuned in found):

        def of_kernel(entry: dict[str, Any], kernel: str = kernel) -> bool:
            return entry["kernel"] == kernel and entry["itemsize"] in (itemsize, None)

        if not any(of_kernel(entry) for entry in merged):
            merged += [{**entry, "itemsize": itemsize} for entry in defaults if of_kernel(entry)]
    for tuned in found:
        head_dim = block_dim(tuned.head_dim)
        new = {"kernel": tuned.kernel, "itemsize": itemsize, "head_dim": head_dim, "options": tuned.after}
        # An entry for every item size stays for the others; of two that fit, the first one counts.
        same = [
            i
            for i, entry in enumerate(merged)
            if (entry["kernel"], entry["itemsize"], entry["head_dim"]) == (tuned.kernel, itemsize, head_dim)
        ]
        if same:
            merged[same[0]] = new
        else:
            first = next((i for i, entry in enumerate(merged) if entry["kernel"] == tuned.kernel), len(merged))
            merged.insert(first, new)
    return merged


def write_table(path: Path, chip: str, found: Sequence[Tuned], itemsize: int) -> None:
    """Write or extend a table, an entry a line, as a whole; entries of other kernels stay."""
    old: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"chip": chip, "entries": []}
    default_path = Path(launch.__file__).parent / "tables" / "default.json"
    entries = merged_entries(old["entries"], json.loads(default_path.read_text())["entries"], found, itemsize)
    tuned = {"date": datetime.now(UTC).date().isoformat(), **package_versions(("torch", "triton"))}
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    text = f'{{\n "chip": {json.dumps(chip)},\n "tuned": {json.dumps(tuned)},\n "entries": [\n{lines}\n ]\n}}\n'
    with AtomicFiles(overwrite=True) as files:
        files.stage(path).write_text(text, encoding="utf-8")
    launch._tables.cache_clear()
    launch._tabled_options.cache_clear()


def run_tune(config: TuneConfig) -> dict[str, Any]:
    """Tune, and write the table after every kernel.

    Returns:
        {"chip", "table", "tuned": [Tuned …], "left_out": [{"kernel", "head_dim", "why"}]}.

    Raises:
        InputError: the device or the output cannot be used.
    """
    started = time.monotonic()
    deadline = started + config.budget
    device = check_device(config.device)
    real = device.type == "cuda"
    chip = device_name(device) if real else "interpreter"
    path = table_path(chip) if config.output is None else config.output
    check_output(path)
    if real:
        torch.cuda.set_device(device)

    def say(text: str) -> None:
        if config.progress:
            print(f"[{time.monotonic() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    compiled = compile_candidates(config, device, COMPILE_SHARE * config.budget) if real else None
    if compiled is not None:
        late = sum(results.count(None) for results in compiled.values())
        say(f"candidates compiled{f'; {late} were not done in time' if late else ''}")
    clock = Clock(device)
    found: list[Tuned] = []
    left_out: list[dict[str, Any]] = []
    winners: dict[int, dict[str, Options]] = {head_dim: {} for head_dim in config.head_dims}
    itemsize = DTYPES[config.dtype].itemsize
    for kernel in config.kernels:
        for head_dim in config.head_dims:
            if time.monotonic() >= deadline:
                why = f"the budget of {config.budget:g} s was used up"
                left_out.append({"kernel": kernel, "head_dim": head_dim, "why": why})
                continue
            results = None if compiled is None else compiled.get((kernel, head_dim))
            tuned = tune_kernel(kernel, head_dim, config, clock, winners[head_dim], results, deadline)
            if tuned is None:
                left_out.append({"kernel": kernel, "head_dim": head_dim, "why": "not launched at these shapes"})
                continue
            winners[head_dim][kernel] = tuned.after
            found.append(tuned)
            write_table(path, chip, [tuned], itemsize)
            say(f"{kernel} d={head_dim}: {tuned.before_ms:.3f} -> {tuned.after_ms:.3f} ms")
            release_memory(device)
    return {"chip": chip, "table": path, "tuned": found, "left_out": left_out}


def text_table(result: dict[str, Any]) -> str:
    """Times before and after, and why candidates were rejected."""
    heading = ["kernel", "d", "before ms", "after ms", "faster", "tried", "rejected", "options"]
    rows = []
    for tuned in result["tuned"]:
        changed = {key: value for key, value in tuned.after.items() if tuned.before.get(key) != value}
        rows.append(
            [
                tuned.kernel,
                str(tuned.head_dim),
                f"{tuned.before_ms:.3f}",
                f"{tuned.after_ms:.3f}",
                f"{tuned.speedup:.2f}x",
                str(tuned.tried),
                str(len(tuned.rejected)),
                ", ".join(f"{key}={value}" for key, value in changed.items()) or "as before",
            ]
        )
    text = aligned(heading, rows)
    for tuned in result["tuned"]:
        for entry in tuned.rejected:
            if entry["problem"].startswith(("wrong", "not ")):
                options = ", ".join(f"{key}={value}" for key, value in entry["options"].items())
                text += f"\nrejected: {tuned.kernel} d={tuned.head_dim} {options}: {entry['problem']}"
    for entry in result["left_out"]:
        text += f"\nleft out: {entry['kernel']} d={entry['head_dim']} ({entry['why']})"
    if result["chip"] == "interpreter":
        text += "\ntimes of the interpreter tell nothing of speed"
    return text
