"""Other ways to share residuals than on a schedule: `python -m vmonarch.eval.studies.residual_sharing`.

    schedule:8              eight steps of all layers, as `refresh` does
    extrapolated:8,0.5      the same, with half of the slope between the last two residuals added
    pooled:8,2              the same, but for every two consecutive tokens the mean of their residuals is kept
    heads:8,0.5             the same, but only for the half of a layer's heads whose residuals are the largest
    layer:0.05              a layer computes exact attention where its relative error exceeds 5 %
    head:0.05               the same of each head
    late:0.05               of each head, in the step after the one in which its error exceeds 5 %

The error is that of approximate attention with the residual, estimated on `--rows` queries drawn anew for every call,
for which exact attention is computed: ‖ours - exact‖ / ‖exact‖ over these rows. Every video decides for itself. For the
study exact attention is computed everywhere and used where the strategy says so; the work counts what it says, the
sampled rows too. Residuals are kept as they are, not in int8.

Legend: B videos, S tokens, H heads, E value dim.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import vmonarch
from vmonarch.configs.methods import resolve_method
from vmonarch.eval.attention_flops import recorded_call, relative_flops
from vmonarch.eval.compare import prompt_scorer
from vmonarch.eval.record import script_parser, script_record
from vmonarch.eval.render.table import markdown, percent, shown_number
from vmonarch.eval.similarity import similarity
from vmonarch.files import write_json
from vmonarch.finetune.embedded.data import held_out_prompts
from vmonarch.pipelines.config import SamplingConfig
from vmonarch.pipelines.loading import LoadedModel, complete_and_load
from vmonarch.pipelines.sampling import decode, denoise
from vmonarch.residuals import Branch, Refresh, ResidualSharing, spaced_steps

# Those on a schedule, and the field of `Strategy` that their second number is.
SCHEDULED = {"schedule": "", "extrapolated": "slope", "pooled": "tokens", "heads": "share"}
STRATEGIES = (*SCHEDULED, "layer", "head", "late")


@dataclass
class Strategy:
    """When residuals are renewed, and the work that it took.

    Args:
        kind: of STRATEGIES.
        steps: that renew all of them; none but the first where errors decide.
        tolerance: the relative error that is exceeded.
        slope: share of the last two residuals' slope that is added.
        tokens: as many consecutive ones have one residual, the mean of theirs.
        share: of the heads, the rest of which has no residual.
        rows: queries that errors are estimated on.
    """

    kind: str
    steps: tuple[int, ...] = (0,)
    tolerance: float = 0.0
    slope: float = 0.0
    tokens: float = 1
    share: float = 1.0
    rows: int = 0
    # Of all calls: the share of exact attention that was computed.
    shares: list[float] = field(default_factory=list)

    @classmethod
    def parse(cls, word: str, steps: int, rows: int) -> Strategy:
        """What a word of the command line stands for."""
        kind, _, numbers = word.partition(":")
        values = [float(number) for number in numbers.split(",")]
        if kind in SCHEDULED:
            option: dict[str, Any] = dict(zip([SCHEDULED[kind]], values[1:], strict=False))
            return cls(kind, spaced_steps(int(values[0]), steps), **option)
        return cls(kind, tolerance=values[0], rows=rows)


@dataclass
class _Layer:
    """The residual of a layer [B, S, H, E], the one before, and the steps in which they were made [B, H]."""

    last: torch.Tensor
    made: torch.Tensor
    before: torch.Tensor | None = None
    made_before: torch.Tensor | None = None
    # Which heads were too far off in the step before.
    late: torch.Tensor | None = None
    # As of a residual that is not offloaded.
    host: None = None


class StudiedSharing(ResidualSharing):
    """Residual sharing by another strategy."""

    def __init__(self, refresh: Refresh, strategy: Strategy) -> None:
        super().__init__(refresh)
        self.strategy = strategy

    def attend(
        self,
        branch: Branch,
        layer: Any,
        exact: Callable[[], torch.Tensor],
        approximate: Callable[[], torch.Tensor],
        implementation: str,
    ) -> torch.Tensor:
        true, cheap = exact().float(), approximate()
        B, S, H, _ = true.shape
        strategy, step = self.strategy, branch.step
        state: Any = branch.residuals.get(layer)
        now = torch.full((B, H), step, device=true.device)
        if state is None:
            branch.residuals[layer] = _Layer(self._kept(true - cheap), now)  # type: ignore[assignment]
            strategy.shares.append(1.0)
            return true.to(cheap.dtype)
        shared = cheap + self._estimate(state, step)
        if strategy.rows:
            rows = torch.randint(S, (strategy.rows,), device=true.device)
            errors, sizes = ((x[:, rows] ** 2).sum((1, 3)) for x in (shared - true, true))
            if strategy.kind == "layer":
                errors, sizes = (x.sum(1, keepdim=True).expand(B, H) for x in (errors, sizes))
            renewed = errors > strategy.tolerance**2 * sizes
            if strategy.kind == "late":
                late, state.late = state.late, renewed
                renewed = torch.zeros_like(renewed) if late is None else late
        else:
            renewed = torch.full((B, H), step in strategy.steps, device=true.device)
        strategy.shares.append(float(renewed.float().mean()) + strategy.rows / S)
        places = renewed[:, None, :, None]
        if state.before is None:
            state.before, state.made_before = state.last, state.made
        state.before = torch.where(places, state.last, state.before)
        state.made_before = torch.where(renewed, state.made, state.made_before)
        state.last = torch.where(places, self._kept(true - cheap), state.last)
        state.made = torch.where(renewed, now, state.made)
        return torch.where(places, true, shared).to(cheap.dtype)

    def _kept(self, residual: torch.Tensor) -> torch.Tensor:
        """What is kept of a residual [B, S, H, E], in its shape."""
        tokens, H = int(self.strategy.tokens), residual.shape[2]
        residual = residual.unflatten(1, (-1, tokens)).mean(2).repeat_interleave(tokens, 1)
        norms = residual.square().sum((1, 3), keepdim=True)  # [B, 1, H, 1]
        largest = norms.topk(math.ceil(self.strategy.share * H), 2).values[:, :, -1:]
        return residual * (norms >= largest)

    def _estimate(self, state: _Layer, step: int) -> torch.Tensor:
        if not self.strategy.slope or state.before is None:
            return state.last
        assert state.made_before is not None
        gap = (state.made - state.made_before).clamp(min=1)
        ahead = ((step - state.made) / gap).clamp(max=1.0) * self.strategy.slope
        return state.last + (state.last - state.before) * ahead[:, None, :, None]


def frames_of(model: LoadedModel, config: SamplingConfig, prompts: Sequence[str], first: int) -> list[torch.Tensor]:
    """Videos [F, 3, H, W] of the prompts, whose seeds count from `first`."""
    seeds = [first + i for i in range(len(prompts))]
    return list(decode(model.pipe, denoise(model, config, prompts, seeds).latents))


def study(words: Sequence[str], method: str, count: int, rows: int, config: SamplingConfig) -> dict[str, Any]:
    """Means over `count` prompts, by strategy: work, PSNR and SSIM to full attention, prompt score."""
    config, model = complete_and_load(config, None)
    score = prompt_scorer(model)
    base, full = resolve_method(method), resolve_method("full")
    prompts = [sample.prompt for sample in held_out_prompts()][:count]
    full.install(model.pipe)
    with recorded_call(model.pipe) as call:
        denoise(model, config, prompts[:1], [0], steps=1)
    cheap = relative_flops(call, [base], ["transformer"])[base.label]
    assert cheap is not None
    assert config.steps is not None
    strategies = {word: Strategy.parse(word, config.steps, rows) for word in words}
    found: dict[str, list[tuple[float, ...]]] = {word: [] for word in ("full", *words)}
    for first in range(0, count, config.batch_size):
        chunk = prompts[first : first + config.batch_size]
        full.install(model.pipe)
        references = frames_of(model, config, chunk, first)
        found["full"] += [(score(x, prompt) or 0.0,) for x, prompt in zip(references, chunk, strict=True)]
        for word, strategy in strategies.items():
            full.install(model.pipe)
            options = {**base.parameters.processor().config, "refresh": 1}
            vmonarch.apply(model.pipe, vmonarch.VMonarchProcessor.from_config(options))
            model.pipe.transformer._vmonarch_record.context.sharing = StudiedSharing(Refresh(1), strategy)
            for x, reference, prompt in zip(frames_of(model, config, chunk, first), references, chunk, strict=True):
                near = similarity(x, reference)
                found[word].append((score(x, prompt) or 0.0, *asdict(near).values()))
    names = ("prompt_score", "psnr", "ssim", "first_frame_psnr", "first_frame_ssim")
    results = {
        word: dict(zip(names, (statistics.fmean(column) for column in zip(*rows, strict=True)), strict=False))
        for word, rows in found.items()
    }
    for word, strategy in strategies.items():
        results[word]["work"] = statistics.fmean(strategy.shares) + cheap
    return {"results": results, "videos": count, "approximate_work": cheap, "device": str(model.device)}


def study_table(results: dict[str, Any]) -> str:
    """Work, similarity to full attention and prompt score of every strategy."""
    rows = []
    for word, row in results["results"].items():
        near = [shown_number(row.get(key), digits) for key, digits in (("psnr", 2), ("ssim", 4))]
        rows.append([word, percent(row.get("work", 1.0)), *near, f"{row['prompt_score']:.3f}"])
    table = markdown(["", "attention FLOPs", "PSNR dB", "SSIM", "prompt score"], rows)
    about = f"{results['videos']} videos; {results['environment']['device_name']}, {results['date']}."
    return f"{table}\n{about} Made by `{results['command']}`.\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = script_parser("studies.residual_sharing", __doc__, whole=True)
    parser.add_argument("strategies", nargs="+", help="such as schedule:8 layer:0.05")
    parser.add_argument("--method", default="vmonarch-plain:num_iterations=1", help="of kind vmonarch, without refresh")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    unknown = [word for word in options.strategies if word.partition(":")[0] not in STRATEGIES]
    if unknown:
        parser.error(f"strategies must be of {', '.join(STRATEGIES)}, got {unknown[0]!r}")
    config = SamplingConfig(
        prompts=("a red circle",), model=options.model, steps=options.steps, batch_size=options.batch_size
    )
    record = study(options.strategies, options.method, options.prompts, options.rows, config)
    record |= script_record("studies.residual_sharing", arguments, record.pop("device"))
    write_json(options.output, record)
    for word, row in record["results"].items():
        print(f"{word:24s}", *(f"{name} {value:.4g}" for name, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
