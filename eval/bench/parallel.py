"""One video on several GPUs: time, scaling and bytes sent: `vmonarch bench parallel`.

Attention alone and whole transformers, computed by 1, 2, … processes that share the tokens of one video, and attention
by heads (Ulysses). Every process holds about as many tokens as the others; its time is that of the slowest.

Shapes: P processes, S tokens, H heads, D head dim.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from vmonarch.configs import InputError
from vmonarch.configs.methods import resolve_method
from vmonarch.context_parallel import TokenSplit
from vmonarch.eval.bench import e2e
from vmonarch.eval.bench.attention import PASSES, exact, randn
from vmonarch.eval.bench.clock import Clock
from vmonarch.eval.bench.gate import NAMES
from vmonarch.eval.bench.machine import check_device, measured_dtype, provenance
from vmonarch.eval.bench.runner import (
    FORMAT,
    Bench,
    Case,
    Limits,
    Way,
    Ways,
    choose,
    left_out,
    measure_cases,
    sdpa,
    with_gradients,
)
from vmonarch.eval.bench.tables import caption, digits
from vmonarch.eval.render.table import shown_number
from vmonarch.eval.wan_models import read_model
from vmonarch.exchange import places_of, split_evenly, ulysses_bytes
from vmonarch.files import check_output, write_json
from vmonarch.grid import LatentGrid
from vmonarch.kernels.monarch.api import vmonarch_attention

METHODS = {"full": "full attention", "vmonarch": "VMonarch"}
# A process that fails ends the others; one that hangs does so after this.
TIMEOUT = timedelta(seconds=120)
FORMULAE = {
    "model": "one forward call and one step of UniPC",
    "efficiency": "ms of one process / (P · ms of P processes), of the same way",
    "compiled": "compile_repeated_blocks(dynamic=False); of VMonarch on several processes all but self-attention",
    "bytes": "counted: what the process that sends most sends to others in the attention of a forward pass",
    "error": "attention: of the first head, in float32; transformers: ‖x − x₀‖ / ‖x₀‖, x₀ by one process in the same"
    " dtype, eager",
}


def attention_case(grid: LatentGrid, heads: int, head_dim: int = 128, training: bool = False) -> Case:
    """Attention alone; `training` is forward and backward together."""
    label = f"attention {'x'.join(map(str, grid))} {heads} heads {PASSES[training]}"
    about = {"grid": grid, "heads": heads, "head_dim": head_dim, "layers": 1, "training": training}
    return Case(label=label, setting=None, **about)


def model_case(setting: e2e.Setting, mode: str) -> Case:
    """One forward call of a whole transformer; `mode` is of e2e.MODES."""
    model = read_model(setting.model)
    sizes = {"heads": "num_attention_heads", "head_dim": "attention_head_dim", "layers": "num_layers"}
    about = {name: model.transformer[key] for name, key in sizes.items()}
    label = setting.label if mode == "eager" else f"{setting.label} {mode}"
    tokens = model.grid(setting.size, argument="models").tokens
    return Case(label=label, setting=setting, mode=mode, tokens=tokens, **about)


# 118,800 tokens (129 frames of 720×1280) and the paper's largest setting, with the heads of the 1.3B and 14B models.
CASES = tuple(
    attention_case(LatentGrid(*grid), heads, training=training)
    for training in (False, True)
    for grid, heads in (((33, 45, 80), 12), ((33, 45, 80), 40), ((24, 44, 80), 40))
)
MODELS = ("14b-93x704x1280", "1.3b-61x720x1280")


@dataclass(frozen=True)
class Job:
    """What every process is told.

    Args:
        ranks: numbers of processes, of which the first is 1; None for 1, 2, 4 … GPUs.
        seconds: after which nothing is begun.
        folder: for results and for what the processes share; of one machine.
        compile_backend: of torch.compile; "eager" compiles nothing and only tries the benchmark.
    """

    cases: tuple[Case, ...]
    ranks: Sequence[int] | None = None
    device: str = "cuda"
    rounds: int = 1
    seconds: float = 0.0
    folder: Path = Path()
    compile_backend: str = "inductor"

    @property
    def bench(self) -> Bench:
        """What a process measures."""
        describe = lambda case, clock: {"ranks": dist.get_world_size()}
        made = partial(ways, self.compile_backend)
        return Bench("parallel", tuple(METHODS), (), self.cases, made, describe=describe, way_seconds=1e6, flushes=1)


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


def ways(backend: str, case: Case, device: torch.device, dtype: torch.dtype) -> Ways:
    """All ways to compute a case on the processes of the group."""
    ranks = dist.get_world_size()
    if case.setting is None:
        tokens = tuple(frames * case.grid.tokens_per_frame for frames in split_evenly(case.grid.frames, ranks))
        made = attention_ways(case, tokens, device, dtype)
    else:
        tokens = split_evenly(case.tokens, ranks)
        options = e2e.Options(guidance=False, compile_backend=backend)
        rows = {name: (resolve_method(name), case.mode) for name in METHODS}
        made = e2e.ways(rows, options, case.setting, device, dtype, ranks)
    sizes = {"tokens": tokens, "batch": 1, "heads": case.heads, "head_dim": case.head_dim, "dtype": dtype}
    sent = case.layers * max(ulysses_bytes(rank=rank, **sizes) for rank in range(ranks))
    more = lambda clock, row: row.update(sent_bytes=sent)
    return {name: lambda make=make: replace(make(), before=0, more=more) for name, make in made.items()}


def attention_ways(case: Case, tokens: Sequence[int], device: torch.device, dtype: torch.dtype) -> Ways:
    """Attention alone; each process has its part of the same tensors. The first head is compared, of these rows."""
    split = TokenSplit(dist.group.WORLD, dist.get_rank(), tuple(tokens))
    places = places_of(tokens, split.rank)
    own, on_gpu = slice(places.start, places.stop), device.type == "cuda"
    whole = randn(case.grid.tokens + case.heads, device, dtype, *[(1, case.grid.tokens, case.heads, case.head_dim)] * 4)
    parts = [x[:, own].clone().requires_grad_(case.training) for x in whole[:3]]
    grad = whole[3][:, own].clone() if case.training else None
    first = [x[:, :, :1].float() for x in whole]
    del whole
    ours = lambda by: partial(vmonarch_attention, grid=case.grid, implementation=by)

    def way(attend: Callable[..., torch.Tensor], reference: Callable[..., torch.Tensor]) -> Way:
        def shared() -> torch.Tensor:
            if len(tokens) == 1:
                return attend(*parts)
            return split.gather_heads(attend(*split.gather_tokens(*parts)), case.heads)

        def expected() -> dict[str, torch.Tensor]:
            leaves = [x.clone().requires_grad_(case.training) for x in first[:3]]
            results = with_gradients(lambda: reference(*leaves), leaves, first[3] if case.training else None)()
            return {name: x[:, own] for name, x in zip(NAMES, results, strict=False)}

        found = lambda results: {name: x[:, :, :1] for name, x in zip(NAMES, results, strict=False)}
        return Way(with_gradients(shared, parts, grad), found, expected)

    return {
        "full": partial(way, partial(sdpa, "cudnn" if on_gpu else "sdpa"), exact),
        "vmonarch": partial(way, ours("triton" if on_gpu else "torch"), ours("torch")),
    }


def run_rank(rank: int, ranks: int, job: Job) -> None:
    """What one process does; the first writes what was measured after every case."""
    limits = Limits(job.rounds, job.seconds, time.monotonic() + job.seconds)
    on_gpu = job.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{job.folder / f'meeting-{ranks}'}",
        rank=rank,
        world_size=ranks,
        timeout=TIMEOUT,
        device_id=device if on_gpu else None,
    )

    def write(cases: list[dict[str, Any]]) -> None:
        if rank == 0:
            write_json(job.folder / f"cases-{ranks}.json", {"cases": cases})

    with e2e.settings_of_torch():
        measure_cases(job.bench, job.cases, tuple(METHODS), SharedClock(device), limits, write, lambda text: None)
    dist.destroy_process_group()


def bench(
    ranks: Sequence[int] | None = None,
    cases: Sequence[str] | None = None,
    models: Sequence[str] = MODELS,
    modes: Sequence[str] = e2e.MODES,
) -> Job:
    """The cases of attention and the models that are asked for.

    Args:
        ranks: see `Job`. cases: labels of CASES, None for all. models: settings of `vmonarch bench e2e`.
        modes: of the models.

    Raises:
        InputError: an argument cannot be used.
    """
    known = {case.label: case for case in CASES}
    labels = tuple(known) if cases is None else choose("cases", cases, known) if cases else ()
    settings = e2e.choose_settings(models, None) if models else ()
    if not labels and not settings:
        raise InputError("cases", "and --models leave nothing to measure")
    choose("modes", modes, e2e.MODES)
    # Whole transformers first: they tell more, should the time be over.
    of_models = (model_case(setting, mode) for setting in settings for mode in modes)
    return Job((*of_models, *map(known.__getitem__, labels)), ranks)


def measure(job: Job, *, device: str, rounds: int, budget: float, output: Path, **told: Any) -> dict[str, Any]:
    """Measure with several numbers of processes, which share the seconds of the budget; see `run_job`.

    Raises:
        InputError: an argument cannot be used.
    """
    check_device(device)
    check_output(output)
    most = torch.cuda.device_count() if device != "cpu" else None
    numbers = [2**n for n in range((most or 1).bit_length())] if job.ranks is None else sorted(job.ranks)
    if numbers[0] != 1 or len(set(numbers)) < len(numbers):
        raise InputError("ranks", f"must be different numbers, 1 among them, got {numbers}")
    if most is not None and numbers[-1] > most:
        raise InputError("ranks", f"must be at most {most}, a GPU for each; got {numbers[-1]}")
    with tempfile.TemporaryDirectory() as folder:
        return run_job(
            replace(job, ranks=numbers, device=device, rounds=rounds, seconds=budget, folder=Path(folder)),
            output,
            **told,
        )


def run_job(job: Job, output: Path, command: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure with these numbers of processes, and write the JSON after each.

    Returns:
        what was written: as of `runner.run_bench`, with "ranks" in cases, "sent_bytes" and "efficiency" in rows, and
        "failed": [{"ranks", "problem"}].
    """
    numbers, started, device = job.ranks or (1,), time.monotonic(), torch.device(job.device)
    results: dict[str, Any] = {
        "format": FORMAT,
        "benchmark": "parallel",
        **provenance(device, command),
        "settings": {
            "dtype": str(measured_dtype(device)).removeprefix("torch."),
            "inputs": "standard normal; transformers with random weights",
            "timing": "device events, ways in turns, all processes beginning together",
            "full": "cuDNN's attention, by heads",
            "rounds": job.rounds,
        },
        "formulae": FORMULAE,
        "cases": [],
        "failed": [],
    }
    if device.type == "cuda":
        results["hardware"] = f"{torch.cuda.device_count()}× {results['hardware']}"
    for n, ranks in enumerate(numbers):
        # Later numbers of processes get their share, too: without them there is nothing to compare.
        share = (job.seconds - (time.monotonic() - started)) / (len(numbers) - n)
        say(f"{ranks} processes, {share:.0f} s for them")
        try:
            torch.multiprocessing.spawn(run_rank, (ranks, replace(job, seconds=share)), nprocs=ranks)
        except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
            say(str(error))
            results["failed"].append({"ranks": ranks, "problem": str(error).strip().splitlines()[-1]})
        with contextlib.suppress(FileNotFoundError):
            path = job.folder / f"cases-{ranks}.json"
            results["cases"] += json.loads(path.read_text(encoding="utf-8"))["cases"]
        rows = {(c["case"], r["method"], c["ranks"]): r for c in results["cases"] for r in c["rows"]}
        for (case, name, count), row in rows.items():
            alone = rows.get((case, name, 1), {})
            if "ms" in row and "ms" in alone:
                row["efficiency"] = alone["ms"]["median"] / (count * row["ms"]["median"])
        results["wrong"] = [
            f"{name} at {case}, {count} processes: {row['problem']}"
            for (case, name, count), row in rows.items()
            if row["status"] not in ("ok", "left out")
        ] + [f"{failed['ranks']} processes: {failed['problem']}" for failed in results["failed"]]
        results |= {"left_out": left_out(results["cases"]), "seconds": round(time.monotonic() - started, 1)}
        results |= tables(results, rows)
        write_json(output, results)
    return results


def tables(results: dict[str, Any], rows: Mapping[tuple[str, str, int], dict[str, Any]]) -> dict[str, Any]:
    """{"tables", "caption"}: milliseconds, efficiency and bytes of every case, by way and number of processes."""
    numbers = sorted({ranks for _, _, ranks in rows} | {entry["ranks"] for entry in results["failed"]})
    lines = []
    for case, name in dict.fromkeys((case, name) for case, name, _ in rows):
        found = [rows.get((case, name, ranks), {"status": "–"}) for ranks in numbers]
        cells = [digits(row["ms"]["median"]) if "ms" in row else row["status"] for row in found]
        shares = [f" ({100 * row['efficiency']:.0f} %)" if "efficiency" in row else "" for row in found]
        cells[1:] = map("".join, zip(cells[1:], shares[1:], strict=True))
        lines.append([case, METHODS[name], *cells, shown_number(found[-1].get("sent_bytes"), 0, factor=1e-6)])
    gpus = [f"{ranks} GPUs, ms" if ranks > 1 else "1 GPU, ms" for ranks in numbers]
    head = ["case", "way", *gpus, f"MB sent, {numbers[-1] if numbers else 0} GPUs"]
    failed = "".join(f" {entry['ranks']} processes failed: {entry['problem']}." for entry in results["failed"])
    return {"tables": [{"name": "times", "header": head, "rows": lines}], "caption": caption(results) + failed}
