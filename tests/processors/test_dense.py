"""dense_steps and dense_layers: which forward calls and which blocks stay exact, shown by bit-identical outputs."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import diffusers
import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    UniPCMultistepScheduler,
)
from diffusers.modular_pipelines import WanBlocks

import vmonarch
from vmonarch import VMonarchProcessor
from vmonarch.call import current_call
from vmonarch.dense import DenseSet

SCHEDULERS = {
    "unipc": lambda: UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    "euler": lambda: FlowMatchEulerDiscreteScheduler(shift=3.0),
    "heun": lambda: FlowMatchHeunDiscreteScheduler(shift=3.0),
    "dpm": lambda: DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, algorithm_type="dpmsolver++"
    ),
}


@pytest.mark.parametrize(
    "dense, total, expected",
    [
        (0, 4, []),
        (2, 4, [0, 1]),
        (4, 4, [0, 1, 2, 3]),
        (0.0, 4, []),
        (0.5, 4, [0, 1]),
        (0.26, 4, [0, 1]),
        (0.1, 50, [0, 1, 2, 3, 4]),
        (0.07, 100, [0, 1, 2, 3, 4, 5, 6]),
        (1.0, 3, [0, 1, 2]),
        ([], 4, []),
        ([3, 1], 4, [1, 3]),
        ({0, 2}, 4, [0, 2]),
        (range(1, 3), 4, [1, 2]),
    ],
    ids=str,
)
def test_what_a_dense_option_means(dense, total, expected):
    chosen = DenseSet("dense_steps", dense)
    assert [index for index in range(total) if chosen.contains(index, total)] == expected
    assert chosen.some == bool(expected)


@pytest.mark.parametrize("dense", [1, 3, 0.34, [0, 2]], ids=str)
def test_dense_layers_keep_their_own_processor(tiny, dense):
    model = tiny.transformer(num_layers=3)
    chosen = DenseSet("dense_layers", dense)
    originals = [block.attn1.processor for block in model.blocks]
    vmonarch.apply(model, VMonarchProcessor(dense_layers=dense))
    actual = tiny.run(model)
    for layer, block in enumerate(model.blocks):
        assert (block.attn1.processor is originals[layer]) == chosen.contains(layer, 3)
    # The same by hand.
    vmonarch.apply(model, VMonarchProcessor())
    for layer, block in enumerate(model.blocks):
        if chosen.contains(layer, 3):
            block.attn1.set_processor(originals[layer])
    assert torch.equal(tiny.run(model), actual)


def test_dense_layers_of_vace_include_their_control_blocks(tiny):
    model = tiny.vace_transformer()
    vmonarch.apply(model, VMonarchProcessor(dense_layers=[2]))
    kinds = [type(block.attn1.processor).__name__ for block in (*model.blocks, *model.vace_blocks)]
    ours, stock = "Own", "WanAttnProcessor"
    assert kinds == [ours, ours, stock, ours, stock]


def by_hand(tiny, pipe, dense, order=1, steps=3, **options):
    """Generate, with apply and restore called by hand between the steps: the oracle for dense_steps."""
    transformers = tiny.transformers_of(pipe)

    def choose(step):
        for model in transformers:
            applied = hasattr(model, "_vmonarch_record")
            if step in dense and applied:
                vmonarch.restore(model)
            elif step not in dense and not applied:
                vmonarch.apply(model, VMonarchProcessor())

    def next_step(pipe, evaluation, timestep, tensors):
        # Wan-Animate starts over with each segment.
        choose((evaluation + 1) // order % steps)
        return {}

    choose(0)
    output = tiny.generate(pipe, steps=steps, callback_on_step_end=next_step, **options)
    for model in transformers:
        if hasattr(model, "_vmonarch_record"):
            vmonarch.restore(model)
    return output


@pytest.mark.parametrize(
    "kind, dense_steps, dense",
    [
        (kind, *option)
        for kind, option in zip(
            ["t2v", "t2v-2.2", "t2v-5b", "i2v-2.1", "i2v-2.2", "i2v-5b", "vace", "v2v"],
            itertools.cycle([(1, {0}), (0.5, {0, 1}), ([1, 3], {1, 3})]),
            strict=False,
        )
    ],
    ids=str,
)
def test_dense_steps_follow_the_pipeline(tiny, kind, dense_steps, dense):
    pipe = tiny.pipeline(kind)
    options = {"steps": 4, "strength": 1.0} if kind == "v2v" else {"steps": 4}
    expected = by_hand(tiny, pipe, dense, **options)
    nothing_dense = by_hand(tiny, pipe, set(), **options)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=dense_steps))
    for _ in range(2):
        assert torch.equal(tiny.generate(pipe, **options), expected)
    assert not torch.equal(nothing_dense, expected)


@pytest.mark.parametrize("scheduler, kind", [*zip(SCHEDULERS, ["t2v", "i2v-2.2", "v2v", "t2v"], strict=True)])
def test_dense_steps_follow_a_scheduler_swapped_after_apply(tiny, scheduler, kind):
    pipe = tiny.applied(kind, dense_steps=[1])
    tiny.generate(pipe, steps=4)
    pipe.scheduler = SCHEDULERS[scheduler]()
    actual = tiny.generate(pipe, steps=4)
    vmonarch.restore(pipe)
    expected = by_hand(tiny, pipe, {1}, pipe.scheduler.order, steps=4)
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, by_hand(tiny, pipe, {0}, pipe.scheduler.order, steps=4))


@pytest.mark.parametrize("strength, run", [(1.0, 5), (0.6, 3), (0.2, 1)])
def test_dense_steps_of_video_to_video_count_the_steps_that_run(tiny, strength, run):
    pipe = tiny.pipeline("v2v")
    options = {"steps": 5, "strength": strength}
    expected = by_hand(tiny, pipe, {0}, **options)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=1))
    assert torch.equal(tiny.generate(pipe, **options), expected)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=[run]))
    with pytest.raises(ValueError, match=f"dense_steps names index {run}, but there are only {run} steps"):
        tiny.generate(pipe, **options)


def test_dense_steps_start_over_with_each_segment_of_animate(tiny):
    pipe = tiny.pipeline("animate")
    options = {"steps": 3, "segment_frame_length": 5}
    expected = by_hand(tiny, pipe, {0}, **options)
    steps_run = []
    tiny.generate(pipe, callback_on_step_end=lambda *step: steps_run.append(step[1]) or {}, **options)
    assert steps_run == [0, 1, 2] * 2, "two segments"
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=1))
    assert torch.equal(tiny.generate(pipe, **options), expected)


def test_a_backend_chosen_later_leaves_the_original_processor_alone(tiny):
    pipe = tiny.applied("t2v", dense_steps=1)
    pipe.transformer.set_attention_backend("_native_math")
    try:
        tiny.quickly(pipe, 1)
        vmonarch.restore(pipe)
        assert {block.attn1.processor._attention_backend for block in pipe.transformer.blocks} == {None}
    finally:
        pipe.transformer.reset_attention_backend()


def modular(pipe):
    """A modular pipeline of the same parts."""
    twin = WanBlocks().init_pipeline()
    names = ("text_encoder", "tokenizer", "transformer", "vae", "scheduler")
    twin.update_components(**{name: getattr(pipe, name) for name in names})
    return twin


@pytest.mark.parametrize("option", [{"dense_steps": [1, 2]}, {"refresh": [0, 2]}], ids=str)
def test_a_modular_pipeline_tells_the_step(tiny, option):
    pipe = tiny.pipeline("t2v")
    twin = modular(pipe)
    call = {"prompt": tiny.PROMPT, "negative_prompt": tiny.NEGATIVE, "num_inference_steps": 4, "output": "latents"}
    call |= {"height": tiny.HEIGHT, "width": tiny.WIDTH, "num_frames": tiny.FRAMES}
    vmonarch.apply(twin, VMonarchProcessor(**option))
    found = twin(**call, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found, tiny.generate(pipe, steps=4))
    vmonarch.restore(twin)
    assert not torch.equal(found, tiny.generate(pipe, steps=4))


@pytest.mark.parametrize("option", ["dense_steps", "refresh"])
def test_more_steps_than_there_are_are_refused(tiny, option):
    with pytest.raises(ValueError, match=f"{option}=4, but there are only 3 steps"):
        tiny.generate(tiny.applied("t2v", **{option: 4}), steps=3)


def watched(model):
    """(thread, whether exact) of each call of a transformer from now on."""
    seen = []
    model.condition_embedder.register_forward_hook(
        lambda *_: seen.append((threading.get_ident(), current_call().dense))
    )
    return seen


@pytest.mark.parametrize("given", ["pipeline", "transformer"])
@pytest.mark.parametrize("own_scheduler", [False, True], ids=["one-scheduler", "two-schedulers"])
def test_pipelines_that_share_a_transformer_take_turns(tiny, own_scheduler, given):
    pipe = tiny.pipeline("t2v")
    other = tiny.another(pipe, own_scheduler=own_scheduler)
    vmonarch.apply(pipe if given == "pipeline" else pipe.transformer, VMonarchProcessor(dense_steps=2))
    seen = watched(pipe.transformer)
    for _ in range(2):
        tiny.quickly(other, 5)
        assert tiny.taken(seen) == [True, True, False], "three of five steps run"
        tiny.quickly(pipe, 4)
        assert tiny.taken(seen) == [True, True, False, False]


@pytest.mark.parametrize("own_scheduler", [False, True], ids=["one-scheduler", "two-schedulers"])
def test_an_interrupted_run_leaves_no_trace(tiny, own_scheduler):
    pipe = tiny.pipeline("t2v")
    other = tiny.another(pipe, own_scheduler=own_scheduler)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=2))
    seen = watched(pipe.transformer)
    with pytest.raises(KeyboardInterrupt):
        tiny.quickly(pipe, 6, callback_on_step_end=tiny.fail_after(2))
    assert tiny.taken(seen) == [True, True, False]
    tiny.quickly(other, 5)
    assert tiny.taken(seen) == [True, True, False]
    tiny.quickly(pipe, 4, callback_on_step_end=tiny.stop_after(1))
    assert tiny.taken(seen) == [True, True]
    tiny.quickly(pipe, 3)
    assert tiny.taken(seen) == [True, True, False]


def test_a_pipeline_runs_in_the_callback_of_another(tiny):
    pipe = tiny.pipeline("t2v")
    other = tiny.another(pipe, own_scheduler=True)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=[1]))
    seen = watched(pipe.transformer)
    within = []

    def callback(outer, step, timestep, tensors):
        before = len(seen)
        if step == 1:
            tiny.run(outer.transformer)
            tiny.quickly(other, 5)
        within.append([exact for _, exact in seen[before:]])
        del seen[before:]
        return {}

    tiny.quickly(pipe, 3, callback_on_step_end=callback)
    assert within == [[], [True, False, True, False], []], "in step 1; then three steps of video to video"
    assert tiny.taken(seen) == [False, True, False]


def test_a_schedule_that_another_pipeline_has_replaced_is_refused(tiny):
    pipe = tiny.pipeline("t2v")
    other = tiny.another(pipe)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=1))
    with pytest.raises(RuntimeError, match="dense_steps.*WanPipeline.*scheduler of its own.*deepcopy"):
        tiny.quickly(pipe, 5, callback_on_step_end=lambda *_: tiny.quickly(other, 5) is None or {})


def test_pipelines_of_two_threads_are_told_apart(tiny):
    pipe = tiny.applied("t2v", dense_steps=[1, 2])
    seen = watched(pipe.transformer)
    together = threading.Barrier(2, timeout=60)
    pipes = [pipe, tiny.another(pipe, own_scheduler=True)]

    def work(index):
        # Both take three steps, each of them together with one of the other's; those of video to video are others.
        callback = lambda *_: together.wait() < 0 or {}
        tiny.quickly(pipes[index], (3, 6)[index], callback_on_step_end=callback, generator=torch.Generator())
        return threading.get_ident()

    with ThreadPoolExecutor(2) as threads:
        idents = list(threads.map(work, (0, 1)))
    first, second = ([exact for ident, exact in seen if ident == own] for own in idents)
    assert first == [False, True, True]
    assert second == [False, True, True]


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))], ids=["copy", "pickle"])
def test_copies_of_a_pipeline_count_their_own_steps(tiny, twin):
    pipe = tiny.applied("t2v", dense_steps=1)
    tiny.quickly(pipe, 2)
    copied = twin(pipe)
    del pipe
    seen = watched(copied.transformer)
    tiny.quickly(copied, 3)
    assert tiny.taken(seen) == [True, False, False]
    with pytest.raises(RuntimeError, match="dense_steps.*no pipeline"):
        tiny.run(copy.deepcopy(copied.transformer))


@pytest.mark.parametrize("option, off", [("dense_steps", "dense_steps=0"), ("refresh", "refresh=None")])
def test_a_transformer_called_without_a_pipeline_has_no_step(tiny, option, off):
    pipe = tiny.applied("t2v", **{option: 1})
    message = f"{option} needs the denoising step, but no pipeline calls this transformer.*{off}"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            tiny.run(pipe.transformer)
        tiny.quickly(pipe, 1)


class Early(diffusers.WanPipeline):
    def encode_prompt(self, *args, **kwargs):
        self.transformer(**self.inputs)


class Computed(diffusers.WanPipeline):
    """As Mochi, which keeps something else than its scheduler's timestep."""

    def __setattr__(self, name, value):
        super().__setattr__(name, 1000 - value if name == "_current_timestep" and value is not None else value)


class Unkept(diffusers.WanPipeline):
    """As Kandinsky 5, which keeps no timestep."""

    def __setattr__(self, name, value):
        if name != "_current_timestep":
            super().__setattr__(name, value)


def derived(tiny, kind):
    pipe = kind(**tiny.pipeline("t2v").components)
    pipe.set_progress_bar_config(disable=True)
    pipe.inputs = tiny.inputs()
    return pipe


@pytest.mark.parametrize("kind", [Computed, Unkept])
def test_the_step_is_that_of_the_loop_where_the_pipeline_does_not_keep_it(tiny, kind):
    pipe = derived(tiny, kind)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=[1]))
    seen = watched(pipe.transformer)
    tiny.quickly(pipe, 3)
    assert tiny.taken(seen) == [False, True, False]


def test_a_step_outside_of_the_loop_is_refused(tiny):
    pipe = derived(tiny, Early)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=1))
    with pytest.raises(RuntimeError, match="dense_steps needs.*Early calls this transformer outside of its"):
        tiny.quickly(pipe, 2)


@pytest.mark.parametrize("option", ["dense_steps", "refresh"])
def test_diffusion_forcing_has_no_common_step(tiny, option):
    class SkyReelsV2DiffusionForcingPipeline(diffusers.WanPipeline):
        pass

    pipe = SkyReelsV2DiffusionForcingPipeline(**tiny.pipeline("t2v").components)
    instead = f"use {option}=(0|None, or the preset)"
    with pytest.raises(ValueError, match=f"{option} is not supported with SkyReelsV2Diffusion.*; {instead}"):
        vmonarch.apply(pipe, VMonarchProcessor(**{option: 1}))
    vmonarch.apply(pipe, VMonarchProcessor())
