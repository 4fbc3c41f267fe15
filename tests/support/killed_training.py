"""A training run that is killed at random moments and started anew, beside one that is not: FOLDER KILLS.

Prints JSON: how many kills hit a run, how many runs went on from a checkpoint, and whether weights, average and losses
are those of the run that was not killed, bit for bit. Each run is a fork, so that all is imported once.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import tiny_wan
import torch
from safetensors.torch import load_file

from vmonarch.finetune.config import finetune_config
from vmonarch.finetune.data.parquet import write_shard
from vmonarch.finetune.trainer import Trainer

STEPS = 16


def train(folder: Path, name: str) -> None:
    """Train to the last step; notes the one that it begins with."""
    config = finetune_config(
        {
            "model": str(folder / "model"),
            "output_dir": str(folder / name),
            "steps": STEPS,
            "batch_size": 4,
            "micro_batch": 2,
            "precision": "fp32",
            "ema": 0.9,
            "trackers": [],
            "log_every": 1,
            "gradient_checkpointing": False,
            "data": {"path": str(folder / "clips"), "workers": 0, "caption_dropout": 0.3},
            "optimizer": {"learning_rate": 1e-3},
            "validation": {"every": 0},
            "checkpoints": {"every": 1},
        }
    )
    trainer = Trainer(config)
    (folder / "begun").write_text(str(trainer.step))
    trainer.run()


def fork(folder: Path, name: str, begun: bool, seconds: float | None) -> tuple[bool, float]:
    """Run, and kill it so many seconds after its start or, if `begun`, after the start of its training.

    Returns:
        (whether it was killed, the seconds that it took from there).
    """
    (folder / "begun").unlink(missing_ok=True)
    started = None if begun else time.monotonic()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(folder, name)
            code = 0
        finally:
            os._exit(code)
    while True:
        if started is None and (folder / "begun").exists():
            started = time.monotonic()
        done, status = os.waitpid(child, os.WNOHANG)
        took = 0.0 if started is None else time.monotonic() - started
        if done:
            assert status == 0, "the run failed by itself"
            return False, took
        if seconds is not None and started is not None and took > seconds:
            os.kill(child, signal.SIGKILL)
            return os.WIFSIGNALED(os.waitpid(child, 0)[1]), took
        time.sleep(0.002)


def losses(folder: Path) -> dict[int, float]:
    """The last that was logged of each step: a step after the last checkpoint is taken again."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines() if line.endswith("}")]
    return {line["step"]: line["loss"] for line in lines}


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tiny_wan.pipeline("t2v").save_pretrained(folder / "model")
    write_shard(folder / "clips" / "a.parquet", tiny_wan.clips(0, 13), rows_per_group=4)
    _, seconds = fork(folder, "whole", True, None)
    rng = random.Random(kills)
    killed = resumed = number = 0
    while killed < kills:
        # One in five while it loads.
        begun = rng.random() > 0.2
        hit, _ = fork(folder, f"killed-{number}", begun, rng.uniform(0, 0.6 * seconds))
        killed += hit
        resumed += hit and begun and int((folder / "begun").read_text()) > 0
        # A run that has ended cannot be killed any more: a new one is.
        number += not hit
    fork(folder, f"killed-{number}", True, None)
    newest = f"checkpoints/step-{STEPS:08d}"
    same = True
    for last in range(number + 1):
        output = folder / f"killed-{last}"
        same &= losses(output) == losses(folder / "whole")
        for file in ("model.safetensors", "ema.safetensors"):
            ours, whole = (load_file(path / newest / file) for path in (output, folder / "whole"))
            same &= ours.keys() == whole.keys() and all(torch.equal(ours[name], whole[name]) for name in whole)
        same &= (output / newest / "optimizer.bin").read_bytes() == (
            folder / "whole" / newest / "optimizer.bin"
        ).read_bytes()
    print(json.dumps({"killed": killed, "resumed": resumed, "runs": number + 1, "same": same}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
