"""Settings of a finetune run: presets, overrides, and errors that name the key."""

import argparse
import math
import re
import shlex
from pathlib import Path

import pytest

from vmonarch.cli import preprocess as preprocess_command
from vmonarch.cli.finetune import read_settings
from vmonarch.configs import FOLDER, InputError, preset_names, read_yaml
from vmonarch.finetune.config import finetune_config

DATA = {"data": {"path": "clips"}}


@pytest.mark.parametrize("name", preset_names("finetune"))
def test_presets_are_read_and_written_back(name):
    config = finetune_config(read_yaml(name, group="finetune"))
    assert config.data.path and config.attention.name == ("based" if "based" in name else "vmonarch")
    assert finetune_config(config.to_dict()) == config


ROOT = Path(__file__).resolve().parents[2]


def commands(file, name):
    """The words after every command of this name that a file shows."""
    text = file.read_text().replace("\\\n", " ")
    return [shlex.split(words) for words in re.findall(rf"^[#\s].*{name} +([^`…\n]+)$", text, re.M)]


def prepared(words):
    parser = argparse.ArgumentParser()
    preprocess_command.add_arguments(parser)
    return preprocess_command.read_settings(parser.parse_intermixed_args(words))


def size(data):
    return f"{data.num_frames}×{data.height}×{data.width}"


def size_of_preset(group, name):
    """What the comment at the top says."""
    [found] = re.findall(r"lips of (\d+×\d+×\d+)", (FOLDER / group / f"{name}.yaml").read_text().partition("\n")[0])
    return found


@pytest.mark.parametrize(
    "file",
    ["docs/finetuning.md", "Makefile", *(f"configs/finetune/{name}.yaml" for name in ("embedded", "embedded-based"))],
)
def test_the_commands_that_are_shown_make_the_clips_that_are_trained_on(file):
    made = [prepared(words) for words in commands(ROOT / file, "vmonarch preprocess")]
    [words] = commands(ROOT / file, "vmonarch finetune") or [["--config", Path(file).stem]]
    assert words[0] == "--config"
    run = read_settings(words[1], words[2:])
    assert {data.output for data in made} == {run.data.path, run.data.validation} - {None}
    assert {data.model for data in made} == {run.model}
    if run.model != "embedded":
        assert {size(data) for data in made} == {size_of_preset("finetune", words[1])}


@pytest.mark.parametrize("name", [name for name in preset_names("finetune") if name.startswith("wan")])
def test_presets_of_one_name_make_and_take_the_same_clips(name):
    clips = prepared(["videos", "--captions", "captions.jsonl", "--output", "data", "--config", name])
    run = read_settings(name, [])
    assert clips.model == run.model and run.batch_size == 8
    assert size(clips) == size_of_preset("finetune", name) == size_of_preset("preprocess", name)
    row = f"| `{name}` | `{run.model}` | {size(clips)} | {clips.fps:g} | {run.steps} |"
    assert row in (ROOT / "docs" / "finetuning.md").read_text()


def test_overrides_lie_over_the_file_key_by_key():
    below = {**DATA, "attention": "vmonarch-t3", "optimizer": {"clip": 2.0, "warmup": 5}}
    config = finetune_config(below, {"optimizer": {"clip": 3}}, {"attention": {"coarse": 2}}, {"data": {"workers": 0}})
    assert (config.optimizer.clip, config.optimizer.warmup) == (3.0, 5)
    assert config.attention.name == "vmonarch-t3" and config.attention.options["coarse"] == 2
    assert config.data.path == "clips" and config.data.workers == 0
    # An adapter that is shipped leaves nothing behind.
    untrained = finetune_config(DATA, {"attention": "based"}, {"attention": {"adapter": None, "feature_dim": 4}})
    assert untrained.attention.to_dict()["adapter"] is None


BAD = {
    "no-data": ({"data": {"path": ""}}, "data.path is missing"),
    "unknown-in-a-group": ({"optimizer": {"lr": 3}}, "optimizer.lr is no known key"),
    "group-of-another-kind": ({"optimizer": 3}, "optimizer must be a mapping"),
    "text-for-a-number": ({"steps": "many"}, "steps must be an integer, got 'many'"),
    "dropout": ({"data": {"caption_dropout": 1.5}}, r"data.caption_dropout must be in \[0, 1\], got 1.5"),
    "ema-of-one": ({"ema": 1.0}, r"ema must be in \[0, 1\), got 1.0"),
    "infinite": ({"objective": {"mean": -math.inf}}, r"objective.mean must be in \(-inf, inf\), got -inf"),
    "part": ({"checkpoints": {"waive": ["model"]}}, "checkpoints.waive must be one of ema, loader, random, got"),
    "zero-rate": ({"optimizer": {"learning_rate": 0.0}}, r"optimizer.learning_rate must be in \(0, inf\), got 0.0"),
    "attention": ({"attention": "sparse"}, "attention must be one of"),
    "attention-option": ({"attention": {"coarse": 0}}, "attention.coarse must be"),
    "no-target": ({"lora": {"rank": 4, "targets": []}}, "lora.targets must name at least one layer"),
    "videos-of-parts": (
        {"sequence_parallel_size": 2, "validation": {"videos_every": 5}},
        "videos_every must be 0 with",
    ),
    "no-prompt": ({"validation": {"videos_every": 5}}, "validation.prompts must hold a prompt"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_named(name):
    values, message = BAD[name]
    with pytest.raises(InputError, match=message):
        finetune_config(DATA, values)


@pytest.mark.parametrize("schedule,middle,end", [("constant", 1.0, 1.0), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1)])
def test_the_learning_rate_warms_up_and_decays(schedule, middle, end):
    options = {"learning_rate": 2.0, "schedule": schedule, "warmup": 4, "final": 0.1}
    config = finetune_config(DATA, {"steps": 104, "optimizer": options})
    assert [config.learning_rate(step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert config.learning_rate(4) == 2.0
    assert config.learning_rate(54) == pytest.approx(2 * middle) and config.learning_rate(104) == pytest.approx(2 * end)
