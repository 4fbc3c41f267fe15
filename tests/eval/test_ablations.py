"""Tables and pictures of collected evaluations say what the JSON says."""

import copy
import json
from pathlib import Path

import pytest

from vmonarch.configs.methods import resolve_method
from vmonarch.eval.record import names_now
from vmonarch.eval.studies.ablations import FAMILIES, ablation_table, family, main, points
from vmonarch.eval.studies.collect import FORMAT

DEMO = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "eval-demo.json"


@pytest.fixture(scope="module")
def results():
    record = names_now(json.loads(DEMO.read_text()))
    record.pop("items")
    lost = {"kl": 0.05, "attention_error": 0.08, "output_error": 0.1}
    record["attention"] = {"full": dict.fromkeys(lost, 0.0), "vmonarch": lost, "vmonarch-t1": None}
    other = copy.deepcopy(record)
    return {"format": FORMAT, "evaluations": {"one": record, "two": other}}


def cells(table, label):
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_table_has_the_means_and_marks_what_differs(results):
    record = results["evaluations"]["one"]
    table = ablation_table(results, "one")
    row = cells(table, "vmonarch")
    assert row[1] == f"{100 * record['attention_flops']['vmonarch']:.1f} %"
    assert row[2] == f"{record['statistics']['vmonarch']['psnr']['mean']:.2f}"
    assert row[7:] == ["0.0500", "8.0", "10.0"]
    assert cells(table, "vmonarch-t1")[7:] == cells(table, "full")[7:] == ["–"] * 3
    assert record["command"] in table and "4 prompts × 1 seed" in table
    changed = copy.deepcopy(results)
    gaps = changed["evaluations"]["one"]["differences"]["vmonarch-t1"]
    gaps["psnr"] |= {"low": 0.1, "high": 0.3}
    gaps["ssim"] |= {"low": -0.3, "high": -0.1}
    gaps["first_frame_psnr"] |= {"low": -0.3, "high": 0.1}
    row, before = cells(ablation_table(changed, "one"), "vmonarch-t1"), record["statistics"]["vmonarch-t1"]
    assert row[2] == f"**{before['psnr']['mean']:.2f}**" and row[3] == f"*{before['ssim']['mean']:.4f}*"
    assert row[4] == f"{before['first_frame_psnr']['mean']:.2f}"


def test_controls_of_other_evaluations_are_in_every_table(results):
    changed = copy.deepcopy(results)
    other = changed["evaluations"]["two"]
    for part in ("attention_flops", "statistics", "differences"):
        other[part]["local"] = copy.deepcopy(other[part]["vmonarch-t1"])
    other["methods"].append("local")
    other["statistics"]["local"]["psnr"]["mean"] = 12.34
    other["differences"]["local"]["psnr"] = {"mean": -9.0, "low": -9.5, "high": -8.5}
    assert cells(ablation_table(changed, "two"), "local")[2] == "*12.34*"
    table = ablation_table(changed, "one")
    assert cells(table, "local")[2] == "*12.34*" and "Controls: from two." in table
    # Differences to another baseline say nothing here.
    other["baseline"] = "vmonarch-t1"
    assert cells(ablation_table(changed, "one"), "local")[2] == "12.34"
    # Videos of other noise cannot be compared.
    other["config"]["seeds"] = [7]
    assert "local" not in ablation_table(changed, "one")


def test_without_a_diagnosis_nothing_is_said_of_the_attention_itself(results, tmp_path):
    without = copy.deepcopy(results)
    for record in without["evaluations"].values():
        del record["attention"]
    assert cells(ablation_table(without, "one"), "vmonarch") == cells(ablation_table(results, "one"), "vmonarch")[:7]
    (tmp_path / "eval-one.json").write_text(json.dumps(without))
    assert main(["--input", str(tmp_path / "eval-one.json"), "--output", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_every_method_is_one_point_of_its_family(results, tmp_path):
    found = {point["label"]: point for point in points(results)}
    assert found.keys() == {"vmonarch-t1", "vmonarch", "vmonarch-band1", "near-lossless"}
    assert found["vmonarch"]["kl"] == 0.05 and found["vmonarch-t1"]["kl"] is None
    assert found["vmonarch"]["psnr"] == results["evaluations"]["one"]["statistics"]["vmonarch"]["psnr"]
    plan = tmp_path / "plan.json"
    plan.write_text('{"format": "vmonarch-plan-1", "methods": {"f": null}, "layers": {"transformer": [["f"]]}}')
    members = {
        "iterations, frames per block": ("vmonarch", "vmonarch-t1", "vmonarch:frames_per_block=2"),
        "exact blocks": ("vmonarch-plain", "vmonarch-band1", "vmonarch-first-own"),
        "pooling, tiles": ("vmonarch:coarse=2", "vmonarch:tiles=[2,2]"),
        "full attention in some steps or layers": ("vmonarch-dense-start", "vmonarch:dense_layers=1"),
        "plans": (f"vmonarch:plan={plan}", f"vmonarch:plan={plan},dense_steps=1"),
        "residual sharing": ("near-lossless", f"vmonarch:plan={plan},refresh=2", "block-topk:refresh=2", "reuse"),
        "controls, other factorisations": ("local", "block-topk", "monarch-h4", "vmonarch-sink-average"),
    }
    assert members.keys() == FAMILIES.keys()
    for name, specs in members.items():
        assert {family(resolve_method(spec).to_dict()) for spec in specs} == {name}


def test_the_picture_is_the_same_for_the_same_numbers(results, tmp_path, capsys):
    source = tmp_path / "eval-demo.json"
    source.write_text(json.dumps(results))
    pictures = [tmp_path / name for name in ("a.png", "b.png", "c.png")]
    for picture in pictures[:2]:
        assert main(["--input", str(source), "--output", str(picture)]) == 0
    changed = copy.deepcopy(results)
    for key in ("mean", "low", "high"):
        changed["evaluations"]["two"]["statistics"]["vmonarch"]["psnr"][key] += 5
    source.write_text(json.dumps(changed))
    main(["--input", str(source), "--output", str(pictures[2])])
    first, second, third = (picture.read_bytes() for picture in pictures)
    assert first == second != third and first.startswith(b"\x89PNG")
    for bad in (tmp_path / "missing.json", DEMO):
        with pytest.raises(SystemExit):
            main(["--input", str(bad), "--output", str(tmp_path / "d.png")])
        assert "input" in capsys.readouterr().err
