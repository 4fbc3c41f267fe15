"""Run the tests that need a GPU, and keep what came of it: `python -m vmonarch.eval.studies.gpu_tests`.

CI has no GPU, so the JSON and the log that this writes are committed beside the benchmarks.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vmonarch.eval.record import script_parser
from vmonarch.files import write_json
from vmonarch.pipelines.environment import environment

ROOT = Path(__file__).resolve().parents[2]
OUTCOMES = ("failure", "error", "skipped")


def summarise(report: str) -> dict[str, Any]:
    """Count the outcomes in a JUnit report, and name the tests that failed or were skipped.

    Raises:
        ValueError: the report holds no test; nothing was shown then.
    """
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    named: dict[str, list[str]] = {"failed": [], "skipped": []}
    seconds = 0.0
    for case in ElementTree.fromstring(report).iter("testcase"):
        seconds += float(case.get("time", 0))
        kinds = {child.tag for child in case} & set(OUTCOMES)
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if kinds else "passed"
        counts[outcome] += 1
        if outcome in named:
            named[outcome].append(f"{case.get('classname')}::{case.get('name')}")
    if not sum(counts.values()):
        raise ValueError("the report holds no test")
    return {"counts": counts, **named, "seconds": round(seconds, 1)}


def without_paths(text: str) -> str:
    """`text` without the folders of this machine: they tell a reader nothing."""
    # The environment may lie in the checkout, and that among temporary files.
    for folder, name in ((sys.prefix, "PYTHON"), (str(ROOT), "."), (tempfile.gettempdir(), "TMP")):
        text = text.replace(folder, name)
    return text


def run(tests: Sequence[str], log: Path, processes: int = 1) -> dict[str, Any]:
    """Run pytest on the tests marked `gpu`, write its output to `log`, and return the record of the run.

    Most of the time goes into compiling kernels; several `processes` (pytest-xdist) do it side by side.
    """
    import torch

    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "report.xml"
        command = ["pytest", "-m", "gpu", *tests, *(["-n", str(processes)] if processes > 1 else [])]
        # Straight into its place: an interrupted run is long, too, and leaves what it has shown.
        with log.open("w") as output:
            subprocess.run(
                [sys.executable, "-m", *command, f"--junitxml={junit}", "--durations=20"],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        log.write_text(without_paths(log.read_text()))
        if not junit.exists():
            raise RuntimeError(f"pytest wrote no report; its output is in {log}")
        summary = summarise(junit.read_text())
    about = environment("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": about["device_name"],
        "command": shlex.join(["python", "-m", *command]),
        "environment": about,
        **summary,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 if a test failed or none passed."""
    parser = script_parser("studies.gpu_tests", __doc__)
    parser.add_argument("tests", nargs="*", default=["tests"], help="test files or folders (default: tests)")
    parser.add_argument("--output", type=Path, required=True, help="JSON to write; the log goes beside it")
    parser.add_argument("--processes", type=int, default=1, help="run the tests in this many processes")
    options = parser.parse_args(arguments)
    record = run(options.tests, options.output.with_suffix(".log"), options.processes)
    write_json(options.output, record)
    print(json.dumps({"hardware": record["hardware"], **record["counts"], "seconds": record["seconds"]}))
    for name in record["failed"]:
        print("failed", name)
    return 1 if record["failed"] or not record["counts"]["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
