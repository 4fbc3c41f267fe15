"""Videos survive the way to disk, appear whole or not at all, and broken ones are told from good ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from videos import read_video

from vmonarch.configs import InputError
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


def where_red(picture: np.ndarray) -> np.ndarray:
    """Mask of the square's colour."""
    return (picture[..., 0] > 150) & (picture[..., 1] < 60) & (picture[..., 2] < 60)


def places(pictures: list[np.ndarray]) -> list[float]:
    """Where the square is from left to right."""
    return [np.argwhere(where_red(picture))[:, 1].mean() for picture in pictures]


# Folders whose names ffmpeg could take for a protocol and an option; an odd number of frames and of blocks of 16.
@pytest.mark.parametrize(("folder", "shape"), [("12:30", (9, 48, 64)), ("-y", (1, 34, 50)), (".", (5, 34, 50))])
def test_mp4_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, shape: tuple[int, ...]) -> None:
    monkeypatch.chdir(tmp_path)
    Path(folder).mkdir(exist_ok=True)
    path, frames = Path(folder, "a.mp4"), video_io.to_uint8(moving_square(*shape))
    video_io.encode_video(path, frames, 12.5)
    decoded, fps = read_video(path)
    assert decoded.shape == frames.shape and fps == pytest.approx(12.5)
    # Chroma is stored at half resolution: edges blur, but no plane may be off as a whole.
    error = decoded.astype(float) - frames
    assert np.abs(error).mean() < 6 and np.abs(error.mean(axis=(0, 1, 2))).max() < 2.5
    assert places(decoded) == sorted(places(decoded)), "the frames keep their order"


@pytest.mark.parametrize("fps", FPS)
def test_the_least_and_the_most_frames_a_second(tmp_path: Path, fps: float) -> None:
    video_io.encode_video(tmp_path / "a.mp4", np.zeros((5, 16, 16, 3), np.uint8), fps)
    assert read_video(tmp_path / "a.mp4")[1] == fps


def test_saturated_colours_survive(tmp_path: Path) -> None:
    colours = [(230, 20, 20), (20, 220, 20), (20, 20, 230), (230, 230, 20), (20, 230, 230), (240, 240, 240)]
    frames = np.repeat(np.array(colours, np.uint8)[None, None], 32, axis=1).repeat(16, axis=2).repeat(3, axis=0)
    video_io.encode_video(tmp_path / "a.mp4", frames, 16)
    decoded, _ = read_video(tmp_path / "a.mp4")
    # Away from the edges between colours; the wrong matrix is off by ten levels and more.
    inner = np.abs(decoded.astype(int) - frames).reshape(3, 32, 6, 16, 3)[:, :, :, 5:11]
    assert inner.max() <= 4


def test_tells_no_videos() -> None:
    for frames, message in (
        (torch.zeros(5, 3, 16, 16), "constant"),
        (0.5 + torch.rand(5, 3, 16, 16) / 255, "constant"),
        (torch.rand(5, 3, 1, 1).expand(5, 3, 16, 16), "flat colour"),
        (moving_square().index_fill(0, torch.tensor(3), float("nan")), "9216 NaN"),
    ):
        with pytest.raises(video_io.VideoError, match=message):
            video_io.check_frames(frames)


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    good = video_io.to_uint8(moving_square())
    with pytest.raises(OSError, match="ffmpeg could not write the video: .*No such file"):
        video_io.encode_video(tmp_path / "missing" / "a.mp4", good, 16)


def test_pictures_are_shown_as_they_are_meant(tmp_path: Path) -> None:
    """Turned by EXIF, cropped at the centre, transparency over black; what is not shown of them is told."""
    from PIL import Image

    frame = np.zeros((32, 48, 3), np.uint8)
    frame[:, :24, 0] = 200
    plain = Image.fromarray(frame)
    turned = plain.getexif()
    turned[0x0112] = 6
    clear = np.dstack([frame, np.full((32, 48), 255, np.uint8)])
    clear[:, 24:] = (0, 0, 250, 0)
    padded = (((0, 0), (16, 16), (0, 0)), ((8, 8), (0, 0), (0, 0)))
    wide, tall = (Image.fromarray(np.pad(frame, sides, constant_values=255)) for sides in padded)
    for picture, options, told in (
        (plain, {}, ""),
        (plain.transpose(Image.Transpose.ROTATE_90), {"exif": turned}, ""),
        (plain.convert("RGBA"), {}, ""),
        (Image.fromarray(clear), {}, "transparent pixels are laid over black"),
        (wide, {}, "80×32 is cropped to 48×32, the shape of 48×32"),
        (tall, {}, "48×48 is cropped to 48×32, the shape of 48×32"),
    ):
        picture.save(tmp_path / "a.png", **options)
        shown, said = video_io.open_image(str(tmp_path / "a.png"), 32, 48)
        assert (np.asarray(shown) == frame).all() and said == told


def test_a_colour_profile_is_converted_to_srgb(tmp_path: Path) -> None:
    from PIL import Image, ImageCms

    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    # Its red is green, and its green red.
    swapped = srgb.replace(b"rXYZ", b"????", 1).replace(b"gXYZ", b"rXYZ", 1).replace(b"????", b"gXYZ", 1)
    picture = Image.new("RGB", (32, 16), (200, 100, 50))
    for profile, shown in ((srgb, (200, 100, 50)), (swapped, (100, 200, 50))):
        picture.save(tmp_path / "a.png", icc_profile=profile)
        frame = np.asarray(video_io.open_image(str(tmp_path / "a.png"), 16, 32)[0]).astype(int)
        assert abs(frame - shown).max() <= 1
    picture.save(tmp_path / "a.png", icc_profile=b"no profile")
    with pytest.raises(InputError, match="colour profile that cannot be used"):
        video_io.open_image(str(tmp_path / "a.png"), 16, 32)


def test_greys_of_more_than_eight_bits_are_refused(tmp_path: Path) -> None:
    from PIL import Image

    for dtype, name in ((np.uint16, "grey.png"), (np.uint16, "grey.tiff"), (np.float32, "grey.tiff")):
        Image.fromarray(np.full((16, 32), 300, dtype)).save(tmp_path / name)
        with pytest.raises(InputError, match="image must have 8 bits a channel"):
            video_io.open_image(str(tmp_path / name), 16, 32)


def test_steps_are_marked_below_and_a_difference_is_grey_where_there_is_none() -> None:
    video = np.full((2, 96, 80, 3), 100, np.uint8)
    marked = video_io.with_steps(video, "eap" + "e")
    assert marked.shape == (2, 112, 80, 3) and np.array_equal(marked[:, :96], video)
    dark = lambda step: int((marked[1, 96:, 20 * step + 5].max(-1) < 200).sum())
    assert [dark(step) for step in range(4)] == [12, 6, 1, 12]
    other = video.copy()
    other[0, 0, 0] = (103, 100, 40)
    gap = video_io.difference(other, video, 4)
    assert gap[0, 0, 0].tolist() == [140, 128, 0] and (gap[1] == 128).all()
