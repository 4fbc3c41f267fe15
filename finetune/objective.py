"""Flow matching as Wan is trained: noise levels, model inputs, targets and the loss.

At noise level σ the model sees x = (1 - σ)·clean + σ·noise with timestep 1000·σ and gives the velocity noise - clean.
All that is drawn is a function of (seed, step, micro-batch, data rank) alone: a resumed run draws the same, on any
device, and processes that share a sample (sequence parallelism) share its noise because they share the data rank.

Shapes: B clips, C latent channels, T latent frames, h × w latent pixels, S tokens, L text tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vmonarch.finetune.config import ObjectiveConfig

TIMESTEPS = 1000
# The model is asked for no level below: there is nothing left to predict from.
LEAST_SIGMA = 1e-4


class Expert(NamedTuple):
    """A transformer of the pipeline and the noise levels that it serves."""

    name: str
    low: float = 0.0
    high: float = 1.0


def generator_for(seed: int, *place: object) -> torch.Generator:
    """Random numbers of one purpose at one place of a run, on the CPU."""
    digest = hashlib.sha256("/".join(map(str, (seed, *place))).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


class Draw(NamedTuple):
    """The random part of a micro-batch.

    Args:
        expert: whose levels these are.
        sigma: [B]. noise: [B, C, T, h, w]. conditioned: bool [B], which clips have a clean first frame.
    """

    expert: Expert
    sigma: torch.Tensor
    noise: torch.Tensor
    conditioned: torch.Tensor


@dataclass(frozen=True)
class Objective:
    """The loss of a micro-batch.

    σ is shift·u / (1 + (shift - 1)·u), so that logit σ = logit u + log shift, for a u that is logit-normal or uniform
    in (0, 1).

    Args:
        experts: the transformers that are trained.
        seed, options: of the run.
        shift: above 1 moves σ towards noise, as the scheduler's flow shift does.
        channels: all clips have their first frame given in further input channels, a mask and the encoded frame
            (Wan2.1 and A14B image-to-video). Those with `options.image_share` have it among their own frames: the
            first latent frame is clean and its tokens have timestep 0 (Wan2.2 5B).
        takes_image: the transformer has cross-attention to an image encoder's features.
        patch: of the transformer.
    """

    experts: tuple[Expert, ...] = (Expert("transformer"),)
    seed: int = 0
    options: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    shift: float = 1.0
    channels: bool = False
    takes_image: bool = False
    patch: tuple[int, int, int] = (1, 2, 2)

    def expert(self, sigma: torch.Tensor) -> Expert:
        """That which serves a noise level."""
        return next(e for e in self.experts if e.low <= sigma <= e.high)

    def levels(self, uniform: torch.Tensor, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        """σ, float32 [B], between `low` and `high`, from numbers [B] that are uniform in [0, 1)."""
        ends, options = self._cumulative(low, high), self.options
        p = ends[0] + uniform.double() * (ends[1] - ends[0])
        normal = options.sigma == "logit_normal"
        logit = options.mean + options.std * torch.special.ndtri(p) if normal else p.logit()
        return (logit + math.log(self.shift)).sigmoid().clamp(max(low, LEAST_SIGMA), high).float()

    def _cumulative(self, *sigma: float) -> torch.Tensor:
        """The probability of a level below each σ, float64."""
        logit = torch.tensor(sigma, dtype=torch.float64).logit() - math.log(self.shift)
        normal = self.options.sigma == "logit_normal"
        return torch.special.ndtr((logit - self.options.mean) / self.options.std) if normal else logit.sigmoid()

    def draw(self, latents: torch.Tensor, *, step: int, micro: int = 0, data_rank: int = 0) -> Draw:
        """The random part for clips of the shape of `latents`; the expert is the same on all ranks of a step."""
        expert = self.experts[0]
        if len(self.experts) > 1:
            chooser = generator_for(self.seed, "expert", step)
            expert = self.expert(self.levels(torch.rand(1, generator=chooser, dtype=torch.float64)))
        random = generator_for(self.seed, "noise", step, micro, data_rank)
        B = len(latents)
        sigma = self.levels(torch.rand(B, generator=random, dtype=torch.float64), expert.low, expert.high)
        noise = torch.randn(latents.shape, generator=random)
        conditioned = torch.rand(B, generator=random) < self.options.image_share
        return Draw(expert, sigma.to(latents.device), noise.to(latents), conditioned.to(latents.device))

    def losses(
        self,
        model: Callable[..., Any],
        draw: Draw,
        latents: torch.Tensor,
        text: torch.Tensor,
        extras: Mapping[str, torch.Tensor],
        teacher: Callable[..., Any] | None = None,
    ) -> torch.Tensor:
        """Mean squared error of the velocity, float32 [B].

        Args:
            model: called as `WanTransformer3DModel` is; `draw.expert` says which one.
            latents: clean and normalised, [B, C, T, h, w]. text: [B, L, D].
            extras: "first_frame_latent" [B, C, T, h, w] normalised and, if the model takes it, "clip_feature"
                [B, tokens, D]; only read with `channels`.
            teacher: its velocity is the second target, which has the share `distillation` of the loss.

        Raises:
            KeyError: an extra that the model needs is not there.
        """
        arguments, counted = self.inputs(draw, latents, text, extras)
        velocity = model(**arguments, return_dict=False)[0].float()
        loss = _mean_square(velocity - (draw.noise - latents), counted)
        if teacher is not None:
            with torch.no_grad():
                wanted = teacher(**arguments, return_dict=False)[0].float()
            loss = torch.lerp(loss, _mean_square(velocity - wanted, counted), self.options.distillation)
        return loss

    def inputs(
        self, draw: Draw, latents: torch.Tensor, text: torch.Tensor, extras: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Arguments of the transformer, and which frames of the velocity count, bool [B, T]."""
        # The VAE is causal: the first latent frame of a clip is the encoding of its first frame.
        given = draw.conditioned[:, None] & (torch.arange(latents.shape[2], device=latents.device) == 0)  # [B, T]
        sigma = torch.where(given, 0.0, draw.sigma[:, None])  # [B, T]
        s = sigma[:, None, :, None, None]
        x, timestep = (1 - s) * latents + s * draw.noise, TIMESTEPS * draw.sigma
        arguments = {"encoder_hidden_states": text}
        if self.channels:
            # As in WanImageToVideoPipeline.prepare_latents: the mask's four channels are 1 in the first latent frame.
            mask = torch.zeros_like(x[:, :4])
            mask[:, :, 0] = 1
            x = torch.cat([x, mask, extras["first_frame_latent"].to(x)], 1)
            if self.takes_image:
                arguments["encoder_hidden_states_image"] = extras["clip_feature"].to(text)
        elif self.options.image_share:
            frames, height, width = self.patch
            tokens = (x.shape[3] // height) * (x.shape[4] // width)
            timestep = TIMESTEPS * sigma[:, ::frames].repeat_interleave(tokens, 1)  # [B, S]
        return {"hidden_states": x, "timestep": timestep, **arguments}, ~given


def _mean_square(difference: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Mean square [B] of [B, C, T, h, w], of the counted frames."""
    return (difference.square().mean((1, 3, 4)) * counted).sum(1) / counted.sum(1)
