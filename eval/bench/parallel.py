"""One video on several GPUs: time, scaling and bytes sent: `vmonarch bench parallel`.

Attention alone and whole transformers, computed by 1, 2, … processes that share the tokens of one video, and attention
by heads (Ulysses). Every process holds about as many tokens as the others; its time is that of the slowest.

Shapes: P processes, S tokens, H heads, D head dim.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import vmonarch
from vmonarch import VMonarchProcessor
from vmonarch.configs import InputError
from vmonarch.context_parallel import TokenSplit
from vmonarch.eval.bench.attention import PASSES, exact, randn
from vmonarch.eval.bench.clock import Clock
from vmonarch.eval.bench.denoiser import TEXT_TOKENS, Denoiser, compiled_graphs, settings_of_torch, share_weights
from vmonarch.eval.bench.e2e import MODES, Setting, choose_settings
from vmonarch.eval.bench.gate import MODEL_BOUNDS, NAMES
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
from vmonarch.exchange import split_evenly, ulysses_bytes
from vmonarch.files import check_output, write_json
from vmonarch.grid import LatentGrid
from vmonarch.kernels.monarch.api import vmonarch_attention

METHODS = {"full": "full attention", "heads": "VMonarch"}
# A process that fails ends the others; one that hangs does so after this.
TIMEOUT = timedelta(seconds=120)
FORMULAE = {
    "efficiency": "ms of one process / (P · ms of P processes), of the same way",
    "compiled": "compile_repeated_blocks(dynamic=False); of VMonarch on several processes all but self-attention",
    "bytes": "counted: what the process that sends most sends to others in the attention of a forward pass",
    "error": "attention: of the first head, in float32; transformers: ‖x − x₀‖ / ‖x₀‖, x₀ by one process in the same"
    " dtype, compiled or not alike",
}


def most_sent(tokens: Sequence[int], heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that the rank that sends most sends in a forward pass of one layer."""
    sizes: dict[str, Any] = {"batch": 1, "heads": heads, "head_dim": head_dim, "dtype": dtype}
    return max(ulysses_bytes(tokens=tokens, rank=rank, **sizes) for rank in range(len(tokens)))


def attention_case(grid: LatentGrid, heads: int, head_dim: int = 128, training: bool = False) -> Case:
    """Attention alone; `training` is forward and backward together."""
    label = f"attention {'x'.join(map(str, grid))} {heads} heads {PASSES[training]}"
    return Case(label=label, grid=grid, heads=heads, head_dim=head_dim, training=training, setting=None)


def model_case(setting: Setting, mode: str) -> Case:
    """One forward call of a whole transformer; `mode` is of e2e.MODES."""
    label = setting.label if mode == "eager" else f"{setting.label} {mode}"
    return Case(label=label, setting=setting, mode=mode)


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
        folder: for results and for what the processes share; of one machine.
        seconds: after which nothing is begun.
        compile_backend: of torch.compile; "eager" compiles nothing and only tries the benchmark.
    """

    folder: Path
    device: str
    cases: tuple[Case, ...]
    rounds: int
    seconds: float
    compile_backend: str = "inductor"

    @property
    def bench(self) -> Bench:
        """What a process measures."""
        describe = lambda case, clock: {"ranks": dist.get_world_size()}
        made = partial(ways, self)
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


def ways(job: Job, case: Case, device: torch.device, dtype: torch.dtype) -> Ways:
    """All ways to compute a case on the processes of the group."""
    return attention_ways(case, device, dtype) if case.setting is None else model_ways(job, case, device, dtype)


def attention_ways(case: Case, device: torch.device, dtype: torch.dtype) -> Ways:
    """Attention alone; each process has its part of the same tensors."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens = tuple(frames * case.grid.tokens_per_frame for frames in split_evenly(case.grid.frames, ranks))
    split = TokenSplit(dist.group.WORLD, rank, tokens)
    own = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    size = (1, case.grid.tokens, case.heads, case.head_dim)
    whole = randn(case.grid.tokens + case.heads, device, dtype, *[size] * 4)
    parts = [x[:, own].clone().requires_grad_(case.training) for x in whole[:3]]
    grad = whole[3][:, own].clone() if case.training else None
    # The first head is compared, of the rows of this process.
    first = [x[:, :, :1].float() for x in whole]
    del whole
    sent = most_sent(tokens, case.heads, case.head_dim, dtype)

    def ours(implementation: str, *tensors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = vmonarch_attention(*tensors, grid=case.grid, implementation=implementation)
        return out

    def way(attend: Callable[..., torch.Tensor], reference: Callable[..., torch.Tensor]) -> Way:
        def shared(*tensors: torch.Tensor) -> torch.Tensor:
            if ranks == 1:
                return attend(*tensors)
            return split.gather_heads(attend(*split.gather_tokens(*tensors)), case.heads)

        def expected() -> dict[str, torch.Tensor]:
            leaves = [x.clone().requires_grad_(case.training) for x in first[:3]]
            results = with_gradients(lambda: reference(*leaves), leaves, first[3] if case.training else None)()
            return {name: x[:, own] for name, x in zip(NAMES, results, strict=False)}

        return Way(
            run=with_gradients(lambda: shared(*parts), parts, grad),
            found=lambda results: {name: x[:, :, :1] for name, x in zip(NAMES, results, strict=False)},
            expected=expected,
            before=0,
            more=lambda clock, row: row.update(sent_bytes=sent),
        )

    on_gpu = device.type == "cuda"
    return {
        "full": partial(way, partial(sdpa, "cudnn" if on_gpu else "sdpa"), exact),
        "heads": partial(way, partial(ours, "triton" if on_gpu else "torch"), partial(ours, "torch")),
    }


def model_ways(job: Job, case: Case, device: torch.device, dtype: torch.dtype) -> Ways:
    """A whole transformer; the output of one process, which came before the others, is kept for them."""
    from diffusers import ContextParallelConfig

    setting, ranks = case.setting, dist.get_world_size()
    model = read_model(setting.model)
    grid, heads = setting.grid(model), model.transformer["num_attention_heads"]
    layers, head_dim = model.transformer["num_layers"], model.transformer["attention_head_dim"]
    stock = model.build_transformer("transformer", device, dtype)
    generator = torch.Generator(device).manual_seed(setting.frames)
    randn = partial(torch.randn, generator=generator, device=device)
    noise = randn(1, model.transformer["in_channels"], *setting.latents(model))
    text = randn(1, TEXT_TOKENS, model.transformer["text_dim"]).to(dtype)
    torch.compiler.reset()
    kept = {name: job.folder / f"{case.label}-{name}.pt" for name in METHODS}

    def way(name: str) -> Way:
        transformer = share_weights(stock)
        transformer.set_attention_backend("_native_cudnn" if device.type == "cuda" else "native")
        if name == "heads":
            vmonarch.apply(transformer, VMonarchProcessor())
        if ranks > 1:
            uneven = grid.tokens % ranks > 0 or (name == "full" and heads % ranks > 0)
            transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ranks, ulysses_anything=uneven))
        denoiser = Denoiser(transformer, model, noise, (text, text), 50, Clock(device))
        graphs = compiled_graphs()
        if case.mode == "compiled":
            with torch.no_grad():
                # diffusers' hooks read signatures in their first call, which cannot be compiled.
                denoiser.forward()
            transformer.compile_repeated_blocks(fullgraph=ranks == 1, dynamic=False, backend=job.compile_backend)

        def run() -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                return (denoiser.forward().movedim(1, -1),)

        made: list[int] = []

        def found(results: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
            made.append(compiled_graphs() - graphs)
            if ranks == 1:
                torch.save(results[0].cpu(), kept[name])
            return {"out": results[0]}

        def more(clock: Clock, row: dict[str, Any]) -> None:
            sent = most_sent(split_evenly(grid.tokens, ranks), heads, head_dim, dtype)
            row.update(graphs=made[0], sent_bytes=layers * sent)

        expected = lambda: {"out": torch.load(kept[name]).to(device).float()}
        return Way(run, found, expected, {"out": MODEL_BOUNDS[dtype]}, before=0, more=more)

    # Without what one process computed there is nothing to compare with.
    return {name: partial(way, name) for name in METHODS if ranks == 1 or kept[name].exists()}


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

    with settings_of_torch():
        measure_cases(job.bench, job.cases, tuple(METHODS), SharedClock(device), limits, write, lambda text: None)
    dist.destroy_process_group()


def add_efficiency(cases: Sequence[dict[str, Any]]) -> None:
    """Add to every timed row what one process would need, over what P processes do."""
    timed = [(case, row) for case in cases for row in case["rows"] if "ms" in row]
    alone = {(case["case"], row["method"]): row["ms"]["median"] for case, row in timed if case["ranks"] == 1}
    for case, row in timed:
        base = alone.get((case["case"], row["method"]))
        if base is not None:
            row["efficiency"] = base / (case["ranks"] * row["ms"]["median"])


@dataclass(frozen=True)
class Plan:
    """The cases, and the numbers of processes; None for 1, 2, 4 … GPUs."""

    cases: tuple[Case, ...]
    ranks: Sequence[int] | None


def bench(
    ranks: Sequence[int] | None = None,
    cases: Sequence[str] | None = None,
    models: Sequence[str] = MODELS,
    modes: Sequence[str] = MODES,
) -> Plan:
    """The cases of attention and the models that are asked for.

    Args:
        ranks: see `Plan`. cases: labels of CASES, None for all. models: settings of `vmonarch bench e2e`.
        modes: of the models.

    Raises:
        InputError: an argument cannot be used.
    """
    known = {case.label: case for case in CASES}
    labels = tuple(known) if cases is None else choose("cases", cases, known) if cases else ()
    settings = choose_settings(models, None) if models else ()
    if not labels and not settings:
        raise InputError("cases", "and --models leave nothing to measure")
    choose("modes", modes, MODES)
    # Whole transformers first: they tell more, should the time be over.
    of_models = (model_case(setting, mode) for setting in settings for mode in modes)
    return Plan((*of_models, *map(known.__getitem__, labels)), ranks)


def measure(
    plan: Plan,
    *,
    output: Path,
    rounds: int,
    budget: float,
    device: str,
    command: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure with several numbers of processes, which share the seconds of the budget; see `run_job`.

    Raises:
        InputError: an argument cannot be used.
    """
    check_device(device)
    check_output(output)
    most = torch.cuda.device_count() if device != "cpu" else None
    numbers = [2**n for n in range((most or 1).bit_length())] if plan.ranks is None else sorted(plan.ranks)
    if numbers[0] != 1 or len(set(numbers)) < len(numbers):
        raise InputError("ranks", f"must be different numbers, 1 among them, got {numbers}")
    if most is not None and numbers[-1] > most:
        raise InputError("ranks", f"must be at most {most}, a GPU for each; got {numbers[-1]}")
    with tempfile.TemporaryDirectory() as folder:
        return run_job(Job(Path(folder), device, plan.cases, rounds, budget), numbers, output, command, say)


def run_job(job: Job, numbers: Sequence[int], output: Path, command: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure with these numbers of processes, of which the first is 1, and write the JSON after each.

    Returns:
        what was written: as of `runner.run_bench`, with "ranks" in cases, "sent_bytes" and "efficiency" in rows, and
        "failed": [{"ranks", "problem"}].
    """
    started = time.monotonic()
    device = torch.device(job.device)
    dtype = measured_dtype(device)
    results: dict[str, Any] = {
        "format": FORMAT,
        "benchmark": "parallel",
        **provenance(device, command),
        "settings": {
            "dtype": str(dtype).removeprefix("torch."),
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
            torch.multiprocessing.spawn(run_rank, (ranks, dataclasses.replace(job, seconds=share)), nprocs=ranks)
        except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
            say(str(error))
            results["failed"].append({"ranks": ranks, "problem": str(error).strip().splitlines()[-1]})
        with contextlib.suppress(FileNotFoundError):
            path = job.folder / f"cases-{ranks}.json"
            results["cases"] += json.loads(path.read_text(encoding="utf-8"))["cases"]
        add_efficiency(results["cases"])
        results.update(left_out=left_out(results["cases"]), wrong=wrong_rows(results))
        results["seconds"] = round(time.monotonic() - started, 1)
        write_json(output, results | tables(results))
    return results | tables(results)


def wrong_rows(results: dict[str, Any]) -> list[str]:
    """What makes a run fail: wrong results, ways and processes that failed."""
    return [
        f"{row['method']} at {case['case']}, {case['ranks']} processes: {row['problem']}"
        for case in results["cases"]
        for row in case["rows"]
        if row["status"] not in ("ok", "left out")
    ] + [f"{failed['ranks']} processes: {failed['problem']}" for failed in results["failed"]]


def tables(results: dict[str, Any]) -> dict[str, Any]:
    """{"tables", "caption"}: milliseconds, efficiency and bytes of every case, by way and number of processes."""
    numbers = sorted({entry["ranks"] for entry in (*results["cases"], *results["failed"])})
    found = {(c["case"], row["method"], c["ranks"]): row for c in results["cases"] for row in c["rows"]}
    rows = []
    for case, name in dict.fromkeys((case, name) for case, name, _ in found):
        cells = []
        for ranks in numbers:
            row = found.get((case, name, ranks), {"status": "–"})
            share = f" ({100 * row['efficiency']:.0f} %)" if ranks > 1 and "efficiency" in row else ""
            cells.append(f"{digits(row['ms']['median'])}{share}" if "ms" in row else row["status"])
        sent = found.get((case, name, numbers[-1]), {}).get("sent_bytes")
        rows.append([case, METHODS[name], *cells, shown_number(sent, 0, factor=1e-6)])
    gpus = [f"{ranks} GPUs, ms" if ranks > 1 else "1 GPU, ms" for ranks in numbers]
    head = ["case", "way", *gpus, f"MB sent, {numbers[-1] if numbers else 0} GPUs"]
    failed = "".join(f" {entry['ranks']} processes failed: {entry['problem']}." for entry in results["failed"])
    return {"tables": [{"name": "times", "header": head, "rows": rows}], "caption": caption(results) + failed}
