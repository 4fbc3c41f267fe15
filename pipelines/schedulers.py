"""Schedulers for models that are distilled to a few steps, which diffusers' pipelines run as they are.

pipe.scheduler = few_step_scheduler("euler", flow_shift=5.0)     # 4 steps at 1, 0.9375, 0.8333, 0.625
pipe.scheduler = few_step_scheduler("lcm", sigmas=(1.0, 0.757, 0.522))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchLCMScheduler, UniPCMultistepScheduler


class _FewSteps:
    """Mixin: noise levels that begin at 1 and are even before the shift, and latents that keep their precision.

    diffusers' own levels for these schedulers end near 0, where the last of a few steps would be lost, and a Wan
    pipeline has no argument for others.

    Attributes:
        levels: noise levels in place of these, after the shift; a run of fewer steps takes the first of them.
        generator: of the noise that a step adds, where it adds any; one, or a list with one for each video.
    """

    levels: tuple[float, ...] = ()
    generator: Any = None

    def set_timesteps(
        self, num_inference_steps: int | None = None, device: Any = None, sigmas: Any = None, **others: Any
    ) -> None:
        """As in diffusers; `sigmas` are levels before the shift."""
        if sigmas is None:
            steps, most = num_inference_steps or 0, len(self.levels)
            if self.levels and steps > most:
                problem = f"at most {most}, the number of sigmas that the scheduler was made with, got {steps}"
                raise ValueError(f"num_inference_steps must be {problem}")
            sigmas = self.levels[:steps] or np.linspace(1, 0, steps, endpoint=False).tolist()
        super().set_timesteps(device=device, sigmas=sigmas, **others)  # type: ignore[misc]

    def step(
        self, model_output: torch.Tensor, timestep: Any, sample: torch.Tensor, generator: Any = None, **others: Any
    ) -> Any:
        """As in diffusers, but the result has the dtype of the latents, not of the prediction."""
        prediction = model_output.to(sample.dtype)
        return super().step(prediction, timestep, sample, generator=generator or self.generator, **others)  # type: ignore[misc]


class EulerScheduler(_FewSteps, FlowMatchEulerDiscreteScheduler):
    """Euler's method along the flow."""


class LCMScheduler(_FewSteps, FlowMatchLCMScheduler):
    """Every step predicts the video, and adds noise to it again for the next step."""


def few_step_scheduler(name: str, flow_shift: float = 1.0, sigmas: Sequence[float] = ()) -> Any:
    """A scheduler by its name.

    Args:
        name: euler, lcm or unipc.
        flow_shift: shift of the noise levels towards noise; `sigmas` are not shifted.
        sigmas: falling noise levels in (0, 1], one for each step; none for even ones. Not for unipc.

    Raises:
        ValueError: there is no such scheduler, or it takes no sigmas.
    """
    if name == "unipc" and not sigmas:
        return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift)
    classes: dict[str, Any] = {"euler": EulerScheduler, "lcm": LCMScheduler}
    if name not in classes:
        raise ValueError(f"name must be {', '.join(classes)}, or unipc without sigmas, got {name!r}")
    scheduler = classes[name](shift=1.0 if sigmas else flow_shift)
    scheduler.levels = tuple(sigmas)
    return scheduler
