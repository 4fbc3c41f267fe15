"""vmonarch.batched_guidance: both predictions of classifier-free guidance in one forward call."""

from __future__ import annotations

import accelerate
import diffusers
import pytest
import tiny_wan
import torch
from diffusers import FirstBlockCacheConfig
from diffusers.hooks import HookRegistry, ModelHook

import vmonarch
from vmonarch import VMonarchProcessor, batched_guidance

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture
def batches():
    """batches(pipe): a list to which every computation of a transformer's blocks adds the size of its batch."""

    def watch(pipe):
        sizes = []
        for model in tiny_wan.transformers_of(pipe):
            model.blocks[0].register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
        return sizes

    return watch


def unguided(pipe):
    """Whether nothing of a block is left behind."""
    return "encode_prompt" not in vars(pipe) and all("forward" not in vars(m) for m in tiny_wan.transformers_of(pipe))


@pytest.mark.parametrize("kind", [*tiny_wan.KINDS, *tiny_wan.RELATIVES])
def test_one_call_a_step_gives_the_same_video(tiny, batches, kind):
    pipe = tiny.applied(kind, dense_steps=[1])
    sizes = batches(pipe)
    # The part of the schedule that is left to video-to-video has two steps then.
    steps = 4 if kind == "v2v" else 3
    expected = tiny.generate(pipe, steps=steps)
    one_by_one, sizes[:] = list(sizes), []
    with batched_guidance(pipe):
        actual = tiny.generate(pipe, steps=steps)
    torch.testing.assert_close(actual, expected, **CLOSE)
    assert set(one_by_one) == {1}
    if kind == "animate":
        # Only its first step tells that the face is blank without guidance.
        assert sizes == [2, 1, 2, 2]
    else:
        assert sizes == [2] * (len(one_by_one) // 2)
    assert unguided(pipe)


@pytest.mark.parametrize("kind", ["t2v", "i2v-2.2"])
@pytest.mark.parametrize("guidance", [0.0, 1.0])
def test_without_guidance_nothing_is_batched(tiny, batches, kind, guidance):
    pipe = tiny.applied(kind)
    expected = tiny.generate(pipe, guidance=guidance)
    sizes = batches(pipe)
    with batched_guidance(pipe):
        # Embeddings of a negative prompt that is not used.
        embeddings = dict(zip(("prompt_embeds", "negative_prompt_embeds"), pipe.encode_prompt("red", ""), strict=True))
        assert torch.equal(tiny.generate(pipe, guidance=guidance), expected)
        tiny.generate(pipe, guidance=guidance, prompt=None, negative_prompt=None, **embeddings)
    assert sizes == [1] * 6


def test_two_scales_two_transformers_and_dense_steps(tiny, batches):
    pipe = tiny.applied("t2v-2.2", dense_steps=[0, 3])
    options = {"steps": 5, "guidance": 3.0, "guidance_scale_2": 7.0}
    expected = tiny.generate(pipe, **options)
    other_scale = tiny.generate(pipe, **options | {"guidance_scale_2": 3.0})
    assert (other_scale - expected).abs().max() > 1e-3, "both transformers must have run"
    sizes = batches(pipe)
    with batched_guidance(pipe):
        actual = tiny.generate(pipe, **options)
    torch.testing.assert_close(actual, expected, **CLOSE)
    assert sizes == [2] * 5


def test_several_videos_embeddings_and_calls_in_one_block(tiny, batches):
    pipe = tiny.applied("t2v")
    prompts = {"prompt": [tiny.PROMPT, "a blue square"], "negative_prompt": [tiny.NEGATIVE, ""]}
    generators = lambda: [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    two = tiny.generate(pipe, generator=generators(), **prompts)
    one = tiny.generate(pipe, width=64)
    sizes = batches(pipe)
    with batched_guidance(pipe):
        torch.testing.assert_close(tiny.generate(pipe, generator=generators(), **prompts), two, **CLOSE)
        torch.testing.assert_close(tiny.generate(pipe, width=64), one, **CLOSE)
        assert sizes == [4, 4, 4, 2, 2, 2]
        embeddings = pipe.encode_prompt([tiny.PROMPT], [tiny.NEGATIVE], max_sequence_length=512)
        given = dict(zip(("prompt_embeds", "negative_prompt_embeds"), embeddings, strict=True))
        from_embeddings = tiny.generate(pipe, width=64, prompt=None, negative_prompt=None, **given)
        torch.testing.assert_close(from_embeddings, one, **CLOSE)
    assert sizes == [4, 4, 4] + [2] * 6


def test_a_negative_prompt_changed_by_a_callback_is_followed(tiny, batches):
    pipe = tiny.applied("t2v")
    other = pipe.encode_prompt("a blue square", do_classifier_free_guidance=False, max_sequence_length=512)[0]

    def change(pipe, step, timestep, tensors):
        return {"negative_prompt_embeds": 3 * other} if step == 1 else {}

    expected = tiny.generate(pipe, steps=5, callback_on_step_end=change)
    assert (expected - tiny.generate(pipe, steps=5)).abs().max() > 1e-3
    sizes = batches(pipe)
    with batched_guidance(pipe):
        actual = tiny.generate(pipe, steps=5, callback_on_step_end=change)
    torch.testing.assert_close(actual, expected, **CLOSE)
    assert sizes == [2, 2, 2, 1, 2, 2]


def test_a_run_that_breaks_off_leaves_nothing_to_the_next(tiny, batches):
    pipe = tiny.pipeline("t2v")
    expected = tiny.generate(pipe, seed=1)
    sizes = batches(pipe)

    def stop(module, inputs):
        if len(sizes) == 1:
            raise KeyboardInterrupt

    handle = pipe.transformer.register_forward_pre_hook(stop)
    with batched_guidance(pipe):
        with pytest.raises(KeyboardInterrupt):
            tiny.generate(pipe)
        handle.remove()
        sizes.clear()
        torch.testing.assert_close(tiny.generate(pipe, seed=1), expected, **CLOSE)
    assert sizes == [2, 2, 2]
    with pytest.raises(KeyboardInterrupt), batched_guidance(pipe):
        raise KeyboardInterrupt
    assert unguided(pipe)


def test_direct_calls_of_the_transformer_are_left_alone(tiny):
    pipe = tiny.pipeline("t2v")
    inputs = tiny.inputs()
    with torch.no_grad():
        expected = pipe.transformer(**inputs)[0]
        with batched_guidance(pipe):
            assert torch.equal(pipe.transformer(**inputs)[0], expected)
            tiny.generate(pipe)
            assert torch.equal(pipe.transformer(**inputs | {"return_dict": True}).sample, expected)
            latents, timestep, text = list(inputs.values())[:3]
            assert torch.equal(pipe.transformer(latents, timestep, text, return_dict=False)[0], expected)


@pytest.mark.parametrize("scope", ["whole", "blocks"])
def test_compiled(tiny, dynamo, batches, scope):
    pipe = tiny.pipeline("t2v")
    pipe.transformer = tiny.transformer(num_layers=1)
    vmonarch.apply(pipe, VMonarchProcessor())
    expected = tiny.generate(pipe)
    if scope == "whole":
        pipe.transformer = torch.compile(pipe.transformer, backend="eager", fullgraph=True)
    else:
        pipe.transformer.compile_repeated_blocks(backend="eager", fullgraph=True)
    with batched_guidance(pipe):
        torch.testing.assert_close(tiny.generate(pipe), expected, **CLOSE)
    assert dynamo["stats"]["unique_graphs"] == 1, "the batch is of two from the first step on"
    torch.testing.assert_close(tiny.generate(pipe), expected, **CLOSE)
    assert not dynamo["graph_break"]


@pytest.mark.parametrize("offload", ["block_level", "sequential"])
def test_offloaded(tiny, batches, offload):
    pipe = tiny.applied("t2v")
    expected = tiny.generate(pipe)
    sizes = batches(pipe)
    tiny.offload(pipe.transformer, offload)
    with batched_guidance(pipe):
        torch.testing.assert_close(tiny.generate(pipe), expected, **CLOSE)
    assert sizes == [2, 2, 2]
    torch.testing.assert_close(tiny.generate(pipe), expected, **CLOSE)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["t2v-2.2", "i2v-2.1"])
@pytest.mark.parametrize("offload", ["none", "model", "sequential", "block_level", "stream"])
def test_on_the_gpu(tiny, batches, kind, offload):
    pipe = tiny.pipeline(kind).to("cuda")
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=1))
    expected = tiny.generate(pipe)
    sizes = batches(pipe)
    if offload != "none":
        tiny.offload_from_gpu(pipe, offload)
    for _ in range(2):
        with batched_guidance(pipe):
            torch.testing.assert_close(tiny.generate(pipe), expected, rtol=1e-3, atol=1e-3)
            if offload == "model":
                with pytest.raises(RuntimeError, match="block of its own"):
                    tiny.generate(pipe)
    assert sizes == [2] * 6
    torch.testing.assert_close(tiny.generate(pipe), expected, rtol=1e-3, atol=1e-3)


class Once(ModelHook):
    """Takes itself off after the first call, like the hook of group offloading with a stream."""

    def post_forward(self, module, output):
        module._diffusers_hook.remove_hook("once", recurse=False)
        return output


@pytest.mark.parametrize("another", [False, True], ids=["alone", "with-another"])
def test_a_hook_may_take_itself_off(tiny, batches, another):
    pipe = tiny.pipeline("t2v")
    expected = tiny.generate(pipe)
    hooks = HookRegistry.check_if_exists_or_initialize(pipe.transformer)
    if another:
        hooks.register_hook(ModelHook(), "stays")
    for _ in range(2):
        hooks.register_hook(Once(), "once")
        sizes = batches(pipe)
        with batched_guidance(pipe):
            for _ in range(2):
                torch.testing.assert_close(tiny.generate(pipe), expected, **CLOSE)
        assert sizes == [2] * 6
        assert torch.equal(tiny.generate(pipe), expected)
        assert sizes == [2] * 6 + [1] * 6


def test_hooks_that_a_run_replaces_are_not_undone_and_a_second_run_is_refused(tiny):
    # What `enable_model_cpu_offload` does on a GPU: hooks go and come back at the end of every run.
    pipe = tiny.pipeline("t2v")
    expected = tiny.generate(pipe)
    hook = lambda: accelerate.hooks.add_hook_to_module(pipe.transformer, accelerate.hooks.ModelHook())
    hook()
    with batched_guidance(pipe):
        torch.testing.assert_close(tiny.generate(pipe), expected, **CLOSE)
        accelerate.hooks.remove_hook_from_module(pipe.transformer)
        hook()
        forward = pipe.transformer.forward
        with pytest.raises(RuntimeError, match="forward of transformer has been replaced.*block of its own"):
            tiny.generate(pipe)
    assert pipe.transformer.forward is forward
    with batched_guidance(pipe):
        torch.testing.assert_close(tiny.generate(pipe), expected, **CLOSE)


def test_what_cannot_be_batched_is_refused(tiny):
    pipe = tiny.pipeline("t2v")
    for wrong in (pipe.transformer, None, torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match="pipe must be a Wan-family pipeline"), batched_guidance(wrong):
            pass
    with batched_guidance(pipe):
        with pytest.raises(ValueError, match="guidance of transformer is batched already"), batched_guidance(pipe):
            pass
        embeddings = {"prompt_embeds": torch.randn(1, 7, 16), "negative_prompt_embeds": torch.randn(1, 5, 16)}
        with pytest.raises(
            ValueError, match=r"encoder_hidden_states is \(1, 7, 16\) with .* \(1, 5, 16\) with the neg"
        ):
            tiny.generate(pipe, prompt=None, negative_prompt=None, **embeddings)
        pipe.encode_prompt(tiny.PROMPT, tiny.NEGATIVE)
        pipe._guidance_scale = 5.0
        with pytest.raises(NotImplementedError, match="called with a tensor fps; known are hidden_states, timestep"):
            pipe.transformer(**tiny.inputs(), fps=torch.ones(1))
        text = {"encoder_hidden_states": torch.randn(1, 226, 16)}
        pipe.transformer(**tiny.inputs() | text)
        with pytest.raises(NotImplementedError, match="attention_kwargs differs between the two calls of a step"):
            pipe.transformer(**tiny.inputs() | text, attention_kwargs={"scale": 0.5})
    pipe.transformer.compile(backend="eager")
    with pytest.raises(ValueError, match="transformer is compiled in place.*compile_repeated_blocks"):
        with batched_guidance(pipe):
            pass
    assert unguided(pipe)


def test_a_cache_that_recorded_the_wrong_answer_is_refused(tiny):
    pipe = tiny.pipeline("t2v")
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.0))

    def change(pipe, step, timestep, tensors):
        return {"negative_prompt_embeds": torch.ones(1, 512, 16)}

    with batched_guidance(pipe), pytest.raises(RuntimeError, match="together with a cache.*another encoder_hidden_st"):
        tiny.generate(pipe, callback_on_step_end=change)


def test_a_stock_pipeline_without_vmonarch_attention(tiny):
    pipe = tiny.pipeline("t2v")
    assert type(pipe) is diffusers.WanPipeline
    expected = tiny.generate(pipe)
    with batched_guidance(pipe):
        torch.testing.assert_close(tiny.generate(pipe), expected, **CLOSE)
