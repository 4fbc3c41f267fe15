"""`vmonarch finetune` and `vmonarch export` as a user runs them, on two processes of the CPU."""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

from vmonarch.cli import main
from vmonarch.finetune.checkpoints import newest, steps_in
from vmonarch.finetune.data.parquet import write_shard
from vmonarch.finetune.trainer import Trainer

AS_WITH_GPUS = str(Path(__file__).parents[1] / "support" / "as_with_gpus.py")
SETTINGS = ["batch_size=4", "micro_batch=1", "precision=fp32", "trackers=[]", "log_every=1",
            "gradient_checkpointing=false", "optimizer.learning_rate=1e-3", "checkpoints.every=4"]  # fmt: skip


@pytest.fixture(scope="module")
def place(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    tiny.pipeline("t2v").save_pretrained(folder / "model")
    # Rows that two processes cannot share evenly.
    write_shard(folder / "clips" / "a.parquet", tiny.clips(0, 7))
    return folder


def words_for(place, output):
    return [f"model={place / 'model'}", f"data.path={place / 'clips'}", f"output_dir={output}", *SETTINGS]


@pytest.fixture
def launch(place, forks, tmp_path):
    """Two processes, which have to end well."""

    def launch(output, *overrides, program="vmonarch.finetune"):
        words = [*words_for(place, output), *overrides]
        code, said = forks(tmp_path, program, *words, processes=2, ACCELERATE_USE_CPU="true")
        assert code == 0, said[-3000:]

    return launch


def test_a_run_that_is_killed_at_any_moment_ends_as_one_that_was_not(tiny, place, forks, tmp_path):
    words = ["steps=30", "checkpoints.every=1", "ema=0.9", "data.caption_dropout=0.3"]
    run = lambda name: [tmp_path, "vmonarch.finetune", *words_for(place, tmp_path / name), *words]
    checkpoints, rng = tmp_path / "killed" / "checkpoints", random.Random(0)
    assert forks(*run("whole"))[0] == 0
    for least in (0, 4, 10):
        (process,) = forks.start(*run("killed"))
        deadline = time.monotonic() + 90
        while least and max(steps_in(checkpoints), default=0) < least:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.1))
        os.kill(process, signal.SIGKILL)
        assert forks.wait()[0] == -signal.SIGKILL, "it had ended before"
    assert forks(*run("killed"))[0] == 0
    # Steps after the last checkpoint are taken, and logged, again.
    whole = tiny.logged(tmp_path / "whole")
    assert tiny.logged(tmp_path / "killed") == whole and len(whole) == 30
    saved = ({}, {})
    for name, tensors in zip(("killed", "whole"), saved, strict=True):
        for file in newest(tmp_path / name / "checkpoints").glob("*.safetensors"):
            tensors |= load_file(file)
    assert saved[0].keys() == saved[1].keys() and "exp_avg_sq" in {name.partition(".")[0] for name in saved[0]}
    assert all(torch.equal(tensor, saved[1][name]) for name, tensor in saved[0].items())


@pytest.mark.parametrize("rank", [0, 2], ids=["full", "lora"])
def test_weights_that_are_spread_learn_what_copied_ones_learn_and_resume_exactly(tiny, place, launch, tmp_path, rank):
    """FSDP2: each process writes its part, of LoRA layers no more than these; export puts the parts together."""
    words = [f"lora.rank={rank}", "checkpoints.every=5"]
    launch(tmp_path / "copied", *words, "steps=5")
    runs = (("whole", "steps=5"), ("parts", "steps=3"), ("parts", "steps=5"), ("copied", "steps=6"))
    first, *others = ([*words_for(place, tmp_path / name), *words, steps] for name, steps in runs)
    joined = [word for other in others for word in ("--then", *other)]
    launch(tmp_path / "unused", *first, *joined, program=AS_WITH_GPUS)
    folder = newest(tmp_path / "whole" / "checkpoints")
    assert {file.name.partition("-model")[0] for file in folder.glob("*.safetensors")} == {"shard-00001", "shard-00002"}
    stored = HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata
    assert all(".lora_" in name for name in stored) == bool(rank)
    # Each goes on where the other has ended.
    launch(tmp_path / "whole", *words, "steps=6")
    names = ("parts", "copied", "whole")
    parts, copied, whole = (tiny.logged(tmp_path / name) for name in names)
    assert len(parts) == 5 and parts.items() <= whole.items() and whole == pytest.approx(copied, rel=1e-4)
    made = [tmp_path / (f"{name}.safetensors" if rank else name) for name in ("same", "spread")]
    for run, file in zip(("copied", "whole"), made, strict=True):
        assert main(["export", str(tmp_path / run), "--output", str(file), "--step", "5"]) == 0
    files = made if rank else [path / "transformer" / "diffusion_pytorch_model.safetensors" for path in made]
    same, spread = map(load_file, files)
    assert spread.keys() == same.keys() and len([name for name in stored if "weights." in name]) == len(spread)
    for name, tensor in spread.items():
        torch.testing.assert_close(tensor, same[name], atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("more", [[], ["lora.rank=2", "objective.distillation=1"]], ids=["full", "lora"])
def test_processes_that_share_clips_and_spread_weights_learn_what_one_learns_and_resume(
    tiny, place, forks, launch, tmp_path, more
):
    """Sequence parallelism and FSDP2 together. The first process has two of three heads."""
    pipe = tiny.pipeline("t2v")
    pipe.register_modules(transformer=tiny.transformer(num_attention_heads=3))
    pipe.save_pretrained(tmp_path / "model")
    words = [f"model={tmp_path / 'model'}", "gradient_checkpointing=true", "checkpoints.every=3", *more]
    assert forks(tmp_path, "vmonarch.finetune", *words_for(place, tmp_path / "one"), *words, "steps=5")[0] == 0
    both = [*words, "sequence_parallel_size=2", "compile=true"]
    joined = ["--then", *words_for(place, tmp_path / "parts"), *both, "steps=5"]
    launch(tmp_path / "whole", *both, "steps=5", "--then", *joined[1:-1], "steps=3", *joined, program=AS_WITH_GPUS)
    for value in ("loss", "gradient_norm"):
        one, whole, parts = (tiny.logged(tmp_path / name, value) for name in ("one", "whole", "parts"))
        assert len(one) == 5 and whole == pytest.approx(one, rel=1e-4) and parts == whole


def test_what_cannot_be_used_is_named_without_a_traceback(place, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vmonarch.finetune.trainer.get_available_trackers", lambda: ["tensorboard"])
    for words, message in (
        (["steps"], "steps is no override"),
        (["data.path=nope"], "data.path must be a folder of parquet files, as `vmonarch preprocess` makes them: no"),
        (["output_dir=/dev/null"], "output_dir must be a folder; '/dev/null' is a file"),
        (["trackers=[nope]"], "trackers must be of all, tensorboard, which are installed, got nope"),
    ):
        assert main(["finetune", *words_for(place, tmp_path), *words]) == 2
        assert f"vmonarch finetune: error: {message}" in capsys.readouterr().err


def test_a_run_that_is_done_says_what_is_left(place, tmp_path, capsys, monkeypatch):
    words = ["finetune", *words_for(place, tmp_path), "steps=2"]
    update = Trainer._update

    def interrupted(trainer, batches):
        if trainer.step == 1:
            raise KeyboardInterrupt
        return update(trainer, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_update", interrupted)
        assert main([*words, "checkpoints.every=1"]) == 130
    assert "interrupted; nothing half-written is left" in capsys.readouterr().err
    for loss in (", loss=", ""):
        assert main(words) == 0
        [last], bar = (text.splitlines() for text in capsys.readouterr())
        # Steps, time left, steps a second and loss in one line.
        assert re.search(r"100%.* 2/2 \[\d+:\d+<.*step.*" + loss, bar[-1]), bar
        assert last == f"step 2 is saved; to export it: vmonarch export {tmp_path} --output …"
    bad = {
        ("nowhere", "--output", "m"): (2, "run must be the output folder of a run; there is no folder 'nowhere/checkp"),
        (str(tmp_path), "--output", "m.safetensors"): (2, "--output must be a folder for what this run trained, got"),
        (str(tmp_path), "--output", "/dev/null/m"): (2, "--output must be a folder; '/dev/null' is a file"),
        (str(tmp_path), "--output", "m", "--step", "7"): (1, f"{tmp_path} has no checkpoint of step 7; it has: 1, 2"),
    }
    monkeypatch.chdir(tmp_path)
    for given, (code, message) in bad.items():
        assert main(["export", *given]) == code
        assert f"vmonarch export: error: {message}" in capsys.readouterr().err
        assert not list(tmp_path.glob("*m*.partial*"))
