"""Presets: `apply` takes them by name, and says what is wrong with a name."""

from __future__ import annotations

import pytest
import torch

import vmonarch
from vmonarch import VMonarchProcessor
from vmonarch.configs.methods import resolve_method

NEAR_LOSSLESS = VMonarchProcessor(num_iterations=1, exact=None, refresh=0.28)
FAST = VMonarchProcessor(num_iterations=1, exact=None, refresh=0.16)


def test_apply_is_near_lossless_and_takes_names(tiny):
    pipe = tiny.pipeline("t2v")
    assert vmonarch.apply(pipe).processor.config == NEAR_LOSSLESS.config
    assert next(iter(vmonarch.presets())) == "near-lossless"
    for name, line in vmonarch.presets().items():
        found = vmonarch.apply(pipe, name).processor
        assert "\n" not in line and found.config == resolve_method(name).processor().config
    assert vmonarch.apply(pipe, "fast").processor.config == FAST.config
    vmonarch.apply(pipe, "fast:refresh=3")
    by_name = tiny.quickly(pipe, 4)
    vmonarch.apply(pipe, VMonarchProcessor(num_iterations=1, exact=None, refresh=3))
    assert torch.equal(tiny.quickly(pipe, 4), by_name)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("near-lossles", "processor must be one of .*near-lossless.*got 'near-lossles' .did you mean near-lossless"),
        ("vmonarch-refresh-fast:refresh=3", "processor 'vmonarch-refresh-fast' is called 'fast' now"),
        ("fast:refesh=3", "processor.refesh is no known key .did you mean refresh"),
        ("full", "processor cannot be 'full', the model's own attention, which vmonarch.restore puts back"),
        ("based", "processor cannot be 'based' with 'embedded': vmonarch.load_adapter applies adapters"),
        ("stack-fast", "processor must be an attention method, got the recipe 'stack-fast'"),
    ],
)
def test_a_name_that_is_no_preset_is_explained(name, problem, tiny):
    transformer = tiny.transformer()
    with pytest.raises(ValueError, match=problem):
        vmonarch.apply(transformer, name)
    vmonarch.restore(transformer)


def test_the_default_says_what_to_use_where_there_is_no_pipeline(tiny):
    transformer = tiny.transformer()
    vmonarch.apply(transformer)
    with pytest.raises(RuntimeError, match='no pipeline calls this transformer.* or the preset "vmonarch"'):
        tiny.run(transformer)
    vmonarch.apply(transformer, "vmonarch")
    tiny.run(transformer)
