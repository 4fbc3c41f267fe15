"""VMonarch at ComfyUI's seam for attention, `optimized_attention_override`, in the sampling runs of a model.

This imports nothing from ComfyUI, which passes in what is needed. Around every forward call of the model, the override
is put into the call's `transformer_options`, on top of an earlier one, and removed again (`OverrideAttention.forward`).

Shapes: B batch, S tokens, of which N = T·H·W are the video's, H heads, D head dim; latents are [B, C, T, H, W].
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from vmonarch.attend import Attend, Beside, Exact, Residual, Result
from vmonarch.base import Layer
from vmonarch.call import Call
from vmonarch.configs import InputError, Settings, choice, number
from vmonarch.configs.methods import resolve_method
from vmonarch.grid import LatentGrid
from vmonarch.refresh import Refresh, Schedule
from vmonarch.residuals import Branch
from vmonarch.steps import noise_changes

PRESETS = ("near-lossless", "fast", "vmonarch", "vmonarch-lite", "vmonarch-t1", "vmonarch-t3", "two-resolution")
# ComfyUI's name for the override, and our key, which separates it from those of other nodes.
OVERRIDE, KEY = "optimized_attention_override", "vmonarch"
_LOG = logging.getLogger(__name__)

Arguments = Mapping[str, Any]


class ComfyModel(NamedTuple):
    """What the node knows about the models of one class of ComfyUI.

    Args:
        blocks: names of the lists of transformer blocks, in the order of the model, each with its value of
            `transformer_options["block_type"]`; empty if the model gives neither that nor `block_index`. Older versions
            of ComfyUI give them for no model.
        before: number of other tokens before the video's, from the model and its arguments; None for all others.
        joint: whether the sequence may hold other tokens at all.
        patch: that of the latents, for models without the attribute.
        fills_up: whether the model pads the last patch; otherwise sizes must be whole patches.
    """

    blocks: Mapping[str, str]
    before: Callable[[Any, Arguments], int | None]
    joint: bool = True
    patch: tuple[int, int, int] | None = None
    fills_up: bool = False

    def layers(self, model: Any) -> int:
        """Number of transformer blocks of a model."""
        return sum(len(getattr(model, name)) for name in self.blocks)

    def layer(self, model: Any, options: Arguments, seen: int) -> int | str:
        """The number of the block that the model is in, or why it cannot be known.

        Args:
            seen: number of earlier calls of the video's self-attention in this forward call.
        """
        told = all(self.blocks.values())
        if not told or "block_index" not in options:
            # A subclass may attend more often than once in a block, as VACE does, so that the count is not the block's.
            counts = not told or type(model).__name__ in MODELS
            return seen if counts else "in a block that this ComfyUI does not tell; newer versions do"
        before = 0
        for name, kind in self.blocks.items():
            if kind == options.get("block_type"):
                return before + int(options["block_index"])
            before += len(getattr(model, name))
        return "outside of the transformer's blocks"

    def grid(self, model: Any, arguments: Arguments) -> LatentGrid | None:
        """The grid of the video's tokens, from the model's arguments; None where they do not give it."""
        x, more = arguments["x"], arguments.get("time_dim_concat")
        # A list holds video and audio.
        x = x[0] if isinstance(x, (list, tuple)) else x
        if x.ndim != 5:
            return None
        sizes, patch = list(x.shape[2:]), self.patch or model.patch_size
        sizes[0] += 0 if more is None else more.shape[2]
        if not self.fills_up and any(n % p for n, p in zip(sizes, patch, strict=True)):
            return None
        return LatentGrid(*(-(-n // p) for n, p in zip(sizes, patch, strict=True)))


def _wan_reference(model: Any, arguments: Arguments) -> int:
    """Tokens of a reference image, which come first; all others that are known come last."""
    reference = arguments.get("reference_latent")
    if reference is None or getattr(model, "ref_conv", None) is None:
        return 0
    return math.prod(n // p for n, p in zip(reference.shape[-2:], model.patch_size[1:], strict=True))


MODELS: dict[str, ComfyModel] = {
    "WanModel": ComfyModel({"blocks": "double"}, _wan_reference, fills_up=True),
    # Text comes first, and after it the reference, if there is one.
    "HunyuanVideo": ComfyModel({"double_blocks": "double", "single_blocks": "single"}, lambda model, arguments: None),
    "LTXVModel": ComfyModel({"transformer_blocks": ""}, lambda model, arguments: 0, joint=False, patch=(1, 1, 1)),
}


def known_model(model: Any) -> ComfyModel:
    """The entry of `MODELS` for a model of ComfyUI (its `diffusion_model`).

    Raises:
        InputError: there is none.
    """
    for base in type(model).__mro__:
        if base.__name__ in MODELS:
            return MODELS[base.__name__]
    supported = "Wan, HunyuanVideo and LTX-Video"
    got = type(model).__name__
    raise InputError("model", f"must be a video model of a supported family ({supported}), got {got}")


def parse_blocks(blocks: str) -> set[int]:
    """Indices from text such as "0, 1, 38-39".

    Raises:
        InputError: it is something else, or a range ends before it begins.
    """
    found: set[int] = set()
    for part in filter(None, map(str.strip, blocks.split(","))):
        match = re.fullmatch(r"(\d{1,4})(?:\s*-\s*(\d{1,4}))?", part)
        several = match and range(int(match[1]), int(match[2] or match[1]) + 1)
        if not several:
            raise InputError("dense_blocks", f'must be indices and ranges of them, such as "0, 1, 38-39", got {part!r}')
        found.update(several)
    return found


def parse_refresh(refresh: str, preset: str, *, offload: bool = False) -> Refresh | None:
    """When attention is exact and renews the residuals; None if there are none.

    Args:
        refresh: as text, a count, a fraction, indices with commas between them, numbers by name ("tolerance=0.1,
            cache=0.1"), "none", or nothing for the preset's.
        offload: as in `Refresh`.

    Raises:
        InputError: it is none of these.
    """
    text = refresh.strip()
    try:
        if not text:
            found = Refresh.parse(resolve_method(preset).options["refresh"])
        elif text == "none":
            found = None
        elif "=" in text:
            named = dict(part.split("=", 1) for part in text.split(","))
            found = Refresh.parse({name.strip(): json.loads(number) for name, number in named.items()})
        else:
            (*several,) = json.loads(f"[{text}]")
            found = Refresh(several[0] if len(several) == 1 else several)
        return None if found is None else dataclasses.replace(found, offload=offload)
    except (TypeError, ValueError, RecursionError) as error:
        what = 'a count ("6"), a fraction ("0.28"), indices ("0, 1, 3, 7"), "tolerance=0.1", "none", or empty'
        raise InputError("refresh", f"must be {what}, got {refresh!r}: {error}") from error


@dataclasses.dataclass
class Run:
    """One sampling run, and what happened to attention in it.

    Args:
        model: of ComfyUI. known: the entry for its class.
        preset: what computed attention.
        grids: of the videos.
        forwards: how many forward calls there were.
        steps: how many steps the schedule has.
        attended: calls of self-attention of the video that the preset answered.
        exact: those of them that `refresh` made exact.
        untouched: other calls, by the reason.
        sigma_start, sigma_end: the noise levels between which the preset is used.
        residual_bytes: the most memory that the residuals took.
        branches: those that have residuals, or can.
        calls: of a branch in a step, by both.
    """

    model: Any
    known: ComfyModel
    preset: str
    sigma_start: float
    sigma_end: float
    grids: set[LatentGrid] = dataclasses.field(default_factory=set)
    forwards: int = 0
    steps: int = 0
    attended: int = 0
    exact: int = 0
    untouched: Counter[str] = dataclasses.field(default_factory=Counter)
    residual_bytes: int = 0
    schedule: Schedule | None = None
    branches: dict[Any, Branch] = dataclasses.field(default_factory=dict)
    calls: Counter[Any] = dataclasses.field(default_factory=Counter)

    def __str__(self) -> str:
        grids = ", ".join("×".join(map(str, grid)) for grid in sorted(self.grids)) or "unknown"
        model = type(self.model).__name__
        parts = [
            f"VMonarch on {model}: latent grid {grids}, steps {self.steps}, forward calls {self.forwards}.",
            f"Calls of self-attention by {self.preset}: {self.attended - self.exact}.",
        ]
        if (schedule := self.schedule) is not None:
            if self.exact:
                parts.append(f"Exact, to renew residuals: {self.exact} (steps {', '.join(map(str, schedule.exact))}).")
            if schedule.predicted:
                parts.append(f"Predicted steps: {', '.join(map(str, sorted(schedule.predicted)))}.")
            if errors := [error for error in schedule.exact.values() if error is not None]:
                parts.append(f"Error of sharing: {min(errors):.3f} to {max(errors):.3f}.")
            if schedule.held:
                parts.append("More exact steps may have been needed than half, which a tolerance allows at most.")
        if self.residual_bytes:
            parts.append(f"Residuals: {self.residual_bytes / 2**30:.2f} GiB, guidance branches {len(self.branches)}.")
        if self.untouched:
            listed = "; ".join(f"{count} {reason}" for reason, count in self.untouched.most_common())
            parts.append(f"Untouched: {listed}.")
        if not (self.attended or self.untouched):
            parts.append("No call of attention came by: another node may have taken the seam.")
        return " ".join(parts)


@dataclasses.dataclass
class _Call:
    """One forward call of the model.

    Args:
        grid: from its arguments; what the model says itself goes before.
        before: as in `ComfyModel`.
        prompts: numbers of tokens of what it attends to by cross-attention.
        why_exact: why all of it stays exact; empty if it does not.
        branch: whose residuals it uses; None if there are none, or it cannot be told.
        seen: how many calls of self-attention of the video there were.
    """

    run: Run
    grid: LatentGrid | None
    before: int | None
    prompts: frozenset[int]
    why_exact: str
    branch: Branch | None
    seen: int = 0


@dataclasses.dataclass(kw_only=True, eq=False)
class OverrideAttention(Settings):
    """VMonarch on one model: in every sampling run it begins anew. Its fields are the inputs of the node.

    Args:
        preset: what computes attention; near-lossless is the nearest to exact attention. Presets without refresh need
            no memory for residuals.
        refresh: steps with exact attention, which renews the residuals: a count (6), a fraction (0.28), indices
            (0, 1, 3, 7), where their error asks for it (tolerance=0.1; with cache=0.1 after a comma, outputs are
            predicted in other steps up to that error), or none. Empty: what the preset says.
        start_percent: attention is exact before this part of the schedule.
        end_percent: attention is exact after this part of the schedule.
        dense_blocks: transformer blocks whose attention stays exact, such as 0, 1, 38-39.
        plan: a plan of vmonarch calibrate: the path of its JSON, or its name in ComfyUI's input folder. It decides what
            every head computes; of the preset only the refresh remains.
        plan_part: which model of the plan this is. Wan 2.2 A14B has two: high noise, then low noise.
        offload_residuals: keep residuals in RAM instead of VRAM; they come back one layer ahead.

    Attributes:
        report: of the latest run; None before the first.

    Raises:
        InputError: an entry has an unsupported value, or there is no such plan.
    """

    preset: str = choice(PRESETS[0], *PRESETS)
    refresh: str = ""
    start_percent: float = number(0.0, "[0, 1]")
    end_percent: float = number(1.0, "[0, 1]")
    dense_blocks: str = ""
    plan: str = ""
    plan_part: str = choice("transformer", "transformer", "transformer_2")
    offload_residuals: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start_percent > self.end_percent:
            problem = f"must be at most end_percent, {self.end_percent}, got {self.start_percent}"
            raise InputError("start_percent", problem)
        self.sharing = parse_refresh(self.refresh, self.preset, offload=self.offload_residuals)
        name: dict[str, Any] = {"name": "vmonarch", "plan": self.plan} if self.plan else {"name": self.preset}
        # Residuals are shared here, not by the processor, which would look for a pipeline of diffusers.
        self.processor = resolve_method(name | {"refresh": None}).processor()
        self.report: Run | None = None
        self._dense = parse_blocks(self.dense_blocks)
        # Keys are (block, blocks, heads); None where the plan leaves all heads exact.
        self._layers: dict[tuple[int, int, int], Attend | None] = {}
        self._run: Run | None = None

    def install(self, patcher: Any, callbacks: Any, wrappers: Any) -> None:
        """Put it on a model in place of the one that is there.

        Args:
            patcher: ComfyUI's `ModelPatcher`, a clone that this is to be the only change of.
            callbacks, wrappers: ComfyUI's `CallbacksMP` and `WrappersMP`.

        Raises:
            InputError: the model is not supported, or has fewer blocks than `dense_blocks` names.
        """
        model = _model_of(patcher)
        blocks = known_model(model).layers(model)
        last = max(self._dense, default=0)
        if last >= blocks:
            problem = f"names block {last}, but the model has {blocks} (0 to {blocks - 1})"
            raise InputError("dense_blocks", problem)
        patcher.remove_wrappers_with_key(wrappers.DIFFUSION_MODEL, KEY)
        patcher.add_wrapper_with_key(wrappers.DIFFUSION_MODEL, KEY, self.forward)
        for when, callback in ((callbacks.ON_PRE_RUN, self.begin_run), (callbacks.ON_CLEANUP, self.end_run)):
            patcher.remove_callbacks_with_key(when, KEY)
            patcher.add_callback_with_key(when, KEY, callback)
        patcher.set_attachments(KEY, self)

    def begin_run(self, patcher: Any) -> None:
        """A sampling run begins."""
        self.end_run(patcher)
        to_sigma = patcher.get_model_object("model_sampling").percent_to_sigma
        # A sampler may add noise to the first level.
        start = float(to_sigma(self.start_percent)) if self.start_percent else math.inf
        preset = f"plan {Path(self.plan).name}" if self.plan else self.preset
        end, model = float(to_sigma(self.end_percent)), _model_of(patcher)
        self._run = Run(model, known_model(model), preset, start, end)

    def end_run(self, patcher: Any) -> None:
        """A sampling run is over: free its residuals and say what happened."""
        if self._run is None:
            return
        run, self._run = self._run, None
        for branch in run.branches.values():
            branch.free()
        if run.forwards:
            self.report = run
            fine = run.attended and not (run.schedule is not None and run.schedule.held)
            _LOG.log(logging.INFO if fine else logging.WARNING, "%s", run)

    # The model itself may be compiled.
    @torch.compiler.disable(recursive=False)
    def forward(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """A wrapper of ComfyUI around a forward call of the model."""
        arguments = inspect.signature(executor.original).bind(*args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        options = arguments.get("transformer_options")
        if self._run is None or not options:
            return executor(*args, **kwargs)
        call = self._begin_call(self._run, arguments, options)
        there, previous = OVERRIDE in options, options.get(OVERRIDE)
        options[OVERRIDE] = functools.partial(self._attention, call, previous)
        branch = call.branch
        try:
            if branch is None:
                return executor(*args, **kwargs)
            output = branch.predicted(bool(call.why_exact))
            if output is None:
                output = executor(*args, **kwargs)
                branch.keep_output(output)
            return output
        finally:
            if there:
                options[OVERRIDE] = previous
            else:
                options.pop(OVERRIDE, None)
            if branch is not None:
                branch.end_call()
                if branch.schedule.computed:
                    kept = sum(branch.residual_bytes for branch in call.run.branches.values())
                    call.run.residual_bytes = max(call.run.residual_bytes, kept)

    @torch.compiler.disable
    def _begin_call(self, run: Run, arguments: Arguments, options: Arguments) -> _Call:
        x, step, why = arguments["x"], None, ""
        sigma = float(options["sigmas"][0]) if options.get("sigmas") is not None else None
        if sigma is not None and options.get("sample_sigmas") is not None:
            schedule = options["sample_sigmas"].tolist()
            run.steps = len(schedule) - 1
            step = step_of(sigma, schedule)
            if self.sharing is not None and run.schedule is None:
                run.schedule = Schedule(self.sharing, run.steps, noise_changes(schedule[:-1]))
        branch = None
        if run.schedule is not None and step is not None and options.get("uuids"):
            x = x if isinstance(x, torch.Tensor) else x[0]
            window = getattr(options.get("context_window"), "index_list", ())
            # Guidance may ask once more, with some blocks left out.
            replaced = {kind: frozenset(blocks) for kind, blocks in options.get("patches_replace", {}).items()}
            key = (tuple(options["uuids"]), x.shape, x.dtype, x.device, tuple(window), frozenset(replaced.items()))
            there = Branch(schedule=run.schedule, devices=[x.device] * run.known.layers(run.model))
            branch = run.branches.setdefault(key, there)
            branch.begin_call(step, run.schedule.times[step] + abs(sigma - schedule[step]), run.calls[key, step])
            run.calls[key, step] += 1
        if sigma is not None and not run.sigma_end <= sigma <= run.sigma_start:
            why = "outside of start_percent to end_percent"
        elif self.sharing is not None and branch is None:
            why = "with refresh, where the sampler tells no step or guidance branch"
        run.forwards += 1
        context, image = arguments.get("context"), arguments.get("clip_fea")
        prompts = frozenset(x.shape[n] for x, n in ((context, 1), (image, -2)) if isinstance(x, torch.Tensor))
        grid, before = run.known.grid(run.model, arguments), run.known.before(run.model, arguments)
        return _Call(run, grid, before, prompts, why, branch)

    @torch.compiler.disable
    def _attention(
        self,
        call: _Call,
        previous: Callable[..., torch.Tensor] | None,
        func: Callable[..., torch.Tensor],
        *given: Any,
        **named: Any,
    ) -> torch.Tensor:
        """The override: what the preset computes, or what `func` and an override before this one compute."""
        exact = functools.partial(func if previous is None else functools.partial(previous, func), *given, **named)
        out = self._attend(call, exact, *given, **named)
        if isinstance(out, str):
            call.run.untouched[out] += 1
            return exact()
        return out

    def _attend(
        self,
        call: _Call,
        exact: Callable[[], torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: Any = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **others: Any,
    ) -> torch.Tensor | str:
        """[B, S, H·D], or [B, H, S, D] with `skip_reshape` -> likewise, by `skip_output_reshape`.

        Or why a call is not for the preset.
        """
        if not q.shape == k.shape == v.shape or q.ndim != (4 if skip_reshape else 3):
            return "cross-attention"
        tokens, options = q.shape[-2], others.get("transformer_options") or {}
        known, model = call.run.known, call.run.model
        if tokens in call.prompts:
            return "with as many tokens as the prompt, which may be cross-attention"
        told = options.get("grid_sizes")
        grid = call.grid if told is None else LatentGrid(*map(int, told))
        if grid is None:
            return "where the model tells no latent grid"
        beside = tokens - grid.tokens
        if beside < (call.before or 0) or (beside and not known.joint):
            return "of other tokens than the video's"
        block = known.layer(model, options, call.seen)
        if isinstance(block, str):
            return block
        call.run.grids.add(grid)
        call.seen += 1
        if mask is not None:
            return "with a mask"
        scale, head_dim = others.get("scale"), q.shape[-1] if skip_reshape else q.shape[-1] // heads
        if scale is not None and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-4):
            return "with a scale of its own"
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            return "with gradients"
        if call.why_exact:
            return call.why_exact
        if block in self._dense:
            return "in dense_blocks"
        sizes = block, known.layers(model), heads
        if sizes not in self._layers:
            # A processor asks no more of the attention module.
            place = Layer(SimpleNamespace(heads=heads), block, *sizes[:2], component=self.plan_part)
            self._layers[sizes] = self.processor.attention(place)
        attend = self._layers[sizes]
        if attend is None:
            return "that the plan leaves exact"
        call.run.attended += 1
        query, key, value = (_by_heads(x, heads, skip_reshape) for x in (q, k, v))
        # Rotary embeddings may leave them in another dtype.
        query, key = query.to(value.dtype), key.to(value.dtype)

        def renewing(*given: Any) -> Result:
            asked: Call = given[-1]
            call.run.exact += 1
            if asked.precision is not None:
                return Exact()(query, key, value, asked)
            return _by_heads(exact(), heads, skip_output_reshape), None

        attend = Beside(attend, Exact())
        if call.branch is not None:
            attend = Residual(attend, renewing, block)
        out, _ = attend(query, key, value, Call(grid, call.before, branch=call.branch).placed(tokens))
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)


def _model_of(patcher: Any) -> Any:
    """A patcher's model, which torch.compile may have wrapped."""
    model = patcher.get_model_object("diffusion_model")
    return getattr(model, "_orig_mod", model)


def _by_heads(x: torch.Tensor, heads: int, apart: bool) -> torch.Tensor:
    """[B, H, S, D] if the heads are apart, or else [B, S, H·D] -> [B, S, H, D]."""
    return x.transpose(1, 2) if apart else x.unflatten(2, (heads, -1))


def step_of(sigma: float, schedule: Sequence[float]) -> int | None:
    """The step of a call at `sigma` in a schedule of n + 1 noise levels; between two levels, that of the first.

    The levels fall, or rise as in unsampling; None if they do both. Samplers of higher order also call the model
    between the levels, or at the next one.
    """
    if list(schedule) == sorted(schedule, reverse=True):
        reached = sum(level >= sigma * (1 - 1e-4) for level in schedule[:-1])
    elif list(schedule) == sorted(schedule):
        reached = sum(level <= sigma * (1 + 1e-4) for level in schedule[:-1])
    else:
        return None
    return max(reached - 1, 0)
