"""`vmonarch generate`: what lies on disk afterwards, that it can be made again, and that nothing half-written is."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from videos import read_video

from vmonarch.cli import main
from vmonarch.pipelines.config import GenerateConfig
from vmonarch.pipelines.generation import generate
from vmonarch.pipelines.processes import Shard, check_sharing

PROMPT = "a red circle moving right"


def test_every_prompt_gets_every_seed_and_a_record_that_tells_all(cli) -> None:
    words = ["--seed", 3, 5, "--fps", 8, "--attention", "vmonarch-t3", "attention.min_mass=0.2"]
    out = cli.done("generate", PROMPT, "a blue square", *words)
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
    assert all(value is not None for key, value in record["config"].items() if key not in OPTIONAL)
    assert record["environment"]["packages"]["torch"] == version("torch") and record["environment"]["device"] == "cpu"
    # What ran is printed after each video, and stands in its record.
    ran = record["attention"]
    assert out.count(ran["text"]) == 4 and ran["method"].startswith("VMonarchProcessor(num_iterations=3, min_mass=0.2")
    assert ran["grid"] == [3, 2, 3] and ran["exact"] == [] and ran["work"] > 0
    seconds = record["seconds"]
    assert {"text", "denoise", "transformer", "decode", "total"} == seconds.keys()
    assert 0 < seconds["transformer"] < seconds["denoise"] < seconds["total"]
    assert record["transformer_calls"] == 4, "two steps, each with and without the prompt"
    assert len(record["model"]["configs_sha256"]) == len(record["model"]["weights_sha256"]) == 64


OPTIONAL = ("revision", "scheduler", "image", "guidance_2", "true_guidance", "flow_shift")


def test_image_to_video(cli, folders) -> None:
    from PIL import Image

    drawn = np.random.default_rng(0).integers(0, 255, (32, 80, 3), np.uint8)
    pictures = {"wide.png": drawn, "centre.png": drawn[:, 16:64], "other.png": 255 - drawn[:, 16:64]}
    for name, pixels in pictures.items():
        Image.fromarray(pixels).save(cli.folder / name)
        told = pytest.warns(UserWarning, match="image: 80×32 is crop") if "wide" in name else contextlib.nullcontext()
        words = ["generate", PROMPT, "a blue square", "--batch-size", 2, "--image", name]
        with told:
            cli.done(*words, model=folders("i2v-2.1"))
    wide, _, centre, _, other, _ = cli.records()
    assert "cropped to 48×32" in wide["model"]["image_changes"] and not centre["model"]["image_changes"]
    assert wide["frames_sha256"] == centre["frames_sha256"] != other["frames_sha256"]
    assert wide["model"]["image_sha256"] != centre["model"]["image_sha256"]
    path = cli.folder / "outputs/generate" / centre["video"].replace(".mp4", ".json")
    cli.done("generate", "--from-json", path, tiny=False)
    assert cli.records()[-1]["model"]["image_sha256"] == centre["model"]["image_sha256"]
    Image.fromarray(pixels).save(cli.folder / "centre.png")
    code, _, err = cli("generate", "--from-json", path, tiny=False)
    assert code == 2 and "names an image that has changed since" in err


def test_one_model_for_text_and_image(cli, folders) -> None:
    from PIL import Image

    Image.new("RGB", (48, 32), (200, 30, 30)).save(cli.folder / "first.png")
    for words in ([], ["--image", "first.png"]):
        cli.done("generate", PROMPT, *words, model=os.path.relpath(folders("t2v-5b")))
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
    cli.done("generate", PROMPT, "--revision", "main", model="owner/name")
    (record,) = cli.records()
    assert (record["config"]["model"], record["config"]["revision"]) == ("owner/name", "0123abcd")
    path = f"outputs/generate/{cli.outputs()[0].split('.')[0]}.json"
    cli.done("generate", "--from-json", path, tiny=False)
    assert asked == [("owner/name", "main"), ("owner/name", "0123abcd")]


def test_a_full_disk_is_an_error_and_leaves_nothing_half_written(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cli.folder / "outputs"
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if str(folder) in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = cli("generate", PROMPT)
    assert code == 1 and "No space left on device" in err and cli.outputs() == []


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


def test_a_prompt_is_enough(cli) -> None:
    """The shipped model at its own size; few frames and steps, for speed."""
    cli.done("generate", "a red circle moving right", "--num-frames", 13, "--steps", 3, tiny=False)
    (record,) = cli.records()
    assert record["config"]["model"] == record["model"]["name"] == "embedded"
    frames, _ = read_video(cli.folder / "outputs/generate" / record["video"])
    assert frames.shape == (13, 96, 160, 3)


# --- `torchrun … -m vmonarch generate`: processes make every video together, and one of them writes it. ---

SCRIPT = Path(__file__).parents[1] / "support" / "shared_generate.py"
# 9 tokens a frame, 27 in all, which two processes cannot divide evenly; two steps, the first with full attention.
SHARED = ["--height", "48", "--width", "48", "--num-frames", "9", "--steps", "2", "--seed", "0", "1"]
METHOD = ["--attention", "vmonarch:dense_steps=1"]


def command(model: Path, folder: Path) -> list[str]:
    words = ["generate", "a red circle", "--model", str(model), "--output-dir", str(folder), "--no-contact-sheet"]
    return [*words, *SHARED, *METHOD]


@pytest.mark.deep
def test_two_processes_make_the_videos_of_one(forks, folders, tmp_path, capsys):
    model = folders("t2v-2.2")
    code, output = forks(tmp_path, SCRIPT, *command(model, tmp_path / "two"), processes=2)
    assert code == 0, output[:3000]
    assert all(f"tokens of a block: [{tokens}]" in output for tokens in (13, 14))
    assert main(command(model, tmp_path / "one")) == 0
    one, two = (sorted((tmp_path / name).glob("*.mp4")) for name in ("one", "two"))
    assert [path.name for path in one] == [path.name for path in two] and len(one) == 2
    assert not list((tmp_path / "two").glob(".*")) and output.count(".mp4") == 2
    for ours, shared in zip(one, two, strict=True):
        alone, together = (json.loads(path.with_suffix(".json").read_text()) for path in (ours, shared))
        assert (alone["environment"]["processes"], together["environment"]["processes"]) == (1, 2)
        assert alone["config"] | {"output_dir": ""} == together["config"] | {"output_dir": ""}
        frames = [read_video(path)[0].astype(np.int16) for path in (ours, shared)]
        # Sums in another order, then eight bits and an encoder.
        assert frames[0].std() > 10 and np.abs(frames[0] - frames[1]).max() <= 8
    assert alone["seed"] == 1 and np.abs(read_video(one[0])[0].astype(int) - read_video(one[1])[0]).mean() > 5


def test_what_processes_cannot_share(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    who = "for 2 processes that share a video"
    for options, message in (
        ({"device": "cpu"}, f"device must be auto {who}, as each has its own, got cpu"),
        ({"offload": "model"}, f"offload must be none {who}, got model"),
    ):
        config = GenerateConfig(prompts=("x",), model=str(tiny_model), output_dir=str(tmp_path / "out"), **options)
        with pytest.raises(ValueError, match=message):
            generate(config, shard=Shard(1, 2, 1))
    assert not (tmp_path / "out").exists()
    check_sharing(GenerateConfig(prompts=("x",), attention="stack-near-lossless"), Shard(1, 2, 1))


def test_commands_for_one_process_say_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    for name in ("compare", "calibrate"):
        assert main([name, "a red circle", "--output-dir", str(tmp_path / "out")]) == 2
        assert "WORLD_SIZE is 4, but this command is for one process" in capsys.readouterr().err
    monkeypatch.delenv("WORLD_SIZE")
    assert main(["generate", "a red circle", "--output-dir", str(tmp_path / "out")]) == 2
    assert "RANK must be a number below WORLD_SIZE, got RANK=1, WORLD_SIZE=1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
