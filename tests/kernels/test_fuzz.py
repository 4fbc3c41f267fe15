"""Random calls of the public ops against float64.

    FUZZ_CASES=1700 pytest -n 14 -m gpu tests/kernels/test_fuzz.py

A case is a pure function of its op and number. It draws shapes, strides, dtype, options, values and which gradients are
taken; the truth is plain torch on the CPU, on float64 copies of the inputs. A result x may err

    max |x - truth| <= 2 · max |noisy - truth| + 4 · u · max |truth| + least

where `noisy` is that float64 computation with every intermediate of every operation multiplied by 1 + u·U(-1, 1), and
with every sum off by U(-1, 1) times float32's epsilon times the sum of its terms' magnitudes: what plain torch in the
same precision errs, in up to twenty such runs. u is half the machine epsilon of the dtype (8 times that for float32, in
which sums are taken), `least` its smallest number. -inf must be where the truth has it. What an op does not write is
NaN, which torch fills new memory with for the time of the call.

Legend: B batch, S tokens, H heads, D head dim of query and key, E of value, R rank of a bias, T frames.
"""

import math
import os
import random

import pytest
import torch
from op_checks import everywhere, quiet
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import vmonarch
from vmonarch import ExactBlocks
from vmonarch.kernels.common.launch import interpreted

# Of each op. Compiling takes far longer than a case, so all share the dtypes, options and strides of some draws.
CASES, CONFIGURATIONS = int(os.environ.get("FUZZ_CASES", 3)), 40
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


class Noise(TorchDispatchMode):
    """Every result of an arithmetic operation is multiplied by 1 + unit·U(-1, 1); sums err on their own, too."""

    def __init__(self, unit, seed):
        super().__init__()
        self.unit, self.generator = unit, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
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

    def __init__(self, name, number, device, tiny):
        self.device, self.tiny = device, tiny
        self.case = random.Random(f"{name} {number}")
        self.kernel = random.Random(f"{name} {number % CONFIGURATIONS} compiled")
        self.values = torch.Generator().manual_seed(number)
        # In Triton's interpreter everything is tiny, and without bfloat16.
        self.dtype = self.kernel.choice([torch.float32, torch.float16] + [torch.bfloat16] * (not tiny))
        self.B, self.H = (1, 2) if tiny else (self.case.choice([1, 1, 2]), self.case.choice([1, 2, 3]))

    def size(self, most):
        """1, a prime, a multiple of a tile, or anything, up to `most`; small ones are as likely as large ones."""
        top = int((min(most, 30) if self.tiny else max(most, 1)) ** self.case.random())
        prime = next(n for n in range(top, 0, -1) if all(n % d for d in range(2, n)))
        return self.case.choice([1, prime, prime, max(1, top // 16 * 16), *3 * [top]])

    def head_dim(self):
        some = [1, 5, 16, 20]
        return self.kernel.choice(some if self.tiny else some + 3 * [64, 128] + [2, 32, 40, 72, 80, 96, 160, 256])

    def tensor(self, *shape, spread=1.0, mean=0.0, dtype=None):
        """Random numbers [B, S, …] in memory of some kind."""
        layout = self.kernel.choice(["contiguous", "heads first", "fused", "padded", "odd", "expanded"])
        x = torch.randn(1 if layout == "expanded" else shape[0], *shape[1:], generator=self.values) * spread + mean
        return strided(x.to(dtype or self.dtype).to(self.device), layout, shape[0])

    def qkv(self, Sq, Sk, D=0):
        spread, mean = self.case.choice([0.3, 1.0, 1.0, 2.0]), self.case.choice([0.0, 0.0, 5.0])
        D = D or self.head_dim()
        E = self.kernel.choice([D, D, self.head_dim()])
        return {
            "query": self.tensor(self.B, Sq, self.H, D, spread=spread),
            "key": self.tensor(self.B, Sk, self.H, D, spread=spread),
            "value": self.tensor(self.B, Sk, self.H, E, mean=mean),
        }

    def key_mask(self, S):
        mask = torch.rand(self.B, S, generator=self.values) < self.case.choice([0.0, 0.2, 0.8, 1.0])
        mask[0] &= self.case.random() > 0.1
        return {"key_mask": mask.to(self.device)} if self.kernel.random() < 0.4 else {}

    def factors(self, Sq, Sk, R):
        dtype, found = self.kernel.choice([self.dtype, torch.float32]), {}
        for name, S in (("query_factor", Sq), ("key_factor", Sk)):
            B, H = self.case.choice([1, self.B]), self.case.choice([1, self.H])
            found[name] = self.tensor(B, S, H, R, spread=R**-0.25, dtype=dtype)
        return found


def strided(x, layout, batch):
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


# Inputs of an op. Of its options, which are drawn, those that depend on sizes are added or changed.


def video(draw, options):
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


def sequence(draw, options):
    S = draw.size(400)
    options["block_size"] = draw.case.choice([1, max(1, math.isqrt(S)), draw.size(S), S, S + 3])
    return draw.qkv(S, S) | draw.key_mask(S)


def with_factors(draw, options):
    Sk = draw.size(500)
    Sq = draw.size(min(Sk, 300) if options["causal"] else 300)
    return draw.qkv(Sq, Sk) | draw.factors(Sq, Sk, draw.kernel.choice([1, 2, 5, 9, 16, 40])) | draw.key_mask(Sk)


def linear(draw, options):
    form = "causal" if options["causal"] else draw.kernel.choice(["all", "frames"])
    T = draw.size(9) if form == "frames" else 1
    S = draw.size(500 // T) * T
    D = draw.kernel.choice([1, 5, 16] if draw.tiny else [1, 5, 16, 16, 24, 32])
    tensors = draw.qkv(draw.size(300) if form == "all" else S, S, D)
    weights = torch.rand(draw.H, T, T, generator=draw.values).to(draw.device)
    weights[:, :, 1:] *= draw.case.choice([0.0, 1.0])
    return tensors | ({"frame_weights": weights} if form == "frames" else {})


def near(draw, options):
    if draw.kernel.random() < 0.5:
        Sk = draw.size(400)
        options["window"] = draw.case.choice([1, 2, draw.size(70), Sk + 3])
        return draw.qkv(draw.case.choice([Sk, draw.size(Sk), 1]), Sk)
    options["grid"] = grid = (draw.size(6), draw.size(9), draw.size(9))
    options["window"] = tuple(draw.case.choice([1, 2, 3, 4, size + 1]) for size in grid)
    return draw.qkv(math.prod(grid), math.prod(grid))


def biased(query, key, value, query_factor=None, key_factor=None, **options):
    bias = None if query_factor is None else (query_factor, key_factor)
    return vmonarch.vmonarch_attention(query, key, value, bias=bias, return_lse=True, **options)


FLAG, SCALES, LSE = (False, False, True), (None, None, 0.2, 0.7, -0.3), {"return_lse": (True,)}
EXACT = [
    ExactBlocks(rows=rows, columns=columns, band=band, aware=aware) for aware in (True, False)
    for rows, columns, band in (((0,), (), None), ((), (0,), None), ((), (), 0), ((0,), (0,), 1))
]  # fmt: skip
# Its function, its inputs, and choices of its options.
OPS = {
    "vmonarch_attention": (biased, video, {
        "num_iterations": (1, 2, 2, 2, 3), "coarse": (1, 1, 2, 3), "min_mass": (0.1, 0.1, 0.0, 1.0), "scale": SCALES,
        "last_l_update": (True, True, False), "exact": (None, "first_frame", "first_frame", *EXACT),
    }),
    "monarch_attention": (vmonarch.monarch_attention, sequence, {
        "num_iterations": (1, 2, 3), "padding": ("post", "pre"), "min_mass": (0.0, 0.1), "scale": SCALES, **LSE,
    }),
    "flash_entropy_attention": (
        vmonarch.flash_entropy_attention, lambda draw, options: draw.qkv(draw.size(400), draw.size(600)),
        {"scale": SCALES, "entropy_grad": FLAG}),
    "flash_bias_attention": (
        vmonarch.flash_bias_attention, with_factors, {"causal": FLAG, "scale": SCALES, **LSE}),
    "taylor_attention": (vmonarch.taylor_attention, linear, {"causal": FLAG, "scale": SCALES[:-1], **LSE}),
    "window_attention": (vmonarch.window_attention, near, {"causal": FLAG, "scale": SCALES, **LSE}),
}  # fmt: skip


def cotangent(x, seed, layout, dtype):
    """The gradient of a result: the same numbers on every device; nothing flows into a row without keys."""
    if layout == "one number" and torch.isfinite(x).all():
        # As the gradient of a sum comes.
        return torch.ones((), dtype=dtype).to(x).expand(x.shape)
    values = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    return strided(values.to(dtype).to(x).masked_fill(~torch.isfinite(x), 0), layout, x.shape[0])


def check(name, number, implementation, device="cpu"):
    """Call an op as the case of this number does, and compare results and gradients with float64."""
    draw = Draw(name, number, device, tiny=implementation == "triton" and interpreted())
    function, inputs, choices = OPS[name]
    options = {option: draw.kernel.choice(some) for option, some in choices.items()}
    tensors, learns = inputs(draw, options), draw.kernel.random() >= 0.25
    # Of the results that have a gradient: all, the first, or the others.
    taken = draw.kernel.choice([slice(None), slice(None), slice(1), slice(1, None)])
    layouts = [draw.kernel.choice(["contiguous", "heads first", "padded", "one number"]) for _ in range(3)]

    def results(tensors, implementation):
        """Results by their number, and gradients by the input's name."""
        leaves = {name: x.detach() for name, x in tensors.items()}
        learnt = [name for name, x in leaves.items() if learns and x.is_floating_point() and name not in FIXED]
        for name in learnt:
            leaves[name].requires_grad_()
        with torch.set_grad_enabled(learns):
            found = function(**leaves, **options, implementation=implementation)
        given = {n: x for n, x in list(enumerate(found))[taken] if x.requires_grad}
        gradients = ()
        if given:
            cotangents = [cotangent(x.detach(), number + n, layouts[n], draw.dtype) for n, x in given.items()]
            of = [leaves[name] for name in learnt]
            gradients = torch.autograd.grad(list(given.values()), of, cotangents, materialize_grads=True)
        return {n: x.detach().cpu() for n, x in [*enumerate(found), *zip(learnt, gradients, strict=False)]}

    wide = {name: x.cpu().double() if x.is_floating_point() else x.cpu() for name, x in tensors.items()}
    wide = {name: x.clone(memory_format=torch.contiguous_format) for name, x in wide.items()}
    # New memory is full of NaN, so that what an op does not write shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        ours = results(tensors, implementation)
    finally:
        torch.use_deterministic_algorithms(False)
    truth = results(wide, "torch")
    shapes = {name: f"{x.dtype} {tuple(x.shape)} strides {x.stride()}" for name, x in tensors.items()}
    case = f"of {options | shapes}"
    for name, exact in truth.items():
        x, infinite = ours[name], ~exact.isfinite()
        assert x.shape == exact.shape and not x.isnan().any(), f"{name} {case}"
        assert torch.equal(x[infinite].double(), exact[infinite]), f"{name} {case}"
    info = torch.finfo(draw.dtype)
    unit, least = info.eps * (4 if draw.dtype == torch.float32 else 0.5), info.smallest_normal * info.eps
    noise = dict.fromkeys(truth, 0.0)
    for seed in range(20):
        with Noise(unit, seed):
            noisy = results(wide, "torch")
        over = {}
        for name, exact in truth.items():
            # What is too large for the dtype of the result may be infinite.
            fits = exact.abs() < torch.finfo(ours[name].dtype).max / 2
            if fits.any():
                exact = exact[fits]
                noise[name] = max(noise[name], float((noisy[name][fits] - exact).abs().nan_to_num(0.0).max()))
                budget = 2.0 * noise[name] + 4.0 * unit * float(exact.abs().max()) + least
                ratio = float((ours[name].double()[fits] - exact).abs().max()) / budget
                if ratio > 1:
                    over[name] = ratio
        if not over:
            return
    raise AssertionError(f"errors over their budgets: {over} {case}")


@quiet
@pytest.mark.parametrize("number", range(CASES))
@everywhere
@pytest.mark.parametrize("op", OPS)
def test_a_random_call_is_as_precise_as_its_dtype(op, implementation, device, number):
    check(op, number, implementation, device)
