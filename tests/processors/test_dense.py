"""dense_steps and dense_layers: which forward calls and which blocks stay exact, shown by bit-identical outputs."""

from __future__ import annotations

import diffusers
import pytest
import tiny_wan
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from diffusers.modular_pipelines import WanBlocks

import vmonarch
from vmonarch import VMonarchProcessor
from vmonarch.call import current_call
from vmonarch.own import Own
from vmonarch.validation import DenseSet


@pytest.mark.parametrize(
    "dense, total, expected",
    [
        (0, 4, []),
        (2, 4, [0, 1]),
        (0.26, 4, [0, 1]),
        (0.07, 100, [0, 1, 2, 3, 4, 5, 6]),
        (1.0, 3, [0, 1, 2]),
        ([3, 1], 4, [1, 3]),
        (range(1, 3), 4, [1, 2]),
    ],
    ids=str,
)
def test_what_a_dense_option_means(dense, total, expected):
    chosen = DenseSet("dense_steps", dense)
    assert [index for index in range(total) if chosen.contains(index, total)] == expected
    assert chosen.some == bool(expected)


@pytest.fixture
def seen(monkeypatch):
    """Of each call of a layer's processor, whether the step is dense."""
    found, right = [], Own._self_attention

    def note(*inputs):
        found.append(current_call().dense)
        return right(*inputs)

    monkeypatch.setattr(Own, "_self_attention", note)
    return found


@pytest.mark.parametrize(
    "kind, dense_steps, dense",
    [("t2v", 1, {0}), ("t2v-2.2", 0.5, {0, 1}), ("i2v-5b", [1, 3], {1, 3}), ("vace", 1, {0})],
    ids=str,
)
def test_dense_steps_follow_the_pipeline(tiny, seen, kind, dense_steps, dense):
    pipe = tiny.pipeline(kind)
    stock = tiny.generate(pipe, steps=4)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=dense_steps))
    outputs = [tiny.generate(pipe, steps=4) for _ in range(2)]
    assert torch.equal(*outputs) and not torch.equal(outputs[0], stock)
    of_a_step = len(seen) // 8
    assert seen == [step in dense for _ in range(2) for step in range(4) for _ in range(of_a_step)]
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=1.0))
    assert torch.equal(tiny.generate(pipe, steps=4), stock)


@pytest.mark.parametrize("strength, run", [(1.0, 5), (0.6, 3), (0.2, 1)])
def test_dense_steps_of_video_to_video_count_the_steps_that_run(tiny, seen, strength, run):
    pipe = tiny.applied("v2v", dense_steps=1)
    options = {"steps": 5, "strength": strength}
    tiny.generate(pipe, **options)
    of_a_step = len(seen) // run
    assert seen == [step == 0 for step in range(run) for _ in range(of_a_step)]
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=[run]))
    with pytest.raises(ValueError, match=f"dense_steps names index {run}, but there are only {run} steps"):
        tiny.generate(pipe, **options)


@pytest.mark.parametrize("option", [{"dense_steps": [1, 2]}, {"refresh": [0, 2]}], ids=str)
def test_a_modular_pipeline_tells_the_step(tiny, option):
    pipe = tiny.pipeline("t2v")
    twin = WanBlocks().init_pipeline()
    names = ("text_encoder", "tokenizer", "transformer", "vae", "scheduler")
    twin.update_components(**{name: getattr(pipe, name) for name in names})
    call = {"prompt": tiny.PROMPT, "negative_prompt": tiny.NEGATIVE, "num_inference_steps": 4, "output": "latents"}
    call |= {"height": tiny.HEIGHT, "width": tiny.WIDTH, "num_frames": tiny.FRAMES}
    vmonarch.apply(twin, VMonarchProcessor(**option))
    found = twin(**call, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found, tiny.generate(pipe, steps=4))
    vmonarch.restore(twin)
    assert not torch.equal(found, tiny.generate(pipe, steps=4))


@pytest.mark.parametrize("option", [{"dense_steps": [1, 2]}, {"refresh": [0, 2]}], ids=["dense_steps", "refresh"])
def test_a_scheduler_may_be_swapped_between_calls(tiny, option):
    pipe, twin = tiny.applied("t2v", **option), tiny.pipeline("t2v")
    tiny.quickly(pipe, 4)
    pipe.scheduler, twin.scheduler = (FlowMatchEulerDiscreteScheduler(shift=3.0) for _ in range(2))
    vmonarch.apply(twin, VMonarchProcessor(**option))
    assert torch.equal(tiny.quickly(pipe, 4), tiny.quickly(twin, 4))


class Refining(WanPipeline):
    """Its call begins with a call of another pipeline that has its transformer."""

    def __call__(self, *inputs, **options):
        self.first = tiny_wan.quickly(self.other, 5)
        return super().__call__(*inputs, **options)


@pytest.mark.parametrize("option", [{"dense_steps": [1, 2]}, {"refresh": [0, 2]}], ids=["dense_steps", "refresh"])
def test_a_pipeline_may_call_another_inside_its_call(tiny, option):
    pipe = tiny.applied("t2v", **option)
    expected, other = tiny.quickly(pipe, 4), tiny.another(pipe, own_scheduler=True)
    alone, refining = tiny.quickly(other, 5), Refining(**pipe.components)
    # Its scheduler is in use as before.
    refining.other = other
    assert torch.equal(tiny.quickly(refining, 4), expected) and torch.equal(refining.first, alone)


def test_a_schedule_that_another_pipeline_has_replaced_is_refused(tiny):
    pipe = tiny.pipeline("t2v")
    other = tiny.another(pipe)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=1))
    with pytest.raises(RuntimeError, match="dense_steps.*WanPipeline.*scheduler of its own.*deepcopy"):
        tiny.quickly(pipe, 5, callback_on_step_end=lambda *_: tiny.quickly(other, 5) is None or {})


def test_a_schedule_that_begins_anew_in_mid_run_is_refused(tiny):
    pipe = tiny.applied("t2v", refresh=1)
    with pytest.raises(RuntimeError, match="refresh needs the denoising step, but UniPC.*does not tell it"):
        tiny.quickly(pipe, 4, callback_on_step_end=lambda pipe, *_: pipe.scheduler.set_timesteps(4) or {})


@pytest.mark.parametrize("option, off", [("dense_steps", "dense_steps=0"), ("refresh", "refresh=None")])
def test_a_transformer_called_without_a_pipeline_has_no_step(tiny, option, off):
    pipe = tiny.applied("t2v", **{option: 1})
    message = f"{option} needs the denoising step, but no pipeline calls this transformer.*{off}"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            tiny.run(pipe.transformer)
        tiny.quickly(pipe, 1)


@pytest.mark.parametrize("option", ["dense_steps", "refresh"])
def test_diffusion_forcing_has_no_common_step(tiny, option):
    class SkyReelsV2DiffusionForcingPipeline(diffusers.WanPipeline):
        pass

    pipe = SkyReelsV2DiffusionForcingPipeline(**tiny.pipeline("t2v").components)
    instead = f"use {option}=(0|None, or the preset)"
    with pytest.raises(ValueError, match=f"{option} is not supported with SkyReelsV2Diffusion.*; {instead}"):
        vmonarch.apply(pipe, VMonarchProcessor(**{option: 1}))
    vmonarch.apply(pipe, VMonarchProcessor())
