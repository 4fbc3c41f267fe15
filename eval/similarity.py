"""How close a video is to a reference: PSNR, SSIM and LPIPS.

Legend: F frames, H and W pixels. Videos are float tensors [F, 3, H, W] with values in [0, 1].
"""

from __future__ import annotations

import functools
import importlib.util
import math
from pathlib import Path
from typing import Any

import torch

from vmonarch.configs import InputError

# torchvision's name for the weights of AlexNet that LPIPS was fitted to, and where it has them from.
ALEXNET_WEIGHTS = "alexnet-owt-7be5be79.pth"
ALEXNET_URL = f"https://download.pytorch.org/models/{ALEXNET_WEIGHTS}"
# Half the 11-tap window: these pixels are mirrored at the border, which needs one pixel more.
_SSIM_MARGIN = 5
# Frames per call: bounds the memory of SSIM's five filtered maps and of AlexNet's features.
_CHUNK = 8


def check_pair(video: torch.Tensor, reference: torch.Tensor, least: int = 6) -> None:
    """Raise ValueError unless two videos can be compared, whose frames must have so many pixels in both directions."""
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

    In float64: in float32 the variances of flat regions are lost to cancellation. The window is applied along one axis
    after the other: torchmetrics' square one gives the same, but takes dozens of times as long on a CPU.
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
    """[F, C, H, W] under SSIM's window, of the same size."""
    taps = [math.exp(-((i - _SSIM_MARGIN) ** 2) / (2 * 1.5**2)) for i in range(2 * _SSIM_MARGIN + 1)]
    for axis, size in ((2, maps.shape[2]), (3, maps.shape[3])):
        margins = (_SSIM_MARGIN, _SSIM_MARGIN, 0, 0) if axis == 3 else (0, 0, _SSIM_MARGIN, _SSIM_MARGIN)
        padded = torch.nn.functional.pad(maps, margins, mode="reflect")
        maps = torch.zeros_like(maps)
        for i, tap in enumerate(taps):
            maps.add_(padded.narrow(axis, i, size), alpha=tap / sum(taps))
    return maps


def similarity(video: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """{"psnr", "ssim"} of `video` against `reference`, both [F, 3, H, W] in [0, 1]; "first_frame_…" is that frame's.

    PSNR is 10 · log10(1 / MSE) in dB, the MSE over all frames, channels and pixels together: pooling the error before
    the logarithm keeps one identical frame from making the result infinite, as that of identical videos is. SSIM (Wang
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


def alexnet_weights() -> Path:
    """The file with AlexNet's weights; nothing is downloaded.

    Raises:
        InputError: torchvision is missing, or the file is; the message says where it belongs.
    """
    if importlib.util.find_spec("torchvision") is None:
        raise InputError("lpips", "needs torchvision: pip install torchvision. PSNR and SSIM are measured without it")
    file = Path(torch.hub.get_dir()) / "checkpoints" / ALEXNET_WEIGHTS
    if not file.is_file():
        raise InputError(
            "lpips", f"needs the weights of AlexNet, which are not downloaded unasked: put {ALEXNET_URL} at {file}"
        )
    return file


@functools.cache
def _lpips_network() -> Any:
    from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

    alexnet_weights()
    return LearnedPerceptualImagePatchSimilarity(net_type="alex").net


@torch.no_grad()
def lpips(video: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """Learned perceptual distance (Zhang et al. 2018, AlexNet with the linear layers v0.1) of two videos [F, 3, H, W].

    {"lpips", "first_frame_lpips"}: the mean of all frames, and the first's; 0 for identical videos.

    Raises:
        ValueError: see `check_pair`, of frames of at least 32×32 pixels.
        InputError: see `alexnet_weights`.
    """
    # AlexNet's last pooling leaves nothing of smaller frames.
    check_pair(video, reference, least=32)
    # Not the metric around it, which holds a sum that other threads would add to.
    network = _lpips_network().to(video.device)
    pairs = zip(video.float().split(_CHUNK), reference.float().split(_CHUNK), strict=True)
    found = torch.cat([network(x, y, normalize=True).flatten() for x, y in pairs])  # [F]
    return {"lpips": float(found.double().mean()), "first_frame_lpips": float(found[0])}
