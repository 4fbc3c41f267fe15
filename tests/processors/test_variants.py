"""Variants for the ablation tables against maps of all pairs, built in float64; methods that carry them; their work."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from vmonarch import ExactBlocks, LatentGrid, TwoResolutionProcessor, vmonarch_attention
from vmonarch.configs import InputError
from vmonarch.configs.methods import resolve_method
from vmonarch.eval.attention_flops import recorded_call, relative_flops
from vmonarch.flops import full_flops, vmonarch_flops
from vmonarch.pipelines.embedded import embedded_model_path
from vmonarch.variants import (
    FIXED,
    VariantProcessor,
    controlled_attention,
    factorised_attention,
    local_attention,
    sink_average_attention,
)

by_grid = pytest.mark.parametrize("grid", [(3, 2, 5), (5, 7, 3), (1, 3, 2)], ids=lambda g: "x".join(map(str, g)))


def qkv(grid, *, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    size = (2, math.prod(grid), 3, 8)
    query, key, value = (1.5 * torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(3))
    # A first frame that draws attention, so that its mass and entropy differ from the others'.
    key[:, : grid[1] * grid[2]] *= 2
    return query.to(dtype), key.to(dtype), value[..., :5].contiguous().to(dtype)


def per_head(attention_map, q, k, v):
    """Apply a function of one head's scaled query and key [N, D] to a map [N, N]; [B, S, H, E]."""
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for i, h in itertools.product(range(q.shape[0]), range(q.shape[2])):
        out[i, :, h] = attention_map(q[i, :, h] * q.shape[-1] ** -0.5, k[i, :, h]) @ v[i, :, h]
    return out


def masked(allowed):
    """The map of softmax over the keys that `allowed` [N, N] names."""
    return lambda Q, K: (Q @ K.T).masked_fill(~allowed, -torch.inf).softmax(-1)


def monarch_map(block, position, iterations, *, held_cR=(), held_cL=(), clamp=0.1):
    """A function to the map M = L·R, all pairs written out, with cR and cL of the held blocks at their initial value.

    block, position: [N] place of every token.
    """
    N, m, b = len(block), int(block.max()) + 1, int(position.max()) + 1
    inside = block[None, :] == torch.arange(m)[:, None]  # [m, N]
    at = (position[None, :] == torch.arange(b)[:, None]).double()  # [b, N]

    def attention_map(Q, K):
        z = torch.einsum("kn,jn,nd->kjd", inside.double(), at, Q)
        for _ in range(iterations):
            R = (z @ K.T).masked_fill(~inside[:, None], -torch.inf).softmax(-1)  # [m, b, N]
            aL, cL = R @ K, torch.xlogy(R, R).sum(-1)
            for k in held_cL:
                cL[k] = -math.log(int(inside[k].sum()))
            Z = torch.einsum("nd,knd->nk", Q, aL[:, position]) - cL[:, position].T
            L = Z.softmax(-1)  # [N, m]
            cR = torch.einsum("nk,jn->kj", L, at)
            for k in held_cR:
                cR[k] = 1.0
            z = torch.einsum("nk,jn,nd->kjd", L, at, Q) / cR.clamp(min=clamp)[..., None]
        M = L[:, block] * R[block, position[:, None].expand(N, N), torch.arange(N)[None, :].expand(N, N)]
        assert torch.allclose(M.sum(-1), torch.ones(N, dtype=M.dtype))
        return M

    return attention_map


def coordinates(grid):
    return torch.cartesian_prod(*(torch.arange(n) for n in grid)).reshape(-1, 3).unbind(1)


def with_exact_first_frame(out, q, k, v, grid):
    exact = per_head(masked(torch.ones(q.shape[1], q.shape[1], dtype=torch.bool)), q, k, v)
    first = grid[1] * grid[2]
    return torch.cat([exact[:, :first], out[:, first:]], 1)


# ------------------------------------------------------------------------------------------------------ the paper's


@by_grid
@pytest.mark.parametrize("iterations", [1, 2, 3])
@pytest.mark.parametrize(("recompute", "exact"), [(False, None), (True, "first_frame")])
def test_without_control_it_is_vmonarch_attention(grid, iterations, recompute, exact):
    q, k, v = qkv(grid)
    out = controlled_attention(q, k, v, grid=grid, num_iterations=iterations, recompute=recompute)
    expected = vmonarch_attention(q, k, v, grid=grid, num_iterations=iterations, exact=exact, implementation="torch")
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@by_grid
@pytest.mark.parametrize("iterations", [1, 2, 3])
@pytest.mark.parametrize("fix_cr", FIXED)
@pytest.mark.parametrize("fix_cl", FIXED)
def test_control_holds_the_terms_of_the_frames_it_names(grid, iterations, fix_cr, fix_cl):
    q, k, v = qkv(grid)
    options = {"num_iterations": iterations, "fix_cr": fix_cr, "fix_cl": fix_cl, "min_mass": 0.02}
    time, row, column = coordinates(grid)
    held = {"none": (), "first": (0,), "all": range(grid[0])}
    oracle = monarch_map(
        time, row * grid[2] + column, iterations, held_cR=held[fix_cr], held_cL=held[fix_cl], clamp=0.02
    )
    torch.testing.assert_close(
        controlled_attention(q, k, v, grid=grid, **options), per_head(oracle, q, k, v), rtol=0, atol=1e-12
    )


def test_every_control_differs_with_two_iterations_and_that_of_cR_is_none_with_one():
    grid = (4, 3, 3)
    q, k, v = qkv(grid)
    outs = {
        (n, cR, cL): controlled_attention(q, k, v, grid=grid, num_iterations=n, fix_cr=cR, fix_cl=cL)
        for n, cR, cL in itertools.product((1, 2), FIXED, FIXED)
    }
    for (one, a), (two, b) in itertools.combinations(outs.items(), 2):
        # As in the paper's Table 5, where rows 2, 3 and 7, 4 and 5, 1 and 6 are the same.
        same = one[0] == two[0] == 1 and one[2] == two[2]
        assert ((a - b).abs().max() < 1e-12) == same, (one, two)


@by_grid
def test_the_sink_average_is_the_mean_of_two_maps(grid):
    q, k, v = qkv(grid)
    time, row, column = coordinates(grid)
    monarch = per_head(monarch_map(time, row * grid[2] + column, 2), q, k, v)
    sink = per_head(masked((time == 0).expand(len(time), -1)), q, k, v)
    out = sink_average_attention(q, k, v, grid=grid)
    torch.testing.assert_close(out, (monarch + sink) / 2, rtol=0, atol=1e-12)


@pytest.mark.parametrize("grid", [(5, 7, 3), (4, 8, 4), (7, 5, 11)], ids=lambda g: "x".join(map(str, g)))
@pytest.mark.parametrize("axis", ["T", "H", "W"])
@pytest.mark.parametrize("recompute", [False, True])
def test_factors_along_another_axis_are_a_monarch_map_of_permuted_tokens(grid, axis, recompute):
    q, k, v = qkv(grid)
    blocks = 3
    numbers = dict(zip("THW", coordinates(grid), strict=True))
    sizes = dict(zip("THW", grid, strict=True))
    length = sizes[axis]
    bounds = [p * length // blocks for p in range(blocks + 1)]
    block = sum((numbers[axis] >= bound).long() for bound in bounds[1:-1])
    # The paper's order of the others: (HWT), (WHT), (THW).
    second, third = {"T": "HW", "H": "WT", "W": "HT"}[axis]
    offset = numbers[axis] - torch.tensor(bounds)[block]
    position = (offset * sizes[second] + numbers[second]) * sizes[third] + numbers[third]
    expected = per_head(monarch_map(block, position, 2), q, k, v)
    if recompute:
        expected = with_exact_first_frame(expected, q, k, v, grid)
    out = factorised_attention(q, k, v, grid=grid, axis=axis, blocks=blocks, recompute=recompute)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


# -------------------------------------------------------------------------------------------------------- controls


@by_grid
@pytest.mark.parametrize(
    "pattern",
    [ExactBlocks(band=0), ExactBlocks(band=1, columns=(0,)), ExactBlocks(columns=(0,)), ExactBlocks(band=0, rows=(0,))],
    ids=["own", "band and first", "first", "own and first row"],
)
def test_local_attention_is_softmax_over_the_pattern(grid, pattern):
    q, k, v = qkv(grid)
    time = coordinates(grid)[0]
    apart = (time[:, None] - time[None, :]).abs()
    allowed = apart <= (-1 if pattern.band is None else pattern.band)
    if pattern.columns:
        allowed = allowed | (time == 0)[None, :]
    if pattern.rows:
        allowed = allowed | (time == 0)[:, None]
    out = local_attention(q, k, v, grid=grid, exact=pattern)
    torch.testing.assert_close(out, per_head(masked(allowed), q, k, v), rtol=0, atol=1e-12)


def test_local_attention_refuses_frames_without_keys():
    with pytest.raises(ValueError, match="frame 1 has none"):
        local_attention(*qkv((3, 2, 2)), grid=(3, 2, 2), exact=ExactBlocks(rows=(0,)))


@by_grid
def test_a_local_band_of_all_frames_is_softmax(grid):
    q, k, v = qkv(grid)
    exact = per_head(masked(torch.ones(q.shape[1], q.shape[1], dtype=torch.bool)), q, k, v)
    out = local_attention(q, k, v, grid=grid, exact=ExactBlocks(band=grid[0]))
    torch.testing.assert_close(out, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda *x, **o: controlled_attention(*x, fix_cr="first", fix_cl="first", recompute=True, **o),
        sink_average_attention,
        lambda *x, **o: factorised_attention(*x, axis="W", blocks=2, **o),
        lambda *x, **o: local_attention(*x, exact=ExactBlocks(band=1), **o),
    ],
    ids=["controlled", "sink average", "factorised", "local"],
)
def test_sums_are_in_float32_and_the_result_in_the_dtype_of_the_query(function):
    grid = (5, 4, 3)
    low = qkv(grid, dtype=torch.bfloat16)
    # float32 inside: nothing but the last rounding is of bfloat16.
    exact = function(*(x.double() for x in low), grid=grid)
    out = function(*low, grid=grid)
    assert out.dtype == torch.bfloat16 and out.shape == (2, 60, 3, 5)
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all()
    with pytest.raises(ValueError, match="grid"):
        function(*low, grid=(5, 4, 4))


# --------------------------------------------------------------------------------------------------------- methods

NAMES = {
    "controlled": "vmonarch-controlled:fix_cr=all,fix_cl=first,recompute=true",
    "sink_average": "vmonarch-sink-average",
    "factorised": "monarch-w4:blocks=2",
    "local": "local",
    "block_topk": "block-topk:cube=[2, 2, 2],sparsity=0.5",
    "two_resolution": "two-resolution:tile=[1, 2, 2],share=null,beta=1.5",
}


@pytest.fixture(scope="module")
def transformer():
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel.from_pretrained(embedded_model_path() / "transformer").eval()


def forward(transformer):
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 16, 5, 6, 8, generator=generator)
    text = torch.randn(1, 7, 128, generator=generator)
    with torch.no_grad():
        return transformer(latents, torch.tensor([500.0]), text, return_dict=False)[0]


@pytest.mark.parametrize("kind", NAMES)
def test_a_method_runs_its_variant_in_every_layer_and_goes_away(transformer, kind):
    before = forward(transformer)
    method = resolve_method(NAMES[kind])
    assert resolve_method(method.to_dict()) == method and method.without_dense() == method
    method.install(transformer)
    processors = [block.attn1.processor for block in transformer.blocks]
    if kind in ("block_topk", "two_resolution"):
        assert all(isinstance(p, TwoResolutionProcessor) for p in processors)
    else:
        assert all(isinstance(p, VariantProcessor) and p.control == kind for p in processors)
    changed = forward(transformer)
    assert torch.isfinite(changed).all() and (changed - before).abs().max() > 1e-3
    resolve_method("full").install(transformer)
    assert torch.equal(forward(transformer), before)


def test_work_is_that_of_the_pairs_and_blocks_that_are_kept(transformer):
    with recorded_call(SimpleNamespace(transformer=transformer)) as call:
        forward(transformer)
    # 5 frames of 3×4 tokens.
    grid = LatentGrid(5, 3, 4)
    names = ["local", "local:exact={columns: [0], band: 0}", "block-topk:cube=[1, 3, 4],sparsity=0.6"]
    names += ["vmonarch-sink-average", "vmonarch-controlled:recompute=true", "vmonarch-controlled"]
    names += ["monarch-t4:blocks=5", "two-resolution:tile=[1, 3, 2],query_tile=[5, 3, 2],share=0.25"]
    names += ["two-resolution:share=null,beta=1.0"]
    found = relative_flops(call, [resolve_method(name) for name in names], ["transformer"])
    near, sink, cubes, average, recomputed, plain, blocks, tiles, unknown = found.values()
    default, without = (vmonarch_flops(grid, 1, exact=exact) / full_flops(grid, 1) for exact in ("first_frame", None))
    assert near == pytest.approx((2 + 3 + 4 + 4 + 3) / 25) and sink == pytest.approx((1 + 4 * 2) / 25)
    # Two of five cubes, and the products of five mean queries and keys.
    assert cubes == pytest.approx(2 / 5 + 2 * 5**2 / (4 * 60**2))
    assert average == pytest.approx(default) and recomputed == pytest.approx(default)
    assert plain == pytest.approx(without) and blocks == pytest.approx(default)
    # Three of ten tiles of six tokens, one key for each of seven others, and the products of two and ten means.
    assert tiles == pytest.approx((3 * 6 + 7) / 60 + 2 * 2 * 10 / (4 * 60**2))
    # How many tiles exceed the threshold depends on the data.
    assert unknown is None


def test_dense_layers_keep_full_attention(transformer):
    resolve_method("local:dense_layers=[0, 2]").install(transformer)
    kinds = [isinstance(block.attn1.processor, VariantProcessor) for block in transformer.blocks]
    resolve_method("full").install(transformer)
    assert kinds == [False, True, False, True, True, True]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("vmonarch-controlled:fix_cr=some", ["fix_cr", "none, first, all"]),
        ("vmonarch-controlled:num_iterations=0", ["num_iterations"]),
        ("vmonarch-sink-average:min_mass=-1", ["min_mass"]),
        ("monarch-h4:axis=D", ["axis", "T, H, W"]),
        ("monarch-h4:blocks=0", ["blocks"]),
        ("local:exact={columns: [], band: null}", ["exact", "band or columns"]),
        ("local:exact=first_frame", ["exact", "mapping"]),
        ("local:exact={bend: 1}", ["exact.bend"]),
        ("block-topk:sparsity=1", ["share", "above 0"]),
        ("block-topk:cube=[4, 4, 0]", ["tile.width"]),
        ("block-topk:dense_steps=-1", ["dense_steps"]),
        ("two-resolution:share=0", ["share", "above 0"]),
        ("two-resolution:share=1.5", ["share", "at most 1"]),
        ("two-resolution:share=all", ["share"]),
        ("two-resolution:beta=1.0", ["share must be None where beta is given", "share=0.1 and beta=1.0"]),
        ("two-resolution:share=null", ["share must be None where beta is given", "share=None and beta=None"]),
        ("two-resolution:share=null,beta=.nan", ["beta", "finite"]),
        ("two-resolution:tile=[1, 4, 0]", ["tile.width", "at least 1"]),
        ("two-resolution:dense_layers=-1", ["dense_layers"]),
    ],
)
def test_bad_options_are_errors_that_name_them(spec, words):
    with pytest.raises(InputError) as error:
        resolve_method(spec)
    assert all(word in str(error.value) for word in words), error.value


def test_more_blocks_than_the_axis_is_long_is_an_error():
    with pytest.raises(ValueError, match="blocks must not exceed the axis W, which is 3 long, got 4"):
        factorised_attention(*qkv((5, 7, 3)), grid=(5, 7, 3), axis="W")
