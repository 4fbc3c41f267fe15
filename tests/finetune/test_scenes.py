"""The procedural clips and their captions: what a seed gives is pinned, and it is what it is said to be."""

import hashlib
import random

import pytest
import torch
from made_scenes import scenes_from_attributes

from vmonarch.finetune import scenes


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def test_what_a_seed_gives_is_pinned():
    batch = scenes.sample_scenes(24, 3)
    pixels = (scenes.render(batch, frames=[0, 30, 60]) * 127.5 + 127.5).round().byte()
    assert digest(pixels.numpy().tobytes()) == "27d70b0e9ec78984"
    assert digest("\n".join(scenes.write_captions(batch, 4, 8)).encode()) == "324d54610dfbc734"
    prompts = scenes.held_out_prompts()
    assert len(prompts) == 64 and sum(len(scene.objects) == 2 for scene in prompts.values()) == 12
    assert digest("\n".join(prompts).encode()) == "2c27cc060215c15e"
    other = scenes.sample_scenes(24, 4)
    assert not torch.equal(scenes.render(batch, frames=[0]), scenes.render(other, frames=[0]))


def test_objects_stay_in_the_frame_and_two_objects_rarely_touch():
    batch = scenes.sample_scenes(2000, 0)
    extent = scenes.SHAPE_EXTENT * batch.radius[..., None]
    for centre in (batch.start, batch.start + batch.motion):
        assert (centre - extent).min() > -1e-3
        assert (torch.tensor([160.0, 96.0]) - centre - extent).min() > -1e-3
    times = torch.linspace(0, 1, 31)[:, None]
    relative, drift = (x[:, 1] - x[:, 0] for x in (batch.start, batch.motion))
    gap = (relative[:, None] + times * drift[:, None]).norm(dim=-1).amin(-1) - 1.35 * batch.radius.sum(-1)
    assert (gap[batch.count == 2] < 0).float().mean() < 0.02


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


@pytest.mark.parametrize("name", scenes.SHAPES)
def test_shapes_are_centred_and_about_as_large_as_a_disc(name):
    grid = torch.linspace(-20, 20, 401)
    x, y = grid[None, :].expand(401, 401), grid[:, None].expand(401, 401)
    inside = scenes.shape_distance(name, x, y, torch.tensor(10.0)) < 0
    centre = torch.stack((x[inside].mean(), y[inside].mean()))
    assert 190 < inside.float().sum() * 0.01 < 330 and centre.abs().max() < 0.1
    assert torch.stack((x[inside], y[inside])).norm(dim=0).max() <= 10 * scenes.SHAPE_EXTENT


def test_a_pan_moves_the_background_against_the_camera():
    objects = (scenes.ObjectAttributes("circle", "red", "up"),)
    panned, still = (
        scenes_from_attributes([scenes.SceneAttributes(objects, pattern="striped", pan=pan)], 0)
        for pan in ("right", "none")
    )
    assert panned.pan_shift[0, 0] <= -24 and panned.pan_shift[0, 1] == 0
    moved = lambda batch: (scenes.render(batch, frames=[0, 8])[0, :, :, :4].diff(dim=1)).abs().max()
    assert moved(panned) > 0.05 and moved(still) < 0.05


def test_held_out_combinations_never_occur_in_training_but_all_their_pairs_do():
    held_out, training = set(scenes.held_out_triples()), scenes.training_triples()
    assert len(held_out) == 64 and not held_out & set(training) and len(training) == 6 * 8 * 8 - 64
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert {(t[first], t[second]) for t in held_out} <= {(t[first], t[second]) for t in training}
    batch = scenes.sample_scenes(20_000, 1)
    drawn = torch.stack((batch.shape, batch.colour, batch.direction), -1)
    seen = {tuple(t) for t in torch.cat((drawn[:, 0], drawn[batch.count == 2, 1])).tolist()}
    assert not seen & held_out and len(seen) == len(training)


def test_captions_vary_and_name_colour_and_shape():
    scene = scenes.sample_scenes(1, 2).scene(0)
    rng = random.Random(0)
    captions = {scenes.caption(scene, rng) for _ in range(200)}
    assert len(captions) > 150
    item = scene.objects[0]
    for caption in captions:
        assert any(word in caption.lower() for word in scenes.COLOUR_WORDS[item.colour])
        assert any(word in caption.lower() for word in scenes.SHAPE_WORDS[item.shape])
