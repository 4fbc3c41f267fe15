"""Denoising steps of one transformer, as diffusers' `WanPipeline` does them, and which of them to measure.

Shapes: S tokens, C channels, T latent frames, h and w latent pixels.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline, UniPCMultistepScheduler

from vmonarch.eval.attention_flops import STEP_KINDS
from vmonarch.eval.bench.clock import Clock
from vmonarch.eval.wan_models import WanModel
from vmonarch.pipelines.recipes import RECOMPILE_LIMIT

# The names that pipelines give guidance's two calls.
CONTEXTS = ("cond", "uncond")
TEXT_TOKENS = 512
GUIDANCE = 5.0


def share_weights(model: torch.nn.Module) -> Any:
    """A copy of the modules with the same parameters and buffers: its processors and compiled code are its own."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def compiled_graphs() -> int:
    """How many graphs torch.compile has made."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


@contextlib.contextmanager
def settings_of_torch() -> Iterator[None]:
    """Room for every method's version of a block; diffusers' attention backend returns to what it was."""
    from diffusers.models.attention_dispatch import attention_backend

    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT), attention_backend("native"):
        yield


class Denoiser(DiffusionPipeline):
    """Denoising steps of one transformer on fixed random latents.

    It is a pipeline, because processors ask the one that calls the transformer for the step.

    Args:
        model: says how timesteps are given.
        latents: [1, C, T, h, w]. texts: embeddings of the prompt and of the negative prompt, [1, 512, text_dim].
        transformer_2: of a model with two; all steps are computed by the first.

    Attributes:
        marks: of every step that was done, its number, when its two forward calls began and ended, and when it ended.
    """

    def __init__(
        self,
        transformer: torch.nn.Module,
        model: WanModel,
        latents: torch.Tensor,
        texts: Sequence[torch.Tensor],
        steps: int,
        clock: Clock,
        transformer_2: torch.nn.Module | None = None,
    ) -> None:
        super().__init__()
        scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        )
        self.register_modules(transformer=transformer, transformer_2=transformer_2, scheduler=scheduler)
        self.register_to_config(boundary_ratio=model.boundary_ratio)
        self.model, self.latents, self.texts, self.steps, self.clock = model, latents, texts, steps, clock
        self.input = latents.to(texts[0].dtype)
        self.tokens = model.grid((latents.shape[2], latents.shape[3], latents.shape[4])).tokens
        self.marks: list[tuple[int, tuple[Any, ...]]] = []
        self.begin()

    def begin(self, step: int = 0) -> None:
        """Begin a run with this step; residuals of the run before are freed."""
        self.scheduler.set_timesteps(self.steps, device=self.latents.device)
        self.scheduler.set_begin_index(step)
        self._num_timesteps = self.steps
        self.next_step = step
        record = getattr(self.transformer, "_vmonarch_record", None)
        if record is not None:
            record.context.forget()
        if not self.transformer.is_cache_enabled:
            return
        # A step cache counts from this step.
        self.transformer._reset_stateful_cache()
        registries = [getattr(module, "_diffusers_hook", None) for module in self.transformer.modules()]
        for name in CONTEXTS:
            with self.transformer.cache_context(name):
                for registry in filter(None, registries):
                    for hook in registry.hooks.values():
                        hook.state_manager.get_state().current_step = step - 1

    def forward(self, text: int = 0) -> torch.Tensor:
        """Velocity [1, C, T, h, w] with one of the texts."""
        self._current_timestep = self.scheduler.timesteps[self.next_step]
        timestep = self._current_timestep.expand(1)
        if self.model.expand_timesteps:
            timestep = torch.ones(1, self.tokens, device=self.latents.device) * timestep[:, None]
        with self.transformer.cache_context(CONTEXTS[text]):
            out: torch.Tensor = self.transformer(
                hidden_states=self.input,
                timestep=timestep,
                encoder_hidden_states=self.texts[text],
                return_dict=False,
            )[0]
        return out

    def step(self) -> torch.Tensor:
        """One step, of a new run after the last; gives the velocity with the prompt."""
        if self.next_step == self.steps:
            self.begin()
        start = self.clock.mark()
        prompt = self.forward(0)
        middle = self.clock.mark()
        negative = self.forward(1)
        stop = self.clock.mark()
        guided = negative + GUIDANCE * (prompt - negative)
        self.scheduler.step(guided, self._current_timestep, self.latents, return_dict=False)
        self.marks.append((self.next_step, (start, middle, stop, self.clock.mark())))
        self.next_step += 1
        return prompt

    def run(self, steps: range) -> list[torch.Tensor]:
        """The velocities of consecutive steps, with which a run begins."""
        self.begin(steps.start)
        return [self.step() for _ in steps]

    def step_times(self, last: int) -> list[tuple[int, float, list[float]]]:
        """(its number, its seconds, seconds of its forward calls) of the last steps that were done."""
        self.clock.wait()
        seconds = lambda start, stop: self.clock.between(start, stop) / 1e3
        return [(step, seconds(a, d), [seconds(a, b), seconds(b, c)]) for step, (a, b, c, d) in self.marks[-last:]]


def steps_to_measure(kinds: Sequence[str]) -> list[range]:
    """Consecutive steps, as few as possible, among which there is one of every kind; a run may begin with each range.

    An approximate step comes with the steps before it, back to the one whose residual it uses, and a skipped one with
    those back to the last that was computed. If there are approximate steps, one of them is the last of the last range.

    Args:
        kinds: of all steps (`step_kinds`).
    """
    ranges: list[range] = []
    for kind in reversed(STEP_KINDS):
        if kind not in kinds or any(kinds[step] == kind for steps in ranges for step in steps):
            continue
        first = last = kinds.index(kind)
        if kind == "skipped":
            first = max(step for step in range(last) if kinds[step] != "skipped")
        if kinds[first] == "approximate" and "kept" in kinds[:first]:
            first = max(step for step in range(first) if kinds[step] == "kept")
        ranges.insert(0, range(first, last + 1))
    return ranges
