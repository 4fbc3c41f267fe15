"""Attention to the first order around mean queries: the tangent of exact attention there, and its gradients."""

import pytest
import torch
from op_checks import call_of, qkv, refuses, softmax_attention

from vmonarch import LatentGrid, first_order_attention

GRID = LatentGrid(2, 3, 5)


INPUTS = qkv(GRID.tokens, GRID.tokens, 8, 5)


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
    q, k, v = INPUTS
    mean = _mean_of_boxes(q, bounds)
    attend = lambda query: softmax_attention(query, k, v, scale=scale)
    (out, lse), (tangent, slope) = torch.func.jvp(attend, (mean,), (q - mean,))
    found = first_order_attention(q, k, v, grid=GRID, parts=parts, scale=scale, return_lse=True)
    torch.testing.assert_close(found, (out + tangent, lse + slope))


def test_gradients():
    grid = LatentGrid(1, 2, 3)
    inputs = [x.requires_grad_() for x in qkv(6, 6, 4, 3, B=1, H=2)]
    attend = lambda *x: first_order_attention(*x, grid=grid, parts=(1, 2, 1), return_lse=True)
    assert torch.autograd.gradcheck(attend, inputs)


bad = call_of(first_order_attention, *INPUTS, grid=GRID)
test_bad_arguments_are_named = refuses({
    "grid": (bad(grid=(2, 3, 4)), ValueError, r"grid \(2, 3, 4\) has 24 tokens, but query has 30"),
    "parts": (bad(parts=(0, 1, 1)), ValueError, "parts.frames must be at least 1, got 0"),
})  # fmt: skip
