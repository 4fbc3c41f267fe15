"""The documents say what the committed JSON says, and nothing else can get in between."""

import functools
import json
import re
from pathlib import Path

import pytest

from vmonarch.eval.record import names_now
from vmonarch.eval.studies import tables

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"


def _json(table, folder):
    return folder / f"{tables.TABLES[table].source}.json"


@pytest.mark.parametrize("document", tables.DOCUMENTS)
def test_the_tables_of_a_document_are_those_of_the_json(document):
    text = (ROOT / document).read_text()
    assert tables.render(text, BENCHMARKS) == text, "run python -m vmonarch.eval.studies.tables"


def test_old_results_have_the_names_of_now_and_new_ones_keep_theirs():
    rows = {"vmonarch-refresh:refresh=6": "fast:cache=null", "near-lossless": ["fast", "full"]}
    now = {"near-lossless:refresh=6": "stack-fast:cache=null", "stack-near-lossless": ["stack-fast", "full"]}
    old = {"date": "2026-11-27", "command": "bench --methods fast", "rows": rows}
    assert names_now({"runs": [old]}) == {"runs": [old | {"rows": now}]}
    new = {"created": "2026-11-28T00:00:00", "rows": now | {"fast": "near-lossless"}}
    assert names_now(new) == new


def test_every_table_stands_in_some_document():
    found = {m["name"] for document in tables.DOCUMENTS for m in tables._BLOCK.finditer((ROOT / document).read_text())}
    assert found == set(tables.TABLES)


def test_a_prompt_score_is_what_eval_calls_so_in_every_table():
    """Shares of videos that show all three attributes have another name and another key."""
    named = set()
    for document in tables.DOCUMENTS:
        for match in tables._BLOCK.finditer((ROOT / document).read_text()):
            keys = _json(match["name"], BENCHMARKS).read_text()
            for heading, key in (("prompt score", '"prompt_score": '), ("all three", '"all": ')):
                if re.search(rf"^\|.*{heading}.*\|\n\| -", match[0], re.M):
                    assert key in keys, (match["name"], heading)
                    named.add(heading)
    assert named == {"prompt score", "all three"}


def test_a_changed_number_changes_the_table(tmp_path):
    runs = json.loads(_json("e2e", BENCHMARKS).read_text())["runs"]
    with_videos = max(i for i, run in enumerate(runs) if run["cases"][0]["rows"][0]["video_s"])
    paths = {
        **dict.fromkeys(("embedded-model", "based-embedded"), ("summary", "full", "shape")),
        "demo": ("means", "full", "seconds"),
        **dict.fromkeys(
            ("kernels-h200", "speed", "flash-bias-h200", "based-h200"), ("cases", 0, "rows", 0, "ms", "median")
        ),
        **dict.fromkeys(tables.STORED, ("tables", 0, "rows", 1, 1)),
        "kernel-log": ("sections", 0, "entries", 0, "seen"),
        **dict.fromkeys(("train-14b", "train-lora-1.3b"), ("rows", 1, "seconds", 0)),
        "train-h200": ("cases", 0, "rows", 1, "ms", "median"),
        "e2e": ("runs", 0, "cases", 0, "rows", 0, "step_s", "median"),
        **dict.fromkeys(("stack", "few-steps-speed"), ("runs", 0, "cases", 0, "rows", -1, "video_s")),
        **dict.fromkeys(("few-steps", "few-steps-plan"), ("rows", 3, "work")),
        "video": ("runs", with_videos, "cases", 0, "rows", 0, "video_s"),
        **dict.fromkeys(("gpu-fits", "gpu-memory", "gpu-others"), ("runs", -1, "hardware")),
        **dict.fromkeys(("norm", "guidance", "families", "sequence"), ("cases", 0, "rows", 0, "ms", "median")),
        **dict.fromkeys(
            ("finetune-embedded", "finetune-embedded-1500"),
            ("results", "vmonarch", "validation_loss", "after"),
        ),
        "finetune-recipe": (
            *("results", "vmonarch:plan=embedded-1.00-refined, 500 updates"),
            *("validation_loss", "after"),
        ),
        **dict.fromkeys(
            ("trained-embedded", "trained-proxy", "trained-proxy-second", "trained-tries", "trained-tries-plans"),
            ("runs", 1, "checks", -1, "flow", 0),
        ),
        "parallel": ("rows", 0, "ms", "median"),
        "parallel-compiled": ("rows", 0, "ms", "median"),
        "fidelity": ("evaluations", "proxy-refresh", "statistics", "vmonarch", "psnr", "mean"),
        "comfyui": ("compared", 1, "to_diffusers"),
        **{
            name: ("evaluations", table.make.keywords["name"], "statistics", "vmonarch", "psnr", "mean")
            for name, table in tables.TABLES.items()
            if isinstance(table.make, functools.partial)
        },
        "stack-fidelity": ("evaluations", "stack", "statistics", "fast", "psnr", "mean"),
        "eval-demo": ("statistics", "vmonarch", "psnr", "mean"),
        "parallel-bytes": ("cases", 0, "by_frames", "frames"),
        "joint": ("attention", "kl"),
        "support": ("models", "HunyuanVideoTransformer3DModel", "`apply`", "failed"),
        "mqar": ("models", 0, "recall", "1024", "256"),
    }
    for name in tables.TABLES:
        changed = _json(name, tmp_path)
        # Some tables share a JSON.
        results = json.loads((changed if changed.exists() else _json(name, BENCHMARKS)).read_text())
        *path, key = paths.get(name, ("seconds", "demo"))
        numbers = results
        for step in path:
            numbers = numbers[step]
        numbers[key] += ", not" if isinstance(numbers[key], str) else 7.7
        changed.write_text(json.dumps(results))
    for document in tables.DOCUMENTS:
        for match in tables._BLOCK.finditer((ROOT / document).read_text()):
            assert tables.render(match[0], tmp_path) != tables.render(match[0], BENCHMARKS), match["name"]


def test_links_and_pictures_of_the_documents_exist():
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "finetune" / "embedded" / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} points at {target}"
