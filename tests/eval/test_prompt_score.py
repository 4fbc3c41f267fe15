"""The reader must read what was rendered, and must be able to say no."""

import dataclasses

import pytest
import torch

from vmonarch.eval import prompt_score as ps
from vmonarch.finetune import scenes as data

# Eleven of the 61 frames keep the tests quick; the reader scales travel by the frames it is given.
FRAMES = range(0, 61, 6)


def clip(shown: data.ObjectAttributes) -> torch.Tensor:
    """A clip of one object before a plain grey background."""
    scene = data.place(data.SceneAttributes((shown,)), (shown, shown), torch.Generator().manual_seed(0))
    return ((data.render(scene, frames=FRAMES) + 1) / 2).permute(1, 2, 3, 0)


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
    assert ps.score(ps.read_video(noise), [ps.Seen("red", "circle", "left")]) < 1
    vanishing = clip(thing("red circle left"))
    vanishing[5:] = 0.5
    assert ps.read_video(vanishing) == []
    for other in (vanishing[0], vanishing.permute(0, 3, 1, 2), vanishing[:1]):
        with pytest.raises(ValueError, match="video must"):
            ps.read_video(other)


def test_a_video_is_scored_by_what_its_prompt_asks_for():
    prompt, shown = next((p, s.objects[0]) for p, s in data.held_out_prompts().items() if len(s.objects) == 1)
    turned = dataclasses.replace(shown, direction="left" if "right" in shown.direction else "right")
    frames = lambda item: clip(item).permute(0, 3, 1, 2)
    assert ps.prompt_score(frames(shown), prompt) == 1
    assert ps.prompt_score(frames(turned), prompt) == pytest.approx(2 / 3)
    assert ps.prompt_score(frames(shown), "a cat sleeps") is ps.prompt_score(frames(shown)[:1], prompt) is None
    # Of two objects, in a colour that was not asked for, or with one too many.
    asked = [ps.Seen("red", "circle", "left"), ps.Seen("blue", "star", "up")]
    assert ps.score(asked[::-1], asked) == 1
    assert ps.score([asked[0], asked[1]._replace(colour="green")], asked) == pytest.approx(2 / 3)
    assert ps.score([*asked, asked[0]], asked) == pytest.approx(2 / 3) and ps.score(asked[:1], asked) == 0


def test_permanence_falls_where_an_object_vanishes_doubles_or_changes_its_colour():
    prompt, shown = next((p, s.objects[0]) for p, s in data.held_out_prompts().items() if len(s.objects) == 1)
    frames = clip(shown).permute(0, 3, 1, 2)
    assert ps.permanence(frames, prompt) == 1 and ps.permanence(frames, "a cat sleeps") is None
    gone, twice, other, more = (frames.clone() for _ in range(4))
    gone[3:5] = 0.5
    turned = frames[2].flip(1, 2)
    twice[2] = torch.where(turned.amax(0) - turned.amin(0) > 0.1, turned, frames[2])
    other[4:] = clip(dataclasses.replace(shown, colour="blue")).permute(0, 3, 1, 2)[4:]
    more[:, :, :12, :12] = torch.tensor(data.COLOURS["green"])[:, None, None]
    found = [ps.permanence(x, prompt) for x in (gone, twice, other, more)]
    assert found == pytest.approx([9 / 11, 10 / 11, 4 / 11, 0])
