"""Settings of a finetune run: errors that name the key, and the learning rate."""

import pytest

from vmonarch.configs import InputError
from vmonarch.finetune.config import FinetuneConfig
from vmonarch.pipelines.config import build_config

DATA = {"data": {"path": "clips"}}
BAD = (
    ({"data": {"path": ""}}, "data.path is missing"),
    ({"data": {"bad_fraction": 0.1}}, "data.bad_fraction"),
    ({"ema": 1.0}, r"ema must be in \[0, 1\), got 1.0"),
    ({"attention": {"coarse": 0}}, "attention.coarse must be"),
    ({"attention": "near-lossless"}, "attention.refresh must be null, as residuals have no gradient"),
    ({"lora": {"rank": 4, "targets": []}}, "lora.targets must name at least one layer"),
    ({"sequence_parallel_size": 2, "validation": {"videos_every": 5}}, "videos_every must be 0 with"),
    ({"validation": {"videos_every": 5}}, "validation.prompts must hold a prompt"),
)


def test_bad_settings_are_named():
    for values, message in BAD:
        with pytest.raises(InputError, match=message):
            build_config(FinetuneConfig, DATA, values)


def test_the_learning_rate_warms_up_and_decays():
    for schedule, later in (("constant", [2.0, 2.0, 2.0]), ("cosine", [2.0, 1.0, 0.0])):
        options = {"learning_rate": 2.0, "schedule": schedule, "warmup": 4}
        config = build_config(FinetuneConfig, DATA, {"steps": 104, "optimizer": options})
        assert [config.learning_rate(step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
        assert [config.learning_rate(step) for step in (4, 54, 104)] == pytest.approx(later)
