"""Writing and laying out videos, and reading the first frame of one.

Legend: F frames, H and W pixels. Generated videos are float tensors [F, 3, H, W] in [0, 1]; pictures are
uint8 arrays [F, H, W, 3].
"""

from __future__ import annotations

import functools
import io
import subprocess
import textwrap
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageDraw, ImageFont, ImageOps, UnidentifiedImageError

from vmonarch.configs import InputError

# A video whose values span less than two of 255 grey levels shows nothing.
_CONSTANT = 2 / 255
# Pixels of a frame for each thread of x264; smaller frames are no faster with several.
_PIXELS_PER_THREAD = 100_000

_BACKGROUND, _INK, _FAINT = (255, 255, 255), (24, 24, 27), (110, 110, 118)
_MARGIN, _GAP, _LINE = 16, 8, 20
# Label, note and frame [H, W, 3] of a part of a picture.
_Cell = tuple[str, str, NDArray[np.uint8] | None]


class VideoError(RuntimeError):
    """A video that is no video: NaN or constant."""


def check_frames(frames: torch.Tensor) -> None:
    """Check a generated video [F, 3, H, W] in [0, 1].

    Raises:
        VideoError: NaN or infinity, or nothing but uniform frames (black, say).
    """
    broken = int((~torch.isfinite(frames)).sum())
    if broken:
        raise VideoError(f"the video holds {broken} NaN or infinite values of {frames.numel()}")
    # Per channel and frame: a picture of one flat colour is constant too, however the colours differ.
    if (frames.amax(dim=(2, 3)) - frames.amin(dim=(2, 3))).max().item() < _CONSTANT:
        raise VideoError("the video is constant: every frame is one flat colour")


def to_uint8(frames: torch.Tensor) -> NDArray[np.uint8]:
    """uint8 [F, H, W, 3] of float [F, 3, H, W] in [0, 1], rounded to nearest."""
    return (frames.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()


def encode_video(path: Path, frames: NDArray[np.uint8], fps: float) -> None:
    """Encode uint8 frames [F, H, W, 3] as H.264 in mp4 (4:2:0, BT.709, near-lossless CRF 12), overwriting `path`.

    The bytes depend on the frames and the encoder alone, not on the time of day or the number of cores: x264 cuts its
    work, and with it the picture, by its threads, so their number follows from the frames' size.

    Raises:
        OSError: ffmpeg could not write the file; 4:2:0 halves height and width, which must be even.
    """
    import imageio_ffmpeg

    height, width = frames.shape[1:3]
    threads = max(1, min(8, height * width // _PIXELS_PER_THREAD))
    # Converted by BT.709 and marked so: players that must guess take BT.601 for small videos, and shift the colours.
    bt709 = "setparams=range=tv:colorspace=bt709:color_primaries=bt709:color_trc=bt709"
    command = [
        *(imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-xerror", "-v", "error"),
        *("-f", "rawvideo", "-s", f"{width}x{height}", "-pix_fmt", "rgb24"),
        *("-r", str(Fraction(fps).limit_denominator()), "-i", "pipe:0", "-c:v", "libx264", "-pix_fmt", "yuv420p"),
        *("-vf", f"scale=out_color_matrix=bt709:out_range=tv,{bt709}", "-threads", str(threads), "-crf", "12"),
        *("-movflags", "+faststart", "-fflags", "+bitexact", "-flags:v", "+bitexact", "-f", "mp4"),
        # Whatever is in a path: a colon would end a protocol, and a dash begin an option.
        f"file:{path.absolute()}",
    ]
    # A process group of its own: it is killed when Ctrl-C ends this call, and not before. Not imageio's writer, which
    # does not tell how ffmpeg ended, and loses a Ctrl-C while it starts it.
    pixels = np.ascontiguousarray(frames).reshape(-1).data
    done = subprocess.run(command, input=pixels, capture_output=True, process_group=0)
    if done.returncode:
        messages = done.stderr.decode(errors="replace").strip().splitlines()
        raise OSError(f"ffmpeg could not write the video: {(messages or [f'exit status {done.returncode}'])[-1]}")


def open_image(path: str, height: int, width: int) -> tuple[Image.Image, str]:
    """The first frame that a picture file gives, RGB of this size, and in words what of the picture it does not show.

    The picture stands as its EXIF tag says, has its colour profile converted to sRGB and transparent pixels laid over
    black, and is cropped to the frame's shape, at its centre, and scaled. Clips for training are cropped alike.

    Raises:
        InputError: it or its colour profile cannot be read, or it has greys of more than 8 bits.
    """
    try:
        with Image.open(path) as image:
            picture = ImageOps.exif_transpose(image)
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError("image", f"must be a picture file, {path!r} cannot be read: {error}") from error
    # Pillow reads colours of 16 bits as 8, but greys as they are.
    if picture.mode[0] in "IF":
        raise InputError("image", f"must have 8 bits a channel, {path!r} has more: save it as RGB")
    if (profile := picture.info.get("icc_profile")) and picture.mode in ("RGB", "RGBA", "CMYK"):
        try:
            srgb, mode = ImageCms.createProfile("sRGB"), "RGBA" if picture.mode == "RGBA" else "RGB"
            converted = ImageCms.profileToProfile(picture, io.BytesIO(profile), srgb, outputMode=mode)
        except (ImageCms.PyCMSError, OSError) as error:
            raise InputError("image", f"has a colour profile that cannot be used: {error}; save it as sRGB") from error
        assert converted is not None
        picture = converted
    changes = []
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        if picture.getchannel("A").getextrema() != (255, 255):
            changes.append("transparent pixels are laid over black")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, (0, 0, 0, 255)), picture)
    size = picture.size
    kept = (min(size[0], round(size[1] * width / height)), min(size[1], round(size[0] * height / width)))
    if kept != size:
        changes.append(f"{size[0]}×{size[1]} is cropped to {kept[0]}×{kept[1]}, the shape of {width}×{height}")
    # diffusers scales in the same way.
    frame = ImageOps.fit(picture.convert("RGB"), (width, height), Image.Resampling.LANCZOS)
    return frame, "; ".join(changes)


def evenly_spaced(frames: int, count: int) -> list[int]:
    """At most `count` frame indices, the first and the last among them, as evenly spread as integers allow."""
    return np.linspace(0, frames - 1, min(frames, count)).round().astype(int).tolist()


def contact_sheet(frames: NDArray[np.uint8], *, title: str = "") -> Image.Image:
    """A picture of twelve evenly spaced frames of a video [F, H, W, 3], each labelled with its index."""
    cells = [(f"frame {index}", "", frames[index]) for index in evenly_spaced(len(frames), 12)]
    return _picture(cells, 4, _cell_size(frames, 160), title)


def strips(
    videos: Mapping[str, NDArray[np.uint8]], *, notes: Mapping[str, str] | None = None, title: str = ""
) -> Image.Image:
    """A picture of labelled videos [F, H, W, 3] of one shape: a row each, six evenly spaced frames as columns.

    Args:
        notes: a line under a label, such as its metrics.
    """
    first = next(iter(videos.values()))
    chosen = evenly_spaced(len(first), 6)
    cells: list[_Cell] = []
    for name, frames in videos.items():
        cells += [(name, (notes or {}).get(name, ""), None), *((f"frame {i}", "", frames[i]) for i in chosen)]
    return _picture(cells, len(chosen) + 1, _cell_size(first, 133), title)


def side_by_side(
    videos: Mapping[str, NDArray[np.uint8] | None], *, notes: Mapping[str, str] | None = None, columns: int = 3
) -> NDArray[np.uint8]:
    """One video [F, H', W', 3] of labelled videos [F, H, W, 3] of one shape, `columns` in a row; H', W' are even.

    The first must be a video; None leaves a place empty.
    """
    first = next(iter(videos.values()))
    assert first is not None
    size = _cell_size(first, 213)
    cells = (
        [(name, (notes or {}).get(name, ""), None if video is None else video[i]) for name, video in videos.items()]
        for i in range(len(first))
    )
    joined = np.stack([np.asarray(_picture(cell, columns, size)) for cell in cells])
    # 4:2:0 halves both sides.
    return joined[:, : joined.shape[1] // 2 * 2, : joined.shape[2] // 2 * 2]


def difference(video: NDArray[np.uint8], reference: NDArray[np.uint8], gain: int) -> NDArray[np.uint8]:
    """The difference of two videos, amplified `gain` times, around a mid grey."""
    return np.clip(128 + gain * (video.astype(np.int16) - reference), 0, 255).astype(np.uint8)


def with_steps(video: NDArray[np.uint8], kinds: str) -> NDArray[np.uint8]:
    """A video [F, H, W, 3] with a bar for each step below: tall and dark for "e" (exact), half as tall for "a"
    (approximate), a line for "p" (predicted); nothing for no steps.
    """
    frames, height, width, _ = video.shape
    strip = np.full((max(4, height // 6), width, 3), _BACKGROUND, np.uint8)
    tall = {"e": max(3, height // 8), "a": max(2, height // 16), "p": max(1, height // 96)}
    edges = np.linspace(0, width, len(kinds) + 1).round().astype(int)
    for kind, left, right in zip(kinds, edges[:-1], edges[1:], strict=True):
        strip[-tall[kind] :, left : right - (right - left > 2)] = _INK if kind == "e" else _FAINT
    return np.concatenate([video, np.broadcast_to(strip, (frames, *strip.shape))], 1)


def _picture(cells: Sequence[_Cell], columns: int, size: tuple[int, int], title: str = "") -> Image.Image:
    """A picture of cells in rows below a title: a label and a note above a frame drawn at `size`, width and height."""
    (width, height), columns = size, min(columns, len(cells))
    # A method's label gets spaces where a line may break.
    texts = [_wrap(label.replace(":", ": ").replace(",", ", "), width) + _wrap(note, width) for label, note, _ in cells]
    bar = max(map(len, texts)) * _LINE + 4
    head = _wrap(title, columns * (width + _GAP) - _GAP)
    top = _MARGIN + _LINE * len(head) + (_GAP if head else 0)
    rows = -(-len(cells) // columns)
    whole = (2 * _MARGIN + columns * (width + _GAP) - _GAP, top + rows * (bar + height + _GAP) + _MARGIN - _GAP)
    sheet = Image.new("RGB", whole, _BACKGROUND)
    write = functools.partial(ImageDraw.Draw(sheet).multiline_text, fill=_INK, font=_font())
    write((_MARGIN, _MARGIN), "\n".join(head))
    for place, (lines, (*_, frame)) in enumerate(zip(texts, cells, strict=True)):
        x, y = _MARGIN + place % columns * (width + _GAP), top + place // columns * (bar + height + _GAP)
        write((x, y), "\n".join(lines))
        if frame is not None:
            sheet.paste(Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS), (x, y + bar))
    return sheet


def _cell_size(frames: NDArray[np.uint8], short_side: int) -> tuple[int, int]:
    """Width and height to draw a frame at, its shorter side close to `short_side`, its shape kept."""
    height, width = frames.shape[1:3]
    scale = short_side / min(height, width)
    if scale > 1:
        # Whole factors keep small videos crisp.
        scale = max(1, round(scale))
    return max(1, round(width * scale)), max(1, round(height * scale))


@functools.cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(15)


def _wrap(text: str, width: int) -> list[str]:
    """`text` in at most three lines of about `width` pixels, then an ellipsis; none if the font lacks its script."""
    text = " ".join(text.split())
    # Pillow's own font covers Latin; boxes in place of other scripts would tell the reader nothing.
    if not text or any(ord(character) > 0x24F and character not in "…–—·×→≥≤°" for character in text):
        return []
    characters = max(8, int(0.95 * width * len(text) / _font().getlength(text)))
    return textwrap.wrap(text, characters, max_lines=3, placeholder=" …")
