"""Finetune the embedded model to one attention method after the other and score it, as the paper's Table 3 does.

    python -m vmonarch.eval.finetune_scores --output docs/benchmarks/finetune-embedded.json

Every method starts from the shipped weights and takes the same updates on the same clips in the same order; "full" is
the control. Before and after: validation loss on clips that are never trained on, and the 64 held-out prompts
(attributes read back from the pixels; PSNR and SSIM against the shipped model with full attention).
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vmonarch.configs import InputError, read_yaml
from vmonarch.configs.methods import AttentionMethod, resolve_method
from vmonarch.eval.prompt_score import generate, score_videos
from vmonarch.eval.video_io import AtomicFiles
from vmonarch.finetune.config import finetune_config
from vmonarch.finetune.data.parquet import write_shard
from vmonarch.finetune.data.preprocess import PipelineEncoders
from vmonarch.finetune.data.schema import Sample
from vmonarch.finetune.embedded.data import HeldOutPrompt, held_out_prompts, sample_scenes
from vmonarch.finetune.embedded.text import write_captions
from vmonarch.finetune.embedded.transformer import encode_clips
from vmonarch.finetune.embedded.vae import latent_statistics
from vmonarch.finetune.export import export
from vmonarch.finetune.trainer import Trainer
from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS, embedded_model_path
from vmonarch.pipelines.environment import environment

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
# What the document says of a run.
SETTINGS = ("steps", "batch_size", "seed", "precision", "objective", "optimizer")


def make_clips(pipe: Any, path: Path, count: int, seed: int, device: str) -> None:
    """Write procedural clips as `vmonarch preprocess --procedural` does, many at a time.

    The VAE takes all frames of a clip at once, which equals its stock chunked form.
    """
    scenes = sample_scenes(count, seed)
    captions = write_captions(scenes, seed + 1, 1)
    mean, std = latent_statistics(pipe.vae, device)
    latents = encode_clips(pipe.vae, scenes, device, batch=min(64, count)).float() * std + mean
    encoders = PipelineEncoders(pipe, torch.device(device), 512)
    rows = (
        Sample(f"procedural-{seed}-{n}", latents[n].cpu(), encoders.text(caption), caption=caption)
        for n, caption in enumerate(captions)
    )
    write_shard(path, rows)


class Scorer:
    """Scores pipelines on the held-out prompts.

    Args:
        prompts: how many of them. steps: of sampling.
    """

    def __init__(self, pipe: Any, prompts: int, steps: int, device: str) -> None:
        self.held_out: list[HeldOutPrompt] = held_out_prompts()[:prompts]
        self.steps, self.device = steps, device
        self.reference = self._videos(pipe)

    def _videos(self, pipe: Any) -> torch.Tensor:
        settings = EMBEDDED_SETTINGS
        return generate(
            pipe,
            [item.prompt for item in self.held_out],
            seed=0,
            batch=16,
            steps=self.steps,
            guidance=settings.guidance_scale,
            size=(settings.height, settings.width, settings.num_frames),
        )

    def __call__(self, pipe: Any, method: AttentionMethod) -> dict[str, float]:
        """Shares and means with this method on this pipeline."""
        method.install(pipe)
        shares, _ = score_videos(self._videos(pipe), self.held_out, self.reference, self.device)
        # Of the reference itself PSNR is infinite, which JSON has no number for.
        return {name: value for name, value in shares.items() if math.isfinite(value)}


def load(path: Path, device: str) -> Any:
    """The stock pipeline in a folder."""
    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(str(path)).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def finetune(method: AttentionMethod, data: Path, folder: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """Train and export into `folder`; validation losses before and after, and the seconds it took."""
    given = {
        "attention": method.to_dict(),
        "output_dir": str(folder / "run"),
        "trackers": [],
        "data": {"path": str(data / "clips.parquet"), "validation": str(data / "held-out.parquet")},
    }
    config = finetune_config(read_yaml("embedded", group="finetune"), overrides, given)
    started = time.perf_counter()
    trainer = Trainer(config)
    trainer.run()
    seconds = time.perf_counter() - started
    lines = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
    export(folder / "run", folder / "model", dtype=torch.float32)
    settings = {key: config.to_dict()[key] for key in SETTINGS}
    return {"before": losses[0], "after": losses[-1], "seconds": round(seconds, 1), "settings": settings}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vmonarch.eval.finetune_scores", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="as `vmonarch compare` takes them")
    parser.add_argument("--clips", type=int, default=4096, help="to train on")
    parser.add_argument("--held-out", type=int, default=64, help="clips for the validation loss")
    parser.add_argument("--prompts", type=int, default=64, help="how many of the 64 held-out prompts")
    parser.add_argument("--sampling-steps", type=int, default=EMBEDDED_SETTINGS.num_inference_steps)
    parser.add_argument("--steps", type=int, help="updates (default: those of configs/finetune/embedded.yaml)")
    parser.add_argument("--batch-size", type=int, help="clips of an update (default: of the same file)")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no method is begun")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    try:
        methods = [resolve_method(name, argument="--methods") for name in options.methods]
    except InputError as error:
        parser.error(str(error))
    overrides: dict[str, Any] = {}
    if options.steps is not None:
        overrides |= {"steps": options.steps, "validation": {"every": options.steps}}
    if options.batch_size is not None:
        overrides |= {"batch_size": options.batch_size, "micro_batch": options.batch_size}
    if options.device == "cpu":
        overrides["precision"] = "fp32"
    started = time.monotonic()
    base = load(embedded_model_path(), options.device)
    results: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    left_out: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_clips(base, folder / "clips.parquet", options.clips, 0, options.device)
        make_clips(base, folder / "held-out.parquet", options.held_out, 1, options.device)
        scorer = Scorer(base, options.prompts, options.sampling_steps, options.device)
        for number, method in enumerate(methods):
            if time.monotonic() - started > options.budget:
                left_out.append(method.label)
                continue
            run = finetune(method, folder, folder / str(number), overrides)
            settings = run["settings"]
            results[method.label] = {
                "validation_loss": {key: run[key] for key in ("before", "after")},
                "before": scorer(base, method),
                "after": scorer(load(folder / str(number) / "model", options.device), method),
                "seconds": run["seconds"],
            }
            print(method.label, json.dumps(results[method.label]), flush=True)
    about = environment(options.device)
    command = shlex.join(arguments if arguments is not None else sys.argv[1:])
    document = {
        "date": datetime.date.today().isoformat(),
        "hardware": f"{about['device_name']}, {about['cpu_count']} cores",
        "environment": about,
        "command": f"python -m vmonarch.eval.finetune_scores {command}",
        "clips": options.clips,
        "prompts": options.prompts,
        "sampling_steps": options.sampling_steps,
        "settings": settings,
        "results": results,
        "left_out": left_out,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with AtomicFiles(overwrite=True) as files:
        files.stage(options.output).write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
