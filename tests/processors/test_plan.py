"""Plans: every head computes what the plan says, whatever the order of heads, and nothing else changes."""

import copy
import itertools
import json
import pickle
import warnings

import pytest
import torch
from op_checks import refuses
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import vmonarch
import vmonarch.attend
from vmonarch import (
    AttentionPlan,
    ExactBlocks,
    LatentGrid,
    VMonarchProcessor,
    first_order_attention,
    processors,
    two_resolution_attention,
    vmonarch_attention,
)
from vmonarch.attend import _some_heads
from vmonarch.call import Call
from vmonarch.configs import InputError, read_yaml
from vmonarch.configs.methods import resolve_method
from vmonarch.finetune.scenes import held_out_prompts
from vmonarch.flops import full_flops, vmonarch_flops
from vmonarch.pipelines.embedded import embedded_model_path
from vmonarch.plan import method_flops, plan_file, plan_names

SPARSE = {"share": 0.3, "tile": (1, 2, 3)}
METHODS = {
    "t1": {"num_iterations": 1},
    "own": {"exact": {"band": 0}},
    "plain": {"exact": None},
    "full": None,
    "sparse": {"kind": "two_resolution", **SPARSE},
    "tangent": {"kind": "first_order", "parts": (1, 2, 1)},
}


def plan_of(*layers, methods=METHODS, **more):
    return AttentionPlan(methods, {"transformer": layers, **more})


def transformer(tiny):
    return tiny.transformer(num_attention_heads=4)


ORDERS = {
    "grouped": ["t1", "t1", "own", "full"],
    "mixed": ["own", "t1", "full", "own"],
    "uneven": ["own", "own", "t1", "own"],
    "kinds": ["own", "sparse", "tangent", "sparse"],
    "one-each": ["full", "plain", "sparse", "t1"],
    "all-alike": ["own"] * 4,
}


@pytest.mark.parametrize("name", ORDERS)
def test_every_head_computes_what_the_plan_says(tiny, name):
    heads = ORDERS[name]
    model = transformer(tiny)
    vmonarch.apply(model, VMonarchProcessor(plan=plan_of(heads, heads)))
    grid = LatentGrid(3, 2, 3)
    q, k, v = torch.randn(3, 2, grid.tokens, 4, 12)
    found, _ = model.blocks[0].attn1.processor.attend(q, k, v, Call(grid))
    for head, method in enumerate(heads):
        one = [x[:, :, head : head + 1] for x in (q, k, v)]
        if method == "full":
            wanted = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in one)).transpose(1, 2)
        elif method == "sparse":
            wanted = two_resolution_attention(*one, grid=grid, **SPARSE)
        elif method == "tangent":
            wanted = first_order_attention(*one, grid=grid, parts=(1, 2, 1))
        else:
            options = {"exact": ExactBlocks(band=0)} if method == "own" else METHODS[method]
            wanted = vmonarch_attention(*one, grid=grid, **options)
        torch.testing.assert_close(found[:, :, head : head + 1], wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("D", "offset"), [(3, 0), (8, 0), (8, 1)])
def test_heads_that_lie_evenly_apart_are_not_copied(D, offset):
    """Whether a head's numbers can be copied by 16 bytes or not."""
    x = torch.randn(2 * 5 * 7 * D + offset)[offset:].view(2, 5, 7, D)
    memory = lambda x: x.untyped_storage().data_ptr()
    for heads in ((1,), (2, 3, 4), (0, 3, 6), (5, 6), tuple(range(7))):
        found = _some_heads(x, heads)
        assert torch.equal(found, x[:, :, list(heads)]) and memory(found) == memory(x)
    for uneven in ((0, 1, 3), (0, 2, 3)):
        found = _some_heads(x, uneven)
        assert torch.equal(found, x[:, :, list(uneven)]) and memory(found) != memory(x)
    # A gradient of a slice would be as large as all heads.
    assert _some_heads(x.requires_grad_(), (0, 3, 6)).data_ptr() != x.data_ptr()


def test_tangents_reach_heads_that_are_copied():
    x = torch.randn(1, 5, 4, 8)
    with forward_ad.dual_level():
        found = _some_heads(forward_ad.make_dual(x, 2 * x), (0, 1, 3))
        assert torch.equal(forward_ad.unpack_dual(found).tangent, 2 * x[:, :, [0, 1, 3]])


def test_tangents_go_through_compiled_layers_that_all_differ(tiny, monkeypatch):
    monkeypatch.setattr(processors, "_LAYERS_INLINE", 0)
    model, given, found = transformer(tiny), tiny.inputs(), []
    vmonarch.apply(model, VMonarchProcessor(plan=plan_of(ORDERS["mixed"], ORDERS["mixed"])))
    for compiled in (False, True):
        if compiled:
            model.compile_repeated_blocks(backend="eager", fullgraph=True)
        with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
            latents = forward_ad.make_dual(given["hidden_states"], given["hidden_states"].sin())
            with torch.no_grad():
                out = model(**given | {"hidden_states": latents})[0]
            found.append(forward_ad.unpack_dual(out).tangent)
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ORDERS)
def test_the_kernels_compute_a_plan(tiny, name):
    heads = ORDERS[name]
    grid = LatentGrid(5, 7, 9)
    q, k, v = torch.randn(3, 2, grid.tokens, 4, 64, device="cuda").bfloat16()
    found = {}
    for implementation in ("torch", "triton"):
        model = transformer(tiny)
        vmonarch.apply(model, VMonarchProcessor(plan=plan_of(heads, heads), implementation=implementation))
        tensors = (q, k, v) if implementation == "triton" else (x.double() for x in (q, k, v))
        found[implementation], _ = model.blocks[0].attn1.processor.attend(*tensors, Call(grid))
    error = (found["triton"].double() - found["torch"]).norm() / found["torch"].norm()
    assert error < 8e-3, error


def test_json_holds_all_of_a_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    plan = AttentionPlan(
        {**METHODS, "pooled": {"coarse": 2, "min_mass": 0.2}},
        {"transformer": [["pooled", "own"], ["full", "t1"]]},
        {"made": "by hand"},
    )
    plan.save("~/plan.json")
    found = AttentionPlan.parse(tmp_path / "plan.json")
    assert found == plan == AttentionPlan.parse("~/plan.json") and found.about == {"made": "by hand"}
    assert found.methods["own"].exact == ExactBlocks(band=0) and found.methods["pooled"].coarse == 2
    processor = VMonarchProcessor(plan=str(tmp_path / "plan.json"))
    again = VMonarchProcessor(**json.loads(json.dumps(processor.config)))
    assert again.plan == plan and "AttentionPlan" in repr(again)


def test_flops_follow_the_options():
    grid = LatentGrid(4, 3, 5)
    plain = vmonarch_flops(grid, 8, exact=None)
    # Ten of sixteen blocks lie in a band of one.
    assert vmonarch_flops(grid, 8, exact=ExactBlocks(band=1)) - plain == 10 * 4 * 15**2 * 8
    # 16×28×52 tokens in 364 tiles of 64, of which a tile of a frame's queries, one of 14, attends to 91 and 273 means.
    large, rows = LatentGrid(16, 28, 52), ExactBlocks(rows=(0, 3))
    saved = 2 * (28 * 52 * 4 * 8 * (large.tokens - 91 * 64 - 273) - 2 * 8 * 14 * 364)
    assert vmonarch_flops(large, 8, exact=rows) - vmonarch_flops(large, 8, exact=rows, row_share=0.25) == saved
    # The last R-step does without aL: one of three products of all centroids and the keys of their frame.
    of_keys = 2 * large.tokens * large.tokens_per_frame * 8
    assert vmonarch_flops(large, 8) - vmonarch_flops(large, 8, last_l_update=False) == of_keys
    # R-steps of both iterations and L-steps.
    odd = LatentGrid(6, 5, 7)
    assert vmonarch_flops(odd, 8, exact=None) == 8 * odd.tokens * (10 * 35 + 8 * 6)
    methods = plan_of(["t1", "full"], ["full", "own"]).methods
    assert method_flops(methods["full"], grid, 8) == full_flops(grid, 8)
    assert method_flops(methods["own"], grid, 8) == vmonarch_flops(grid, 8, exact=ExactBlocks(band=0))


def test_a_plan_is_a_method_of_the_command_line(tmp_path, tiny):
    path = tmp_path / "plan.json"
    plan_of(["t1", "full"], ["own", "own"]).save(path)
    method = resolve_method(f"vmonarch:plan={path}")
    pipe = tiny.pipeline("t2v")
    method.install(pipe)
    assert pipe.transformer.blocks[0].attn1.processor.spec.plan.layers["transformer"][0] == ("t1", "full")
    assert resolve_method(method.to_dict()) == method
    plan_of(["t1", "t1"], ["own", "own"]).save(path)
    with pytest.raises(InputError, match="plan .* is not the file that it was"):
        resolve_method(method.to_dict())
    with pytest.raises(InputError, match="coarse must be left at 1 with a plan"):
        resolve_method(f"vmonarch:plan={path},coarse=2")


def test_compiled_blocks_share_graphs_however_many_layers_differ(tiny, dynamo):
    layers = list(itertools.product(METHODS, repeat=2))[:6]
    model = tiny.transformer(num_attention_heads=2, num_layers=6)
    vmonarch.apply(model, VMonarchProcessor(plan=plan_of(*layers)))
    given = tiny.inputs()

    def run_both(found):
        found.zero_grad()
        with torch.no_grad():
            sampled = found(**given)[0]
        trained = found(**given)[0]
        trained.square().mean().backward()
        return sampled, trained, {name: parameter.grad for name, parameter in found.named_parameters()}

    expected = run_both(model)
    # A copy has numbers of its own, and so has what is read from a file.
    model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    model.compile_repeated_blocks(backend="eager", fullgraph=True)
    torch.testing.assert_close(run_both(model), expected, atol=1e-5, rtol=1e-4)
    # With gradients and without.
    assert dynamo["stats"]["unique_graphs"] == 2 and not dynamo["graph_break"]


def test_plans_that_ship_are_known_by_name_and_fit_the_embedded_model():
    found = plan_names()
    assert {"embedded-0.50", "embedded-1.00", "embedded-1.35"} <= set(found)
    config = json.loads((embedded_model_path() / "transformer" / "config.json").read_text())
    for name in found:
        plan = AttentionPlan.parse(name)
        assert plan == AttentionPlan.parse(plan_file(name)) and plan_file(name).is_file()
        layers = config["num_layers"]
        assert all(len(plan.heads_of("transformer", i, layers, config["num_attention_heads"])) for i in range(layers))
        grid = LatentGrid(16, 6, 10)
        heads, head_dim = layers * config["num_attention_heads"], config["attention_head_dim"]
        of = {name: method_flops(options, grid, head_dim) for name, options in plan.methods.items()}
        total = sum(of[method] for row in plan.layers["transformer"] for method in row)
        work = total / (heads * vmonarch_flops(grid, head_dim))
        limit = float(name.split("-")[1])
        assert limit - 0.05 < work <= limit + 1e-9, (name, work)
    held_out = held_out_prompts().keys()
    assert held_out.isdisjoint(read_yaml("embedded", group="calibrate")["prompts"])


def method(**options):
    return lambda: plan_of(["a"], methods={"a": options})


BAD = {
    "unknown-method": (lambda: plan_of(["t9"]), "names methods that it has not: .'t9'.; it has t1"),
    "unknown-option": (
        lambda: plan_of(["a"], methods={"a": {"iterations": 1}}),
        "'a': iterations is no known key.*; known: num_it",
    ),
    "unknown-kind": (method(kind="based"), "the kind 'based'; supported: vmonarch, t"),
    "bad-pattern": (method(exact={"band": -1}), "method 'a': exact must fit: ExactBlocks.band"),
    "no-format": (lambda: AttentionPlan.parse({"methods": {}, "layers": {}}), "format must be 'vmonarch-plan-1'"),
    "no-file": (lambda: AttentionPlan.parse("nowhere.json"), "plan 'nowhere.json' cannot be read.*embedded-1.00"),
    "other-options": (lambda: VMonarchProcessor(plan=plan_of(["t1"]), num_iterations=3), "num_iterations must be left"),
}


test_what_is_no_plan_is_named = refuses({name: (make, ValueError, message) for name, (make, message) in BAD.items()})


def test_a_plan_for_another_model_is_refused_before_anything_changes(tiny):
    model = transformer(tiny)
    stock = tiny.run(model)
    with pytest.raises(ValueError, match="it is for 1 layers of 2 heads, but transformer has 2 of 4"):
        vmonarch.apply(model, VMonarchProcessor(plan=plan_of(["t1", "t1"])))
    assert torch.equal(tiny.run(model), stock)


def test_a_plan_for_one_transformer_is_for_the_one_that_is_given(tiny):
    plan = AttentionPlan(METHODS, {"transformer_2": [["t1", "t1", "own", "t1"]] * 2})
    for switch_on in (vmonarch.apply, lambda it, processor: it.set_attn_processor(processor)):
        model = transformer(tiny)
        switch_on(model, VMonarchProcessor(plan=plan))
        assert type(model.blocks[0].attn1.processor).__name__ == "Own"


def test_of_each_size_it_is_said_once_if_it_is_too_small_or_not_the_plans(tiny, monkeypatch):
    model = transformer(tiny)
    heads = {"transformer": [["t1", "own", "t1", "own"]] * 2}
    plan = AttentionPlan(METHODS, heads, AttentionPlan.parse("embedded-1.00").about | {"grid": [3, 2, 3]})
    larger = (4, 2, 3)

    def told(*grids):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for grid in grids:
                tiny.run(model, grid)
        return [str(warning.message) for warning in found]

    vmonarch.apply(model, VMonarchProcessor(plan=plan))
    (small,) = told(tiny.GRID, tiny.GRID)
    assert small.startswith("videos of 18 tokens are too small for VMonarch to make them faster: with 3840")
    monkeypatch.setattr(processors, "_TOO_FEW_TOKENS", 18)
    (other,) = told(larger, larger)
    assert other.startswith("the plan was made for 3 × 2 × 3 latent tokens") and "have 4 × 2 × 3" in other
    assert told(tiny.GRID)[0].startswith("videos of 18")
    vmonarch.apply(model, VMonarchProcessor(plan=plan_of(*heads["transformer"])))
    assert told(larger) == [], "a plan by hand is for no size"
