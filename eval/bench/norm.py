"""Time RMS norm with rotary embedding in one kernel against diffusers' code: `vmonarch bench norm`.

Queries of one self-attention module, at the sizes of `vmonarch bench e2e`.

Shapes: B batch (always 1), S tokens, H heads, D head dim, C = H·D channels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch

from vmonarch.eval.bench.attention import BOTH, bytes_of, case_of, randn, with_gradients
from vmonarch.eval.bench.e2e import SETTINGS
from vmonarch.eval.bench.runner import Bench, Case, Way, Ways
from vmonarch.eval.wan_models import read_model_config
from vmonarch.kernels.norm_rotary.api import norm_rotary
from vmonarch.kernels.norm_rotary.reference import norm_rotary_reference
from vmonarch.own import rotate

METHODS = ("vmonarch", "diffusers", "compiled")
NAMES = ("out", "dx", "dweight")
EPS = 1e-6
FORMULAE = (
    "bytes that must be moved, s those of an element: forward 2·S·C·s + 2·S·D·4 + C·s (x, out; cosines and sines in"
    " float32; weight); forward+backward 5·S·C·s + 4·S·D·4 + 4·C·s (x, out; gradient, x, dx; angles twice; weight,"
    " dweight)"
)


def bytes_moved(case: Case, itemsize: int) -> float:
    """By FORMULAE."""
    S, C = case.grid.tokens, case.heads * case.head_dim
    passes, angles, weights = (5, 4, 4) if case.training else (2, 2, 1)
    return float(passes * S * C * itemsize + angles * S * case.head_dim * 4 + weights * C * itemsize)


def diffusers_code(
    x: torch.Tensor, weight: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, *, heads: int
) -> torch.Tensor:
    """What `WanAttnProcessor` does to a projection: the norm, then the rotation, rounded in between."""
    normed = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, EPS)
    return rotate(normed.unflatten(2, (heads, -1)), cosines, sines)


def ways(case: Case, device: torch.device, dtype: torch.dtype) -> Ways:
    """All ways to compute a case; they share x [1, S, C], weight [C], cosines and sines [1, S, 1, D] of Wan."""
    from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

    S, H, C = case.grid.tokens, case.heads, case.heads * case.head_dim
    x, spread, grad = randn(S + C, device, dtype, (1, S, C), (C,), (1, S, H, case.head_dim))
    learnt = [tensor.requires_grad_(case.training) for tensor in (x, 1 + 0.3 * spread)]
    rope = WanRotaryPosEmbed(case.head_dim, (1, 1, 1), 1024).to(device)
    angles = rope(torch.empty(1, 1, *case.grid, device=device))

    named = lambda results: dict(zip(NAMES, results, strict=False))

    def call(code: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> Callable[[], Sequence[torch.Tensor]]:
        of_output = grad.to(tensors[0]) if case.training else None
        return with_gradients(lambda: code(*tensors, heads=H), tensors[:2], of_output)

    def expected() -> dict[str, torch.Tensor]:
        leaves = [tensor.detach().float().requires_grad_(case.training) for tensor in learnt]
        return named(call(partial(norm_rotary_reference, eps=EPS), *leaves, *angles)())

    def way(method: str) -> Way:
        code = diffusers_code
        if method == "compiled":
            # After a few functions torch would stop compiling new ones.
            torch.compiler.reset()
            code = torch.compile(diffusers_code, fullgraph=True, dynamic=False)
        elif method == "vmonarch":
            code = partial(norm_rotary, eps=EPS, implementation="triton" if device.type == "cuda" else "torch")
        run, moved, inputs = call(code, *learnt, *angles), bytes_moved(case, dtype.itemsize), [*learnt, *angles]
        return Way(run, named, expected, bytes=moved, input_bytes=bytes_of(inputs))

    return {method: partial(way, method) for method in METHODS}


def bench() -> Bench:
    """The settings of the end-to-end benchmark, forward before backward."""
    cases = []
    for training, setting in itertools.product(BOTH, SETTINGS):
        model = read_model_config(setting.model)
        sizes = {"heads": model.transformer["num_attention_heads"], "head_dim": model.transformer["attention_head_dim"]}
        cases.append(case_of(setting.label, training, grid=model.grid(setting.size, argument="settings"), **sizes))
    return Bench(
        name="norm",
        methods=METHODS,
        ours=METHODS[:1],
        cases=cases,
        ways=ways,
        base="diffusers",
        formulae=FORMULAE,
        settings={
            "inputs": "standard normal",
            "layout": "x [1, S, C], result [1, S, H, D]; angles of Wan, float32",
            "reference": "float32 plain torch, all rows",
        },
    )
