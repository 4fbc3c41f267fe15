"""Time attention with a low-rank bias against other ways to have it: `python -m vmonarch.eval.bias_bench`.

Four ways, in turns, at every case: FlashBias; the same kernels without a bias; torch's SDPA with the bias written out
as a matrix, as a model that keeps it would have it; and FlexAttention that reads the same matrix. A result that differs
from float32 has no speed. Clock, rounds and rates are those of `vmonarch bench kernels`.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from vmonarch.eval.kernel_bench import (
    BOUNDS,
    Clock,
    check_device,
    check_output,
    measure,
    measure_rates,
    measured_dtype,
    summary,
    versions,
    write_json,
)
from vmonarch.kernels.flash_bias.op import flash_bias_attention_triton, flash_bias_forward
from vmonarch.kernels.flash_bias.reference import flash_bias_attention_reference
from vmonarch.pipelines.environment import device_name

# Rows of the first and the last head that every result is compared on.
CHECKED_ROWS = 256
METHODS = ("flash-bias", "no-bias", "sdpa", "flex")


@dataclass(frozen=True)
class Case:
    """What one row of numbers is measured on.

    Args:
        shared: whether heads share the factors.
        training: forward and backward, with gradients of the factors, or of the matrix.
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

    @property
    def label(self) -> str:
        return f"{self.name} R={self.rank} {'forward+backward' if self.training else 'forward'}"

    @property
    def flops(self) -> float:
        """4·S²·(d + R/2) forward, half of it if causal; +10·S²·(d + 3·R/5) backward; times batch and heads."""
        pairs = self.batch * self.heads * self.tokens**2 * (0.5 if self.causal else 1.0)
        forward = pairs * (4 * self.head_dim + 2 * self.rank)
        return forward + (pairs * (10 * self.head_dim + 6 * self.rank) if self.training else 0.0)


def standard_cases() -> list[Case]:
    """The paper's three, then lengths, head dimensions and ranks; the most telling first."""
    cases = []
    for training in (False, True):
        cases += [
            Case("gpt2-alibi", 1, 2048, 50, 32, 2, causal=True, training=training),
            Case("swin-window", 1024, 576, 4, 32, 32, training=training),
            Case("pde-distance", 1, 32186, 8, 16, 9, training=training),
        ]
    for tokens in (16384, 8192, 4096, 32768):
        for head_dim in (128, 64):
            for training in (False, True):
                for rank in (9, 64, 2, 32):
                    cases.append(Case(f"{tokens} d={head_dim}", 1, tokens, 12, head_dim, rank, training=training))
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

    def forget_bias(self) -> None:
        """Give its memory back."""
        self._bias = None


def attention(method: str, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """The call that gives the output [B, S, H, D]."""
    case = inputs.case
    q, k, v = inputs.qkv
    scale = case.head_dim**-0.5
    if method == "flash-bias":
        fq, fk = inputs.factors
        return lambda: flash_bias_attention_triton(
            q, k, v, fq, fk, scale=scale, causal=case.causal, key_mask=None
        )[0]  # fmt: skip
    if method == "no-bias":
        none = q.new_empty(1, case.tokens, 1, 0)
        return lambda: flash_bias_forward(q, k, v, none, none, None, scale, case.causal)[0]
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    if method == "sdpa":
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return lambda: sdpa(qt, kt, vt, attn_mask=inputs.bias, scale=scale).transpose(1, 2)
    from torch.nn.attention.flex_attention import flex_attention

    bias = inputs.bias
    of_head = 0 if case.shared else 1

    def score_mod(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return score + bias[0, h * of_head, i, j]

    flex: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False)
    return lambda: flex(qt, kt, vt, score_mod=score_mod, scale=scale).transpose(1, 2)


def call(method: str, inputs: Inputs) -> Callable[[], Any]:
    """Forward, or forward and backward with the gradients that this way of having a bias has."""
    run = attention(method, inputs)
    if not inputs.case.training:

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return run()

        return forward
    leaves = [*inputs.qkv]
    if method == "flash-bias":
        leaves += inputs.factors
    elif method == "sdpa":
        leaves.append(inputs.bias)

    def both() -> tuple[torch.Tensor, ...]:
        out = run()
        return (out.detach(), *torch.autograd.grad(out, leaves, inputs.grad_out))

    return both


@torch.no_grad()
def error_of(method: str, inputs: Inputs, out: torch.Tensor) -> float:
    """Relative error (Frobenius norm) of the last rows of the first and the last head, against float32."""
    case = inputs.case
    rows = min(CHECKED_ROWS, case.tokens)
    heads = [0, case.heads - 1]
    q, k, v = (x[:1, :, heads].float() for x in inputs.qkv)
    factors = [x.float().expand(-1, -1, case.heads, -1)[:, :, heads] for x in inputs.factors]
    if method == "no-bias":
        factors = [torch.zeros_like(x) for x in factors]
    expected, _ = flash_bias_attention_reference(
        q[:, -rows:], k, v, factors[0][:, -rows:], factors[1], scale=case.head_dim**-0.5, causal=case.causal,
        key_mask=None,
    )  # fmt: skip
    found = out[:1, -rows:, heads].float()
    return ((found - expected).norm() / expected.norm()).item()


def run_case(case: Case, clock: Clock, dtype: torch.dtype, methods: Sequence[str], rounds: int) -> dict[str, Any]:
    """Check and time all methods on one case."""
    inputs = Inputs(case, clock.device, dtype)
    real = clock.device.type == "cuda"
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[[], Any]] = {}
    for method in methods:
        row: dict[str, Any] = {"method": method}
        rows[method] = row
        try:
            run = call(method, inputs)
            run()
            clock.wait()
            if real:
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            result = run()
            clock.wait()
            if real:
                row["peak_bytes"] = torch.cuda.max_memory_allocated() - before
            out = result[0] if case.training else result
            row["error"] = error_of(method, inputs, out)
            del result, out
        except Exception as error:
            if "CUDA error" in str(error):
                raise
            memory = isinstance(error, torch.OutOfMemoryError)
            row["status"] = "out of memory" if memory else "failed"
            row["problem"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        else:
            row["status"] = "ok" if row["error"] <= BOUNDS[dtype]["out"] else "wrong"
            if row["status"] == "ok":
                runs[method] = run
        if real:
            gc.collect()
            torch.cuda.empty_cache()
    # The matrix is an input of those that read it; how much it takes is no part of their peak.
    matrix = 0 if inputs._bias is None else inputs.bias.numel() * inputs.bias.element_size()
    times, _ = measure(runs, dict.fromkeys(runs, rounds), clock, float("inf")) if runs else ({}, {})
    for method in runs:
        rows[method]["ms"] = summary(times[method])
        if real:
            flops = case.flops if method != "no-bias" else Case(**{**vars(case), "rank": 0}).flops
            rows[method]["tflops"] = flops / rows[method]["ms"]["median"] / 1e9
    inputs.forget_bias()
    return {"case": case.label, **vars(case), "bias_bytes": matrix, "rows": list(rows.values())}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; exit code 1 if a result is wrong."""
    parser = argparse.ArgumentParser(prog="python -m vmonarch.eval.bias_bench", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("outputs/bench/flash-bias.json"))
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which no case is begun")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    device = check_device(options.device)
    check_output(options.output)
    dtype = measured_dtype(device)
    clock = Clock(device)
    words = [Path(word).name if Path(word).is_absolute() else word for word in arguments or sys.argv[1:]]
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": device_name(device) if device.type == "cuda" else "interpreter",
        "versions": versions(device),
        "command": shlex.join(["python", "-m", "vmonarch.eval.bias_bench", *words]),
        "settings": {"dtype": str(dtype).removeprefix("torch."), "rounds": options.rounds, "flops": Case.flops.__doc__},
        "rates": measure_rates(device),
        "cases": [],
        "left_out": [],
    }
    for case in standard_cases():
        if time.monotonic() - started > options.budget:
            results["left_out"].append(case.label)
            continue
        results["cases"].append(run_case(case, clock, dtype, options.methods, options.rounds))
        write_json(options.output, results)
        for row in results["cases"][-1]["rows"]:
            ms = f"{row['ms']['median']:9.3f} ms" if "ms" in row else row["status"]
            print(f"[{time.monotonic() - started:6.1f} s] {case.label:40s} {row['method']:12s} {ms}", flush=True)
    write_json(options.output, results)
    return 1 if any(row["status"] == "wrong" for case in results["cases"] for row in case["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
