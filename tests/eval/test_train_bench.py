"""The benchmark of a training step: what it measures and writes, on a tiny model, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch

from vmonarch.cli import main
from vmonarch.eval.bench import train
from vmonarch.eval.wan_models import read_model_config


@pytest.fixture
def words(tiny_yaml, tmp_path):
    return ["--model", tiny_yaml, "--size", "32", "64", "--output", str(tmp_path / "train.json"),
            "--device", "cpu", "--rounds", "1"]  # fmt: skip


def test_every_size_and_method_is_measured(words, tmp_path):
    assert main(["bench", "train", *words, "--frames", "5", "9"]) == 0
    document = json.loads((tmp_path / "train.json").read_text())
    assert [(case["frames"], case["grid"], case["tokens"]) for case in document["cases"]] == [
        (5, [2, 2, 4], 16),
        (9, [3, 2, 4], 24),
    ]
    for case in document["cases"]:
        assert [row["method"] for row in case["rows"]] == ["full", "vmonarch"]
        assert all(row["ms"]["median"] > 0 and row["rounds"] == 1 for row in case["rows"])
    assert str(Path(words[1]).parent) not in document["command"]
    table = train.train_table(document)
    assert table.count("full (cuDNN)") == 2 and "9×32×64" in table


def test_no_size_is_begun_after_the_budget(words, tmp_path):
    main(["bench", "train", *words, "--frames", "5", "--budget", "1e-9"])
    document = json.loads((tmp_path / "train.json").read_text())
    assert document["cases"] == [] and document["left_out"] == [5]


def test_a_step_trains_all_weights_with_the_attention_that_is_set(tiny_yaml):
    config = read_model_config(tiny_yaml)
    step = train.TrainingStep(config.transformer, (2, 4, 8), torch.device("cpu"), "fp32")
    seen = []
    from vmonarch import VMonarchProcessor, apply

    class Watched(VMonarchProcessor):
        def attend(self, *inputs):
            seen.append(inputs[3])
            return super().attend(*inputs)

    apply(step.transformer, Watched())
    before = [parameter.detach().clone() for parameter in step.parameters]
    step()
    # Both layers forward, and once more because of gradient checkpointing.
    assert [tuple(grid) for grid in seen] == [(2, 2, 4)] * 4
    assert all((new != old).any() for new, old in zip(step.parameters, before, strict=True))


@pytest.mark.parametrize(
    "changes,message",
    [
        (["--frames", "60"], "--frames must have frames 1 more than a multiple of 4, got 60"),
        (["--size", "32", "60"], "--frames must have a width that is a multiple of 16, got 60"),
        (["--methods", "vmonarch"], "--methods must hold full"),
        (["--methods", "full", "sparse"], "--methods must be one of"),
        (["--model", "wan-nothing"], "--model must be a YAML file or one of wan2.1-1.3b"),
        (["--rounds", "0"], "--rounds must be above 0, got 0"),
        (["--device", "cuda:99"], "device"),
    ],
)
def test_bad_arguments_are_named(words, capsys, changes, message):
    assert main(["bench", "train", *words, *changes]) == 2
    assert message in capsys.readouterr().err
