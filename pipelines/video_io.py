"""Writing, reading and laying out videos.

Legend: F frames, H and W pixels. Generated videos are float tensors [F, 3, H, W] in [0, 1]; pictures and decoded videos
are uint8 arrays [F, H, W, 3].
"""

from __future__ import annotations

import contextlib
import itertools
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont

# A video whose values span less than two of 255 grey levels shows nothing.
_CONSTANT = 2 / 255
# Mean absolute error, as a share of the range, that encoding may cost. Pure noise in 4:2:0 chroma stays well below.
_ENCODING_ERROR = 0.15
# Pixels of a frame for each thread of x264; smaller frames are no faster with several.
_PIXELS_PER_THREAD = 100_000

_BACKGROUND, _INK, _FAINT = (255, 255, 255), (24, 24, 27), (110, 110, 118)
_MARGIN, _GAP = 16, 8


class VideoError(RuntimeError):
    """A video that is no video: wrong shape, NaN, constant, or not readable back from its file."""


def check_frames(frames: torch.Tensor) -> None:
    """Check a generated video [F, 3, H, W] in [0, 1].

    Raises:
        TypeError: not a floating-point tensor.
        VideoError: another shape, NaN or infinity, values outside [0, 1], constant (black, say), or nothing but
            uniform frames.
    """
    if not isinstance(frames, torch.Tensor) or not frames.is_floating_point():
        raise TypeError(f"frames must be a floating-point tensor [F, 3, H, W], got {type(frames).__name__}")
    if frames.ndim != 4 or frames.shape[1] != 3 or 0 in frames.shape:
        raise VideoError(f"frames must have shape [F, 3, H, W] and no empty dimension, got {tuple(frames.shape)}")
    broken = int((~torch.isfinite(frames)).sum())
    if broken:
        raise VideoError(f"the video holds {broken} NaN or infinite values of {frames.numel()}")
    low, high = frames.min().item(), frames.max().item()
    if low < 0 or high > 1:
        raise VideoError(f"the video has values outside [0, 1]: [{low:.4g}, {high:.4g}]")
    if high - low < _CONSTANT:
        raise VideoError(f"the video is constant: every value is {low:.4g}")
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
        ValueError: another dtype or shape, an odd height or width (4:2:0 halves both), fps not above 0.
        OSError: ffmpeg could not write the file.
    """
    import imageio_ffmpeg

    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or 0 in frames.shape:
        raise ValueError(f"frames must be uint8 [F, H, W, 3] and not empty, got {frames.dtype} {frames.shape}")
    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        raise ValueError(f"frames must have even height and width, got {height}×{width}")
    if not 0 < fps < float("inf"):
        raise ValueError(f"fps must be above 0 and finite, got {fps}")
    threads = max(1, min(8, height * width // _PIXELS_PER_THREAD))
    # Converted by BT.709 and marked so: players that must guess take BT.601 for small videos, and shift the colours.
    bt709 = "setparams=range=tv:colorspace=bt709:color_primaries=bt709:color_trc=bt709"
    colours = f"scale=out_color_matrix=bt709:out_range=tv,{bt709}"
    command = [
        *(imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", "-nostdin"),
        *("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{fps:.6g}", "-i", "pipe:0", "-an"),
        *("-vf", colours, "-c:v", "libx264", "-threads", str(threads), "-crf", "12", "-pix_fmt", "yuv420p"),
        *("-movflags", "+faststart", "-fflags", "+bitexact", "-flags:v", "+bitexact", "-f", "mp4", _url(path)),
    ]
    with tempfile.TemporaryFile() as log:
        # A process group of its own: Ctrl-C reaches us alone, and we end ffmpeg and remove the file in order.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, process_group=0)
        try:
            assert process.stdin is not None
            # ffmpeg closing its end early is told by its exit code below.
            with contextlib.suppress(BrokenPipeError):
                for frame in frames:
                    process.stdin.write(np.ascontiguousarray(frame).data)
                process.stdin.close()
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        if code:
            log.seek(0)
            lines = log.read().decode(errors="replace").split("\n")
            reason = next((line for line in lines if line.strip()), "no message").strip()
            raise OSError(f"ffmpeg could not write the video (exit code {code}): {reason}")


def read_video(path: Path) -> tuple[NDArray[np.uint8], float]:
    """All frames [F, H, W, 3] of a video file and its frames per second.

    Raises:
        FileNotFoundError: there is no such file.
        VideoError: it cannot be decoded or holds no frame.
    """
    import imageio_ffmpeg

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no video {path}")
    # Not imageio_ffmpeg's reader: its fork runs Python between fork and exec, where Ctrl-C gets lost.
    command = [
        *(imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-hide_banner", "-xerror", "-i", _url(path), "-map", "0:V:0"),
        *("-fps_mode", "passthrough", "-f", "image2pipe", "-c:v", "ppm", "-pix_fmt", "rgb24", "pipe:1"),
    ]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
    )
    try:
        output, log = process.communicate()
    except BaseException:
        process.kill()
        process.wait()
        raise
    text = log.decode(errors="replace")
    if process.returncode:
        reason = (text.strip().splitlines() or ["no message"])[-1]
        raise VideoError(f"{path} cannot be decoded: {reason}")
    # ffmpeg writes 1000 as "1k". An attached picture may come first; it has no rate, or that of its clock.
    streams = [line for line in text.splitlines() if "Video: " in line and "(attached pic)" not in line]
    rate = re.search(r"([0-9.]+)(k?) fps", "".join(streams[:1]))
    header = re.match(rb"P6\s(\d+)\s(\d+)\s255\s", output)
    if header is None or rate is None:
        raise VideoError(f"{path} holds no frame")
    width, height, start = int(header[1]), int(header[2]), header.end()
    # A binary PPM file for every frame, all with the same header.
    size = start + 3 * width * height
    files = np.frombuffer(output, np.uint8, len(output) // size * size).reshape(-1, size)
    if len(output) % size or not (files[:, :start] == files[0, :start]).all():
        raise VideoError("the decoder's output is no stream of pictures")
    return files[:, start:].reshape(-1, height, width, 3), float(rate.group(1)) * (1000 if rate.group(2) else 1)


def _url(path: Path) -> str:
    """A path as ffmpeg takes it whatever is in it: a colon would end a protocol, and a dash begin an option."""
    return f"file:{path.absolute()}"


def verify_video(path: Path, frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Decode a video file, check it against the frames [F, H, W, 3] that it was made of, and return what it decodes to.

    Raises:
        VideoError: it cannot be decoded, or differs in frame count or size, is constant, or is far from its source.
    """
    decoded, _ = read_video(path)
    if decoded.shape != frames.shape:
        raise VideoError(f"{path} decodes to shape {decoded.shape}, but {frames.shape} was written")
    if int(decoded.max()) - int(decoded.min()) < 255 * _CONSTANT:
        raise VideoError(f"{path} decodes to a constant video")
    error = float(np.mean([np.abs(a.astype(np.int16) - b).mean() for a, b in zip(decoded, frames, strict=True)])) / 255
    if error > _ENCODING_ERROR:
        raise VideoError(f"{path} decodes to another video: mean absolute error {error:.3f} of the range")
    return decoded


def evenly_spaced(frames: int, count: int) -> list[int]:
    """At most `count` frame indices, the first and the last among them, as evenly spread as integers allow."""
    count = min(frames, count)
    return [0] if count == 1 else [round(i * (frames - 1) / (count - 1)) for i in range(count)]


def contact_sheet(frames: NDArray[np.uint8], *, title: str = "", columns: int = 4, count: int = 12) -> Image.Image:
    """A picture of `count` evenly spaced frames of a video [F, H, W, 3], each labelled with its index."""
    chosen = evenly_spaced(len(frames), count)
    columns = min(columns, len(chosen))
    width, height = _cell_size(frames, 240)
    row_height = height + 22 + _GAP
    rows = -(-len(chosen) // columns)
    sheet, draw, top = _sheet(columns * (width + _GAP) - _GAP, rows * row_height - _GAP, title)
    for place, index in enumerate(chosen):
        x = _MARGIN + place % columns * (width + _GAP)
        y = top + place // columns * row_height
        sheet.paste(_scaled(frames[index], (width, height)), (x, y))
        draw.text((x, y + height + 3), f"frame {index}", _FAINT, font=_font(14))
    return sheet


def strips(
    videos: Mapping[str, NDArray[np.uint8]], *, notes: Mapping[str, str] | None = None, title: str = "", count: int = 6
) -> Image.Image:
    """A picture of labelled videos [F, H, W, 3] of one shape: a row each, evenly spaced frames as columns.

    Args:
        notes: a line under a label, such as its metrics.

    Raises:
        ValueError: no video, or videos of different shapes.
    """
    shape = _common_shape(videos)
    chosen = evenly_spaced(shape[0], count)
    width, height = _cell_size(next(iter(videos.values())), 200)
    labels = {name: _Label.of(name, notes, 220, 16, 22) for name in videos}
    # Long labels next to flat videos must not run into the row below.
    row_height = max(height, *(label.height for label in labels.values()))
    left = _MARGIN + max(1, *(label.width for label in labels.values())) + 2 * _GAP
    content_width = left - _MARGIN + len(chosen) * (width + _GAP) - _GAP
    sheet, draw, top = _sheet(content_width, 22 + len(videos) * (row_height + _GAP) - _GAP, title)
    for column, index in enumerate(chosen):
        draw.text((left + column * (width + _GAP), top + 2), f"frame {index}", _FAINT, font=_font(13))
    for row, (name, frames) in enumerate(videos.items()):
        y = top + 22 + row * (row_height + _GAP)
        label = labels[name]
        label.draw(draw, _MARGIN, y + (height - label.height) // 2 if row_height == height else y)
        for column, index in enumerate(chosen):
            sheet.paste(_scaled(frames[index], (width, height)), (left + column * (width + _GAP), y))
    return sheet


def side_by_side(
    videos: Mapping[str, NDArray[np.uint8]], *, notes: Mapping[str, str] | None = None, columns: int = 3
) -> NDArray[np.uint8]:
    """One video [F, H', W', 3] of labelled videos [F, H, W, 3] of one shape, next to each other; H', W' are even.

    Raises:
        ValueError: no video, or videos of different shapes.
    """
    shape = _common_shape(videos)
    columns = min(columns, len(videos))
    rows = -(-len(videos) // columns)
    width, height = _cell_size(next(iter(videos.values())), 320)
    labels = [_Label.of(name, notes, width, 17, 24) for name in videos]
    bar = max(label.height for label in labels) + 6
    content_width, content_height = columns * (width + _GAP) - _GAP, rows * (bar + height + 2 * _GAP) - 2 * _GAP
    empty, draw, _ = _sheet(content_width + content_width % 2, content_height + content_height % 2)
    places = [
        (_MARGIN + i % columns * (width + _GAP), _MARGIN + i // columns * (bar + height + 2 * _GAP))
        for i in range(len(videos))
    ]
    for (x, y), label in zip(places, labels, strict=True):
        label.draw(draw, x, y)
    canvas = np.repeat(np.asarray(empty)[None], shape[0], axis=0)
    for (x, y), frames in zip(places, videos.values(), strict=True):
        for index, frame in enumerate(frames):
            canvas[index, y + bar : y + bar + height, x : x + width] = np.asarray(_scaled(frame, (width, height)))
    return canvas


def _sheet(width: int, height: int, title: str = "") -> tuple[Image.Image, ImageDraw.ImageDraw, int]:
    """A picture with room for these pixels within its margins, below a title; what draws on it; where they begin."""
    from PIL import Image, ImageDraw

    font = _font(17)
    lines = _wrap(title, font, width)
    top = _MARGIN + 24 * len(lines) + (_GAP if lines else 0)
    sheet = Image.new("RGB", (width + 2 * _MARGIN, top + height + _MARGIN), _BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    for i, line in enumerate(lines):
        draw.text((_MARGIN, _MARGIN + i * 24), line, _INK, font=font)
    return sheet, draw, top


@dataclass(frozen=True)
class _Label:
    """A video's label and the note under it: lines with their fonts, colours and heights."""

    lines: Sequence[tuple[str, ImageFont.FreeTypeFont | ImageFont.ImageFont, tuple[int, int, int], int]]

    @classmethod
    def of(cls, name: str, notes: Mapping[str, str] | None, width: int, size: int, line_height: int) -> _Label:
        font, small = _font(size), _font(13)
        # A method's label, with spaces where a line may break.
        head = _wrap(name.replace(":", ": ").replace(",", ", "), font, width)
        note = _wrap((notes or {}).get(name, ""), small, width)
        return cls([*((t, font, _INK, line_height) for t in head), *((t, small, _FAINT, 18) for t in note)])

    @property
    def height(self) -> int:
        return sum(height for *_, height in self.lines)

    @property
    def width(self) -> int:
        return max((int(font.getlength(text)) for text, font, *_ in self.lines), default=1)

    def draw(self, draw: ImageDraw.ImageDraw, x: int, y: int) -> None:
        for text, font, colour, height in self.lines:
            draw.text((x, y), text, colour, font=font)
            y += height


def _common_shape(videos: Mapping[str, NDArray[np.uint8]]) -> tuple[int, ...]:
    """The shape that all videos share."""
    if not videos:
        raise ValueError("videos must hold at least one video")
    shapes = {name: frames.shape for name, frames in videos.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"videos must have one shape, got {shapes}")
    return next(iter(shapes.values()))


def _cell_size(frames: NDArray[np.uint8], short_side: int) -> tuple[int, int]:
    """Width and height to draw a frame at, its shorter side close to `short_side` · 2/3, its shape kept."""
    height, width = frames.shape[1:3]
    scale = short_side * 2 / 3 / min(height, width)
    if scale > 1:
        # Whole factors keep small videos crisp.
        scale = max(1, round(scale))
    return max(1, round(width * scale)), max(1, round(height * scale))


def _scaled(frame: NDArray[np.uint8], size: tuple[int, int]) -> Image.Image:
    from PIL import Image

    return Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    from PIL import ImageFont

    return ImageFont.load_default(size)


def _wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int, lines: int = 3) -> list[str]:
    """`text` in at most `lines` lines of `width` pixels, cut with an ellipsis; nothing if the font lacks its script."""
    text = " ".join(text.split())
    # Pillow's own font covers Latin; boxes in place of other scripts would tell the reader nothing.
    if not text or any(ord(character) > 0x24F and character not in "…–—·×→≥≤°" for character in text):
        return []
    for characters in itertools.count(max(8, width // 6), -1):
        wrapped = textwrap.wrap(text, characters, max_lines=lines, placeholder=" …")
        if characters <= 8 or max(font.getlength(line) for line in wrapped) <= width:
            return wrapped
    raise AssertionError("unreachable")
