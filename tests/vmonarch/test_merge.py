"""Laws of the monoid that merges partial attentions."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

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


@settings(deadline=None, max_examples=200)
@given(elements, elements, elements)
def test_merging_is_associative(a, b, c):
    a, b, c = map(element, (a, b, c))
    assert_same(merge_partials(merge_partials(a, b), c), merge_partials(a, merge_partials(b, c)))
    assert_same(merge_partials(a, b, c), merge_partials(a, merge_partials(b, c)))


@settings(deadline=None, max_examples=100)
@given(elements, elements)
def test_merging_is_commutative(a, b):
    assert_same(merge_partials(element(a), element(b)), merge_partials(element(b), element(a)))


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
