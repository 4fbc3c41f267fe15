"""The reader must read what was rendered, and must be able to say no."""

import random

import pytest
import torch

from vmonarch.eval import prompt_score as ps
from vmonarch.finetune import scenes as data

# Eleven of the 61 frames keep the tests quick; the reader scales travel by the frames it is given.
FRAMES = range(0, 61, 6)


def clip(shown: data.ObjectAttributes) -> torch.Tensor:
    """A clip of one object before a plain grey background."""
    index = lambda table, value: torch.tensor([table.index(value)])
    drawn = {"count": torch.tensor([1])}
    for name, table in data.OBJECT_TABLES.items():
        drawn[name] = index(table, getattr(shown, name)).expand(1, data.MAX_OBJECTS)
    for name, table in data.SCENE_TABLES.items():
        drawn[name] = index(table, getattr(data.SceneAttributes((shown,)), name))
    scenes = data.place(drawn, torch.Generator().manual_seed(0))
    return ((data.render(scenes, frames=FRAMES)[0] + 1) / 2).permute(1, 2, 3, 0)


def thing(words: str) -> data.ObjectAttributes:
    colour, shape, direction = words.split()
    return data.ObjectAttributes(shape, colour, direction)


@pytest.mark.parametrize("size", data.SIZES)
@pytest.mark.parametrize("shape", data.SHAPES)
def test_shape_is_read_at_every_size(shape, size):
    (reading,) = ps.read_video(clip(data.ObjectAttributes(shape, "green", "down-right", size=size)))
    assert (reading.shape, reading.colour, reading.direction) == (shape, "green", "down-right")


def test_backgrounds_noise_and_a_vanishing_object_are_nothing():
    for colour in data.BACKGROUNDS.values():
        assert ps.read_video(torch.tensor(colour).expand(11, 96, 160, 3)) == []
    noise = torch.rand(11, 96, 160, 3, generator=torch.Generator().manual_seed(0))
    assert ps.score_video(noise, "a red circle moving left") < 1
    vanishing = clip(thing("red circle left"))
    vanishing[5:] = 0.5
    assert ps.read_video(vanishing) == []


def test_what_is_no_video_or_names_nothing_is_refused():
    video = clip(thing("red circle left"))
    assert ps.score_video(video, "a red circle moving left") == 1
    for other in (video[0], video.permute(0, 3, 1, 2), video[:1]):
        with pytest.raises(ValueError, match="video must"):
            ps.read_video(other)
    with pytest.raises(ValueError, match="prompt names none"):
        ps.score_video(video, "a cat sleeps in the sun")


def test_every_caption_is_understood_as_the_scene_it_was_written_for():
    scenes, rng = data.sample_scenes(1000, 7), random.Random(8)
    for scene in map(scenes.scene, range(1000)):
        text = data.caption(scene, rng, complete=True)
        expected = tuple((thing.colour, thing.shape, thing.direction) for thing in scene.objects)
        assert ps.parse_prompt(text) == expected, text
