"""Time and memory of a training step with VMonarch and with full attention: `vmonarch bench train`.

One transformer with random weights takes the training steps of `vmonarch.finetune`: float32 weights and AdamW, products
in bfloat16, gradient checkpointing, one clip. The methods take turns on it, so that all else is the same. Full
attention is cuDNN's. Several processes (`vmonarch bench parallel --modes training`) share the clip's tokens, and FSDP2
shards the weights over them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from vmonarch import apply
from vmonarch.base import FullAttentionProcessor
from vmonarch.configs import InputError
from vmonarch.configs.methods import AttentionMethod
from vmonarch.engines import CUDNN
from vmonarch.eval.bench.e2e import TEXT_TOKENS
from vmonarch.eval.bench.machine import Clock
from vmonarch.eval.bench.runner import Bench, Case, Way, Ways
from vmonarch.eval.settings import resolved
from vmonarch.eval.wan_models import read_model_config
from vmonarch.finetune.config import OptimizerConfig
from vmonarch.finetune.models import Experts, share_clips
from vmonarch.finetune.objective import Objective
from vmonarch.finetune.trainer import FSDP_PRECISION, make_optimizer


def ways(methods: Sequence[AttentionMethod], ranks: int, case: Case, device: torch.device, dtype: torch.dtype) -> Ways:
    """A training step by every method, all on the same transformer and random clip."""
    config = case.config
    torch.manual_seed(0)
    with device:
        transformer = WanTransformer3DModel(**config).train()
    transformer.enable_gradient_checkpointing()
    on_gpu = device.type == "cuda"
    # The backend of full attention under every method, cross-attention included.
    transformer.set_attention_backend(CUDNN if on_gpu else "native")
    model = transformer if ranks == 1 else spread(transformer, ranks, device)
    parameters = list(transformer.parameters())
    optimizer = make_optimizer(parameters, OptimizerConfig(), device)
    objective = Objective()
    latents = torch.randn(1, config["in_channels"], *case.latents, device=device)
    text = torch.randn(1, TEXT_TOKENS, config["text_dim"], device=device)
    numbers = itertools.count()
    latest: dict[str, tuple[torch.Tensor, Any]] = {}

    def run(method: AttentionMethod) -> tuple[torch.Tensor, ...]:
        method.install(transformer)
        if ranks > 1 and method.processor_name == "full":
            apply(transformer, FullAttentionProcessor())
        draw = objective.draw(latents, step=next(numbers))
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            losses = objective.losses(model, draw, latents, text, {})
        # FSDP2 averages gradients, but each process only has those of its own tokens: their sum is wanted.
        (ranks * losses.mean()).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, OptimizerConfig().clip)
        latest[method.label] = losses.detach(), norm
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return ()

    def more(method: AttentionMethod, clock: Clock, row: dict[str, Any]) -> None:
        loss, norm = latest[method.label]
        # With FSDP2, each process only has its part of the norm.
        norm = norm.full_tensor() if ranks > 1 else norm
        row.update(loss=loss.item(), gradient_norm=norm.item())

    # Whole steps have no reference; the benchmarks of attention alone check what it computes.
    return {m.label: partial(Way, partial(run, m), before=0, more=partial(more, m)) for m in methods}


def spread(transformer: Any, ranks: int, device: torch.device) -> Callable[..., Any]:
    """Spread a transformer's tokens and weights over all processes, as `vmonarch.finetune` does; return its call."""
    apply(transformer, FullAttentionProcessor())
    experts = Experts({"transformer": transformer})
    share_clips(experts, ranks, device)
    precision = FSDP_PRECISION if device.type == "cuda" else MixedPrecisionPolicy()
    for module in (*transformer.blocks, experts):
        fully_shard(module, mp_policy=precision)
    return partial(experts, "transformer")


def finish(case: dict[str, Any]) -> None:
    """Add mode and seconds to the rows."""
    for row in case["rows"]:
        row["mode"] = "training"
        if "ms" in row:
            row["step_s"] = {key: ms / 1e3 for key, ms in row["ms"].items()}


def bench(
    model: str = "wan2.1-1.3b",
    frames: Sequence[int] = (61, 141),
    size: Sequence[int] = (448, 832),
    methods: Sequence[str] = ("full", "vmonarch"),
    ranks: int = 1,
) -> Bench:
    """The benchmark of training steps on clips with these numbers of frames.

    Args:
        model: entry of configs/models.yaml, or a YAML file.
        size: height and width of the clips.
        methods: compared with full attention if it is among them.
        ranks: processes in this group, which share the clip.

    Raises:
        InputError: an argument cannot be used.
    """
    wan = read_model_config(model)
    compared = resolved(methods, "methods", recipes=False)
    for method in compared:
        if method.options.get("refresh") is not None:
            problem = f"must be methods that can be trained; the residuals of {method.label!r} have no gradient"
            raise InputError("methods", problem)
    labels = tuple(method.label for method in compared)
    cases = []
    for clip in ((count, *size) for count in frames):
        latents, grid = wan.latents(clip, argument="frames"), wan.grid(clip, argument="frames")
        about = {"config": wan.transformer, "latents": latents, "grid": grid, "tokens": grid.tokens}
        cases.append(Case(label="x".join(map(str, clip)), **about))
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in WanTransformer3DModel(**wan.transformer).parameters())
    return Bench(
        name="train",
        methods=labels,
        ours=labels,
        cases=cases,
        ways=partial(ways, compared, ranks),
        base="full",
        finish=finish,
        settings={
            "model": model,
            "parameters": parameters,
            "batch": 1,
            "precision": "bfloat16 products (float32 on a CPU), float32 weights and AdamW",
            "gradient_checkpointing": True,
            "reference": "none: results of whole steps are not compared",
            "timing": "device events around whole steps (draw, forward, backward, clip, update), methods in turns",
            "memory": "peak_bytes: the most that is allocated during a step, weights and optimiser counted",
        },
        # No limit of its own: `rounds` decides.
        way_seconds=1e6,
        flushes=1,
    )
