"""Attention to the first order around mean queries: the tangent of exact attention there, and its gradients."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vmonarch import FirstOrderOptions, LatentGrid, first_order_attention, flash_entropy_attention
from vmonarch.plan import method_flops

GRID = LatentGrid(2, 3, 5)


def _inputs(spread=1.0, dtype=torch.float64, grid=GRID):
    """query and key [2, S, 3, 8], value [2, S, 3, 5]; `spread` of the queries around one that has nothing special."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=dtype)
    query = draw(2, 1, 3, 8) + spread * draw(2, grid.tokens, 3, 8)
    return query, draw(2, grid.tokens, 3, 8), draw(2, grid.tokens, 3, 5)


def _exact(query, key, value, scale):
    """out [B, S, H, E] and lse [B, H, S] of exact attention, densely."""
    logits = scale * torch.einsum("bihd,bjhd->bhij", query, key)
    return torch.einsum("bhij,bjhe->bihe", logits.softmax(-1), value), logits.logsumexp(-1)


def _mean_of_boxes(query, bounds):
    """Every query replaced by the mean of its box; the boxes lie between `bounds` of every axis."""
    boxes = query.unflatten(1, GRID)
    means = torch.empty_like(boxes)
    t, y, x = ([slice(*pair) for pair in zip(axis, axis[1:], strict=False)] for axis in bounds)
    for box in [(slice(None), i, j, k) for i in t for j in y for k in x]:
        means[box] = boxes[box].mean((1, 2, 3), keepdim=True)
    return means.flatten(1, 3)


@pytest.mark.parametrize(
    ("parts", "bounds", "scale"),
    [
        ((1, 1, 1), ((0, 2), (0, 3), (0, 5)), None),
        ((1, 2, 2), ((0, 2), (0, 2, 3), (0, 3, 5)), 0.7),
        ((4, 1, 4), ((0, 1, 2), (0, 3), (0, 2, 3, 4, 5)), None),
    ],
)
def test_it_is_the_tangent_of_exact_attention_at_the_mean_queries(parts, bounds, scale):
    q, k, v = _inputs()
    mean = _mean_of_boxes(q, bounds)
    attend = lambda query: _exact(query, k, v, 8**-0.5 if scale is None else scale)
    (out, lse), (tangent, slope) = torch.func.jvp(attend, (mean,), (q - mean,))
    found = first_order_attention(q, k, v, grid=GRID, parts=parts, scale=scale, return_lse=True)
    torch.testing.assert_close(found, (out + tangent, lse + slope))


def test_it_is_near_where_queries_are_alike():
    errors = []
    for spread in (0.1, 0.05):
        q, k, v = _inputs(spread)
        exact, lse, _ = flash_entropy_attention(q, k, v)
        found, bound = first_order_attention(q, k, v, grid=GRID, return_lse=True)
        errors.append((found - exact).norm() / exact.norm())
        assert (bound <= lse + 1e-12).all()
    # What is left is of the second order.
    assert errors[0] < 0.01 and 3 < errors[0] / errors[1] < 5


@pytest.mark.parametrize("parts", [(1, 1, 1), (2, 4, 1)])
def test_its_work_is_what_is_counted(parts):
    q, k, v = (torch.empty(2, GRID.tokens, 3, 8, device="meta") for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        first_order_attention(q, k, v, grid=GRID, parts=parts)
    assert counter.get_total_flops() == 2 * 3 * method_flops(FirstOrderOptions(parts=parts), GRID, 8)


def test_gradients():
    grid = LatentGrid(1, 2, 3)
    inputs = [x.requires_grad_() for x in _inputs(grid=grid)]
    attend = lambda *x: first_order_attention(*x, grid=grid, parts=(1, 2, 1), return_lse=True)
    assert torch.autograd.gradcheck(attend, inputs)


def test_half_precision_is_summed_in_float32():
    grid = LatentGrid(16, 16, 16)
    q, k, v = (x.bfloat16() for x in _inputs(dtype=torch.float32, grid=grid))
    found, lse = first_order_attention(q, k, v, grid=grid, return_lse=True)
    wanted = first_order_attention(*(x.double() for x in (q, k, v)), grid=grid)
    assert found.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert (found.double() - wanted).abs().max() < 0.01 * wanted.abs().max()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grid": (2, 3, 4)}, r"grid \(2, 3, 4\) has 24 tokens, but query has 30"),
        ({"options": {}}, "options must be None or FirstOrderOptions, got dict"),
        ({"parts": (0, 1, 1)}, "parts.frames must be at least 1, got 0"),
        ({"implementation": "cuda"}, "implementation must be"),
        ({"scale": float("nan")}, "scale must be finite"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        first_order_attention(*_inputs(), **{"grid": GRID, **arguments})
