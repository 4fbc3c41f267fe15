"""What is made of pytest's reports: the record of a run on a GPU, and which transformers have been tried with what."""

import json
import re
import tempfile
from pathlib import Path

import gpu_tests
import pytest
import support_matrix

HUNYUAN, HUNYUAN15 = "HunyuanVideoTransformer3DModel", "HunyuanVideo15Transformer3DModel"


@pytest.mark.parametrize("body, code, counts", [
    ("def test_it(): pass", 0, {"passed": 1, "failed": 0, "skipped": 0}),
    ("def test_it(): assert False", 1, {"passed": 0, "failed": 1, "skipped": 0}),
    ("def test_it(): pytest.skip('no')", 1, {"passed": 0, "failed": 0, "skipped": 1}),
    ("import os\nos._exit(3)", "pytest wrote no report", None),
], ids=["passes", "fails", "skips", "dies"])  # fmt: skip
def test_a_run_is_recorded(tmp_path, body, code, counts):
    test, output = tmp_path / "test_some.py", tmp_path / "gpu.json"
    test.write_text(f"import pytest\npytestmark = pytest.mark.gpu\n{body}\n")
    if counts is None:
        with pytest.raises(SystemExit, match=code):
            gpu_tests.main([str(test), "--output", str(output)])
        assert not output.exists()
        return
    assert gpu_tests.main([str(test), "--output", str(output)]) == code
    record, log = json.loads(output.read_text()), (tmp_path / "gpu.log").read_text()
    assert record["counts"] == counts and record["command"] == f"python -m pytest -m gpu {test}"
    assert all(record[name] for name in ("date", "hardware", "environment"))
    assert "rootdir: " in log and not any(place in log for place in (str(gpu_tests.ROOT), tempfile.gettempdir()))


def report(*cases):
    tests = "".join(f'<testcase name="{name}">{inside}</testcase>' for name, inside in cases)
    return f"<testsuites><testsuite>{tests}</testsuite></testsuites>"


def everything(parameter):
    return [
        (f"{test}[{prefix}{parameter}]", "") for prefix, tests in support_matrix.FEATURES.values() for test in tests
    ]


def test_the_tests_that_show_a_feature_are_there():
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("**/test_*.py"))
    named = {test for _, tests in support_matrix.FEATURES.values() for test in tests}
    assert named <= set(re.findall(r"def (test_\w+)\(", source))
    assert set(support_matrix.count([report(*everything("hunyuan"))])) == set(support_matrix.MODELS.values())


def test_what_failed_or_was_skipped_does_not_count_as_shown():
    others = [(name, "<skipped/>") for name, _ in everything("hunyuan15")]
    # Other models by prefixes of names, and parameters that begin otherwise.
    others += [(name, "<failure/>") for name, _ in everything("grid0-hunyuan")]
    counts = support_matrix.count([report(*everything("hunyuan-i2v"), *others)])
    cells = {row[0]: set(row[1:]) for row in support_matrix.table(counts)["rows"]}
    assert cells["HunyuanVideo"] == {"yes"} and next(v for k, v in cells.items() if "HunyuanVideo15" in k) == {"–"}
    failed = (f"{support_matrix.FEATURES['`refresh`'][1][0]}[hunyuan]", "<failure/>")
    counts = support_matrix.count([report(*everything("hunyuan"), *everything("hunyuan15"), failed)])
    rows = {row[0]: row[1:] for row in support_matrix.table(counts)["rows"]}
    assert rows["HunyuanVideo"].count("no") == 1 and set(rows["HunyuanVideo15"]) == {"yes"}
    with pytest.raises(ValueError, match="no test of `generate`"):
        support_matrix.count([report(*everything("hunyuan")[:-2])])
