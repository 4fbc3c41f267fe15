"""Time attention with a low-rank bias against other ways to have it: `vmonarch bench bias`.

Four ways, in turns: FlashBias; the same kernels with factors of rank 0; torch's SDPA with the bias written out as a
matrix, as a model that keeps it would have it; and FlexAttention that reads the same matrix (at one rank of a shape,
because a matrix does not care). In training all have gradients of q, k and v; FlashBias has those of its factors too,
SDPA that of the matrix, and FlexAttention none of the bias.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from vmonarch.eval.bench.gate import NAMES
from vmonarch.eval.bench.runner import ATTENTION, Bench, Tensors, Way, Ways, flex, with_gradients
from vmonarch.flops import pair_flops
from vmonarch.kernels.common.launch import block_dim
from vmonarch.kernels.flash_bias.op import flash_bias_attention_triton
from vmonarch.kernels.flash_bias.reference import flash_bias_attention_reference

METHODS = ("flash-bias", "no-bias", "sdpa", "flex")
# Where FlexAttention is measured, besides the paper's cases: compiling it takes longer than all else of a case.
FLEX_RANK = 9
NAMES_OF_ALL = (*NAMES, "dφq", "dφk")
FORMULAE = {
    "legend": "S tokens, d head dim, R rank; a multiply-add counts 2; times batch and heads; causal: half of it",
    "flash-bias": "4·S²·(d + R/2) forward, +10·S²·(d + 3·R/5) backward",
    "others": "4·S²·d forward, +10·S²·d backward; reading the matrix counts nothing",
    "factors": "of the dtype of q; float32 factors among bfloat16 tensors have 6 times as many columns",
}


@dataclass(frozen=True)
class Case:
    """What one row of numbers is measured on.

    Args:
        shared: whether heads share the factors.
        training: forward and backward.
        flex: whether FlexAttention is measured too.
    """

    name: str
    batch: int
    tokens: int
    heads: int
    head_dim: int
    rank: int
    causal: bool = False
    shared: bool = False
    training: bool = False
    flex: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} R={self.rank} {'forward+backward' if self.training else 'forward'}"

    @property
    def flops(self) -> float:
        """Of FlashBias, and with rank 0 of the others; see FORMULAE."""
        pairs = self.batch * self.heads * self.tokens**2 * (0.5 if self.causal else 1.0)
        return pair_flops(pairs, self.head_dim, rank=self.rank, training=self.training)


def standard_cases() -> list[Case]:
    """The paper's three, then lengths, head dimensions and ranks; the most telling first."""
    cases = []
    for training in (False, True):
        cases += [
            Case("gpt2-alibi", 1, 2048, 50, 32, 2, causal=True, training=training, flex=True),
            Case("swin-window", 1024, 576, 4, 32, 32, training=training, flex=True),
            Case("pde-distance", 1, 32186, 8, 16, 9, training=training, flex=True),
        ]
    for tokens in (16384, 8192, 4096, 32768):
        for head_dim in (128, 64):
            for training in (False, True):
                for rank in (9, 64, 2, 32):
                    name, has_flex = f"{tokens} d={head_dim}", rank == FLEX_RANK
                    cases.append(Case(name, 1, tokens, 12, head_dim, rank, training=training, flex=has_flex))
    return cases


class Inputs:
    """q, k, v [B, S, H, D], factors [1, S, H or 1, R], the gradient of the output, and the bias as a matrix."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator(device).manual_seed(case.tokens + case.rank)
        B, S, H, D, R = case.batch, case.tokens, case.heads, case.head_dim, case.rank

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=torch.float32)

        self.case = case
        self.qkv = [randn(B, S, H, D).to(dtype).requires_grad_(case.training) for _ in range(3)]
        heads = 1 if case.shared else H
        self.factors = [(randn(1, S, heads, R) * R**-0.25).to(dtype).requires_grad_(case.training) for _ in range(2)]
        self.grad_out = randn(B, S, H, D).to(dtype)
        self._bias: torch.Tensor | None = None
        self._expected: dict[bool, Tensors] = {}
        # In training, the sum over heads that share a factor is its gradient.
        self.checked = list(range(H)) if case.shared else [0] if case.training else [0, H - 1]

    @property
    def bias(self) -> torch.Tensor:
        """[1, H or 1, S, S], -inf above the diagonal if causal; made when it is first needed."""
        if self._bias is None:
            with torch.no_grad():
                query_factor, key_factor = (x.transpose(1, 2) for x in self.factors)
                bias = query_factor @ key_factor.transpose(2, 3)
                if self.case.causal:
                    bias.masked_fill_(
                        torch.ones(bias.shape[2:], dtype=torch.bool, device=bias.device).triu(1), -torch.inf
                    )
            self._bias = bias.requires_grad_(self.case.training)
        return self._bias

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [*self.qkv, *self.factors]

    def expected(self, biased: bool) -> Tensors:
        """Float32 results on the checked heads, of all batch entries and rows."""
        if biased not in self._expected:
            case = self.case
            leaves = [self.of_checked(x).float().detach().requires_grad_(case.training) for x in self.leaves]
            q, k, v, *factors = leaves

            def attend() -> torch.Tensor:
                fq, fk = (f if biased else f * 0 for f in factors)
                return flash_bias_attention_reference(
                    q, k, v, fq, fk, scale=case.head_dim**-0.5, causal=case.causal, key_mask=None
                )[0]

            grad_out = self.of_checked(self.grad_out).float() if case.training else None
            self._expected[biased] = dict(zip(NAMES_OF_ALL, with_gradients(attend, leaves, grad_out)(), strict=False))
        return self._expected[biased]

    def of_checked(self, x: torch.Tensor) -> torch.Tensor:
        """The checked heads of [·, S, H or 1, ·]."""
        return x if x.shape[2] == 1 else x[:, :, self.checked]


def way(method: str, inputs: Inputs) -> Way:
    """One way to compute the case of these inputs."""
    case = inputs.case
    q, k, v = inputs.qkv
    scale = case.head_dim**-0.5
    leaves, flops = inputs.qkv, replace(case, rank=0).flops
    bias_inputs: list[torch.Tensor]
    attend: Callable[[], torch.Tensor]
    if method in ("flash-bias", "no-bias"):
        bias_inputs = inputs.factors if method == "flash-bias" else [q.new_empty(1, case.tokens, 1, 0)] * 2
        fq, fk = bias_inputs
        if method == "flash-bias":
            leaves, flops = inputs.leaves, case.flops

        def attend() -> torch.Tensor:
            return flash_bias_attention_triton(q, k, v, fq, fk, scale=scale, causal=case.causal, key_mask=None)[0]

    elif method == "sdpa":
        bias_inputs = [inputs.bias]
        leaves = [*inputs.qkv, inputs.bias]

        def attend() -> torch.Tensor:
            qt, kt, vt = (x.transpose(1, 2) for x in inputs.qkv)
            out = torch.nn.functional.scaled_dot_product_attention(qt, kt, vt, attn_mask=inputs.bias, scale=scale)
            return out.transpose(1, 2)

    else:
        bias_inputs = [inputs.bias]
        attend = _flex(inputs, scale)
    tensors = [*inputs.qkv, *bias_inputs, *([inputs.grad_out] if case.training else [])]

    def found(results: tuple[torch.Tensor, ...]) -> Tensors:
        # The gradient of the matrix has no counterpart among those of the factors.
        kept = results if method == "flash-bias" else results[: len(NAMES)]
        return {name: inputs.of_checked(x) for name, x in zip(NAMES_OF_ALL, kept, strict=False)}

    return Way(
        run=with_gradients(attend, leaves, inputs.grad_out if case.training else None),
        found=found,
        expected=lambda: inputs.expected(method != "no-bias"),
        flops=flops,
        input_bytes=sum(x.numel() * x.element_size() for x in tensors),
    )


def _flex(inputs: Inputs, scale: float) -> Callable[[], torch.Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask

    case = inputs.case
    bias, S = inputs.bias.detach().flatten(), case.tokens
    of_head = 0 if case.shared else S * S

    def score_mod(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        # Torch compiles sums of these numbers in 32 bits, which matrices of more than 2³¹ numbers exceed.
        return score + bias[h.to(torch.int64) * of_head + i.to(torch.int64) * S + j]

    mask = None
    if case.causal:
        mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, S, S, device=bias.device)
    return flex(*inputs.qkv, score_mod=score_mod, block_mask=mask, scale=scale)


def ways(case: Case, device: torch.device, dtype: torch.dtype) -> Ways:
    """All ways to compute a case, none of them made yet; they share the inputs."""
    made: list[Inputs] = []

    def make(method: str) -> Way:
        if not made:
            made.append(Inputs(case, device, dtype))
        return way(method, made[0])

    return {method: partial(make, method) for method in METHODS if method != "flex" or case.flex}


def compiled(case: Case, method: str) -> Hashable | None:
    """What the code of a method depends on; see `Bench`."""
    if method in ("flash-bias", "no-bias"):
        columns = block_dim(case.rank) if method == "flash-bias" else 0
        return method, case.head_dim, columns, case.causal, case.training
    # Several processes have no room for matrices of more than a few gigabytes.
    return (method, case.label) if case.flex and method == "flex" and case.heads * case.tokens**2 < 2**31 else None


def bench() -> Bench:
    """The benchmark, for the registry."""
    return Bench(
        methods=METHODS,
        ours=METHODS[:2],
        cases=standard_cases(),
        ways=ways,
        compiled=compiled,
        formulae=FORMULAE,
        settings=ATTENTION,
    )
