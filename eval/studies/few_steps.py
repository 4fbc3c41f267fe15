"""VMonarch in few steps: `python -m vmonarch.eval.studies.few_steps --output JSON`.

The embedded model with its guidance is distilled into LoRA layers that need none, for 8 and for 4 steps of Euler's
method: in every step the student's velocity learns to lead where the teacher arrives in several steps. It begins with
states of the teacher, which are replaced bit by bit by those that the student itself comes through. The student of 4
steps goes on from that of 8, and a second one of each goes on from the first with `attention` at work in all its steps.
All are sampled as users sample them, by the settings `lora`, `scheduler` and `steps`, on prompts whose combinations
training never shows.

Legend: N states of a pool, n steps, B videos, C latent channels, T latent frames, h and w latent pixels.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from vmonarch.configs import InputError
from vmonarch.configs.methods import resolve_method, with_options
from vmonarch.eval.attention_flops import recorded_call, relative_flops
from vmonarch.eval.methods import prompt_scorer
from vmonarch.eval.prompt_score import contact_sheet
from vmonarch.eval.record import script_parser, script_record
from vmonarch.eval.render.table import made, markdown, percent, shown_number
from vmonarch.eval.similarity import similarity
from vmonarch.files import file_name, write_json
from vmonarch.finetune.embedded import loop
from vmonarch.finetune.embedded.based import LORA_TARGETS
from vmonarch.finetune.embedded.data import held_out_prompts, sample_scenes
from vmonarch.finetune.embedded.text import TEXT_LENGTH, TRAIN_TOKENS, encode_text, tokenize, write_captions
from vmonarch.finetune.embedded.transformer import TrainingAttention
from vmonarch.finetune.models import compile_blocks
from vmonarch.pipelines.config import SamplingConfig
from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS, embedded_model_path
from vmonarch.pipelines.loading import LoadedModel, complete_and_load
from vmonarch.pipelines.sampling import decode, denoise

# Not the layers of time: with LoRA on these, compiled blocks had wrong gradients on an H200 with torch 2.11.
TARGETS = [*LORA_TARGETS, "proj_out"]
# Of the attention, the options that videos are sampled with.
OPTIONS = ("", "dense_steps=1", "refresh=0.25", "refresh=0.5")


@dataclasses.dataclass(frozen=True)
class FewSteps:
    """Sizes of a run.

    Args:
        attention: that students learn with, beside full attention, and that videos are sampled with.
        minutes: of everything but each student's first pass, which compiles; two thirds of it are for training.
        steps: of the students.
        teacher_steps: of all the teacher's way, with two evaluations each; a multiple of each of `steps`.
        sampled_steps: of the teacher where it is sampled beside the students.
        pool: trajectories whose states are kept, as far as a third of a student's time is enough to make them.
        chunk: trajectories made at once; `every` so many updates the student makes as many.
        updates: at most; the clock ends a run before.
        prompts: of the 64 held out.
    """

    attention: str = "vmonarch"
    minutes: float = 9.0
    steps: tuple[int, ...] = (8, 4)
    teacher_steps: int = 16
    sampled_steps: int = 50
    captions: int = 8192
    pool: int = 4096
    chunk: int = 128
    every: int = 48
    batch: int = 64
    updates: int = 100_000
    rank: int = 64
    learning_rate: float = 4e-4
    prompts: int = 48
    num_frames: int = EMBEDDED_SETTINGS.num_frames
    seed: int = 0

    @property
    def methods(self) -> tuple[str, ...]:
        """Full attention, and the other with all `OPTIONS`."""
        return "full", *(with_options(self.attention, options) for options in OPTIONS)


QUICK = FewSteps(
    minutes=1000.0,
    teacher_steps=8,
    sampled_steps=2,
    captions=4,
    pool=1,
    chunk=1,
    every=1,
    batch=1,
    updates=2,
    prompts=1,
    num_frames=9,
)


def noise_levels(steps: int) -> list[float]:
    """Of Euler's method in so many steps, and 0 at the end."""
    shift, even = EMBEDDED_SETTINGS.flow_shift, (1 - i / steps for i in range(steps + 1))
    return [shift * u / (1 + (shift - 1) * u) for u in even]


class Distillation:
    """The teacher, and a pool of states with the velocities that lead from them to the next level; for n steps."""

    def __init__(self, study: FewSteps, steps: int, device: str, compile: bool) -> None:
        from diffusers import WanPipeline

        self.study, self.n, self.device, self.compile = study, steps, device, compile
        self.levels = noise_levels(steps)
        pipe = WanPipeline.from_pretrained(embedded_model_path())
        self.encoder = pipe.text_encoder.to(device).eval().requires_grad_(False)
        self.teacher = pipe.transformer.to(device).eval().requires_grad_(False)
        self.teacher.set_attn_processor(TrainingAttention(TEXT_LENGTH - TRAIN_TOKENS))
        self.plain = copy.deepcopy(self.teacher)
        if compile:
            compile_blocks(self.teacher)
        # Other scenes than those that the embedded model was trained on.
        captions = write_captions(sample_scenes(study.captions, study.seed + 32_452), study.seed + 32_453, 1)
        self.tokens = tokenize(pipe.tokenizer, captions).to(device)
        self.empty = self.text(tokenize(pipe.tokenizer, [""]).to(device))
        settings = EMBEDDED_SETTINGS
        grid = ((study.num_frames - 1) // 4 + 1, settings.height // 8, settings.width // 8)
        self.shape = (self.teacher.config.in_channels, *grid)
        half: dict[str, Any] = {"dtype": torch.float16, "device": device}
        self.states = torch.empty(study.pool, steps, *self.shape, **half)  # [N, n, C, T, h, w]
        self.velocities = torch.empty_like(self.states)
        self.prompts = torch.zeros(study.pool, dtype=torch.long, device=device)
        self.filled = self.made = 0

    @torch.no_grad()
    def text(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of text of token numbers, as `TrainingAttention` takes them."""
        return encode_text(self.encoder, ids, padding=1)[0].float()

    def velocity(self, model: Any, x: torch.Tensor, sigma: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Float32 [B, C, T, h, w] at x of that shape, sigma [B] and text."""
        with loop.autocast(self.device):
            return model(x, 1000 * sigma, text, return_dict=False)[0].float()

    def guided(self, x: torch.Tensor, sigma: float, text: torch.Tensor) -> torch.Tensor:
        """The teacher's velocity with guidance, from one call for both predictions."""
        both = torch.cat((text, self.empty.expand_as(text)))
        found = self.velocity(self.teacher, x.repeat(2, 1, 1, 1, 1), torch.full((len(both),), sigma).to(x), both)
        given, empty = found.chunk(2)
        return empty + EMBEDDED_SETTINGS.guidance_scale * (given - empty)

    def arrive(self, x: torch.Tensor, step: int, text: torch.Tensor) -> torch.Tensor:
        """Where the teacher arrives from x in this step, by the midpoint method."""
        parts = self.study.teacher_steps // self.n
        levels = noise_levels(self.n * parts)[step * parts : (step + 1) * parts + 1]
        for sigma, after in itertools.pairwise(levels):
            half = (after - sigma) / 2
            middle = x + half * self.guided(x, sigma, text)
            x = x + 2 * half * self.guided(middle, sigma + half, text)
        return x

    @torch.no_grad()
    def fill(self, student: Any = None) -> None:
        """Put a chunk of new trajectories into the pool, in place of the oldest: the teacher's own, or a student's."""
        study = self.study
        rows = (self.made + torch.arange(study.chunk)) % study.pool
        self.made += study.chunk
        self.filled = min(study.pool, max(self.filled, self.made))
        self.prompts[rows] = torch.randint(len(self.tokens), (study.chunk,), device=self.device)
        text = self.text(self.tokens[self.prompts[rows]])
        x = torch.randn(study.chunk, *self.shape, device=self.device)
        for step, (sigma, after) in enumerate(itertools.pairwise(self.levels)):
            end = self.arrive(x, step, text)
            self.states[rows, step] = x.half()
            self.velocities[rows, step] = ((end - x) / (after - sigma)).half()
            if student is not None:
                end = x + (after - sigma) * self.velocity(student, x, torch.full((len(x),), sigma).to(x), text)
            x = end

    def train(self, attention: str, seconds: float, start: Any = None) -> tuple[Any, list[dict[str, Any]]]:
        """A student and the log of its training.

        Args:
            attention: full, or another method.
            start: a student whose LoRA layers it goes on with.
        """
        from peft import LoraConfig

        began, study = time.monotonic(), self.study
        while self.filled < study.pool and (not self.filled or time.monotonic() - began < seconds / 3):
            self.fill()
        torch.manual_seed(study.seed + self.n)
        student = copy.deepcopy(self.plain)
        student.add_adapter(LoraConfig(r=study.rank, lora_alpha=study.rank, target_modules=TARGETS))
        if start is not None:
            student.load_state_dict(start.state_dict())
        if attention != "full":
            resolve_method(attention).install(student)
        elif self.compile:
            compile_blocks(student)
        learnt = [parameter for parameter in student.parameters() if parameter.requires_grad]
        average = [parameter.detach().clone() for parameter in learnt]
        levels = torch.tensor(self.levels, device=self.device)

        def losses(update: int) -> dict[str, torch.Tensor]:
            if update and update % study.every == 0:
                self.fill(student)
            rows = torch.randint(self.filled, (study.batch,), device=self.device)
            step = torch.randint(self.n, (study.batch,), device=self.device)
            text = self.text(self.tokens[self.prompts[rows]])
            found = self.velocity(student, self.states[rows, step].float(), levels[step], text)
            return {"loss": (found - self.velocities[rows, step]).square().mean()}

        left = seconds - (time.monotonic() - began)
        # Compiles, which is not to take the time of learning.
        losses(0)["loss"].backward()
        for parameter in learnt:
            parameter.grad = None
        log: list[dict[str, Any]] = []
        loop.train(
            f"{self.n} steps, {attention}",
            learnt,
            average,
            [torch.optim.AdamW(learnt, betas=(0.9, 0.98), weight_decay=0.0)],
            losses,
            steps=study.updates,
            rate=loop.trapezoid(study.learning_rate, min(100, 1 + study.updates // 10), 0.5),
            ema=0.99,
            log=log,
            time_limit=left,
        )
        with torch.no_grad():
            torch._foreach_copy_(learnt, average)
        return student, log


def distil(study: FewSteps, folder: Path, device: str, compile: bool) -> list[dict[str, Any]]:
    """Train all students and write LoRA files `{steps}-{attention}.safetensors`; their logs."""
    from diffusers import WanPipeline
    from peft import get_peft_model_state_dict

    part = 2 / 3 * 60 * study.minutes / (3 * len(study.steps))
    logs, full = [], None
    for steps in study.steps:
        distillation = Distillation(study, steps, device, compile)
        # A student of fewer steps goes on from one of more.
        full, log = distillation.train("full", 2 * part, full)
        made = {"full": (full, log), study.attention: distillation.train(study.attention, part, full)}
        for attention, (student, log) in made.items():
            name = f"{steps}-{file_name(attention)}.safetensors"
            WanPipeline.save_lora_weights(str(folder), get_peft_model_state_dict(student), weight_name=name)
            logs.append({"steps": steps, "attention": attention, "trajectories": distillation.made, "log": log})
    return logs


def sample(model: LoadedModel, config: SamplingConfig, prompts: Sequence[str]) -> torch.Tensor:
    """Videos [prompts, F, 3, H, W]; the i-th has the seed i."""
    videos = []
    for start in range(0, len(prompts), config.batch_size):
        some = prompts[start : start + config.batch_size]
        seeds = range(start, start + len(some))
        videos.append(decode(model.pipe, denoise(model, config, some, list(seeds)).latents))
    return torch.cat(videos)


def measure(study: FewSteps, folder: Path, device: str, sheets: Path | None) -> Iterator[dict[str, Any]]:
    """Rows of the table, as they are done.

    PSNR and SSIM are to what the same student makes with full attention, which itself is compared with the teacher; the
    students that learnt with another attention are compared with the one that did not.
    """
    prompts = [prompt.prompt for prompt in held_out_prompts()[: study.prompts]]
    # Name, settings, methods, and the row that the methods after full are compared with.
    runs: list[tuple[str, dict[str, Any], tuple[str, ...], str]] = [
        ("teacher", {"steps": study.sampled_steps}, study.methods[:2], "teacher"),
    ]
    for steps in study.steps:
        euler = {"steps": steps, "scheduler": "euler"}
        runs.append((f"teacher, {steps} steps", euler, study.methods[:1], "teacher"))
        for attention, words in (("full", study.methods), (study.attention, study.methods[1:])):
            lora = (str(folder / f"{steps}-{file_name(attention)}.safetensors"),)
            name = f"student of {attention}, {steps} steps"
            runs.append((name, euler | {"guidance": 1.0, "lora": lora}, words, f"student of full, {steps} steps"))
    full: dict[str, torch.Tensor] = {}
    for name, settings, words, own in runs:
        settings |= {"device": device, "batch_size": min(16, len(prompts)), "num_frames": study.num_frames}
        config, model = complete_and_load(SamplingConfig(prompts=tuple(prompts), **settings), None)
        score, methods = prompt_scorer(model), [resolve_method(word) for word in words]
        resolve_method("full").install(model.pipe)
        with recorded_call(model.pipe) as call:
            denoise(model, config, prompts[:1], [0], steps=1)
        work = relative_flops(call, methods, ["transformer"] * settings["steps"])
        for method in methods:
            method.install(model.pipe)
            videos = sample(model, config, prompts)
            reference = full.get(own, full.get("teacher"))
            if method.label == "full":
                full[name] = videos
            if sheets is not None:
                contact_sheet(videos[:8].permute(0, 1, 3, 4, 2), sheets / f"{file_name(f'{name} {method.label}')}.png")
            scores = [score(video.to(device), prompt) or 0.0 for video, prompt in zip(videos, prompts, strict=True)]
            row = {"model": name, "steps": settings["steps"], "method": method.label, "work": work[method.label]}
            row |= {"prompt_score": statistics.fmean(scores)}
            if reference is not None:
                pairs = zip(videos, reference, strict=True)
                near = [dataclasses.asdict(similarity(x.to(device), y.to(device))) for x, y in pairs]
                row |= {key: statistics.fmean(entry[key] for entry in near) for key in ("psnr", "ssim")}
            yield row


def few_steps_table(results: dict[str, Any]) -> str:
    """Work, PSNR to full attention and prompt score, of few steps beside each other; under it the teacher's in many."""
    study = results["study"]
    few: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    many = []
    for row in results["rows"]:
        if row["model"] == "teacher":
            psnr = f", {row['psnr']:.2f} dB" if "psnr" in row else ""
            many.append(f"{row['method']} {percent(row['prompt_score'])}{psnr}")
        else:
            name = row["model"].removesuffix(f", {row['steps']} steps")
            few.setdefault((name, row["method"]), {})[row["steps"]] = row
    heading, rows = ["model", "attention"], [list(names) for names in few]
    for steps in study["steps"]:
        heading += [f"{steps} steps: attention FLOPs", "PSNR dB", "prompt score"]
        for cells, of_steps in zip(rows, few.values(), strict=True):
            found = of_steps.get(steps, {})
            cells += [
                percent(found.get("work")),
                shown_number(found.get("psnr"), 2),
                percent(found.get("prompt_score")),
            ]
    about = (
        f"{study['prompts']} prompts. The teacher in {study['sampled_steps']} steps with guidance: {'; '.join(many)}. "
    )
    return made(results, markdown(heading, rows), about)


def attention_method(word: str) -> str:
    """A word of `resolve_method`, for the command line."""
    try:
        return resolve_method(word).label
    except InputError as error:
        raise argparse.ArgumentTypeError(error.problem) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = script_parser("studies.few_steps", __doc__, whole=True)
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true", help="run eagerly")
    parser.add_argument("--quick", action="store_true", help="two updates of everything, to see that it runs")
    parser.add_argument("--attention", type=attention_method, help="that students learn with (default vmonarch)")
    parser.add_argument("--minutes", type=float, help=f"of everything (default {FewSteps.minutes:g})")
    parser.add_argument("--prompts", type=int, help=f"of the 64 held out (default {FewSteps.prompts})")
    parser.add_argument("--sheets", type=Path, help="folder for a contact sheet of every row")
    options = parser.parse_args(arguments)
    given = {
        name: value for name in ("attention", "minutes", "prompts") if (value := getattr(options, name)) is not None
    }
    study = dataclasses.replace(QUICK if options.quick else FewSteps(), **given)
    if options.sheets is not None:
        options.sheets.mkdir(parents=True, exist_ok=True)
    record = script_record("studies.few_steps", arguments, options.device)
    compile = not options.no_compile and options.device != "cpu"
    torch.set_float32_matmul_precision("high")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        record |= {"study": dataclasses.asdict(study), "training": distil(study, Path(folder), options.device, compile)}
        record["train_seconds"] = round(time.monotonic() - started, 1)
        torch.set_float32_matmul_precision("highest")
        record["rows"] = []
        for row in measure(study, Path(folder), options.device, options.sheets):
            print(json.dumps(row), flush=True)
            record["rows"].append(row)
            record["seconds"] = round(time.monotonic() - started, 1)
            write_json(options.output, record)
    print(few_steps_table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
