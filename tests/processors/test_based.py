"""Based as a processor: what its layers compute, how it starts, and that what it learns belongs to the transformer."""

from __future__ import annotations

import copy
import math
import pickle

import diffusers
import pytest
import torch

import vmonarch
from vmonarch import BasedProcessor, VMonarchProcessor, taylor_attention, window_attention
from vmonarch.based import frame_decay, initial_projection
from vmonarch.call import Call

EVERYTHING = (9, 7, 13)  # over every grid below
GRIDS = [(1, 1, 1), (1, 3, 5), (5, 1, 7), (3, 2, 3)]


def based(**options):
    return BasedProcessor(**{"feature_dim": 8, "window": (3, 3, 3)} | options)


def applied(tiny, **options):
    model = tiny.transformer()
    vmonarch.apply(model, based(**options))
    return model


def learnt(model):
    return {name: parameter for name, parameter in model.named_parameters() if ".processor." in name}


@pytest.mark.parametrize("grid", [GRIDS[0], GRIDS[-1]], ids=str)
@pytest.mark.parametrize("layers, decay", [("linear", False), ("window", False), ("both", False), ("both", True)])
def test_attention_layers_are_what_their_parts_give(tiny, layers, decay, grid):
    model = tiny.jitter(applied(tiny, layers=layers, decay=decay).double())
    processor = model.blocks[0].attn1.processor
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, math.prod(grid), 2, 12, generator=generator, dtype=torch.float64) for _ in range(3))
    with torch.no_grad():
        actual, _ = processor.attend(q, k, v, Call(vmonarch.LatentGrid(*grid)))
        near, near_lse = window_attention(q, k, v, window=(3, 3, 3), grid=grid, return_lse=True)
        if layers == "window":
            assert processor.linear is None
            torch.testing.assert_close(actual, near)
            return
        linear = processor.linear
        fq, fk = (torch.einsum("bshd,hfd->bhsf", x, w) for x, w in ((q, linear.query_weight), (k, linear.key_weight)))
        s = fq @ fk.mT / math.sqrt(8)
        weights = 1 + s + s**2 / 2
        if decay:
            frame = torch.arange(math.prod(grid)) // (grid[1] * grid[2])
            weights = weights * torch.exp(-linear.log_rate.exp()[:, None, None] * (frame[:, None] - frame).abs())
        if layers == "both":
            weights = weights * linear.log_weight.exp()[:, None, None]
        numerator, total = weights @ v.transpose(1, 2), weights.sum(-1, keepdim=True)
        if layers == "both":
            near_weight = near_lse.exp().unsqueeze(-1)
            numerator, total = numerator + near_weight * near.transpose(1, 2), total + near_weight
    # The rates are learnt in float32 at least, the decay is computed in the wider of the two.
    torch.testing.assert_close(actual, (numerator / total).transpose(1, 2), rtol=1e-6, atol=1e-7)


def test_a_fast_decay_leaves_a_frame_to_itself():
    weights = frame_decay(torch.tensor([-100.0, 0.0, 5.0]), 4)
    distance = (torch.arange(4)[:, None] - torch.arange(4)).abs()
    torch.testing.assert_close(weights[0], torch.ones(4, 4))
    torch.testing.assert_close(weights[1], torch.exp(-distance.float()))
    assert torch.equal(weights[2] > 1e-9, distance == 0)
    assert frame_decay(torch.zeros(1, dtype=torch.bfloat16), 2).dtype == torch.float32


def test_log_weights_turn_the_linear_part_off_and_the_window_down(tiny):
    model = tiny.transformer()
    stock = tiny.run(model)
    vmonarch.apply(model, based(window=EVERYTHING))
    assert not torch.allclose(tiny.run(model), stock, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        for block in model.blocks:
            block.attn1.processor.linear.log_weight.fill_(-100.0)
    torch.testing.assert_close(tiny.run(model), stock, rtol=1e-5, atol=1e-5)
    linear = applied(tiny, layers="linear")
    with torch.no_grad():
        for block in model.blocks:
            block.attn1.processor.linear.log_weight.fill_(100.0)
    torch.testing.assert_close(tiny.run(model), tiny.run(linear), rtol=1e-5, atol=1e-5)


def test_logits_are_right_on_average_at_first():
    heads, D, features = 20_000, 24, 8
    projection = initial_projection(0, heads, D, features)
    q, k = torch.randn(2, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    s = (projection @ q * (projection @ k)).sum(-1) / math.sqrt(features)  # [heads]
    error = s.std() / math.sqrt(heads)
    assert abs(s.mean() - q @ k / math.sqrt(D)) < 4 * error and error < 0.05 * s.std()
    assert abs(q @ k / math.sqrt(D)) > 8 * error, "the test must tell the right average from 0"


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_have_parameters_of_their_own(tiny, way):
    model = tiny.jitter(applied(tiny, layers=["both", "window"]))
    expected = tiny.run(model)
    twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert torch.equal(tiny.run(twin), expected)
    tiny.jitter(twin)
    twin.blocks[0].attn1.processor.register_forward_hook(lambda *_: None)
    assert not torch.equal(tiny.run(twin), expected) and torch.equal(tiny.run(model), expected)
    assert not model.blocks[0].attn1.processor._forward_hooks
    vmonarch.restore(twin)
    assert learnt(model) and not learnt(twin)


@pytest.mark.parametrize("layers", ["linear", "both"])
def test_autocast_keeps_the_sums_in_float32(tiny, monkeypatch, layers):
    model = applied(tiny, layers=layers)
    seen = []

    def record(query, key, value, **options):
        result = taylor_attention(query, key, value, **options)
        seen.append((query.dtype, torch.is_autocast_enabled("cpu")))
        return result

    monkeypatch.setattr("vmonarch.based.taylor_attention", record)
    expected = tiny.run(model)
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        actual = tiny.run(model)
    torch.testing.assert_close(actual.float(), expected, rtol=0.05, atol=0.05)
    assert seen == [(torch.bfloat16, False)] * 2


REPLACED = {
    "for-all": VMonarchProcessor,
    "stock": lambda: diffusers.models.transformers.transformer_wan.WanAttnProcessor(),
    "based": based,
}


@pytest.mark.parametrize("way", REPLACED)
def test_what_was_learnt_is_not_replaced_unasked(tiny, way):
    # Of layers that learn nothing, too: they belong to those that do.
    model = tiny.jitter(applied(tiny, layers=["full", "both"]))
    expected, before = tiny.run(model), dict(model.attn_processors)
    with pytest.raises(ValueError, match=r"would lose.*save_adapter.*vmonarch.restore"):
        model.set_attn_processor(REPLACED[way]())
    assert model.attn_processors == before and torch.equal(tiny.run(model), expected)
    model.set_attn_processor(before)
    vmonarch.restore(model)
    model.set_attn_processor(REPLACED[way]())
    assert bool(learnt(model)) == (way == "based")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_dim": 13}, "feature_dim=13, but heads have only 12 dimensions"),
        ({"layers": ["both"] * 3}, "layers has 3 entries, but there are 2 transformer blocks"),
    ],
    ids=["feature_dim", "layers"],
)
def test_options_that_do_not_fit_the_transformer_change_nothing(tiny, options, message):
    model = tiny.transformer()
    before, names = tiny.run(model), set(model.state_dict())
    with pytest.raises(ValueError, match=message):
        vmonarch.apply(model, based(**options))
    assert torch.equal(tiny.run(model), before) and set(model.state_dict()) == names
    assert "_vmonarch_processor" not in model.config
