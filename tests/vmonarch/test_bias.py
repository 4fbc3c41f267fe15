"""Factors of biases: their products are the bias, exactly or to the energy asked for."""

import pytest
import torch
from op_checks import refuses

from vmonarch import flash_bias_attention
from vmonarch.bias import SpatioTemporalDecay, alibi_factors, alibi_slopes, distance_factors, svd_factors


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


def test_svd_keeps_the_energy_that_was_asked_for():
    # Of rank 1, 2, 3 and 4.
    bias = torch.stack([randn(30, n + 1, seed=n) @ randn(n + 1, 40, seed=n + 50) for n in range(4)])
    factors = svd_factors(bias, energy=0.995)
    assert [x.shape for x in factors] == [(1, 30, 4, 8), (1, 40, 4, 8)]
    assert (product(factors) - bias).abs().max() < 1e-5
    # One column more than there are singular values; and a bias of zeros.
    assert (product(svd_factors(randn(1, 7, 40), energy=1.0)) - randn(1, 7, 40)).abs().max() < 1e-5
    assert not product(svd_factors(torch.zeros(1, 3, 4))).any()
    full = randn(1, 30, 40, seed=99)
    kept = product(svd_factors(full, energy=0.5)).square().sum() / full.double().square().sum()
    squares = torch.linalg.svdvals(full[0].double()).square()
    needed = int((squares.cumsum(0) / squares.sum() < 0.5).sum()) + 1
    assert 0.5 <= kept < 0.9 and svd_factors(full, energy=0.5)[0].shape[3] == -(-needed // 8) * 8


BAD = {
    "heads": (lambda: alibi_slopes(0), "heads must be at least 1"),
    "points": (lambda: distance_factors(torch.ones(3), torch.ones(3, 1)), r"query_points must be a tensor \[S, C\]"),
    "coordinates": (lambda: distance_factors(torch.ones(3, 2), torch.ones(3, 1)), "key_points must have as many coord"),
    "reach": (lambda: SpatioTemporalDecay(2, reach=(1.0, 0.0, 1.0)), "reach must be three numbers above 0"),
    "bias": (lambda: svd_factors(torch.ones(3, 3)), r"bias must be a tensor \[H, Sq, Sk\]"),
}  # fmt: skip


test_bad_input_is_named = refuses({name: (call, ValueError, message) for name, (call, message) in BAD.items()})
