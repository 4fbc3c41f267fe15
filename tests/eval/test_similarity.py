"""PSNR, SSIM and LPIPS against other implementations of their definitions."""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from vmonarch.configs import InputError
from vmonarch.eval import similarity as module
from vmonarch.eval.similarity import ALEXNET_WEIGHTS, lpips, similarity

SHAPES = {"square": (1, 3, 16, 16), "ragged": (3, 3, 13, 31), "more frames than a chunk": (11, 3, 12, 20)}


def pair(shape: tuple[int, ...], noise: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """A smooth reference with flat regions, and a noisy video of it."""
    generator = torch.Generator().manual_seed(1)
    reference = torch.rand(shape, generator=generator)
    reference = torch.nn.functional.avg_pool2d(reference, 5, 1, 2, count_include_pad=False)
    reference[..., : shape[-1] // 3] = 0.25
    video = (reference + noise * torch.randn(shape, generator=generator)).clamp(0, 1)
    return video, reference


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("noise", [1e-3, 0.1, 1.0])
def test_psnr_and_ssim_are_those_of_torchmetrics(shape: tuple[int, ...], noise: float) -> None:
    from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

    video, reference = (frames.double() for frames in pair(shape, noise))
    measured = similarity(video.float(), reference.float())
    for prefix, frames in (("", slice(None)), ("first_frame_", slice(1))):
        x, y = video[frames], reference[frames]
        # It rounds ln(10) to float32.
        psnr = peak_signal_noise_ratio(x, y, data_range=1.0).item()
        ssim = structural_similarity_index_measure(x, y, data_range=1.0).item()
        assert measured[f"{prefix}psnr"] == pytest.approx(psnr, abs=1e-5)
        assert measured[f"{prefix}ssim"] == pytest.approx(ssim, abs=1e-12)


def test_refuses() -> None:
    good = torch.rand(2, 3, 16, 16)
    for video, message in (
        (good[:1], "one shape"),
        (good.movedim(1, -1), r"\[F, 3, H, W\]"),
        (torch.where(good == good.max(), torch.nan, good), "video must have finite"),
        (255 * good, "video must have .*" + r"\[0, 1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            similarity(video, good)
        with pytest.raises(ValueError, match=message.replace("video", "reference")):
            similarity(good, video)
    with pytest.raises(ValueError, match="6×6"):
        similarity(good[..., :5], good[..., :5])


def alexnet_features() -> torch.nn.Sequential:
    """The layers of torchvision's AlexNet, with random weights."""
    conv = torch.nn.Conv2d
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(conv(3, 64, 11, 4, 2), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2)),
        *(conv(64, 192, 5, 1, 2), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2)),
        *(conv(192, 384, 3, 1, 1), torch.nn.ReLU(), conv(384, 256, 3, 1, 1), torch.nn.ReLU()),
        *(conv(256, 256, 3, 1, 1), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2)),
    )


@pytest.fixture
def alexnet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> torch.nn.Sequential:
    """A torchvision that has nothing but AlexNet, its weights where they belong."""
    from torchmetrics.functional.image import lpips as functional
    from torchmetrics.image import lpip

    features = alexnet_features()
    vision = ModuleType("torchvision")
    vision.models = SimpleNamespace(  # type: ignore[attr-defined]
        AlexNet_Weights=SimpleNamespace(DEFAULT="default"), alexnet=lambda weights: SimpleNamespace(features=features)
    )
    vision.__spec__ = importlib.util.spec_from_loader("torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision", vision)
    monkeypatch.setattr(functional, "_TORCHVISION_AVAILABLE", True)
    monkeypatch.setattr(lpip, "_TORCHVISION_AVAILABLE", True)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ALEXNET_WEIGHTS).touch()
    module._lpips_network.cache_clear()
    yield features
    module._lpips_network.cache_clear()


@pytest.mark.parametrize("frames", [1, 11])
def test_lpips_is_the_mean_of_that_of_the_frames(alexnet: torch.nn.Sequential, frames: int) -> None:
    from torchmetrics.functional.image import learned_perceptual_image_patch_similarity

    video, reference = pair((frames, 3, 40, 64))
    pairs = zip(video.split(1), reference.split(1), strict=True)
    expected = [learned_perceptual_image_patch_similarity(x, y, "alex", normalize=True).item() for x, y in pairs]
    measured = lpips(video, reference)
    assert 0 < measured["lpips"] == pytest.approx(np.mean(expected), rel=1e-4)
    assert measured["first_frame_lpips"] == pytest.approx(expected[0], rel=1e-4)
    assert lpips(video.double(), reference.double()) == measured

    # And so it is in threads, which evaluations measure in.
    pairs = [pair((10, 3, 32, 32), noise) for noise in (0.05, 0.1, 0.2, 0.3)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda videos: lpips(*videos), pairs)) == [lpips(*videos) for videos in pairs]
    _, reference = pair((3, 3, 32, 32))
    assert lpips(reference, reference.clone()) == {"lpips": 0.0, "first_frame_lpips": 0.0}
    with pytest.raises(ValueError, match="32×32"):
        lpips(*pair((2, 3, 31, 64)))


def test_lpips_says_what_is_missing_and_downloads_nothing(alexnet, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda *_, **__: pytest.fail("downloads"))
    weights = tmp_path / "checkpoints" / ALEXNET_WEIGHTS
    weights.unlink()
    with pytest.raises(InputError, match="weights of AlexNet.*put https://.* at " + str(weights)):
        lpips(*pair((2, 3, 32, 32)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"torchvision: pip install torchvision\."):
        lpips(*pair((2, 3, 32, 32)))
