"""Laws of the monoid that merges partial attentions, and its kernels."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from op_checks import assert_bits, assert_compiles, assert_precise, in_interpreter, quiet, with_gradients

from vmonarch import flash_entropy_attention, merge_partials

logits = st.one_of(st.floats(-1e4, 1e4), st.just(-float("inf")))
values = st.floats(-1e3, 1e3)
elements = st.tuples(st.lists(values, min_size=3, max_size=3), logits)


def element(drawn):
    """One row of one head: out [1, 1, 1, 3], lse [1, 1, 1]."""
    out, lse = (torch.tensor(x, dtype=torch.float64) for x in drawn)
    return out.view(1, 1, 1, 3), lse.view(1, 1, 1)


def neutral():
    return element(([0.0, 0.0, 0.0], -float("inf")))


def assert_same(one, other):
    torch.testing.assert_close(one[0], other[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(one[1], other[1], rtol=1e-12, atol=1e-9)


@settings(deadline=None, max_examples=100)
@given(elements)
def test_zero_with_no_weight_is_neutral(a):
    out, lse = element(a)
    # Where nothing was attended the value means nothing, so it may become zero.
    expected = (out if torch.isfinite(lse).all() else torch.zeros_like(out), lse)
    assert_same(merge_partials((out, lse), neutral()), expected)
    assert_same(merge_partials(neutral(), (out, lse)), expected)


@settings(deadline=None, max_examples=50)
@given(st.lists(elements, min_size=1, max_size=6))
def test_the_weights_are_those_of_a_softmax_over_log_weights(drawn):
    outs, lses = zip(*map(element, drawn), strict=True)
    out, lse = merge_partials(*zip(outs, lses, strict=True))
    stacked = torch.stack(lses)
    torch.testing.assert_close(lse, stacked.logsumexp(0), rtol=1e-12, atol=1e-9)
    if torch.isfinite(lse).all():
        expected = (stacked.softmax(0).unsqueeze(-1) * torch.stack(outs)).sum(0)
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cuts", [(5,), (1, 2, 30), (7, 8, 9, 20)], ids=str)
def test_attention_over_pieces_of_the_keys_merges_into_attention_over_all(cuts):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 31, 3, 8, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bounds = [0, *cuts, 31]
    parts = [
        flash_entropy_attention(q, k[:, start:stop], v[:, start:stop])[:2]
        for start, stop in zip(bounds, bounds[1:], strict=False)
    ]
    merged, whole = merge_partials(*parts), flash_entropy_attention(q, k, v)[:2]
    torch.testing.assert_close(merged, whole, rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad(out.sin().sum() + lse.cos().sum(), (q, k, v)) for out, lse in (merged, whole)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


def test_a_nan_is_never_hidden():
    good, bad = element(([1.0, 2.0, 3.0], 0.0)), element(([1.0, 2.0, 3.0], float("nan")))
    for merged in (merge_partials(good, bad), merge_partials(bad, good)):
        assert merged[0].isnan().all() and merged[1].isnan().all()


def test_the_result_keeps_the_dtype_of_the_first_output():
    out, lse = element(([1.0, 2.0, 3.0], 0.0))
    merged, merged_lse = merge_partials((out.bfloat16(), lse.float()), (out.bfloat16(), lse.float()))
    assert merged.dtype == torch.bfloat16 and merged_lse.dtype == torch.float32


ON_GPU = pytest.mark.gpu
EVERYWHERE = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=(in_interpreter, quiet)), pytest.param("cuda", marks=ON_GPU)]
)
SHAPES = {"odd": (2, 7, 3, 20), "one-number": (1, 1, 1, 1), "power-of-two": (1, 40, 2, 64), "widest": (1, 5, 2, 256)}


def parts_of(B, S, H, E, dtype=torch.float32, device="cpu", empty=True):
    """out, lse, out, lse; both parts empty at the first token, one at the second and at the third, if there are any."""
    generator = torch.Generator().manual_seed(0)
    outs = torch.randn(2, B, S, H, E, generator=generator).to(dtype)
    lses = 3 * torch.randn(2, B, H, S, generator=generator)
    if empty and S > 2:
        lses[:, ..., 0] = lses[0, ..., 1] = lses[1, ..., 2] = -torch.inf
        # What an empty part holds means nothing.
        outs[:, :, 0] = torch.nan
    return [x.to(device) for pair in zip(outs, lses, strict=True) for x in pair]


def merged(*tensors, implementation="triton"):
    return merge_partials(tensors[:2], tensors[2:], implementation=implementation)


def check_precision(tensors, dtype):
    def reference(*inputs):
        return merged(*inputs, implementation="torch")

    names = ("out", "lse", "dout_1", "dlse_1", "dout_2", "dlse_2")
    exact, plain = with_gradients(reference, [x.double() for x in tensors]), with_gradients(reference, tensors)
    found = with_gradients(merged, tensors)
    # The reference has no gradient of what is empty; that of the kernels is 0.
    of_empty = tensors[1].isneginf() & tensors[3].isneginf()
    for index in (2, 4):
        assert not found[index][of_empty.transpose(1, 2)].any()
    exact, plain = ([x.nan_to_num(0.0, neginf=-torch.inf) for x in results] for results in (exact, plain))
    for name, x, y, z in zip(names, found, plain, exact, strict=True):
        of = torch.float32 if name.endswith(("lse", "lse_1", "lse_2")) else dtype
        assert x.dtype == of
        assert_precise(["lse" if of != dtype else "out"], [x], [y], [z], of)


@in_interpreter
@quiet
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_are_as_precise_as_the_reference(name, dtype):
    check_precision(parts_of(*SHAPES[name], dtype), dtype)


@ON_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*SHAPES, "video"])
def test_kernels_are_as_precise_as_the_reference_on_the_gpu(name, dtype):
    check_precision(parts_of(*SHAPES.get(name, (2, 9973, 12, 128)), dtype, "cuda"), dtype)


@EVERYWHERE
def test_kernels_hide_no_nan(device):
    tensors = parts_of(*SHAPES["odd"], device=device, empty=False)
    for index in (1, 3):
        spoilt = [x.clone() for x in tensors]
        spoilt[index][0, 1, 4] = torch.nan
        out, lse = merged(*spoilt)
        assert out[0, 4, 1].isnan().all() and lse[0, 1, 4].isnan()
        assert int(out.isnan().sum()) == out.shape[-1] and int(lse.isnan().sum()) == 1


@EVERYWHERE
def test_one_gradient_alone_and_compiled(device):
    tensors = parts_of(*SHAPES["odd"], device=device, empty=False)
    for index in (0, 1):
        grads = [torch.zeros_like(x) for x in tensors[:2]]
        grads[index] = torch.randn_like(grads[index])
        alone = with_gradients(lambda *x, index=index: merged(*x)[index], tensors, [grads[index]])
        assert_bits(alone[1:], with_gradients(merged, tensors, grads)[2:])
    assert_compiles(merged, tensors)


@in_interpreter
def test_what_the_kernels_cannot_take_is_said():
    out, lse, *_ = parts_of(*SHAPES["odd"])
    for partials, message in (
        (3 * [(out, lse)], "there are 3 partial results"),
        ([(out, lse), (out.half(), lse)], "out is torch.float32 and torch.float16"),
        (2 * [(out, lse.double())], "lse is torch.float64"),
        ([(out, lse), (out, lse.double())], "lse is .*torch.float64"),
        ([(out, lse.double()), (out, lse)], "lse is .*torch.float64"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            merge_partials(*partials, implementation="triton")
