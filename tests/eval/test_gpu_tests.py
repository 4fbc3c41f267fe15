"""The record of a run of GPU tests."""

import json
import sys
import tempfile

import pytest
import torch

from vmonarch.eval.studies.gpu_tests import ROOT, main, summarise, without_paths

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="good" time="1.5"/>
<testcase classname="tests.a" name="bad" time="0.5"><failure message="no"/></testcase>
<testcase classname="tests.a" name="broken" time="0"><error message="no"/></testcase>
<testcase classname="tests.a" name="left[out]" time="0"><skipped message="needs a CUDA device"/></testcase>
</testsuite></testsuites>"""


def test_outcomes_are_counted_and_named():
    assert summarise(REPORT) == {
        "counts": {"passed": 1, "failed": 2, "skipped": 1},
        "failed": ["tests.a::bad", "tests.a::broken"],
        "skipped": ["tests.a::left[out]"],
        "seconds": 2.0,
    }


def test_a_report_without_tests_shows_nothing():
    with pytest.raises(ValueError, match="the report holds no test"):
        summarise("<testsuites><testsuite/></testsuites>")


@pytest.mark.parametrize("body,code,counts", [
    ("def test_it(): pass", 0, {"passed": 1, "failed": 0, "skipped": 0}),
    ("def test_it(): assert False", 1, {"passed": 0, "failed": 1, "skipped": 0}),
    ("def test_it(): pytest.skip('no')", 1, {"passed": 0, "failed": 0, "skipped": 1}),
], ids=["passes", "fails", "skips"])  # fmt: skip
def test_a_run_is_recorded(tmp_path, body, code, counts):
    test = tmp_path / "test_some.py"
    test.write_text(f"import pytest\npytestmark = pytest.mark.gpu\n{body}\n")
    assert main([str(test), "--output", str(tmp_path / "gpu.json"), "--processes", "2"]) == code
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["counts"] == counts
    assert record["command"] == f"python -m pytest -m gpu {test} -n 2" and record["environment"]["packages"]["torch"]
    assert record["hardware"] and (torch.cuda.is_available() or "NVIDIA" not in record["hardware"])
    assert "test_some" in (tmp_path / "gpu.log").read_text()


def test_a_run_that_dies_is_an_error(tmp_path):
    (tmp_path / "test_some.py").write_text("import os\nos._exit(3)\n")
    with pytest.raises(RuntimeError, match="pytest wrote no report"):
        main([str(tmp_path / "test_some.py"), "--output", str(tmp_path / "gpu.json")])
    assert not (tmp_path / "gpu.json").exists()


def test_no_folder_of_the_machine_gets_into_the_log(tmp_path):
    text = without_paths(f"rootdir: {ROOT}\n{sys.prefix}/lib/x.py: warning\n{tempfile.gettempdir()}/report")
    assert text == "rootdir: .\nPYTHON/lib/x.py: warning\nTMP/report"
