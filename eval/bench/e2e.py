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

import contextlib
import copy
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import DiffusionPipeline, UniPCMultistepScheduler

from vmonarch.configs import InputError, read_document, suggest
from vmonarch.configs.methods import AttentionMethod
from vmonarch.eval.attention_flops import STEP_KINDS, step_kinds, transformers_by_step
from vmonarch.eval.bench.clock import Clock, measure, release_memory, summary
from vmonarch.eval.bench.gate import failure, relative_errors
from vmonarch.eval.bench.kernels import METHODS, Selection, Shape, compile_ahead
from vmonarch.eval.bench.machine import check_device, measured_dtype, provenance
from vmonarch.eval.render.table import markdown
from vmonarch.eval.wan_models import WanModel, read_model
from vmonarch.files import check_output, write_json
from vmonarch.grid import LatentGrid
from vmonarch.pipelines.environment import memory_bytes

FORMAT = "vmonarch-e2e-1"
MODES = ("eager", "compiled")
# Of the budget, for compiling Triton's kernels beforehand.
COMPILE_SHARE = 0.25
# A block of the model is one function to torch.compile; every method makes a version of it.
RECOMPILE_LIMIT = 64
TEXT_TOKENS = 512
GUIDANCE = 5.0
# Relative errors (Frobenius norm) that one forward call may have where both compute the same: exact attention against
# stock eager, and a method compiled against the same one eager. Of a whole transformer, so above those of one kernel.
BOUNDS = {torch.bfloat16: 5e-2, torch.float32: 1e-3}
# Of the rest, so many kernels are named.
REST_KERNELS = 12
# Profiled kernels that add up to more than so many forward calls are said to: their durations are not all work then.
PROFILE_BOUND = 1.1
# What ratios of `video_table` are to; its methods and their titles there.
STOCK = ("full", "compiled")
VIDEO_METHODS = {
    "vmonarch-refresh": "VMonarch, near-lossless",
    "vmonarch-refresh-fast": "VMonarch, fast",
    "vmonarch": "VMonarch, every step",
}
PARTS = ("attention", "projections", "norms and rotary", "cross-attention", "FFN", "rest")
FORMULAE = {
    "step": "two forward calls (prompt and negative prompt, batch 1), guidance, one step of UniPC; where steps differ,"
    " their mean, Σ number · median / steps, and so for forward",
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
    if not chosen or len(set(chosen)) < len(chosen):
        raise InputError("settings", f"must be one or several different ones, got {', '.join(words) or 'none'}")
    return tuple(chosen)


@dataclass(frozen=True)
class E2EConfig:
    """What `run_bench` measures, and where the result goes.

    Args:
        methods: of `configs/attention/`.
        modes: of MODES. Eager rows use diffusers' standard attention backend, compiled ones cuDNN's.
        rounds: steps of every row, at most.
        steps: of a video.
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
        labels = [method.label for method in self.methods]
        if not labels or len(set(labels)) < len(labels):
            raise InputError("methods", f"must be one or several different ones, got {', '.join(labels) or 'none'}")
        if not self.modes or len(set(self.modes)) < len(self.modes) or not set(self.modes) <= set(MODES):
            raise InputError(
                "modes", f"must be of {', '.join(MODES)}, each once; got {', '.join(self.modes) or 'none'}"
            )
        for method in self.methods:
            try:
                step_kinds(method.parameters, ["transformer"] * self.steps)
            except ValueError as error:
                raise InputError("methods", f"{method.label!r} cannot compute this video: {error}") from error


def share_weights(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the modules with the same parameters and buffers: its processors and compiled code are its own."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


class StepTimes(NamedTuple):
    """Seconds of a denoising step and of its forward calls."""

    step: int
    whole: float
    forward: tuple[float, float]


class Denoiser(DiffusionPipeline):
    """Denoising steps of one transformer on fixed random latents.

    It is a pipeline, because processors ask the one that calls the transformer for the step.

    Args:
        model: says how timesteps are given.
        latents: [1, C, T, h, w]. texts: embeddings of the prompt and of the negative prompt, [1, 512, text_dim].
        transformer_2: of a model with two; all steps are computed by the first.
    """

    def __init__(
        self,
        transformer: torch.nn.Module,
        model: WanModel,
        latents: torch.Tensor,
        texts: Sequence[torch.Tensor],
        steps: int,
        clock: Clock,
        transformer_2: torch.nn.Module | None = None,
    ) -> None:
        super().__init__()
        scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        )
        self.register_modules(transformer=transformer, transformer_2=transformer_2, scheduler=scheduler)
        self.register_to_config(boundary_ratio=model.boundary_ratio)
        self.model, self.latents, self.texts, self.steps, self.clock = model, latents, texts, steps, clock
        self.input = latents.to(texts[0].dtype)
        self.tokens = model.grid((latents.shape[2], latents.shape[3], latents.shape[4])).tokens
        # Of each step: when its forward calls began and ended, and when it ended.
        self.marks: list[tuple[int, tuple[Any, ...]]] = []
        self.begin()

    def begin(self, step: int = 0) -> None:
        """Begin a run with this step; residuals of the run before are freed."""
        self.scheduler.set_timesteps(self.steps, device=self.latents.device)
        self.scheduler.set_begin_index(step)
        self._num_timesteps = self.steps
        self.next_step = step
        record = getattr(self.transformer, "_vmonarch_record", None)
        if record is not None:
            record.context.forget()

    def forward(self, text: int = 0) -> torch.Tensor:
        """Velocity [1, C, T, h, w]."""
        self._current_timestep = self.scheduler.timesteps[self.next_step]
        timestep = self._current_timestep.expand(1)
        if self.model.expand_timesteps:
            timestep = (torch.ones(self.tokens, device=self.latents.device) * timestep)[None]
        out: torch.Tensor = self.transformer(
            hidden_states=self.input,
            timestep=timestep,
            encoder_hidden_states=self.texts[text],
            return_dict=False,
        )[0]
        return out

    def __call__(self) -> None:
        """One step, of a new run after the last; `marks` keeps its times."""
        if self.next_step == self.steps:
            self.begin()
        start = self.clock.mark()
        prompt = self.forward(0)
        middle = self.clock.mark()
        negative = self.forward(1)
        stop = self.clock.mark()
        guided = negative + GUIDANCE * (prompt - negative)
        self.scheduler.step(guided, self._current_timestep, self.latents, return_dict=False)
        self.marks.append((self.next_step, (start, middle, stop, self.clock.mark())))
        self.next_step += 1

    def run(self, steps: range) -> None:
        """Consecutive steps, with which a run begins."""
        self.begin(steps.start)
        for _ in steps:
            self()

    def step_times(self) -> list[StepTimes]:
        """Of all steps in `marks`."""
        self.clock.wait()
        seconds = lambda start, stop: self.clock.between(start, stop) / 1e3
        return [StepTimes(step, seconds(a, d), (seconds(a, b), seconds(b, c))) for step, (a, b, c, d) in self.marks]


def steps_to_measure(kinds: Sequence[str]) -> list[range]:
    """Consecutive steps, as few as possible, among which there is one of every kind; a run may begin with each range.

    An approximate step comes with the steps before it, back to the one whose residual it uses. If there are approximate
    steps, one of them is the last of the last range.

    Args:
        kinds: of all steps (`step_kinds`).
    """
    ranges: list[range] = []
    for kind in reversed(STEP_KINDS):
        if kind not in kinds or any(kinds[step] == kind for steps in ranges for step in steps):
            continue
        first = last = kinds.index(kind)
        if kind == "approximate" and "kept" in kinds[:last]:
            first = max(step for step in range(last) if kinds[step] == "kept")
        ranges.insert(0, range(first, last + 1))
    return ranges


@contextlib.contextmanager
def timed_parts(transformer: Any, clock: Clock) -> Iterator[Callable[[], dict[str, float]]]:
    """Marks around the modules of every block, while the block of `with` runs; gives what tells milliseconds by part.

    What a self-attention module does besides attention and projections is its norms and rotary embedding. Norms of
    queries and keys get no hooks: with hooks they would not be computed by the kernel that they are timed for.
    """
    from diffusers.models.transformers import transformer_wan

    spans: dict[str, list[tuple[Any, Any]]] = {
        name: [] for name in ("self", "attention", "projections", "layer norms", "cross-attention", "FFN")
    }
    handles = []
    in_self_attention = [False]

    def watch(module: torch.nn.Module, name: str, note: bool = False) -> None:
        starts: list[Any] = []

        def before(*_: Any) -> None:
            in_self_attention[0] = in_self_attention[0] or note
            starts.append(clock.mark())

        def after(*_: Any) -> None:
            in_self_attention[0] = in_self_attention[0] and not note
            spans[name].append((starts.pop(), clock.mark()))

        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_forward_hook(after))

    def marked(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = clock.mark()
            result = function(*args, **kwargs)
            spans["attention"].append((start, clock.mark()))
            return result

        return call

    dispatch = transformer_wan.dispatch_attention_fn

    def stock(*args: Any, **kwargs: Any) -> Any:
        return (marked(dispatch) if in_self_attention[0] else dispatch)(*args, **kwargs)

    changed = []
    for block in transformer.blocks:
        own = block.attn1
        watch(own, "self", note=True)
        for projection in (own.to_q, own.to_k, own.to_v, own.to_out[0]):
            watch(projection, "projections")
        for norm in (block.norm1, block.norm2, block.norm3):
            watch(norm, "layer norms")
        watch(block.attn2, "cross-attention")
        watch(block.ffn, "FFN")
        if hasattr(own.processor, "attend_layer"):
            own.processor.attend_layer = marked(own.processor.attend_layer)
            changed.append(own.processor)
    transformer_wan.dispatch_attention_fn = stock

    def milliseconds() -> dict[str, float]:
        clock.wait()
        ms = {name: sum(clock.between(*span) for span in found) for name, found in spans.items()}
        rest_of_self = ms.pop("self") - ms["attention"] - ms["projections"]
        norms = ms.pop("layer norms") + rest_of_self
        return {**ms, "norms and rotary": norms}

    try:
        yield milliseconds
    finally:
        transformer_wan.dispatch_attention_fn = dispatch
        for handle in handles:
            handle.remove()
        for processor in changed:
            del processor.attend_layer


def part_of(name: str, shapes: Sequence[Sequence[int]], tokens: int, width: int, ffn_dim: int) -> str | None:
    """Which part an operator of a compiled block belongs to, by its name and the shapes of its inputs.

    "square" is a product of all tokens with a width × width matrix: query, key, value and output of self-attention, or
    query and output of cross-attention. None: no part, or not to be told.
    """
    if name.startswith("vmonarch::"):
        return "norms and rotary" if "norm_rotary" in name else "attention"
    if name.startswith("aten::_scaled_dot_product") and len(shapes) > 1 and len(shapes[1]) == 4:
        return "attention" if shapes[1][2] == tokens else "cross-attention"
    factors = shapes[1:3] if name == "aten::addmm" else shapes[:2] if name == "aten::mm" else []
    if [len(shape) for shape in factors] != [2, 2]:
        return None
    (rows, inner), (_, columns) = factors
    if inner == columns == width:
        return "square" if rows == tokens else "cross-attention" if rows == TEXT_TOKENS else None
    return "FFN" if rows == tokens and {inner, columns} == {width, ffn_dim} else None


def profiled_parts(
    run: Callable[[], Any], device: torch.device, tokens: int, config: dict[str, Any]
) -> tuple[dict[str, float], list[str], dict[str, float]]:
    """(milliseconds of all kernels of a call by PARTS, names of attention's operators, the rest by kernel).

    Two of every six square products are cross-attention's. On a CPU, operators take the place of kernels.
    """
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, record_shapes=True) as profiled:
        run()
        if cuda:
            torch.cuda.synchronize(device)
    width = config["num_attention_heads"] * config["attention_head_dim"]
    ms = dict.fromkeys((*PARTS[:-1], "square"), 0.0)
    names = set()
    rest: Counter[str] = Counter()
    waiting = [
        event
        for event in profiled.events()
        if event.cpu_parent is None and event.device_type == torch.autograd.DeviceType.CPU
    ]
    while waiting:
        event = waiting.pop()
        part = part_of(event.name, event.input_shapes or [], tokens, width, config["ffn_dim"])
        if part is None:
            waiting.extend(event.cpu_children)
            own = [(kernel.name, kernel.duration) for kernel in event.kernels]
            for name, microseconds in own if cuda else [(event.name, event.self_cpu_time_total)]:
                rest[name] += microseconds / 1e3
        else:
            ms[part] += (event.device_time_total if cuda else event.cpu_time_total) / 1e3
            if part == "attention":
                names.add(event.name)
    square = ms.pop("square")
    ms["projections"] += square * 4 / 6
    ms["cross-attention"] += square * 2 / 6
    return ms | {"rest": rest.total()}, sorted(names), dict(rest.most_common(REST_KERNELS))


def with_rest(ms: dict[str, float], total: float) -> dict[str, float]:
    """Milliseconds by PARTS, the rest being what is left of `total`."""
    return {name: ms.get(name, total - sum(ms.values())) for name in PARTS}


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


def video_seconds(step_s: float, steps: int, vae: dict[str, Any], text: dict[str, Any]) -> dict[str, float | None]:
    """{"denoise_s", "video_s"}: extrapolated; no seconds per video without those of VAE and text encoder."""
    denoise = steps * step_s
    complete = vae["status"] == text["status"] == "ok"
    return {"denoise_s": denoise, "video_s": denoise + vae["seconds"] + 2 * text["seconds"] if complete else None}


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
            "kind": method.parameters.kind,
            "mode": mode,
            "options": method.to_dict(),
        }

    @property
    def ok(self) -> bool:
        return self.record.get("status") == "ok"

    def build(self, stock: torch.nn.Module) -> torch.nn.Module:
        """The transformer with the method, compiled if it is to be."""
        transformer: Any = share_weights(stock)
        self.method.install(transformer)
        compiled = self.mode == "compiled"
        on_gpu = next(stock.parameters()).is_cuda
        transformer.set_attention_backend("_native_cudnn" if compiled and on_gpu else "native")
        if compiled:
            transformer.compile_repeated_blocks(fullgraph=True, dynamic=False, backend=self.bench.compile_backend)
        return transformer

    def prepare(
        self, make: Callable[[torch.nn.Module], Denoiser], stock: torch.nn.Module, expected: dict[str, torch.Tensor]
    ) -> None:
        """Build it, and let it make two forward calls: the first is checked, the second is taken apart.

        Where steps differ, what is taken apart is an approximate one, which is checked too; steps of the other kinds
        are done before it.

        Args:
            make: the denoiser of a transformer.
            expected: outputs of rows before; this one's are added if it is eager.
        """
        denoiser = make(self.build(stock))
        self.kinds = step_kinds(self.method.parameters, transformers_by_step(denoiser, self.bench.steps))
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
        exact = self.record["kind"] == "full"
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
                self.denoiser()
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
                "step_s": summary([step.whole for step in found]),
            }
        for name in ("forward_s", "step_s"):
            self.record[name] = {
                key: sum(kind["steps"] * kind[name][key] for kind in kinds.values()) / self.bench.steps
                for key in ("median", "min", "p20", "p80")
            }
        if len(kinds) > 1:
            self.record["kinds"] = kinds
        self.record["rounds"] = rounds
        self.record.update(video_seconds(self.record["step_s"]["median"], self.bench.steps, vae, text))


def compiled_graphs() -> int:
    """How many graphs torch.compile has made since its counters were cleared."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


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
    rows = [Row(method, mode, bench, base) for method in bench.methods for mode in bench.modes]
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
        return Denoiser(transformer, model, noise, texts, bench.steps, clock, *transformers[1:])

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


@contextlib.contextmanager
def settings_of_torch() -> Iterator[None]:
    """Room for every method's version of a block; diffusers' attention backend returns to what it was."""
    from diffusers.models.attention_dispatch import attention_backend

    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT), attention_backend("native"):
        yield


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
            "guidance": GUIDANCE,
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


def newest_rows(results: dict[str, Any]) -> dict[str, dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]]]:
    """{setting: {(method, mode): (row, its case)}}: of rows measured in several runs the last that has times."""
    found: dict[str, dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]]] = {}
    for run in results["runs"]:
        for case in run["cases"]:
            rows = found.setdefault(case["setting"], {})
            for row in case["rows"]:
                key = row["method"], row["mode"]
                if row["status"] == "ok" or key not in rows:
                    rows[key] = row, case
    order = {setting.name: i for i, setting in enumerate(SETTINGS)}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def ratio(row: dict[str, Any], case: dict[str, Any], mode: str) -> float | None:
    """How many times as fast as full attention in `mode` a row is, both of the same run; None if there is none."""
    base = next((r for r in case["rows"] if (r["method"], r["mode"]) == ("full", mode)), None)
    if base is None or base is row or base["status"] != "ok" or row["status"] != "ok":
        return None
    return base["step_s"]["median"] / row["step_s"]["median"]


def e2e_table(results: dict[str, Any]) -> str:
    """Seconds of steps and videos with the ratios that are aimed at, and what the time goes into."""
    rows, parts, kinds, longer = [], [], [], ""
    for setting, found in newest_rows(results).items():
        for (method, mode), (row, case) in found.items():
            aims = case["aims"] if (method, mode) == ("vmonarch", "compiled") and case["aims"] else (None, None)
            over = []
            for base, aim in zip(MODES, aims, strict=True):
                value = ratio(row, case, base)
                text = "–" if value is None else f"{value:.2f}×"
                over.append(text if aim is None else f"{text} (aim {aim:g}×)")
            name = [setting, f"{method}, {mode}"]
            if row["status"] != "ok":
                rows.append([*name, row["status"], *["–"] * 7])
                continue
            video, peak = row["video_s"], row.get("peak_bytes")
            error = row["errors"].get("to_stock")
            rows.append(
                [
                    *name,
                    f"{row['forward_s']['median']:.3f}",
                    f"{row['step_s']['median']:.3f}",
                    f"{row['denoise_s']:.1f}",
                    "–" if video is None else f"{video:.1f}",
                    *over,
                    "–" if peak is None else f"{peak / 1e9:.1f}",
                    "–" if error is None else f"{error:.1e}",
                ]
            )
            if "kinds" in row:
                found_kinds = [row["kinds"].get(kind) for kind in STEP_KINDS]
                cells = ["–" if k is None else f"{k['steps']} × {k['step_s']['median']:.3f}" for k in found_kinds]
                kinds.append([*name, *cells])
            if "parts" in row:
                shares = [f"{100 * row['parts'][part] / row['parts_of_ms']:.0f} %" for part in PARTS]
                parts.append([*name, *shares])
                times = row["parts_of_ms"] / 1e3 / row["single_forward_s"]
                if times > PROFILE_BOUND:
                    longer += (
                        f"- {', '.join(name)}: the profiled kernels add up to {times:.2f} times a forward call; their"
                        " shares may be off\n"
                    )
    heading = ["setting", "method", "forward s", "step s", "denoising s", "video s"]
    table = markdown([*heading, "× stock eager", "× stock compiled", "GB", "error"], rows)
    shares_table = markdown(["setting", "method", *PARTS], parts)
    kinds_table = f"\nSteps of each kind, and their seconds:\n\n{markdown(['setting', 'method', *STEP_KINDS], kinds)}"
    return (
        f"{table}{kinds_table if kinds else ''}\nWhere a forward call spends its time:\n\n{shares_table}\n{longer}"
        f"{_about(results)}"
    )


def video_table(results: dict[str, Any]) -> str:
    """Seconds per video alone, of the settings that have them: what a first reader wants to know.

    A line is one case, the last with full attention, compiled, which ratios are to. A method has a column if any case
    has it. Memory is that of denoising, residuals counted.
    """
    cases = {}
    for run in results["runs"]:
        for case in run["cases"]:
            rows = {(row["method"], row["mode"]): row for row in case["rows"] if row.get("video_s")}
            if STOCK in rows and len(rows) > 1:
                cases[case["setting"]] = (run, case, rows)
    order = {setting.name: i for i, setting in enumerate(SETTINGS)}
    shown = sorted(cases.values(), key=lambda found: order.get(found[1]["setting"], len(order)))
    named = {
        method: title for method, title in VIDEO_METHODS.items() if any((method, "compiled") in f[2] for f in shown)
    }
    lines, made = [], []
    for run, case, rows in shown:
        stock = rows[STOCK]
        line = [case["setting"], f"{case['tokens']:,}", f"{stock['video_s']:.1f}"]
        memory = [stock.get("peak_bytes")]
        for method in named:
            row = rows.get((method, "compiled"), {})
            seconds = row.get("video_s")
            line.append("–" if seconds is None else f"{seconds:.1f} ({stock['video_s'] / seconds:.2f}×)")
            memory.append(row.get("peak_bytes"))
        lines.append([*line, *("–" if peak is None else f"{peak / 1e9:.1f}" for peak in memory[:2])])
        versions_used = f"torch {run['versions']['torch']}, Triton {run['versions']['triton']}"
        made.append(
            f"{run['hardware']}, {run['date'][:10]}, {versions_used}, {run['settings']['steps']} steps."
            f" Made by `{run['command']}`."
        )
    titles = list(named.values())
    heading = ["setting", "tokens", "full attention, s", *(f"{title}, s" for title in titles)]
    table = markdown([*heading, "full attention, GB", *(f"{title}, GB" for title in titles[:1])], lines)
    return table + "\n" + "\n".join(dict.fromkeys(made)) + "\n"


def _about(results: dict[str, Any]) -> str:
    measured = {
        name
        for setting, found in newest_rows(results).items()
        for (method, mode), (row, _) in found.items()
        if row["status"] == "ok"
        for name in (setting, f"{setting} {method} {mode}")
    }
    lines = []
    for name, text in FORMULAE.items():
        lines.append(f"- {name}: {text}")
    for case in {case["setting"]: case for run in results["runs"] for case in run["cases"]}.values():
        seconds = [
            f"{name} {case[key]['seconds']:.2f} s" if case[key]["status"] == "ok" else f"{name} {case[key]['status']}"
            for key, name in (("vae", "VAE decode"), ("text_encoder", "text encoder"))
        ]
        paper = f"; paper {case['paper_s'][0]:g} → {case['paper_s'][1]:g} s" if case["paper_s"] else ""
        lines.append(
            f"- {case['setting']}: {case['tokens']:,} tokens, {case['weights']} weights, {', '.join(seconds)}{paper}"
        )
    for run in results["runs"]:
        settings = run["settings"]
        lines.append(
            f"- {run['hardware']}, torch {run['versions']['torch']}, Triton {run['versions']['triton']},"
            f" {settings['dtype']}, {settings['steps']} steps, up to {settings['rounds']} rounds, {run['date'][:10]}:"
            f" `{run['command']}`"
        )
        lines += [
            f"- left out: {entry['case']} ({entry['why']})"
            for entry in run["left_out"]
            if entry["case"] not in measured
        ]
    return "\n".join(lines) + "\n"
