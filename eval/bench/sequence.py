"""What text in the sequence costs VMonarch attention: `vmonarch bench sequence`.

`joint` puts [video | text] together out of the video's VMonarch attention, its exact attention to the text, and exact
attention of the text to everything. `video` is the first of these alone: less than any joint attention can take.

Shapes: N tokens of video, X of text, S = N + X, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vmonarch.eval.bench.attention import PASSES, attention_way, exact, randn
from vmonarch.eval.bench.runner import ATTENTION, Bench, Case, Way, Ways, sdpa
from vmonarch.grid import LatentGrid
from vmonarch.kernels.monarch.api import vmonarch_attention
from vmonarch.sequence import TokenSequence, joint_attention, masked_attention

METHODS = ("exact", "video", "joint", "joint-compiled")
FORMULAE = (
    "exact: cuDNN's attention, without a mask; joint-compiled: torch.compile(fullgraph=True, dynamic=False) of joint"
)


def standard_cases() -> list[Case]:
    """The sequences of HunyuanVideo and HunyuanVideo-1.5 at 720p; if masked, a quarter of the text is padding."""
    sequences = ((LatentGrid(33, 45, 80), 256, 24), (LatentGrid(31, 45, 80), 1985, 16))
    return [
        case_of(*of, masked, training) for training in (False, True) for masked in (False, True) for of in sequences
    ]


def case_of(grid: LatentGrid, text: int, heads: int, masked: bool, training: bool = False, head_dim: int = 128) -> Case:
    """A sequence of one sample; `text` is X, and `training` forward and backward."""
    label = f"{'x'.join(map(str, grid))}+{text}{' masked' if masked else ''} {PASSES[training]}"
    return Case(label=label, grid=grid, text=text, heads=heads, masked=masked, training=training, head_dim=head_dim)


def joint(
    case: Case, key_mask: torch.Tensor | None, implementation: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Attention of the whole sequence, [1, S, H, D]."""

    def video(*qkv: torch.Tensor) -> Any:
        return vmonarch_attention(*qkv, grid=case.grid, return_lse=True, implementation=implementation)

    def others(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if key_mask is not None:
            return masked_attention(query, key, value, key_mask, implementation=implementation)[0]
        return exact(query, key, value) if implementation == "torch" else sdpa("sdpa", query, key, value)

    sequence = TokenSequence(case.grid, after=case.text)
    return joint_attention(q, k, v, sequence, key_mask, video=video, exact=others, implementation=implementation)


def video_alone(case: Case, implementation: str, *tensors: torch.Tensor) -> torch.Tensor:
    """VMonarch attention of the video, [1, N, H, D]."""
    own = (TokenSequence(case.grid, after=case.text).video(x) for x in tensors)
    out: torch.Tensor = vmonarch_attention(*own, grid=case.grid, implementation=implementation)
    return out


def ways(case: Case, device: torch.device, dtype: torch.dtype) -> Ways:
    """All ways to compute a case; they share the inputs."""
    N, S = case.grid.tokens, case.grid.tokens + case.text
    size = (1, S, case.heads, case.head_dim)
    tensors = randn(S, device, dtype, *[size] * 3, learn=case.training)
    (grad,) = randn(N, device, dtype, size) if case.training else (None,)
    key_mask = None
    if case.masked:
        key_mask = torch.ones(1, S, dtype=torch.bool, device=device)
        key_mask[:, S - case.text // 4 :] = False

    def way(method: str) -> Way:
        attend: Callable[..., torch.Tensor]
        reference: Callable[..., torch.Tensor]
        rows = N if method == "video" else S
        if method == "exact":
            attend, reference = partial(sdpa, "cudnn"), exact
        elif method == "video":
            attend, reference = (partial(video_alone, case, by) for by in ("auto", "torch"))
        else:
            attend, reference = (partial(joint, case, key_mask, by) for by in ("auto", "torch"))
        if method == "joint-compiled":
            torch.compiler.reset()
            attend = torch.compile(attend, fullgraph=True, dynamic=False)
        return attention_way(attend, reference, tensors, None if grad is None else grad[:, :rows])

    return {method: partial(way, method) for method in METHODS}


def bench() -> Bench:
    """The benchmark, for the registry."""
    return Bench(
        name="sequence",
        methods=METHODS,
        ours=METHODS[1:],
        cases=standard_cases(),
        ways=ways,
        base="video",
        formulae=FORMULAE,
        settings=ATTENTION,
        way_seconds=2.0,
    )
