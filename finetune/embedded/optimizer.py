"""Muon for many small matrices: matrices of one shape are orthogonalised together, in one batched product."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Newton–Schulz: replace the singular values of each matrix [K, R, C] by values near 1.

    In bfloat16 on CUDA, in float32 elsewhere. Source: Jordan et al., "Muon: an optimizer for hidden layers" (2024).
    """
    a, b, c = _COEFFICIENTS
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class StackedMuon(torch.optim.Optimizer):
    """Muon with Nesterov momentum; its update is as large as one of AdamW, so that it takes AdamW's learning rates.

    Args:
        parameters: matrices, or kernels of convolutions, which are matrices of shape (out, everything else).
        lr: learning rate, as for AdamW.
        momentum: of the gradient's running mean.
        weight_decay: decoupled.

    Raises:
        ValueError: a parameter has fewer than two dimensions.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.ndim < 2:
                raise ValueError(f"parameters must be matrices or kernels, got one of shape {tuple(parameter.shape)}")
            by_shape.setdefault(parameter.shape, []).append(parameter)
        groups = [{"params": group} for group in by_shape.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = group["params"]
            gradients = torch.stack([parameter.grad for parameter in parameters])  # [K, R, C]
            state = self.state[parameters[0]]
            average = state.setdefault("average", torch.zeros_like(gradients))
            average.lerp_(gradients, 1 - group["momentum"])
            update = orthogonalize(gradients.lerp(average, group["momentum"]).flatten(2))
            update = (update * 0.2 * max(update.shape[1:]) ** 0.5).view_as(gradients)
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, list(update.unbind(0)), alpha=-group["lr"])
