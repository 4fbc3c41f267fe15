"""What text in the sequence costs VMonarch attention: `vmonarch bench sequence`.

`joint` puts [video | text] together out of the video's VMonarch attention, its exact attention to the text, and exact
attention of the text to everything. `video` is the first of these alone: less than any joint attention can take.

Legend: N tokens of video, X of text, S = N + X, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vmonarch.eval.bench.gate import NAMES
from vmonarch.eval.bench.runner import ATTENTION, Bench, Tensors, Way, Ways, sdpa, with_gradients
from vmonarch.eval.bench.tables import PASSES, about, cell, digits, good_rows
from vmonarch.eval.render.table import markdown
from vmonarch.grid import LatentGrid
from vmonarch.kernels.flash_entropy.api import flash_entropy_attention
from vmonarch.kernels.monarch.api import vmonarch_attention
from vmonarch.sequence import TokenSequence, joint_attention, masked_attention

METHODS = ("exact", "video", "joint", "joint-compiled")
FORMULAE = {
    "exact": "cuDNN's attention of the whole sequence, without a mask",
    "joint-compiled": "torch.compile(fullgraph=True, dynamic=False) of joint",
}


@dataclass(frozen=True)
class Case:
    """A sequence of one sample.

    Args:
        text: X; the last quarter of it is padding if it is `masked`.
        training: forward and backward.
    """

    name: str
    grid: LatentGrid
    text: int
    heads: int
    masked: bool = False
    training: bool = False
    head_dim: int = 128

    @property
    def label(self) -> str:
        return f"{self.name}{' masked' if self.masked else ''} {'forward+backward' if self.training else 'forward'}"


def standard_cases() -> list[Case]:
    """The sequences of HunyuanVideo and HunyuanVideo-1.5 at 720p."""
    return [
        Case(name, LatentGrid(*grid), text, heads, masked, training)
        for training in (False, True)
        for masked in (False, True)
        for name, grid, text, heads in (
            ("33x45x80+256", (33, 45, 80), 256, 24),
            ("31x45x80+1985", (31, 45, 80), 1985, 16),
        )
    ]


class Inputs:
    """q, k, v [1, S, H, D], the gradient of the output, and which keys may be attended [1, S] or None."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        self.sequence = TokenSequence(case.grid, after=case.text)
        S = case.grid.tokens + case.text
        generator = torch.Generator(device).manual_seed(S)
        q, k, v, grad = (
            torch.randn(1, S, case.heads, case.head_dim, generator=generator, device=device).to(dtype) for _ in range(4)
        )
        self.case, self.qkv = case, [x.requires_grad_(case.training) for x in (q, k, v)]
        self.grad = grad if case.training else None
        self.key_mask = None
        if case.masked:
            self.key_mask = torch.ones(1, S, dtype=torch.bool, device=device)
            self.key_mask[:, S - case.text // 4 :] = False
        self.checked = [0] if case.training else [0, case.heads - 1]

    def joint(self, implementation: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[1, S, h, D] -> [1, S, h, D]"""
        mask = self.key_mask

        def video(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return vmonarch_attention(q, k, v, grid=self.case.grid, return_lse=True, implementation=implementation)

        def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if mask is not None:
                return masked_attention(q, k, v, mask, implementation=implementation)[0]
            if implementation == "torch":
                return flash_entropy_attention(q, k, v, implementation=implementation)[0]
            return sdpa("sdpa", q, k, v)

        return joint_attention(
            query, key, value, self.sequence, mask, video=video, exact=exact, implementation=implementation
        )

    def video(self, implementation: str, *tensors: torch.Tensor) -> torch.Tensor:
        """[1, S, h, D] -> [1, N, h, D]"""
        q, k, v = (self.sequence.video(x) for x in tensors)
        return vmonarch_attention(q, k, v, grid=self.case.grid, implementation=implementation)

    def results(self, attend: Callable[..., torch.Tensor], tensors: list[torch.Tensor], grad: Any) -> Any:
        """The call that gives (out,) or (out, dq, dk, dv)."""
        return with_gradients(lambda: attend(*tensors), tensors, grad)

    def expected(self, attend: Callable[..., torch.Tensor], rows: int) -> Tensors:
        """In float32, of the checked heads; `rows` of the gradient belong to the output."""
        tensors = [x[:, :, self.checked].float().detach().requires_grad_(self.case.training) for x in self.qkv]
        grad = None if self.grad is None else self.grad[:, :rows, self.checked].float()
        return dict(zip(NAMES, self.results(attend, tensors, grad)(), strict=False))


def ways(case: Case, device: torch.device, dtype: torch.dtype) -> Ways:
    """All ways to compute a case; they share the inputs."""
    inputs = Inputs(case, device, dtype)
    tokens = case.grid.tokens
    exact = partial(flash_entropy_attention, implementation="torch")
    # By method: what is timed, its reference, and how many rows it gives.
    known: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], int]] = {
        "exact": (partial(sdpa, "cudnn"), lambda *tensors: exact(*tensors)[0], tokens + case.text),
        "video": (partial(inputs.video, "auto"), partial(inputs.video, "torch"), tokens),
        "joint": (partial(inputs.joint, "auto"), partial(inputs.joint, "torch"), tokens + case.text),
    }

    def way(method: str) -> Way:
        attend, reference, rows = known[method.removesuffix("-compiled")]
        if method.endswith("-compiled"):
            torch.compiler.reset()
            attend = torch.compile(attend, fullgraph=True, dynamic=False)
        grad = None if inputs.grad is None else inputs.grad[:, :rows]
        return Way(
            run=inputs.results(attend, inputs.qkv, grad),
            found=lambda results: {name: x[:, :, inputs.checked] for name, x in zip(NAMES, results, strict=False)},
            expected=lambda: inputs.expected(reference, rows),
            input_bytes=sum(x.numel() * x.element_size() for x in inputs.qkv),
        )

    return {method: partial(way, method) for method in METHODS}


def sequence_table(results: dict[str, Any]) -> str:
    """Milliseconds in every way, and what is added to those of the video alone."""
    rows = []
    for case in results["cases"]:
        good = good_rows(case)

        def show(row: dict[str, Any], good: dict[str, Any] = good) -> str:
            ms, alone = row["ms"]["median"], good.get("video")
            added = alone and row["method"].startswith("joint")
            return digits(ms) + (f" (+{ms / alone['ms']['median'] - 1:.0%})" if added and alone else "")

        sequence = f"{'×'.join(map(str, case['grid']))} + {case['text']:,}{', padded' if case['masked'] else ''}"
        rows.append(
            [sequence, str(case["heads"]), PASSES[case["training"]], *(cell(case, name, show) for name in METHODS)]
        )
    heading = ["video and text", "heads", "pass", "exact, no mask", "VMonarch, video alone", "joint", "joint, compiled"]
    what = "Milliseconds of attention of one sample (what is added to the video's alone)."
    return f"{markdown(heading, rows)}\n{about(results, what)}"


def bench() -> Bench:
    """The benchmark, for the registry."""
    return Bench(
        methods=METHODS,
        ours=METHODS[1:],
        cases=standard_cases(),
        ways=ways,
        formulae=FORMULAE,
        settings=ATTENTION,
        way_seconds=2.0,
    )
