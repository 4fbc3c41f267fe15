"""Seconds per video of Wan models, with VMonarch and with full attention: `vmonarch bench e2e`.

A case is a model and a video size; its ways are methods, each eager and compiled. All share the weights of one
transformer and take turns, step by step. diffusers' `WanPipeline` runs the steps. VAE and text encoder are timed once,
because no method changes them. Seconds per video are extrapolated from measured steps; where `refresh`, `dense_steps`
or a cache makes steps differ, each kind of step is measured.
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import ContextParallelConfig, UniPCMultistepScheduler, WanPipeline

from vmonarch import apply
from vmonarch.base import FullAttentionProcessor
from vmonarch.configs import InputError, read_document, suggest
from vmonarch.configs.methods import AttentionMethod
from vmonarch.engines import CUDNN
from vmonarch.eval.bench.machine import Clock, allocated, measured_dtype, release_memory, summary
from vmonarch.eval.bench.rows import caption
from vmonarch.eval.bench.runner import Bench, Way, Ways, failure
from vmonarch.eval.render.tables import shown_number
from vmonarch.eval.settings import check_names, resolved
from vmonarch.eval.wan_models import WanModel, read_model
from vmonarch.files import check_output, write_json
from vmonarch.hooks import record_of
from vmonarch.pipelines import recipes
from vmonarch.refresh import Refresh, Schedule
from vmonarch.validation import check_dense, is_dense

FORMAT = "vmonarch-e2e-1"
MODES = ("eager", "compiled")
# Largest relative errors of a whole transformer, which exceed those of one kernel.
MODEL_BOUNDS = {torch.bfloat16: 5e-2, torch.float32: 1e-3}
TEXT_TOKENS = 512
GUIDANCE = 5.0
FORMULAE = {
    "step": "two forward calls (prompt and negative prompt, batch 1) or without guidance one, guidance, one step of"
    " UniPC; where steps differ, their mean, Σ number · median / steps",
    "video": "steps · median step + VAE decode + 2 · text encoder (1 without guidance): extrapolated from the measured"
    " steps",
    "error": "‖x − x₀‖ / ‖x₀‖ of the forward calls with the prompt, x₀ by the same method, eager, in one process",
}

HOW = {
    "attention": "diffusers' standard backend in eager rows, cuDNN's in compiled ones",
    "cold": "a method's first step in a new process with empty caches of compiled code, after imports and weights",
    "compiled": "compile_repeated_blocks(fullgraph=True, dynamic=False)",
    "timing": "device events around whole steps, rows in turns",
    "memory": "peak_bytes: the most that is allocated during steps, weights of all transformers and residuals"
    " counted, VAE and text encoder not",
}
# See `step_kinds`.
STEP_KINDS = ("dense", "exact", "exact, int8", "kept", "kept, int8", "predicted", "approximate")
Rows = Mapping[str, tuple[AttentionMethod, str]]


class Setting(NamedTuple):
    """A model, as `read_model` takes it, and a video's (frames, height, width)."""

    label: str
    model: str
    size: tuple[int, ...]


# The settings of Table 1 of the VMonarch paper, by label.
SETTINGS = {
    setting.label: setting
    for setting in (
        Setting("1.3b-61x448x832", "wan2.1-1.3b", (61, 448, 832)),
        Setting("1.3b-141x448x832", "wan2.1-1.3b", (141, 448, 832)),
        Setting("1.3b-61x720x1280", "wan2.1-1.3b", (61, 720, 1280)),
        Setting("14b-93x704x1280", "wan2.1-14b", (93, 704, 1280)),
        Setting("5b-93x704x1280", "wan2.2-5b", (93, 704, 1280)),
    )
}


def choose_settings(words: Sequence[str], model: str | None) -> tuple[Setting, ...]:
    """The requested settings: names of SETTINGS, or sizes FRAMESxHEIGHTxWIDTH of `model`.

    Args:
        model: replaces the settings' own models and is measured once at each size.

    Raises:
        InputError: an unknown name, a size without a model, or no setting at all.
    """
    if model is None:
        check_names("settings", words, SETTINGS)
        return tuple(SETTINGS[word] for word in words)
    chosen = {}
    for word in words:
        own = re.fullmatch(r"(\d+)x(\d+)x(\d+)", word)
        if word not in SETTINGS and own is None:
            problem = f"must be of {', '.join(SETTINGS)}, or frames x height x width such as 61x448x832"
            raise InputError("settings", f"{problem}; got {word!r}{suggest(word, SETTINGS)}")
        size = SETTINGS[word].size if own is None else tuple(map(int, own.groups()))
        chosen[size] = Setting(f"{Path(model).name}-{'x'.join(map(str, size))}", model, size)
    return tuple(chosen.values())


@dataclass(frozen=True)
class Options:
    """How videos are sampled.

    Args:
        modes: one or both of MODES. Eager rows use diffusers' standard attention backend, compiled rows cuDNN's.
            Recipes that compile only have compiled rows.
        cold: whether to measure the first step in a new process as well.
        steps: denoising steps of a video.
        guidance: whether a step takes two forward calls instead of one.
        transformer_only: whether to leave VAE and text encoder out.
        compile_backend: backend of torch.compile; "eager" compiles nothing and only serves to try the benchmark.
        ranks: processes in this group, which share the tokens of the video.
    """

    modes: Sequence[str] = MODES
    steps: int = 50
    guidance: bool = True
    transformer_only: bool = False
    cold: bool = False
    compile_backend: str = "inductor"
    ranks: int = 1


class Steps(WanPipeline):
    """diffusers' pipeline on random noise and texts; it runs only some of the denoising steps and times them.

    Every step starts from the same noise, so that the methods' velocities can be compared. In a model with two
    transformers, which are alike, the first one runs all steps.

    Attributes:
        names: for each step, the transformer that runs it in the model's own pipeline.
        marks: (number, start, end) of every step that was run.
    """

    @classmethod
    def of(cls, transformer: Any, model: WanModel, noise: Any, texts: Any, options: Options, clock: Clock) -> Steps:
        """The pipeline with this transformer.

        Args:
            noise: [1, C, T, h, w]. texts: embeddings of the prompt and of the negative prompt, [2, 1, 512, text_dim].
        """
        scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        )
        second = None if model.boundary_ratio is None else transformer
        pipe = cls(None, None, None, scheduler, transformer, second, model.boundary_ratio, model.expand_timesteps)
        pipe.set_progress_bar_config(disable=True)
        pipe.noise, pipe.texts, pipe.options, pipe.clock, pipe.marks = noise, texts, options, clock, []
        pipe.names = transformers_by_step(pipe, options.steps)
        transformer.register_forward_hook(lambda *call: pipe.velocities.setdefault(pipe.step, call[-1][0]))
        return pipe

    def do(self, steps: Collection[int]) -> dict[int, torch.Tensor]:
        """Run these steps and return the velocities [1, C, T, h, w] with the prompt, by step number."""
        self.velocities: dict[int, torch.Tensor] = {}
        self.wanted, self.numbers = steps, itertools.count()
        self(
            prompt_embeds=self.texts[0],
            negative_prompt_embeds=self.texts[1],
            latents=self.noise,
            num_inference_steps=self.options.steps,
            guidance_scale=GUIDANCE if self.options.guidance else 1.0,
            output_type="latent",
            callback_on_step_end=self._ended,
        )
        record = record_of(self.transformer)
        if record is not None and record.sharing is not None:
            # The last step, which frees the residuals, may not have been run.
            record.sharing.forget()
        return self.velocities

    @property
    def interrupt(self) -> bool:
        """Whether to skip the next step; the pipeline asks before every one."""
        self.step = next(self.numbers)
        if self.step not in self.wanted:
            return True
        self.began = self.clock.mark()
        return False

    def _ended(self, pipe: Any, step: int, timestep: Any, tensors: Any) -> dict[str, Any]:
        self.marks.append((step, self.began, self.clock.mark()))
        return {"latents": self.noise}

    def kinds(self) -> list[str]:
        """The kind of every step in the latest run, for a method whose measured errors decide it."""
        record = record_of(self.transformer)
        assert record is not None and record.sharing is not None
        (schedule,) = record.sharing.runs
        kinds = dict.fromkeys(range(self.options.steps), "predicted") | dict.fromkeys(schedule.forward, "approximate")
        kinds |= {step: exact_kind(schedule, step, step in schedule.renewals) for step in schedule.exact}
        return list(kinds.values())

    def seconds(self, clock: Clock, last: int, kinds: Sequence[str]) -> dict[str, Any]:
        """{"step_s", "kinds"}: seconds of a video's mean step and of each kind of step, on the slowest process.

        Args:
            clock: shared by all processes. last: how many of the latest marks count.
            kinds: the kind of each of a video's steps.
        """
        clock.wait()
        done = self.marks[-last:]
        of_ranks = clock.everywhere([clock.between(start, stop) / 1e3 for _, start, stop in done])
        times = [(kinds[step], max(of)) for (step, *_), of in zip(done, zip(*of_ranks, strict=True), strict=True)]
        by_kind: dict[str, Any] = {}
        for kind in sorted(set(kinds), key=STEP_KINDS.index):
            found = summary([seconds for of, seconds in times if of == kind])
            by_kind[kind] = {"steps": kinds.count(kind), "step_s": found}
        total = lambda key: sum(of["steps"] * of["step_s"][key] for of in by_kind.values())
        return {"step_s": {key: total(key) / len(kinds) for key in ("median", "min", "p20", "p80")}, "kinds": by_kind}


def transformers_by_step(pipe: Any, steps: int) -> list[str]:
    """The transformer that computes each of a pipeline's steps; two divide the steps at `boundary_ratio`."""
    names = [name for name in ("transformer", "transformer_2") if getattr(pipe, name, None) is not None]
    boundary = pipe.config.get("boundary_ratio")
    if len(names) == 1 or boundary is None:
        return names[:1] * steps
    scheduler = copy.deepcopy(pipe.scheduler)
    scheduler.set_timesteps(steps)
    # Solvers of higher order have several timesteps per step.
    timesteps = scheduler.timesteps[:: max(1, len(scheduler.timesteps) // steps)][:steps]
    return [names[int(t < boundary * scheduler.config.num_train_timesteps)] for t in timesteps]


def exact_kind(schedule: Schedule, step: int, kept: bool) -> str:
    """The one of `STEP_KINDS` for a step that `refresh` makes exact."""
    precision = schedule.precision(step)
    return ("kept" if kept else "exact") + ("" if precision is None else f", {precision}")


def step_kinds(method: AttentionMethod, transformers: Sequence[str]) -> list[str]:
    """The kind of each of a method's denoising steps, one of `STEP_KINDS`.

    "dense" is the model's own attention (`dense_steps`). "exact" is exact attention (`refresh`), "kept" also keeps its
    residual, and both have a form in eight bits, ", int8". "approximate" is the method itself, with the last residual
    if there is one. "predicted" computes no attention (`refresh.cache`); only a run decides which steps these are.

    Args:
        transformers: the transformer of each step (`transformers_by_step`).

    Raises:
        ValueError: the method asks for more steps than there are.
    """
    steps = len(transformers)
    dense = check_dense("dense_steps", method.options.get("dense_steps", 0))
    refresh = Refresh.parse(method.options.get("refresh"))
    schedules = {name: Schedule(refresh, steps) for name in transformers if refresh is not None}
    kinds = []
    for step, name in enumerate(transformers):
        schedule = schedules.get(name)
        if schedule is not None:
            schedule.enter(step)
        if is_dense("dense_steps", dense, step, steps):
            kinds.append("dense")
        elif schedule is None or schedule.due < step:
            kinds.append("approximate")
        else:
            schedule.computed = True
            kinds.append(exact_kind(schedule, step, schedule.kept))
    return kinds


def steps_to_measure(kinds: Sequence[str]) -> list[int]:
    """A small set of steps that includes every kind.

    An approximate step brings the steps before it, back to the one whose residual it uses.

    Args:
        kinds: the kind of each step (`step_kinds`).
    """
    found: set[int] = set()
    for kind in reversed(STEP_KINDS):
        if kind not in kinds or any(kinds[step] == kind for step in found):
            continue
        first = last = kinds.index(kind)
        if kinds[first] == "approximate":
            first = max((step for step in range(first) if kinds[step].startswith("kept")), default=first)
        found |= set(range(first, last + 1))
    return sorted(found)


def ways(
    rows: Rows, options: Options, setting: Setting, device: torch.device, dtype: torch.dtype, *, first: bool = False
) -> Ways:
    """All rows on one transformer; a call of a way is one turn, with steps of every kind.

    Args:
        rows: method and mode, by name of the way.
        first: whether a turn is only the first step.
    """
    from torch._dynamo.utils import counters

    model, clock, before = read_model(setting.model), Clock(device), allocated(device)
    # All transformers are in memory, as in a pipeline.
    transformers = [model.build(name, device, dtype) for name in model.transformers]
    randn = partial(torch.randn, generator=torch.Generator(device).manual_seed(setting.size[0]), device=device)
    noise = randn(1, model.transformer["in_channels"], *model.latents(setting.size, argument="settings"))
    texts = randn(2, 1, TEXT_TOKENS, model.transformer["text_dim"]).to(dtype)
    common, weights = allocated(device), [*transformers[0].parameters(), *transformers[0].buffers()]
    torch.compiler.reset()
    graphs = counters["stats"]["unique_graphs"]

    def pipeline(method: AttentionMethod, mode: str, ranks: int) -> Steps:
        # Each copy has its own processors and compiled code; all share the weights.
        transformer = copy.deepcopy(transformers[0], {id(tensor): tensor for tensor in weights})
        compiled, on_gpu = mode == "compiled", device.type == "cuda"
        transformer.set_attention_backend(CUDNN if compiled and on_gpu else "native")
        recipes.apply(transformer, method, compile_backend=options.compile_backend)
        if method.processor_name == "full" and model.transformer["num_attention_heads"] % ranks:
            # diffusers' own cannot share 12 heads among 8 ranks.
            apply(transformer, FullAttentionProcessor())
        pipe = Steps.of(transformer, model, noise, texts, options, clock)
        if ranks > 1:
            tokens, heads = model.grid(setting.size, argument="settings").tokens, transformer.config.num_attention_heads
            shares = ContextParallelConfig(ulysses_degree=ranks, ulysses_anything=tokens % ranks + heads % ranks > 0)
            transformer.enable_parallelism(config=shares)
            # diffusers' hooks inspect signatures in their first call, which torch.compile cannot trace.
            pipe.do([0])
        if compiled and not method.additions.compile:
            recipes.allow_versions()
            transformer.compile_repeated_blocks(fullgraph=ranks == 1, dynamic=False, backend=options.compile_backend)
        return pipe

    def way(method: AttentionMethod, mode: str) -> Way:
        # Memory of the other ways, such as float8 weights.
        others = allocated(device) - common
        pipe = pipeline(method, mode, options.ranks)
        kinds = step_kinds(method, pipe.names)
        # Where measured errors decide, the kind of a step depends on all steps before it.
        refresh = Refresh.parse(method.options.get("refresh"))
        decided = refresh is not None and refresh.decides
        every = list(range(len(kinds))) if decided else steps_to_measure(kinds)
        steps = [0] if first else every
        named = lambda velocities: {f"step {n}": x.movedim(1, -1) for n, x in zip(steps, velocities, strict=True)}

        def found(velocities: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
            if mode == "compiled" and counters["stats"]["unique_graphs"] == graphs:
                raise RuntimeError("torch.compile compiled nothing")
            if not all(velocity.isfinite().all() for velocity in velocities):
                raise RuntimeError("the output is not finite")
            return named(velocities)

        def expected() -> dict[str, torch.Tensor]:
            if mode == "eager" and options.ranks == 1:
                return {}
            eager = replace(method, additions=replace(method.additions, compile=False))
            return {name: x.float() for name, x in named(pipeline(eager, "eager", 1).do(steps).values()).items()}

        def more(clock: Clock, row: dict[str, Any]) -> None:
            found = pipe.kinds() if decided else kinds
            row.update(pipe.seconds(clock, row["rounds"] * len(steps), found), options=method.to_dict())
            if options.cold:
                make = partial(ways, {"cold": (method, mode)}, options, first=True)
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                    row["cold_s"] = pool.submit(first_call, make, setting, device).result()

        # Compiled and eager code sum in different orders, and float8 layers round the sums: no bound would hold.
        bounds = {} if method.additions.linears else {f"step {n}": MODEL_BOUNDS[dtype] for n in steps}
        return Way(lambda: list(pipe.do(steps).values()), found, expected, bounds, before=before + others, more=more)

    return {name: partial(way, *of) for name, of in rows.items()}


def first_call(make: Callable[..., Ways], setting: Setting, device: torch.device) -> float:
    """Seconds of a way's first call with empty caches of compiled code; for a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update({f"{compiler}_CACHE_DIR": folder for compiler in ("TRITON", "TORCHINDUCTOR")})
        way, clock = make(setting, device, measured_dtype(device))["cold"](), Clock(device)
        return clock.time(way.run) / 1e3


def describe(options: Options, setting: Setting, clock: Clock) -> dict[str, Any]:
    """The JSON's description of a setting, with the seconds of decoding one video and of encoding one prompt."""
    model, device = read_model(setting.model), clock.device
    latents, grid = model.latents(setting.size, argument="settings"), model.grid(setting.size, argument="settings")
    noise = torch.randn(1, model.transformer["out_channels"], *latents, device=device)
    tokens = torch.randint(0, model.text_encoder["vocab_size"], (1, TEXT_TOKENS), device=device)

    @torch.no_grad()
    def seconds(part: str, inputs: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
        if options.transformer_only:
            return {"status": "left out", "problem": "--transformer-only"}
        try:
            built = model.build(part, device, dtype)
            call = partial(getattr(built, "decode", built), inputs)
            call()
            clock.wait()
            return {"status": "ok", "seconds": clock.time(call) / 1e3}
        except Exception as error:
            return failure(error)
        finally:
            release_memory(device)

    return {
        "setting": setting.label,
        "model": model.name,
        "weights": "random" if model.folder is None else "the model's own",
        "size": setting.size,
        "grid": grid,
        "tokens": grid.tokens,
        "transformers": len(model.transformers),
        "vae": seconds("vae", noise, torch.float32),
        "text_encoder": seconds("text_encoder", tokens, measured_dtype(device)),
    }


def finish(options: Options, case: dict[str, Any]) -> None:
    """Add method, mode and the extrapolated seconds per video, None unless VAE and text encoder were timed."""
    vae, text = case.get("vae", {}), case.get("text_encoder", {})
    for row in case["rows"]:
        row["method"], _, row["mode"] = row["method"].rpartition(" ")
        if "step_s" in row:
            row["denoise_s"], row["video_s"] = options.steps * row["step_s"]["median"], None
            if vae.get("status") == text.get("status") == "ok":
                row["video_s"] = row["denoise_s"] + vae["seconds"] + (1 + options.guidance) * text["seconds"]


def bench(
    settings: Sequence[str] = tuple(SETTINGS),
    model: str | None = None,
    methods: Sequence[str] = ("full", "stock:backend=fa3", "vmonarch"),
    **options: Any,
) -> Bench:
    """The benchmark of these settings.

    Args:
        settings, model: see `choose_settings`. options: fields of `Options`.
        methods: entries of `configs/attention.yaml` or `configs/recipes.yaml`.

    Raises:
        InputError: a model, a size, a method or an option cannot be used.
    """
    chosen, of = choose_settings(settings, model), Options(**options)
    check_names("modes", of.modes, MODES)
    compared = resolved(methods, "methods")
    for method in compared:
        try:
            step_kinds(method, ["transformer"] * of.steps)
        except ValueError as error:
            raise InputError("methods", f"{method.label!r} cannot compute this video: {error}") from error
    for setting in chosen:
        read_model(setting.model).latents(setting.size, argument="settings")
    pairs = itertools.product(compared, of.modes)
    rows = {f"{m.label} {mode}": (m, mode) for m, mode in pairs if mode == "compiled" or not m.additions.compile}
    return Bench(
        name="e2e",
        methods=tuple(rows),
        ours=(),
        cases=chosen,
        ways=partial(ways, rows, of),
        formulae=FORMULAE,
        settings={"batch": 1, **asdict(of), "guidance": GUIDANCE if of.guidance else None, **HOW},
        describe=partial(describe, of),
        finish=partial(finish, of),
        document=lambda run, base: document([run]),
        way_seconds=1e6,
        flushes=1,
    )


def merge_files(parts: Sequence[Path], output: Path) -> None:
    """Merge the JSON of several runs; tables that `document` does not make are kept.

    Raises:
        InputError: a file is not from this benchmark, or the output cannot be written.
    """
    documents = [read_document("parts", path, FORMAT, "JSON of `vmonarch bench e2e`") for path in parts]
    check_output(output)
    merged = document([run for part in documents for run in part["runs"]])
    merged["tables"] += [
        t for part in documents for t in part.get("tables", ()) if t.get("name") not in (None, "steps")
    ]
    write_json(output, merged)


def document(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """{"format", "runs", "wrong", "tables", "caption"} of several runs.

    If a row was measured more than once, the last one with times counts; ratios compare rows of the same run.
    """
    newest: dict[tuple[str, str, str], tuple[dict[str, Any], dict[str, Any]]] = {}
    for case in (case for run in runs for case in run["cases"]):
        for row in case["rows"]:
            key = case.get("setting", case.get("case", "")), row["method"], row["mode"]
            if row["status"] == "ok" or key not in newest:
                newest[key] = row, case
    whole, lines = lambda row: row.get("video_s") or row["denoise_s"], []
    for (setting, method, mode), (row, case) in newest.items():
        cells = [row["status"], *["–"] * 6]
        if "step_s" in row:
            stock = {r["mode"]: r for r in case["rows"] if r["method"] == "full" and "step_s" in r and r is not row}
            faster = [shown_number(whole(stock[m]) / whole(row) if m in stock else None, 2, "{}×") for m in MODES]
            seconds = [shown_number(row["step_s"]["median"], 3), shown_number(row.get("video_s"))]
            rest = [shown_number(row.get("peak_bytes"), factor=1e-9), shown_number(row.get("cold_s"))]
            cells = [f"{case['tokens']:,}", *seconds, *faster, *rest]
        lines.append([setting, f"{method}, {mode}", *cells])
    head = ["setting", "method", "tokens", "step s", "video s", *(f"× full, {mode}" for mode in MODES), "GB", "cold s"]
    return {
        "format": FORMAT,
        "runs": list(runs),
        "wrong": [entry for run in runs for entry in run.get("wrong", ())],
        "tables": [{"name": "steps", "header": head, "rows": lines}],
        "caption": " ".join(dict.fromkeys(caption(run) for run in runs)),
    }
