"""Factors of biases: their products are the bias, exactly, to the energy asked for, or as well as networks learn it."""

import pytest
import torch
from op_checks import refuses

from vmonarch import flash_bias_attention
from vmonarch.bias import (
    SpatioTemporalDecay,
    alibi_factors,
    alibi_slopes,
    distance_factors,
    low_rank_bias_attention,
    svd_factors,
)


def product(factors):
    """[H, Sq, Sk] in float64."""
    query_factor, key_factor = (x.detach().double()[0] for x in factors)
    heads = max(query_factor.shape[1], key_factor.shape[1])
    return torch.einsum("shr,thr->hst", query_factor.expand(-1, heads, -1), key_factor.expand(-1, heads, -1))


def randn(*shape, seed=0, **options):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **options)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (8, [2.0**-n for n in range(1, 9)]),
        (1, [2.0**-8]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (12, [2.0**-n for n in range(1, 9)] + [2.0 ** (-0.5 - n) for n in range(4)]),
    ],
)
def test_alibi_has_the_slopes_of_its_paper(heads, slopes):
    torch.testing.assert_close(alibi_slopes(heads), torch.tensor(slopes))


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 9), (1, 40_001)])
def test_alibi_is_the_distance_to_keys_before(queries, keys):
    slopes = alibi_slopes(12)
    factors = alibi_factors(queries, keys, slopes)
    i = torch.arange(keys - queries, keys, dtype=torch.float64)[:, None]
    j = torch.arange(keys, dtype=torch.float64)
    assert factors[0].shape == (1, queries, 1, 2) and factors[1].shape == (1, keys, 12, 2)
    expected = -slopes.double()[:, None, None] * (i - j)
    assert (product(factors) - expected).abs().max() <= 2**-24 * keys
    assert product(alibi_factors(3, 3)).tolist()[0] == [[0, 1, 2], [-1, 0, 1], [-2, -1, 0]]


@pytest.mark.parametrize("C", [1, 2, 3, 5])
@pytest.mark.parametrize("weights", ["number", "head", "query-and-head", "axis", "query-head-and-axis"])
def test_distances_are_squared_and_weighted(C, weights):
    x, y = 100 + randn(7, C), 100 + randn(9, C, seed=1)
    shape = {"head": (4,), "query-and-head": (7, 4), "axis": (1, 4, C), "query-head-and-axis": (7, 4, C)}.get(weights)
    weight = -0.3 if shape is None else randn(*shape, seed=2).requires_grad_()
    factors = distance_factors(x, y, weight)
    assert factors[0].shape[3] == factors[1].shape[3] == (2 * C + 1 if "axis" in weights else C + 2)
    squares = (x.double()[:, None] - y.double()).square()  # [Sq, Sk, C]
    if shape is None:
        expected = weight * squares.sum(-1)[None]
    elif "axis" in weights:
        expected = torch.einsum("shc,stc->hst", weight.detach().double().expand(7, -1, -1), squares)
    else:
        expected = weight.detach().double().expand(7, 4).T[:, :, None] * squares.sum(-1)
    torch.testing.assert_close(product(factors), expected, rtol=0, atol=2e-5)
    if shape is not None:
        q, k, v = randn(1, 7, 4, 8), randn(1, 9, 4, 8, seed=1), randn(1, 9, 4, 8, seed=2)
        (gradient,) = torch.autograd.grad(flash_bias_attention(q, k, v, *factors).sum(), weight)
        assert gradient.shape == weight.shape and gradient.abs().max() > 0


def low_and_high_rank():
    """A bias of rank 1, 2, 3, …, but of full rank in the last head."""
    bias = torch.stack([randn(30, n + 1, seed=n) @ randn(n + 1, 40, seed=n + 50) for n in range(5)])
    bias[-1] = randn(30, 40, seed=99)
    return bias


def test_svd_keeps_the_energy_that_was_asked_for():
    bias = low_and_high_rank()
    found = svd_factors(bias, energy=0.995, max_rank=8)
    assert found.low_rank_heads == (0, 1, 2, 3) and found.dense_heads == (4,)
    assert found.query_factor.shape[3] == 8
    assert (product((found.query_factor, found.key_factor)) - bias[:4]).abs().max() < 1e-5
    assert torch.equal(found.dense[0], bias[4])
    coarse = svd_factors(bias[4:], energy=0.5, max_rank=20)
    kept = product((coarse.query_factor, coarse.key_factor)).square().sum() / bias[4].double().square().sum()
    squares = torch.linalg.svdvals(bias[4].double()).square()
    needed = int((squares.cumsum(0) / squares.sum() < 0.5).sum()) + 1
    assert 0.5 <= kept < 0.9 and coarse.query_factor.shape[3] == -(-needed // 8) * 8


@pytest.mark.parametrize("heads", [[0, 1, 2, 3, 4], [0, 1], [4]], ids=["both-kinds", "low", "high"])
def test_heads_of_low_and_high_rank_attend_side_by_side(heads):
    bias = low_and_high_rank()[heads]
    H = len(heads)
    q, k, v = randn(2, 30, H, 8), randn(2, 40, H, 8, seed=1), randn(2, 40, H, 6, seed=2)
    out = low_rank_bias_attention(q, k, v, svd_factors(bias, energy=1.0, max_rank=8))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).double() for x in (q, k, v)), attn_mask=bias.double()[None]
    ).transpose(1, 2)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)


BAD = {
    "heads": (lambda: alibi_slopes(0), "heads must be at least 1"),
    "points": (lambda: distance_factors(torch.ones(3), torch.ones(3, 1)), r"query_points must be a tensor \[S, C\]"),
    "coordinates": (lambda: distance_factors(torch.ones(3, 2), torch.ones(3, 1)), "key_points must have as many coord"),
    "reach": (lambda: SpatioTemporalDecay(2, reach=(1.0, 0.0, 1.0)), "reach must be three numbers above 0"),
    "bias": (lambda: svd_factors(torch.ones(3, 3)), r"bias must be a tensor \[H, Sq, Sk\]"),
    "other-lengths": (
        lambda: low_rank_bias_attention(*[torch.ones(1, 4, 1, 2)] * 3, svd_factors(torch.ones(1, 3, 3))),
        "bias must be of 1 heads, 4 queries and 4 keys, got 1, 3 and 3"),
}  # fmt: skip


test_bad_input_is_named = refuses({name: (call, ValueError, message) for name, (call, message) in BAD.items()})
