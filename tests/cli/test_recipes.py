"""Recipes: each part of them does what it says, alone and together, and goes without a trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_wan
import torch

from vmonarch.configs import InputError
from vmonarch.configs.methods import merge_attention, recipe_names, resolve_method
from vmonarch.finetune.config import finetune_config
from vmonarch.pipelines import recipes
from vmonarch.pipelines.loading import LoadedModel
from vmonarch.pipelines.model_folder import find_model
from vmonarch.pipelines.sampling import denoise

STEPS = 7
resolve = functools.partial(resolve_method, recipes=True)
CACHE = {"kind": "taylorseer", "disable_cache_before_step": 2, "cache_interval": 3, "max_order": 1}
ALL = "stack-fast:linears=null,attention.refresh=[0,1,3],cache={kind: taylorseer, disable_cache_before_step: 2}"


@pytest.fixture
def loaded(tiny_model: Path) -> LoadedModel:
    return tiny_wan.load(tiny_model, attention="full", steps=STEPS, guidance=4.0)


@pytest.fixture
def sample(loaded: LoadedModel) -> Callable[..., torch.Tensor]:
    """sample(recipe): latents with it, blocks compiled by the "eager" backend."""

    def latents(recipe: Any, backend: Any = "eager") -> torch.Tensor:
        recipes.apply(loaded.pipe, recipe, steps=STEPS, compile_backend=backend)
        return denoise(loaded, loaded.config, loaded.config.prompts, [0]).latents

    return latents


@pytest.fixture
def told_steps(monkeypatch: pytest.MonkeyPatch) -> set[int | None]:
    """The numbers of steps that caches are told."""
    found: set[int | None] = set()
    make = recipes.cache_config
    monkeypatch.setattr(recipes, "cache_config", lambda additions, steps: found.add(steps) or make(additions, steps))
    return found


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_written_and_read_back(name: str) -> None:
    recipe = resolve(name)
    assert recipe.name == recipe.label == name and recipe.additions
    assert resolve(recipe.to_dict()) == recipe
    plain = resolve(f"{name}:attention=full,cache=null")
    assert (plain.processor_name, plain.additions.cache) == ("full", None)
    assert resolve({"name": name, "cache": {"kind": "sea"}}).additions.cache == {"kind": "sea"}
    # Who cannot switch on what they add refuses recipes.
    for use in (resolve_method, lambda recipe: finetune_config({"attention": recipe})):
        with pytest.raises(InputError, match=f"attention must be an attention method, got the recipe '{name}'"):
            use(name)


def test_a_recipe_with_overrides_is_labelled_with_them() -> None:
    """Whether they come in its word, in a mapping, or as overrides of a command."""
    for above in ({"cache": None, "attention": {"refresh": 12}}, {"cache": {"kind": "first_block", "threshold": 0.1}}):
        merged, mapping = resolve(merge_attention("stack-fast", above)), resolve({"name": "stack-fast", **above})
        assert merged == mapping and merged.label not in ("stack-fast", resolve("stack-fast:cache=null").label)
    assert mapping.label == "stack-fast:cache={'kind': 'first_block', 'threshold': 0.1}"
    assert mapping.additions.cache == {"kind": "first_block", "threshold": 0.1}
    inner = resolve(merge_attention("stack-fast", {"attention": {"refresh": 12}}))
    assert (inner.label, inner.attention.label) == ("stack-fast:attention=fast:refresh=12", "fast:refresh=12")  # type: ignore[attr-defined]


def test_a_recipe_leaves_no_trace(sample: Callable[..., torch.Tensor], loaded: LoadedModel) -> None:
    transformer = loaded.pipe.transformer
    before = [set(vars(block)) for block in transformer.blocks]
    stock, with_all = sample("full"), sample(ALL)
    assert transformer.is_cache_enabled and not torch.equal(stock, with_all)
    assert torch.equal(sample("full"), stock) and not transformer.is_cache_enabled
    # diffusers leaves its empty registry of hooks behind.
    assert [set(vars(block)) - {"_diffusers_hook"} for block in transformer.blocks] == before


def test_blocks_are_compiled_below_the_caches_hooks(sample: Callable[..., torch.Tensor]) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([node for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch.compiler.reset()
    assert torch.equal(sample("stock"), sample("full"))
    cached = sample({"name": "stock", "cache": CACHE}, backend)
    # One for both blocks and every step, with all that a block computes.
    assert len(graphs) == 1 and len(graphs[0]) > 20
    assert torch.equal(cached, sample({"name": "stock", "compile": False, "cache": CACHE}))


def test_a_recipe_is_recorded_made_again_and_compared_with_stock(cli: Any, told_steps: set[int | None]) -> None:
    code, _, err = cli("generate", "a red circle", "--recipe", ALL, "attention.compile=false", "steps=5")
    assert code == 0, err
    (record,) = cli.records()
    assert record["config"]["attention"]["cache"]["disable_cache_before_step"] == 2
    # Two calls of the transformer a step; a cache skips blocks.
    assert record["transformer_calls"] == 10 and told_steps == {5}
    (path,) = (cli.folder / "outputs/generate").glob("*.json")
    code, _, err = cli("generate", "--from-json", path, tiny=False)
    assert code == 0, err
    assert cli.records()[1]["frames_sha256"] == record["frames_sha256"]
    told_steps.clear()
    line = ["--recipe", "stock:compile=false", "stack-near-lossless:compile=false,linears=null"]
    code, _, err = cli("compare", "a red circle", *line)
    assert code == 0, err
    (folder,) = cli.outputs("outputs/compare")
    (record,) = cli.records(f"outputs/compare/{folder}")
    means = {label: values["psnr"] and values["psnr"]["mean"] for label, values in record["statistics"].items()}
    assert list(means) == ["full", *line[1:]] and told_steps == {2}
    assert means[line[1]] == "inf" and 10 < means[line[2]] < 200


@pytest.fixture
def wide(tiny: Any) -> torch.nn.Module:
    """A transformer whose linear layers can be quantised."""
    return tiny.transformer(num_attention_heads=2, attention_head_dim=16, ffn_dim=64)


def test_linear_layers_are_quantised_and_come_back_or_not(wide: torch.nn.Module) -> None:
    pytest.importorskip("torchao")
    float8 = "stock:compile=false,linears=float8-weights"
    own = {name: parameter for name, parameter in wide.named_parameters()}
    recipes.apply(wide, float8)
    quantised = {name for name, parameter in wide.named_parameters() if parameter is not own[name]}
    linears = {f"{name}.weight" for name, m in wide.blocks.named_modules() if isinstance(m, torch.nn.Linear)}
    assert quantised == {f"blocks.{name}" for name in linears}
    weight = wide.blocks[0].ffn.net[2].weight
    assert weight.qdata.dtype == torch.float8_e4m3fn
    assert 0 < (weight.dequantize() - own["blocks.0.ffn.net.2.weight"]).abs().max() < 0.05
    recipes.apply(wide, "full")
    assert all(parameter is own[name] for name, parameter in wide.named_parameters())
    recipes.quantize_for_good(wide, "float8-weights", torch.device("cpu"))
    kept = wide.blocks[0].ffn.net[2].weight
    recipes.apply(wide, float8)
    assert wide.blocks[0].ffn.net[2].weight is kept and kept.qdata.equal(weight.qdata)
    with pytest.raises(InputError, match="linears must be 'float8-weights', got None: the model was quantised for"):
        recipes.apply(wide, "full")


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ("stack-fst", r"recipe must be one of .*stack-near-lossless.*did you mean stack-fast\?"),
        ("stack-fast:linears=int4", "recipe.linears must be null or one of float8, float8-weights"),
        ("stack-fast:linears=float8", "linears 'float8' needs a GPU of Ada, Hopper or newer"),
        ("fast:cache=null", "recipe.cache is for recipes, which are stack-fast, .*; 'fast' is a method"),
        ("stack-fast:attention=stock", "recipe.attention must be an attention method, got the recipe 'stock'"),
        ("stock:cache=3", "recipe.cache must be null or a mapping with a kind of first_block, mag, sea, taylorseer"),
        ("stock:cache={kind: tea}", "recipe.cache.kind must be one of .*did you mean sea"),
        ("stock:cache={kind: sea, order: 2}", "cache.order is no known key; known: threshold"),
        ("stock:cache={kind: sea, threshold: -1}", "cache cannot be used: `threshold` must be non-negative"),
        ("stock:cache={kind: mag}", "cache cannot be used: `mag_ratios` must be provided"),
    ],
)  # fmt: skip
def test_what_a_recipe_cannot_do_is_said(recipe: str, problem: str, wide: torch.nn.Module, monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(InputError, match=problem):
        recipes.apply(wide, recipe)


def test_quantised_layers_need_torchao(wide: torch.nn.Module, monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"linears 'float8-weights' needs torchao: pip install 'vmonarch\[float8\]'"):
        recipes.apply(wide, "stock:linears=float8-weights")


def test_a_stack_is_checked_before_a_model_is_loaded(tiny_model: Path) -> None:
    for attention, offload, problem in (
        ("stack-fast", "group", "offload cannot be group with quantised linear layers"),
        (
            "stock:cache={kind: sea, order: 2}",
            "none",
            "attention .* a cache that cannot be used: cache.order is no",
        ),
        ("stock:cache={kind: first_block, threshold: true}", "none", "cache.threshold must be a number, got True"),
    ):
        with pytest.raises(InputError, match=problem):
            tiny_wan.settings(find_model(str(tiny_model)), attention=attention, offload=offload)


def test_the_cache_mag_knows_the_steps(sample: Callable[..., torch.Tensor], loaded: LoadedModel) -> None:
    sample("stock:compile=false,cache={kind: mag, calibrate: true}")
    hook = loaded.pipe.transformer.blocks[0]._diffusers_hook.get_hook("mag_cache_leader_block_hook")
    assert hook.config.num_inference_steps == STEPS


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["stock:linears=float8", "stock:linears=float8,attention=vmonarch"])
def test_float8_layers_on_the_gpu(recipe: str, tiny: Any) -> None:
    pytest.importorskip("torchao")
    model = tiny.transformer(num_attention_heads=2, attention_head_dim=64, ffn_dim=256).to("cuda", torch.bfloat16)
    inputs = {name: value.cuda() for name, value in tiny.inputs(dtype=torch.bfloat16).items() if name != "return_dict"}
    found = []
    for each in (recipe.replace("linears=float8", "linears=null"), f"{recipe},compile=false", recipe):
        recipes.apply(model, each)
        with torch.no_grad():
            found.append(model(**inputs, return_dict=False)[0].float())
    own, eager, compiled = found
    assert 1e-4 < (eager - own).norm() / own.norm() < 0.2
    assert (compiled - eager).norm() < 0.02 * eager.norm()


def test_caches_that_look_at_the_data_are_not_extrapolated() -> None:
    from vmonarch.eval.bench.e2e import bench

    for recipe, problem in (
        ("stock:cache={kind: sea}", "has a cache whose steps depend on the data; supported: taylorseer"),
        ("stock:cache={kind: taylorseer, order: 2}", "cache.order is no known key"),
    ):
        with pytest.raises(InputError, match=problem):
            bench(methods=[recipe])
