"""Time a training step and its memory with VMonarch against full attention: `vmonarch bench train`.

One transformer with random weights takes the steps that `vmonarch.finetune` takes: float32 weights and AdamW, products
in bfloat16, gradient checkpointing, one clip. The methods are exchanged on it in turns, so that all else is the same.
Full attention is cuDNN's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from vmonarch.configs import InputError
from vmonarch.configs.methods import AttentionMethod, resolve_method
from vmonarch.eval.bench.clock import Clock
from vmonarch.eval.bench.runner import Bench, Case, Way, Ways, choose, profiled
from vmonarch.eval.wan_models import WanModel, read_model_config
from vmonarch.finetune.config import OptimizerConfig
from vmonarch.finetune.data.parquet import TEXT_LENGTH
from vmonarch.finetune.models import Experts
from vmonarch.finetune.objective import NoiseLevels, Objective, experts_of
from vmonarch.finetune.trainer import make_optimizer


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

    def __call__(self) -> None:
        draw = self.objective.draw(self.latents, step=self.step)
        with self.autocast:
            losses = self.objective.losses(
                lambda **given: self.experts(draw.expert.name, **given), draw, self.latents, self.text, {}
            )
        losses.mean().backward()
        self.step += 1
        torch.nn.utils.clip_grad_norm_(self.parameters, OptimizerConfig().clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


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

    def more(method: AttentionMethod, clock: Clock, row: dict[str, Any]) -> None:
        row["kernels"] = profiled(partial(run, method), clock)

    # Whole steps have nothing to be compared with: what is computed is for attention's own benchmarks to check.
    return {m.label: partial(Way, partial(run, m), before=0, more=partial(more, m)) for m in methods}


def bench(
    model: str = "wan2.1-1.3b",
    frames: Sequence[int] = (61, 141),
    size: Sequence[int] = (448, 832),
    methods: Sequence[str] = ("full", "vmonarch"),
) -> Bench:
    """The benchmark of clips of these numbers of frames.

    Args:
        model: of configs/models/, or a YAML file.
        size: height and width of the clips.
        methods: full attention among them, which the others are compared with.

    Raises:
        InputError: an argument cannot be used.
    """
    wan = read_model_config(model, argument="model")
    grids = [wan.grid(wan.latents(count, *size, argument="frames")) for count in frames]
    resolved = [resolve_method(name, argument="methods") for name in methods]
    labels = choose("methods", [method.label for method in resolved])
    if "full" not in labels:
        raise InputError("methods", "must hold full, which the others are compared with")
    cases = [
        Case(label="x".join(map(str, (count, *size))), frames=count, size=tuple(size), grid=grid, tokens=grid.tokens)
        for count, grid in zip(frames, grids, strict=True)
    ]
    return Bench(
        name="train",
        methods=labels,
        ours=labels,
        cases=cases,
        ways=partial(ways, wan, resolved),
        base="full",
        settings={
            "model": model,
            "config": wan.transformer,
            "parameters": wan.parameters(transformer_only=True) // len(wan.transformers),
            "batch": 1,
            "precision": "bfloat16 products (float32 on a CPU), float32 weights and AdamW",
            "gradient_checkpointing": True,
            "reference": "none: results of whole steps are not compared",
            "timing": "device events around whole steps (draw, forward, backward, clip, update), methods in turns",
            "memory": "peak_bytes: the most that is allocated during a step, weights and optimiser counted",
        },
        # As many rounds as are asked for.
        way_seconds=1e6,
        flushes=1,
    )
