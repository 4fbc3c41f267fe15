"""What has been tried with which transformer beyond Wan: `python -m vmonarch.eval.studies.support REPORT …`.

    pytest tests/processors tests/cli/test_generate_families.py --junitxml=cpu.xml
    pytest -m gpu tests/processors/test_families.py --junitxml=gpu.xml
    python -m vmonarch.eval.studies.support cpu.xml gpu.xml --output docs/benchmarks/support.json

counts, in JUnit reports of pytest, the tests of every feature by the transformer that they are of.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vmonarch.eval.record import script_parser, script_record
from vmonarch.eval.render.table import markdown
from vmonarch.eval.studies.gpu_tests import OUTCOMES
from vmonarch.families import FAMILIES
from vmonarch.files import write_json

TINY_MODELS = Path(__file__).resolve().parents[2] / "tests" / "support"
# By feature, the tests that show it, and how their parameter begins before the name of a tiny model.
FEATURES: dict[str, tuple[tuple[str, ...], str]] = {
    "`apply`": (
        (
            "test_with_all_blocks_exact_the_model_is_the_stock_one",
            "test_video_rows_are_monarch_and_exact_rows_in_one_softmax",
            "test_only_the_self_attention_of_the_video_is_replaced",
            "test_it_is_restored_copied_and_pickled",
        ),
        "",
    ),
    "`set_attn_processor`": (("test_set_attn_processor_applies",), ""),
    "kernels, compiled blocks": (("test_gpu_kernels_compute_the_same_and_blocks_compile",), ""),
    "`dense_steps`": (("test_pipelines_tell_the_step",), ""),
    "`refresh`": (("test_pipelines_share_the_last_residual_of_a_branch",), ""),
    "several processes": (("test_ranks_compute_what_one_process_computes",), "joint-"),
    "their gradients": (("test_ranks_compute_what_one_process_computes",), "joint-gradients-"),
    "`generate`": (("test_full_attention_is_the_stock_pipeline", "test_a_record_repeats_every_bit"), ""),
}
_SUFFIX = "Transformer3DModel"
# Tiny pipelines that are named after none of the tiny models.
_OTHER_NAMES = {"skyreels": "hunyuan"}


def tiny_models() -> dict[str, str]:
    """Class of the transformer by the names that tests have for it."""
    sys.path.insert(0, str(TINY_MODELS))
    try:
        from tiny_families import FAMILIES as tiny
    finally:
        sys.path.remove(str(TINY_MODELS))
    models = {name: case.model for name, case in tiny.items()}
    return models | {name: models[of] for name, of in _OTHER_NAMES.items()}


def model_of(parameter: str, prefix: str, models: dict[str, str]) -> str | None:
    """The transformer that the parameter of a test is of; None if it is of none."""
    named = sorted(models, key=len, reverse=True)
    found = re.match(f"{re.escape(prefix)}({'|'.join(map(re.escape, named))})", parameter)
    return None if found is None else models[found[1]]


def count(reports: Iterable[str], models: dict[str, str]) -> dict[str, dict[str, dict[str, int]]]:
    """{transformer: {feature: {"passed": …, "failed": …}}} of JUnit reports; what was skipped shows nothing.

    Raises:
        ValueError: no test of a feature is in the reports, so that it has another name now.
    """
    counts: dict[str, dict[str, dict[str, int]]] = {
        name: {feature: {"passed": 0, "failed": 0} for feature in FEATURES}
        for name, family in FAMILIES.items()
        if not family.own
    }
    seen = set()
    for report in reports:
        for case in ElementTree.fromstring(report).iter("testcase"):
            test, _, parameter = case.get("name", "").removesuffix("]").partition("[")
            kinds = {child.tag for child in case} & set(OUTCOMES)
            for feature, (tests, prefix) in FEATURES.items():
                model = model_of(parameter, prefix, models) if test in tests else None
                if model is not None:
                    seen.add(feature)
                    if kinds != {"skipped"}:
                        counts[model][feature]["failed" if kinds else "passed"] += 1
    missing = [feature for feature in FEATURES if feature not in seen]
    if missing:
        raise ValueError(f"the reports hold no test of {', '.join(missing)}")
    return counts


def support_table(results: dict[str, Any]) -> str:
    """yes where all tests of a feature have passed, a dash where there was none; models that are alike share a row."""

    def cell(counts: dict[str, int]) -> str:
        return "no" if counts["failed"] else "yes" if counts["passed"] else "–"

    alike: dict[tuple[str, ...], list[str]] = {}
    for name, features in results["models"].items():
        alike.setdefault(tuple(map(cell, features.values())), []).append(name.removesuffix(_SUFFIX))
    rows = [[", ".join(names), *cells] for cells, names in sorted(alike.items(), key=lambda row: -row[0].count("yes"))]
    passed = sum(counts["passed"] for features in results["models"].values() for counts in features.values())
    text = f"{passed} tests with tiny random models, {results['date'][:10]}. Made by `{results['command']}`."
    return f"{markdown([f'…{_SUFFIX}', *FEATURES], rows)}\n{text}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = script_parser("studies.support", __doc__)
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT", help="JUnit reports of pytest")
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    options = parser.parse_args(arguments)
    record = script_record("studies.support", arguments, "cpu")
    models = count((report.read_text() for report in options.reports), tiny_models())
    write_json(options.output, {**record, "models": models})
    print(support_table({**record, "models": models}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
