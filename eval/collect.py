"""Put evaluations together for the documents: `python -m vmonarch.eval.collect FOLDER … --output FILE`.

Each folder is one of `vmonarch eval`. Of its `evaluation.json` everything is kept but the single items (their prompts
and seeds follow from the settings, their numbers are in the means and intervals) and the place of a model's folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vmonarch.configs import InputError
from vmonarch.eval.evaluate import EVALUATION_FORMAT, evaluation_table
from vmonarch.eval.kernel_bench import check_output, write_json

FORMAT = "vmonarch-evaluations-1"


def collect(folders: Sequence[Path]) -> dict[str, Any]:
    """The evaluations in folders, by the folders' names, in their order.

    Raises:
        InputError: a folder holds no finished evaluation, or two have one name.
    """
    found: dict[str, Any] = {}
    for folder in folders:
        path = folder / "evaluation.json"
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError("folder", f"{str(folder)!r} holds no finished evaluation: {error}") from error
        if not isinstance(record, dict) or record.get("format") != EVALUATION_FORMAT:
            raise InputError("folder", f"{str(path)!r} is no evaluation of `vmonarch eval`")
        if folder.name in found:
            raise InputError("folder", f"names must differ, or one would take the other's place: {folder.name!r}")
        items = record.pop("items")
        model = Path(record["config"]["model"])
        # Folders of this machine are nobody else's.
        record["config"]["model"] = model.name if model.is_absolute() else record["config"]["model"]
        found[folder.name] = {**record, "item_count": len(items)}
    return {"format": FORMAT, "evaluations": found}


def collection_table(results: Mapping[str, Any]) -> str:
    """A table for every evaluation under its name."""
    parts = [f"**{name}**\n\n{evaluation_table(record)}" for name, record in results["evaluations"].items()]
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m vmonarch.eval.collect", description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help="output folders of `vmonarch eval`")
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    options = parser.parse_args(arguments)
    try:
        check_output(options.output)
        document = collect(options.folders)
    except InputError as error:
        parser.error(str(error))
    write_json(options.output, document)
    print(collection_table(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
