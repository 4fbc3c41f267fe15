"""Frames of footage are what a player shows, or the file is set aside with the reason."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
import torch

from vmonarch.finetune.data.decode import BadVideo, Clip, ClipShape, decode_clip
from vmonarch.pipelines.video_io import encode_video

H264 = ("-c:v", "libx264", "-qp", "1")
LOSSLESS = ("-c:v", "libx264rgb", "-qp", "0")
HEVC = ("-c:v", "libx265", "-x265-params", "log-level=error:qp=4")
BROWN = (120, 60, 40)


def encode(path: Path, frames: np.ndarray, *options: str) -> Path:
    """Encode frames [F, H, W, 3 or 4] with ffmpeg's options."""
    height, width, channels = frames.shape[1:]
    source = ("-f", "rawvideo", "-pix_fmt", {3: "rgb24", 4: "rgba"}[channels], "-s", f"{width}x{height}", "-r", "10")
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *source, "-i", "pipe:0", *options, str(path)]
    subprocess.run(command, input=frames.tobytes(), check=True)
    return path


def flat(height: int, width: int, colour: tuple[int, ...] = BROWN) -> np.ndarray:
    return np.full((3, height, width, len(colour)), colour, np.uint8)


def decoded(path: Path, frames: int = 3, height: int = 48, width: int = 48) -> Clip:
    return decode_clip(path, ClipShape(height, width, frames), timeout=60)


def test_clips_are_the_right_frames(tmp_path: Path) -> None:
    grey = np.arange(20, 200, 6, dtype=np.uint8)
    frames = np.broadcast_to(grey[:, None, None, None], (30, 32, 48, 3)).copy()
    encode_video(tmp_path / "a.mp4", frames, 20.0)

    def numbers(**shape: Any) -> list[int]:
        clip = decode_clip(tmp_path / "a.mp4", ClipShape(32, 48, 5, **shape), timeout=60)
        assert clip.fps == shape.get("fps", 20)
        return [round((float(frame.float().mean()) - 20) / 6) for frame in clip.frames.unbind(1)]

    # Around the middle.
    assert numbers() == [12, 13, 14, 15, 16]
    assert numbers(fps=5) == [5, 9, 13, 17, 21] and numbers(fps=40) == [13, 14, 14, 15, 15]
    # Rates that were rounded.
    encode_video(path := tmp_path / "b.mp4", frames, 30000 / 1001)
    for rate in (29.97, 30, 30000 / 1001):
        assert decode_clip(path, ClipShape(32, 48, len(frames), fps=rate), timeout=60).frames.shape[1] == len(frames)
    with pytest.raises(BadVideo, match="has 15 frames at 15 frames per second, 33 are needed"):
        decode_clip(path, ClipShape(32, 48, 33, fps=15), timeout=60)


def test_frames_are_scaled_to_cover_and_cut_at_the_centre(tmp_path: Path) -> None:
    # Of the second nothing is to be scaled: the very rows.
    for size, inside in (((64, 200), (slice(None), slice(48, 152))), ((200, 48), (slice(84, 116),))):
        frames = np.zeros((3, *size, 3), np.uint8)
        frames[:, *inside] = 200
        clip = decoded(encode(tmp_path / "a.mp4", frames, *LOSSLESS), height=32)
        assert bool((clip.frames == 200).all())
    # Antialiased: a fine grid becomes grey instead of stripes.
    grid = np.broadcast_to((255 * (np.arange(384) % 2)).astype(np.uint8)[:, None], (3, 256, 384, 3))
    clip = decoded(encode(tmp_path / "a.mp4", np.ascontiguousarray(grid), *LOSSLESS), height=32)
    assert clip.frames[:, :, 4:-4, 4:-4].float().std() < 3
    path = encode(tmp_path / "a.mp4", np.zeros((3, 2, 5000, 3), np.uint8), *LOSSLESS)
    with pytest.raises(BadVideo, match="cannot be scaled"):
        decoded(path, height=480, width=832)


def test_pixels_become_square(tmp_path: Path) -> None:
    frames = flat(48, 48, (0, 0, 0))
    frames[:, :, 12:36] = 250
    path = encode(tmp_path / "a.mp4", frames, "-vf", "setsar=2", *H264, "-pix_fmt", "yuv444p")
    # Shown 96 wide, of which the middle half is white, and all that a square leaves.
    clip = decoded(path)
    assert clip.kept == 0.5 and bool((clip.frames[..., 2:-2] > 240).all())
    assert decoded(path, width=96).kept == 1.0


def linear(primaries: str, transfer: str) -> str:
    start = "format=gbrp,setparams=color_primaries=bt709:color_trc=bt709,zscale=t=linear:npl=203,format=gbrpf32le"
    return f"{start},zscale=p={primaries}:t={transfer}:m=bt2020nc:npl=203,format=yuv420p10le"


UNTAGGED = "scale=out_color_matrix={},format=yuv420p,setparams=colorspace=unknown"
COLOURS = {
    "hd, no tags": (720, 1280, UNTAGGED.format("bt709"), H264),
    "hd on its side, no tags": (1280, 720, UNTAGGED.format("bt709"), H264),
    "small, no tags": (48, 64, UNTAGGED.format("bt601"), H264),
    "pq": (48, 64, linear("bt2020", "smpte2084"), HEVC),
    "hlg": (48, 64, linear("bt2020", "arib-std-b67"), HEVC),
    "wide gamut": (48, 64, linear("bt2020", "bt709"), HEVC),
}


@pytest.mark.parametrize("case", COLOURS)
def test_colours_are_those_of_a_bt709_screen(case: str, tmp_path: Path) -> None:
    height, width, filters, encoder = COLOURS[case]
    clip = decoded(encode(tmp_path / "a.mp4", flat(height, width), "-vf", filters, *encoder))
    error = clip.frames.float().mean((1, 2, 3)) - torch.tensor(BROWN)
    assert error.abs().max() < 4, error


def test_highlights_of_hdr_are_compressed_and_stay_apart(tmp_path: Path) -> None:
    """Of 203 and 609 cd/m²: clipped, both would be white."""
    levels = []
    for gain in (1, 3):
        filters = linear("bt2020", "smpte2084").replace("gbrpf32le,", f"gbrpf32le,exposure={np.log2(gain)},")
        path = encode(tmp_path / "a.mp4", flat(48, 64, (250, 250, 250)), "-vf", filters, *HEVC)
        levels.append(float(decoded(path).frames.float().mean()))
    assert 180 < levels[0] < levels[1] - 10 < 250, levels


def test_interlaced_frames_are_deinterlaced(tmp_path: Path) -> None:
    fields = np.zeros((18, 48, 64, 3), np.uint8)
    for number, field in enumerate(fields):
        field[:, 2 + 3 * number : 8 + 3 * number] = 250
    woven = fields[::2].copy()
    woven[:, 1::2] = fields[1::2, 1::2]
    options = ("-vf", "setfield=tff", "-flags", "+ildct+ilme", *H264, "-pix_fmt", "yuv444p")
    clip = decoded(encode(tmp_path / "a.mp4", woven, *options), frames=9, width=64)
    pictures = clip.frames[0].float()
    # A bar that moves has teeth where the fields are left as they are, and as many frames as before.
    assert float((pictures[:, 1:] - pictures[:, :-1]).abs().mean()) < 3
    centres = [float(np.argwhere(picture.numpy() > 125)[:, 1].mean()) for picture in pictures]
    assert centres == pytest.approx([4.5 + 6 * number for number in range(9)], abs=1)


def test_transparency_lies_over_black(tmp_path: Path) -> None:
    frames = flat(48, 64, (200, 100, 50, 0))
    frames[:, :, 32:, 3] = 255
    for codec in ("png", "qtrle"):
        clip = decoded(encode(tmp_path / "a.mov", frames, "-c:v", codec), width=64)
        assert not clip.frames[..., :30].any()
        assert clip.frames[..., 34:].float().mean((1, 2, 3)).tolist() == [200, 100, 50]


def test_what_cannot_be_shown_is_set_aside_with_the_reason(tmp_path: Path) -> None:
    ycgco = "format=yuv444p,setparams=colorspace=ycgco"
    half = flat(48, 64, (200, 100, 50, 128))
    cases = {
        "has transparency in a stream": encode(tmp_path / "a.webm", half, "-pix_fmt", "yuva420p", "-c:v", "libvpx-vp9"),
        "no path between colorspaces": encode(tmp_path / "a.mp4", flat(48, 64), "-vf", ycgco, *H264),
        "changes its picture size": tmp_path / "a.h264",
    }
    parts = [encode(tmp_path / "part.h264", flat(48, width), *H264).read_bytes() for width in (64, 96)]
    (tmp_path / "a.h264").write_bytes(b"".join(parts))
    for reason, path in cases.items():
        with pytest.raises(BadVideo, match=reason):
            decoded(path)
