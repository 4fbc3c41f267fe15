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

# What errors tell to use in its place, by the name of a preset too: "near-lossless" is the default.
NO_REFRESH = 'use refresh=None, or the preset "vmonarch", which has none'
NO_GRAPH = "refresh looks for the pipeline; compile_repeated_blocks leaves that out"
# Steps that a guidance branch may sit out and still find its residual.
_IDLE_STEPS = 2


class _Kept(NamedTuple):
    """A residual, the step in which it was made, and the GPU to which it comes back if it is in the host's memory."""

    step: int
    residual: Residual
    gpu: torch.device | None


class _Arriving(NamedTuple):
    """A residual on its way to the GPU, and what tells that it is there."""

    residual: Residual
    event: torch.cuda.Event

    def wait(self) -> Residual:
        """The residual, for the current stream, which waits for it; the host does not."""
        for x in self.residual:
            stream = torch.cuda.current_stream(x.device)
            stream.wait_event(self.event)
            x.record_stream(stream)
        return self.residual


@functools.cache
def _copying(gpu: torch.device) -> torch.cuda.Stream:
    """The stream of copies to the host's pinned memory and back, in their order, beside what the GPU computes."""
    return torch.cuda.Stream(gpu)


def _to_host(residual: Residual, place: Residual | None) -> Residual:
    """A copy in the host's memory: at a place that an earlier residual of this shape leaves, or a new one."""
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
    """The calls of a transformer in one run that differ in nothing but step and latents, and their residuals.

    Args:
        schedule: of the run, which all its branches share.
        devices: of each layer that keeps a residual.
        residuals: by layer, in the order of layers; see `layer_of`.
        calls: how often each layer has attended in the latest call.
        arriving: those that are on their way from the host.
        errors: of the layers in this call, squared: [2, B] each, as `renew_residual` measures them.
        group: of the ranks that each compute some heads; None where this process computes all.
        lines: through the transformer's outputs, one for each evaluation in a step: samplers of ComfyUI have several.
        line: of this evaluation.
        time: how far the noise has changed by now.
        foretold: whether the output of this call is predicted; None where the transformer's forward has not asked yet.
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
        """Memory of the residuals that there are now."""
        tensors = (tensor for kept in self.residuals.values() for tensor in kept.residual)
        return sum(tensor.nbytes for tensor in tensors)

    def begin_call(self, step: int, time: float, evaluation: int = 0) -> None:
        """A forward call begins in this step; what its first layer needs is on its way from the host then.

        Args:
            time: how far the noise has changed by now. evaluation: of those in a step, which one it is.
        """
        self.schedule.enter(step)
        self.time, self.line, self.foretold = time, self.lines.setdefault(evaluation, Line()), None
        self.calls.clear()
        self.arriving.clear()
        self.errors.clear()
        self._fetch(next(iter(self.residuals), None))

    def end_call(self) -> None:
        """A forward call is over: its error is that of the worst sample, in the mean of its layers."""
        if self.errors:
            sums = torch.stack([error.to(self.errors[0].device) for error in self.errors])
            if self.group is not None:
                torch.distributed.all_reduce(sums, group=self.group)
            change, size = sums.unbind(1)
            self.schedule.measured((change / size).sqrt().mean(0).max())

    @torch.compiler.disable(reason=NO_GRAPH)
    def predicted(self, dense: bool) -> Any:
        """The transformer's output of this call; None where it is to be computed."""
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
        """Whether the line goes through the outputs of the run's latest two computed steps."""
        before = [step for step in self.schedule.forward if step < self.schedule.step]
        return [step for step, *_ in self.line.outputs] == before[-2:] and len(before) > 1

    @torch.compiler.disable(reason=NO_GRAPH)
    def keep_output(self, output: Any) -> None:
        """Keep the output of a call that was computed, and measure how wrong it would have been to predict it."""
        if self.schedule.refresh.cache is None or self.schedule.step not in self.schedule.forward:
            # Nothing is predicted, or this call was dense, beside others that are.
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
        """What tells the residuals of a layer that attends now with so many samples from others.

        FasterCache leaves half of a batch out of some steps, and the samples of Mochi attend one by one.
        """
        self.calls[layer] += 1
        return layer, samples, self.calls[layer]

    def residual_of(self, layer: Any) -> Residual | None:
        """What the layer's approximate attention lacks in this step; None where that is to be computed."""
        kept = self.residuals.get(layer)
        if kept is None or kept.step < self.schedule.due:
            return None
        return self._take(layer, kept)

    def renew(self, layer: Any, exact: torch.Tensor, approximate: Callable[[], torch.Tensor], by: str) -> None:
        """Keep what approximate attention lacks in this step, if it is of use later, and measure the last one's error.

        Args:
            exact: attention of the layer, [B, S, H, E]; `approximate` computes what comes near to it.
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
        # In the host's memory, in place of the layer's last one.
        place = None if kept is None else kept.residual
        self.residuals[layer] = _Kept(schedule.step, residual if gpu is None else _to_host(residual, place), gpu)

    def _offloads(self, device: torch.device) -> bool:
        return self.schedule.refresh.offload and device.type == "cuda"

    def _check_memory(self, out: torch.Tensor) -> None:
        """Check, with the first residual of a branch on a device, that there is memory for those of all its layers.

        Raises:
            torch.OutOfMemoryError: there is not.
        """
        first = all(kept.residual.values.device != out.device for kept in self.residuals.values())
        free = _free_bytes(out.device) if first and not self._offloads(out.device) else None
        if free is None:
            return
        # Offloaded layers come to the device where the others are.
        layers = sum(device == out.device or device.type != out.device.type for device in self.devices)
        needed = layers * residual_bytes(*out.shape)
        if needed > free:
            raise torch.OutOfMemoryError(
                f"refresh needs {needed / 2**30:.1f} GiB for the residuals of {layers} layers, for each guidance"
                f" branch, but {free / 2**30:.1f} GiB are free on {out.device}: give vmonarch.Refresh(…) offload=True"
            )

    def _fetch(self, layer: Any) -> None:
        """Begin to bring back what the layer needs, if that is in the host's memory and not on its way."""
        kept, schedule = self.residuals.get(layer), self.schedule
        if kept is None or kept.gpu is None or layer in self.arriving:
            return
        if kept.step >= schedule.due or schedule.refresh.tolerance is not None:
            self.arriving[layer] = _to_gpu(kept.residual, kept.gpu)

    def _take(self, layer: Any, kept: _Kept) -> Residual:
        """The residual of a layer, where it is needed; that of the next layer is on its way then."""
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
    """One denoising loop of a pipeline with one transformer; a branch makes one forward call a step in it.

    Args:
        timesteps: of the scheduler, another tensor for each loop.
        pipeline, transformer: whose it is.
        residual_bytes: the most memory that the residuals of its branches took.
    """

    timesteps: weakref.ref[torch.Tensor]
    pipeline: weakref.ref[Any]
    transformer: weakref.ref[torch.nn.Module]
    residual_bytes: int = 0

    def is_of(self, step: DenoisingStep, transformer: torch.nn.Module) -> bool:
        """Whether that step, in which this transformer is called, belongs to it."""
        return self.timesteps() is step.timesteps and self.transformer() is transformer


@dataclasses.dataclass(kw_only=True)
class PipelineBranch(Branch):
    """A branch in one run of a pipeline of diffusers, with one call a step.

    Args:
        schedule: the run that it is in.
        conditioning: what the transformer is called with, without latents and timestep.
        versions: of the tensors in there, which tell of changes in place.
        step: of the latest call.
    """

    schedule: Run
    conditioning: Mapping[str, Any]
    versions: list[int]
    step: int = -1

    def may_go_on(self, step: DenoisingStep, transformer: torch.nn.Module) -> bool:
        """Whether what the branch holds may be of use in that step, in which this transformer is called, or later."""
        timesteps = self.schedule.timesteps()
        if timesteps is not step.timesteps:
            # The run of another pipeline goes on, as long as its scheduler has not begun another one.
            pipeline = self.schedule.pipeline()
            return pipeline is not None and pipeline.scheduler.timesteps is timesteps
        if self.schedule.transformer() is not transformer:
            # A pipeline with two of them goes on to the second for good.
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
    """The residuals of a pipeline's transformers, and what they are used for. A copy holds none.

    They belong to a *run*, one denoising loop of one pipeline, and in it to a branch (prompt, negative prompt, both in
    one batch), which is told by what the transformer is called with. Those of a run are freed in its last step, or,
    where it ended early, when the next run begins, and by `forget`.

    Args:
        refresh: the option.

    Attributes:
        runs: of the latest call of each pipeline, also where its residuals are freed.
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
            arguments: of the call, by name.

        Raises:
            RuntimeError: no pipeline has called the transformer, or its scheduler does not tell the step.
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
        """The run of a new branch: that of another branch, or a new one, which begins with this step."""
        for branch in self._branches:
            if branch.schedule.is_of(step, transformer):
                return branch.schedule
        over = lambda run: run.timesteps() is not step.timesteps and run.pipeline() in (None, step.pipeline)
        self.runs = [run for run in self.runs if not over(run)]
        # To read them is to wait for the GPU.
        times = noise_changes(step.timesteps[-step.steps :].tolist()) if self.refresh.decides else ()
        spent = sum(len(run.exact) for run in self.runs if run.timesteps() is step.timesteps)
        owners = {"timesteps": step.timesteps, "pipeline": step.pipeline, "transformer": transformer}
        refs: dict[str, Any] = {name: weakref.ref(owner) for name, owner in owners.items()}
        run = Run(self.refresh, step.steps, times, spent, **refs)
        self.runs.append(run)
        return run

    def end(self, branch: PipelineBranch) -> None:
        """The forward call is over: after a run's last one its residuals are freed."""
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
        """Free the residuals of some branches, which a traceback may still hold."""
        with self._lock:
            for branch in filter(over, self._branches):
                branch.free()
            self._branches = [branch for branch in self._branches if not over(branch)]


def versions_of(arguments: Mapping[str, Any]) -> list[int]:
    """Of the tensors in there, which tell of changes in place."""
    # What inference mode has made has no version.
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors_in(arguments)]


def same_values(expected: Any, given: Any) -> bool:
    """Whether two values have the same form and equal leaves; tensors that are not the same object are read."""
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
    """Memory of a GPU that torch can still give out; None of other devices."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
