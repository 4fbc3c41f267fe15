"""PSNR and SSIM against an implementation of their definitions that shares no code with torchmetrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vmonarch.eval.similarity import psnr, similarity, ssim

SHAPES = {"square": (1, 3, 16, 16), "ragged": (3, 3, 13, 31), "more frames than a chunk": (11, 3, 12, 20)}


def pair(shape: tuple[int, ...], noise: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """A smooth reference with flat regions, and a noisy video of it."""
    generator = torch.Generator().manual_seed(1)
    reference = torch.rand(shape, generator=generator)
    reference = torch.nn.functional.avg_pool2d(reference, 5, 1, 2, count_include_pad=False)
    reference[..., : shape[-1] // 3] = 0.25
    video = (reference + noise * torch.randn(shape, generator=generator)).clamp(0, 1)
    return video, reference


def numpy_psnr(video: torch.Tensor, reference: torch.Tensor) -> float:
    error = (video.double().numpy() - reference.double().numpy()) ** 2
    return float(-10 * np.log10(error.mean()))


def numpy_ssim(video: torch.Tensor, reference: torch.Tensor) -> float:
    """Wang et al. (2004), Eq. 13, with an 11×11 Gaussian window of sigma 1.5 and mirrored borders."""
    taps = np.exp(-((np.arange(11) - 5.0) ** 2) / (2 * 1.5**2))
    taps /= taps.sum()

    def blur(image: np.ndarray) -> np.ndarray:
        padded = np.pad(image, 5, mode="reflect")
        rows = np.apply_along_axis(lambda line: np.convolve(line, taps, "valid"), 0, padded)
        return np.apply_along_axis(lambda line: np.convolve(line, taps, "valid"), 1, rows)

    scores = []
    for x, y in zip(video.double().flatten(0, 1).numpy(), reference.double().flatten(0, 1).numpy(), strict=True):
        mean_x, mean_y = blur(x), blur(y)
        var_x, var_y = blur(x * x) - mean_x**2, blur(y * y) - mean_y**2
        covariance = blur(x * y) - mean_x * mean_y
        luminance = (2 * mean_x * mean_y + 0.01**2) / (mean_x**2 + mean_y**2 + 0.01**2)
        structure = (2 * covariance + 0.03**2) / (var_x + var_y + 0.03**2)
        scores.append((luminance * structure).mean())
    return float(np.mean(scores))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("noise", [1e-3, 0.1, 1.0])
def test_agrees_with_the_definitions(shape: tuple[int, ...], noise: float) -> None:
    video, reference = pair(shape, noise)
    measured = similarity(video, reference)
    assert measured.psnr == pytest.approx(numpy_psnr(video, reference), abs=1e-6)
    assert measured.ssim == pytest.approx(numpy_ssim(video, reference), abs=1e-6)
    assert measured.first_frame_psnr == pytest.approx(numpy_psnr(video[:1], reference[:1]), abs=1e-6)
    assert measured.first_frame_ssim == pytest.approx(numpy_ssim(video[:1], reference[:1]), abs=1e-6)


def test_known_values() -> None:
    reference = torch.zeros(2, 3, 12, 12)
    assert psnr(reference + 0.1, reference) == pytest.approx(20.0, abs=1e-5)
    # Constant pictures: only the luminance term is left, 0.01² / (0.5² + 0.01²).
    assert ssim(reference + 0.5, reference) == pytest.approx(1e-4 / (0.25 + 1e-4), rel=1e-5)


def test_identical_videos_are_perfect() -> None:
    _, reference = pair((3, 3, 16, 16))
    measured = similarity(reference, reference.clone())
    assert measured.psnr == measured.first_frame_psnr == float("inf")
    assert measured.ssim == measured.first_frame_ssim == pytest.approx(1.0, abs=1e-12)


def test_first_frame_is_measured_by_itself() -> None:
    video, reference = pair((4, 3, 16, 16))
    video[0] = reference[0]
    measured = similarity(video, reference)
    assert measured.first_frame_psnr == float("inf") and measured.first_frame_ssim == pytest.approx(1.0)
    assert measured.psnr < 40 and measured.ssim < 0.99


def with_value(value: float) -> torch.Tensor:
    video, _ = pair((2, 3, 16, 16))
    video[1, 2, 3, 4] = value
    return video


REFUSED = {
    "other frame count": (torch.rand(3, 3, 16, 16), torch.rand(2, 3, 16, 16), ValueError, "shape of reference"),
    "other size": (torch.rand(2, 3, 16, 18), torch.rand(2, 3, 16, 16), ValueError, "shape of reference"),
    "broadcastable": (torch.rand(1, 3, 16, 16), torch.rand(2, 3, 16, 16), ValueError, "shape of reference"),
    "batch dimension": (torch.rand(1, 2, 3, 16, 16), torch.rand(1, 2, 3, 16, 16), ValueError, r"\[F, 3, H, W\]"),
    "channels last": (torch.rand(2, 16, 16, 3), torch.rand(2, 16, 16, 3), ValueError, r"\[F, 3, H, W\]"),
    "no frames": (torch.rand(0, 3, 16, 16), torch.rand(0, 3, 16, 16), ValueError, "empty"),
    "smaller than the window": (torch.rand(2, 3, 5, 16), torch.rand(2, 3, 5, 16), ValueError, "6×6"),
    "nan": (with_value(float("nan")), torch.rand(2, 3, 16, 16), ValueError, "video must be finite"),
    "nan in the reference": (
        torch.rand(2, 3, 16, 16),
        with_value(float("nan")),
        ValueError,
        "reference must be finite",
    ),
    "infinity": (with_value(float("inf")), torch.rand(2, 3, 16, 16), ValueError, "finite"),
    "values to 255": (with_value(255.0), torch.rand(2, 3, 16, 16), ValueError, r"\[0, 1\]"),
    "values below 0": (with_value(-0.5), torch.rand(2, 3, 16, 16), ValueError, r"\[0, 1\]"),
    "uint8": (torch.zeros(2, 3, 16, 16, dtype=torch.uint8), torch.rand(2, 3, 16, 16), TypeError, "floating-point"),
    "missing video": (None, torch.rand(2, 3, 16, 16), TypeError, "video must be"),
}


@pytest.mark.parametrize(("video", "reference", "error", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("measure", [psnr, ssim, similarity])
def test_refuses(measure, video, reference, error, message) -> None:
    with pytest.raises(error, match=message):
        measure(video, reference)
