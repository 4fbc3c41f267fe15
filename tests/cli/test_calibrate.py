"""`vmonarch calibrate`: from prompts to a diagnosis, a plan that runs, and a report; and what it refuses."""

import json
from pathlib import Path

import pytest
from html_page import check_whole

from vmonarch import AttentionPlan
from vmonarch.configs import InputError, read_yaml
from vmonarch.eval.calibrate.settings import CANDIDATES, CalibrateConfig
from vmonarch.files import AtomicFiles
from vmonarch.pipelines.config import build_config
from vmonarch.plan import method_dict
from vmonarch.two_resolution_options import TwoResolutionOptions

PROMPT = "a <b>red</b> circle & more"
SPARSE = "two-resolution:share=0.2,tile=[1,2,2]"


def test_a_model_is_diagnosed_planned_and_reported_and_other_plans_need_no_sampling(cli, monkeypatch):
    words = ["calibrate", PROMPT, "--every", 1, "--maps", "1:0", "--candidates", "vmonarch-t1", SPARSE]
    code, out, err = cli(*words, "--flops", 0.5, "--measure", "kl", "--refine", 2)
    assert code == 0 and "work:" in out and "change of the model's output, measured in place: " in out, err
    (folder,) = (cli.folder / "outputs" / "calibrate").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["diagnosis.json", "plan.json", "report.html"]
    diagnosis = json.loads((folder / "diagnosis.json").read_text())
    part = diagnosis["transformers"]["transformer"]
    assert part["steps"] == list(range(len(part["steps"]))) and list(part["candidates"]) == ["vmonarch-t1", SPARSE]
    assert diagnosis["about"]["config"]["prompts"] == [PROMPT]
    assert diagnosis["candidates"][SPARSE]["options"] == {"kind": "two_resolution", "share": 0.2, "tile": [1, 2, 2]}
    plan = AttentionPlan.parse(folder / "plan.json")
    assert 1 <= len(plan.about["in_place"]) <= 2 and min(plan.about["in_place"]) > 0
    assert plan.about["measure"] == "kl" and plan.about["predicted"]["flops_of_vmonarch"] <= 0.5 + 1e-6
    page = check_whole((folder / "report.html").read_text())
    assert "Measured in place, the output changes by" in " ".join(text for _, text in page.texts)
    # Maps of full attention and of two candidates.
    pictures = page.of("img")
    assert len(pictures) == 3 and all(picture["src"].startswith("data:image/png;base64,") for picture in pictures)
    assert not page.of("b") and PROMPT in "".join(text for _, text in page.texts)
    # The plan, three maps of full attention, three measures of two candidates: 2 layers of 2 heads each.
    titles = [text for tag, text in page.texts if tag == "title" and text.startswith("layer 1, head 1: ")]
    assert len(titles) == 1 + 3 + 3 * 2
    again = ["calibrate", "--diagnosis", folder / "diagnosis.json"]
    with monkeypatch.context() as patch:
        patch.setattr("vmonarch.pipelines.loading.load_model", lambda *_: pytest.fail("a model was loaded"))
        with pytest.warns(UserWarning, match="the plan is nothing but full attention"):
            code, out, _ = cli(*again, "--budget", 0, "--plan", "exact.json", tiny=False)
        assert code == 0 and out.splitlines()[-1] == "exact.json"
        assert {name for row in AttentionPlan.parse("exact.json").layers["transformer"] for name in row} == {"full"}
        some = [*again, "--budget", 9, "--plan"]
        for left, cheapest in (["vmonarch-t1"], "vmonarch-t1"), (["vmonarch-t1", SPARSE], SPARSE):
            assert cli(*some, f"{len(left)}.json", "--candidates", *left, tiny=False)[0] == 0
            assert list(AttentionPlan.parse(f"{len(left)}.json").methods) == [cheapest]
        for words, message in (
            (
                [*some, "p.json", "--candidates", "vmonarch-t2"],
                f"must be of vmonarch-t1, {SPARSE}, got 'vmonarch-",
            ),
            (again, "exists; give another --plan"),
            ([*again, "a prompt"], "prompt must not be given with --diagnosis"),
            ([*again, "--refine", 2], "--refine must not be given with --diagnosis"),
            ([*again[:2], folder / "plan.json"], "is no diagnosis"),
        ):
            code, _, err = cli(*words, tiny=False)
            assert code == 2 and message in err, err
    (options,) = AttentionPlan.parse("2.json").methods.values()
    assert options == TwoResolutionOptions(share=0.2, tile=(1, 2, 2))
    assert cli("compare", "a red circle", "--methods", "full", "vmonarch:plan=2.json")[0] == 0


def test_a_plan_for_a_time_needs_a_gpu_and_is_reported(cli, monkeypatch):
    line = ["calibrate", PROMPT, *"--steps 1 --candidates vmonarch-t1 vmonarch --no-sensitivity".split()]
    code, _, err = cli(*line, "--time", 1)
    assert code == 2 and "--time must be measured on a GPU, but the model is on cpu" in err
    assert not list((cli.folder / "outputs" / "calibrate").glob("*")), "nothing was sampled"
    times = {"full": 2.0, "vmonarch-t1": 0.8, "vmonarch": 0.8}
    monkeypatch.setattr("vmonarch.eval.calibrate.run.head_times", lambda *_: times)
    code, out, err = cli(*line, "--budget", 9)
    assert code == 0 and "time: 40.0 % of full attention's" in out, err
    diagnosis = out.splitlines()[-2]
    code, out, err = cli("calibrate", "--diagnosis", diagnosis, "--time", 1, "--plan", "p.json", tiny=False)
    assert code == 0 and "time: 40.0 % of full attention's" in out, err
    page = check_whole(Path(diagnosis).with_name("report.html").read_text())
    words = " ".join(text for _, text in page.texts)
    assert "time of full attention" in words and "head by head: 40.0 %" in words


def test_what_was_sampled_outlives_a_plan_a_report_or_a_file_that_cannot_be_made(cli, monkeypatch):
    line = ["calibrate", "a red circle", *"--steps 1 --candidates vmonarch-t1 vmonarch --no-sensitivity".split()]
    monkeypatch.setattr("tempfile.tempdir", str(cli.folder))

    def no_plan(*_, **__):
        raise InputError("limit", "cannot be kept")

    with monkeypatch.context() as patch:
        patch.setattr("vmonarch.eval.calibrate.planning.plan", no_plan)
        code, _, err = cli(*line, "--limit", "kl=1e-9")
    (folder,) = (cli.folder / "outputs" / "calibrate").iterdir()
    assert code == 2 and "--limit cannot be kept" in err and "--diagnosis makes other plans" in err
    assert str(folder.relative_to(cli.folder) / "diagnosis.json") in err
    assert cli("calibrate", "--diagnosis", folder / "diagnosis.json", tiny=False)[0] == 0
    stage = AtomicFiles.stage
    for lost in ("diagnosis.json", "report.html"):

        def no_room(self, path, lost=lost):
            if path.name == lost:
                raise OSError(28, "No space left on device")
            return stage(self, path)

        monkeypatch.setattr(AtomicFiles, "stage", no_room)
        code, _, err = cli(*line, "--flops", 1)
        (kept,) = cli.folder.glob(f"vmonarch-*/{lost}")
        assert code == 1 and "No space left" in err and f"{lost} is kept at {kept}" in err
    assert AttentionPlan.parse(max((cli.folder / "outputs" / "calibrate").iterdir()) / "plan.json").methods


def test_candidates_are_what_their_methods_change():
    config = CalibrateConfig(prompts=("p",), candidates=CANDIDATES)
    found = [method_dict(method.processor().options) for method in config.candidates]
    half = {"coarse": 2, "last_l_update": False}
    assert found[:3] == [{"num_iterations": 1, "exact": None}, half | {"exact": None}, {"exact": None}]
    assert found[3:6] == [half | {"row_share": 0.25}, {"num_iterations": 1}, {"coarse": 2, "row_share": 0.25}]
    assert found[6:9] == [{"coarse": 2}, {}, {"num_iterations": 3}]
    assert [entry["exact"]["band"] for entry in found[9:15]] == [0, 1, 0, 1, 2, 3]
    assert ["rows" in entry["exact"] for entry in found[9:15]] == [False] * 2 + [True] * 4
    kind = {"kind": "two_resolution"}
    assert found[15:18] == [kind, kind | {"share": 0.2}, kind | {"share": 0.4}]
    kind = {"kind": "first_order"}
    assert found[18:] == [kind, kind | {"parts": (1, 2, 2)}, kind | {"parts": (1, 4, 4)}]


def test_what_a_model_that_cannot_be_differentiated_needs_is_said(cli, monkeypatch):
    from vmonarch.eval.calibrate import diagnosis

    def refuses(*tensors):
        raise RuntimeError("derivative for aten::quantized is not implemented")

    words = ["a red circle moving right", "--steps", "1", "--candidates", "vmonarch-t1"]
    monkeypatch.setattr(diagnosis.Recorder, "add", refuses)
    code, _, err = cli("calibrate", *words)
    assert code == 2 and "sensitivity cannot be measured: derivative for" in err and "--no-sensitivity" in err
    monkeypatch.undo()
    code, out, err = cli("calibrate", *words, "--no-sensitivity")
    assert code == 0, err
    assert "output_error" not in Path(out.split()[-2]).read_text()


def test_settings_are_checked_and_the_shipped_ones_build():
    assert [CalibrateConfig(prompts=("p",), **given).measure for given in ({}, {"refine": 2})] == [None, "layer_error"]
    assert CalibrateConfig(prompts=("p",), refine=2, measure="kl").measure == "kl"
    assert build_config(CalibrateConfig, read_yaml("quick", group="calibrate"), {"prompts": ["p"]}).every == 10
    for given, message in (
        ({"candidates": "vmonarch"}, "candidates must be a list"),
        ({"maps": ("²:0",)}, "maps must be layer:head"),
        ({"flops": 1.0, "time": 1.0}, "flops and time exclude each other"),
        ({"budget": 1.0, "limit": "kl=1"}, "limit is for flops and time"),
        ({"limit": "kl"}, "limit must be measure=share"),
        ({"measure": "output_error", "sensitivity": False}, "measure cannot be output_error without sensitivity"),
        ({"refine": 2, "budget": 1.0}, "refine measures plans for flops or time"),
        ({"time": 1.0, "candidates": ("vmonarch-t1",)}, "time is relative to VMonarch with its defaults"),
        ({"candidates": ("vmonarch:dense_layers=1",)}, "candidates must leave dense_layers alone"),
    ):
        with pytest.raises(InputError, match=message):
            CalibrateConfig(prompts=("p",), **given)
