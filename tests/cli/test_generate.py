"""`vmonarch generate`: what lies on disk afterwards, that it can be made again, and that nothing is ever lost."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from vmonarch.pipelines import loading, outputs, sampling
from vmonarch.pipelines.config import GenerateConfig, build_config, complete
from vmonarch.pipelines.generation import generate
from vmonarch.pipelines.model_folder import find_model
from vmonarch.pipelines.outputs import load_record
from vmonarch.pipelines.video_io import read_video

PROMPT = "a red circle moving right"
TINY = {"height": 32, "width": 48, "num_frames": 9, "steps": 2, "negative_prompt": "", "device": "cpu"}


def config(model: Path, **values: object) -> GenerateConfig:
    return GenerateConfig(**{"prompts": (PROMPT,), "model": str(model), **TINY, **values})  # type: ignore[arg-type]


@pytest.fixture
def loaded(tiny_model: Path) -> loading.LoadedModel:
    """The tiny pipeline, and a completed config's settings with it."""
    folder = find_model(str(tiny_model))
    return loading.load_model(complete(config(tiny_model), folder), folder)


def sampled(loaded: loading.LoadedModel, prompts: list[str], seeds: list[int], **values: object) -> torch.Tensor:
    """Frames [B, F, 3, H, W] without touching the disk."""
    settings = complete(config(loaded.folder.path, **values), loaded.folder)
    settings.attention.install(loaded.pipe)
    return sampling.sample(loaded, settings, prompts, seeds).frames


def test_every_prompt_gets_every_seed_and_a_record_that_tells_all(cli) -> None:
    code, _, err = cli("generate", PROMPT, "--attention", "vmonarch-t3", "min_mass=0.2")
    assert code == 2 and "min_mass" in err, "parameters of the method need their prefix"
    words = ["--seed", 3, 5, "--fps", 8, "--attention", "vmonarch-t3", "attention.min_mass=0.2"]
    code, out, err = cli("generate", PROMPT, "a blue square", *words)
    assert code == 0, err
    records = cli.records()
    assert [(r["prompt"], r["seed"]) for r in records] == [(p, s) for p in (PROMPT, "a blue square") for s in (3, 5)]
    folder = cli.folder / "outputs/generate"
    for number, record in enumerate(records, 1):
        assert record["video"].startswith(f"{number:04d}-") and (folder / record["contact_sheet"]).stat().st_size > 1000
        frames, fps = read_video(folder / record["video"])
        assert frames.shape == (9, 32, 48, 3) and fps == pytest.approx(8)
        assert str(Path("outputs/generate") / record["video"]) in out
    assert len({record["frames_sha256"] for record in records}) == 4 and len(cli.outputs()) == 12
    assert not any("circle" in name or "square" in name or name.startswith(".") for name in cli.outputs())
    record = records[0]
    assert record["config"]["attention"]["num_iterations"] == 3 and record["config"]["attention"]["min_mass"] == 0.2
    assert record["config"]["steps"] == 2 and record["config"]["max_sequence_length"] == 512
    assert all(value is not None for key, value in record["config"].items() if key not in OPTIONAL)
    assert record["environment"]["packages"]["torch"] == version("torch") and record["environment"]["device"] == "cpu"
    assert {"vmonarch", "git_commit", "device_name"} <= record["environment"].keys()
    seconds = record["seconds"]
    assert {"load", "text", "denoise", "transformer", "decode", "total"} == seconds.keys()
    assert 0 < seconds["transformer"] < seconds["denoise"] < seconds["total"]
    assert record["transformer_calls"] == 4, "two steps, each with and without the prompt"
    assert record["peak_memory_bytes"]["process_rss"] > 10**7
    assert len(record["model"]["configs_sha256"]) == len(record["model"]["weights_sha256"]) == 64
    assert record["model"]["dtype"] == record["model"]["vae_dtype"] == "float32"


OPTIONAL = ("revision", "scheduler", "image", "guidance_2", "true_guidance", "flow_shift")


def test_from_json_makes_the_same_video_again(cli, broken_model: Path) -> None:
    code, _, err = cli("generate", PROMPT, "a blue square", "--seed", 7, "--guidance", 1, model=broken_model)
    assert code == 0, err
    folder, before = cli.folder / "outputs/generate", cli.records()
    paths = [folder / record["video"].replace(".mp4", ".json") for record in before]
    for path in paths:
        code, _, err = cli("generate", "--from-json", path, "--quiet", tiny=False)
        assert code == 0, err
    assert before[0]["transformer_calls"] == 2, "two steps without guidance"
    for old, new in zip(before, cli.records()[2:], strict=True):
        assert old["frames_sha256"] == new["frames_sha256"]
        assert (folder / old["video"]).read_bytes() == (folder / new["video"]).read_bytes()
        assert {**old["config"], "output_dir": ""} == {**new["config"], "output_dir": ""}
    code, _, err = cli("generate", "--from-json", paths[0], "--seed", 4, "attention=vmonarch-t1", tiny=False)
    assert code == 0, err
    other = cli.records()[4]
    assert (other["seed"], other["prompt"], other["config"]["attention"]["num_iterations"]) == (4, PROMPT, 1)
    assert other["frames_sha256"] != before[0]["frames_sha256"]
    weights = next((broken_model / "transformer").glob("*.safetensors"))
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    code, _, err = cli("generate", "--from-json", paths[0], tiny=False)
    assert code == 2 and "--from-json names a model whose weights have changed since" in err


def test_full_attention_is_the_stock_pipeline(tiny_model: Path, loaded: loading.LoadedModel) -> None:
    from diffusers import WanPipeline

    stock = WanPipeline.from_pretrained(tiny_model)
    stock.set_progress_bar_config(disable=True)
    expected = stock(
        PROMPT,
        height=32,
        width=48,
        num_frames=9,
        num_inference_steps=3,
        guidance_scale=5.0,
        generator=torch.Generator().manual_seed(11),
        output_type="pt",
    ).frames
    assert torch.equal(sampled(loaded, [PROMPT], [11], attention="full", steps=3), expected)


def test_attention_methods_differ_and_leave_no_trace(loaded: loading.LoadedModel) -> None:
    names = ("full", "vmonarch-plain", "vmonarch-plain:num_iterations=5", "full", "vmonarch:exact.band=99")
    full, fast, longer, again, exact = (sampled(loaded, [PROMPT], [0], attention=name) for name in names)
    assert not torch.equal(full, fast) and not torch.equal(fast, longer)
    assert torch.equal(again, full)
    assert torch.allclose(exact, full, atol=1e-4), "all blocks exact is full attention"


def test_a_seed_means_the_same_in_any_batch(loaded: loading.LoadedModel) -> None:
    alone = sampled(loaded, [PROMPT], [5])
    together = sampled(loaded, ["a blue square", PROMPT, PROMPT], [1, 5, 6])
    assert torch.allclose(together[1], alone[0], atol=1e-4)
    assert not torch.allclose(together[2], alone[0], atol=1e-2)


def test_settings_reach_the_pipeline(tiny_model: Path, loaded: loading.LoadedModel) -> None:
    plain, folder = sampled(loaded, [PROMPT], [0], attention="full"), find_model(str(tiny_model))
    for change in (
        {"guidance": 2.0},
        {"negative_prompt": "blue"},
        {"flow_shift": 9.0},
        {"steps": 3},
        {"max_sequence_length": 8},
    ):
        changed = complete(config(tiny_model, attention="full", **change), folder)
        other = loading.load_model(changed, folder)
        assert not torch.equal(sampling.sample(other, changed, [PROMPT], [0]).frames, plain), change


def test_a_record_of_before_is_read_where_what_is_gone_changed_nothing(cli) -> None:
    assert cli("generate", PROMPT)[0] == 0
    (path,) = (cli.folder / "outputs/generate").glob("*.json")
    record = json.loads(path.read_text())
    record["config"] |= {"batch_guidance": False}
    record["config"]["attention"]["parallel_by"] = "heads"
    path.write_text(json.dumps(record))
    code, _, err = cli("generate", "--from-json", path, tiny=False)
    assert code == 0, err
    path.write_text(json.dumps(record | {"config": record["config"] | {"batch_guidance": True}}))
    code, _, err = cli("generate", "--from-json", path, tiny=False)
    assert code == 2 and "batch_guidance is gone" in err


def test_image_to_video(cli, tiny_image_model: Path) -> None:
    from PIL import Image

    drawn = np.random.default_rng(0).integers(0, 255, (32, 80, 3), np.uint8)
    pictures = {"wide.png": drawn, "centre.png": drawn[:, 16:64], "other.png": 255 - drawn[:, 16:64]}
    for name, pixels in pictures.items():
        Image.fromarray(pixels).save(cli.folder / name)
        told = pytest.warns(UserWarning, match="image: 80×32 is crop") if "wide" in name else contextlib.nullcontext()
        words = ["generate", PROMPT, "a blue square", "--batch-size", 2, "--image", name]
        with told:
            code, _, err = cli(*words, model=tiny_image_model)
        assert code == 0, err
    wide, _, centre, _, other, _ = cli.records()
    assert "cropped to 48×32" in wide["model"]["image_changes"] and not centre["model"]["image_changes"]
    assert wide["frames_sha256"] == centre["frames_sha256"] != other["frames_sha256"]
    assert wide["model"]["image_sha256"] != centre["model"]["image_sha256"]
    path = cli.folder / "outputs/generate" / centre["video"].replace(".mp4", ".json")
    assert cli("generate", "--from-json", path, tiny=False)[0] == 0
    assert cli.records()[-1]["model"]["image_sha256"] == centre["model"]["image_sha256"]
    Image.fromarray(pixels).save(cli.folder / "centre.png")
    code, _, err = cli("generate", "--from-json", path, tiny=False)
    assert code == 2 and "names an image that has changed since" in err


def test_two_transformers_have_a_guidance_each(cli, tiny_two_stage_model: Path) -> None:
    for guidance in (1, 6):
        line = ["--guidance-2", guidance, "--steps", 4]
        code, _, err = cli("generate", PROMPT, *line, model=tiny_two_stage_model)
        assert code == 0, err
    first, second = cli.records()
    assert first["frames_sha256"] != second["frames_sha256"] and first["transformer_calls"] == 8
    attention = [record["config"]["attention"]["name"] for record in (first, second)]
    assert attention == ["vmonarch", "vmonarch"] and first["config"]["guidance_2"] == 1.0


def test_one_model_for_text_and_image(cli, tiny_token_timestep_model: Path) -> None:
    from PIL import Image

    Image.new("RGB", (48, 32), (200, 30, 30)).save(cli.folder / "first.png")
    for words in ([], ["--image", "first.png"]):
        code, _, err = cli("generate", PROMPT, *words, model=os.path.relpath(tiny_token_timestep_model))
        assert code == 0, err
    text, image = cli.records()
    assert (text["model"]["pipeline"], image["model"]["pipeline"]) == ("WanPipeline", "WanImageToVideoPipeline")
    assert all(Path(image["config"][name]).is_absolute() for name in ("model", "image"))


def test_a_hub_model_is_recorded_with_its_commit(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    snapshot = shutil.copytree(cli.model, cli.folder / "snapshots/0123abcd")
    asked = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        wanted = ["model_index.json", "vae/model.safetensors", "tokenizer/chat_template.jinja"]
        others = ["of-other-programs.safetensors", "vae/model.bin"]
        assert list(filter_repo_objects(wanted + others, allow_patterns=allow_patterns)) == wanted
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert cli("generate", PROMPT, "--revision", "main", model="owner/name")[0] == 0
    (record,) = cli.records()
    assert (record["config"]["model"], record["config"]["revision"]) == ("owner/name", "0123abcd")
    path = f"outputs/generate/{cli.outputs()[0].split('.')[0]}.json"
    code, _, err = cli("generate", "--from-json", path, tiny=False)
    assert code == 0, err
    assert asked == [("owner/name", "main"), ("owner/name", "0123abcd")]


def test_nothing_is_overwritten(cli) -> None:
    assert cli("generate", PROMPT)[0] == 0
    folder = cli.folder / "outputs/generate"
    before = {name: (folder / name).read_bytes() for name in cli.outputs()}
    assert cli("generate", PROMPT)[0] == 0
    assert len(cli.outputs()) == 6 and [name[:4] for name in cli.outputs()] == ["0001"] * 3 + ["0002"] * 3
    assert all((folder / name).read_bytes() == data for name, data in before.items())
    assert cli("generate", "a blue square", "overwrite=true")[0] == 2
    (folder / "0007-abc.mp4").touch()
    assert cli("generate", PROMPT)[0] == 0 and cli.outputs()[-1].startswith("0008-")


def test_a_broken_video_is_an_error_and_its_frames_are_kept(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file

    sample = sampling.sample

    def second_is_broken(*given: object, **options: object) -> sampling.Batch:
        batch = sample(*given, **options)  # type: ignore[arg-type]
        batch.frames[1] = float("nan")
        return batch

    monkeypatch.setattr("vmonarch.pipelines.generation.sample", second_is_broken)
    monkeypatch.setattr(outputs.tempfile, "tempdir", str(cli.folder))
    code, out, err = cli("generate", PROMPT, "--seed", 1, 2, 3, "--batch-size", 3, "--quiet")
    assert out.split() == [f"outputs/generate/{name}" for name in cli.outputs() if name.endswith(".mp4")]
    assert code == 1 and "seed 2" in err and "NaN" in err and "2 of 3 videos were made" in err
    assert [record["seed"] for record in cli.records()] == [1, 3] and len(cli.outputs()) == 6
    (kept,) = cli.folder.glob("vmonarch-*/frames.raw.safetensors")
    assert str(kept) in err and load_file(kept)["frames"].shape == (9, 3, 32, 48)


def test_a_full_disk_is_an_error_and_leaves_nothing_half_written(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cli.folder / "outputs"
    temporary = cli.folder / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(outputs.tempfile, "tempdir", str(temporary))
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if str(folder) in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = cli("generate", PROMPT)
    assert code == 1 and "No space left on device" in err and cli.outputs() == []
    (kept,) = temporary.rglob("*.raw.safetensors")
    assert str(kept) in err


def test_a_file_size_limit_reaches_ffmpeg_and_leaves_nothing(cli, tiny_model: Path) -> None:
    """A real failure of the operating system's write, in ffmpeg itself."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    run = subprocess.run(
        [sys.executable, "-m", "vmonarch", "generate", PROMPT, "--model", str(tiny_model), *map(str, SIZE)],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(cli.folder), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert run.returncode == 1, run.stderr
    assert "Traceback" not in run.stderr and "no room to keep" in run.stderr
    assert cli.outputs() == []


SIZE = ["--height", 32, "--width", 48, "--num-frames", 9, "--steps", 2, "--negative-prompt", ""]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "terminate"])
def test_an_interrupted_run_leaves_complete_videos_only(cli, forks, tiny_model: Path, number: int, code: int) -> None:
    steps = ["generate", PROMPT, "--model", tiny_model, *SIZE, "--seed", *range(500), "--quiet"]
    (process,) = forks.start(cli.folder, "vmonarch", *map(str, steps))
    deadline = time.monotonic() + 90
    # At the sight of the second video's JSON the first video is complete; that of the second may be taken back.
    while len([name for name in cli.outputs() if re.fullmatch(r"[^.].*json", name)]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process, number)
    ended, err = forks.wait()
    assert ended == code and "Traceback" not in err, err
    said = "vmonarch generate: interrupted; nothing half-written is left" in err
    assert said == (number == signal.SIGINT)
    names = cli.outputs()
    assert not [name for name in names if name.startswith(".")]
    stems = {name.split(".")[0] for name in names}
    assert len(names) == 3 * len(stems) >= 3
    for name in names:
        if name.endswith(".mp4"):
            assert read_video(cli.folder / "outputs/generate" / name)[0].shape == (9, 32, 48, 3)


def test_ctrl_c_while_writing_takes_the_video_back(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from vmonarch.pipelines import video_io

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(video_io, "contact_sheet", interrupted)
    code, _, err = cli("generate", PROMPT)
    assert code == 130 and "interrupted" in err and cli.outputs() == []


def test_ctrl_c_within_a_transformer_call_stays_ctrl_c(loaded: loading.LoadedModel) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    hook = loaded.pipe.transformer.blocks[1].register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        sampled(loaded, [PROMPT], [0], attention="full")
    hook.remove()
    assert not loaded.pipe.transformer._forward_pre_hooks and not loaded.pipe.transformer._forward_hooks


def test_config_file_options_and_overrides_lie_in_that_order(cli) -> None:
    (cli.folder / "a.yaml").write_text(
        "guidance: 3.0\nfps: 5\nseeds: [8]\nprompts: [a blue square]\nattention: {name: vmonarch, num_iterations: 4}\n"
    )
    line = [
        "--config",
        "a.yaml",
        "--guidance",
        2,
        "guidance=1.5",
        "attention.coarse=2",
        "--quiet",
        "--no-contact-sheet",
    ]
    code, out, err = cli("generate", *line)
    assert code == 0 and err == ""
    assert out.splitlines() == [f"outputs/generate/{name}" for name in cli.outputs() if name.endswith(".mp4")]
    (record,) = cli.records()
    assert len(cli.outputs()) == 2 and record["contact_sheet"] is None
    settings = record["config"]
    assert (settings["guidance"], settings["fps"], record["seed"], record["prompt"]) == (1.5, 5.0, 8, "a blue square")
    assert settings["attention"]["num_iterations"] == 4 and settings["attention"]["coarse"] == 2


def test_another_method_drops_the_options_of_the_one_below() -> None:
    below = {"attention": {"name": "vmonarch", "num_iterations": 4}}
    assert build_config(GenerateConfig, below, {"attention": "full"}).attention.label == "full"
    merged = build_config(GenerateConfig, below, {"attention": {"coarse": 2}}).attention
    assert merged.label == "vmonarch:num_iterations=4,coarse=2"


def test_prompts_are_text_and_nothing_else(cli) -> None:
    prompts = ["${oc.env:HOME}", "???", "../../E=mc2", "漢字 🎈; 50% off\nnow"]
    (cli.folder / "p.yaml").write_text(json.dumps({"prompts": prompts}, ensure_ascii=False), encoding="utf-8")
    assert cli("generate", "--config", "p.yaml", "--steps", 1, "--no-contact-sheet")[0] == 0
    assert [record["prompt"] for record in cli.records()] == prompts
    assert all(re.fullmatch(r"000\d-[0-9a-f]{8}\.(mp4|json)", name) for name in cli.outputs())
    (cli.folder / "p.txt").write_text("\ufeffa red circle\n\n  a blue square  \n", encoding="utf-8")
    assert cli("generate", "a green square", "--prompt-file", "p.txt", "--steps", 1)[0] == 0
    found = [record["prompt"] for record in cli.records()][4:]
    assert found == ["a green square", "a red circle", "a blue square"]


def test_a_prompt_is_enough(cli) -> None:
    """The shipped model at its own size; few frames and steps, for speed."""
    code, _, err = cli("generate", "a red circle moving right", "--num-frames", 13, "--steps", 3, tiny=False)
    assert code == 0, err
    (record,) = cli.records()
    assert record["config"]["model"] == record["model"]["name"] == "embedded"
    frames, _ = read_video(cli.folder / "outputs/generate" / record["video"])
    assert frames.shape == (13, 96, 160, 3)
    assert record["model"]["weights_sha256"] is not None and record["model"]["weights_bytes"] < 16 * 2**20


def test_library_use(tiny_model: Path, tmp_path: Path, loaded: loading.LoadedModel) -> None:
    settings = config(tiny_model, seeds=(1, 2), output_dir=str(tmp_path / "out"))
    videos = generate(settings, model=loaded)
    assert [video.record["seed"] for video in videos] == [1, 2]
    assert all(video.video.is_file() and video.contact_sheet and video.contact_sheet.is_file() for video in videos)
    recorded = load_record(str(videos[1].record_path))
    again = generate(build_config(GenerateConfig, recorded["config"]), recorded=recorded)
    assert again[0].record["frames_sha256"] == videos[1].record["frames_sha256"]
    for change in ({"flow_shift": 9.0}, {"dtype": "bfloat16"}, {"device": "auto"}):
        (name,) = change
        with pytest.raises(ValueError, match=f"{name} must be .* with which the pipeline was loaded"):
            generate(config(tiny_model, output_dir=str(tmp_path / "other"), **change), model=loaded)
    assert not list((tmp_path / "other").iterdir())
