"""VBench's scores: whatever the package does to videos, prompts and results, a wrong or missing score is an error.

The package is played by one of the same interface, in an environment of its own; the real one is tested below where
VMONARCH_TEST_VBENCH names a folder with its environment (made there if there is none).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vmonarch.cli import main
from vmonarch.configs import InputError
from vmonarch.eval.vbench import weights as weights_module
from vmonarch.eval.vbench.dimensions import DIMENSIONS, Dimension, WeightFile
from vmonarch.eval.vbench.environment import VERSION, VBenchEnvironment, VBenchError, install, load_environment
from vmonarch.eval.vbench.scoring import PromptedVideo, VBenchScore, score_videos
from vmonarch.eval.vbench.suite import custom_suite, read_videos, standard_suite, suite_videos
from vmonarch.eval.vbench.weights import download_weights
from vmonarch.pipelines.video_io import VideoError, encode_video, read_video

# The interface of vbench 0.1.5. Scores are the first byte of a file's hash over 256; the file `order` says what goes
# wrong, and `calls.jsonl` gets what the package was told.
FAKE_PACKAGE = """
import hashlib, json, os, subprocess, sys, time
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
        if order == "hang":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            (HERE / "child").write_text(str(child.pid))
            time.sleep(60)
        (dimension,) = dimension_list
        files = sorted(os.listdir(videos_path), reverse=True)
        assert set(files) == set(prompt_list)
        paths = [os.path.join(videos_path, file) for file in files]
        contents = [hashlib.sha256(Path(path).read_bytes()).digest() for path in paths]
        with open(HERE / "calls.jsonl", "a") as calls:
            call = {"dimension": dimension, "device": self.device, "cache": os.environ["VBENCH_CACHE_DIR"],
                    "prompts": {c.hex(): prompt_list[f] for c, f in zip(contents, files)},
                    "dino": os.path.realpath(os.environ["TORCH_HOME"] + "/hub/checkpoints/dino_vitbase16_pretrain.pth")}
            calls.write(json.dumps(call) + "\\n")
        scale = 100 if dimension == "imaging_quality" else 1
        listed = [{"video_path": p, "video_results": c[0] / 256 * scale} for p, c in zip(paths, contents)]
        score = sum(entry["video_results"] for entry in listed) / len(listed) / scale
        if order == "skip":
            del listed[0]
        if order == "nan":
            listed[0]["video_results"] = float("nan")
        if order == "range":
            listed[0]["video_results"] = 1.5 * scale
        if order == "text":
            listed[0]["video_results"] = "0.5"
        if order == "stranger":
            listed.append({"video_path": "/elsewhere/other.mp4", "video_results": 0.5})
        if order == "twice":
            listed.append(listed[0])
        if order == "mean":
            score = 1.0
        result = {dimension: score if order == "form" else [score, listed]}
        if order != "silent":
            Path(self.output_path, name + "_eval_results.json").write_text(json.dumps(result))
"""
FULL_INFO = [
    {"prompt_en": "a cat", "dimension": ["subject_consistency", "dynamic_degree"]},
    {"prompt_en": "still life / \"quotes\"", "dimension": ["temporal_flickering"]},
    {"prompt_en": "a beach", "dimension": ["overall_consistency"]},
    {"prompt_en": "a beach", "dimension": ["temporal_flickering"], "auxiliary_info": {}},
]  # fmt: skip
AWKWARD_PROMPTS = (
    "a cat/dog in a C:\\folder, ../../etc",
    'she says "it\'s `$HOME`"; rm -rf *',
    "long " * 60 + "end-3",
    "naïve 日本語 🦊\u202e reversed",
    "two\nlines\tand a tab",
    "0",
)


class Bench:
    """A fake package in an environment, weights, and videos."""

    def __init__(self, root: Path) -> None:
        self.environment = VBenchEnvironment(root / "environment", {"python": "3", "vbench": VERSION})
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.environment.folder)], check=True)
        site = next(self.environment.folder.glob("lib/python3*/site-packages"))
        # The worker makes a device of its name; torch itself takes seconds to import.
        (site / "torch.py").write_text("device = str\n")
        self.package = site / "vbench"
        self.package.mkdir()
        (self.package / "__init__.py").write_text(FAKE_PACKAGE)
        (self.package / "VBench_full_info.json").write_text(json.dumps(FULL_INFO))
        self.weights = root / "weights"
        for dimension in DIMENSIONS.values():
            for file in dimension.weights:
                path = self.weights / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(file.path)
        self.videos = root / "videos"
        self.videos.mkdir()
        for number in range(6):
            write_video(self.videos / f"{number}.mp4", seed=number)
        self.work_dir = root / "work"
        self.order("fine")

    def order(self, order: str) -> None:
        (self.package / "order").write_text(order)

    def write_manifest(self) -> None:
        manifest = {"versions": dict(self.environment.versions), "requirements_sha256": ""}
        (self.environment.folder / "environment.json").write_text(json.dumps(manifest))

    def calls(self) -> list[dict[str, Any]]:
        path = self.package / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def video(self, number: int, prompt: str = "a cat", index: int = 0) -> PromptedVideo:
        return PromptedVideo(self.videos / f"{number}.mp4", prompt, index)

    def score(self, videos: list[PromptedVideo], *dimensions: str, **changes: Any) -> dict[str, VBenchScore]:
        settings: dict[str, Any] = {
            "work_dir": self.work_dir,
            "timeout": 30,
            "device": "cpu",
            "environment": self.environment,
            "weights": self.weights,
        }
        return score_videos(videos, dimensions or ("temporal_flickering",), **{**settings, **changes})


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
    for name in ("calls.jsonl", "child"):
        (shared_bench.package / name).unlink(missing_ok=True)


def test_scores_are_those_of_the_videos_in_their_order(bench: Bench) -> None:
    videos = [bench.video(number) for number in (3, 0, 5, 1)]
    scores = bench.score(videos, "temporal_flickering", "imaging_quality", "overall_consistency")
    for score in scores.values():
        assert score.per_video == pytest.approx([expected(video) for video in videos])
        assert score.score == pytest.approx(np.mean(score.per_video))
    assert len({expected(video) for video in videos}) == 4
    record = json.loads(scores["imaging_quality"].record.read_text())
    assert record["score"] == scores["imaging_quality"].score and record["versions"]["vbench"] == VERSION


def test_prompts_reach_the_package_unchanged(bench: Bench) -> None:
    videos = [bench.video(number, prompt) for number, prompt in enumerate(AWKWARD_PROMPTS)]
    bench.score(videos)
    (call,) = bench.calls()
    assert call["prompts"] == {
        hashlib.sha256(video.path.read_bytes()).hexdigest(): video.prompt for video in videos
    }  # fmt: skip


def test_one_prompt_may_have_several_videos_and_one_file_several_prompts(bench: Bench) -> None:
    videos = [bench.video(0, index=0), bench.video(1, index=1), bench.video(0, "another prompt")]
    assert bench.score(videos)["temporal_flickering"].per_video == pytest.approx([expected(v) for v in videos])


def test_the_package_finds_its_weights_and_dinos(bench: Bench) -> None:
    bench.score([bench.video(0)], "subject_consistency")
    (call,) = bench.calls()
    assert call["cache"] == str(bench.weights) and call["device"] == "cpu"
    assert call["dino"] == str(bench.weights / "dino_model" / "dino_vitbase16_pretrain.pth")


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("crash", r"(?s)imaging_quality failed \(exit code 1\).*no kernel image is available"),
        ("silent", "ended without results"),
        ("form", "results of an unknown form"),
        ("skip", r"5\.mp4 no score"),
        ("nan", r"5\.mp4 the score nan"),
        ("range", r"5\.mp4 the score 150\.0, which is not in \[0, 100\]"),
        ("text", r"5\.mp4 the score 0\.5"),
        ("stranger", "scores of other videos"),
        ("twice", "scores of other videos"),
        ("mean", "score 1.0, which is no mean"),
    ],
)
def test_what_goes_wrong_in_the_package_is_an_error_and_is_not_kept(bench: Bench, order: str, message: str) -> None:
    videos = [bench.video(number) for number in (2, 4, 5)]
    bench.order(order)
    with pytest.raises(VBenchError, match=message):
        bench.score(videos, "imaging_quality")
    assert not list(bench.work_dir.iterdir())
    bench.order("fine")
    assert bench.score(videos, "imaging_quality")["imaging_quality"].per_video[2] == pytest.approx(expected(videos[2]))


def test_scores_before_a_failure_stay(bench: Bench) -> None:
    bench.score([bench.video(0)])
    bench.order("crash")
    with pytest.raises(VBenchError, match="imaging_quality failed"):
        bench.score([bench.video(0)], "temporal_flickering", "imaging_quality")
    assert [path.name.partition("-")[0] for path in bench.work_dir.iterdir()] == ["temporal_flickering"]


def test_a_package_that_hangs_is_ended_with_its_children(bench: Bench) -> None:
    bench.order("hang")
    started = time.monotonic()
    with pytest.raises(VBenchError, match="temporal_flickering did not end within 2 s and was killed"):
        bench.score([bench.video(0)], timeout=2)
    assert time.monotonic() - started < 20
    child = int((bench.package / "child").read_text())
    assert ended(child) and not list(bench.work_dir.iterdir())


def ended(process: int) -> bool:
    """Whether a process is gone, or dead and not yet collected, within five seconds."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_equal_requests_are_answered_from_disk(bench: Bench) -> None:
    videos = [bench.video(0), bench.video(1)]
    first = bench.score(videos, "dynamic_degree")
    bench.order("crash")
    assert bench.score(videos, "dynamic_degree") == first and len(bench.calls()) == 1


def change_prompt(bench: Bench) -> dict[str, Any]:
    return {"videos": [bench.video(0, "a dog"), bench.video(1)]}


def change_order(bench: Bench) -> dict[str, Any]:
    return {"videos": [bench.video(1), bench.video(0)]}


def change_version(bench: Bench) -> dict[str, Any]:
    return {"environment": VBenchEnvironment(bench.environment.folder, {**bench.environment.versions, "torch": "2"})}


def change_weights(bench: Bench) -> dict[str, Any]:
    (bench.weights / "raft_model/models/raft-things.pth").write_text(f"other {time.monotonic()}")
    return {}


def change_video(bench: Bench) -> dict[str, Any]:
    path = bench.videos / "changing.mp4"
    write_video(path, seed=10)
    bench.score([PromptedVideo(path, "a cat")], "dynamic_degree")
    write_video(path, seed=11)
    return {"videos": [PromptedVideo(path, "a cat")]}


@pytest.mark.parametrize("change", [change_prompt, change_order, change_version, change_weights, change_video])
def test_a_change_is_computed_anew(bench: Bench, change: Callable[[Bench], dict[str, Any]]) -> None:
    videos = [bench.video(0), bench.video(1)]
    bench.score(videos, "dynamic_degree")
    settings = {"videos": videos, **change(bench)}
    before = len(bench.calls())
    score = bench.score(settings["videos"], "dynamic_degree", **{k: v for k, v in settings.items() if k != "videos"})
    assert len(bench.calls()) == before + 1
    assert score["dynamic_degree"].per_video == pytest.approx([expected(video) for video in settings["videos"]])


@pytest.mark.parametrize("contents", ["", "[1]", '{"score": 1, "per_video": [1]}'])
def test_a_broken_record_is_named(bench: Bench, contents: str) -> None:
    record = bench.score([bench.video(0)])["temporal_flickering"].record
    record.write_text(contents)
    with pytest.raises(VBenchError, match=f"{record.name}.*delete it"):
        bench.score([bench.video(0)])


def test_missing_weights_are_named_before_anything_runs(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(VBenchError) as caught:
        bench.score([bench.video(0)], "temporal_flickering", "dynamic_degree", weights=tmp_path)
    assert f"dynamic_degree: {tmp_path}/raft_model/models/raft-things.pth" in str(caught.value)
    assert "models/raft-things.pth of https://" in str(caught.value)
    assert not bench.calls()


@pytest.mark.parametrize(
    ("frames", "fps", "dimension", "enough"),
    [
        (1, 8, "temporal_flickering", False),
        (2, 8, "temporal_flickering", True),
        (2, 8, "motion_smoothness", False),
        (4, 16, "dynamic_degree", False),
        (5, 16, "dynamic_degree", True),
    ],
)
def test_a_video_too_short_for_a_dimension_is_named(
    bench: Bench, frames: int, fps: float, dimension: str, enough: bool
) -> None:
    path = bench.videos / "short.mp4"
    write_video(path, frames=frames, fps=fps)
    if enough:
        bench.score([PromptedVideo(path, "a cat")], dimension)
        return
    with pytest.raises(InputError, match=rf"short\.mp4 is too short for {dimension}"):
        bench.score([PromptedVideo(path, "a cat")], dimension)


def test_videos_that_are_none_are_named(bench: Bench) -> None:
    broken = bench.videos / "broken.mp4"
    broken.write_bytes(b"no video")
    with pytest.raises(VideoError, match="broken.mp4"):
        bench.score([bench.video(0), PromptedVideo(broken, "a cat")])
    with pytest.raises(FileNotFoundError, match="gone.mp4"):
        bench.score([PromptedVideo(bench.videos / "gone.mp4", "a cat")])
    with pytest.raises(InputError, match="mp4 files, got .*a.gif"):
        bench.score([PromptedVideo(bench.videos / "a.gif", "a cat")])
    with pytest.raises(InputError, match="that of .*0.mp4 is empty"):
        bench.score([bench.video(0, " ")])
    with pytest.raises(InputError, match="videos must be one or more"):
        bench.score([])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timeout": 0}, "timeout must be above 0"),
        ({"timeout": float("nan")}, "timeout must be above 0"),
        ({"device": "tpu:x"}, "device must be auto, cpu"),
        ({"dimensions": ["motion_smothness"]}, "did you mean motion_smoothness"),
        ({"dimensions": []}, "dimensions must be one or more"),
        ({"dimensions": "dynamic_degree"}, "dimensions must be one or more"),
        ({"dimensions": ["dynamic_degree"] * 2}, "dimensions must differ"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_used_are_named(bench: Bench, changes: dict[str, Any], message: str) -> None:
    dimensions = changes.pop("dimensions", ["temporal_flickering"])
    settings = {"work_dir": bench.work_dir, "timeout": 9, "environment": bench.environment, **changes}
    with pytest.raises(InputError, match=message):
        score_videos([bench.video(0)], dimensions, **settings)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A server of the folder `served`; of files named `cut` it announces a byte more than it sends."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = folder / self.path.lstrip("/")
            if not path.is_file():
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(path.stat().st_size + (path.name == "cut")))
            self.end_headers()
            self.wfile.write(path.read_bytes())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def serve(monkeypatch: pytest.MonkeyPatch, *files: WeightFile) -> None:
    dimensions = {**DIMENSIONS, "dynamic_degree": Dimension(weights=files)}
    monkeypatch.setattr(weights_module, "DIMENSIONS", dimensions)


def test_weights_are_downloaded_unpacked_and_not_downloaded_again(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "served/plain").write_bytes(b"plain")
    with zipfile.ZipFile(tmp_path / "served/models.zip", "w") as archive:
        archive.writestr("models/raft.pth", b"member")
    digest = hashlib.sha256(b"plain").hexdigest()
    zipped = WeightFile("raft/raft.pth", f"{server}/models.zip", member="models/raft.pth")
    serve(monkeypatch, WeightFile("a/plain.pt", f"{server}/plain", sha256=digest), zipped)
    reported: list[str] = []
    for _ in range(2):
        download_weights(["dynamic_degree"], tmp_path / "weights", report=reported.append)
    files = {str(path.relative_to(tmp_path / "weights")): path.read_bytes() for path in all_files(tmp_path / "weights")}
    assert files == {"a/plain.pt": b"plain", "raft/raft.pth": b"member"} and len(reported) == 2


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gone", {}, "404"),
        ("cut", {}, "ended after 4 of 5 bytes"),
        ("plain", {"sha256": "0" * 64}, "another file than its authors'"),
        ("plain", {"member": "models/raft.pth"}, "not a zip file"),
        ("models.zip", {"member": "models/other.pth"}, "no item named"),
    ],
)
def test_a_failed_download_leaves_nothing_and_says_where_the_file_belongs(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, str], message: str
) -> None:
    for served in ("cut", "plain"):
        (tmp_path / "served" / served).write_bytes(b"data")
    with zipfile.ZipFile(tmp_path / "served/models.zip", "w") as archive:
        archive.writestr("models/raft.pth", b"member")
    serve(monkeypatch, WeightFile("a/file.pt", f"{server}/{name}", **settings))
    with pytest.raises(VBenchError, match=message) as caught:
        download_weights(["dynamic_degree"], tmp_path / "weights")
    assert f"{server}/{name}" in str(caught.value)
    assert not all_files(tmp_path / "weights")


def all_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def write_wheel(folder: Path, version: str) -> None:
    """A wheel of a package `vbench` that has nothing but the module whose import is tried."""
    about = f"vbench-{version}.dist-info"
    files = {
        "vbench/__init__.py": "",
        "vbench/temporal_flickering.py": "",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: vbench\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"vbench-{version}-py3-none-any.whl", "w") as wheel:
        for name, contents in files.items():
            wheel.writestr(name, contents)


def write_requirements(folder: Path, version: str, offered: str | None = None) -> Path:
    write_wheel(folder, offered or version)
    path = folder / f"requirements-{version}.txt"
    path.write_text(f"--no-index\n--find-links {folder}\nvbench=={version}\n")
    return path


@pytest.mark.slow
def test_an_environment_is_made_once_and_knows_its_versions(tmp_path: Path) -> None:
    requirements = write_requirements(tmp_path, VERSION)
    made = install(tmp_path / "cache/vbench", requirements=requirements)
    assert made.versions["vbench"] == VERSION and made.versions["python"] == sys.version.split()[0]
    outcome = subprocess.run(
        [made.python, "-c", "import vbench; print(vbench.__file__)"], capture_output=True, text=True
    )
    assert outcome.stdout.startswith(str(made.folder))
    assert os.listdir(tmp_path / "cache") == ["vbench"]
    assert install(made.folder, requirements=requirements) == made == load_environment(made.folder)
    with pytest.raises(InputError, match="other requirements"):
        install(made.folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "offered", "message"),
    [
        (VERSION, "0.1.4", f"(?s)ERROR: No matching distribution found for vbench=={VERSION}"),
        ("0.1.4", None, "it must pin vbench=="),
    ],
    ids=["not to be had", "another version"],
)
def test_an_environment_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, version: str, offered: str | None, message: str
) -> None:
    requirements = write_requirements(tmp_path, version, offered)
    with pytest.raises(VBenchError, match=message):
        install(tmp_path / "cache/vbench", requirements=requirements)
    assert not os.listdir(tmp_path / "cache")


def test_folders_that_are_no_environment_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist; `vmonarch vbench install` makes it"):
        load_environment(tmp_path / "none")
    (tmp_path / "half/bin").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/environment.json").write_text("{}")
    with pytest.raises(InputError, match="other was not made by"):
        load_environment(tmp_path / "other")
    for use in (load_environment, install):
        with pytest.raises(InputError, match="half was not made by"):
            use(tmp_path / "half")
    with pytest.raises(InputError, match="python must be a Python interpreter"):
        install(tmp_path / "new", python=str(tmp_path / "no-python"))
    with pytest.raises(InputError, match="requirements must be a file"):
        install(tmp_path / "new", requirements=tmp_path / "none.txt")


def test_the_standard_suite_has_every_prompt_once_with_seeds_of_its_own(bench: Bench) -> None:
    suite = standard_suite(["temporal_flickering", "overall_consistency"], bench.environment, videos_per_prompt=2)
    assert [(item.prompt, item.index) for item in suite] == [
        ('still life / "quotes"', 0), ('still life / "quotes"', 1), ("a beach", 0), ("a beach", 1),
    ]  # fmt: skip
    assert suite[0].dimensions == ("temporal_flickering",)
    assert suite[2].dimensions == ("temporal_flickering", "overall_consistency")
    everything = standard_suite(list(DIMENSIONS), bench.environment, videos_per_prompt=25)
    assert len({item.seed for item in everything}) == len(everything) == 75
    seeds = {(item.prompt, item.index): item.seed for item in everything}
    assert all(seeds[item.prompt, item.index] == item.seed for item in suite)


def test_videos_of_a_suite_are_found_again(bench: Bench) -> None:
    suite = standard_suite(["temporal_flickering", "dynamic_degree"], bench.environment, videos_per_prompt=1)
    videos = [bench.video(0, "a beach"), bench.video(1, 'still life / "quotes"'), bench.video(2, "not asked for")]
    assert suite_videos(videos, suite, "temporal_flickering") == [videos[1], videos[0]]
    with pytest.raises(InputError, match="lack 1 of 1 videos for dynamic_degree, the first: 'a cat', index 0"):
        suite_videos(videos, suite, "dynamic_degree")
    with pytest.raises(InputError, match="3.mp4 are of the same prompt and index"):
        suite_videos([*videos, bench.video(3, "a beach")], suite, "temporal_flickering")
    with pytest.raises(InputError, match="no video for imaging_quality"):
        suite_videos(videos, suite, "imaging_quality")


@pytest.mark.parametrize(
    ("prompts", "number", "message"),
    [
        ([], 5, "one or more"),
        (["a", " "], 5, "none of them empty"),
        (["a", "a"], 5, "must differ"),
        (["a"], 26, "1 to 25"),
    ],
    ids=str,
)
def test_custom_prompts_that_cannot_be_used_are_named(prompts: list[str], number: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        custom_suite(prompts, videos_per_prompt=number)


def test_lists_of_videos_are_read(tmp_path: Path) -> None:
    entries = [{"file": "a.mp4", "prompt": "a/b \u2028 c", "index": 3}, {"file": "/x/b.mp4", "prompt": "é"}]
    wanted = [PromptedVideo(tmp_path / "a.mp4", "a/b \u2028 c", 3), PromptedVideo(Path("/x/b.mp4"), "é")]
    (tmp_path / "list.json").write_text(json.dumps(entries))
    lines = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
    (tmp_path / "list.jsonl").write_text(lines, encoding="utf-8")
    assert read_videos(tmp_path / "list.json") == read_videos(tmp_path / "list.jsonl") == wanted
    assert read_videos(tmp_path / "list.json", Path("/videos"))[0].path == Path("/videos/a.mp4")


@pytest.mark.parametrize(
    "contents",
    ["", "{", "{}", "[]", "[1]", '[{"file": "a.mp4"}]', '[{"file": "a.mp4", "prompt": 3}]',
     '[{"file": "a.mp4", "prompt": "a", "index": -1}]', '[{"file": "a.mp4", "prompt": "a", "index": true}]'],
)  # fmt: skip
def test_lists_that_are_none_are_named(tmp_path: Path, contents: str) -> None:
    (tmp_path / "list.json").write_text(contents)
    with pytest.raises(InputError, match=r"videos must be .*list\.json"):
        read_videos(tmp_path / "list.json")


def test_the_command_scores_a_suite(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.write_manifest()
    environment = ["--environment", str(bench.environment.folder)]
    dimensions = ["--dimensions", "temporal_flickering", "dynamic_degree"]
    prompts = tmp_path / "prompts.jsonl"
    asked = ["vbench", "prompts", *dimensions, *environment, "--videos-per-prompt", "2", "--output", str(prompts)]
    assert main(asked) == 0
    items = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    listed = [{"file": f"{n}.mp4", "prompt": i["prompt"], "index": i["index"]} for n, i in enumerate(items)]
    (tmp_path / "videos.json").write_text(json.dumps(listed))
    output = tmp_path / "scores.json"
    asked = ["vbench", "score", str(tmp_path / "videos.json"), *dimensions, *environment, "--standard"]
    asked += [
        "--device",
        "cpu",
        "--videos-per-prompt",
        "2",
        "--videos",
        str(bench.videos),
        "--weights",
        str(bench.weights),
    ]
    asked += ["--work-dir", str(bench.work_dir), "--output", str(output)]
    assert main(asked) == 0
    scores = json.loads(output.read_text())["dimensions"]
    assert {video["prompt"] for video in scores["dynamic_degree"]["videos"]} == {"a cat"}
    assert {video["prompt"] for video in scores["temporal_flickering"]["videos"]} == {
        "a beach",
        'still life / "quotes"',
    }
    for video in scores["temporal_flickering"]["videos"]:
        assert video["score"] == pytest.approx(expected(PromptedVideo(Path(video["file"]), "")))
    assert main(asked) == 2
    assert f"vmonarch vbench score: error: --output {output} exists and is not overwritten" in capsys.readouterr().err
    assert main([*asked, "--output", str(tmp_path / "b.json"), "--weights", str(tmp_path)]) == 1
    assert "raft-things.pth" in capsys.readouterr().err


def test_the_command_lists_prompts_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.txt").write_text("a cat\n\na dog, naïve\n", encoding="utf-8")
    output = tmp_path / "folder/prompts.jsonl"
    asked = ["vbench", "prompts", "--prompt-file", str(tmp_path / "own.txt"), "--videos-per-prompt", "2", "--seed", "7"]
    assert main([*asked, "--output", str(output)]) == 0
    items = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [(item["prompt"], item["index"]) for item in items] == [
        ("a cat", 0), ("a cat", 1), ("a dog, naïve", 0), ("a dog, naïve", 1),
    ]  # fmt: skip
    assert items[0]["seed"] == 7 and len({item["seed"] for item in items}) == 4
    assert main([*asked, "--output", str(output)]) == 1
    assert "exists and is not overwritten" in capsys.readouterr().err


def test_a_command_that_is_terminated_ends_the_package_and_keeps_nothing(bench: Bench, tmp_path: Path) -> None:
    bench.write_manifest()
    bench.order("hang")
    (tmp_path / "videos.json").write_text(json.dumps([{"file": str(bench.videos / "0.mp4"), "prompt": "a cat"}]))
    asked = [sys.executable, "-m", "vmonarch.eval.vbench", "score", str(tmp_path / "videos.json"), "--device", "cpu"]
    asked += ["--dimensions", "temporal_flickering", "--environment", str(bench.environment.folder)]
    asked += ["--weights", str(bench.weights), "--work-dir", str(bench.work_dir), "--output", str(tmp_path / "s.json")]
    with subprocess.Popen(asked) as running:
        child = bench.package / "child"
        for _ in range(600):
            if child.exists() and child.read_text():
                break
            time.sleep(0.1)
        running.terminate()
        assert running.wait(20) == 143
    assert ended(int(child.read_text()))
    assert not list(bench.work_dir.iterdir()) and not (tmp_path / "s.json").exists()


needs_vbench = pytest.mark.skipif(
    "VMONARCH_TEST_VBENCH" not in os.environ, reason="VMONARCH_TEST_VBENCH names no folder of an environment"
)
# Enough for temporal_flickering on a CPU, which loads no weights: 1.2 GB instead of 6. This torchvision is the last one
# that imports beside another torch than its own, without its compiled operators.
SMALL_REQUIREMENTS = """\
vbench==0.1.5
torch==2.13.0
torchvision==0.15.2
numpy==1.26.4
decord==0.6.0
opencv-python-headless==4.10.0.84
pillow==11.0.0
tqdm==4.67.0
requests==2.32.3
certifi==2024.8.30
charset-normalizer==3.4.0
idna==3.10
urllib3==2.2.3
filelock==3.16.1
fsspec==2024.10.0
Jinja2==3.1.4
MarkupSafe==3.0.2
mpmath==1.3.0
networkx==3.4.2
setuptools==80.9.0
sympy==1.13.3
typing_extensions==4.15.0
"""


@pytest.fixture(scope="session")
def official(tmp_path_factory: pytest.TempPathFactory) -> VBenchEnvironment:
    folder = Path(os.environ["VMONARCH_TEST_VBENCH"])
    if folder.exists():
        return load_environment(folder)
    requirements = tmp_path_factory.mktemp("requirements") / "small.txt"
    requirements.write_text(SMALL_REQUIREMENTS)
    return install(folder, requirements=requirements)


@needs_vbench
@pytest.mark.slow
def test_temporal_flickering_of_the_official_package_is_that_of_the_frames(
    official: VBenchEnvironment, tmp_path: Path
) -> None:
    videos = []
    for number, prompt in enumerate(AWKWARD_PROMPTS):
        path = tmp_path / f"{number} odd 'name'-{number}.mp4"
        write_video(path, seed=number, frames=4 + number)
        videos.append(PromptedVideo(path, prompt, number))
    settings: dict[str, Any] = {"work_dir": tmp_path / "work", "timeout": 300, "environment": official}
    score = score_videos(videos, ["temporal_flickering"], device="cpu", **settings)["temporal_flickering"]
    assert score.per_video == pytest.approx([flickering(official, v.path, tmp_path) for v in videos], abs=1e-6)
    assert score.score == pytest.approx(np.mean(score.per_video), abs=1e-6)
    assert max(score.per_video) - min(score.per_video) > 1e-3
    # Decoders round colours differently.
    ours = [frame_stability(read_video(video.path)[0]) for video in videos]
    assert score.per_video == pytest.approx(ours, abs=5e-3)


def flickering(official: VBenchEnvironment, video: Path, folder: Path) -> float:
    """The score of a video's frames [F, H, W, 3] as OpenCV, the package's decoder, gives them."""
    script = (
        "import sys, cv2, numpy; video = cv2.VideoCapture(sys.argv[1]); frames = []\n"
        "while (read := video.read())[0]: frames.append(read[1])\n"
        "numpy.save(sys.argv[2], numpy.stack(frames))"
    )
    subprocess.run([official.python, "-I", "-c", script, video, folder / "frames.npy"], check=True)
    return frame_stability(np.load(folder / "frames.npy"))


def frame_stability(frames: NDArray[np.uint8]) -> float:
    """(255 - mean absolute error of neighbouring frames [F, H, W, 3]) / 255."""
    return 1 - float(np.abs(np.diff(frames.astype(np.float64), axis=0)).mean()) / 255


@needs_vbench
def test_the_standard_suite_of_the_official_package(official: VBenchEnvironment) -> None:
    suite = standard_suite(list(DIMENSIONS), official)
    prompts = {name: {item.prompt for item in suite if name in item.dimensions} for name in DIMENSIONS}
    counted = {name: len(found) for name, found in prompts.items()}
    assert counted["subject_consistency"] == counted["dynamic_degree"] == counted["motion_smoothness"] == 72
    assert counted["background_consistency"] == 86 and counted["temporal_flickering"] == 75
    assert counted["aesthetic_quality"] == counted["imaging_quality"] == counted["overall_consistency"] == 93
    assert len(suite) == 5 * len(set().union(*prompts.values())) == len({item.seed for item in suite})


@needs_vbench
@pytest.mark.slow
def test_the_official_package_looks_for_weights_where_they_are_said_to_belong(
    official: VBenchEnvironment, tmp_path: Path
) -> None:
    script = textwrap.dedent("""
        import json, sys
        from vbench import utils
        utils.subprocess.run = lambda command, check=False: fetched.append(" ".join(command))
        fetched = []
        utils.init_submodules(sys.argv[1:], local=True)
        print(json.dumps(fetched))
    """)
    variables = {**os.environ, "VBENCH_CACHE_DIR": str(tmp_path)}
    asked = [str(official.python), "-I", "-c", script, *DIMENSIONS]
    outcome = subprocess.run(asked, env=variables, capture_output=True, text=True, check=True)
    fetched = json.loads(outcome.stdout.splitlines()[-1])
    # The other files are loaded by modules whose imports the small environment lacks.
    elsewhere = {"sa_0_4_vit_l_14_linear.pth", "bpe_simple_vocab_16e6.txt.gz"}
    for dimension in DIMENSIONS.values():
        for file in dimension.weights:
            folder = str((tmp_path / file.path).parent)
            if Path(file.path).name not in elsewhere and not file.path.endswith(".py"):
                expected_folder = folder if not file.member else str(Path(folder).parent)
                assert any(file.url in line and expected_folder in line for line in fetched), file.path
