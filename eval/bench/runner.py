"""The runner of the benchmarks: check all ways to compute a case, time them in turns, write JSON.

A benchmark says what its cases are and how each can be computed (`Bench`). A result that differs from float32 has no
speed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vmonarch.configs import InputError, suggest
from vmonarch.eval.bench.clock import MIN_ROUNDS, Clock, measure, release_memory, summary
from vmonarch.eval.bench.gate import BOUNDS, ROW_FACTOR, compare, failure
from vmonarch.eval.bench.machine import (
    COMPILE_SHARE,
    check_device,
    compiling,
    map_in_processes,
    measure_rates,
    measured_dtype,
    provenance,
)
from vmonarch.files import check_output, write_json

# Free memory that a process waits for before it compiles: block masks of FlexAttention take that much.
COMPILE_BYTES = 24e9
Tensors = dict[str, torch.Tensor]
# Settings of the benchmarks of attention.
ATTENTION = {
    "layout": "[B, S, H, D]; SDPA and FlexAttention get transposed views of it",
    "inputs": "standard normal",
    "reference": "float32 plain torch, all rows of the first and the last head; gradients of the first head, or of all"
    " where they share factors",
}


@dataclass(frozen=True)
class Way:
    """One way to compute a case, with its inputs.

    Args:
        run: the call; gives (out,) or (out, dq, dk, dv, …).
        found: of what `run` gave, the parts that are compared, by name; names of gradients begin with a d.
        expected: the same parts in float32, and maybe others.
        flops, bytes: its work; 0 if they are not counted.
        input_bytes: of all tensors that must exist before the call.
        graph: record the call as a CUDA graph, because launching takes longer than computing.
        more: what else its row says, by the clock that timed it.
    """

    run: Callable[[], tuple[torch.Tensor, ...]]
    found: Callable[[tuple[torch.Tensor, ...]], Tensors]
    expected: Callable[[], Tensors]
    flops: float = 0.0
    bytes: float = 0.0
    input_bytes: int = 0
    graph: bool = False
    more: Callable[[Clock], dict[str, Any]] = lambda clock: {}


Ways = Mapping[str, Callable[[], Way]]


@dataclass(frozen=True)
class Bench:
    """A benchmark.

    Args:
        methods: names of all ways; of those, `ours` must not fail.
        cases: dataclasses with a `label` and with `training`, the most telling first.
        ways: how a case can be computed; each is made only when its turn comes. A function of a module, as other
            processes call it too.
        compiled: (case, method) -> what its code depends on, None where nothing is to be compiled beforehand.
        formulae: of FLOPs and bytes.
        settings: further ones of the JSON.
        finish: called with a case, its rows and the rates; adds to the rows what follows from all of them.
        describe: what the JSON says of a case.
        ahead: (device, seconds) -> how many tasks were not done; compiles what all cases need, in place of `compiled`.
        least_seconds: a guess of what the least of a case takes, by the rates.
        format: of the JSON, if it has a name.
        way_seconds: that a way may take; one whose calls take long is measured in fewer rounds.
        flushes: of the L2 before each call. Sixteen take about a millisecond, in which the host queues all of the call.
    """

    methods: tuple[str, ...]
    ours: tuple[str, ...]
    cases: Sequence[Any]
    ways: Callable[[Any, torch.device, torch.dtype], Ways]
    compiled: Callable[[Any, str], Hashable | None] = lambda case, method: None
    formulae: Mapping[str, str] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    finish: Callable[[Any, list[dict[str, Any]], dict[str, Any] | None], Any] = lambda case, rows, rates: None
    describe: Callable[[Any], dict[str, Any]] = dataclasses.asdict
    ahead: Callable[[torch.device, float], int] | None = None
    least_seconds: Callable[[Any, dict[str, Any]], float] = lambda case, rates: 0.0
    format: str = ""
    way_seconds: float = 1.0
    flushes: int = 16


def with_gradients(
    attend: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor], grad_out: torch.Tensor | None
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """The call that gives (out,), or with `grad_out` (out, gradients of the leaves)."""
    if grad_out is None:

        def forward() -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                return (attend(),)

        return forward

    def both() -> tuple[torch.Tensor, ...]:
        out = attend()
        return (out.detach(), *torch.autograd.grad(out, leaves, grad_out))

    return both


def sdpa(
    backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """Exact attention of [B, S, H, D] by one backend of torch, on transposed views as diffusers has them.

    Args:
        backend: "cudnn" or "flash"; or "sdpa", the one that torch chooses.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {"cudnn": [SDPBackend.CUDNN_ATTENTION], "flash": [SDPBackend.FLASH_ATTENTION]}
    with sdpa_kernel(backends[backend]) if backend in backends else contextlib.nullcontext():
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=causal
        )
    return out.transpose(1, 2)


def flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Callable[[], torch.Tensor]:
    """FlexAttention of [B, S, H, D], compiled for these tensors; `options` are its score_mod, block_mask and scale."""
    from torch.nn.attention.flex_attention import flex_attention

    # After a few functions torch would stop compiling new ones and write all scores to memory instead.
    torch.compiler.reset()
    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(*(x.transpose(1, 2) for x in (query, key, value)), **options).transpose(1, 2)


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


Task = tuple[Callable[[Any, torch.device, torch.dtype], Ways], Any, str, str]


def compile_task(task: Task) -> bool:
    """Compute a case in one way, so that its code is in the caches on disk."""
    ways, case, method, device_text = task
    # There is a process for every core already.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    with compiling(device_text, COMPILE_BYTES) as device:
        ways(case, device, measured_dtype(device))[method]().run()
    return True


def compile_tasks(bench: Bench, cases: Sequence[Any], methods: Sequence[str], device: str) -> list[Task]:
    """One task for all cases and methods that share their code; gradients first, because they take longest."""
    tasks: dict[Hashable, Task] = {}
    for case in sorted(cases, key=lambda case: not case.training):
        for method in methods:
            code = bench.compiled(case, method)
            if code is not None:
                tasks.setdefault(code, (bench.ways, case, method, device))
    return list(tasks.values())


def _prepare(
    make: Callable[[], Way], clock: Clock, dtype: torch.dtype, row: dict[str, Any], seconds: float
) -> Way | None:
    """Check a way, fill its row, and give it back if it may be timed; as often as takes so many seconds."""
    way = make()
    began = time.perf_counter()
    results = way.run()
    clock.wait()
    spent = time.perf_counter() - began
    row["first_call_s"] = round(spent, 2)
    row["errors"], problem = compare(way.found(results), way.expected(), dtype)
    del results
    if problem:
        row.update(status="wrong", problem=problem)
        return None
    release_memory(clock.device)
    if clock.device.type == "cuda":
        before = torch.cuda.memory_allocated(clock.device)
        torch.cuda.reset_peak_memory_stats(clock.device)
        way.run()
        clock.wait()
        row["peak_bytes"] = torch.cuda.max_memory_allocated(clock.device) - before
        row["input_bytes"] = way.input_bytes
        if way.graph:
            way = dataclasses.replace(way, run=recorded(way.run))
            row["graph"] = True
        spent = clock.time(way.run) / 1e3
    row["rounds"] = max(MIN_ROUNDS, int(seconds / max(spent, 1e-6)))
    row["status"] = "ok"
    return way


def measure_ways(
    ways: Ways,
    clock: Clock,
    dtype: torch.dtype,
    rounds: int,
    deadline: float,
    rates: dict[str, Any] | None,
    *,
    seconds: float = Bench.way_seconds,
    flushes: int = Bench.flushes,
) -> list[dict[str, Any]]:
    """Check and time all ways of a case.

    Args:
        rounds: measurements of each way, at most.
        deadline: `time.monotonic()` after which no round begins, except the first few.
        rates: of `measure_rates`; None where times tell nothing of speed.
        seconds, flushes: see `Bench`.

    Returns:
        a row for every way: its status, "ok", "wrong", "out of memory" or "failed"; errors; if ok its milliseconds,
        and with rates TFLOP/s and the times that FLOPs and bytes alone would take.
    """
    rows: dict[str, dict[str, Any]] = {}
    good: dict[str, Way] = {}
    for name, make in ways.items():
        row = rows[name] = {"method": name}
        try:
            way = _prepare(make, clock, dtype, row, seconds)
            if way is not None:
                good[name] = way
        except Exception as error:
            row.update(failure(error))
        release_memory(clock.device)
    counts = {name: min(rounds, rows[name]["rounds"]) for name in good}
    times, host = measure({name: way.run for name, way in good.items()}, counts, clock, deadline, flushes)
    for name, way in good.items():
        row = rows[name]
        row.update(ms=summary(times[name]), host_ms=statistics.median(host[name]), rounds=len(times[name]))
        row.update(rounds_left_out=counts[name] - row["rounds"], flops=way.flops, bytes=way.bytes, **way.more(clock))
        if rates is None:
            continue
        ms = row["ms"]["median"]
        if way.flops:
            row["tflops"] = way.flops / ms / 1e9
            row["flop_floor_ms"] = 1e3 * way.flops / rates["matmul_flops_per_second"]
        if way.bytes:
            row["byte_floor_ms"] = 1e3 * way.bytes / rates["copy_bytes_per_second"]
            row["over_byte_floor"] = ms / row["byte_floor_ms"]
    return list(rows.values())


def choose(argument: str, names: Sequence[str], known: dict[str, Any]) -> tuple[Any, ...]:
    """The named things, in the order given.

    Raises:
        InputError: a name that is not known, given twice, or none at all.
    """
    if not names:
        raise InputError(argument, f"must name at least one of {', '.join(known)}")
    for name in names:
        if name not in known:
            raise InputError(argument, f"must be of {', '.join(known)}; got {name!r}{suggest(name, known)}")
    distinct(argument, names)
    return tuple(known[name] for name in names)


def distinct(argument: str, names: Sequence[str]) -> None:
    """Check what somebody has chosen.

    Raises:
        InputError: nothing, or something twice.
    """
    if not names or len(set(names)) < len(names):
        raise InputError(argument, f"must be one or several different ones, got {', '.join(names) or 'none'}")


def run_bench(
    bench: Bench,
    *,
    output: Path,
    methods: Sequence[str],
    cases: str = "",
    rounds: int,
    budget: float,
    device: str,
    command: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure, and write the JSON after each case.

    Args:
        methods: of the benchmark's. cases: a regular expression that is found in the labels of those to measure.
        rounds: measurements of each method, at most.
        budget: seconds after which no case is begun.
        command: as documents show it. say: told what is done.

    Returns:
        what was written: {"format", "date", "hardware", "versions", "command", "settings", "rates", "formulae",
        "cases": [{"case", "rows": [{"method", "status", "ms", …}], …}], "left_out": [{"case", "why"}], "complete",
        "seconds"}. Times are milliseconds.

    Raises:
        InputError: an argument cannot be used.
    """
    started = time.monotonic()
    deadline = started + budget
    choose("methods", methods, {name: name for name in bench.methods})
    try:
        chosen = [case for case in bench.cases if re.search(cases, case.label)]
    except re.error as error:
        raise InputError("cases", f"must be a regular expression, got {cases!r}: {error}") from error
    if not chosen:
        raise InputError("cases", f"{cases!r} leaves none of: {'; '.join(case.label for case in bench.cases)}")
    on = check_device(device)
    check_output(output)
    dtype, real = measured_dtype(on), on.type == "cuda"
    if real:
        torch.cuda.set_device(on)
        if bench.ahead is not None:
            missing = bench.ahead(on, COMPILE_SHARE * budget)
        else:
            tasks = compile_tasks(bench, chosen, methods, str(on))
            missing = map_in_processes(compile_task, tasks, COMPILE_SHARE * budget).count(None)
        say(f"compiled; {missing} tasks left for later")
    clock = Clock(on)
    rates = measure_rates(on)
    flushed = "" if bench.flushes == 1 else f"{bench.flushes} times "
    results: dict[str, Any] = {
        **({"format": bench.format} if bench.format else {}),
        **provenance(on, command),
        "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(on))) if real else None,
        "settings": {
            "dtype": str(dtype).removeprefix("torch."),
            "timing": f"CUDA events, L2 overwritten {flushed}before each call, methods in turns"
            if real
            else "no speed",
            "rounds": rounds,
            "budget_s": budget,
            "bounds": {**BOUNDS[dtype], "row_factor": ROW_FACTOR},
            "memory": "peak_bytes: the most that was allocated during a call beyond what was before it, results"
            " counted; input_bytes: tensors that must exist before it, a written-out bias counted",
            **bench.settings,
        },
        "rates": rates,
        "formulae": bench.formulae,
        "cases": [],
        "left_out": [],
        "complete": False,
    }

    def leave_out(case: Any, why: str) -> None:
        results["left_out"].append({"case": case.label, "why": why})
        say(f"left out: {case.label} ({why})")

    write_json(output, results)
    for case in chosen:
        if deadline - time.monotonic() <= (bench.least_seconds(case, rates) if rates else 0.0):
            leave_out(case, f"the budget of {budget:g} s was used up")
            continue
        ways = {name: way for name, way in bench.ways(case, on, dtype).items() if name in methods}
        rows = measure_ways(
            ways, clock, dtype, rounds, deadline, rates, seconds=bench.way_seconds, flushes=bench.flushes
        )
        bench.finish(case, rows, rates)
        results["cases"].append({"case": case.label, **bench.describe(case), "rows": rows})
        if cut := max((row.get("rounds_left_out", 0) for row in rows), default=0):
            leave_out(case, f"{cut} rounds did not fit the budget")
        # Inputs of several gigabytes hang on these.
        del ways
        release_memory(clock.device)
        write_json(output, results)
        for row in rows:
            ms = f"{row['ms']['median']:9.3f} ms" if "ms" in row else f"{row['status']} {row.get('problem', '')}"
            say(f"{case.label:48s} {row['method']:14s} {ms}")
    results["complete"] = not results["left_out"]
    results["seconds"] = round(time.monotonic() - started, 1)
    write_json(output, results)
    return results


def wrong_rows(results: dict[str, Any], ours: Sequence[str]) -> list[str]:
    """What makes a run fail: wrong results of any method, and `ours` that did not run."""
    return [
        f"{row['method']} at {case['case']}: {row['problem']}"
        for case in results["cases"]
        for row in case["rows"]
        if row["status"] == "wrong" or (row["status"] != "ok" and row["method"] in ours)
    ]
