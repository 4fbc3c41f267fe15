"""One video on several GPUs: time, scaling and bytes sent: `vmonarch bench parallel`.

Attention alone and whole transformers, computed by 1, 2, … processes that share the tokens of one video. Every process
holds about as many tokens as the others; attention is divided by heads (Ulysses). The time of a call is that of its
slowest process.

Legend: P processes, S tokens, H heads, D head dim.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import vmonarch
from vmonarch import VMonarchProcessor
from vmonarch.configs import InputError
from vmonarch.context_parallel import TokenSplit
from vmonarch.eval.bench.clock import Clock, measure, release_memory, summary
from vmonarch.eval.bench.denoiser import TEXT_TOKENS, Denoiser, compiled_graphs, settings_of_torch, share_weights
from vmonarch.eval.bench.e2e import BOUNDS as MODEL_BOUNDS
from vmonarch.eval.bench.e2e import MODES, Setting, choose_settings
from vmonarch.eval.bench.gate import BOUNDS, NAMES, bound, failure, relative_errors
from vmonarch.eval.bench.machine import check_device, measured_dtype, provenance
from vmonarch.eval.bench.runner import choose, sdpa, with_gradients
from vmonarch.eval.render.table import markdown
from vmonarch.eval.wan_models import WanModel, read_model
from vmonarch.exchange import split_evenly, ulysses_bytes
from vmonarch.files import check_output, write_json
from vmonarch.grid import LatentGrid
from vmonarch.kernels.monarch.api import vmonarch_attention

FORMAT = "vmonarch-parallel-1"
WAYS = {"full": "full attention", "heads": "VMonarch"}
# A process that fails ends the others; one that hangs does so after this.
TIMEOUT = timedelta(seconds=120)
FORMULAE = {
    "ms": "device time of a call, its slowest process; medians over the rounds",
    "efficiency": "ms of one process / (P · ms of P processes), of the same way",
    "compiled": "compile_repeated_blocks(dynamic=False); of VMonarch on several processes all but self-attention",
    "bytes": "counted: what the process that sends most sends to others in the attention of a forward pass",
    "error": "‖x − x₀‖ / ‖x₀‖, x₀ by one process in the same dtype, compiled or not alike",
}


def sent_by_heads(tokens: Sequence[int], **sizes: Any) -> list[int]:
    """Bytes that every rank sends in a forward pass of attention by heads; sizes as in `ulysses_bytes`.

    Raises:
        ValueError: there are fewer heads than ranks.
    """
    return [ulysses_bytes(tokens=tokens, rank=rank, **sizes) for rank in range(len(tokens))]


@dataclass(frozen=True)
class Case:
    """Attention alone; `training` is forward and backward together."""

    grid: LatentGrid
    heads: int
    head_dim: int = 128
    training: bool = False

    @property
    def label(self) -> str:
        shape = "x".join(map(str, self.grid))
        return f"attention {shape} {self.heads} heads {'forward+backward' if self.training else 'forward'}"


@dataclass(frozen=True)
class Model:
    """One forward call of a whole transformer; `mode` is of e2e.MODES."""

    setting: Setting
    mode: str = "eager"

    @property
    def label(self) -> str:
        return self.setting.name if self.mode == "eager" else f"{self.setting.name} {self.mode}"


# 118,800 tokens (129 frames of 720×1280) and the paper's largest setting, with the heads of the 1.3B and 14B models.
CASES = tuple(
    Case(LatentGrid(*grid), heads, training=training)
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
    models: tuple[Model, ...]
    rounds: int
    seconds: float
    compile_backend: str = "inductor"


class SharedClock(Clock):
    """A clock whose measurements begin on all ranks together."""

    def flush(self, times: int = 1) -> None:
        super().flush(times)
        # On a GPU it is the streams that wait for each other, not the hosts.
        dist.all_reduce(torch.zeros(1, device=self.device))


def most_sent(tokens: Sequence[int], heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that the rank that sends most sends in a forward pass of one layer."""
    return max(sent_by_heads(tokens, batch=1, heads=heads, head_dim=head_dim, dtype=dtype))


def _left_out(case: Case | Model, ranks: int, problem: str) -> list[dict[str, Any]]:
    """Rows of all ways without times."""
    return [{"case": case.label, "way": way, "ranks": ranks, "status": "left out", "problem": problem} for way in WAYS]


def _everywhere(value: Any) -> list[Any]:
    """What all ranks have, in their order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def measure_rows(
    runs: dict[str, Callable[[], Any]], rows: dict[str, dict[str, Any]], clock: SharedClock, rounds: int
) -> None:
    """Time the runs of the rows that are ok, and add their milliseconds and memory."""
    good = {name: run for name, run in runs.items() if rows[name]["status"] == "ok"}
    for name, run in good.items():
        release_memory(clock.device)
        if clock.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(clock.device)
        run()
        clock.wait()
        if clock.device.type == "cuda":
            rows[name]["peak_bytes"] = max(_everywhere(torch.cuda.max_memory_allocated(clock.device)))
    times, _ = measure(good, dict.fromkeys(good, rounds), clock, float("inf"))
    for name in good:
        # Of every round the slowest rank.
        rows[name]["ms"] = summary([max(ms) for ms in zip(*_everywhere(times[name]), strict=True)])
        rows[name]["rounds"] = rounds


def judge(row: dict[str, Any], errors: dict[str, float], bounds: dict[str, float]) -> None:
    """Set a row's status, the same on all ranks, by its errors on all of them."""
    found = _everywhere(errors)
    row["errors"] = {name: max(of[name] for of in found) for name in errors}
    # Written so that NaN is wrong too.
    wrong = [name for name in errors if not all(of[name] <= bounds[name] for of in found)]
    row["status"] = "wrong" if wrong else "ok"
    if wrong:
        row["problem"] = "; ".join(f"{name} is off by {row['errors'][name]:.2g}" for name in wrong)


def run_case(case: Case, clock: SharedClock, rounds: int) -> list[dict[str, Any]]:
    """Check and time all ways of attention alone; the rows are the same on all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device, dtype = clock.device, measured_dtype(clock.device)
    implementation = "triton" if device.type == "cuda" else "torch"
    split = TokenSplit(dist.group.WORLD, rank, split_evenly(case.grid.tokens, ranks))
    start = sum(split.tokens[:rank])
    own = slice(start, start + split.tokens[rank])
    # The same on all ranks; each has its part once more, as it would without the whole.
    generator = torch.Generator(device).manual_seed(case.grid.tokens + case.heads)
    size = (1, case.grid.tokens, case.heads, case.head_dim)
    whole = [torch.randn(size, generator=generator, device=device, dtype=dtype) for _ in range(4)]
    parts = [x[:, own].clone() for x in whole]
    for tensors in (whole, parts):
        for x in tensors[:3]:
            x.requires_grad_(case.training)

    def alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return vmonarch_attention(query, key, value, grid=case.grid, implementation=implementation)

    def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return sdpa("cudnn" if device.type == "cuda" else "sdpa", query, key, value)

    def by_heads(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *tensors: split.gather_heads(attend(*split.gather_tokens(*tensors)), case.heads)

    def call(attend: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> Callable[[], Any]:
        query, key, value, grad = tensors
        return with_gradients(lambda: attend(query, key, value), (query, key, value), grad if case.training else None)

    ways = {"full": (exact, by_heads(exact)), "heads": (alone, by_heads(alone))}
    bounds = {name: bound(name, dtype) for name in NAMES}
    rows: dict[str, dict[str, Any]] = {}
    runs = {}
    for name, (reference, attend) in ways.items():
        row = rows[name] = {"case": case.label, "way": name, "ranks": ranks, **dataclasses.asdict(case)}
        if case.heads < ranks:
            row.update(status="left out", problem=f"{case.heads} heads cannot be divided by {ranks} ranks")
            continue
        # One process is what the others are measured against; it exchanges nothing.
        runs[name] = call(reference if ranks == 1 else attend, parts)
        found = runs[name]()
        row["bytes"] = most_sent(split.tokens, case.heads, case.head_dim, dtype)
        expected = call(reference, whole)()
        errors = {
            of: relative_errors(x, wanted[:, own].float())["relative"]
            for of, x, wanted in zip(NAMES, found, expected, strict=False)
        }
        del found, expected
        judge(row, errors, bounds)
    del whole
    measure_rows(runs, rows, clock, rounds)
    return list(rows.values())


@torch.no_grad()
def run_model(case: Model, model: WanModel, job: Job, clock: SharedClock) -> list[dict[str, Any]]:
    """Check and time a whole transformer in all ways."""
    from diffusers import ContextParallelConfig

    setting, ranks, device = case.setting, dist.get_world_size(), clock.device
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[[], Any]] = {}
    dtype = measured_dtype(device)
    latents = model.latents(setting.frames, setting.height, setting.width, argument="models")
    grid, heads = model.grid(latents), model.transformer["num_attention_heads"]
    # One process came before the others and kept what it computed.
    kept = {way: job.folder / f"{case.label}-{way}.pt" for way in WAYS}
    for name in WAYS:
        row = rows[name] = {"case": case.label, "way": name, "ranks": ranks, "grid": list(grid), "heads": heads}
        if heads < ranks:
            row.update(status="left out", problem=f"{heads} heads cannot be divided by {ranks} ranks")
        elif ranks > 1 and not kept[name].exists():
            row.update(status="left out", problem="one process did not come to it")
    if all("status" in row for row in rows.values()):
        return list(rows.values())
    stock = model.build_transformer("transformer", device, dtype)
    generator = torch.Generator(device).manual_seed(setting.frames)
    noise = torch.randn(1, model.transformer["in_channels"], *latents, generator=generator, device=device)
    text = torch.randn(1, TEXT_TOKENS, model.transformer["text_dim"], generator=generator, device=device).to(dtype)
    for name, row in rows.items():
        if "status" in row:
            continue
        transformer: Any = share_weights(stock)
        transformer.set_attention_backend("_native_cudnn" if device.type == "cuda" else "native")
        if name != "full":
            vmonarch.apply(transformer, VMonarchProcessor())
        if ranks > 1:
            uneven = grid.tokens % ranks > 0 or (name == "full" and heads % ranks > 0)
            config = ContextParallelConfig(ulysses_degree=ranks, ulysses_anything=uneven)
            transformer.enable_parallelism(config=config)
        denoiser = Denoiser(transformer, model, noise, (text, text), 50, clock)
        graphs = compiled_graphs()
        try:
            if case.mode == "compiled":
                # diffusers' hooks read signatures in their first call, which cannot be compiled.
                denoiser.forward()
                transformer.compile_repeated_blocks(fullgraph=ranks == 1, dynamic=False, backend=job.compile_backend)
            out = denoiser.forward()
        except Exception as error:
            # What cannot be compiled cannot be on any rank.
            row.update(failure(error))
            continue
        row["graphs"] = compiled_graphs() - graphs
        runs[name] = denoiser.forward
        tokens = [part.numel() for part in torch.arange(grid.tokens).tensor_split(ranks)]
        layers, head_dim = model.transformer["num_layers"], model.transformer["attention_head_dim"]
        row["bytes"] = layers * most_sent(tokens, heads, head_dim, dtype)
        if ranks == 1:
            torch.save(out.cpu(), kept[name])
        expected = torch.load(kept[name]).to(device).float()
        off = relative_errors(out.movedim(1, -1), expected.movedim(1, -1))["relative"]
        judge(row, {"out": off}, {"out": MODEL_BOUNDS[dtype]})
        del out, expected
        release_memory(device)
    measure_rows(runs, rows, clock, job.rounds)
    return list(rows.values())


def run_rank(rank: int, ranks: int, job: Job) -> None:
    """What one process does; the first writes the rows after every case."""
    started = time.monotonic()
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
    rows: list[dict[str, Any]] = []
    clock = SharedClock(device)
    # Whole transformers first: they tell more, should the time be over.
    work: tuple[Case | Model, ...] = (*job.models, *job.cases)
    for case in work:
        if max(_everywhere(time.monotonic() - started)) > job.seconds:
            rows += _left_out(case, ranks, "the time was over")
        elif isinstance(case, Case):
            rows += run_case(case, clock, job.rounds)
        else:
            torch.compiler.reset()
            with settings_of_torch():
                rows += run_model(case, read_model(case.setting.model), job, clock)
        release_memory(device)
        if rank == 0:
            write_json(job.folder / f"rows-{ranks}.json", {"rows": rows})
    dist.destroy_process_group()


def add_efficiency(rows: Sequence[dict[str, Any]]) -> None:
    """Add to every timed row what one process would need, over what P processes do."""
    alone = {(row["case"], row["way"]): row["ms"]["median"] for row in rows if row["ranks"] == 1 and "ms" in row}
    for row in rows:
        base = alone.get((row["case"], row["way"]))
        if base is not None and "ms" in row:
            row["efficiency"] = base / (row["ranks"] * row["ms"]["median"])


def run_bench(
    *,
    output: Path,
    ranks: Sequence[int] | None,
    cases: Sequence[str] | None,
    models: Sequence[str] | None,
    modes: Sequence[str],
    rounds: int,
    budget: float,
    device: str,
    command: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure cases of attention and models with several numbers of processes, and write the JSON after each.

    Args:
        ranks: numbers of processes, 1 among them; None for 1, 2, 4 … GPUs.
        cases: labels of CASES, None for all. models: settings of `vmonarch bench e2e`, None for MODELS.
        modes: of the models. budget: seconds, shared out among the numbers.

    Raises:
        InputError: an argument cannot be used.
    """
    known = {case.label: case for case in CASES}
    for label in cases or ():
        if label not in known:
            raise InputError("cases", f"must be of {'; '.join(known)}; got {label!r}")
    names = MODELS if models is None else models
    chosen = tuple(CASES if cases is None else (known[label] for label in cases))
    if not chosen and not names:
        raise InputError("cases", "and --models leave nothing to measure")
    choose("modes", modes, {mode: mode for mode in MODES})
    settings = choose_settings(names, None) if names else ()
    check_device(device)
    check_output(output)
    most = torch.cuda.device_count() if device != "cpu" else None
    numbers = [2**n for n in range((most or 1).bit_length())] if ranks is None else sorted(ranks)
    if numbers[0] != 1 or len(set(numbers)) < len(numbers):
        raise InputError("ranks", f"must be different numbers, 1 among them, got {numbers}")
    if most is not None and numbers[-1] > most:
        raise InputError("ranks", f"must be at most {most}, a GPU for each; got {numbers[-1]}")
    of = tuple(Model(setting, mode) for setting in settings for mode in modes)
    with tempfile.TemporaryDirectory() as folder:
        return run_job(Job(Path(folder), device, chosen, of, rounds, budget), numbers, output, command, say)


def run_job(job: Job, numbers: Sequence[int], output: Path, command: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure with so many processes, one number after the other, and write the JSON after each.

    Args:
        numbers: of processes, the first 1.
        say: told what is measured.

    Returns:
        what was written: {"format", "date", "hardware", "versions", "command", "settings", "formulae", "rows":
        [{"case", "way", "ranks", "status", "ms", "bytes", "errors", "efficiency", …}], "failed": [{"ranks",
        "problem"}]}.
    """
    started = time.monotonic()
    device = torch.device(job.device)
    dtype = measured_dtype(device)
    about = provenance(device, command)
    if device.type == "cuda":
        about["hardware"] = f"{torch.cuda.device_count()}× {about['hardware']}"
    results: dict[str, Any] = {
        "format": FORMAT,
        **about,
        "settings": {
            "dtype": str(dtype).removeprefix("torch."),
            "inputs": "standard normal; transformers with random weights",
            "timing": "device events, ways in turns, all processes beginning together",
            "full": "cuDNN's attention, by heads",
            "rounds": job.rounds,
            "bounds": {"attention": BOUNDS[dtype], "transformer": MODEL_BOUNDS[dtype]},
        },
        "formulae": FORMULAE,
        "rows": [],
        "failed": [],
    }
    for n, ranks in enumerate(numbers):
        # Later numbers of processes get their share, too: without them there is nothing to compare.
        share = (job.seconds - (time.monotonic() - started)) / (len(numbers) - n)
        say(f"{ranks} processes, {share:.0f} s for them")
        try:
            torch.multiprocessing.spawn(run_rank, (ranks, dataclasses.replace(job, seconds=share)), nprocs=ranks)
        except (
            torch.multiprocessing.ProcessRaisedException,
            torch.multiprocessing.ProcessExitedException,
        ) as error:
            say(str(error))
            problem = str(error).strip().splitlines()[-1]
            results["failed"].append({"ranks": ranks, "status": "failed", "problem": problem})
        path = job.folder / f"rows-{ranks}.json"
        if path.exists():
            results["rows"] += json.loads(path.read_text(encoding="utf-8"))["rows"]
        add_efficiency(results["rows"])
        write_json(output, results)
    results["seconds"] = round(time.monotonic() - started, 1)
    write_json(output, results)
    return results


def wrong_rows(results: dict[str, Any]) -> list[str]:
    """What makes a run fail: wrong results, and processes that failed."""
    return [
        f"{row['case']} {row['way']}, {row['ranks']} processes: {row['problem']}"
        for row in results["rows"]
        if row["status"] not in ("ok", "left out")
    ] + [f"{failed['ranks']} processes: {failed['problem']}" for failed in results["failed"]]


def parallel_table(results: dict[str, Any]) -> str:
    """Milliseconds, efficiency and bytes of every case, by way and number of processes."""
    numbers = sorted({entry["ranks"] for entry in (*results["rows"], *results["failed"])})
    found = {(row["case"], row["way"], row["ranks"]): row for row in results["rows"]}
    lines = []
    for case, way in dict.fromkeys((row["case"], row["way"]) for row in results["rows"]):
        cells = [case, WAYS[way]]
        for ranks in numbers:
            row = found.get((case, way, ranks), {"status": "–"})
            if "ms" not in row:
                cells.append(row["status"])
                continue
            share = "" if ranks == 1 or "efficiency" not in row else f" ({100 * row['efficiency']:.0f} %)"
            cells.append(f"{row['ms']['median']:.1f}{share}")
        sent = found.get((case, way, numbers[-1]), {}).get("bytes")
        lines.append([*cells, "–" if sent is None else f"{sent / 1e6:.0f}"])
    gpus = [f"{ranks} GPUs" if ranks > 1 else "1 GPU" for ranks in numbers]
    heading = ["", "", *gpus, f"MB sent, {gpus[-1]}"]
    settings = results["settings"]
    about = [
        f"Milliseconds (efficiency). {results['hardware']}, {results['date'][:10]}, torch"
        f" {results['versions']['torch']}, Triton {results['versions']['triton']}, {settings['dtype']};"
        f" {settings['timing']}. Made by `{results['command']}`.",
        "",
        *(f"- {name}: {text}" for name, text in results["formulae"].items()),
        *(f"- {entry['ranks']} processes failed: {entry['problem']}" for entry in results["failed"]),
    ]
    return markdown(heading, lines) + "\n" + "\n".join(about) + "\n"
