"""Processors with a low-rank bias: exact attention and VMonarch."""

from __future__ import annotations

import copy
import json
import math
import pickle

import pytest
import torch

import vmonarch
from vmonarch import ExactBlocks, FlashBiasProcessor, LatentGrid, VMonarchProcessor
from vmonarch.bias import SpatioTemporalDecay
from vmonarch.call import Call

PROCESSORS = {
    "flash-bias": lambda bias, **options: FlashBiasProcessor(bias, **options),
    "vmonarch": lambda bias, **options: VMonarchProcessor(bias=bias, exact=ExactBlocks(band=1000), **options),
}
by_processor = pytest.mark.parametrize("make", PROCESSORS.values(), ids=PROCESSORS)


def factors(tiny, heads=1):
    generator = torch.Generator().manual_seed(0)
    tokens = math.prod(tiny.GRID)
    return tuple(torch.randn(1, tokens, heads, 2, generator=generator) for _ in range(2))


@by_processor
def test_it_is_attention_with_the_bias(tiny, make):
    bias = factors(tiny, heads=2)
    q, k, v = (torch.randn(1, math.prod(tiny.GRID), 2, 12) for _ in range(3))
    out, _ = make(bias).attention(None)(q, k, v, Call(LatentGrid(*tiny.GRID)))
    matrix = torch.einsum("bshr,bthr->bhst", *bias)
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), matrix)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


@by_processor
def test_config_keeps_what_was_learnt(make):
    decay = SpatioTemporalDecay(3, reach=(2.0, math.inf, 5.0))
    with torch.no_grad():
        decay.decay.add_(0.25)
    processor = make(decay, dense_steps=2)
    twin = type(processor)(**json.loads(json.dumps(processor.config)))
    assert torch.equal(twin.bias.decay, decay.decay) and twin.dense_steps == 2
    assert twin.config == processor.config
    for copied in (pickle.loads(pickle.dumps(processor)), copy.deepcopy(processor)):
        assert torch.equal(copied.bias.decay, decay.decay)
    # Copies of a model share what may learn.
    assert copied.bias is processor.bias


def run(tiny, bias, **options):
    model = tiny.transformer()
    vmonarch.apply(model, FlashBiasProcessor(bias))
    return tiny.run(model, **options)


BAD = {
    "none": (lambda tiny: FlashBiasProcessor(None), TypeError, "bias must be a pair of tensors .* got NoneType"),
    "number": (lambda tiny: FlashBiasProcessor(3), TypeError, "bias must be a pair of tensors .* got int"),
    "config": (lambda tiny: FlashBiasProcessor({"kind": "alibi"}), TypeError, "bias must be the arguments of .*'kind'"),
    "other-grid": (
        lambda tiny: run(tiny, factors(tiny), grid=(1, 2, 2)), ValueError, "query_factor must be .1, 4,"),
    "other-heads": (lambda tiny: run(tiny, factors(tiny, heads=5)), ValueError, "query_factor must be"),
}  # fmt: skip


@pytest.mark.parametrize("call, error, message", BAD.values(), ids=BAD)
def test_bad_input_is_named(tiny, call, error, message):
    with pytest.raises(error, match=message):
        call(tiny)
