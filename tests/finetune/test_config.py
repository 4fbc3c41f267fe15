"""Settings of a finetune run: errors that name the key, and the learning rate."""

import math

import pytest

from vmonarch.configs import InputError
from vmonarch.finetune.config import FinetuneConfig
from vmonarch.pipelines.config import build_config

DATA = {"data": {"path": "clips"}}


BAD = {
    "no-data": ({"data": {"path": ""}}, "data.path is missing"),
    "unknown-in-a-group": ({"optimizer": {"lr": 3}}, "optimizer.lr is no known key"),
    "group-of-another-kind": ({"optimizer": 3}, "optimizer must be a mapping"),
    "text-for-a-number": ({"steps": "many"}, "steps must be an integer, got 'many'"),
    "ema-of-one": ({"ema": 1.0}, r"ema must be in \[0, 1\), got 1.0"),
    "infinite": ({"objective": {"mean": -math.inf}}, r"objective.mean must be in \(-inf, inf\), got -inf"),
    "part": ({"checkpoints": {"waive": ["model"]}}, "checkpoints.waive must be one of loader, random, got"),
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
        build_config(FinetuneConfig, DATA, values)


@pytest.mark.parametrize("schedule,middle,end", [("constant", 1.0, 1.0), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1)])
def test_the_learning_rate_warms_up_and_decays(schedule, middle, end):
    options = {"learning_rate": 2.0, "schedule": schedule, "warmup": 4, "final": 0.1}
    config = build_config(FinetuneConfig, DATA, {"steps": 104, "optimizer": options})
    assert [config.learning_rate(step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert config.learning_rate(4) == 2.0
    assert config.learning_rate(54) == pytest.approx(2 * middle) and config.learning_rate(104) == pytest.approx(2 * end)
