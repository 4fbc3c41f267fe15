"""`vmonarch eval` and `compare`: numbers are those of their definitions, and nothing is lost by stopping."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from videos import read_video

from vmonarch import LatentGrid
from vmonarch.configs import InputError
from vmonarch.configs.methods import resolve_method
from vmonarch.eval import evaluate as module
from vmonarch.eval.evaluate import EvalConfig, Evaluation, evaluate
from vmonarch.eval.similarity import similarity
from vmonarch.eval.summary import MEASURES, TIMES, differences, interval, low_end, statistics, summary_rows
from vmonarch.flops import full_flops, vmonarch_flops
from vmonarch.pipelines import loading, outputs, sampling
from vmonarch.pipelines.config import complete
from vmonarch.pipelines.loading import load_model
from vmonarch.pipelines.model_folder import find_model
from vmonarch.pipelines.outputs import GenerationError
from vmonarch.pipelines.video_io import to_uint8

PROMPTS = ("a red circle moving right", "a blue </script><b>../../square\" & 'plain'")
TINY = {"height": 32, "width": 48, "num_frames": 9, "steps": 2, "negative_prompt": "", "device": "cpu"}
METHODS = ("full", "vmonarch-plain", "vmonarch-t1:dense_layers=1,dense_steps=1")


def config(model: Path, output: Path, **values: Any) -> EvalConfig:
    given = {"prompts": PROMPTS, "seeds": (1, 2), "methods": METHODS, "model": str(model), "batch_size": 2, **TINY}
    return EvalConfig(**{**given, **values}, output_dir=str(output))


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


@pytest.mark.deep
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
        for key, value in similarity(frames[method.label], frames["full"]).items():
            assert row[key] == value
        assert row["lpips"] is None
    # Prompts are in no file's name.
    names = {part for name in files(whole.folder) for part in Path(name).parts}
    assert not [name for name in names if re.search("square|circle|script", name)]
    assert sorted(path.name[:5] for path in (whole.folder / "items").glob("0*")) == [f"000{n}-" for n in (1, 2, 3, 4)]


def test_attention_flops_are_those_of_the_formulas_and_of_the_steps_that_ran(
    whole: Evaluation, loaded: loading.LoadedModel
) -> None:
    grid = LatentGrid(3, 2, 3)
    of = lambda **options: vmonarch_flops(grid, 12, **options) / full_flops(grid, 12)
    plain, once = of(exact=None), of(num_iterations=1)
    assert whole.record is not None
    assert [row[2] for row in summary_rows(whole.record)[1]] == ["–", "0.0", "1.0"]
    assert list(whole.record["attention_flops"].values()) == pytest.approx([1, plain, (3 + once) / 4])
    settings = complete(config(loaded.folder.path, whole.folder), loaded.folder)
    for options, exact, rough in (
        ("dense_steps=3", 0.3, 0.7),
        ("dense_layers=[1]", 0.5, 0.5),
        # The residuals of steps 0 and 9 are of no use, so they are not made.
        ("refresh=[0,1,4,9]", 0.4, 0.8),
        # Step 2 is the first that has to make one.
        ("refresh=[0,1,4],dense_steps=2", 0.4, 0.8),
    ):
        resolve_method(f"vmonarch-plain:{options}").install(loaded.pipe)
        ran = sampling.sample(loaded, settings, [PROMPTS[0]], [0], steps=10, decode=False).report
        assert ran is not None and ran.work == pytest.approx(exact + rough * plain), options


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


def test_processes_share_the_items_out(
    loaded: loading.LoadedModel, whole: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(loaded.folder.path, tmp_path / "eval")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    evaluation = evaluate(settings, model=loaded)
    assert evaluation.missing == 2 and evaluation.record is None
    monkeypatch.setenv("RANK", "0")
    evaluation = evaluate(settings, model=loaded)
    assert evaluation.missing == 0
    assert without_times(evaluation.record) == without_times(whole.record)


def test_a_file_of_other_lora_layers_is_another_setting(loaded, copied: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "sample", no_sampling)
    others = lambda *given: outputs.source_hashes(*given) | {"lora_sha256": ["of other layers"]}
    monkeypatch.setattr(module, "source_hashes", others)
    with pytest.raises(InputError, match=r'lora_sha256\[0\] was null, is "of other layers"$'):
        evaluate(config(loaded.folder.path, copied), model=loaded)


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
    item = (folder / "item.json").read_text()
    (folder / "item.json").write_text(item.replace("vmonarch-eval-3", "vmonarch-eval-2"))
    with pytest.raises(GenerationError, match="its format is vmonarch-eval-2, this version reads vmonarch-eval-3"):
        evaluate(config(loaded.folder.path, copied), model=loaded)
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


def test_differences_are_paired() -> None:
    # The items differ by far more than the methods: unpaired, nothing could be told apart.
    records = made_up(a=[10.0, 20.0, 30.0, 40.0], b=[11.0, 21.1, 31.0, 41.1], c=["inf"] * 4, d=["inf"] * 4)
    found = differences(records, "abcd", "a")
    assert found["b"]["psnr"]["mean"] == pytest.approx(1.05) and found["b"]["psnr"]["low"] >= 0.99
    assert found["c"]["psnr"]["mean"] == "inf" and found["b"]["ssim"] is None
    to_equal = differences(records, "abcd", "c")
    assert to_equal["d"]["psnr"]["mean"] == 0.0 and to_equal["a"]["psnr"]["mean"] == "-inf", "JSON has no -inf"
    # Prompts in words of their own have no score.
    some = made_up(a=[1.0, 2.0])
    some[0]["results"][0]["prompt_score"] = 0.5
    assert statistics(some, "a")["a"]["prompt_score"]["items"] == 1


def test_the_low_end_is_of_the_videos_and_the_percentile_is_of_enough() -> None:
    psnr = list(np.random.default_rng(3).normal(30, 3, 128))
    low = statistics(made_up(a=psnr), "a")["a"]["psnr"]
    assert (low["mean"], low["p5"]) == pytest.approx((np.mean(psnr), np.percentile(psnr, 5)))
    assert 0 < low["below_27"] == sum(value < 27 for value in psnr) and low["items"] == 128
    # One of 20 videos lies below p5; and 27 dB is not below itself.
    few = [low_end(made_up(a=[27.0] + [26.0] * (n - 1)), "a") for n in (19, 20)]
    assert [row["p5"] for row in few] == [None, 26.0] and [row["below_27"] for row in few] == [18, 19]
    assert low_end(made_up(a=[1.0] + ["inf"] * 20), "a") == {"p5": "inf", "below_27": 1, "items": 21}


# VBench


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
    assert "imaging_quality" in (copied / "report.html").read_text(encoding="utf-8")
    with pytest.raises(InputError, match="vbench must be of aesthetic_quality, .*did you mean overall_consistency"):
        evaluate(config(loaded.folder.path, copied, vbench=("overal_consistency",)), model=loaded)


# The commands


def test_the_command_writes_the_report_and_prints_the_table(cli) -> None:
    line = ["eval", "a red circle moving right", "a blue square", "--methods", "vmonarch-plain", "--seed", 1]
    line += ["--report-items", 1, "output_dir=a folder"]
    out = cli.done(*line)
    assert "| vmonarch-plain  " in out and "| full (reference) |         100.0 % |" in out
    assert len({len(line) for line in out.splitlines() if line.startswith("|")}) == 1
    assert out.rstrip().endswith("a folder/report.html")
    page = (cli.folder / "a folder" / "report.html").read_text(encoding="utf-8")
    assert page.count("<video") == 2 and "1 of 2 items" in page
    assert cli.done(*line, "--quiet").split("\n")[:2] == ["a folder/evaluation.json", "a folder/report.html"]
