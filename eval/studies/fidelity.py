"""What methods lose in every attention of a model, from a diagnosis: the columns beside PSNR in the tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vmonarch.configs.methods import AttentionMethod
from vmonarch.dense import DenseSet
from vmonarch.options import Options
from vmonarch.plan import AttentionPlan, parse_method


def attention_fidelity(
    diagnosis: Mapping[str, Any], method: AttentionMethod, steps: int
) -> dict[str, float | None] | None:
    """Means over all recorded steps, layers and heads; steps, layers and heads with full attention lose nothing.

    Args:
        diagnosis: whose candidates are among what the method's heads compute.
        steps: of the sampling that was diagnosed.

    Returns:
        kl: mean row-KL in nats. attention_error: square root of the mean over steps and layers of the layers' squared
        relative errors. output_error: the same of the squared relative change in the model's output, added up over
        heads and layers as if they changed it independently; None where the diagnosis has none. None for a method whose
        heads compute something that was not diagnosed.
    """
    options = method.options
    if method.processor_name == "full":
        return {"kl": 0.0, "attention_error": 0.0, "output_error": 0.0}
    if method.processor_name not in ("vmonarch", "two_resolution") or options["refresh"] is not None:
        return None
    if options.get("bias") is not None:
        return None
    known = {name: parse_method(name, entry["options"]) for name, entry in diagnosis["candidates"].items()}
    sums: dict[str, list[torch.Tensor]] = {}
    for component, part in diagnosis["transformers"].items():
        found = _of_transformer(part, _choices(method, component, part), known)
        if found is None:
            return None
        sparse_steps = ~_dense("dense_steps", options["dense_steps"], part["steps"], steps)
        layers = range(part["layers"])
        sparse_layers = ~_dense("dense_layers", options["dense_layers"], layers, part["layers"])
        for measure, values in found.items():
            # [steps, layers, heads]
            sums.setdefault(measure, []).append(values * sparse_steps[:, None, None] * sparse_layers[:, None])
    mean = lambda tensors: torch.cat(tensors).mean().item()
    per_layer = [values.sum(2).flatten() for values in sums["layer_error"]]
    per_step = [values.sum((1, 2)) for values in sums.get("output_error", [])]
    result = {
        "kl": mean([values.flatten() for values in sums["kl"]]),
        "attention_error": mean(per_layer) ** 0.5,
        "output_error": mean(per_step) ** 0.5 if per_step else None,
    }
    return {name: None if value is None else float(f"{value:.6g}") for name, value in result.items()}


def _choices(method: AttentionMethod, component: str, part: Mapping[str, Any]) -> list[list[Options | None]]:
    """What every head computes, [layers][heads]; None for full attention."""
    processor: Any = method.processor()
    layers, heads = part["layers"], part["heads"]
    plan: AttentionPlan | None = getattr(processor, "plan", None)
    if plan is None:
        return [[processor.options] * heads] * layers
    return [[plan.methods[name] for name in plan.heads_of(component, l, layers, heads)] for l in range(layers)]


def _of_transformer(
    part: Mapping[str, Any], choices: list[list[Options | None]], known: Mapping[str, Options | None]
) -> dict[str, torch.Tensor] | None:
    """Every measure, [steps, layers, heads]; None if a head computes what was not diagnosed."""
    measures = {name for values in part["candidates"].values() for name in values}
    shape = len(part["steps"]), part["layers"], part["heads"]
    found = {measure: torch.zeros(shape, dtype=torch.float64) for measure in measures}
    recorded = {
        name: {measure: torch.tensor(values[measure], dtype=torch.float64) for measure in measures}
        for name, values in part["candidates"].items()
    }
    for layer, heads in enumerate(choices):
        for head, options in enumerate(heads):
            if options is None:
                continue
            name = next((name for name, candidate in known.items() if candidate == options), None)
            if name is None:
                return None
            for measure, values in found.items():
                values[:, layer, head] = recorded[name][measure][:, layer, head]
    return found


def _dense(argument: str, option: Any, indices: Any, total: int) -> torch.Tensor:
    """Which of the indices an option leaves to full attention, bool [indices]."""
    dense = DenseSet(argument, option)
    return torch.tensor([dense.contains(index, total) for index in indices])
