"""The procedural clips and their captions: what a seed gives is pinned."""

import hashlib

import pytest
import torch

from vmonarch.finetune import scenes


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def test_what_a_seed_gives_is_pinned():
    """All shapes, colours, directions, patterns and pans are in it."""
    batch = scenes.sample_scenes(96, 3)
    drawn = [getattr(batch, name).flatten() for name in {**scenes.OBJECT_TABLES, **scenes.SCENE_TABLES}]
    for indices, table in zip(drawn, {**scenes.OBJECT_TABLES, **scenes.SCENE_TABLES}.values(), strict=True):
        assert set(indices.tolist()) == set(range(len(table)))
    assert digest(torch.cat(drawn).numpy().tobytes()) == "98be7530e268be19"
    # Processors round the last bit of pixels differently.
    means = (127.5 + 127.5 * scenes.render(batch, frames=[0, 30, 60])).mean((1, 2, 3, 4))
    assert means[:6].tolist() == pytest.approx([140.597, 122.441, 143.347, 146.410, 54.433, 111.532], abs=0.01)
    assert digest("\n".join(scenes.write_captions(batch, 4, 8)).encode()) == "85126c90450f02b5"
    prompts = scenes.held_out_prompts()
    assert len(prompts) == 64 and sum(len(scene.objects) == 2 for scene in prompts.values()) == 12
    assert digest("\n".join(prompts).encode()) == "2c27cc060215c15e"
    other = scenes.sample_scenes(96, 4)
    assert not torch.equal(scenes.render(batch, frames=[0]), scenes.render(other, frames=[0]))


def test_scenes_drawn_larger_are_the_same_scenes():
    batch = scenes.sample_scenes(6, 11)
    small, large = (scenes.render(batch, frames=[0, 60], scale=scale) for scale in (1, 2))
    assert small.shape == (6, 3, 2, 96, 160) and large.shape == (6, 3, 2, 192, 320)
    shrunk = torch.nn.functional.avg_pool3d(large, (1, 2, 2))
    # They differ where an edge crosses a pixel.
    assert (shrunk - small).abs().mean() < 0.01 and (shrunk - small).abs().max() < 0.6
    # Edges are one pixel wide at any scale: the share of pixels between two colours halves.
    edges = [(video.diff(dim=-1).abs() > 0.02).float().mean() for video in (small, large)]
    assert 0.3 < edges[1] / edges[0] < 0.7
