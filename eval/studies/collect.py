"""Put evaluations together for the documents: `python -m vmonarch.eval.studies.collect FOLDER … --output FILE`.

With `--diagnosis`, of `vmonarch calibrate` with the same model and steps, every method that it can tell about also gets
what it loses in the attention itself (`vmonarch.eval.studies.fidelity`).

Each folder is one of `vmonarch eval`. Of its `evaluation.json` everything is kept but the single items (their prompts
and seeds follow from the settings, their numbers are in the means and intervals) and the place of a model's folder.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vmonarch.configs import InputError, read_document
from vmonarch.eval.calibrate.run import read_diagnosis
from vmonarch.eval.evaluate import EVALUATION_FORMAT
from vmonarch.eval.record import script_parser
from vmonarch.eval.summary import evaluation_table
from vmonarch.files import check_output, write_json

FORMAT = "vmonarch-evaluations-1"


def collect(folders: Sequence[Path], diagnosis: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The evaluations in folders, by the folders' names, in their order.

    Args:
        diagnosis: for the methods' "attention" (see the module).

    Raises:
        InputError: a folder holds no finished evaluation, two have one name, or the diagnosis is of another number of
            steps.
    """
    found: dict[str, Any] = {}
    for folder in folders:
        record = read_document("folder", folder / "evaluation.json", EVALUATION_FORMAT, "evaluation of `vmonarch eval`")
        if folder.name in found:
            raise InputError("folder", f"names must differ, or one would take the other's place: {folder.name!r}")
        items = record.pop("items")
        model = Path(record["config"]["model"])
        # Folders of this machine are nobody else's.
        record["config"]["model"] = model.name if model.is_absolute() else record["config"]["model"]
        found[folder.name] = {**record, "item_count": len(items)}
        if diagnosis is not None:
            found[folder.name]["attention"] = _attention(record, diagnosis)
    return {"format": FORMAT, "evaluations": found}


def _attention(record: Mapping[str, Any], diagnosis: Mapping[str, Any]) -> dict[str, Any]:
    """What the methods lose in the attention itself, by label."""
    from vmonarch.configs.methods import resolve_method
    from vmonarch.eval.studies.fidelity import attention_fidelity

    steps, diagnosed = record["config"]["steps"], diagnosis["about"]["config"]["steps"]
    if steps != diagnosed:
        raise InputError("diagnosis", f"must be of {steps} steps, as the evaluation, got one of {diagnosed}")
    methods = [resolve_method(entry) for entry in record["config"]["methods"]]
    return {method.label: attention_fidelity(diagnosis, method, steps) for method in methods}


def collection_table(results: Mapping[str, Any]) -> str:
    """A table for every evaluation under its name."""
    parts = [f"**{name}**\n\n{evaluation_table(record)}" for name, record in results["evaluations"].items()]
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = script_parser("studies.collect", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="output folders of `vmonarch eval`")
    parser.add_argument("--diagnosis", type=Path, help="diagnosis.json of `vmonarch calibrate`")
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    options = parser.parse_args(arguments)
    try:
        check_output(options.output)
        document = collect(options.folders, read_diagnosis(options.diagnosis) if options.diagnosis else None)
    except InputError as error:
        parser.error(str(error))
    write_json(options.output, document)
    print(collection_table(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
