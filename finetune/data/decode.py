"""Clips of one size from video files of any, by an ffmpeg that may be slow, wrong or stuck.

A file is decoded twice: once whole, for the time of every frame and to find damage wherever it is, and once as far as
its clips reach. Damage is what ffmpeg reports: noise within the data of a picture may well decode, to a picture of
noise.

Frames become what a player shows on a BT.709 screen: pixels are made square, interlaced frames deinterlaced, HDR is
tone-mapped, and transparency lies over black. What cannot be shown so is a `BadVideo`.

Legend: F frames, H and W pixels of a clip, h and w of its file.
"""

from __future__ import annotations

import bisect
import os
import re
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from pathlib import Path

import imageio_ffmpeg
import torch

# No video for training comes close; beyond, a broken header asks for memory that is not there.
MAX_PIXELS = 64 * 2**20
# What swscale, which knows neither primaries nor transfer functions, converts to RGB as a BT.709 screen shows it.
_PLAIN_COLOURS = {
    *("unknown", "reserved", "gbr", "bt709", "fcc", "bt470bg", "smpte170m", "smpte240m", "bt2020nc"),
    *("bt1361e", "iec61966-2-1", "iec61966-2-4", "bt2020-10", "bt2020-12"),
}


class BadVideo(ValueError):
    """A video that gives no clip; the message says why, the same each time."""


@dataclass(frozen=True)
class ClipShape:
    """What to cut out of a video.

    Args:
        height, width: pixels.
        num_frames: of each clip.
        fps: frames per second of the clips; None for those of the file.
        start: `begin`, or `middle` for clips around the middle of the file.
        clips: one after the other, at most so many.
    """

    height: int
    width: int
    num_frames: int
    fps: float | None = None
    start: str = "begin"
    clips: int = 1


@dataclass(frozen=True)
class Clip:
    """Frames of a video.

    Args:
        frames: [3, F, H, W], uint8 or float32 in [-1, 1].
        fps: how many of them a second has (0 if unknown).
        kept: the share of the video's picture that they show; the rest was cropped.
    """

    frames: torch.Tensor
    fps: float
    kept: float = 1.0


@dataclass(frozen=True)
class Stream:
    """The decoded frames of a file: their times in seconds, h and w after rotation, and what their pixels are.

    Args:
        number: of the stream among the file's video streams.
        aspect: width of a pixel over its height.
        colours: matrix, primaries and transfer function, in ffmpeg's names.
    """

    number: int
    times: list[Fraction]
    height: int
    width: int
    aspect: Fraction
    transparent: bool
    colours: Sequence[str]

    @property
    def rate(self) -> float:
        """Frames per second; 0 if unknown."""
        seconds = self.times[-1] - self.times[0]
        return float((len(self.times) - 1) / seconds) if seconds > 0 else 0.0

    def kept(self, shape: ClipShape) -> float:
        """The share of the picture that clips of a shape show."""
        excess = Fraction(self.width * shape.height, self.height * shape.width) * self.aspect
        return float(min(excess, 1 / excess))

    def filters(self, chosen: str) -> str:
        """ffmpeg's filters from decoded frames to what a BT.709 screen shows; `chosen` is the one that takes some."""
        filters = []
        if self.colours[0] in ("unknown", "reserved"):
            # Players' rule: who tags nothing follows the standard for the size.
            large = max(self.height, self.width) >= 1280 or min(self.height, self.width) > 576
            filters.append(f"setparams=colorspace={'bt709' if large else 'smpte170m'}")
        if self.transparent:
            # In 8 bits premultiply takes a level from what is opaque.
            filters += ["format=gbrap16", "premultiply=inplace=1"]
        # It needs a frame's neighbours, and passes frames that are not interlaced on as they are.
        filters += ["bwdif=send_frame:deint=interlaced", chosen]
        if not _PLAIN_COLOURS.issuperset(self.colours):
            if self.transparent:
                raise BadVideo(f"has transparency, which is not supported with its colours ({'/'.join(self.colours)})")
            filters += ["zscale=t=linear:npl=203:p=bt709", "format=gbrpf32le"]
            if self.colours[2] in ("smpte2084", "arib-std-b67"):
                # 203 cd/m² is HDR's reference white (ITU-R BT.2408); mobius leaves what is darker nearly as it is.
                filters.append("tonemap=mobius:desat=0")
            filters += ["zscale=t=bt709", "format=gbrp"]
        return ",".join(filters)


def decode_clips(
    path: Path, shapes: Sequence[ClipShape], *, timeout: float, stop: threading.Event | None = None
) -> list[Clip]:
    """The clips of a video file: scaled to cover H×W (bicubic, antialiased), centre cropped.

    Args:
        shapes: of those for which the video is long enough, the one is taken of which most of the picture is kept; of
            several, the longest, and then the largest.
        timeout: seconds for the whole file.
        stop: ends the work when set, with an error.

    Raises:
        BadVideo: no such file, no video in it, damaged anywhere, changing its size or colours midway, of colours that
            cannot be converted, shorter than a clip, or the time is over.
        OSError: ffmpeg cannot be started.
    """
    check_time = time_limit(timeout, stop)
    stream = read_stream(path, check_time)
    fitting = [shape for shape in shapes if len(_grid(stream.times, shape)) >= shape.num_frames]
    shape = max(
        fitting or [min(shapes, key=lambda shape: shape.num_frames)],
        key=lambda shape: (stream.kept(shape), shape.num_frames, shape.height * shape.width),
    )
    clips = choose_frames(stream.times, shape)
    wanted = {index for clip in clips for index in clip}
    first, last = min(wanted), max(wanted)
    filters = stream.filters(rf"select=between(n\,{first}\,{last})")
    output = ["-vf", filters, "-frames:v", str(last - first + 1), "-f", "rawvideo", "-pix_fmt", "rgb24"]
    frames, numbers, size = {}, count(first), 3 * stream.height * stream.width

    def take(data: bytearray) -> None:
        index = next(numbers)
        if index in wanted and len(data) == size:
            frame = torch.frombuffer(data, dtype=torch.uint8).reshape(stream.height, stream.width, 3)
            frames[index] = resize_and_crop(frame.permute(2, 0, 1), shape.height, shape.width, stream.aspect)

    _decode(path, stream.number, output, size, check_time, take)
    if len(frames) < len(wanted):
        raise BadVideo("cannot be decoded: the decoder ended early")
    rate = shape.fps or stream.rate
    return [Clip(torch.stack([frames[index] for index in clip], dim=1), rate, stream.kept(shape)) for clip in clips]


def time_limit(timeout: float, stop: threading.Event | None = None) -> Callable[[], None]:
    """What raises `BadVideo` when so many seconds are over, or `stop` is set."""
    end = time.monotonic() + timeout

    def check_time() -> None:
        if time.monotonic() > end or (stop is not None and stop.is_set()):
            raise BadVideo(f"took longer than {timeout:g} s to decode")

    return check_time


def _grid(times: Sequence[Fraction], shape: ClipShape) -> list[int]:
    """Indices of the frames at the clips' frame rate: each is the nearest in time, of two the earlier."""
    if shape.fps is None:
        return list(range(len(times)))
    # Frame rates are written with few digits; 29.97 shall not become a fraction of 2^50.
    step = 1 / Fraction(shape.fps).limit_denominator(100_000)
    # A tenth of a step for rates that were rounded: 61 frames at 30000/1001 are 61 frames at 29.97 and at 30, too.
    count = int((times[-1] - times[0]) / step + Fraction(1, 10)) + 1
    grid = []
    for moment in (times[0] + k * step for k in range(count)):
        after = bisect.bisect_left(times, moment)
        beside = max(after - 1, 0), min(after, len(times) - 1)
        grid.append(min(beside, key=lambda index: abs(times[index] - moment)))
    return grid


def choose_frames(times: Sequence[Fraction], shape: ClipShape) -> list[list[int]]:
    """Indices of each clip's frames; to another frame rate by taking the frame nearest in time, the earlier of two.

    Args:
        times: of the video's frames, in seconds, never falling.

    Raises:
        BadVideo: the video is shorter than a clip.
    """
    grid, length = _grid(times, shape), shape.num_frames
    clips = min(shape.clips, len(grid) // length)
    if not clips:
        rate = "" if shape.fps is None else f" at {shape.fps:g} frames per second"
        raise BadVideo(f"is too short: it has {len(grid)} frames{rate}, {length} are needed")
    first = 0 if shape.start == "begin" else (len(grid) - clips * length) // 2
    return [grid[first + k * length : first + (k + 1) * length] for k in range(clips)]


def resize_and_crop(frame: torch.Tensor, height: int, width: int, aspect: Fraction = Fraction(1)) -> torch.Tensor:
    """uint8 [3, H, W] of uint8 [3, h, w]: scaled to cover H×W with its shape kept, then the centre.

    Args:
        aspect: width of a pixel of `frame` over its height.

    Raises:
        BadVideo: so far from H×W in shape that the scaled picture would not fit into memory.
    """
    source_height, source_width = frame.shape[1:]
    scale = max(Fraction(height, source_height), width / (source_width * aspect))
    size = (max(height, round(source_height * scale)), max(width, round(source_width * aspect * scale)))
    if size[0] * size[1] > MAX_PIXELS:
        raise BadVideo(f"cannot be scaled: {source_width}×{source_height} is no shape for {width}×{height}")
    if size != (source_height, source_width):
        scaled = torch.nn.functional.interpolate(frame[None].float(), size, mode="bicubic", antialias=True)
        frame = scaled[0].round().clamp(0, 255).to(torch.uint8)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return frame[:, top : top + height, left : left + width].contiguous()


def _decode(
    path: Path,
    stream: int,
    output: Sequence[str],
    size: int,
    check_time: Callable[[], None],
    take: Callable[[bytearray], object],
) -> str:
    """Have an ffmpeg decode a file; `take` gets what it makes, in blocks of `size` bytes, the last one shorter.

    Returns:
        what it reported, each message after its level in brackets.
    """
    command = [
        *(imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-hide_banner", "-nostats", "-v", "level+info", "-xerror"),
        # With more, an error in the last frames sometimes comes too late for the exit code.
        *("-threads", "1"),
        # A playlist that passes for a video shall not reach the network.
        *("-protocol_whitelist", "file", "-max_pixels", str(MAX_PIXELS), "-i", f"file:{path.absolute()}"),
        # Not of the pictures attached to it, of which V knows nothing.
        *("-map", f"0:V:{stream}", "-fps_mode", "passthrough", *output, "pipe:1"),
    ]
    with tempfile.TemporaryFile() as log, selectors.DefaultSelector() as selector:
        # A process group of its own: Ctrl-C reaches us alone, and whatever it starts is killed with it.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, process_group=0
        )
        assert process.stdout is not None
        pipe = process.stdout
        selector.register(pipe, selectors.EVENT_READ)

        try:
            block, more = bytearray(), True
            while more:
                check_time()
                if selector.select(0.1):
                    chunk = os.read(pipe.fileno(), min(size - len(block), 2**20))
                    block += chunk
                    more = bool(chunk)
                if len(block) == size or not more:
                    take(block)
                    block = bytearray()
            while process.poll() is None:
                check_time()
                time.sleep(0.002)
            log.seek(0)
            # Addresses differ from run to run.
            report = re.sub(r"\[[^\]\n]*@ 0x[0-9a-f]+\]\s*", "", log.read(2**24).decode(errors="replace"))
            errors = re.findall(r"^\[(?:error|fatal|panic)\]\s*(\S.*)", report, re.MULTILINE)
            # Of some containers ffmpeg reports the missing end, and goes on all the same.
            if process.returncode or any("prematurely" in error for error in errors):
                raise BadVideo(f"cannot be decoded: {next(iter(errors), f'ffmpeg ended with {process.returncode}')}")
            return report
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            # One that waits for a dead disk does not die; better a lost process than a run that hangs with it.
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            pipe.close()


def read_stream(path: Path, check_time: Callable[[], None], number: int = 0) -> Stream:
    """Decode the whole video of a file for its frames' times and kind.

    Args:
        check_time: see `time_limit`. number: of the first stream that it may be.

    Raises:
        BadVideo, OSError: as `decode_clips`.
    """
    found = bytearray()
    options = ["-enc_time_base", "demux", "-f", "framecrc"]
    report = _decode(path, number, options, 2**20, check_time, found.extend)
    text, (source, _, output) = found.decode(), report.partition("[info] Output #0")
    ticks = [int(tick) for tick in re.findall(r"^0,\s*-?\d+,\s*(-?\d+),", text, re.MULTILINE)]
    base = re.search(r"^#tb 0: (\d+/\d+)", text, re.MULTILINE)
    # pixel format, its traits, width, height, shape of a pixel
    line = r"Video: rawvideo.*?, (\w+)(?:\((.*)\))?, (\d+)x(\d+)(?: \[SAR (\d+):(\d+))?"
    kind = re.search(line, output)
    if not ticks or base is None or kind is None:
        raise BadVideo("has no frame")
    if ticks != sorted(ticks):
        raise BadVideo("has frames whose times go backwards")
    if "Reconfiguring filter graph" in output:
        raise BadVideo("changes its picture size or its colours midway; cut it there")
    if re.search(r"alpha_mode\s*: 1", output):
        raise BadVideo("has transparency in a stream of its own, which is not decoded; lay it over a background first")
    pixels, traits, width, height, across, down = kind.groups(default="")
    # Of three names that are the same number, ffmpeg writes the first.
    names = [trait for trait in traits.split(", ") if "/" in trait or trait in _PLAIN_COLOURS]
    colours = names[0].split("/") if names else ["unknown"]
    streams = len(re.findall(r"^\[info\]   Stream #0:.*: Video: (?!.*\(attached pic\))", source, re.MULTILINE))
    # A still before the video, such as a cover that is not marked as one.
    if len(ticks) == 1 and number + 1 < streams:
        return read_stream(path, check_time, number + 1)
    return Stream(
        number=number,
        times=[tick * Fraction(base[1]) for tick in ticks],
        height=int(height),
        width=int(width),
        aspect=Fraction(int(across), int(down)) if int(across or 0) and int(down or 0) else Fraction(1),
        transparent=bool(re.match(r"yuva|gbrap|rgba|bgra|argb|abgr|ya[\df]|ayuv|vuya|pal8", pixels)),
        colours=(3 * colours)[:3],
    )
