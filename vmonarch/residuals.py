"""Residual sharing: what approximate attention lacks changes little from one denoising step to the next.

In a few steps attention is exact, and its difference from approximate attention, the residual, is kept for every layer
and guidance branch. In the steps between, the last residual is added to approximate attention.

Source: Yuan et al., DiTFastAttn: Attention Compression for Diffusion Transformer Models (2024), "window attention with
residual sharing", where the approximation is attention in a window.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from vmonarch.families import BY_STEP
from vmonarch.kernels.residual.api import attention_residual, renew_residual, residual_bytes
from vmonarch.kernels.residual.reference import Residual
from vmonarch.own import ours_of
from vmonarch.refresh import Line, Refresh, Schedule, tensors_in
from vmonarch.steps import DenoisingStep, denoising_step, noise_changes

# What errors suggest instead, also by the name of a preset, because "near-lossless" is the default.
NO_REFRESH = 'use refresh=None, or the preset "vmonarch", which has none'
NO_GRAPH = "refresh looks for the pipeline; compile_repeated_blocks leaves that out"
# Steps that a guidance branch may skip and still find its residual.
_IDLE_STEPS = 2


class _Kept(NamedTuple):
    """A residual, the step that made it, and, if it lies in the host's memory, the GPU that it returns to."""

    step: int
    residual: Residual
    gpu: torch.device | None


class _Arriving(NamedTuple):
    """A residual on its way to the GPU, and the event of its arrival."""

    residual: Residual
    event: torch.cuda.Event

    def wait(self) -> Residual:
        """The residual; the current stream waits for it, the host does not."""
        for x in self.residual:
            stream = torch.cuda.current_stream(x.device)
            stream.wait_event(self.event)
            x.record_stream(stream)
        return self.residual


@functools.cache
def _copying(gpu: torch.device) -> torch.cuda.Stream:
    """The stream for copies to the host's pinned memory and back, which run in order beside the computation."""
    return torch.cuda.Stream(gpu)


def _to_host(residual: Residual, place: Residual | None) -> Residual:
    """A copy in the host's memory, in place of an earlier residual of this shape or in new memory."""
    gpu = residual.values.device
    stream = _copying(gpu)
    if place is None:
        place = Residual(*(torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in residual))
    stream.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(stream):
        for x, to in zip(residual, place, strict=True):
            to.copy_(x, non_blocking=True)
            x.record_stream(stream)
    return place


def _to_gpu(residual: Residual, gpu: torch.device) -> _Arriving:
    """Begin to copy back what `_to_host` returned."""
    with torch.cuda.stream(_copying(gpu)):
        copy = Residual(*(x.to(gpu, non_blocking=True) for x in residual))
        return _Arriving(copy, _copying(gpu).record_event())


@dataclasses.dataclass(kw_only=True)
class Branch:
    """The calls of a transformer in one run that differ in step and latents alone, and their residuals.

    Args:
        schedule: that of the run, shared by all its branches.
        devices: those of the layers that keep a residual.
        residuals: by layer, in the order of layers; see `layer_of`.
        calls: how often each layer has attended in the latest call.
        arriving: residuals on their way from the host.
        errors: squared errors of the layers in this call: [2, B] each, as `renew_residual` measures them.
        group: the ranks that each compute some heads; None where this process computes all.
        lines: through the transformer's outputs, one for each evaluation in a step: samplers of ComfyUI have several.
        line: that of this evaluation.
        time: how far the noise has changed so far.
        foretold: whether the output of this call is predicted; None until the transformer's forward has asked.
    """

    schedule: Schedule
    devices: Sequence[torch.device]
    residuals: dict[Any, _Kept] = dataclasses.field(default_factory=dict)
    calls: Counter[Any] = dataclasses.field(default_factory=Counter)
    arriving: dict[Any, _Arriving] = dataclasses.field(default_factory=dict)
    errors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    group: Any = None
    lines: dict[int, Line] = dataclasses.field(default_factory=dict)
    line: Line = dataclasses.field(default_factory=Line)
    time: float = 0.0
    foretold: bool | None = None

    @property
    def exact(self) -> bool:
        """Whether this call is exact in all layers."""
        return self.schedule.due == self.schedule.step or not self.residuals

    @property
    def residual_bytes(self) -> int:
        """Memory that the residuals take now."""
        tensors = (tensor for kept in self.residuals.values() for tensor in kept.residual)
        return sum(tensor.nbytes for tensor in tensors)

    def begin_call(self, step: int, time: float, evaluation: int = 0) -> None:
        """Begin a forward call in this step, and begin to fetch its first layer's residual from the host.

        Args:
            time: how far the noise has changed so far. evaluation: its index among those of the step.
        """
        self.schedule.enter(step)
        self.time, self.line, self.foretold = time, self.lines.setdefault(evaluation, Line()), None
        self.calls.clear()
        self.arriving.clear()
        self.errors.clear()
        self._fetch(next(iter(self.residuals), None))

    def end_call(self) -> None:
        """End a forward call. Its error is the mean over layers, of the worst sample."""
        if self.errors:
            sums = torch.stack([error.to(self.errors[0].device) for error in self.errors])
            if self.group is not None:
                torch.distributed.all_reduce(sums, group=self.group)
            change, size = sums.unbind(1)
            self.schedule.measured((change / size).sqrt().mean(0).max())

    @torch.compiler.disable(reason=NO_GRAPH)
    def predicted(self, dense: bool) -> Any:
        """The predicted output of this call; None if it must be computed."""
        schedule = self.schedule
        self.foretold = not dense and schedule.step not in schedule.forward and self._goes_on
        if not self.foretold:
            if not dense:
                schedule.compute()
            return None
        schedule.predicted.add(schedule.step)
        return self.line.at(self.time)

    @property
    def _goes_on(self) -> bool:
        """Whether the line goes through the outputs of the run's last two computed steps."""
        before = [step for step in self.schedule.forward if step < self.schedule.step]
        return [step for step, *_ in self.line.outputs] == before[-2:] and len(before) > 1

    @torch.compiler.disable(reason=NO_GRAPH)
    def keep_output(self, output: Any) -> None:
        """Keep the output of a computed call, and measure the error that a prediction would have had."""
        if self.schedule.refresh.cache is None or self.schedule.step not in self.schedule.forward:
            # Nothing is predicted, or this call was dense while others are predicted.
            return
        if self._goes_on:
            error = self.line.error(self.time, output)
            if self.group is not None:
                torch.distributed.all_reduce(error, torch.distributed.ReduceOp.MAX, group=self.group)
            self.schedule.measured_forward(error)
        self.line.add(self.schedule.step, self.time, output)

    def free(self) -> None:
        """Drop all residuals and outputs."""
        self.residuals.clear()
        self.arriving.clear()
        self.lines, self.line = {}, Line()

    def layer_of(self, layer: Any, samples: int) -> Any:
        """The key of the residual for a layer that now attends with so many samples.

        FasterCache leaves half of a batch out of some steps, and the samples of Mochi attend one by one.
        """
        self.calls[layer] += 1
        return layer, samples, self.calls[layer]

    def residual_of(self, layer: Any) -> Residual | None:
        """What the layer's approximate attention lacks in this step; None if the step must be exact."""
        kept = self.residuals.get(layer)
        if kept is None or kept.step < self.schedule.due:
            return None
        return self._take(layer, kept)

    def renew(self, layer: Any, exact: torch.Tensor, approximate: Callable[[], torch.Tensor], by: str) -> None:
        """Measure the last residual's error, and keep what approximate attention lacks in this step if it is of use.

        Args:
            exact: exact attention of the layer, [B, S, H, E]; `approximate` computes the approximation.
            by: the implementation.
        """
        schedule, kept = self.schedule, self.residuals.get(layer)
        schedule.computed = True
        if not schedule.kept:
            self.residuals.pop(layer, None)
            return
        if schedule.step in schedule.exact:
            schedule.renewals.add(schedule.step)
        if kept is not None and schedule.refresh.tolerance is not None:
            residual = self._take(layer, kept)
            self.errors.append(renew_residual(residual, exact, approximate(), implementation=by))
        else:
            self._check_memory(exact)
            residual = attention_residual(exact, approximate(), implementation=by)
        gpu = exact.device if self._offloads(exact.device) else None
        # In the host's memory it replaces the layer's last residual.
        place = None if kept is None else kept.residual
        self.residuals[layer] = _Kept(schedule.step, residual if gpu is None else _to_host(residual, place), gpu)

    def _offloads(self, device: torch.device) -> bool:
        return self.schedule.refresh.offload and device.type == "cuda"

    def _check_memory(self, out: torch.Tensor) -> None:
        """Check, with the first residual of a branch on a device, that the residuals of all its layers fit.

        Raises:
            torch.OutOfMemoryError: they do not.
        """
        first = all(kept.residual.values.device != out.device for kept in self.residuals.values())
        free = _free_bytes(out.device) if first and not self._offloads(out.device) else None
        if free is None:
            return
        # Offloaded layers move to the device of the others.
        layers = sum(device == out.device or device.type != out.device.type for device in self.devices)
        needed = layers * residual_bytes(*out.shape)
        if needed > free:
            raise torch.OutOfMemoryError(
                f"refresh needs {needed / 2**30:.1f} GiB for the residuals of {layers} layers, for each guidance"
                f" branch, but {free / 2**30:.1f} GiB are free on {out.device}: give vmonarch.Refresh(…) offload=True"
            )

    def _fetch(self, layer: Any) -> None:
        """Begin to copy the layer's residual from the host's memory, unless it is here or on its way."""
        kept, schedule = self.residuals.get(layer), self.schedule
        if kept is None or kept.gpu is None or layer in self.arriving:
            return
        if kept.step >= schedule.due or schedule.refresh.tolerance is not None:
            self.arriving[layer] = _to_gpu(kept.residual, kept.gpu)

    def _take(self, layer: Any, kept: _Kept) -> Residual:
        """The residual of a layer, where it is needed. This begins to fetch the next layer's."""
        if kept.gpu is None:
            return kept.residual
        self._fetch(layer)
        residual = self.arriving.pop(layer).wait()
        layers = list(self.residuals)
        for following in layers[layers.index(layer) + 1 :][:1]:
            self._fetch(following)
        return residual


@dataclasses.dataclass(kw_only=True)
class Run(Schedule):
    """One denoising loop of a pipeline with one transformer; a branch makes one forward call per step in it.

    Args:
        timesteps: the scheduler's, another tensor for each loop.
        pipeline, transformer: those of the loop.
        residual_bytes: the most memory that the residuals of its branches took.
    """

    timesteps: weakref.ref[torch.Tensor]
    pipeline: weakref.ref[Any]
    transformer: weakref.ref[torch.nn.Module]
    residual_bytes: int = 0

    def is_of(self, step: DenoisingStep, transformer: torch.nn.Module) -> bool:
        """Whether a step, in which this transformer is called, belongs to the run."""
        return self.timesteps() is step.timesteps and self.transformer() is transformer


@dataclasses.dataclass(kw_only=True)
class PipelineBranch(Branch):
    """A branch in one run of a diffusers pipeline, with one call per step.

    Args:
        schedule: its run.
        conditioning: the transformer's arguments without latents and timestep.
        versions: those of its tensors, which reveal changes in place.
        step: that of the latest call.
    """

    schedule: Run
    conditioning: Mapping[str, Any]
    versions: list[int]
    step: int = -1

    def may_go_on(self, step: DenoisingStep, transformer: torch.nn.Module) -> bool:
        """Whether a step, in which this transformer is called, or a later one may use what the branch holds."""
        timesteps = self.schedule.timesteps()
        if timesteps is not step.timesteps:
            # Another pipeline's run goes on until its scheduler begins a new one.
            pipeline = self.schedule.pipeline()
            return pipeline is not None and pipeline.scheduler.timesteps is timesteps
        if self.schedule.transformer() is not transformer:
            # A pipeline with two transformers never returns to the first.
            return self.step == step.step
        return step.step - 1 - _IDLE_STEPS <= self.step <= step.step

    def is_of(self, step: DenoisingStep, transformer: torch.nn.Module, conditioning: Mapping[str, Any]) -> bool:
        """Whether a call is the next one of the branch."""
        follows = self.schedule.is_of(step, transformer) and self.step < step.step
        unchanged = self.versions == versions_of(self.conditioning)
        return follows and unchanged and same_values(self.conditioning, conditioning)

    def free(self) -> None:
        super().free()
        # An interrupted call may still hold the branch.
        self.conditioning = {}


class ResidualSharing:
    """The residuals of a pipeline's transformers, by run and branch. A copy holds none.

    A *run* is one denoising loop of one pipeline. A branch of it (prompt, negative prompt, or both in one batch) is
    recognised by the transformer's arguments. A run's residuals are freed in its last step, by `forget`, or, if it
    ended early, when the next run begins.

    Args:
        refresh: the option.

    Attributes:
        runs: the latest run of each pipeline, also after its residuals are freed.
    """

    def __init__(self, refresh: Refresh) -> None:
        self.refresh = refresh
        self.runs: list[Run] = []
        self._branches: list[PipelineBranch] = []
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ResidualSharing, (self.refresh,)

    @torch.compiler.disable(reason=NO_GRAPH)
    def begin(self, transformer: torch.nn.Module, arguments: Mapping[str, Any]) -> PipelineBranch:
        """The branch of a forward call that begins.

        Args:
            arguments: those of the call, by name.

        Raises:
            RuntimeError: no pipeline has called the transformer, or its scheduler does not give the step.
        """
        step = denoising_step(transformer, arguments.get("timestep"), "refresh", NO_REFRESH)
        latents = arguments.get("hidden_states")
        conditioning = {name: x for name, x in arguments.items() if name not in BY_STEP}
        if latents is not None:
            conditioning["latents"] = (latents.shape, latents.dtype, latents.device)
        with self._lock:
            self._drop(lambda branch: not branch.may_go_on(step, transformer))
            branch = next((b for b in self._branches if b.is_of(step, transformer, conditioning)), None)
            if branch is None:
                bound = ((module, ours) for module in transformer.modules() if (ours := ours_of(module)) is not None)
                layers = (module for module, ours in bound if ours.spec.refresh is not None)
                branch = PipelineBranch(
                    schedule=self._run(step, transformer),
                    devices=[next(layer.parameters()).device for layer in layers],
                    conditioning=conditioning,
                    versions=versions_of(conditioning),
                )
                self._branches.append(branch)
            branch.step, times = step.step, branch.schedule.times
            branch.begin_call(step.step, times[step.step] if times else 0.0)
        return branch

    def _run(self, step: DenoisingStep, transformer: torch.nn.Module) -> Run:
        """The run of a new branch: another branch's run, or a new one that begins with this step."""
        for branch in self._branches:
            if branch.schedule.is_of(step, transformer):
                return branch.schedule
        over = lambda run: run.timesteps() is not step.timesteps and run.pipeline() in (None, step.pipeline)
        self.runs = [run for run in self.runs if not over(run)]
        # Reading them waits for the GPU.
        times = noise_changes(step.timesteps[-step.steps :].tolist()) if self.refresh.decides else ()
        spent = sum(len(run.exact) for run in self.runs if run.timesteps() is step.timesteps)
        owners = {"timesteps": step.timesteps, "pipeline": step.pipeline, "transformer": transformer}
        refs: dict[str, Any] = {name: weakref.ref(owner) for name, owner in owners.items()}
        run = Run(self.refresh, step.steps, times, spent, **refs)
        self.runs.append(run)
        return run

    def end(self, branch: PipelineBranch) -> None:
        """End the forward call; after the last one of a run, free its residuals."""
        branch.end_call()
        run = branch.schedule
        if run.computed:
            with self._lock:
                kept = sum(other.residual_bytes for other in self._branches if other.schedule is run)
            run.residual_bytes = max(run.residual_bytes, kept)
        if branch.step < run.steps - 1:
            return
        self._drop(lambda other: other is branch)
        if run.held and all(other.schedule is not run for other in self._branches):
            warnings.warn(
                f"the error of residual sharing may have grown beyond tolerance={self.refresh.tolerance}, because"
                f" at_most={self.refresh.at_most} allows no more exact steps: raise it, or see vmonarch.report(pipe)",
                stacklevel=2,
            )

    def forget(self) -> None:
        """Free all residuals."""
        self._drop(lambda branch: True)

    def _drop(self, over: Callable[[PipelineBranch], bool]) -> None:
        """Free the residuals of some branches, even if a traceback still holds the branches."""
        with self._lock:
            for branch in filter(over, self._branches):
                branch.free()
            self._branches = [branch for branch in self._branches if not over(branch)]


def versions_of(arguments: Mapping[str, Any]) -> list[int]:
    """The versions of the tensors in there, which reveal changes in place."""
    # Tensors made in inference mode have no version.
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors_in(arguments)]


def same_values(expected: Any, given: Any) -> bool:
    """Whether two values have the same structure and equal leaves; tensors are read unless they are the same object."""
    (leaves, form), (others, other_form) = pytree.tree_flatten(expected), pytree.tree_flatten(given)
    return form == other_form and all(map(_same, leaves, others))


def _same(expected: Any, given: Any) -> bool:
    if expected is given:
        return True
    tensors = [isinstance(x, torch.Tensor) for x in (expected, given)]
    if not any(tensors):
        return bool(expected == given)
    facts = lambda x: (x.shape, x.dtype, x.device)
    return all(tensors) and facts(expected) == facts(given) and torch.equal(expected, given)


def _free_bytes(device: torch.device) -> int | None:
    """Memory of a GPU that torch can still allocate; None for other devices."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
