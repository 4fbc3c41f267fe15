"""Time a training step and its memory with VMonarch against full attention: `vmonarch bench train`.

One transformer with random weights takes the steps that `vmonarch.finetune` takes: float32 weights and AdamW, products
in bfloat16, gradient checkpointing, one clip. The methods are exchanged on it in turns, so that all else is the same.
Full attention is cuDNN's.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vmonarch.configs import InputError
from vmonarch.configs.methods import AttentionMethod
from vmonarch.eval.bench.clock import Clock, measure, summary
from vmonarch.eval.bench.kernels import BenchConfig, Method, Shape, compile_ahead
from vmonarch.eval.bench.machine import check_device, provenance
from vmonarch.eval.render.table import markdown
from vmonarch.eval.wan_models import WanModel, read_model_config
from vmonarch.files import check_output, write_json
from vmonarch.finetune.config import OptimizerConfig
from vmonarch.finetune.data.schema import TEXT_LENGTH
from vmonarch.finetune.models import Experts
from vmonarch.finetune.objective import NoiseLevels, Objective, experts_of
from vmonarch.finetune.trainer import make_optimizer

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


def run_case(
    model: WanModel,
    frames: int,
    size: tuple[int, int],
    methods: Sequence[AttentionMethod],
    clock: Clock,
    rounds: int,
    deadline: float,
) -> dict[str, Any]:
    """Measure all methods on clips of one size."""
    device = clock.device
    latents = model.latents(frames, *size, argument="--frames, --size")
    grid = model.grid(latents)
    step = TrainingStep(model.transformer, latents, device, "bf16" if device.type == "cuda" else "fp32")
    rows: dict[str, dict[str, Any]] = {}
    for method in methods:
        row = rows[method.label] = {"method": method.label}
        method.parameters.install(step.transformer)
        started = time.monotonic()
        step()
        clock.wait()
        row["first_step_s"] = round(time.monotonic() - started, 2)
        if device.type == "cuda":
            row["memory_bytes"] = memory(step, device)
            row["kernels"] = kernels(step)

    def run(method: AttentionMethod) -> None:
        method.parameters.install(step.transformer)
        step()

    runs: dict[str, Callable[[], Any]] = {method.label: partial(run, method) for method in methods}
    times, _ = measure(runs, dict.fromkeys(runs, rounds), clock, deadline)
    for name, row in rows.items():
        row.update(ms=summary(times[name]), rounds=len(times[name]))
    return {
        "frames": frames,
        "size": list(size),
        "grid": list(grid),
        "tokens": grid.tokens,
        "parameters": sum(parameter.numel() for parameter in step.parameters),
        "rows": list(rows.values()),
    }


def train_table(results: dict[str, Any]) -> str:
    """A row for every number of frames and method."""
    rows = []
    for case in results["cases"]:
        base = next(row for row in case["rows"] if row["method"] == "full")
        for row in case["rows"]:
            seconds = row["ms"]["median"] / 1e3
            ours = row is not base
            peak = row.get("memory_bytes", {}).get("peak")
            more = "" if not ours or peak is None else f"{100 * (peak / base['memory_bytes']['peak'] - 1):+.1f} %"
            rows.append(
                [
                    f"{case['frames']}×{case['size'][0]}×{case['size'][1]}",
                    f"{case['tokens']:,}",
                    {"full": "full (cuDNN)"}.get(row["method"], row["method"]),
                    f"{seconds:.2f} s",
                    f"{base['ms']['median'] / row['ms']['median']:.2f}×" if ours else "",
                    "–" if peak is None else f"{peak / 1e9:.1f} GB",
                    more,
                ]
            )
    table = markdown(["clip", "tokens", "attention", "step", "faster", "peak memory", "more"], rows)
    settings = results["settings"]
    parameters = results["cases"][0]["parameters"] / 1e9
    about = (
        f"{settings['model']} with random weights, {parameters:.2f} billion parameters, all trained, batch"
        f" {settings['batch']}, {settings['precision']}, gradient checkpointing; {results['hardware']}, torch"
        f" {results['versions']['torch']}, Triton {results['versions']['triton']}, {results['date'][:10]}."
    )
    return f"{table}\n{about} Made by `{results['command']}`.\n"


def run_bench(
    *,
    output: Path,
    model: str,
    frames: Sequence[int],
    size: tuple[int, int],
    methods: Sequence[AttentionMethod],
    rounds: int,
    budget: float,
    device: str,
    command: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure clips of all numbers of frames, write the JSON after each, and return what was written.

    Args:
        model: of configs/models/, or a YAML file.
        size: height and width of the clips.
        methods: full attention among them, which the others are compared with.
        rounds: measurements of each method. budget: seconds after which no number of frames is begun.
        command: as documents show it. say: told what is done.

    Raises:
        InputError: an argument cannot be used.
    """
    started = time.monotonic()
    wan = read_model_config(model, argument="model")
    config = wan.transformer
    latents = [wan.latents(count, *size, argument="frames") for count in frames]
    on = check_device(device)
    check_output(output)
    if "full" not in [method.label for method in methods]:
        raise InputError("methods", "must hold full, which the others are compared with")
    if on.type == "cuda":
        torch.cuda.set_device(on)
        ahead = BenchConfig(
            output,
            tuple(Shape(wan.grid(latent), config["num_attention_heads"]) for latent in latents),
            (Method("vmonarch", "vmonarch"),),
            head_dims=(config["attention_head_dim"],),
        )
        say(f"compiled; {compile_ahead(ahead, on, budget / 3)} left for later")
    clock = Clock(on)
    results: dict[str, Any] = {
        **provenance(on, command),
        "settings": {
            "model": model,
            "config": config,
            "batch": 1,
            "precision": "bfloat16 products, float32 weights and AdamW" if on.type == "cuda" else "float32",
            "gradient_checkpointing": True,
            "timing": "device events around whole steps (draw, forward, backward, clip, update), methods in turns",
            "memory": "memory_bytes: allocated before a step, most during forward and backward, most of all",
        },
        "cases": [],
        "left_out": [],
    }
    for count in frames:
        if time.monotonic() - started > budget:
            results["left_out"].append(count)
            continue
        case = run_case(wan, count, size, methods, clock, rounds, started + budget)
        # The transformer and its hooks hold each other.
        gc.collect()
        results["cases"].append(case)
        write_json(output, results)
        for row in case["rows"]:
            for kernel in row.get("kernels", []):
                say(f"{kernel['ms']:9.2f} ms {kernel['calls']:6d} × {kernel['kernel']}")
            seconds, peak = row["ms"]["median"] / 1e3, row.get("memory_bytes", {}).get("peak", 0)
            say(
                f"{count} frames {row['method']:12s} {seconds:8.3f} s {peak / 1e9:7.2f} GB,"
                f" first step {row['first_step_s']} s"
            )
    results["seconds"] = round(time.monotonic() - started, 1)
    write_json(output, results)
    return results
