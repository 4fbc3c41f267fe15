"""A clip of one size from video files of any, by an ffmpeg that may be slow, wrong or stuck.

A file is decoded twice: once whole, to count its frames and to find damage wherever it is, and once as far as its clip
reaches. Damage is what ffmpeg reports: noise within the data of a picture may well decode, to a picture of
noise.

Frames become what a player shows on a BT.709 screen: pixels are made square, interlaced frames deinterlaced, HDR is
tone-mapped, and transparency lies over black. What cannot be shown so is a `BadVideo`.

Legend: F frames, H and W pixels of a clip, h and w of its file.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import imageio_ffmpeg
import torch

# No video for training comes close; beyond, a broken header asks for memory that is not there.
MAX_PIXELS = 64 * 2**20
# swscale, which ignores primaries and transfer functions, converts these to RGB as a BT.709 screen shows it.
_PLAIN_COLOURS = {
    *("unknown", "reserved", "gbr", "bt709", "fcc", "bt470bg", "smpte170m", "smpte240m", "bt2020nc"),
    *("bt1361e", "iec61966-2-1", "iec61966-2-4", "bt2020-10", "bt2020-12"),
}


class BadVideo(ValueError):
    """A video that gives no clip; the message says why, the same each time."""


@dataclass(frozen=True)
class ClipShape:
    """The part to cut out of the middle of a video.

    Args:
        height, width: pixels.
        num_frames: of the clip.
        fps: frames per second of the clip; None for those of the file.
    """

    height: int
    width: int
    num_frames: int
    fps: float | None = None


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
    """The decoded frames of a file, at the clips' rate: how many, h and w after rotation, and what their pixels are.

    Args:
        rate: frames per second; 0 if unknown.
        aspect: width of a pixel over its height.
        colours: matrix, primaries and transfer function, in ffmpeg's names.
    """

    frames: int
    rate: float
    height: int
    width: int
    aspect: Fraction
    transparent: bool
    colours: Sequence[str]

    def kept(self, shape: ClipShape) -> float:
        """The share of the picture that clips of a shape show."""
        excess = Fraction(self.width * shape.height, self.height * shape.width) * self.aspect
        return float(min(excess, 1 / excess))

    def filters(self, shape: ClipShape, first: int) -> str:
        """ffmpeg's filters from decoded frames to those of clips from the first on, as a BT.709 screen shows them.

        They are scaled to cover the clip's H×W (bicubic, antialiased) with their shape kept, of which the centre stays.
        """
        scale = max(Fraction(shape.height, self.height), shape.width / (self.width * self.aspect))
        height = max(shape.height, round(self.height * scale))
        width = max(shape.width, round(self.width * self.aspect * scale))
        if height * width > MAX_PIXELS:
            raise BadVideo(f"cannot be scaled: {self.width}×{self.height} is no shape for {shape.width}×{shape.height}")
        filters = []
        if self.colours[0] in ("unknown", "reserved"):
            # Players' rule: who tags nothing follows the standard for the size.
            large = max(self.height, self.width) >= 1280 or min(self.height, self.width) > 576
            filters.append(f"setparams=colorspace={'bt709' if large else 'smpte170m'}")
        if self.transparent:
            # In 8 bits premultiply takes a level from what is opaque.
            filters += ["format=gbrap16", "premultiply=inplace=1"]
        # It needs a frame's neighbours, and passes frames that are not interlaced on as they are.
        filters.append("bwdif=send_frame:deint=interlaced")
        if shape.fps is not None:
            filters.append(f"fps={shape.fps}")
        filters.append(f"trim=start_frame={first}")
        if not _PLAIN_COLOURS.issuperset(self.colours):
            if self.transparent:
                raise BadVideo(f"has transparency, which is not supported with its colours ({'/'.join(self.colours)})")
            filters += ["zscale=t=linear:npl=203:p=bt709", "format=gbrpf32le"]
            if self.colours[2] in ("smpte2084", "arib-std-b67"):
                # 203 cd/m² is HDR's reference white (ITU-R BT.2408); mobius leaves what is darker nearly as it is.
                filters.append("tonemap=mobius:desat=0")
            filters += ["zscale=t=bt709", "format=gbrp"]
        filters += [f"scale={width}:{height}:flags=bicubic+accurate_rnd+full_chroma_int", "format=rgb24"]
        filters.append(f"crop={shape.width}:{shape.height}")
        return ",".join(filters)


def decode_clip(path: Path, shape: ClipShape, *, timeout: float) -> Clip:
    """The clip of a video file.

    Args:
        timeout: seconds for each of the two times.

    Raises:
        BadVideo: no such file, no video in it, damaged anywhere, changing its size or colours midway, of colours that
            cannot be converted, so far from H×W in shape that it cannot be scaled, shorter than a clip, or the time is
            over.
        OSError: ffmpeg cannot be started.
    """
    stream, count = read_stream(path, timeout, shape.fps), shape.num_frames
    if stream.frames < count:
        rate = "" if shape.fps is None else f" at {shape.fps:g} frames per second"
        raise BadVideo(f"is too short: it has {stream.frames} frames{rate}, {count} are needed")
    output = ["-vf", stream.filters(shape, (stream.frames - count) // 2), "-frames:v", str(count), "-f", "rawvideo"]
    pixels, _ = _decode(path, output, timeout)
    if len(pixels) < 3 * count * shape.height * shape.width:
        raise BadVideo("cannot be decoded: the decoder ended early")
    frames = torch.frombuffer(pixels, dtype=torch.uint8).view(count, shape.height, shape.width, 3).permute(3, 0, 1, 2)
    return Clip(frames, stream.rate, stream.kept(shape))


def _decode(path: Path, output: Sequence[str], timeout: float) -> tuple[bytearray, str]:
    """Have an ffmpeg decode a file: what it makes, and what it reports, each message after its level in brackets."""
    command = [
        *(imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-hide_banner", "-nostats", "-v", "level+info", "-xerror"),
        # With more, an error in the last frames sometimes comes too late for the exit code.
        *("-threads", "1"),
        # A playlist that passes for a video shall not reach the network.
        *("-protocol_whitelist", "file", "-max_pixels", str(MAX_PIXELS), "-i", f"file:{path.absolute()}"),
        *("-map", "0:v:0", "-fps_mode", "passthrough", *output, "pipe:1"),
    ]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise BadVideo(f"took longer than {timeout:g} s to decode") from error
    # Addresses differ from run to run.
    report = re.sub(r"\[[^\]\n]*@ 0x[0-9a-f]+\]\s*", "", done.stderr.decode(errors="replace"))
    errors = re.findall(r"^\[(?:error|fatal|panic)\]\s*(\S.*)", report, re.MULTILINE)
    # For some containers ffmpeg reports that the end is missing, and goes on.
    if done.returncode or any("prematurely" in error for error in errors):
        raise BadVideo(f"cannot be decoded: {next(iter(errors), f'ffmpeg ended with {done.returncode}')}")
    return bytearray(done.stdout), report


def read_stream(path: Path, timeout: float, fps: float | None = None) -> Stream:
    """Decode the whole video of a file, within a time limit, to find the number and the properties of its frames.

    Args:
        fps: of clips; None for that of the file.

    Raises:
        BadVideo, OSError: as `decode_clip`.
    """
    filters = [] if fps is None else ["-vf", f"fps={fps}"]
    found, report = _decode(path, [*filters, "-enc_time_base", "demux", "-f", "framecrc"], timeout)
    text, output = found.decode(), report.partition("[info] Output #0")[2]
    ticks = [int(tick) for tick in re.findall(r"^0,\s*-?\d+,\s*(-?\d+),", text, re.MULTILINE)]
    base = re.search(r"^#tb 0: (\d+/\d+)", text, re.MULTILINE)
    # pixel format, its traits, width, height, shape of a pixel
    line = r"Video: rawvideo.*?, (\w+)(?:\((.*)\))?, (\d+)x(\d+)(?: \[SAR (\d+):(\d+))?"
    kind = re.search(line, output)
    if not ticks or base is None or kind is None:
        raise BadVideo("has no frame")
    if "Reconfiguring filter graph" in output:
        raise BadVideo("changes its picture size or its colours midway; cut it there")
    if re.search(r"alpha_mode\s*: 1", output):
        raise BadVideo("has transparency in a stream of its own, which is not decoded; lay it over a background first")
    pixels, traits, width, height, across, down = kind.groups(default="")
    # Three names stand for the same number, and ffmpeg writes the first.
    names = [trait for trait in traits.split(", ") if "/" in trait or trait in _PLAIN_COLOURS]
    colours = names[0].split("/") if names else ["unknown"]
    seconds = float((max(ticks) - min(ticks)) * Fraction(base[1]))
    return Stream(
        frames=len(ticks),
        rate=fps or ((len(ticks) - 1) / seconds if seconds else 0.0),
        height=int(height),
        width=int(width),
        aspect=Fraction(int(across), int(down)) if int(across or 0) and int(down or 0) else Fraction(1),
        transparent=bool(re.match(r"yuva|gbrap|rgba|bgra|argb|abgr|ya[\df]|ayuv|vuya|pal8", pixels)),
        colours=(3 * colours)[:3],
    )
