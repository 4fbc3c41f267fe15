"""Clips of one size from video files of any, by an ffmpeg that may be slow, wrong or stuck.

A file is decoded twice: once whole, for the time of every frame and to find damage wherever it is, and once as far as
its clips reach. Both run in processes that are killed at a deadline. Damage is what ffmpeg reports: noise within the
data of a picture may well decode, to a picture of noise.

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
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch

# No video for training comes close; beyond, a broken header asks for memory that is not there.
MAX_PIXELS = 64 * 2**20
_MAX_LOG = 2**24
# What swscale, which knows neither primaries nor transfer functions, converts to RGB as a BT.709 screen shows it.
_PLAIN_COLOURS = {
    *("unknown", "reserved", "gbr", "bt709", "fcc", "bt470bg", "smpte170m", "smpte240m", "bt2020nc"),
    *("bt1361e", "iec61966-2-1", "iec61966-2-4", "bt2020-10", "bt2020-12"),
}


class BadVideo(ValueError):
    """A video that gives no clip; the message says why, the same each time."""


class Cancelled(Exception):
    """Nobody waits for the result any more."""


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
class Timing:
    """When a video's frames are shown: in ticks of `tick` seconds, never falling."""

    times: Sequence[int]
    tick: Fraction

    @property
    def fps(self) -> float:
        """The mean frame rate; 0 for a single frame."""
        span = self.times[-1] - self.times[0]
        return float((len(self.times) - 1) / (span * self.tick)) if span else 0.0


@dataclass(frozen=True)
class _Picture:
    """What a video's decoded frames are: all alike.

    Args:
        height, width: h and w, after the rotation that the file asks for.
        aspect: width of a pixel over its height.
        transparent: whether the pixel format has an alpha channel.
        colours: their matrix, primaries and transfer function, in ffmpeg's names.
        streams: how many video streams the file has, pictures that are attached to it left out.
    """

    height: int
    width: int
    aspect: Fraction
    transparent: bool
    colours: Sequence[str]
    streams: int

    def kept(self, shape: ClipShape) -> float:
        """The share of the picture that clips of a shape show."""
        excess = Fraction(self.width * shape.height, self.height * shape.width) * self.aspect
        return float(min(excess, 1 / excess))

    def filters(self, chosen: str) -> str:
        """ffmpeg's filters from decoded frames to those that `chosen`, a filter, leaves, as a BT.709 screen shows them.

        Raises:
            BadVideo: the colours are not converted together with transparency.
        """
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
        stop: ends the work when set.

    Raises:
        BadVideo: no such file, empty, no video in it, damaged anywhere, changing its size or colours midway, of colours
            that cannot be converted, shorter than a clip, or the time is over.
        Cancelled: `stop` was set.
        OSError: ffmpeg cannot be started.
    """
    deadline = _Deadline(timeout, stop or threading.Event())
    try:
        if not path.is_file():
            raise BadVideo("is no file" if path.exists() else "does not exist")
        if path.stat().st_size == 0:
            raise BadVideo("is empty (0 bytes)")
    except OSError as error:
        raise BadVideo(f"cannot be read: {error.strerror or error}") from error
    stream = 0
    timing, picture = _read_timing(path, stream, deadline)
    # A still before the video, such as a cover that is not marked as one.
    while len(timing.times) == 1 and stream + 1 < picture.streams:
        stream += 1
        timing, picture = _read_timing(path, stream, deadline)
    longest = lambda shape: (picture.kept(shape), shape.num_frames, shape.height * shape.width)
    long_enough = [shape for shape in shapes if len(_grid(timing, shape)) >= shape.num_frames]
    shape = max(long_enough, key=longest) if long_enough else min(shapes, key=lambda shape: shape.num_frames)
    wanted = choose_frames(timing, shape)
    frames = _read_frames(path, stream, {index for clip in wanted for index in clip}, picture, shape, deadline)
    fps = float(shape.fps) if shape.fps is not None else timing.fps
    kept = picture.kept(shape)
    return [Clip(torch.stack([frames[index] for index in clip], dim=1), fps, kept) for clip in wanted]


def _grid(timing: Timing, shape: ClipShape) -> list[int]:
    """Indices of the frames at the clips' frame rate: each is the nearest in time, of two the earlier."""
    if shape.fps is None:
        return list(range(len(timing.times)))
    # Frame rates are written with few digits; 29.97 shall not become a fraction of 2^50.
    step = 1 / (Fraction(shape.fps).limit_denominator(100_000) * timing.tick)
    # A tenth of a step for rates that were rounded: 61 frames at 30000/1001 are 61 frames at 29.97 and at 30, too.
    count = int((timing.times[-1] - timing.times[0]) / step + Fraction(1, 10)) + 1
    return [_nearest(timing.times, timing.times[0] + k * step) for k in range(count)]


def choose_frames(timing: Timing, shape: ClipShape) -> list[list[int]]:
    """Indices of each clip's frames; to another frame rate by taking the frame nearest in time, the earlier of two.

    Raises:
        BadVideo: the video is shorter than a clip.
    """
    grid = _grid(timing, shape)
    clips = min(shape.clips, len(grid) // shape.num_frames)
    if not clips:
        rate = "" if shape.fps is None else f" at {shape.fps:g} frames per second"
        raise BadVideo(f"is too short: it has {len(grid)} frames{rate}, {shape.num_frames} are needed")
    first = 0 if shape.start == "begin" else (len(grid) - clips * shape.num_frames) // 2
    starts = range(first, first + clips * shape.num_frames, shape.num_frames)
    return [grid[start : start + shape.num_frames] for start in starts]


def _nearest(times: Sequence[int], moment: Fraction) -> int:
    after = bisect.bisect_left(times, moment)
    if after == 0:
        return 0
    if after == len(times):
        return after - 1
    return after if times[after] - moment < moment - times[after - 1] else after - 1


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


def _ffmpeg() -> str:
    import imageio_ffmpeg

    return imageio_ffmpeg.get_ffmpeg_exe()


class _Deadline:
    def __init__(self, timeout: float, stop: threading.Event) -> None:
        self._timeout, self._stop = timeout, stop
        self._end = time.monotonic() + timeout

    def left(self) -> float:
        """Seconds to go.

        Raises:
            BadVideo: none.
            Cancelled: nobody waits.
        """
        if self._stop.is_set():
            raise Cancelled
        left = self._end - time.monotonic()
        if left <= 0:
            raise BadVideo(f"took longer than {self._timeout:g} s to decode")
        return left


class _Decoder:
    """An ffmpeg that writes what it decodes into a pipe, read against a deadline and killed when its block ends."""

    def __init__(self, path: Path, stream: int, output: Sequence[str], deadline: _Deadline) -> None:
        self._command = [
            *(_ffmpeg(), "-nostdin", "-hide_banner", "-nostats", "-v", "level+info", "-xerror"),
            # With more, an error in the last frames sometimes comes too late for the exit code.
            *("-threads", "1"),
            # A playlist that passes for a video shall not reach the network.
            *("-protocol_whitelist", "file", "-max_pixels", str(MAX_PIXELS), "-i", f"file:{path.absolute()}"),
            # Not of the pictures attached to it, of which V knows nothing.
            *("-map", f"0:V:{stream}", "-fps_mode", "passthrough", *output, "pipe:1"),
        ]
        self._deadline = deadline

    def __enter__(self) -> _Decoder:
        self._log = tempfile.TemporaryFile()
        # A process group of its own: Ctrl-C reaches us alone, and whatever it starts is killed with it.
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._log, process_group=0
        )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pipe, selectors.EVENT_READ)
        self._buffer = bytearray()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        # One that waits for a dead disk does not die; better a lost process than a run that hangs with it.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._selector.close()
        self._pipe.close()
        self._log.close()

    def _fill(self) -> bool:
        """Read more into the buffer; False at the end."""
        while not self._selector.select(min(self._deadline.left(), 0.1)):
            pass
        chunk = os.read(self._pipe.fileno(), 2**20)
        self._buffer += chunk
        return bool(chunk)

    def read(self, size: int = sys.maxsize) -> bytes:
        """So many bytes of what it writes, fewer at its end."""
        while len(self._buffer) < size and self._fill():
            pass
        found = bytes(self._buffer[:size])
        del self._buffer[:size]
        return found

    def finish(self) -> str | None:
        """Wait for its end; what went wrong, or None."""
        while True:
            try:
                code = self._process.wait(min(self._deadline.left(), 0.1))
                break
            except subprocess.TimeoutExpired:
                continue
        # Addresses differ from run to run.
        lines = [re.sub(r"\[[^\]]*@ 0x[0-9a-f]+\]\s*", "", line) for line in self.log().splitlines()]
        errors = [found.group(1) for line in lines if (found := re.match(r"\[(?:error|fatal|panic)\]\s*(\S.*)", line))]
        if any("matches no streams" in line for line in errors):
            return "has no video stream"
        if any("no path between colorspaces" in line for line in errors):
            return "has no colours that can be converted to those of a BT.709 screen"
        # Of some containers ffmpeg reports the missing end, and goes on all the same.
        if code or any("prematurely" in line for line in errors):
            return next(iter(errors), f"ffmpeg ended with code {code}")
        return None

    def log(self) -> str:
        """What it has reported, each message after its level in brackets."""
        self._log.seek(0)
        return self._log.read(_MAX_LOG).decode(errors="replace")


def _read_timing(path: Path, stream: int, deadline: _Deadline) -> tuple[Timing, _Picture]:
    with _Decoder(path, stream, ["-enc_time_base", "demux", "-f", "framecrc"], deadline) as decoder:
        text = decoder.read().decode(errors="replace")
        problem = decoder.finish()
        log = decoder.log()
    times = [int(found.group(1)) for found in re.finditer(r"^0,\s*-?\d+,\s*(-?\d+),", text, re.MULTILINE)]
    if problem is not None:
        where = f" after {len(times)} frames" if times else ""
        raise _bad(problem, where)
    tick = re.search(r"^#tb 0: (\d+)/(\d+)", text, re.MULTILINE)
    if not times or tick is None:
        raise BadVideo("has no frame")
    if any(later < earlier for earlier, later in zip(times, times[1:], strict=False)):
        raise BadVideo("has frames whose times go backwards")
    return Timing(times, Fraction(int(tick.group(1)), int(tick.group(2)))), _picture(log)


def _bad(problem: str, where: str) -> BadVideo:
    """What a decoder's `finish` tells, and after how much of the file."""
    return BadVideo(problem if problem.startswith("has no") else f"cannot be decoded{where}: {problem}")


def _picture(log: str) -> _Picture:
    """What the frames are by the log of an ffmpeg that decoded all of them."""
    if "Reconfiguring filter graph" in log:
        raise BadVideo("changes its picture size or its colours midway; cut it there")
    source, _, output = log.partition("[info] Output #0")
    if re.search(r"alpha_mode\s*: 1", output):
        raise BadVideo("has transparency in a stream of its own, which is not decoded; lay it over a background first")
    line = r"Video: rawvideo.*?, (\w+)(?:\((.*)\))?, (\d+)x(\d+)(?: \[SAR (\d+):(\d+))?"
    found = re.search(line, output)
    if found is None:
        raise BadVideo("has frames of an unknown kind")
    pixels, traits, width, height, across, down = found.groups()
    # Of three names that are the same number, ffmpeg writes the first.
    names = [trait for trait in (traits or "").split(", ") if "/" in trait or trait in _PLAIN_COLOURS]
    colours = names[0].split("/") if names else 3 * ["unknown"]
    aspect = Fraction(int(across), int(down)) if across and int(across) and int(down) else Fraction(1)
    transparent = bool(re.match(r"yuva|gbrap|rgba|bgra|argb|abgr|ya[\df]|ayuv|vuya|pal8", pixels))
    streams = len(re.findall(r"^\[info\]   Stream #0:.*: Video: (?!.*\(attached pic\))", source, re.MULTILINE))
    return _Picture(int(height), int(width), aspect, transparent, (3 * colours)[:3], streams)


def _read_frames(
    path: Path, stream: int, wanted: set[int], picture: _Picture, shape: ClipShape, deadline: _Deadline
) -> dict[int, torch.Tensor]:
    """The frames of the given indices, each uint8 [3, H, W]."""
    first, last = min(wanted), max(wanted)
    filters = picture.filters(rf"select=between(n\,{first}\,{last})")
    output = ["-vf", filters, "-frames:v", str(last - first + 1), "-f", "rawvideo", "-pix_fmt", "rgb24"]
    frames: dict[int, torch.Tensor] = {}
    size = 3 * picture.height * picture.width
    with _Decoder(path, stream, output, deadline) as decoder:
        for index in range(first, last + 1):
            data = decoder.read(size)
            if len(data) < size:
                raise _bad(decoder.finish() or "the decoder ended early", f" after {index} frames")
            if index in wanted:
                pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                frame = pixels.reshape(picture.height, picture.width, 3).permute(2, 0, 1)
                frames[index] = resize_and_crop(frame, shape.height, shape.width, picture.aspect)
                deadline.left()
    return frames
