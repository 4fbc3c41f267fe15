"""How close a video is to a reference: PSNR and SSIM through torchmetrics, on float frames before any mp4 encoding.

Legend: F frames, H and W pixels. Videos are float tensors [F, 3, H, W] with values in [0, 1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# Half the 11-tap window; torchmetrics mirrors that many pixels at the border, which needs one pixel more than that.
_SSIM_MARGIN = 5
# Frames per SSIM call: bounds the memory of its five filtered maps.
_CHUNK = 8


@dataclass(frozen=True)
class Similarity:
    """PSNR in dB (`inf` for identical videos) and SSIM in [-1, 1], of all frames and of the first frame alone."""

    psnr: float
    ssim: float
    first_frame_psnr: float
    first_frame_ssim: float


def check_pair(video: torch.Tensor, reference: torch.Tensor) -> None:
    """Check that two videos [F, 3, H, W] can be compared.

    Raises:
        TypeError: one of them is no floating-point tensor.
        ValueError: other ranks, different shapes, no frames, frames under 6×6, values not finite or outside [0, 1].
    """
    for name, frames in (("video", video), ("reference", reference)):
        if not isinstance(frames, torch.Tensor) or not frames.is_floating_point():
            kind = frames.dtype if isinstance(frames, torch.Tensor) else type(frames).__name__
            raise TypeError(f"{name} must be a floating-point tensor [F, 3, H, W] with values in [0, 1], got {kind}")
        if frames.ndim != 4 or frames.shape[1] != 3 or 0 in frames.shape:
            raise ValueError(f"{name} must have shape [F, 3, H, W] and no empty dimension, got {tuple(frames.shape)}")
    if video.shape != reference.shape:
        raise ValueError(
            f"video must have the shape of reference {tuple(reference.shape)}, got {tuple(video.shape)};"
            " nothing is cropped, resized or skipped"
        )
    if min(video.shape[2:]) <= _SSIM_MARGIN:
        raise ValueError(f"video must have frames of at least 6×6 pixels for SSIM's window, got {tuple(video.shape)}")
    for name, frames in (("video", video), ("reference", reference)):
        if not torch.isfinite(frames).all():
            raise ValueError(f"{name} must be finite, but holds NaN or infinity")
        low, high = frames.min().item(), frames.max().item()
        if low < 0 or high > 1:
            raise ValueError(f"{name} must have values in [0, 1], got [{low:.4g}, {high:.4g}]")


def psnr(video: torch.Tensor, reference: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB: 10 · log10(1 / MSE), the MSE over all frames, channels and pixels together.

    Pooling the error before the logarithm keeps one identical frame from making the result infinite.

    Raises:
        TypeError, ValueError: see `check_pair`.
    """
    from torchmetrics.functional import mean_squared_error

    check_pair(video, reference)
    # torchmetrics' own PSNR rounds ln(10) to float32, which costs 3e-6 dB; its error in float64 does not.
    error = float(mean_squared_error(video.double().flatten(), reference.double().flatten()))
    return -10 * math.log10(error) if error > 0 else math.inf


def ssim(video: torch.Tensor, reference: torch.Tensor) -> float:
    """Structural similarity (Wang et al. 2004): per frame and colour channel, then the mean over everything.

    Gaussian window of 11×11 taps with sigma 1.5, k1 = 0.01, k2 = 0.03, data range 1, borders mirrored, population
    (not sample) variances. In float64: in float32 the variances of flat regions are lost to cancellation.

    Raises:
        TypeError, ValueError: see `check_pair`.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure

    check_pair(video, reference)
    total = 0.0
    for start in range(0, len(video), _CHUNK):
        per_frame = structural_similarity_index_measure(
            video[start : start + _CHUNK].double(),
            reference[start : start + _CHUNK].double(),
            gaussian_kernel=True,
            sigma=1.5,
            kernel_size=11,
            data_range=1.0,
            k1=0.01,
            k2=0.03,
            reduction="sum",
        )
        assert isinstance(per_frame, torch.Tensor)
        total += float(per_frame)
    return total / len(video)


def similarity(video: torch.Tensor, reference: torch.Tensor) -> Similarity:
    """PSNR and SSIM of `video` against `reference`, both [F, 3, H, W] in [0, 1].

    Raises:
        TypeError, ValueError: see `check_pair`.
    """
    return Similarity(
        psnr=psnr(video, reference),
        ssim=ssim(video, reference),
        first_frame_psnr=psnr(video[:1], reference[:1]),
        first_frame_ssim=ssim(video[:1], reference[:1]),
    )
