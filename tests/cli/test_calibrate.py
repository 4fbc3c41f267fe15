"""`vmonarch calibrate`: from prompts to a diagnosis and a plan that runs; and what it refuses."""

import json
import re

import numpy as np
import pytest

from vmonarch import AttentionPlan
from vmonarch.configs import InputError
from vmonarch.eval.calibrate.planning import default_flops
from vmonarch.flops import full_flops, vmonarch_flops
from vmonarch.grid import LatentGrid
from vmonarch.options import TwoResolutionOptions

PROMPT = "a red circle"
SPARSE = "two-resolution:share=0.2,tile=[1,2,2]"


def test_a_model_is_diagnosed_and_planned_and_other_plans_need_no_sampling(cli, monkeypatch):
    words = ["calibrate", PROMPT, "--steps", 3, "--every", 2, "--candidates", "vmonarch-t1", SPARSE]
    assert "work:" in cli.done(*words, "--flops", 0.5, "--measure", "kl", "--refine", 2)
    (folder,) = (cli.folder / "outputs" / "calibrate").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["diagnosis.json", "plan.json"]
    diagnosis = json.loads((folder / "diagnosis.json").read_text())
    part = diagnosis["transformers"]["transformer"]
    assert part["steps"] == [0, 2] and (part["layers"], part["heads"]) == (2, 2)
    # Two calls of a step: with the prompt and without.
    assert diagnosis["grid"] == [3, 2, 3] and part["rows"] == 2 * 18
    assert list(part["candidates"]) == ["vmonarch-t1", SPARSE]
    for values in part["candidates"].values():
        assert all(np.shape(values[key]) == (2, 2, 2) for key in ("error", "layer_error", "kl", "output_error"))
    assert diagnosis["about"]["config"]["prompts"] == [PROMPT]
    flops = vmonarch_flops(LatentGrid(3, 2, 3), 12, num_iterations=1) / full_flops(LatentGrid(3, 2, 3), 12)
    assert diagnosis["candidates"]["vmonarch-t1"]["flops"] == pytest.approx(flops)
    assert diagnosis["candidates"][SPARSE]["options"] == {"kind": "two_resolution", "share": 0.2, "tile": [1, 2, 2]}
    plan = AttentionPlan.parse(folder / "plan.json")
    assert 1 <= len(plan.about["in_place"]) <= 2 and min(plan.about["in_place"]) > 0
    assert plan.about["measure"] == "kl" and plan.about["predicted"]["flops_of_vmonarch"] <= 0.5 + 1e-6
    again = ["calibrate", "--diagnosis", folder / "diagnosis.json"]
    with monkeypatch.context() as patch:
        patch.setattr("vmonarch.pipelines.loading.load_model", lambda *_: pytest.fail("a model was loaded"))
        with pytest.warns(UserWarning, match="the plan is nothing but full attention"):
            assert cli.done(*again, "--flops", 99, "--plan", "exact.json", tiny=False).endswith("exact.json\n")
        assert {name for row in AttentionPlan.parse("exact.json").layers["transformer"] for name in row} == {"full"}
        least = diagnosis["candidates"][SPARSE]["flops"] / default_flops(LatentGrid(*diagnosis["grid"])) + 1e-9
        cli.done(*again, "--measure", "kl", "--flops", least, "--plan", "2.json", tiny=False)
        assert list(AttentionPlan.parse("2.json").methods) == [SPARSE]
        for words, message in (
            (again, "exists; give another --plan"),
            ([*again, "--flops", 0.01], "--flops must be at least 0."),
            ([*again, "a prompt"], "prompt must not be given with --diagnosis"),
            ([*again[:2], folder / "plan.json"], "is no diagnosis"),
        ):
            code, _, err = cli(*words, tiny=False)
            assert code == 2 and message in err, err
    (options,) = AttentionPlan.parse("2.json").methods.values()
    assert options == TwoResolutionOptions(share=0.2, tile=(1, 2, 2))
    cli.done("compare", "a red circle", "--methods", "full", "vmonarch:plan=2.json")


def test_a_plan_for_a_time_needs_a_gpu(cli, monkeypatch):
    line = ["calibrate", PROMPT, *"--steps 1 --candidates vmonarch-t1 vmonarch --no-sensitivity".split()]
    code, _, err = cli(*line, "--time", 1)
    assert code == 2 and "--time must be measured on a GPU, but the model is on cpu" in err
    assert not list((cli.folder / "outputs" / "calibrate").glob("*")), "nothing was sampled"
    times = {"full": 2.0, "vmonarch-t1": 0.8, "vmonarch": 0.8}
    monkeypatch.setattr("vmonarch.eval.calibrate.run.head_times", lambda *_: times)
    out = cli.done(*line)
    assert re.search(r"^time: \S+ % of full", out, re.MULTILINE)
    diagnosis = out.splitlines()[-2]
    monkeypatch.setenv("HOME", str(cli.folder))
    words = ["--diagnosis", f"~/{diagnosis}", "--time", 1, "--plan", "~/p.json"]
    assert "time: 40.0 % of full attention's" in cli.done("calibrate", *words, tiny=False)


def test_what_was_sampled_outlives_a_plan_that_cannot_be_made(cli, monkeypatch):
    line = ["calibrate", "a red circle", *"--steps 1 --candidates vmonarch-t1 vmonarch --no-sensitivity".split()]

    def no_plan(*_, **__):
        raise InputError("flops", "has no plan")

    with monkeypatch.context() as patch:
        patch.setattr("vmonarch.eval.calibrate.planning.plan", no_plan)
        code, _, err = cli(*line)
    (folder,) = (cli.folder / "outputs" / "calibrate").iterdir()
    assert code == 2 and "--flops has no plan" in err and "--diagnosis makes other plans" in err
    assert str(folder.relative_to(cli.folder) / "diagnosis.json") in err
    cli.done("calibrate", "--diagnosis", folder / "diagnosis.json", tiny=False)
    with pytest.warns(UserWarning, match="nothing but full attention"):
        cli.done(*line, "--flops", 99)
