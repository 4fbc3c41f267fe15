"""What text in the sequence costs VMonarch attention: `vmonarch bench sequence`.

`joint` puts [video | text] together out of the video's VMonarch attention, its exact attention to the text, and exact
attention of the text to everything. `video` is the first of these alone: less than any joint attention can take.

Shapes: N tokens of video, X of text, S = N + X, H heads, D head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch

from vmonarch.attend import Beside, Exact, Op
from vmonarch.call import Call
from vmonarch.eval.bench.attention import ATTENTION, BOTH, attention_way, case_of, exact, randn, sdpa
from vmonarch.eval.bench.runner import Bench, Case, Way, Ways
from vmonarch.grid import LatentGrid
from vmonarch.kernels.monarch.api import vmonarch_attention
from vmonarch.options import VMonarchOptions

METHODS = ("exact", "video", "joint")
FORMULAE = "exact: cuDNN's attention, without a mask"


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

    call = Call(case.grid, after=case.text, key_mask=key_mask)

    def video(by: str, *qkv: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = vmonarch_attention(*(x[:, :N] for x in qkv), grid=case.grid, implementation=by)
        return out

    def joint(by: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return Beside(Op(VMonarchOptions(), by), Exact(by), by)(q, k, v, call)[0]

    def way(method: str) -> Way:
        attend: Callable[..., torch.Tensor]
        reference: Callable[..., torch.Tensor]
        attend, reference = partial(sdpa, "cudnn"), exact
        if method != "exact":
            attend, reference = (partial(video if method == "video" else joint, by) for by in ("auto", "torch"))
        rows = N if method == "video" else S
        return attention_way(attend, reference, tensors, None if grad is None else grad[:, :rows])

    return {method: partial(way, method) for method in METHODS}


def bench() -> Bench:
    """The sequences of HunyuanVideo and HunyuanVideo-1.5 at 720p; if masked, a quarter of the text is padding."""
    cases = []
    for training, masked, (frames, text, heads) in itertools.product(BOTH, BOTH, ((33, 256, 24), (31, 1985, 16))):
        sizes = {"grid": LatentGrid(frames, 45, 80), "text": text, "heads": heads, "head_dim": 128}
        label = f"{frames}x45x80+{text}{' masked' if masked else ''}"
        cases.append(case_of(label, training, masked=masked, **sizes))
    return Bench(
        name="sequence",
        methods=METHODS,
        ours=METHODS[1:],
        cases=cases,
        ways=ways,
        base="video",
        formulae=FORMULAE,
        settings=ATTENTION,
        way_seconds=2.0,
    )
