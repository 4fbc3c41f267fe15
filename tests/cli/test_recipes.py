"""Recipes: each part of them does what it says, alone and together, and goes without a trace."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_wan
import torch
from diffusers import MagCacheConfig

from vmonarch.configs import InputError, preset_names
from vmonarch.configs.methods import Additions, merge_attention, resolve_method
from vmonarch.finetune.config import FinetuneConfig
from vmonarch.pipelines import recipes, sampling
from vmonarch.pipelines.loading import LoadedModel
from vmonarch.pipelines.model_folder import find_model

STEPS = 7
resolve = functools.partial(resolve_method, recipes=True)
ALL = "stack-fast:linears=null,attention.refresh={steps: [0, 1, 3], cache: 9.0}"


@pytest.fixture
def loaded(tiny_model: Path) -> LoadedModel:
    return tiny_wan.load(tiny_model, attention="full", steps=STEPS, guidance=4.0)


@pytest.fixture
def sample(loaded: LoadedModel) -> Callable[..., torch.Tensor]:
    """sample(recipe): latents with it, blocks compiled by the "eager" backend."""

    def latents(recipe: Any, backend: Any = "eager") -> torch.Tensor:
        recipes.apply(loaded.pipe, recipe, compile_backend=backend)
        return sampling.sample(loaded, loaded.config, loaded.config.prompts, [0], decode=False).latents

    return latents


@pytest.mark.parametrize("name", preset_names("recipes"))
def test_every_recipe_is_written_and_read_back(name: str) -> None:
    recipe = resolve(name)
    assert recipe.name == recipe.label == name and recipe.additions != Additions()
    assert resolve(recipe.to_dict()) == recipe
    assert resolve(f"{name}:attention=full").processor_name == "full"
    # Who cannot switch on what they add refuses recipes.
    for use in (resolve_method, lambda recipe: FinetuneConfig(attention=recipe)):
        with pytest.raises(InputError, match=f"attention must be one of based.* got '{name}'"):
            use(name)


def test_a_recipe_with_overrides_is_labelled_with_them() -> None:
    """Whether they come in its word, in a mapping, or as overrides of a command."""
    for above in ({"compile": False, "attention": {"refresh": 12}}, {"linears": "float8-weights"}):
        merged, mapping = resolve(merge_attention("stack-fast", above)), resolve({"name": "stack-fast", **above})
        assert merged == mapping and merged.label not in ("stack-fast", resolve("stack-fast:compile=false").label)
    assert (mapping.label, mapping.additions.linears) == ("stack-fast:linears=float8-weights", "float8-weights")
    inner = resolve(merge_attention("stock", {"attention": "fast:refresh=12"}))
    assert (inner.label, inner.attention.label) == ("stock:attention=fast:refresh=12", "fast:refresh=12")  # type: ignore[attr-defined]


def test_a_recipe_leaves_no_trace(sample: Callable[..., torch.Tensor], loaded: LoadedModel) -> None:
    transformer = loaded.pipe.transformer
    before = [set(vars(block)) for block in transformer.blocks]
    stock, with_all = sample("full"), sample(ALL)
    assert "forward" in vars(transformer) and not torch.equal(stock, with_all)
    assert torch.equal(sample("full"), stock) and "forward" not in vars(transformer)
    assert [set(vars(block)) for block in transformer.blocks] == before


def test_blocks_are_compiled_below_the_hooks_of_caches(
    sample: Callable[..., torch.Tensor], loaded: LoadedModel
) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([node for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = 8
    assert torch.equal(sample("stock"), sample("full"))
    # Each of several methods, and every kind of their steps, takes a version of a block.
    assert torch._dynamo.config.recompile_limit >= 64
    found = []
    for recipe in ("stock", "full"):
        recipes.apply(loaded.pipe, recipe, compile_backend=backend)
        loaded.pipe.transformer.enable_cache(MagCacheConfig(num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS))
        found.append(sampling.sample(loaded, loaded.config, loaded.config.prompts, [0], decode=False).latents)
        loaded.pipe.transformer.disable_cache()
    # One for both blocks and every step, with all that a block computes.
    assert len(graphs) == 1 and len(graphs[0]) > 20
    assert torch.equal(*found)


def test_a_recipe_is_recorded_made_again_and_compared_with_stock(cli: Any) -> None:
    cli.done("generate", "a red circle", "--recipe", ALL, "attention.compile=false", "steps=5")
    (record,) = cli.records()
    refresh = {"steps": [0, 1, 3], "cache": 9.0, "precision": "int8"}
    assert record["config"]["attention"]["attention"]["refresh"] == refresh
    # Two calls of the transformer a step, of which those of predicted steps compute nothing.
    assert record["transformer_calls"] == 10 and record["attention"]["predicted"] == [3]
    (path,) = (cli.folder / "outputs/generate").glob("*.json")
    cli.done("generate", "--from-json", path, tiny=False)
    assert cli.records()[1]["frames_sha256"] == record["frames_sha256"]
    line = ["--recipe", "stock:compile=false", "stack-near-lossless:compile=false,linears=null"]
    cli.done("compare", "a red circle", *line)
    (folder,) = cli.outputs("outputs/compare")
    (record,) = cli.records(f"outputs/compare/{folder}")
    means = {label: values["psnr"] and values["psnr"]["mean"] for label, values in record["statistics"].items()}
    assert list(means) == ["full", *line[1:]]
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
        ("stack-fast:linears=int4", "recipe.linears must be one of float8, float8-feed-forward, float8-weights"),
        ("stock:backend=fa3", "backend 'fa3' needs a Hopper GPU, got cpu"),
        ("stack-fast:linears=float8", "linears 'float8' needs a GPU of Ada, Hopper or newer"),
        ("stack-fast:attention=stock", "recipe.attention must be one of based.* got 'stock'"),
    ],
)  # fmt: skip
def test_what_a_recipe_cannot_do_is_said(recipe: str, problem: str, wide: torch.nn.Module, monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(InputError, match=problem):
        recipes.apply(wide, recipe)


def test_exact_attention_is_flash_attention_3_of_that_model_alone(wide: torch.nn.Module, tiny: Any, fa3: Any) -> None:
    inputs, found = tiny.inputs(dtype=torch.bfloat16), []
    for recipe in ("full", "stock:compile=false,backend=fa3", "full"):
        recipes.apply(wide.to(torch.bfloat16), recipe)
        with torch.no_grad():
            found.append((wide(**inputs)[0].float(), len(fa3)))
    (stock, none), (flash, some), (again, same) = found
    # Two layers' self-attention and cross-attention.
    assert (none, some, same) == (0, 4, 4) and torch.equal(again, stock)
    assert (flash - stock).norm() < 0.02 * stock.norm()


def test_feed_forwards_can_be_quantised_alone(wide: torch.nn.Module, tiny: Any, monkeypatch: Any) -> None:
    found, config = [], "Float8DynamicActivationFloat8WeightConfig"
    quantize = lambda block, _, filter_fn: found.extend(m for m in block.modules() if filter_fn(m, ""))
    # Their products need a GPU.
    torchao = SimpleNamespace(quantize_=quantize, PerRow=object, **{config: dict})
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(quantization=torchao))
    monkeypatch.setattr(recipes, "check_linears", lambda linears, device: None)
    recipes.apply(wide, "stock:compile=false,linears=float8-feed-forward")
    assert found == [layer for block in wide.blocks for layer in (block.ffn.net[0].proj, block.ffn.net[2])]
    with pytest.raises(InputError, match="linears cannot be 'float8-feed-forward': WanTransformer3DModel has no such"):
        recipes.apply(tiny.transformer(), "stock:linears=float8-feed-forward")


def test_a_stack_is_checked_before_a_model_is_loaded(tiny_model: Path) -> None:
    with pytest.raises(InputError, match="offload cannot be group with quantised linear layers"):
        tiny_wan.settings(find_model(str(tiny_model)), attention="stack-fast", offload="group")


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
