"""One video on several GPUs: time, scaling and bytes sent: `vmonarch bench parallel`.

Attention alone and whole transformers, computed by 1, 2, … processes that share the tokens of one video, and attention
by heads (Ulysses). Every process holds about as many tokens as the others; its time is that of the slowest.

Shapes: P processes, S tokens, H heads, D head dim.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessException

from vmonarch.configs import InputError
from vmonarch.configs.methods import resolve_method
from vmonarch.context_parallel import TokenSplit
from vmonarch.eval.bench import e2e
from vmonarch.eval.bench.attention import PASSES, exact, randn
from vmonarch.eval.bench.clock import Clock
from vmonarch.eval.bench.gate import NAMES
from vmonarch.eval.bench.machine import check_device
from vmonarch.eval.bench.runner import Bench, Case, Way, Ways, choose, left_out, run_bench, sdpa, with_gradients
from vmonarch.eval.bench.tables import caption, digits
from vmonarch.eval.render.table import shown_number
from vmonarch.eval.wan_models import read_model
from vmonarch.exchange import places_of, split_evenly, ulysses_bytes
from vmonarch.files import check_output, write_json
from vmonarch.grid import LatentGrid
from vmonarch.kernels.monarch.api import vmonarch_attention

METHODS = ("full", "vmonarch")
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
    about = {"heads": heads, "head_dim": head_dim, "layers": 1}
    return Case(label=label, setting=None, grid=grid, training=training, **about)


def model_case(setting: e2e.Setting, mode: str) -> Case:
    """One forward call of a whole transformer; `mode` is of e2e.MODES."""
    model = read_model(setting.model)
    sizes = {"heads": "num_attention_heads", "head_dim": "attention_head_dim", "layers": "num_layers"}
    about = {name: model.transformer[key] for name, key in sizes.items()}
    label = setting.label if mode == "eager" else f"{setting.label} {mode}"
    return Case(label=label, setting=setting, grid=model.grid(setting.size, argument="models"), mode=mode, **about)


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
        told: the arguments of `run_bench`.
        folder: for results and for what the processes share; of one machine.
        compile_backend: of torch.compile; "eager" compiles nothing and only tries the benchmark.
    """

    cases: tuple[Case, ...]
    ranks: Sequence[int] | None = None
    told: Any = None
    folder: Path = Path()
    compile_backend: str = "inductor"


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
        tokens = split_evenly(case.grid.tokens, ranks)
        options = e2e.Options(guidance=False, compile_backend=backend)
        rows = {name: (resolve_method(name), case.mode) for name in METHODS}
        made = e2e.ways(rows, options, case.setting, device, dtype, ranks)
    sizes = {"tokens": tokens, "batch": 1, "heads": case.heads, "head_dim": case.head_dim, "dtype": dtype}
    sent = case.layers * max(ulysses_bytes(rank=rank, **sizes) for rank in range(ranks))

    def counted(make: Callable[[], Way]) -> Way:
        return replace(make(), before=0, more=lambda clock, row: row.update(sent_bytes=sent))

    return {name: partial(counted, make) for name, make in made.items()}


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
    on_gpu = job.told["device"] == "cuda"
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
    of = Bench(
        name="parallel",
        methods=METHODS,
        ours=METHODS,
        cases=job.cases,
        ways=partial(ways, job.compile_backend),
        formulae=FORMULAE,
        settings={
            "inputs": "standard normal; transformers with random weights",
            "timing": "device events, ways in turns, all processes beginning together",
            "full": "cuDNN's attention, by heads",
            "gpus": torch.cuda.device_count(),
        },
        describe=lambda case, clock: {"ranks": ranks, "grid": case.grid},
        way_seconds=1e6,
        flushes=1,
    )
    told = job.told | {"device": str(device), "output": job.folder / f"{ranks}.json" if rank == 0 else None}
    run_bench(of, clock=SharedClock(device), say=lambda text: None, **told)
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
    labels = [case.label for case in CASES]
    chosen = choose("cases", cases, labels) if cases else labels if cases is None else ()
    settings = e2e.choose_settings(models, None) if models else ()
    if not chosen and not settings:
        raise InputError("cases", "and --models leave nothing to measure")
    choose("modes", modes, e2e.MODES)
    # Whole transformers first: they tell more, should the time be over.
    of_models = (model_case(setting, mode) for setting in settings for mode in modes)
    return Job((*of_models, *(case for case in CASES if case.label in chosen)), ranks)


def measure(
    job: Job, *, device: str, budget: float, output: Path, say: Callable[[str], None], **told: Any
) -> dict[str, Any]:
    """Measure with several numbers of processes, which share the seconds of the budget, and write the JSON after each.

    Returns:
        what was written: as of `runner.run_bench`, with "ranks" in cases, "sent_bytes" and "efficiency" in rows, and
        "failed": [{"ranks", "problem"}].

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
    results: dict[str, Any] = {"cases": [], "failed": []}
    started = time.monotonic()
    for n, ranks in enumerate(numbers):
        # Later numbers of processes get their share, too: without them there is nothing to compare.
        share = (budget - (time.monotonic() - started)) / (len(numbers) - n)
        say(f"{ranks} processes, {share:.0f} s for them")
        with tempfile.TemporaryDirectory() as folder:
            of = replace(job, folder=Path(folder), told={**told, "device": device, "budget": share})
            try:
                torch.multiprocessing.spawn(run_rank, (ranks, of), nprocs=ranks)
            except ProcessException as error:
                say(str(error))
                results["failed"].append({"ranks": ranks, "problem": str(error).strip().splitlines()[-1]})
            path = Path(folder, f"{ranks}.json")
            run = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cases": []}
        results = run | results | {"cases": results["cases"] + run["cases"]}
        results["seconds"] = round(time.monotonic() - started, 1)
        if "caption" in results:
            results |= summary(results, numbers[: n + 1])
            write_json(output, results)
    if "caption" not in results:
        raise RuntimeError(f"no process could begin: {results['failed']}")
    return results


def summary(results: dict[str, Any], numbers: Sequence[int]) -> dict[str, Any]:
    """{"wrong", "left_out", "tables", "caption"} of the cases of several numbers of processes; adds efficiency to rows.

    The table has milliseconds, efficiency and bytes of every case, by way and number of processes.
    """
    rows = {(c["case"], r["method"], c["ranks"]): r for c in results["cases"] for r in c["rows"]}
    wrong, lines = [], []
    for case, name in dict.fromkeys((case, name) for case, name, _ in rows):
        cells = []
        for ranks in numbers:
            row, alone = rows.get((case, name, ranks), {"status": "–"}), rows.get((case, name, 1), {})
            cells.append(digits(row["ms"]["median"]) if "ms" in row else row["status"])
            if "ms" in row and "ms" in alone:
                row["efficiency"] = alone["ms"]["median"] / (ranks * row["ms"]["median"])
                cells[-1] += f" ({100 * row['efficiency']:.0f} %)" if ranks > 1 else ""
            if row["status"] not in ("ok", "left out", "–"):
                wrong.append(f"{name} at {case}, {ranks} processes: {row['problem']}")
        lines.append([case, name, *cells, shown_number(row.get("sent_bytes"), 0, factor=1e-6)])
    gpus = [f"{ranks} GPUs, ms" if ranks > 1 else "1 GPU, ms" for ranks in numbers]
    head = ["case", "way", *gpus, f"MB sent, {numbers[-1]} GPUs"]
    failed = [f"{entry['ranks']} processes: {entry['problem']}" for entry in results["failed"]]
    missing = left_out(results["cases"])
    made = caption({**results, "left_out": missing}) + "".join(f" Failed: {problem}." for problem in failed)
    table = {"name": "times", "header": head, "rows": lines}
    return {"wrong": wrong + failed, "left_out": missing, "tables": [table], "caption": made}
