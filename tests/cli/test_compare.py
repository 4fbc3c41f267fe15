"""`vmonarch compare`: the numbers are those of the definitions, every method is run, nothing is skipped."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from vmonarch.configs import InputError
from vmonarch.eval import compare as compare_module
from vmonarch.eval.compare import CompareConfig, compare, format_table, means
from vmonarch.eval.similarity import similarity
from vmonarch.files import file_name
from vmonarch.pipelines import loading, outputs, records, sampling
from vmonarch.pipelines.config import complete
from vmonarch.pipelines.loading import load_model
from vmonarch.pipelines.model_folder import find_model
from vmonarch.pipelines.outputs import GenerationError
from vmonarch.pipelines.video_io import read_video

PROMPT = "a red circle moving right"
TINY = {"height": 32, "width": 48, "num_frames": 9, "steps": 2, "negative_prompt": "", "device": "cpu"}


def config(model: Path, **values: object) -> CompareConfig:
    return CompareConfig(**{"prompts": (PROMPT,), "model": str(model), **TINY, **values})  # type: ignore[arg-type]


@pytest.fixture
def loaded(tiny_model: Path) -> loading.LoadedModel:
    folder = find_model(str(tiny_model))
    return load_model(complete(config(tiny_model), folder), folder)


def test_the_record_holds_what_the_definitions_give(cli) -> None:
    line = ["--seed", 1, 2, "--methods", "vmonarch-plain", "vmonarch-t1", "--save-videos", "--strip-frames", 3]
    code, out, err = cli("compare", PROMPT, "a blue square", *line)
    assert code == 0, err
    (name,) = cli.outputs("outputs/compare")
    (record,) = cli.records(f"outputs/compare/{name}")
    assert record["complete"] and record["reference"] == "full"
    assert record["methods"] == ["full", "vmonarch-plain", "vmonarch-t1"], "the reference runs without being named"
    assert [(v["prompt"], v["seed"]) for v in record["videos"]] == [
        (prompt, seed) for prompt in (PROMPT, "a blue square") for seed in (1, 2)
    ]
    folder = find_model(str(cli.model))
    settings = config(cli.model, negative_prompt=None, methods=("full", "vmonarch-plain", "vmonarch-t1"))
    settings = complete(settings, folder)
    model = load_model(settings, folder)
    video = record["videos"][3]
    frames = {}
    for method in settings.methods:
        method.install(model.pipe)
        frames[method.label] = sampling.sample(model, settings, ["a blue square"], [2]).frames[0]
    for result in video["results"]:
        assert result["frames_sha256"] == records.frames_sha256(frames[result["method"]])
        if result["method"] == "full":
            assert result["psnr"] is result["ssim"] is result["first_frame_psnr"] is None
            continue
        expected = similarity(frames[result["method"]], frames["full"])
        for key in ("psnr", "ssim", "first_frame_psnr", "first_frame_ssim"):
            assert result[key] == getattr(expected, key)
    for method in ("vmonarch-plain", "vmonarch-t1"):
        rows = [r for v in record["videos"] for r in v["results"] if r["method"] == method]
        for key in ("psnr", "ssim", "first_frame_ssim", "seconds", "transformer_seconds_per_step"):
            assert record["means"][method][key] == pytest.approx(np.mean([row[key] for row in rows]))
        assert 0 < rows[0]["transformer_seconds_per_step"] * 2 < rows[0]["seconds"]
    table = (cli.folder / "outputs/compare" / name / "table.md").read_text().strip()
    assert table in out and f"{record['means']['vmonarch-t1']['psnr']:.2f}" in table


def test_pictures_and_videos_of_every_pair(cli) -> None:
    assert cli("compare", PROMPT, "--seed", 1, 2, "--save-videos", "--quiet")[0] == 0
    (name,) = cli.outputs("outputs/compare")
    names = cli.outputs(f"outputs/compare/{name}")
    expected = [
        f"000{n}-{kind}" for n in (1, 2) for kind in ("full.mp4", "side-by-side.mp4", "strips.png", "vmonarch.mp4")
    ]
    assert names == [*expected, "comparison.json", "table.md"]
    folder = cli.folder / "outputs/compare" / name
    joined, _ = read_video(folder / "0001-side-by-side.mp4")
    assert len(joined) == 9 and joined.shape[2] > joined.shape[1]
    assert read_video(folder / "0002-vmonarch.mp4")[0].shape == (9, 32, 48, 3)


def test_batches_give_the_same_numbers(loaded: loading.LoadedModel, tmp_path: Path) -> None:
    results = []
    for batch_size in (1, 3):
        settings = config(
            loaded.folder.path,
            seeds=(1, 2, 3),
            methods=("vmonarch-plain",),
            batch_size=batch_size,
            output_dir=str(tmp_path / str(batch_size)),
        )
        results.append(compare(settings, model=loaded).record["videos"])
    for alone, together in zip(*results, strict=True):
        assert alone["seed"] == together["seed"]
        a, b = alone["results"][1], together["results"][1]
        assert a["psnr"] == pytest.approx(b["psnr"], abs=0.05) and a["ssim"] == pytest.approx(b["ssim"], abs=1e-3)


def test_a_method_that_is_full_attention_scores_as_such(loaded: loading.LoadedModel, tmp_path: Path) -> None:
    methods = ("vmonarch:exact.band=9", "vmonarch:dense_layers=1.0", "vmonarch:dense_steps=1.0", "vmonarch-plain")
    settings = config(loaded.folder.path, methods=methods, output_dir=str(tmp_path))
    found = compare(settings, model=loaded).record["means"]
    assert found[methods[0]]["psnr"] > 60 > found["vmonarch-plain"]["psnr"]
    assert found[methods[1]]["psnr"] == found[methods[2]]["psnr"] == "inf"
    assert found[methods[1]]["ssim"] == pytest.approx(1.0)


def test_every_method_is_warmed_up_with_itself(loaded: loading.LoadedModel, tmp_path: Path, monkeypatch) -> None:
    from vmonarch import VMonarchProcessor

    calls: list[tuple[int | None, object]] = []
    denoise = sampling.denoise

    def watched(model, settings, prompts, seeds, *, steps=None, **options):
        processor = model.pipe.transformer.blocks[0].attn1.processor
        sparse = isinstance(processor, VMonarchProcessor)
        calls.append((steps, (processor.num_iterations, processor.dense_steps) if sparse else "full"))
        return denoise(model, settings, prompts, seeds, steps=steps, **options)

    monkeypatch.setattr(compare_module, "denoise", watched)
    monkeypatch.setattr(sampling, "denoise", watched)
    methods = ("vmonarch:num_iterations=1", "vmonarch:dense_steps=1")
    compare(config(loaded.folder.path, methods=methods, output_dir=str(tmp_path)), model=loaded)
    assert calls == [
        *((1, "full"), (1, (1, 0)), (1, (2, 0))),
        *((None, "full"), (None, (1, 0)), (None, (2, 1))),
    ]


def test_the_pipeline_keeps_no_method_of_the_comparison_before(loaded: loading.LoadedModel, tmp_path: Path) -> None:
    settings = config(loaded.folder.path, methods=("vmonarch-plain",), output_dir=str(tmp_path))
    first, second = (compare(settings, model=loaded).record["videos"][0]["results"] for _ in range(2))
    assert [r["frames_sha256"] for r in first] == [r["frames_sha256"] for r in second]


def test_nothing_is_overwritten(loaded: loading.LoadedModel, tmp_path: Path) -> None:
    settings = config(loaded.folder.path, output_dir=str(tmp_path))
    folders = [compare(settings, model=loaded).folder.name for _ in range(2)]
    assert folders[0][:5] == "0001-" and folders[1][:5] == "0002-"
    assert sorted(path.name for path in tmp_path.iterdir()) == folders


@pytest.mark.parametrize("broken", [0.0, math.nan])
def test_a_broken_method_is_an_error_that_names_it(cli, monkeypatch: pytest.MonkeyPatch, broken: float) -> None:
    from safetensors.torch import load_file

    sample = sampling.sample
    monkeypatch.setattr(outputs.tempfile, "tempdir", str(cli.folder))

    def second_seed_fails(model, settings, prompts, seeds, **options):
        result = sample(model, settings, prompts, seeds, **options)
        if seeds == [2] and "vmonarch" in str(options["progress"]):
            result.frames.fill_(broken)
        return result

    monkeypatch.setattr(compare_module, "sample", second_seed_fails)
    code, out, err = cli("compare", PROMPT, "--seed", 1, 2)
    assert code == 1 and "method vmonarch" in err and "seed 2" in err
    assert ("NaN" if broken else "constant") in err and "| full" not in out
    (kept,) = cli.folder.rglob("frames.raw.safetensors")
    assert str(kept) in err and load_file(kept)["frames"].shape == (9, 3, 32, 48)
    (name,) = cli.outputs("outputs/compare")
    (record,) = cli.records(f"outputs/compare/{name}")
    assert not record["complete"] and [video["seed"] for video in record["videos"]] == [1]
    assert "table.md" not in cli.outputs(f"outputs/compare/{name}")


def test_what_was_measured_outlives_a_full_disk(loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compare_module._Run, "_write_pictures", no_room)
    monkeypatch.setattr(outputs.tempfile, "tempdir", str(tmp_path))
    settings = config(loaded.folder.path, methods=("vmonarch-plain",), steps=1, output_dir=str(tmp_path / "out"))
    with pytest.raises(GenerationError, match=r"No space left.*comparison.json is kept at") as error:
        compare(settings, model=loaded)
    (kept,) = tmp_path.glob("vmonarch-*/comparison.json")
    record = json.loads(kept.read_text())
    assert str(kept) in str(error.value) and not record["complete"]
    assert record["means"]["vmonarch-plain"]["psnr"] == record["videos"][0]["results"][1]["psnr"] > 0


def test_ctrl_c_keeps_complete_videos_only(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = sampling.sample

    def interrupted(model, settings, prompts, seeds, **options):
        if seeds == [2]:
            raise KeyboardInterrupt
        return sample(model, settings, prompts, seeds, **options)

    monkeypatch.setattr(compare_module, "sample", interrupted)
    assert cli("compare", PROMPT, "--seed", 1, 2)[0] == 130
    (name,) = cli.outputs("outputs/compare")
    files = cli.outputs(f"outputs/compare/{name}")
    assert files == ["0001-side-by-side.mp4", "0001-strips.png", "comparison.json"]
    assert cli("compare", PROMPT, "--seed", 2)[0] == 130
    assert cli.outputs("outputs/compare") == [name], "nothing was made, so no folder is left"


def test_a_missing_video_is_an_error(loaded: loading.LoadedModel, tmp_path: Path, monkeypatch) -> None:
    call = type(loaded.pipe).__call__

    def loses_one(self, **arguments):
        output = call(self, **arguments)
        output.frames = output.frames[1:]
        return output

    monkeypatch.setattr(type(loaded.pipe), "__call__", loses_one)
    settings = config(loaded.folder.path, seeds=(1, 2), batch_size=2, output_dir=str(tmp_path))
    with pytest.raises(GenerationError, match="returned 1 videos for 2 prompts"):
        compare(settings, model=loaded)


def row(method: str, **values: object) -> dict:
    keys = (
        "seconds",
        "transformer_seconds_per_step",
        "psnr",
        "ssim",
        "first_frame_psnr",
        "first_frame_ssim",
        "prompt_score",
    )
    return {"method": method, **dict.fromkeys(keys, 1.0), **values}


def test_means_refuse_gaps() -> None:
    whole = [{"results": [row("full"), row("fast", psnr=30.0)]}, {"results": [row("full"), row("fast", psnr=20.0)]}]
    assert means(whole, ["full", "fast"])["fast"]["psnr"] == 25.0
    with pytest.raises(GenerationError, match="fast has 1 results for 2 videos"):
        means([whole[0], {"results": [row("full")]}], ["full", "fast"])
    with pytest.raises(GenerationError, match="psnr for 1 of 2"):
        means([whole[0], {"results": [row("full"), row("fast", psnr=None)]}], ["full", "fast"])


def test_identical_videos_do_not_break_the_json() -> None:
    found = means([{"results": [row("fast", psnr="inf")]}, {"results": [row("fast", psnr=20.0)]}], ["fast"])
    assert found["fast"]["psnr"] == "inf" and json.loads(json.dumps(found, allow_nan=False))
    assert "inf" in format_table(["fast"], found, "full")


def test_the_table_is_aligned_markdown() -> None:
    found = means(
        [{"results": [row("full", psnr=None, prompt_score=None), row("fast", prompt_score=None)]}], ["full", "fast"]
    )
    lines = format_table(["full", "fast"], found, "full").splitlines()
    assert len({len(line) for line in lines}) == 1 and all(line.startswith("| ") for line in lines)
    assert "full (reference)" in lines[2] and "–" in lines[2] and "prompt score" not in lines[0]


def test_prompts_in_other_words_have_no_score() -> None:
    videos = [{"results": [row("full", prompt_score=None)]}, {"results": [row("full", prompt_score=0.5)]}]
    found = means(videos, ["full"])["full"]
    assert (found["prompt_score"], found["prompts_scored"], found["videos"]) == (0.5, 1, 2)


def test_prompt_score_reads_the_pixels() -> None:
    """The scorer of the embedded model gets frames in its own layout, and prompts it knows."""
    from vmonarch.eval.compare import prompt_scorer

    class Folder:
        name = "embedded"

    class Model:
        folder = Folder()

    score = prompt_scorer(Model())  # type: ignore[arg-type]
    video = torch.full((13, 3, 96, 160), 0.2)
    for frame in range(13):
        x = 20 + 9 * frame
        video[frame, :, 36:60, x - 12 : x + 12] = torch.tensor([0.9, 0.1, 0.1])[:, None, None]
    right = score(video, "a red square moving right")
    wrong = score(video, "a blue circle moving left")
    assert right == 1.0 and wrong == 0.0
    assert score(video, "a harbour at dawn") is None


def test_the_embedded_model_is_the_default_and_is_scored(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from vmonarch.pipelines import embedded

    monkeypatch.setattr(embedded, "embedded_model_path", lambda: cli.model)
    folder = find_model("embedded")
    settings = complete(CompareConfig(prompts=(PROMPT,)), folder)
    expected = embedded.EMBEDDED_SETTINGS
    assert (settings.height, settings.width, settings.num_frames) == (
        expected.height,
        expected.width,
        expected.num_frames,
    )
    assert (settings.steps, settings.guidance) == (expected.num_inference_steps, expected.guidance_scale)
    assert (settings.fps, settings.flow_shift, settings.negative_prompt) == (expected.fps, expected.flow_shift, "")
    assert settings.model == "embedded", "no machine's path in the record"
    line = ["--height", 32, "--width", 48, "--num-frames", 9, "--steps", 1]
    code, out, err = cli("compare", "a red circle moving right", "a harbour at dawn", *line, tiny=False)
    assert code == 0, err
    (name,) = cli.outputs("outputs/compare")
    (record,) = cli.records(f"outputs/compare/{name}")
    scores = [[result["prompt_score"] for result in video["results"]] for video in record["videos"]]
    assert None not in scores[0] and scores[1] == [None, None]
    assert record["means"]["full"]["prompts_scored"] == 1 and "prompt score" in out


def test_labels_make_file_names() -> None:
    labels = ["full", "vmonarch-t1", "vmonarch:tiles=[2,2]", "vmonarch:tiles=[2.2]", "vmonarch:exact={rows: [../../x]}"]
    names = [file_name(label) for label in labels]
    assert names[:2] == labels[:2] and len(set(names)) == 5
    assert not any("/" in name or ":" in name for name in names)


def test_the_reference_comes_first() -> None:
    labels = lambda **values: [method.label for method in CompareConfig(prompts=(PROMPT,), **values).methods]
    assert labels(methods=("vmonarch", "full")) == ["full", "vmonarch"]
    assert labels(methods=("vmonarch",), reference="vmonarch-t3") == ["vmonarch-t3", "vmonarch"]
    with pytest.raises(InputError, match="methods must differ"):
        labels(methods=("vmonarch", "vmonarch"))
