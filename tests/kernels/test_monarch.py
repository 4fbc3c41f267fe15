"""Monarch and VMonarch attention against the papers' pseudo-code and against the identities in docs/attention.md.

The oracles work on one head in float64, one position at a time, and build the whole N×N Monarch matrix: slow, and as
close to the page as possible. B batch, S tokens, H heads, D head dim, m blocks, b positions per block.
"""

import itertools
import math

import pytest
import torch
from op_checks import call_of, in_interpreter, quiet, refuses, softmax_attention, with_gradients
from torch.utils._python_dispatch import TorchDispatchMode

from vmonarch import (
    ExactBlocks,
    VMonarchOptions,
    monarch_attention,
    two_resolution_attention,
    vmonarch_attention,
)
from vmonarch.kernels.flash_entropy import reference as flash_entropy_reference
from vmonarch.kernels.monarch.reference import monarch_attention_reference
from vmonarch.kernels.two_resolution.tiling import Tiling, tile_layout


def qkv(tokens, *, batch=2, heads=3, dim=8, seed=0, dtype=torch.float64, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        (torch.randn(batch, tokens, heads, dim, generator=generator, dtype=torch.float64) * spread).to(dtype)
        for _ in range(3)
    )


def per_head(function, *tensors):
    """Apply a one-head function to every head of [B, S, H, D] tensors and stack its results the same way."""
    B, _, H, _ = tensors[0].shape
    heads = [[function(*(t[i, :, h] for t in tensors)) for h in range(H)] for i in range(B)]
    return torch.stack([torch.stack(row, 1) for row in heads])


# --- Fig. 6 of VMonarch, literally. `clamp` is the one addition of its §4.1. ---


def figure_6(Q, K, V, m, b, T, clamp=0.0):
    N, d = Q.shape
    Qb = Q.reshape(m, b, d).transpose(0, 1)
    Kb = K.reshape(m, b, d)
    Vb = V.reshape(m, b, V.shape[-1])
    aR = Q.reshape(m, b, d)
    cR = torch.ones(m, b, dtype=Q.dtype)
    for _ in range(T):
        R = torch.softmax(torch.bmm(aR, Kb.transpose(1, 2)) / cR.clamp(min=clamp)[:, :, None], dim=2)
        cL = torch.sum(torch.xlogy(R, R), dim=2).transpose(0, 1)
        aL = torch.bmm(R, Kb).transpose(0, 1)
        L = torch.softmax(torch.bmm(Qb, aL.transpose(1, 2)) - cL[:, None, :], dim=2)
        cR = torch.sum(L, dim=1).transpose(0, 1)
        aR = torch.bmm(L.transpose(1, 2), Qb).transpose(0, 1)
    y = torch.bmm(R, Vb).transpose(0, 1)
    O = torch.bmm(L, y).transpose(0, 1)
    return O.reshape(N, -1)


# --- The general oracle: any assignment of tokens to (block, position), any exact blocks, any key mask. ---


def monarch_map(Q, K, block, position, T, clamp, attended=None, exact=None, aware=True, cell=None, update=True):
    """The N×N map of one head and the log-partition of its rows, one position and one query at a time.

    block, position: [N] place of every token. attended: [N] keys that take part. exact: [N, m] query × key block.
    cell: [N] coarse cell of every token inside its block, for all iterations but the last.
    update: whether L is updated in the last iteration.
    """
    N = Q.shape[0]
    m, b = int(block.max()) + 1, int(position.max()) + 1
    attended = torch.ones(N, dtype=torch.bool) if attended is None else attended
    exact = torch.zeros(N, m, dtype=torch.bool) if exact is None else exact
    token = {(int(block[n]), int(position[n])): n for n in range(N)}
    z = {(k, j): Q[token[k, j]] if (k, j) in token else torch.zeros_like(Q[0]) for k in range(m) for j in range(b)}
    scores = Q @ K.T
    aL, cL, R = {}, {}, {}
    for t in range(T):
        last = t == T - 1
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
            if update or not last:
                aL[k, j], cL[k, j] = r @ K[keys], torch.xlogy(r, r).sum()
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


def vmonarch_oracle(
    q, k, v, grid, *, num_iterations=2, coarse=1, exact=None, min_mass=0.1, last_l_update=True, scale=None, bias=None
):
    """(out, lse) of `monarch_map` for every head; places by counting."""
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        # Logits are what counts, and these are those of longer heads.
        q, k = (torch.cat([x, factor.expand(*x.shape[:3], -1)], -1) for x, factor in zip((q, k), bias, strict=True))
    frame, row, column = torch.cartesian_prod(*map(torch.arange, grid)).view(-1, 3).unbind(1)
    position = row * grid[2] + column
    pattern = None
    if exact is not None:
        pairs = torch.zeros(grid[0], grid[0], dtype=torch.bool)
        for l, k_frame in itertools.product(range(grid[0]), repeat=2):
            in_band = exact.band is not None and abs(l - k_frame) <= exact.band
            pairs[l, k_frame] = l in exact.rows or k_frame in exact.columns or in_band
        pattern = pairs[frame]
    aware = exact is None or exact.aware
    cell = None if coarse == 1 else row // coarse * grid[2] + column // coarse

    def head(q, k, v):
        known = {"exact": pattern, "aware": aware, "cell": cell, "update": last_l_update}
        M, lse = monarch_map(q, k, frame, position, num_iterations, min_mass, **known)
        return torch.cat([M @ v, lse[:, None]], -1)

    result = per_head(head, q, k, v)
    return result[..., :-1], result[..., -1].transpose(1, 2)


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


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


OPTIONS = {
    "plain": {},
    "t1": {"num_iterations": 1},
    "t3": {"num_iterations": 3},
    "scale": {"scale": -0.7},
    "no-clamp": {"min_mass": 0.0},
    "coarse": {"coarse": 2},
    "coarse-3": {"coarse": 3, "num_iterations": 3},
    "row": {"exact": ExactBlocks(rows=(0,))},
    "row-unaware": {"exact": ExactBlocks(rows=(0,), aware=False)},
    "column": {"exact": ExactBlocks(columns=(0,))},
    "own-frame": {"exact": ExactBlocks(band=0)},
    "own-frame-unaware": {"exact": ExactBlocks(band=0, aware=False)},
    "band": {"exact": ExactBlocks(band=1), "num_iterations": 3},
    "all-patterns": {"exact": ExactBlocks(rows=(1,), columns=(0, 2), band=0)},
    "everything": {"exact": ExactBlocks(rows=(2,), columns=(0,), band=0), "coarse": 2, "num_iterations": 3},
    "last-values": {"last_l_update": False},
    "last-values-coarse": {"last_l_update": False, "coarse": 2, "exact": ExactBlocks(rows=(0,))},
    "bias": {"bias": (1, 1), "num_iterations": 3},
    "bias-by-head": {"bias": (1, 2), "exact": ExactBlocks(rows=(0,))},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("grid", [(3, 3, 4), (5, 2, 3)], ids=["3x3x4", "5x2x3"])
def test_every_option_matches_the_oracle(name, grid):
    options = {"exact": None, **OPTIONS[name]}
    q, k, v = qkv(math.prod(grid), batch=1, heads=2, spread=2.0)
    if "bias" in options:
        batch, heads = options["bias"]
        options["bias"] = qkv(math.prod(grid), batch=batch, heads=heads, dim=3, seed=1)[:2]
    results = vmonarch_attention(q, k, v, grid=grid, return_lse=True, **options)
    for found, expected in zip(results, vmonarch_oracle(q, k, v, grid, **options), strict=True):
        assert_equal(found, expected)


@pytest.mark.parametrize(("rows", "blocks"), [(5, 3), (7, 2), (6, 3), (4, 4), (3, 1)])
def test_blocks_of_rows_that_do_not_divide_match_the_oracle(rows, blocks):
    q, k, v = qkv(rows * 2, batch=1, heads=1)
    layout = tile_layout(Tiling(rows, 1, 2, *[blocks, 1, 1] * 2, rows), torch.device("cpu"))
    options = VMonarchOptions(exact=None, min_mass=0.0)
    out, lse = monarch_attention_reference(q, k, v, layout, options, scale=8**-0.5)
    starts = [p * rows // blocks for p in range(blocks)]
    block = torch.tensor([max(p for p in range(blocks) if starts[p] <= row) for row in range(rows)])
    row = torch.arange(rows) - torch.tensor(starts)[block]
    position = row.repeat_interleave(2) * 2 + torch.arange(2).repeat(rows)
    M, expected = monarch_map(q[0, :, 0] * 8**-0.5, k[0, :, 0], block.repeat_interleave(2), position, 2, 0.0)
    assert_equal(out[0, :, 0], M @ v[0, :, 0])
    assert_equal(lse[0, 0], expected)


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
    if masked:
        key_mask[1] = False
    size = min(block_size, tokens)
    place = torch.arange(tokens) + (-tokens % size if padding == "pre" else 0)
    out, lse = monarch_attention(q, k, v, block_size=block_size, padding=padding, key_mask=key_mask, return_lse=True)
    for i in range(2):
        attended = None if key_mask is None else key_mask[i]
        Q, K, V = (x[i, :, 0] for x in (q * q.shape[-1] ** -0.5, k, v))
        M, expected_lse = monarch_map(Q, K, place // size, place % size, 2, 0.0, attended=attended)
        assert_equal(out[i, :, 0], M @ V)
        assert_equal(lse[i, 0], expected_lse)


@pytest.mark.parametrize("rows", [(0,), (1, 3)], ids=str)
@pytest.mark.parametrize("aware", [False, True], ids=["", "aware"])
def test_exact_rows_with_a_share_of_the_tiles_are_attention_in_two_resolutions(rows, aware):
    grid, P = (4, 4, 7), 28
    q, k, v = qkv(4 * P, heads=2, dim=6)
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


@pytest.mark.parametrize("options", [{}, {"exact": ExactBlocks(band=1)}, {"coarse": 2}], ids=str)
def test_no_tensor_grows_beyond_the_budget_or_the_inputs(monkeypatch, options):
    budget = 5_000
    monkeypatch.setattr(flash_entropy_reference, "MAX_CHUNK_SCORES", budget)
    q, k, v = qkv(8 * 64, batch=1, heads=2, dim=4, dtype=torch.float32)
    with LargestTensor() as largest, torch.no_grad():
        vmonarch_attention(q, k, v, grid=(8, 8, 8), **options)
    assert largest.numel <= max(budget, q.numel() * 2)  # the N×N map would hold 524,288


def test_chunks_change_neither_result_nor_gradients(monkeypatch):
    options = {"grid": (5, 3, 5), "exact": ExactBlocks(band=0, columns=(0,)), "coarse": 2, "return_lse": True}
    run = lambda: with_gradients(lambda *x: vmonarch_attention(*x, **options), qkv(5 * 15, batch=1, heads=2))
    whole = run()
    monkeypatch.setattr(flash_entropy_reference, "MAX_CHUNK_SCORES", 1)
    torch.testing.assert_close(run(), whole, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("exact", [None, ExactBlocks(rows=(0,), band=0)], ids=["plain", "exact-blocks"])
@pytest.mark.parametrize("coarse", [1, 2])
def test_gradients_are_those_of_the_map_with_its_entropies_detached(exact, coarse, monkeypatch):
    """Those of the oracle in plain autograd. The entropy's own would dominate them (VMonarch, App. B)."""
    q, k, v = (x.requires_grad_() for x in qkv(24, batch=1, heads=1, dim=3))
    weight, weight_lse = torch.randn(1, 24, 1, 3).double(), torch.randn(1, 1, 24).double()

    def gradients(out, lse):
        return torch.autograd.grad((out * weight).sum() + (lse * weight_lse).sum(), (q, k, v))

    options = {"exact": exact, "coarse": coarse}
    ours = gradients(*vmonarch_attention(q, k, v, grid=(3, 2, 4), return_lse=True, **options))
    flowing = gradients(*vmonarch_oracle(q, k, v, (3, 2, 4), **options))
    plain = torch.xlogy
    monkeypatch.setattr(torch, "xlogy", lambda *x: plain(*x).detach())
    for a, b, c in zip(ours, gradients(*vmonarch_oracle(q, k, v, (3, 2, 4), **options)), flowing, strict=True):
        assert_equal(a, b)
        assert c is flowing[2] or (a - c).abs().max() > 1e-3


# --- A low-rank bias gives what it gives written out as a matrix. ---

GRID, S = (3, 1, 5), 15


@in_interpreter
@quiet
@pytest.mark.parametrize("options", [{}, {"exact": ExactBlocks(band=1), "coarse": 2}], ids=["paper", "band-coarse"])
def test_with_a_bias_the_kernels_agree_with_plain_torch(options):
    tensors = *qkv(S, batch=1, heads=2, dtype=torch.float32), *qkv(S, batch=1, heads=1, dim=4, dtype=torch.float32)[:2]
    inputs = [x.requires_grad_() for x in tensors]
    results = []
    for implementation in ("triton", "torch"):
        out = vmonarch_attention(*inputs[:3], grid=GRID, bias=inputs[3:], implementation=implementation, **options)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert all(x.abs().max() > 0 for x in results[0])


Q, F = torch.randn(1, S, 2, 4), torch.randn(1, S, 1, 2)
bad = call_of(vmonarch_attention, Q, Q, Q, grid=GRID)
BAD = {
    "one-factor": (bad(bias=(F,)), TypeError, "bias must be None or a pair"),
    "other-length": (bad(bias=(F, F[:, :3])), ValueError, "key_factor must be"),
    "no-scale": (bad(bias=(F, F), scale=0.0), ValueError, "scale must not be 0"),
    "too-wide": (
        bad(*[torch.randn(1, S, 1, 250)] * 3, bias=(F[..., :1].repeat(1, 1, 1, 8),) * 2, implementation="triton"),
        NotImplementedError, "a head dimension is 258 .supported: up to 256"),
}  # fmt: skip
test_a_bad_bias_is_named = in_interpreter(refuses(BAD))
