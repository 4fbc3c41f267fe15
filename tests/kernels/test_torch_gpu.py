"""The plain torch form on a CUDA device: same numbers as on the CPU, in every dtype, compiled too."""

import functools

import pytest
import torch

from vmonarch import ExactBlocks, flash_entropy_attention, vmonarch_attention

pytestmark = pytest.mark.gpu
GRID = (5, 7, 9)
OPTIONS = {
    "default": {},
    "no-exact-block": {"exact": None},
    "band": {"exact": ExactBlocks(band=1, columns=(0,))},
    "tiles-coarse-two-frames": {"tiles": (2, 3), "coarse": 2, "frames_per_block": 2},
}


def qkv(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, 315, 3, 32, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))


def relative_error(actual, expected):
    return ((actual.cpu().double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "budget"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)],
    ids=["float64", "float32", "bfloat16", "float16"],
)
def test_the_device_gives_the_numbers_of_the_cpu(name, dtype, budget):
    q, k, v = (x.requires_grad_() for x in qkv(dtype))
    expected_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = vmonarch_attention(*expected_inputs, grid=GRID, implementation="torch", **OPTIONS[name])
    expected_grads = torch.autograd.grad(expected.sin().sum(), expected_inputs)
    on_device = [x.detach().cuda().requires_grad_() for x in (q, k, v)]
    out = vmonarch_attention(*on_device, grid=GRID, implementation="torch", **OPTIONS[name])
    grads = torch.autograd.grad(out.sin().sum(), on_device)
    assert out.is_cuda and out.dtype == dtype
    assert relative_error(out, expected.detach()) < budget
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert relative_error(ours, theirs) < 4 * budget


def test_flash_entropy_attention_on_the_device():
    q, k, v = qkv()
    expected = flash_entropy_attention(q, k, v)
    for actual, wanted in zip(
        flash_entropy_attention(q.cuda(), k.cuda(), v.cuda(), implementation="torch"), expected, strict=True
    ):
        torch.testing.assert_close(actual.cpu(), wanted, rtol=1e-11, atol=1e-11)


def test_compiled_by_inductor_it_gives_the_same_numbers():
    q, k, v = (x.cuda() for x in qkv(torch.float32))
    attention = functools.partial(vmonarch_attention, grid=GRID, implementation="torch")
    compiled = torch.compile(lambda q, k, v: attention(q, k, v), fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v), rtol=1e-4, atol=1e-5)


def test_sixty_thousand_tokens_fit_in_a_few_gigabytes():
    """43 × 1456 tokens, 12 heads, d = 128 in bfloat16: float32 copies of q, k, v and their like, never N×N."""
    q, k, v = (torch.randn(1, 43 * 1456, 12, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        out = vmonarch_attention(q, k, v, grid=(43, 28, 52), implementation="torch")
    peak = torch.cuda.max_memory_allocated() - before
    assert out.isfinite().all()
    assert peak < 6e9, f"peak of {peak / 1e9:.2f} GB"
