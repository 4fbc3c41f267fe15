"""Train the embedded model from scratch and write a folder that `diffusers.WanPipeline.from_pretrained` loads.

    python -m vmonarch.finetune.embedded --output my-model --work-dir outputs/embedded

Stages: the VAE; captions and tokenizer; latents of all clips; text encoder and transformer together. VAE, tokenizer and
checkpoints stay in the work folder, and the command picks up from there when it is run again.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vmonarch.finetune.embedded import loop, parallel
from vmonarch.pipelines.model_folder import folder_bytes


@dataclass(frozen=True)
class TrainingSettings:
    """Sizes of a run; the defaults are what the shipped model was trained with."""

    vae_steps: int = 3200
    vae_batch: int = 8
    vae_learning_rate: float = 2e-3
    vae_object_weight: float = 0.0
    vae_first_frame_weight: float = 0.0
    clips: int = 64_000
    captions_per_clip: int = 4
    steps: int = 12_000
    batch: int = 256
    learning_rate: float = 1.5e-3
    sigma_shift: float = 3.0
    seed: int = 0


def save_pipeline(
    folder: Path, *, vae: Any, tokenizer: Any, text_encoder: Any, transformer: Any, flow_shift: float
) -> None:
    """Write a stock `WanPipeline` folder, weights in float16 safetensors that load as float32."""
    from diffusers import UniPCMultistepScheduler, WanPipeline

    half = lambda model: copy.deepcopy(model).to("cpu").half()
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=flow_shift
    )
    pipe = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=half(text_encoder),
        vae=half(vae),
        scheduler=scheduler,
        transformer=half(transformer),
    )
    pipe.save_pretrained(folder, safe_serialization=True)
    config = folder / "text_encoder" / "config.json"
    values = json.loads(config.read_text())
    # transformers loads in the precision that the config names, diffusers' models load in float32 by default.
    values["dtype"] = "float32"
    config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    # The name under which every version of transformers knows this class.
    for name in ("model_index.json", "tokenizer/tokenizer_config.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))


def run(
    settings: TrainingSettings,
    *,
    output: Path,
    work: Path,
    device: str,
    compile: bool,
    time_limit: float,
    continue_from: Path | None = None,
    quick: bool = False,
) -> None:
    """Train and save; see the module's docstring."""
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import AutoTokenizer, UMT5EncoderModel

    from vmonarch.finetune.embedded.text import (
        attribute_targets,
        build_text_encoder,
        tokenize,
        train_tokenizer,
    )
    from vmonarch.finetune.embedded.transformer import encode_clips, train_transformer
    from vmonarch.finetune.embedded.vae import reconstruction_psnr, train_vae
    from vmonarch.finetune.scenes import render, sample_scenes, write_captions
    from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS

    work.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    report: dict[str, Any] = {}

    def note(stage: str, **values: Any) -> None:
        if parallel.rank() > 0:
            return
        report[stage] = {**values, "at_seconds": round(time.monotonic() - started, 1)}
        print(stage, json.dumps(report[stage], default=str)[:400], flush=True)
        (work / f"report-{stage}.json").write_text(json.dumps(report[stage], indent=1, default=str) + "\n")

    if continue_from is not None:
        with parallel.first_process_first():
            for part in ("vae", "tokenizer"):
                if not (work / part).is_dir():
                    shutil.copytree(continue_from / part, work / part)
    if (work / "vae").is_dir():
        vae = AutoencoderKLWan.from_pretrained(work / "vae").to(device).eval()
    else:
        vae, log = train_vae(
            steps=settings.vae_steps,
            batch=settings.vae_batch,
            learning_rate=settings.vae_learning_rate,
            object_weight=settings.vae_object_weight,
            first_frame_weight=settings.vae_first_frame_weight,
            seed=settings.seed,
            device=device,
            compile=compile,
            statistics_clips=2 if quick else 256,
        )
        if parallel.rank() == 0:
            vae.save_pretrained(work / "vae")
        video = render(sample_scenes(1 if quick else 16, settings.seed + 999_983), device)
        note("vae", psnr_db=float(reconstruction_psnr(vae, video).mean()), log=log)

    scenes = sample_scenes(settings.clips, parallel.own_seed(settings.seed + 1))
    captions = write_captions(scenes, parallel.own_seed(settings.seed + 2), settings.captions_per_clip)
    with parallel.first_process_first():
        if not (work / "tokenizer").is_dir():
            train_tokenizer(captions[:200_000]).save_pretrained(work / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    tokens = tokenize(tokenizer, captions).view(settings.clips, settings.captions_per_clip, -1).to(device)
    note("captions", vocabulary=len(tokenizer), longest=int((tokens != 0).sum(-1).max()))
    latents = encode_clips(vae, scenes, device, batch=4 if quick else 64, compile=compile)
    note("latents", shape=list(latents.shape), std=float(latents[:256].float().std()))

    def save(step: int, transformer: Any, text_encoder: Any) -> None:
        save_pipeline(
            output,
            vae=vae,
            tokenizer=tokenizer,
            text_encoder=text_encoder,
            transformer=transformer,
            flow_shift=EMBEDDED_SETTINGS.flow_shift,
        )
        note("saved", step=step, bytes=folder_bytes(output))

    torch.manual_seed(settings.seed)
    if continue_from is None:
        text_encoder, transformer = build_text_encoder(len(tokenizer)), None
    else:
        text_encoder = UMT5EncoderModel.from_pretrained(continue_from / "text_encoder")
        transformer = WanTransformer3DModel.from_pretrained(continue_from / "transformer")
    _, _, log = train_transformer(
        latents=latents,
        tokens=tokens,
        targets=attribute_targets(scenes).to(device),
        text_encoder=text_encoder,
        transformer=transformer,
        sigma_shift=settings.sigma_shift,
        steps=settings.steps,
        batch=settings.batch,
        learning_rate=settings.learning_rate,
        seed=settings.seed,
        device=device,
        compile=compile,
        checkpoint=work / "checkpoint.pt",
        checkpoint_every=max(1, settings.steps // 6),
        time_limit=parallel.first_process_says(time_limit - (time.monotonic() - started), device),
        on_checkpoint=save,
    )
    note("transformer", log=log)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = loop.training_parser("vmonarch.finetune.embedded", str(__doc__).splitlines()[0], TrainingSettings())
    parser.add_argument("--output", type=Path, required=True, help="folder of the pipeline to write")
    parser.add_argument("--work-dir", type=Path, required=True, help="folder for stages and checkpoints")
    parser.add_argument("--continue-from", type=Path, help="folder of an embedded model to train on from")
    options = parser.parse_args(arguments)
    zeros = ("seed", "vae_object_weight", "vae_first_frame_weight")
    quick = {"vae_steps": 2, "vae_batch": 1, "clips": 4, "captions_per_clip": 4, "steps": 2, "batch": 2}
    settings = loop.read_settings(parser, options, TrainingSettings(), zeros, quick)
    if options.continue_from is not None and not (options.continue_from / "model_index.json").is_file():
        parser.error(f"--continue-from must be the folder of a pipeline, got {options.continue_from}")
    torch.backends.cudnn.benchmark = True
    with parallel.process_group(options.device) as device:
        run(
            settings,
            output=options.output,
            work=options.work_dir,
            device=device,
            compile=not options.no_compile and device != "cpu",
            time_limit=options.time_limit,
            continue_from=options.continue_from,
            quick=options.quick,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
