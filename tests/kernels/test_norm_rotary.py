"""RMS norm and rotary embedding: the kernels against float64, and what they cannot take."""

import pytest
import torch
from op_checks import assert_bits, call_of, in_interpreter, refuses, with_gradients

from vmonarch.kernels.norm_rotary import op
from vmonarch.kernels.norm_rotary.api import MAX_CHANNELS, norm_rotary

ON_GPU = pytest.mark.gpu
# Results are rounded twice, in the norm and after the rotation; gradients are sums in float32 of such numbers.
EPSILON = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def inputs(B=2, S=7, heads=3, D=10, dtype=torch.float32, device="cpu", weight_dtype=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(B, S, heads * D, generator=generator)
    weight = 1 + 0.3 * torch.randn(heads * D, generator=generator)
    angles = torch.randn(1, S, 1, D // 2, generator=generator).repeat_interleave(2, -1) * 5
    x, weight = x.to(device, dtype), weight.to(device, weight_dtype or dtype)
    return x, weight, angles.cos().to(device), angles.sin().to(device)


def both_ways(x, weight, cosines, sines, heads, **options):
    """(out, dx, dweight) with the gradient of a random weighting of the result."""
    attend = lambda x, weight: norm_rotary(x, weight, cosines, sines, heads=heads, eps=1e-6, **options)
    shape = (*x.shape[:2], heads, x.shape[2] // heads)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return with_gradients(attend, (x, weight), [grad.to(x.device)])


CASES = {
    "odd": dict(),
    "one-token": dict(B=1, S=1, heads=1, D=2),
    "embedded": dict(B=1, S=40, heads=6, D=32),
    "power-of-two": dict(B=1, S=5, heads=4, D=64),
}
LARGE = {
    "wan-1.3b": dict(B=1, S=23296, heads=12, D=128),
    "wan-14b": dict(B=2, S=999, heads=40, D=128),
    "most-channels": dict(B=1, S=65, heads=128, D=128),
}


@pytest.mark.parametrize(
    ("name", "dtype", "device"),
    [
        *(pytest.param(name, dtype, "cpu", marks=in_interpreter) for name, dtype in (
            *((name, torch.float32) for name in CASES), ("odd", torch.float16), ("embedded", torch.float16))),
        *(pytest.param(name, dtype, "cuda", marks=ON_GPU) for name in [*CASES, *LARGE]
          for dtype in (torch.float32, torch.float16, torch.bfloat16)),
    ],
    ids=str,
)  # fmt: skip
def test_kernels_equal_float64(name, dtype, device, monkeypatch):
    case = {"heads": 3, **(CASES | LARGE)[name]}
    # Weights in float32 on the GPU, as autocast leaves them.
    case |= {"weight_dtype": torch.float32} if device == "cuda" else {}
    if device == "cpu":
        # Of which each has several tokens, here too.
        monkeypatch.setattr(op, "PROGRAMS", 4)
    x, weight, *_ = tensors = inputs(**case, dtype=dtype, device=device)
    found = both_ways(*tensors, case["heads"], implementation="triton")
    wide = [tensor.double() for tensor in tensors]
    expected = both_ways(*wide, case["heads"], implementation="torch")
    for name, value, exact, like in zip(("out", "dx", "dw"), found, expected, (x, x, weight), strict=True):
        assert value.dtype == like.dtype and value.isfinite().all(), name
        error = (value.double() - exact).norm() / exact.norm()
        assert error <= EPSILON[x.dtype], (name, error.item())
    if x.dtype == weight.dtype == torch.float16:
        # Norm and rotation each round, as in the model: rounded once, a quarter of the numbers would differ.
        same = found[0] == norm_rotary(*tensors, heads=case["heads"], eps=1e-6, implementation="torch")
        assert same.double().mean() > 0.98
    if device == "cuda":
        assert_bits(found, both_ways(*tensors, case["heads"], implementation="auto"))


@ON_GPU
def test_more_than_2_to_the_31_elements():
    x = torch.zeros(1, 1_400_002, 1536, device="cuda", dtype=torch.bfloat16)
    small, weight, cosines, sines = inputs(B=1, S=2, heads=12, D=128, dtype=torch.bfloat16, device="cuda")
    x[:, -2:] = small
    angles = [torch.zeros(1, x.shape[1], 1, 128, device="cuda") for _ in range(2)]
    for whole, end in zip(angles, (cosines, sines), strict=True):
        whole[:, -2:] = end
    with torch.no_grad():
        out = norm_rotary(x, weight, *angles, heads=12, eps=1e-6)[:, -2:]
        assert torch.equal(out, norm_rotary(small, weight, cosines, sines, heads=12, eps=1e-6))


@in_interpreter
@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_only_the_gradients_that_are_needed(frozen):
    x, weight, cosines, sines = inputs()
    (weight if frozen == "x" else x).requires_grad_()
    norm_rotary(x, weight, cosines, sines, heads=3, eps=1e-6, implementation="triton").square().sum().backward()
    assert (x.grad is None) == (frozen == "x") and (weight.grad is None) == (frozen == "weight")


NAMES = ("x", "weight", "cosines", "sines")
WIDE = dict(zip(NAMES, inputs(B=1, S=1, heads=1, D=MAX_CHANNELS + 2), strict=True))
bad = call_of(norm_rotary, heads=3, eps=1e-6, **dict(zip(NAMES, inputs(), strict=True)))
BAD = {
    "x-empty": (bad(x=torch.zeros(0, 7, 30)), ValueError, "x must be .* not empty"),
    "weight": (bad(weight=torch.zeros(29)), ValueError, r"weight must be \[C\] = \[30\], got \(29,\)"),
    "sines-gradient": (
        bad(sines=torch.zeros(1, 7, 1, 10, requires_grad=True)), ValueError, "sines must not require a gradient"),
    "dtype-of-the-kernels": (
        bad(x=torch.zeros(2, 7, 30).double(), implementation="triton"), NotImplementedError, "a dtype is float64"),
    "channels-of-the-kernels": (
        bad(**WIDE, heads=1, implementation="triton"), NotImplementedError, "16386 channels"),
}  # fmt: skip
test_bad_arguments_are_named = in_interpreter(refuses(BAD))
