"""Time and scaling of one video on several GPUs: `vmonarch bench parallel`.

It measures the rows of `vmonarch bench e2e` with 1, 2, … processes, which share the tokens of one video and split
attention by heads (Ulysses); or the rows of `vmonarch bench train`, with the weights sharded as well (FSDP2). All
processes hold about equally many tokens, and the time of the slowest counts.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessException

from vmonarch.configs import InputError
from vmonarch.eval.bench import e2e, train
from vmonarch.eval.bench.machine import Clock, check_device
from vmonarch.eval.bench.rows import caption, digits
from vmonarch.eval.bench.runner import Bench, Case, left_out, run_bench
from vmonarch.files import check_output, write_json

MODELS = ("14b-93x704x1280", "1.3b-61x720x1280")
TRAINING = "training"
# A process that fails ends the others at once; one that hangs ends them after this time.
TIMEOUT = timedelta(seconds=120)
FORMULAE = {
    **e2e.FORMULAE,
    "efficiency": "step of one process / (P · step of P processes), of the same row",
    "compiled": "compile_repeated_blocks(dynamic=False); of VMonarch on several processes all but self-attention",
    "training": "tokens by heads, float32 weights and AdamW's averages in parts on all processes (FSDP2)",
}


class SharedClock(Clock):
    """A clock whose measurements begin on all ranks together."""

    def flush(self, times: int = 1) -> None:
        super().flush(times)
        # On a GPU it is the streams that wait for each other, not the hosts.
        dist.all_reduce(torch.zeros(1, device=self.device))

    def everywhere(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found


def run_rank(rank: int, ranks: int, make: Callable[..., Bench], folder: Path, told: dict[str, Any]) -> None:
    """Run the benchmark in one process; the first process writes the results after every case.

    Args:
        make: see `bench`.
        folder: for the results and for the processes' rendezvous; on one machine.
        told: arguments of `run_bench`.
    """
    on_gpu = told["device"] == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{folder / f'meeting-{ranks}'}",
        rank=rank,
        world_size=ranks,
        timeout=TIMEOUT,
        device_id=device if on_gpu else None,
    )
    of = make(ranks=ranks)
    of = replace(
        of,
        name="parallel",
        formulae=FORMULAE,
        settings={
            **of.settings,
            "timing": "device events, rows in turns, all processes beginning together",
            "gpus": torch.cuda.device_count(),
        },
        document=lambda run, base: run,
    )
    told |= {"device": str(device), "output": folder / f"{ranks}.json" if rank == 0 else None}
    run_bench(of, clock=SharedClock(device), say=lambda text: None, **told)
    dist.destroy_process_group()


def bench(
    ranks: Sequence[int] | None = None,
    models: Sequence[str] = MODELS,
    modes: Sequence[str] = e2e.MODES,
    methods: Sequence[str] = ("full", "vmonarch"),
) -> tuple[Sequence[int] | None, Callable[..., Bench]]:
    """(numbers of processes, function that makes the benchmark for one of them, given as `ranks`).

    Args:
        ranks: None for 1, 2, 4 … GPUs. models: settings of `vmonarch bench e2e`. methods: as there, except that
            diffusers cannot split tokens with FlashAttention-3.
        modes: as there, or "training" alone.

    Raises:
        InputError: an argument cannot be used.
    """
    if TRAINING not in modes:
        make = partial(e2e.bench, models, methods=methods, modes=modes, guidance=False, transformer_only=True)
    elif len(modes) > 1:
        raise InputError("modes", f"must be {TRAINING} alone, or of {', '.join(e2e.MODES)}; got {', '.join(modes)}")
    else:
        make = partial(training, models, None, methods)
    make()
    return ranks, make


def training(settings: Sequence[str], model: str | None, methods: Sequence[str], ranks: int = 1) -> Bench:
    """The benchmark of training steps on clips of these settings; arguments and errors are those of `e2e.bench`."""
    chosen = e2e.choose_settings(settings, model)
    made = [train.bench(s.model, s.size[:1], s.size[1:], methods, ranks) for s in chosen]
    cases = [Case(**{**vars(of.cases[0]), "label": setting.label}) for setting, of in zip(chosen, made, strict=True)]
    common = {key: value for key, value in made[0].settings.items() if key not in ("model", "parameters")}
    return replace(made[0], cases=cases, settings=common)


def measure(
    job: tuple[Sequence[int] | None, Callable[..., Bench]],
    *,
    device: str,
    budget: float,
    output: Path,
    say: Callable[[str], None],
    **told: Any,
) -> dict[str, Any]:
    """Measure with each number of processes within one budget, and write the JSON after each.

    Args:
        job: what `bench` returned.

    Returns:
        what was written: as in `runner.run_bench`, with "ranks" in cases and "efficiency" in rows.

    Raises:
        InputError: an argument cannot be used.
        RuntimeError: a process failed; results of smaller numbers of processes stay written.
    """
    check_device(device)
    check_output(output)
    most = torch.cuda.device_count() if device != "cpu" else None
    asked, make = job
    numbers = [2**n for n in range((most or 1).bit_length())] if asked is None else sorted(asked)
    if numbers[0] != 1 or len(set(numbers)) < len(numbers):
        raise InputError("ranks", f"must be different numbers, 1 among them, got {numbers}")
    if most is not None and numbers[-1] > most:
        raise InputError("ranks", f"must be at most {most}, a GPU for each; got {numbers[-1]}")
    results: dict[str, Any] = {"cases": []}
    started = time.monotonic()
    for n, ranks in enumerate(numbers):
        # Later numbers of processes keep their share of the budget: without them there is nothing to compare.
        share = (budget - (time.monotonic() - started)) / (len(numbers) - n)
        say(f"{ranks} processes, {share:.0f} s for them")
        with tempfile.TemporaryDirectory() as folder:
            given = (ranks, make, Path(folder), {**told, "device": device, "budget": share})
            try:
                torch.multiprocessing.spawn(run_rank, given, nprocs=ranks)
            except ProcessException as error:
                raise RuntimeError(f"{ranks} processes: {error}") from error
            run = json.loads(Path(folder, f"{ranks}.json").read_text(encoding="utf-8"))
        cases = [{"case": case["case"], "ranks": ranks, **case} for case in run["cases"]]
        results = run | {"cases": results["cases"] + cases}
        results |= summary(results, numbers[: n + 1]) | {"seconds": round(time.monotonic() - started, 1)}
        write_json(output, results)
    return results


def summary(results: dict[str, Any], numbers: Sequence[int]) -> dict[str, Any]:
    """{"wrong", "left_out", "tables", "caption"} of cases with several numbers of processes; adds efficiency to rows.

    The table shows milliseconds and efficiency of every row by number of processes.
    """
    rows = {(c["case"], f"{r['method']}, {r['mode']}", c["ranks"]): r for c in results["cases"] for r in c["rows"]}
    wrong, lines = [], []
    for case, name in dict.fromkeys((case, name) for case, name, _ in rows):
        cells = []
        for ranks in numbers:
            row, alone = rows[case, name, ranks], rows[case, name, 1]
            cells.append(digits(1e3 * row["step_s"]["median"]) if "step_s" in row else row["status"])
            if "step_s" in row and "step_s" in alone:
                row["efficiency"] = alone["step_s"]["median"] / (ranks * row["step_s"]["median"])
                cells[-1] += f" ({100 * row['efficiency']:.0f} %)" if ranks > 1 else ""
            # Out of memory is no failure: several processes also serve videos that do not fit on one GPU.
            if row["status"] not in ("ok", "left out", "out of memory"):
                wrong.append(f"{name} at {case}, {ranks} processes: {row['problem']}")
        lines.append([case, name, *cells])
    gpus = [f"{ranks} GPUs, ms" if ranks > 1 else "1 GPU, ms" for ranks in numbers]
    table = {"name": "times", "header": ["setting", "method", *gpus], "rows": lines}
    missing = left_out(results["cases"])
    made = caption({**results, "left_out": missing})
    return {"wrong": wrong, "left_out": missing, "tables": [table], "caption": made}
