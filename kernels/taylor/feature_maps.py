"""Feature maps φ of linear attention (Based, §4.1 and Fig. 3): weights are φ(q)·φ(k) in place of exp(q·k/√d').

Shapes: x is a query or key […, S, d'], a feature vector […, S, F].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vmonarch.kernels.common.constants import kept


@dataclass(frozen=True)
class FeatureMap:
    """A feature map.

    Args:
        name: as in the option `feature_map`.
        features: F for d' dimensions.
        map: (x, scale, positions […, S], max_tokens) -> […, S, F]; `scale` multiplies q·k, half of it each side.
        placed: whether it depends on positions, hence on `max_tokens`.
        signed: whether weights can be negative, so that their sum may have no logarithm.
    """

    name: str
    features: Callable[[int], int]
    map: Callable[[torch.Tensor, float, torch.Tensor, int], torch.Tensor]
    placed: bool = False
    signed: bool = False


def taylor(x: torch.Tensor, scale: float, *_: object) -> torch.Tensor:
    """[1, x̂, (x̂⊗x̂)/√2] with x̂ = √scale·x, so that φ(q)·φ(k) = 1 + s + s²/2 with s = scale·q·k (Based, Eq. 4)."""
    x = x * math.sqrt(scale)
    square = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2) * math.sqrt(0.5)
    return torch.cat([torch.ones_like(x[..., :1]), x, square], -1)


def _performer(x: torch.Tensor, scale: float, *_: object) -> torch.Tensor:
    """exp(ω·x̂ - ‖x̂‖²/2)/√F for F orthogonal Gaussian ω, whose products estimate exp(scale·q·k) (FAVOR+)."""
    x = x * math.sqrt(scale)
    directions = performer_directions(x.shape[-1], x.device).to(x.dtype)
    return torch.exp(x @ directions.T - x.square().sum(-1, keepdim=True) / 2) * x.shape[-1] ** -0.5


@kept
def performer_directions(dims: int, device: torch.device) -> torch.Tensor:
    """ω [d', d']: orthogonal rows, each as long as a Gaussian vector; the same in every process."""
    generator = torch.Generator().manual_seed(dims)
    orthogonal, _ = torch.linalg.qr(torch.randn(dims, dims, generator=generator, dtype=torch.float64))
    lengths = torch.randn(dims, dims, generator=generator, dtype=torch.float64).norm(dim=1)
    return (orthogonal.T * lengths[:, None]).to(device)


def _cosformer(x: torch.Tensor, scale: float, positions: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """ReLU(x)·[cos θ, sin θ] with θ = π·position/(2·max_tokens): tokens far apart weigh less (cosFormer, Eq. 10)."""
    x = torch.relu(x * math.sqrt(scale))
    angle = (positions.to(x) * (math.pi / (2 * max_tokens))).unsqueeze(-1)
    return torch.cat([x * torch.cos(angle), x * torch.sin(angle)], -1)


def _same(dims: int) -> int:
    return dims


FEATURE_MAPS = {
    feature_map.name: feature_map
    for feature_map in (
        FeatureMap("taylor", lambda dims: 1 + dims + dims**2, taylor),
        FeatureMap("relu", _same, lambda x, scale, *_: torch.relu(x * math.sqrt(scale))),
        FeatureMap("elu", _same, lambda x, scale, *_: torch.nn.functional.elu(x * math.sqrt(scale)) + 1),
        FeatureMap("square", _same, lambda x, scale, *_: x.square() * scale),
        FeatureMap("identity", _same, lambda x, scale, *_: x * math.sqrt(scale), signed=True),
        FeatureMap("performer", _same, _performer),
        FeatureMap("cosformer", lambda dims: 2 * dims, _cosformer, placed=True),
    )
}
