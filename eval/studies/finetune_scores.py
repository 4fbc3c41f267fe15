"""Finetune the embedded model to one attention method after the other and score it, as the paper's Table 3 does.

    python -m vmonarch.eval.studies.finetune_scores --output docs/benchmarks/finetune-embedded.json

Every method starts from the shipped weights and takes the same updates on the same clips in the same order; "full" is
the control. Before and after: validation loss on clips that are never trained on, and the 64 held-out prompts
(attributes read back from the pixels; PSNR and SSIM against the shipped model with full attention). With a schedule
that is constant a run may be scored after several numbers of updates, and resumed by another command:

    python -m vmonarch.eval.studies.finetune_scores --config recipe --updates 500 1500 5000 --folder runs \\
        --methods vmonarch:plan=embedded-1.00 --output docs/benchmarks/finetune-recipe.json batch_size=32 micro_batch=32
"""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vmonarch.configs import InputError, deep_merge, parse_overrides, read_yaml
from vmonarch.configs.methods import AttentionMethod, resolve_method
from vmonarch.eval.prompt_score import generate, score_videos
from vmonarch.eval.record import script_parser, script_record
from vmonarch.eval.render.table import made, markdown, percent, shown_number
from vmonarch.files import check_output, file_name, write_json
from vmonarch.finetune.config import finetune_config
from vmonarch.finetune.data.parquet import write_empty_caption, write_shard
from vmonarch.finetune.data.schema import Sample
from vmonarch.finetune.embedded.data import HeldOutPrompt, held_out_prompts, sample_scenes
from vmonarch.finetune.embedded.text import TEXT_LENGTH, encode_text, tokenize, write_captions
from vmonarch.finetune.embedded.transformer import encode_clips
from vmonarch.finetune.embedded.vae import latent_statistics
from vmonarch.finetune.export import export
from vmonarch.finetune.trainer import Trainer
from vmonarch.pipelines.config import SamplingConfig
from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS, embedded_model_path
from vmonarch.pipelines.loading import read_pipeline
from vmonarch.pipelines.lora import fuse_loras
from vmonarch.pipelines.model_folder import find_model

# The paper's Table 3 (iterations, frames per block, recomputation), and exact patterns beside it.
METHODS = (
    "full",
    "vmonarch",
    "vmonarch-t1",
    "vmonarch-t3",
    "vmonarch:frames_per_block=2",
    "vmonarch-plain",
    "vmonarch-own",
    "vmonarch-band1",
)
# Validation and checkpoints come before the first and after the last update anyway.
NEVER = 1 << 30
# What the document says of a run.
SETTINGS = ("steps", "batch_size", "seed", "precision", "objective", "optimizer", "ema", "anneal", "lora")


def make_clips(pipe: Any, path: Path, count: int, seed: int, device: str) -> None:
    """Write a folder of procedural clips as `vmonarch preprocess --procedural` does, many at a time.

    The VAE takes all frames of a clip at once, and the text encoder captions without padding, which equals their stock
    forms.
    """
    scenes = sample_scenes(count, seed)
    captions = write_captions(scenes, seed + 1, 1)
    mean, std = latent_statistics(pipe.vae, device)
    latents = encode_clips(pipe.vae, scenes, device, batch=min(64, count)).float() * std + mean
    ids = tokenize(pipe.tokenizer, [*captions, ""], TEXT_LENGTH)
    counts = (ids != 0).sum(1).tolist()
    with torch.no_grad():
        batches = [
            encode_text(pipe.text_encoder, part, padding=0)[0] for part in ids[:, : max(counts)].to(device).split(64)
        ]
    texts = [text[:count].float().cpu() for text, count in zip(torch.cat(batches), counts, strict=True)]
    rows = (
        Sample(f"procedural-{seed}-{n}", latents[n].cpu(), texts[n], caption=caption)
        for n, caption in enumerate(captions)
    )
    write_shard(path / "clips.parquet", rows)
    write_empty_caption(path, texts[-1])


@dataclass(frozen=True)
class Plan:
    """What is the same for all methods.

    Args:
        folder: holds `clips` and `held-out`, and the videos of the shipped model with full attention.
        runs: where those of all methods go.
        config: of configs/finetune, and `overrides` of its settings. updates: after which the weights are scored.
        prompts: how many of the held-out ones. sampling_steps: of a video.
        deadline: `time.time()` after which no method is begun.
    """

    folder: Path
    runs: Path
    config: str
    overrides: dict[str, Any]
    updates: tuple[int, ...]
    prompts: int
    sampling_steps: int
    device: str
    deadline: float

    @property
    def held_out(self) -> list[HeldOutPrompt]:
        return held_out_prompts()[: self.prompts]

    @property
    def reference(self) -> Path:
        return self.folder / "reference.safetensors"

    def videos(self, pipe: Any) -> torch.Tensor:
        """A video [F, Y, X, 3] of every prompt, [B, F, Y, X, 3]."""
        settings = EMBEDDED_SETTINGS
        return generate(
            pipe,
            [item.prompt for item in self.held_out],
            seed=0,
            batch=16,
            steps=self.sampling_steps,
            guidance=settings.guidance_scale,
            size=(settings.height, settings.width, settings.num_frames),
        )

    def score(self, pipe: Any, method: AttentionMethod) -> dict[str, float]:
        """Shares and means with this method on this pipeline."""
        method.install(pipe)
        reference = load_file(self.reference)["videos"]
        shares, _ = score_videos(self.videos(pipe), self.held_out, reference, self.device)
        # Of the reference itself PSNR is infinite, which JSON has no number for.
        return {name: value for name, value in shares.items() if math.isfinite(value)}


def load(path: Path, device: str) -> Any:
    """The stock pipeline in a folder."""
    from diffusers import WanPipeline

    pipe = read_pipeline(WanPipeline, find_model(str(path)), torch.float32).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def finetune(plan: Plan, method: AttentionMethod, run: Path) -> Iterator[tuple[int, dict[str, Any], Any]]:
    """Train in the folder of a run, or go on there: (updates, what the document says of them, the pipeline) of each."""
    for updates in plan.updates:
        given = {
            "attention": method.to_dict(),
            "steps": updates,
            "output_dir": str(run),
            "trackers": [],
            "data": {"path": str(plan.folder / "clips"), "validation": str(plan.folder / "held-out")},
            "checkpoints": {"keep": len(plan.updates)},
        }
        config = finetune_config(read_yaml(plan.config, group="finetune"), plan.overrides, given)
        Trainer(config).run()
        lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        losses = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
        with tempfile.TemporaryDirectory() as folder:
            name = "layers.safetensors" if config.lora.rank else "model"
            written = export(run, Path(folder) / name, step=updates, dtype=torch.float32)
            pipe = load(embedded_model_path() if config.lora.rank else written, plan.device)
            if config.lora.rank:
                prompts = tuple(item.prompt for item in plan.held_out)
                fuse_loras(pipe, SamplingConfig(prompts=prompts, lora=(str(written),)))
        settings = {key: config.to_dict()[key] for key in SETTINGS}
        yield updates, {"loss": {"before": losses[0], "after": losses[updates]}, "settings": settings}, pipe


def run_method(plan: Plan, name: str) -> Iterator[dict[str, Any]]:
    """Everything of one method, after each number of updates; nothing if it would begin after the deadline."""
    if time.time() > plan.deadline:
        return
    method = resolve_method(name)
    before = plan.score(load(embedded_model_path(), plan.device), method)
    for updates, found, pipe in finetune(plan, method, plan.runs / file_name(method.label)):
        yield {
            "method": method.label,
            "label": method.label if len(plan.updates) == 1 else f"{method.label}, {updates} updates",
            "settings": found["settings"],
            "result": {"validation_loss": found["loss"], "before": before, "after": plan.score(pipe, method)},
        }


def _whole_method(plan: Plan, name: str) -> list[dict[str, Any]]:
    return list(run_method(plan, name))


def run_all(plan: Plan, names: Sequence[str], processes: int) -> Iterator[dict[str, Any]]:
    """`run_method` of all names: from one process each row when it is done, from several all rows of a method."""
    if processes == 1:
        for name in names:
            yield from run_method(plan, name)
        return
    # Not a Pool, whose processes may have no children: the loader has its own.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as executor:
        for future in as_completed([executor.submit(_whole_method, plan, name) for name in names]):
            yield from future.result()


def finetune_table(results: dict[str, Any]) -> str:
    """Every method before and after, and how far its validation loss is from that of full attention."""
    control = results["results"].get("full", {}).get("validation_loss", {}).get("after")
    rows = []
    for name, result in results["results"].items():
        loss = result["validation_loss"]
        cells = [name, f"{loss['before']:.4f}", f"{loss['after']:.4f}"]
        if control is not None:
            cells.append("–" if name == "full" else f"{100 * (loss['after'] / control - 1):+.1f} %")
        for key in ("all", "direction"):
            cells += [f"{100 * result[when][key]:.0f} %" for when in ("before", "after")]
        for key, digits in (("psnr_db", 1), ("ssim", 3)):
            cells += [shown_number(result[when].get(key), digits) for when in ("before", "after")]
        rows.append(cells)
    heading = ["", "loss before", "after"]
    if control is not None:
        heading.append("more than full")
    for score in ("all three", "direction", "PSNR dB", "SSIM"):
        heading += [f"{score} before", "after"]
    table = markdown(heading, rows)
    settings = results["settings"]
    share = settings["objective"]["distillation"]
    distilled = f", {percent(share)} of the loss the distance to full attention's velocity" if share else ""
    about = (
        f"{', '.join(map(str, results.get('updates', [settings['steps']])))} updates of {settings['batch_size']} clips,"
        f" {results['clips']} clips,"
        f" {results['prompts']} prompts of {results['sampling_steps']} sampling steps{distilled}; "
    )
    return made(results, table, about)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = script_parser("studies.finetune_scores", __doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="as `vmonarch compare` takes them")
    parser.add_argument("--clips", type=int, default=4096, help="to train on")
    parser.add_argument("--held-out", type=int, default=64, help="clips for the validation loss")
    parser.add_argument("--prompts", type=int, default=64, help="how many of the 64 held-out prompts")
    parser.add_argument("--sampling-steps", type=int, default=EMBEDDED_SETTINGS.num_inference_steps)
    parser.add_argument("--config", default="embedded", help="of configs/finetune")
    parser.add_argument("--updates", nargs="+", type=int, help="after which to score (default: the steps of --config)")
    parser.add_argument("--folder", type=Path, help="where the runs are kept, and resumed if they are there")
    parser.add_argument("overrides", nargs="*", help="key=value over --config, for all methods")
    parser.add_argument("--processes", type=int, default=4, help="that work on one method each")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no method is begun")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    try:
        methods = [resolve_method(name, argument="--methods") for name in options.methods]
        check_output(options.output)
        overrides = deep_merge(
            {"validation": {"every": NEVER}, "checkpoints": {"every": NEVER}}, parse_overrides(options.overrides)
        )
        steps = finetune_config(read_yaml(options.config, group="finetune"), overrides).steps
    except InputError as error:
        parser.error(str(error))
    updates = options.updates or [steps]
    if updates != sorted({n for n in updates if n > 0}):
        parser.error(f"--updates must be positive and ascending, got {updates}")
    if options.processes < 1:
        parser.error(f"--processes must be at least 1, got {options.processes}")
    deadline = time.time() + options.budget
    document: dict[str, Any] = {
        **script_record("studies.finetune_scores", arguments, options.device),
        "updates": updates,
        "clips": options.clips,
        "prompts": options.prompts,
        "sampling_steps": options.sampling_steps,
    }
    results: dict[str, dict[str, Any]] = {}
    order = [method.label for method in methods]
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(
            Path(folder),
            options.folder or Path(folder),
            options.config,
            overrides,
            tuple(updates),
            options.prompts,
            options.sampling_steps,
            options.device,
            deadline,
        )
        base = load(embedded_model_path(), options.device)
        make_clips(base, plan.folder / "clips", options.clips, 0, options.device)
        make_clips(base, plan.folder / "held-out", options.held_out, 1, options.device)
        save_file({"videos": plan.videos(base)}, plan.reference)
        del base
        write_json(options.output, document | {"results": {}, "left_out": order})
        for row in run_all(plan, options.methods, options.processes):
            results.setdefault(row["method"], {})[row["label"]] = row["result"]
            document["settings"] = row["settings"]
            print(row["label"], json.dumps(row["result"]), flush=True)
            document["results"] = {key: result for name in order for key, result in results.get(name, {}).items()}
            document["left_out"] = [name for name in order if name not in results]
            write_json(options.output, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
