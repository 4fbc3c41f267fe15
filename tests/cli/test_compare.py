"""`vmonarch compare`: an evaluation with pictures in a new folder; every method is run, nothing is skipped or lost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vmonarch.configs import InputError
from vmonarch.eval import compare as module
from vmonarch.eval import methods as methods_module
from vmonarch.eval.compare import CompareConfig, compare
from vmonarch.eval.methods import prompt_scorer
from vmonarch.files import file_name
from vmonarch.pipelines import embedded, loading, outputs, sampling
from vmonarch.pipelines.config import complete
from vmonarch.pipelines.loading import load_model
from vmonarch.pipelines.model_folder import find_model
from vmonarch.pipelines.outputs import GenerationError
from vmonarch.pipelines.video_io import read_video

PROMPT = "a red circle moving right"
TINY = {"height": 32, "width": 48, "num_frames": 9, "steps": 2, "negative_prompt": "", "device": "cpu"}


def config(model: Path, output: Path, **values: object) -> CompareConfig:
    given = {"prompts": (PROMPT,), "model": str(model), "output_dir": str(output), **TINY}
    return CompareConfig(**{**given, **values})  # type: ignore[arg-type]


@pytest.fixture
def loaded(tiny_model: Path) -> loading.LoadedModel:
    folder = find_model(str(tiny_model))
    return load_model(complete(config(tiny_model, Path("unused")), folder), folder)


def test_the_command_writes_table_record_report_and_pictures(cli) -> None:
    line = ["--seed", 1, 2, "--methods", "vmonarch-plain", "vmonarch-t1", "--save-videos", "--strip-frames", 3]
    code, out, err = cli("compare", PROMPT, *line)
    assert code == 0, err
    (name,) = cli.outputs("outputs/compare")
    folder = cli.folder / "outputs/compare" / name
    pictures = [f"000{n}-{kind}" for n in (1, 2) for kind in ("side-by-side.mp4", "strips.png")]
    others = ["evaluation.json", "items", "report.html", "table.md"]
    assert cli.outputs(f"outputs/compare/{name}") == [*pictures, *others]
    record = json.loads((folder / "evaluation.json").read_text())
    assert record["methods"] == ["full", "vmonarch-plain", "vmonarch-t1"], "the reference runs without being named"
    assert [(item["prompt"], item["seed"]) for item in record["items"]] == [(PROMPT, 1), (PROMPT, 2)]
    assert (folder / "table.md").read_text() in out and f"{name}/0002-strips.png" in out
    assert out.splitlines()[-1].endswith("report.html") and record["command"].startswith("vmonarch compare")
    joined, _ = read_video(folder / "0001-side-by-side.mp4")
    assert len(joined) == 9 and joined.shape[2] > joined.shape[1]
    for item in record["items"]:
        for row in item["results"]:
            assert read_video(folder / item["folder"] / row["video"])[0].shape == (9, 32, 48, 3)


def test_batches_give_the_same_numbers(loaded: loading.LoadedModel, tmp_path: Path) -> None:
    given = {"seeds": (1, 2, 3), "methods": ("vmonarch-plain",)}
    results = [
        compare(config(loaded.folder.path, tmp_path / str(size), batch_size=size, **given), model=loaded)
        for size in (1, 3)
    ]
    for alone, together in zip(*(found.record["items"] for found in results), strict=True):
        assert alone["seed"] == together["seed"]
        a, b = alone["results"][1], together["results"][1]
        assert a["psnr"] == pytest.approx(b["psnr"], abs=0.05) and a["ssim"] == pytest.approx(b["ssim"], abs=1e-3)


def test_a_method_that_is_full_attention_scores_as_such(loaded: loading.LoadedModel, tmp_path: Path) -> None:
    methods = ("vmonarch:exact.band=9", "vmonarch:dense_layers=1.0", "vmonarch:dense_steps=1.0", "vmonarch-plain")
    comparison = compare(config(loaded.folder.path, tmp_path, methods=methods), model=loaded)
    found = {label: values["psnr"] for label, values in comparison.record["statistics"].items()}
    assert found[methods[0]]["mean"] > 60 > found["vmonarch-plain"]["mean"]
    assert found[methods[1]]["mean"] == found[methods[2]]["mean"] == "inf" and "inf" in comparison.table()
    assert comparison.record["statistics"][methods[1]]["ssim"]["mean"] == pytest.approx(1.0)


def test_every_method_is_warmed_up_with_itself(loaded: loading.LoadedModel, tmp_path: Path, monkeypatch) -> None:
    from vmonarch import VMonarchProcessor

    calls: list[tuple[int | None, object]] = []
    denoise = sampling.denoise

    def watched(model, settings, prompts, seeds, *, steps=None, **options):
        processor = model.pipe.transformer.blocks[0].attn1.processor
        sparse = isinstance(processor, VMonarchProcessor)
        calls.append((steps, (processor.num_iterations, processor.dense_steps) if sparse else "full"))
        return denoise(model, settings, prompts, seeds, steps=steps, **options)

    monkeypatch.setattr(methods_module, "denoise", watched)
    monkeypatch.setattr(sampling, "denoise", watched)
    methods = ("vmonarch:num_iterations=1", "vmonarch:dense_steps=1")
    compare(config(loaded.folder.path, tmp_path, methods=methods), model=loaded)
    assert calls == [
        *((1, "full"), (1, (1, 0)), (1, (2, 0))),
        *((None, "full"), (None, (1, 0)), (None, (2, 1))),
    ]


def test_nothing_is_overwritten_unasked_or_kept_of_the_comparison_before(loaded, tmp_path: Path) -> None:
    settings = config(loaded.folder.path, tmp_path, methods=("vmonarch-plain",))
    made = [compare(settings, model=loaded) for _ in range(2)]
    names = [comparison.folder.name for comparison in made]
    assert names[0][:5] == "0001-" and names[1][:5] == "0002-"
    first, second = ([row["frames_sha256"] for row in c.record["items"][0]["results"]] for c in made)
    assert first == second
    again = config(loaded.folder.path, tmp_path, methods=("vmonarch-plain",), overwrite=True)
    folders = {compare(again, model=loaded).folder.name for _ in range(2)}
    assert len(folders) == 1 and {path.name for path in tmp_path.iterdir()} == {*names, *folders}


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

    monkeypatch.setattr(methods_module, "sample", second_seed_fails)
    code, out, err = cli("compare", PROMPT, "--seed", 1, 2)
    assert code == 1 and "method vmonarch" in err and "seed 2" in err
    assert ("NaN" if broken else "constant") in err and "| full" not in out
    (kept,) = cli.folder.rglob("frames.raw.safetensors")
    assert str(kept) in err and load_file(kept)["frames"].shape == (9, 3, 32, 48)
    (name,) = cli.outputs("outputs/compare")
    assert len(list((cli.folder / "outputs/compare" / name).glob("items/*/item.json"))) == 1
    assert "evaluation.json" not in cli.outputs(f"outputs/compare/{name}")


def test_what_was_measured_outlives_a_full_disk(loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write_pictures", no_room)
    monkeypatch.setattr(outputs.tempfile, "tempdir", str(tmp_path))
    settings = config(loaded.folder.path, tmp_path / "out", methods=("vmonarch-plain",), steps=1)
    with pytest.raises(GenerationError, match=r"No space left.*item.json is kept at") as error:
        compare(settings, model=loaded)
    (kept,) = tmp_path.glob("vmonarch-*/item.json")
    record = json.loads(kept.read_text())
    assert str(kept) in str(error.value) and record["prompt"] == PROMPT and record["results"][1]["psnr"] > 0


def test_ctrl_c_keeps_complete_items_only(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = sampling.sample

    def interrupted(model, settings, prompts, seeds, **options):
        if seeds == [2]:
            raise KeyboardInterrupt
        return sample(model, settings, prompts, seeds, **options)

    monkeypatch.setattr(methods_module, "sample", interrupted)
    assert cli("compare", PROMPT, "--seed", 1, 2)[0] == 130
    (name,) = cli.outputs("outputs/compare")
    files = cli.outputs(f"outputs/compare/{name}")
    assert files == ["0001-side-by-side.mp4", "0001-strips.png", "flops.json", "items"]
    assert cli("compare", PROMPT, "--seed", 2)[0] == 130
    assert cli.outputs("outputs/compare") == [name], "nothing was made, so no folder is left"


def test_a_missing_video_is_an_error(loaded: loading.LoadedModel, tmp_path: Path, monkeypatch) -> None:
    call = type(loaded.pipe).__call__

    def loses_one(self, **arguments):
        output = call(self, **arguments)
        output.frames = output.frames[1:]
        return output

    monkeypatch.setattr(type(loaded.pipe), "__call__", loses_one)
    with pytest.raises(GenerationError, match="returned 1 videos for 2 prompts"):
        compare(config(loaded.folder.path, tmp_path, seeds=(1, 2), batch_size=2), model=loaded)


def test_prompt_score_reads_the_pixels() -> None:
    """The scorer of the embedded model gets frames in its own layout, and prompts it knows."""
    model = SimpleNamespace(folder=SimpleNamespace(name="embedded", path=Path("none")))
    score = prompt_scorer(model)
    video = torch.full((13, 3, 96, 160), 0.2)
    for frame in range(13):
        x = 20 + 9 * frame
        video[frame, :, 36:60, x - 12 : x + 12] = torch.tensor([0.9, 0.1, 0.1])[:, None, None]
    assert score(video, "a red square moving right") == 1.0 and score(video, "a blue circle moving left") == 0.0
    assert score(video, "a harbour at dawn") is None
    # A finetuned model is scored where its prompts are the embedded model's.
    model.folder.name = "finetuned"
    assert prompt_scorer(model)(video, "a red square moving right") is None
    assert prompt_scorer(model, "embedded")(video, "a red square moving right") == 1.0


def test_the_embedded_model_is_the_default_and_is_scored(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "embedded_model_path", lambda: cli.model)
    settings = complete(CompareConfig(prompts=(PROMPT,)), find_model("embedded"))
    for name, value in vars(embedded.EMBEDDED_SETTINGS).items():
        ours = {"num_inference_steps": "steps", "guidance_scale": "guidance"}.get(name, name)
        assert getattr(settings, ours, value) == value
    assert settings.model == "embedded", "no machine's path in the record"
    line = ["--height", 32, "--width", 48, "--num-frames", 9, "--steps", 1]
    code, out, err = cli("compare", "a red circle moving right", "a harbour at dawn", *line, tiny=False)
    assert code == 0 and "prompt score" in out, err
    (name,) = cli.outputs("outputs/compare")
    (record,) = cli.records(f"outputs/compare/{name}")
    scores = [[row["prompt_score"] for row in item["results"]] for item in record["items"]]
    assert None not in scores[0] and scores[1] == [None, None]
    assert record["statistics"]["full"]["prompt_score"]["items"] == 1


def test_settings_are_checked_and_the_reference_comes_first() -> None:
    labels = lambda **values: CompareConfig(prompts=(PROMPT,), **values).labels
    assert labels(methods=("vmonarch", "full")) == ["full", "vmonarch"]
    assert labels(methods=("vmonarch",), reference="vmonarch-t3") == ["vmonarch-t3", "vmonarch"]
    for values, message in (
        ({"methods": ("vmonarch", "vmonarch")}, "methods must differ"),
        ({"methods": "vmonarch"}, "methods must be a list"),
        ({"strip_frames": 0}, "strip_frames must be at least 1"),
        ({"save_videos": False}, "save_videos must be true"),
    ):
        with pytest.raises(InputError, match=message):
            labels(**values)
    names = [file_name(label) for label in ("full", "vmonarch:exact={rows: [../../x]}", "a:b=[2,2]", "a:b=[2.2]")]
    assert len(set(names)) == 4 and not any("/" in name or ":" in name for name in names)
