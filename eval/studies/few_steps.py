"""A student of few steps: `python -m vmonarch.eval.studies.few_steps --steps 8 --output student.safetensors`.

The embedded model with its guidance is distilled into LoRA layers that need none, for a few steps of Euler's method: in
every step the student's velocity learns to lead where the teacher arrives in several steps, from states of the teacher
first and then from those that the student itself comes through. A student of 4 steps goes on from one of 8 (`--start`),
and one with `--attention vmonarch` from one of full attention.

    vmonarch eval --lora student.safetensors --scheduler euler --steps 8 --guidance 1 --methods vmonarch \\
        vmonarch:refresh=0.5 --prompt-set embedded

samples it as users do, on prompts whose combinations training never shows.

Legend: N states of a pool, n steps, B videos, C latent channels, T latent frames, h and w latent pixels.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vmonarch.configs.methods import resolve_method
from vmonarch.eval.record import script_parser, script_record
from vmonarch.files import write_json
from vmonarch.finetune.scenes import sample_scenes, write_captions
from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS, embedded_model_path

# Not the layers of time: with LoRA on these, compiled blocks had wrong gradients on an H200 with torch 2.11.
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2", "proj_out"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run, which the clock ends before all its updates."""

    # Of all the teacher's way, with two evaluations each; a multiple of the student's.
    teacher_steps: int = 16
    captions: int = 8192
    # Trajectories whose states are kept, and those made at once, by the student after `every` updates.
    pool: int = 4096
    chunk: int = 128
    every: int = 48
    batch: int = 64
    updates: int = 100_000
    rank: int = 64
    num_frames: int = EMBEDDED_SETTINGS.num_frames


QUICK = Sizes(teacher_steps=8, captions=4, pool=1, chunk=1, every=1, batch=1, updates=2, rank=4, num_frames=9)
LEARNING_RATE = 4e-4


def noise_levels(steps: int) -> list[float]:
    """Of Euler's method in these many steps, and 0 at the end."""
    shift, even = EMBEDDED_SETTINGS.flow_shift, (1 - i / steps for i in range(steps + 1))
    return [shift * u / (1 + (shift - 1) * u) for u in even]


class Distillation:
    """The teacher, and a pool of states with the velocities that lead from them to the next level."""

    def __init__(self, sizes: Sizes, steps: int, device: str) -> None:
        from diffusers import WanPipeline

        self.sizes, self.n, self.device, self.levels = sizes, steps, device, noise_levels(steps)
        self.pipe = WanPipeline.from_pretrained(embedded_model_path()).to(device)
        self.teacher = self.pipe.transformer.eval().requires_grad_(False)
        # Other scenes than those that the embedded model was trained on.
        self.captions = write_captions(sample_scenes(sizes.captions, 32_452), 32_453, 1)
        self.empty = self.text([""])
        frames, settings = (sizes.num_frames - 1) // 4 + 1, EMBEDDED_SETTINGS
        self.shape = (self.teacher.config.in_channels, frames, settings.height // 8, settings.width // 8)
        self.states = torch.empty(
            sizes.pool, steps, *self.shape, dtype=torch.float16, device=device
        )  # [N, n, C, T, h, w]
        self.velocities = torch.empty_like(self.states)
        self.prompts = torch.zeros(sizes.pool, dtype=torch.long)
        self.made = 0

    @torch.no_grad()
    def text(self, captions: list[str]) -> torch.Tensor:
        """Rows of text [B, 512, D]."""
        embeds, _ = self.pipe.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=512)
        return embeds

    def texts_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of text [B, 512, D] of places in the pool [B]."""
        return self.text([self.captions[number] for number in self.prompts[rows].tolist()])

    def velocity(self, model: Any, x: torch.Tensor, sigma: torch.Tensor | float, text: torch.Tensor) -> torch.Tensor:
        """Float32 [B, C, T, h, w] at x of that shape, and at a level or one of each video [B]."""
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.device != "cpu"):
            return model(x, 1000 * torch.as_tensor(sigma).to(x).expand(len(x)), text, return_dict=False)[0].float()

    def guided(self, x: torch.Tensor, sigma: float, text: torch.Tensor) -> torch.Tensor:
        """The teacher's velocity with guidance, from one call for both predictions."""
        both = torch.cat((text, self.empty.expand_as(text)))
        given, empty = self.velocity(self.teacher, x.repeat(2, 1, 1, 1, 1), sigma, both).chunk(2)
        return empty + EMBEDDED_SETTINGS.guidance_scale * (given - empty)

    def arrive(self, x: torch.Tensor, step: int, text: torch.Tensor) -> torch.Tensor:
        """Where the teacher arrives from x in this step, by the midpoint method."""
        parts = self.sizes.teacher_steps // self.n
        for sigma, after in itertools.pairwise(noise_levels(self.n * parts)[step * parts : (step + 1) * parts + 1]):
            half = (after - sigma) / 2
            middle = x + half * self.guided(x, sigma, text)
            x = x + 2 * half * self.guided(middle, sigma + half, text)
        return x

    @torch.no_grad()
    def fill(self, student: Any = None) -> None:
        """Put a chunk of new trajectories into the pool, in place of the oldest: the teacher's own, or a student's."""
        rows = (self.made + torch.arange(self.sizes.chunk)) % self.sizes.pool
        self.made += self.sizes.chunk
        self.prompts[rows] = torch.randint(len(self.captions), (self.sizes.chunk,))
        text = self.texts_of(rows)
        x = torch.randn(self.sizes.chunk, *self.shape, device=self.device)
        for step, (sigma, after) in enumerate(itertools.pairwise(self.levels)):
            end = self.arrive(x, step, text)
            self.states[rows, step] = x.half()
            self.velocities[rows, step] = ((end - x) / (after - sigma)).half()
            if student is not None:
                end = x + (after - sigma) * self.velocity(student, x, sigma, text)
            x = end

    def train(self, attention: str, seconds: float, start: Path | None = None) -> tuple[dict[str, Any], list[float]]:
        """LoRA layers of a student with an attention method, and the mean loss of every 100 updates."""
        from diffusers import WanPipeline
        from diffusers.training_utils import EMAModel
        from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict

        began, sizes = time.monotonic(), self.sizes
        while self.made < sizes.pool and (not self.made or time.monotonic() - began < seconds / 3):
            self.fill()
        torch.manual_seed(self.n)
        student = copy.deepcopy(self.teacher)
        student.add_adapter(LoraConfig(r=sizes.rank, lora_alpha=sizes.rank, target_modules=TARGETS))
        if start is not None:
            layers = WanPipeline.lora_state_dict(str(start))
            set_peft_model_state_dict(student, {k.removeprefix("transformer."): x for k, x in layers.items()})
        resolve_method(attention).install(student)
        learnt = [parameter for parameter in student.parameters() if parameter.requires_grad]
        average = EMAModel(learnt, decay=0.99)
        optimizer = torch.optim.AdamW(learnt, betas=(0.9, 0.98), weight_decay=0.0)
        levels, losses, filled = torch.tensor(self.levels, device=self.device), [], min(sizes.pool, self.made)
        training = time.monotonic()
        for update in range(sizes.updates):
            share = max(update / sizes.updates, (time.monotonic() - training) / (seconds - (training - began)))
            if share >= 1:
                break
            if update and update % sizes.every == 0:
                self.fill(student)
            rows, step = torch.randint(filled, (sizes.batch,)), torch.randint(self.n, (sizes.batch,))
            found = self.velocity(student, self.states[rows, step].float(), levels[step], self.texts_of(rows))
            loss = (found - self.velocities[rows, step]).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(learnt, 1.0)
            # A warm-up, and a decay over the second half.
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, (update + 1) / 100, 2 * (1 - share))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            average.step(learnt)
            losses.append(loss.detach())
        average.copy_to(learnt)
        return get_peft_model_state_dict(student), [part.mean().item() for part in torch.stack(losses).split(100)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    from diffusers import WanPipeline

    parser = script_parser("studies.few_steps", __doc__, whole=True)
    parser.add_argument("--output", type=Path, required=True, help="LoRA file to write; its record goes beside it")
    parser.add_argument("--steps", type=int, default=8, help="of the student: 16 or a divisor (default: 8)")
    parser.add_argument("--attention", default="full", help="method at work in the student (default: full)")
    parser.add_argument("--start", type=Path, help="LoRA file of a student to go on from")
    parser.add_argument("--minutes", type=float, default=2.0, help="of everything (default: 2)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="two updates, to see that it runs")
    options = parser.parse_args(arguments)
    sizes = QUICK if options.quick else Sizes()
    if options.steps < 1 or sizes.teacher_steps % options.steps:
        parser.error(f"--steps must be a divisor of {sizes.teacher_steps}, got {options.steps}")
    if options.output.exists():
        parser.error(f"--output: {options.output} exists; nothing is overwritten")
    record = script_record("studies.few_steps", arguments, options.device) | {"sizes": vars(sizes)}
    distillation = Distillation(sizes, options.steps, options.device)
    layers, losses = distillation.train(options.attention, 60 * options.minutes, options.start)
    folder, name = options.output.parent, options.output.name
    WanPipeline.save_lora_weights(str(folder), layers, weight_name=name)
    write_json(options.output.with_suffix(".json"), record | {"trajectories": distillation.made, "losses": losses})
    print(json.dumps({"trajectories": distillation.made, "losses": losses[-3:]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
