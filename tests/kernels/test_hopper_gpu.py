"""The kernels for Hopper against the portable ones and float32, at sizes around the edges of their tiles."""

import pytest
import torch

from vmonarch import ExactBlocks, vmonarch_attention
from vmonarch.kernels.common.launch import hopper_fits, launch_overrides
from vmonarch.kernels.flash_entropy.api import flash_entropy_attention

PORTABLE = {"hopper": {"enabled": 0}}
# Positions per frame: fewer than a warpgroup's rows, whole tiles, one more and one less, odd ones, those of videos.
FRAMES = [(1, 1), (3, 5), (7, 9), (8, 8), (5, 13), (1, 127), (8, 16), (3, 43), (11, 17), (1, 193), (16, 16), (28, 52)]


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    torch.manual_seed(0)


def relative_error(x, expected):
    """Relative to the expected values, but to no less than 1e-3 each: an entropy may be 0 everywhere."""
    return ((x.float() - expected.float()).norm() / (expected.float().norm() + 1e-3 * expected.numel() ** 0.5)).item()


def check(attend, query, key, value):
    """`attend(q, k, v)` with the kernels for Hopper must be as near to float32 as with the portable ones."""
    assert hopper_fits("monarch", query, key, value)
    expected = attend(query.float(), key.float(), value.float(), implementation="torch")
    with launch_overrides(PORTABLE):
        assert not hopper_fits("monarch", query, key, value)
        portable = attend(query, key, value, implementation="triton")
    found = attend(query, key, value, implementation="triton")
    again = attend(query, key, value, implementation="triton")
    for a, b, c, d in zip(found, again, portable, expected, strict=True):
        assert torch.equal(a, b)
        assert relative_error(a, d) <= 1.1 * relative_error(c, d) + 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [8, 64, 72, 96, 128])
@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: "x".join(map(str, frame)))
def test_sizes_of_frames(frame, dim):
    grid = (5, *frame)
    tokens = 5 * frame[0] * frame[1]
    inputs = torch.randn(2, tokens, 3, 3, dim, device="cuda", dtype=torch.bfloat16).unbind(2)
    check(lambda q, k, v, **how: vmonarch_attention(q, k, v, grid=grid, return_lse=True, **how), *inputs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        dict(coarse=2),
        dict(coarse=3, num_iterations=3),
        dict(num_iterations=1),
        dict(exact=ExactBlocks(band=1, rows=(0,))),
        dict(exact=ExactBlocks(columns=(0, 3), aware=False)),
    ],
    ids=str,
)
@pytest.mark.parametrize("frame", [(4, 6), (15, 17), (16, 24), (28, 52)], ids=lambda frame: "x".join(map(str, frame)))
def test_options(frame, options):
    grid = (5, *frame)
    tokens = 5 * frame[0] * frame[1]
    inputs = torch.randn(2, tokens, 3, 3, 128, device="cuda", dtype=torch.float16).unbind(2)
    check(lambda q, k, v, **how: vmonarch_attention(q, k, v, grid=grid, return_lse=True, **options, **how), *inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("queries,keys", [(1, 1), (63, 64), (64, 129), (65, 200), (130, 31), (200, 4000), (1500, 5000)])
def test_flash_entropy_of_any_length(queries, keys, dim):
    query = torch.randn(2, queries, 3, dim, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, keys, 2, 3, dim, device="cuda", dtype=torch.bfloat16).unbind(2)
    check(lambda q, k, v, **how: flash_entropy_attention(q, k, v, **how), query, key, value)


@pytest.mark.gpu
def test_many_more_tiles_than_processors():
    """Thousands of small blocks: every program goes round its buffers many times."""
    inputs = torch.randn(4, 40 * 70, 3, 40, 64, device="cuda", dtype=torch.bfloat16).unbind(2)
    check(lambda q, k, v, **how: vmonarch_attention(q, k, v, grid=(40, 7, 10), return_lse=True, **how), *inputs)


WHOLE_ROWS = [
    None,
    ExactBlocks(rows=(0,)),
    ExactBlocks(rows=(0,), aware=False),
    ExactBlocks(rows=(0, 7, 16)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("exact", WHOLE_ROWS, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("frames", [17, 32, 33, 43, 64, 65, 128])
def test_numbers_of_frames(frames, dim, exact):
    """Two positions to a tile, one, or half of one; an odd number of positions."""
    dtype = torch.float16 if frames % 2 else torch.bfloat16
    inputs = torch.randn(2, frames * 35, 3, 3, dim, device="cuda", dtype=dtype).unbind(2)
    options = dict(grid=(frames, 5, 7), exact=exact, return_lse=True)
    check(lambda q, k, v, **how: vmonarch_attention(q, k, v, **options, **how), *inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("exact", WHOLE_ROWS, ids=str)
@pytest.mark.parametrize("frames", [17, 43, 81])
def test_gradients_with_many_frames(frames, exact):
    """They need what the L-steps save: cR and log-partitions."""
    query, key, value, grad = torch.randn(4, 2, frames * 35, 3, 128, device="cuda", dtype=torch.bfloat16)

    def gradients(*tensors, **how):
        tensors = [x.detach().requires_grad_() for x in tensors]
        out = vmonarch_attention(*tensors, grid=(frames, 5, 7), exact=exact, num_iterations=3, **how)
        return torch.autograd.grad(out, tensors, grad.to(out.dtype))

    check(gradients, query, key, value)


@pytest.mark.gpu
def test_auto_means_the_kernels_where_they_can_run():
    query, key, value = torch.randn(3, 1, 5 * 63, 2, 64, device="cuda", dtype=torch.bfloat16)
    attend = lambda *tensors, **how: vmonarch_attention(*tensors, grid=(5, 7, 9), **how)
    assert torch.equal(attend(query, key, value), attend(query, key, value, implementation="triton"))
    double = [x.double() for x in (query, key, value)]
    assert torch.equal(attend(*double), attend(*double, implementation="torch"))
