"""Attention in windows against a mask over all pairs of tokens, in float64."""

import pytest
import torch

from vmonarch import LatentGrid, merge_partials, window_attention
from vmonarch.kernels.window import reference


def qkv(Sq, Sk, D=6, E=5, *, B=2, H=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * Sq + Sk)
    shapes = ((B, Sq, H, D), (B, Sk, H, D), (B, Sk, H, E))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


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
    inputs = [x.requires_grad_() for x in inputs]
    results = []
    for out, lse in (window_attention(*inputs, return_lse=True, **options), masked(*inputs, mask)):
        results.append([out, lse, *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), inputs)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


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


def test_a_step_of_decoding_needs_only_the_keys_of_its_window():
    q, k, v = qkv(20, 20)
    whole = window_attention(q, k, v, window=6, causal=True)
    for i in range(20):
        start = max(0, i - 5)
        step = window_attention(q[:, i : i + 1], k[:, start : i + 1], v[:, start : i + 1], window=6, causal=True)
        torch.testing.assert_close(step, whole[:, i : i + 1])


def test_parts_merge_by_their_log_partitions():
    q, k, v = qkv(12, 12)
    near = window_attention(q, k, v, window=4, causal=True, return_lse=True)
    mask = sequence_mask(12, 12, 12, True) & ~sequence_mask(12, 12, 4, True)
    logits = torch.einsum("bshd,bthd->bhst", q, k) * 6**-0.5
    logits = logits.masked_fill(~mask, -torch.inf)
    P = torch.nan_to_num(logits.softmax(-1))
    far = torch.einsum("bhst,bthe->bshe", P, v), logits.logsumexp(-1)
    out, lse = merge_partials(near, far)
    expected = window_attention(q, k, v, window=12, causal=True, return_lse=True)
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_lower_precisions_stay_close(dtype):
    inputs = qkv(30, 30, dtype=dtype)
    out, lse = window_attention(*inputs, window=7, return_lse=True)
    expected, _ = masked(*(x.double() for x in inputs), sequence_mask(30, 30, 7, False))
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


Q = torch.randn(1, 12, 2, 4)
BAD = {
    "no-window": (lambda: window_attention(Q, Q, Q), TypeError, "window"),
    "window-zero": (lambda: window_attention(Q, Q, Q, window=0), ValueError, "window must be at least 1"),
    "window-of-a-grid": (lambda: window_attention(Q, Q, Q, window=(1, 2, 3)), TypeError, "window must be a positive"),
    "window-of-a-sequence": (
        lambda: window_attention(Q, Q, Q, window=3, grid=(3, 2, 2)), TypeError, "window must be three integers"),
    "window-of-two": (
        lambda: window_attention(Q, Q, Q, window=(3, 3), grid=(3, 2, 2)), ValueError, "window must have three entries"),
    "window-with-zero": (
        lambda: window_attention(Q, Q, Q, window=(3, 0, 3), grid=(3, 2, 2)), ValueError, r"window\[1\] must be"),
    "grid": (lambda: window_attention(Q, Q, Q, window=(1, 1, 1), grid=(3, 2, 3)), ValueError, "has 18 tokens, but key"),
    "few-keys": (lambda: window_attention(Q, Q[:, :5], Q[:, :5], window=3), ValueError, "key must have at least"),
    "causal": (lambda: window_attention(Q, Q, Q, window=3, causal="yes"), TypeError, "causal must be True or False"),
    "triton": (
        lambda: window_attention(Q, Q, Q, window=3, implementation="triton"), NotImplementedError, "there is no"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()
