"""The study of how long a calibration takes: what it writes of a tiny model, and what it refuses."""

import json

import pytest

from vmonarch.eval.calibrate.run import CANDIDATES
from vmonarch.eval.studies import calibration_time


def test_a_calibration_is_timed_by_its_parts(tiny_yaml, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(calibration_time, "CANDIDATES", CANDIDATES[:8])
    output = tmp_path / "time.json"
    words = ["--settings", "9x32x48", "--model", tiny_yaml, "--device", "cpu", "--output", str(output)]
    assert calibration_time.main(words) == 0
    record = json.loads(output.read_text())
    (case,) = record["cases"]
    seconds = case["seconds"]
    assert seconds["all"] >= seconds["sampling"] + seconds["times of heads"] + seconds["plan"] > 0
    assert case["video"] == [9, 32, 48] and case["tokens"] == 3 * 2 * 3 and case["peak_bytes"] is None
    # Two layers of two heads have a plan of the candidates.
    assert sum(case["heads"].values()) == 4 and case["candidates"] == 8
    assert f"| {case['setting']} | 18 |" in capsys.readouterr().out


def test_an_unknown_setting_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        calibration_time.main(["--settings", "2b", "--output", str(tmp_path / "time.json")])
    assert "settings must be of 1.3b-61x448x832" in capsys.readouterr().err
