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

COLOURS = [(230, 20, 20), (20, 220, 20), (20, 20, 230), (230, 230, 20), (20, 230, 230), (240, 240, 240)]


# Folders whose names ffmpeg could take for a protocol and an option; an odd number of frames and of blocks of 16; the
# least and the most frames a second.
@pytest.mark.parametrize(
    ("folder", "shape", "fps"), [("12:30", (9, 48, 96), FPS[1]), ("-y", (1, 34, 50), 12.5), (".", (5, 34, 98), FPS[0])]
)
def test_mp4_round_trip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, shape: tuple[int, int, int], fps: float
) -> None:
    """Of columns in saturated colours, each of which has another one in the next frame."""
    monkeypatch.chdir(tmp_path)
    Path(folder).mkdir(exist_ok=True)
    count, height, width = shape
    column = np.arange(width) * len(COLOURS) // width
    shown = (column + np.arange(count)[:, None]) % len(COLOURS)
    frames = np.repeat(np.array(COLOURS, np.uint8)[shown][:, None], height, axis=1)
    assert np.array_equal(video_io.to_uint8(torch.from_numpy(frames).movedim(3, 1) / 255), frames)
    path = Path(folder, "a.mp4")
    video_io.encode_video(path, frames, fps)
    decoded, found = read_video(path)
    assert decoded.shape == frames.shape and found == fps
    # Chroma is stored at half resolution: edges blur. The wrong matrix is off by ten levels and more.
    inner = (np.roll(column, 3) == column) & (np.roll(column, -3) == column)
    assert inner.any() and np.abs(decoded.astype(int) - frames)[:, :, inner].max() <= 4


def test_tells_no_videos() -> None:
    for frames, message in (
        (torch.zeros(5, 3, 16, 16), "constant"),
        (0.5 + torch.rand(5, 3, 16, 16) / 255, "constant"),
        (torch.rand(5, 3, 1, 1).expand(5, 3, 16, 16), "flat colour"),
        (torch.rand(9, 3, 48, 64).index_fill(0, torch.tensor(3), float("nan")), "9216 NaN"),
    ):
        with pytest.raises(video_io.VideoError, match=message):
            video_io.check_frames(frames)


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="ffmpeg could not write the video: .*No such file"):
        video_io.encode_video(tmp_path / "missing" / "a.mp4", np.zeros((9, 48, 64, 3), np.uint8), 16)


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
