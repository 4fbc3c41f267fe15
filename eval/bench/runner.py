"""The runner of the benchmarks: check all ways to compute a case, time them in turns, write JSON.

A benchmark is one record (`Bench`): its cases, and the ways to compute each. A way with a wrong result is not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vmonarch.configs import InputError
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
# Share of the budget for compiling beforehand.
COMPILE_SHARE = 0.5
# Largest relative errors (Frobenius norm) to the float32 reference, by dtype; a single row may have 10 × as much.
BOUNDS = {
    torch.bfloat16: {"out": 2e-2, "gradient": 5e-2},
    torch.float32: {"out": 1e-4, "gradient": 1e-3},
}
ROW_FACTOR = 10
NAMES = ("out", "dq", "dk", "dv")
Tensors = Mapping[str, torch.Tensor]


class WrongResultError(RuntimeError):
    """A kernel gave a result outside the stated bounds, or failed: the run did not measure attention."""


class Case(SimpleNamespace):
    """One thing to measure: its `label`, whether it is `training`, its `heads`, and the sizes that its ways need."""


@dataclass(frozen=True)
class Way:
    """One way to compute a case, with its inputs.

    Args:
        run: the call; returns (out,) or (out, dq, dk, dv, …).
        found: the parts of `run`'s results to compare, by name; names of gradients begin with a d.
        expected: the same parts in float32, and perhaps others.
        bounds: see `compare`.
        flops, bytes: work of the call; 0 if not counted.
        before: allocated bytes that do not belong to the call; None for all that are allocated when it begins.
        more: adds to the row, with the clock that timed it.
    """

    run: Callable[[], Sequence[torch.Tensor]]
    found: Callable[[Sequence[torch.Tensor]], Tensors] = lambda results: {}
    expected: Callable[[], Tensors] = dict
    bounds: Mapping[str, float] | None = None
    flops: float = 0.0
    bytes: float = 0.0
    before: int | None = None
    more: Callable[[Clock, dict[str, Any]], Any] = lambda clock, row: None


Ways = Mapping[str, Callable[[], Way]]


@dataclass(frozen=True)
class Bench:
    """A benchmark.

    Args:
        methods: names of all ways; those in `ours` must not fail.
        cases: the most important first.
        ways: (case, device, dtype) -> the ways to compute it, each made only when its turn comes. Must be a
            module-level function or a partial of one, because other processes call it too.
        base: the way whose times the tables compare the others with.
        compiled: (case, method) -> what its code depends on; None if nothing needs compiling beforehand.
        formulae: how FLOPs and bytes are counted.
        settings: added to the JSON's settings.
        describe: (case, clock) -> the JSON's description of a case.
        finish: called with the JSON of a case; adds what depends on all of its rows.
        document: makes the file's contents from the JSON of a run.
        way_seconds: time that a way may take; if its calls are slow, it is measured in fewer rounds.
        flushes: overwrites of the L2 before each call. Sixteen take a millisecond, so the host can queue the call.
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


def compare(
    found: Tensors, expected: Tensors, dtype: torch.dtype, bounds: Mapping[str, float] | None = None
) -> tuple[dict[str, dict[str, float]], str]:
    """(errors by name, description of those out of bounds, or "").

    Errors are relative, in the Frobenius norm: that of all rows, and the largest of any row [..., D], where the norm of
    a small row counts as the root mean square of all.

    Args:
        bounds: allowed errors by name; one without a bound is only reported. None for the bounds of the dtype.
    """
    errors, problems = {}, []
    for name, x in found.items():
        if name not in expected:
            continue
        difference = torch.linalg.vector_norm(x.float() - expected[name], dim=-1)
        norms = torch.linalg.vector_norm(expected[name], dim=-1)
        typical = norms.square().mean().sqrt().clamp_min(1e-30)
        relative = (difference.square().mean().sqrt() / typical).item()
        row = (difference / norms.clamp_min(typical)).max().item()
        errors[name] = {"relative": relative, "row": row}
        if bounds is not None and name not in bounds:
            continue
        most = BOUNDS[dtype]["gradient" if name.startswith("d") else "out"] if bounds is None else bounds[name]
        # Written so that NaN is wrong too.
        if not relative <= most:
            problems.append(f"{name} is off by {relative:.2g} (at most {most:.2g})")
        elif bounds is None and not row <= ROW_FACTOR * most:
            problems.append(f"a row of {name} is off by {row:.2g} (at most {ROW_FACTOR * most:.2g})")
    return errors, "; ".join(problems)


def failure(error: Exception) -> dict[str, str]:
    """The status and the problem of a way that failed; an error that lost the device is raised again."""
    out_of_memory = isinstance(error, torch.OutOfMemoryError)
    # After this, no measurement would be right.
    if "CUDA error" in str(error) and not out_of_memory:
        raise error
    problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300] or type(error).__name__}"
    other = "missing" if isinstance(error.__cause__ or error, ImportError) else "failed"
    return {"status": "out of memory" if out_of_memory else other, "problem": problem}


def compile_task(task: tuple[Callable[..., Ways], Case, str, str]) -> None:
    """Compute a case in one way, so that its code is in the caches on disk; for a process of its own."""
    ways, case, method, device_text = task
    device = torch.device(device_text)
    torch.cuda.set_device(device)
    ways(case, device, measured_dtype(device))[method]().run()
    release_memory(device)


def compile_tasks(bench: Bench, device: str) -> list[Any]:
    """One task for all cases and methods that share their code; training first, because it takes longest.

    Triton specialises on one head and on multiples of 16, so our kernels compile to the same code for fewer heads.
    """
    tasks: dict[Hashable, Any] = {}
    for case in bench.cases:
        for method in bench.methods:
            if (code := bench.compiled(case, method)) is None:
                continue
            few = 1 if case.heads == 1 else 2 if case.heads % 16 else 16
            shared = Case(**{**vars(case), "heads": few}) if method in bench.ours else case
            tasks.setdefault(code, (bench.ways, shared, method, device))
    return sorted(tasks.values(), key=lambda task: not task[1].training)


@dataclass
class Run:
    """A benchmark being measured, and its budget.

    Args:
        rounds: measurements of each way, at most.
        budget: seconds from the start after which nothing is begun.
        rates: what `measure_rates` returned; None where times say nothing about speed.
    """

    bench: Bench
    clock: Clock
    rounds: int
    budget: float
    rates: dict[str, Any] | None = None
    say: Callable[[str], None] = lambda text: None
    started: float = field(default_factory=lambda: time.monotonic())

    def over(self, seconds: float = 0.0) -> dict[str, str] | None:
        """The status of a row that is left out because `seconds` more do not fit the budget; None if they fit."""
        if not max(self.clock.everywhere(time.monotonic() + seconds > self.started + self.budget)):
            return None
        what = f"a round of {seconds:.0f} s did not fit the budget" if seconds else "the budget"
        return {"status": "left out", "problem": f"{what} of {self.budget:g} s{'' if seconds else ' was used up'}"}

    def case(self, case: Any) -> dict[str, Any]:
        """Measure a case and return its JSON."""
        bench, names = self.bench, self.bench.methods
        if late := self.over():
            about = {"case": case.label, "rows": [{"method": name, **late} for name in names]}
            self.say(f"left out: {case.label} ({late['problem']})")
            bench.finish(about)
            return about
        about = {"case": case.label, **bench.describe(case, self.clock)}
        try:
            # The common part of the ways may fail, too.
            made = bench.ways(case, self.clock.device, measured_dtype(self.clock.device))
            about["rows"] = self.rows({name: way for name, way in made.items() if name in names})
            del made
        except Exception as error:
            about["rows"] = [{"method": name, **failure(error)} for name in names]
        # The ways held inputs of several gigabytes.
        release_memory(self.clock.device)
        bench.finish(about)
        for row in about["rows"]:
            ms = f"{row['ms']['median']:9.3f} ms" if "ms" in row else f"{row['status']} {row.get('problem', '')}"
            self.say(f"{case.label:48s} {row['method']:14s} {row.get('mode', '')} {ms}")
        return about

    def rows(self, ways: Ways) -> list[dict[str, Any]]:
        """Check and time all ways of a case.

        Returns:
            a row for every way: status ("ok", "wrong", "out of memory", "missing", "failed" or "left out") and errors;
            if ok also milliseconds, FLOPs, bytes, and with rates the times that FLOPs and bytes alone would take.
        """
        rows: dict[str, dict[str, Any]] = {}
        good: dict[str, Way] = {}
        clock = self.clock
        for name, make in ways.items():
            row = rows[name] = {"method": name, **(self.over() or {})}
            if "status" in row:
                continue
            try:
                good[name] = self._prepare(make, row)
            except Exception as error:
                row.update(failure(error))
            self._agree(row)
            if row["status"] != "ok":
                good.pop(name, None)
            release_memory(clock.device)
        late = self.over(sum(rows[name]["call_s"] for name in good))
        if late is not None:
            for name in good:
                rows[name].update(late)
            return list(rows.values())
        most = {name: max(MIN_ROUNDS, int(self.bench.way_seconds / max(rows[name]["call_s"], 1e-6))) for name in good}
        counts, runs = {n: min(self.rounds, most[n]) for n in good}, {n: way.run for n, way in good.items()}
        times = measure(runs, counts, clock, self.started + self.budget, self.bench.flushes)
        for name, way in good.items():
            row, ms = rows[name], [max(of) for of in zip(*clock.everywhere(times[name]), strict=True)]
            row.update(ms=summary(ms), rounds=len(ms), rounds_left_out=counts[name] - len(ms))
            row.update(flops=way.flops, bytes=way.bytes)
            for what, rate in (("flop", "matmul_flops_per_second"), ("byte", "copy_bytes_per_second")):
                if row[f"{what}s"] and self.rates is not None:
                    row[f"{what}_floor_ms"] = 1e3 * row[f"{what}s"] / self.rates[rate]
            try:
                way.more(clock, row)
            except Exception as error:
                # The measured times still stand.
                row["more_problem"] = failure(error)["problem"]
        return list(rows.values())

    def _prepare(self, make: Callable[[], Way], row: dict[str, Any]) -> Way:
        """Check a way and fill its row: the first call gives the result, the second its time and memory."""
        way, clock = make(), self.clock
        results = way.run()
        clock.wait()
        row["errors"], problem = compare(way.found(results), way.expected(), measured_dtype(clock.device), way.bounds)
        row.update({"status": "wrong", "problem": problem} if problem else {"status": "ok"})
        del results
        if problem:
            return way
        release_memory(clock.device)
        before, on_gpu = allocated(clock.device) if way.before is None else way.before, clock.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(clock.device)
        row["call_s"] = clock.time(way.run) / 1e3
        if on_gpu:
            row["peak_bytes"] = torch.cuda.max_memory_allocated(clock.device) - before
        return way

    def _agree(self, row: dict[str, Any]) -> None:
        """Give a row the worst status, time, memory and errors of all processes that measure together."""
        rows = self.clock.everywhere(row)
        row.update(next(({k: r[k] for k in ("status", "problem")} for r in rows if r["status"] != "ok"), {}))
        for key in ("peak_bytes", "call_s"):
            if key in row:
                row[key] = max(r.get(key, 0) for r in rows)
        for name, error in row.get("errors", {}).items():
            error.update({of: max(r["errors"][name][of] for r in rows if name in r.get("errors", {})) for of in error})


def left_out(cases: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Everything that a run has not measured, and why: cases, rows, and rounds of rows."""
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
    """What makes a run fail: wrong results of any method, and failures of `ours`."""
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
        rounds: measurements of each method, at most.
        budget: seconds after which nothing is begun.
        command: as documents show it. say: gets messages about progress.
        clock: of the device; None for a clock of this process alone.

    Returns:
        what was written: {"format", "benchmark", "date", "hardware", "versions", "command", "settings", "rates",
        "formulae", "cases": [{"case", "rows": [{"method", "status", "ms", …}], …}], "left_out": [{"case", "why"}],
        "complete", "wrong", "seconds", "tables", "caption"}. Times are milliseconds.

    Raises:
        InputError: an argument cannot be used.
    """
    started = time.monotonic()
    for name, most in (("rounds", rounds), ("budget", budget)):
        if not most > 0:
            raise InputError(name, f"must be above 0, got {most}")
    on = check_device(device)
    if output is not None:
        check_output(output)
    if on.type == "cuda":
        torch.cuda.set_device(on)
        tasks = compile_tasks(bench, str(on))
        done = count_done(compile_task, tasks, COMPILE_SHARE * budget)
        say(f"{done} tasks compiled, {len(tasks) - done} left for later")
    run = Run(bench, Clock(on) if clock is None else clock, rounds, budget, measure_rates(on), say, started)
    about = _about(run, command)
    found: list[dict[str, Any]] = []

    def write(complete: bool = False) -> dict[str, Any]:
        missing, seconds = left_out(found), round(time.monotonic() - started, 1)
        results = about | {"cases": found, "left_out": missing, "complete": complete and not missing}
        results |= {"wrong": wrong_rows(found, bench.ours), "seconds": seconds}
        document = bench.document(results, bench.base)
        if output is not None:
            write_json(output, document)
        return document

    write()
    for case in bench.cases:
        found.append(run.case(case))
        write()
    return write(complete=True)


def _about(run: Run, command: str) -> dict[str, Any]:
    """The head of a run's JSON."""
    bench, device = run.bench, run.clock.device
    dtype = measured_dtype(device)
    flushed = "" if bench.flushes == 1 else f"{bench.flushes} times "
    return {
        "format": FORMAT,
        "benchmark": bench.name,
        **provenance(device, command),
        # Times on a CPU say nothing about a chip.
        **({} if device.type == "cuda" else {"hardware": "no speed: a test of the benchmark"}),
        "settings": {
            "dtype": str(dtype).removeprefix("torch."),
            "timing": f"CUDA events, L2 overwritten {flushed}before each call, methods in turns",
            "rounds": run.rounds,
            "budget_s": run.budget,
            "bounds": {**BOUNDS[dtype], "row_factor": ROW_FACTOR},
            "memory": "peak_bytes: the most that was allocated during a call beyond what was before it",
            **bench.settings,
        },
        "rates": run.rates,
        "formulae": bench.formulae,
    }
