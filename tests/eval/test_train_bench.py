"""The benchmark of a training step: what it measures and writes, on a tiny model, and what it refuses."""

from pathlib import Path

import pytest
import torch

from vmonarch.eval.bench import train
from vmonarch.eval.wan_models import read_model_config


@pytest.fixture
def run(run_command, tiny_yaml):
    return lambda *words: run_command("train", "--model", tiny_yaml, "--size", "32", "64", "--rounds", "1", *words)


def test_every_size_and_method_is_measured(run, tiny_yaml):
    code, document = run("--frames", "5", "9")
    assert code == 0
    assert [(case["frames"], case["grid"], case["tokens"]) for case in document["cases"]] == [
        (5, [2, 2, 4], 16),
        (9, [3, 2, 4], 24),
    ]
    for case in document["cases"]:
        assert [row["method"] for row in case["rows"]] == ["full", "vmonarch"]
        assert all(row["ms"]["median"] > 0 and row["rounds"] == 1 for row in case["rows"])
    assert str(Path(tiny_yaml).parent) not in document["command"]
    table = train.train_table(document)
    assert table.count("full (cuDNN)") == 2 and "9×32×64" in table


def test_no_size_is_begun_after_the_budget(run):
    _, document = run("--frames", "5", "--budget", "1e-9")
    assert document["cases"] == [] and [entry["case"] for entry in document["left_out"]] == ["5x32x64"]


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
