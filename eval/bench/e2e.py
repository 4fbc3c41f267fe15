"""Seconds per video: whole denoising steps of Wan models with VMonarch and with full attention: `vmonarch bench e2e`.

A case is a model and a video size; its ways are methods, each eager and compiled. All share the weights of one
transformer and take turns, step after step. A step is what diffusers' `WanPipeline` does: two forward calls, guidance,
one step of the scheduler. VAE and text encoder are timed once, because no method changes them. Seconds per video are
extrapolated from measured steps; where `refresh` or `dense_steps` make steps differ, from those of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from vmonarch.configs import InputError, read_document, suggest
from vmonarch.configs.methods import AttentionMethod, resolve_method
from vmonarch.eval.attention_flops import STEP_KINDS, step_kinds, transformers_by_step
from vmonarch.eval.bench.clock import Clock, allocated, release_memory, summary
from vmonarch.eval.bench.denoiser import (
    GUIDANCE,
    TEXT_TOKENS,
    Denoiser,
    compiled_graphs,
    settings_of_torch,
    share_weights,
    steps_to_measure,
)
from vmonarch.eval.bench.gate import MODEL_BOUNDS, failure
from vmonarch.eval.bench.machine import measured_dtype
from vmonarch.eval.bench.parts import PARTS, profiled_parts
from vmonarch.eval.bench.runner import Bench, Way, Ways, choose, run_bench
from vmonarch.eval.bench.tables import caption
from vmonarch.eval.render.table import shown_number
from vmonarch.eval.wan_models import WanModel, read_model
from vmonarch.files import check_output, write_json
from vmonarch.grid import LatentGrid
from vmonarch.pipelines import recipes
from vmonarch.pipelines.environment import memory_bytes

FORMAT = "vmonarch-e2e-1"
MODES = ("eager", "compiled")
FORMULAE = {
    "step": "two forward calls (prompt and negative prompt, batch 1), guidance, one step of UniPC; where steps differ,"
    " their mean, Σ number · median / steps, and so for forward; without guidance a step is one forward call",
    "video": "steps · median step + VAE decode + 2 · text encoder: extrapolated from the measured steps",
    "error": "‖x − x₀‖ / ‖x₀‖ of one forward call, x₀ by stock diffusers, eager, in the same dtype",
}


@dataclass(frozen=True)
class Setting:
    """A model, of `configs/models/` or whatever `read_model` takes, and a video size."""

    label: str
    model: str
    frames: int
    height: int
    width: int

    def latents(self, model: WanModel) -> tuple[int, int, int]:
        """Latent [T, h, w] of the video.

        Raises:
            InputError: the model has none of this size.
        """
        return model.latents(self.frames, self.height, self.width, argument="settings")

    def grid(self, model: WanModel) -> LatentGrid:
        """The transformer's tokens."""
        return model.grid(self.latents(model))


# Table 1 of the VMonarch paper.
SETTINGS = (
    Setting("1.3b-61x448x832", "wan2.1-1.3b", 61, 448, 832),
    Setting("1.3b-141x448x832", "wan2.1-1.3b", 141, 448, 832),
    Setting("1.3b-61x720x1280", "wan2.1-1.3b", 61, 720, 1280),
    Setting("14b-93x704x1280", "wan2.1-14b", 93, 704, 1280),
    Setting("5b-93x704x1280", "wan2.2-5b", 93, 704, 1280),
)


def choose_settings(words: Sequence[str] | None, model: str | None, quick: bool = False) -> tuple[Setting, ...]:
    """The settings that are asked for: names of SETTINGS, or FRAMESxHEIGHTxWIDTH of `model`.

    Args:
        words: None for all settings (of `quick`, the first).
        model: measured in place of the settings' own models.

    Raises:
        InputError: an unknown name, a size without a model, the same twice, or a model without sizes.
    """
    known = {setting.label: setting for setting in SETTINGS}
    if words is None:
        if model is not None:
            raise InputError("settings", "must be given with --model, such as 61x448x832 or 1.3b-61x448x832")
        return SETTINGS[:1] if quick else SETTINGS
    chosen = []
    for word in words:
        numbers = word.split("x")
        if word in known:
            setting = known[word]
            size = (setting.frames, setting.height, setting.width)
        elif len(numbers) == 3 and all(number.isdecimal() for number in numbers) and model is not None:
            size = (int(numbers[0]), int(numbers[1]), int(numbers[2]))
        else:
            problem = (
                f"must be of {', '.join(known)}, or with --model frames x height x width such as 61x448x832; got"
                f" {word!r}{suggest(word, known)}"
            )
            raise InputError("settings", problem)
        own = Setting(f"{Path(model).name}-{'x'.join(map(str, size))}", model, *size) if model else setting
        chosen.append(own)
    choose("settings", [setting.label for setting in chosen])
    return tuple(chosen)


@dataclass(frozen=True)
class Options:
    """How videos are made.

    Args:
        modes: of MODES. Eager rows use diffusers' standard attention backend, compiled ones cuDNN's. Recipes that
            compile have compiled rows alone.
        steps: of a video.
        guidance: whether a step takes two forward calls; else it takes one, measured all the same in pairs.
        transformer_only: no VAE and no text encoder.
        compile_backend: of torch.compile; "eager" compiles nothing and only tries the benchmark.
    """

    modes: Sequence[str] = MODES
    steps: int = 50
    guidance: bool = True
    transformer_only: bool = False
    compile_backend: str = "inductor"


def build(method: AttentionMethod, mode: str, stock: torch.nn.Module, backend: str) -> Any:
    """A transformer with the weights of `stock` and the method, compiled if it is to be."""
    transformer = share_weights(stock)
    recipes.apply(transformer, method, compile_backend=backend)
    if not method.stack.compile:
        compiled, on_gpu = mode == "compiled", next(stock.parameters()).is_cuda
        transformer.set_attention_backend("_native_cudnn" if compiled and on_gpu else "native")
        if compiled:
            transformer.compile_repeated_blocks(fullgraph=True, dynamic=False, backend=backend)
    return transformer


def rows_of(methods: Sequence[AttentionMethod], modes: Sequence[str]) -> dict[str, tuple[AttentionMethod, str]]:
    """(method, mode) by the name of the way."""
    pairs = [(method, mode) for method in methods for mode in modes if mode == "compiled" or not method.stack.compile]
    return {f"{method.label} {mode}": (method, mode) for method, mode in pairs}


def ways(
    methods: Sequence[AttentionMethod], options: Options, setting: Setting, device: torch.device, dtype: torch.dtype
) -> Ways:
    """All methods in all modes on one transformer; a call of one is a turn: a step of every kind."""
    model, before, clock = read_model(setting.model), allocated(device), Clock(device)
    # All are there as in a pipeline; they are alike, so that the first one stands for all.
    stock, *others = (model.build_transformer(name, device, dtype) for name in model.transformers)
    generator = torch.Generator(device).manual_seed(setting.frames)
    randn = partial(torch.randn, generator=generator, device=device)
    noise = randn(1, model.transformer["in_channels"], *setting.latents(model))
    texts = [randn(1, TEXT_TOKENS, model.transformer["text_dim"]).to(dtype) for _ in range(2)]
    torch.compiler.reset()

    def make(transformer: torch.nn.Module) -> Denoiser:
        return Denoiser(transformer, model, noise, texts, options.steps, clock, *others)

    # Velocities of eager rows by (label, step).
    known: dict[tuple[str, int], torch.Tensor] = {}
    reference = cache(lambda: make(share_weights(stock)))

    @cache
    @torch.no_grad()
    def of_stock(step: int) -> torch.Tensor:
        reference().begin(step)
        return reference().forward()

    def way(method: AttentionMethod, mode: str) -> Way:
        graphs = compiled_graphs()
        denoiser = make(build(method, mode, stock, options.compile_backend))
        kinds = step_kinds(method, transformers_by_step(denoiser, options.steps))
        ranges = steps_to_measure(kinds)
        # The steps whose velocities are compared.
        compared = {"": ranges[0].start, "_approximate": ranges[-1][-1]} if len(set(kinds)) > 1 else {"": 0}
        exact = (method.attention or method).name == "full" and not method.stack.linears

        @torch.no_grad()
        def run() -> list[torch.Tensor]:
            velocities = [velocity for steps in ranges for velocity in denoiser.run(steps)]
            # The other rows need the memory of the residuals.
            denoiser.begin()
            return velocities

        def found(velocities: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
            if mode == "compiled" and compiled_graphs() == graphs:
                raise RuntimeError("torch.compile compiled nothing")
            if not all(bool(velocity.isfinite().all()) for velocity in velocities):
                raise RuntimeError("the output is not finite")
            of_steps = dict(zip((step for steps in ranges for step in steps), velocities, strict=True))
            if mode == "eager":
                known.update({(method.label, step): of_steps[step] for step in compared.values()})
            return {
                f"to_{other}{name}": of_steps[step].movedim(1, -1)
                for name, step in compared.items()
                for other in ("stock", "eager")
            }

        def expected() -> dict[str, torch.Tensor]:
            others = {f"to_stock{name}": of_stock(step) for name, step in compared.items()}
            for name, step in compared.items():
                if mode == "compiled" and (method.label, step) in known:
                    others[f"to_eager{name}"] = known[method.label, step]
            return {name: other.movedim(1, -1).float() for name, other in others.items()}

        def more(clock: Clock, row: dict[str, Any]) -> None:
            row["options"] = method.to_dict()
            times = denoiser.step_times(row["rounds"] * sum(map(len, ranges)))
            row.update(step_seconds(times, kinds, options.guidance))
            # The last step is taken apart, an approximate one where steps differ; those of other kinds come before it.
            # Kernels of eager blocks are launched without an operator that a profile could name.
            if mode == "eager":
                return
            with torch.no_grad():
                denoiser.run(ranges[-1][:-1])
                row.update(profiled_parts(denoiser.forward, device, denoiser.tokens, model.transformer))
                denoiser.begin()

        names = [f"to_eager{name}" for name in compared] + (["to_stock"] if exact else [])
        return Way(run, found, expected, dict.fromkeys(names, MODEL_BOUNDS[dtype]), before=before, more=more)

    return {name: partial(way, *of) for name, of in rows_of(methods, options.modes).items()}


def step_seconds(
    times: Sequence[tuple[int, float, list[float]]], kinds: Sequence[str], guidance: bool
) -> dict[str, Any]:
    """{"forward_s", "step_s"} of a whole video's mean step, and {"kinds"} where there are several.

    Args:
        times: of `Denoiser.step_times`. kinds: of all steps of a video.
    """
    by_kind: dict[str, dict[str, Any]] = {}
    for kind in sorted(set(kinds), key=STEP_KINDS.index):
        found = [(whole, forward) for step, whole, forward in times if kinds[step] == kind]
        forward_s = summary([seconds for _, forward in found for seconds in forward])
        step_s = summary([whole for whole, _ in found]) if guidance else forward_s
        by_kind[kind] = {"steps": list(kinds).count(kind), "forward_s": forward_s, "step_s": step_s}
    mean = {
        name: {
            key: sum(of["steps"] * of[name][key] for of in by_kind.values()) / len(kinds)
            for key in ("median", "min", "p20", "p80")
        }
        for name in ("forward_s", "step_s")
    }
    return mean | ({"kinds": by_kind} if len(by_kind) > 1 else {})


def _seconds_of(make: Callable[[], Any], call: Callable[[Any], Any], clock: Clock) -> dict[str, Any]:
    """Seconds of the second call of a model that is built for it, or why there are none."""
    try:
        with torch.no_grad():
            model = make()
            call(model)
            clock.wait()
            return {"status": "ok", "seconds": clock.time(lambda: call(model)) / 1e3}
    except Exception as error:
        return failure(error)


def describe(options: Options, texts: dict[str, Any], setting: Setting, clock: Clock) -> dict[str, Any]:
    """What the JSON says of a setting; the VAE decodes one video, the text encoder (`texts`, by model) one prompt."""
    model, device = read_model(setting.model), clock.device
    dtype, latents, grid = measured_dtype(device), setting.latents(model), setting.grid(model)
    vae: dict[str, Any] = {"status": "left out", "problem": "--transformer-only"}
    if options.transformer_only:
        texts[setting.model] = vae
    else:
        size = (1, model.transformer["out_channels"], *latents)
        noise = torch.randn(size, device=device)
        vae = _seconds_of(lambda: model.build_vae(device), lambda it: it.decode(noise, return_dict=False), clock)
        release_memory(device)
    if setting.model not in texts:
        tokens = torch.randint(0, model.text_encoder["vocab_size"], (1, TEXT_TOKENS), device=device)
        encode = lambda encoder: encoder(tokens, torch.ones_like(tokens))
        texts[setting.model] = _seconds_of(lambda: model.build_text_encoder(device, dtype), encode, clock)
        release_memory(device)
    return {
        **asdict(setting),
        "setting": setting.label,
        "model": model.name,
        "weights": "random" if model.folder is None else "the model's own",
        "size": [setting.height, setting.width],
        "grid": list(grid),
        "tokens": grid.tokens,
        "transformers": len(model.transformers),
        "text_encoder": texts[setting.model],
        "vae": vae,
    }


def finish(options: Options, case: dict[str, Any]) -> None:
    """Add method, mode and seconds per video to the rows: extrapolated, and none without VAE and text encoder."""
    vae, text = case.get("vae", {}), case.get("text_encoder", {})
    for row in case["rows"]:
        row["method"], _, row["mode"] = row["method"].rpartition(" ")
        row["errors"] = {name: error["relative"] for name, error in row.get("errors", {}).items()}
        if "step_s" not in row:
            continue
        row["denoise_s"] = options.steps * row["step_s"]["median"]
        complete = vae["status"] == text["status"] == "ok"
        around = vae["seconds"] + (1 + options.guidance) * text["seconds"] if complete else 0.0
        row["video_s"] = row["denoise_s"] + around if complete else None


def _check(method: AttentionMethod, steps: int) -> None:
    """Raise InputError if a method cannot compute a video, or its steps cannot be told beforehand."""
    if not method.stack.predictable:
        problem = f"{method.label!r} has a cache whose steps depend on the data; supported: taylorseer"
        raise InputError("methods", problem)
    try:
        recipes.cache_config(method.stack, steps)
        step_kinds(method, ["transformer"] * steps)
    except ValueError as error:
        raise InputError("methods", f"{method.label!r} cannot compute this video: {error}") from error


def bench(
    settings: Sequence[str] | None = None,
    model: str | None = None,
    methods: Sequence[str] = ("full", "vmonarch"),
    quick: bool = False,
    **options: Any,
) -> Bench:
    """The benchmark of these settings.

    Args:
        settings, model, quick: see `choose_settings`. options: of `Options`.
        methods: of `configs/attention/` or `configs/recipes/`.

    Raises:
        InputError: a model, a size, a method or an option cannot be used.
    """
    chosen, of = choose_settings(settings, model, quick), Options(**options)
    resolved = [resolve_method(name, argument="methods", recipes=True) for name in methods]
    choose("methods", [method.label for method in resolved])
    choose("modes", of.modes, MODES)
    for method in resolved:
        _check(method, of.steps)
    for setting in chosen:
        wan = read_model(setting.model)
        setting.grid(wan)
        if not of.transformer_only:
            wan.check_parts(argument="model")
    return Bench(
        name="e2e",
        methods=tuple(rows_of(resolved, of.modes)),
        ours=(),
        cases=chosen,
        ways=partial(ways, resolved, of),
        formulae=FORMULAE,
        settings={
            "batch": 1,
            "guidance": GUIDANCE if of.guidance else None,
            "steps": of.steps,
            "transformer_only": of.transformer_only,
            "text_tokens": TEXT_TOKENS,
            "eager": "diffusers' standard attention backend",
            "compiled": "compile_repeated_blocks(fullgraph=True, dynamic=False,"
            f" backend={of.compile_backend!r}), cuDNN's attention",
            "timing": "device events around whole steps and their forward calls, rows in turns",
            "memory": "peak_bytes: the most that is allocated during steps, weights of all transformers and residuals"
            " counted, VAE and text encoder not",
            "parts": "kernels of one profiled call by the shapes of their products, of six square ones two for"
            " cross-attention; what is fused is rest; gaps between kernels are not counted",
            "bounds": {"model": list(MODEL_BOUNDS.values())},
        },
        describe=partial(describe, of, {}),
        finish=partial(finish, of),
        document=lambda run, base: document([run]),
        way_seconds=1e6,
        flushes=1,
    )


def measure(bench: Bench, *, device: str, **options: Any) -> dict[str, Any]:
    """`run_bench`, with room for the code of all methods.

    Raises:
        InputError: an argument cannot be used; or weights in float32 take more than half of the CPU's memory, the rest
            of which is for what is computed.
    """
    for setting in bench.cases if device == "cpu" else ():
        needed = 4 * read_model(setting.model).parameters(transformer_only=bench.settings["transformer_only"])
        if 2 * needed > memory_bytes():
            problem = (
                f"cpu has not the memory for {setting.label}: the weights of its model take {needed / 2**30:.0f} GiB"
                f" in float32, more than half of {memory_bytes() / 2**30:.0f} GiB; give a smaller --model"
            )
            raise InputError("device", problem)
    with settings_of_torch():
        return run_bench(bench, device=device, **options)


def merge_files(parts: Sequence[Path], output: Path) -> None:
    """Put the JSON of several runs together.

    Raises:
        InputError: a file is none of this benchmark, or the output cannot be written.
    """
    documents = [read_document("parts", path, FORMAT, "JSON of `vmonarch bench e2e`") for path in parts]
    check_output(output)
    write_json(output, document([run for part in documents for run in part["runs"]]))


def document(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """{"format", "runs", "wrong", "tables", "caption"} of several runs.

    Of rows that were measured more than once the last that has times; ratios are of one run. The tables: seconds per
    video, steps, steps of each kind, and where a forward call spends its time.
    """
    newest: dict[tuple[str, str, str], tuple[dict[str, Any], dict[str, Any]]] = {}
    for case in (case for run in runs for case in run["cases"]):
        for row in case["rows"]:
            key = case.get("setting", case.get("case", "")), row["method"], row["mode"]
            if row["status"] == "ok" or key not in newest:
                newest[key] = row, case
    videos, steps, kinds, parts = ([] for _ in range(4))
    for (setting, method, mode), (row, case) in newest.items():
        name = [setting, f"{method}, {mode}"]
        if "step_s" not in row:
            steps.append([*name, row["status"], *["–"] * 5])
            continue
        stock = {r["mode"]: r for r in case["rows"] if r["method"] == "full" and "step_s" in r and r is not row}
        step, error = row["step_s"]["median"], row["errors"].get("to_stock")
        faster = [shown_number(stock[m]["step_s"]["median"] / step if m in stock else None, 2, "{}×") for m in MODES]
        gigabytes = shown_number(row.get("peak_bytes"), factor=1e-9)
        errors = "–" if error is None else f"{error:.1e}"
        steps.append([*name, f"{row['forward_s']['median']:.3f}", f"{step:.3f}", *faster, gigabytes, errors])
        if row.get("video_s"):
            base = stock.get("compiled", {}).get("video_s")
            ratio = shown_number(base / row["video_s"] if base else None, 2, "{}×")
            videos.append([*name, f"{case['tokens']:,}", f"{row['video_s']:.1f}", ratio, gigabytes])
        for kind, of in row.get("kinds", {}).items():
            kinds.append([*name, kind, str(of["steps"]), f"{of['step_s']['median']:.3f}"])
        if "parts" in row:
            parts.append([*name, *(f"{100 * row['parts'][part] / row['parts_of_ms']:.0f} %" for part in PARTS)])
    tables = [
        {"name": name, "header": ["setting", "method", *header], "rows": rows}
        for name, header, rows in (
            ("videos", ["tokens", "video s", "× stock compiled", "GB"], videos),
            ("steps", ["forward s", "step s", "× stock eager", "× stock compiled", "GB", "error"], steps),
            ("kinds", ["kind of steps", "number", "step s"], kinds),
            ("parts", PARTS, parts),
        )
        if rows
    ]
    made = " ".join(dict.fromkeys(caption(run) for run in runs))
    wrong = [entry for run in runs for entry in run.get("wrong", ())]
    return {"format": FORMAT, "runs": list(runs), "wrong": wrong, "tables": tables, "caption": made}
