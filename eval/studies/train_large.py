"""What an update of a large model takes: `python -m vmonarch.eval.studies.train_large --output JSON`.

A Wan model with random weights is trained by `vmonarch finetune` itself on random clips, once for each of `--runs`. A
run is what such a command would be given; "PLAN" in it stands for the plan of the embedded model, stretched over the
layers and heads of this one: what it computes has no use, but takes the time that a plan like it takes.

    python -m vmonarch.eval.studies.train_large --output train-14b.json --model wan2.1-14b --frames 93 \\
        --size 704 1280 --processes 2 --runs "attention=full lora.rank=64" "attention=vmonarch lora.rank=64"
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vmonarch.configs import InputError
from vmonarch.eval.record import script_parser, script_record
from vmonarch.eval.render.table import made, markdown, shown_number
from vmonarch.eval.wan_models import WanModel, read_model
from vmonarch.files import check_output, write_json
from vmonarch.finetune.data.parquet import write_empty_caption, write_shard
from vmonarch.finetune.data.schema import TEXT_LENGTH, Sample
from vmonarch.pipelines.embedded import embedded_model_path
from vmonarch.plan import AttentionPlan

PLAN = "embedded-1.00-refined"
RUNS = ("attention=full", "attention=vmonarch", "attention=vmonarch:plan=PLAN")
# Clips of a run; an update has one.
CLIPS = 2


def stretched(plan: AttentionPlan, layers: int, heads: int) -> AttentionPlan:
    """A plan for a model of so many layers and heads, with about the same share of every method."""
    (rows,) = plan.layers.values()
    place = lambda i, count, of: i * of // count
    return AttentionPlan(
        plan.methods,
        {
            "transformer": [
                [rows[place(i, layers, len(rows))][place(j, heads, len(rows[0]))] for j in range(heads)]
                for i in range(layers)
            ]
        },
    )


def write_model(model: WanModel, folder: Path, device: torch.device) -> None:
    """A pipeline with a large transformer; the rest, which training does not use, is the embedded model's."""
    shutil.copytree(embedded_model_path(), folder, ignore=shutil.ignore_patterns("transformer", "*.py", "__pycache__"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    transformer: Any = model.build_transformer("transformer", device, dtype)
    transformer.save_pretrained(folder / "transformer", max_shard_size="4GB")


def write_clips(model: WanModel, latents: tuple[int, int, int], folder: Path) -> None:
    """Random clips with captions of full length."""
    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=random)
    channels, width = model.transformer["in_channels"], model.transformer["text_dim"]
    clips = (
        Sample(f"random-{i}", draw(channels, *latents), draw(TEXT_LENGTH, width), caption="?") for i in range(CLIPS)
    )
    write_shard(folder / "clips.parquet", clips)
    write_empty_caption(folder, draw(1, width))


def train(run: str, work: Path, updates: int, processes: int) -> dict[str, Any]:
    """Seconds of an update and peak memory, as `vmonarch finetune` logs them."""
    output = work / "run"
    shutil.rmtree(output, ignore_errors=True)
    given = [word.replace("PLAN", str(work / "plan.json")) for word in run.split()]
    fixed = f"model={work / 'model'} data.path={work / 'clips'} data.workers=0 output_dir={output} steps={updates}"
    fixed += f" batch_size=1 log_every=1 trackers=[] sequence_parallel_size={processes}"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    started = time.monotonic()
    done = subprocess.run([*launch, "-m", "vmonarch.finetune", *fixed.split(), *given], capture_output=True, text=True)
    row: dict[str, Any] = {"run": run, "seconds_in_all": round(time.monotonic() - started, 1)}
    log = output / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    lines = [line for line in lines if "seconds" in line]
    if done.returncode or len(lines) < 2:
        return row | {"status": "failed", "problem": _problem(done.stderr)}
    # The first update compiles kernels.
    seconds = [line["seconds"] for line in lines[1:]]
    peak = max((line["peak_memory_gb"] for line in lines if "peak_memory_gb" in line), default=None)
    loss = [line["loss"] for line in lines]
    return row | {"status": "ok", "seconds": seconds, "peak_memory_gb": peak, "loss": loss}


def _problem(text: str) -> str:
    """The lines of an output that name an error."""
    return " ".join(line.strip() for line in text.splitlines() if "rror: " in line)[:1000]


def table(results: dict[str, Any]) -> str:
    """A row for every run."""
    rows = []
    base = next(
        (row for row in results["rows"] if row["run"].split()[0] == "attention=full" and "seconds" in row), None
    )
    for row in results["rows"]:
        if row["status"] != "ok":
            rows.append([row["run"], row["status"], "", ""])
            continue
        seconds = statistics.median(row["seconds"])
        faster = "" if base is None or row is base else f"{statistics.median(base['seconds']) / seconds:.2f}×"
        rows.append([row["run"], f"{seconds:.2f} s", faster, shown_number(row["peak_memory_gb"], 1, "{} GB")])
    settings = results["settings"]
    size = "×".join(map(str, (settings["frames"], *settings["size"])))
    about = f"{settings['model']} with random weights, a clip of {size} ({settings['tokens']:,} tokens) an update,"
    about += f" {settings['processes']} {'processes share' if settings['processes'] > 1 else 'process has'} it; "
    return made(results, markdown(["", "update", "faster", "peak memory"], rows), about)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = script_parser("studies.train_large", __doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    parser.add_argument("--model", default="wan2.1-1.3b", help="of configs/models/, or a YAML file")
    parser.add_argument("--frames", type=int, default=61)
    parser.add_argument("--size", type=int, nargs=2, default=(448, 832), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--runs", nargs="+", default=list(RUNS), help="words of `vmonarch finetune`, a string for each")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1, help="that share a clip")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no run is begun")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        check_output(options.output)
        model = read_model(options.model, argument="--model")
        latents = model.latents(options.frames, *options.size, argument="--frames")
    except InputError as error:
        parser.error(str(error))
    record = script_record("studies.train_large", arguments, str(device))
    names = ("model", "frames", "size", "updates", "processes")
    record |= {"settings": {name: getattr(options, name) for name in names}, "rows": []}
    record["settings"]["tokens"] = model.grid(latents).tokens
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_model(model, work / "model", device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        write_clips(model, latents, work / "clips")
        config = model.transformer
        plan = stretched(AttentionPlan.parse(PLAN), config["num_layers"], config["num_attention_heads"])
        plan.save(work / "plan.json")
        for run in options.runs:
            if time.monotonic() - started > options.budget:
                break
            record["rows"].append(train(run, work, options.updates, options.processes))
            print(json.dumps(record["rows"][-1]), flush=True)
            write_json(options.output, record)
    print(table(record))
    return 0 if all(row["status"] == "ok" for row in record["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
