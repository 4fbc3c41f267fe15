"""Monarch and VMonarch attention against the papers' pseudo-code and against the identities in docs/attention.md.

The oracles work on one head in float64, one position at a time, and build the whole N×N Monarch matrix: slow, and as
close to the page as possible. B batch, S tokens, H heads, D head dim, m blocks, b positions per block.
"""

import itertools
import math

import pytest
import torch
from op_checks import call_of, in_interpreter, quiet, refuses, with_gradients
from torch.utils._python_dispatch import TorchDispatchMode

from vmonarch import ExactBlocks, LatentGrid, monarch_attention, two_resolution_attention, vmonarch_attention
from vmonarch.bias import SpatioTemporalDecay
from vmonarch.kernels.flash_entropy import reference as flash_entropy_reference
from vmonarch.kernels.monarch.reference import r_step, r_step_in_two_resolutions
from vmonarch.kernels.two_resolution.selection import exact_tiles
from vmonarch.kernels.two_resolution.tiling import frame_tiling
from vmonarch.options import VMonarchOptions
from vmonarch.two_resolution_options import TwoResolutionOptions

RAGGED_GRIDS = [(1, 1, 1), (1, 7, 3), (2, 1, 1), (7, 1, 1), (3, 7, 5), (5, 2, 11), (4, 6, 6)]
by_grid = pytest.mark.parametrize("grid", RAGGED_GRIDS, ids=lambda g: "x".join(map(str, g)))


def qkv(tokens, *, batch=2, heads=3, dim=8, seed=0, dtype=torch.float64, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        (torch.randn(batch, tokens, heads, dim, generator=generator, dtype=torch.float64) * spread).to(dtype)
        for _ in range(3)
    )


def softmax_attention(q, k, v, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bshd,bthd->bhst", q, k) * scale
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v), scores.logsumexp(-1)


def per_head(function, *tensors):
    """Apply a one-head function to every head of [B, S, H, D] tensors and stack its results the same way."""
    B, _, H, _ = tensors[0].shape
    heads = [[function(*(t[i, :, h] for t in tensors)) for h in range(H)] for i in range(B)]
    return torch.stack([torch.stack(row, 1) for row in heads])


# --- Fig. 6 of VMonarch, literally. `clamp` is the one addition of its §4.1. ---


def R_update(aR, cR, Kb):
    R = torch.softmax(torch.bmm(aR, Kb.transpose(1, 2)) / cR[:, :, None], dim=2)
    cL = torch.sum(torch.xlogy(R, R), dim=2).transpose(0, 1)
    aL = torch.bmm(R, Kb).transpose(0, 1)
    return aL, cL, R


def L_update(aL, cL, Qb):
    L = torch.softmax(torch.bmm(Qb, aL.transpose(1, 2)) - cL[:, None, :], dim=2)
    cR = torch.sum(L, dim=1).transpose(0, 1)
    aR = torch.bmm(L.transpose(1, 2), Qb).transpose(0, 1)
    return aR, cR, L


def figure_6(Q, K, V, m, b, T, clamp=0.0):
    N, d = Q.shape
    Qb = Q.reshape(m, b, d).transpose(0, 1)
    Kb = K.reshape(m, b, d)
    Vb = V.reshape(m, b, V.shape[-1])
    aR = Q.reshape(m, b, d)
    cR = torch.ones(m, b, dtype=Q.dtype)
    for _ in range(T):
        aL, cL, R = R_update(aR, cR.clamp(min=clamp), Kb)
        aR, cR, L = L_update(aL, cL, Qb)
    y = torch.bmm(R, Vb).transpose(0, 1)
    O = torch.bmm(L, y).transpose(0, 1)
    return O.reshape(N, -1)


# --- The general oracle: any assignment of tokens to (block, position), any exact blocks, any key mask. ---


def monarch_map(Q, K, block, position, T, clamp, attended=None, exact=None, aware=True, cell=None):
    """The N×N map of one head and the log-partition of its rows, one position and one query at a time.

    block, position: [N] place of every token. attended: [N] keys that take part. exact: [N, m] query × key block.
    cell: [N] coarse cell of every token inside its block, for all iterations but the last.
    """
    N = Q.shape[0]
    m, b = int(block.max()) + 1, int(position.max()) + 1
    attended = torch.ones(N, dtype=torch.bool) if attended is None else attended
    exact = torch.zeros(N, m, dtype=torch.bool) if exact is None else exact
    token = {(int(block[n]), int(position[n])): n for n in range(N)}
    z = {(k, j): Q[token[k, j]] if (k, j) in token else torch.zeros_like(Q[0]) for k in range(m) for j in range(b)}
    scores = Q @ K.T
    for t in range(T):
        last = t == T - 1
        aL, cL, R = {}, {}, {}
        for k, j in itertools.product(range(m), range(b)):
            keys = [n for n in range(N) if block[n] == k and attended[n]]
            if not keys:
                continue
            if cell is not None and not last:
                groups = {}
                for n in keys:
                    groups.setdefault(int(cell[n]), []).append(n)
                keys, groups = [n for g in groups.values() for n in g], list(groups.values())
                means = torch.stack([K[g].mean(0) for g in groups])
                counts = torch.tensor([float(len(g)) for g in groups], dtype=Q.dtype)
                share = torch.softmax(means @ z[k, j] + counts.log(), 0) / counts
                r = torch.cat([s.repeat(len(g)) for s, g in zip(share, groups, strict=True)])
            else:
                r = torch.softmax(K[keys] @ z[k, j], 0)
            R[k, j] = (keys, r)
            aL[k, j] = r @ K[keys]
            cL[k, j] = torch.xlogy(r, r).sum()
        M, lse = torch.zeros(N, N, dtype=Q.dtype), torch.full((N,), -math.inf, dtype=Q.dtype)
        column_sum, column_query = {}, {}
        for n in range(N):
            j = int(position[n])
            knows = aware or last
            logits = {k: Q[n] @ aL[k, j] - cL[k, j] for k in range(m) if (k, j) in aL and not (knows and exact[n, k])}
            exact_keys = [i for i in range(N) if knows and exact[n, block[i]] and attended[i]]
            if exact_keys:
                logits["exact"] = scores[n, exact_keys].logsumexp(0)
            if not logits:
                continue
            lse[n] = torch.stack(list(logits.values())).logsumexp(0)
            for k, logit in logits.items():
                weight = (logit - lse[n]).exp()
                if k == "exact":
                    M[n, exact_keys] += weight * scores[n, exact_keys].softmax(0)
                else:
                    keys, r = R[k, j]
                    M[n, keys] += weight * r
                    column_sum[k, j] = column_sum.get((k, j), 0.0) + weight
                    column_query[k, j] = column_query.get((k, j), 0.0) + weight * Q[n]
        for k, j in z:
            if (k, j) in column_sum:
                z[k, j] = column_query[k, j] / column_sum[k, j].clamp(min=clamp)
            else:
                z[k, j] = torch.zeros_like(Q[0])
    return M, lse


def grid_places(grid, frames_per_block=1, tiles=(1, 1), coarse=1):
    """Block, position, frame and coarse cell of every token, by counting."""
    T, H, W = grid
    tile_of = [
        [max(p for p in range(n) if p * size // n <= x) for x in range(size)]
        for n, size in zip(tiles, grid[1:], strict=True)
    ]
    start = [[p * size // n for p in range(n)] for n, size in zip(tiles, grid[1:], strict=True)]
    extent = [
        max((p + 1) * size // n - p * size // n for p in range(n)) for n, size in zip(tiles, grid[1:], strict=True)
    ]
    block, position, frame, cell = [], [], [], []
    for t, y, x in itertools.product(range(T), range(H), range(W)):
        ty, tx = tile_of[0][y], tile_of[1][x]
        dt, dy, dx = t % frames_per_block, y - start[0][ty], x - start[1][tx]
        block.append((t // frames_per_block * tiles[0] + ty) * tiles[1] + tx)
        position.append((dt * extent[0] + dy) * extent[1] + dx)
        frame.append(t)
        cell.append(hash((dt, dy // coarse, dx // coarse)))
    return tuple(torch.tensor(x) for x in (block, position, frame, cell))


def vmonarch_oracle(q, k, v, grid, *, T=2, frames_per_block=1, tiles=(1, 1), coarse=1, exact=None, clamp=0.1):
    """(out, lse) of `monarch_map` for every head, with E(l) rounded outward to whole key blocks."""
    block, position, frame, cell = grid_places(grid, frames_per_block, tiles, coarse)
    pattern = None
    if exact is not None:
        pairs = torch.zeros(grid[0], int(block.max()) + 1, dtype=torch.bool)
        for l, key_frame in itertools.product(range(grid[0]), range(grid[0])):
            if (
                l in exact.rows
                or key_frame in exact.columns
                or (exact.band is not None and abs(l - key_frame) <= exact.band)
            ):
                whole_block = frame // frames_per_block == key_frame // frames_per_block
                pairs[l, block[whole_block].unique()] = True
        pattern = pairs[frame]
    aware = exact is None or exact.aware

    def head(q, k, v):
        M, lse = monarch_map(
            q * q.shape[-1] ** -0.5, k, block, position, T, clamp,
            exact=pattern, aware=aware, cell=None if coarse == 1 else cell,
        )  # fmt: skip
        return torch.cat([M @ v, lse[:, None]], -1)

    result = per_head(head, q, k, v)
    return result[..., :-1], result[..., -1].transpose(1, 2)


def assert_equal(actual, expected, tolerance=1e-9):
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# --- The papers' pseudo-code ---


@pytest.mark.parametrize("T", [1, 2, 3, 5])
@pytest.mark.parametrize(("m", "b"), [(1, 6), (6, 1), (3, 4), (4, 7)])
def test_monarch_attention_is_figure_6(m, b, T):
    q, k, v = qkv(m * b)
    scale = q.shape[-1] ** -0.5
    expected = per_head(lambda q, k, v: figure_6(q * scale, k, v, m, b, T), q, k, v)
    assert_equal(monarch_attention(q, k, v, block_size=b, num_iterations=T), expected)


@pytest.mark.parametrize("T", [1, 2, 4])
def test_vmonarch_attention_is_figure_6_with_clamp_and_first_frame_recomputation(T):
    grid = (4, 3, 5)
    q, k, v = qkv(60, spread=3.0)
    scale = q.shape[-1] ** -0.5
    expected = per_head(lambda q, k, v: figure_6(q * scale, k, v, 4, 15, T, clamp=0.1), q, k, v)
    out = vmonarch_attention(q, k, v, grid=grid, num_iterations=T, exact=None)
    assert_equal(out, expected)
    unclamped = vmonarch_attention(q, k, v, grid=grid, num_iterations=T, exact=None, min_mass=0.0)
    assert T == 1 or (out - unclamped).abs().max() > 1e-3, "the clamp matters"
    expected[:, :15] = softmax_attention(q[:, :15], k, v)[0]
    assert_equal(vmonarch_attention(q, k, v, grid=grid, num_iterations=T), expected)


# --- Every option against the token-by-token oracle ---

OPTIONS = {
    "plain": {},
    "t1": {"T": 1},
    "t3": {"T": 3},
    "two-frames": {"frames_per_block": 2},
    "three-frames": {"frames_per_block": 3},
    "tiles": {"tiles": (2, 2)},
    "tiles-one-row": {"tiles": (1, 3)},
    "coarse": {"coarse": 2},
    "coarse-3": {"coarse": 3, "T": 3},
    "row": {"exact": ExactBlocks(rows=(0,))},
    "row-unaware": {"exact": ExactBlocks(rows=(0,), aware=False)},
    "column": {"exact": ExactBlocks(columns=(0,))},
    "own-frame": {"exact": ExactBlocks(band=0)},
    "own-frame-unaware": {"exact": ExactBlocks(band=0, aware=False)},
    "band": {"exact": ExactBlocks(band=1), "T": 3},
    "all-patterns": {"exact": ExactBlocks(rows=(1,), columns=(0, 2), band=0)},
    "band-of-two-frames": {"exact": ExactBlocks(band=0), "frames_per_block": 2},
    "band-of-tiles": {"exact": ExactBlocks(rows=(0,), band=0), "tiles": (2, 2)},
    "everything": {
        "exact": ExactBlocks(rows=(2,), columns=(0,), band=0),
        "frames_per_block": 2,
        "tiles": (2, 1),
        "coarse": 2,
        "T": 3,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("grid", [(3, 3, 4), (5, 2, 3)], ids=["3x3x4", "5x2x3"])
def test_every_option_matches_the_oracle(name, grid):
    options = dict(OPTIONS[name])
    q, k, v = qkv(math.prod(grid), batch=1, heads=2, spread=2.0)
    expected, expected_lse = vmonarch_oracle(q, k, v, grid, **options)
    out, lse = vmonarch_attention(
        q, k, v, grid=grid, num_iterations=options.pop("T", 2), return_lse=True, **{"exact": None, **options}
    )
    assert_equal(out, expected)
    assert_equal(lse, expected_lse)


@pytest.mark.parametrize("tiles", [(3, 2), (5, 1), (2, 4)], ids=str)
def test_tiles_that_do_not_divide_a_frame_match_the_oracle(tiles):
    q, k, v = qkv(2 * 5 * 5, batch=1, heads=1)
    expected, _ = vmonarch_oracle(q, k, v, (2, 5, 5), tiles=tiles)
    assert_equal(vmonarch_attention(q, k, v, grid=(2, 5, 5), tiles=tiles, exact=None), expected)


# All pairs of padding and mask, and of either with a ragged size.
@pytest.mark.parametrize(
    ("tokens", "block_size", "padding", "masked"),
    [
        *((11, 4, "post", False), (11, 4, "pre", True), (13, 5, "post", True), (13, 5, "pre", False)),
        *((7, 7, "pre", True), (9, 1, "post", True), (10, 64, "pre", False), (1, 3, "post", False)),
    ],
)
def test_ragged_blocks_and_key_masks_match_the_oracle(tokens, block_size, padding, masked):
    q, k, v = qkv(tokens, batch=2, heads=1)
    key_mask = torch.rand(2, tokens, generator=torch.Generator().manual_seed(1)) > 0.4 if masked else None
    size = min(block_size, tokens)
    place = torch.arange(tokens) + (-tokens % size if padding == "pre" else 0)
    out, lse = monarch_attention(q, k, v, block_size=block_size, padding=padding, key_mask=key_mask, return_lse=True)
    for i in range(2):
        attended = None if key_mask is None else key_mask[i]
        Q, K, V = (x[i, :, 0] for x in (q * q.shape[-1] ** -0.5, k, v))
        M, expected_lse = monarch_map(Q, K, place // size, place % size, 2, 0.0, attended=attended)
        assert_equal(out[i, :, 0], M @ V)
        assert_equal(lse[i, 0], expected_lse)


def test_rows_without_any_key_are_zero_with_empty_log_weight():
    q, k, v = qkv(12)
    key_mask = torch.zeros(2, 12, dtype=torch.bool)
    key_mask[1] = True
    out, lse = monarch_attention(q, k, v, block_size=4, key_mask=key_mask, return_lse=True)
    assert (out[0] == 0).all() and torch.isneginf(lse[0]).all()
    assert_equal(out[1], monarch_attention(q, k, v, block_size=4)[1])


# --- Identities ---


def explicit_map(q, k, grid, **options):
    """The map itself, read off the op by giving it one-hot values."""
    S = q.shape[1]
    one_hot = torch.eye(S, dtype=q.dtype)[None, :, None].expand(q.shape[0], S, q.shape[2], S)
    return vmonarch_attention(q, k, one_hot, grid=grid, return_lse=True, **options)


def test_the_last_r_step_in_two_resolutions_is_that_attention_inside_every_frame():
    """With keys as values, and an entropy that counts a mean as its keys; with a share of 1 it is the plain R-step."""
    grid = LatentGrid(3, 6, 8)
    z, key, value = (x.permute(0, 2, 1, 3).unflatten(2, (3, 48)) for x in qkv(144, spread=2.0))
    options = VMonarchOptions(r_share=0.5)
    aL, cL, y = r_step_in_two_resolutions(z, key, value, grid, options, False)
    tiling = frame_tiling(grid, TwoResolutionOptions(share=0.5))
    assert tiling.cells == 4 and 1 < exact_tiles(tiling, TwoResolutionOptions(share=0.5)) < tiling.tiles
    cell = tuple(-(-edge // 2) for edge in tiling.box[1:])
    frames = lambda x: x[:, :, 1].transpose(1, 2)
    attend = lambda v: two_resolution_attention(
        frames(z), frames(key), v, grid=(1, 6, 8), share=0.5, tile=tiling.box, cell=(1, *cell), scale=1.0
    )
    for found, values in ((aL, key), (y, value)):
        assert_equal(frames(found), attend(frames(values)))
    one_hot = torch.eye(48, dtype=z.dtype)[None, :, None].expand(z.shape[0], 48, z.shape[1], 48)
    R = attend(one_hot).transpose(1, 2)
    assert_equal(cL[:, :, 1], torch.xlogy(R, R).sum(-1), 1e-10)
    whole = r_step_in_two_resolutions(z, key, value, grid, VMonarchOptions(r_share=1.0), False)
    for found, expected in zip(whole, r_step(z, key, None, value, False), strict=True):
        assert_equal(found, expected)


@pytest.mark.parametrize("more", [{}, {"coarse": 2}, {"r_share": 0.5}], ids=str)
def test_without_its_last_update_L_is_that_of_the_iteration_before(more):
    """Its log-partitions are, and so is the output where L alone decides it; R is of the last iteration."""
    grid = (3, 4, 6)
    q, k, v = qkv(72, spread=2.0)
    attend = lambda v, **options: vmonarch_attention(q, k, v, grid=grid, exact=None, return_lse=True, **options)
    half, lse = attend(v, last_l_update=False, **more)
    whole, before = attend(v, **more), attend(v, num_iterations=1)
    assert (lse - whole[1]).abs().max() > 1e-3
    if more.get("coarse") is None:
        assert_equal(lse, before[1])
        of_frames = v[:, ::24].repeat_interleave(24, 1)
        assert_equal(attend(of_frames, last_l_update=False, **more)[0], attend(of_frames, num_iterations=1)[0])
    # R is best for this L: the mean row-KL is at most what the log-partitions tell of the R before.
    one_hot = torch.eye(72, dtype=q.dtype)[None, :, None].expand(*q.shape[:1], 72, q.shape[2], 72)
    rows = attend(one_hot, last_l_update=False, min_mass=0.0, **more)
    M, logits = rows[0].transpose(1, 2), q.shape[-1] ** -0.5 * (q.transpose(1, 2) @ k.permute(0, 2, 3, 1))
    KL = (torch.xlogy(M, M) - M * logits.log_softmax(-1)).sum(-1)
    assert more.get("r_share") or KL.mean() < (logits.logsumexp(-1) - rows[1]).mean()
    # A frame by itself has one L, and R is that of the last iteration.
    alone = [x[:, :24] for x in (q, k, v)]
    found, expected = (
        vmonarch_attention(*alone, grid=(1, 4, 6), exact=None, last_l_update=update, **more) for update in (False, True)
    )
    assert_equal(found, expected)
    assert (half - before[0]).abs().max() > 1e-3, "the values are mixed with the R of the last iteration"


@pytest.mark.parametrize("rows", [(0,), (1, 3)], ids=str)
@pytest.mark.parametrize("aware", [False, True], ids=["", "aware"])
def test_exact_rows_with_a_share_of_the_tiles_are_attention_in_two_resolutions(rows, aware):
    grid, P = (4, 4, 7), 28
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4 * P, 2, 6, generator=generator, dtype=torch.float64) for _ in range(3))
    options = dict(grid=grid, exact=ExactBlocks(rows=rows, aware=aware), return_lse=True)
    out, lse = vmonarch_attention(q, k, v, row_share=0.3, **options)
    whole, whole_lse = vmonarch_attention(q, k, v, **options)
    # A tile of queries is of one frame.
    other = two_resolution_attention(q, k, v, grid=grid, share=0.3, query_tile=(1, 4, 4), return_lse=True)
    for l in range(4):
        frame = slice(l * P, (l + 1) * P)
        expected, expected_lse = other if l in rows else (whole, whole_lse)
        assert_equal(out[:, frame], expected[:, frame])
        assert_equal(lse[..., frame], expected_lse[..., frame])
        assert l not in rows or not torch.allclose(out[:, frame], whole[:, frame])


@by_grid
@pytest.mark.parametrize("options", [{}, {"coarse": 2, "r_share": 0.3}], ids=["", "two-resolutions"])
def test_log_partition_is_the_variational_objective(grid, options):
    """logsumexp_k Z = ⟨M_row, s_row⟩ + H(M_row) = lse_true - KL(M_row ‖ softmax_row)."""
    q, k, v = qkv(math.prod(grid), spread=2.0)
    M, lse = explicit_map(q, k, grid, exact=None, **options)
    M = M.transpose(1, 2)  # [B, H, S, S]
    scores = torch.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
    objective = (M * scores).sum(-1) - torch.xlogy(M, M).sum(-1)
    assert_equal(lse, objective, 1e-11)
    lse_true = softmax_attention(q, k, v)[1]
    KL = (torch.xlogy(M, M) - M * scores.log_softmax(-1)).sum(-1)
    assert_equal(lse, lse_true - KL, 1e-11)
    assert (lse <= lse_true + 1e-12).all()


@by_grid
@pytest.mark.parametrize("aware", [True, False], ids=["aware", "unaware"])
def test_all_blocks_exact_is_softmax(grid, aware):
    q, k, v = qkv(math.prod(grid), spread=3.0)
    expected, expected_lse = softmax_attention(q, k, v)
    for exact in (ExactBlocks(rows=range(grid[0]), aware=aware), ExactBlocks(band=grid[0], aware=aware)):
        out, lse = vmonarch_attention(q, k, v, grid=grid, exact=exact, return_lse=True)
        assert_equal(out, expected)
        assert_equal(lse, expected_lse)


# --- Equivalent ways to say the same ---


@by_grid
def test_the_scale_is_absorbed_by_the_query(grid):
    q, k, v = qkv(math.prod(grid))
    assert_equal(
        vmonarch_attention(q, k, v, grid=grid, scale=0.7), vmonarch_attention(q * 0.7, k, v, grid=grid, scale=1.0)
    )
    assert_equal(
        vmonarch_attention(q, k, v, grid=grid), vmonarch_attention(q, k, v, grid=grid, scale=q.shape[-1] ** -0.5)
    )


# --- Numbers: precision, extremes, memory ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("exact", [None, "first_frame", ExactBlocks(band=1)], ids=["none", "first-frame", "band"])
def test_error_stays_near_that_of_rounding_the_inputs(dtype, exact):
    """The op computes in float32, so the error is that of one rounding of the output (× 2 for float32's own sums)."""
    q, k, v = (x.to(dtype) for x in qkv(5 * 12))
    out = vmonarch_attention(q, k, v, grid=(5, 3, 4), exact=exact)
    assert out.dtype == dtype
    expected = vmonarch_attention(*(x.double() for x in (q, k, v)), grid=(5, 3, 4), exact=exact)
    budget = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    assert (out.double() - expected).norm() / expected.norm() < budget


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spread", [1e-30, 1.0, 60.0])
def test_logits_up_to_ten_thousand_stay_finite_forward_and_backward(dtype, spread):
    q, k, v = (x.to(dtype).requires_grad_() for x in qkv(24, dim=16, spread=spread))
    if spread == 60.0:
        assert (torch.einsum("bshd,bthd->bhst", q, k) / 4).abs().max() > 1e4
    for exact in (None, "first_frame", ExactBlocks(band=0, columns=(0,))):
        out, lse = vmonarch_attention(
            q, k, v.clamp(-5, 5), grid=(4, 2, 3), exact=exact, return_lse=True, entropy_grad=True
        )
        gradients = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
        for tensor in (out, lse, *gradients):
            assert tensor.isfinite().all()


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("options", [{}, {"exact": ExactBlocks(band=1)}, {"tiles": (2, 2), "coarse": 2}], ids=str)
def test_no_tensor_grows_beyond_the_budget_or_the_inputs(monkeypatch, options):
    budget = 5_000
    monkeypatch.setattr(flash_entropy_reference, "MAX_CHUNK_SCORES", budget)
    q, k, v = qkv(8 * 64, batch=1, heads=2, dim=4, dtype=torch.float32)
    with LargestTensor() as largest, torch.no_grad():
        vmonarch_attention(q, k, v, grid=(8, 8, 8), **options)
    assert largest.numel <= max(budget, q.numel() * 2)  # the N×N map would hold 524,288


@pytest.mark.parametrize("budget", [1, 40, 700])
def test_chunks_change_neither_result_nor_gradients(monkeypatch, budget):
    options = {"grid": (5, 3, 5), "exact": ExactBlocks(band=0, columns=(0,)), "coarse": 2, "return_lse": True}
    run = lambda: with_gradients(lambda *x: vmonarch_attention(*x, entropy_grad=True, **options), qkv(5 * 15))
    whole = run()
    monkeypatch.setattr(flash_entropy_reference, "MAX_CHUNK_SCORES", budget)
    torch.testing.assert_close(run(), whole, rtol=1e-11, atol=1e-11)


# --- Gradients ---


@pytest.mark.parametrize(
    "options",
    [{"exact": None}, {}, {"exact": ExactBlocks(band=0)}, {"tiles": (1, 2), "coarse": 2}, {"frames_per_block": 2}],
    ids=str,
)
def test_gradients_are_those_of_finite_differences(options):
    q, k, v = (x.requires_grad_() for x in qkv(12, batch=1, heads=1, dim=3))
    assert torch.autograd.gradcheck(
        lambda q, k, v: vmonarch_attention(q, k, v, grid=(3, 2, 2), entropy_grad=True, return_lse=True, **options),
        (q, k, v),
    )


def test_the_entropy_gradient_is_stopped_unless_asked_for():
    q, k, v = (x.requires_grad_() for x in qkv(12))

    def figure_6_stopped(q, k, v):
        """Fig. 6 with cL detached, in plain autograd."""
        Qb, Kb, Vb = q.reshape(3, 4, -1).transpose(0, 1), k.reshape(3, 4, -1), v.reshape(3, 4, -1)
        aR, cR = q.reshape(3, 4, -1), torch.ones(3, 4, dtype=q.dtype)
        for _ in range(2):
            aL, cL, R = R_update(aR, cR, Kb)
            aR, cR, L = L_update(aL, cL.detach(), Qb)
        return torch.bmm(L, torch.bmm(R, Vb).transpose(0, 1)).transpose(0, 1).reshape(12, -1)

    options = {"grid": (3, 2, 2), "exact": None, "scale": 1.0, "min_mass": 0.0}
    weight = torch.randn(2, 12, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    expected = torch.autograd.grad((per_head(figure_6_stopped, q, k, v) * weight).sum(), (q, k, v))
    stopped = torch.autograd.grad((vmonarch_attention(q, k, v, **options) * weight).sum(), (q, k, v))
    flowing = torch.autograd.grad((vmonarch_attention(q, k, v, entropy_grad=True, **options) * weight).sum(), (q, k, v))
    for ours, theirs in zip(stopped, expected, strict=True):
        assert_equal(ours, theirs)
    assert (stopped[0] - flowing[0]).abs().max() > 1e-3


# --- A low-rank bias gives what it gives written out as a matrix. ---

S, P = 15, 5
GRID = (3, 1, 5)


def with_factors(*, B=1, H=2, D=6, R=4, shared=True, dtype=torch.float64, factors=None):
    generator = torch.Generator().manual_seed(0)
    sizes = [(B, S, H, D)] * 3 + [(1 if shared else B, S, 1 if shared else H, R)] * 2
    dtypes = [dtype] * 3 + [factors or dtype] * 2
    return [
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        for size, dtype in zip(sizes, dtypes, strict=True)
    ]


def map_of_logits(G, T, min_mass, exact_rows=()):
    """The Monarch map of one head [S, S] from its matrix of logits alone, bias and all, token by token.

    A centroid query is a mean of queries, so that its logits are the mean of their rows of G.
    """
    m, b = S // P, P
    z = {(k, j): G[k * b + j] for k in range(m) for j in range(b)}
    for _ in range(T):
        M = torch.zeros(S, S, dtype=G.dtype)
        R = {(k, j): z[k, j][k * b : (k + 1) * b].softmax(0) for k, j in z}
        L = torch.zeros(m, m, b, dtype=G.dtype)
        for l, j in itertools.product(range(m), range(b)):
            row = G[l * b + j]
            logits = [row[k * b : (k + 1) * b] @ R[k, j] - torch.xlogy(R[k, j], R[k, j]).sum() for k in range(m)]
            L[l, :, j] = torch.stack(logits).softmax(0)
            for k in range(m):
                M[l * b + j, k * b : (k + 1) * b] = L[l, k, j] * R[k, j]
        for k, j in z:
            mean = sum(L[l, k, j] * G[l * b + j] for l in range(m))
            z[k, j] = mean / L[:, k, j].sum().clamp(min=min_mass)
    for l in exact_rows:
        M[l * b : (l + 1) * b] = G[l * b : (l + 1) * b].softmax(-1)
    return M


@pytest.mark.parametrize("exact", [None, "first_frame"])
@pytest.mark.parametrize("num_iterations", [1, 2, 3])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "by-head"])
def test_a_bias_gives_what_it_gives_written_out(exact, num_iterations, shared):
    q, k, v, fq, fk = with_factors(B=2, shared=shared)
    out = vmonarch_attention(q, k, v, grid=GRID, exact=exact, num_iterations=num_iterations, bias=(fq, fk))
    logits = torch.einsum("bshd,bthd->bhst", q, k) * 6**-0.5
    logits = logits + torch.einsum("bshr,bthr->bhst", fq.expand(2, -1, 2, -1), fk.expand(2, -1, 2, -1))
    rows = () if exact is None else (0,)
    maps = torch.stack([torch.stack([map_of_logits(G, num_iterations, 0.1, rows) for G in heads]) for heads in logits])
    torch.testing.assert_close(out, torch.einsum("bhst,bthd->bshd", maps, v), rtol=1e-10, atol=1e-12)
    plain = vmonarch_attention(q, k, v, grid=GRID, exact=exact, num_iterations=num_iterations)
    assert (out - plain).abs().max() > 0.1


@in_interpreter
@quiet
@pytest.mark.parametrize("options", [{}, {"exact": ExactBlocks(band=1), "coarse": 2}], ids=["paper", "band-coarse"])
def test_with_a_bias_the_kernels_agree_with_plain_torch(options):
    inputs = [x.requires_grad_() for x in with_factors(dtype=torch.float32)]
    results = []
    for implementation in ("triton", "torch"):
        out = vmonarch_attention(*inputs[:3], grid=GRID, bias=inputs[3:], implementation=implementation, **options)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert all(x.abs().max() > 0 for x in results[0])


def test_float32_factors_of_a_bias_stay_exact_in_16_bit():
    grid = LatentGrid(3, 20, 20)
    fq, fk = SpatioTemporalDecay(1, reach=(4.0, 1.0, 1.0))(grid)
    q, k, v = (torch.randn(1, grid.tokens, 1, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    q, k, v = (x.bfloat16() for x in (q, k, v))
    exact, ours, rounded = (
        vmonarch_attention(*x, grid=grid, bias=bias, exact=ExactBlocks(band=2)).double()
        for x, bias in (
            ((q.double(), k.double(), v.double()), (fq.double(), fk.double())),
            ((q, k, v), (fq, fk)),
            ((q, k, v), (fq.bfloat16(), fk.bfloat16())),
        )
    )
    assert (ours - exact).norm() < 0.003 * exact.norm() and (rounded - exact).norm() > 0.03 * exact.norm()


Q, F = torch.randn(1, S, 2, 4), torch.randn(1, S, 1, 2)
bad = call_of(vmonarch_attention, Q, Q, Q, grid=GRID)
BAD = {
    "no-pair": (bad(bias=F), TypeError, "bias must be None or a pair"),
    "one-factor": (bad(bias=(F,)), TypeError, "bias must be None or a pair"),
    "other-length": (bad(bias=(F, F[:, :3])), ValueError, "key_factor must be"),
    "no-scale": (bad(bias=(F, F), scale=0.0), ValueError, "scale must not be 0"),
    "too-wide": (
        bad(*[torch.randn(1, S, 1, 250)] * 3, bias=(F[..., :1].repeat(1, 1, 1, 8),) * 2, implementation="triton"),
        NotImplementedError, "a head dimension is 258 .supported: up to 256"),
}  # fmt: skip
test_a_bad_bias_is_named = in_interpreter(refuses(BAD))


# --- Compilation ---


def test_it_compiles_without_a_graph_break():
    q, k, v = qkv(30, dtype=torch.float32)
    for options in ({}, {"tiles": (2, 2), "coarse": 2, "frames_per_block": 2, "exact": ExactBlocks(band=0)}):
        compiled = torch.compile(
            lambda q, k, v, options=options: vmonarch_attention(q, k, v, grid=(5, 2, 3), **options),
            fullgraph=True,
            backend="aot_eager",
        )
        torch.testing.assert_close(compiled(q, k, v), vmonarch_attention(q, k, v, grid=(5, 2, 3), **options))


@pytest.mark.slow
def test_the_papers_first_setting_runs_within_a_few_gigabytes(monkeypatch):
    """16 × 1456 tokens (61×448×832 pixels) on the CPU, without any tensor above 3 q-sized ones.

    A quarter of the 12 heads, and of the budget: in proportion, all sizes are those of 12.
    """
    assert flash_entropy_reference.MAX_CHUNK_SCORES == 2**25
    monkeypatch.setattr(flash_entropy_reference, "MAX_CHUNK_SCORES", 2**23)
    q, k, v = qkv(16 * 28 * 52, batch=1, heads=3, dim=64, dtype=torch.float32)
    with LargestTensor() as largest, torch.no_grad():
        out = vmonarch_attention(q, k, v, grid=(16, 28, 52))
    assert largest.numel <= max(flash_entropy_reference.MAX_CHUNK_SCORES, 3 * q.numel())
    rows = torch.randint(0, 1456, (4,), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(out[:, rows], softmax_attention(q[:, rows], k, v)[0], rtol=1e-4, atol=1e-5)
