"""Predicted FLOPs of a method's self-attention, relative to full attention.

They are counted, not derived: the transformer's self-attention modules run once more on tensors without data (torch's
meta device), each method in its plain-torch form, and torch's counter sees every product. What the projections to
queries, keys, values and back take is left out, so it is the attention itself, exact blocks, dense layers and dense
steps included, and tokens of text where attention is joint; a multiply-add counts 2. The fused kernels do the same
products. Places of ragged blocks that are masked count as if they held tokens.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from vmonarch.configs.methods import AttentionMethod, resolve_method
from vmonarch.families import known_family
from vmonarch.installation import find_transformers
from vmonarch.refresh import Refresh, Schedule
from vmonarch.validation import DenseSet

# See `step_kinds`.
STEP_KINDS = ("dense", "exact", "exact, int8", "kept", "kept, int8", "predicted", "approximate")


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    # The model that counts is in float32, whichever the real one is in.
    return torch.empty_like(tensor, device="meta", dtype=torch.float32 if tensor.is_floating_point() else None)


@contextmanager
def recorded_call(pipe: Any) -> Iterator[SimpleNamespace]:
    """The last forward call of one of the pipeline's transformers, which have one architecture, while the block runs.

    `module` is the transformer, `inputs` (args, kwargs) of the call, and `attention` those of the calls of its
    self-attention modules, all tensors without their data.
    """
    call = SimpleNamespace()

    def record(module: Any, *inputs: Any) -> None:
        call.module, call.inputs, call.attention = module, tree_map_only(torch.Tensor, _without_data, inputs), []

    def record_attention(module: Any, *inputs: Any) -> None:
        call.attention.append(tree_map_only(torch.Tensor, _without_data, inputs))

    with ExitStack() as hooks:
        for transformer in find_transformers(pipe).values():
            hooks.enter_context(transformer.register_forward_pre_hook(record, with_kwargs=True))
            for _, module in known_family(transformer).layers(transformer):
                hooks.enter_context(module.register_forward_pre_hook(record_attention, with_kwargs=True))
        yield call


def transformers_by_step(pipe: Any, steps: int) -> list[str]:
    """Which of a pipeline's transformers computes every step: two share them at the pipeline's `boundary_ratio`."""
    names = [name for name in ("transformer", "transformer_2") if getattr(pipe, name, None) is not None]
    boundary = pipe.config.get("boundary_ratio")
    if len(names) == 1 or boundary is None:
        return names[:1] * steps
    scheduler = copy.deepcopy(pipe.scheduler)
    scheduler.set_timesteps(steps)
    # Solvers of higher order have several timesteps a step.
    timesteps = scheduler.timesteps[:: max(1, len(scheduler.timesteps) // steps)][:steps]
    return [names[int(t < boundary * scheduler.config.num_train_timesteps)] for t in timesteps]


def exact_kind(schedule: Schedule, step: int, kept: bool) -> str:
    """Of `STEP_KINDS`, that of a step which `refresh` makes exact."""
    precision = schedule.precision(step)
    return ("kept" if kept else "exact") + ("" if precision is None else f", {precision}")


def step_kinds(method: AttentionMethod, transformers: Sequence[str]) -> list[str]:
    """What a method does in every denoising step, each of `STEP_KINDS`.

    "dense": the model's own attention, by `dense_steps`. "exact": exact attention, by `refresh`; "kept": the same, and
    its residual is kept; "exact, int8" and "kept, int8": in eight bits. "approximate": the method itself, with the last
    residual if there is one. "predicted": none, by `refresh.cache`, which a run alone decides on.

    Args:
        transformers: of every step (`transformers_by_step`).

    Raises:
        ValueError: the method asks for more steps than there are.
    """
    steps = len(transformers)
    dense = DenseSet("dense_steps", method.options.get("dense_steps", 0))
    refresh = Refresh.parse(method.options.get("refresh"))
    schedules = {name: Schedule(refresh, steps) for name in transformers if refresh is not None}
    kinds = []
    for step, name in enumerate(transformers):
        schedule = schedules.get(name)
        if schedule is not None:
            schedule.enter(step)
        if dense.contains(step, steps):
            kinds.append("dense")
        elif schedule is None or schedule.due < step:
            kinds.append("approximate")
        else:
            schedule.computed = True
            kinds.append(exact_kind(schedule, step, schedule.kept))
    return kinds


def attention_flops(call: SimpleNamespace, method: AttentionMethod, component: str = "transformer") -> int:
    """FLOPs of the video's self-attention of all layers in one forward call, without its projections.

    Args:
        method: without dense steps.
        component: the transformer whose layers of a plan count.
    """
    if "implementation" in method.options:
        # The counter sees torch's own operators only.
        method = dataclasses.replace(method, options=method.options | {"implementation": "torch"})
    with torch.device("meta"):
        transformer = type(call.module).from_config(call.module.config)
    method.install(SimpleNamespace(**{"transformer": None, component: transformer}))
    modules = [module for _, module in known_family(transformer).layers(transformer)]

    def attend(*args: Any, **kwargs: Any) -> None:
        for module, (own_args, own_kwargs) in zip(modules, call.attention, strict=True):
            module(*own_args, **own_kwargs)

    # What is between them may look at the data, such as the lengths of prompts.
    transformer.forward = attend
    args, kwargs = call.inputs
    # The counter knows the products that SDPA consists of, not its fused form on the CPU.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        transformer(*args, **kwargs)
    counts = {module: sum(flops.values()) for module, flops in counter.get_flop_counts().items()}
    name_of_all = type(call.module).__name__
    linears = (name for name, module in transformer.named_modules() if isinstance(module, torch.nn.Linear))
    return counts[name_of_all] - sum(counts.get(f"{name_of_all}.{name}", 0) for name in linears)


def relative_flops(
    call: SimpleNamespace, methods: Sequence[AttentionMethod], transformers: Sequence[str]
) -> dict[str, float | None]:
    """Attention FLOPs of a whole video over those of full attention, by the methods' labels.

    None for Based, whose layers cannot be made without their learnt weights, and where the work depends on the data:
    with `refresh` by tolerance or with a cache.

    Args:
        call: any forward call of the sampling.
        transformers: of every denoising step (`transformers_by_step`); a method may compute some with full attention.
    """
    steps = len(transformers)
    full = attention_flops(call, resolve_method("full"))
    shares: dict[str, float | None] = {}
    for method in methods:
        if method.processor_name == "based" or method.decides_steps:
            shares[method.label] = None
            continue
        alone = method.without_dense()
        sparse = {name: attention_flops(call, alone, name) for name in dict.fromkeys(transformers)}
        work = 0.0
        for kind, name in zip(step_kinds(method, transformers), transformers, strict=True):
            work += full if kind.startswith(("dense", "exact", "kept")) else 0
            work += sparse[name] if kind.startswith(("kept", "approximate")) else 0
        shares[method.label] = work / (steps * full)
    return shares
