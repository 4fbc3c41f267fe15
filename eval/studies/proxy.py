"""Train a larger proxy of a video model by the clock: `python -m vmonarch.eval.studies.proxy train --output FOLDER`.

The embedded model has 60 tokens a frame, where attention over the frame is as cheap as that over time. The proxy has
240, and six times the parameters, on the same captioned scenes drawn twice as large. VAE, tokenizer and text encoder
start as the embedded model's, which are convolutional or know the captions already, so that all of the time goes into
the transformer. The folder is a stock Wan pipeline; it also holds `proxy.json`, which says how it was trained.

Work: 6·parameters·tokens + 14·tokens²·width·layers FLOPs a clip, forward and backward (`clip_flops`), 1.7e12 here. The
embedded model's run, 10,534 steps of 256 clips in 762 s on an H200, did 1.9e14 FLOP/s (`RATE`) by the same formula.
At that rate seven of ten minutes, the others being for clips, compiling and saving, are 1,980 steps of 24 clips;
`proxy.json` has the steps that were done. Under `torchrun` every process draws clips and batches of its own.

With `--from-embedded` the transformer too starts as the embedded model's, of its size, and learns the larger frames.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vmonarch.configs import InputError
from vmonarch.eval.record import script_parser, script_record
from vmonarch.files import write_json
from vmonarch.finetune.embedded import parallel
from vmonarch.finetune.embedded.__main__ import save_pipeline
from vmonarch.finetune.embedded.data import sample_scenes
from vmonarch.finetune.embedded.text import attribute_targets, tokenize, write_captions
from vmonarch.finetune.embedded.transformer import TRANSFORMER_CONFIG, encode_clips, train_transformer
from vmonarch.flops import pair_flops
from vmonarch.grid import LatentGrid
from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS, GenerationSettings, embedded_model_path
from vmonarch.pipelines.model_folder import PROXY_RECORD

SCALE = 2
PROXY_CONFIG: dict[str, Any] = TRANSFORMER_CONFIG | {"num_attention_heads": 8, "ffn_dim": 2048, "num_layers": 8}
PROXY_SETTINGS = GenerationSettings(
    height=SCALE * EMBEDDED_SETTINGS.height,
    width=SCALE * EMBEDDED_SETTINGS.width,
    # Four times the tokens show the same scene through twice the noise.
    flow_shift=5.0,
)
# FLOP/s of the embedded model's training on an H200; see above.
RATE = 1.9e14
# Kept back for starting Python, and for copying and writing the model.
RESERVED_SECONDS = 40.0


@dataclass(frozen=True)
class ProxyTraining:
    """Sizes of a run.

    Args:
        minutes: for everything, from the first clip to the saved folder.
        steps: at most; the clock ends a run before.
        scale: pixels of a scene's side to those of the embedded model's.
        from_embedded: the transformer starts from the embedded model's.
        config: of the transformer, where it starts anew.
    """

    minutes: float = 10.0
    clips: int = 8_192
    captions_per_clip: int = 4
    batch: int = 24
    steps: int = 100_000
    learning_rate: float = 1e-3
    seed: int = 0
    scale: int = SCALE
    from_embedded: bool = False
    config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("minutes", "clips", "captions_per_clip", "batch", "steps", "learning_rate"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise InputError(name, f"must be positive, got {value}")
        if self.seed < 0:
            raise InputError("seed", f"must be at least 0, got {self.seed}")


QUICK = ProxyTraining(
    clips=2, batch=2, steps=2, scale=1, config=PROXY_CONFIG | {"num_attention_heads": 1, "ffn_dim": 64, "num_layers": 1}
)


def proxy_grid(settings: GenerationSettings) -> LatentGrid:
    """Tokens of a video of this size: the VAE takes 4×8×8 pixels to one, a patch 1×2×2 of these."""
    return LatentGrid(1 + (settings.num_frames - 1) // 4, settings.height // 16, settings.width // 16)


def clip_flops(parameters: int, tokens: int, config: dict[str, Any]) -> float:
    """FLOPs of training on one clip: every parameter meets every token, and attention over all pairs of tokens."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    return 6 * parameters * tokens + config["num_layers"] * pair_flops(tokens**2, width, training=True)


def expected_steps(seconds: float, batch: int, parameters: int, tokens: int, config: dict[str, Any]) -> float:
    """Updates that an H200 is expected to do in a time, at the rate of the embedded model's training."""
    return seconds * RATE / (batch * clip_flops(parameters, tokens, config))


def train(
    training: ProxyTraining,
    output: Path,
    *,
    device: str,
    compile: bool = False,
    checkpoint: Path | None = None,
    arguments: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Train and write the folder; it appears whole or not at all.

    Args:
        output: folder of the pipeline; must not exist.
        checkpoint: file to keep the training state in, and to go on from where it exists.
        arguments: of the command, for the record.

    Returns:
        what `PROXY_RECORD` holds; of several processes, the first one writes the folder.

    Raises:
        InputError: `output` exists or cannot be written, or the time is over before training begins.
    """
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import AutoTokenizer, UMT5EncoderModel

    started = time.monotonic()
    if output.exists():
        raise InputError("output", f"must not exist, {str(output)!r} does; nothing is overwritten")
    try:
        for parent in (output.parent, *(() if checkpoint is None else (checkpoint.parent,))):
            parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("output", f"{str(output)!r} cannot be written: {error.strerror}") from error
    base = embedded_model_path()
    vae = AutoencoderKLWan.from_pretrained(base / "vae").to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(base / "tokenizer")
    text_encoder = UMT5EncoderModel.from_pretrained(base / "text_encoder")

    # Other clips than those of the embedded model.
    scenes = sample_scenes(training.clips, parallel.own_seed(training.seed + 104_729))
    captions = write_captions(scenes, parallel.own_seed(training.seed + 104_730), training.captions_per_clip)
    tokens = tokenize(tokenizer, captions).view(training.clips, training.captions_per_clip, -1).to(device)
    latents = encode_clips(vae, scenes, device, batch=16, compile=compile, scale=training.scale)
    prepared = time.monotonic() - started
    print(f"{training.clips} clips, latents {list(latents.shape)}, {prepared:.0f} s", flush=True)
    left = parallel.first_process_says(60 * training.minutes - prepared - RESERVED_SECONDS, device)
    if left <= 0:
        raise InputError("minutes", f"must be more than {training.minutes:g}: clips and saving alone take as long")

    torch.manual_seed(training.seed)
    config, transformer = training.config or PROXY_CONFIG, None
    if training.from_embedded:
        config, transformer = TRANSFORMER_CONFIG, WanTransformer3DModel.from_pretrained(base / "transformer")
    transformer, text_encoder, log = train_transformer(
        latents=latents,
        tokens=tokens,
        targets=attribute_targets(scenes).to(device),
        text_encoder=text_encoder,
        transformer=transformer,
        config=config,
        steps=training.steps,
        batch=training.batch,
        learning_rate=training.learning_rate,
        sigma_shift=PROXY_SETTINGS.flow_shift,
        seed=training.seed,
        device=device,
        compile=compile,
        time_limit=left,
        checkpoint=checkpoint,
    )
    assert isinstance(transformer, WanTransformer3DModel)
    parameters = sum(parameter.numel() for parameter in transformer.parameters())
    frames, height, width = latents.shape[2:]
    grid = LatentGrid(frames, height // 2, width // 2)
    record: dict[str, Any] = {
        **script_record("studies.proxy", arguments, device),
        "training": asdict(training) | {"config": config},
        "generation": asdict(PROXY_SETTINGS) | {"height": 8 * height, "width": 8 * width},
        "parameters": parameters,
        "grid": list(grid),
        "steps": log[-1]["step"],
        "processes": parallel.world_size(),
        "clip_flops": clip_flops(parameters, grid.tokens, config),
        "expected_steps_h200": round(expected_steps(left, training.batch, parameters, grid.tokens, config)),
        "log": log,
    }
    if parallel.rank() > 0:
        return record
    temporary = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        save_pipeline(
            temporary,
            vae=vae,
            tokenizer=tokenizer,
            text_encoder=text_encoder,
            transformer=transformer,
            flow_shift=PROXY_SETTINGS.flow_shift,
        )
        record["seconds"] = round(time.monotonic() - started, 1)
        write_json(temporary / PROXY_RECORD, record)
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return record


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = script_parser("studies.proxy", __doc__)
    command = parser.add_subparsers(dest="command", required=True).add_parser("train", help="train and write a folder")
    command.add_argument("--output", type=Path, required=True, help="folder of the pipeline to write; must not exist")
    command.add_argument("--checkpoint", type=Path, help="file of the training state; it goes on from there")
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    command.add_argument("--no-compile", action="store_true", help="run eagerly")
    command.add_argument("--quick", action="store_true", help="two steps of a tiny model, to see that it runs")
    for name in ("minutes", "clips", "batch", "steps", "learning_rate", "seed"):
        default = getattr(ProxyTraining, name)
        command.add_argument(f"--{name.replace('_', '-')}", type=type(default), help=f"default {default}")
    command.add_argument("--from-embedded", action="store_true", help="start from the embedded model's transformer")
    options = parser.parse_args(arguments)
    base = QUICK if options.quick else ProxyTraining()
    given = {name: value for name in asdict(base) if (value := getattr(options, name, None)) is not None}
    torch.backends.cudnn.benchmark = True
    try:
        with parallel.process_group(options.device) as device:
            record = train(
                ProxyTraining(**{**vars(base), **given}),
                options.output,
                device=device,
                compile=not options.no_compile and device != "cpu",
                checkpoint=options.checkpoint,
                arguments=arguments,
            )
            if parallel.rank() > 0:
                return 0
    except InputError as error:
        command.error(str(error))
    print(json.dumps({key: record[key] for key in ("parameters", "grid", "steps", "expected_steps_h200", "seconds")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
