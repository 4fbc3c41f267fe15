"""The latent grid: from the hook, from `grid=`, or read off the rotary embedding."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from diffusers.models.transformers.transformer_chronoedit import ChronoEditRotaryPosEmbed
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

import vmonarch
from vmonarch import VMonarchProcessor
from vmonarch.forward_context import infer_grid


def cosines(grid, head_dim=24, dtype=torch.float32, rope_class=WanRotaryPosEmbed, longest=1024):
    rope = rope_class(head_dim, (1, 2, 2), longest).to(dtype)
    frames, height, width = grid
    return rope(torch.empty(1, 1, frames, 2 * height, 2 * width, device="cpu"))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 12, 24, 64, 128])
def test_every_small_grid_is_read_off(dtype, head_dim):
    for grid in itertools.product((1, 2, 3, 7), repeat=3):
        assert infer_grid(cosines(grid, head_dim, dtype)) == grid


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "grid", [(16, 30, 52), (16, 52, 30), (1000, 1, 2), (2, 1, 1000), (2, 1000, 1), (81, 3, 5), (1, 1, 1)], ids=str
)
def test_large_and_degenerate_grids_are_read_off(grid, dtype):
    assert infer_grid(cosines(grid, 24, dtype)) == grid


def test_temporal_skip_of_chronoedit_is_read_off():
    assert infer_grid(cosines((2, 3, 5), rope_class=ChronoEditRotaryPosEmbed)) == (2, 3, 5)


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: c[:, :-1],
        lambda c: c[:, 6:],
        lambda c: c.flip(1),
        lambda c: c[:, torch.randperm(c.shape[1], generator=torch.Generator().manual_seed(0))],
        lambda c: torch.cat([c, c], dim=1),
        lambda c: c[..., :4],
        lambda c: c[0],
    ],
    ids=["cut", "not-from-the-start", "reversed", "shuffled", "twice", "too-few-channels", "rank"],
)
def test_what_is_no_whole_grid_is_refused(damage):
    with pytest.raises(ValueError, match="rotary_emb.*grid=.*vmonarch.apply"):
        infer_grid(damage(cosines((3, 2, 3))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grid", [(3, 2, 3), (1, 3, 2), (2, 1, 5), (5, 4, 1), (7, 1, 1)], ids=str)
def test_the_three_ways_agree(tiny, grid, dtype):
    model = tiny.transformer().to(dtype)
    run = lambda: tiny.run(model, grid, dtype=dtype)
    installation = vmonarch.apply(model, VMonarchProcessor())
    applied = run()
    assert installation.grid == grid
    installation.restore()
    tiny.switch(model, VMonarchProcessor())
    assert torch.equal(run(), applied)
    tiny.switch(model, VMonarchProcessor(grid=grid))
    assert torch.equal(run(), applied)


@pytest.mark.parametrize("way", ["apply", "set_processor"])
def test_grids_of_equal_size_are_told_apart(tiny, way):
    model = tiny.transformer()
    grids = [(3, 2, 4), (3, 4, 2), (2, 3, 4), (1, 4, 6), (3, 2, 4)]
    # Whole frames would make no difference between 2 × 4 and 4 × 2.
    options = {"tiles": (1, 2), "exact": None}
    expected = []
    for grid in grids:
        tiny.switch(model, VMonarchProcessor(grid=grid, **options))
        expected.append(tiny.run(model, grid))
    vmonarch.restore(model)
    tiny.switch(model, VMonarchProcessor(**options), way)
    for grid, output in zip(grids, expected, strict=True):
        assert torch.equal(tiny.run(model, grid), output), grid
    # The same latents on the wrong grid would give something else.
    vmonarch.restore(model)
    tiny.switch(model, VMonarchProcessor(grid=(3, 4, 2), **options))
    assert not torch.equal(tiny.run(model, (3, 2, 4)), expected[0])


def test_inference_happens_once_per_forward_and_keeps_no_tensor_alive(tiny, monkeypatch):
    calls = []

    def counted(cosines):
        calls.append(cosines.shape)
        return infer_grid(cosines)

    monkeypatch.setattr("vmonarch.video_processor.infer_grid", counted)
    model = tiny.transformer(num_layers=3)
    processor = VMonarchProcessor()
    tiny.switch(model, processor)
    tiny.run(model)
    tiny.run(model)
    assert len(calls) == 2
    gc.collect()
    assert processor._inferred[0]() is None
    vmonarch.apply(model, VMonarchProcessor())
    tiny.run(model)
    assert len(calls) == 2, "the hook knows the grid; nothing should be inferred"


@pytest.mark.parametrize(
    "way, message",
    [
        ("apply", r"grid=\(3, 3, 3\), but the transformer"),
        ("set_processor", "27 tokens, but self-attention was given 18"),
    ],
)
def test_grid_that_does_not_fit_is_refused(tiny, way, message):
    model = tiny.transformer()
    tiny.switch(model, VMonarchProcessor(grid=(3, 3, 3)), way)
    with pytest.raises(ValueError, match=message):
        tiny.run(model)


def test_grid_of_equal_size_is_refused_where_the_hook_knows_better(tiny):
    model = tiny.applied_transformer(grid=(3, 3, 2))
    with pytest.raises(ValueError, match=r"\(3, 3, 2\).*\(3, 2, 3\)"):
        tiny.run(model)


def test_no_rotary_embedding_and_no_grid_is_refused(tiny):
    attn = tiny.transformer().blocks[0].attn1
    attn.set_processor(VMonarchProcessor())
    with pytest.raises(RuntimeError, match=r"vmonarch.apply.*grid="):
        attn(torch.randn(1, 6, 24))
