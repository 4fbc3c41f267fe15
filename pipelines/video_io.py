"""Writing, reading and laying out videos.

Legend: F frames, H and W pixels. Generated videos are float tensors [F, 3, H, W] in [0, 1]; pictures and decoded videos
are uint8 arrays [F, H, W, 3].
"""

from __future__ import annotations

import contextlib
import itertools
import re
import subprocess
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image, ImageFont

# A video whose values span less than two of 255 grey levels shows nothing.
_CONSTANT = 2 / 255
# Mean absolute error, as a share of the range, that encoding may cost. Pure noise in 4:2:0 chroma stays well below.
_ENCODING_ERROR = 0.15
# Pixels of a frame for each thread of x264; smaller frames are no faster with several.
_PIXELS_PER_THREAD = 100_000

_BACKGROUND, _INK, _FAINT = (255, 255, 255), (24, 24, 27), (110, 110, 118)
_MARGIN, _GAP, _LINE = 16, 8, 20


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
    options = [
        *("-vf", f"scale=out_color_matrix=bt709:out_range=tv,{bt709}", "-threads", str(threads), "-crf", "12"),
        *("-movflags", "+faststart", "-fflags", "+bitexact", "-flags:v", "+bitexact", "-f", "mp4"),
    ]
    writer = imageio_ffmpeg.write_frames(
        _url(path), (width, height), fps=fps, codec="libx264", quality=None, macro_block_size=1,
        ffmpeg_log_level="error", output_params=options,
    )  # fmt: skip
    try:
        with contextlib.closing(writer):
            writer.send(None)
            for frame in frames:
                writer.send(np.ascontiguousarray(frame).data)
        # The writer does not tell how ffmpeg ended.
        written, _ = imageio_ffmpeg.count_frames_and_secs(_url(path))
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise OSError(f"ffmpeg could not write the video: {reason}") from error
    if written != len(frames):
        raise OSError(f"ffmpeg could not write the video: {written} frames of {len(frames)} are there")


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
    cells = [(f"frame {index}", "", frames[index]) for index in chosen]
    return _tiles(cells, columns, _cell_size(frames, 240), title)[0]


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
    cells: list[tuple[str, str, NDArray[np.uint8] | None]] = []
    for name, frames in videos.items():
        cells += [(name, (notes or {}).get(name, ""), None), *((f"frame {i}", "", frames[i]) for i in chosen)]
    return _tiles(cells, len(chosen) + 1, _cell_size(next(iter(videos.values())), 200), title)[0]


def side_by_side(
    videos: Mapping[str, NDArray[np.uint8]], *, notes: Mapping[str, str] | None = None, columns: int = 3
) -> NDArray[np.uint8]:
    """One video [F, H', W', 3] of labelled videos [F, H, W, 3] of one shape, next to each other; H', W' are even.

    Raises:
        ValueError: no video, or videos of different shapes.
    """
    shape = _common_shape(videos)
    size = _cell_size(next(iter(videos.values())), 320)
    cells = [(name, (notes or {}).get(name, ""), None) for name in videos]
    empty, places = _tiles(cells, columns, size, "")
    canvas = np.repeat(np.asarray(empty)[None], shape[0], axis=0)
    for (x, y), frames in zip(places, videos.values(), strict=True):
        for index, frame in enumerate(frames):
            canvas[index, y : y + size[1], x : x + size[0]] = np.asarray(_scaled(frame, size))
    # 4:2:0 halves both sides.
    return canvas[:, : canvas.shape[1] // 2 * 2, : canvas.shape[2] // 2 * 2]


def _tiles(
    cells: Sequence[tuple[str, str, NDArray[np.uint8] | None]], columns: int, size: tuple[int, int], title: str
) -> tuple[Image.Image, list[tuple[int, int]]]:
    """A picture of cells in rows below a title, and where the picture of each begins, (x, y).

    Args:
        cells: label, note and frame [H, W, 3] of each; the label stands above the frame, or where there will be one.
        size: width and height that frames are drawn at.
    """
    from PIL import Image, ImageDraw

    (width, height), columns = size, min(columns, len(cells))
    # A method's label gets spaces where a line may break.
    texts = [
        [(line, 15, _INK) for line in _wrap(label.replace(":", ": ").replace(",", ", "), 15, width)]
        + [(line, 13, _FAINT) for line in _wrap(note, 13, width)]
        for label, note, _ in cells
    ]
    bar = max(map(len, texts)) * _LINE + 4
    head = _wrap(title, 17, columns * (width + _GAP) - _GAP)
    top = _MARGIN + _LINE * len(head) + (_GAP if head else 0)
    rows = -(-len(cells) // columns)
    whole = (2 * _MARGIN + columns * (width + _GAP) - _GAP, top + rows * (bar + height + _GAP) + _MARGIN - _GAP)
    sheet = Image.new("RGB", whole, _BACKGROUND)
    draw, places = ImageDraw.Draw(sheet), []
    for i, line in enumerate(head):
        draw.text((_MARGIN, _MARGIN + i * _LINE), line, _INK, font=_font(17))
    for place, (lines, (*_, frame)) in enumerate(zip(texts, cells, strict=True)):
        x, y = _MARGIN + place % columns * (width + _GAP), top + place // columns * (bar + height + _GAP)
        for i, (line, font, colour) in enumerate(lines):
            draw.text((x, y + i * _LINE), line, colour, font=_font(font))
        places.append((x, y + bar))
        if frame is not None:
            sheet.paste(_scaled(frame, size), places[-1])
    return sheet, places


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


def _wrap(text: str, size: int, width: int, lines: int = 3) -> list[str]:
    """`text` in at most `lines` lines of `width` pixels, cut with an ellipsis; nothing if the font lacks its script."""
    text, font = " ".join(text.split()), _font(size)
    # Pillow's own font covers Latin; boxes in place of other scripts would tell the reader nothing.
    if not text or any(ord(character) > 0x24F and character not in "…–—·×→≥≤°" for character in text):
        return []
    for characters in itertools.count(max(8, width // 6), -1):
        wrapped = textwrap.wrap(text, characters, max_lines=lines, placeholder=" …")
        if characters <= 8 or max(font.getlength(line) for line in wrapped) <= width:
            return wrapped
    raise AssertionError("unreachable")
