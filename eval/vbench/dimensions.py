"""The dimensions of VBench that are scored here: which files they load, and what their scores look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vmonarch.configs import InputError, suggest


@dataclass(frozen=True)
class WeightFile:
    """A file that VBench loads.

    Args:
        path: below the folder of weights, where the package looks for it.
        url: where the package, or the project it is from, offers it.
        member: what it is called inside the zip archive that the URL gives; "" if the URL gives the file itself.
        sha256: of its contents, "" where its authors publish none.
    """

    path: str
    url: str
    member: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class Dimension:
    """A dimension of VBench.

    Args:
        weights: files that it loads.
        frames: fewest frames that it can judge.
        frames_per_second: rate at which it samples these frames; None if it takes every frame.
        per_video_range: of the package's scores of single videos; they are divided by its upper end, as the package
            itself does with the score of all videos.
    """

    weights: tuple[WeightFile, ...] = ()
    frames: int = 1
    frames_per_second: float | None = None
    per_video_range: tuple[float, float] = (0.0, 1.0)


def _clip(name: str, sha256: str) -> WeightFile:
    url = f"https://openaipublic.azureedge.net/clip/models/{sha256}/{name}"
    return WeightFile(f"clip_model/{name}", url, sha256=sha256)


def _dino_code(name: str, sha256: str) -> WeightFile:
    commit = "https://raw.githubusercontent.com/facebookresearch/dino/7c446df5b9f45747937fb0d72314eb9f7b66930a"
    return WeightFile(f"dino_model/facebookresearch_dino_main/{name}", f"{commit}/{name}", sha256=sha256)


PAPER_DIMENSIONS = (
    "aesthetic_quality",
    "background_consistency",
    "dynamic_degree",
    "imaging_quality",
    "subject_consistency",
)
# Paths and URLs: `init_submodules` of vbench 0.1.5's utils.py, and the modules of the dimensions.
DIMENSIONS = {
    "aesthetic_quality": Dimension(
        weights=(
            _clip("ViT-L-14.pt", "b8cca3fd41ae0c99ba7e8951adf17d267cdb84cd88be6f7c2e0eca1737a03836"),
            WeightFile(
                "aesthetic_model/emb_reader/sa_0_4_vit_l_14_linear.pth",
                "https://github.com/LAION-AI/aesthetic-predictor/blob/main/sa_0_4_vit_l_14_linear.pth?raw=true",
            ),
        )
    ),
    "background_consistency": Dimension(
        weights=(_clip("ViT-B-32.pt", "40d365715913c9da98579312b702a82c18be219cc2a73407c4526f58eba950af"),),
        frames=2,
    ),
    "dynamic_degree": Dimension(
        weights=(
            WeightFile(
                "raft_model/models/raft-things.pth",
                "https://dl.dropboxusercontent.com/s/4j4z58wuv8o0mfz/models.zip",
                member="models/raft-things.pth",
            ),
        ),
        # Of fewer it asks that round(4 · frames / 16) = 0 pairs move, and calls every video dynamic.
        frames=3,
        frames_per_second=8,
    ),
    "imaging_quality": Dimension(
        weights=(
            WeightFile(
                "pyiqa_model/musiq_spaq_ckpt-358bb6af.pth",
                "https://github.com/chaofengc/IQA-PyTorch/releases/download/v0.1-weights/musiq_spaq_ckpt-358bb6af.pth",
            ),
        ),
        per_video_range=(0.0, 100.0),
    ),
    "subject_consistency": Dimension(
        weights=(
            WeightFile(
                "dino_model/dino_vitbase16_pretrain.pth",
                "https://dl.fbaipublicfiles.com/dino/dino_vitbase16_pretrain/dino_vitbase16_pretrain.pth",
            ),
            _dino_code("hubconf.py", "fa80babf82c71d2123e23b05061eb1991a1fbc9877238f250b2a25023e910f72"),
            _dino_code("vision_transformer.py", "b1f998d5f49ab43666b9fc6d007c5f6540c3ead2e8645e144f74045f63ff44d7"),
            _dino_code("utils.py", "962a97e1acda1c986dfd921275325e4083f9016dddadcf018f1ccf03fa600eab"),
        ),
        frames=2,
    ),
    "overall_consistency": Dimension(
        weights=(
            WeightFile(
                "ViCLIP/ViClip-InternVid-10M-FLT.pth",
                "https://huggingface.co/OpenGVLab/VBench_Used_Models/resolve/main/ViClip-InternVid-10M-FLT.pth",
            ),
            WeightFile(
                "ViCLIP/bpe_simple_vocab_16e6.txt.gz",
                "https://raw.githubusercontent.com/openai/CLIP/main/clip/bpe_simple_vocab_16e6.txt.gz",
            ),
        ),
        # A cosine.
        per_video_range=(-1.0, 1.0),
    ),
    "temporal_flickering": Dimension(frames=2),
    "motion_smoothness": Dimension(
        weights=(WeightFile("amt_model/amt-s.pth", "https://huggingface.co/lalala125/AMT/resolve/main/amt-s.pth"),),
        # It drops every second frame, and predicts it from its neighbours.
        frames=3,
    ),
}


def check_dimensions(dimensions: Sequence[str]) -> None:
    """Check names of dimensions.

    Raises:
        InputError: none, one that is not in DIMENSIONS, or one twice.
    """
    known = ", ".join(DIMENSIONS)
    if isinstance(dimensions, str) or not dimensions:
        raise InputError("dimensions", f"must be one or more of {known}, got {dimensions!r}")
    for name in dimensions:
        if name not in DIMENSIONS:
            raise InputError("dimensions", f"must be of {known}; got {name!r}{suggest(name, DIMENSIONS)}")
    if len(set(dimensions)) < len(dimensions):
        raise InputError("dimensions", f"must differ, got {', '.join(dimensions)}")
