"""`vmonarch eval`: the numbers are those of the definitions, nothing is lost by stopping, and the report is whole."""

from __future__ import annotations

import copy
import fcntl
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from html_page import Page, check_whole

from vmonarch import AttentionPlan, LatentGrid
from vmonarch.configs import InputError, preset_names, read_yaml
from vmonarch.configs.methods import resolve_method
from vmonarch.eval import evaluate as module
from vmonarch.eval.attention_flops import recorded_call, relative_flops, transformers_by_step
from vmonarch.eval.evaluate import EvalConfig, Evaluation, Shard, evaluate
from vmonarch.eval.report import quality_plot, report
from vmonarch.eval.similarity import PerceptualDistance, frames_of_file, similarity
from vmonarch.eval.summary import MEASURES, TIMES, differences, interval, statistics
from vmonarch.flops import full_flops, vmonarch_flops
from vmonarch.pipelines import loading, records, sampling
from vmonarch.pipelines.config import build_config, complete
from vmonarch.pipelines.loading import load_model
from vmonarch.pipelines.model_folder import find_model
from vmonarch.pipelines.outputs import GenerationError
from vmonarch.pipelines.video_io import read_video

PROMPTS = ("a red circle moving right", "a blue </script><b>../../square\" & 'plain'")
TINY = {"height": 32, "width": 48, "num_frames": 9, "steps": 2, "negative_prompt": "", "device": "cpu"}
METHODS = ("full", "vmonarch-plain", "vmonarch-t1:dense_layers=1")


def config(model: Path, output: Path, **values: Any) -> EvalConfig:
    given = {"prompts": PROMPTS, "seeds": (1, 2), "methods": METHODS, "model": str(model), **TINY, **values}
    return EvalConfig(**given, output_dir=str(output))


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> loading.LoadedModel:
    folder = find_model(str(tiny_model))
    return load_model(complete(config(tiny_model, Path("unused")), folder), folder)


@pytest.fixture(scope="module")
def whole(loaded: loading.LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    """An evaluation that nothing interrupted; not to be changed."""
    output = tmp_path_factory.mktemp("whole") / "eval"
    return evaluate(config(loaded.folder.path, output, batch_size=2), model=loaded, command="vmonarch eval …")


@pytest.fixture
def copied(whole: Evaluation, tmp_path: Path) -> Path:
    """The folder of such an evaluation, for a test to change."""
    return Path(shutil.copytree(whole.folder, tmp_path / "eval"))


def without_times(record: Any) -> Any:
    """A record without what differs between two runs."""
    if isinstance(record, dict):
        return {key: without_times(value) for key, value in record.items() if key not in (*TIMES, "created", "command")}
    return [without_times(value) for value in record] if isinstance(record, list) else record


def files(folder: Path) -> dict[str, int]:
    """When each file was written."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_the_record_holds_what_the_definitions_give(whole: Evaluation, loaded: loading.LoadedModel) -> None:
    record = whole.record
    assert record == json.loads((whole.folder / "evaluation.json").read_text(encoding="utf-8"))
    assert [(item["prompt"], item["seed"]) for item in record["items"]] == [(p, s) for p in PROMPTS for s in (1, 2)]
    settings = complete(config(loaded.folder.path, whole.folder, batch_size=2), loaded.folder)
    frames, decoded = {}, {}
    item = record["items"][3]
    for method, row in zip(settings.methods, item["results"], strict=True):
        method.install(loaded.pipe)
        frames[method.label] = sampling.sample(loaded, settings, [PROMPTS[1]] * 2, [1, 2]).frames[1]
        decoded[method.label] = frames_of_file(read_video(whole.folder / item["folder"] / row["video"])[0])
        assert row["frames_sha256"] == records.frames_sha256(frames[method.label])
        if method.label == "full":
            assert all(row[key] is None for key in MEASURES if key not in TIMES)
            continue
        for prefix, of in (("", frames), ("mp4_", decoded)):
            for key, value in vars(similarity(of[method.label], of["full"])).items():
                assert row[prefix + key] == value
        assert row["mp4_psnr"] != row["psnr"] and row["lpips"] is row["mp4_lpips"] is None
    for label in METHODS[1:]:
        rows = [row for item in record["items"] for row in item["results"] if row["method"] == label]
        for key in ("psnr", "mp4_ssim", "seconds"):
            values = [row[key] for row in rows]
            found = record["statistics"][label][key]
            assert found["mean"] == pytest.approx(np.mean(values)) and found["items"] == 4
            assert min(values) <= found["low"] <= found["mean"] <= found["high"] <= max(values)
    assert record["attention_flops"]["full"] == 1.0 and record["baseline"] == "vmonarch-plain"
    assert "vmonarch-plain" not in record["differences"]


def test_no_prompt_is_a_file_name(whole: Evaluation) -> None:
    names = {part for name in files(whole.folder) for part in Path(name).parts}
    assert not [name for name in names if "square" in name or "circle" in name or "script" in name]
    assert sorted(path.name[:5] for path in (whole.folder / "items").iterdir()) == [f"000{n}-" for n in (1, 2, 3, 4)]


def test_a_stopped_evaluation_goes_on_to_the_same_record(
    loaded: loading.LoadedModel, whole: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(loaded.folder.path, tmp_path / "eval", batch_size=2)
    write = module._Run._write

    def stop_at_the_second(self, item, frames, results) -> None:
        if item.number == 2:
            # What a process leaves that is killed while it gives the files their names.
            folder = self.output / "items" / item.name
            folder.mkdir()
            (folder / "full.mp4").write_bytes(b"half")
            (folder / ".vmonarch-plain.99.partial.mp4").write_bytes(b"half")
            raise KeyboardInterrupt
        write(self, item, frames, results)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module._Run, "_write", stop_at_the_second)
        evaluate(settings, model=loaded)
    assert not (tmp_path / "eval" / "evaluation.json").exists()
    before = files(tmp_path / "eval")
    evaluation = evaluate(settings, model=loaded)
    after = files(tmp_path / "eval")
    first = [name for name in before if name.startswith("items/0001")]
    assert len(first) == 4 and all(after[name] == before[name] for name in first), "what is done is not done again"
    assert not [name for name in after if "partial" in name]
    assert without_times(evaluation.record) == without_times(whole.record)


def test_processes_share_the_items_out(
    loaded: loading.LoadedModel, whole: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(loaded.folder.path, tmp_path / "eval", batch_size=2)
    for rank, missing in ((1, 2), (0, 0)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        evaluation = evaluate(settings, model=loaded)
        assert evaluation.missing == missing and (evaluation.record is None) == bool(missing)
        assert (tmp_path / "eval" / "flops.json").exists() == (rank == 0), "one process counts for all"
    assert without_times(evaluation.record) == without_times(whole.record)


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("x", "2"), ("-1", "2"), ("0", "0")])
def test_a_rank_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(InputError, match="must be a number below WORLD_SIZE"):
        Shard.of_environment()


def no_sampling(*_: Any, **__: Any) -> None:
    pytest.fail("samples")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 3}, "steps was 2, is 3"),
        ({"seeds": (1, 2, 3)}, r"seeds was \[1, 2\], is \[1, 2, 3\]"),
        ({"methods": ("full", "vmonarch-plain")}, "methods was"),
        (
            {"methods": ("full", "vmonarch-plain", {"name": "vmonarch-t1", "dense_layers": 2, "label": METHODS[2]})},
            r"settings: methods\[2\].dense_layers was 1, is 2$",
        ),
        ({"lpips": True}, "lpips was false, is true"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_settings_are_refused_and_named(loaded, copied: Path, monkeypatch, change: dict, message: str) -> None:
    monkeypatch.setattr(module, "sample_methods", no_sampling)
    monkeypatch.setattr("vmonarch.eval.similarity.alexnet_weights", lambda: None)
    before = files(copied)
    with pytest.raises(InputError, match=message):
        evaluate(config(loaded.folder.path, copied, **{"batch_size": 2, **change}), model=loaded)
    assert files(copied) == before


def test_what_changes_no_number_may_change(loaded, whole: Evaluation, copied: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "sample_methods", no_sampling)
    settings = config(loaded.folder.path, copied, batch_size=2, baseline=METHODS[2], report_items=1)
    record = evaluate(settings, model=loaded).record
    there, back = whole.record["differences"][METHODS[2]], record["differences"]["vmonarch-plain"]
    assert back["psnr"]["mean"] == pytest.approx(-there["psnr"]["mean"]) != 0
    assert (copied / "report.html").read_text(encoding="utf-8").count("<video") == 3


def test_a_plan_may_have_moved_but_not_changed() -> None:
    before = {"methods": [{"plan": "/a/plan.json", "plan_sha256": "1"}]}
    assert not list(module._changes(before, {"methods": [{"plan": "/b/plan.json", "plan_sha256": "1"}]}))
    assert len(list(module._changes(before, {"methods": [{"plan": "/b/plan.json", "plan_sha256": "2"}]}))) == 2


def test_a_folder_of_something_else_is_left_alone(loaded, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="must be empty or hold an evaluation"):
        evaluate(config(loaded.folder.path, tmp_path), model=loaded)
    assert list(files(tmp_path)) == ["thesis.txt"]


@pytest.mark.parametrize("damage", ["missing", "cut", "no record"])
def test_a_missing_or_damaged_file_is_an_error_that_names_it(loaded, copied: Path, damage: str) -> None:
    (folder,) = (copied / "items").glob("0003-*")
    video = folder / ("item.json" if damage == "no record" else "vmonarch-plain.mp4")
    if damage == "missing":
        video.unlink()
    else:
        video.write_bytes(video.read_bytes()[:200])
    before = (copied / "report.html").stat().st_mtime_ns
    with pytest.raises(GenerationError, match=str(video)):
        evaluate(config(loaded.folder.path, copied, batch_size=2), model=loaded)
    assert (copied / "report.html").stat().st_mtime_ns == before


# --------------------------------------------------------------------------------------------------------------------
# Statistics


def test_the_interval_is_the_bootstraps() -> None:
    from scipy.stats import bootstrap

    values = np.random.default_rng(3).normal(20, 3, 50)
    found = interval(values)
    expected = bootstrap((values,), np.mean, method="percentile", rng=1).confidence_interval
    assert found["mean"] == pytest.approx(values.mean()) and found["items"] == 50
    assert (found["low"], found["high"]) == pytest.approx(tuple(expected), abs=0.05)
    assert interval(values) == found


def test_there_is_no_interval_of_one_item_or_of_infinity() -> None:
    assert interval([3.0]) == {"mean": 3.0, "low": None, "high": None, "items": 1}
    assert interval([math.inf, 3.0]) == {"mean": "inf", "low": None, "high": None, "items": 2}
    assert interval([2.0, 2.0]) == {"mean": 2.0, "low": 2.0, "high": 2.0, "items": 2}


def made_up(**measured: list[Any]) -> list[dict[str, Any]]:
    """Records of as many items as `measured` has PSNRs, by method."""
    empty = dict.fromkeys(MEASURES)
    return [
        {
            "number": i + 1,
            "results": [{"method": name, **empty, "psnr": values[i]} for name, values in measured.items()],
        }
        for i in range(len(next(iter(measured.values()))))
    ]


def test_differences_are_paired() -> None:
    # The items differ by far more than the methods: unpaired, nothing could be told apart.
    records = made_up(a=[10.0, 20.0, 30.0, 40.0], b=[11.0, 21.1, 31.0, 41.1], c=["inf"] * 4, d=["inf"] * 4)
    found = differences(records, "abcd", "a")
    assert found["b"]["psnr"]["mean"] == pytest.approx(1.05) and found["b"]["psnr"]["low"] >= 0.99
    assert found["c"]["psnr"]["mean"] == "inf" and found["b"]["ssim"] is None
    to_equal = differences(records, "abcd", "c")
    assert to_equal["d"]["psnr"]["mean"] == 0.0 and to_equal["a"]["psnr"]["mean"] == "-inf", "JSON has no -inf"


def test_a_measure_of_some_items_only_is_an_error() -> None:
    with pytest.raises(GenerationError, match="method a has psnr for 1 of 2 items"):
        statistics(made_up(a=[10.0, None]), "a")
    records = made_up(a=[10.0, 20.0])
    records[1]["results"] = []
    with pytest.raises(GenerationError, match="method a has 0 results in item 2"):
        statistics(records, "a")


# --------------------------------------------------------------------------------------------------------------------
# FLOPs


@pytest.fixture(scope="module")
def call(loaded: loading.LoadedModel) -> Any:
    settings = complete(config(loaded.folder.path, Path("unused")), loaded.folder)
    resolve_method("full").install(loaded.pipe)
    with recorded_call(loaded.pipe) as call:
        sampling.denoise(loaded, settings, ["a red circle"], [0], steps=1)
    return call


TEN = ["transformer"] * 10
# 9 frames of 32×48 pixels.
GRID = LatentGrid(3, 2, 3)


@pytest.mark.parametrize(
    "options", [{}, {"num_iterations": 3}, {"coarse": 2}, {"tiles": (2, 1)}, {"frames_per_block": 3}], ids=str
)
def test_flops_are_those_of_the_formula(call, options: dict[str, Any]) -> None:
    method = resolve_method({"name": "vmonarch", "implementation": "triton", **options, "label": "ours"})
    expected = vmonarch_flops(GRID, 12, **options) / full_flops(GRID, 12)
    assert relative_flops(call, [method], TEN) == {"ours": pytest.approx(expected)}


@pytest.mark.parametrize("name", ["tiny_two_stage_model", "tiny_token_timestep_model", "tiny_image_model"])
def test_flops_of_other_pipelines(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    from PIL import Image

    image = None
    if name == "tiny_image_model":
        image = str(tmp_path / "first.png")
        Image.new("RGB", (48, 32), "red").save(image)
    model = request.getfixturevalue(name)
    settings = complete(config(model, tmp_path, image=image), find_model(str(model)))
    pipeline = load_model(settings, find_model(str(model)))
    with recorded_call(pipeline.pipe) as call:
        sampling.denoise(pipeline, settings, ["a red circle"], [0], steps=2)
    expected = vmonarch_flops(GRID, 12) / full_flops(GRID, 12)
    steps = transformers_by_step(pipeline.pipe, 10)
    assert relative_flops(call, [resolve_method("vmonarch")], steps) == {"vmonarch": pytest.approx(expected)}


def test_flops_of_exact_blocks_dense_steps_and_dense_layers(call) -> None:
    names = (
        "full",
        "vmonarch-plain",
        "vmonarch-own",
        "vmonarch-plain:dense_steps=3",
        "vmonarch-plain:dense_layers=[1]",
    )
    full, plain, own, steps, layers = relative_flops(call, [resolve_method(name) for name in names], TEN).values()
    assert full == 1.0
    assert own - plain == pytest.approx(1 / GRID.frames), "the blocks on the diagonal"
    assert steps == pytest.approx(0.3 + 0.7 * plain) and layers == pytest.approx((1 + plain) / 2)


def test_flops_of_steps_that_renew_residuals(call) -> None:
    names = ("vmonarch-plain", "vmonarch-plain:refresh=[0,1,4,9]", "vmonarch-plain:refresh=[0,1,4],dense_steps=2")
    plain, found, after_dense = relative_flops(call, [resolve_method(name) for name in names], TEN).values()
    # The residuals of steps 0 and 9 are of no use, so they are not made.
    assert found == pytest.approx(0.4 + 0.8 * plain)
    # Step 2 is the first that has to make one.
    assert after_dense == pytest.approx(0.4 + 0.8 * plain)
    two = relative_flops(call, [resolve_method(names[1])], ["transformer"] * 3 + ["transformer_2"] * 7)
    assert two == {names[1]: pytest.approx(0.5 + 0.7 * plain)}, "step 3 is the first of the second transformer"


def test_flops_of_a_plan_are_those_of_its_heads(call, tmp_path) -> None:
    plan = AttentionPlan({"t1": {"num_iterations": 1}, "full": None}, {"transformer": [["full", "t1"], ["t1", "t1"]]})
    plan.save(tmp_path / "plan.json")
    method = resolve_method(f"vmonarch:plan={tmp_path / 'plan.json'}")
    (found,) = relative_flops(call, [method], TEN).values()
    assert found == pytest.approx(plan.flops(GRID, 12) / (4 * full_flops(GRID, 12)))


def test_flops_of_a_plan_for_two_transformers_count_each_where_it_runs(tiny_two_stage_model: Path, tmp_path) -> None:
    settings = complete(config(tiny_two_stage_model, tmp_path), find_model(str(tiny_two_stage_model)))
    pipeline = load_model(settings, find_model(str(tiny_two_stage_model)))
    used: list[str] = []
    for name in ("transformer", "transformer_2"):
        getattr(pipeline.pipe, name).register_forward_pre_hook(lambda *_, name=name: used.append(name))
    with recorded_call(pipeline.pipe) as call:
        sampling.denoise(pipeline, settings, ["a red circle"], [0], steps=6)
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


# --------------------------------------------------------------------------------------------------------------------
# VBench and LPIPS


def test_vbench_gets_every_video_with_its_prompt(loaded, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def score_videos(videos: Any, dimensions: Any, *, work_dir: Path, timeout: float) -> dict[str, Any]:
        seen.append((videos, dimensions, work_dir, timeout))
        return {name: SimpleNamespace(score=0.25 * len(seen)) for name in dimensions}

    dimensions = ("imaging_quality", "subject_consistency", "overall_consistency")
    fake = ModuleType("vmonarch.eval.vbench")
    fake.DIMENSIONS = dict.fromkeys(dimensions)  # type: ignore[attr-defined]
    fake.load_environment = lambda: None  # type: ignore[attr-defined]
    fake.PromptedVideo = lambda *values: values  # type: ignore[attr-defined]
    fake.score_videos = score_videos  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vmonarch.eval.vbench", fake)
    settings = config(loaded.folder.path, copied, batch_size=2, vbench=dimensions, vbench_timeout=7.0)
    record = evaluate(settings, model=loaded).record
    assert len(seen) == 3, "once for each method"
    for (videos, asked, _, timeout), label in zip(seen, METHODS, strict=True):
        assert asked == dimensions and timeout == 7.0
        assert [(prompt, index) for _, prompt, index in videos] == [(p, i) for p in PROMPTS for i in (0, 1)]
        for path, _, _ in videos:
            assert path.is_file() and path.name.startswith(label.partition(":")[0])
    assert record["vbench"]["full"] == dict.fromkeys(dimensions, 0.25)
    assert record["paper_score"] == dict.fromkeys(METHODS), "LPIPS was not measured"
    assert "imaging_quality" in (copied / "report.html").read_text(encoding="utf-8")
    with pytest.raises(InputError, match="vbench must be of imaging_quality, .*did you mean overall_consistency"):
        evaluate(config(loaded.folder.path, copied, vbench=("overal_consistency",)), model=loaded)


def test_without_vbench_nothing_is_sampled(loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vmonarch.eval.vbench", None)
    monkeypatch.setattr(module, "sample_methods", no_sampling)
    with pytest.raises(InputError, match="vbench cannot be scored"):
        evaluate(config(loaded.folder.path, tmp_path / "eval", vbench=("imaging_quality",)), model=loaded)
    assert not (tmp_path / "eval").exists()


def test_vbench_that_is_not_installed_is_refused_at_once(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cli.folder / "cache"))
    code, _, err = cli("eval", "a red circle", "--vbench", "imaging_quality")
    assert code == 2 and "vmonarch vbench install" in err and not (cli.folder / "outputs").exists()


def test_lpips_is_measured_on_float_and_on_decoded_frames(loaded, tmp_path: Path, monkeypatch) -> None:
    from vmonarch.eval import similarity as measures

    distance = lambda a, b: PerceptualDistance(float((a - b).abs().mean()), float((a - b)[0].abs().mean()))
    monkeypatch.setattr(measures, "lpips", distance)
    monkeypatch.setattr(measures, "alexnet_weights", lambda: None)
    methods = ("full", "vmonarch-plain")
    settings = config(loaded.folder.path, tmp_path / "eval", prompts=PROMPTS[:1], methods=methods, lpips=True)
    record = evaluate(settings, model=loaded).record
    row = record["items"][0]["results"][1]
    assert 0 < row["lpips"] != row["mp4_lpips"] > 0 and row["first_frame_lpips"] != row["lpips"]
    assert record["statistics"]["vmonarch-plain"]["mp4_first_frame_lpips"]["items"] == 2
    means = {key: value["mean"] for key, value in record["statistics"]["vmonarch-plain"].items() if value}
    score = module._paper_score(record["statistics"]["vmonarch-plain"], dict.fromkeys(module._SCORED, 0.5))
    assert score == pytest.approx(
        (means["psnr"] + means["first_frame_psnr"]) / 100
        + means["ssim"]
        + means["first_frame_ssim"]
        + (2 - means["lpips"] - means["first_frame_lpips"])
        + 1.5
    )


def test_calls_in_one_folder_leave_each_others_items_alone(loaded, copied: Path, monkeypatch) -> None:
    settings = config(loaded.folder.path, copied, batch_size=2)
    monkeypatch.setattr(module._Run, "_warm_up", lambda *_: None)
    folders = sorted((copied / "items").iterdir())
    for folder in folders[:2]:
        (folder / "item.json").unlink()
    half_written = folders[0] / ".full.1.partial.mp4"
    half_written.write_bytes(b"")
    with (folders[0] / ".claim").open("a") as claim:
        fcntl.flock(claim, fcntl.LOCK_EX)
        assert evaluate(settings, model=loaded).missing == 2 and half_written.exists()
    assert evaluate(settings, model=loaded).missing == 0
    assert not [path.name for path in (copied / "items").rglob(".*")]


# --------------------------------------------------------------------------------------------------------------------
# The command


def test_the_command_writes_the_report_and_prints_the_table(cli) -> None:
    line = ["--methods", "vmonarch-plain", "--seed", 1, "--report-items", 1, "output_dir=a folder"]
    code, out, err = cli("eval", "a red circle moving right", "a blue square", *line)
    assert code == 0, err
    assert "| vmonarch-plain  " in out and "| full (reference) |         100.0 % |" in out
    assert len({len(line) for line in out.splitlines() if line.startswith("|")}) == 1
    assert out.rstrip().endswith("a folder/report.html")
    (record,) = [record for record in cli.records("a folder") if "statistics" in record]
    page = (cli.folder / "a folder" / "report.html").read_text(encoding="utf-8")
    assert page.count("<video") == 2 and "1 of 2 items" in page and record["methods"] == ["full", "vmonarch-plain"]
    code, out, _ = cli("eval", "a red circle moving right", "a blue square", *line, "--quiet")
    assert code == 0 and out.strip() == "a folder/report.html"


def test_settings_that_cannot_be_read_are_named(cli) -> None:
    (cli.folder / "out").mkdir()
    (cli.folder / "out" / "settings.json").write_text('{"prompts": [')
    code, _, err = cli("eval", "a red", "--output-dir", "out")
    assert code == 2 and "--output-dir holds out/settings.json, which cannot be read" in err


def test_lpips_without_its_parts_is_refused_at_once(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = cli("eval", "a red circle", "--lpips")
    assert code == 2 and "--lpips needs torchvision" in err and not (cli.folder / "outputs").exists()


@pytest.mark.parametrize("name", preset_names("eval"))
def test_shipped_settings_fit(loaded: loading.LoadedModel, name: str) -> None:
    settings = build_config(EvalConfig, read_yaml(name, group="eval"))
    assert len(settings.prompts) == 64 and settings.seeds == (0, 1) and settings.labels[0] == "full"
    assert settings.output_dir == f"outputs/eval-{name}"
    for method in settings.methods:
        # Plans that ship are of the embedded model: see test_plan.py.
        if method.options.get("plan") is None:
            method.install(loaded.pipe)


# --------------------------------------------------------------------------------------------------------------------
# The report


def test_the_report_is_one_whole_file(whole: Evaluation) -> None:
    text = (whole.folder / "report.html").read_text(encoding="utf-8")
    page = check_whole(text)
    assert json.loads(next(data for tag, data in page.texts if tag == "script")) == whole.record
    # A prompt is text, whatever it holds: no element comes of it.
    assert not [tag for tag, data in page.texts if tag == "b" and "square" in data]
    assert any(tag == "h3" and PROMPTS[1] in data for tag, data in page.texts)
    assert len(page.of("video")) == 4 * 3 and all(attributes["src"] for attributes in page.of("video"))


def test_the_numbers_of_the_tables_are_those_of_the_record(whole: Evaluation) -> None:
    cells = [attributes.get("data-value") for attributes in Page(report(whole.record, whole.folder)).of("td")]
    for label in METHODS[1:]:
        assert str(whole.record["attention_flops"][label]) in cells
        for key in ("psnr", "mp4_ssim", "first_frame_psnr"):
            assert str(whole.record["statistics"][label][key]["mean"]) in cells
        assert all(str(row["psnr"]) in cells for i in whole.record["items"] for row in i["results"][1:])


def test_wide_tables_show_that_they_scroll_and_keep_their_methods(whole: Evaluation) -> None:
    page = report(whole.record, whole.folder)
    assert page.count("<table") == page.count('<div class="scroll"><table') == 3
    first = re.search(r"\.scroll td:first-child \{([^}]*)\}", page)
    assert first is not None and "position: sticky; left: 0" in first[1] and "background" in first[1]
    assert ".scroll::-webkit-scrollbar {" in page
    # What is asked of a method comes before the measures of decoded frames.
    assert list(MEASURES).index("prompt_score") < list(MEASURES).index("mp4_psnr")


def test_the_report_of_many_items_lists_them_and_holds_some_videos(whole: Evaluation) -> None:
    record = copy.deepcopy(whole.record)
    record["items"] = [{**record["items"][n % 4], "number": n + 1} for n in range(100)]
    page = report(record, whole.folder)
    assert page.count("<video") == 12 * 3 and "12 of 100 items" in page
    assert page.count('href="#item-') == 12 and 'data-value="100">100</td>' in page
    record["config"]["report_megabytes"] = 0
    assert "<video" not in report(record, whole.folder)


def test_plots_leave_out_what_has_no_place(whole: Evaluation) -> None:
    record = copy.deepcopy(whole.record)
    svg = quality_plot(record, "psnr")
    assert svg.count("<title>") == 2 and "<title>vmonarch-plain: PSNR dB" in svg and svg == quality_plot(record, "psnr")
    record["statistics"]["vmonarch-plain"]["psnr"]["mean"] = "inf"
    assert quality_plot(record, "psnr").count("<title>") == 1
    record["attention_flops"][METHODS[2]] = None
    assert quality_plot(record, "psnr") is quality_plot(record, "lpips") is None


@pytest.fixture
def chromium() -> Iterator[str]:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    yield found


# Clicks and looks; what it finds becomes the page's title.
_VISIT = """<script>
addEventListener("load", async () => {
  const first = () => document.querySelector("table tbody tr td").textContent;
  const heads = [...document.querySelectorAll("table th button")];
  const order = [first()];
  const psnr = heads.find(head => head.textContent === "PSNR dB");
  psnr.click(); order.push(first()); psnr.click(); order.push(first());
  const item = document.querySelector(".item"), videos = [...item.querySelectorAll("video")];
  await Promise.all(videos.map(video => video.readyState >= 2 ? 0 :
    new Promise((done, fail) => { video.onloadeddata = done; video.onerror = () => fail(video.error); })));
  const range = item.querySelector("input");
  range.value = 0.5; range.dispatchEvent(new Event("input"));
  const sought = videos.map(video => video.currentTime > 0 && video.currentTime === videos[0].currentTime);
  item.querySelector("button").click();
  const playing = videos.map(video => !video.paused);
  item.querySelector("button").click();
  document.body.style.width = "390px";
  const box = document.querySelector(".scroll"), method = box.querySelector("td");
  box.scrollLeft = 1e4;
  const shift = method.getBoundingClientRect().left - box.getBoundingClientRect().left;
  const table = [box.scrollLeft > 100, Math.abs(shift) < 4];
  document.title = JSON.stringify({order, sought, playing, paused: videos.map(video => video.paused), table});
});
</script>"""


def test_the_report_works_in_a_browser(whole: Evaluation, chromium: str, tmp_path: Path) -> None:
    text = (whole.folder / "report.html").read_text(encoding="utf-8")
    page = tmp_path / "report.html"
    page.write_text(text.replace("</body>", _VISIT + "</body>"), encoding="utf-8")
    run = subprocess.run(
        [
            *(chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=10000", "--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in run.stderr, [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    title = run.stdout.partition("<title>")[2].partition("</title>")[0]
    found = json.loads(title.replace("&amp;", "&"))
    statistics_ = whole.record["statistics"]
    best = max(METHODS[1:], key=lambda label: statistics_[label]["psnr"]["mean"])
    worst = min(METHODS[1:], key=lambda label: statistics_[label]["psnr"]["mean"])
    assert "full" in found["order"][0] and best in found["order"][1] and worst in found["order"][2]
    assert found["sought"] == found["playing"] == found["paused"] == [True] * 3
    # The summary scrolls, and its methods stay.
    assert found["table"] == [True, True]
