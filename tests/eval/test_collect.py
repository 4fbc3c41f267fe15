"""Evaluations put together: all of their numbers but those of single items."""

import json
from pathlib import Path

import pytest

from vmonarch.eval.studies.collect import collect, main

DEMO = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "eval-demo.json"


def folder(place, **changes):
    place.mkdir()
    (place / "evaluation.json").write_text(json.dumps({**json.loads(DEMO.read_text()), **changes}))
    return place


def test_means_stay_and_items_are_counted(tmp_path, capsys):
    folders = [folder(tmp_path / "iterations"), folder(tmp_path / "patterns", command="vmonarch eval --config exact")]
    assert main([*map(str, folders), "--output", str(tmp_path / "out" / "all.json")]) == 0
    document = json.loads((tmp_path / "out" / "all.json").read_text())
    assert list(document["evaluations"]) == ["iterations", "patterns"]
    whole, found = json.loads(DEMO.read_text()), document["evaluations"]["iterations"]
    assert found["item_count"] == len(whole.pop("items")) and found == {**whole, "item_count": found["item_count"]}
    shown = capsys.readouterr().out
    assert shown.count("**iterations**") == 1 and "vmonarch eval --config exact" in shown
    mean = whole["statistics"]["vmonarch"]["psnr"]["mean"]
    assert f"{mean:.2f} [" in shown


def test_folders_of_a_machine_are_not_told(tmp_path):
    config = json.loads(DEMO.read_text())["config"] | {"model": str(tmp_path / "proxy")}
    found = collect([folder(tmp_path / "one", config=config)])
    assert found["evaluations"]["one"]["config"]["model"] == "proxy" and str(tmp_path) not in json.dumps(found)


def test_what_is_no_evaluation_is_named(tmp_path, capsys):
    one = folder(tmp_path / "one")
    (tmp_path / "sub").mkdir()
    for bad, message in (
        ([tmp_path / "nothing"], "evaluation.json' cannot be read"),
        ([folder(tmp_path / "other", format="x")], "is no evaluation of"),
        ([one, folder(tmp_path / "sub" / "one")], "names must differ"),
    ):
        with pytest.raises(SystemExit):
            main([*map(str, bad), "--output", str(tmp_path / "all.json")])
        assert message in capsys.readouterr().err
    assert not (tmp_path / "all.json").exists()
    assert collect([one])["evaluations"].keys() == {"one"}
