"""What attention did in the latest call of a pipeline: its exact steps and their errors, its work, its memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from functools import partial
from itertools import groupby
from typing import Any

import torch

from vmonarch.attend import ByHead, Exact, Op, method_of
from vmonarch.families import heads_of, known_family
from vmonarch.grid import LatentGrid
from vmonarch.hooks import record_of
from vmonarch.installation import find_transformers
from vmonarch.own import ours_of
from vmonarch.plan import method_flops
from vmonarch.validation import is_dense

# For models whose config does not give it. Most methods' share of FLOPs does not depend on it.
_HEAD_DIM = 128


@dataclasses.dataclass(frozen=True)
class Report:
    """What attention of the video's tokens did in the latest call of a pipeline; `print` shows it in two lines.

    Args:
        method: the processor, with the options that are not the defaults.
        grid: the latent grid, (frames, height, width) in tokens; None before the first call.
        steps: number of denoising steps; None where no option needs it.
        exact: the steps of exact attention, with the error of residual sharing measured there, relative to exact
            attention's output; None where none was measured.
        eight_bits: the exact steps in eight bits; None where `refresh.precision` does not ask for them.
        predicted: the steps whose output `refresh.cache` predicted.
        forward: the computed steps that measured the error of a prediction, with that error, relative to the output.
        work: attention FLOPs over those of full attention; None where they depend on the data or no call was made.
        residual_bytes: memory of the residuals of all guidance branches.
    """

    method: str
    grid: tuple[int, int, int] | None
    steps: int | None
    exact: dict[int, float | None]
    eight_bits: tuple[int, ...] | None
    predicted: tuple[int, ...]
    forward: dict[int, float]
    work: float | None
    residual_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values; steps with their errors become lists of [step, error]."""
        pairs = {name: [list(pair) for pair in getattr(self, name).items()] for name in ("exact", "forward")}
        return dataclasses.asdict(self) | pairs

    def __str__(self) -> str:
        parts = [] if self.steps is None else [f"{len(self.exact)} of {self.steps} steps exact ({_ranges(self.exact)})"]
        if self.eight_bits is not None:
            parts.append(f"{len(self.eight_bits)} of them in eight bits ({_ranges(self.eight_bits) or 'none'})")
        if self.predicted:
            parts.append(f"{len(self.predicted)} predicted ({_ranges(self.predicted)})")
        for what, found in (("sharing", self.exact), ("prediction", self.forward)):
            if errors := [error for error in found.values() if error is not None]:
                parts.append(f"error of {what} {min(errors):.3f} to {max(errors):.3f}")
        if self.work is not None:
            parts.append(f"attention work {100 * self.work:.0f} % of full")
        if self.residual_bytes:
            parts.append(f"residuals {self.residual_bytes / 2**30:.2f} GiB")
        return f"{self.method}\n{'; '.join(parts)}"


def report(pipe_or_transformer: Any) -> Report:
    """What attention did in the latest call of a pipeline, or of a transformer, to which a processor is applied.

    Raises:
        TypeError: `pipe_or_transformer` has no supported transformer.
        ValueError: no processor is applied.
    """
    transformers = find_transformers(pipe_or_transformer).values()
    applied = {transformer: record for transformer in transformers if (record := record_of(transformer)) is not None}
    if not applied:
        raise ValueError("no processor is applied: stock attention has no report, and vmonarch.restore ends ours")
    spec, *_ = specs = [record.processor for record in applied.values()]
    grid = next((record.grid for record in applied.values() if record.grid is not None), None)
    # The transformers of a pipeline share one `ResidualSharing`, unless they got their processors one by one.
    sharings = dict.fromkeys(record.sharing for record in applied.values() if record.sharing is not None)
    runs = [run for sharing in sharings for run in sharing.runs if run.transformer() in applied]
    if isinstance(pipe_or_transformer, torch.nn.Module):
        pipe_or_transformer = next((run.pipeline() for run in reversed(runs)), None)
    # Other pipelines may have the same transformer.
    runs = [run for run in runs if run.pipeline() is pipe_or_transformer]
    for run in runs:
        run.read()
    shares = [share for transformer in applied for share in _shares(transformer, grid)]
    steps = next((run.steps for run in runs), next(iter(applied.values())).steps)
    dense = [step for step in range(steps) if is_dense("dense_steps", spec.dense_steps, step, steps)]
    exact: dict[int, float | None] = dict.fromkeys(dense)
    eight_bits = {step for run in runs for step in run.exact if run.precision(step)} - exact.keys()
    exact |= {step: error for run in runs for step, error in run.exact.items()}
    predicted = tuple(sorted(step for run in runs for step in run.predicted))
    # Without runs all steps count. A run begins with an exact step. Renewals also compute approximate attention.
    of_run = lambda run: range(min(run.exact, default=0), run.step + 1)
    ran = set(range(steps)) if not sharings else {step for run in runs for step in of_run(run)}
    done, rough = max(ran, default=-1) + 1, len(ran - {*exact, *predicted})
    whole = done - rough - len(predicted)
    rough += sum(len(run.renewals) for run in runs)
    of = lambda share: (done - len(predicted) if share == 1 else whole + share * rough) / done if done else share
    work = None if None in shares or sharings and not done else sum(map(of, shares)) / len(shares)
    return Report(
        method=", ".join(dict.fromkeys(map(repr, specs))),
        grid=None if grid is None else (*grid,),
        steps=steps or None,
        exact=dict(sorted(exact.items())),
        eight_bits=tuple(sorted(eight_bits)) if runs and runs[0].refresh.precision else None,
        predicted=predicted,
        forward={step: e for run in runs for step, e in run.forward.items() if e is not None},
        work=work,
        residual_bytes=max((run.residual_bytes for run in runs), default=0),
    )


def _shares(transformer: Any, grid: LatentGrid | None) -> Iterator[float | None]:
    """The FLOPs of every head of every layer over those of exact attention."""
    head_dim = getattr(transformer.config, "attention_head_dim", _HEAD_DIM)
    for _, attn in known_family(transformer).layers(transformer):
        ours = ours_of(attn)
        if ours is None:
            yield from [1.0] * heads_of(attn)
            continue
        element = method_of(ours.attend)
        of_plan = isinstance(element, ByHead)
        heads = [element.methods[name] for name in element.heads] if of_plan else [element] * heads_of(attn)
        yield from (_share(head, grid, head_dim) for head in heads)


def _share(element: Any, grid: LatentGrid | None, head_dim: int) -> float | None:
    """FLOPs of an element over those of exact attention; None where they are not known."""
    if isinstance(element, Exact):
        return 1.0
    flops = partial(method_flops, element.options) if isinstance(element, Op) else getattr(element, "flops", None)
    work = None if flops is None or grid is None else flops(grid, head_dim)
    return None if grid is None or work is None else work / method_flops(None, grid, head_dim)


def _ranges(numbers: Collection[int]) -> str:
    """Numbers in increasing order, consecutive ones as first–last."""
    runs = ([n for _, n in run] for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]))
    return ", ".join(f"{run[0]}–{run[-1]}" if run[1:] else f"{run[0]}" for run in runs)
