"""FlashBias against attention with the bias written out, in float64: plain torch, and the kernels (Triton).

Here the kernels run through Triton's interpreter on tiles of 16 × 16; tests marked `gpu` run them compiled, at real
sizes.
"""

import pytest
import torch
from op_checks import (
    by_implementation,
    call_of,
    check_kernels,
    in_interpreter,
    quiet,
    refuses,
    softmax_attention,
    with_gradients,
)

from vmonarch import flash_bias_attention
from vmonarch.kernels.flash_bias.factors import in_dtype

CPU = torch.device("cpu")
pytestmark = quiet


def inputs(Sq, Sk, D=16, E=None, R=3, *, batch=2, heads=3, shared=(True, True), dtype=torch.float32, factors=None,
           device=CPU):  # fmt: skip
    """q, k, v, φq, φk with logits and biases of order 1; `shared`: whether batch entries and heads share factors."""
    generator = torch.Generator().manual_seed(1000 * Sq + Sk + R)
    factor_shape = (1 if shared[0] else batch, 1 if shared[1] else heads)
    shapes = [(batch, Sq, heads, D), (batch, Sk, heads, D), (batch, Sk, heads, E or D)]
    shapes += [(factor_shape[0], S, factor_shape[1], R) for S in (Sq, Sk)]
    dtypes = [dtype] * 3 + [factors or dtype] * 2
    sizes = [1.0] * 3 + [R**-0.25] * 2
    return [
        (torch.randn(shape, generator=generator) * size).to(device, dtype)
        for shape, size, dtype in zip(shapes, sizes, dtypes, strict=True)
    ]


def some_keys(batch, Sk, device=CPU):
    """A key mask: half of the keys, and none for the last batch entry."""
    mask = torch.rand(batch, Sk, generator=torch.Generator().manual_seed(Sk)) > 0.5
    mask[-1] = False
    return mask.to(device)


def written_out(q, k, v, fq, fk, scale=None, causal=False, key_mask=None):
    """(out, lse) with the bias as a matrix."""
    B, Sq, H, _ = q.shape
    bias = torch.einsum("bshr,bthr->bhst", fq.expand(B, -1, H, -1), fk.expand(B, -1, H, -1))
    attended = torch.ones(bias.shape[-2:]).bool()
    attended = attended.tril(k.shape[1] - Sq) if causal else attended
    if key_mask is not None:
        attended = attended & key_mask[:, None, None]
    return softmax_attention(q, k, v, scale=scale, bias=bias, attended=attended)


def attend(implementation, **options):
    op = lambda *x: flash_bias_attention(*x, return_lse=True, implementation=implementation, **options)
    # The gradient of a log-partition of -inf is NaN, which may go no further.
    return lambda *x: (lambda out, lse: (out, lse.exp().log()))(*op(*x))


CASES = {
    "one-token": dict(Sq=1, Sk=1),
    "whole-tiles": dict(Sq=32, Sk=32, D=32, R=16),
    "ragged": dict(Sq=33, Sk=47, D=24, E=40, R=5),
    "factors-of-their-own": dict(Sq=17, Sk=63, R=9, shared=(False, False)),
    "factors-by-head": dict(Sq=20, Sk=20, R=2, shared=(True, False)),
    "factors-by-batch-entry": dict(Sq=20, Sk=7, R=1, shared=(False, True)),
    "high-rank": dict(Sq=18, Sk=19, D=72, R=100),
    "wide": dict(Sq=9, Sk=18, D=256, E=130, R=17, batch=1, heads=1),
    **{f"scale-{scale}": dict(Sq=17, Sk=23, options=dict(scale=scale)) for scale in (-0.4, 0.0, 2.0)},
    # Causal attention ends with all keys.
    **{
        f"causal-{Sq}-{Sk}-{keys}": dict(Sq=Sq, Sk=Sk, heads=2, masked=keys == "some", options=dict(causal=True))
        for Sq, Sk in ((1, 1), (16, 16), (33, 33), (17, 40), (1, 50), (40, 41)) for keys in ("all", "some")
    },
    "masked": dict(Sq=19, Sk=35, R=4, shared=(False, False), masked=True),
}  # fmt: skip
for name in ("ragged", "factors-of-their-own", "high-rank"):
    for factors in (torch.float16, torch.float32):
        case = dict(dtype=torch.float16, factors=factors, R=min(CASES[name]["R"], 85))
        CASES[f"float16-{name}-{str(factors)[6:]}"] = {**CASES[name], **case}


@by_implementation
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_the_written_out_bias(name, implementation):
    case = dict(CASES[name])
    options = {"key_mask": some_keys(2, case["Sk"]) if case.pop("masked", False) else None, **case.pop("options", {})}
    tensors = inputs(**case)
    if implementation == "triton":
        return check_kernels(lambda how: attend(how, **options), tensors, own_units=True)
    doubles = [x.double() for x in tensors]
    theirs = with_gradients(lambda *x: written_out(*x, **options), doubles)
    torch.testing.assert_close(with_gradients(attend("torch", **options), doubles), theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_factors_stay_exact_among_16_bit_tensors(dtype):
    positions = torch.arange(30000, 30040, dtype=torch.float32)
    ones = torch.ones_like(positions)
    fq = torch.stack([positions, ones], -1)[None, :, None] / 256
    fk = torch.stack([ones, -positions], -1)[None, :, None]
    fk[..., 1] /= 256
    left, right = (a.double().squeeze() for a in in_dtype(fq, fk, dtype))
    exact = fq.double().squeeze() @ fk.double().squeeze().T
    assert left.shape[1] == {torch.float16: 6, torch.bfloat16: 12}[dtype]
    assert (left @ right.T - exact).abs().max() < 2e-4
    # In 16 bit alone nothing is left of differences.
    rounded = fq.to(dtype).double().squeeze() @ fk.to(dtype).double().squeeze().T
    assert (rounded - exact).abs().max() > 0.02


GPU_CASES = {
    "rank-9": dict(Sq=1000, Sk=1000, D=128, R=9),
    "rank-64": dict(Sq=515, Sk=700, D=64, R=64, shared=(False, False)),
    "rank-200": dict(Sq=300, Sk=300, D=256, R=200),
    "odd-heads": dict(Sq=777, Sk=333, D=72, E=80, R=33),
    "narrow": dict(Sq=2048, Sk=2048, D=32, R=2, shared=(True, False)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", ["all-pairs", "causal", "masked", "float32-factors"])
@pytest.mark.parametrize("name", GPU_CASES)
def test_gpu_results_and_gradients_match_float64(name, mode, dtype):
    case = dict(GPU_CASES[name])
    options = {}
    if mode == "causal":
        options["causal"] = True
        case["Sq"] = min(case["Sq"], case["Sk"])
    if mode == "float32-factors":
        case["factors"] = torch.float32
        case["R"] = min(case["R"], 42)
    tensors = inputs(**case, dtype=dtype, device="cuda")
    if mode == "masked":
        options["key_mask"] = some_keys(2, case["Sk"], "cuda")
    check_kernels(lambda how: attend(how, **options), tensors, own_units=True)


@pytest.mark.gpu
def test_gpu_memory_does_not_grow_with_the_pairs():
    tensors = [
        x.requires_grad_() for x in inputs(16384, 16384, D=64, R=16, batch=1, dtype=torch.bfloat16, device="cuda")
    ]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(flash_bias_attention(*tensors).sum(), tensors)
    peak = torch.cuda.max_memory_allocated() - before
    # A written-out bias of one head alone would be 512 MiB.
    assert peak < 100 * 2**20


Q, F = torch.randn(2, 6, 3, 8), torch.randn(1, 6, 1, 2)
bad = call_of(flash_bias_attention, Q, Q, Q, F, F)
BAD = {
    "factor-for-one-head": (
        bad(*[Q[:1, :, :1]] * 3, F[:, :5], F), ValueError, r"query_factor must be \[1, 6, 1, R\]"),
    "other-dtypes": (bad(*[Q.half()] * 3, F.half(), F), ValueError, "must have the dtype of query_factor"),
    "integers": (bad(Q, Q, Q, F.int(), F.int()), ValueError, "or be float32, got torch.int32"),
    "causal-with-few-keys": (
        bad(Q, Q[:, :5], Q[:, :5], F, F[:, :5], causal=True), ValueError,
        "causal needs at least as many keys as queries, got 5 keys and 6"),
    "rank-for-the-kernels": (
        bad(*[Q.half()] * 3, *[F.repeat(1, 1, 1, 43)] * 2, implementation="triton"),
        NotImplementedError, "rank of the factors is 86 .supported for torch.float32 among torch.float16: up to 85"),
}  # fmt: skip
test_bad_input_is_named = in_interpreter(refuses(BAD))
