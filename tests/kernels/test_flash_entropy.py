"""Flash-Entropy-Attention against softmax attention and the definition of entropy, in float64."""

import pytest
import torch

from vmonarch import flash_entropy_attention
from vmonarch.kernels.flash_entropy import reference

SHAPES = [(1, 1, 1), (2, 7, 63), (3, 111, 5), (1, 64, 64)]
by_shape = pytest.mark.parametrize(("heads", "queries", "keys"), SHAPES, ids=lambda n: str(n))


def qkv(heads, queries, keys, *, dim=8, value_dim=5, dtype=torch.float64, spread=1.0):
    generator = torch.Generator().manual_seed(0)
    shapes = ((queries, dim), (keys, dim), (keys, value_dim))
    return tuple(
        (torch.randn(2, n, heads, d, generator=generator, dtype=torch.float64) * spread).to(dtype) for n, d in shapes
    )


def literal(q, k, v, scale):
    scores = torch.einsum("bshd,bthd->bhst", q, k) * scale
    P = scores.softmax(-1)
    return torch.einsum("bhst,bthd->bshd", P, v), scores.logsumexp(-1), -torch.xlogy(P, P).sum(-1)


@by_shape
@pytest.mark.parametrize("spread", [1e-3, 1.0, 5.0])
def test_output_log_partition_and_entropy_follow_their_definitions(heads, queries, keys, spread):
    q, k, v = qkv(heads, queries, keys, spread=spread)
    for actual, expected in zip(flash_entropy_attention(q, k, v), literal(q, k, v, 8**-0.5), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def test_the_entropy_is_between_zero_and_that_of_the_uniform_distribution():
    q, k, v = qkv(2, 9, 31)
    entropy = flash_entropy_attention(q, k, v)[2]
    assert (entropy > 0).all() and (entropy < torch.tensor(31.0).log()).all()
    uniform = flash_entropy_attention(torch.zeros_like(q), k, v)[2]
    torch.testing.assert_close(uniform, torch.full_like(uniform, 31.0).log())


@pytest.mark.parametrize("entropy_grad", [False, True], ids=["stopped", "flowing"])
def test_gradients_match_autograd_of_the_definition(entropy_grad):
    q, k, v = (x.requires_grad_() for x in qkv(2, 7, 11))

    def loss(out, lse, entropy):
        return out.sin().sum() + lse.cos().sum() + (entropy if entropy_grad else entropy.detach()).square().sum()

    expected = torch.autograd.grad(loss(*literal(q, k, v, 0.3)), (q, k, v))
    results = flash_entropy_attention(q, k, v, scale=0.3, entropy_grad=entropy_grad)
    assert results[2].requires_grad == entropy_grad
    for actual, wanted in zip(torch.autograd.grad(loss(*results), (q, k, v)), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("budget", [1, 30, 500])
def test_chunks_change_neither_results_nor_gradients(monkeypatch, budget):
    q, k, v = (x.requires_grad_() for x in qkv(3, 13, 17))

    def run():
        results = flash_entropy_attention(q, k, v, entropy_grad=True)
        return *results, *torch.autograd.grad(sum(x.sin().sum() for x in results), (q, k, v))

    whole = run()
    monkeypatch.setattr(reference, "MAX_CHUNK_SCORES", budget)
    for chunked, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(chunked, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_large_logits_stay_finite(dtype):
    q, k, v = qkv(2, 17, 33, dtype=dtype, spread=60.0)
    assert (torch.einsum("bshd,bthd->bhst", q.double(), k.double()) * 8**-0.5).abs().max() > 5e3
    out, lse, entropy = flash_entropy_attention(q, k, v)
    assert out.dtype == dtype and lse.dtype == entropy.dtype == torch.float32
    assert out.isfinite().all() and lse.isfinite().all()
    assert entropy.isfinite().all() and (entropy >= 0).all()
