"""Transformers beyond the Wan family: what is around the softmax stays the model's own, and other tokens stay exact."""

import copy
import math
import pickle

import diffusers
import pytest
import tiny_pipelines
import torch
from tiny_families import FAMILIES, GRID, SHORT, first, raster
from torch.utils._pytree import tree_map_only

import vmonarch
from vmonarch import (
    AttentionPlan,
    BasedProcessor,
    ExactBlocks,
    FlashBiasProcessor,
    Refresh,
    TwoResolutionProcessor,
    VMonarchProcessor,
    families,
    vmonarch_attention,
)
from vmonarch.attend import Exact
from vmonarch.base import FullAttentionProcessor
from vmonarch.bias import SpatioTemporalDecay
from vmonarch.borrowed import Borrowed, _softmax, borrow
from vmonarch.call import Call, running
from vmonarch.families import known_family
from vmonarch.grid import LatentGrid
from vmonarch.installation import own_processors
from vmonarch.residuals import same_values

EVERYTHING = ExactBlocks(band=100)
each_family = pytest.mark.parametrize("name", FAMILIES)


def run(model, inputs):
    with torch.no_grad():
        return first(model(**inputs))


def made(name):
    return FAMILIES[name].make(), FAMILIES[name].call()


def error(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.fixture
def calls(monkeypatch):
    """(processor, query, key, value, key_mask, out) of every joint attention."""
    found, attend = [], Borrowed.attend_joint

    def noted(self, query, key, value, call):
        out = attend(self, query, key, value, call)
        found.append((self, query, key, value, call.key_mask, out))
        return out

    monkeypatch.setattr(Borrowed, "attend_joint", noted)
    return found


def test_every_family_is_tested():
    beyond_wan = {name for name, family in families.FAMILIES.items() if not family.own}
    assert {case.model for case in FAMILIES.values()} == beyond_wan
    assert all(hasattr(diffusers, name) for name in families.FAMILIES)


@each_family
def test_with_all_blocks_exact_the_model_is_the_stock_one(name):
    case, grid = FAMILIES[name], (5, 7, 3)
    model, inputs = case.make(), case.call(grid)
    expected = run(model, inputs)
    with vmonarch.apply(model, VMonarchProcessor(exact=EVERYTHING)):
        assert error(run(model, inputs), expected) < 1e-5
    with vmonarch.apply(model, FullAttentionProcessor()):
        assert error(run(model, inputs), expected) < 1e-5
    # Otherwise the above would show nothing.
    with vmonarch.apply(model, VMonarchProcessor()):
        assert error(run(model, inputs), expected) > 1e-4
        assert vmonarch.report(model).grid == grid


def dense_joint_attention(query, key, value, key_mask, grid, before):
    """Joint VMonarch attention in float64 by its whole map, row for row."""
    query, key, value = (x.double() for x in (query, key, value))
    B, S, H, D = query.shape
    tokens = grid[0] * grid[1] * grid[2]
    video = torch.arange(before, before + tokens)
    others = torch.cat([torch.arange(before), torch.arange(before + tokens, S)])
    logits = torch.einsum("bqhd,bkhd->bhqk", query, key) * D**-0.5
    if key_mask is not None:
        logits = logits.masked_fill(~key_mask[:, None, None], -torch.inf)
    weights = logits.softmax(-1)
    identity = torch.eye(tokens, dtype=torch.double)[None, :, None].expand(B, tokens, H, tokens)
    monarch, lse = vmonarch_attention(
        query[:, video], key[:, video], identity, grid=grid, return_lse=True, implementation="torch"
    )
    unnormalised = torch.zeros(B, H, tokens, S, dtype=torch.double)
    unnormalised[..., video] = monarch.transpose(1, 2) * lse.exp()[..., None]
    unnormalised[..., others] = logits[:, :, video][..., others].exp()
    weights[:, :, video] = unnormalised / unnormalised.sum(-1, keepdim=True)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value)


@each_family
def test_video_rows_are_monarch_and_exact_rows_in_one_softmax(name, calls):
    case = FAMILIES[name]
    model = case.make()
    vmonarch.apply(model, VMonarchProcessor())
    run(model, case.call())
    assert len({id(processor) for processor, *_ in calls}) == case.modules
    for processor, query, key, value, key_mask, out in calls:
        grid = (processor.videos * GRID[0], *GRID[1:])
        # The decoder's blocks of Motif have no text.
        before = 0 if processor.videos > 1 else case.before
        expected = dense_joint_attention(query, key, value, key_mask, grid, before)
        assert error(out.double(), expected) < 1e-5


@each_family
def test_only_the_self_attention_of_the_video_is_replaced(name, calls):
    case = FAMILIES[name]
    model = case.make()
    before = {name: module.processor for name, module in model.named_modules() if hasattr(module, "processor")}
    vmonarch.apply(model, VMonarchProcessor())
    replaced = {name for name, processor in before.items() if model.get_submodule(name).processor is not processor}
    assert len(replaced) == len(known_family(model).layers(model)) == case.modules
    foreign = ("audio", "refiner", "text_transformer", "attn2", "cross", "video_to", "to_video")
    assert not [name for name in replaced if any(part in name for part in foreign)]
    assert {attn for attn, _, _ in own_processors(model)} == {model.get_submodule(name) for name in replaced}
    run(model, case.call())
    # A sequence is the video, twice in some blocks of Motif, and the others.
    lengths = {(query.shape[1], processor.videos) for processor, query, *_ in calls}
    video = GRID[0] * GRID[1] * GRID[2]
    whole = video + case.before + case.after
    if name == "mochi":
        assert {length for length, _ in lengths} == {whole, whole - case.after + SHORT}
    else:
        assert lengths <= {(whole, 1), (2 * video, 2)}


@each_family
def test_dense_layers_are_the_models_own(name):
    model, inputs = made(name)
    stock = run(model, inputs)
    with vmonarch.apply(model, VMonarchProcessor(dense_layers=1.0)):
        assert torch.equal(run(model, inputs), stock)
    with vmonarch.apply(model, VMonarchProcessor(dense_layers=1)):
        assert error(run(model, inputs), stock) > 1e-4


@each_family
def test_it_is_restored_copied_and_pickled(name):
    model, inputs = made(name)
    stock = run(model, inputs)
    processors = {name: module.processor for name, module in model.named_modules() if hasattr(module, "processor")}
    vmonarch.apply(model, VMonarchProcessor())
    ours = run(model, inputs)
    twin, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert torch.equal(run(twin, inputs), ours)
    assert torch.equal(run(pickled, inputs), ours)
    vmonarch.restore(model)
    assert torch.equal(run(model, inputs), stock)
    assert all(model.get_submodule(name).processor is processor for name, processor in processors.items())
    assert "enable_parallelism" not in vars(model)
    # The copies have processors of their own.
    assert torch.equal(run(twin, inputs), ours)
    vmonarch.restore(twin)
    vmonarch.restore(pickled)
    assert torch.equal(run(twin, inputs), stock) and torch.equal(run(pickled, inputs), stock)


@pytest.mark.parametrize(
    "name", [name for name, case in FAMILIES.items() if hasattr(getattr(diffusers, case.model), "set_attn_processor")]
)
def test_set_attn_processor_applies(name):
    model, inputs = made(name)
    stock = run(model, inputs)
    with vmonarch.apply(model, VMonarchProcessor()):
        expected = run(model, inputs)
    model.set_attn_processor(VMonarchProcessor())
    assert torch.equal(run(model, inputs), expected)
    vmonarch.restore(model)
    assert torch.equal(run(model, inputs), stock)


@pytest.mark.parametrize("name", ["hunyuan", "cogvideox", "kandinsky6"])
def test_every_kind_of_attention_but_linear_serves_them(name):
    model, inputs = made(name)
    stock = run(model, inputs)
    layers = len(known_family(model).layers(model))
    plans = [
        AttentionPlan({"half": options, "full": None}, {"transformer": [["half", "full"]] * layers})
        for options in ({"num_iterations": 1}, {"exact": {"band": 9}})
    ]
    results = {}
    for label, processor in {
        "two": TwoResolutionProcessor(share=0.2),
        "plan": VMonarchProcessor(plan=plans[0]),
        "lite": VMonarchProcessor(coarse=2, row_share=0.25, last_l_update=False),
        "bias": VMonarchProcessor(bias=SpatioTemporalDecay(2)),
        "flash-bias": FlashBiasProcessor(SpatioTemporalDecay(2)),
        "biased-exact": VMonarchProcessor(bias=SpatioTemporalDecay(2), exact=EVERYTHING),
        "all-two": TwoResolutionProcessor(share=1.0),
        "all-plan": VMonarchProcessor(plan=plans[1]),
    }.items():
        with vmonarch.apply(model, processor):
            results[label] = run(model, inputs)
    for label in ("two", "plan", "lite", "bias", "flash-bias"):
        assert error(results[label], stock) > 1e-4, label
    assert error(results["all-two"], stock) < 1e-5
    assert error(results["all-plan"], stock) < 1e-5
    assert error(results["biased-exact"], results["flash-bias"]) < 1e-5
    with pytest.raises(ValueError, match="BasedProcessor .*Wan"):
        vmonarch.apply(model, BasedProcessor())
    assert torch.equal(run(model, inputs), stock)


@pytest.mark.parametrize("name", ["hunyuan", "ltx2"])
def test_gradients_are_those_of_the_stock_model_with_and_without_checkpointing(name):
    case, found = FAMILIES[name], {}
    # As many tokens in both: nothing but the call tells them apart.
    calls = case.call(), case.call((4, 3, 6))
    for label in ("stock", "exact", "exact checkpointed", "ours", "ours checkpointed"):
        model = case.make().train()
        if label != "stock":
            vmonarch.apply(model, VMonarchProcessor(exact=EVERYTHING if "exact" in label else None))
        if "checkpointed" in label:
            model.enable_gradient_checkpointing()
        sum(first(model(**inputs)).square().sum() for inputs in calls).backward()
        found[label] = known_family(model).layers(model)[0][1].to_q.weight.grad
    assert error(found["exact"], found["stock"]) < 1e-5
    assert torch.equal(found["exact checkpointed"], found["exact"])
    assert torch.equal(found["ours checkpointed"], found["ours"])


def test_compiled_blocks_take_several_sizes():
    torch._dynamo.reset()
    # Nothing is beside its video.
    case = FAMILIES["ltx"]
    model, calls = case.make(num_layers=1), [case.call(grid) for grid in (GRID, (2, 3, 4))]
    vmonarch.apply(model, VMonarchProcessor())
    expected = [run(model, inputs) for inputs in calls]
    model.compile_repeated_blocks(fullgraph=True, backend="eager")
    for inputs, output in zip(calls, expected, strict=True):
        assert error(run(model, inputs), output) < 1e-5


@pytest.mark.gpu
@each_family
def test_gpu_kernels_compute_the_same_and_blocks_compile(name):
    case = FAMILIES[name]
    model, inputs = case.make().cuda(), tree_map_only(torch.Tensor, lambda x: x.cuda(), case.call())
    found = {}
    for implementation in ("torch", "triton"):
        vmonarch.apply(model, VMonarchProcessor(implementation=implementation))
        found[implementation] = run(model, inputs)
    assert error(found["triton"], found["torch"]) < 1e-4
    torch.compiler.reset()
    # Kandinsky 5 rounds its rotation to bfloat16, which inductor leaves out.
    bound = 2e-3 if name == "kandinsky5" else 1e-4
    for block in known_family(model).blocks_of(model):
        block.compile(fullgraph=True, dynamic=False)
    assert error(run(model, inputs), found["triton"]) < bound


def test_several_prompts_of_ltx_tell_the_grid_by_their_coordinates():
    pipe, call = tiny_pipelines.ltx_of_prompts()
    stock, grids, kept = tiny_pipelines.sample(pipe, call), set(), []
    branches = lambda: pipe.transformer._vmonarch_record.sharing._branches

    def note(model, *_):
        grids.add(tuple(model._vmonarch_record.grid))
        kept.append(sum(len(branch.residuals) for branch in branches()))

    with vmonarch.apply(pipe, VMonarchProcessor(exact=EVERYTHING)):
        assert error(tiny_pipelines.sample(pipe, call), stock) < 1e-5
    vmonarch.apply(pipe, VMonarchProcessor())
    plain = tiny_pipelines.sample(pipe, call)
    assert error(plain, stock) > 1e-4
    vmonarch.apply(pipe, VMonarchProcessor(refresh=1))
    watching = pipe.transformer.register_forward_hook(note)
    assert 0 < error(tiny_pipelines.sample(pipe, call), stock) < error(plain, stock)
    watching.remove()
    assert grids == {(3, 4, 6), (4, 4, 6)}
    # Its loop takes one step fewer than it announces.
    assert kept[-1] == len(known_family(pipe.transformer).layers(pipe.transformer))
    vmonarch.apply(pipe, VMonarchProcessor(grid=(3, 4, 6)))
    with pytest.raises(ValueError, match=r"grid=\(3, 4, 6\), but .*\(4, 4, 6\)"):
        tiny_pipelines.sample(pipe, call)


def test_coordinates_of_no_raster_tell_no_grid():
    model, inputs = made("ltx")
    inputs |= {"num_frames": 1, "height": 1, "width": 1}
    vmonarch.apply(model, VMonarchProcessor())
    for places in (raster(*GRID).flip(1), torch.rand(math.prod(GRID), 3)):
        with pytest.raises(RuntimeError, match=r"grid=\(frames, height, width\)"):
            run(model, inputs | {"video_coords": places.T[None].expand(2, -1, -1)})
    model, inputs = made("minimax-h3")
    vmonarch.apply(model, VMonarchProcessor())
    # The sound comes last, or there is none.
    for sound in (inputs["audio_indices"] + math.prod(GRID), inputs["audio_indices"][:0]):
        with pytest.raises(RuntimeError, match=r"grid=\(frames, height, width\)"):
            run(model, inputs | {"audio_indices": sound, "audio_hidden_states": torch.rand(1, len(sound), 6)})


@pytest.mark.parametrize("option", [{"scale": 1.0}, {"dropout_p": 0.1}, {"attention_kwargs": {"window": 3}}], ids=str)
def test_options_of_the_softmax_that_are_not_ours_are_refused(monkeypatch, option):
    model, query = FAMILIES["hunyuan"].make(), torch.zeros(1, 72, 2, 10)
    vmonarch.apply(model, VMonarchProcessor())
    monkeypatch.setitem(running.by, "borrowed", (own_processors(model)[0][1], None))
    with pytest.raises(NotImplementedError, match="VMonarchProcessor supports no dropout or scale"):
        _softmax(query, query, query, **option)


def test_fewer_tokens_than_the_grid_and_those_before_it_are_refused():
    with pytest.raises(ValueError, match="72 tokens and 9 tokens before it, but self-attention was given 80"):
        Call(LatentGrid(3, 4, 6), 9).placed(80)
    model, inputs = made("minimax-h3")
    vmonarch.apply(model, VMonarchProcessor(grid=(30, 4, 6)))
    with pytest.raises(ValueError, match=r"grid \(30, 4, 6\) has 720 tokens, but self-attention was given 88"):
        run(model, inputs | {"position_ids": torch.rand(88, 3)})


def test_kandinskys_sparse_attention_gives_way_where_its_order_does_not_matter(calls):
    case = FAMILIES["kandinsky5"]
    model, grid = case.make(), (3, 8, 16)
    inputs = case.call(grid)
    sparse = {"to_fractal": True, "P": 0.9, "sta_mask": torch.ones(1, 1, 6, 6, dtype=torch.bool)}
    for options in ({}, {"num_iterations": 1, "exact": {"band": 0}}):
        vmonarch.apply(model, VMonarchProcessor(**options))
        expected = run(model, inputs)
        # Sums in another order, of float32: 1.2e-5 on some processors. A wrong order of tokens: 1e-2.
        assert error(run(model, inputs | {"sparse_params": sparse}), expected) < 1e-4
        assert error(run(model, inputs | {"sparse_params": sparse | {"to_fractal": False}}), expected) < 1e-5
    ordered = [{"coarse": 2}, {"row_share": 0.5}, {"bias": SpatioTemporalDecay(2)}]
    for processor in (*(VMonarchProcessor(**options) for options in ordered), TwoResolutionProcessor()):
        vmonarch.apply(model, processor)
        with pytest.raises(ValueError, match="sparse_params puts the tokens of a frame in another order"):
            run(model, inputs | {"sparse_params": sparse})
    with vmonarch.apply(model, FullAttentionProcessor()):
        full = run(model, inputs | {"sparse_params": sparse})
    vmonarch.apply(model, VMonarchProcessor(exact=EVERYTHING))
    assert error(run(model, inputs), full) < 1e-5


PADDED = {"hunyuan": lambda: FlashBiasProcessor(SpatioTemporalDecay()), "hunyuan15": VMonarchProcessor}


@pytest.mark.parametrize("name", PADDED)
def test_what_is_padding_in_a_prompt_changes_nothing(name):
    model, inputs = made(name)
    changed = dict(inputs)
    for mask in [name for name in inputs if "mask" in name]:
        states = mask.replace("attention_mask", "hidden_states")
        changed[states] = inputs[states].clone()
        changed[states][1, SHORT:] += 1
    vmonarch.apply(model, PADDED[name]())
    torch.testing.assert_close(run(model, changed), run(model, inputs), rtol=1e-4, atol=1e-5)


def test_arguments_are_compared_by_value_in_lists_and_mappings_too():
    one, same, other = torch.ones(2), torch.ones(2), torch.zeros(2)
    assert same_values([one, (3, one)], [same, (3, same)]) and same_values({"a": one, "b": [3]}, {"a": same, "b": [3]})
    assert not any(same_values([one], given) for given in ([other], [same, same], one, [3]))
    assert not same_values({"a": one}, {"a": other}) and not same_values({"a": one}, {"b": one})


def test_an_unknown_processor_is_refused():
    class Own:
        def __call__(self, attn, hidden_states):
            return hidden_states

    class ByTheLongName:
        def __call__(self, attn, hidden_states):
            return torch.nn.functional.scaled_dot_product_attention(hidden_states, hidden_states, hidden_states)

    for cls in (Own, ByTheLongName):
        with pytest.raises(RuntimeError, match=f"{cls.__name__} of diffusers .* computes its softmax in a way"):
            borrow(VMonarchProcessor(), Exact(), cls(), families.FAMILIES["MochiTransformer3DModel"])
    assert families.diffusers_class(torch.nn.Linear(1, 1)) is None


def sample_with(name, pipe, call, **options):
    # With conditions the pipeline of LTX gives coordinates in place of the grid.
    given = {"grid": tiny_pipelines.GRID} if name == "ltx-condition" else {}
    with vmonarch.apply(pipe, VMonarchProcessor(**options, **given)):
        out = tiny_pipelines.sample(pipe, call)
        assert vmonarch.report(pipe).grid == (tiny_pipelines.MINIMAX_GRID if "minimax" in name else tiny_pipelines.GRID)
    return out


@pytest.mark.parametrize("name", tiny_pipelines.PIPELINES)
def test_pipelines_tell_the_step(name, calls):
    pipe, call = tiny_pipelines.pipeline(name)
    sample_with(name, pipe, call)
    queries = [query for _, query, *_ in calls]
    calls.clear()
    sample_with(name, pipe, call, dense_steps=(1, 2, 3))
    # Exact attention of a step is the model's own.
    assert 4 * len(calls) == len(queries)
    assert torch.equal(calls[0][1], queries[0])
    assert torch.equal(sample_with(name, pipe, call, dense_steps=4), tiny_pipelines.sample(pipe, call))


@pytest.mark.parametrize("name", tiny_pipelines.PIPELINES)
def test_pipelines_share_the_last_residual_of_a_branch(name, used, renewed):
    pipe, call = tiny_pipelines.pipeline(name)
    stock = tiny_pipelines.sample(pipe, call)
    # Nor does a step cache that predicts nothing change a bit.
    assert torch.equal(sample_with(name, pipe, call, refresh=Refresh(1.0, cache=1e-9)), stock)
    plain = error(sample_with(name, pipe, call), stock)
    used.clear()
    renewed.clear()
    shared = sample_with(name, pipe, call, refresh=(0, 2))
    # Every branch calls every layer in the same order in every step.
    added = [residual for _, residual in used if residual is not None]
    assert len(renewed) + len(added) == len(used)
    assert all(mine is last for mine, last in zip(added, renewed, strict=True))
    assert 0 < error(shared, stock) < 0.6 * plain
    assert torch.equal(tiny_pipelines.sample(pipe, call), stock)


def test_text_sound_and_conditions_stay_exact_where_a_residual_is_shared(calls, used):
    pipe, call = tiny_pipelines.pipeline("minimax-h3-references")
    sample_with("minimax-h3-references", pipe, call, refresh=1)
    assert sum(residual is not None for _, residual in used) == 3 * len(calls) // 4
    before = calls[0][1].shape[1] - math.prod(tiny_pipelines.MINIMAX_GRID)
    for _, query, key, value, _, out in calls:
        query, key, value = (x.double().transpose(1, 2) for x in (query, key, value))
        exact = torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        assert error(out[:, :before].double(), exact[:, :before]) < 1e-5


def test_a_prompt_in_a_tuple_that_a_callback_changes_has_residuals_of_its_own(used):
    pipe, call = tiny_pipelines.pipeline("cosmos-transfer")

    def change(pipe, step, timestep, tensors):
        if step == 1:
            tensors["prompt_embeds"].add_(1)
        return {}

    callback = {"callback_on_step_end": change, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    sample_with("cosmos-transfer", pipe, call | callback, refresh=1)
    # Two layers, two branches, four steps; one branch begins again in the third.
    exact = [residual is None for _, residual in used]
    assert (exact.count(True), exact.count(False)) == (4 + 2, 4 + 2 + 4)
