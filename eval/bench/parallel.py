"""One video on several GPUs: time, scaling and bytes sent: `vmonarch bench parallel`.

The rows of `vmonarch bench e2e`, computed by 1, 2, … processes that share the tokens of one video, with attention by
heads (Ulysses). Every process holds about as many tokens as the others; its time is that of the slowest.
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
from vmonarch.context_parallel import split_evenly
from vmonarch.eval.bench import e2e
from vmonarch.eval.bench.machine import Clock, check_device, measured_dtype
from vmonarch.eval.bench.rows import caption, digits
from vmonarch.eval.bench.runner import left_out, run_bench
from vmonarch.eval.render.tables import shown_number
from vmonarch.eval.wan_models import read_model
from vmonarch.files import check_output, write_json

MODELS = ("14b-93x704x1280", "1.3b-61x720x1280")
# A process that fails ends the others; one that hangs does so after this.
TIMEOUT = timedelta(seconds=120)
FORMULAE = {
    "step": "one forward call and one step of UniPC, of the slowest process",
    "efficiency": "step of one process / (P · step of P processes), of the same row",
    "compiled": "compile_repeated_blocks(dynamic=False); of VMonarch on several processes all but self-attention",
    "bytes": "counted: what the process that sends most sends to others in the self-attention of a forward call",
    "error": "‖x − x₀‖ / ‖x₀‖, x₀ by the same method, eager, in one process",
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


def ulysses_bytes(
    *, tokens: Sequence[int], rank: int, batch: int, heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes that a rank sends to others in a forward pass of attention by heads: of q, k, v and o, without alignment.

    Args:
        tokens: how many each rank has. Heads are split evenly, the first ranks having one more where need be.

    Raises:
        ValueError: there are fewer heads than ranks.
    """
    if heads < len(tokens):
        raise ValueError(f"heads must be at least the number of ranks, {len(tokens)}, got {heads}")
    own = split_evenly(heads, len(tokens))[rank]
    sent = 3 * tokens[rank] * (heads - own) + (sum(tokens) - tokens[rank]) * own
    return batch * sent * head_dim * dtype.itemsize


def describe(ranks: int, setting: e2e.Setting, clock: Clock) -> dict[str, Any]:
    """What the JSON says of a setting on so many processes."""
    model = read_model(setting.model)
    grid, shape, dtype = model.grid(setting.size, argument="models"), model.transformer, measured_dtype(clock.device)
    sizes = {"batch": 1, "heads": shape["num_attention_heads"], "head_dim": shape["attention_head_dim"], "dtype": dtype}
    tokens = split_evenly(grid.tokens, ranks)
    sent = max(ulysses_bytes(tokens=tokens, rank=rank, **sizes) for rank in range(ranks))
    return {"grid": grid, "tokens": tokens, "sent_bytes": shape["num_layers"] * sent}


def run_rank(rank: int, ranks: int, options: dict[str, Any], folder: Path, told: dict[str, Any]) -> None:
    """What one process does; the first writes what was measured after every case.

    Args:
        options: of `e2e.bench`.
        folder: for results and for what the processes share; of one machine.
        told: to `run_bench`.
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
    # diffusers spreads no tokens with FlashAttention-3.
    of = e2e.bench(**{"methods": ("full", "vmonarch")} | options, ranks=ranks)
    of = replace(
        of,
        name="parallel",
        describe=partial(describe, ranks),
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
    ranks: Sequence[int] | None = None, models: Sequence[str] = MODELS, modes: Sequence[str] = e2e.MODES
) -> tuple[Sequence[int] | None, dict[str, Any]]:
    """(numbers of processes, options of `e2e.bench`).

    Args:
        ranks: None for 1, 2, 4 … GPUs. models: settings of `vmonarch bench e2e`. modes: of the models.

    Raises:
        InputError: an argument cannot be used.
    """
    options: dict[str, Any] = {"settings": models, "modes": modes, "guidance": False, "transformer_only": True}
    e2e.bench(**options)
    return ranks, options


def measure(
    job: tuple[Sequence[int] | None, dict[str, Any]],
    *,
    device: str,
    budget: float,
    output: Path,
    say: Callable[[str], None],
    **told: Any,
) -> dict[str, Any]:
    """Measure with several numbers of processes, which share the seconds of the budget, and write the JSON after each.

    Args:
        job: of `bench`.

    Returns:
        what was written: as of `runner.run_bench`, with "ranks" and "sent_bytes" in cases, "efficiency" in rows, and
        "failed": [{"ranks", "problem"}].

    Raises:
        InputError: an argument cannot be used.
        RuntimeError: no process could begin.
    """
    check_device(device)
    check_output(output)
    most = torch.cuda.device_count() if device != "cpu" else None
    asked, options = job
    numbers = [2**n for n in range((most or 1).bit_length())] if asked is None else sorted(asked)
    if numbers[0] != 1 or len(set(numbers)) < len(numbers):
        raise InputError("ranks", f"must be different numbers, 1 among them, got {numbers}")
    if most is not None and numbers[-1] > most:
        raise InputError("ranks", f"must be at most {most}, a GPU for each; got {numbers[-1]}")
    results: dict[str, Any] = {"cases": [], "failed": []}
    started = time.monotonic()
    for n, ranks in enumerate(numbers):
        # Later numbers of processes get their share, too: without them there is nothing to compare.
        share = (budget - (time.monotonic() - started)) / (len(numbers) - n)
        say(f"{ranks} processes, {share:.0f} s for them")
        with tempfile.TemporaryDirectory() as folder:
            given = (ranks, options, Path(folder), {**told, "device": device, "budget": share})
            try:
                torch.multiprocessing.spawn(run_rank, given, nprocs=ranks)
            except ProcessException as error:
                say(str(error))
                results["failed"].append({"ranks": ranks, "problem": str(error).strip().splitlines()[-1]})
            path = Path(folder, f"{ranks}.json")
            run = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cases": []}
        cases = [{"case": case["case"], "ranks": ranks, **case} for case in run["cases"]]
        results = run | results | {"cases": results["cases"] + cases}
        if "hardware" not in results:
            raise RuntimeError(f"no process could begin: {results['failed']}")
        results |= summary(results, numbers[: n + 1]) | {"seconds": round(time.monotonic() - started, 1)}
        write_json(output, results)
    return results


def summary(results: dict[str, Any], numbers: Sequence[int]) -> dict[str, Any]:
    """{"wrong", "left_out", "tables", "caption"} of the cases of several numbers of processes; adds efficiency to rows.

    The table has milliseconds, efficiency and bytes of every row, by number of processes.
    """
    rows = {(c["case"], f"{r['method']}, {r['mode']}", c["ranks"]): (r, c) for c in results["cases"] for r in c["rows"]}
    wrong, lines = [], []
    for case, name in dict.fromkeys((case, name) for case, name, _ in rows):
        cells = []
        for ranks in numbers:
            row, about = rows.get((case, name, ranks), ({"status": "–"}, {}))
            alone = rows.get((case, name, 1), ({}, {}))[0]
            cells.append(digits(1e3 * row["step_s"]["median"]) if "step_s" in row else row["status"])
            if "step_s" in row and "step_s" in alone:
                row["efficiency"] = alone["step_s"]["median"] / (ranks * row["step_s"]["median"])
                cells[-1] += f" ({100 * row['efficiency']:.0f} %)" if ranks > 1 else ""
            if row["status"] not in ("ok", "left out", "–"):
                wrong.append(f"{name} at {case}, {ranks} processes: {row['problem']}")
        lines.append([case, name, *cells, shown_number(about.get("sent_bytes"), 0, factor=1e-6)])
    gpus = [f"{ranks} GPUs, ms" if ranks > 1 else "1 GPU, ms" for ranks in numbers]
    head = ["setting", "method", *gpus, f"MB sent, {numbers[-1]} GPUs"]
    failed = [f"{entry['ranks']} processes: {entry['problem']}" for entry in results["failed"]]
    missing = left_out(results["cases"])
    made = caption({**results, "left_out": missing}) + "".join(f" Failed: {problem}." for problem in failed)
    table = {"name": "times", "header": head, "rows": lines}
    return {"wrong": wrong + failed, "left_out": missing, "tables": [table], "caption": made}
