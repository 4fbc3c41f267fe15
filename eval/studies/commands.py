"""Time the Makefile's commands on a clean clone: `python -m vmonarch.eval.studies.commands`."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vmonarch.eval.record import script_parser, script_record
from vmonarch.files import write_json

ROOT = Path(__file__).resolve().parents[2]
# `make .venv/.ready` installs; the others then find the environment ready.
TARGETS = {"install": ".venv/.ready", "demo": "demo", "finetune-demo": "finetune-demo", "test": "test"}


def time_commands(root: Path) -> dict[str, Any]:
    """Clone `root`, run each target of `TARGETS` in the clone, and return what they took.

    Raises:
        subprocess.CalledProcessError: a command failed; its output is on the terminal.
    """
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "vmonarch"
        subprocess.run(["git", "clone", "--quiet", str(root), str(clone)], check=True)
        for name, target in TARGETS.items():
            started = time.perf_counter()
            subprocess.run(["make", target], cwd=clone, check=True)
            seconds[name] = round(time.perf_counter() - started, 1)
    return {**script_record("studies.commands", [], "cpu"), "seconds": seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = script_parser("studies.commands", __doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks" / "commands.json")
    options = parser.parse_args(arguments)
    result = time_commands(ROOT)
    write_json(options.output, result)
    print(json.dumps(result["seconds"]))


if __name__ == "__main__":
    main()
