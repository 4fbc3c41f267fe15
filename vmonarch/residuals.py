"""Residual sharing: what approximate attention lacks changes little from one denoising step to the next.

In a few steps attention is exact, and its difference from approximate attention, the residual, is kept for every layer
and guidance branch. In the steps between, the last residual is added to approximate attention.

Source: Yuan et al., DiTFastAttn: Attention Compression for Diffusion Transformer Models (2024), "window attention with
residual sharing", where the approximation is attention in a window.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from vmonarch.host_memory import Arriving, HostMemory
from vmonarch.kernels.residual.api import (
    DTYPES,
    add_residual,
    attention_residual,
    check_residual_dtype,
    residual_bytes,
)
from vmonarch.kernels.residual.reference import Residual
from vmonarch.pipeline_calls import at_end_of_call, watch_calls
from vmonarch.steps import DenoisingStep, denoising_step
from vmonarch.validation import DenseSet, check_flag

# What errors tell to use in its place, by the name of a preset too: "near-lossless" is the default.
NO_REFRESH = 'use refresh=None, or the preset "vmonarch", which has none'
# Steps that a guidance branch may sit out and still find its residual.
_IDLE_STEPS = 2


def spaced_steps(count: int, steps: int) -> tuple[int, ...]:
    """`count` of `steps` denoising steps, from the first on at intervals that grow evenly.

    The i-th is at steps · (i / count)², rounded, and at least at i: 8 of 50 are 0, 1, 3, 7, 12, 20, 28, 38. Attention
    changes most at the start of a run.
    """
    return tuple(max(i, round(steps * (i / count) ** 2)) for i in range(count))


@dataclasses.dataclass(frozen=True)
class Refresh:
    """Which denoising steps are computed with exact attention and renew the residual, and how that is kept.

    Args:
        steps: how many (int), which fraction, rounded up (float), both spaced by `spaced_steps`; or a collection of
            step indices. A step in which a layer has no residual is always such a step: the first, the first of the
            second transformer in a pipeline of two, and the first after one that a cache has skipped.
        dtype: of the residuals: "int8", with a scale for every token and head, or "bfloat16", of twice the size.
        offload: keep them in the host's pinned memory, from where they come back one layer ahead. On a GPU only.

    Raises:
        TypeError, ValueError: an option has an unsupported value.
    """

    steps: Any
    dtype: str = "int8"
    offload: bool = False

    def __post_init__(self) -> None:
        chosen = DenseSet("refresh", self.steps)
        if not chosen.some:
            raise ValueError(f"refresh must name at least one step, got {self.steps!r}; None leaves residuals out")
        check_residual_dtype(self.dtype, "refresh.dtype")
        check_flag("refresh.offload", self.offload)
        object.__setattr__(self, "steps", chosen.dense)

    @classmethod
    def parse(cls, refresh: object) -> Refresh | None:
        """What an option `refresh` stands for: None, a `Refresh`, a mapping of its arguments, or its `steps`.

        Raises:
            TypeError, ValueError: it is none of these, or has an unsupported value.
        """
        if refresh is None or isinstance(refresh, Refresh):
            return refresh
        if not isinstance(refresh, Mapping):
            return cls(refresh)
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(refresh) - set(names))
        if unknown or "steps" not in refresh:
            raise TypeError(f"refresh must have steps, and of {', '.join(names)} no others, got {dict(refresh)!r}")
        return cls(**refresh)

    def schedule(self, steps: int) -> tuple[int, ...]:
        """The steps of a run of `steps` that refresh.

        Raises:
            ValueError: there are fewer steps than asked for.
        """
        chosen = DenseSet("refresh", self.steps)
        found = tuple(step for step in range(steps) if chosen.contains(step, steps))
        return found if isinstance(chosen.dense, tuple) else spaced_steps(len(found), steps)

    def at(self, step: int, steps: int) -> tuple[int, bool]:
        """(the step since which a residual must have been made to be used in this one, whether one of this is kept).

        The first step has no residual, whether it is in the schedule or not; one that the next step renews is not made.
        """
        schedule = self.schedule(steps)
        due = max((chosen for chosen in schedule if chosen <= step), default=0)
        return due, step + 1 < steps and step + 1 not in schedule


class _Kept(NamedTuple):
    """A residual, the step in which it was made, and through what it comes back if it is in the host's memory."""

    step: int
    residual: Residual
    host: HostMemory | None


@dataclasses.dataclass(kw_only=True)
class Branch:
    """The calls of a transformer in one run that differ in nothing but step and latents, and their residuals.

    Args:
        sharing: what they are shared by.
        layers: how many keep a residual.
        step: of the latest call.
        due: a residual must have been made in this step or later to be used.
        kept: whether the residual of this step is of use in the next.
        residuals: by layer, in the order of layers; see `ResidualSharing.attend`.
        arriving: those that are on their way from the host.
    """

    sharing: ResidualSharing
    layers: int
    step: int = -1
    due: int = 0
    kept: bool = False
    residuals: dict[Any, _Kept] = dataclasses.field(default_factory=dict)
    arriving: dict[Any, Arriving] = dataclasses.field(default_factory=dict)

    def layers_on(self, device: torch.device) -> int:
        """How many layers may keep their residual on a device."""
        return self.layers

    def enter(self, step: int, steps: int) -> None:
        """A forward call begins in this step of so many."""
        self.step = step
        self.due, self.kept = self.sharing.refresh.at(step, steps)
        self.arriving.clear()


@dataclasses.dataclass(kw_only=True)
class PipelineBranch(Branch):
    """A branch in one run of a pipeline of diffusers, with one call a step.

    Args:
        run: the timesteps of the run.
        pipeline: whose it is.
        transformer: which is called.
        conditioning: what the transformer is called with, without latents and timestep.
        versions: of the tensors in there, which tell of changes in place.
        evaluation: of the latest call.
        last: whether no other one follows.
    """

    run: weakref.ref[torch.Tensor]
    pipeline: weakref.ref[Any]
    transformer: weakref.ref[torch.nn.Module]
    conditioning: Mapping[str, Any]
    versions: list[int]
    evaluation: int = -1
    last: bool = False

    def layers_on(self, device: torch.device) -> int:
        transformer = self.transformer()
        assert transformer is not None
        devices = [next(layer.parameters()).device for layer in _sharing_layers(transformer)]
        # Offloaded layers come to the device where the others are.
        return sum(other == device or other.type != device.type for other in devices)

    def may_go_on(self, step: DenoisingStep, transformer: torch.nn.Module) -> bool:
        """Whether what the branch holds may be of use in that step, in which this transformer is called, or later."""
        if self.run() is not step.timesteps:
            # The run of another pipeline goes on, as long as its scheduler has not begun another one.
            pipeline = self.pipeline()
            return pipeline is not None and pipeline.scheduler.timesteps is self.run()
        if self.transformer() is not transformer:
            # A pipeline with two of them goes on to the second for good.
            return self.step == step.step
        return step.step - 1 - _IDLE_STEPS <= self.step <= step.step

    def is_of(self, step: DenoisingStep, transformer: torch.nn.Module, conditioning: Mapping[str, Any]) -> bool:
        """Whether a call is the next one of the branch."""
        follows = self.run() is step.timesteps and self.evaluation < step.evaluation
        unchanged = self.transformer() is transformer and self.versions == _versions(self.conditioning)
        return follows and unchanged and same_arguments(self.conditioning, conditioning)


def _versions(conditioning: Mapping[str, Any]) -> list[int]:
    tensors = (tensor for value in conditioning.values() for tensor in tensors_in(value))
    # What inference mode has made has no version.
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def same_arguments(expected: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether two sets of arguments, by name, have the same values; tensors that are not the same object are read."""
    return expected.keys() == given.keys() and all(same_value(expected[name], given[name]) for name in given)


def same_value(expected: Any, given: Any) -> bool:
    """Whether two arguments are the same object, equal tensors, equal values, or sequences or mappings of such."""
    if expected is given:
        return True
    if isinstance(expected, Mapping) and isinstance(given, Mapping):
        return same_arguments(expected, given)
    if isinstance(expected, (tuple, list)) and isinstance(given, (tuple, list)):
        return len(expected) == len(given) and all(map(same_value, expected, given))
    if isinstance(expected, torch.Tensor) and isinstance(given, torch.Tensor):
        alike = (expected.shape, expected.dtype, expected.device) == (given.shape, given.dtype, given.device)
        return alike and torch.equal(expected, given)
    return not isinstance(expected, torch.Tensor) and not isinstance(given, torch.Tensor) and expected == given


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that an argument is, or that its sequences and mappings hold."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)


class ResidualSharing:
    """The residuals of a pipeline's transformers, and what they are used for. A copy holds none.

    They belong to a *run*, one denoising loop of one pipeline, and in it to a branch (prompt, negative prompt, both in
    one batch), which is told by what the transformer is called with. Those of a run are freed in its last step, and
    when the call of the pipeline ends, whatever ends it (of a call that was running at the first `apply`, in the next).

    Args:
        refresh: the option.
    """

    def __init__(self, refresh: Refresh) -> None:
        watch_calls()
        self.refresh = refresh
        self._branches: list[PipelineBranch] = []
        self._lock = threading.RLock()
        # By device: a transformer may be spread over several.
        self._hosts: dict[torch.device, HostMemory] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ResidualSharing, (self.refresh,)

    @torch.compiler.disable(reason="refresh looks for the pipeline; compile_repeated_blocks leaves that out")
    def begin(
        self, transformer: torch.nn.Module, arguments: Mapping[str, Any], by_step: Collection[str]
    ) -> PipelineBranch:
        """The branch of a forward call that begins.

        Args:
            arguments: of the call, by name; `hidden_states` and those that `by_step` names change from step to step.

        Raises:
            RuntimeError: no pipeline has called the transformer, or its scheduler does not tell the step.
        """
        step = denoising_step(transformer, arguments.get("timestep"), "refresh", NO_REFRESH)
        latents = arguments.get("hidden_states")
        conditioning = {name: x for name, x in arguments.items() if name not in ("hidden_states", *by_step)}
        if latents is not None:
            conditioning["latents"] = (latents.shape, latents.dtype, latents.device)
        with self._lock:
            self._drop(lambda branch: not branch.may_go_on(step, transformer))
            branch = next((b for b in self._branches if b.is_of(step, transformer, conditioning)), None)
            if branch is None:
                branch = PipelineBranch(
                    sharing=self,
                    layers=len(_sharing_layers(transformer)),
                    run=weakref.ref(step.timesteps),
                    pipeline=weakref.ref(step.pipeline),
                    transformer=weakref.ref(transformer),
                    conditioning=conditioning,
                    versions=_versions(conditioning),
                )
                self._branches.append(branch)
                at_end_of_call(step.pipeline, self.end_runs_of)
            branch.evaluation, branch.last = step.evaluation, step.last
            branch.enter(step.step, step.steps)
        self._fetch(branch, next(iter(branch.residuals), None))
        return branch

    def end(self, branch: PipelineBranch | None) -> None:
        """The forward call is over: after a run's last one its residuals are freed."""
        if branch is not None and branch.last:
            self._drop(lambda other: other is branch)

    def end_runs_of(self, pipeline: Any) -> None:
        """The call of a pipeline is over, also where it has ended before its last step."""
        self._drop(lambda branch: branch.pipeline() is pipeline)

    def forget(self) -> None:
        """Free all residuals."""
        self._drop(lambda branch: True)

    def _drop(self, over: Callable[[PipelineBranch], bool]) -> None:
        """Free the residuals of some branches, which the traceback of an exception may still hold."""
        with self._lock:
            for branch in filter(over, self._branches):
                branch.residuals.clear()
                branch.arriving.clear()
                # An interrupted call may still hold the branch.
                branch.conditioning = {}
            self._branches = [branch for branch in self._branches if not over(branch)]

    def attend(
        self,
        branch: Branch,
        layer: Any,
        exact: Callable[[], torch.Tensor],
        approximate: Callable[[], torch.Tensor],
        implementation: str,
    ) -> torch.Tensor:
        """Attention of one layer: exact where the residual is due, else approximate with the residual.

        Args:
            layer: what tells its residuals from others: its number, and that of samples, since FasterCache
                leaves half of a batch out of some steps.
            exact, approximate: compute [B, S, H, E]; what the second returns may be written to.
        """
        kept = branch.residuals.get(layer)
        if kept is not None and kept.step >= branch.due:
            return add_residual(approximate(), self._take(branch, layer), implementation=implementation)
        out = exact()
        if branch.kept:
            self._check_memory(branch, out)
            residual = attention_residual(out, approximate(), dtype=self.refresh.dtype, implementation=implementation)
            branch.residuals[layer] = self._store(branch, residual, kept)
        else:
            branch.residuals.pop(layer, None)
        return out

    def _offloads(self, device: torch.device) -> bool:
        return self.refresh.offload and device.type == "cuda"

    def _check_memory(self, branch: Branch, out: torch.Tensor) -> None:
        """Check, with the first residual of a branch on a device, that there is memory for those of all its layers.

        Raises:
            torch.OutOfMemoryError: there is not.
        """
        first = all(kept.residual.values.device != out.device for kept in branch.residuals.values())
        free = _free_bytes(out.device) if first and not self._offloads(out.device) else None
        if free is None:
            return
        (B, S, H, E), layers = out.shape, branch.layers_on(out.device)
        needed = {dtype: layers * residual_bytes(B, S, H, E, dtype) for dtype in DTYPES}
        if needed[self.refresh.dtype] > free:
            smaller = [f'dtype="{dtype}" ({size / 2**30:.1f} GiB)' for dtype, size in needed.items() if size <= free]
            raise torch.OutOfMemoryError(
                f"refresh needs {needed[self.refresh.dtype] / 2**30:.1f} GiB for the residuals of {layers} layers, for"
                f" each guidance branch, but {free / 2**30:.1f} GiB are free on {out.device}; these fit:"
                f" vmonarch.Refresh({self.refresh.steps!r}, {' or '.join([*smaller, 'offload=True'])})"
            )

    def _store(self, branch: Branch, residual: Residual, before: _Kept | None) -> _Kept:
        """A residual that has just been made, where it is to be kept: in place of the layer's last one."""
        device = residual.values.device
        if not self._offloads(device):
            return _Kept(branch.step, residual, None)
        with self._lock:
            host = self._hosts.get(device) or HostMemory(device)
            self._hosts[device] = host
        places = None if before is None else before.residual
        return _Kept(branch.step, Residual(*host.store(residual, places)), host)

    def _fetch(self, branch: Branch, layer: Any) -> None:
        """Begin to bring back what the layer needs, if that is in the host's memory and not on its way."""
        kept = branch.residuals.get(layer)
        if kept is not None and kept.host is not None and kept.step >= branch.due and layer not in branch.arriving:
            branch.arriving[layer] = kept.host.fetch(kept.residual)

    def _take(self, branch: Branch, layer: Any) -> Residual:
        """The residual of a layer, where it is needed; that of the next layer is on its way then."""
        kept = branch.residuals[layer]
        if kept.host is None:
            return kept.residual
        self._fetch(branch, layer)
        residual = Residual(*branch.arriving.pop(layer).wait())
        layers = list(branch.residuals)
        for following in layers[layers.index(layer) + 1 :][:1]:
            self._fetch(branch, following)
        return residual


def _sharing_layers(transformer: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a transformer that keep residuals."""
    spec = lambda module: getattr(getattr(module, "processor", None), "spec", None)
    return [module for module in transformer.modules() if getattr(spec(module), "refresh", None) is not None]


def _free_bytes(device: torch.device) -> int | None:
    """Memory of a GPU that torch can still give out; None of other devices."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
