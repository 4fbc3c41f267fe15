"""FLOPs of methods are those of the formulas, counted on what a pipeline calls its transformers with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vmonarch import AttentionPlan, LatentGrid
from vmonarch.configs.methods import resolve_method
from vmonarch.eval.attention_flops import recorded_call, relative_flops, transformers_by_step
from vmonarch.eval.settings import MethodsConfig
from vmonarch.flops import full_flops, vmonarch_flops
from vmonarch.pipelines import sampling
from vmonarch.pipelines.config import complete
from vmonarch.pipelines.loading import LoadedModel, load_model
from vmonarch.pipelines.model_folder import find_model


def recorded(model: Path, steps: int, **values: Any) -> tuple[LoadedModel, Any]:
    """A loaded pipeline, and the last call of a transformer in a run of it."""
    tiny = {"height": 32, "width": 48, "num_frames": 9, "steps": 2, "negative_prompt": "", "device": "cpu"}
    told = {"prompts": ("a red circle",), **tiny, **values, "model": str(model), "output_dir": "unused"}
    folder = find_model(str(model))
    settings = complete(MethodsConfig(**told), folder)
    loaded = load_model(settings, folder)
    with recorded_call(loaded.pipe) as call:
        sampling.denoise(loaded, settings, ["a red circle"], [0], steps=steps)
    return loaded, call


@pytest.fixture(scope="module")
def call(tiny_model: Path) -> Any:
    return recorded(tiny_model, 1)[1]


TEN = ["transformer"] * 10
# 9 frames of 32×48 pixels.
GRID = LatentGrid(3, 2, 3)


@pytest.mark.parametrize(
    "options", [{}, {"num_iterations": 3, "coarse": 2}, {"tiles": (2, 1), "frames_per_block": 3}], ids=str
)
def test_flops_are_those_of_the_formula(call, options: dict[str, Any]) -> None:
    method = resolve_method({"name": "vmonarch", "implementation": "triton", **options, "label": "ours"})
    expected = vmonarch_flops(GRID, 12, **options) / full_flops(GRID, 12)
    assert relative_flops(call, [method], TEN) == {"ours": pytest.approx(expected)}


@pytest.mark.parametrize("name", ["tiny_token_timestep_model", "tiny_image_model"])
def test_flops_of_other_pipelines(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model, image = request.getfixturevalue(name), None
    if name == "tiny_image_model":
        image = str(tmp_path / "first.png")
        Image.new("RGB", (48, 32), "red").save(image)
    pipeline, call = recorded(model, 2, image=image)
    expected = vmonarch_flops(GRID, 12) / full_flops(GRID, 12)
    steps = transformers_by_step(pipeline.pipe, 10)
    assert relative_flops(call, [resolve_method("vmonarch")], steps) == {"vmonarch": pytest.approx(expected)}


def test_flops_of_exact_blocks_dense_steps_dense_layers_and_steps_that_renew_residuals(call) -> None:
    plain_name, refresh = "vmonarch-plain", "vmonarch-plain:refresh=[0,1,4,9]"
    more = ("dense_steps=3", "dense_layers=[1]", "refresh=[0,1,4],dense_steps=2")
    names = ["full", plain_name, "vmonarch-own", refresh, *(f"{plain_name}:{options}" for options in more)]
    methods = [resolve_method(name) for name in names]
    full, plain, own, renewed, steps, layers, after_dense = relative_flops(call, methods, TEN).values()
    assert full == 1.0
    assert own - plain == pytest.approx(1 / GRID.frames), "the blocks on the diagonal"
    assert steps == pytest.approx(0.3 + 0.7 * plain) and layers == pytest.approx((1 + plain) / 2)
    # The residuals of steps 0 and 9 are of no use, so they are not made.
    assert renewed == pytest.approx(0.4 + 0.8 * plain)
    # Step 2 is the first that has to make one.
    assert after_dense == pytest.approx(0.4 + 0.8 * plain)
    two = relative_flops(call, [resolve_method(refresh)], ["transformer"] * 3 + ["transformer_2"] * 7)
    assert two == {refresh: pytest.approx(0.5 + 0.7 * plain)}, "step 3 is the first of the second transformer"


def test_flops_of_a_plan_are_those_of_its_heads(call, tmp_path) -> None:
    plan = AttentionPlan({"t1": {"num_iterations": 1}, "full": None}, {"transformer": [["full", "t1"], ["t1", "t1"]]})
    plan.save(tmp_path / "plan.json")
    method = resolve_method(f"vmonarch:plan={tmp_path / 'plan.json'}")
    (found,) = relative_flops(call, [method], TEN).values()
    assert found == pytest.approx(plan.flops(GRID, 12) / (4 * full_flops(GRID, 12)))


def test_flops_of_a_plan_for_two_transformers_count_each_where_it_runs(
    tiny_two_stage_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    denoise = sampling.denoise

    def noted(model: LoadedModel, *inputs: Any, **options: Any) -> Any:
        for name in ("transformer", "transformer_2"):
            getattr(model.pipe, name).register_forward_pre_hook(lambda *_, name=name: used.append(name))
        return denoise(model, *inputs, **options)

    monkeypatch.setattr(sampling, "denoise", noted)
    pipeline, call = recorded(tiny_two_stage_model, 6)
    steps = transformers_by_step(pipeline.pipe, 6)
    # Two calls a step, for guidance.
    assert used[::2] == steps and len(set(steps)) == 2
    layers = {"transformer": [["t1"] * 2] * 2, "transformer_2": [["full", "t1"]] * 2}
    AttentionPlan({"t1": {"num_iterations": 1}, "full": None}, layers).save(tmp_path / "plan.json")
    cheap = vmonarch_flops(GRID, 12, num_iterations=1) / full_flops(GRID, 12)
    methods = [resolve_method(f"vmonarch:plan={tmp_path / 'plan.json'}{more}") for more in ("", ",dense_steps=1")]
    plain, dense = relative_flops(call, methods, steps).values()
    work = [cheap if name == "transformer" else (1 + cheap) / 2 for name in steps]
    assert plain == pytest.approx(sum(work) / 6) and dense == pytest.approx((1 + sum(work[1:])) / 6)


def test_flops_of_learnt_layers_are_not_told(call, shipped_adapter) -> None:
    assert relative_flops(call, [resolve_method("based")], TEN) == {"based": None}
