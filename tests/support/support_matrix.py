"""What has been tried with which transformer beyond Wan, as a table.

    pytest tests/processors tests/cli/test_generate_families.py --junitxml=cpu.xml
    pytest -m gpu tests/processors/test_families.py --junitxml=gpu.xml
    python tests/support/support_matrix.py cpu.xml gpu.xml --output docs/benchmarks/support.json

counts, in JUnit reports of pytest, the tests of every feature by the transformer that they are of.
"""

import argparse
import re
import shlex
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch
from gpu_tests import outcome
from tiny_families import FAMILIES as TINY

from vmonarch.eval.bench.machine import provenance
from vmonarch.families import FAMILIES
from vmonarch.files import write_json

# By feature, the tests that show it, and how their parameter begins before the name of a tiny model.
FEATURES = {
    "`apply`": ("", (
        "test_with_all_blocks_exact_the_model_is_the_stock_one",
        "test_video_rows_are_monarch_and_exact_rows_in_one_softmax",
        "test_only_the_self_attention_of_the_video_is_replaced",
        "test_it_is_restored_copied_and_pickled",
    )),
    "`set_attn_processor`": ("", ("test_set_attn_processor_applies",)),
    "kernels, compiled blocks": ("", ("test_gpu_kernels_compute_the_same_and_blocks_compile",)),
    "`dense_steps`": ("", ("test_pipelines_tell_the_step",)),
    "`refresh`": ("", ("test_pipelines_share_the_last_residual_of_a_branch",)),
    "several processes": ("joint-", ("test_ranks_compute_what_one_process_computes",)),
    "their gradients": ("joint-gradients-", ("test_ranks_compute_what_one_process_computes",)),
    "`generate`": ("", ("test_full_attention_is_the_stock_pipeline", "test_a_record_repeats_every_bit")),
}  # fmt: skip
MODELS = {name: case.model for name, case in TINY.items()}
# A tiny pipeline that is named after none of the tiny models.
MODELS["skyreels"] = MODELS["hunyuan"]
NAMES = "|".join(sorted(map(re.escape, MODELS), key=len, reverse=True))
SUFFIX = "Transformer3DModel"


def count(reports):
    """{transformer: {feature: {"passed": …, "failed": …}}} of JUnit reports; what was skipped shows nothing.

    Raises:
        ValueError: no test of a feature is in the reports, so that it has another name now.
    """
    counts = {
        name: {feature: {"passed": 0, "failed": 0} for feature in FEATURES}
        for name, family in FAMILIES.items()
        if not family.own
    }
    seen = set()
    for case in (case for report in reports for case in ElementTree.fromstring(report).iter("testcase")):
        test, _, parameter = case.get("name", "").removesuffix("]").partition("[")
        for feature, (prefix, tests) in FEATURES.items():
            model = re.match(f"{prefix}({NAMES})", parameter) if test in tests else None
            if model:
                seen.add(feature)
                if outcome(case) != "skipped":
                    counts[MODELS[model[1]]][feature][outcome(case)] += 1
    if seen != set(FEATURES):
        raise ValueError(f"the reports hold no test of {', '.join(FEATURES.keys() - seen)}")
    return counts


def table(counts):
    """yes where all tests of a feature have passed, a dash where there was none; models that are alike share a row."""
    alike = {}
    for name, features in counts.items():
        cells = ("no" if n["failed"] else "yes" if n["passed"] else "–" for n in features.values())
        alike.setdefault(tuple(cells), []).append(name.removesuffix(SUFFIX))
    rows = [[", ".join(names), *cells] for cells, names in sorted(alike.items(), key=lambda row: -row[0].count("yes"))]
    return {"header": [f"…{SUFFIX}", *FEATURES], "rows": rows}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT", help="JUnit reports of pytest")
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    options = parser.parse_args(arguments)
    counts = count([report.read_text() for report in options.reports])
    words = map(str, [*options.reports, "--output", options.output])
    record = provenance(torch.device("cpu"), shlex.join(["python", "tests/support/support_matrix.py", *words]))
    passed = sum(n["passed"] for features in counts.values() for n in features.values())
    caption = f"{passed} tests with tiny random models, {record['date'][:10]}. Made by `{record['command']}`."
    write_json(options.output, record | {"models": counts, "tables": [table(counts)], "caption": caption})


if __name__ == "__main__":
    sys.exit(main())
