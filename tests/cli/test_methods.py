"""The registry of attention methods: every name that ships works, and says what it does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vmonarch.configs import FOLDER, InputError, build, preset_names, read_yaml
from vmonarch.configs.methods import VMonarchAttention, method_names, resolve_method
from vmonarch.eval.calibrate.run import CalibrateConfig
from vmonarch.eval.compare import CompareConfig
from vmonarch.eval.evaluate import EvalConfig
from vmonarch.eval.wan_models import read_model_config
from vmonarch.finetune.config import finetune_config
from vmonarch.finetune.data.preprocess import preprocess_config
from vmonarch.pipelines.config import GenerateConfig, SamplingConfig, build_config, complete
from vmonarch.pipelines.loading import load_model
from vmonarch.pipelines.model_folder import find_model

GENERAL = {"full", "vmonarch", "vmonarch-t1", "vmonarch-t3", "vmonarch-band1"}
REACH = (4.0, 8.0, 8.0)


@pytest.fixture(scope="module")
def pipe(tiny_model: Path):
    folder = find_model(str(tiny_model))
    return load_model(complete(GenerateConfig(prompts=("a red circle",), model=str(tiny_model)), folder), folder).pipe


@pytest.mark.parametrize("name", method_names())
def test_every_method_installs_what_it_says(name: str, pipe, shipped_adapter: Path) -> None:
    from vmonarch import (
        BasedProcessor,
        ExactBlocks,
        FirstOrderProcessor,
        FlashBiasProcessor,
        TwoResolutionProcessor,
        VMonarchProcessor,
    )
    from vmonarch.variants import VARIANTS, VariantProcessor

    method = resolve_method(name)
    assert method.label == method.name == name and resolve_method(method.to_dict()) == method
    method.install(pipe)
    processor = pipe.transformer.blocks[0].attn1.processor
    kinds = {"full": (), "vmonarch": VMonarchProcessor, "flashbias": FlashBiasProcessor, "based": BasedProcessor}
    kinds |= dict.fromkeys(VARIANTS, VariantProcessor)
    kinds |= dict.fromkeys(("two_resolution", "block_topk"), TwoResolutionProcessor)
    kinds["first_order"] = FirstOrderProcessor
    kind = method.parameters.kind
    assert isinstance(processor, kinds[kind] or type(pipe.transformer.blocks[0].attn2.processor))
    assert (kind == "full") != isinstance(processor, tuple(filter(None, kinds.values())))
    assert (kind == "based") == any(".lora_" in key for key in pipe.transformer.state_dict())
    if isinstance(method.parameters, VMonarchAttention):
        assert processor.num_iterations == method.parameters.num_iterations
        exact = method.parameters.exact
        assert processor.exact == (ExactBlocks(**exact) if isinstance(exact, dict) else exact)


def test_the_names_mean_what_they_say() -> None:
    assert set(method_names()) >= GENERAL
    iterations = {name: resolve_method(name).to_dict().get("num_iterations") for name in GENERAL}
    assert iterations == {"full": None, "vmonarch": 2, "vmonarch-t1": 1, "vmonarch-t3": 3, "vmonarch-band1": 2}
    assert resolve_method("vmonarch-band1").to_dict()["exact"] == {"band": 1}


def test_parameters_in_the_name() -> None:
    method = resolve_method("vmonarch:num_iterations=3,tiles=[2, 2],exact={band: 1},dense_steps=0.25")
    expected = VMonarchAttention(num_iterations=3, tiles=(2, 2), exact={"band": 1}, dense_steps=0.25)
    assert method.parameters == expected and method.name == "vmonarch"
    assert method.label.startswith("vmonarch:") and resolve_method("vmonarch:").label == "vmonarch"


def test_a_bias_falls_off_over_the_reach(pipe) -> None:
    for spec, kind in (("flashbias:reach=[4, 8, 8]", "flashbias"), ("vmonarch:reach=[4, 8, 8]", "vmonarch")):
        method = resolve_method(spec)
        assert method.parameters.kind == kind and tuple(method.parameters.reach) == REACH
        method.install(pipe)
        decay = pipe.transformer.blocks[0].attn1.processor.bias.decay
        assert decay.tolist() == [[reach**-2 for reach in REACH]]
        assert resolve_method(method.to_dict()) == method


def test_options_that_are_gone_are_read_where_they_changed_nothing() -> None:
    method = resolve_method("vmonarch-t3")
    assert resolve_method(method.to_dict() | {"parallel_by": "heads"}) == method
    with pytest.raises(InputError, match="^attention.parallel_by is gone, got 'frames': ranks always share heads"):
        resolve_method("vmonarch:parallel_by=frames")
    with pytest.raises(InputError, match="^recipe.batch_guidance is gone, got True: guidance takes two"):
        resolve_method("stack-fast:batch_guidance=true", argument="recipe", recipes=True)


def test_the_warm_up_runs_the_method_itself() -> None:
    method = resolve_method("vmonarch:dense_steps=5,num_iterations=3").parameters
    assert method.without_dense() == VMonarchAttention(num_iterations=3)


# What the commands make of the presets in each folder of `configs/`. (Those in `plans/` are JSON: see test_plan.py.)
PROMPT = {"prompts": ["a red circle"]}
READERS: dict[str, Callable[[str], Any]] = {
    "attention": resolve_method,
    "calibrate": lambda name: build_config(CalibrateConfig, read_yaml(name, group="calibrate"), PROMPT),
    "compare": lambda name: build_config(CompareConfig, read_yaml(name, group="compare"), PROMPT),
    "defaults": lambda name: build_config(SamplingConfig, read_yaml(name, group="defaults"), PROMPT),
    "eval": lambda name: build_config(EvalConfig, read_yaml(name, group="eval")),
    "finetune": lambda name: finetune_config(read_yaml(name, group="finetune")),
    "generate": lambda name: build_config(GenerateConfig, read_yaml(name, group="generate"), PROMPT),
    "models": read_model_config,
    "preprocess": lambda name: preprocess_config(read_yaml(name, group="preprocess"), VIDEOS),
    "recipes": lambda name: resolve_method(name, recipes=True),
}
VIDEOS = {"videos": "clips", "captions": "captions.jsonl", "output": "data"}


def test_every_folder_of_presets_has_a_reader() -> None:
    assert set(READERS) == {path.parent.name for path in FOLDER.rglob("*.yaml")}


@pytest.mark.parametrize("group", READERS)
def test_every_preset_is_read_and_names_a_model_that_there_is(group: str) -> None:
    for name in preset_names(group):
        model = getattr(READERS[group](name), "model", "embedded")
        assert model == "embedded" or re.fullmatch(r"[\w.-]+/[\w.-]+", model), f"{group}/{name}: {model!r}"


def test_every_shipped_yaml_says_what_it_is_for() -> None:
    for path in FOLDER.rglob("*.yaml"):
        assert path.read_text(encoding="utf-8").startswith("# "), path


def test_build_checks_types() -> None:
    assert build(VMonarchAttention, {"min_mass": 1}).min_mass == 1.0
    for values in (
        {"coarse": "1.5"},
        {"coarse": None},
        {"coarse": True},
        {"tiles": [1]},
        {"tiles": 2},
        {"coarse": "???"},
    ):
        with pytest.raises(InputError, match=next(iter(values))):
            build(VMonarchAttention, values)
