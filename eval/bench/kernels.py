"""Time the attention kernels against exact attention and plain torch: `vmonarch bench kernels`.

A case is a latent grid, a number of heads, a head dimension and a pass. Results are compared on a few heads.

Shapes: tensors are [B, S, H, D]; B batch, S tokens, H heads, D head dim.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from vmonarch import flops
from vmonarch.configs import InputError
from vmonarch.engines import FA3, fa3_backend
from vmonarch.eval.bench.machine import Clock
from vmonarch.eval.bench.runner import NAMES, Bench, Case, Way, Ways
from vmonarch.eval.controls import SLA, VSA, Sol
from vmonarch.eval.settings import check_names
from vmonarch.flops import full_flops, least_bytes, two_resolution_flops, vmonarch_work
from vmonarch.grid import LatentGrid
from vmonarch.kernels.flash_bias.reference import flash_bias_attention_reference
from vmonarch.kernels.int8.api import int8_attention
from vmonarch.kernels.monarch.api import vmonarch_attention
from vmonarch.kernels.two_resolution.api import two_resolution_attention
from vmonarch.kernels.two_resolution.tiling import exact_tiles, tiling_of
from vmonarch.options import TwoResolutionOptions

# The paper's Fig. 8, which compares with plain torch: 32 frames of 2048 tokens, d = 64.
FIGURE_8 = "32x32x64"
# In order of priority: when the budget is used up, the rest is left out.
SHAPES = ("43x28x52", "16x28x52", "16x45x80", "81x28x52", "24x44x80:40", "36x28x52", "24x28x52", FIGURE_8)
# Exact attention, by backend of `sdpa`.
EXACT = ("cudnn", FA3, "fa2")
INT8 = "int8"
# Normal inputs are the worst case for eight bits, because their output is near zero.
INT8_BOUNDS = {"out": 0.045}
# Options of `vmonarch_attention`.
VMONARCH: Mapping[str, Mapping[str, Any]] = {
    "vmonarch": {},
    "vmonarch-coarse2": {"coarse": 2},
    "vmonarch-coarse2-rows": {"coarse": 2, "row_share": 0.25},
    "vmonarch-lite": {"coarse": 2, "row_share": 0.25, "last_l_update": False},
    "vmonarch-t1": {"num_iterations": 1},
    "vmonarch-t3": {"num_iterations": 3},
}
OURS = (*VMONARCH, "two-resolution")
METHODS = ("cudnn", FA3, INT8, *OURS, "fa2", "vmonarch-torch")
# Peers' public kernels, measured only on request, with the rule that each computes. Those that drop blocks add VSA's
# branch of means, ungated. "sla" is thu-ml's SLA, untrained, so that its linear branch has no weight; the others are
# FastVideo's and comfy-kitchen's.
BLOCK, SHARE = (1, 1, 64), 0.1
PEERS: Mapping[str, Sol | VSA | SLA] = {
    "sol-tau1": Sol(tau=1.0),
    "sol-tau2": Sol(tau=2.0),
    "sol-top10": Sol(tau=None, share=SHARE),
    "sol-top20": Sol(tau=None, share=2 * SHARE),
    "vsa-comfy": Sol(tau=None, share=SHARE, rest=False),
    "vsa-fastvideo": VSA(share=SHARE, tile=BLOCK, query_tile=BLOCK),
    "sla": SLA(share=SHARE, tile=BLOCK, query_tile=BLOCK),
}
# Peers score blocks in eight bits or bfloat16, so a few of their exact blocks differ from ours. The error of that on an
# H200 is up to 0.128 (tau 2); the nearest other rule would be off by 0.18.
PEER_BOUNDS = {"out": 0.15}


def parse_shape(text: str) -> tuple[LatentGrid, int]:
    """(grid, heads) from `TxHxW` (12 heads) or `TxHxW:heads`.

    Raises:
        InputError: the text has another form.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)(?::([1-9]\d*))?", text)
    if match is None:
        known = ", ".join(SHAPES)
        raise InputError("shapes", f"must be frames x height x width of the latent, such as {known}; got {text!r}")
    *grid, heads = (int(group or 12) for group in match.groups())
    return LatentGrid(*grid), heads


def shape_case(text: str, head_dim: int, training: bool) -> Case:
    """The case of a shape (see `parse_shape`); `training` measures forward and backward together."""
    grid, heads = parse_shape(text)
    shape = "x".join(map(str, grid)) + (f":{heads}" if heads != 12 else "")
    label = f"{shape} d={head_dim} {'forward+backward' if training else 'forward'}"
    return Case(label=label, training=training, shape=shape, grid=grid, heads=heads, head_dim=head_dim)


def measures(case: Case, method: str) -> bool:
    """Whether a method is measured on a case."""
    if method == "vmonarch-torch":
        return (case.shape, case.head_dim) == (FIGURE_8, 64)
    if method in (FA3, INT8):
        return not case.training
    if method in PEERS:
        return not case.training and case.head_dim == 128
    return case.head_dim == 128 or method not in ("vmonarch-t1", "vmonarch-t3")


def work(case: Case, method: str, itemsize: int) -> dict[str, float]:
    """FLOPs and bytes of a method on a case; see `vmonarch.flops`."""
    of, training = (case.grid, case.head_dim), case.training
    if method in PEERS:
        flops = 0.0
    elif method in (*EXACT, INT8):
        flops = full_flops(*of, training=training)
    elif method == "two-resolution":
        flops = two_resolution_flops(*of, TwoResolutionOptions(), training=training)
    else:
        flops = sum(vmonarch_work(*of, training=training, **VMONARCH.get(method, {})).values())
    moved = least_bytes(*of, itemsize=itemsize, training=training)
    return {"flops": case.heads * flops, "bytes": case.heads * moved}


def randn(
    seed: int, device: torch.device, dtype: torch.dtype, *sizes: Sequence[int], learn: bool = False
) -> list[torch.Tensor]:
    """Standard normal tensors of these sizes, the same on every run; with `learn` they require gradients."""
    generator = torch.Generator(device).manual_seed(seed)
    made = (torch.randn(*size, generator=generator, device=device) for size in sizes)
    return [x.to(dtype).requires_grad_(learn) for x in made]


def with_gradients(
    attend: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor], grad_out: torch.Tensor | None
) -> Callable[[], Sequence[torch.Tensor]]:
    """A call that returns (out,), or with `grad_out` (out, *gradients of the leaves)."""

    def run() -> Sequence[torch.Tensor]:
        if grad_out is None:
            with torch.no_grad():
                return (attend(),)
        out = attend()
        return (out.detach(), *torch.autograd.grad(out, leaves, grad_out))

    return run


def attention_way(
    attend: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    tensors: Sequence[torch.Tensor],
    grad: torch.Tensor | None,
    **work: Any,
) -> Way:
    """The way that calls `attend`, checked against `reference` in float32 on all rows of some heads.

    The checked heads are the first and the last; in training only the first.

    Args:
        grad: gradient of the output; None for a forward pass alone.
        work: further fields of the `Way`.
    """
    checked = [0] if grad is not None else sorted({0, tensors[0].shape[2] - 1})

    def expected() -> dict[str, torch.Tensor]:
        copies = [x[:, :, checked].detach().float().requires_grad_(grad is not None) for x in tensors]
        of_output = None if grad is None else grad[:, :, checked].float()
        return dict(zip(NAMES, with_gradients(lambda: reference(*copies), copies, of_output)(), strict=False))

    run = with_gradients(lambda: attend(*tensors), tensors, grad)
    return Way(
        run=run,
        found=lambda results: {name: x[:, :, checked] for name, x in zip(NAMES, results, strict=False)},
        expected=expected,
        more=partial(host_time, run),
        **work,
    )


def exact(*tensors: torch.Tensor) -> torch.Tensor:
    """Exact attention in plain torch that computes every score: attention with a bias of rank 0."""
    scale, none = tensors[0].shape[-1] ** -0.5, [x.new_empty(1, x.shape[1], 1, 0) for x in tensors[:2]]
    return flash_bias_attention_reference(*tensors, *none, scale=scale, causal=False, key_mask=None)[0]


def sdpa(backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Exact attention of [B, S, H, D] by torch, on transposed views as in diffusers, or by FlashAttention-3.

    Args:
        backend: "cudnn" or "fa2"; or "fa3", FlashAttention-3 without gradients.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if backend == FA3:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        return dispatch_attention_fn(query, key, value, backend=fa3_backend(query.device))
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
    with sdpa_kernel(backends[backend]):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def host_time(run: Callable[[], Any], clock: Clock, row: dict[str, Any]) -> None:
    """Add the median milliseconds until a call returns, where each call begins on an idle GPU."""
    times = []
    for _ in range(21):
        clock.wait()
        began = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - began))
    row["host_ms"] = statistics.median(times)


def peer(method: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Callable[..., torch.Tensor]:
    """A call of one of `PEERS` on these tensors [B, S, H, D], converted to its layout beforehand; returns our layout.

    Raises:
        ImportError: its package is not installed.
    """
    rule, tokens = PEERS[method], query.shape[1]
    tiling = tiling_of(LatentGrid(1, 1, tokens), TwoResolutionOptions(tile=BLOCK))
    blocks, count = tiling.tiles, 0 if rule.share is None else exact_tiles(tiling, rule.share)
    if isinstance(rule, Sol):
        sol_attn = importlib.import_module("comfy_kitchen").sol_attn
        how = {"tau": rule.tau} if rule.share is None else {"topk_ratio": count / blocks, "tail": rule.rest}
        gate = None if rule.rest else torch.ones_like(query)
        return lambda *_: sol_attn(query, key, value, coarse_gate=gate, **how)
    if isinstance(rule, SLA):
        layer = importlib.import_module("sparse_linear_attention").SparseLinearAttention(
            query.shape[3], (count + 0.5) / blocks, use_bf16=query.dtype == torch.bfloat16
        )
        layer = layer.to(query.device).requires_grad_(False)
        q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
        return lambda *_: layer(q, k, v).transpose(1, 2)
    video_sparse_attn = importlib.import_module("fastvideo_kernel").video_sparse_attn
    missing = blocks * BLOCK[2] - tokens
    padded = [torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, missing)) for x in (query, key, value)]
    q, k, v = (x.contiguous() for x in padded)
    sizes = torch.full((blocks,), BLOCK[2], dtype=torch.int32, device=query.device)
    sizes[-1] -= missing
    return lambda *_: video_sparse_attn(q, k, v, sizes, sizes, count, 4)[:, :, :tokens].transpose(1, 2)


def peer_reference(method: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What one of `PEERS` computes, by our control with the same rule."""
    rule, line = PEERS[method], LatentGrid(1, 1, query.shape[1])
    means = VSA(tile=BLOCK, query_tile=BLOCK)
    far = 0.0 if rule.rest or isinstance(rule, SLA) else means.far(query, key, value, tiling_of(line, means))
    if isinstance(rule, Sol):
        return rule.attend(query, key, value, line) + far
    return two_resolution_attention(query, key, value, grid=line, options=rule) + far


def ways(case: Case, device: torch.device, dtype: torch.dtype) -> Ways:
    """The methods that are measured on a case; they share the inputs."""
    size = (1, case.grid.tokens, case.heads, case.head_dim)
    tensors = randn(case.grid.tokens + case.head_dim, device, dtype, *[size] * 3, learn=case.training)
    (grad,) = randn(case.head_dim, device, dtype, size) if case.training else (None,)
    # The exact reference takes longest to compute, and all backends can share it.
    shared: dict[str, Any] = {}

    def way(method: str) -> Way:
        done: dict[str, Any] = work(case, method, dtype.itemsize)
        if method in PEERS:
            # Our controls cut blocks differently where the last is not full: the error to full attention is reported.
            same = case.grid.tokens % BLOCK[2] == 0
            done |= {"bounds": PEER_BOUNDS if same else {}}
            reference = partial(peer_reference, method) if same else exact
            return attention_way(peer(method, *tensors), reference, tensors, grad, **done)
        if method in (*EXACT, INT8):
            bounds = INT8_BOUNDS if method == INT8 else None
            attend = partial(int8_attention, implementation="triton") if bounds else partial(sdpa, method)
            made = attention_way(attend, exact, tensors, grad, bounds=bounds, **done)
            return dataclasses.replace(made, expected=shared.setdefault("exact", cache(made.expected)))
        op = two_resolution_attention if method == "two-resolution" else vmonarch_attention
        attend = partial(op, grid=case.grid, **VMONARCH.get(method, {}))
        by = "torch" if method == "vmonarch-torch" else "triton"
        ours, reference = (partial(attend, implementation=implementation) for implementation in (by, "torch"))
        return attention_way(ours, reference, tensors, grad, **done)

    return {method: partial(way, method) for method in (*METHODS, *PEERS) if measures(case, method)}


def check_head_dims(head_dims: Sequence[int]) -> None:
    """Raise InputError for head dimensions that are not from 1 to 256."""
    if not all(1 <= dim <= 256 for dim in head_dims):
        raise InputError("head_dims", f"must be from 1 to 256, got {', '.join(map(str, head_dims))}")


def bench(
    shapes: Sequence[str] = SHAPES,
    head_dims: Sequence[int] = (128, 64),
    passes: Sequence[str] = ("forward", "backward"),
    methods: Sequence[str] = METHODS,
) -> Bench:
    """The benchmark of the selected cases, in the given order: by head dimension, then pass, then shape.

    Args:
        passes: "forward", "backward" (both together).

    Raises:
        InputError: an argument cannot be used, or no method is measured on any of the shapes.
    """
    check_head_dims(head_dims)
    check_names("passes", passes, ("forward", "backward"))
    check_names("methods", methods, (*METHODS, *PEERS))
    cases = [shape_case(shape, dim, name == "backward") for dim in head_dims for name in passes for shape in shapes]
    # Fig. 8 has d = 64; at other head dimensions its shape adds nothing to the others.
    cases = [case for case in cases if len(shapes) == 1 or case.shape != FIGURE_8 or case.head_dim == 64]
    cases = [case for case in cases if any(measures(case, method) for method in methods)]
    if not cases:
        raise InputError("methods", f"are measured on none of the shapes; {FIGURE_8} with d=64 has them all")
    return Bench(
        name="kernels",
        methods=tuple(methods),
        ours=OURS,
        cases=cases,
        ways=ways,
        base="cudnn",
        compiled=lambda case, method: (
            (method, case.grid, case.head_dim, case.training) if method in OURS and measures(case, method) else None
        ),
        formulae=flops.__doc__,
        settings={
            "layout": "[B, S, H, D]; SDPA gets transposed views of it",
            "inputs": "standard normal",
            "reference": "float32 plain torch, all rows of the first and the last head; gradients of the first head",
            "batch": 1,
            "exact": "first_frame",
        },
        way_seconds=5.0,
        # About four milliseconds, enough for the host to queue the longest call.
        flushes=64,
    )
