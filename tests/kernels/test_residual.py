"""Residual sharing: the reference against float64, the kernels against the reference, and what they cannot take."""

import pytest
import torch
from op_checks import call_of, everywhere, in_interpreter, refuses

from vmonarch.kernels.residual.api import Residual, add_residual, attention_residual, renew_residual
from vmonarch.kernels.residual.reference import add_residual_reference, attention_residual_reference

ON_GPU = pytest.mark.gpu
NAN, INF = float("nan"), float("inf")


def outputs(B=2, S=7, H=3, E=20, dtype=torch.float32, device="cpu"):
    """Exact and approximate outputs, with differences of several magnitudes and of 0."""
    generator = torch.Generator().manual_seed(0)
    approximate, difference = torch.randn(2, B, S, H, E, generator=generator)
    difference *= 10.0 ** torch.randint(-3, 2, (B, S, H, 1), generator=generator)
    difference[:, S // 2] = 0
    return [x.to(dtype).to(device) for x in (approximate + difference, approximate)]


def strided(x, layout):
    """The numbers of x [B, S, H, E] in memory of another shape."""
    if layout == "heads-first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "part":
        return torch.stack([torch.full_like(x, NAN), x, torch.full_like(x, NAN)], 2)[:, :, 1]
    return x.clone()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_sum_is_off_by_half_a_scale_at_most(dtype):
    exact, approximate = outputs(dtype=dtype)
    residual = attention_residual(exact, approximate)
    difference = exact.double() - approximate.double()
    assert residual.values.dtype == torch.int8 and residual.scale.dtype == torch.float32
    torch.testing.assert_close(residual.scale.double(), difference.abs().amax(-1) / 127, rtol=1e-6, atol=0)
    out = add_residual(approximate.clone(), residual)
    # Of the sum itself: half a unit in its last place.
    rounding = torch.finfo(dtype).eps / 2 * exact.abs().double()
    error = (out.double() - exact.double()).abs()
    assert (error <= residual.scale.double()[..., None] * 0.50001 + 1.01 * rounding + 1e-7).all()
    # Nearest numbers, and not only near ones.
    steps = difference / residual.scale.double()[..., None]
    assert ((steps.nan_to_num(0.0) - residual.values).abs() <= 0.5001).all()


def check_bits(exact, approximate, **options):
    """The kernels give the bits of the reference on the CPU."""
    residual = attention_residual(exact, approximate, **options)
    expected = attention_residual_reference(exact.cpu(), approximate.cpu())
    assert residual.values.dtype == expected.values.dtype
    assert all(torch.equal(x.cpu(), y) for x, y in zip(residual, expected, strict=True))
    older = attention_residual(approximate, exact, **options)
    # What adding it would have given here.
    shared = add_residual(approximate.double().cpu(), Residual(*(x.cpu() for x in older)))
    squares = [(exact.double().cpu() - shared).square(), exact.double().cpu().square()]
    change = renew_residual(older, exact, approximate, **options).double().cpu()
    torch.testing.assert_close(change, torch.stack([x.sum((1, 2, 3)) for x in squares]), rtol=1e-5, atol=0)
    assert all(torch.equal(x, y) for x, y in zip(older, residual, strict=True))
    out = add_residual(approximate.clone(), residual, **options)
    assert torch.equal(out.cpu(), add_residual_reference(approximate.cpu().clone(), expected))


CASES = {
    "odd": dict(),
    "one-number": dict(B=1, S=1, H=1, E=1),
    "power-of-two": dict(B=1, S=40, H=2, E=64),
    "widest": dict(B=1, S=5, H=2, E=256),
    "wan-1.3b": dict(B=1, S=23296, H=12, E=128),
    "wan-14b": dict(B=2, S=999, H=40, E=128),
    "narrow": dict(B=2, S=130, H=3, E=80),
}


@pytest.mark.parametrize(
    ("name", "dtype", "device"),
    [
        *(pytest.param(name, dtype, "cpu", marks=in_interpreter) for name in list(CASES)[:4]
          for dtype in (torch.float32, torch.float16)),
        *(pytest.param(name, dtype, "cuda", marks=ON_GPU) for name in CASES
          for dtype in (torch.float32, torch.float16, torch.bfloat16)),
    ],
    ids=str,
)  # fmt: skip
def test_kernels_give_the_bits_of_the_reference(name, dtype, device):
    check_bits(*outputs(**CASES[name], dtype=dtype, device=device), implementation="triton")


@ON_GPU
def test_more_than_2_to_the_31_elements():
    last = outputs(B=1, S=2, H=40, E=128, dtype=torch.bfloat16, device="cuda")
    exact, approximate = (torch.zeros(2, 210_000, 40, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    exact[-1:, -2:], approximate[-1:, -2:] = last
    residual, expected = attention_residual(exact, approximate), attention_residual(*last)
    assert torch.equal(residual.values[-1:, -2:], expected.values)
    assert torch.equal(residual.scale[-1:, -2:], expected.scale)
    add_residual(approximate, residual)
    assert torch.equal(approximate[-1:, -2:], add_residual(last[1], expected))
    assert not approximate[:, :-2].any()


@everywhere
@pytest.mark.parametrize("layout", ["contiguous", "heads-first", "part"])
def test_the_sum_is_written_in_place_and_nothing_beside_it(implementation, device, layout):
    exact, approximate = outputs(device=device)
    residual = attention_residual(exact, approximate, implementation=implementation)
    expected = add_residual_reference(approximate.clone(), residual)
    out = strided(approximate, layout)
    memory = out.as_strided((out.untyped_storage().nbytes() // out.itemsize,), (1,), 0)
    others = memory.isnan()
    assert add_residual(out, residual, implementation=implementation) is out
    assert torch.equal(out, expected) and torch.equal(memory.isnan(), others)


@everywhere
def test_nan_and_infinity_show_in_the_sum(implementation, device):
    exact, approximate = outputs(device=device)
    exact[0, 1, 2, 3], exact[0, 2, 0, 0], approximate[1, 3, 1, -1] = NAN, INF, NAN
    spoilt = torch.zeros(exact.shape[:3], dtype=torch.bool, device=device)
    spoilt[0, 1, 2] = spoilt[0, 2, 0] = spoilt[1, 3, 1] = True
    residual = attention_residual(exact, approximate, implementation=implementation)
    assert torch.equal(residual.scale.isnan(), spoilt) and not residual.values[spoilt].any()
    out = add_residual(torch.zeros_like(exact), residual, implementation=implementation)
    assert out[spoilt].isnan().all() and out[~spoilt].isfinite().all()


SMALL = torch.zeros(1, 2, 3, 4)
INT8 = Residual(SMALL.to(torch.int8), SMALL[..., 0])
LEARNS = SMALL.clone().requires_grad_()
made = call_of(attention_residual, SMALL, SMALL)
added = call_of(add_residual, SMALL, INT8)
renewed = call_of(renew_residual, INT8, SMALL, SMALL)
BAD = {
    "dtypes": (made(SMALL, SMALL.half()), ValueError, "approximate must be torch.float32"),
    "gradient": (made(SMALL, LEARNS), RuntimeError, "approximate must not .* is for inference"),
    "out-expanded": (added(SMALL[:, :1].expand(1, 2, 3, 4), INT8), ValueError, "out must have a place"),
    "residual-type": (added(SMALL, tuple(INT8)), TypeError, "residual must be a Residual, got tuple"),
    "renewed-strides": (
        renewed(Residual(INT8[0].transpose(1, 2).contiguous().transpose(1, 2), INT8[1]), SMALL, SMALL),
        ValueError,
        "residual must be contiguous",
    ),
    "residual-shape": (added(SMALL[:, :1], INT8), ValueError, "residual.values must have the shape"),
}  # fmt: skip
test_bad_arguments_are_named = refuses(BAD)
