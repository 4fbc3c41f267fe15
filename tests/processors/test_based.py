"""Based as a processor: what its layers compute, how it starts, and that what it learns belongs to the transformer."""

from __future__ import annotations

import copy
import json
import math
import pickle

import diffusers
import pytest
import torch
import torch.nn.functional as F

import vmonarch
from vmonarch import BasedProcessor, VMonarchProcessor, taylor_attention, window_attention
from vmonarch.based import LinearPart, frame_decay, initial_projection
from vmonarch.based_options import resolve_layers
from vmonarch.call import Call, running

EVERYTHING = (9, 7, 13)  # over every grid below
ATTENTION = "blocks.0.attn1.processor"
GRIDS = [(1, 1, 1), (1, 3, 5), (5, 1, 7), (3, 2, 3)]


def based(**options):
    return BasedProcessor(**{"feature_dim": 8, "window": (3, 3, 3)} | options)


def applied(tiny, grid=None, **options):
    model = tiny.transformer()
    vmonarch.apply(model, based(**options))
    return model


def randomise(model, std=0.3):
    """As if it had learnt something."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".processor." in name:
                parameter += std * torch.randn(parameter.shape, generator=generator)
    return model


def learnt(model):
    return {name: parameter for name, parameter in model.named_parameters() if ".processor." in name}


# ------------------------------------------------------------------------------------------------ what layers compute


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("layers", ["full", "window"])
def test_full_layers_and_windows_over_everything_are_the_stock_attention(tiny, layers, grid):
    model = tiny.transformer()
    expected = tiny.run(model, grid, batch=2)
    vmonarch.apply(model, based(layers=layers, window=EVERYTHING))
    torch.testing.assert_close(tiny.run(model, grid, batch=2), expected, rtol=1e-5, atol=1e-5)
    assert not learnt(model)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("decay", [False, True], ids=["no-decay", "decay"])
@pytest.mark.parametrize("layers", ["linear", "window", "both"])
def test_attention_layers_are_what_their_parts_give(tiny, layers, decay, grid):
    model = randomise(applied(tiny, layers=layers, decay=decay).double())
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


@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_convolution_layers_follow_the_papers_formula(tiny, grid, fused, monkeypatch):
    model = randomise(applied(tiny, layers="conv").double())
    attn = model.blocks[0].attn1
    T, Y, X = grid
    u = torch.randn(2, T, Y, X, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    filters = attn.processor.convolution.weight[:, 0]  # [C, 3, 3, 3]
    filtered = torch.zeros_like(u)
    padded = F.pad(u, (0, 0, 1, 1, 1, 1, 1, 1))
    for t in range(3):
        for y in range(3):
            for x in range(3):
                filtered += filters[:, t, y, x] * padded[:, t : t + T, y : y + Y, x : x + X]
    gate = filtered.flatten(1, 3) @ attn.to_q.weight.T + attn.to_q.bias
    value = u.flatten(1, 3) @ attn.to_v.weight.T + attn.to_v.bias
    expected = (value * gate * torch.sigmoid(gate)) @ attn.to_out[0].weight.T + attn.to_out[0].bias
    if fused:
        attn.fuse_projections()
    monkeypatch.setitem(running.now, "call", Call(vmonarch.LatentGrid(*grid)))
    torch.testing.assert_close(attn(u.flatten(1, 3)), expected)


def test_filters_begin_as_identity(tiny):
    convolution = applied(tiny, layers="conv").blocks[1].attn1.processor.convolution
    u = torch.randn(2, 30, 24)
    assert torch.equal(convolution(u, vmonarch.LatentGrid(2, 3, 5)), u)


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


def test_a_mixture_gives_every_layer_its_own(tiny):
    model = tiny.transformer(num_layers=5)
    vmonarch.apply(model, based(layers=["conv", "linear", "full", "both", "window"]))
    kinds = [getattr(block.attn1.processor, "kind", "full") for block in model.blocks]
    assert kinds == ["conv", "linear", "full", "both", "window"]
    assert {name.split(".")[1] for name in learnt(model)} == {"0", "1", "3"}
    assert torch.isfinite(tiny.run(model)).all()


@pytest.mark.parametrize(("blocks", "share"), [(27, 5), (36, 7), (30, 6), (6, 1), (2, 1), (40, 8)])
def test_the_papers_mixture(blocks, share):
    kinds = resolve_layers("based", blocks)
    assert [kinds.count(kind) for kind in ("linear", "window", "conv")] == [share, share, blocks - 2 * share]
    if blocks == 30:
        assert [n for n, kind in enumerate(kinds) if kind == "linear"] == [1, 6, 11, 16, 21, 26]
        assert [n for n, kind in enumerate(kinds) if kind == "window"] == [3, 8, 13, 18, 23, 28]
    # Spread over depth: neither kind is missing from a half.
    if share > 1:
        for half in (kinds[: blocks // 2], kinds[blocks // 2 :]):
            assert {"linear", "window", "conv"} == set(half)


def test_control_blocks_follow_the_block_that_they_feed(tiny):
    model = tiny.vace_transformer()
    vmonarch.apply(model, based(layers=["window", "full", "conv"]))
    kinds = [getattr(block.attn1.processor, "kind", "full") for block in model.vace_blocks]
    assert kinds == ["window", "conv"]
    with torch.no_grad():
        out = model(**tiny.inputs(), control_hidden_states=torch.randn(1, 96, 3, 4, 6))[0]
    assert torch.isfinite(out).all()


def test_dense_layers_and_dense_steps(tiny):
    pipe = tiny.pipeline("t2v")
    stock = tiny.generate(pipe)
    vmonarch.apply(pipe, based(dense_steps=1.0))
    assert torch.equal(tiny.generate(pipe), stock)
    vmonarch.restore(pipe)
    vmonarch.apply(pipe, based(dense_layers=[0]))
    assert {name.split(".")[1] for name in learnt(pipe.transformer)} == {"1"}
    some = tiny.generate(pipe)
    vmonarch.restore(pipe)
    vmonarch.apply(pipe, based(layers=["full", "both"]))
    assert torch.equal(tiny.generate(pipe), some) and not torch.equal(some, stock)


# ----------------------------------------------------------------------------------------------------- how it starts


def test_logits_are_right_on_average_at_first():
    heads, D, features = 20_000, 24, 8
    projection = initial_projection(0, heads, D, features)
    q, k = torch.randn(2, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    s = (projection @ q * (projection @ k)).sum(-1) / math.sqrt(features)  # [heads]
    error = s.std() / math.sqrt(heads)
    assert abs(s.mean() - q @ k / math.sqrt(D)) < 4 * error and error < 0.05 * s.std()
    assert abs(q @ k / math.sqrt(D)) > 8 * error, "the test must tell the right average from 0"


def test_projections_are_orthonormal_shared_by_query_and_key_and_independent_otherwise(tiny):
    model = applied(tiny)
    parts = [block.attn1.processor.linear for block in model.blocks]
    for part in parts:
        assert torch.equal(part.query_weight, part.key_weight) and part.query_weight is not part.key_weight
        gram = part.query_weight @ part.query_weight.mT
        torch.testing.assert_close(gram, torch.eye(8).expand(2, 8, 8) * math.sqrt(12 / 8), rtol=1e-5, atol=1e-5)
        assert torch.equal(part.log_weight, torch.zeros(2))
    weights = [part.query_weight[h] for part in parts for h in range(2)]
    assert all((a - b).abs().max() > 0.1 for n, a in enumerate(weights) for b in weights[:n])


@pytest.mark.parametrize("layers", ["both", "conv"])
def test_what_was_applied_in_inference_mode_learns(tiny, layers):
    model = tiny.transformer()
    with torch.inference_mode():
        vmonarch.apply(model, based(layers=layers))
    model(**tiny.inputs())[0].sum().backward()
    assert all(parameter.grad is not None for parameter in learnt(model).values())


def test_it_starts_the_same_every_time_and_draws_no_random_number(tiny):
    torch.manual_seed(5)
    first = applied(tiny)
    torch.manual_seed(6)
    state = torch.get_rng_state()
    second = applied(tiny)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, a), b in zip(learnt(first).items(), learnt(second).values(), strict=True):
        assert torch.equal(a, b), name


# ----------------------------------------------------------------------- parameters that belong to the transformer


def test_what_it_learns_is_the_transformers(tiny):
    model = tiny.transformer()
    before = set(dict(model.named_parameters()))
    vmonarch.apply(model, based(decay=True))
    parameters = learnt(model)
    assert set(dict(model.named_parameters())) - before == set(parameters)
    assert {f"{ATTENTION}.linear.{name}" for name in ("query_weight", "key_weight", "log_weight", "log_rate")} == {
        name for name in parameters if name.startswith(ATTENTION)
    }
    assert set(parameters) <= set(model.state_dict()) and all(p.requires_grad for p in parameters.values())
    assert parameters[f"{ATTENTION}.linear.query_weight"].shape == (2, 8, 12)
    vmonarch.restore(model)
    assert set(dict(model.named_parameters())) == before == set(model.state_dict())


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_have_parameters_of_their_own(tiny, way):
    model = randomise(applied(tiny, layers=["both", "conv"]))
    expected = tiny.run(model)
    twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert torch.equal(tiny.run(twin), expected)
    randomise(twin)
    twin.blocks[0].attn1.processor.register_forward_hook(lambda *_: None)
    assert not torch.equal(tiny.run(twin), expected) and torch.equal(tiny.run(model), expected)
    assert not model.blocks[0].attn1.processor._forward_hooks
    vmonarch.restore(twin)
    assert learnt(model) and not learnt(twin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_parameters_take_the_dtype_of_the_module_and_move_with_it(tiny, dtype):
    late, early = tiny.transformer(), applied(tiny, decay=True)
    late.to(dtype)
    vmonarch.apply(late, based(decay=True))
    early.to(dtype)
    inputs = tiny.inputs(dtype=dtype)
    assert {parameter.dtype for model in (late, early) for parameter in learnt(model).values()} == {dtype}
    with torch.no_grad():
        outputs = [model(**inputs)[0] for model in (late, early)]
    assert torch.isfinite(outputs[0]).all()
    torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)
    assert all(parameter.device.type == "meta" for parameter in learnt(late.to("meta")).values())


@pytest.mark.parametrize("layers", ["both", "conv"])
def test_parameters_in_float32_train_a_model_in_bfloat16(tiny, layers):
    model = applied(tiny, layers=layers).bfloat16()
    for parameter in learnt(model).values():
        parameter.data = parameter.data.float()
    model(**tiny.inputs(dtype=torch.bfloat16))[0].float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 and (p.grad != 0).any() for p in learnt(model).values())


@pytest.mark.parametrize("layers", ["linear", "both", "conv"])
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
    assert seen == ([] if layers == "conv" else [(torch.bfloat16, False)] * 2)


def set_one_by_one(model, processor):
    for module in reversed(list(model.modules())):
        if hasattr(module, "set_processor"):
            module.set_processor(processor)


REPLACED = {
    "for-all": lambda model: model.set_attn_processor(VMonarchProcessor()),
    "stock": lambda model: model.set_attn_processor(diffusers.models.transformers.transformer_wan.WanAttnProcessor()),
    "based": lambda model: model.set_attn_processor(based()),
    "one-by-one": lambda model: set_one_by_one(model, VMonarchProcessor()),
}


@pytest.mark.parametrize("twin", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("way", REPLACED)
def test_what_was_learnt_is_not_replaced_unasked(tiny, way, twin):
    # Of layers that learn nothing, too: they belong to those that do.
    first = applied(tiny, layers=["full", "both"])
    model = randomise(twin(first))
    expected, before = tiny.run(model), dict(model.attn_processors)
    with pytest.raises(ValueError, match=r"would lose.*save_adapter.*vmonarch.restore"):
        REPLACED[way](model)
    with pytest.raises(TypeError, match="torch.nn.Module or None expected"):
        model.blocks[1].attn1.processor = VMonarchProcessor()
    assert model.attn_processors == before and torch.equal(tiny.run(model), expected)
    model.set_attn_processor(before)
    vmonarch.restore(model)
    if model is not first:
        with pytest.raises(ValueError, match="would lose"):
            REPLACED[way](first)
    REPLACED[way](model)
    assert bool(learnt(model)) == (way == "based")
    assert len(learnt(first)) == (len(learnt(model)) if model is first else 3)


@pytest.mark.parametrize("second", [based(), VMonarchProcessor()], ids=["based", "vmonarch"])
def test_applying_on_top_of_learnt_parameters_is_refused_and_changes_nothing(tiny, second):
    model = randomise(applied(tiny))
    expected = tiny.run(model)
    with pytest.raises(ValueError, match="transformer has a processor with parameters.*save_adapter.*vmonarch.restore"):
        vmonarch.apply(model, second)
    assert torch.equal(tiny.run(model), expected)
    vmonarch.restore(model)
    vmonarch.apply(model, second)
    assert not torch.equal(tiny.run(model), expected)


def test_without_parameters_it_is_replaced_as_any_other(tiny):
    model = applied(tiny, layers="window")
    vmonarch.apply(model, VMonarchProcessor())
    assert isinstance(model.blocks[0].attn1.processor.spec, VMonarchProcessor)


# ---------------------------------------------------------------------------------- together with torch and diffusers


@pytest.mark.parametrize("layers", ["linear", "window", "both", "conv"])
def test_compiled_whole_without_graph_break(tiny, dynamo, layers):
    model = tiny.transformer(num_layers=1)
    vmonarch.apply(model, based(layers=layers, decay=True))
    tiny.check_one_graph(model, dynamo, whole=True)


def test_compiled_repeated_blocks_share_one_graph(tiny, dynamo):
    model = tiny.transformer(num_layers=4)
    vmonarch.apply(model, based())
    tiny.check_one_graph(model, dynamo)


def gradients(model, inputs):
    model.train()
    model.zero_grad()
    output = model(**inputs)[0]
    (output * output.detach().cos()).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in learnt(model).items()}


@pytest.mark.parametrize("layers", ["both", "conv"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradient_checkpointing_gives_the_same_gradients(tiny, dynamo, layers, compiled):
    model = randomise(applied(tiny, layers=layers, decay=True))
    inputs = tiny.inputs(batch=2)
    expected = gradients(model, inputs)
    assert all((gradient != 0).any() for gradient in expected.values()) and expected
    model.enable_gradient_checkpointing()
    if compiled:
        model.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    for name, gradient in gradients(model, inputs).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offload", ["block_level", "leaf_level", "sequential"])
def test_offloading_moves_what_it_learnt(tiny, offload):
    pipe = tiny.pipeline("t2v")
    vmonarch.apply(pipe, based(layers=["both", "conv"], decay=True))
    randomise(pipe.transformer)
    expected = tiny.generate(pipe)
    tiny.offload(pipe.transformer, offload)
    weight = pipe.transformer.blocks[0].attn1.processor.linear.query_weight
    assert (weight.device.type == "meta") == (offload == "sequential")
    assert torch.equal(tiny.generate(pipe), expected)


@pytest.mark.parametrize("offload", ["block_level", "leaf_level", "sequential"])
def test_offloaded_weights_are_refused_instead_of_left_behind(tiny, offload):
    model = tiny.transformer()
    tiny.offload(model, offload)
    with pytest.raises(ValueError, match="apply.* before"):
        vmonarch.apply(model, based())
    assert not learnt(model)
    vmonarch.apply(model, VMonarchProcessor())


@pytest.mark.gpu
@pytest.mark.parametrize("layers", ["linear", "window", "both", "conv"])
def test_the_gpu_computes_what_the_cpu_does(tiny, layers):
    model = randomise(applied(tiny, layers=layers, decay=True))
    expected = tiny.run(model, batch=2)
    inputs = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in tiny.inputs(batch=2).items()}
    with torch.no_grad():
        actual = model.cuda()(**inputs)[0]
    assert all(parameter.is_cuda for parameter in learnt(model).values())
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-3, atol=1e-3)


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "options",
    [{}, {"layers": ["both", "conv"], "decay": True, "grid": (3, 2, 3), "dense_steps": 0.25, "window": [1, 3, 5]}],
    ids=["defaults", "all"],
)
def test_config_goes_through_json(options):
    processor = BasedProcessor(**options)
    again = BasedProcessor.from_config(json.loads(json.dumps(processor.config)))
    assert again.config == processor.config and repr(again) == repr(processor)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_dim": 13}, "feature_dim=13, but heads have only 12 dimensions"),
        ({"layers": ["both"] * 3}, "layers has 3 entries, but there are 2 transformer blocks"),
        ({"layers": "based", "num_layers": 1}, "layers='based' needs at least 2 transformer blocks"),
    ],
    ids=["feature_dim", "layers", "mixture"],
)
def test_options_that_do_not_fit_the_transformer_change_nothing(tiny, options, message):
    options = dict(options)
    model = tiny.transformer(num_layers=options.pop("num_layers", 2))
    before, names = tiny.run(model), set(model.state_dict())
    with pytest.raises(ValueError, match=message):
        vmonarch.apply(model, based(**options))
    assert torch.equal(tiny.run(model), before) and set(model.state_dict()) == names
    assert "_vmonarch_processor" not in model.config


def test_weights_on_the_meta_device_are_refused(tiny):
    with pytest.raises(ValueError, match="weights on the meta device"):
        vmonarch.apply(tiny.transformer().to("meta"), based())


def test_the_kernels_are_asked_for_by_name(tiny):
    model = applied(tiny, layers="linear", implementation="triton").bfloat16()
    part = model.blocks[0].attn1.processor.linear
    assert isinstance(part, LinearPart)
    states = torch.randn(1, 6, 2, 12).bfloat16()
    # On the CPU in bfloat16 there are none: nothing falls back in silence.
    with pytest.raises(NotImplementedError, match="taylor_attention with implementation=.triton"):
        part(states, states, states, 1)
