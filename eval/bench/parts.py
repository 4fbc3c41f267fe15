"""Where a forward call of a Wan transformer spends its time, by part, from a profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vmonarch.eval.bench.denoiser import TEXT_TOKENS

PARTS = ("attention", "projections", "norms and rotary", "cross-attention", "FFN", "rest")


def part_of(name: str, shapes: Sequence[Sequence[int]], tokens: int, width: int, ffn_dim: int) -> str | None:
    """Which part an operator belongs to, by its name and the shapes of its inputs.

    "square" is a product of all tokens with a width × width matrix: query, key, value and output of self-attention, or
    query and output of cross-attention. None: no part, or not to be told.
    """
    if name.startswith("vmonarch::"):
        return "norms and rotary" if "norm_rotary" in name else "attention"
    if name.startswith("aten::_scaled_dot_product") and len(shapes) > 1 and len(shapes[1]) == 4:
        return "attention" if shapes[1][2] == tokens else "cross-attention"
    factors = shapes[1:3] if name == "aten::addmm" else shapes[:2] if name == "aten::mm" else []
    if [len(shape) for shape in factors] != [2, 2]:
        return None
    (rows, inner), (_, columns) = factors
    if inner == columns == width:
        return "square" if rows == tokens else "cross-attention" if rows == TEXT_TOKENS else None
    return "FFN" if rows == tokens and {inner, columns} == {width, ffn_dim} else None


def profiled_parts(run: Callable[[], Any], device: torch.device, tokens: int, config: dict[str, Any]) -> dict[str, Any]:
    """{"parts", "parts_of_ms"}: milliseconds of the kernels of a call by PARTS, and of all.

    Two of every six square products are cross-attention's. On a CPU, operators take the place of kernels.
    """
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, record_shapes=True) as profiled:
        run()
        if cuda:
            torch.cuda.synchronize(device)
    width = config["num_attention_heads"] * config["attention_head_dim"]
    ms = dict.fromkeys((*PARTS, "square"), 0.0)
    of_cpu = torch.autograd.DeviceType.CPU
    waiting = [event for event in profiled.events() if event.cpu_parent is None and event.device_type == of_cpu]
    while waiting:
        event = waiting.pop()
        part = part_of(event.name, event.input_shapes or [], tokens, width, config["ffn_dim"])
        if part is not None:
            ms[part] += (event.device_time_total if cuda else event.cpu_time_total) / 1e3
            continue
        waiting.extend(event.cpu_children)
        own = sum(kernel.duration for kernel in event.kernels) if cuda else event.self_cpu_time_total
        ms["rest"] += own / 1e3
    square = ms.pop("square")
    ms["projections"] += square * 4 / 6
    ms["cross-attention"] += square * 2 / 6
    return {"parts": ms, "parts_of_ms": sum(ms.values())}
