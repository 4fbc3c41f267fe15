"""Attention in windows against a mask over all pairs of tokens, in float64: plain torch, and the kernels (Triton).

Here the kernels run through Triton's interpreter on bricks of 16 tokens.
"""

import pytest
import torch
from op_checks import (
    assert_precise,
    call_of,
    in_interpreter,
    qkv,
    quiet,
    refuses,
    with_gradients,
)

from vmonarch import LatentGrid, window_attention
from vmonarch.kernels.window import reference

pytestmark = quiet


def masked(q, k, v, mask, scale=None):
    logits = torch.einsum("bshd,bthd->bhst", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = logits.masked_fill(~mask, -torch.inf)
    return torch.einsum("bhst,bthe->bshe", logits.softmax(-1), v), logits.logsumexp(-1)


def sequence_mask(Sq, Sk, window, causal):
    i, j = torch.arange(Sk - Sq, Sk)[:, None], torch.arange(Sk)
    if causal:
        return (j <= i) & (j > i - window)
    return (j >= i - (window - 1) // 2) & (j <= i + window // 2)


def grid_mask(grid, window, causal):
    axes = torch.meshgrid(*(torch.arange(size) for size in grid), indexing="ij")
    mask = torch.ones(grid.tokens, grid.tokens, dtype=torch.bool)
    for axis, (place, size) in enumerate(zip(axes, window, strict=True)):
        place = place.flatten()
        ahead = place - place[:, None]
        if causal and axis == 0:
            mask &= (ahead <= 0) & (ahead > -size)
        else:
            mask &= (ahead >= -((size - 1) // 2)) & (ahead <= size // 2)
    return mask


def check(inputs, mask, **options):
    ours = with_gradients(lambda *x: window_attention(*x, return_lse=True, **options), inputs)
    torch.testing.assert_close(ours, with_gradients(lambda *x: masked(*x, mask), inputs))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 2, 5, 8, 100])
@pytest.mark.parametrize(("Sq", "Sk"), [(1, 1), (1, 20), (7, 20), (23, 23)], ids=str)
def test_a_sequence_is_seen_through_a_window(Sq, Sk, window, causal, monkeypatch):
    monkeypatch.setattr(reference, "MAX_CHUNK_ELEMENTS", 1000)
    check(qkv(Sq, Sk), sequence_mask(Sq, Sk, window, causal), window=window, causal=causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [(1, 1, 1), (3, 3, 3), (2, 4, 1), (1, 2, 5), (9, 9, 9)], ids=str)
@pytest.mark.parametrize("grid", [(1, 1, 1), (3, 4, 5), (5, 1, 3), (1, 3, 2), (1, 1, 6)], ids=str)
def test_a_video_is_seen_through_a_neighbourhood(grid, window, causal):
    grid = LatentGrid(*grid)
    check(qkv(grid.tokens, grid.tokens), grid_mask(grid, window, causal), window=window, causal=causal, grid=grid)


def check_kernels(inputs, **options):
    attend = lambda how: lambda *x: window_attention(*x, return_lse=True, implementation=how, **options)
    exact = with_gradients(attend("torch"), [x.double() for x in inputs])
    ours, plain = (with_gradients(attend(how), inputs) for how in ("triton", "torch"))
    assert_precise(("out", "lse", "dq", "dk", "dv"), ours, plain, exact, inputs[0].dtype)


@in_interpreter
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 5, 40])
@pytest.mark.parametrize(("Sq", "Sk"), [(1, 50), (7, 40), (48, 48)], ids=str)
def test_the_kernels_see_a_sequence_through_a_window(Sq, Sk, window, causal):
    check_kernels(qkv(Sq, Sk, dtype=torch.float32), window=window, causal=causal)


@in_interpreter
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("grid", "window"), [((3, 5, 7), (3, 3, 3)), ((5, 3, 6), (2, 4, 1)), ((2, 9, 3), (9, 9, 9))], ids=str
)
def test_the_kernels_see_a_video_through_a_neighbourhood(grid, window, causal):
    tokens = LatentGrid(*grid).tokens
    check_kernels(qkv(tokens, tokens, B=1, dtype=torch.float32), window=window, causal=causal, grid=grid)


@in_interpreter
def test_the_kernels_take_float16_and_any_head_dimension():
    check_kernels(qkv(40, 40, dims=72, E=80, dtype=torch.float16), window=9)
    check_kernels(qkv(20, 20, dims=130, E=256, B=1, H=1, dtype=torch.float32), window=(1, 3, 3), grid=(1, 4, 5))
    check_kernels(qkv(20, 20, dtype=torch.float32), window=7, scale=-0.7)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        dict(window=64, causal=True),
        dict(window=128),
        dict(window=(3, 5, 5), grid=(6, 13, 13)),
        dict(window=(2, 13, 13), grid=(6, 13, 13), causal=True),
    ],
    ids=str,
)
@pytest.mark.parametrize(("D", "E"), [(64, 64), (128, 128), (72, 80), (256, 256)], ids=str)
def test_gpu_results_and_gradients_match_float64(D, E, options, dtype):
    check_kernels([x.cuda() for x in qkv(1014, 1014, dims=D, E=E, dtype=dtype)], **options)


Q = torch.randn(1, 12, 2, 4)
VIDEO = {"grid": (3, 2, 2)}
bad = call_of(window_attention, Q, Q, Q)
BAD = {
    "window-zero": (bad(window=0), ValueError, "window must be at least 1"),
    "window-of-a-sequence": (bad(window=3, **VIDEO), TypeError, "window must be three integers"),
    "window-of-two": (bad(window=(3, 3), **VIDEO), ValueError, "window must have three entries"),
    "grid": (bad(window=(1, 1, 1), grid=(3, 2, 3)), ValueError, "has 18 tokens, but key"),
    "few-keys": (bad(Q, Q[:, :5], Q[:, :5], window=3), ValueError, "key must have at least"),
    "triton-last-frames": (
        bad(Q[:, :4], Q, Q, window=(1, 1, 1), implementation="triton", **VIDEO),
        NotImplementedError, "queries are the last tokens of a video"),
}  # fmt: skip
test_bad_input_is_named = in_interpreter(refuses(BAD))
