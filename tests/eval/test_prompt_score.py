"""The reader must read what was rendered, and must be able to say no."""

import random

import pytest
import torch
from made_scenes import scenes_from_attributes

from vmonarch.eval import prompt_score as ps
from vmonarch.finetune import scenes as data

ALL_TRIPLES = [
    (s, c, d) for s in range(len(data.SHAPES)) for c in range(len(data.COLOURS)) for d in range(len(data.DIRECTIONS))
]
# Eleven of the 61 frames keep the tests quick; the reader scales travel by the frames it is given.
FRAMES = range(0, 61, 6)


def clip(*objects: data.ObjectAttributes, **scene) -> torch.Tensor:
    scenes = scenes_from_attributes([data.SceneAttributes(objects, **scene)], 0)
    return ((data.render(scenes, frames=FRAMES)[0] + 1) / 2).permute(1, 2, 3, 0)


def thing(words: str) -> data.ObjectAttributes:
    colour, shape, direction = words.split()
    return data.ObjectAttributes(shape, colour, direction)


def score(video: torch.Tensor, *objects: str) -> ps.PromptMatch:
    return ps.score_video(video, data.SceneAttributes(tuple(map(thing, objects))))


def test_reader_is_right_on_rendered_clips_of_every_combination():
    scenes = data.sample_scenes(128, 5, triples=ALL_TRIPLES)
    videos = ((data.render(scenes, frames=FRAMES) + 1) / 2).permute(0, 2, 3, 4, 1)
    scores = [
        ps.score_readings(ps.read_video(video), ps.expected_objects(scenes.scene(n))).all
        for n, video in enumerate(videos)
    ]
    assert sum(scores) >= 127


@pytest.mark.parametrize("size", data.SIZES)
@pytest.mark.parametrize("shape", data.SHAPES)
def test_shape_is_read_at_every_size(shape, size):
    (reading,) = ps.read_video(clip(data.ObjectAttributes(shape, "green", "down-right", size=size)))
    assert (reading.shape, reading.colour, reading.direction) == (shape, "green", "down-right")


def test_one_wrong_attribute_fails_alone():
    video = clip(thing("red circle left"))
    for wrong, fails in (
        ("red square left", "shape"),
        ("orange circle left", "colour"),
        ("red circle right", "direction"),
        ("red circle up-left", "direction"),
    ):
        found = score(video, wrong)
        assert [name for name in ("colour", "shape", "direction") if not getattr(found, name)] == [fails]
        assert not found.all and found.score == pytest.approx(2 / 3)


def test_missing_extra_swapped_and_doubled_objects_are_wrong():
    one, both = clip(thing("red circle left")), clip(thing("red circle left"), thing("blue star left"))
    assert not score(one, "red circle left", "blue star left").shape
    assert score(both, "red circle left", "blue star left").all and not score(both, "red circle left").colour
    swapped = score(both, "red star left", "blue circle left")
    assert swapped == ps.PromptMatch(colour=True, shape=False, direction=True)
    doubled = torch.where((one.amax(-1) - one.amin(-1) > 0.3)[..., None], one, one.roll(48, 2))
    assert not score(doubled, "red circle left").shape


def test_motion_is_read_in_pixels_over_the_whole_clip():
    scenes = scenes_from_attributes([data.SceneAttributes((thing("red circle left"),))], 3)
    video = ((data.render(scenes, frames=FRAMES)[0] + 1) / 2).permute(1, 2, 3, 0)
    assert ps.read_video(video)[0].travel == pytest.approx(scenes.motion[0, 0].tolist(), abs=0.5)
    assert ps.read_video(video.flip(0))[0].direction == "right"
    still = video[:1].expand(11, -1, -1, -1)
    (reading,) = ps.read_video(still)
    assert reading.direction is None and reading.travel == pytest.approx((0, 0), abs=1e-3)
    assert not score(still, "red circle left").direction


def test_backgrounds_noise_and_a_vanishing_object_are_nothing():
    for colour in data.BACKGROUNDS.values():
        assert ps.read_video(torch.tensor(colour).expand(11, 96, 160, 3)) == []
    noise = torch.rand(11, 96, 160, 3, generator=torch.Generator().manual_seed(0))
    assert not score(noise, "red circle left").all
    vanishing = clip(thing("red circle left"))
    vanishing[5:] = 0.5
    assert ps.read_video(vanishing) == []


def test_bytes_and_arrays_read_like_floats_and_what_is_no_video_is_refused():
    video = clip(thing("red circle left"))
    as_bytes = (video * 255).round().to(torch.uint8)
    for other in (as_bytes, as_bytes.numpy(), video.numpy()):
        assert ps.read_video(other)[0].shape == "circle"
    for other in (video[0], video.permute(0, 3, 1, 2), video[:1], video / 0, video * 1.5, -video):
        with pytest.raises(ValueError, match="video must"):
            ps.read_video(other)
    with pytest.raises(ValueError, match="prompt names none"):
        ps.score_video(video, "a cat sleeps in the sun")
    with pytest.raises(ValueError, match="expected"):
        ps.score_readings([], [])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("A red circle moves left", ["red circle left"]),
        ("Scarlet BALL, rising, on a striped grey background", ["red circle up"]),
        ("from left to right a violet hoop glides", ["purple ring right"]),
        ("a small box in aqua heads to the lower left", ["cyan square down-left"]),
        ("a blue star moves up while the camera pans right", ["blue star up"]),
        ("a red star falls and a green plus sign slides to the right", ["red star down", "green cross right"]),
        ("a pink triangle", ["pink triangle None"]),
        ("something red moves left", ["red None left"]),
        ("a dog", []),
    ],
)
def test_prompts_are_understood(prompt, expected):
    words = [[None if word == "None" else word for word in item.split()] for item in expected]
    assert ps.parse_prompt(prompt) == tuple(ps.ExpectedObject(*item) for item in words)


def test_every_caption_is_understood_as_the_scene_it_was_written_for():
    scenes, rng = data.sample_scenes(1000, 7), random.Random(8)
    for scene in map(scenes.scene, range(1000)):
        text = data.caption(scene, rng, complete=True)
        assert ps.parse_prompt(text) == ps.expected_objects(scene), text
