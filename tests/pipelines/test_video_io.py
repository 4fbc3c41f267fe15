"""Videos survive the way to disk, appear whole or not at all, and broken ones are told from good ones."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from vmonarch.pipelines import video_io
from vmonarch.pipelines.config import FPS


def moving_square(frames: int = 9, height: int = 48, width: int = 64) -> torch.Tensor:
    """A red square that moves right over a blue gradient, [F, 3, H, W]."""
    video = torch.zeros(frames, 3, height, width)
    video[:, 2] = torch.linspace(0.1, 0.6, width)
    for frame in range(frames):
        left = 4 + frame * (width - 24) // max(1, frames - 1)
        video[frame, :, 12:28, left : left + 16] = torch.tensor([0.9, 0.1, 0.1])[:, None, None]
    return video


@pytest.mark.parametrize("shape", [(9, 48, 64), (1, 16, 16), (5, 34, 50)], ids=str)
def test_mp4_round_trip(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    frames = video_io.to_uint8(moving_square(*shape) if shape[1] > 30 else moving_square(*shape)[..., :16, :16])
    video_io.encode_video(tmp_path / "a.mp4", frames, 12.5)
    decoded, fps = video_io.read_video(tmp_path / "a.mp4")
    assert decoded.shape == frames.shape and fps == pytest.approx(12.5)
    # Chroma is stored at half resolution: edges blur, but no plane may be off as a whole.
    error = decoded.astype(float) - frames
    assert np.abs(error).mean() < 6 and np.abs(error.mean(axis=(0, 1, 2))).max() < 2.5
    video_io.verify_video(tmp_path / "a.mp4", frames)
    centres = [np.argwhere(frame[..., 0] > 150)[:, 1].mean() for frame in decoded]
    assert all(a < b for a, b in zip(centres, centres[1:], strict=False)), "the frames keep their order"


@pytest.mark.parametrize("folder", ["12:30", "-y"])
def test_any_relative_folder_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path(folder).mkdir()
    frames = video_io.to_uint8(moving_square())
    video_io.encode_video(Path(folder, "a.mp4"), frames, 16)
    video_io.verify_video(Path(folder, "a.mp4"), frames)


@pytest.mark.parametrize("fps", [*FPS, 1000.0])
def test_the_least_and_the_most_frames_a_second(tmp_path: Path, fps: float) -> None:
    video_io.encode_video(tmp_path / "a.mp4", np.zeros((5, 16, 16, 3), np.uint8), fps)
    assert video_io.read_video(tmp_path / "a.mp4")[1] == fps


def test_saturated_colours_survive(tmp_path: Path) -> None:
    colours = [(230, 20, 20), (20, 220, 20), (20, 20, 230), (230, 230, 20), (20, 230, 230), (240, 240, 240)]
    frames = np.repeat(np.array(colours, np.uint8)[None, None], 32, axis=1).repeat(16, axis=2).repeat(3, axis=0)
    video_io.encode_video(tmp_path / "a.mp4", frames, 16)
    decoded, _ = video_io.read_video(tmp_path / "a.mp4")
    # Away from the edges between colours; the wrong matrix is off by ten levels and more.
    inner = np.abs(decoded.astype(int) - frames).reshape(3, 32, 6, 16, 3)[:, :, :, 5:11]
    assert inner.max() <= 4


def test_bytes_do_not_depend_on_the_number_of_cores(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    frames = video_io.to_uint8(moving_square(9, 96, 128))
    video_io.encode_video(tmp_path / "all.mp4", frames, 16)
    try:
        os.sched_setaffinity(0, {min(cores)})
        video_io.encode_video(tmp_path / "one.mp4", frames, 16)
    finally:
        os.sched_setaffinity(0, cores)
    assert (tmp_path / "all.mp4").read_bytes() == (tmp_path / "one.mp4").read_bytes()


def test_uint8_rounds_to_nearest() -> None:
    frames = torch.tensor([0.0, 0.5 / 255 + 1e-4, 0.4 / 255, 1.0]).view(1, 1, 2, 2).expand(1, 3, 2, 2)
    assert video_io.to_uint8(frames)[0, :, :, 0].tolist() == [[0, 1], [0, 255]]


def with_nan() -> torch.Tensor:
    video = moving_square()
    video[3, 1, 2, 2] = float("nan")
    return video


NO_VIDEOS = {
    "black": (torch.zeros(5, 3, 16, 16), "constant"),
    "grey, one level of noise": (0.5 + torch.rand(5, 3, 16, 16) / 255, "constant"),
    "flat frames": (torch.rand(5, 3, 1, 1).expand(5, 3, 16, 16), "flat colour"),
    "nan": (with_nan(), "1 NaN"),
    "all nan": (torch.full((5, 3, 16, 16), float("nan")), "NaN"),
    "infinite": (moving_square() / 0, "infinite"),
    "out of range": (moving_square() * 2, r"outside \[0, 1\]"),
    "no frames": (torch.zeros(0, 3, 16, 16), "empty"),
    "four channels": (torch.rand(5, 4, 16, 16), r"\[F, 3, H, W\]"),
}


@pytest.mark.parametrize(("frames", "message"), NO_VIDEOS.values(), ids=NO_VIDEOS)
def test_tells_no_videos(frames: torch.Tensor, message: str) -> None:
    with pytest.raises(video_io.VideoError, match=message):
        video_io.check_frames(frames)


def test_accepts_videos() -> None:
    video_io.check_frames(moving_square())
    video_io.check_frames(moving_square(1))
    video_io.check_frames(moving_square()[:1].expand(5, 3, 48, 64))


def test_refuses_what_cannot_be_encoded(tmp_path: Path) -> None:
    good = video_io.to_uint8(moving_square())
    for frames, fps, message in (
        (good[:, :47], 16, "even"),
        (good[..., :1], 16, "uint8"),
        (good.astype(np.float32), 16, "uint8"),
        (good[:0], 16, "not empty"),
        (good, 0, "fps"),
        (good, float("nan"), "fps"),
    ):
        with pytest.raises(ValueError, match=message):
            video_io.encode_video(tmp_path / "a.mp4", frames, fps)
    with pytest.raises(OSError, match="ffmpeg could not write"):
        video_io.encode_video(tmp_path / "missing" / "a.mp4", good, 16)


def test_damaged_files_are_found(tmp_path: Path) -> None:
    frames = video_io.to_uint8(moving_square(17))
    path = tmp_path / "a.mp4"
    video_io.encode_video(path, frames, 16)
    whole = path.read_bytes()
    with pytest.raises(video_io.VideoError, match="decodes to shape"):
        video_io.verify_video(path, frames[:-1])
    with pytest.raises(video_io.VideoError, match="another video"):
        video_io.verify_video(path, 255 - frames)
    for damaged in (whole[: len(whole) // 2], b"", b"no video"):
        path.write_bytes(damaged)
        with pytest.raises(video_io.VideoError):
            video_io.verify_video(path, frames)
    with pytest.raises(FileNotFoundError):
        video_io.verify_video(tmp_path / "missing.mp4", frames)
    video_io.encode_video(path, np.full_like(frames, 7), 16)
    with pytest.raises(video_io.VideoError, match="constant"):
        video_io.verify_video(path, np.full_like(frames, 7))


@pytest.mark.parametrize(
    ("frames", "count", "expected"),
    [(9, 3, [0, 4, 8]), (2, 6, [0, 1]), (1, 6, [0]), (61, 6, [0, 12, 24, 36, 48, 60]), (5, 1, [0])],
)
def test_evenly_spaced(frames: int, count: int, expected: list[int]) -> None:
    assert video_io.evenly_spaced(frames, count) == expected


def where_red(picture: np.ndarray) -> np.ndarray:
    """Mask of the square's colour."""
    return (picture[..., 0] > 200) & (picture[..., 1] < 60) & (picture[..., 2] < 60)


def test_contact_sheet_shows_the_frames_in_order() -> None:
    frames = video_io.to_uint8(moving_square(9))
    sheet = np.asarray(video_io.contact_sheet(frames, title="a red square", columns=3, count=9))
    # Nine cells in a 3×3 grid, the square further right in each.
    height, width = sheet.shape[0], sheet.shape[1]
    positions = []
    for row in range(3):
        for column in range(3):
            band = where_red(
                sheet[row * height // 3 : (row + 1) * height // 3, column * width // 3 : (column + 1) * width // 3]
            )
            positions.append(np.argwhere(band)[:, 1].mean())
    assert all(a < b for a, b in zip(positions, positions[1:], strict=False)), positions


def test_strips_have_a_row_for_each_method() -> None:
    frames = video_io.to_uint8(moving_square(9))
    one = np.asarray(video_io.strips({"full": frames}, count=3))
    three = np.asarray(video_io.strips({"full": frames, "other": frames, "third": np.zeros_like(frames)}, count=3))
    assert three.shape[0] > 2 * one.shape[0]
    assert where_red(three).sum() == 2 * where_red(one).sum() > 0


def test_side_by_side_plays_all_at_once() -> None:
    frames = video_io.to_uint8(moving_square(9))
    notes = {"full": "reference", "vmonarch": "PSNR 30.0 dB"}
    joined = video_io.side_by_side({"full": frames, "vmonarch": frames[::-1].copy()}, notes=notes)
    assert len(joined) == 9 and joined.shape[1] % 2 == joined.shape[2] % 2 == 0
    half = joined.shape[2] // 2
    left = [np.argwhere(where_red(frame[:, :half]))[:, 1].mean() for frame in joined]
    right = [np.argwhere(where_red(frame[:, half:]))[:, 1].mean() for frame in joined]
    assert left == sorted(left) and right == sorted(right, reverse=True)


def test_five_methods_wrap_into_rows() -> None:
    frames = video_io.to_uint8(moving_square(2))
    joined = video_io.side_by_side({f"method {i}": frames for i in range(5)}, columns=3)
    top, bottom = np.array_split(where_red(joined[0]), 2)
    assert bottom.sum() == pytest.approx(top.sum() * 2 / 3, rel=0.02)


@pytest.mark.parametrize("layout", [video_io.strips, video_io.side_by_side])
def test_layouts_refuse_different_shapes(layout) -> None:
    frames = video_io.to_uint8(moving_square(9))
    with pytest.raises(ValueError, match="one shape"):
        layout({"full": frames, "short": frames[:-1]})
    with pytest.raises(ValueError, match="at least one"):
        layout({})


@pytest.mark.parametrize(
    "title", ["", "漢字のプロンプト", "word " * 500, "x" * 3000, "two\nlines\t\x1b[0m"], ids=lambda t: repr(t[:8])
)
def test_any_title_fits(title: str) -> None:
    frames = video_io.to_uint8(moving_square(4))
    plain, titled = video_io.contact_sheet(frames), video_io.contact_sheet(frames, title=title)
    assert titled.width == plain.width and plain.height <= titled.height < plain.height + 100
