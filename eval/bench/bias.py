"""Time attention with a low-rank bias against other ways to have it: `vmonarch bench bias`.

Three ways, in turns: FlashBias; the same kernels with factors of rank 0; and torch's SDPA with the bias written out as
a matrix, as a model that keeps it would have it. In training all have gradients of q, k and v; FlashBias has those of
its factors too, and SDPA that of the matrix.
"""

from __future__ import annotations

import itertools
from functools import cache, partial
from typing import Any

import torch

from vmonarch import flops as work
from vmonarch.eval.bench.attention import ATTENTION, BOTH, attention_way, case_of, exact, randn
from vmonarch.eval.bench.runner import NAMES, Bench, Case, Way, Ways
from vmonarch.flops import pair_flops
from vmonarch.kernels.common.launch import block_dim
from vmonarch.kernels.flash_bias.api import flash_bias_attention
from vmonarch.kernels.flash_bias.op import flash_bias_attention_triton

METHODS = ("flash-bias", "no-bias", "sdpa")


def flops(case: Case, rank: int) -> float:
    """With a bias of this rank; causal attention is half of all pairs. Reading a matrix counts nothing."""
    pairs = case.batch * case.heads * case.tokens**2 * (0.5 if case.causal else 1.0)
    return pair_flops(pairs, case.head_dim, rank=rank, training=case.training)


def ways(case: Case, device: torch.device, dtype: torch.dtype) -> Ways:
    """All ways to compute a case; they share q, k, v [B, S, H, D], factors [1, S, H, R] and the bias as a matrix."""
    B, S, H = case.batch, case.tokens, case.heads
    wide, narrow = (B, S, H, case.head_dim), (1, S, H, case.rank)
    q, k, v = randn(S + case.rank, device, dtype, *[wide] * 3, learn=case.training)
    (grad_out,) = randn(S, device, dtype, wide) if case.training else (None,)
    factors = [x * case.rank**-0.25 for x in randn(case.rank, device, dtype, *[narrow] * 2)]
    for factor in factors:
        factor.requires_grad_(case.training)

    @cache
    def matrix() -> torch.Tensor:
        """The bias [1, H, S, S], -inf above the diagonal if causal; made when it is first needed."""
        with torch.no_grad():
            query_factor, key_factor = (x.transpose(1, 2) for x in factors)
            bias = query_factor @ key_factor.transpose(2, 3)
            if case.causal:
                bias.masked_fill_(torch.ones(S, S, dtype=torch.bool, device=device).triu(1), -torch.inf)
        return bias.requires_grad_(case.training)

    def biased(implementation: str, *tensors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash_bias_attention(*tensors, causal=case.causal, implementation=implementation)
        return out

    def with_matrix(*tensors: torch.Tensor) -> torch.Tensor:
        query, key, value = (x.transpose(1, 2) for x in tensors[:3])
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=matrix())
        return out.transpose(1, 2)

    def way(method: str) -> Way:
        made = partial(attention_way, grad=grad_out)
        if method == "no-bias":
            none, options = [q.new_empty(1, S, 1, 0)] * 2, {"causal": case.causal, "key_mask": None}
            plain = lambda *qkv: flash_bias_attention_triton(*qkv, *none, scale=case.head_dim**-0.5, **options)[0]
            return made(plain, partial(exact, causal=case.causal), [q, k, v], flops=flops(case, 0))
        made = partial(made, reference=partial(biased, "torch"), tensors=[q, k, v, *factors])
        if method == "flash-bias":
            return made(partial(biased, "triton"), names=(*NAMES, "dφq", "dφk"), flops=flops(case, case.rank))
        # The gradient of the matrix has no counterpart among those of the factors.
        return made(with_matrix, leaves=[q, k, v, matrix()], flops=flops(case, 0))

    return {method: partial(way, method) for method in METHODS}


def compiled(case: Case, method: str) -> Any:
    """FlashBias's code depends on the padded rank."""
    columns = block_dim(case.rank) if method == "flash-bias" else 0
    return None if method == "sdpa" else (method, case.head_dim, columns, case.causal, case.training)


def bench() -> Bench:
    """The paper's three, then lengths, head dimensions and ranks; the most telling first."""
    sizes = ("batch", "tokens", "heads", "head_dim", "rank", "training", "causal")
    papers = {
        "gpt2-alibi": (1, 2048, 50, 32, 2, True),
        "swin-window": (1024, 576, 4, 32, 32, False),
        "pde-distance": (1, 32186, 8, 16, 9, False),
    }
    rows: list[tuple[str, Any]] = [
        (name, (*of, training, causal)) for training in BOTH for name, (*of, causal) in papers.items()
    ]
    rows += [
        (f"{tokens} d={dim}", (1, tokens, 12, dim, rank, training, False))
        for tokens, dim, training, rank in itertools.product(
            (16384, 8192, 4096, 32768), (128, 64), BOTH, (9, 64, 2, 32)
        )
    ]
    return Bench(
        name="bias",
        methods=METHODS,
        ours=METHODS[:2],
        cases=[case_of(f"{name} R={of[4]}", **dict(zip(sizes, of, strict=True))) for name, of in rows],
        ways=ways,
        base="flash-bias",
        compiled=compiled,
        formulae=work.__doc__,
        settings=ATTENTION,
    )
