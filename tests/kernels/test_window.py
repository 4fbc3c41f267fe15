"""Attention in windows against a mask over all pairs of tokens, in float64: plain torch, and the kernels (Triton).

Here the kernels run through Triton's interpreter on bricks of 16 tokens.
"""

import math

import pytest
import torch
from op_checks import (
    call_of,
    check_kernels,
    in_interpreter,
    qkv,
    quiet,
    refuses,
    softmax_attention,
    with_gradients,
)

from vmonarch import window_attention
from vmonarch.kernels.window import reference

pytestmark = quiet


def mask_of(Sq, grid, window, causal):
    """[Sq, Sk]: whether the last Sq tokens of a video attend to each of it; a sequence is a row of one frame."""
    places = torch.cartesian_prod(*map(torch.arange, grid)).view(-1, 3)
    mask = torch.ones(Sq, len(places), dtype=torch.bool)
    # A causal sequence looks back along its only axis, a causal video along time.
    backward = 2 if grid[:2] == (1, 1) else 0
    for axis, size in enumerate(window):
        ahead = places[:, axis] - places[-Sq:, axis, None]
        low, high = (1 - size, 0) if causal and axis == backward else (-((size - 1) // 2), size // 2)
        mask &= (ahead >= low) & (ahead <= high)
    return mask


def attend(implementation="auto", **options):
    return lambda *x: window_attention(*x, return_lse=True, implementation=implementation, **options)


SEQUENCES = [
    (Sq, (1, 1, Sk), window) for Sq, Sk in ((1, 1), (1, 20), (7, 20), (23, 23)) for window in (1, 2, 5, 8, 100)
]
SEEN = [
    (math.prod(grid), grid, window)
    for grid in ((3, 4, 5), (5, 1, 3), (1, 3, 2), (2, 1, 6))
    for window in ((1, 1, 1), (3, 3, 3), (2, 4, 1), (1, 2, 5), (9, 9, 9))
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("Sq", "grid", "window"), SEQUENCES + SEEN, ids=str)
def test_a_sequence_and_a_video_are_seen_through_a_window(Sq, grid, window, causal, monkeypatch):
    monkeypatch.setattr(reference, "MAX_CHUNK_ELEMENTS", 1000)
    of_video = isinstance(window, tuple)
    mask = mask_of(Sq, grid, window if of_video else (1, 1, window), causal)
    found = attend(window=window, causal=causal, **({"grid": grid} if of_video else {}))
    inputs = qkv(Sq, math.prod(grid))
    expected = with_gradients(lambda *x: softmax_attention(*x, attended=mask), inputs)
    torch.testing.assert_close(with_gradients(found, inputs), expected)


VIDEOS = [((3, 5, 7), (3, 3, 3)), ((5, 3, 6), (2, 4, 1)), ((2, 9, 3), (9, 9, 9))]
KERNEL_CASES = {
    **{
        f"{Sq}-{Sk}-{window}{'-causal' * causal}": (
            qkv(Sq, Sk, dtype=torch.float32), dict(window=window, causal=causal))
        for Sq, Sk in ((1, 50), (7, 40), (48, 48)) for window in (1, 5, 40) for causal in (True, False)
    },
    **{
        f"video-{n}{'-causal' * causal}": (
            qkv(math.prod(grid), math.prod(grid), B=1, dtype=torch.float32),
            dict(grid=grid, window=window, causal=causal))
        for n, (grid, window) in enumerate(VIDEOS) for causal in (True, False)
    },
    "float16": (qkv(40, 40, dims=72, E=80, dtype=torch.float16), dict(window=9)),
    "wide": (qkv(20, 20, dims=130, E=256, B=1, H=1, dtype=torch.float32), dict(window=(1, 3, 3), grid=(1, 4, 5))),
    "negative-scale": (qkv(20, 20, dtype=torch.float32), dict(window=7, scale=-0.7)),
}  # fmt: skip


@in_interpreter
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_the_kernels_compute_the_same(name):
    inputs, options = KERNEL_CASES[name]
    check_kernels(lambda how: attend(how, **options), inputs)


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
    inputs = [x.cuda() for x in qkv(1014, 1014, dims=D, E=E, dtype=dtype)]
    check_kernels(lambda how: attend(how, **options), inputs)


Q = torch.randn(1, 12, 2, 4)
VIDEO = {"grid": (3, 2, 2)}
bad = call_of(window_attention, Q, Q, Q)
BAD = {
    "window-of-a-sequence": (bad(window=3, **VIDEO), TypeError, "window must be three integers"),
    "grid": (bad(window=(1, 1, 1), grid=(3, 2, 3)), ValueError, "has 18 tokens, but key"),
    "few-keys": (bad(Q, Q[:, :5], Q[:, :5], window=3), ValueError, "key must have at least"),
    "triton-last-frames": (
        bad(Q[:, :4], Q, Q, window=(1, 1, 1), implementation="triton", **VIDEO),
        NotImplementedError, "queries are the last tokens of a video"),
}  # fmt: skip
test_bad_input_is_named = in_interpreter(refuses(BAD))
