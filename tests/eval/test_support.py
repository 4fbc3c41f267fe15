"""What has been tried with which transformer: which tests show it, and that they are there."""

import re
from pathlib import Path

import pytest

from vmonarch.eval.studies import support

TESTS = Path(__file__).parents[1]
MODELS = {"hunyuan": "HunyuanVideoTransformer3DModel", "hunyuan15": "HunyuanVideo15Transformer3DModel"}


def report(*cases):
    tests = "".join(f'<testcase name="{name}">{inside}</testcase>' for name, inside in cases)
    return f"<testsuites><testsuite>{tests}</testsuite></testsuites>"


def everything(parameter):
    return [(f"{test}[{prefix}{parameter}]", "") for tests, prefix in support.FEATURES.values() for test in tests]


def test_the_tests_are_there():
    source = "".join(path.read_text() for path in TESTS.glob("**/test_*.py"))
    named = {test for tests, _ in support.FEATURES.values() for test in tests}
    assert named <= set(re.findall(r"def (test_\w+)\(", source))


def test_every_family_beyond_wan_has_a_name_in_the_tests():
    models = support.tiny_models()
    counts = support.count([report(*everything("hunyuan"))], models)
    assert set(counts) == set(models.values())
    assert models["skyreels"] == models["hunyuan-i2v"] == MODELS["hunyuan"]


@pytest.mark.parametrize(
    "parameter, prefix, expected",
    [
        ("hunyuan15", "", "hunyuan15"),
        ("hunyuan-i2v", "", "hunyuan"),
        ("grid0-hunyuan", "", None),
        ("joint-hunyuan15", "joint-", "hunyuan15"),
        ("joint-gradients-hunyuan", "joint-", None),
        ("joint-gradients-hunyuan", "joint-gradients-", "hunyuan"),
    ],
)
def test_parameters_name_models(parameter, prefix, expected):
    assert support.model_of(parameter, prefix, MODELS) == MODELS.get(expected)


def test_what_failed_or_was_skipped_does_not_count_as_shown():
    first, second = MODELS.values()
    others = [(name, "<skipped/>") for name, _ in everything("hunyuan15")]
    counts = support.count([report(*everything("hunyuan"), *others)], MODELS)
    assert all(features == {"passed": features["passed"], "failed": 0} for features in counts[first].values())
    results = {"models": {first: counts[first], second: counts[second]}, "date": "2026-11-26", "command": "x"}
    table = support.support_table(results)
    assert f"| HunyuanVideo |{' yes |' * len(support.FEATURES)}" in table
    assert f"| HunyuanVideo15 |{' – |' * len(support.FEATURES)}" in table
    results["models"] = {first: counts[first], second: counts[first]}
    assert f"| HunyuanVideo, HunyuanVideo15 |{' yes |' * len(support.FEATURES)}" in support.support_table(results)
    failed = (f"{support.FEATURES['`refresh`'][0][0]}[hunyuan15]", "<failure/>")
    results["models"] = support.count([report(*everything("hunyuan"), failed)], MODELS)
    assert results["models"][second]["`refresh`"] == {"passed": 0, "failed": 1}
    assert "| no |" in support.support_table(results)


def test_a_test_of_another_name_is_missed():
    with pytest.raises(ValueError, match="no test of `generate`"):
        support.count([report(*everything("hunyuan")[:-2])], MODELS)
