"""Train a larger proxy of a video model by the clock: `python -m vmonarch.eval.studies.proxy train --output FOLDER`.

The embedded model has 60 tokens a frame, where attention over the frame is as cheap as that over time. The proxy has
240, and six times the parameters, on the same captioned scenes drawn twice as large. VAE, tokenizer and text encoder
start as the embedded model's, so that all of the time goes into the transformer; with `--from-embedded` that too starts
as the embedded model's, of its size. The folder is a stock Wan pipeline; its `proxy.json` says how it was trained.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vmonarch.eval.record import script_parser, script_record
from vmonarch.files import write_json
from vmonarch.finetune.embedded.__main__ import save_pipeline
from vmonarch.finetune.embedded.text import attribute_targets, tokenize
from vmonarch.finetune.embedded.transformer import TRANSFORMER_CONFIG, encode_clips, train_transformer
from vmonarch.finetune.scenes import sample_scenes, write_captions
from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS, embedded_model_path
from vmonarch.pipelines.model_folder import PROXY_RECORD

PROXY_CONFIG = TRANSFORMER_CONFIG | {"num_attention_heads": 8, "ffn_dim": 2048, "num_layers": 8}
QUICK = {"clips": 2, "batch": 2, "steps": 2, "scale": 1}
QUICK_CONFIG = PROXY_CONFIG | {"num_attention_heads": 1, "ffn_dim": 64, "num_layers": 1}
# Four times the tokens show the same scene through twice the noise.
FLOW_SHIFT = 5.0
# Seconds kept back for starting Python, and for copying and writing the model.
RESERVED = 40.0


def train(output: Path, about: dict[str, Any], *, device: str, compile: bool, **training: Any) -> dict[str, Any]:
    """Train and write the folder, which appears whole or not at all; what `PROXY_RECORD` holds.

    Raises:
        ValueError: the time is over before training begins.
    """
    from diffusers import WanPipeline

    started = time.monotonic()
    pipe = WanPipeline.from_pretrained(embedded_model_path())
    # Other clips than those of the embedded model.
    scenes = sample_scenes(training["clips"], training["seed"] + 104_729)
    captions = write_captions(scenes, training["seed"] + 104_730, training["captions"])
    tokens = tokenize(pipe.tokenizer, captions).view(training["clips"], training["captions"], -1).to(device)
    vae = pipe.vae.to(device)
    latents = encode_clips(vae, scenes, device, batch=16, compile=compile, scale=training["scale"])
    left = 60 * training["minutes"] - (time.monotonic() - started) - RESERVED
    if left <= 0:
        raise ValueError("--minutes: clips and saving alone take as long")
    torch.manual_seed(training["seed"])
    transformer, text_encoder, log = train_transformer(
        latents=latents,
        tokens=tokens,
        targets=attribute_targets(scenes).to(device),
        text_encoder=pipe.text_encoder,
        transformer=pipe.transformer if training["from_embedded"] else None,
        config=training["config"],
        sigma_shift=FLOW_SHIFT,
        device=device,
        compile=compile,
        time_limit=left,
        **{name: training[name] for name in ("steps", "batch", "learning_rate", "seed")},
    )
    frames, height, width = latents.shape[2:]
    record = about | {
        "training": training,
        "generation": asdict(EMBEDDED_SETTINGS) | {"height": 8 * height, "width": 8 * width, "flow_shift": FLOW_SHIFT},
        "parameters": sum(parameter.numel() for parameter in transformer.parameters()),
        "grid": [frames, height // 2, width // 2],
        "steps": log[-1]["step"],
        "log": log,
        "seconds": round(time.monotonic() - started, 1),
    }
    partial = output.with_name(f".{output.name}.partial")
    models = {"vae": vae, "tokenizer": pipe.tokenizer, "text_encoder": text_encoder, "transformer": transformer}
    save_pipeline(partial, **models, flow_shift=FLOW_SHIFT)
    write_json(partial / PROXY_RECORD, record)
    partial.rename(output)
    return record


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = script_parser("studies.proxy", __doc__, whole=True)
    command = parser.add_subparsers(required=True).add_parser("train", help="train and write a folder")
    command.add_argument("--output", type=Path, required=True, help="folder of the pipeline to write; must not exist")
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    command.add_argument("--no-compile", action="store_true", help="run eagerly")
    command.add_argument("--quick", action="store_true", help="two steps of a tiny model, to see that it runs")
    command.add_argument("--from-embedded", action="store_true", help="start from the embedded model's transformer")
    sizes = {"minutes": 10.0, "clips": 8192, "captions": 4, "batch": 24, "steps": 100_000, "learning_rate": 1e-3}
    for name, value in sizes.items():
        command.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default {value}")
    command.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for name in sizes:
        if not 0 < getattr(options, name) < float("inf"):
            command.error(f"--{name.replace('_', '-')} must be positive, got {getattr(options, name)}")
    if options.output.exists():
        command.error(f"--output: {options.output} exists; nothing is overwritten")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    training = {name: getattr(options, name) for name in (*sizes, "seed", "from_embedded")} | {"scale": 2}
    training |= QUICK if options.quick else {}
    own = QUICK_CONFIG if options.quick else PROXY_CONFIG
    training["config"] = TRANSFORMER_CONFIG if options.from_embedded else own
    about = script_record("studies.proxy", arguments, options.device)
    compile = not options.no_compile and options.device != "cpu"
    try:
        record = train(options.output, about, device=options.device, compile=compile, **training)
    except ValueError as error:
        command.error(str(error))
    print(json.dumps({key: record[key] for key in ("parameters", "grid", "steps", "seconds")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
