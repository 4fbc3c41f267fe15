"""Together with the caches of diffusers (`enable_cache`), against the same reuse written out in plain torch."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from diffusers import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
)

import vmonarch
from vmonarch import VMonarchProcessor
from vmonarch.attend import Residual
from vmonarch.call import running

STEPS = 6
DENSE_STEPS = (0, 3)
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def taylor(**options):
    # diffusers' default patterns match no module of Wan.
    where = {} if options.get("use_lite_mode") else {"cache_identifiers": [r"blocks\.\d+\.attn1"]}
    return TaylorSeerCacheConfig(disable_cache_before_step=2, taylor_factors_dtype=torch.float32, **where | options)


def pyramid(pipe, every):
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=every,
        spatial_attention_timestep_skip_range=(-1, 1001),
        current_timestep_callback=lambda: float(pipe.current_timestep),
    )


def again(past, step, given):
    return past[-1][1]


def residual(past, step, given):
    return given + past[-1][1] - past[-1][2]


def residual_along_a_line(past, step, given):
    residuals = [(when, output - given) for when, output, given in past[-2:]]
    return given + along_a_line(residuals, step, given)


def along_a_line(past, step, given):
    if len(past) == 1:
        return past[-1][1]
    (before, earlier), (last, latest) = (entry[:2] for entry in past[-2:])
    return latest + (latest - earlier) * (step - last) / (last - before)


# name: (never reuses, does), what is computed anew or not, how reuse makes its output.
CACHES = {
    "first-block": (
        lambda pipe: FirstBlockCacheConfig(threshold=0.0),
        lambda pipe: FirstBlockCacheConfig(threshold=0.095),
        "tail",
        residual,
    ),
    "mag": (
        lambda pipe: MagCacheConfig(num_inference_steps=STEPS, mag_ratios=[0.0] * STEPS, threshold=0.0),
        lambda pipe: MagCacheConfig(num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS, max_skip_steps=1),
        "stack",
        residual,
    ),
    "sea": (
        lambda pipe: SeaCacheConfig(threshold=0.0),
        lambda pipe: SeaCacheConfig(threshold=100.0, max_consecutive_cached=1),
        "stack",
        residual_along_a_line,
    ),
    "taylor": (
        lambda pipe: taylor(cache_interval=1),
        lambda pipe: taylor(cache_interval=2),
        "attention",
        along_a_line,
    ),
    "taylor-lite": (
        lambda pipe: taylor(cache_interval=1, use_lite_mode=True),
        lambda pipe: taylor(cache_interval=2, use_lite_mode=True),
        "output",
        along_a_line,
    ),
    "pyramid": (lambda pipe: pyramid(pipe, 1), lambda pipe: pyramid(pipe, 2), "attention", again),
}


class Reuse(torch.nn.Module):
    """A module that is computed in some of its calls, and answers the others by what it gave before.

    Args:
        computed: whether each call is.
        predict: (step, output, input) of the calls that were, the step, the input -> output.
        calls: of one step; they know nothing of each other.
    """

    def __init__(self, module, computed, predict, calls):
        super().__init__()
        self.module, self.computed, self.predict, self.calls = module, list(computed), predict, calls
        self.past = [[] for _ in range(calls)]
        self.count = 0

    def forward(self, given, *others):
        (step, call), self.count = divmod(self.count, self.calls), self.count + 1
        if not self.computed.pop(0):
            return self.predict(self.past[call], step, given)
        output = self.module(given, *others)
        self.past[call].append((step, output, given))
        return output


class Stack(torch.nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, hidden_states, *others):
        for block in self.blocks:
            hidden_states = block(hidden_states, *others)
        return hidden_states


def reuse(model, where, *rule):
    if where == "stack":
        model.blocks = torch.nn.ModuleList([Reuse(Stack(model.blocks), *rule)])
    elif where == "tail":
        model.blocks = torch.nn.ModuleList([model.blocks[0], Reuse(Stack(model.blocks[1:]), *rule)])
    elif where == "attention":
        for block in model.blocks:
            block.attn1 = Reuse(block.attn1, *rule)
    else:
        model.proj_out = Reuse(model.proj_out, *rule)


def watch(model):
    """(whether the last block's attention is computed in each call, (call, whether exact) where it is)."""
    computed, exact = [], []
    model.register_forward_pre_hook(lambda *_: computed.append(False))

    def note(*_):
        computed[-1] = True
        call = running.now.get("call")
        exact.append((len(computed) - 1, call is not None and call.dense))

    model.blocks[-1].attn1.to_q.register_forward_hook(note)
    return computed, exact


def generate(tiny, pipe, guidance):
    return tiny.generate(pipe, steps=STEPS, guidance=1.0 if guidance == "none" else 5.0)


def three_layers(tiny):
    pipe = tiny.pipeline("t2v")
    pipe.transformer = tiny.transformer(num_layers=3)
    return pipe


@pytest.mark.parametrize("name, dense_steps", [*((name, DENSE_STEPS) for name in CACHES), ("first-block", ())])
@pytest.mark.parametrize("applied", ["before", "after"])
def test_a_cache_reuses_what_vmonarch_computed(tiny, name, dense_steps, applied):
    never, often, where, predict = CACHES[name]
    # diffusers' pyramid counts calls, not steps: the second of guidance would be given what the first computed.
    guidance = "none" if name == "pyramid" else "two-calls"
    pipe = three_layers(tiny)
    stock = generate(tiny, pipe, guidance)
    switch = lambda pipe: vmonarch.apply(pipe, VMonarchProcessor(dense_steps=dense_steps))
    plain = three_layers(tiny)
    switch(plain)
    uncached = generate(tiny, plain, guidance)

    if applied == "before":
        switch(pipe)
    pipe.transformer.enable_cache(never(pipe))
    if applied == "after":
        switch(pipe)
    assert torch.equal(generate(tiny, pipe, guidance), uncached), "a cache that is never used changes nothing"
    pipe.transformer.disable_cache()

    if applied == "after":
        vmonarch.restore(pipe)
    pipe.transformer.enable_cache(often(pipe))
    switch(pipe)
    computed, exact = watch(pipe.transformer)
    cached = generate(tiny, pipe, guidance)
    calls = 1 if guidance == "none" else 2
    assert len(computed) == calls * STEPS and set(computed[::calls]) == {False, True}
    assert all(dense == (call // calls in dense_steps) for call, dense in exact)
    assert any(dense for _, dense in exact) == bool(dense_steps)
    assert torch.equal(generate(tiny, pipe, guidance), cached), "every run begins with an empty cache"

    reuse(plain.transformer, where, computed[: calls * STEPS], predict, calls)
    torch.testing.assert_close(cached, generate(tiny, plain, guidance), **CLOSE)
    assert (cached - uncached).abs().max() > 100 * CLOSE["atol"], "the cache changes the video"

    off = [pipe.transformer.disable_cache, lambda: vmonarch.restore(pipe)]
    for step in off if applied == "before" else reversed(off):
        step()
    assert torch.equal(generate(tiny, pipe, guidance), stock)


@pytest.mark.parametrize("name, skipped", [("first-block", 2), ("mag", 3), ("sea", 3), ("taylor", 2), ("pyramid", 3)])
def test_a_refresh_that_a_cache_skips_is_made_up_for(tiny, monkeypatch, name, skipped):
    _, often, where, predict = CACHES[name]
    guidance, calls = ("none", 1) if name == "pyramid" else ("two-calls", 2)
    attention = VMonarchProcessor(refresh=[0, skipped])
    plain = three_layers(tiny)
    vmonarch.apply(plain, attention)
    uncached = generate(tiny, plain, guidance)

    pipe = three_layers(tiny)
    pipe.transformer.enable_cache(often(pipe))
    vmonarch.apply(pipe, attention)
    computed, _ = watch(pipe.transformer)
    exact, attend = [], Residual.__call__

    def note(element, *inputs):
        # Of the last layer.
        seen = exact if element.layer == 2 else []
        noted = lambda *inputs: seen.append(len(computed) - 1) or element.exact(*inputs)
        return attend(replace(element, exact=noted), *inputs)

    monkeypatch.setattr(Residual, "__call__", note)
    cached = generate(tiny, pipe, guidance)
    assert not computed[calls * skipped] and sum(computed) > len(exact), "a refresh is skipped, residuals are used"
    assert exact == [calls * step + call for step in (0, skipped + 1) for call in range(calls)]

    reuse(plain.transformer, where, computed, predict, calls)
    torch.testing.assert_close(cached, generate(tiny, plain, guidance), **CLOSE)
    assert (cached - uncached).abs().max() > 100 * CLOSE["atol"]


def test_a_pyramid_with_two_calls_a_step_never_computes_the_second(tiny):
    # Why docs/compose.md says that it is for models without guidance.
    pipe = three_layers(tiny)
    pipe.transformer.enable_cache(pyramid(pipe, 2))
    computed, _ = watch(pipe.transformer)
    generate(tiny, pipe, "two-calls")
    assert computed == [True, False] * STEPS


@pytest.mark.parametrize("name", ["mag", "taylor"])
def test_a_cache_of_two_transformers(tiny, name):
    pipe = tiny.applied("t2v-2.2", dense_steps=[2])
    uncached = generate(tiny, pipe, "two-calls")
    never, often = CACHES[name][:2]
    for config in (never, often):
        for model in (pipe.transformer, pipe.transformer_2):
            model.enable_cache(config(pipe))
        seen = [watch(model) for model in (pipe.transformer, pipe.transformer_2)]
        cached = generate(tiny, pipe, "two-calls")
        assert all(True in computed for computed, _ in seen), "both have run"
        assert (False in sum((computed for computed, _ in seen), [])) == (config is often)
        # The first transformer has two of the steps.
        assert {call // 2 + 2 * index for index, (_, exact) in enumerate(seen) for call, dense in exact if dense} == {2}
        assert torch.equal(cached, uncached) == (config is never)
        for model in (pipe.transformer, pipe.transformer_2):
            model.disable_cache()


@pytest.mark.parametrize("name", ["first-block", "mag", "sea"])
def test_blocks_under_a_cache_are_compiled_in_parts(tiny, dynamo, name):
    pipe = three_layers(tiny)
    vmonarch.apply(pipe, VMonarchProcessor())
    pipe.transformer.enable_cache(CACHES[name][1](pipe))
    expected = generate(tiny, pipe, "two-calls")
    for block in pipe.transformer.blocks:
        for part in (block.attn1, block.attn2, block.ffn):
            part.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(generate(tiny, pipe, "two-calls"), expected)
    assert dynamo["stats"]["unique_graphs"] == 3 and not dynamo["graph_break"]


def test_a_copy_with_a_cache_of_its_own(tiny):
    pipe = three_layers(tiny)
    vmonarch.apply(pipe, VMonarchProcessor())
    expected = generate(tiny, pipe, "two-calls")
    twin = copy.deepcopy(pipe)
    twin.transformer.enable_cache(CACHES["mag"][1](twin))
    assert not torch.equal(generate(tiny, twin, "two-calls"), expected)
    assert torch.equal(generate(tiny, pipe, "two-calls"), expected)
