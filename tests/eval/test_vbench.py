"""VBench's scores: whatever the package does to videos, prompts and results, a wrong or missing score is an error.

The package is played by one of the same interface, in an environment of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vmonarch.cli import main
from vmonarch.configs import InputError
from vmonarch.eval.vbench import installation
from vmonarch.eval.vbench.installation import VERSION, VBenchError, download_weights, install, manifest
from vmonarch.eval.vbench.scoring import (
    PromptedVideo,
    VBenchScore,
    score_videos,
    suite,
)
from vmonarch.files import write_json
from vmonarch.pipelines.video_io import encode_video

# The interface of vbench 0.1.5. Scores are the first byte of a file's hash over 256; the file `order` says what goes
# wrong, and `calls.jsonl` gets what the package was told.
FAKE_PACKAGE = """
import hashlib, json, os
from pathlib import Path

HERE = Path(__file__).parent

class VBench:
    def __init__(self, device, full_info_dir, output_path):
        self.device, self.full_info_dir, self.output_path = device, full_info_dir, output_path
        os.makedirs(output_path, exist_ok=True)

    def evaluate(self, videos_path, name, prompt_list=[], dimension_list=None, local=False, read_frame=False,
                 mode="vbench_standard", **kwargs):
        order = (HERE / "order").read_text()
        assert Path(self.full_info_dir).is_file() and mode == "custom_input" and local and len(dimension_list) == 1
        if order == "crash":
            raise RuntimeError("no kernel image is available")
        (dimension,) = dimension_list
        files = sorted(os.listdir(videos_path), reverse=True)
        assert set(files) == set(prompt_list)
        paths = [os.path.join(videos_path, file) for file in files]
        contents = [hashlib.sha256(Path(path).read_bytes()).digest() for path in paths]
        assert os.path.isfile(os.environ["TORCH_HOME"] + "/hub/checkpoints/dino_vitbase16_pretrain.pth")
        with open(HERE / "calls.jsonl", "a") as calls:
            calls.write(json.dumps([dimension, self.device, os.environ["VBENCH_CACHE_DIR"]]) + "\\n")
        scale = 100 if dimension == "imaging_quality" else 1
        listed = [{"video_path": p, "video_results": c[0] / 256 * scale} for p, c in zip(paths, contents)]
        score = sum(entry["video_results"] for entry in listed) / len(listed) / scale
        if order == "skip":
            del listed[0]
        if order == "nan":
            listed[0]["video_results"] = float("nan")
        if order == "mean":
            score = 1.0
        if order != "silent":
            Path(self.output_path, name + "_eval_results.json").write_text(json.dumps({dimension: [score, listed]}))
"""
FULL_INFO = [
    {"prompt_en": "a cat", "dimension": ["subject_consistency", "dynamic_degree"]},
    {"prompt_en": 'still life / "quotes"', "dimension": ["temporal_flickering"]},
    {"prompt_en": "a beach", "dimension": ["overall_consistency"]},
    {"prompt_en": "a beach", "dimension": ["temporal_flickering"], "auxiliary_info": {}},
]


class Bench:
    """A fake package in an environment, weights, and videos."""

    def __init__(self, root: Path) -> None:
        self.environment, self.weights, self.videos = root / "environment", root / "weights", root / "videos"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.environment)], check=True)
        site = next(self.environment.glob("lib/python3*/site-packages"))
        # The worker makes a device of its name; torch itself takes seconds to import.
        (site / "torch.py").write_text("device = str\n")
        self.package = site / "vbench"
        self.package.mkdir()
        (self.package / "__init__.py").write_text(FAKE_PACKAGE)
        (self.package / "VBench_full_info.json").write_text(json.dumps(FULL_INFO))
        versions = {"python": "3", "vbench": VERSION}
        write_json(self.environment / "environment.json", {"versions": versions, "requirements_sha256": ""})
        for file in installation.WEIGHTS:
            path = self.weights / file["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file["path"])
        self.videos.mkdir()
        for number in range(6):
            write_video(self.videos / f"{number}.mp4", seed=number)
        self.work_dir = root / "work"
        self.order("fine")

    def order(self, order: str) -> None:
        (self.package / "order").write_text(order)

    def calls(self) -> list[dict[str, Any]]:
        path = self.package / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def video(self, number: int, prompt: str = "a cat") -> PromptedVideo:
        return PromptedVideo(self.videos / f"{number}.mp4", prompt)

    def settings(self, **changes: Any) -> dict[str, Any]:
        places = {"work_dir": self.work_dir, "environment": self.environment, "weights": self.weights}
        return {**places, "timeout": 30, "device": "cpu", **changes}

    def score(self, videos: list[PromptedVideo], *dimensions: str, **changes: Any) -> dict[str, VBenchScore]:
        return score_videos(videos, dimensions or ("temporal_flickering",), **self.settings(**changes))


def write_video(path: Path, *, seed: int = 0, frames: int = 6, fps: float = 8) -> None:
    pixels = np.random.default_rng(seed).integers(0, 255, (frames, 4, 4, 3), np.uint8)
    encode_video(path, pixels.repeat(8, axis=1).repeat(8, axis=2), fps)


def expected(video: PromptedVideo) -> float:
    return hashlib.sha256(video.path.read_bytes()).digest()[0] / 256


@pytest.fixture(scope="module")
def shared_bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture
def bench(shared_bench: Bench, tmp_path: Path) -> Iterator[Bench]:
    shared_bench.work_dir = tmp_path / "work"
    yield shared_bench
    shared_bench.order("fine")
    (shared_bench.package / "calls.jsonl").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("crash", r"(?s)imaging_quality failed \(exit code 1\).*no kernel image is available"),
        ("silent", "results of an unknown form"),
        ("skip", "not one for each of 3 videos"),
        ("nan", r"5\.mp4 the score nan"),
        ("mean", "score 1.0, which is no mean"),
    ],
)
def test_what_goes_wrong_in_the_package_is_an_error_and_is_not_kept(bench: Bench, order: str, message: str) -> None:
    videos = [bench.video(number) for number in (2, 4, 5)]
    bench.score(videos)
    bench.order(order)
    with pytest.raises(VBenchError, match=message):
        bench.score(videos, "temporal_flickering", "imaging_quality")
    assert [path.name.partition("-")[0] for path in bench.work_dir.iterdir()] == ["temporal_flickering"]


def test_equal_requests_are_answered_from_disk(bench: Bench) -> None:
    path = bench.videos / "changing.mp4"
    write_video(path, seed=10)
    videos = [bench.video(0), PromptedVideo(path, "a cat")]
    first = bench.score(videos, "dynamic_degree")

    def again(calls: int, *videos: PromptedVideo) -> dict[str, VBenchScore]:
        found = bench.score([*videos], "dynamic_degree")
        assert len(bench.calls()) == calls
        assert found["dynamic_degree"].per_video == pytest.approx([expected(video) for video in videos])
        return found

    assert again(1, *videos) == first
    again(2, bench.video(0, "a dog"), videos[1])
    again(3, *reversed(videos))
    made_of = {"versions": {"vbench": VERSION, "torch": "another"}, "requirements_sha256": ""}
    write_json(bench.environment / "environment.json", made_of)
    assert again(4, *videos) == first
    write_video(path, seed=11)
    assert again(5, *videos) != first


def test_a_video_too_short_for_a_dimension_is_named(bench: Bench) -> None:
    path = bench.videos / "short.mp4"
    for dimension, frames, fps in (("motion_smoothness", 3, 8), ("dynamic_degree", 5, 16)):
        write_video(path, frames=frames, fps=fps)
        bench.score([PromptedVideo(path, "a cat")], dimension)
        write_video(path, frames=frames - 1, fps=fps)
        with pytest.raises(InputError, match=rf"short\.mp4 is too short for {dimension}"):
            bench.score([PromptedVideo(path, "a cat")], dimension)


def test_what_cannot_be_scored_is_named_before_anything_runs(bench: Bench, tmp_path: Path) -> None:
    (bench.videos / "broken.mp4").write_bytes(b"no video")
    dimensions = ["temporal_flickering"]
    with pytest.raises(InputError, match="broken.mp4"):
        bench.score([bench.video(0), PromptedVideo(bench.videos / "broken.mp4", "a cat")])
    with pytest.raises(InputError, match="videos must be mp4 files with prompts, got .*a.gif"):
        PromptedVideo(bench.videos / "a.gif", "a cat")
    for videos, names, changes, message in (
        ([], dimensions, {}, "videos must be one or more"),
        ([bench.video(0)], ["motion_smothness"], {}, "did you mean motion_smoothness"),
        ([bench.video(0)], dimensions, {"environment": tmp_path / "none"}, "`vmonarch vbench install` makes one"),
        ([bench.video(0)], dimensions, {"environment": tmp_path}, "holds no environment of VBench; give another"),
    ):
        with pytest.raises(InputError, match=message):
            score_videos(videos, names, **bench.settings(**changes))
    with pytest.raises(VBenchError, match=f"dynamic_degree: {tmp_path}/raft_model/models/raft-things.pth\n *https://"):
        bench.score([bench.video(0)], "temporal_flickering", "dynamic_degree", weights=tmp_path)
    assert not bench.calls()


def test_weights_are_downloaded_once_and_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, served = tmp_path / "weights", tmp_path / "served"
    served.mkdir()
    (served / "plain").write_bytes(b"data")
    with zipfile.ZipFile(served / "models.zip", "w") as archive:
        archive.writestr("models/raft.pth", b"member")

    def download(*files: dict[str, str]) -> list[str]:
        """Download these files; returns what was reported."""
        reported: list[str] = []
        named = [{"dimension": "dynamic_degree", "path": f"a/{n}", **file} for n, file in enumerate(files)]
        monkeypatch.setattr(installation, "WEIGHTS", named)
        download_weights(["dynamic_degree"], weights, reported.append)
        return reported

    plain = {"url": f"{served.as_uri()}/plain", "sha256": hashlib.sha256(b"data").hexdigest()}
    zipped = {"url": f"{served.as_uri()}/models.zip", "member": "models/raft.pth"}
    for file, message in (
        (plain | {"url": f"{served.as_uri()}/gone"}, "No such file"),
        (plain | {"sha256": "0" * 64}, "another file than its authors'"),
        (zipped | {"member": "models/other.pth"}, "no item named"),
    ):
        with pytest.raises(VBenchError, match=f"weights/a/0 cannot be downloaded from {file['url']}: .*{message}"):
            download(file)
    assert not [path for path in weights.rglob("*") if path.is_file()]
    assert len(download(plain, zipped)) == 2
    assert (weights / "a/0").read_bytes() == b"data" and (weights / "a/1").read_bytes() == b"member"
    assert download(plain, zipped) == []


def write_requirements(folder: Path, version: str) -> Path:
    """Requirements of a package `vbench` that has nothing but the module whose import is tried, and its wheel."""
    about = f"vbench-{version}.dist-info"
    files = {
        "vbench/__init__.py": "",
        "vbench/temporal_flickering.py": "",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: vbench\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"vbench-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    path = folder / f"requirements-{version}.txt"
    path.write_text(f"--no-index\n--find-links {folder}\nvbench=={version}\n")
    return path


@pytest.mark.deep
def test_an_environment_is_made_once_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "cache/vbench"
    older = write_requirements(tmp_path, "0.1.4")
    (missing := tmp_path / "missing.txt").write_text(older.read_text().replace("0.1.4", VERSION))
    for path, message in ((missing, "(?s)ERROR: No matching distribution found"), (older, "must pin vbench==")):
        with pytest.raises(VBenchError, match=message):
            install(folder, requirements=path)
        assert not os.listdir(tmp_path / "cache")
    requirements = write_requirements(tmp_path, VERSION)
    assert install(folder, requirements=requirements) == folder == install(folder, requirements=requirements)
    versions = manifest(folder)["versions"]
    assert versions["vbench"] == VERSION and versions["python"] == sys.version.split()[0]
    with pytest.raises(InputError, match="holds an environment of other requirements"):
        install(folder)


def test_the_command_scores_a_suite(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = ["--environment", str(bench.environment)]
    dimensions = ["--dimensions", "temporal_flickering", "dynamic_degree"]
    prompts = bench.videos / "prompts.jsonl"
    asked = ["vbench", "prompts", *dimensions, *environment, "--videos-per-prompt", "2"]
    assert main([*asked, "--output", str(prompts)]) == 0
    items = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    judged = {item["prompt"]: item["dimensions"] for item in items}
    flickering = {'still life / "quotes"': ["temporal_flickering"], "a beach": ["temporal_flickering"]}
    assert judged == {"a cat": ["dynamic_degree"], **flickering} and len(items) == 6
    # Seeds are those of any number of videos and of any dimensions.
    all_of_them = suite(["overall_consistency"], 25, 0, bench.environment)
    assert {item["prompt"] for item in all_of_them} == {"a beach"}
    seeds = [
        {(i["prompt"], i["index"]): i["seed"] for i in some if i["prompt"] == "a beach"}
        for some in (items, all_of_them)
    ]
    assert seeds[0].items() <= seeds[1].items() and len({item["seed"] for item in [*items[:4], *all_of_them]}) == 29
    # Prompts of one's own.
    own = suite(["dynamic_degree"], 2, 7, bench.environment, ["a cat", "a dog, naïve"])
    assert [item["prompt"] for item in own] == ["a cat", "a cat", "a dog, naïve", "a dog, naïve"]
    assert own[0]["seed"] == 7 and len({item["seed"] for item in own}) == 4
    listed = [json.dumps(item | {"file": f"{number}.mp4"}) for number, item in enumerate(items)]
    prompts.write_text("\n".join(listed))
    output = tmp_path / "scores.json"
    asked = ["vbench", "score", str(prompts), *dimensions, *environment, "--device", "cpu"]
    asked += ["--weights", str(bench.weights), "--work-dir", str(bench.work_dir), "--output", str(output)]
    assert main(asked) == 0
    scores = json.loads(output.read_text())["dimensions"]
    assert {video["prompt"] for video in scores["dynamic_degree"]["videos"]} == {"a cat"}
    assert {video["prompt"] for video in scores["temporal_flickering"]["videos"]} == flickering.keys()
    for video in scores["temporal_flickering"]["videos"]:
        assert video["score"] == pytest.approx(expected(PromptedVideo(Path(video["file"]), "a")))
    capsys.readouterr()
    assert main(asked) == 2
    assert f"vmonarch vbench score: error: --output {output} exists and is not overwritten" in capsys.readouterr().err
