"""Run the tests that need a GPU, and keep what came of it: `python tests/support/gpu_tests.py tests --output JSON`.

CI has no GPU, so the JSON and the log that this writes are committed beside the benchmarks.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch

from vmonarch.eval.bench.machine import provenance
from vmonarch.files import write_json

ROOT = Path(__file__).resolve().parents[2]


def outcome(case):
    """passed, failed or skipped."""
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def summarise(report):
    """Count the outcomes in a JUnit report, and name the tests that failed or were skipped."""
    found = {"passed": [], "failed": [], "skipped": []}
    for case in ElementTree.fromstring(report).iter("testcase"):
        found[outcome(case)].append(f"{case.get('classname')}::{case.get('name')}")
    return {"counts": {name: len(tests) for name, tests in found.items()}, **found, "passed": len(found["passed"])}


def main(arguments=None):
    """Exit code 1 if a test failed or none passed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", default=["tests"], help="test files or folders; other options are pytest's")
    parser.add_argument("--output", type=Path, required=True, help="JSON to write; the log goes beside it")
    options, others = parser.parse_known_args(arguments)
    command, log = ["pytest", "-v", "-m", "gpu", *options.words, *others], options.output.with_suffix(".log")
    shown = shlex.join(["python", "-m", *command])
    record = provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu"), shown)
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "report.xml"
        # Straight into its place: an interrupted run is long, too, and leaves what it has shown.
        with log.open("w") as output:
            words = [sys.executable, "-m", *command, f"--junitxml={junit}", "--durations=20"]
            subprocess.run(words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False)
        # Folders of this machine tell a reader nothing; the environment may lie in the checkout.
        text = log.read_text()
        for place, name in ((sys.prefix, "PYTHON"), (str(ROOT), "."), (tempfile.gettempdir(), "TMP")):
            text = text.replace(place, name)
        log.write_text(text)
        if not junit.exists():
            sys.exit(f"pytest wrote no report; its output is in {log}")
        record |= summarise(junit.read_text())
    write_json(options.output, record)
    print(record["counts"], *record["failed"], sep="\n")
    return 1 if record["failed"] or not record["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
