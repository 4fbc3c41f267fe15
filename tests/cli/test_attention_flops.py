"""FLOPs of methods are those of the formulas, counted on what a pipeline calls its transformers with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_wan
from PIL import Image

from vmonarch import LatentGrid
from vmonarch.configs.methods import resolve_method
from vmonarch.eval.attention_flops import recorded_call, relative_flops, transformers_by_step
from vmonarch.flops import full_flops, vmonarch_flops
from vmonarch.pipelines import sampling
from vmonarch.pipelines.loading import LoadedModel


def recorded(model: Path, steps: int, **values: Any) -> tuple[LoadedModel, Any]:
    """A loaded pipeline, and the last call of a transformer in a run of it."""
    loaded = tiny_wan.load(model, **values)
    with recorded_call(loaded.pipe) as call:
        sampling.sample(loaded, loaded.config, ["a red circle"], [0], steps=steps, decode=False)
    return loaded, call


@pytest.fixture(scope="module")
def call(tiny_model: Path) -> Any:
    return recorded(tiny_model, 1)[1]


TEN = ["transformer"] * 10
# 9 frames of 32×48 pixels.
GRID = LatentGrid(3, 2, 3)


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
