"""VMonarch with a low-rank bias gives what it gives with the bias written out as a matrix."""

import itertools

import pytest
import torch

from vmonarch import ExactBlocks, LatentGrid, vmonarch_attention
from vmonarch.bias import SpatioTemporalDecay
from vmonarch.kernels.common.launch import interpreted

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1 when triton is imported")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
S, P = 15, 5
GRID = (3, 1, 5)


def tensors(*, B=1, H=2, D=6, R=4, shared=True, dtype=torch.float64, factors=None):
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
def test_it_is_what_the_written_out_bias_gives(exact, num_iterations, shared):
    q, k, v, fq, fk = tensors(B=2, shared=shared)
    out = vmonarch_attention(q, k, v, grid=GRID, exact=exact, num_iterations=num_iterations, bias=(fq, fk))
    logits = torch.einsum("bshd,bthd->bhst", q, k) * 6**-0.5
    logits = logits + torch.einsum("bshr,bthr->bhst", fq.expand(2, -1, 2, -1), fk.expand(2, -1, 2, -1))
    rows = () if exact is None else (0,)
    maps = torch.stack([torch.stack([map_of_logits(G, num_iterations, 0.1, rows) for G in heads]) for heads in logits])
    torch.testing.assert_close(out, torch.einsum("bhst,bthd->bshd", maps, v), rtol=1e-10, atol=1e-12)
    plain = vmonarch_attention(q, k, v, grid=GRID, exact=exact, num_iterations=num_iterations)
    assert (out - plain).abs().max() > 0.1


def test_everything_exact_it_is_attention_with_the_bias():
    q, k, v, fq, fk = tensors()
    out, lse = vmonarch_attention(
        q, k, v, grid=GRID, exact=ExactBlocks(band=2), bias=(fq, fk), scale=-0.3, return_lse=True
    )
    logits = torch.einsum("bshd,bthd->bhst", q, k) * -0.3 + torch.einsum("bshr,bthr->bst", fq, fk)[:, None]
    torch.testing.assert_close(out, torch.einsum("bhst,bthd->bshd", logits.softmax(-1), v))
    torch.testing.assert_close(lse, logits.logsumexp(-1))


@in_interpreter
@pytest.mark.parametrize("options", [{}, {"exact": ExactBlocks(band=1), "coarse": 2}], ids=["paper", "band-coarse"])
def test_the_kernels_agree_with_plain_torch(options):
    inputs = [x.requires_grad_() for x in tensors(dtype=torch.float32)]
    results = []
    for implementation in ("triton", "torch"):
        out = vmonarch_attention(*inputs[:3], grid=GRID, bias=inputs[3:], implementation=implementation, **options)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert ours.abs().max() > 0


def test_float32_factors_stay_exact_in_16_bit():
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
BAD = {
    "no-pair": (lambda: vmonarch_attention(Q, Q, Q, grid=GRID, bias=F), TypeError, "bias must be None or a pair"),
    "one-factor": (lambda: vmonarch_attention(Q, Q, Q, grid=GRID, bias=(F,)), TypeError, "bias must be None or a pair"),
    "other-length": (
        lambda: vmonarch_attention(Q, Q, Q, grid=GRID, bias=(F, F[:, :3])), ValueError, "key_factor must be"),
    "no-scale": (
        lambda: vmonarch_attention(Q, Q, Q, grid=GRID, bias=(F, F), scale=0.0), ValueError, "scale must not be 0"),
    "too-wide": (
        lambda: vmonarch_attention(
            *[torch.randn(1, S, 1, 250)] * 3, grid=GRID, bias=(F[..., :1].repeat(1, 1, 1, 8),) * 2,
            implementation="triton"),
        NotImplementedError, "a head dimension is 258 .supported: up to 256"),
}  # fmt: skip


@in_interpreter
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()
