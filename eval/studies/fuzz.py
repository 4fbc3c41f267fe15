"""Random calls of the public ops against float64: `python -m vmonarch.eval.studies.fuzz`.

A case is a pure function of its number. It draws shapes, strides, dtype, options, values and which gradients are taken;
the truth is plain torch on the CPU, on float64 copies of the inputs. A result x may err

    max |x - truth| <= 2 · max |noisy - truth| + 4 · u · max |truth| + least

where `noisy` is that float64 computation with every intermediate of every operation multiplied by 1 + u·U(-1, 1), and
with every sum off by U(-1, 1) times float32's epsilon times the sum of its terms' magnitudes: what plain torch in the
same precision errs, in up to twenty such runs. u is half the machine epsilon of the dtype (8 times that for float32, in
which sums are taken), `least` its smallest number. -inf must be where the truth has it. What an op does not write is
NaN, which torch fills new memory with for the time of the call.

Compiling takes far longer than a case, so all share the dtypes, options and strides of `--configurations` draws.

Legend: B batch, S tokens, H heads, D head dim of query and key, E of value, R rank of a bias, T frames.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import vmonarch
from vmonarch import ExactBlocks, taylor_attention, vmonarch_attention
from vmonarch.eval.bench.machine import provenance
from vmonarch.files import write_json
from vmonarch.kernels.common.launch import interpreted
from vmonarch.pipelines.environment import shown_command

Tensors = dict[str, torch.Tensor]

# Operations whose results are rounded in a noisy run; others move numbers, compare or make them.
ROUNDED = {
    "_fused_rms_norm", "_fused_rms_norm_backward", "_softmax", "_softmax_backward_data", "add", "addmm", "baddbmm",
    "bmm", "cos", "div", "elu", "elu_backward", "exp", "linear", "log", "mean", "mm", "mul", "mv", "pow", "reciprocal",
    "rsqrt", "rsub", "sigmoid", "sin", "sqrt", "sub", "sum",
}  # fmt: skip
# Of those, the ones that sum: where terms cancel, the error is relative to their magnitudes and not to the result.
SUMS = {"addmm", "baddbmm", "bmm", "linear", "mean", "mm", "mv", "sum"}
# Inputs that get no gradient.
FIXED = ("key_mask", "frame_weights")
SCALES = (None, None, 0.2, 0.7, -0.3)


class Noise(TorchDispatchMode):
    """Every result of an arithmetic operation is multiplied by 1 + unit·U(-1, 1); sums err on their own, too."""

    def __init__(self, unit: float, seed: int) -> None:
        super().__init__()
        self.unit, self.generator = unit, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        floating = lambda x: isinstance(x, torch.Tensor) and x.is_floating_point()
        noise = lambda x: 2 * torch.rand(x.shape, generator=self.generator, dtype=x.dtype) - 1
        result, name = func(*args, **(kwargs or {})), func._schema.name.removeprefix("aten::")
        if name in SUMS and floating(result):
            magnitudes = func(*(x.abs() if isinstance(x, torch.Tensor) else x for x in args), **(kwargs or {}))
            result = result + torch.finfo(torch.float32).eps * magnitudes * noise(result)
        if name not in ROUNDED:
            return result
        return tree_map(lambda x: x * (1 + self.unit * noise(x)) if floating(x) else x, result)


class Draw:
    """What a case is drawn from: `case` for sizes and values, `kernel` for what kernels are compiled for."""

    def __init__(
        self, number: int, configurations: int | None = None, device: str = "cpu", implementation: str = "torch"
    ) -> None:
        self.device, self.triton = device, implementation == "triton"
        # In Triton's interpreter everything is tiny, and without bfloat16.
        self.tiny = self.triton and interpreted()
        self.case = random.Random(f"case {number}")
        self.kernel = random.Random(f"kernel {number if configurations is None else number % configurations}")
        self.values = torch.Generator().manual_seed(number)
        self.dtype = self.kernel.choice([torch.float32, torch.float16] + [torch.bfloat16] * (not self.tiny))
        self.B, self.H = (1, 2) if self.tiny else (self.case.choice([1, 1, 2]), self.case.choice([1, 2, 3]))

    def size(self, most: int) -> int:
        """1, a prime, a multiple of a tile, or anything, up to `most`; small ones are as likely as large ones."""
        top = int((min(most, 30) if self.tiny else max(most, 1)) ** self.case.random())
        prime = next(n for n in range(top, 0, -1) if all(n % d for d in range(2, n)))
        return self.case.choice([1, prime, prime, max(1, top // 16 * 16), *3 * [top]])

    def head_dim(self) -> int:
        some = [1, 5, 16, 20]
        return self.kernel.choice(some if self.tiny else some + 3 * [64, 128] + [2, 32, 40, 72, 80, 96, 160, 256])

    def tensor(self, *shape: int, spread: float = 1.0, mean: float = 0.0, dtype: Any = None) -> torch.Tensor:
        """Random numbers [B, S, …] in memory of some kind."""
        kinds = ["contiguous", "heads first", "fused", "padded", "odd", "expanded"]
        layout = self.kernel.choice(kinds)
        x = torch.randn(1 if layout == "expanded" else shape[0], *shape[1:], generator=self.values) * spread + mean
        return strided(x.to(dtype or self.dtype).to(self.device), layout, shape[0])

    def qkv(self, Sq: int, Sk: int, D: int = 0) -> Tensors:
        spread, mean = self.case.choice([0.3, 1.0, 1.0, 2.0]), self.case.choice([0.0, 0.0, 5.0])
        D = D or self.head_dim()
        E = self.kernel.choice([D, D, self.head_dim()])
        return {
            "query": self.tensor(self.B, Sq, self.H, D, spread=spread),
            "key": self.tensor(self.B, Sk, self.H, D, spread=spread),
            "value": self.tensor(self.B, Sk, self.H, E, mean=mean),
        }

    def key_mask(self, S: int) -> Tensors:
        mask = torch.rand(self.B, S, generator=self.values) < self.case.choice([0.0, 0.2, 0.8, 1.0])
        mask[0] &= self.case.random() > 0.1
        return {"key_mask": mask.to(self.device)} if self.kernel.random() < 0.4 else {}

    def factors(self, Sq: int, Sk: int, R: int) -> Tensors:
        dtype, found = self.kernel.choice([self.dtype, torch.float32]), {}
        for name, S in (("query_factor", Sq), ("key_factor", Sk)):
            B, H = self.case.choice([1, self.B]), self.case.choice([1, self.H])
            found[name] = self.tensor(B, S, H, R, spread=R**-0.25, dtype=dtype)
        return found


def strided(x: torch.Tensor, layout: str, batch: int) -> torch.Tensor:
    """The numbers of `x` [B, S, …] in memory of another shape."""
    if layout == "heads first" and x.ndim == 4:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "fused":
        others = torch.full_like(x, torch.nan)
        return torch.stack([others, x, others], 2)[:, :, 1]
    if layout in ("padded", "odd"):
        # As `x[..., :20]` of 32.
        extra = 3 if layout == "odd" else 32 - x.shape[-1] % 32
        return torch.nn.functional.pad(x, (0, extra), value=torch.nan)[..., : x.shape[-1]]
    return x.expand(batch, *x.shape[1:]) if layout == "expanded" else x.clone()


def _video(draw: Draw, options: dict[str, Any]) -> Tensors:
    T, most = draw.size(70), 50 if draw.tiny else 600
    height = draw.size(math.isqrt(most // T) + 1)
    options["grid"] = grid = (T, height, draw.size(most // T // height + 1))
    one = options["num_iterations"] == 1
    options["coarse"] = 1 if one else options["coarse"]
    options["last_l_update"] |= one
    tensors = draw.qkv(math.prod(grid), math.prod(grid))
    R = draw.kernel.choice([0, 0, 0, 2, 9])
    fits = R and tensors["query"].shape[3] + 6 * R <= 256
    return tensors | (draw.factors(math.prod(grid), math.prod(grid), R) if fits else {})


def _sequence(draw: Draw, options: dict[str, Any]) -> Tensors:
    S = draw.size(400)
    options["block_size"] = draw.case.choice([1, max(1, math.isqrt(S)), draw.size(S), S, S + 3])
    return draw.qkv(S, S) | draw.key_mask(S)


def _with_factors(draw: Draw, options: dict[str, Any]) -> Tensors:
    Sk = draw.size(500)
    Sq = draw.size(min(Sk, 300) if options["causal"] else 300)
    return draw.qkv(Sq, Sk) | draw.factors(Sq, Sk, draw.kernel.choice([1, 2, 5, 9, 16, 40])) | draw.key_mask(Sk)


def _linear(draw: Draw, options: dict[str, Any]) -> Tensors:
    form = "causal" if options["causal"] else draw.kernel.choice(["all", "frames"])
    T = draw.size(9) if form == "frames" else 1
    S = draw.size(500 // T) * T
    D = draw.kernel.choice([1, 5, 16] if draw.tiny else [1, 5, 16, 16, 24, 32])
    tensors = draw.qkv(draw.size(300) if form == "all" else S, S, D)
    weights = torch.rand(draw.H, T, T, generator=draw.values).to(draw.device)
    weights[:, :, 1:] *= draw.case.choice([0.0, 1.0])
    return tensors | ({"frame_weights": weights} if form == "frames" else {})


def _near(draw: Draw, options: dict[str, Any]) -> Tensors:
    if draw.kernel.random() < 0.5:
        Sk = draw.size(400)
        options["window"] = draw.case.choice([1, 2, draw.size(70), Sk + 3])
        return draw.qkv(draw.case.choice([Sk, draw.size(Sk), 1]), Sk)
    options["grid"] = grid = (draw.size(6), draw.size(9), draw.size(9))
    options["window"] = tuple(draw.case.choice([1, 2, 3, 4, size + 1]) for size in grid)
    return draw.qkv(math.prod(grid), math.prod(grid))


def _biased(query: Any, key: Any, value: Any, query_factor: Any = None, key_factor: Any = None, **options: Any) -> Any:
    bias = None if query_factor is None else (query_factor, key_factor)
    return vmonarch_attention(query, key, value, bias=bias, return_lse=True, **options)


class Op(NamedTuple):
    """How often an op is drawn, its function and the names of its results, its inputs, and choices of its options."""

    weight: int
    function: Callable[..., Any]
    results: tuple[str, ...]
    inputs: Callable[[Draw, dict[str, Any]], Tensors]
    options: dict[str, Sequence[Any]]


_FLAG = (False, False, True)
_LSE = {"return_lse": (True,)}
OPS = {
    "vmonarch_attention": Op(10, _biased, ("out", "lse"), _video, {
        "num_iterations": (1, 2, 2, 2, 3), "coarse": (1, 1, 2, 3), "min_mass": (0.1, 0.1, 0.0, 1.0), "scale": SCALES,
        "last_l_update": (True, True, False),
        "exact": (None, "first_frame", "first_frame", *(
            ExactBlocks(rows=rows, columns=columns, band=band, aware=aware) for aware in (True, False)
            for rows, columns, band in (((0,), (), None), ((), (0,), None), ((), (), 0), ((0,), (0,), 1)))),
    }),
    "monarch_attention": Op(4, vmonarch.monarch_attention, ("out", "lse"), _sequence, {
        "num_iterations": (1, 2, 3), "padding": ("post", "pre"), "min_mass": (0.0, 0.1), "scale": SCALES,
        **_LSE,
    }),
    "flash_entropy_attention": Op(
        4, vmonarch.flash_entropy_attention, ("out", "lse", "entropy"),
        lambda draw, options: draw.qkv(draw.size(400), draw.size(600)), {"scale": SCALES, "entropy_grad": _FLAG}),
    "flash_bias_attention": Op(
        6, vmonarch.flash_bias_attention, ("out", "lse"), _with_factors, {"causal": _FLAG, "scale": SCALES, **_LSE}),
    "taylor_attention": Op(7, taylor_attention, ("out", "lse"), _linear, {
        "causal": _FLAG, "scale": SCALES[:-1], **_LSE,
    }),
    "window_attention": Op(
        3, vmonarch.window_attention, ("out", "lse"), _near, {"causal": _FLAG, "scale": SCALES, **_LSE}),
}  # fmt: skip


class Case(NamedTuple):
    """One call, whose results are to have the precision of `dtype`.

    Args:
        cotangents: seed and layout of the gradient of each result that has one.
    """

    op: str
    tensors: Tensors
    options: dict[str, Any]
    dtype: torch.dtype
    forward_only: bool
    cotangents: dict[str, tuple[int, str]]

    def __str__(self) -> str:
        shapes = {name: f"{x.dtype} {tuple(x.shape)} strides {x.stride()}" for name, x in self.tensors.items()}
        return f"{self.op}: {self.options | shapes}"


def make_case(number: int, *, ops: Sequence[str] = tuple(OPS), **how: Any) -> Case:
    """The case of that number; the same every time for the same arguments, which are those of `Draw`."""
    draw = Draw(number, **how)
    (name,) = draw.kernel.choices(ops, [OPS[name].weight for name in ops])
    op = OPS[name]
    options = {option: draw.kernel.choice(choices) for option, choices in op.options.items()}
    tensors, forward_only = op.inputs(draw, options), draw.kernel.random() < 0.25
    taken = draw.kernel.choice([op.results, op.results, op.results[:1], op.results[1:]])
    layouts = ["contiguous", "heads first", "padded", "one number"]
    cotangents = {result: (number + i, draw.kernel.choice(layouts)) for i, result in enumerate(taken)}
    return Case(name, tensors, options, draw.dtype, forward_only, cotangents)


def results_of(case: Case, tensors: Tensors, implementation: str) -> Tensors:
    """Results by name, and gradients by "d" and the name of the input."""
    learns = lambda name, x: not case.forward_only and x.is_floating_point() and name not in FIXED
    leaves = {name: x.detach().requires_grad_(learns(name, x)) for name, x in tensors.items()}
    with torch.set_grad_enabled(not case.forward_only):
        results = OPS[case.op].function(**leaves, **case.options, implementation=implementation)
    results = dict(zip(OPS[case.op].results, results, strict=True))
    found = {name: x.detach() for name, x in results.items()}
    if taken := [name for name in case.cotangents if results[name].requires_grad]:
        cotangents = [_cotangent(found[name], *case.cotangents[name], case.dtype) for name in taken]
        learnt = {f"d{name}": x for name, x in leaves.items() if x.requires_grad}
        outputs = [results[name] for name in taken]
        gradients = torch.autograd.grad(outputs, [*learnt.values()], cotangents, materialize_grads=True)
        found |= zip(learnt, gradients, strict=True)
    return found


def _cotangent(x: torch.Tensor, seed: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers on every device; nothing flows into a row without keys."""
    if layout == "one number" and torch.isfinite(x).all():
        # As the gradient of a sum comes.
        return torch.ones((), dtype=dtype).to(x).expand(x.shape)
    values = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    return strided(values.to(dtype).to(x).masked_fill(~torch.isfinite(x), 0), layout, x.shape[0])


def check(case: Case, implementation: str) -> dict[str, float]:
    """Error over budget by result; infinite where NaN, infinity, shape or dtype is not as it should be."""
    wide = {name: x.detach().cpu().double() if x.is_floating_point() else x.cpu() for name, x in case.tensors.items()}
    wide = {name: x.clone(memory_format=torch.contiguous_format) for name, x in wide.items()}
    # New memory is full of NaN, so that what an op does not write shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        ours = {name: x.cpu() for name, x in results_of(case, case.tensors, implementation).items()}
    finally:
        torch.use_deterministic_algorithms(False)
    truth = results_of(case, wide, "torch")
    info = torch.finfo(case.dtype)
    unit, least = info.eps * (4 if case.dtype == torch.float32 else 0.5), info.smallest_normal * info.eps
    budgets, ratios = dict.fromkeys(truth, 0.0), dict.fromkeys(truth, math.inf)
    for seed in range(20):
        with Noise(unit, seed):
            noisy = results_of(case, wide, "torch")
        for name, exact in truth.items():
            # What is too large for the dtype of the result may be infinite.
            x, finite = ours[name], torch.isfinite(exact)
            fits = finite & (exact.abs() < torch.finfo(x.dtype).max / 2)
            if x.shape != exact.shape or x.isnan().any() or not torch.equal(x[~finite].double(), exact[~finite]):
                continue
            if not fits.any():
                ratios[name] = 0.0
                continue
            exact = exact[fits]
            budgets[name] = max(budgets[name], float((noisy[name][fits] - exact).abs().nan_to_num(0.0).max()))
            budget = 2.0 * budgets[name] + 4.0 * unit * float(exact.abs().max()) + least
            ratios[name] = float((x.double()[fits] - exact).abs().max()) / budget
        if all(ratio <= 1 or ratio == math.inf for ratio in ratios.values()):
            break
    return ratios


def outcome_of(number: int, implementation: str, **options: Any) -> dict[str, Any]:
    """Op, largest error over its budget, and what went wrong in a case, "" if nothing."""
    # A case that hangs ends the process.
    faulthandler.dump_traceback_later(240, exit=True)
    op, text, worst = "?", "?", math.inf
    try:
        case = make_case(number, implementation=implementation, **options)
        op, text = case.op, str(case)
        ratios = check(case, implementation)
        worst = max(ratios.values())
        failure = f"errors over their budgets: {ratios}" if worst > 1 else ""
    except Exception:
        failure = traceback.format_exc(limit=-6)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return {"number": number, "op": op, "ratio": worst, "failure": failure and f"{text}\n{failure}"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m vmonarch.eval.studies.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case (default: 0)")
    parser.add_argument("--ops", nargs="+", choices=list(OPS), default=list(OPS), help="draw from these (default: all)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--implementation", choices=["torch", "triton"], default="torch")
    parser.add_argument("--configurations", type=int, help="what kernels are compiled for is one of so many draws")
    parser.add_argument("--output", type=Path, help="JSON to write")
    options = parser.parse_args(arguments)
    command = shown_command(("python", "-m", "vmonarch.eval.studies.fuzz"), arguments)
    record = provenance(torch.device(options.device), command)
    how = {name: getattr(options, name) for name in ("device", "implementation", "configurations", "ops")}
    # Those of a configuration one after the other.
    numbers = range(options.seed, options.seed + options.cases)
    outcomes = []
    for number in sorted(numbers, key=lambda number: number % (options.configurations or 1)):
        outcomes.append(outcome := outcome_of(number, **how))
        if outcome["failure"]:
            print(f"\ncase {number}: {outcome['failure'].rstrip()}", flush=True)
    failed = [outcome | {"ratio": str(outcome["ratio"])} for outcome in outcomes if outcome["failure"]]
    ratios = {op: [outcome["ratio"] for outcome in outcomes if outcome["op"] == op] for op in OPS}
    # JSON has no infinity.
    by_op = {op: {"cases": len(some), "worst_ratio": f"{max(some):.3g}"} for op, some in ratios.items() if some}
    if options.output:
        write_json(options.output, record | {"cases": len(outcomes), "by_op": by_op, "failed": failed})
    print(f"{by_op}\n{len(outcomes)} cases, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
