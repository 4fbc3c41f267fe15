"""Where a forward call of a transformer spends its time, by part: eager calls by events, compiled ones by profile."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from vmonarch.eval.bench.clock import Clock
from vmonarch.eval.bench.denoiser import TEXT_TOKENS

PARTS = ("attention", "projections", "norms and rotary", "cross-attention", "FFN", "rest")
# Of the rest, so many kernels are named.
REST_KERNELS = 12


@contextlib.contextmanager
def timed_parts(transformer: Any, clock: Clock) -> Iterator[Callable[[], dict[str, float]]]:
    """Marks around the modules of every block, while the block of `with` runs; gives what tells milliseconds by part.

    What a self-attention module does besides attention and projections is its norms and rotary embedding. Norms of
    queries and keys get no hooks: with hooks they would not be computed by the kernel that they are timed for.
    """
    from diffusers.models.transformers import transformer_wan

    spans: dict[str, list[tuple[Any, Any]]] = {
        name: [] for name in ("self", "attention", "projections", "layer norms", "cross-attention", "FFN")
    }
    handles = []
    in_self_attention = [False]

    def watch(module: torch.nn.Module, name: str, note: bool = False) -> None:
        starts: list[Any] = []

        def before(*_: Any) -> None:
            in_self_attention[0] = in_self_attention[0] or note
            starts.append(clock.mark())

        def after(*_: Any) -> None:
            in_self_attention[0] = in_self_attention[0] and not note
            spans[name].append((starts.pop(), clock.mark()))

        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_forward_hook(after))

    def marked(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = clock.mark()
            result = function(*args, **kwargs)
            spans["attention"].append((start, clock.mark()))
            return result

        return call

    dispatch = transformer_wan.dispatch_attention_fn

    def stock(*args: Any, **kwargs: Any) -> Any:
        return (marked(dispatch) if in_self_attention[0] else dispatch)(*args, **kwargs)

    changed = []
    for block in transformer.blocks:
        own = block.attn1
        watch(own, "self", note=True)
        for projection in (own.to_q, own.to_k, own.to_v, own.to_out[0]):
            watch(projection, "projections")
        for norm in (block.norm1, block.norm2, block.norm3):
            watch(norm, "layer norms")
        watch(block.attn2, "cross-attention")
        watch(block.ffn, "FFN")
        if hasattr(own.processor, "attend_layer"):
            own.processor.attend_layer = marked(own.processor.attend_layer)
            changed.append(own.processor)
    transformer_wan.dispatch_attention_fn = stock

    def milliseconds() -> dict[str, float]:
        clock.wait()
        ms = {name: sum(clock.between(*span) for span in found) for name, found in spans.items()}
        rest_of_self = ms.pop("self") - ms["attention"] - ms["projections"]
        norms = ms.pop("layer norms") + rest_of_self
        return {**ms, "norms and rotary": norms}

    try:
        yield milliseconds
    finally:
        transformer_wan.dispatch_attention_fn = dispatch
        for handle in handles:
            handle.remove()
        for processor in changed:
            del processor.attend_layer


def part_of(name: str, shapes: Sequence[Sequence[int]], tokens: int, width: int, ffn_dim: int) -> str | None:
    """Which part an operator of a compiled block belongs to, by its name and the shapes of its inputs.

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


def profiled_parts(
    run: Callable[[], Any], device: torch.device, tokens: int, config: dict[str, Any]
) -> tuple[dict[str, float], list[str], dict[str, float]]:
    """(milliseconds of all kernels of a call by PARTS, names of attention's operators, the rest by kernel).

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
    ms = dict.fromkeys((*PARTS[:-1], "square"), 0.0)
    names = set()
    rest: Counter[str] = Counter()
    waiting = [
        event
        for event in profiled.events()
        if event.cpu_parent is None and event.device_type == torch.autograd.DeviceType.CPU
    ]
    while waiting:
        event = waiting.pop()
        part = part_of(event.name, event.input_shapes or [], tokens, width, config["ffn_dim"])
        if part is None:
            waiting.extend(event.cpu_children)
            own = [(kernel.name, kernel.duration) for kernel in event.kernels]
            for name, microseconds in own if cuda else [(event.name, event.self_cpu_time_total)]:
                rest[name] += microseconds / 1e3
        else:
            ms[part] += (event.device_time_total if cuda else event.cpu_time_total) / 1e3
            if part == "attention":
                names.add(event.name)
    square = ms.pop("square")
    ms["projections"] += square * 4 / 6
    ms["cross-attention"] += square * 2 / 6
    return ms | {"rest": rest.total()}, sorted(names), dict(rest.most_common(REST_KERNELS))


def with_rest(ms: dict[str, float], total: float) -> dict[str, float]:
    """Milliseconds by PARTS, the rest being what is left of `total`."""
    return {name: ms.get(name, total - sum(ms.values())) for name in PARTS}
