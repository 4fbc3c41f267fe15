"""Seconds per video: whole denoising steps of Wan models with VMonarch and with full attention: `vmonarch bench e2e`.

A setting is a model and a video size; its rows are methods, each eager and compiled. All rows share the weights of one
transformer and take turns, step after step. A step is what diffusers' `WanPipeline` does: two forward calls, guidance,
one step of the scheduler. VAE and text encoder are timed once, because no method changes them. Seconds per video are
extrapolated from measured steps; where `refresh` or `dense_steps` make steps differ, from those of each kind.

Runs in pieces are put together by

    vmonarch bench e2e PART.json … --output docs/benchmarks/e2e.json

Legend: S tokens, C channels, T latent frames, h and w latent pixels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vmonarch.configs import InputError, read_document, suggest
from vmonarch.configs.methods import AttentionMethod
from vmonarch.eval.attention_flops import STEP_KINDS, step_kinds, transformers_by_step
from vmonarch.eval.bench.clock import Clock, measure, release_memory, summary
from vmonarch.eval.bench.denoiser import (
    GUIDANCE,
    TEXT_TOKENS,
    Denoiser,
    compiled_graphs,
    settings_of_torch,
    share_weights,
    steps_to_measure,
)
from vmonarch.eval.bench.gate import failure, relative_errors
from vmonarch.eval.bench.kernels import METHODS, Selection, Shape, compile_ahead
from vmonarch.eval.bench.machine import check_device, measured_dtype, provenance
from vmonarch.eval.bench.parts import profiled_parts, timed_parts, with_rest
from vmonarch.eval.bench.runner import choose, distinct
from vmonarch.eval.wan_models import WanModel, read_model
from vmonarch.files import check_output, write_json
from vmonarch.grid import LatentGrid
from vmonarch.pipelines import recipes
from vmonarch.pipelines.environment import memory_bytes

FORMAT = "vmonarch-e2e-1"
MODES = ("eager", "compiled")
# Of the budget, for compiling Triton's kernels beforehand.
COMPILE_SHARE = 0.25
# Relative errors (Frobenius norm) that one forward call may have where both compute the same: exact attention against
# stock eager, and a method compiled against the same one eager. Of a whole transformer, so above those of one kernel.
BOUNDS = {torch.bfloat16: 5e-2, torch.float32: 1e-3}
FORMULAE = {
    "step": "two forward calls (prompt and negative prompt, batch 1), guidance, one step of UniPC; where steps differ,"
    " their mean, Σ number · median / steps, and so for forward; without guidance a step is one forward call",
    "video": "steps · median step + VAE decode + 2 · text encoder: extrapolated from the measured steps",
    "ratio": "median step of full attention / median step, in the same run",
    "error": "‖x − x₀‖ / ‖x₀‖ of one forward call, x₀ by stock diffusers, eager, in the same dtype",
}


@dataclass(frozen=True)
class Setting:
    """A model and a video size.

    Args:
        model: of `configs/models/`, or whatever `read_model` takes.
        paper: seconds per video of full attention and of VMonarch in the paper's Table 1, on its hardware.
        aims: how many times as fast as stock eager and as stock compiled the compiled VMonarch is to be.
    """

    name: str
    model: str
    frames: int
    height: int
    width: int
    paper: tuple[float, float] | None = None
    aims: tuple[float, float] | None = None


# Table 1 of the VMonarch paper.
SETTINGS = (
    Setting("1.3b-61x448x832", "wan2.1-1.3b", 61, 448, 832, (63.4, 47.7), (2.2, 1.8)),
    Setting("1.3b-141x448x832", "wan2.1-1.3b", 141, 448, 832, (214.2, 102.7), (4.0, 3.2)),
    Setting("1.3b-61x720x1280", "wan2.1-1.3b", 61, 720, 1280, (246.8, 136.8), (3.0, 2.6)),
    Setting("14b-93x704x1280", "wan2.1-14b", 93, 704, 1280, (2222.2, 969.2), (2.8, 2.6)),
    Setting("5b-93x704x1280", "wan2.2-5b", 93, 704, 1280, (123.7, 92.0), (1.9, 1.5)),
)
QUICK_SETTINGS = SETTINGS[:1]


def choose_settings(words: Sequence[str] | None, model: str | None, quick: bool = False) -> tuple[Setting, ...]:
    """The settings that are asked for: names of SETTINGS, or FRAMESxHEIGHTxWIDTH of `model`.

    Args:
        words: None for all settings (of `quick`, the first).
        model: measured in place of the settings' own models.

    Raises:
        InputError: an unknown name, a size without a model, the same twice, or a model without sizes.
    """
    if words is None:
        if model is not None:
            raise InputError("settings", "must be given with --model, such as 61x448x832 or 1.3b-61x448x832")
        return QUICK_SETTINGS if quick else SETTINGS
    known = {setting.name: setting for setting in SETTINGS}
    chosen = []
    for word in words:
        numbers = word.split("x")
        if word in known:
            setting = known[word]
            size = (setting.frames, setting.height, setting.width)
        elif len(numbers) == 3 and all(number.isdecimal() for number in numbers) and model is not None:
            size = (int(numbers[0]), int(numbers[1]), int(numbers[2]))
        else:
            listed = ", ".join(known)
            raise InputError(
                "settings",
                f"must be of {listed}, or with --model frames x height x width such as 61x448x832; got"
                f" {word!r}{suggest(word, known)}",
            )
        if model is None:
            chosen.append(setting)
        else:
            chosen.append(Setting(f"{Path(model).name}-{'x'.join(map(str, size))}", model, *size))
    distinct("settings", [setting.name for setting in chosen])
    return tuple(chosen)


@dataclass(frozen=True)
class E2EConfig:
    """What `run_bench` measures, and where the result goes.

    Args:
        methods: of `configs/attention/` or `configs/recipes/`.
        modes: of MODES. Eager rows use diffusers' standard attention backend, compiled ones cuDNN's. Recipes that
            compile have compiled rows alone.
        rounds: steps of every row, at most.
        steps: of a video.
        guidance: whether a step takes two forward calls; else it takes one, measured all the same in pairs.
        budget: seconds; what does not fit is left out and named.
        say: told what is done.
        transformer_only: no VAE and no text encoder.
        compile_backend: of torch.compile; "eager" compiles nothing and only tries the benchmark.
        device: "cuda", "cuda:N", or "cpu" with TRITON_INTERPRET=1 (a test of the benchmark itself).
    """

    output: Path
    settings: tuple[Setting, ...]
    methods: tuple[AttentionMethod, ...]
    modes: tuple[str, ...] = MODES
    rounds: int = 5
    steps: int = 50
    guidance: bool = True
    budget: float = 540.0
    transformer_only: bool = False
    compile_backend: str = "inductor"
    device: str = "cuda"
    command: str = ""
    say: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        for name in ("rounds", "steps"):
            if getattr(self, name) < 1:
                raise InputError(name, f"must be at least 1, got {getattr(self, name)}")
        distinct("methods", [method.label for method in self.methods])
        choose("modes", self.modes, {mode: mode for mode in MODES})
        for method in self.methods:
            try:
                recipes.cache_config(method.stack, self.steps)
                step_kinds(method, ["transformer"] * self.steps)
            except ValueError as error:
                raise InputError("methods", f"{method.label!r} cannot compute this video: {error}") from error
            if not method.stack.predictable:
                raise InputError(
                    "methods", f"{method.label!r} has a cache whose steps depend on the data; supported: taylorseer"
                )


def measure_component(build: Callable[[], torch.nn.Module], call: Callable[[Any], Any], clock: Clock) -> dict[str, Any]:
    """Seconds of the second call of a model that is built for it, and its peak memory; or why there are none."""
    device = clock.device
    try:
        release_memory(device)
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        model = build()
        with torch.no_grad():
            call(model)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            clock.wait()
            row: dict[str, Any] = {"status": "ok", "seconds": clock.time(lambda: call(model)) / 1e3}
        if device.type == "cuda":
            row["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
        return row
    except Exception as error:
        return failure(error)


def measure_vae(model: WanModel, latents: tuple[int, int, int], clock: Clock) -> dict[str, Any]:
    """Decoding of one video from random latents, in float32 as all of this package decodes."""
    size = (1, model.transformer["out_channels"], *latents)
    return measure_component(
        lambda: model.build_vae(clock.device),
        lambda vae: vae.decode(torch.randn(size, device=clock.device), return_dict=False)[0],
        clock,
    )


def measure_text_encoder(model: WanModel, clock: Clock) -> dict[str, Any]:
    """Encoding of one prompt of 512 random tokens."""
    device = clock.device
    tokens = torch.randint(0, model.text_encoder["vocab_size"], (1, TEXT_TOKENS), device=device)
    return measure_component(
        lambda: model.build_text_encoder(device, measured_dtype(device)),
        lambda encoder: encoder(tokens, torch.ones_like(tokens)).last_hidden_state,
        clock,
    )


def video_seconds(
    step_s: float, steps: int, vae: dict[str, Any], text: dict[str, Any], texts: int = 2
) -> dict[str, float | None]:
    """{"denoise_s", "video_s"}: extrapolated; no seconds per video without those of VAE and text encoder.

    Args:
        texts: prompts to encode.
    """
    denoise = steps * step_s
    complete = vae["status"] == text["status"] == "ok"
    return {"denoise_s": denoise, "video_s": denoise + vae["seconds"] + texts * text["seconds"] if complete else None}


class Row:
    """One method in one mode on one setting: prepared once, then measured in turns with the others.

    Args:
        base: bytes allocated before the transformer was built.

    Attributes:
        kinds: of all steps of a video.
        ranges: the steps to measure, where they differ.
        turn_s: what a turn takes, estimated.
    """

    def __init__(self, method: AttentionMethod, mode: str, bench: E2EConfig, base: int) -> None:
        self.method, self.mode, self.bench, self.base = method, mode, bench, base
        self.denoiser: Denoiser | None = None
        self.kinds: list[str] = []
        self.ranges: list[range] = []
        self.turn_s = 0.0
        self.record: dict[str, Any] = {
            "method": method.label,
            "kind": method.processor_name,
            "mode": mode,
            "options": method.to_dict(),
        }

    @property
    def ok(self) -> bool:
        return self.record.get("status") == "ok"

    def build(self, stock: torch.nn.Module) -> torch.nn.Module:
        """The transformer with the method, compiled if it is to be."""
        transformer: Any = share_weights(stock)
        recipes.apply(transformer, self.method, compile_backend=self.bench.compile_backend)
        if self.method.stack.compile:
            return transformer
        compiled = self.mode == "compiled"
        on_gpu = next(stock.parameters()).is_cuda
        transformer.set_attention_backend("_native_cudnn" if compiled and on_gpu else "native")
        if compiled:
            transformer.compile_repeated_blocks(fullgraph=True, dynamic=False, backend=self.bench.compile_backend)
        return transformer

    def prepare(self, make: Callable[..., Denoiser], stock: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
        """Build it, and let it make two forward calls: the first is checked, the second is taken apart.

        Where steps differ, what is taken apart is an approximate one, which is checked too; steps of the other kinds
        are done before it.

        Args:
            make: the denoiser of a transformer.
            expected: outputs of rows before; this one's are added if it is eager.
        """
        denoiser = make(self.build(stock))
        self.kinds = step_kinds(self.method, transformers_by_step(denoiser, self.bench.steps))
        self.ranges = steps_to_measure(self.kinds)
        clock, device = denoiser.clock, denoiser.clock.device
        started = time.monotonic()
        out = denoiser.forward()
        clock.wait()
        self.record["first_call_s"] = round(time.monotonic() - started, 2)
        if self.mode == "compiled" and compiled_graphs() == 0:
            raise RuntimeError("torch.compile compiled nothing")
        self._check(out, expected)
        if not self.ok:
            return
        del out
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for steps in (*self.ranges[:-1], self.ranges[-1][:-1]):
            denoiser.run(steps)
        outs: list[torch.Tensor] = []
        forward = lambda text: outs.append(denoiser.forward(text))
        apart, differ = 0, len(set(self.kinds)) > 1
        if differ and (self.mode == "eager" or len(self.ranges[-1]) == 1):
            # The first call of its kind compiles something. Not for a profile with residuals, for which a step would
            # need a third call: all that is compiled there is a kernel, which profiles do not count.
            forward(0)
            apart = 1
        if self.mode == "eager":
            with timed_parts(denoiser.transformer, clock) as milliseconds:
                total = clock.time(lambda: forward(apart))
                parts = milliseconds()
            self.record.update(parts=with_rest(parts, total), parts_of_ms=total, single_forward_s=total / 1e3)
        else:
            try:
                config = denoiser.model.transformer
                parts, names, rest = profiled_parts(lambda: forward(apart), device, denoiser.tokens, config)
                self.record.update(parts=parts, parts_of_ms=sum(parts.values()), attention_operators=names)
                self.record["rest_ms"] = rest
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                # Without them the times of the whole still stand.
                self.record["parts_problem"] = failure(error)["problem"]
            # Once more, because profiling takes its time.
            self.record["single_forward_s"] = clock.time(lambda: denoiser.forward(1)) / 1e3
        if device.type == "cuda":
            self.record["peak_bytes"] = torch.cuda.max_memory_allocated(device) - self.base
        if differ and outs:
            self._check(outs[0], expected, "_approximate")
        self.turn_s = 2 * sum((times.forward[1] for times in denoiser.step_times()), self.record["single_forward_s"])
        denoiser.marks.clear()
        denoiser.begin()
        self.denoiser = denoiser

    def _check(self, out: torch.Tensor, expected: dict[str, torch.Tensor], of: str = "") -> None:
        """Compare an output with those of other rows, and add it to them if it is eager.

        Args:
            expected: by the label of the method, followed by `of`.
            of: nothing for the first forward call; for others "_" and what they are.
        """
        bound = BOUNDS[out.dtype]
        exact = self.record["kind"] == "full" and not self.method.stack.linears
        errors = self.record.setdefault("errors", {})
        problems = []
        if not bool(out.isfinite().all()):
            problems.append("the output is not finite")
        for name, other, checked in (
            ("to_stock", expected.get("full" + of), exact),
            ("to_eager", expected.get(self.method.label + of) if self.mode == "compiled" else None, True),
        ):
            if other is None:
                continue
            error = relative_errors(out.movedim(1, -1), other.movedim(1, -1).float())["relative"]
            errors[name + of] = error
            # Written so that NaN is a problem too.
            if checked and not error <= bound:
                problems.append(f"{(name + of).replace('_', ' ')} it is off by {error:.2g} (at most {bound:g})")
        if self.mode == "eager":
            expected.setdefault(self.method.label + of, out)
        self.record["status"] = "wrong" if problems else "ok"
        if problems:
            self.record["problem"] = "; ".join(problems)

    def turn(self) -> None:
        """A step of every kind, if none failed before."""
        assert self.denoiser is not None
        if not self.ok:
            return
        try:
            if len(set(self.kinds)) == 1:
                self.denoiser.step()
                return
            for steps in self.ranges:
                self.denoiser.run(steps)
        except Exception as error:
            self.record.update(failure(error))
        # The other rows need the memory of the residuals.
        self.denoiser.begin()

    def finish(self, rounds: int, vae: dict[str, Any], text: dict[str, Any]) -> None:
        """Add what follows from the measured steps."""
        assert self.denoiser is not None
        times = self.denoiser.step_times()
        kinds: dict[str, dict[str, Any]] = {}
        for kind in sorted(set(self.kinds), key=STEP_KINDS.index):
            found = [step for step in times if self.kinds[step.step] == kind]
            kinds[kind] = {
                "steps": self.kinds.count(kind),
                "forward_s": summary([seconds for step in found for seconds in step.forward]),
            }
            if self.bench.guidance:
                kinds[kind]["step_s"] = summary([step.whole for step in found])
            else:
                kinds[kind]["step_s"] = kinds[kind]["forward_s"]
        for name in ("forward_s", "step_s"):
            self.record[name] = {
                key: sum(kind["steps"] * kind[name][key] for kind in kinds.values()) / self.bench.steps
                for key in ("median", "min", "p20", "p80")
            }
        if len(kinds) > 1:
            self.record["kinds"] = kinds
        self.record["rounds"] = rounds
        texts = 2 if self.bench.guidance else 1
        self.record.update(video_seconds(self.record["step_s"]["median"], self.bench.steps, vae, text, texts))


def _skipped(what: str) -> dict[str, Any]:
    return {"status": "left out", "problem": what}


def run_setting(
    setting: Setting,
    model: WanModel,
    bench: E2EConfig,
    clock: Clock,
    deadline: float,
    text: dict[str, Any],
) -> dict[str, Any]:
    """Measure all rows of one setting.

    Args:
        text: of `measure_text_encoder`.
        deadline: `time.monotonic()` after which nothing is begun.
    """
    say = bench.say
    device, dtype = clock.device, measured_dtype(clock.device)
    latents = model.latents(setting.frames, setting.height, setting.width, argument="settings")
    grid = model.grid(latents)
    over = f"the budget of {bench.budget:g} s was used up"
    case: dict[str, Any] = {
        "setting": setting.name,
        "model": model.name,
        "weights": "random" if model.folder is None else "the model's own",
        "frames": setting.frames,
        "size": [setting.height, setting.width],
        "grid": list(grid),
        "tokens": grid.tokens,
        "paper_s": setting.paper,
        "aims": setting.aims,
        "text_encoder": text,
        "vae": _skipped("--transformer-only") if bench.transformer_only else measure_vae(model, latents, clock),
    }
    say(f"{setting.name} VAE: {case['vae']['status']}")
    release_memory(device)
    base = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    rows = [
        Row(method, mode, bench, base)
        for method in bench.methods
        for mode in bench.modes
        if mode == "compiled" or not method.stack.compile
    ]
    case["rows"] = [row.record for row in rows]
    try:
        # All are there as in a pipeline; they are alike, so that the first one stands for all.
        transformers = [model.build_transformer(name, device, dtype) for name in model.transformers]
    except Exception as error:
        for row in rows:
            row.record.update(failure(error))
        return case
    stock = transformers[0]
    case["transformers"] = len(transformers)
    case["parameters"] = sum(parameter.numel() for parameter in stock.parameters())
    generator = torch.Generator(device).manual_seed(setting.frames)
    noise = torch.randn(1, model.transformer["in_channels"], *latents, generator=generator, device=device)
    size = (1, TEXT_TOKENS, model.transformer["text_dim"])
    texts = [torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(2)]

    def make(transformer: torch.nn.Module) -> Denoiser:
        second = transformers[1] if len(transformers) > 1 else None
        return Denoiser(transformer, model, noise, texts, bench.steps, clock, second)

    expected: dict[str, torch.Tensor] = {}
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad(), settings_of_torch():
        if (rows[0].method.label, rows[0].mode) != ("full", "eager"):
            # What the others' errors are measured against.
            try:
                expected["full"] = make(share_weights(stock)).forward()
            except Exception as error:
                case["reference_problem"] = failure(error)["problem"]
        for row in rows:
            if time.monotonic() > deadline:
                row.record.update(_skipped(over))
                continue
            try:
                row.prepare(make, stock, expected)
            except Exception as error:
                row.record.update(failure(error))
            say(f"{setting.name} {row.method.label} {row.mode}: first call {row.record.get('first_call_s', '–')} s")
            release_memory(device)
        expected.clear()
        measure_rows(rows, case, bench, clock, deadline)
    for row in rows:
        row.denoiser = None
    torch.compiler.reset()
    return case


def measure_rows(rows: Sequence[Row], case: dict[str, Any], bench: E2EConfig, clock: Clock, deadline: float) -> None:
    """Measure the rows that are ok in turns, in as many rounds as the time is enough for; at best after a warm-up."""
    ready = [row for row in rows if row.ok]
    round_s = sum(row.turn_s for row in ready)
    fitting = int(max(deadline - time.monotonic(), 0) / max(round_s, 1e-6))
    rounds = min(bench.rounds, fitting)
    case["warm_up"] = fitting > rounds
    if ready and rounds < 1:
        for row in ready:
            row.record.update(_skipped(f"a round of {round_s:.0f} s did not fit the budget of {bench.budget:g} s"))
        return
    if case["warm_up"]:
        for row in ready:
            row.turn()
        clock.wait()
        for row in ready:
            assert row.denoiser is not None
            row.denoiser.marks.clear()
    case["rounds_left_out"] = bench.rounds - rounds
    names = {str(i): row for i, row in enumerate(ready)}
    runs: dict[str, Callable[[], Any]] = {name: row.turn for name, row in names.items()}
    times, _ = measure(runs, dict.fromkeys(runs, rounds), clock, deadline)
    for name, row in names.items():
        if row.ok:
            row.finish(len(times[name]), case["vae"], case["text_encoder"])


def _check_memory(setting: Setting, model: WanModel, transformer_only: bool) -> None:
    """Check that weights in float32 take no more than half of the main memory; the rest is for what is computed.

    Raises:
        InputError: they take more.
    """
    needed, have = 4 * model.parameters(transformer_only=transformer_only), memory_bytes()
    if 2 * needed > have:
        raise InputError(
            "device",
            f"cpu has not the memory for {setting.name}: the weights of its model take {needed / 2**30:.0f} GiB in"
            f" float32, more than half of {have / 2**30:.0f} GiB; give a smaller --model",
        )


def run_bench(bench: E2EConfig) -> dict[str, Any]:
    """Measure all settings and write the JSON after each.

    Returns:
        what was written: {"format", "runs": [{"date", "hardware", "versions", "command", "settings", "left_out",
        "cases": [{"setting", "grid", "vae", "text_encoder", "rows": [{"method", "mode", "status", "step_s", …}]}]}]}.

    Raises:
        InputError: a model, a size, the device or the output cannot be used.
    """
    started = time.monotonic()
    deadline = started + bench.budget
    models = [(setting, read_model(setting.model)) for setting in bench.settings]
    for setting, model in models:
        model.latents(setting.frames, setting.height, setting.width, argument="settings")
        if not bench.transformer_only:
            model.check_parts(argument="model")
    device = check_device(bench.device)
    check_output(bench.output)
    real = device.type == "cuda"
    if not real:
        for setting, model in models:
            _check_memory(setting, model, bench.transformer_only)

    say = bench.say
    if real:
        torch.cuda.set_device(device)
        missing = _compile_ahead(bench, models, device)
        say(f"kernels compiled; {missing} left to compile when they are met")
    run: dict[str, Any] = {
        **provenance(device, bench.command),
        "settings": {
            "dtype": str(measured_dtype(device)).removeprefix("torch."),
            "batch": 1,
            "guidance": GUIDANCE if bench.guidance else None,
            "steps": bench.steps,
            "text_tokens": TEXT_TOKENS,
            "rounds": bench.rounds,
            "budget_s": bench.budget,
            "eager": "diffusers' standard attention backend",
            "compiled": f"compile_repeated_blocks(fullgraph=True, dynamic=False, backend={bench.compile_backend!r}),"
            " cuDNN's attention",
            "timing": "device events around whole steps and their forward calls, rows in turns",
            "memory": "peak_bytes: the most that is allocated during a forward call, weights of all transformers"
            " and residuals of both guidance branches counted, VAE and text encoder not",
            "parts": "eager: device events around modules, gaps between kernels counted; compiled: kernels by the"
            " shapes of their products, of six square ones two for cross-attention; what is fused is rest, its longest"
            " kernels are rest_ms; of one profiled call, gaps not counted",
            "bound": BOUNDS[measured_dtype(device)],
        },
        "formulae": FORMULAE,
        "cases": [],
        "left_out": [],
    }
    results = {"format": FORMAT, "runs": [run]}
    clock = Clock(device)
    texts: dict[str, dict[str, Any]] = {}
    for setting, model in models:
        if time.monotonic() > deadline:
            run["left_out"].append({"case": setting.name, "why": f"the budget of {bench.budget:g} s was used up"})
            continue
        if setting.model not in texts:
            skip = bench.transformer_only
            texts[setting.model] = _skipped("--transformer-only") if skip else measure_text_encoder(model, clock)
            say(f"{setting.name} text encoder: {texts[setting.model]['status']}")
        case = run_setting(setting, model, bench, clock, deadline, texts[setting.model])
        run["cases"].append(case)
        release_memory(device)
        for row in case["rows"]:
            if row["status"] == "left out":
                name = f"{setting.name} {row['method']} {row['mode']}"
                run["left_out"].append({"case": name, "why": row["problem"]})
            told = f"{row['step_s']['median']:.3f} s a step" if "step_s" in row else row["problem"]
            say(f"{setting.name} {row['method']} {row['mode']}: {row['status']}, {told}")
        write_json(bench.output, results)
    run["seconds"] = round(time.monotonic() - started, 1)
    write_json(bench.output, results)
    return results


def _compile_ahead(bench: E2EConfig, models: Sequence[tuple[Setting, WanModel]], device: torch.device) -> int:
    """Compile Triton's kernels of the methods that `vmonarch bench kernels` knows too; how many tasks were not done."""
    labels = {method.label for method in bench.methods}
    methods = tuple(method for method in METHODS if method.name in labels and method.kind == "vmonarch")
    shapes: dict[int, list[Shape]] = {}
    for setting, model in models:
        grid: LatentGrid = model.grid(model.latents(setting.frames, setting.height, setting.width, argument="settings"))
        shape = Shape(grid, model.transformer["num_attention_heads"])
        shapes.setdefault(model.transformer["attention_head_dim"], []).append(shape)
    missing = 0
    for head_dim, found in shapes.items():
        if methods:
            ahead = Selection(tuple(found), methods, (head_dim,), ("forward",))
            missing += compile_ahead(ahead, device, COMPILE_SHARE * bench.budget / len(shapes))
    return missing


def wrong_rows(results: dict[str, Any]) -> list[str]:
    """What makes a run fail: wrong results."""
    return [
        f"{case['setting']} {row['method']} {row['mode']}: {row['problem']}"
        for run in results["runs"]
        for case in run["cases"]
        for row in case["rows"]
        if row["status"] == "wrong"
    ]


def merge_files(parts: Sequence[Path], output: Path) -> None:
    """Put the JSON of several runs together.

    Raises:
        InputError: a file is none of this benchmark, or the output cannot be written.
    """
    documents = [read_document("parts", path, FORMAT, "JSON of `vmonarch bench e2e`") for path in parts]
    check_output(output)
    write_json(output, merge(documents))


def merge(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The runs of several files in one."""
    return {"format": FORMAT, "runs": [run for part in parts for run in part["runs"]]}
