"""Attention in two resolutions against a map of all pairs of tokens, in float64: plain torch, and the kernels (Triton).

In the map, tokens of a tile that is not exact all have the logit of the mean key of their tile.
"""

import itertools
import math

import pytest
import torch
from op_checks import (
    attend_by,
    by_implementation,
    call_of,
    check_kernels,
    in_interpreter,
    quiet,
    refuses,
    with_gradients,
)

from vmonarch import LatentGrid, TwoResolutionOptions, two_resolution_attention
from vmonarch.kernels.common.launch import launch_overrides, on_hopper
from vmonarch.kernels.two_resolution import op, reference
from vmonarch.kernels.two_resolution.tiling import tiling_of

pytestmark = quiet
by_grid = pytest.mark.parametrize("grid", [(4, 4, 4), (5, 7, 3), (1, 2, 5), (1, 1, 1)], ids=str)
TILE, QUERY_TILE = (2, 3, 2), (1, 4, 3)
BOXES = dict(tile=TILE, query_tile=QUERY_TILE)


def qkv(grid, D=6, E=5, *, B=2, H=2, dtype=torch.float64):
    tokens = math.prod(grid)
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((B, tokens, H, D), (B, tokens, H, D), (B, tokens, H, E))
    return [1.5 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def some_keys(grid, B=2):
    """A mask that leaves no key of the first tile."""
    mask = torch.rand(B, math.prod(grid), generator=torch.Generator().manual_seed(1)) < 0.7
    mask[0] &= boxes_of(grid, TILE) > 0
    return mask


def parts_of(length, most):
    """The part of each place of an axis that is cut evenly into parts of at most `most`, and the size of each part."""
    count = -(-length // most)
    sizes = [(i + 1) * length // count - i * length // count for i in range(count)]
    return [i for i, size in enumerate(sizes) for _ in range(size)], sizes


def boxes_of(grid, box):
    """The number of the box of every token."""
    parts = [parts_of(length, min(most, length))[0] for length, most in zip(grid, box, strict=True)]
    counts = [1 + axis[-1] for axis in parts]
    return torch.tensor([(t * counts[1] + h) * counts[2] + w for t, h, w in itertools.product(*parts)])


def oracle(q, k, v, exact, tile, *, rest=True, key_mask=None):
    """(out, lse) with all pairs of tokens written out; exact [B, H, S, S], of each pair whether it is."""
    attended = q.new_ones(*q.shape[:2], dtype=torch.bool) if key_mask is None else key_mask
    mixing = (tile[:, None] == tile) & attended[:, None]  # [B, S, S]
    means = mixing.to(k.dtype) / mixing.sum(-1, keepdim=True).clamp(min=1)
    k_mean = torch.einsum("bst,bthd->bshd", means, k)
    fine, coarse = (torch.einsum("bshd,bthd->bhst", q, x) * q.shape[-1] ** -0.5 for x in (k, k_mean))
    logits = torch.where(exact, fine, coarse if rest else -torch.inf)
    logits = logits.masked_fill(~attended[:, None, None], -torch.inf)
    return attend_by(logits, v)


def choice(grid):
    """A choice of tiles by chance, other numbers in every row, of which one is none and one is all."""
    n, m = (int(boxes_of(grid, box).max()) + 1 for box in (QUERY_TILE, TILE))
    chosen = torch.rand(2, 2, n, m, generator=torch.Generator().manual_seed(m)) < 0.4
    chosen[0, 0, 0], chosen[-1, -1, -1] = False, True
    return chosen


def of_pairs(chosen, grid):
    return chosen[..., boxes_of(grid, QUERY_TILE), :][..., boxes_of(grid, TILE)]


def attend(**options):
    return lambda *x: two_resolution_attention(*x, return_lse=True, **options)


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("rest", [True, False], ids=["", "without-rest"])
@by_grid
def test_tokens_of_a_tile_that_is_not_exact_all_have_the_logit_of_their_mean_key(grid, rest, masked, monkeypatch):
    inputs, chosen, mask = qkv(grid), choice(grid), some_keys(grid) if masked else None
    ours_of = attend(grid=grid, **BOXES, rest=rest, selection=chosen, key_mask=mask)
    ours = with_gradients(ours_of, inputs)
    pairs, tiles = of_pairs(chosen, grid), boxes_of(grid, TILE)
    theirs = with_gradients(lambda *x: oracle(*x, pairs, tiles, rest=rest, key_mask=mask), inputs)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    monkeypatch.setattr(reference, "MAX_CHUNK_ELEMENTS", 1)
    for x, y in zip(with_gradients(ours_of, inputs), ours, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@by_grid
@pytest.mark.parametrize("share", [0.01, 0.4])
def test_tiles_are_chosen_by_the_product_of_mean_query_and_mean_key(grid, share):
    q, k, v = qkv(grid)
    box, query_box = boxes_of(grid, TILE), boxes_of(grid, QUERY_TILE)
    mean, query_mean = (torch.nn.functional.one_hot(boxes).T.to(q.dtype) for boxes in (box, query_box))
    q_mean, k_mean = (
        torch.einsum("ms,bshd->bhmd", weights / weights.sum(1, keepdim=True), x)
        for weights, x in ((query_mean, q), (mean, k))
    )
    scores = q_mean @ k_mean.mT
    ranked = scores.argsort(-1, descending=True)[..., : math.ceil(share * len(mean))]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, ranked, True)
    ours = two_resolution_attention(q, k, v, grid=grid, **BOXES, share=share)
    expected, _ = oracle(q, k, v, of_pairs(chosen, grid), box)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@by_implementation
def test_without_any_exact_tile_and_without_the_rest_nothing_is_attended(implementation):
    grid = (3, 4, 3)
    inputs, none = qkv(grid, dtype=torch.float32), choice(grid) & False
    ours = attend(grid=grid, **BOXES, rest=False, selection=none, implementation=implementation)
    out, lse, *gradients = with_gradients(ours, inputs)
    assert lse.isneginf().all() and not any(x.any() for x in (out, *gradients))


SMALL, PART, HALF = (3, 4, 3), dict(grid=(2, 2, 5), B=1, H=1), dict(dtype=torch.float16, D=72, E=80)
# Of the inputs, and options.
KERNEL_CASES = {
    "tiles": (dict(grid=SMALL), dict(**BOXES, selection=choice(SMALL))),
    "masked": (dict(grid=SMALL), dict(**BOXES, selection=choice(SMALL), key_mask=some_keys(SMALL))),
    "without-rest": (dict(grid=SMALL), dict(rest=False, **BOXES, selection=choice(SMALL))),
    "masked-without-rest": (
        dict(grid=SMALL), dict(rest=False, **BOXES, selection=choice(SMALL), key_mask=some_keys(SMALL))),
    "negative-scale": (dict(grid=SMALL), dict(scale=-0.7, **BOXES, selection=choice(SMALL))),
    "full-tiles": (
        dict(grid=(4, 2, 4), D=16, E=16, B=1), dict(tile=(2, 2, 4), query_tile=(2, 2, 4), share=0.3)),
    "parts-of-tiles": (
        dict(grid=SMALL, B=1, H=1), dict(tile=(3, 3, 3), query_tile=(3, 4, 2), share=0.3)),
    "split-unevenly": (
        dict(grid=(1, 1, 5), B=2, H=1), dict(tile=(1, 1, 2), query_tile=(1, 1, 1), share=0.3)),
    "float16": (PART | HALF, dict(tile=(1, 2, 3))),
}  # fmt: skip


@in_interpreter
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_the_kernels_compute_the_same(name):
    sizes, options = KERNEL_CASES[name]
    inputs = qkv(**{"dtype": torch.float32} | sizes)
    check_kernels(lambda how: attend(grid=sizes["grid"], implementation=how, **options), inputs)


@in_interpreter
@pytest.mark.parametrize("m", [1, 5, 40])
def test_the_best_scores_are_the_largest_and_of_equal_ones_the_first(m):
    from vmonarch.kernels.two_resolution.op import best

    scores = torch.randn(1, 2, 3, m, generator=torch.Generator().manual_seed(m)).round(decimals=1)
    scores[0, 0, 0] = 0.0
    scores[0, 0, 0, ::2] = -0.0
    scores[0, 0, 1, ::3] = torch.inf
    scores[0, 1, 0, 1::2] = -torch.inf
    for count in {1, m // 2 + 1, m}:
        ranked = scores.argsort(stable=True, dim=-1, descending=True)[..., :count]
        expected = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, ranked, True)
        assert torch.equal(best(scores, count), expected)


GPU_CASES = {
    "default": dict(),
    "ragged": dict(tile=(2, 5, 5)),
    "boxes": dict(tile=(4, 4, 4)),
    "full-boxes": dict(tile=(2, 4, 8), grid=(6, 12, 16)),
    "without-rest": dict(rest=False, share=0.3),
    "boxes-without-rest": dict(rest=False, share=0.3, tile=(4, 4, 4)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", GPU_CASES)
@pytest.mark.parametrize(("D", "E"), [(64, 64), (128, 128), (72, 80), (256, 256)], ids=str)
def test_gpu_results_and_gradients_match_float64(D, E, name, dtype):
    case = {"grid": (6, 13, 16)} | GPU_CASES[name]
    grid = case.pop("grid")
    inputs = [x.cuda() for x in qkv(grid, D, E, dtype=dtype)]
    options = TwoResolutionOptions(**case)
    # Rounding of the means must not choose other tiles than in float64.
    tiling = tiling_of(LatentGrid(*grid), options)
    shape = (2, 2, tiling.of_queries.tiles, tiling.tiles)
    chosen = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.2
    selected = dict(grid=grid, options=options, selection=chosen.cuda())
    check_kernels(lambda how: attend(implementation=how, **selected), inputs)
    ours = two_resolution_attention(*inputs, grid=grid, options=options)
    plain = two_resolution_attention(*inputs, grid=grid, options=options, implementation="torch")
    assert (ours - plain).norm() <= 0.05 * plain.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("rest", [True, False])
@pytest.mark.parametrize(("grid", "D"), [((6, 28, 52), 128), ((6, 13, 17), 64), ((2, 4, 5), 128)], ids=str)
def test_gpu_keys_in_parts(grid, D, rest, parts, monkeypatch):
    """Of one frame's queries, written among other frames; some of them have no exact tile, or fewer than parts."""
    hopper = pytest.importorskip("vmonarch.kernels.hopper.two_resolution")
    if not on_hopper(torch.device("cuda", 0)):
        pytest.skip("these kernels are for Hopper")
    tiling = tiling_of(LatentGrid(*grid), TwoResolutionOptions(), query_frames=1)
    _, key, value = (x.cuda() for x in qkv(grid, D, D, dtype=torch.bfloat16))
    B, S, H, _ = key.shape
    frame = slice(S // grid[0], 2 * (S // grid[0]))
    query = torch.randn_like(key[:, frame])
    exact = torch.rand(B, H, tiling.of_queries.tiles, tiling.tiles, device="cuda") < 0.4
    exact[0, 0, 0] = False
    pooled = op.pool(key, value, tiling, None) if rest else None
    monkeypatch.setattr(hopper, "parts_of", lambda *_: parts)

    def attend(enabled):
        out, lse = torch.full_like(key, 7), torch.full((B, H, S), 7.0, device="cuda")
        with launch_overrides({"hopper": {"enabled": enabled}}):
            op.attend(
                query, key, value, exact, tiling.tiles, None, tiling, pooled, D**-0.5, out[:, frame], lse[:, :, frame]
            )
        return out, lse

    (out, lse), (portable, portable_lse) = attend(1), attend(0)
    assert (out - portable).norm() <= 0.01 * portable[:, frame].norm()
    empty = portable_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty) and bool(empty.any()) is (not rest)
    assert (lse - portable_lse)[~empty].abs().max() < 0.02


@pytest.mark.gpu
def test_gpu_results_are_the_same_in_a_cuda_graph():
    grid = (6, 13, 16)
    inputs = [x.cuda() for x in qkv(grid, 128, 128, dtype=torch.bfloat16)]
    graph, expected = torch.cuda.CUDAGraph(), two_resolution_attention(*inputs, grid=grid)
    with torch.no_grad(), torch.cuda.graph(graph):
        out = two_resolution_attention(*inputs, grid=grid)
    graph.replay()
    assert torch.equal(out, expected)


Q = torch.randn(1, 12, 2, 4)
bad = call_of(two_resolution_attention, Q, Q, Q, grid=(3, 2, 2))
BAD = {
    "grid": (bad(grid=(3, 2, 3)), ValueError, "has 18 tokens, but query"),
    "options": (bad(options={"share": 0.1}), TypeError, "options must be None or TwoResolutionOptions, got dict"),
    "both": (bad(options=TwoResolutionOptions(), share=0.2), TypeError, "share must not be given beside options"),
    "share": (bad(share=None), TypeError, "share must be a number"),
    "selection-shape": (
        bad(selection=torch.ones(1, 1, 2, 3, dtype=torch.bool), tile=(3, 2, 1)), ValueError,
        r"selection must be \[1 or 1, 2 or 1, 1, 2\] for these 1 tiles of queries and 2 of keys"),
}  # fmt: skip

test_bad_input_is_named = refuses(BAD)
