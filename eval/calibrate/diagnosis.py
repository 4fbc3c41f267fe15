"""What heads lose: candidates compared with full attention at every step, layer and head of a model, on its own inputs.

The model samples with full attention, and its calls are `recorded` and computed again. At every self-attention, the
candidates see the same queries, keys and values, and their outputs are compared with the exact one by relative error
and mean row-KL. The KL is exact, because a Monarch row has a log-partition of its own
(docs/attention.md, "The log-partition").

What a head loses says little about what the model loses: later layers mend some errors and amplify others. So the calls
are computed again with gradients. Let v be the model's output, u a tensor of the same shape drawn from N(0, 1), and
g = ∂⟨u, v⟩/∂o at a head's output o. A candidate's error δ in o changes ⟨u, v⟩ by ⟨g, δ⟩ to first order, and
E ⟨g, δ⟩² = ‖J δ‖² is the square of the change in v, with the Jacobian J = ∂v/∂o. One backward pass gives it for all
layers, heads and candidates (Hutchinson's estimator). First order is far off where errors grow, by tenfold and more in
the first layers. So the call is also computed with a reference candidate in one layer at a time, and the first-order
squares of the layer are scaled to the change in v that this makes. Deep models do this only in `replaced_layers`; the
scales of the layers between are interpolated.

Where attention is joint over video and text, all this concerns the video's queries and keys among themselves.

Shapes: B batch, S = T·H·W tokens, H heads, D head dim; statistics are [steps, layers, heads].
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vmonarch import apply, restore
from vmonarch.attend import Attend, Result
from vmonarch.base import Layer, VideoAttentionProcessor
from vmonarch.call import Call
from vmonarch.configs import InputError
from vmonarch.families import known_family
from vmonarch.grid import LatentGrid
from vmonarch.installation import find_transformers
from vmonarch.kernels.flash_entropy.api import flash_entropy_attention
from vmonarch.options import Options, VMonarchOptions
from vmonarch.plan import FULL, AttentionPlan, method_attention, method_dict, method_flops
from vmonarch.processors import VMonarchProcessor
from vmonarch.steps import denoising_step

FORMAT = "vmonarch-diagnosis-1"
# The most layers in which the reference is measured.
_REPLACED = 8


# Sums of one layer at one step over prompts, guidance and rows, mostly [heads] in float64 on the host:
#   rows        number of rows that were summed
#   energy      squares of the exact output
#   squares     (with a candidate's name) squares of the difference to the exact output
#   kl          (with a candidate's name) KL(candidate's row ‖ softmax row) in nats
#   output      (with a candidate's name; with gradients) ⟨g, δ⟩²; its mean is, to first order, the square of the
#               change in the model's output
#   velocity    (with gradients; a number) squares of the model's output
#   change      (likewise, in `replaced_layers`) squares of its change when the layer has the reference
Totals = dict[Any, Any]


def measure(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grid: LatentGrid,
    candidates: Mapping[str, Options],
    gradient: torch.Tensor | None = None,
) -> Totals:
    """`Totals` of one call.

    Args:
        query, key, value: [B, S, H, D].
        gradient: g [B, S, H, D], see the module's docstring; None without gradients.
    """
    B, S, *_ = query.shape
    out, lse, _ = flash_entropy_attention(query, key, value)
    exact = out.double()
    totals: Totals = {"energy": exact.square().sum((0, 1, 3))}
    for name, options in candidates.items():
        approximate, weight = method_attention(query, key, value, options, grid=grid, return_lse=True)
        difference = approximate.double() - exact
        totals["squares", name] = difference.square().sum((0, 1, 3))
        totals["kl", name] = (lse.double() - weight.double()).sum((0, 2))
        if gradient is not None:
            totals["output", name] = (gradient * difference).sum((1, 3)).square().sum(0)
    return {"rows": B * S, **{key: total.cpu() for key, total in totals.items()}}


@dataclass(frozen=True)
class Rerun:
    """A call of a transformer that can be computed again, and the model's output `velocity` with full attention."""

    component: str
    step: int
    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    velocity: torch.Tensor


@contextlib.contextmanager
def recorded(pipe: Any, every: int = 1) -> Iterator[list[Rerun]]:
    """Record the transformers' calls, with full attention, at steps 0, every, 2·every, … while the block runs."""
    calls: list[Rerun] = []

    def keep(component: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        step, *_ = denoising_step(module, None, "a diagnosis", "leave `recorded`")
        if step % every == 0:
            calls.append(Rerun(component, step, module, args, kwargs, output[0]))

    restore(pipe)
    with contextlib.ExitStack() as hooks:
        for component, module in find_transformers(pipe).items():
            hooks.enter_context(module.register_forward_hook(functools.partial(keep, component), with_kwargs=True))
        yield calls


@dataclass
class Recorder:
    """Computes recorded calls again and collects the measurements.

    Args:
        candidates: options by name.

    Attributes:
        grid: of the videos. totals: by (transformer, step, layer).
        inputs: query, key and value [1, S, H, D] of one layer.
        again: the call that is being computed again.
    """

    candidates: dict[str, Options]
    grid: LatentGrid | None = None
    totals: dict[tuple[str, int, int], Totals] = field(default_factory=dict)
    inputs: tuple[torch.Tensor, ...] = ()
    again: Rerun | None = None
    noise: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @property
    def reference(self) -> str:
        """The candidate that replaces whole layers: VMonarch with its defaults, else the first."""
        plain = [name for name, options in self.candidates.items() if options == VMonarchOptions()]
        return [*plain, *self.candidates][0]

    def diagnose(self, pipe: Any, calls: Sequence[Rerun], *, sensitivity: bool = True) -> None:
        """Compute calls of a pipeline again and add what the candidates lose in them.

        Args:
            sensitivity: also measure what their errors change in the model's output: with gradients, and with one more
                call for each of `replaced_layers`, where the reference replaces that layer.

        Raises:
            InputError: see `differentiate`.
        """
        apply(pipe, DiagnosisProcessor(self))
        for self.again in calls:
            if not sensitivity:
                with torch.no_grad():
                    self.again.module(*self.again.args, **self.again.kwargs)
                continue
            noise = torch.randn(self.again.velocity.shape, generator=self.noise).to(self.again.velocity.device)
            differentiate(self.again, lambda found: (found.float() * noise).sum())  # noqa: B023
        if sensitivity:
            self._replace_layers(pipe, calls)
        restore(pipe)

    def receive(self, layer: int, grid: LatentGrid, gradient: torch.Tensor | None, *tensors: torch.Tensor) -> None:
        """Add the sums of a layer in the current call."""
        assert self.again is not None
        query, key, value, _ = tensors
        if self.grid not in (None, grid):
            raise ValueError(f"all videos must have one size: {tuple(self.grid or ())} and {tuple(grid)}")
        self.grid, self.inputs = grid, self.inputs or tuple(x[:1].clone() for x in (query, key, value))
        totals = measure(query, key, value, grid, self.candidates, gradient)
        if gradient is not None:
            totals["velocity"] = self.again.velocity.double().square().sum().item()
        self._add(self.again, layer, totals)

    def _add(self, call: Rerun, layer: int, totals: Totals) -> None:
        known = self.totals.setdefault((call.component, call.step, layer), {})
        for key, value in totals.items():
            known[key] = known.get(key, 0) + value

    def _replace_layers(self, pipe: Any, calls: Sequence[Rerun]) -> None:
        """Add the change of the model's output when the reference replaces one of `replaced_layers` at a time."""
        sizes = {name: len(known_family(module).layers(module)) for name, module in find_transformers(pipe).items()}
        options = {self.reference: self.candidates[self.reference], FULL: None}
        heads = self.inputs[0].shape[2] if self.inputs else 0
        for layer in sorted({layer for layers in sizes.values() for layer in replaced_layers(layers)}):
            names = {name: [self.reference if i == layer else FULL for i in range(n)] for name, n in sizes.items()}
            plan = AttentionPlan(options, {name: [[one] * heads for one in row] for name, row in names.items()})
            apply(pipe, VMonarchProcessor(plan=plan))
            for call in calls:
                if layer in replaced_layers(sizes[call.component]):
                    with torch.no_grad():
                        changed = call.module(*call.args, **call.kwargs)[0].double() - call.velocity.double()
                    self._add(call, layer, {"change": changed.square().sum().item()})


def replaced_layers(layers: int) -> tuple[int, ...]:
    """The layers that the reference replaces, one at a time; at most `_REPLACED`.

    In deeper models these are the first layer, powers of two and the last, because errors grow most in the first ones.
    """
    if layers <= _REPLACED:
        return tuple(range(layers))
    return (0, *(1 << n for n in range(_REPLACED - 2) if 1 << n < layers - 1), layers - 1)


def differentiate(call: Rerun, loss: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Compute a call again, backpropagate a loss of its output, but not into parameters, and return the loss.

    Blocks are checkpointed, so that only one at a time keeps what its backward pass needs.

    Raises:
        InputError: the transformer cannot be differentiated, or memory runs out.
    """
    module = call.module
    learnt = [parameter for parameter in module.parameters() if parameter.requires_grad]
    checkpointed = module.is_gradient_checkpointing
    try:
        for parameter in learnt:
            parameter.requires_grad_(False)
        module.enable_gradient_checkpointing()
        with torch.enable_grad():
            found = loss(module(*call.args, **call.kwargs)[0])
            found.backward()
    except RuntimeError as error:
        instead = "leave out --refine, and what it needs, with --no-sensitivity (sensitivity=False)"
        raise InputError("sensitivity", f"cannot be measured: {error}; {instead}") from error
    finally:
        for parameter in learnt:
            parameter.requires_grad_(True)
        if not checkpointed:
            module.disable_gradient_checkpointing()
    return found.item()


@dataclass(frozen=True)
class Watched:
    """Attention of a layer that passes its inputs and output to `receive`, in `differentiate` also the gradient.

    Args:
        receive: gets the grid, the gradient or None, query, key, value and output.
    """

    attend: Attend
    receive: Callable[..., None]
    # Holds tensors while the backward pass of a checkpointed block runs.
    kept: list[tuple[torch.Tensor, ...]] = field(default_factory=list)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> Result:
        if call.heads is not None:
            raise NotImplementedError("a diagnosis records all heads, but context parallelism spreads them over ranks")
        out, lse = self.attend(query, key, value, call)
        if not torch.is_grad_enabled():
            self.receive(call.grid, None, query, key, value, out)
            return out, lse
        if not out.requires_grad:
            # In the first layer, no input requires a gradient.
            out.requires_grad_()
        if torch._C._current_graph_task_id() != -1:
            # The block is computed again in backward, because it is checkpointed; the gradient comes next.
            self.kept.append(tuple(x.detach() for x in (query, key, value, out)))
        else:
            out.register_hook(lambda gradient: self.receive(call.grid, gradient, *self.kept.pop()))
        return out, lse


def full_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> Result:
    """Exact attention by our own op, which the candidates are compared with."""
    return flash_entropy_attention(query, key, value)[:2]


class DiagnosisProcessor(VideoAttentionProcessor):
    """Full attention in all layers, with a `Recorder` that sees their inputs."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def attention(self, layer: Layer) -> Watched:
        return Watched(full_attention, functools.partial(self.recorder.receive, layer.block))


def document(recorder: Recorder, times: Mapping[str, float]) -> dict[str, Any]:
    """The recorded measurements as JSON.

    Args:
        times: see `head_times`.

    Returns:
        {"format", "grid", "full_ms", "candidates": {name: {"options", "flops", "ms"}}, "transformers": {name: {"steps",
        "layers", "heads", "rows", "candidates": {name: {"error", "layer_error", "kl", "output_error"}}}}}. Values are
        [steps, layers, heads]. "flops" are relative to full attention; "ms" and "full_ms" are `times`, None without
        them. "error" is ‖o - o*‖/‖o*‖ of a head's outputs over all rows; "layer_error" is the share
        ‖o - o*‖²/Σ_heads ‖o*‖², which adds up over the heads of a layer; "kl" is the mean over rows, in nats;
        "output_error", only with sensitivity, is the square of the change that the head's error makes in the model's
        output, relative to the square of that output.
    """
    grid = recorder.grid
    assert grid is not None
    full = method_flops(None, grid, recorder.inputs[0].shape[-1])
    work = lambda options: method_flops(options, grid, recorder.inputs[0].shape[-1]) / full
    about = {
        name: {"options": method_dict(options), "flops": work(options), "ms": times.get(name)}
        for name, options in recorder.candidates.items()
    }
    return {
        "format": FORMAT,
        "grid": list(grid),
        "full_ms": times.get(FULL),
        "candidates": about,
        "transformers": {
            component: _of_transformer(recorder, component)
            for component in dict.fromkeys(name for name, _, _ in recorder.totals)
        },
    }


def _of_transformer(recorder: Recorder, component: str) -> dict[str, Any]:
    """A transformer's entry in `document`."""
    steps = sorted({step for name, step, _ in recorder.totals if name == component})
    layers = 1 + max(layer for name, _, layer in recorder.totals if name == component)
    found = [[recorder.totals[component, step, layer] for layer in range(layers)] for step in steps]
    energy = _stacked(found, "energy")
    candidates = {}
    for name in recorder.candidates:
        squares = _stacked(found, ("squares", name))
        candidates[name] = {
            "error": _plain((squares / energy).sqrt()),
            "layer_error": _plain(squares / energy.sum(-1, keepdim=True)),
            "kl": _plain(_stacked(found, ("kl", name), over="rows")),
        }
    if "velocity" in found[0][0]:
        for name, errors in _output_errors(found, recorder.candidates, recorder.reference).items():
            candidates[name]["output_error"] = _plain(errors)
    return {
        "steps": steps,
        "layers": layers,
        "heads": energy.shape[-1],
        "rows": found[0][0]["rows"],
        "candidates": candidates,
    }


def head_times(
    tensors: tuple[torch.Tensor, ...], grid: LatentGrid, candidates: Mapping[str, Options]
) -> dict[str, float]:
    """Milliseconds per head of every candidate and of exact attention ("full"), from forward calls with all heads and a
    cold L2; empty on a CPU.

    Args:
        tensors: query, key and value [B, S, H, D].
        candidates: options by name.
    """
    from diffusers.models.attention_dispatch import dispatch_attention_fn
    from triton.testing import do_bench

    query, key, value = tensors
    if query.device.type != "cuda":
        return {}
    runs: dict[str, Callable[[], Any]] = {FULL: functools.partial(dispatch_attention_fn, query, key, value)}
    for name, options in candidates.items():
        runs[name] = functools.partial(method_attention, query, key, value, options, grid=grid)
    with torch.no_grad():
        return {name: do_bench(run, return_mode="median") / query.shape[2] for name, run in runs.items()}


def _stacked(found: list[list[Totals]], key: Any, over: str | None = None) -> torch.Tensor:
    """An entry of `Totals` as [steps, layers, …], divided by the entry `over` if it is given."""
    of = lambda totals: totals[key] if over is None else totals[key] / totals[over]
    return torch.stack([torch.stack([of(totals) for totals in row]) for row in found])


def _output_errors(found: list[list[Totals]], candidates: Iterable[str], reference: str) -> dict[str, torch.Tensor]:
    """Output errors [steps, layers, heads] by candidate: first order, scaled to the reference's measured change."""
    first = {name: _stacked(found, ("output", name), over="velocity") for name in candidates}
    layers = len(found[0])
    known = list(replaced_layers(layers))
    change = torch.tensor(
        [[row[i]["change"] / row[i]["velocity"] for i in known] for row in found], dtype=torch.float64
    )
    expected = first[reference].sum(-1)[:, known]
    # A layer in which the reference is exact has nothing to scale to.
    log_scale = torch.where((change > 0) & (expected > 0), (change / expected).log(), 0.0)
    every = [np.interp(np.log1p(range(layers)), np.log1p(known), row) for row in log_scale.numpy()]
    scale = torch.from_numpy(np.exp(every))
    return {name: scale[..., None] * values for name, values in first.items()}


def _plain(tensor: torch.Tensor) -> list[Any]:
    """Lists of numbers with six significant digits.

    Raises:
        ValueError: a number is not finite.
    """
    if not tensor.isfinite().all():
        raise ValueError("a statistic is not finite: the model gives NaN or infinity, or an output that is all zero")
    return [[[float(f"{value:.6g}") for value in row] for row in rows] for rows in tensor.tolist()]
