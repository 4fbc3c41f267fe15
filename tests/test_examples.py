"""The examples run as they stand, with few steps and frames, all in one process."""

import re
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples"
SHORT = ["--steps", "2", "--frames", "5"]
# Example -> its arguments, and what it has to print.
EXAMPLES = {
    "attention": ([], r"all +error   0\.0 %  mean row-KL -?0\.0000 nats\ngradients: "),
    "compare": ([*SHORT, "--output", "compared"], r"\| full \(reference\) (.*\n)+\| near-lossless "),
    "generate": ([*SHORT, "--output", "video.mp4"], r"^video\.mp4$"),
    "plan": ([*SHORT, "--output", "calibrated"], r"heads: \{.*\n.*report\.html\nlatents: \(1, 16, 2, 12, 20\)"),
    "residual_sharing": (SHORT, r"residuals take 0\.\d MiB(.*\n)+residual sharing: latents are "),
}


def test_every_example_is_run():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, monkeypatch, tmp_path, capsys):
    words, printed = EXAMPLES[name]
    path = FOLDER / f"{name}.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), *words])
    runpy.run_path(str(path), run_name="__main__")
    assert re.search(printed, capsys.readouterr().out, re.M)
    assert len(path.read_text().splitlines()) <= 40
    if name == "generate":
        assert (tmp_path / "video.mp4").stat().st_size > 0
