"""Time a training step and its memory with VMonarch against full attention: `vmonarch bench train`.

One transformer with random weights takes the steps that `vmonarch.finetune` takes: float32 weights and AdamW, products
in bfloat16, gradient checkpointing, one clip. The methods are exchanged on it in turns, so that all else is the same.
Full attention is cuDNN's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vmonarch.configs import InputError
from vmonarch.configs.methods import AttentionMethod
from vmonarch.eval.bench.clock import Clock
from vmonarch.eval.bench.kernels import Method, Selection, Shape, compile_ahead
from vmonarch.eval.bench.runner import Bench, Way, Ways
from vmonarch.eval.bench.tables import good_rows
from vmonarch.eval.render.table import markdown, shown_number
from vmonarch.eval.wan_models import WanModel, read_model_config
from vmonarch.finetune.config import OptimizerConfig
from vmonarch.finetune.data.schema import TEXT_LENGTH
from vmonarch.finetune.models import Experts
from vmonarch.finetune.objective import NoiseLevels, Objective, experts_of
from vmonarch.finetune.trainer import make_optimizer
from vmonarch.grid import LatentGrid

METHODS = ("full", "vmonarch")


class TrainingStep:
    """Steps of training on random clips of one size.

    Args:
        config: of a `WanTransformer3DModel`.
        size: latent [T, h, w].
        precision: as in `FinetuneConfig`.
    """

    def __init__(self, config: dict[str, Any], size: tuple[int, int, int], device: torch.device, precision: str):
        from diffusers import WanTransformer3DModel

        torch.manual_seed(0)
        with device:
            self.transformer = WanTransformer3DModel(**config)
        self.transformer.enable_gradient_checkpointing()
        # Full attention, the text's too, and under every method.
        self.transformer.set_attention_backend("_native_cudnn" if device.type == "cuda" else "native")
        self.experts = Experts({"transformer": self.transformer}).train()
        self.parameters = list(self.experts.parameters())
        self.optimizer = make_optimizer(self.parameters, OptimizerConfig(), device)
        self.objective = Objective(NoiseLevels(), experts_of(["transformer"], None), seed=0)
        self.latents = torch.randn(1, config["in_channels"], *size, device=device)
        self.text = torch.randn(1, TEXT_LENGTH, config["text_dim"], device=device)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
        self.step = 0

    def gradients(self) -> None:
        """Forward and backward."""
        draw = self.objective.draw(self.latents, step=self.step)
        with self.autocast:
            losses = self.objective.losses(
                lambda **given: self.experts(draw.expert.name, **given), draw, self.latents, self.text, {}
            )
        losses.mean().backward()
        self.step += 1

    def update(self) -> None:
        """Clip, and let the optimizer step."""
        torch.nn.utils.clip_grad_norm_(self.parameters, OptimizerConfig().clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def __call__(self) -> None:
        self.gradients()
        self.update()


def memory(step: TrainingStep, device: torch.device) -> dict[str, int]:
    """Bytes: allocated before a step, and the most during forward and backward, and during all of it."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step.gradients()
    gradients = torch.cuda.max_memory_allocated(device)
    step.update()
    return {"before": before, "gradients": gradients, "peak": torch.cuda.max_memory_allocated(device)}


def kernels(step: TrainingStep, count: int = 24) -> list[dict[str, Any]]:
    """The kernels that take the most time of a step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    events = sorted(profiled.key_averages(), key=lambda event: -event.device_time_total)
    return [
        {"kernel": event.key[:90], "ms": round(event.device_time_total / 1e3, 2), "calls": event.count}
        for event in events[:count]
    ]


@dataclass(frozen=True)
class Case:
    """Clips of one size; `grid` is the transformer's, which has so many parameters."""

    frames: int
    size: tuple[int, int]
    grid: LatentGrid
    tokens: int
    parameters: int
    training: bool = True

    @property
    def label(self) -> str:
        return "x".join(map(str, (self.frames, *self.size)))


def ways(
    model: WanModel, methods: Sequence[AttentionMethod], case: Case, device: torch.device, dtype: torch.dtype
) -> Ways:
    """A step by every method, all on the same transformer."""
    latents = model.latents(case.frames, *case.size, argument="frames")
    step = TrainingStep(model.transformer, latents, device, "bf16" if device.type == "cuda" else "fp32")

    def run(method: AttentionMethod) -> tuple[torch.Tensor, ...]:
        method.install(step.transformer)
        step()
        return ()

    def more(method: AttentionMethod, clock: Clock) -> dict[str, Any]:
        if device.type != "cuda":
            return {}
        method.install(step.transformer)
        return {"memory_bytes": memory(step, device), "kernels": kernels(step)}

    # What is computed is attention's own benchmarks' to check: here there is nothing to compare with.
    unchecked: Callable[..., dict[str, torch.Tensor]] = lambda *_: {}
    return {
        method.label: partial(Way, partial(run, method), unchecked, unchecked, more=partial(more, method))
        for method in methods
    }


def train_table(results: dict[str, Any]) -> str:
    """A row for every number of frames and method."""
    rows = []
    for case in results["cases"]:
        found = good_rows(case)
        base = found.get("full", {})
        for row in case["rows"]:
            name = [
                f"{case['frames']}×{case['size'][0]}×{case['size'][1]}",
                f"{case['tokens']:,}",
                {"full": "full (cuDNN)"}.get(row["method"], row["method"]),
            ]
            if row["method"] not in found:
                rows.append([*name, row["status"], *["–"] * 3])
                continue
            seconds, peak = row["ms"]["median"] / 1e3, row.get("memory_bytes", {}).get("peak")
            faster = more = ""
            if base and row is not base:
                faster = f"{base['ms']['median'] / row['ms']['median']:.2f}×"
                more = "" if peak is None else f"{100 * (peak / base['memory_bytes']['peak'] - 1):+.1f} %"
            rows.append([*name, f"{seconds:.2f} s", faster, shown_number(peak, 1, "{} GB", factor=1e-9), more])
    table = markdown(["clip", "tokens", "attention", "step", "faster", "peak memory", "more"], rows)
    settings = results["settings"]
    parameters = results["cases"][0]["parameters"] / 1e9
    about = (
        f"{settings['model']} with random weights, {parameters:.2f} billion parameters, all trained, batch"
        f" {settings['batch']}, {settings['precision']}, gradient checkpointing; {results['hardware']}, torch"
        f" {results['versions']['torch']}, Triton {results['versions']['triton']}, {results['date'][:10]}."
    )
    return f"{table}\n{about} Made by `{results['command']}`.\n"


def bench(model: str, frames: Sequence[int], size: Sequence[int], methods: Sequence[AttentionMethod]) -> Bench:
    """The benchmark of clips of so many frames.

    Args:
        model: of configs/models/, or a YAML file.
        size: height and width of the clips.
        methods: full attention among them, which the others are compared with.

    Raises:
        InputError: an argument cannot be used.
    """
    wan = read_model_config(model, argument="model")
    config, (height, width) = wan.transformer, size
    grids = [wan.grid(wan.latents(count, height, width, argument="frames")) for count in frames]
    labels = tuple(method.label for method in methods)
    if "full" not in labels:
        raise InputError("methods", "must hold full, which the others are compared with")
    parameters = wan.parameters(transformer_only=True) // len(wan.transformers)
    shapes = tuple(Shape(grid, config["num_attention_heads"]) for grid in grids)
    ahead = Selection(shapes, (Method("vmonarch", "vmonarch"),), (config["attention_head_dim"],))
    return Bench(
        methods=labels,
        ours=labels,
        cases=[
            Case(count, (height, width), grid, grid.tokens, parameters)
            for count, grid in zip(frames, grids, strict=True)
        ],
        ways=partial(ways, wan, methods),
        settings={
            "model": model,
            "config": config,
            "batch": 1,
            "precision": "bfloat16 products (float32 on a CPU), float32 weights and AdamW",
            "gradient_checkpointing": True,
            "reference": "none: results of whole steps are not compared",
            "timing": "device events around whole steps (draw, forward, backward, clip, update), methods in turns",
            "memory": "memory_bytes: allocated before a step, most during forward and backward, most of all",
        },
        ahead=partial(compile_ahead, ahead),
        # As many rounds as are asked for.
        way_seconds=1e6,
        flushes=1,
    )
