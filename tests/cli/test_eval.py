"""`vmonarch eval` and `compare`: numbers are those of their definitions, and nothing is lost by stopping."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from html_page import check_whole

from vmonarch.configs import InputError, preset_names, read_yaml
from vmonarch.eval import evaluate as module
from vmonarch.eval.compare import compare
from vmonarch.eval.evaluate import EvalConfig, Evaluation, Item, evaluate, prompt_score
from vmonarch.eval.report import quality_plot, report
from vmonarch.eval.settings import CompareConfig
from vmonarch.eval.similarity import PerceptualDistance, similarity
from vmonarch.eval.summary import MEASURES, TIMES, differences, interval, statistics
from vmonarch.files import file_name
from vmonarch.own import ours_of
from vmonarch.pipelines import embedded, loading, outputs, sampling
from vmonarch.pipelines.config import build_config, complete
from vmonarch.pipelines.loading import load_model
from vmonarch.pipelines.model_folder import find_model
from vmonarch.pipelines.outputs import GenerationError
from vmonarch.pipelines.video_io import read_video, to_uint8

PROMPTS = ("a red circle moving right", "a blue </script><b>../../square\" & 'plain'")
TINY = {"height": 32, "width": 48, "num_frames": 9, "steps": 2, "negative_prompt": "", "device": "cpu"}
METHODS = ("full", "vmonarch-plain", "vmonarch-t1:dense_layers=1")


def config(model: Path, output: Path, **values: Any) -> EvalConfig:
    given = {"prompts": PROMPTS, "seeds": (1, 2), "methods": METHODS, "model": str(model), "batch_size": 2, **TINY}
    return EvalConfig(**{**given, **values}, output_dir=str(output))


def comparison(loaded: loading.LoadedModel, output: Path, **values: Any) -> CompareConfig:
    given = {"prompts": PROMPTS[:1], "methods": ("vmonarch-plain",), "model": str(loaded.folder.path), **TINY}
    return CompareConfig(**{**given, **values}, output_dir=str(output))


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> loading.LoadedModel:
    folder = find_model(str(tiny_model))
    return load_model(complete(config(tiny_model, Path("unused")), folder), folder)


@pytest.fixture(scope="module")
def whole(loaded: loading.LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    """An evaluation that nothing interrupted; not to be changed."""
    output = tmp_path_factory.mktemp("whole") / "eval"
    return evaluate(config(loaded.folder.path, output), model=loaded, command="vmonarch eval …")


@pytest.fixture
def copied(whole: Evaluation, tmp_path: Path) -> Path:
    """The folder of such an evaluation, for a test to change."""
    return Path(shutil.copytree(whole.folder, tmp_path / "eval"))


def without_times(record: Any) -> Any:
    """A record without what differs between two runs."""
    if isinstance(record, dict):
        left_out = (*TIMES, "created", "command", "caption")
        return {key: without_times(value) for key, value in record.items() if key not in left_out}
    return [without_times(value) for value in record] if isinstance(record, list) else record


def files(folder: Path) -> dict[str, int]:
    """When each file was written."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def no_sampling(*_: Any, **__: Any) -> None:
    pytest.fail("samples")


def test_the_record_holds_what_the_definitions_give(whole: Evaluation, loaded: loading.LoadedModel) -> None:
    record = whole.record
    assert record == json.loads((whole.folder / "evaluation.json").read_text(encoding="utf-8"))
    assert [(item["prompt"], item["seed"]) for item in record["items"]] == [(p, s) for p in PROMPTS for s in (1, 2)]
    settings = complete(config(loaded.folder.path, whole.folder), loaded.folder)
    frames = {}
    item = record["items"][3]
    for method, row in zip(settings.methods, item["results"], strict=True):
        method.install(loaded.pipe)
        frames[method.label] = sampling.sample(loaded, settings, [PROMPTS[1]] * 2, [1, 2]).frames[1]
        decoded = read_video(whole.folder / item["folder"] / row["video"])[0]
        assert np.abs(decoded.astype(int) - to_uint8(frames[method.label])).mean() < 10
        assert row["frames_sha256"] == outputs.frames_sha256(frames[method.label])
        assert 0 < row["transformer_seconds_per_step"] * 2 < row["seconds"]
        if method.label == "full":
            assert all(row[key] is None for key in MEASURES if key not in TIMES)
            continue
        for key, value in vars(similarity(frames[method.label], frames["full"])).items():
            assert row[key] == value
        assert row["lpips"] is None
    for label in METHODS[1:]:
        rows = [row for item in record["items"] for row in item["results"] if row["method"] == label]
        for key in ("psnr", "first_frame_ssim", "seconds"):
            values = [row[key] for row in rows]
            found = record["statistics"][label][key]
            assert found["mean"] == pytest.approx(np.mean(values)) and found["items"] == 4
            assert min(values) <= found["low"] <= found["mean"] <= found["high"] <= max(values)
    assert record["attention_flops"]["full"] == 1.0 and record["baseline"] == "vmonarch-plain"
    assert "vmonarch-plain" not in record["differences"]
    (table,) = record["tables"]
    assert table["header"] == ["method", "attention FLOPs", "PSNR dB", "SSIM", "first PSNR dB", "first SSIM"]
    assert [row[0] for row in table["rows"]] == ["full (reference)", *METHODS[1:]]
    mean = record["statistics"]["vmonarch-plain"]["psnr"]["mean"]
    assert table["rows"][1][2].startswith(f"{mean:.2f} [") and all(len(row) == 6 for row in table["rows"])
    assert record["caption"].startswith("2 prompts × 2 seeds, model ") and ", torch " in record["caption"]
    assert record["caption"].endswith(f"{record['created'][:10]}. Made by `vmonarch eval …`.")
    # Prompts are in no file's name.
    names = {part for name in files(whole.folder) for part in Path(name).parts}
    assert not [name for name in names if re.search("square|circle|script", name)]
    assert sorted(path.name[:5] for path in (whole.folder / "items").glob("0*")) == [f"000{n}-" for n in (1, 2, 3, 4)]


def test_a_stopped_evaluation_goes_on_to_the_same_record(
    loaded: loading.LoadedModel, whole: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(loaded.folder.path, tmp_path / "eval")
    write = module._Run._write

    def stop_at_the_second(self, item, *rest) -> None:
        if item.number == 2:
            # What a process leaves that is killed while it gives the files their names.
            folder = self.output / "items" / item.name
            folder.mkdir()
            (folder / "full.mp4").write_bytes(b"half")
            (folder / ".vmonarch-plain.99.partial.mp4").write_bytes(b"half")
            raise KeyboardInterrupt
        write(self, item, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module._Run, "_write", stop_at_the_second)
        evaluate(settings, model=loaded)
    assert not (tmp_path / "eval" / "evaluation.json").exists()
    before = files(tmp_path / "eval")
    evaluation = evaluate(settings, model=loaded)
    after = files(tmp_path / "eval")
    first = [name for name in before if name.startswith("items/0001")]
    assert len(first) == 4 and all(after[name] == before[name] for name in first), "what is done is not done again"
    assert not [name for name in after if "/." in name]
    assert without_times(evaluation.record) == without_times(whole.record)


def test_processes_and_calls_share_the_items_out(
    loaded: loading.LoadedModel, whole: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(loaded.folder.path, tmp_path / "eval")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    evaluation = evaluate(settings, model=loaded)
    assert evaluation.missing == 2 and evaluation.record is None
    assert not (tmp_path / "eval" / "flops.json").exists(), "one process counts for all"
    monkeypatch.setenv("RANK", "0")
    # Another call makes the batch that is left.
    name = Item(1, PROMPTS[0], 1).name
    half_written = tmp_path / "eval" / "items" / name / ".full.1.partial.mp4"
    half_written.parent.mkdir()
    half_written.touch()
    with FileLock(tmp_path / "eval" / "items" / f".{name}.lock"):
        assert evaluate(settings, model=loaded).missing == 2 and half_written.exists()
    evaluation = evaluate(settings, model=loaded)
    assert evaluation.missing == 0 and not [name for name in files(tmp_path / "eval") if "/." in name]
    assert without_times(evaluation.record) == without_times(whole.record)
    # Where the first process has nothing left to do, the second counts.
    (tmp_path / "eval" / "flops.json").unlink()
    shutil.rmtree(*(tmp_path / "eval" / "items").glob("0003-*"))
    monkeypatch.setenv("RANK", "1")
    assert without_times(evaluate(settings, model=loaded).record) == without_times(whole.record)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 3}, "steps was 2, is 3"),
        ({"seeds": (1, 2, 3)}, r"seeds\[2\] was null, is 3$"),
        ({"methods": ("full", "vmonarch-plain")}, r"methods\[2\] was .*, is null$"),
        (
            {"methods": ("full", "vmonarch-plain", {"name": "vmonarch-t1", "dense_layers": 2, "label": METHODS[2]})},
            r"settings: methods\[2\].dense_layers was 1, is 2$",
        ),
        ({"lpips": True}, "lpips was false, is true"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_settings_are_refused_and_named(loaded, copied: Path, monkeypatch, change: dict, message: str) -> None:
    monkeypatch.setattr(module, "sample", no_sampling)
    monkeypatch.setattr("vmonarch.eval.similarity.alexnet_weights", lambda: None)
    before = files(copied)
    with pytest.raises(InputError, match=message):
        evaluate(config(loaded.folder.path, copied, **change), model=loaded)
    assert files(copied) == before


def test_a_file_of_other_lora_layers_is_another_setting(loaded, copied: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "sample", no_sampling)
    monkeypatch.setattr(module, "lora_sha256", lambda _: ["of other layers"])
    with pytest.raises(InputError, match=r"lora_sha256 was null, is \[.of other layers.\]$"):
        evaluate(config(loaded.folder.path, copied), model=loaded)


def test_what_changes_no_number_may_change(loaded, whole: Evaluation, copied: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "sample", no_sampling)
    # Nor does what older evaluations call it.
    path = copied / "settings.json"
    settings = json.loads(path.read_text()) | {"parallel_by": "heads"}
    for method in (settings["reference"], *settings["methods"]):
        method["kind"] = method.pop("processor")
        method.pop("implementation", None)
    path.write_text(json.dumps(settings))
    record = evaluate(config(loaded.folder.path, copied, baseline=METHODS[2], report_items=1), model=loaded).record
    there, back = whole.record["differences"][METHODS[2]], record["differences"]["vmonarch-plain"]
    assert back["psnr"]["mean"] == pytest.approx(-there["psnr"]["mean"]) != 0
    assert (copied / "report.html").read_text(encoding="utf-8").count("<video") == 3
    # A plan may have moved, but not changed.
    before = {"methods": [{"plan": "/a/plan.json", "plan_sha256": "1"}]}
    assert not list(module._changes(before, {"methods": [{"plan": "/b/plan.json", "plan_sha256": "1"}]}))
    assert len(list(module._changes(before, {"methods": [{"plan": "/b/plan.json", "plan_sha256": "2"}]}))) == 2


def test_folders_and_files_that_cannot_be_gone_on_with_are_named(loaded, copied: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="must be empty or hold an evaluation"):
        evaluate(config(loaded.folder.path, other), model=loaded)
    assert list(files(other)) == ["thesis.txt"]
    (other / "settings.json").write_text('{"prompts": [')
    with pytest.raises(InputError, match=f"output_dir holds {other}/settings.json, which cannot be read"):
        evaluate(config(loaded.folder.path, other), model=loaded)
    (folder,) = (copied / "items").glob("0003-*")
    page = (copied / "report.html").stat().st_mtime_ns
    for name in ("full.mp4", "vmonarch-plain.mp4", "item.json"):
        contents = (folder / name).read_bytes()
        if name == "full.mp4":
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(contents[:200])
        with pytest.raises(GenerationError, match=str(folder / name)):
            evaluate(config(loaded.folder.path, copied), model=loaded)
        (folder / name).write_bytes(contents)
    assert (copied / "report.html").stat().st_mtime_ns == page


# Statistics


def test_the_interval_is_the_bootstraps() -> None:
    values = np.random.default_rng(3).normal(20, 3, 50)
    found = interval(values)
    assert found["mean"] == pytest.approx(values.mean()) and found["items"] == 50
    # By hand.
    picked = values[np.random.default_rng(0).integers(50, size=(10_000, 50))].mean(1)
    assert (found["low"], found["high"]) == pytest.approx(tuple(np.percentile(picked, [2.5, 97.5])))
    assert interval(values) == found
    assert interval([3.0]) == {"mean": 3.0, "low": None, "high": None, "items": 1}
    assert interval([2.0, 2.0]) == {"mean": 2.0, "low": 2.0, "high": 2.0, "items": 2}
    assert interval([math.inf, 3.0]) == {"mean": "inf", "low": None, "high": None, "items": 2}


def made_up(**measured: list[Any]) -> list[dict[str, Any]]:
    """Records of as many items as `measured` has PSNRs, by method."""
    rows = [
        [{"method": name, **dict.fromkeys(MEASURES), "psnr": values[i]} for name, values in measured.items()]
        for i in range(len(next(iter(measured.values()))))
    ]
    return [{"number": i, "results": results} for i, results in enumerate(rows, start=1)]


def test_differences_are_paired_and_gaps_are_errors() -> None:
    # The items differ by far more than the methods: unpaired, nothing could be told apart.
    records = made_up(a=[10.0, 20.0, 30.0, 40.0], b=[11.0, 21.1, 31.0, 41.1], c=["inf"] * 4, d=["inf"] * 4)
    found = differences(records, "abcd", "a")
    assert found["b"]["psnr"]["mean"] == pytest.approx(1.05) and found["b"]["psnr"]["low"] >= 0.99
    assert found["c"]["psnr"]["mean"] == "inf" and found["b"]["ssim"] is None
    to_equal = differences(records, "abcd", "c")
    assert to_equal["d"]["psnr"]["mean"] == 0.0 and to_equal["a"]["psnr"]["mean"] == "-inf", "JSON has no -inf"
    with pytest.raises(GenerationError, match="method a has psnr for 1 of 2 items"):
        statistics(made_up(a=[10.0, None]), "a")
    records[1]["results"] = []
    with pytest.raises(GenerationError, match="method a has 3 results in 4 items"):
        statistics(records, "a")
    # Prompts in words of their own have no score.
    some = made_up(a=[1.0, 2.0])
    some[0]["results"][0]["prompt_score"] = 0.5
    assert statistics(some, "a")["a"]["prompt_score"]["items"] == 1


# VBench and LPIPS


def test_vbench_gets_every_video_with_its_prompt(loaded, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def score_videos(videos: Any, dimensions: Any, *, work_dir: Path, timeout: float) -> dict[str, Any]:
        seen.append((videos, dimensions, work_dir, timeout))
        return {name: SimpleNamespace(score=0.25 * len(seen)) for name in dimensions}

    dimensions = ("imaging_quality", "subject_consistency", "overall_consistency")
    monkeypatch.setattr("vmonarch.eval.vbench.score_videos", score_videos)
    monkeypatch.setattr("vmonarch.eval.vbench.installation.manifest", lambda folder: {})
    record = evaluate(config(loaded.folder.path, copied, vbench=dimensions, vbench_timeout=7.0), model=loaded).record
    assert len(seen) == 3, "once for each method"
    for (videos, asked, _, timeout), label in zip(seen, METHODS, strict=True):
        assert asked == dimensions and timeout == 7.0
        assert [video.prompt for video in videos] == [p for p in PROMPTS for _ in (0, 1)]
        for video in videos:
            assert video.path.is_file() and video.path.name.startswith(label.partition(":")[0])
    assert record["vbench"]["full"] == dict.fromkeys(dimensions, 0.25)
    assert record["paper_score"] == dict.fromkeys(METHODS), "LPIPS was not measured"
    assert "imaging_quality" in (copied / "report.html").read_text(encoding="utf-8")
    with pytest.raises(InputError, match="vbench must be of aesthetic_quality, .*did you mean overall_consistency"):
        evaluate(config(loaded.folder.path, copied, vbench=("overal_consistency",)), model=loaded)


def test_what_cannot_be_measured_is_refused_at_once(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cli.folder / "cache"))
    code, _, err = cli("eval", "a red circle", "--vbench", "imaging_quality")
    assert code == 2 and "--vbench cannot be scored" in err and "vmonarch vbench install" in err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = cli("eval", "a red circle", "--lpips")
    assert code == 2 and "--lpips needs torchvision" in err and not (cli.folder / "outputs").exists()


def test_lpips_is_measured_where_it_is_asked_for(loaded, tmp_path: Path, monkeypatch) -> None:
    distance = lambda a, b: PerceptualDistance(float((a - b).abs().mean()), float((a - b)[0].abs().mean()))
    monkeypatch.setattr("vmonarch.eval.similarity.lpips", distance)
    monkeypatch.setattr("vmonarch.eval.similarity.alexnet_weights", lambda: None)
    methods = ("full", "vmonarch-plain")
    settings = config(loaded.folder.path, tmp_path / "eval", prompts=PROMPTS[:1], methods=methods, lpips=True)
    record = evaluate(settings, model=loaded).record
    row = record["items"][0]["results"][1]
    assert 0 < row["lpips"] != row["first_frame_lpips"] > 0
    assert record["statistics"]["vmonarch-plain"]["first_frame_lpips"]["items"] == 2


# The commands


def test_the_command_writes_the_report_and_prints_the_table(cli) -> None:
    line = ["eval", "a red circle moving right", "a blue square", "--methods", "vmonarch-plain", "--seed", 1]
    line += ["--report-items", 1, "output_dir=a folder"]
    code, out, err = cli(*line)
    assert code == 0, err
    assert "| vmonarch-plain  " in out and "| full (reference) |         100.0 % |" in out
    assert len({len(line) for line in out.splitlines() if line.startswith("|")}) == 1
    assert out.rstrip().endswith("a folder/report.html")
    assert (cli.folder / "a folder" / "table.md").read_text() in out
    page = (cli.folder / "a folder" / "report.html").read_text(encoding="utf-8")
    assert page.count("<video") == 2 and "1 of 2 items" in page
    code, out, _ = cli(*line, "--quiet")
    assert code == 0 and out.strip() == "a folder/report.html"


def test_a_comparison_is_an_evaluation_with_pictures_of_the_embedded_model(cli, monkeypatch) -> None:
    monkeypatch.setattr(embedded, "embedded_model_path", lambda: cli.model)
    settings = complete(CompareConfig(prompts=PROMPTS), find_model("embedded"))
    for name, value in vars(embedded.EMBEDDED_SETTINGS).items():
        ours = {"num_inference_steps": "steps", "guidance_scale": "guidance"}.get(name, name)
        assert getattr(settings, ours, value) == value
    assert settings.model == "embedded", "no machine's path in the record"
    line = ["--height", 32, "--width", 48, "--num-frames", 9, "--steps", 1, "--strip-frames", 3]
    line += ["--methods", "vmonarch-plain", "vmonarch-t1"]
    code, out, err = cli("compare", PROMPTS[0], "a harbour at dawn", *line, tiny=False)
    assert code == 0, err
    (name,) = cli.outputs("outputs/compare")
    folder = cli.folder / "outputs/compare" / name
    pictures = [f"000{n}-{kind}" for n in (1, 2) for kind in ("side-by-side.mp4", "strips.png")]
    others = ["evaluation.json", "items", "report.html", "table.md"]
    assert cli.outputs(f"outputs/compare/{name}") == [*pictures, *others]
    record = json.loads((folder / "evaluation.json").read_text())
    assert record["methods"] == ["full", "vmonarch-plain", "vmonarch-t1"], "the reference runs without being named"
    assert (folder / "table.md").read_text() in out and f"{name}/0002-strips.png" in out and "prompt score" in out
    assert out.splitlines()[-1].endswith("report.html") and record["command"].startswith("vmonarch compare")
    joined, _ = read_video(folder / "0001-side-by-side.mp4")
    assert len(joined) == 9 and joined.shape[2] > joined.shape[1]
    rows = [row for item in record["items"] for row in item["results"]]
    assert all(read_video(folder / item["folder"] / row["video"])[0].shape == (9, 32, 48, 3)
               for item in record["items"] for row in item["results"])  # fmt: skip
    scores = [row["prompt_score"] for row in rows]
    assert None not in scores[:3] and scores[3:] == [None] * 3
    assert record["statistics"]["full"]["prompt_score"]["items"] == 1


def test_batches_give_the_same_numbers_and_full_attention_scores_as_such(loaded, tmp_path: Path) -> None:
    methods = ("vmonarch-plain", "vmonarch:exact.band=9", "vmonarch:dense_layers=1.0", "vmonarch:dense_steps=1.0")
    given = {"seeds": (1, 2, 3), "methods": methods}
    alone, together = (compare(comparison(loaded, tmp_path / str(n), batch_size=n, **given), model=loaded).record
                       for n in (1, 3))  # fmt: skip
    for one, other in zip(alone["items"], together["items"], strict=True):
        a, b = one["results"][1], other["results"][1]
        assert one["seed"] == other["seed"]
        assert a["psnr"] == pytest.approx(b["psnr"], abs=0.05) and a["ssim"] == pytest.approx(b["ssim"], abs=1e-3)
    found = {label: alone["statistics"][label]["psnr"]["mean"] for label in methods}
    assert found[methods[1]] > 60 > found[methods[0]] and found[methods[2]] == found[methods[3]] == "inf"
    assert alone["statistics"][methods[2]]["ssim"]["mean"] == pytest.approx(1.0)


def test_every_method_is_warmed_up_with_itself(loaded, tmp_path: Path, monkeypatch) -> None:
    calls: list[tuple[int | None, object]] = []
    denoise = sampling.denoise

    def watched(model, settings, prompts, seeds, *, steps=None, **options):
        ours = ours_of(model.pipe.transformer.blocks[0].attn1)
        calls.append((steps, "full" if ours is None else (ours.spec.num_iterations, ours.spec.dense_steps)))
        return denoise(model, settings, prompts, seeds, steps=steps, **options)

    monkeypatch.setattr(module, "denoise", watched)
    monkeypatch.setattr(sampling, "denoise", watched)
    compare(comparison(loaded, tmp_path, methods=("vmonarch:num_iterations=1", "vmonarch:dense_steps=1")), model=loaded)
    # The first is that of which FLOPs are counted.
    assert calls == [(1, "full"), (1, "full"), (1, (1, 0)), (1, (2, 0)),
                     (None, "full"), (None, (1, 0)), (None, (2, 1))]  # fmt: skip


def test_nothing_is_overwritten(loaded, tmp_path: Path) -> None:
    made = [compare(comparison(loaded, tmp_path), model=loaded) for _ in range(2)]
    names = [comparison.folder.name for comparison in made]
    assert names[0][:5] == "0001-" and names[1][:5] == "0002-"
    first, second = ([row["frames_sha256"] for row in c.record["items"][0]["results"]] for c in made)
    assert first == second


def test_a_broken_video_and_a_full_disk_are_named_and_leave_what_was_done(loaded, tmp_path: Path, monkeypatch) -> None:
    sample = sampling.sample

    def second_seed_fails(model, settings, prompts, seeds, **options):
        result = sample(model, settings, prompts, seeds, **options)
        if seeds == [2] and "vmonarch" in options["progress"]:
            result.frames.fill_(math.nan)
        return result

    with monkeypatch.context() as patch, pytest.raises(GenerationError, match="method vmonarch-plain.*seed 2.*NaN"):
        patch.setattr(module, "sample", second_seed_fails)
        compare(comparison(loaded, tmp_path / "out", seeds=(1, 2)), model=loaded, progress=True)
    (made,) = (tmp_path / "out").iterdir()
    assert len(list(made.glob("items/*/item.json"))) == 1 and not (made / "evaluation.json").exists()

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_pictures", no_room)
    with pytest.raises(OSError, match=r"No space left"):
        compare(comparison(loaded, tmp_path / "full"), model=loaded)
    assert not any((tmp_path / "full").iterdir())


def test_ctrl_c_keeps_complete_items_only(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = sampling.sample

    def interrupted(model, settings, prompts, seeds, **options):
        if seeds == [2]:
            raise KeyboardInterrupt
        return sample(model, settings, prompts, seeds, **options)

    monkeypatch.setattr(module, "sample", interrupted)
    assert cli("compare", PROMPTS[0], "--seed", 1, 2)[0] == 130
    (name,) = cli.outputs("outputs/compare")
    files = cli.outputs(f"outputs/compare/{name}")
    assert files == ["0001-side-by-side.mp4", "0001-strips.png", "flops.json", "items"]
    assert cli("compare", PROMPTS[0], "--seed", 2)[0] == 130
    assert cli.outputs("outputs/compare") == [name], "nothing was made, so no folder is left"


def test_a_missing_video_is_an_error(loaded: loading.LoadedModel, tmp_path: Path, monkeypatch) -> None:
    call = type(loaded.pipe).__call__

    def loses_one(self, **arguments):
        output = call(self, **arguments)
        output.frames = output.frames[1:]
        return output

    monkeypatch.setattr(type(loaded.pipe), "__call__", loses_one)
    with pytest.raises(GenerationError, match="returned 1 videos for 2 prompts"):
        compare(comparison(loaded, tmp_path, seeds=(1, 2), batch_size=2), model=loaded)


def test_prompt_score_reads_the_pixels() -> None:
    """It gets frames in its own layout, and prompts that it knows."""
    folder = SimpleNamespace(name="embedded", path=Path("none"))
    video = torch.full((13, 3, 96, 160), 0.2)
    for frame in range(13):
        x = 20 + 9 * frame
        video[frame, :, 36:60, x - 12 : x + 12] = torch.tensor([0.9, 0.1, 0.1])[:, None, None]
    words = {"a red square moving right": 1.0, "a blue circle moving left": 0.0, "a harbour at dawn": None}
    assert {prompt: prompt_score(folder, video, prompt) for prompt in words} == words
    # A finetuned model is scored where its prompts are the embedded model's.
    folder.name = "finetuned"
    assert prompt_score(folder, video, "a red square moving right") is None
    assert prompt_score(folder, video, "a red square moving right", "embedded") == 1.0


def test_settings_are_checked_and_the_reference_comes_first() -> None:
    labels = lambda **values: CompareConfig(prompts=PROMPTS, **values).labels
    assert labels(methods=("vmonarch", "full")) == ["full", "vmonarch"]
    assert labels(methods=("vmonarch",), reference="vmonarch-t3") == ["vmonarch-t3", "vmonarch"]
    for values, message in (
        ({"methods": "vmonarch"}, "methods must be a list"),
        ({"baseline": "vmonarc"}, "baseline must be one of full, vmonarch, .*did you mean vmonarch"),
        ({"num_prompts": 3}, "num_prompts must be at most 2"),
    ):
        with pytest.raises(InputError, match=message):
            labels(**values)
    with pytest.raises(InputError, match="save_videos is gone, got False: comparisons keep every method's video"):
        build_config(CompareConfig, {"save_videos": False})
    names = [file_name(label) for label in ("full", "vmonarch:exact={rows: [../../x]}", "a:b=[2,2]", "a:b=[2.2]")]
    assert len(set(names)) == 4 and not any("/" in name or ":" in name for name in names)


@pytest.mark.parametrize("name", preset_names("eval"))
def test_shipped_settings_fit(loaded: loading.LoadedModel, name: str) -> None:
    settings = build_config(EvalConfig, read_yaml(name, group="eval"))
    assert len(settings.prompts) == 64 and settings.seeds == (0, 1) and settings.labels[0] == "full"
    assert settings.output_dir == f"outputs/eval-{name}"
    for method in settings.methods:
        # Plans that ship are of the embedded model: see test_plan.py.
        if method.options.get("plan") is None:
            method.install(loaded.pipe)


# The report


def test_the_report_is_one_whole_file_with_the_numbers_of_the_record(whole: Evaluation) -> None:
    text = (whole.folder / "report.html").read_text(encoding="utf-8")
    page = check_whole(text)
    assert json.loads(next(data for tag, data in page.texts if tag == "script")) == whole.record
    # A prompt is text, whatever it holds: no element comes of it.
    assert not [tag for tag, data in page.texts if tag == "b" and "square" in data]
    assert any(tag == "h3" and PROMPTS[1] in data for tag, data in page.texts)
    assert len(page.of("video")) == 4 * 3 and all(attributes["src"] for attributes in page.of("video"))
    cells = [attributes.get("data-value") for attributes in page.of("td")]
    for label in METHODS[1:]:
        assert str(whole.record["attention_flops"][label]) in cells
        for key in ("psnr", "ssim", "first_frame_psnr"):
            assert str(whole.record["statistics"][label][key]["mean"]) in cells
        assert all(str(row["psnr"]) in cells for i in whole.record["items"] for row in i["results"][1:])
    # Wide tables show that they scroll, and keep their methods.
    assert text.count("<table") == text.count('<div class="scroll"><table') == 3
    assert re.search(r"\.scroll td:first-child \{ position: sticky; left: 0;[^}]*background", text)


def test_the_report_of_many_items_lists_them_and_holds_some_videos(whole: Evaluation) -> None:
    record = copy.deepcopy(whole.record)
    record["items"] = [{**record["items"][n % 4], "number": n + 1} for n in range(100)]
    page = report(record, whole.folder)
    assert page.count("<video") == 12 * 3 and "12 of 100 items" in page
    assert page.count('href="#item-') == 12 and 'data-value="100">100</td>' in page
    record["config"]["report_megabytes"] = 0
    assert "<video" not in report(record, whole.folder)
    # What has no place in a plot is left out.
    svg = quality_plot(record, "psnr")
    assert svg.count("<title>") == 2 and "<title>vmonarch-plain: PSNR dB" in svg and svg == quality_plot(record, "psnr")
    record["statistics"]["vmonarch-plain"]["psnr"]["mean"] = "inf"
    assert quality_plot(record, "psnr").count("<title>") == 1
    record["attention_flops"][METHODS[2]] = None
    assert quality_plot(record, "psnr") is quality_plot(record, "lpips") is None


# Clicks and looks; what it finds becomes the page's title.
_VISIT = """<script>
addEventListener("load", async () => {
  const first = () => document.querySelector("table tbody tr td").textContent;
  const psnr = [...document.querySelectorAll("table th button")].find(head => head.textContent === "PSNR dB");
  const order = [first()];
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
  document.title = JSON.stringify({order, sought, playing, paused: videos.map(video => video.paused)});
});
</script>"""


def test_the_report_works_in_a_browser(whole: Evaluation, tmp_path: Path) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium is installed")
    text = (whole.folder / "report.html").read_text(encoding="utf-8")
    page = tmp_path / "report.html"
    page.write_text(text.replace("</body>", _VISIT + "</body>"), encoding="utf-8")
    command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=10000", "--dump-dom", page.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in run.stderr, [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    title = run.stdout.partition("<title>")[2].partition("</title>")[0]
    found = json.loads(title.replace("&amp;", "&"))
    means = {label: whole.record["statistics"][label]["psnr"]["mean"] for label in METHODS[1:]}
    best, worst = max(means, key=means.get), min(means, key=means.get)
    assert "full" in found["order"][0] and best in found["order"][1] and worst in found["order"][2]
    assert found["sought"] == found["playing"] == found["paused"] == [True] * 3
