"""Biases that are any function of two points, by two small networks (FlashBias, §3.2 and Appendix F).

Shapes: N queries, M keys, C coordinates, H heads, R rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vmonarch.validation import check_positive_integer


class NeuralFactors(torch.nn.Module):
    """φq and φk as two networks of three linear layers with tanh between them.

    Args:
        coordinates: C, numbers that describe a query or a key.
        rank: R.
        heads: H.
        hidden: width of the networks.

    Source: FlashBias, §3.2; Table 10 (hidden 256).
    """

    def __init__(self, coordinates: int, rank: int = 32, *, heads: int = 1, hidden: int = 256) -> None:
        super().__init__()
        for name, number in (("coordinates", coordinates), ("rank", rank), ("heads", heads), ("hidden", hidden)):
            check_positive_integer(name, number)
        self.heads, self.rank = heads, rank

        def network() -> torch.nn.Sequential:
            linear, tanh = torch.nn.Linear, torch.nn.Tanh
            return torch.nn.Sequential(
                linear(coordinates, hidden), tanh(), linear(hidden, hidden), tanh(), linear(hidden, heads * rank)
            )

        self.query_network, self.key_network = network(), network()

    def forward(self, query_points: torch.Tensor, key_points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors of the bias between points [N, C] and [M, C].

        Returns:
            (φq [1, N, H, R], φk [1, M, H, R]).
        """
        pairs = ((self.query_network, query_points), (self.key_network, key_points))
        query_factor, key_factor = (network(x).unflatten(-1, (self.heads, self.rank))[None] for network, x in pairs)
        return query_factor, key_factor


def fit_neural_factors(
    factors: NeuralFactors,
    bias: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    points: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    *,
    steps: int = 10_000,
    lr: float = 1e-3,
    decay: float = 0.95,
    decay_steps: int = 50,
) -> list[float]:
    """Train the networks so that φq·φkᵀ comes close to a bias, by the paper's recipe.

    Args:
        bias: maps points [N, C] and [M, C] to the wanted [N, M] or [H, N, M].
        points: draws the points of a step.
        steps, lr, decay, decay_steps: Adam with a learning rate that is multiplied by `decay` every `decay_steps`.

    Returns:
        the mean squared error at every step.

    Source: FlashBias, Eq. 5, Table 10 and Appendix F.
    """
    check_positive_integer("steps", steps)
    optimizer = torch.optim.Adam(factors.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, decay_steps, decay)
    errors = []
    for _ in range(steps):
        x, y = points()
        query_factor, key_factor = factors(x, y)
        found = torch.einsum("nhr,mhr->hnm", query_factor[0], key_factor[0])
        loss = (found - bias(x, y)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        errors.append(float(loss.detach()))
    return errors
