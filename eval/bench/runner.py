"""The runner of the benchmarks: check all ways to compute a case, time them in turns, write JSON.

A benchmark is one record (`Bench`): its cases, and how each can be computed. A result that is wrong has no speed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vmonarch.configs import InputError, suggest
from vmonarch.eval.bench.gate import BOUNDS, ROW_FACTOR, compare, failure
from vmonarch.eval.bench.machine import (
    MIN_ROUNDS,
    Clock,
    allocated,
    check_device,
    count_done,
    measure,
    measure_rates,
    measured_dtype,
    provenance,
    release_memory,
    summary,
)
from vmonarch.eval.bench.rows import tables
from vmonarch.files import check_output, write_json

FORMAT = "vmonarch-bench-1"
# Of the budget, for compiling beforehand; and the bytes that must be free before a process compiles.
COMPILE_SHARE = 0.5
COMPILE_BYTES = 24e9
Tensors = Mapping[str, torch.Tensor]
# Settings of the benchmarks of attention.
ATTENTION = {
    "layout": "[B, S, H, D]; SDPA and FlexAttention get transposed views of it",
    "inputs": "standard normal",
    "reference": "float32 plain torch, all rows of the first and the last head; gradients of the first head, or of all"
    " where they share factors",
}


class Case(SimpleNamespace):
    """One row of numbers: its `label`, whether it is `training`, its `heads`, and the sizes that its ways need."""


@dataclass(frozen=True)
class Way:
    """One way to compute a case, with its inputs.

    Args:
        run: the call; gives (out,) or (out, dq, dk, dv, …).
        found: the parts of what `run` gave that are compared, by name; names of gradients begin with a d.
        expected: the same parts in float32, and maybe others.
        bounds: see `gate.compare`.
        flops, bytes: its work; 0 if they are not counted.
        input_bytes: of all tensors that must exist before the call.
        before: bytes that are not the call's; None for those that are allocated when it begins.
        graph: record the call as a CUDA graph, because launching takes longer than computing.
        more: adds to the row, by the clock that timed it.
    """

    run: Callable[[], Sequence[torch.Tensor]]
    found: Callable[[Sequence[torch.Tensor]], Tensors] = lambda results: {}
    expected: Callable[[], Tensors] = dict
    bounds: Mapping[str, float] | None = None
    flops: float = 0.0
    bytes: float = 0.0
    input_bytes: int = 0
    before: int | None = None
    graph: bool = False
    more: Callable[[Clock, dict[str, Any]], Any] = lambda clock, row: None


Ways = Mapping[str, Callable[[], Way]]


@dataclass(frozen=True)
class Bench:
    """A benchmark.

    Args:
        methods: names of all ways; of those, `ours` must not fail.
        cases: the most telling first.
        ways: (case, device, dtype) -> how it can be computed; each is made only when its turn comes. A function of a
            module, or a partial of one, as other processes call it too.
        base: the way that the times of the others are compared with, in tables.
        compiled: (case, method) -> what its code depends on, None where nothing is to be compiled beforehand.
        formulae: of FLOPs and bytes.
        settings: further ones of the JSON.
        describe: (case, clock) -> what the JSON says of a case.
        finish: called with the JSON of a case; adds what follows from all of its rows.
        document: makes the file's contents of the JSON of a run.
        way_seconds: that a way may take; one whose calls take long is measured in fewer rounds.
        flushes: of the L2 before each call. Sixteen take about a millisecond, in which the host queues all of the call.
    """

    name: str
    methods: tuple[str, ...]
    ours: tuple[str, ...]
    cases: Sequence[Any]
    ways: Callable[[Any, torch.device, torch.dtype], Ways]
    base: str = ""
    compiled: Callable[[Case, str], Hashable | None] = lambda case, method: None
    formulae: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    describe: Callable[[Any, Clock], dict[str, Any]] = lambda case, clock: dict(vars(case))
    finish: Callable[[dict[str, Any]], Any] = lambda case: None
    document: Callable[[dict[str, Any], str], dict[str, Any]] = lambda run, base: run | tables(run, base)
    way_seconds: float = 1.0
    flushes: int = 16


@dataclass(frozen=True)
class Limits:
    """How much is measured.

    Args:
        rounds: measurements of each way, at most. deadline: `time.monotonic()` after which nothing is begun.
    """

    rounds: int
    budget: float
    deadline: float

    def over(self, clock: Clock, seconds: float = 0.0) -> dict[str, str] | None:
        """What a row says that is left out because these seconds more do not fit; None if they fit."""
        if not max(clock.everywhere(time.monotonic() + seconds > self.deadline)):
            return None
        what = f"a round of {seconds:.0f} s did not fit the budget" if seconds else "the budget"
        return {"status": "left out", "problem": f"{what} of {self.budget:g} s{'' if seconds else ' was used up'}"}


def with_gradients(
    attend: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor], grad_out: torch.Tensor | None
) -> Callable[[], Sequence[torch.Tensor]]:
    """The call that gives (out,), or with `grad_out` (out, gradients of the leaves)."""

    def run() -> Sequence[torch.Tensor]:
        if grad_out is None:
            with torch.no_grad():
                return (attend(),)
        out = attend()
        return (out.detach(), *torch.autograd.grad(out, leaves, grad_out))

    return run


def sdpa(
    backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """Exact attention of [B, S, H, D] by torch, on transposed views as diffusers has them.

    Args:
        backend: "cudnn" or "flash"; or "sdpa", the one that torch chooses.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {"cudnn": [SDPBackend.CUDNN_ATTENTION], "flash": [SDPBackend.FLASH_ATTENTION]}
    with sdpa_kernel(backends[backend]) if backend in backends else contextlib.nullcontext():
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def flex(*tensors: torch.Tensor, **options: Any) -> Callable[..., torch.Tensor]:
    """FlexAttention of [B, S, H, D], compiled for these tensors, whatever it is called with.

    Args:
        options: its score_mod, block_mask and scale.
    """
    from torch.nn.attention.flex_attention import flex_attention

    # After a few functions torch would stop compiling new ones and write all scores to memory instead.
    torch.compiler.reset()
    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False)
    return lambda *_: compiled(*(x.transpose(1, 2) for x in tensors), **options).transpose(1, 2)


def bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    """Of all that are there."""
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def recorded(run: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a CUDA graph that is replayed; its results are overwritten by each replay.

    Raises:
        NotImplementedError: torch cannot record it; the device is as good as before.
    """
    # Torch wants a few calls on another stream before it records one.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            results = run()
    except RuntimeError as error:
        raise NotImplementedError("the call cannot be recorded as a CUDA graph") from error

    def replay() -> Any:
        graph.replay()
        return results

    return replay


def profiled(run: Callable[[], Any], clock: Clock, most: int = 24) -> list[dict[str, Any]]:
    """The kernels that take the most time of a call, by name; none on a CPU."""
    from torch.profiler import ProfilerActivity, profile

    if clock.device.type != "cuda":
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        clock.wait()
    events = sorted(found.key_averages(), key=lambda event: -event.device_time_total)[:most]
    return [{"kernel": e.key[:90], "ms": e.device_time_total / 1e3, "calls": e.count} for e in events]


def compile_task(task: tuple[Callable[..., Ways], Case, str, str]) -> bool:
    """In a process of its own: compute a case in one way, so that its code is in the caches on disk."""
    ways, case, method, device_text = task
    # There is a process for every core already.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    device = torch.device(device_text)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        started = time.monotonic()
        while torch.cuda.mem_get_info(device)[0] < COMPILE_BYTES and time.monotonic() < started + 60:
            time.sleep(0.5)
    ways(case, device, measured_dtype(device))[method]().run()
    release_memory(device)
    return True


def compile_tasks(bench: Bench, device: str) -> list[Any]:
    """One task for all cases and methods that share their code; gradients first, because they take longest.

    Triton tells apart one head, a multiple of 16 and others: kernels of ours for fewer heads compile to the same code.
    """
    tasks: dict[Hashable, Any] = {}
    for case in bench.cases:
        for method in bench.methods:
            code = bench.compiled(case, method)
            if code is None:
                continue
            few = case
            if method in bench.ours:
                few = Case(**{**vars(case), "heads": 1 if case.heads == 1 else 2 if case.heads % 16 else 16})
            tasks.setdefault(code, (bench.ways, few, method, device))
    return sorted(tasks.values(), key=lambda task: not task[1].training)


def _compile(bench: Bench, device: torch.device, seconds: float, say: Callable[[str], None]) -> None:
    """Let processes compute the tasks of a benchmark, as far as they come."""
    torch.cuda.set_device(device)
    tasks = compile_tasks(bench, str(device))
    done = count_done(compile_task, tasks, seconds)
    say(f"{done} tasks compiled, {len(tasks) - done} left for later")


def _prepare(make: Callable[[], Way], clock: Clock, dtype: torch.dtype, row: dict[str, Any]) -> Way:
    """Check a way and fill its row, by two calls; the second says how long one takes and the memory it needs."""
    way = make()
    began = time.perf_counter()
    results = way.run()
    clock.wait()
    row["first_call_s"] = round(time.perf_counter() - began, 2)
    row["errors"], problem = compare(way.found(results), way.expected(), dtype, way.bounds)
    row.update({"status": "wrong", "problem": problem} if problem else {"status": "ok"})
    del results
    if problem:
        return way
    release_memory(clock.device)
    before = allocated(clock.device) if way.before is None else way.before
    if clock.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(clock.device)
        if way.graph:
            way.run()
            row["peak_bytes"] = torch.cuda.max_memory_allocated(clock.device) - before
            way = dataclasses.replace(way, run=recorded(way.run))
    row["call_s"] = clock.time(way.run) / 1e3
    if clock.device.type == "cuda":
        row.setdefault("peak_bytes", torch.cuda.max_memory_allocated(clock.device) - before)
        row["input_bytes"] = way.input_bytes
    return way


def _agree(row: dict[str, Any], clock: Clock) -> None:
    """Give a row what is worst of any process that measures with this one."""
    rows = clock.everywhere(row)
    row.update(next(({k: r[k] for k in ("status", "problem")} for r in rows if r["status"] != "ok"), {}))
    for key in ("peak_bytes", "call_s"):
        if key in row:
            row[key] = max(r.get(key, 0) for r in rows)
    for name, error in row.get("errors", {}).items():
        error.update({of: max(r["errors"][name][of] for r in rows if name in r.get("errors", {})) for of in error})


def measure_ways(
    ways: Ways, clock: Clock, dtype: torch.dtype, limits: Limits, bench: Bench, rates: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Check and time all ways of a case.

    Args:
        rates: of `measure_rates`; None where times tell nothing of speed.

    Returns:
        a row for every way: its status, "ok", "wrong", "out of memory", "failed" or "left out"; errors; if ok its
        milliseconds, and with rates TFLOP/s and the times that FLOPs and bytes alone would take.
    """
    rows: dict[str, dict[str, Any]] = {}
    good: dict[str, Way] = {}
    for name, make in ways.items():
        row = rows[name] = {"method": name, **(limits.over(clock) or {})}
        if "status" in row:
            continue
        try:
            good[name] = _prepare(make, clock, dtype, row)
        except Exception as error:
            row.update(failure(error))
        _agree(row, clock)
        if row["status"] != "ok":
            good.pop(name, None)
        release_memory(clock.device)
    late = limits.over(clock, sum(rows[name]["call_s"] for name in good))
    if late is not None:
        for name in good:
            rows[name].update(late)
        return list(rows.values())
    most = {name: max(MIN_ROUNDS, int(bench.way_seconds / max(rows[name]["call_s"], 1e-6))) for name in good}
    counts = {name: min(limits.rounds, most[name]) for name in good}
    times = measure({n: way.run for n, way in good.items()}, counts, clock, limits.deadline, bench.flushes)
    for name, way in good.items():
        row, ms = rows[name], [max(of) for of in zip(*clock.everywhere(times[name]), strict=True)]
        row.update(ms=summary(ms), rounds=len(ms))
        row.update(rounds_left_out=counts[name] - len(ms), flops=way.flops, bytes=way.bytes)
        for what, work, rate in (
            ("flop", way.flops, "matmul_flops_per_second"),
            ("byte", way.bytes, "copy_bytes_per_second"),
        ):
            if work and rates is not None:
                row[f"{what}_floor_ms"] = 1e3 * work / rates[rate]
        try:
            way.more(clock, row)
        except Exception as error:
            # The times of the whole still stand.
            row["more_problem"] = failure(error)["problem"]
    return list(rows.values())


def choose(argument: str, names: Sequence[str], known: Iterable[str] | None = None) -> tuple[str, ...]:
    """The names, in the order given.

    Raises:
        InputError: a name that is not known, given twice, or none at all.
    """
    listed = list(names if known is None else known)
    for name in names:
        if name not in listed:
            raise InputError(argument, f"must be of {', '.join(listed)}; got {name!r}{suggest(name, listed)}")
    if not names or len(set(names)) < len(names):
        raise InputError(argument, f"must be one or several different ones, got {', '.join(names) or 'none'}")
    return tuple(names)


def left_out(cases: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """What a run has not measured, and why: cases, rows, and rounds of rows."""
    found = []
    for case in cases:
        late = {row["method"]: row["problem"] for row in case["rows"] if row["status"] == "left out"}
        if late and len(late) == len(case["rows"]):
            found.append({"case": case["case"], "why": next(iter(late.values()))})
        else:
            found += [{"case": f"{case['case']} {name}", "why": why} for name, why in late.items()]
        if cut := max((row.get("rounds_left_out", 0) for row in case["rows"]), default=0):
            found.append({"case": case["case"], "why": f"{cut} rounds did not fit the budget"})
    return found


def wrong_rows(cases: Sequence[dict[str, Any]], ours: Sequence[str]) -> list[str]:
    """What makes a run fail: wrong results of any method, and `ours` that failed."""
    return [
        f"{row['method']} at {case['case']}: {row['problem']}"
        for case in cases
        for row in case["rows"]
        if row["status"] == "wrong" or (row["status"] not in ("ok", "left out") and row["method"] in ours)
    ]


def run_bench(
    bench: Bench,
    *,
    output: Path | None,
    methods: Sequence[str] | None = None,
    cases: str = "",
    rounds: int,
    budget: float,
    device: str,
    command: str,
    say: Callable[[str], None],
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Measure, and write the JSON after each case.

    Args:
        output: None to write nothing.
        methods: some of the benchmark's, None for all. cases: a regular expression, found in the labels of the cases.
        rounds: measurements of each method, at most.
        budget: seconds after which nothing is begun.
        command: as documents show it. say: told what is done.
        clock: of the device; None for one of this process alone.

    Returns:
        what was written: {"format", "benchmark", "date", "hardware", "versions", "command", "settings", "rates",
        "formulae", "cases": [{"case", "rows": [{"method", "status", "ms", …}], …}], "left_out": [{"case", "why"}],
        "complete", "wrong", "seconds", "tables", "caption"}. Times are milliseconds.

    Raises:
        InputError: an argument cannot be used.
    """
    limits = Limits(rounds, budget, time.monotonic() + budget)
    bench = _chosen(bench, methods, cases)
    on = check_device(device)
    if output is not None:
        check_output(output)
    if on.type == "cuda":
        _compile(bench, on, COMPILE_SHARE * budget, say)
    results = _about(bench, limits, on, command)
    clock = Clock(on) if clock is None else clock
    found: list[dict[str, Any]] = []

    def write(complete: bool = False) -> dict[str, Any]:
        missing, seconds = left_out(found), round(time.monotonic() - limits.deadline + budget, 1)
        run = {**results, "cases": found, "left_out": missing, "complete": complete and not missing}
        document = bench.document(run | {"wrong": wrong_rows(found, bench.ours), "seconds": seconds}, bench.base)
        if output is not None:
            write_json(output, document)
        return document

    write()
    for case in bench.cases:
        found.append(_measured(bench, case, clock, limits, results["rates"], say))
        write()
    return write(complete=True)


def _chosen(bench: Bench, methods: Sequence[str] | None, cases: str) -> Bench:
    """The benchmark with these methods and cases alone.

    Raises:
        InputError: there is no such method or case.
    """
    names = bench.methods if methods is None else choose("methods", methods, bench.methods)
    try:
        chosen = [case for case in bench.cases if re.search(cases, case.label)]
    except re.error as error:
        raise InputError("cases", f"must be a regular expression, got {cases!r}: {error}") from error
    if not chosen:
        raise InputError("cases", f"{cases!r} leaves none of: {'; '.join(case.label for case in bench.cases)}")
    return dataclasses.replace(bench, methods=names, cases=chosen)


def _measured(
    bench: Bench, case: Case, clock: Clock, limits: Limits, rates: dict[str, Any] | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """What the JSON says of a case."""
    if late := limits.over(clock):
        about = {"case": case.label, "rows": [{"method": name, **late} for name in bench.methods]}
        bench.finish(about)
        say(f"left out: {case.label} ({late['problem']})")
        return about
    about = {"case": case.label, **bench.describe(case, clock)}
    about["rows"] = _rows(bench, case, clock, limits, rates)
    # Inputs of several gigabytes hung on its ways.
    release_memory(clock.device)
    bench.finish(about)
    for row in about["rows"]:
        ms = f"{row['ms']['median']:9.3f} ms" if "ms" in row else f"{row['status']} {row.get('problem', '')}"
        say(f"{case.label:48s} {row['method']:14s} {row.get('mode', '')} {ms}")
    return about


def _rows(bench: Bench, case: Case, clock: Clock, limits: Limits, rates: dict[str, Any] | None) -> list[dict[str, Any]]:
    """`measure_ways` of the benchmark's methods; what they have in common may fail, too."""
    dtype = measured_dtype(clock.device)
    try:
        ways = bench.ways(case, clock.device, dtype).items()
        return measure_ways({n: way for n, way in ways if n in bench.methods}, clock, dtype, limits, bench, rates)
    except Exception as error:
        return [{"method": name, **failure(error)} for name in bench.methods]


def _about(bench: Bench, limits: Limits, device: torch.device, command: str) -> dict[str, Any]:
    """What the JSON of a run begins with."""
    dtype, flushed = measured_dtype(device), "" if bench.flushes == 1 else f"{bench.flushes} times "
    return {
        "format": FORMAT,
        "benchmark": bench.name,
        **provenance(device, command),
        "settings": {
            "dtype": str(dtype).removeprefix("torch."),
            "timing": f"CUDA events, L2 overwritten {flushed}before each call, methods in turns",
            "rounds": limits.rounds,
            "budget_s": limits.budget,
            "bounds": {**BOUNDS[dtype], "row_factor": ROW_FACTOR},
            "memory": "peak_bytes: the most that was allocated during a call beyond what was before it, results"
            " counted; input_bytes: tensors that must exist before it, a written-out bias counted",
            **bench.settings,
        },
        "rates": measure_rates(device),
        "formulae": bench.formulae,
    }
